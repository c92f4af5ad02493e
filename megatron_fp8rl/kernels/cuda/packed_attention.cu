// Causal attention over packed sequences: the function of triton/attention.py, bit for bit.
//
//   keys, values  fp16 [K, G, DIM]   tensor maps, as bytes [K, 2 G DIM]; even features of a key before odd ones
//   query         bf16 [T, Q, DIM]   whose tokens are query_stride apart
//   cu_queries    int  [S + 1]       first query of each sequence, then T
//   key_starts    int  [S]           first key of each sequence
//   num_keys      int  [S]           the last query of a sequence sees all its keys, or the last WINDOW of them
//   out           bf16 [T, Q, DIM]
//   log_sums      float [Q, T]       natural log-sum-exp of each query
//
// Tensor cores multiply FP16 with sums in float32: queries by a tile of 128 keys, 16 features at a time, then weights
// by values, 16 keys at a time. A part is TILES tiles; parts are added from left to right, in shared memory.
//
// Thread blocks are persistent. An item is 128 queries of a head; items with many keys come first. Two warp groups work
// on 64 queries each. With 256 features an item is 64 queries, whose tiles fill shared memory: both groups compute all
// scores, and each half of the features of the sums. Their products alternate: while one computes weights, the tensor
// cores work for the other. A warp group asks for the scores of the next tile together with the weighted values of this
// one. A third group loads.
//
// With a WINDOW an item begins at the first tile that one of its queries sees. Maxima then start at a finite number, so
// that a query which sees no key of a tile keeps its sums.
//
// DIM (64, 128 or 256), TILES and WINDOW (0: all keys) are compiler definitions.

#include "hopper.h"

constexpr bool WIDE = DIM == 256;
constexpr int HEIGHT = WIDE ? 64 : 128, KEYS = 128, STAGES = WIDE ? 1 : 2;
constexpr int SHARERS = WIDE ? 256 : 128;  // threads that share queries
constexpr int PARTS = SHARERS / 64;        // threads that convert a query
constexpr int LINES = DIM / 64;        // of 128 bytes, in the features of a head
constexpr u32 TILE = KEYS * 128;       // bytes of 64 features of a tile
constexpr int NUMBERS = WIDE ? 64 : DIM / 2;  // sums of a thread
constexpr u32 BARRIERS = 0;            // per stage and operand: full and empty
constexpr u32 QUERIES = 1024;
constexpr u32 QUERY_LINES = HEIGHT * 128;  // bytes of 64 features of all queries
constexpr u32 KEY_TILES = QUERIES + LINES * QUERY_LINES;
constexpr u32 VALUE_TILES = KEY_TILES + STAGES * LINES * TILE;
constexpr u32 SUMS = VALUE_TILES + STAGES * LINES * TILE;
constexpr int FEW = 24, MANY = 240;    // registers per thread: the loading group, multiplying groups
static_assert(registers_suffice(384, 128, FEW, MANY));
constexpr int TURN = 1, OWN = 3;       // named barriers: whose products are next, and of a warp group
constexpr float LOG2_E = 1.4426950408889634f;

struct Items {  // of a thread block: tiles of queries from the last of the longest sequence to the first, and heads
    const int *cu_queries, *key_starts, *lengths;
    int sequences, heads, tiles, index, distance;
    int head, first, queries, begin, key, length, end;  // begin: first query; end: of the keys that some query sees

    ON_GPU bool more() {
        for (; index < tiles * sequences * heads; index += distance) {
            head = index % heads;
            const int sequence = index / heads % sequences;
            first = cu_queries[sequence], queries = cu_queries[sequence + 1] - first;
            begin = (tiles - 1 - index / heads / sequences) * HEIGHT;
            if (begin >= queries) continue;
            key = key_starts[sequence], length = lengths[sequence];
            const int last = length - queries + begin + HEIGHT;
            end = last < length ? last : length;
            return true;
        }
        return false;
    }
    ON_GPU void next() { index += distance; }
    ON_GPU int count() const { return (end + KEYS - 1) / KEYS; }
    ON_GPU int start() const {  // the first tile
        const int first_key = length - queries + begin + 1 - WINDOW;
        return WINDOW && first_key > 0 ? first_key / KEYS : 0;
    }
};

struct Row {  // the running maximum and sum of a query
    float largest, total;
};

ON_GPU float minus_infinity() { return as_float(0xFF800000); }
ON_GPU float lowest() { return WINDOW ? -1e30f : minus_infinity(); }  // the first maximum

// Turns scores of a row in a thread's two columns of every eight into weights. Returns the factor of earlier sums.
ON_GPU float weigh(float (&s)[64], int upper, float factor, Row& row) {
    float top = minus_infinity();
#pragma unroll
    for (int j = 0; j < 16; ++j) top = maximum(top, maximum(s[j * 4 + upper], s[j * 4 + upper + 1]));
    top = maximum(top, as_float(of_lane_xor(as_bits(top), 1)));
    top = maximum(top, as_float(of_lane_xor(as_bits(top), 2)));
    const float largest = maximum(row.largest, product(top, factor));
    const float shrink = power_of_two(sum(row.largest, -largest));
    u32 units = 0;
#pragma unroll
    for (int j = 0; j < 32; ++j) {
        float& x = s[j / 2 * 4 + upper + j % 2];
        x = power_of_two(fused(x, factor, -largest));
        units += as_bits(sum(x, 1.0f)) - 0x3F800000;
    }
    units += of_lane_xor(units, 1);
    units += of_lane_xor(units, 2);
    row.total = fused(row.total, shrink, product((float)(int)units, as_float(0x34000000)));  // times 2^-23
    row.largest = largest;
    return shrink;
}

// Adds a part with the row ``part`` to ``whole``; (a, b): factors of the sums so far, and of the part's.
ON_GPU void fold(Row& whole, const Row& part, float& a, float& b) {
    const float largest = maximum(whole.largest, part.largest);
    a = power_of_two(sum(whole.largest, -largest)), b = power_of_two(sum(part.largest, -largest));
    whole = {largest, fused(part.total, b, product(whole.total, a))};
}

extern "C" __global__ void IN_CLUSTERS(1) __launch_bounds__(384, 1)
packed_attention(const IN_PLACE TensorMap keys, const IN_PLACE TensorMap values, const u16* __restrict__ query,
                 const int* __restrict__ cu_queries, const int* __restrict__ key_starts, const int* __restrict__ lengths,
                 const float* __restrict__ key_scale, const float* __restrict__ value_scale, u16* __restrict__ out,
                 float* __restrict__ log_sums, int to_log2_bits, int query_stride, int num_tokens, int num_sequences,
                 int num_heads, int num_groups, int num_tiles) {
    const u32 base = shared_memory<1024>();
    const int warp = my_warp(), group = warp / 4, lane = threadIdx.x % 32;
    auto full = [&](int operand, int s) { return base + BARRIERS + (operand * STAGES + s) * 16; };
    auto empty = [&](int operand, int s) { return full(operand, s) + 8; };
    auto key_tile = [&](int s) { return base + KEY_TILES + s * LINES * TILE; };
    auto value_tile = [&](int s) { return base + VALUE_TILES + s * LINES * TILE; };
    Items items = {cu_queries, key_starts, lengths, num_sequences, num_heads, num_tiles, int(blockIdx.x), int(gridDim.x)};
    if (threadIdx.x == 0) {
        for (int operand = 0; operand < 2; ++operand)
            for (int s = 0; s < STAGES; ++s) {
                barrier_init(full(operand, s), 1);
                barrier_init(empty(operand, s), 8);  // warps that read this stage
            }
        barriers_are_ready();
    }
    meet_cluster<1>();

    if (group == 0) {
        few_registers<FEW>();
        if (threadIdx.x == 0) {
            int s = 0, parity = 1;
            for (; items.more(); items.next()) {
                const int column = items.head / (num_heads / num_groups) * DIM * 2;
                for (int j = items.start(); j < items.count(); ++j) {
                    const int row = items.key + j * KEYS;
                    for (int operand = 0; operand < 2; ++operand) {
                        const u32 to = operand ? value_tile(s) : key_tile(s);
                        barrier_wait(empty(operand, s), parity);
                        barrier_expect(full(operand, s), LINES * TILE);
                        for (int line = 0; line < LINES; ++line)
                            load_tile(to + line * TILE, operand ? values : keys, column + line * 128, row,
                                      full(operand, s));
                    }
                    if (++s == STAGES) s = 0, parity ^= 1;
                }
            }
        }
    } else {
        many_registers<MANY>();
        const int half = group - 1, thread = threadIdx.x % 128;
        const int row = warp % 4 * 16 + lane / 4, column = lane % 4 * 2;  // of this thread's first sum
        const int top = WIDE ? 0 : half * 64;  // first query of this group
        const int own = WIDE ? OWN : OWN + half;
        const u32 my_queries = base + QUERIES + top * 128, my_sums = base + SUMS + half * 512 * NUMBERS;
        const float factor = key_scale[0], to_log2 = as_float(to_log2_bits);
        if (half == 1) named_arrive(TURN, 256);
        float s[64], sums[NUMBERS];
        u32 weights[32];
        int stage = 0, parity = 0;  // of the next keys
        for (; items.more(); items.next()) {
            named_wait(own, SHARERS);  // all warps have read the last item's queries
            {
                // A thread converts part of the features of a query: pairs of bf16 to an even and an odd fp16 number.
                const int sharer = WIDE ? threadIdx.x - 128 : thread, at = sharer / PARTS, part = sharer % PARTS;
                int token = items.begin + top + at;
                token = items.first + (token < items.queries ? token : items.queries - 1);
                const uint4* from = (const uint4*)(query + (size_t)token * query_stride + items.head * DIM) + part * DIM / (8 * PARTS);
#pragma unroll
                for (int i = 0; i < DIM / (16 * PARTS); ++i) {
                    u32 even[4], odd[4];  // of 16 features
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const uint4 x = from[i * 2 + j];
                        auto low = [&](u32 pair) { return product(as_float(pair << 16), to_log2); };
                        auto high = [&](u32 pair) { return product(as_float(pair & 0xFFFF0000), to_log2); };
                        even[j * 2] = fp16_pair(low(x.x), low(x.y)), even[j * 2 + 1] = fp16_pair(low(x.z), low(x.w));
                        odd[j * 2] = fp16_pair(high(x.x), high(x.y)), odd[j * 2 + 1] = fp16_pair(high(x.z), high(x.w));
                    }
                    auto place = [&](int piece) {  // of 16 bytes, in the line of 128 bytes of a query
                        const u32 line = my_queries + piece / 8 * QUERY_LINES + at * 128;
                        return line + ((piece % 8 ^ at % 8) * 16);
                    };
                    const int piece = part * DIM / (16 * PARTS) + i;  // the odd features begin DIM / 16 pieces later
                    write4(place(piece), even[0], even[1], even[2], even[3]);
                    write4(place(piece + DIM / 16), odd[0], odd[1], odd[2], odd[3]);
                }
            }
            visible_to_copies();
            named_wait(own, SHARERS);

            const int position = items.length - items.queries + items.begin + top + row;  // of the upper row
            const int unmasked = items.length - items.queries + items.begin + top + 1, tiles = items.count();
            const int start = items.start();
            Row upper = {lowest(), 0}, lower = upper, upper_whole = upper, lower_whole = upper;
            auto ask_scores = [&](int at) {
                products_begin(s);
#pragma unroll
                for (int i = 0; i < DIM / 16; ++i) {
                    const u32 of_query = i / 4 * QUERY_LINES + i % 4 * 32, of_key = i / 4 * TILE + i % 4 * 32;
                    multiply_fp16(s, my_queries + of_query, key_tile(at) + of_key, i);
                }
                products_asked();
            };
            auto ask_values = [&](int at, int adds) {
                const u32 my_values = value_tile(at) + (WIDE ? half * 2 * TILE : 0);
                products_begin(sums);
#pragma unroll
                for (int i = 0; i < KEYS / 16; ++i)
                    multiply_fp16(sums, weights + i * 4, my_values + i * 16 * 128, TILE, adds | i);
                products_asked();
            };
            auto release = [&](int operand, int at) {
                if (lane == 0) barrier_arrive(empty(operand, at));
            };
            auto mask = [&](int tile) {
                const bool is_before = WINDOW && tile * KEYS < unmasked + 63 - WINDOW;  // of the last query's window
                if (tile * KEYS + KEYS <= unmasked && !is_before) return;
#pragma unroll
                for (int i = 0; i < 64; ++i) {
                    const int after = tile * KEYS + i / 4 * 8 + column + i % 2 - (position + i % 4 / 2 * 8);
                    if (after > 0 || (WINDOW && after <= -WINDOW)) s[i] = minus_infinity();
                }
            };
            auto round = [&]() {
#pragma unroll
                for (int i = 0; i < 32; ++i) weights[i] = fp16_pair(s[i * 2], s[i * 2 + 1]);
            };
            // Adds the part that begins at a tile to the sums in shared memory; with is_last, to those in registers.
            auto add_part = [&](int tile, const Row& upper_part, const Row& lower_part, bool is_last) {
                float a[2] = {1, 1}, b[2] = {0, 0};  // a row that sees no key of the part keeps its sums
                const bool sees[2] = {tile * KEYS <= position, tile * KEYS <= position + 8};
                if (sees[0]) fold(upper_whole, upper_part, a[0], b[0]);
                if (sees[1]) fold(lower_whole, lower_part, a[1], b[1]);
                const bool is_first = tile == start;
#pragma unroll
                for (int i = 0; i < NUMBERS; ++i) {
                    const int of = i % 4 / 2;
                    const u32 at = my_sums + (i * 128 + thread) * 4;
                    const float before = is_first ? 0.0f : read1(at);
                    const float after = fused(sees[of] ? sums[i] : 0.0f, b[of], product(before, a[of]));
                    if (is_last)
                        sums[i] = after;
                    else
                        write1(at, as_bits(after));
                }
            };

            barrier_wait(full(0, stage), parity);
            named_wait(TURN + half, 256);
            ask_scores(stage);
            named_arrive(TURN + 1 - half, 256);
            products_end<0>(s);
            release(0, stage);
            mask(start);
            weigh(s, 0, factor, upper);
            weigh(s, 2, factor, lower);
            round();
            int part = start;  // first tile of the part
            for (int j = start + 1; j < tiles; ++j) {
                const int before = stage, before_parity = parity;
                if (++stage == STAGES) stage = 0, parity ^= 1;
                barrier_wait(full(0, stage), parity);
                named_wait(TURN + half, 256);
                ask_scores(stage);
                barrier_wait(full(1, before), before_parity);
                ask_values(before, j - 1 - part);
                named_arrive(TURN + 1 - half, 256);
                products_end<1>(s);
                release(0, stage);
                mask(j);
                const Row upper_part = upper, lower_part = lower;
                const bool begins = j % TILES == 0;
                if (begins) upper = lower = {lowest(), 0};
                const float of_upper = weigh(s, 0, factor, upper), of_lower = weigh(s, 2, factor, lower);
                products_end<0>(sums);
                release(1, before);
                if (begins) {
                    add_part(part, upper_part, lower_part, false);
                    part = j;
                } else {
#pragma unroll
                    for (int i = 0; i < NUMBERS; ++i) sums[i] = product(sums[i], i % 4 < 2 ? of_upper : of_lower);
                }
                round();
            }
            barrier_wait(full(1, stage), parity);
            ask_values(stage, tiles - 1 - part);
            products_end<0>(sums);
            release(1, stage);
            if (++stage == STAGES) stage = 0, parity ^= 1;
            add_part(part, upper, lower, true);

            const float of_value = value_scale[0];
#pragma unroll
            for (int below = 0; below < 2; ++below) {
                const int at = items.begin + top + row + below * 8;
                const Row& whole = below ? lower_whole : upper_whole;
                const float scale = quotient(of_value, whole.total);
                if (at >= items.queries) continue;
                const size_t token = items.first + at;
                u16* to = out + (token * num_heads + items.head) * DIM + (WIDE ? half * 128 : 0) + column;
#pragma unroll
                for (int i = 0; i < NUMBERS / 4; ++i)
                    *(u32*)(to + i * 8) = bf16_pair(product(sums[i * 4 + below * 2], scale),
                                                    product(sums[i * 4 + below * 2 + 1], scale));
                if (column == 0 && !(WIDE && half))
                    log_sums[(size_t)items.head * num_tokens + token] = (whole.largest + log_of_two(whole.total)) / LOG2_E;
            }
        }
    }
    meet_cluster<1>();
}
