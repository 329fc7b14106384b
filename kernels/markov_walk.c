/* The walk of a vanilla Markov head along blocks: see markov_walk.py. */
#include <math.h>

#include "tiled_linear.h"

static inline __m512 sixteen(const element *from) { return (__m512)load_lanes(from); }

/* scores += logits, rounded as bfloat16 is. */
static void add_logits(element *scores, const element *logits, int64_t count) {
    int64_t v = 0;
    for (; v + LANES <= count; v += LANES) {
        const __m256bh sum = _mm512_cvtneps_pbh(_mm512_add_ps(sixteen(logits + v), sixteen(scores + v)));
        _mm256_storeu_si256((__m256i *)(scores + v), (__m256i)sum);
    }
    for (; v < count; v++) scores[v] = narrow(widen(logits[v]) + widen(scores[v]));
}

static float highest_of(const element *scores, int64_t count) {
    __m512 most = _mm512_set1_ps(-INFINITY);
    int64_t v = 0;
    for (; v + LANES <= count; v += LANES) most = _mm512_max_ps(sixteen(scores + v), most);
    float highest = _mm512_reduce_max_ps(most);
    for (; v < count; v++) highest = widen(scores[v]) > highest ? widen(scores[v]) : highest;
    return highest;
}

/* The first that is the highest; 0 where none is, since there are no numbers. */
static int64_t place_of(const element *scores, float highest, int64_t count) {
    for (int64_t v = 0; v < count; v++)
        if (widen(scores[v]) == highest) return v;
    return 0;
}

/* The logarithm of the sum of exp(score - highest). */
static float log_sum(const element *scores, float highest, int64_t count) {
    float sums[LANES] = {0.0f}, sum = 0.0f;
    int64_t v = 0;
    for (; v + LANES <= count; v += LANES)
        for (int lane = 0; lane < LANES; lane++) sums[lane] += fast_exp(widen(scores[v + lane]) - highest);
    for (int lane = 0; lane < LANES; lane++) sum += sums[lane];
    for (; v < count; v++) sum += fast_exp(widen(scores[v]) - highest);
    return logf(sum);
}

/* embedded: [tokens][rank]; rows: what of it is added to the logits of each candidate; token_ids: [candidates] or
 * NULL; logits: [block][slot][candidate]; memory: [blocks][rank + candidates]; drafts, top, second: [block][slot] */
void markov_walk(const element *embedded, const Linear *rows, const int64_t *token_ids, const int64_t *anchors,
                 const element *logits, element *memory, int64_t blocks, int64_t slots, int64_t *drafts, float *top,
                 float *second) {
    const int64_t rank = rows->inputs, count = rows->outputs;
    element *latents = memory, *scores = memory + blocks * rank;
    for (int64_t slot = 0; slot < slots; slot++) {
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t previous = slot ? drafts[b * slots + slot - 1] : anchors[b];
            memcpy(latents + b * rank, embedded + previous * rank, sizeof(element) * rank);
        }
        linear_rows(rows, latents, scores, blocks);
#pragma omp parallel for schedule(static)
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t at = b * slots + slot;
            element *own = scores + b * count;
            add_logits(own, logits + at * count, count);
            const float highest = highest_of(own, count), others = log_sum(own, highest, count);
            const int64_t best = place_of(own, highest, count);
            drafts[at] = token_ids ? token_ids[best] : best;
            top[at] = -others;
            own[best] = narrow(-INFINITY);
            second[at] = highest_of(own, count) - highest - others;
        }
    }
}
