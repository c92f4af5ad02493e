// Grouped FP8 weight gradients of all experts of a rank: out[e] += g[e]^T x[e], in float32.
//
//   g       e4m3  [P/128, N, 128]   blocks of 128 rows: each feature is a line of its 128 values, whose eight 16-byte
//   x       e4m3  [P/128, K, 128]   chunks are swizzled to chunk ^ (feature % 8) for the tensor cores
//   g_scale float [P/128, N]        one per line
//   x_scale float [P/128, K]
//   offsets int   [E + 1]           first row of each expert, multiples of 128, then the end of the last
//   out     float [E, N, K]
//
// N is a multiple of 128 DOWN, K of 128 ACROSS. Tensor cores sum 128 products; these partial sums are scaled and
// accumulated in float32, block by block, and the total is added to out: the order of sums does not depend on timing.
//
// Thread blocks are persistent and process tiles of 128 x 128 of out. A cluster of DOWN x ACROSS thread blocks works on
// adjacent tiles: multicast reads g once from L2 for the blocks in a row of the cluster, and x once for those in a
// column. In an expert of LONG rows or more, the schedule goes down 16 rows of tiles before moving to the next column, so
// that concurrent tiles share operands.
//
// Two warp groups multiply, each 64 x 128 of a tile; while the tensor cores multiply a block of 128 rows, the products
// of the previous block are scaled and accumulated. In a third group, one warp loads operands, and one warp per half
// tile adds finished sums to global memory while the next tile is computed; it prefetches the destination when the
// tile starts.
//
// DOWN, ACROSS, STAGES (pipeline depth of operand loads) and LONG are compiler definitions.

#include "hopper.h"

constexpr int CLUSTER = DOWN * ACROSS;
constexpr int SIDE = 128;
constexpr int SLOTS = STAGES + 1;           // scale buffers, which are read after the operands
constexpr u32 TILE = SIDE * SIDE;           // bytes per operand
constexpr u32 STAGE = 2 * TILE;             // tiles of g and x
constexpr u32 LINE = SIDE * 4 + 32;         // stride of sum rows in shared memory, padded against bank conflicts
constexpr u32 BARRIERS = 0;                 // per stage: full and empty
constexpr u32 NOTES = 512;                  // per slot: what follows this step
constexpr u32 SCALES = 1024;                // per slot: of g and of x
constexpr u32 OPERANDS = SCALES + SLOTS * 1024;
constexpr u32 SUMS = OPERANDS + STAGES * STAGE;
constexpr int FEW = 40, MANY = 232;  // registers per thread: load and store warps, multiplying warps
static_assert(registers_suffice(384, 128, FEW, MANY));

enum : u32 { SAME_TILE, NEXT_TILE, NOTHING };  // what follows a step

struct Steps {  // of a cluster: its tiles in schedule order, and for each the blocks of 128 rows of its expert
    const int* offsets;
    int experts, rows, columns;  // rows, columns: in tiles of a cluster
    int index, distance;
    int expert, row, column, first, count, i;
    bool more;

    ON_GPU void find() {
        const int per_expert = rows * columns;
        i = 0;
        while (index < experts * per_expert) {
            expert = index / per_expert;
            first = offsets[expert] / SIDE, count = offsets[expert + 1] / SIDE - first;
            if (count) {
                const int height = count >= LONG / SIDE ? 16 : 1;
                const int place = index % per_expert, above = place / (height * columns) * height;
                const int here = rows - above < height ? rows - above : height, inside = place - above * columns;
                row = above + inside % here, column = inside / here, more = true;
                return;
            }
            const int left = (expert + 1) * per_expert - index;  // tiles left of an expert without rows
            index += (left + distance - 1) / distance * distance;
        }
        more = false;
    }
    ON_GPU void next_tile() { index += distance, find(); }
    ON_GPU void next() {
        if (++i == count) next_tile();
    }
};

// Named barriers between a multiplying warp group and the warp that adds its sums to global memory.
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
    const int warp = my_warp(), group = warp / 4, lane = threadIdx.x % 32;
    const int rank = blockIdx.x % CLUSTER, down = rank / ACROSS, across = rank % ACROSS;
    auto full = [&](int s) { return base + BARRIERS + s * 16; };
    auto empty = [&](int s) { return base + BARRIERS + s * 16 + 8; };
    auto note = [&](int slot) { return base + NOTES + slot * 4; };
    auto scales = [&](int slot) { return base + SCALES + slot * 1024; };
    auto operands = [&](int s) { return base + OPERANDS + s * STAGE; };
    auto sums_of = [&](int half) { return base + SUMS + half * 64 * LINE; };
    Steps steps = {offsets, experts, n / SIDE / DOWN, k / SIDE / ACROSS};
    steps.index = blockIdx.x / CLUSTER, steps.distance = gridDim.x / CLUSTER;
    steps.find();

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full(s), 1);
            barrier_init(empty(s), 8 * (DOWN + ACROSS - 1));  // warps of the cluster that read this stage
        }
        barriers_are_ready();
    }
    meet_cluster<CLUSTER>();

    if (group == 0) {
        few_registers<FEW>();
        if (warp == 0) {
            for (int step = 0; lane == 0 && steps.more; ++step) {
                const int s = step % STAGES, slot = step % SLOTS;
                const int row = (steps.row * DOWN + down) * SIDE, column = (steps.column * ACROSS + across) * SIDE;
                const size_t g_line = (size_t)(steps.first + steps.i) * n + row;
                const size_t x_line = (size_t)(steps.first + steps.i) * k + column;
                const u32 g_part = across * (TILE / ACROSS), x_part = down * (TILE / DOWN);
                steps.next();
                barrier_wait(empty(s), (step / STAGES & 1) ^ 1);
                write1(note(slot), !steps.more ? NOTHING : steps.i ? SAME_TILE : NEXT_TILE);
                barrier_expect(full(s), STAGE + 2 * SIDE * 4);
                if (ACROSS > 1)
                    load_for(((1 << ACROSS) - 1) << (down * ACROSS), operands(s) + g_part, g + g_line * SIDE + g_part,
                             TILE / ACROSS, full(s));
                else
                    load(operands(s), g + g_line * SIDE, TILE, full(s));
                if (DOWN > 1)
                    load_for((1 | 1 << ACROSS) << across, operands(s) + TILE + x_part, x + x_line * SIDE + x_part,
                             TILE / DOWN, full(s));
                else
                    load(operands(s) + TILE, x + x_line * SIDE, TILE, full(s));
                load(scales(slot), g_scale + g_line, SIDE * 4, full(s));
                load(scales(slot) + SIDE * 4, x_scale + x_line, SIDE * 4, full(s));
            }
            __syncwarp();
        } else if (warp < 3) {
            const int half = warp - 1;
            named_arrive(FREE + half, BOTH);
            for (; steps.more; steps.next_tile()) {
                const size_t row = (size_t)steps.expert * n + (steps.row * DOWN + down) * SIDE + half * 64;
                float* to = out + row * k + (steps.column * ACROSS + across) * SIDE;
#pragma unroll 1
                for (int i = lane; i < 64 * 4; i += 32) prefetch(to + (size_t)(i / 4) * k + i % 4 * 32);
                named_wait(READY + half, BOTH);
                to += lane * 4;
#pragma unroll 1
                for (int first = 0; first < 64; first += 4) {
                    uint4 x[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) x[i] = read4(sums_of(half) + (first + i) * LINE + lane * 16);
#pragma unroll
                    for (int i = 0; i < 4; ++i) add4(to + (size_t)(first + i) * k, x[i]);
                }
                __syncwarp();
                named_arrive(FREE + half, BOTH);
            }
        }
    } else {
        many_registers<MANY>();
        const int half = group - 1;
        const int row = warp % 4 * 16 + lane / 4, column = lane % 4 * 2;  // of this thread's first accumulator
        float even[64], odd[64], sum[64];
#pragma unroll
        for (int i = 0; i < 64; ++i) sum[i] = 0.0f;
        int step = 0;
        auto begin = [&](float(&d)[64], int step) {
            const int s = step % STAGES;
            barrier_wait(full(s), step / STAGES & 1);
            products_begin(d);
#pragma unroll
            for (int p = 0; p < 4; ++p)
                multiply(d, operands(s) + half * 64 * SIDE + p * 32, operands(s) + TILE + p * 32, p);
            products_asked();
        };
        // Adds the finished products of this step to the tile's sums; after the last step, hands the sums to be stored.
        auto add = [&](float(&d)[64], u32 after) {
            const int s = step % STAGES, slot = step % SLOTS;
            // Release the stage to the blocks that load for this one: those of its row, and the others of its column.
            if (CLUSTER == 1) {
                if (lane == 0) barrier_arrive(empty(s));
            } else if (lane < ACROSS) {
                barrier_arrive_at(empty(s), down * ACROSS + lane);
            } else if (lane < ACROSS + DOWN && lane - ACROSS != down) {
                barrier_arrive_at(empty(s), (lane - ACROSS) * ACROSS + across);
            }
            const u32 of_row = scales(slot) + (half * 64 + row) * 4, of_column = scales(slot) + (SIDE + column) * 4;
            const float r0 = read1(of_row), r1 = read1(of_row + 8 * 4);
#pragma unroll
            for (int j = 0; j < 16; ++j) {
                const float2 c = read2(of_column + j * 32);
                sum[j * 4 + 0] += r0 * c.x * d[j * 4 + 0];
                sum[j * 4 + 1] += r0 * c.y * d[j * 4 + 1];
                sum[j * 4 + 2] += r1 * c.x * d[j * 4 + 2];
                sum[j * 4 + 3] += r1 * c.y * d[j * 4 + 3];
            }
            if (after != SAME_TILE) {
                const u32 at = sums_of(half) + row * LINE + column * 4;
                named_wait(FREE + half, BOTH);
#pragma unroll
                for (int j = 0; j < 16; ++j) {
                    write2(at + j * 32, sum[j * 4], sum[j * 4 + 1]);
                    write2(at + 8 * LINE + j * 32, sum[j * 4 + 2], sum[j * 4 + 3]);
                }
                named_arrive(READY + half, BOTH);
#pragma unroll
                for (int i = 0; i < 64; ++i) sum[i] = 0.0f;
            }
            ++step;
        };
        auto comes = [&]() { return as_bits(read1(note(step % SLOTS))); };
        // Computes the products of the next step while accumulating those of this one.
        auto go_on = [&](float(&d)[64], float(&next)[64], u32 after) {
            begin(next, step + 1);
            products_end<1>(d);
            add(d, after);
        };
        auto finish = [&](float(&d)[64]) {
            products_end<0>(d);
            add(d, NOTHING);
        };
        // Unrolled for both sets of accumulators: where control flow with and without WGMMAs in flight merges, the
        // compiler waits for all of them.
        if (steps.more) {
            begin(even, 0);
            while (true) {
                const u32 after_even = comes();
                if (after_even == NOTHING) {
                    finish(even);
                    break;
                }
                go_on(even, odd, after_even);
                const u32 after_odd = comes();
                if (after_odd == NOTHING) {
                    finish(odd);
                    break;
                }
                go_on(odd, even, after_odd);
            }
        }
        named_wait(FREE + half, BOTH);  // wait until the last sums have been read
    }
    if (CLUSTER > 1) meet_cluster<CLUSTER>();  // no block may exit while a peer still writes to its shared memory
}
