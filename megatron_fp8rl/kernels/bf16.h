// Rounding to BF16, to the nearest number, ties to even.

#include <stdint.h>
#include <string.h>

static inline uint16_t bf16_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return value != value ? 0x7FC0 : (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}
