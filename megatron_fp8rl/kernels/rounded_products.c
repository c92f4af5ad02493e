// out = a b^T in BF16, each sum rounded once, as if it had been accumulated in float64. AVX-512 with BF16 only.
//
// AVX-512 adds the products of a lane, one in sixteen, in float32, and lanes are added in float64. The rounding errors of
// a lane add up like a random walk: sqrt(K / 16) steps of at most 2^-24 |a_lane| |b_lane|. Over all lanes that is at most
// sqrt(K / 16) 2^-24 |a| max |b_lane|, and three times as much is allowed. If both ends of that interval round to the same
// BF16 number, it is the result. The others, one in a hundred, are added again in float64.

#include <immintrin.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "bf16.h"

#ifndef __AVX512BF16__
#error "this CPU does not multiply BF16"
#endif

enum { ROWS = 8, COLUMNS = 3, BLOCK = 64 };  // 24 of 32 registers are sums; the rows of a block stay in the cache

static inline __m512d lower(__m512 x) { return _mm512_cvtps_pd(_mm512_castps512_ps256(x)); }
static inline __m512d upper(__m512 x) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)); }

// Products of two BF16 numbers are exact in float32.
static uint16_t in_float64(const uint16_t *a, const uint16_t *b, ptrdiff_t k_end) {
    const __m512i odd = _mm512_set1_epi32((int)0xFFFF0000);
    __m512d sums[4] = {};
    for (ptrdiff_t k = 0; k < k_end; k += 32) {
        __m512i left = _mm512_loadu_si512(a + k), right = _mm512_loadu_si512(b + k);
        __m512 evens = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(left, 16)),
                                     _mm512_castsi512_ps(_mm512_slli_epi32(right, 16)));
        __m512 odds = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(left, odd)),
                                    _mm512_castsi512_ps(_mm512_and_si512(right, odd)));
        sums[0] = _mm512_add_pd(sums[0], lower(evens));
        sums[1] = _mm512_add_pd(sums[1], upper(evens));
        sums[2] = _mm512_add_pd(sums[2], lower(odds));
        sums[3] = _mm512_add_pd(sums[3], upper(odds));
    }
    double sum = _mm512_reduce_add_pd((sums[0] + sums[1]) + (sums[2] + sums[3]));
    return bf16_of((float)sum);
}

static inline __m512bh load(const uint16_t *p) { return (__m512bh)_mm512_loadu_si512(p); }

// The norm of a row, or the largest norm of a lane. Zero only for zeros; infinite, which leaves nothing certain, if
// squares are flushed to zero.
static float norm(const uint16_t *a, ptrdiff_t k_end, int of_lane) {
    __m512 sum = _mm512_setzero_ps();
    __m512i bits = _mm512_setzero_si512();
    for (ptrdiff_t k = 0; k < k_end; k += 32) {
        sum = _mm512_dpbf16_ps(sum, load(a + k), load(a + k));
        bits = _mm512_or_si512(bits, _mm512_loadu_si512(a + k));
    }
    if (!_mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x7FFF7FFF))) return 0;
    float square = of_lane ? _mm512_reduce_max_ps(sum) : _mm512_reduce_add_ps(sum);
    return square > 0x1p-80f ? sqrtf(square) * 1.001f : INFINITY;
}

// Eight sums of sixteen lanes each.
static inline __m512d add_lanes(const __m512 rows[ROWS]) {
    __m512d x[8];
    for (int i = 0; i < 8; i++) x[i] = _mm512_add_pd(lower(rows[i]), upper(rows[i]));
    for (int i = 0; i < 8; i += 2)  // pairs of neighbours
        x[i] = _mm512_add_pd(_mm512_unpacklo_pd(x[i], x[i + 1]), _mm512_unpackhi_pd(x[i], x[i + 1]));
    for (int i = 0; i < 8; i += 4)  // quarters 0 + 1 and 2 + 3
        x[i] = _mm512_add_pd(_mm512_shuffle_f64x2(x[i], x[i + 2], 0x88), _mm512_shuffle_f64x2(x[i], x[i + 2], 0xDD));
    return _mm512_add_pd(_mm512_shuffle_f64x2(x[0], x[4], 0x88), _mm512_shuffle_f64x2(x[0], x[4], 0xDD));
}

// Up to eight rows of a times up to COLUMNS rows of b. Rows of b beyond `columns` repeat the last.
static inline __attribute__((always_inline)) void tile(const uint16_t *a, const uint16_t *b, uint16_t *out,
                                                       const float *norms_a, const float *norms_b, ptrdiff_t k_end,
                                                       ptrdiff_t stride, const int rows, int columns) {
    __m512 sums[COLUMNS][ROWS] = {};
    const uint16_t *right_rows[COLUMNS];
    for (int j = 0; j < COLUMNS; j++) right_rows[j] = b + (j < columns ? j : columns - 1) * k_end;
    for (ptrdiff_t k = 0; k < k_end; k += 32) {
        __m512bh right[COLUMNS];
        for (int j = 0; j < COLUMNS; j++) right[j] = load(right_rows[j] + k);
        for (int i = 0; i < rows; i++) {
            __m512bh left = load(a + i * k_end + k);
            for (int j = 0; j < COLUMNS; j++) sums[j][i] = _mm512_dpbf16_ps(sums[j][i], left, right[j]);
        }
    }
    float norms[ROWS] = {};
    memcpy(norms, norms_a, rows * sizeof(float));
    const __m512d norms_of_rows = _mm512_cvtps_pd(_mm256_loadu_ps(norms));
    const double allowed = 3 * 0x1p-24 * sqrt(k_end / 16.0);
    for (int j = 0; j < columns; j++) {
        __m512d sum = add_lanes(sums[j]);
        __m512d error = _mm512_mul_pd(norms_of_rows, _mm512_set1_pd(norms_b[j] * allowed));
        // The last term is for products that are flushed to zero.
        error = _mm512_mask_add_pd(error, _mm512_cmp_pd_mask(error, _mm512_setzero_pd(), _CMP_NEQ_UQ), error,
                                   _mm512_set1_pd(0x1p-90));
        __m512d size = _mm512_add_pd(_mm512_abs_pd(sum), error);
        __m128i low = (__m128i)_mm256_cvtneps_pbh(_mm512_cvtpd_ps(_mm512_sub_pd(sum, error)));
        __m128i high = (__m128i)_mm256_cvtneps_pbh(_mm512_cvtpd_ps(_mm512_add_pd(sum, error)));
        int are_certain =
            _mm_cmpeq_epi16_mask(low, high) & _mm512_cmp_pd_mask(size, _mm512_set1_pd(0x1p126), _CMP_LT_OQ);
        uint16_t results[ROWS];
        _mm_storeu_si128((void *)results, low);
        for (int i = 0; i < rows; i++)
            out[i * stride + j] =
                are_certain >> i & 1 ? results[i] : in_float64(a + i * k_end, right_rows[j], k_end);
    }
}

// Columns start to end of out [m, n], for a [m, k] and b [n, k]; k is a multiple of 32.
void multiply(const uint16_t *a, const uint16_t *b, uint16_t *out, ptrdiff_t m, ptrdiff_t n, ptrdiff_t k,
              ptrdiff_t start, ptrdiff_t end) {
    float norms_a[BLOCK], norms_b[COLUMNS];
    for (ptrdiff_t first = 0; first < m; first += BLOCK) {
        ptrdiff_t last = first + BLOCK < m ? first + BLOCK : m;
        for (ptrdiff_t i = first; i < last; i++) norms_a[i - first] = norm(a + i * k, k, 0);
        for (ptrdiff_t j = start; j < end; j += COLUMNS) {
            int columns = j + COLUMNS < end ? COLUMNS : (int)(end - j);
            for (int c = 0; c < columns; c++) norms_b[c] = norm(b + (j + c) * k, k, 1);
            for (ptrdiff_t i = first, rows; i < last; i += rows) {
#define TILE(number) tile(a + i * k, b + j * k, out + i * n + j, norms_a + i - first, norms_b, k, n, number, columns)
                rows = last - i >= 8 ? 8 : last - i >= 4 ? 4 : last - i >= 2 ? 2 : 1;
                if (rows == 8) TILE(8);
                else if (rows == 4) TILE(4);
                else if (rows == 2) TILE(2);
                else TILE(1);
            }
        }
    }
}
