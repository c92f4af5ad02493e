// out = a b^T in BF16, each sum rounded once, as if it had been accumulated in float64. AVX-512 with BF16 only.
//
// AVX-512 adds the products in float32, sixteen partial sums per output. Their rounding errors add up like a random
// walk: sqrt(K / 16) steps of at most 2^-24 |a| |b|, of which three are allowed. If both ends of that interval round to
// the same BF16 number, it is the result. The others, one in twenty, are added again in float64.

#include <immintrin.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifndef __AVX512BF16__
#error "this CPU does not multiply BF16"
#endif

enum { ROWS = 8, COLUMNS = 3, BLOCK = 64 };  // 24 of 32 registers are sums; the rows of a block stay in the cache

static inline uint16_t bf16_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}

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
    return sum != sum ? 0x7FC0 : bf16_of((float)sum);
}

static inline __m512bh load(const uint16_t *p) { return (__m512bh)_mm512_loadu_si512(p); }

// Zero only for zeros; infinite, which leaves nothing certain, if squares are flushed to zero.
static float norm(const uint16_t *a, ptrdiff_t k_end) {
    __m512 sum = _mm512_setzero_ps();
    __m512i bits = _mm512_setzero_si512();
    for (ptrdiff_t k = 0; k < k_end; k += 32) {
        sum = _mm512_dpbf16_ps(sum, load(a + k), load(a + k));
        bits = _mm512_or_si512(bits, _mm512_loadu_si512(a + k));
    }
    if (!_mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x7FFF7FFF))) return 0;
    float square = _mm512_reduce_add_ps(sum);
    return square > 0x1p-80f ? sqrtf(square) : INFINITY;
}

static inline __attribute__((always_inline)) void tile(const uint16_t *a, const uint16_t *b, uint16_t *out,
                                                       const float *norms_a, const float *norms_b, ptrdiff_t k_end,
                                                       ptrdiff_t stride, const int rows, const int columns) {
    __m512 sums[ROWS][COLUMNS] = {};
    for (ptrdiff_t k = 0; k < k_end; k += 32) {
        __m512bh right[COLUMNS];
        for (int j = 0; j < columns; j++) right[j] = load(b + j * k_end + k);
        for (int i = 0; i < rows; i++) {
            __m512bh left = load(a + i * k_end + k);
            for (int j = 0; j < columns; j++) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], left, right[j]);
        }
    }
    const float allowed = 3 * 0x1p-24f * sqrtf(k_end / 16.0f);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++) {
            float sum = _mm512_reduce_add_ps(sums[i][j]);
            // The last term is for products that are flushed to zero.
            float norms = norms_a[i] * norms_b[j];
            float error = norms == 0 ? 0 : norms * allowed + fabsf(sum) * 0x1p-22f + 0x1p-90f;
            uint16_t low = bf16_of(sum - error), high = bf16_of(sum + error);
            int is_certain = low == high && fabsf(sum) < 0x1p126f && error < 0x1p126f;
            out[i * stride + j] = is_certain ? low : in_float64(a + i * k_end, b + j * k_end, k_end);
        }
}

// Columns start to end of out [m, n], for a [m, k] and b [n, k]; k is a multiple of 32.
void multiply(const uint16_t *a, const uint16_t *b, uint16_t *out, ptrdiff_t m, ptrdiff_t n, ptrdiff_t k,
              ptrdiff_t start, ptrdiff_t end) {
    float norms_a[BLOCK], norms_b[COLUMNS];
    for (ptrdiff_t first = 0; first < m; first += BLOCK) {
        ptrdiff_t last = first + BLOCK < m ? first + BLOCK : m;
        for (ptrdiff_t i = first; i < last; i++) norms_a[i - first] = norm(a + i * k, k);
        for (ptrdiff_t j = start; j < end; j += COLUMNS) {
            int columns = j + COLUMNS < end ? COLUMNS : (int)(end - j);
            for (int c = 0; c < columns; c++) norms_b[c] = norm(b + (j + c) * k, k);
            for (ptrdiff_t i = first; i < last; i += ROWS)
                if (i + ROWS <= last && columns == COLUMNS)
                    tile(a + i * k, b + j * k, out + i * n + j, norms_a + i - first, norms_b, k, n, ROWS, COLUMNS);
                else
                    for (ptrdiff_t r = i; r < last && r < i + ROWS; r++)
                        for (int c = 0; c < columns; c++)
                            tile(a + r * k, b + (j + c) * k, out + r * n + j + c, norms_a + r - first, norms_b + c, k,
                                 n, 1, 1);
        }
    }
}
