#!/usr/bin/env bash
# What is to be run wherever a GPU can be had for eight minutes: tests, kernels, decoding, one JSON.
# Downloads and builds nothing: PyTorch with CUDA, Triton and transformers must be there already.
# PYTHON names the interpreter, MODEL a folder with the demo model (random weights without it).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-benchmarks/results/gpu-$(date +%F).json}
export PYTHONPATH=$PWD HF_HUB_OFFLINE=1
exec timeout --kill-after=5 475 "${PYTHON:-python3}" benchmarks/gpu.py \
  --budget 450 --out "$out" ${MODEL:+--model "$MODEL"}
