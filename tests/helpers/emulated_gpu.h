// What our CUDA kernels want of a GPU, in threads of a CPU: the same barriers, and copies that come late and in any
// order. It knows nothing of time, or of a GPU's descriptors of matrices; where numbers lie, and who waits for whom, it
// shows.
#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#define EMULATED
#define ON_GPU
#define __global__
#define __restrict__
#define __launch_bounds__(threads, blocks)
#define IN_CLUSTERS(blocks)
#define IN_PLACE

struct float2 {
    float x, y;
};
struct uint2 {
    uint32_t x, y;
};
struct uint4 {
    uint32_t x, y, z, w;
};
struct int4 {
    int x, y, z, w;
};
struct Index {
    int x;
};
static thread_local Index threadIdx, blockIdx;
static Index gridDim;
static int block_threads;

struct Barrier {  // of arrivals and bytes
    int count = 0, pending = 0, phase = 0;
    long bytes = 0;
    void settle() {
        if (!pending && !bytes) pending = count, phase ^= 1;
    }
};
struct Named {
    int arrived = 0;
    long phase = 0;
};
struct Block {
    std::vector<uint8_t> memory;
    std::map<uint32_t, Barrier> barriers;
    Named named[128];         // the upper ones of warps
    uint32_t exchanged[1024];  // between the threads of a warp
};
struct Copy {
    uint32_t blocks, to;  // blocks: a bit for each of the cluster
    const void* from;
    uint32_t bytes, barrier;
    uint64_t pitch = 0;        // between lines of 128 bytes, which are swizzled; 0: one piece
    uint32_t outside = 0;      // bytes at the end that are zeros, behind the last line of a matrix
};
struct Cluster {
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<Block> blocks;
    std::vector<Copy> copies;
    Named meeting;
    bool over = false;

    void meet(Named& named, int threads, bool waits) {
        std::unique_lock lock(mutex);
        const long phase = named.phase;
        if (++named.arrived == threads) {
            named.arrived = 0, ++named.phase;
            changed.notify_all();
        } else if (waits) {
            changed.wait(lock, [&] { return named.phase != phase; });
        }
    }

    void ask(const Copy& copy) {
        std::lock_guard lock(mutex);
        copies.push_back(copy);
        changed.notify_all();
    }

    void copy_all() {
        std::mt19937 random(1);
        std::unique_lock lock(mutex);
        for (;;) {
            changed.wait(lock, [&] { return over || !copies.empty(); });
            if (copies.empty()) return;
            std::swap(copies[random() % copies.size()], copies.back());
            const Copy copy = copies.back();
            copies.pop_back();
            for (int block = 0; block < 16; ++block) {
                if (!(copy.blocks >> block & 1)) continue;
                uint8_t* to = blocks.at(block).memory.data() + copy.to;
                const uint8_t* from = (const uint8_t*)copy.from;
                for (uint32_t i = 0; copy.pitch && i < copy.bytes; ++i)
                    to[i ^ (i >> 7 & 7) << 4] = i < copy.bytes - copy.outside ? from[i / 128 * copy.pitch + i % 128] : 0;
                if (!copy.pitch) std::memcpy(to, from, copy.bytes);
                Barrier& barrier = blocks[block].barriers.at(copy.barrier);
                barrier.bytes -= copy.bytes;
                barrier.settle();
            }
            changed.notify_all();
        }
    }
};
struct Store {
    void* to;
    uint32_t from, bytes;
};
static thread_local Cluster* cluster;
static thread_local int place;  // of this thread's block in its cluster
static thread_local std::vector<Store> stores;

static Block& mine() { return cluster->blocks[place]; }
static float* numbers(uint32_t at) { return (float*)(mine().memory.data() + at); }
static void require(bool holds, int line = __builtin_LINE()) {
    if (!holds) std::fprintf(stderr, "emulated_gpu.h:%d does not hold\n", line), std::abort();
}

template <uint32_t BYTES>
static uint32_t shared_memory() {
    return BYTES;
}
static void barrier_init(uint32_t barrier, uint32_t arrivals) {
    std::lock_guard lock(cluster->mutex);
    mine().barriers[barrier].count = mine().barriers[barrier].pending = arrivals;
}
static void barriers_are_ready() {}
static void barrier_wait(uint32_t barrier, uint32_t parity) {
    std::unique_lock lock(cluster->mutex);
    Barrier& b = mine().barriers.at(barrier);
    cluster->changed.wait(lock, [&] { return b.phase != (int)parity; });
}
static void arrive(uint32_t barrier, int block, long bytes) {
    std::lock_guard lock(cluster->mutex);
    Barrier& b = cluster->blocks[block].barriers.at(barrier);
    require(b.pending > 0);
    b.bytes += bytes, --b.pending;
    b.settle();
    cluster->changed.notify_all();
}
static void barrier_expect(uint32_t barrier, uint32_t bytes) { arrive(barrier, place, bytes); }
static void barrier_arrive(uint32_t barrier) { arrive(barrier, place, 0); }
static void barrier_arrive_at(uint32_t barrier, uint32_t block) { arrive(barrier, block, 0); }
static void load_for(uint32_t blocks, uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
    require(to % 16 == 0 && bytes % 16 == 0 && (uintptr_t)from % 16 == 0);
    cluster->ask({blocks, to, from, bytes, barrier});
}
static void load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
    load_for(1 << place, to, from, bytes, barrier);
}
enum { ADDRESS, COLUMNS, ROWS, PITCH, TILE_ROWS };  // words of a map here
template <class Map>
static void load_tile_for(uint32_t blocks, uint32_t to, const Map& map, int column, int row, uint32_t barrier) {
    const auto& words = map.words;
    require(to % 1024 == 0 && column + 128 <= (int)words[COLUMNS]);
    const void* from = (const uint8_t*)words[ADDRESS] + row * words[PITCH] + column;
    const int tile = words[TILE_ROWS], outside = std::clamp<int>(row + tile - (int)words[ROWS], 0, tile);
    cluster->ask({blocks, to, from, tile * 128u, barrier, words[PITCH], outside * 128u});
}
template <class Map>
static void load_tile(uint32_t to, const Map& map, int column, int row, uint32_t barrier) {
    load_tile_for(1 << place, to, map, column, row, barrier);
}
extern "C" int cuTensorMapEncodeTiled(uint64_t* map, uint32_t type, uint32_t dimensions, uint64_t address,
                                      const uint64_t* sizes, const uint64_t* strides, const uint32_t* tile,
                                      const uint32_t* steps, uint32_t, uint32_t swizzle, uint32_t, uint32_t) {
    const bool fits = (uintptr_t)map % 64 == 0 && !type && dimensions == 2 && swizzle == 3 && tile[0] == 128;
    if (!fits || address % 16 || strides[0] % 16 || steps[0] != 1 || steps[1] != 1) return 1;
    map[ADDRESS] = address, map[COLUMNS] = sizes[0], map[ROWS] = sizes[1], map[PITCH] = strides[0];
    map[TILE_ROWS] = tile[1];
    return 0;
}
static void store(void* to, uint32_t from, uint32_t bytes) {
    require(from % 16 == 0 && bytes % 16 == 0 && (uintptr_t)to % 16 == 0);
    stores.push_back({to, from, bytes});
}
static void stores_are_read() {
    std::this_thread::yield();
    for (const Store& s : stores) std::memcpy(s.to, numbers(s.from), s.bytes);
    stores.clear();
}
static void stores_are_done() { require(stores.empty()); }
static void named_arrive(int name, int threads) { cluster->meet(mine().named[name], threads, false); }
static void named_wait(int name, int threads) { cluster->meet(mine().named[name], threads, true); }
template <int BLOCKS>
static void meet_cluster() {
    cluster->meet(cluster->meeting, cluster->blocks.size() * block_threads, true);
}
static void __syncwarp() { named_wait(100 + threadIdx.x / 32, 32); }
static uint32_t of_lane(uint32_t x, int lane) {
    uint32_t* warp = mine().exchanged + threadIdx.x / 32 * 32;
    warp[threadIdx.x % 32] = x;
    __syncwarp();
    const uint32_t found = warp[lane];
    __syncwarp();
    return found;
}
static uint32_t of_lane_xor(uint32_t x, int mask) { return of_lane(x, threadIdx.x % 32 ^ mask); }
static void visible_to_copies() {}
template <int NUMBER>
static void few_registers() {}
template <int NUMBER>
static void many_registers() {}
static float read1(uint32_t at) { return *numbers(at); }
static float2 read2(uint32_t at) {
    require(at % 8 == 0);
    return {numbers(at)[0], numbers(at)[1]};
}
static void write2(uint32_t at, float a, float b) {
    require(at % 8 == 0);
    numbers(at)[0] = a, numbers(at)[1] = b;
}
static uint4 read4(uint32_t at) {
    require(at % 16 == 0);
    uint4 x;
    std::memcpy(&x, numbers(at), 16);
    return x;
}
static void prefetch(const void*) {}
static void store4(void* to, uint4 x) {
    require((uintptr_t)to % 16 == 0);
    std::memcpy(to, &x, 16);
}
static void add4(float* to, uint4 x) {
    require((uintptr_t)to % 16 == 0);
    float terms[4];
    std::memcpy(terms, &x, 16);
    for (int i = 0; i < 4; ++i) to[i] += terms[i];
}
static uint32_t read_half(uint32_t at) { return *(uint16_t*)(mine().memory.data() + at); }
static void write1(uint32_t at, uint32_t x) {
    require(at % 4 == 0);
    std::memcpy(numbers(at), &x, 4);
}
static void write4(uint32_t at, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    require(at % 16 == 0);
    const uint32_t x[4] = {a, b, c, d};
    std::memcpy(numbers(at), x, 16);
}
static float as_float(uint32_t x) {
    float y;
    std::memcpy(&y, &x, 4);
    return y;
}
static uint32_t as_bits(float x) {
    uint32_t y;
    std::memcpy(&y, &x, 4);
    return y;
}
static float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
static uint32_t bf16_bits(float x) {
    const uint32_t bits = as_bits(x);
    return x != x ? 0x7FC0 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
static uint32_t bf16_pair(float a, float b) { return bf16_bits(a) | bf16_bits(b) << 16; }
static uint32_t bf16_product(uint32_t a, uint32_t b) {
    constexpr uint32_t UPPER = 0xFFFF0000;
    return bf16_pair(as_float(a << 16) * as_float(b << 16), as_float(a & UPPER) * as_float(b & UPPER));
}
static uint32_t larger(uint32_t a, uint32_t b) {
    return std::max(a & 0xFFFF, b & 0xFFFF) | std::max(a & 0xFFFF0000, b & 0xFFFF0000);
}
template <int NUMBERS>
static void products_begin(float (&)[NUMBERS]) {}
static void products_asked() {}
template <int LATER, int NUMBERS>
static void products_end(float (&)[NUMBERS]) { __syncwarp(); }  // threads of a warp go together

static float e4m3(uint8_t bits) {
    const int exponent = bits >> 3 & 15;
    if ((bits & 127) == 127) return NAN;
    const float size = exponent ? std::ldexp(8 + (bits & 7), exponent - 10) : std::ldexp(bits & 7, -9);
    return bits >> 7 ? -size : size;
}
static const std::vector<float>& e4m3_numbers() {
    static const std::vector<float> table = [] {
        std::vector<float> numbers(256);
        for (int bits = 0; bits < 256; ++bits) numbers[bits] = e4m3(bits);
        return numbers;
    }();
    return table;
}
static uint32_t e4m3_byte(float x) {  // the nearest, ties to even
    if (x != x) return 0x7F;
    const float* first = e4m3_numbers().data();
    const float size = std::min(std::fabs(x), 448.0f);
    uint32_t byte = std::lower_bound(first, first + 0x7F, size) - first;
    if (byte > 0) {
        const float above = first[byte] - size, below = size - first[byte - 1];
        if (below < above || (below == above && byte % 2)) --byte;
    }
    return byte | (as_bits(x) >> 24 & 0x80);
}
static uint32_t e4m3_bytes(float a, float b, float c, float d) {
    return e4m3_byte(a) | e4m3_byte(b) << 8 | e4m3_byte(c) << 16 | e4m3_byte(d) << 24;
}
static float element(uint32_t matrix, int line, int term) {
    const uint32_t at = matrix + line / 8 * 1024 + line % 8 * 128 + term;
    return e4m3_numbers()[mine().memory[at ^ (at >> 7 & 7) << 4]];
}
template <int NUMBERS>
static void multiply(float (&d)[NUMBERS], uint32_t a, uint32_t b, int adds) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4, column = lane % 4 * 2;
    for (int j = 0; j < NUMBERS; ++j) {
        float sum = adds ? d[j] : 0.0f;
        for (int term = 0; term < 32; ++term)
            sum += element(a, row + (j & 2) * 4, term) * element(b, column + j / 4 * 8 + (j & 1), term);
        d[j] = sum;
    }
}

static float product(float a, float b) { return a * b; }
static float sum(float a, float b) { return a + b; }
static float fused(float a, float b, float c) { return std::fma(a, b, c); }
static float maximum(float a, float b) { return std::fmax(a, b); }
static float power_of_two(float x) { return std::exp2(x); }
static float log_of_two(float x) { return std::log2(x); }
static float quotient(float a, float b) { return a / b; }
static uint32_t fp16_bits(float x) {
    const _Float16 half = x;
    uint16_t bits;
    std::memcpy(&bits, &half, 2);
    return bits;
}
static uint32_t fp16_pair(float a, float b) { return fp16_bits(a) | fp16_bits(b) << 16; }
static float fp16(uint16_t bits) {
    _Float16 half;
    std::memcpy(&half, &bits, 2);
    return half;
}
static float fp16_at(uint32_t matrix, int line, int term) {  // term: of 64 in a line of 128 bytes
    const uint32_t at = matrix + line * 128 + term * 2, swizzled = at ^ (at >> 7 & 7) << 4;
    return fp16(*(uint16_t*)(mine().memory.data() + swizzled));
}
static void multiply_fp16(float (&d)[64], uint32_t a, uint32_t b, int adds) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4, column = lane % 4 * 2;
    for (int j = 0; j < 64; ++j) {
        float total = adds ? d[j] : 0.0f;
        for (int term = 0; term < 16; ++term)
            total += fp16_at(a, row + (j & 2) * 4, term) * fp16_at(b, column + j / 4 * 8 + (j & 1), term);
        d[j] = total;
    }
}
template <int NUMBERS>
static void multiply_fp16(float (&d)[NUMBERS], const uint32_t* a, uint32_t b, uint32_t next, int adds) {
    const int lane = threadIdx.x % 32, column = lane % 4 * 2;
    float terms[2][16];  // of this thread's two rows, held by the four threads of the rows
    for (int owner = 0; owner < 4; ++owner)
        for (int i = 0; i < 4; ++i) {
            const uint32_t pair = of_lane(a[i], lane / 4 * 4 + owner);
            for (int j = 0; j < 2; ++j) terms[i % 2][i / 2 * 8 + owner * 2 + j] = fp16(pair >> 16 * j);
        }
    for (int j = 0; j < NUMBERS; ++j) {
        const int at = column + j / 4 * 8 + (j & 1);
        float total = adds ? d[j] : 0.0f;
        for (int term = 0; term < 16; ++term)
            total += terms[j / 2 % 2][term] * fp16_at(b + at / 64 * next, term, at % 64);
        d[j] = total;
    }
}

template <int CLUSTER, int THREADS, class... Arguments>
static void launch(int num_blocks, void (*kernel)(Arguments...), Arguments... arguments) {
    gridDim.x = num_blocks, block_threads = THREADS;
    for (int first = 0; first < num_blocks; first += CLUSTER) {
        Cluster together;
        together.blocks.resize(CLUSTER);
        for (Block& block : together.blocks) block.memory.assign(256 << 10, 0xFF);
        std::thread copies([&] { together.copy_all(); });
        std::vector<std::thread> threads;
        for (int i = 0; i < CLUSTER * THREADS; ++i)
            threads.emplace_back([&, i] {
                cluster = &together, place = i / THREADS, threadIdx.x = i % THREADS, blockIdx.x = first + place;
                kernel(arguments...);
            });
        for (std::thread& thread : threads) thread.join();
        {
            std::lock_guard lock(together.mutex);
            together.over = true;
            together.changed.notify_all();
        }
        copies.join();
    }
}
