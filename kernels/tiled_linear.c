/* The library of tiled_linear.py and compressed_tiles.py; see tiled_linear.h. */
#include "tiled_linear.h"

void tiled_linear(const Linear *linear, const element *x, element *out, int64_t rows) {
    linear_rows(linear, x, out, rows);
}

/* Where in a block's bytes weight `n` lies, so that unpacking two registers of bytes, which is done in lanes
 * of sixteen, gives the weights in order. */
static inline int byte_of(int n) {
    const int lane = n % TILE / 8, half = n / TILE;
    return 16 * lane + 8 * half + n % 8;
}

/* The sixteen upper bytes that a tile has most of, the lowest of equally many first. */
static void choose_uppers(const element *weight, int64_t count, uint8_t *uppers) {
    int64_t number[256] = {0};
    for (int64_t n = 0; n < count; n++) number[weight[n] >> 8]++;
    for (int place = 0; place < UPPERS; place++) {
        int best = 0;
        for (int upper = 1; upper < 256; upper++)
            if (number[upper] > number[best]) best = upper;
        uppers[place] = (uint8_t)best;
        number[best] = -1;
    }
}

/* Fills `blocks` and `uppers` (see CompressedTiles), and says in `is_whole`, [tiles][pairs], which blocks are
 * to be kept whole. */
void compress(const element *weight, int64_t tiles, int64_t pairs, uint8_t *blocks, uint8_t *uppers,
                     uint8_t *is_whole) {
#pragma omp parallel for schedule(static)
    for (int64_t tile = 0; tile < tiles; tile++) {
        const element *from = weight + tile * pairs * BLOCK;
        uint8_t choice[256];
        choose_uppers(from, pairs * BLOCK, uppers + tile * UPPERS);
        memset(choice, UPPERS, sizeof choice);
        for (int place = 0; place < UPPERS; place++) choice[uppers[tile * UPPERS + place]] = (uint8_t)place;
        for (int64_t pair = 0; pair < pairs; pair++) {
            uint8_t *block = blocks + (tile * pairs + pair) * BLOCK_BYTES, whole = 0;
            memset(block + BLOCK, 0, BLOCK / 2);
            for (int n = 0; n < BLOCK; n++) {
                const element bits = from[pair * BLOCK + n];
                const uint8_t chosen = choice[bits >> 8];
                const int byte = byte_of(n);
                whole |= chosen == UPPERS;
                block[byte] = (uint8_t)bits;
                block[BLOCK + byte / 2] |= (uint8_t)((chosen % UPPERS) << (byte % 2 * 4));
            }
            is_whole[tile * pairs + pair] = whole;
        }
    }
}
