/* SPDX-License-Identifier: Apache-2.0 */
/* XXH3-64 without a seed, after the published specification of the hash. It is here, and not called
   from Python's xxhash, so that a batch is hashed without the interpreter's lock, and what is large piece
   by piece: while it is copied, or where it lies in memory. */
#ifndef TE_XXH3_H
#define TE_XXH3_H

#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define XXH3_BLOCK 1024 /* bytes between two scrambles, with the default secret */
#define XXH3_STRIPE 64
#define XXH3_SECRET 192
#define XXH3_SHORT 240 /* bytes: up to there the hash has other forms, without blocks */

static const uint8_t xxh3_secret[XXH3_SECRET] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static const uint64_t XXH3_P1 = 0x9E3779B185EBCA87ULL, XXH3_P2 = 0xC2B2AE3D27D4EB4FULL,
                      XXH3_P3 = 0x165667B19E3779F9ULL, XXH3_P4 = 0x85EBCA77C2B2AE63ULL,
                      XXH3_P5 = 0x27D4EB2F165667C5ULL;
static const uint32_t XXH3_Q1 = 0x9E3779B1U, XXH3_Q2 = 0x85EBCA77U, XXH3_Q3 = 0xC2B2AE3DU;

static inline uint64_t xxh3_word(const uint8_t *p) {
    uint64_t word;
    memcpy(&word, p, 8); /* the hash is defined for little-endian words */
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

static inline uint32_t xxh3_half(const uint8_t *p) {
    uint32_t half;
    memcpy(&half, p, 4);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    half = __builtin_bswap32(half);
#endif
    return half;
}

static inline uint64_t xxh3_fold(uint64_t a, uint64_t b) {
    __uint128_t product = (__uint128_t)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t xxh3_avalanche(uint64_t h) {
    h = (h ^ h >> 37) * 0x165667919E3779F9ULL;
    return h ^ h >> 32;
}

static inline uint64_t xxh3_mix16(const uint8_t *p, const uint8_t *secret) {
    return xxh3_fold(
        xxh3_word(p) ^ xxh3_word(secret), xxh3_word(p + 8) ^ xxh3_word(secret + 8));
}

/* -- objects of at most 240 bytes */

static uint64_t xxh3_tiny(const uint8_t *p, uint64_t n) {
    const uint8_t *s = xxh3_secret;
    uint64_t h, low, high;
    if (n > 8) {
        low = xxh3_word(p) ^ (xxh3_word(s + 24) ^ xxh3_word(s + 32));
        high = xxh3_word(p + n - 8) ^ (xxh3_word(s + 40) ^ xxh3_word(s + 48));
        return xxh3_avalanche(n + __builtin_bswap64(low) + high + xxh3_fold(low, high));
    }
    if (n >= 4) {
        h = (uint64_t)xxh3_half(p + n - 4) + ((uint64_t)xxh3_half(p) << 32);
        h ^= xxh3_word(s + 8) ^ xxh3_word(s + 16);
        h ^= (h << 49 | h >> 15) ^ (h << 24 | h >> 40);
        h *= 0x9FB21C651E98DF25ULL;
        h = (h ^ ((h >> 35) + n)) * 0x9FB21C651E98DF25ULL;
        return h ^ h >> 28;
    }
    if (n)
        h = (uint64_t)p[0] << 16 | (uint64_t)p[n >> 1] << 24 | p[n - 1] | n << 8;
    else
        h = xxh3_word(s + 56) ^ xxh3_word(s + 64);
    if (n)
        h ^= xxh3_half(s) ^ xxh3_half(s + 4);
    h = (h ^ h >> 33) * XXH3_P2;
    h = (h ^ h >> 29) * XXH3_P3;
    return h ^ h >> 32;
}

static uint64_t xxh3_short(const uint8_t *p, uint64_t n) {
    const uint8_t *s = xxh3_secret;
    uint64_t h = n * XXH3_P1, end, i;
    if (n <= 16)
        return xxh3_tiny(p, n);
    if (n <= 128) {
        for (i = (n - 1) / 32 + 1; i-- > 0;)
            h += xxh3_mix16(p + 16 * i, s + 32 * i) +
                 xxh3_mix16(p + n - 16 * (i + 1), s + 32 * i + 16);
        return xxh3_avalanche(h);
    }
    for (i = 0; i < 8; i++)
        h += xxh3_mix16(p + 16 * i, s + 16 * i);
    h = xxh3_avalanche(h);
    end = xxh3_mix16(p + n - 16, s + 136 - 17);
    for (i = 8; i < n / 16; i++)
        end += xxh3_mix16(p + 16 * i, s + 16 * (i - 8) + 3);
    return xxh3_avalanche(h + end);
}

/* -- longer ones, block by block */

typedef struct {
    uint64_t lanes[8];
} xxh3_state;

static inline void xxh3_begin(xxh3_state *state) {
    const uint64_t lanes[8] = {
        XXH3_Q3, XXH3_P1, XXH3_P2, XXH3_P3, XXH3_P4, XXH3_Q2, XXH3_P5, XXH3_Q1};
    memcpy(state->lanes, lanes, sizeof(lanes));
}

/* Two lanes at a time, which every 64-bit processor has in hardware; the compiler makes more of it
   where it may. */
typedef uint64_t xxh3_pair __attribute__((vector_size(16)));

static inline xxh3_pair xxh3_load(const uint8_t *p) {
    xxh3_pair pair;
    memcpy(&pair, p, 16);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    pair[0] = __builtin_bswap64(pair[0]);
    pair[1] = __builtin_bswap64(pair[1]);
#endif
    return pair;
}

static inline xxh3_pair xxh3_product(xxh3_pair keyed) { /* of the halves of each lane */
#if defined(__x86_64__)
    return (xxh3_pair)_mm_mul_epu32((__m128i)keyed, _mm_srli_epi64((__m128i)keyed, 32));
#else
    return (keyed & 0xFFFFFFFFULL) * (keyed >> 32);
#endif
}

static inline void xxh3_stripe(xxh3_pair *lanes, const uint8_t *p, const uint8_t *secret) {
    for (int i = 0; i < 4; i++) {
        xxh3_pair pair = xxh3_load(p + 16 * i);
        lanes[i] += __builtin_shuffle(pair, (xxh3_pair){1, 0});
        lanes[i] += xxh3_product(pair ^ xxh3_load(secret + 16 * i));
    }
}

static void xxh3_pairs(xxh3_state *state, const uint8_t *p, uint8_t *to, uint64_t blocks) {
    const uint8_t *scramble = xxh3_secret + XXH3_SECRET - XXH3_STRIPE;
    xxh3_pair lanes[4];
    memcpy(lanes, state->lanes, sizeof(lanes));
    for (; blocks; blocks--) {
        const uint8_t *block = p;
        if (to)
            block = memcpy(to, p, XXH3_BLOCK); /* should the source change meanwhile */
        for (int n = 0; n < XXH3_BLOCK / XXH3_STRIPE; n++)
            xxh3_stripe(lanes, block + XXH3_STRIPE * n, xxh3_secret + 8 * n);
        for (int i = 0; i < 4; i++) {
            xxh3_pair lane = lanes[i] ^ lanes[i] >> 47 ^ xxh3_load(scramble + 16 * i);
            lanes[i] = lane * (xxh3_pair){XXH3_Q1, XXH3_Q1};
        }
        p += XXH3_BLOCK;
        to += to ? XXH3_BLOCK : 0;
    }
    memcpy(state->lanes, lanes, sizeof(lanes));
}

#if defined(__x86_64__)
enum { XXH3_HASH, XXH3_STORE, XXH3_STREAM };

__attribute__((target("avx2"), always_inline)) static inline void xxh3_fours_in(
    xxh3_state *state, const uint8_t *p, uint8_t *to, uint64_t blocks, const int mode) {
    const __m256i *scramble = (const __m256i *)(xxh3_secret + XXH3_SECRET - XXH3_STRIPE);
    const __m256i factor = _mm256_set1_epi32((int)XXH3_Q1);
    __m256i lanes[2];
    memcpy(lanes, state->lanes, sizeof(lanes));
    for (; blocks; blocks--) {
        for (int n = 0; n < XXH3_BLOCK / XXH3_STRIPE; n++, p += XXH3_STRIPE) {
            for (int i = 0; i < 2; i++) {
                __m256i four = _mm256_loadu_si256((const __m256i *)p + i);
                __m256i keyed = _mm256_xor_si256(
                    four, _mm256_loadu_si256((const __m256i *)(xxh3_secret + 8 * n) + i));
                __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
                lanes[i] = _mm256_add_epi64(
                    lanes[i], _mm256_add_epi64(product, _mm256_shuffle_epi32(four, 0x4E)));
                if (mode == XXH3_STORE)
                    _mm256_storeu_si256((__m256i *)to + i, four);
                if (mode == XXH3_STREAM)
                    _mm256_stream_si256((__m256i *)to + i, four);
            }
            to += mode == XXH3_HASH ? 0 : XXH3_STRIPE;
        }
        for (int i = 0; i < 2; i++) {
            __m256i lane = _mm256_xor_si256(lanes[i], _mm256_srli_epi64(lanes[i], 47));
            lane = _mm256_xor_si256(lane, _mm256_loadu_si256(scramble + i));
            __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(lane, 32), factor);
            lanes[i] = _mm256_add_epi64(
                _mm256_mul_epu32(lane, factor), _mm256_slli_epi64(high, 32));
        }
    }
    if (mode == XXH3_STREAM)
        _mm_sfence();
    memcpy(state->lanes, lanes, sizeof(lanes));
}

__attribute__((target("avx2"))) static void xxh3_fours(
    xxh3_state *state, const uint8_t *p, uint8_t *to, uint64_t blocks, int past_caches) {
    if (!to)
        xxh3_fours_in(state, p, to, blocks, XXH3_HASH);
    else if (past_caches && (uintptr_t)to % 32 == 0)
        xxh3_fours_in(state, p, to, blocks, XXH3_STREAM);
    else
        xxh3_fours_in(state, p, to, blocks, XXH3_STORE);
}
#endif

/* Hashes the blocks of an object that come next, and copies them to `to` unless that is NULL. The
   last bytes of an object, 1 to 1,024, are for `xxh3_end`. One pass over the bytes: a copy of 1 MiB
   and a hash behind it take 55 us, and both at once 35. `past_caches`: for copies that are larger
   than the caches; those then need not first be filled with what is overwritten. */
static inline void xxh3_feed(
    xxh3_state *state, const uint8_t *p, uint8_t *to, uint64_t blocks, int past_caches) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {
        xxh3_fours(state, p, to, blocks, past_caches);
        return;
    }
#endif
    xxh3_pairs(state, p, to, blocks);
}

/* The hash of an object of `n` bytes, more than 240, whose blocks were fed up to `rest`. If there was
   a block, the 64 bytes before `rest` are the last of it. */
static uint64_t xxh3_end(xxh3_state *state, const uint8_t *rest, uint64_t n) {
    const uint8_t *last = rest + (n - 1) % XXH3_BLOCK + 1 - XXH3_STRIPE;
    uint64_t stripes = (n - 1) % XXH3_BLOCK / XXH3_STRIPE, h = n * XXH3_P1;
    xxh3_pair lanes[4];
    uint64_t found[8];
    memcpy(lanes, state->lanes, sizeof(lanes));
    for (uint64_t i = 0; i < stripes; i++)
        xxh3_stripe(lanes, rest + XXH3_STRIPE * i, xxh3_secret + 8 * i);
    xxh3_stripe(lanes, last, xxh3_secret + XXH3_SECRET - XXH3_STRIPE - 7);
    memcpy(found, lanes, sizeof(found));
    for (int i = 0; i < 4; i++)
        h += xxh3_fold(
            found[2 * i] ^ xxh3_word(xxh3_secret + 11 + 16 * i),
            found[2 * i + 1] ^ xxh3_word(xxh3_secret + 19 + 16 * i));
    return xxh3_avalanche(h);
}

/* -- the same of bytes that come in pieces of any size */

typedef struct {
    xxh3_state state;
    uint64_t total;
    uint64_t held;                        /* bytes in `block`, which are not hashed yet */
    uint8_t last[XXH3_STRIPE];            /* of the blocks that are: `block` lies behind it */
    uint8_t block[XXH3_BLOCK];
} xxh3_stream;

static inline void xxh3_open(xxh3_stream *s) {
    xxh3_begin(&s->state);
    s->total = s->held = 0;
}

/* `n` bytes more. A block is hashed once a byte follows it, as the last one is for `xxh3_end`. */
static inline void xxh3_add(xxh3_stream *s, const uint8_t *p, uint64_t n) {
    uint64_t some, blocks;
    s->total += n;
    if (s->held) {
        some = n < XXH3_BLOCK - s->held ? n : XXH3_BLOCK - s->held;
        memcpy(s->block + s->held, p, some);
        s->held += some;
        p += some;
        n -= some;
        if (!n)
            return;
        xxh3_feed(&s->state, s->block, NULL, 1, 0);
        memcpy(s->last, s->block + XXH3_BLOCK - XXH3_STRIPE, XXH3_STRIPE);
        s->held = 0;
    }
    if (!n)
        return;
    blocks = (n - 1) / XXH3_BLOCK;
    if (blocks) {
        xxh3_feed(&s->state, p, NULL, blocks, 0);
        p += blocks * XXH3_BLOCK;
        n -= blocks * XXH3_BLOCK;
        memcpy(s->last, p - XXH3_STRIPE, XXH3_STRIPE);
    }
    memcpy(s->block, p, n);
    s->held = n;
}

static inline uint64_t xxh3_close(xxh3_stream *s) {
    if (s->total <= XXH3_SHORT)
        return xxh3_short(s->block, s->total);
    return xxh3_end(&s->state, s->block, s->total);
}

#endif
