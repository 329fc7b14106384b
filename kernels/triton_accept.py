"""`Accept` in one launch.

Several programs read a row for its largest logit; the one that comes last goes on alone. Of the
rows of a request, again, the one that is ready last settles what is emitted.

# R rows of logits, S requests, M rows of a request at most, V vocabulary, E ends at most
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from adaflash_batch.kernels import accept as words
from adaflash_batch.kernels.accept import Emitted, Rows, Rules
from adaflash_batch.kernels.triton_sampling import sampled
from adaflash_batch.kernels.triton_uniform import keyed_uniform
from adaflash_batch.kernels.variant import LAUNCH, Variant

_BLOCK, _NUM_WARPS = 1024, 16
# Programs that the device should have at the least, and that one row is divided among at the most.
_ENOUGH, _MOST_PARTS = 128, 16
# Digits of four bits that tell all values of a type apart, from the top of a float32.
_DIGITS = {torch.bfloat16: 4, torch.float16: 5, torch.float32: 8}

_NUM_FLOATS, _NUM_INTEGERS = tl.constexpr(words.NUM_FLOATS), tl.constexpr(words.NUM_INTEGERS)
_NUM_COUNTS = tl.constexpr(words.NUM_COUNTS)
_STOP, _LENGTH, _UNSOUND = map(tl.constexpr, (words.STOP, words.LENGTH, words.UNSOUND))
_NONE = tl.constexpr(0x7FFFFFFF)


def accept(
    logits: torch.Tensor, rows: Rows, rules: Rules, uniforms: torch.Tensor | None = None
) -> Emitted:
    """See accept.Accept; nothing waits for the device."""
    num_rows, vocabulary = logits.shape
    num_requests, num_ends = rules.ends.shape
    assert logits.stride(1) == 1
    assert rules.integers.is_contiguous()
    assert rules.floats.is_contiguous()
    assert all(each.is_contiguous() for each in (rows.first, rows.count, rows.request, rows.drafts))
    place, parts = logits.device, _num_parts(num_rows, vocabulary)
    numbers = torch.empty(
        num_requests, words.NUM_COUNTS + rows.most, dtype=torch.int32, device=place
    )
    counters = torch.zeros(num_rows + num_requests, dtype=torch.int32, device=place)
    found = torch.empty(num_rows, 2 * parts + 2, dtype=torch.int32, device=place)
    accept_kernel[(max(num_rows, num_requests), parts)](
        *(logits, rows.first, rows.count, rows.request, rows.drafts, rules.floats, rules.integers),
        *(rules.floats if uniforms is None else uniforms, counters, found, numbers),
        *(num_rows, num_requests, vocabulary, logits.stride(0)),
        HAS_UNIFORMS=uniforms is not None,
        DIGITS=_DIGITS[logits.dtype],
        NUM_ENDS=num_ends,
        NUM_TOKENS=rows.most,
        TOKENS=_power(rows.most),
        PARTS=parts,
        BLOCK=_BLOCK,
        CHUNKS=_power(triton.cdiv(vocabulary, _BLOCK)),
        num_warps=_NUM_WARPS,
        **LAUNCH,
    )
    return Emitted(numbers)


def _power(number: int) -> int:
    return int(triton.next_power_of_2(max(number, 1)))


def _num_parts(num_rows: int, vocabulary: int) -> int:
    """Which changes no result: the largest of a row is the same however it is found."""
    wanted = _power(triton.cdiv(_ENOUGH, max(num_rows, 1)))
    return min(wanted, _MOST_PARTS, _power(triton.cdiv(vocabulary, 4 * _BLOCK)))


@triton.jit
def _largest(
    row: tl.tensor, vocabulary: tl.tensor, part: tl.tensor, PARTS: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """The largest logit of a part, NaN if one is, and the first token that has it."""
    best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    at = tl.zeros([BLOCK], dtype=tl.int32)
    is_nan = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(part * BLOCK, vocabulary, PARTS * BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(row + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
        at = tl.where(x > best, token, at)
        best = tl.where(x > best, x, best)
        is_nan = is_nan | (x != x).to(tl.int32)
    highest = tl.max(best, axis=0)
    first = tl.min(tl.where(best == highest, at, _NONE), axis=0)
    return tl.where(tl.max(is_nan, axis=0) > 0, float("nan"), highest), first


@triton.jit
def _settle(
    request: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    drafts: tl.tensor,
    integers: tl.tensor,
    choices: tl.tensor,
    numbers: tl.tensor,
    NUM_ENDS: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr,
    STRIDE: tl.constexpr,
) -> None:
    """Write what a request emits; its rows have left choices and whether they are sound."""
    index = tl.arange(0, TOKENS)
    at = choices + (first + index) * STRIDE
    choice = tl.load(at, mask=index < count, other=-1, cache_modifier=".cg")
    is_sound = tl.load(at + 1, mask=index < count, other=1, cache_modifier=".cg")
    draft = tl.load(drafts + first + index, mask=index < count - 1, other=-1).to(tl.int32)
    is_wrong = (index >= count - 1) | (choice != draft)
    accepted = tl.min(tl.where(is_wrong, index, _NONE), axis=0)
    has_token = tl.min(tl.where(index <= accepted, is_sound, 1), axis=0) * tl.minimum(count, 1)
    own = integers + request * (_NUM_INTEGERS + NUM_ENDS)
    room = tl.load(own + 5).to(tl.int32)
    length = tl.minimum(accepted + 1, room)
    is_end = index < 0
    for end in tl.static_range(NUM_ENDS):
        is_end = is_end | (choice == tl.load(own + _NUM_INTEGERS + end).to(tl.int32))
    stop = tl.min(tl.where(is_end & (index < length), index, _NONE), axis=0)
    reason = tl.where(accepted + 1 >= room, _LENGTH, 0)
    reason = tl.where(stop < length, _STOP, reason)
    emitted = (tl.minimum(stop, length - 1) + 1) * has_token
    out = numbers + request * (_NUM_COUNTS + NUM_TOKENS)
    last = tl.sum(tl.where(index == emitted - 1, choice, 0), axis=0)
    tl.store(out, emitted)
    tl.store(out + 1, tl.minimum(accepted, emitted))
    tl.store(out + 2, tl.where(has_token > 0, reason, tl.where(count > 0, _UNSOUND, 0)))
    tl.store(out + 3, tl.where(emitted > 0, last, -1))
    token = tl.where(index < emitted, choice, -1)
    tl.store(out + _NUM_COUNTS + index, token, mask=index < NUM_TOKENS)


@triton.jit
def _choose(
    row: tl.tensor,
    index: tl.tensor,
    request: tl.tensor,
    first: tl.tensor,
    vocabulary: tl.tensor,
    floats: tl.tensor,
    integers: tl.tensor,
    uniforms: tl.tensor,
    mine: tl.tensor,
    HAS_UNIFORMS: tl.constexpr,
    DIGITS: tl.constexpr,
    NUM_ENDS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    """Leave a row's choice, and whether it is sound, where `_settle` finds them."""
    parts = tl.arange(0, PARTS)
    best = tl.load(mine + parts, cache_modifier=".cg").to(tl.float32, bitcast=True)
    at = tl.load(mine + PARTS + parts, cache_modifier=".cg")
    is_nan = tl.max((best != best).to(tl.int32), axis=0)
    highest = tl.max(tl.where(best != best, float("-inf"), best), axis=0)
    choice = tl.min(tl.where(best == highest, at, _NONE), axis=0)
    sound = tl.where(tl.abs(highest) < float("inf"), 1 - is_nan, 0)
    choice = tl.where(sound > 0, choice, 0)
    rule = floats + request * _NUM_FLOATS
    if (tl.load(rule) > 0.0) & (sound > 0):
        own = integers + request * (_NUM_INTEGERS + NUM_ENDS)
        if HAS_UNIFORMS:
            drawn = tl.load(uniforms + index)
        else:
            seed, identity, sample = tl.load(own + 1), tl.load(own + 2), tl.load(own + 3)
            drawn = keyed_uniform(seed, identity, sample, tl.load(own + 4) + index - first)
        choice = sampled(
            *(row, vocabulary, highest, rule, tl.load(own), drawn, DIGITS, BLOCK, CHUNKS)
        )
    tl.store(mine + 2 * PARTS, choice)
    tl.store(mine + 2 * PARTS + 1, sound)


@triton.jit
def accept_kernel(
    logits: tl.tensor,
    firsts: tl.tensor,
    counts: tl.tensor,
    requests: tl.tensor,
    drafts: tl.tensor,
    floats: tl.tensor,
    integers: tl.tensor,
    uniforms: tl.tensor,
    counters: tl.tensor,
    found: tl.tensor,
    numbers: tl.tensor,
    num_rows: tl.tensor,
    num_requests: tl.tensor,
    vocabulary: tl.tensor,
    stride: tl.tensor,
    HAS_UNIFORMS: tl.constexpr,
    DIGITS: tl.constexpr,
    NUM_ENDS: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    """A program for each row, or request if there are more, and part of the vocabulary."""
    index, part = tl.program_id(0), tl.program_id(1)
    STRIDE: tl.constexpr = 2 * PARTS + 2
    own_count = tl.load(counts + index, mask=index < num_requests, other=1)
    if (own_count == 0) & (part == 0):
        _settle(
            *(index, 0, 0, drafts, integers, found, numbers),
            *(NUM_ENDS, NUM_TOKENS, TOKENS, STRIDE),
        )
    request = tl.load(requests + index, mask=index < num_rows, other=-1)
    if request >= 0:
        row = logits + index.to(tl.int64) * stride
        highest, at = _largest(row, vocabulary, part, PARTS, 4 * BLOCK)
        mine = found + index * STRIDE
        tl.store(mine + part, highest.to(tl.int32, bitcast=True))
        tl.store(mine + PARTS + part, at)
        # All threads have written before one of them says so; who comes last sees what all wrote.
        tl.debug_barrier()
        before = tl.atomic_add(counters + index, 1, sem="acq_rel", scope="gpu")
        if before == PARTS - 1:
            first, count = tl.load(firsts + request), tl.load(counts + request)
            _choose(
                *(row, index, request, first, vocabulary, floats, integers, uniforms, mine),
                *(HAS_UNIFORMS, DIGITS, NUM_ENDS, PARTS, BLOCK, CHUNKS),
            )
            tl.debug_barrier()
            own = counters + num_rows + request
            if tl.atomic_add(own, 1, sem="acq_rel", scope="gpu") == count - 1:
                _settle(
                    *(request, first, count, drafts, integers, found + 2 * PARTS, numbers),
                    *(NUM_ENDS, NUM_TOKENS, TOKENS, STRIDE),
                )


_TYPES = {
    **dict.fromkeys(("firsts", "counts", "requests", "counters", "found", "numbers"), "*i32"),
    **dict.fromkeys(("floats", "uniforms"), "*fp64"),
    **dict.fromkeys(("num_rows", "num_requests", "vocabulary"), "i32"),
    **{"drafts": "*i64", "integers": "*i64", "stride": "i64"},
}


def _variant(dtype: torch.dtype, vocabulary: int, parts: int, *, has_uniforms: bool) -> Variant:
    name = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    sizes = {"DIGITS": _DIGITS[dtype], "NUM_ENDS": 2, "NUM_TOKENS": 16, "TOKENS": 16}
    chunks = _power(triton.cdiv(vocabulary, _BLOCK))
    sizes |= {"PARTS": parts, "BLOCK": _BLOCK, "CHUNKS": chunks}
    return Variant(
        name=f"accept {name} of {vocabulary} tokens, {parts} parts",
        kernel=accept_kernel,
        signature={"logits": f"*{name}", **_TYPES},
        constexprs={"HAS_UNIFORMS": has_uniforms, **sizes},
        num_warps=_NUM_WARPS,
        num_stages=3,
    )


VARIANTS = [
    _variant(torch.bfloat16, 151_936, _MOST_PARTS, has_uniforms=False),
    _variant(torch.float32, 49_152, 1, has_uniforms=True),
]
