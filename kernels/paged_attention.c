/* Attention of packed queries over paged keys and values, on a CPU.
 *
 * Compiled by native.py once per element type and head size (-DELEMENT=0|1|2, -DHEAD_DIM=d) and
 * called through ctypes; paged_attention.py holds the PyTorch reference of the same signature.
 *
 * A page holds PAGE consecutive positions of one request. Keys lie transposed, [kv_head][dim][position],
 * so that the scores of a page are sums over dim of vectors of PAGE positions, without horizontal
 * additions; values lie [kv_head][position][dim]. Every query row is computed by the same operations in
 * the same order whatever else is in the step, so attention never depends on width or neighbours.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "element.h"

#ifndef PAGE
#define PAGE 32
#endif
#define ROWS 32 /* query rows (token, head of the group) of one task; bounds its stack */

/* One step's packed tokens: segment s is `length[s]` consecutive tokens of one request, beginning at
 * row `start[s]` of q/k/v, whose first token has position `context[s]`. */
typedef struct {
    const int32_t *start, *length, *context, *table;
    int64_t num_segments, table_stride;
} Step;

/* Strides in elements; the head dimension of q, k and v is contiguous. `out` is [token][head][dim]. */
typedef struct {
    const element *q, *k, *v;
    element *out, *k_pages, *v_pages;
    int64_t q_token, q_head, k_token, k_head, v_token, v_head;
    int64_t num_heads, num_kv_heads, window;
    float scale, softcap;
    int32_t causal;
} Layer;

typedef struct { int32_t segment, kv_head, first_row; } Task;

/* Ask for what the next page's turn will need, a little with every step of this page's: hardware
 * prefetchers stop at 4 KiB, and asking for a whole page at once would wait for the answers. */
static inline void prefetch(const element *from, int count) {
    for (int at = 0; at < count; at += 64 / (int)sizeof(element)) __builtin_prefetch(from + at);
}

/* Scores of `rows` query rows against a page, ROW_VECTORS registers each. `rows` is a constant where
 * this is inlined, so that the sums stay in registers. */
static inline __attribute__((always_inline)) void
score_rows(const int rows, const float *q, const element *keys, const element *ahead, float *scores) {
    lanes sum[12][PAGE / LANES];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < PAGE / LANES; v++) sum[r][v] = (lanes){0.0f};
    for (int d = 0; d < HEAD_DIM; d++) {
        prefetch(ahead + d * PAGE, PAGE);
        lanes key[PAGE / LANES];
        for (int v = 0; v < PAGE / LANES; v++) key[v] = load_lanes(keys + d * PAGE + v * LANES);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < PAGE / LANES; v++) sum[r][v] += q[r * HEAD_DIM + d] * key[v];
    }
    memcpy(scores, sum, sizeof(float) * PAGE * rows);
}

/* mixed += weights * values for `rows` rows, SPAN dimensions at a time. */
static inline __attribute__((always_inline)) void
mix_rows(const int rows, const float *weights, const element *values, const element *ahead,
         int visible, float *mixed) {
    enum { SPAN = HEAD_DIM % 64 == 0 ? 64 : LANES };
    for (int base = 0; base + SPAN <= HEAD_DIM; base += SPAN) {
        lanes sum[6][SPAN / LANES];
        for (int r = 0; r < rows; r++)
            memcpy(sum[r], mixed + r * HEAD_DIM + base, sizeof(float) * SPAN);
        for (int c = 0; c < visible; c++) {
            prefetch(ahead + c * HEAD_DIM + base, SPAN);
            lanes value[SPAN / LANES];
            for (int v = 0; v < SPAN / LANES; v++)
                value[v] = load_lanes(values + c * HEAD_DIM + base + v * LANES);
            for (int r = 0; r < rows; r++)
                for (int v = 0; v < SPAN / LANES; v++) sum[r][v] += weights[r * PAGE + c] * value[v];
        }
        for (int r = 0; r < rows; r++)
            memcpy(mixed + r * HEAD_DIM + base, sum[r], sizeof(float) * SPAN);
    }
    for (int d = HEAD_DIM - HEAD_DIM % LANES; d < HEAD_DIM; d++) /* head sizes such as 8 or 24 */
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < visible; c++)
                mixed[r * HEAD_DIM + d] += weights[r * PAGE + c] * widen(values[c * HEAD_DIM + d]);
}

static void score_page(int rows, const float *q, const element *keys, const element *ahead,
                       float *scores) {
    int r = 0;
    for (; r + 12 <= rows; r += 12) score_rows(12, q + r * HEAD_DIM, keys, ahead, scores + r * PAGE);
    for (; r + 6 <= rows; r += 6) score_rows(6, q + r * HEAD_DIM, keys, ahead, scores + r * PAGE);
    for (; r + 3 <= rows; r += 3) score_rows(3, q + r * HEAD_DIM, keys, ahead, scores + r * PAGE);
    for (; r < rows; r++) score_rows(1, q + r * HEAD_DIM, keys, ahead, scores + r * PAGE);
}

static void mix_page(int rows, const float *weights, const element *values, const element *ahead,
                     int visible, float *mixed) {
    int r = 0;
    for (; r + 6 <= rows; r += 6)
        mix_rows(6, weights + r * PAGE, values, ahead, visible, mixed + r * HEAD_DIM);
    for (; r + 3 <= rows; r += 3)
        mix_rows(3, weights + r * PAGE, values, ahead, visible, mixed + r * HEAD_DIM);
    for (; r < rows; r++)
        mix_rows(1, weights + r * PAGE, values, ahead, visible, mixed + r * HEAD_DIM);
}

/* Halving a vector of known length step by step keeps the reductions in registers. */
#define HALVE(values, n, combine)                                                                  \
    for (int c = 0; c < (n); c++) (values)[c] = combine((values)[c], (values)[c + (n)]);
#define REDUCE(values, combine)                                                                    \
    HALVE(values, 16, combine)                                                                     \
    HALVE(values, 8, combine)                                                                      \
    HALVE(values, 4, combine)                                                                      \
    HALVE(values, 2, combine)                                                                      \
    HALVE(values, 1, combine)
#define LARGER(a, b) ((a) > (b) ? (a) : (b))
#define PLUS(a, b) ((a) + (b))
_Static_assert(PAGE == 32, "REDUCE is written for pages of 32");

static inline float highest_of(const float *scores) {
    float best[PAGE];
    memcpy(best, scores, sizeof best);
    REDUCE(best, LARGER)
    return best[0];
}

static inline float sum_of(const float *weights) {
    float sum[PAGE];
    memcpy(sum, weights, sizeof sum);
    REDUCE(sum, PLUS)
    return sum[0];
}

/* Scores to weights for one row: softcap, visibility, running maximum and sum. Returns the factor
 * that what was mixed so far must be scaled by. Positions low..high-1 of the page are visible. */
static float soften(float *scores, int low, int high, float softcap, float *maximum, float *total) {
    if (softcap > 0.0f)
        for (int c = 0; c < PAGE; c++) scores[c] = softcap * tanhf(scores[c] / softcap);
    const int is_partial = low > 0 || high < PAGE;
    if (is_partial)
        for (int c = 0; c < PAGE; c++)
            scores[c] = (c >= low && c < high) ? scores[c] : -INFINITY;
    const float before = *maximum, here = highest_of(scores);
    const float highest = here > before ? here : before;
    if (highest == -INFINITY) { /* nothing visible yet */
        for (int c = 0; c < PAGE; c++) scores[c] = 0.0f;
        return 1.0f;
    }
    for (int c = 0; c < PAGE; c++) scores[c] = fast_exp(scores[c] - highest);
    if (is_partial)
        for (int c = 0; c < PAGE; c++) scores[c] = (c >= low && c < high) ? scores[c] : 0.0f;
    const float decay =
        before == highest ? 1.0f : before == -INFINITY ? 0.0f : fast_exp(before - highest);
    *maximum = highest;
    *total = *total * decay + sum_of(scores);
    return decay;
}

static inline int clamp_page(int64_t position) {
    return position < 0 ? 0 : position > PAGE ? PAGE : (int)position;
}

static void run_task(const Step *step, const Layer *layer, Task task) {
    float q[ROWS * HEAD_DIM], mixed[ROWS * HEAD_DIM], scores[ROWS * PAGE];
    float maximum[ROWS], total[ROWS];
    int64_t position[ROWS];
    const int64_t group = layer->num_heads / layer->num_kv_heads;
    const int64_t start = step->start[task.segment], context = step->context[task.segment];
    const int64_t length = step->length[task.segment], all_rows = length * group;
    const int rows = (int)(all_rows - task.first_row < ROWS ? all_rows - task.first_row : ROWS);
    const int32_t *pages = step->table + task.segment * step->table_stride;

    for (int r = 0; r < rows; r++) {
        int64_t token = (task.first_row + r) / group;
        int64_t head = task.kv_head * group + (task.first_row + r) % group;
        const element *row = layer->q + (start + token) * layer->q_token + head * layer->q_head;
        for (int d = 0; d < HEAD_DIM; d++) {
            q[r * HEAD_DIM + d] = widen(row[d]) * layer->scale;
            mixed[r * HEAD_DIM + d] = 0.0f;
        }
        position[r] = context + token;
        maximum[r] = -INFINITY;
        total[r] = 0.0f;
    }
    const int64_t end = layer->causal ? position[rows - 1] + 1 : context + length;
    const int64_t window = layer->window;
    int64_t begin = window > 0 && position[0] - window + 1 > 0 ? position[0] - window + 1 : 0;
    for (int64_t page = begin / PAGE; page * PAGE < end; page++) {
        const int64_t first = page * PAGE;
        const int64_t block = (int64_t)pages[page] * layer->num_kv_heads + task.kv_head;
        const int64_t next_page = first + PAGE < end ? pages[page + 1] : pages[page];
        const int64_t next = next_page * layer->num_kv_heads + task.kv_head;
        score_page(rows, q, layer->k_pages + block * HEAD_DIM * PAGE,
                   layer->k_pages + next * HEAD_DIM * PAGE, scores);
        for (int r = 0; r < rows; r++) {
            int64_t visible_end = layer->causal ? position[r] + 1 : end;
            int low = window > 0 ? clamp_page(position[r] - window + 1 - first) : 0;
            float decay = soften(scores + r * PAGE, low, clamp_page(visible_end - first),
                                 layer->softcap, maximum + r, total + r);
            if (decay != 1.0f)
                for (int d = 0; d < HEAD_DIM; d++) mixed[r * HEAD_DIM + d] *= decay;
        }
        mix_page(rows, scores, layer->v_pages + block * HEAD_DIM * PAGE,
                 layer->v_pages + next * HEAD_DIM * PAGE, clamp_page(end - first), mixed);
    }
    for (int r = 0; r < rows; r++) {
        int64_t token = (task.first_row + r) / group;
        int64_t head = task.kv_head * group + (task.first_row + r) % group;
        element *row = layer->out + ((start + token) * layer->num_heads + head) * HEAD_DIM;
        for (int d = 0; d < HEAD_DIM; d++) row[d] = narrow(mixed[r * HEAD_DIM + d] / total[r]);
    }
}

/* Write the step's keys and values into their pages. */
void store_kv(const Step *step, const Layer *layer) {
#pragma omp parallel for schedule(dynamic, 8)
    for (int64_t s = 0; s < step->num_segments; s++)
        for (int64_t i = 0; i < step->length[s]; i++) {
            const int64_t position = step->context[s] + i, slot = position % PAGE;
            const int64_t page = step->table[s * step->table_stride + position / PAGE];
            for (int64_t h = 0; h < layer->num_kv_heads; h++) {
                const int64_t row = step->start[s] + i;
                const element *k = layer->k + row * layer->k_token + h * layer->k_head;
                const element *v = layer->v + row * layer->v_token + h * layer->v_head;
                const int64_t block = (page * layer->num_kv_heads + h) * HEAD_DIM * PAGE;
                for (int d = 0; d < HEAD_DIM; d++) layer->k_pages[block + d * PAGE + slot] = k[d];
                memcpy(layer->v_pages + block + slot * HEAD_DIM, v, sizeof(element) * HEAD_DIM);
            }
        }
}

/* Attend; the step's own keys and values must be stored. Returns 0, or 1 when memory ran out. */
int32_t paged_attention(const Step *step, const Layer *layer) {
    const int64_t group = layer->num_heads / layer->num_kv_heads;
    int64_t num_tasks = 0;
    for (int64_t s = 0; s < step->num_segments; s++)
        num_tasks += layer->num_kv_heads * ((step->length[s] * group + ROWS - 1) / ROWS);
    Task *tasks = malloc(sizeof(Task) * (num_tasks ? num_tasks : 1));
    if (!tasks) return 1;
    int64_t next = 0;
    for (int64_t s = 0; s < step->num_segments; s++)
        for (int64_t h = 0; h < layer->num_kv_heads; h++)
            for (int64_t row = 0; row < step->length[s] * group; row += ROWS)
                tasks[next++] = (Task){(int32_t)s, (int32_t)h, (int32_t)row};
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t t = 0; t < num_tasks; t++) run_task(step, layer, tasks[t]);
    free(tasks);
    return 0;
}
