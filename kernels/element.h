/* What the C files share: the element types (-DELEMENT=0 float32, 1 bfloat16, 2 float16) and exp. */
#pragma once
#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#if ELEMENT == 0
typedef float element;
static inline float widen(element x) { return x; }
static inline element narrow(float x) { return x; }
#elif ELEMENT == 1
typedef uint16_t element;
static inline float widen(element x) {
    union { uint32_t u; float f; } bits = {(uint32_t)x << 16};
    return bits.f;
}
static inline element narrow(float x) { /* round to nearest even; NaN stays NaN */
    union { float f; uint32_t u; } bits = {x};
    uint32_t rounded = (bits.u + 0x7fffu + ((bits.u >> 16) & 1u)) >> 16;
    return (element)(x != x ? 0x7fc0u : rounded);
}
#else
typedef _Float16 element;
static inline float widen(element x) { return (float)x; }
static inline element narrow(float x) { return (element)x; }
#endif

/* Sixteen floats: a register where there are 512-bit ones, several elsewhere. */
#define LANES 16
typedef float lanes __attribute__((vector_size(64)));

static inline lanes load_lanes(const element *from) {
#if ELEMENT == 0
    lanes wide;
    memcpy(&wide, from, sizeof wide);
    return wide;
#elif ELEMENT == 1 && defined(__AVX512F__)
    /* What the next form means; gcc 12 makes eight instructions of it instead of two. */
    __m256i bits = _mm256_loadu_si256((const __m256i *)from);
    return (lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
#elif ELEMENT == 1
    typedef uint16_t narrow_lanes __attribute__((vector_size(32)));
    typedef uint32_t wide_lanes __attribute__((vector_size(64)));
    narrow_lanes bits;
    memcpy(&bits, from, sizeof bits);
    return (lanes)(__builtin_convertvector(bits, wide_lanes) << 16);
#else
    typedef _Float16 narrow_lanes __attribute__((vector_size(32)));
    narrow_lanes halves;
    memcpy(&halves, from, sizeof halves);
    return __builtin_convertvector(halves, lanes);
#endif
}

/* Relative error about 2e-7 between -87 and 88, clamped there; vectorises, unlike a library call. */
static inline float fast_exp(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float n = __builtin_rintf(x * 1.44269504f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { int32_t i; float f; } scale = {((int32_t)n + 127) << 23};
    return p * scale.f;
}
