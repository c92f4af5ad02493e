// Attention over a paged cache of keys and values, accumulated in float64 and rounded once to BF16. AVX-512 only.
//
// A unit of work is one request and one key head. Eight rows (a query token and a query head each) share every key and
// value that is read. Cache: [blocks, key heads, tokens of a block, 2 D], a token's key before its value.

#include <immintrin.h>
#include <math.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "bf16.h"

#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512VL__)
#error "this CPU has no AVX-512"
#endif

enum { ROWS = 8 };

struct job {
    const uint16_t *query;  // BF16 [T, query heads, D], rows of query_stride
    const void *cache;      // BF16, or E4M3
    const int32_t *starts, *lengths, *blocks;  // [requests + 1], [requests], [requests, table_stride]
    uint16_t *out;                             // BF16 [T, query heads, D], rows of out_stride
    double scale;
    float key_scale, value_scale;  // of E4M3; 0: the cache is BF16
    int64_t requests, key_heads, heads_per_key, width;  // width: D, a multiple of 16
    int64_t query_stride, out_stride, table_stride, block_stride, head_stride, token_stride, block_size;
    int64_t window;     // last tokens that a token reads, with its own; 0: all
    atomic_llong next;  // unit of work
    atomic_int failed;
};

static inline void widen(__m512 values, __m512d out[2]) {
    out[0] = _mm512_cvtps_pd(_mm512_castps512_ps256(values));
    out[1] = _mm512_cvtps_pd(_mm512_extractf32x8_ps(values, 1));
}

static inline __m512 of_bf16(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16));
}

// E4M3 shifted into FP16 is the number over 2^8.
static inline __m512 of_e4m3(const uint8_t *p, float scale) {
    __m256i codes = _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)p));
    __m256i numbers = _mm256_slli_epi16(_mm256_and_si256(codes, _mm256_set1_epi16(0x7F)), 7);
    __m512 values = _mm512_cvtph_ps(_mm256_or_si256(numbers, _mm256_slli_epi16(_mm256_srli_epi16(codes, 7), 15)));
    __mmask16 are_nan = _mm256_cmpeq_epi16_mask(numbers, _mm256_set1_epi16(0x7F << 7));
    values = _mm512_mul_ps(_mm512_mul_ps(values, _mm512_set1_ps(256)), _mm512_set1_ps(scale));
    return _mm512_mask_mov_ps(values, are_nan, _mm512_set1_ps(NAN));
}

// Sixteen features of a key or value as float64, from an offset in the cache.
static inline void load(const struct job *job, float scale, ptrdiff_t offset, __m512d out[2]) {
    widen(scale ? of_e4m3((const uint8_t *)job->cache + offset, scale) : of_bf16((const uint16_t *)job->cache + offset),
          out);
}

// e^x for x <= 0: x = n ln 2 + r, and the Taylor series of e^r to the power 13 (|r| <= 0.35, so 5e-18 are missing).
static inline __m512d exponential(__m512d x) {
    static const double inverse[] = {1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880,
                                     1.0 / 40320,      1.0 / 5040,      1.0 / 720,      1.0 / 120,     1.0 / 24,
                                     1.0 / 6,          1.0 / 2,         1.0,            1.0};
    __m512d n = _mm512_roundscale_pd(_mm512_mul_pd(x, _mm512_set1_pd(0x1.71547652b82fep0)), 0);
    __m512d r = _mm512_fnmadd_pd(n, _mm512_set1_pd(0x1.62e42fefa39efp-1), x);
    r = _mm512_fnmadd_pd(n, _mm512_set1_pd(0x1.abc9e3b39803fp-56), r);
    __m512d sum = _mm512_set1_pd(inverse[0]);
    for (int i = 1; i < 14; i++) sum = _mm512_fmadd_pd(sum, r, _mm512_set1_pd(inverse[i]));
    return _mm512_scalef_pd(sum, n);
}

static inline ptrdiff_t offset_of(const struct job *job, ptrdiff_t request, ptrdiff_t head, ptrdiff_t token) {
    ptrdiff_t block = job->blocks[request * job->table_stride + token / job->block_size];
    return block * job->block_stride + head * job->head_stride + token % job->block_size * job->token_stride;
}

// Turns the scores [first, last) of a row into weights: softmax over [start, end), zero elsewhere.
static void softmax(double *scores, ptrdiff_t first, ptrdiff_t start, ptrdiff_t end, ptrdiff_t last) {
    for (ptrdiff_t t = first; t < start; t++) scores[t - first] = 0;
    for (ptrdiff_t t = end; t < last; t++) scores[t - first] = 0;
    double *row = scores + (start - first);
    ptrdiff_t count = end - start;
    __m512d largest = _mm512_set1_pd(-INFINITY), sum = _mm512_setzero_pd();
    for (ptrdiff_t t = 0; t < count; t += 8) {
        __mmask8 mask = count - t >= 8 ? 0xFF : (1 << (count - t)) - 1;
        largest = _mm512_mask_max_pd(largest, mask, largest, _mm512_maskz_loadu_pd(mask, row + t));
    }
    largest = _mm512_set1_pd(_mm512_reduce_max_pd(largest));
    for (ptrdiff_t t = 0; t < count; t += 8) {
        __mmask8 mask = count - t >= 8 ? 0xFF : (1 << (count - t)) - 1;
        __m512d weight = exponential(_mm512_sub_pd(_mm512_maskz_loadu_pd(mask, row + t), largest));
        _mm512_mask_storeu_pd(row + t, mask, weight);
        sum = _mm512_mask_add_pd(sum, mask, sum, weight);
    }
    sum = _mm512_set1_pd(_mm512_reduce_add_pd(sum));
    for (ptrdiff_t t = 0; t < count; t += 8) {
        __mmask8 mask = count - t >= 8 ? 0xFF : (1 << (count - t)) - 1;
        _mm512_mask_storeu_pd(row + t, mask, _mm512_div_pd(_mm512_maskz_loadu_pd(mask, row + t), sum));
    }
}

// Rows `row` to `row + rows` of a request's [query tokens * heads_per_key] for one key head.
static inline __attribute__((always_inline)) void attend_rows(const struct job *job, ptrdiff_t request, ptrdiff_t head,
                                                              ptrdiff_t row, const int rows, double *buffer,
                                                              ptrdiff_t *offsets) {
    const ptrdiff_t width = job->width, group = job->heads_per_key, length = job->lengths[request];
    const ptrdiff_t token = job->starts[request], before = length - (job->starts[request + 1] - token);
    ptrdiff_t starts[ROWS], ends[ROWS];
    for (int i = 0; i < rows; i++) {
        ends[i] = before + (row + i) / group + 1;
        starts[i] = job->window && ends[i] > job->window ? ends[i] - job->window : 0;
    }
    const ptrdiff_t first = starts[0], last = ends[rows - 1], count = last - first;
    double *queries = buffer, *scores = buffer + ROWS * width;
    for (int i = 0; i < rows; i++) {
        ptrdiff_t at = (token + (row + i) / group) * job->query_stride + (head * group + (row + i) % group) * width;
        for (ptrdiff_t d = 0; d < width; d += 16) {
            __m512d values[2];
            widen(of_bf16(job->query + at + d), values);
            _mm512_storeu_pd(queries + i * width + d, values[0]);
            _mm512_storeu_pd(queries + i * width + d + 8, values[1]);
        }
    }
    for (ptrdiff_t t = 0; t < count; t++) {
        offsets[t] = offset_of(job, request, head, first + t);
        __m512d sums[ROWS] = {};
        for (ptrdiff_t d = 0; d < width; d += 16) {
            __m512d key[2];
            load(job, job->key_scale, offsets[t] + d, key);
            for (int i = 0; i < rows; i++) {
                sums[i] = _mm512_fmadd_pd(key[0], _mm512_loadu_pd(queries + i * width + d), sums[i]);
                sums[i] = _mm512_fmadd_pd(key[1], _mm512_loadu_pd(queries + i * width + d + 8), sums[i]);
            }
        }
        for (int i = 0; i < rows; i++) scores[i * count + t] = _mm512_reduce_add_pd(sums[i]) * job->scale;
    }
    for (int i = 0; i < rows; i++) softmax(scores + i * count, first, starts[i], ends[i], last);
    for (ptrdiff_t d = 0; d < width; d += 16) {
        __m512d sums[ROWS][2] = {};
        for (ptrdiff_t t = 0; t < count; t++) {
            __m512d value[2];
            load(job, job->value_scale, offsets[t] + width + d, value);
            for (int i = 0; i < rows; i++) {
                __m512d weight = _mm512_set1_pd(scores[i * count + t]);
                sums[i][0] = _mm512_fmadd_pd(weight, value[0], sums[i][0]);
                sums[i][1] = _mm512_fmadd_pd(weight, value[1], sums[i][1]);
            }
        }
        for (int i = 0; i < rows; i++) {
            ptrdiff_t at = (token + (row + i) / group) * job->out_stride + (head * group + (row + i) % group) * width;
            double values[16];
            _mm512_storeu_pd(values, sums[i][0]);
            _mm512_storeu_pd(values + 8, sums[i][1]);
            for (int j = 0; j < 16; j++) job->out[at + d + j] = bf16_of((float)values[j]);
        }
    }
}

// Takes units of work until none is left; several threads may share a job.
void attend(struct job *job) {
    ptrdiff_t longest = 0;
    for (ptrdiff_t i = 0; i < job->requests; i++) longest = job->lengths[i] > longest ? job->lengths[i] : longest;
    double *buffer = malloc(sizeof(double) * ROWS * (job->width + longest));
    ptrdiff_t *offsets = malloc(sizeof(ptrdiff_t) * longest);
    if (buffer == NULL || offsets == NULL) atomic_store(&job->failed, 1);
    while (!atomic_load(&job->failed)) {
        long long unit = atomic_fetch_add(&job->next, 1);
        if (unit >= job->requests * job->key_heads) break;
        ptrdiff_t request = unit / job->key_heads, head = unit % job->key_heads;
        ptrdiff_t rows = (job->starts[request + 1] - job->starts[request]) * job->heads_per_key;
#define CASE(n) case n: attend_rows(job, request, head, row, n, buffer, offsets); break;
        for (ptrdiff_t row = 0; row < rows; row += ROWS)
            switch (rows - row) {
                CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7)
                default: attend_rows(job, request, head, row, ROWS, buffer, offsets);
            }
    }
    free(buffer);
    free(offsets);
}
