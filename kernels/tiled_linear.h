/* Products of bfloat16 rows with a weight whose rows lie in tiles, sums in float32 (AVX-512 BF16).
 *
 * A tile is TILE outputs: [input pair][output][2], so that one instruction multiplies an input pair of a row
 * with sixteen outputs. Each sum is made in the order of the inputs, whatever other rows there are: a token
 * comes out the same alone and in a batch. tiled_linear.py lays weights out and holds the reference.
 *
 * Few rows wait for the weights to be read: theirs may be compressed, and are asked for ahead. With more rows
 * those of the next tile are asked for while this one is computed.
 */
#pragma once
#include "compressed_tiles.h"

#define TILE_ROWS 12   /* two registers of sums a row: 24 of 32 */
#define AHEAD 4096     /* bytes; found by trial, as 2048 to 16384 are about as good */

/* weight: tiles of [inputs / 2][TILE][2]; bias: [outputs] or NULL */
typedef struct {
    const element *weight, *bias;
    int64_t inputs, outputs;
    CompressedTiles compressed; /* the same weight */
} Linear;

static inline __attribute__((always_inline)) void
multiply(__m512 sum[][2], const int rows, const element *x, int64_t inputs, __m512i low, __m512i high) {
    for (int r = 0; r < rows; r++) {
        int32_t pair;
        memcpy(&pair, x + r * inputs, sizeof pair);
        const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
        sum[r][0] = _mm512_dpbf16_ps(sum[r][0], both, (__m512bh)low);
        sum[r][1] = _mm512_dpbf16_ps(sum[r][1], both, (__m512bh)high);
    }
}

static inline __attribute__((always_inline)) void
store_rows(__m512 sum[][2], const int rows, const Linear *linear, int64_t tile, element *out) {
    const int64_t outputs = linear->outputs, first = tile * TILE;
    float bias[TILE] = {0.0f};
    const int64_t left = outputs - first, count = left < TILE ? left : TILE;
    if (linear->bias)
        for (int64_t n = 0; n < count; n++) bias[n] = widen(linear->bias[first + n]);
    for (int r = 0; r < rows; r++) {
        element narrowed[TILE];
        for (int half = 0; half < 2; half++) {
            __m512 whole = _mm512_add_ps(sum[r][half], _mm512_loadu_ps(bias + 16 * half));
            _mm256_storeu_si256((__m256i *)(narrowed + 16 * half), (__m256i)_mm512_cvtneps_pbh(whole));
        }
        memcpy(out + r * outputs + first, narrowed, sizeof(element) * count);
    }
}

/* `ahead`: what is asked for meanwhile, a cache line a block; NULL for nothing. */
static inline __attribute__((always_inline)) void
tile_rows(const int rows, const Linear *linear, int64_t tile, const element *x, element *out, const char *ahead) {
    const int64_t inputs = linear->inputs;
    const element *weight = linear->weight + tile * TILE * inputs;
    __m512 sum[TILE_ROWS][2];
    for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    for (int64_t i = 0; i < inputs; i += 2) {
        const element *at = weight + i * TILE;
        if (ahead) _mm_prefetch(ahead + i * 32, _MM_HINT_T1);
        multiply(sum, rows, x + i, inputs, _mm512_loadu_si512(at), _mm512_loadu_si512(at + TILE));
    }
    store_rows(sum, rows, linear, tile, out);
}

#ifdef __AVX512VBMI__
/* The same from the compressed form. */
static inline __attribute__((always_inline)) void
compressed_rows(const int rows, const Linear *linear, int64_t tile, const element *x, element *out) {
    const int64_t inputs = linear->inputs, pairs = inputs / 2;
    TileReader reader = open_tile(&linear->compressed, tile, pairs);
    __m512 sum[TILE_ROWS][2];
    for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    for (int64_t pair = 0; pair < pairs; pair++) {
        __m512i low, high;
        _mm_prefetch((const char *)reader.at + AHEAD, _MM_HINT_T0);
        _mm_prefetch((const char *)reader.at + AHEAD + 64, _MM_HINT_T0);
        read_block(&reader, pair, &low, &high);
        multiply(sum, rows, x + 2 * pair, inputs, low, high);
    }
    store_rows(sum, rows, linear, tile, out);
}
#endif

#define CASE(n)                                                                                    \
    case n: RUN(n); break;
#define CASES                                                                                      \
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)                                                \
    CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)

static inline void few_rows(const Linear *linear, int64_t tile, const element *x, element *out, int64_t rows) {
#ifdef __AVX512VBMI__
#define RUN(n) compressed_rows(n, linear, tile, x, out)
    switch (rows) { CASES }
#undef RUN
#endif
}

/* One tile of outputs for all rows, in groups of about the same size. */
static inline void tile_of(const Linear *linear, int64_t tile, const element *x, element *out, int64_t rows) {
    const int64_t groups = (rows + TILE_ROWS - 1) / TILE_ROWS, tile_bytes = TILE * linear->inputs * sizeof(element);
    const char *next = (const char *)linear->weight + (tile + 1) * tile_bytes;
    for (int64_t g = 0, row = 0; g < groups; g++) {
        const int64_t size = (rows - row + groups - g - 1) / (groups - g);
        const element *from = x + row * linear->inputs;
        element *to = out + row * linear->outputs;
        /* Half of the next tile in each of the last two groups. */
        const int64_t part = g - (groups - 2);
        const char *ahead = groups < 2 || part < 0 ? NULL : next + part * tile_bytes / 2;
#define RUN(n) tile_rows(n, linear, tile, from, to, ahead)
        switch (size) { CASES }
#undef RUN
        row += size;
    }
}
#undef CASES
#undef CASE

/* out[rows][outputs] = x[rows][inputs] * weight^T + bias */
static void linear_rows(const Linear *linear, const element *x, element *out, int64_t rows) {
    const int64_t tiles = (linear->outputs + TILE - 1) / TILE;
    const int is_compressed = linear->compressed.blocks != NULL && rows <= TILE_ROWS;
#pragma omp parallel for schedule(static)
    for (int64_t tile = 0; tile < tiles; tile++) {
        if (is_compressed) few_rows(linear, tile, x, out, rows);
        else tile_of(linear, tile, x, out, rows);
    }
}
