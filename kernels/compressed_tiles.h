/* Tiles of bfloat16 weights in three quarters of their bytes, bit for bit (AVX-512 VBMI).
 *
 * The upper byte of a bfloat16 number is its sign and most of its exponent, and of trained weights a tile has
 * few of them: sixteen cover all but one in some thousands. So a weight is its lower byte and four bits that
 * choose the upper one from the tile's table. A block is the TILE pairs of weights that a pair of inputs
 * meets; one with a weight whose upper byte is not in the table is kept whole, elsewhere.
 */
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "element.h"

#define TILE 32
#define BLOCK (2 * TILE)         /* weights */
#define BLOCK_BYTES (BLOCK + BLOCK / 2)
#define UPPERS 16

/* What compressed_tiles.py made. `whole_at[first[tile] .. first[tile + 1]]` are the places in a tile of those
 * of its blocks that are kept in `whole`, in order. `blocks` is NULL where there is nothing. */
typedef struct {
    const uint8_t *blocks; /* tiles of [inputs / 2][BLOCK_BYTES]: lower bytes, then choices */
    const uint8_t *uppers; /* [tiles][UPPERS] */
    const int32_t *first, *whole_at;
    const element *whole;  /* [..][BLOCK] */
} CompressedTiles;

#ifdef __AVX512VBMI__
/* A tile as it is gone through, block by block. */
typedef struct {
    const uint8_t *at;
    const int32_t *whole_at, *whole_end;
    const element *whole;
    int64_t next; /* block that is whole, -1 for none */
    __m512i uppers;
} TileReader;

static inline __attribute__((always_inline)) TileReader
open_tile(const CompressedTiles *tiles, int64_t tile, int64_t pairs) {
    const int32_t *from = tiles->whole_at + tiles->first[tile], *end = tiles->whole_at + tiles->first[tile + 1];
    const __m128i uppers = _mm_loadu_si128((const __m128i *)(tiles->uppers + tile * UPPERS));
    return (TileReader){
        .at = tiles->blocks + tile * pairs * BLOCK_BYTES,
        .whole_at = from, .whole_end = end,
        .whole = tiles->whole + (int64_t)tiles->first[tile] * BLOCK,
        .next = from < end ? *from : -1,
        .uppers = _mm512_broadcast_i32x4(uppers), /* four times: two bits of a neighbour do not matter */
    };
}

/* The weights of block `pair`, which is the next: of outputs 0 to 15, and of 16 to 31. */
static inline __attribute__((always_inline)) void
read_block(TileReader *reader, int64_t pair, __m512i *low, __m512i *high) {
    if (__builtin_expect(pair == reader->next, 0)) {
        *low = _mm512_loadu_si512(reader->whole);
        *high = _mm512_loadu_si512(reader->whole + TILE);
        reader->whole += BLOCK;
        reader->next = ++reader->whole_at < reader->whole_end ? *reader->whole_at : -1;
    } else {
        const __m512i shifts = _mm512_set1_epi64(0x1c1814100c080400);
        const __m512i lowers = _mm512_loadu_si512(reader->at);
        const __m256i choices = _mm256_loadu_si256((const __m256i *)(reader->at + BLOCK));
        const __m512i chosen = _mm512_multishift_epi64_epi8(shifts, _mm512_cvtepu32_epi64(choices));
        const __m512i uppers = _mm512_permutexvar_epi8(chosen, reader->uppers);
        *low = _mm512_unpacklo_epi8(lowers, uppers);
        *high = _mm512_unpackhi_epi8(lowers, uppers);
    }
    reader->at += BLOCK_BYTES;
}
#endif
