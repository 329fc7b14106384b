"""A row's token by the filtered distribution, in one program and without sorting.

The least logit that a filter keeps is found digit by digit, of a number that is ordered like the
logits; then the kept weights are summed up in the order of token ids.

# V vocabulary
"""

from __future__ import annotations

import triton
import triton.language as tl

_NONE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _ordered(x: tl.tensor, DIGITS: tl.constexpr) -> tl.tensor:
    """A uint32 of so many hexadecimal digits, larger for larger x, and the same for both zeros."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)
    flipped = tl.where((bits >> 31) != 0, ~bits, bits | 0x80000000)
    return flipped >> (32 - 4 * DIGITS)


@triton.jit
def _value_of(ordered: tl.tensor, DIGITS: tl.constexpr) -> tl.tensor:
    """The x of `_ordered`."""
    REST: tl.constexpr = 32 - 4 * DIGITS
    bits = ordered << REST
    negative = ~(bits | ((1 << REST) - 1))  # the digits left out are ones there, zeros in x
    bits = tl.where((bits >> 31) != 0, bits & 0x7FFFFFFF, negative)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _least_kept(
    row: tl.tensor,
    vocabulary: tl.tensor,
    temperature: tl.tensor,
    top: tl.tensor,
    least: tl.tensor,
    wanted: tl.tensor,
    by_weight: tl.tensor,
    DIGITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The smallest logit behind larger ones that are fewer than `wanted`, as `_ordered`.

    Of logits that are `least` or more. By weight, they are to weigh less than that share of all.
    """
    digits = tl.arange(0, 16)
    prefix = tl.zeros([1], dtype=tl.uint32)
    above = tl.zeros([1], dtype=tl.float64)
    goal = tl.zeros([1], dtype=tl.float64) + wanted
    for step in range(DIGITS):
        shift = 4 * (DIGITS - 1 - step)
        sums = tl.zeros([BLOCK, 16], dtype=tl.float32)
        for start in range(0, vocabulary, BLOCK):
            token = start + tl.arange(0, BLOCK)
            is_there = token < vocabulary
            x = tl.load(row + token, mask=is_there, other=float("-inf")).to(tl.float32)
            key = _ordered(x, DIGITS)
            upper = key >> shift
            weight = tl.where(by_weight, tl.exp(tl.div_rn(x, temperature) - top), 1.0)
            is_meant = is_there & ((upper >> 4) == prefix) & (key >= least)
            weight = tl.where(is_meant, weight, 0.0)
            is_digit = (upper & 15).to(tl.int32)[:, None] == digits[None, :]
            sums += tl.where(is_digit, weight[:, None], 0.0)
        by_digit = tl.sum(sums, axis=0).to(tl.float64)
        total = tl.sum(by_digit, axis=0)
        if step == 0:
            goal = tl.where(by_weight, goal * total, goal)
        larger = above + total - tl.cumsum(by_digit, axis=0)
        digit = tl.min(tl.where(larger < goal, digits, 15), axis=0)
        above += tl.sum(tl.where(digits > digit, by_digit, 0.0), axis=0)
        prefix = prefix * 16 + digit.to(tl.uint32)
    return prefix


@triton.jit
def _weights(
    row: tl.tensor,
    token: tl.tensor,
    vocabulary: tl.tensor,
    temperature: tl.tensor,
    top: tl.tensor,
    threshold: tl.tensor,
) -> tl.tensor:
    """Of these tokens, float64, before they are normalised; 0 for those that filters drop."""
    x = tl.load(row + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    scaled = tl.div_rn(x, temperature)
    is_kept = (scaled >= threshold) & (scaled > float("-inf"))
    return tl.where(is_kept, tl.exp(scaled - top), 0.0).to(tl.float64)


@triton.jit
def _draw(
    row: tl.tensor,
    vocabulary: tl.tensor,
    temperature: tl.tensor,
    top: tl.tensor,
    threshold: tl.tensor,
    drawn: tl.tensor,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> tl.tensor:
    """The first token whose cumulative weight exceeds the drawn share of the whole."""
    chunks, within = tl.arange(0, CHUNKS), tl.arange(0, BLOCK)
    sums = tl.zeros([CHUNKS], dtype=tl.float64)
    for chunk in range(0, tl.cdiv(vocabulary, BLOCK)):
        token = chunk * BLOCK + within
        weight = _weights(row, token, vocabulary, temperature, top, threshold)
        sums = tl.where(chunks == chunk, tl.sum(weight, axis=0), sums)
    ends = tl.cumsum(sums, axis=0)
    target = drawn * tl.max(ends, axis=0)
    chunk = tl.min(tl.where((ends > target) & (sums > 0.0), chunks, CHUNKS), axis=0)
    # The target can round up to the whole: then the last token that has any weight.
    chunk = tl.minimum(chunk, tl.max(tl.where(sums > 0.0, chunks, 0), axis=0))
    token = chunk * BLOCK + within
    weight = _weights(row, token, vocabulary, temperature, top, threshold)
    ends = tl.sum(tl.where(chunks < chunk, sums, 0.0), axis=0) + tl.cumsum(weight, axis=0)
    first = tl.min(tl.where((ends > target) & (weight > 0.0), token, _NONE), axis=0)
    return tl.minimum(first, tl.max(tl.where(weight > 0.0, token, 0), axis=0))


@triton.jit
def sampled(
    row: tl.tensor,
    vocabulary: tl.tensor,
    highest: tl.tensor,
    floats: tl.tensor,
    top_k: tl.tensor,
    drawn: tl.tensor,
    DIGITS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> tl.tensor:
    """The row's token by the filtered distribution: temperature, top_k, top_p, min_p."""
    temperature = tl.load(floats).to(tl.float32)
    top_p = tl.load(floats + 1)
    top = tl.div_rn(highest, temperature)
    # Whatever the logits, what is min_p's to drop is below this.
    threshold = top + tl.load(floats + 3).to(tl.float32)
    least = tl.zeros([1], dtype=tl.uint32)
    for by_weight in range(2):
        is_on = tl.where(by_weight == 1, top_p < 1.0, (top_k > 0) & (top_k < vocabulary))
        if is_on:
            wanted = tl.where(by_weight == 1, top_p, top_k.to(tl.float64))
            least = _least_kept(
                *(row, vocabulary, temperature, top, least, wanted, by_weight == 1, DIGITS, BLOCK)
            )
            scaled = tl.div_rn(_value_of(tl.max(least, axis=0), DIGITS), temperature)
            threshold = tl.maximum(threshold, scaled)
    return _draw(row, vocabulary, temperature, top, threshold, drawn, BLOCK, CHUNKS)
