// Weight gradients of all experts of a rank in FP8: out[e] += g[e]^T x[e], in float32.
//
//   g       e4m3  [P/128, N, 128]   blocks of 128 rows: of every feature a line of its 128 numbers, whose eight pieces
//   x       e4m3  [P/128, K, 128]   of 16 bytes lie at piece ^ (feature % 8), as the tensor cores want them
//   g_scale float [P/128, N]        of each line
//   x_scale float [P/128, K]
//   offsets int   [E + 1]           first row of each expert, multiples of 128, and the end of the last
//   out     float [E, N, K]
//
// N is a multiple of 128 DOWN, K of 128 ACROSS. Sums of 128 products of the tensor cores are scaled and added up in
// float32, block after block, and the total is added to what is in memory: no order depends on time.
//
// Blocks of threads stay, and take tile after tile of 128 x 128 of out, down GROUP rows before the next column, so that
// those at work at one time need few operands. DOWN x ACROSS of them, a cluster, work on neighbouring tiles: what those
// of a row need of g, and those of a column of x, is read once from the cache for all. Two warp groups multiply, each
// 64 x 128 of a tile; of a third, one warp loads, and one for each half of a tile adds finished sums to memory while the
// next are made. Loads wait for the cache, not for memory: AHEAD steps before, each of the blocks that share a tile asks
// for one of its PARTS; and what sums are added to is in the cache when they are.

#ifndef DOWN
#define DOWN 1
#endif
#ifndef ACROSS
#define ACROSS 1
#endif
#ifndef STAGES
#define STAGES 4
#endif

#ifndef GROUP
#define GROUP 8
#endif
#ifndef AHEAD
#define AHEAD 8
#endif
#ifndef PARTS
#define PARTS 4
#endif
#ifndef EARLY
#define EARLY 0
#endif
#ifndef PREFETCH_OUT
#define PREFETCH_OUT 1
#endif

#include "hopper.h"

constexpr int CLUSTER = DOWN * ACROSS;
constexpr int SIDE = 128;
constexpr u32 TILE = SIDE * SIDE;       // bytes of an operand's
constexpr u32 STAGE = 2 * TILE;         // g's tile and x's
constexpr u32 LINE = SIDE * 4 + 32;     // between rows of sums, so that no two rows of a store meet in a bank
constexpr u32 BARRIERS = 0;             // of each stage, full and empty
constexpr u32 SCALES = 1024;            // of each stage, g's and x's
constexpr u32 OPERANDS = SCALES + (STAGES * 1024 + 1023) / 1024 * 1024;
constexpr u32 SUMS = OPERANDS + STAGES * STAGE;

constexpr int FEW = 56, MANY = 224;  // registers of threads that load and store, and of those that multiply
static_assert(registers_suffice(384, 128, FEW, MANY));

struct Tiles {  // of a cluster, in turn
    int expert, row, column;  // of the group of tiles
    int first, count;         // blocks of 128 rows of the expert
    int index, step;

    ON_GPU bool find(int experts, int rows, int columns, const int* offsets) {
        const int per_expert = rows * columns;
        while (index < experts * per_expert) {
            expert = index / per_expert;
            first = offsets[expert] / SIDE, count = offsets[expert + 1] / SIDE - first;
            if (count) {
                const int place = index % per_expert, above = place / (GROUP * columns) * GROUP;
                const int height = rows - above < GROUP ? rows - above : GROUP, inside = place - above * columns;
                row = above + inside % height, column = inside / height;
                return true;
            }
            const int left = (expert + 1) * per_expert - index;  // of an expert without a row
            index += (left + step - 1) / step * step;
        }
        return false;
    }
};

struct Steps {  // of a cluster's tiles, a block of 128 rows each
    Tiles tiles;
    int i;
    bool more;

    ON_GPU void go_on(int experts, int rows, int columns, const int* offsets) {
        if (++i == tiles.count) tiles.index += tiles.step, i = 0, more = tiles.find(experts, rows, columns, offsets);
    }
};

// Barriers of a warp group that multiplies and the warp that adds its sums to memory.
constexpr int READY = 1, FREE = 3, BOTH = 128 + 32;

extern "C" __global__ void
#if DOWN * ACROSS > 1
IN_CLUSTERS(CLUSTER)
#endif
__launch_bounds__(384, 1)
add_weight_gradients(const u8* __restrict__ g, const float* __restrict__ g_scale, const u8* __restrict__ x,
                     const float* __restrict__ x_scale, const int* __restrict__ offsets, float* __restrict__ out,
                     int experts, int n, int k) {
    const u32 base = shared_memory<1024>();
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int rows = n / SIDE / DOWN, columns = k / SIDE / ACROSS;  // of groups of tiles
    const int rank = blockIdx.x % CLUSTER, down = rank / ACROSS, across = rank % ACROSS;
    auto full = [&](int s) { return base + BARRIERS + s * 16; };
    auto empty = [&](int s) { return base + BARRIERS + s * 16 + 8; };
    auto scales = [&](int s) { return base + SCALES + s * 1024; };
    auto operands = [&](int s) { return base + OPERANDS + s * STAGE; };
    auto sums_of = [&](int half) { return base + SUMS + half * 64 * LINE; };
    Tiles tiles;
    tiles.index = blockIdx.x / CLUSTER, tiles.step = gridDim.x / CLUSTER;
    auto sums_at = [&](int half) {
        const size_t row = (size_t)tiles.expert * n + (tiles.row * DOWN + down) * SIDE + half * 64;
        return out + row * k + (tiles.column * ACROSS + across) * SIDE;
    };

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full(s), 1);
            barrier_init(empty(s), 8 * (DOWN + ACROSS - 1));  // warps that read what is loaded here
        }
        barriers_are_ready();
    }
    meet_cluster<CLUSTER>();

    if (group == 0) {
        few_registers<FEW>();
        if (warp == 0) {
            if (lane == 0) {
                Steps now = {tiles, 0};
                now.more = now.tiles.find(experts, rows, columns, offsets);
                Steps later = now;
                auto ask = [&]() {
                    const int row = later.tiles.row * DOWN + down, column = later.tiles.column * ACROSS + across;
                    const size_t g_line = (size_t)(later.tiles.first + later.i) * n + row * SIDE;
                    const size_t x_line = (size_t)(later.tiles.first + later.i) * k + column * SIDE;
                    const u32 g_part = column % PARTS, x_part = row % PARTS;
                    prefetch(g + g_line * SIDE + g_part * (TILE / PARTS), TILE / PARTS);
                    prefetch(x + x_line * SIDE + x_part * (TILE / PARTS), TILE / PARTS);
                    if (g_part == 0) prefetch(g_scale + g_line, SIDE * 4);
                    if (x_part == 0) prefetch(x_scale + x_line, SIDE * 4);
                    later.go_on(experts, rows, columns, offsets);
                };
                for (int i = 0; i < AHEAD && later.more; ++i) ask();
                for (int step = 0; now.more; now.go_on(experts, rows, columns, offsets), ++step) {
                    if (AHEAD && later.more) ask();
                    const int row = now.tiles.row * DOWN + down, column = now.tiles.column * ACROSS + across;
                    const int s = step % STAGES;
                    const size_t g_line = (size_t)(now.tiles.first + now.i) * n + row * SIDE;
                    const size_t x_line = (size_t)(now.tiles.first + now.i) * k + column * SIDE;
                    barrier_wait(empty(s), (step / STAGES & 1) ^ 1);
                    barrier_expect(full(s), STAGE + 2 * SIDE * 4);
                    const u32 g_part = across * (TILE / ACROSS), x_part = down * (TILE / DOWN);
                    if (ACROSS > 1)
                        load_for(((1 << ACROSS) - 1) << (down * ACROSS), operands(s) + g_part,
                                 g + g_line * SIDE + g_part, TILE / ACROSS, full(s));
                    else
                        load(operands(s), g + g_line * SIDE, TILE, full(s));
                    if (DOWN > 1)
                        load_for((1 | 1 << ACROSS) << across, operands(s) + TILE + x_part,
                                 x + x_line * SIDE + x_part, TILE / DOWN, full(s));
                    else
                        load(operands(s) + TILE, x + x_line * SIDE, TILE, full(s));
                    load(scales(s), g_scale + g_line, SIDE * 4, full(s));
                    load(scales(s) + SIDE * 4, x_scale + x_line, SIDE * 4, full(s));
                }
            }
            __syncwarp();
        } else if (warp < 3) {
            const int half = warp - 1;
            named_arrive(FREE + half, BOTH);
            for (; tiles.find(experts, rows, columns, offsets); tiles.index += tiles.step) {
                float* to = sums_at(half) + (size_t)lane * k;
                const u32 from = sums_of(half) + lane * LINE;
                if (PREFETCH_OUT) prefetch(to, SIDE * 4), prefetch(to + (size_t)32 * k, SIDE * 4);
                named_wait(READY + half, BOTH);
                reduce(to, from, SIDE * 4);
                reduce(to + (size_t)32 * k, from + 32 * LINE, SIDE * 4);
                stores_are_read();
                __syncwarp();
                named_arrive(FREE + half, BOTH);
            }
            stores_are_done();
        }
    } else {
        many_registers<MANY>();
        const int half = group - 1;
        const int row = warp % 4 * 16 + lane / 4, column = lane % 4 * 2;  // of the first number of this thread
        for (int step = 0; tiles.find(experts, rows, columns, offsets); tiles.index += tiles.step) {
            float d[64], sum[64];
#pragma unroll
            for (int i = 0; i < 64; ++i) sum[i] = 0.0f;
            for (int i = 0; i < tiles.count; ++i, ++step) {
                const int s = step % STAGES;
                barrier_wait(full(s), step / STAGES & 1);
                const u32 of_row = scales(s) + (half * 64 + row) * 4;
                float r0, r1;
                float2 c[16];
                auto read_scales = [&]() {
                    r0 = read1(of_row), r1 = read1(of_row + 8 * 4);
#pragma unroll
                    for (int j = 0; j < 16; ++j) c[j] = read2(scales(s) + (SIDE + j * 8 + column) * 4);
                };
                if (EARLY) read_scales();
                products_begin(d);
#pragma unroll
                for (int p = 0; p < 4; ++p)
                    multiply(d, operands(s) + half * 64 * SIDE + p * 32, operands(s) + TILE + p * 32, p);
                products_asked();
                if (!EARLY) read_scales();
                products_end(d);
                // To the blocks that load for this one: those of its row, and the others of its column.
                if (CLUSTER == 1) {
                    if (lane == 0) barrier_arrive(empty(s));
                } else if (lane < ACROSS) {
                    barrier_arrive_at(empty(s), down * ACROSS + lane);
                } else if (lane < ACROSS + DOWN && lane - ACROSS != down) {
                    barrier_arrive_at(empty(s), (lane - ACROSS) * ACROSS + across);
                }
#pragma unroll
                for (int j = 0; j < 16; ++j) {
                    sum[j * 4 + 0] += r0 * c[j].x * d[j * 4 + 0];
                    sum[j * 4 + 1] += r0 * c[j].y * d[j * 4 + 1];
                    sum[j * 4 + 2] += r1 * c[j].x * d[j * 4 + 2];
                    sum[j * 4 + 3] += r1 * c[j].y * d[j * 4 + 3];
                }
            }
            const u32 at = sums_of(half) + row * LINE + column * 4;
            named_wait(FREE + half, BOTH);
#pragma unroll
            for (int j = 0; j < 16; ++j) {
                write2(at + j * 32, sum[j * 4], sum[j * 4 + 1]);
                write2(at + 8 * LINE + j * 32, sum[j * 4 + 2], sum[j * 4 + 3]);
            }
            visible_to_copies();
            named_arrive(READY + half, BOTH);
        }
        named_wait(FREE + half, BOTH);  // until the last sums have been read
    }
    if (CLUSTER > 1) meet_cluster<CLUSTER>();  // nobody leaves while another still writes to it
}
