// Operations on BF16 rows between products, with the roundings of PyTorch's (-ffp-contract=off).

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "bf16.h"

static inline float float_of(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// round_blocks_ of blockwise.py with power-of-two scales and E4M3, for `count` blocks.
void round_blocks(const uint16_t *x, uint16_t *out, ptrdiff_t count, ptrdiff_t size) {
    for (ptrdiff_t block = 0; block < count; block++, x += size, out += size) {
        uint32_t largest = 0;
        for (ptrdiff_t i = 0; i < size; i++) {
            uint32_t bits = (uint32_t)(x[i] & 0x7FFF) << 16;
            largest = bits > largest ? bits : largest;
        }
        if (largest >= 0x7F800000) {
            for (ptrdiff_t i = 0; i < size; i++) out[i] = 0x7FC0;
            continue;
        }
        int32_t exponent = (int32_t)((largest + 0x1FFFFF) >> 23) - 8;
        exponent = largest == 0 ? 127 : exponent < 1 ? 1 : exponent;
        const float least = of_bits((uint32_t)exponent << 23) * 0x1p-6f;
        for (ptrdiff_t i = 0; i < size; i++) {
            float value = float_of(x[i]), shift = of_bits(bits_of(value) & 0x7F800000);
            shift = (shift > least ? shift : least) * 0x1.8p20f;
            out[i] = bits_of(value + shift - shift) >> 16;  // exact
        }
    }
}

// rms_norm of float64.py.
void rms_norm(const uint16_t *x, const uint16_t *weight, uint16_t *out, ptrdiff_t rows, ptrdiff_t stride,
              ptrdiff_t width, double eps) {
    for (ptrdiff_t row = 0; row < rows; row++, x += stride, out += width) {
        double sums[8] = {};
        ptrdiff_t i = 0;
        for (; i + 8 <= width; i += 8)
            for (int j = 0; j < 8; j++) sums[j] += (double)float_of(x[i + j]) * float_of(x[i + j]);
        for (; i < width; i++) sums[0] += (double)float_of(x[i]) * float_of(x[i]);
        for (int j = 1; j < 8; j++) sums[0] += sums[j];
        const double factor = 1 / sqrt(sums[0] / width + eps);
        for (i = 0; i < width; i++)
            out[i] = bf16_of(float_of(bf16_of((float)(float_of(x[i]) * factor))) * float_of(weight[i]));
    }
}
