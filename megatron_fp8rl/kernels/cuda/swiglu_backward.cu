// SwiGLU backward, quantized to rowwise and columnwise FP8 with power-of-two scales, in one pass over memory.
//
//   h     bf16 [P, 2F]  gate | up              dy    bf16 [P, F]
//   probs float [T]                            rows  int [P]  the token of each row, -1 for padding
//   experts int [P]     -1 after the last expert, where nothing is read or written
//
//   dh_rows    e4m3 [P, 2F]              dh_row_scales    float [2F/128, P]
//   dh_columns e4m3 [P/128, 2F, 128]     dh_column_scales float [P/128, 2F]
//   a_columns  e4m3 [P/128, F, 128]      a_column_scales  float [P/128, F]       of silu(gate) * up, times the probs
//   dprobs     float [F/128, P]          sums over 128 features of activation times dy
//
// Thread blocks are persistent, one per SM, and process tiles of 128 x 128. While 16 warps compute a tile, three warps
// load the next one, one input each, and another warp stores the columnwise bytes of the previous one, which are
// contiguous in global memory for each tile.
//
// Values stay in BF16, two features per word, until they are converted to FP8: products with powers of two are exact.
//
// A thread owns 4 rows x 8 features, a warp 32 rows x 32 features, and 4 x 4 warps cover a tile.

#ifndef WEIGHTED
#define WEIGHTED 1
#endif

#include "hopper.h"

constexpr int SIDE = 128, STAGES = 2, WARPS = 16, THREADS = WARPS * 32;
constexpr u32 LINE = SIDE * 2 + 16;       // row stride of an input in bytes, padded against bank conflicts
constexpr u32 INPUT = SIDE * LINE;        // bytes each of gate, up and dy
constexpr u32 STAGE = 3 * INPUT;          // three inputs, reused for columnwise bytes
constexpr u32 TILE = SIDE * SIDE;
constexpr u32 BARRIERS = 0;               // per stage: full and empty
constexpr u32 PARTS = 128;                // partial results per quarter tile, double-buffered over tiles
constexpr u32 ROW_PART = SIDE * 2, COLUMN_PART = SIDE * 2, SUM_PART = SIDE * 4;
constexpr u32 ROW_PARTS = 0, COLUMN_PARTS = ROW_PARTS + 4 * 2 * ROW_PART, SUM_PARTS = COLUMN_PARTS + 4 * 3 * COLUMN_PART;
constexpr u32 PART = SUM_PARTS + 4 * SUM_PART;
constexpr u32 INPUTS = (PARTS + 2 * PART + 127) / 128 * 128;

constexpr int FEW = 32, MANY = 112;  // registers per thread: load and store warps, computing warps
static_assert(registers_suffice(THREADS + 128, 128, FEW, MANY));

constexpr u32 MAGNITUDES = 0x7FFF7FFF;
constexpr int STAGED = 2;  // first of the named barriers (one per stage) between computing warps and the storing warp

ON_GPU float low(u32 x) { return as_float(x << 16); }

ON_GPU float high(u32 x) { return as_float(x & 0xFFFF0000); }

// Float32 bits of a block's power-of-two scale, from the BF16 bits of its amax; inverse_of gives its inverse.
ON_GPU u32 scale_bits(u32 largest) {
    const u32 bits = largest << 16;
    if (bits == 0) return 0x3F800000;
    if (bits >= 0x7F800000) return 0x7FC00000;
    const int exponent = (int)((bits + 0x1FFFFF) >> 23) - 8;
    return (u32)(exponent > 1 ? exponent : 1) << 23;
}
ON_GPU u32 inverse_of(u32 scale) { return (scale == 0x7FC00000 ? scale : (254u << 23) - scale) >> 16; }  // BF16

ON_GPU u32 largest_of(u32 a, u32 b, u32 c, u32 d) {  // amax per 16-bit half
    return larger(larger(a & MAGNITUDES, b & MAGNITUDES), larger(c & MAGNITUDES, d & MAGNITUDES));
}

template <class At>
ON_GPU u32 scale_of(At at) {  // of a block, from the amax of each quarter tile
    u32 largest = read_half(at(0));
#pragma unroll
    for (int quarter = 1; quarter < 4; ++quarter) largest = larger(largest, read_half(at(quarter)));
    return scale_bits(largest);
}

struct Parts {  // partial results of the current tile
    u32 base;
    ON_GPU u32 row(int quarter, int matrix, int row) {
        return base + ROW_PARTS + (quarter * 2 + matrix) * ROW_PART + row * 2;
    }
    ON_GPU u32 column(int quarter, int matrix, int feature) {
        return base + COLUMN_PARTS + (quarter * 3 + matrix) * COLUMN_PART + feature * 2;
    }
    ON_GPU u32 sum(int quarter, int row) { return base + SUM_PARTS + quarter * SUM_PART + row * 4; }
};

extern "C" __global__ void __launch_bounds__(THREADS + 128, 1)
swiglu_backward(const u16* __restrict__ dy, const u16* __restrict__ h, const float* __restrict__ probs,
                const int* __restrict__ rows, const int* __restrict__ experts, u8* __restrict__ dh_rows,
                float* __restrict__ dh_row_scales, u8* __restrict__ dh_columns, float* __restrict__ dh_column_scales,
                u8* __restrict__ a_columns, float* __restrict__ a_column_scales, float* __restrict__ dprobs,
                int num_rows, int width) {
    const u32 base = shared_memory<128>();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int across = width / SIDE, num_tiles = num_rows / SIDE * across;
    auto full = [&](int s) { return base + BARRIERS + s * 16; };
    auto empty = [&](int s) { return base + BARRIERS + s * 16 + 8; };
    auto stage = [&](int s) { return base + INPUTS + s * STAGE; };
    auto is_used = [&](int tile) { return experts[tile / across * SIDE] >= 0; };
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) barrier_init(full(s), 3), barrier_init(empty(s), 1);
        barriers_are_ready();
    }
    meet_cluster<1>();

    int step = 0;
    if (warp >= WARPS) few_registers<FEW>();
    if (warp >= WARPS && warp < WARPS + 3) {
        const int input = warp - WARPS;  // gate, up or dy
        const u16* from = input == 2 ? dy : h + input * width;
        const size_t distance = input == 2 ? width : 2 * width;
        for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
            if (!is_used(tile)) continue;
            const int s = step % STAGES;
            const u16* first = from + ((size_t)(tile / across) * SIDE + lane) * distance + tile % across * SIDE;
            const u32 to = stage(s) + input * INPUT + lane * LINE;
            if (lane == 0) {
                barrier_wait(empty(s), (step / STAGES & 1) ^ 1);
                barrier_expect(full(s), SIDE * SIDE * 2);
            }
            __syncwarp();
#pragma unroll
            for (int r = 0; r < SIDE; r += 32) load(to + r * LINE, first + r * distance, SIDE * 2, full(s));
            ++step;
        }
    } else if (warp == WARPS + 3) {
        for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
            if (!is_used(tile)) continue;
            const int s = step % STAGES;
            const size_t block = tile / across;
            const int feature = tile % across * SIDE;
            named_wait(STAGED + s, THREADS + 32);
            if (lane == 0) {
                store(dh_columns + (block * 2 * width + feature) * SIDE, stage(s), TILE);
                store(dh_columns + (block * 2 * width + width + feature) * SIDE, stage(s) + TILE, TILE);
                store(a_columns + (block * width + feature) * SIDE, stage(s) + 2 * TILE, TILE);
                stores_are_read();
                barrier_arrive(empty(s));
            }
            __syncwarp();
            ++step;
        }
        if (lane == 0) stores_are_done();
    } else if (warp < WARPS) {
        many_registers<MANY>();
        const int down = warp / 4, right = warp % 4, of_rows = lane / 4, of_features = lane % 4;
        const int my_row = down * 32 + of_rows * 4, my_feature = right * 32 + of_features * 8;
        for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
            if (!is_used(tile)) continue;
            const int s = step % STAGES;
            const size_t row = (size_t)(tile / across) * SIDE + my_row;
            const int feature = tile % across * SIDE;
            Parts parts{base + PARTS + (step & 1) * PART};
            const int4 t = *(const int4*)(rows + row);
            const int token[4] = {t.x, t.y, t.z, t.w};
            float p[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) p[i] = WEIGHTED && token[i] >= 0 ? probs[token[i]] : 1.0f;
            barrier_wait(full(s), step / STAGES & 1);

            // BF16 bits, two features per word.
            u32 gate[4][4], up[4][4], act[4][4];
            float sum[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32 at = stage(s) + (my_row + i) * LINE + my_feature * 2;
                const uint4 g4 = read4(at), u4 = read4(at + INPUT), y4 = read4(at + 2 * INPUT);
                u32 gs[4] = {g4.x, g4.y, g4.z, g4.w}, us[4] = {u4.x, u4.y, u4.z, u4.w};
                u32 ys[4] = {y4.x, y4.y, y4.z, y4.w};
                if (token[i] < 0) {  // padding may contain anything
#pragma unroll
                    for (int w = 0; w < 4; ++w) gs[w] = us[w] = ys[w] = 0;
                }
                sum[i] = 0.0f;
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    const u32 g = gs[w], u = us[w], y = ys[w];
                    const float g0 = low(g), g1 = high(g), s0 = sigmoid(g0), s1 = sigmoid(g1);
                    const float silu0 = g0 * s0, silu1 = g1 * s1;
                    float y0 = low(y), y1 = high(y);
                    u32 a = bf16_product(bf16_pair(silu0, silu1), u);
                    if (WEIGHTED) {
                        sum[i] += low(a) * y0;
                        sum[i] += high(a) * y1;
                        a = bf16_pair(low(a) * p[i], high(a) * p[i]);
                        y0 *= p[i], y1 *= p[i];
                    }
                    act[i][w] = a;
                    up[i][w] = bf16_pair(y0 * silu0, y1 * silu1);
                    gate[i][w] = bf16_pair(y0 * low(u) * (s0 * (1.0f + g0 * (1.0f - s0))),
                                           y1 * high(u) * (s1 * (1.0f + g1 * (1.0f - s1))));
                }
            }

            // Amax: rows reduce over four adjacent lanes, features over the eight lanes with equal lane % 4.
            u32 of_row[2][2];  // gate and up: rows 0 and 1, rows 2 and 3
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int two = 0; two < 2; ++two) {
                    u32 largest[2];
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const u32(&x)[4] = m == 0 ? gate[two * 2 + i] : up[two * 2 + i];
                        const u32 y = largest_of(x[0], x[1], x[2], x[3]);
                        largest[i] = larger(y, y >> 16) & 0xFFFF;
                    }
                    u32 y = largest[0] | largest[1] << 16;
                    y = larger(y, of_lane_xor(y, 1));
                    of_row[m][two] = larger(y, of_lane_xor(y, 2));
                }
            if (of_features == 0) {
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    write1(parts.row(right, m, my_row), of_row[m][0]);
                    write1(parts.row(right, m, my_row + 2), of_row[m][1]);
                }
            }
#pragma unroll
            for (int m = 0; m < 3; ++m) {
                u32 y[4];
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    const u32(&x)[4][4] = m == 0 ? gate : m == 1 ? up : act;
                    y[w] = largest_of(x[0][w], x[1][w], x[2][w], x[3][w]);
                    y[w] = larger(y[w], of_lane_xor(y[w], 4));
                    y[w] = larger(y[w], of_lane_xor(y[w], 8));
                    y[w] = larger(y[w], of_lane_xor(y[w], 16));
                }
                if (of_rows == 0) write4(parts.column(down, m, my_feature), y[0], y[1], y[2], y[3]);
            }
            if (WEIGHTED) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    sum[i] += as_float(of_lane_xor(as_bits(sum[i]), 1));
                    sum[i] += as_float(of_lane_xor(as_bits(sum[i]), 2));
                }
                if (of_features == 0)
                    write4(parts.sum(right, my_row), as_bits(sum[0]), as_bits(sum[1]), as_bits(sum[2]), as_bits(sum[3]));
            }
            named_wait(1, THREADS);  // partial results are complete, and the inputs are no longer read

            // Each of the four lanes that share rows computes one row's factor, each of eight one feature's.
            u32 row_factor[2], column_factor[3];
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                const int r = my_row + of_features;
                const u32 scale = scale_of([&](int quarter) { return parts.row(quarter, m, r); });
                row_factor[m] = inverse_of(scale) * 0x10001;  // in both halves
                if (right == 0)
                    dh_row_scales[(size_t)((m * width + feature) / SIDE) * num_rows + row + of_features] =
                        as_float(scale);
            }
            const size_t block = tile / across;
#pragma unroll
            for (int m = 0; m < 3; ++m) {
                const int f = my_feature + of_rows;
                const u32 scale = scale_of([&](int quarter) { return parts.column(quarter, m, f); });
                column_factor[m] = inverse_of(scale);
                if (down == 0) {
                    float* scales = m < 2 ? dh_column_scales + (block * 2 + m) * width : a_column_scales + block * width;
                    scales[feature + f] = as_float(scale);
                }
            }
            if (WEIGHTED && right == 0) {
                const int r = my_row + of_features;
                dprobs[(size_t)(feature / SIDE) * num_rows + row + of_features] =
                    read1(parts.sum(0, r)) + read1(parts.sum(1, r)) + read1(parts.sum(2, r)) + read1(parts.sum(3, r));
            }

#pragma unroll
            for (int m = 0; m < 2; ++m) {
                u8* to = dh_rows + row * 2 * width + m * width + feature + my_feature;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const u32 factor = of_lane(row_factor[m], lane & 28 | i);
                    u32 x[4];
#pragma unroll
                    for (int w = 0; w < 4; ++w) x[w] = bf16_product(m == 0 ? gate[i][w] : up[i][w], factor);
                    uint2 bytes;
                    bytes.x = e4m3_bytes(low(x[0]), high(x[0]), low(x[1]), high(x[1]));
                    bytes.y = e4m3_bytes(low(x[2]), high(x[2]), low(x[3]), high(x[3]));
                    *(uint2*)(to + (size_t)i * 2 * width) = bytes;
                }
            }
#pragma unroll
            for (int m = 0; m < 3; ++m) {
                // The factors of two adjacent features, packed in the lanes of the first one.
                const u32 factors = column_factor[m] | of_lane_xor(column_factor[m], 4) << 16;
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    const u32 factor = of_lane(factors, w * 8 | lane & 3);
                    u32 x[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        x[i] = bf16_product(m == 0 ? gate[i][w] : m == 1 ? up[i][w] : act[i][w], factor);
                    // Four words form a 16-byte chunk of a feature's line, stored at chunk ^ (feature % 8).
                    const u32 line = stage(s) + m * TILE + (my_feature + 2 * w) * SIDE;
                    const u32 even = e4m3_bytes(low(x[0]), low(x[1]), low(x[2]), low(x[3]));
                    const u32 odd = e4m3_bytes(high(x[0]), high(x[1]), high(x[2]), high(x[3]));
                    write1(line + (my_row ^ (w * 32)), even);
                    write1(line + SIDE + (my_row ^ (w * 32 + 16)), odd);
                }
            }
            visible_to_copies();
            named_arrive(STAGED + s, THREADS + 32);
            ++step;
        }
    }
}
