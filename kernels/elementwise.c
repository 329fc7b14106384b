/* The small operations between a decoder layer's matrix products, each in one pass over memory.
 *
 * They round where transformers' Llama rounds (after every operation that is one of its own there), so a
 * fused layer computes what the unfused does. elementwise.py holds the PyTorch references.
 */
#include <math.h>
#include <stdint.h>

#include "element.h"

#define MANY 16  /* rows from which on a second thread pays */

static inline float round_to_element(float x) { return widen(narrow(x)); }

static float inverse_rms(const element *restrict row, int64_t width, float eps) {
    float partial[LANES] = {0.0f}, sum = 0.0f; /* LANES sums: one order on every machine */
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            float value = widen(row[i + lane]);
            partial[lane] += value * value;
        }
    for (; i < width; i++) sum += widen(row[i]) * widen(row[i]);
    for (int lane = 0; lane < LANES; lane++) sum += partial[lane];
    return 1.0f / sqrtf(sum / (float)width + eps);
}

static void normalise(const element *restrict row, const element *restrict weight, element *restrict to, int64_t width,
                      float eps) {
    const float factor = inverse_rms(row, width, eps);
    for (int64_t i = 0; i < width; i++)
        to[i] = narrow(widen(weight[i]) * round_to_element(widen(row[i]) * factor));
}

/* out = weight * x / rms(x), row by row */
void rms_norm(const element *restrict x, const element *restrict weight, element *restrict out, int64_t rows, int64_t width,
              float eps) {
#pragma omp parallel for schedule(static) if (rows >= MANY)
    for (int64_t r = 0; r < rows; r++)
        normalise(x + r * width, weight, out + r * width, width, eps);
}

/* sum = x + residual, out = weight * sum / rms(sum) */
void add_rms_norm(const element *restrict x, const element *restrict residual, const element *restrict weight, element *restrict sum,
                  element *restrict out, int64_t rows, int64_t width, float eps) {
#pragma omp parallel for schedule(static) if (rows >= MANY)
    for (int64_t r = 0; r < rows; r++) {
        const int64_t at = r * width;
        for (int64_t i = 0; i < width; i++)
            sum[at + i] = narrow(widen(x[at + i]) + widen(residual[at + i]));
        normalise(sum + at, weight, out + at, width, eps);
    }
}

/* out = silu(gate) * up; a row of gate_up is gate, then up, `width` of each */
void silu_mul(const element *restrict gate_up, element *restrict out, int64_t rows, int64_t width) {
#pragma omp parallel for schedule(static) if (rows >= MANY)
    for (int64_t r = 0; r < rows; r++) {
        const element *restrict gate = gate_up + r * 2 * width, *restrict up = gate + width;
        element *restrict to = out + r * width;
        for (int64_t i = 0; i < width; i++) {
            float g = widen(gate[i]);
            to[i] = narrow(round_to_element(g / (1.0f + fast_exp(-g))) * widen(up[i]));
        }
    }
}

static inline void turn(const element *restrict from, const element *restrict c,
                        const element *restrict s, element *restrict to, int64_t half) {
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float low = widen(from[i]), high = widen(from[half + i]);
        to[i] = narrow(round_to_element(low * widen(c[i])) -
                       round_to_element(high * widen(s[i])));
        to[half + i] = narrow(round_to_element(high * widen(c[half + i])) +
                              round_to_element(low * widen(s[half + i])));
    }
}

/* Rotate the query and key heads at the front of each row of qkv; q_norm and k_norm may be NULL.
 * cos, sin: [token][dim]; out: [token][heads + kv_heads][dim]. */
void rotate(const element *qkv, const element *q_norm, const element *k_norm, const element *cos,
            const element *sin, element *out, int64_t tokens, int64_t stride, int64_t heads,
            int64_t kv_heads, int64_t dim, float eps) {
    const int64_t half = dim / 2, all = heads + kv_heads;
#pragma omp parallel for schedule(static) if (tokens >= MANY)
    for (int64_t t = 0; t < tokens; t++) {
        const element *c = cos + t * dim, *s = sin + t * dim;
        for (int64_t h = 0; h < all; h++) {
            const element *from = qkv + t * stride + h * dim;
            const element *norm = h < heads ? q_norm : k_norm;
            element normed[dim];
            if (norm) normalise(from, norm, normed, dim, eps);
            turn(norm ? normed : from, c, s, out + (t * all + h) * dim, half);
        }
    }
}
