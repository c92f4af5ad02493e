// What weight_gradients.cu wants of a GPU, in threads of a CPU: the same barriers, and copies that come late and in any
// order. It knows nothing of time, or of a GPU's descriptors of matrices; where numbers lie, and who waits for whom, it
// shows.
#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdint>
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
#define NEXT_TO_EACH_OTHER

struct float2 {
    float x, y;
};
struct Index {
    int x;
};
static thread_local Index threadIdx, blockIdx;
static Index gridDim;

constexpr int THREADS = 384;

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
    Named named[128];  // the upper ones of warps
};
struct Copy {
    std::vector<int> blocks;
    uint32_t to;
    const void* from;
    uint32_t bytes, barrier;
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

    void copy_all() {
        std::mt19937 random(1);
        std::unique_lock lock(mutex);
        for (;;) {
            changed.wait(lock, [&] { return over || !copies.empty(); });
            if (copies.empty()) return;
            std::swap(copies[random() % copies.size()], copies.back());
            const Copy copy = copies.back();
            copies.pop_back();
            for (int block : copy.blocks) {
                std::memcpy(blocks.at(block).memory.data() + copy.to, copy.from, copy.bytes);
                Barrier& barrier = blocks[block].barriers.at(copy.barrier);
                barrier.bytes -= copy.bytes;
                barrier.settle();
            }
            changed.notify_all();
        }
    }
};
struct Reduction {
    float* to;
    uint32_t from, bytes;
};
static thread_local Cluster* cluster;
static thread_local int place;  // of this thread's block in its cluster
static thread_local std::vector<Reduction> reductions;

static Block& mine() { return cluster->blocks[place]; }
static float* numbers(uint32_t at) { return (float*)(mine().memory.data() + at); }
static void require(bool holds) {
    if (!holds) std::abort();
}

static uint32_t shared_memory() { return 1024; }
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
static void load_for(uint32_t mask, uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
    require(to % 16 == 0 && bytes % 16 == 0 && (uintptr_t)from % 16 == 0);
    std::vector<int> blocks;
    for (int block = 0; block < 16; ++block)
        if (mask >> block & 1) blocks.push_back(block);
    std::lock_guard lock(cluster->mutex);
    cluster->copies.push_back({blocks, to, from, bytes, barrier});
    cluster->changed.notify_all();
}
static void load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
    load_for(1 << place, to, from, bytes, barrier);
}
static void reduce(float* to, uint32_t from, uint32_t bytes) {
    require(from % 16 == 0 && (uintptr_t)to % 16 == 0);
    reductions.push_back({to, from, bytes});
}
static void reductions_are_read() {
    std::this_thread::yield();
    for (const Reduction& r : reductions)
        for (uint32_t i = 0; i < r.bytes / 4; ++i) r.to[i] += numbers(r.from)[i];
    reductions.clear();
}
static void reductions_are_done() { require(reductions.empty()); }
static void named_arrive(int name, int threads) { cluster->meet(mine().named[name], threads, false); }
static void named_wait(int name, int threads) { cluster->meet(mine().named[name], threads, true); }
static void meet() { cluster->meet(cluster->meeting, cluster->blocks.size() * THREADS, true); }
static void __syncwarp() { named_wait(100 + threadIdx.x / 32, 32); }
static void visible_to_copies() {}
static void few_registers() {}
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
static void products_begin(float (&)[64]) {}
static void products_end(float (&)[64]) { __syncwarp(); }  // threads of a warp go together

static float e4m3(uint8_t bits) {
    const int exponent = bits >> 3 & 15;
    if ((bits & 127) == 127) return NAN;
    const float size = exponent ? std::ldexp(8 + (bits & 7), exponent - 10) : std::ldexp(bits & 7, -9);
    return bits >> 7 ? -size : size;
}
static float element(uint32_t matrix, int line, int term) {
    const uint32_t at = matrix + line / 8 * 1024 + line % 8 * 128 + term;
    static const std::vector<float> table = [] {
        std::vector<float> numbers(256);
        for (int bits = 0; bits < 256; ++bits) numbers[bits] = e4m3(bits);
        return numbers;
    }();
    return table[mine().memory[at ^ (at >> 7 & 7) << 4]];
}
static void multiply(float (&d)[64], uint32_t a, uint32_t b, int adds) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4, column = lane % 4 * 2;
    for (int j = 0; j < 64; ++j) {
        float sum = adds ? d[j] : 0.0f;
        for (int term = 0; term < 32; ++term)
            sum += element(a, row + (j & 2) * 4, term) * element(b, column + j / 4 * 8 + (j & 1), term);
        d[j] = sum;
    }
}

template <int CLUSTER, class... Arguments>
static void launch(int num_blocks, void (*kernel)(Arguments...), Arguments... arguments) {
    gridDim.x = num_blocks;
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
