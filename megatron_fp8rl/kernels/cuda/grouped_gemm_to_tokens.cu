// Grouped FP8 GEMM of a rank's tokens with their experts' weights: out[token] = x[row] w[expert]^T, in BF16.
//
//   x       e4m3  [P, K]           tensor map, P = num_rows a multiple of 128; each block of 128 rows has one expert
//   x_scale float [K/128, P]       one per 128 values of a row
//   w       e4m3  [E, N, K]        tensor map, as [E N, K]
//   w_scale float [E, N/128, K/128], whose last two dimensions have strides scale_down and scale_across
//   offsets int   [E + 1]          first row of each expert, then the end of the last
//   experts int   [P]              expert of each row; the first row of a block gives the block's expert
//   rows    int   [P]              token of each row, -1 for none; null: out has all rows
//   probs   float [T]              factor applied to a token's result after rounding; null: none
//   out     bf16  [T, N]
//
// N and K are multiples of 128. Tensor cores sum 128 products; these partial sums are scaled and accumulated in
// float32, block by block along K: a row's bits do not depend on the other rows.
//
// Thread blocks are persistent and process tiles of 128 x WIDTH of out. A cluster of two thread blocks works on two
// vertically adjacent tiles: if both have the same expert, each loads half of the weights and multicasts it to both.
// The schedule goes down HEIGHT pairs of tiles before moving to the next columns, so that concurrent tiles share
// operands.
//
// Two warp groups multiply, each 64 x WIDTH of a tile: while one accumulates products or rounds its sums, the tensor
// cores work for the other. In a third group, one warp loads operands, and one warp per half tile writes rows to global
// memory, each to its token's position, while the next tile is computed.
//
// STAGES (pipeline depth of operand loads) and WIDTH (192) are compiler definitions.

#include "hopper.h"

constexpr int CLUSTER = 2;
constexpr int HEIGHT = 8;
constexpr int SIDE = 128;
static_assert(WIDTH == 192, "a step's scales are those of three times 64 columns");
constexpr int NUMBERS = WIDTH / 2;          // accumulators per thread, for its half of a tile
constexpr u32 X_TILE = SIDE * SIDE;         // bytes
constexpr u32 W_TILE = WIDTH * SIDE;
constexpr u32 STAGE = X_TILE + W_TILE;
constexpr int PIECES = WIDTH / 8;           // of 16 bytes, in a row of results
static_assert(4 * PIECES == 3 * 32, "a warp reads four rows in three rounds");
constexpr u32 LINE = WIDTH * 2 + 16;        // stride of result rows in shared memory, padded against bank conflicts
constexpr u32 BARRIERS = 0;                 // per stage: full and empty
constexpr u32 W_SCALES = 128;               // per stage, one per 64 columns
constexpr u32 FACTORS = 512;                // one per row of a tile
constexpr u32 X_SCALES = 1024;              // per stage
constexpr u32 OPERANDS = X_SCALES + (STAGES * SIDE * 4 + 1023) / 1024 * 1024;
constexpr u32 RESULTS = OPERANDS + STAGES * STAGE;
constexpr int FEW = 64, MANY = 216;  // registers per thread: load and store warps, multiplying warps
static_assert(registers_suffice(384, 128, FEW, MANY));

struct Tiles {  // of a cluster, in schedule order: pairs of row blocks, and columns
    int pairs, columns, index, distance;
    int pair, column;

    ON_GPU bool more() {
        if (index >= pairs * columns) return false;
        const int above = index / (HEIGHT * columns) * HEIGHT, inside = index - above * columns;
        const int here = pairs - above < HEIGHT ? pairs - above : HEIGHT;
        pair = above + inside % here, column = inside / here * WIDTH;
        return true;
    }
    ON_GPU void next() { index += distance; }
};

// Named barriers between a multiplying warp group and the warp that writes its results.
constexpr int READY = 1, FREE = 3, BOTH = 128 + 32;

extern "C" __global__ void IN_CLUSTERS(CLUSTER) __launch_bounds__(384, 1)
multiply_rows(const IN_PLACE TensorMap x, const float* __restrict__ x_scale, const IN_PLACE TensorMap w,
              const float* __restrict__ w_scale, const int* __restrict__ offsets, const int* __restrict__ experts,
              const int* __restrict__ rows, const float* __restrict__ probs, u16* __restrict__ out, int num_experts,
              int num_rows, int n, int k, int scale_down, int scale_across) {
    const u32 base = shared_memory<1024>();
    const int warp = my_warp(), group = warp / 4, lane = threadIdx.x % 32;
    const int rank = blockIdx.x % CLUSTER, depth = k / SIDE, blocks = offsets[num_experts] / SIDE;
    auto full = [&](int s) { return base + BARRIERS + s * 16; };
    auto empty = [&](int s) { return base + BARRIERS + s * 16 + 8; };
    auto w_scales = [&](int s) { return base + W_SCALES + s * 16; };
    auto x_scales = [&](int s) { return base + X_SCALES + s * SIDE * 4; };
    auto operands = [&](int s) { return base + OPERANDS + s * STAGE; };
    auto results_of = [&](int half) { return base + RESULTS + half * 64 * LINE; };
    auto factors_of = [&](int half) { return base + FACTORS + half * 64 * 4; };
    // If the number of row blocks is odd, the second thread block of the last pair recomputes the last block and writes
    // nothing.
    auto block_of = [&](int pair, int rank) { return pair * 2 + rank < blocks ? pair * 2 + rank : blocks - 1; };
    Tiles tiles = {(blocks + 1) / 2, (n + WIDTH - 1) / WIDTH, int(blockIdx.x) / CLUSTER, int(gridDim.x) / CLUSTER};

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full(s), 1);
            barrier_init(empty(s), 8 * CLUSTER);  // warps of the cluster that read this stage
        }
        barriers_are_ready();
    }
    meet_cluster<CLUSTER>();

    if (group == 0) {
        few_registers<FEW>();
        if (warp == 0) {
            // Tile and scale positions are computed one tile ahead, and scales are loaded one step ahead.
            struct Place {
                int row, w_row, first, second;  // first, second: scales of the tile's (at most two) column blocks
                bool is_shared, begins_inside;
            };
            auto place = [&]() {
                const int row = block_of(tiles.pair, rank) * SIDE, expert = experts[row];
                const int block = tiles.column / SIDE, next = block + 1 < n / SIDE ? block + 1 : block;
                const int first = expert * (n / SIDE) * depth;
                const bool is_shared = experts[block_of(tiles.pair, rank ^ 1) * SIDE] == expert;
                return Place{row, expert * n + tiles.column, first + block * scale_down, first + next * scale_down,
                             is_shared, tiles.column % SIDE != 0};
            };
            bool more = lane == 0 && tiles.more();
            Place here = more ? place() : Place{};
            float first = more ? w_scale[here.first] : 0, second = more ? w_scale[here.second] : 0;
            int s = 0, parity = 1;
            while (more) {
                tiles.next();
                more = tiles.more();
                const Place after = more ? place() : here;
                for (int i = 0; i < depth; ++i) {
                    const u32 a = as_bits(first), c = as_bits(second), to = operands(s) + X_TILE;
                    const int next = i + 1 < depth ? (i + 1) * scale_across : 0;
                    first = w_scale[(i + 1 < depth ? here.first : after.first) + next];
                    second = w_scale[(i + 1 < depth ? here.second : after.second) + next];
                    barrier_wait(empty(s), parity);
                    write4(w_scales(s), a, here.begins_inside ? c : a, c, 0);
                    barrier_expect(full(s), STAGE + SIDE * 4);
                    load_tile(operands(s), x, i * SIDE, here.row, full(s));
                    if (here.is_shared) {
                        const int half = rank * (WIDTH / 2);
                        load_tile_for(3, to + half * SIDE, w, i * SIDE, here.w_row + half, full(s));
                    } else {
                        load_tile(to, w, i * SIDE, here.w_row, full(s));
                        load_tile(to + W_TILE / 2, w, i * SIDE, here.w_row + WIDTH / 2, full(s));
                    }
                    load(x_scales(s), x_scale + i * num_rows + here.row, SIDE * 4, full(s));
                    if (++s == STAGES) s = 0, parity ^= 1;
                }
                here = after;
            }
            __syncwarp();
        } else if (warp < 3) {
            const int half = warp - 1;
            struct Place {
                int upper, lower;  // tokens of this thread's rows, -1 for none
                float of_upper, of_lower;
            };
            auto place = [&]() {
                const int block = tiles.pair * 2 + rank, row = block * SIDE + half * 64 + lane;
                Place p = {-1, -1, 1, 1};
                if (block < blocks) p.upper = rows ? rows[row] : row, p.lower = rows ? rows[row + 32] : row + 32;
                if (probs && p.upper >= 0) p.of_upper = probs[p.upper];
                if (probs && p.lower >= 0) p.of_lower = probs[p.lower];
                return p;
            };
            auto release = [&](const Place& p) {
                __syncwarp();
                write1(factors_of(half) + lane * 4, as_bits(p.of_upper));
                write1(factors_of(half) + (lane + 32) * 4, as_bits(p.of_lower));
                __syncwarp();
                named_arrive(FREE + half, BOTH);
            };
            bool more = tiles.more();
            Place here = more ? place() : Place{};
            if (more) release(here);
            while (more) {
                u16* to = out + tiles.column;
                const int width = n - tiles.column;
                const u32 from = results_of(half);
                tiles.next();
                more = tiles.more();
                const Place after = more ? place() : here;  // read while this tile is computed
                named_wait(READY + half, BOTH);
#pragma unroll 1
                for (int first = 0; first < 64; first += 4) {  // four rows
                    uint4 x[3];
                    int token[3];
#pragma unroll
                    for (int i = 0; i < 3; ++i) {
                        const int piece = i * 32 + lane, row = first + piece / PIECES;
                        token[i] = of_lane(first < 32 ? here.upper : here.lower, row % 32);
                        x[i] = read4(from + row * LINE + piece % PIECES * 16);
                    }
#pragma unroll
                    for (int i = 0; i < 3; ++i) {
                        const int column = (i * 32 + lane) % PIECES * 8;
                        if (token[i] >= 0 && column < width) store4(to + (size_t)token[i] * n + column, x[i]);
                    }
                }
                if (more) release(after);
                here = after;
            }
        }
    } else {
        many_registers<MANY>();
        const int half = group - 1;
        const int row = warp % 4 * 16 + lane / 4, column = lane % 4 * 2;  // of this thread's first accumulator
        float d[NUMBERS], sum[NUMBERS];
        int s = 0, parity = 0;
        for (; tiles.more(); tiles.next()) {
#pragma unroll
            for (int i = 0; i < NUMBERS; ++i) sum[i] = 0.0f;
            for (int i = 0; i < depth; ++i) {
                barrier_wait(full(s), parity);
                const uint4 of_columns = read4(w_scales(s));
                const u32 of_row = x_scales(s) + (half * 64 + row) * 4;
                const float r0 = read1(of_row), r1 = read1(of_row + 8 * 4);
                products_begin(d);
#pragma unroll
                for (int p = 0; p < 4; ++p)
                    multiply(d, operands(s) + half * 64 * SIDE + p * 32, operands(s) + X_TILE + p * 32, p);
                products_asked();
                products_end<0>(d);
                if (lane < CLUSTER) barrier_arrive_at(empty(s), lane);
                if (++s == STAGES) s = 0, parity ^= 1;
#pragma unroll
                for (int part = 0; part < 3; ++part) {
                    const float c = as_float(part == 0 ? of_columns.x : part == 1 ? of_columns.y : of_columns.z);
                    const float a = r0 * c, b = r1 * c;
#pragma unroll
                    for (int j = part * 8; j < part * 8 + 8; ++j) {
                        sum[j * 4 + 0] += a * d[j * 4 + 0];
                        sum[j * 4 + 1] += a * d[j * 4 + 1];
                        sum[j * 4 + 2] += b * d[j * 4 + 2];
                        sum[j * 4 + 3] += b * d[j * 4 + 3];
                    }
                }
            }
            const u32 at = results_of(half) + row * LINE + column * 2;
            named_wait(FREE + half, BOTH);
            const float p0 = read1(factors_of(half) + row * 4), p1 = read1(factors_of(half) + (row + 8) * 4);
#pragma unroll
            for (int j = 0; j < NUMBERS / 4; ++j) {
                const u32 upper = bf16_pair(sum[j * 4], sum[j * 4 + 1]);
                const u32 lower = bf16_pair(sum[j * 4 + 2], sum[j * 4 + 3]);
                write1(at + j * 16, probs ? weighted(upper, p0) : upper);
                write1(at + 8 * LINE + j * 16, probs ? weighted(lower, p1) : lower);
            }
            named_arrive(READY + half, BOTH);
        }
    }
    meet_cluster<CLUSTER>();  // no block may exit while its peer still writes to its shared memory
}
