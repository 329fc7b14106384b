# make demo: environment, model and a whole job.  make test: environment and every check.
# PYTHON=python3.12 chooses the interpreter; TORCH=torch==... another build of PyTorch.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
EXTRAS := $(VENV)/extras
PYTHON ?= python3 python3.14 python3.13 python3.12 python3.11
# Without a GPU an open range would bring gigabytes of CUDA.
TORCH ?= $(if $(shell command -v nvidia-smi),torch,torch==2.13.0)
OUT := out/demo
# Errors only: pip warns at length about mirrors and about running as root.
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check install --root-user-action=ignore

.PHONY: demo test clean

demo: $(READY)
	@echo "removing $(OUT) and $(OUT)-plain of an earlier demo, so that there is something to do"
	@rm -rf $(OUT) $(OUT)-plain
	$(BIN)/adaflash-batch run --config jobs/smoke.toml --out $(OUT)
	@echo "the same job without drafts, to compare"
	$(BIN)/adaflash-batch run --config jobs/smoke.toml --drafter none --no-lookup --out $(OUT)-plain
	@$(BIN)/python -m adaflash_batch.report.show $(OUT) $(OUT)-plain

test: $(READY) $(EXTRAS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	$(BIN)/pytest -n auto --maxprocesses 8 --dist loadfile

clean:
	rm -rf $(VENV) out build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# Older than pyproject.toml means: install again what is new in it.
$(READY): pyproject.toml
	@for python in $(PYTHON); do \
	  "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	  echo "creating $(VENV) with $$python"; exec "$$python" -m venv $(VENV); \
	done; \
	echo "error: no Python 3.11 or later among: $(PYTHON)" >&2; \
	echo "hint: make PYTHON=/path/to/python3.11" >&2; exit 1
	@echo "installing $(TORCH) (some 200 MB or more, once)"
	@$(PIP) "$(TORCH)"
	@echo "installing adaflash-batch and the tools for its tests"
	@$(PIP) "$(TORCH)" -e ".[dev]"
	@touch $@

# The tests of several trainer ranks and of GPU kernels want them, the demo does not.
$(EXTRAS): $(READY)
	@echo "installing DeepSpeed and Triton for the tests (some 300 MB, once)"
	@$(PIP) "$(TORCH)" -e ".[deepspeed,triton]"
	@touch $@
