// Hopper PTX instructions without CUDA C++ intrinsics, one per function. Shared memory addresses are 32-bit.
//
// Tests compile the kernels for a CPU with EMULATED defined, which replaces these functions by emulations.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef EMULATED
#define ON_GPU __device__ __forceinline__
#define IN_CLUSTERS(blocks) __cluster_dims__(blocks, 1, 1)
#define IN_PLACE __grid_constant__  // a kernel argument whose address TMA copies can use
#endif

struct alignas(64) TensorMap {  // of a byte matrix, encoded by the CUDA driver
    u64 words[16];
};

// A block starts with the same number of registers for each of its threads. Warps that request more wait until others
// have released enough; if there are not enough, they deadlock.
ON_GPU constexpr bool registers_suffice(int threads, int threads_with_few, int few, int many) {
    return threads_with_few * few + (threads - threads_with_few) * many <= 65536 / threads / 8 * 8 * threads;
}

#ifndef EMULATED

// Start of dynamic shared memory, aligned to BYTES.
template <u32 BYTES>
ON_GPU u32 shared_memory() {
    extern __shared__ u8 memory[];
    return ((u32)__cvta_generic_to_shared(memory) + BYTES - 1) & ~(BYTES - 1);
}

// mbarriers, which count arrivals and the bytes of asynchronous copies.

ON_GPU void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

ON_GPU void barriers_are_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

ON_GPU void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra over;\n"
        "bra again;\n"
        "over:\n"
        "}\n" ::"r"(barrier), "r"(parity) : "memory");
}

ON_GPU void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

ON_GPU void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

ON_GPU void barrier_arrive_at(u32 barrier, u32 block) {  // of the cluster
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
        "}\n" ::"r"(barrier), "r"(block) : "memory");
}

// Named barriers of a block, and a barrier of all threads of a cluster.

ON_GPU void named_arrive(int name, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

ON_GPU void named_wait(int name, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

template <int BLOCKS>
ON_GPU void meet_cluster() {
    if (BLOCKS > 1)
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    else
        __syncthreads();
}

// Bulk copies between global and shared memory; sizes and addresses are multiples of 16 bytes.

ON_GPU void load(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

ON_GPU void load_for(u32 blocks, u32 to, const void* from, u32 bytes, u32 barrier) {  // a bit per block of the cluster
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
        ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "h"((u16)blocks) : "memory");
}

// Loads the tile of a matrix that starts at (row, column), in lines of 128 bytes, swizzled as descriptor() expects; the
// tensor map gives the number of lines.
ON_GPU void load_tile(u32 to, const TensorMap& from, int column, int row, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(to), "l"(&from), "r"(column), "r"(row), "r"(barrier) : "memory");
}

ON_GPU void load_tile_for(u32 blocks, u32 to, const TensorMap& from, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;"
        ::"r"(to), "l"(&from), "r"(column), "r"(row), "r"(barrier), "h"((u16)blocks) : "memory");
}

ON_GPU void store(void* to, u32 from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}

ON_GPU void stores_are_read() {  // afterwards, the source in shared memory may be overwritten
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
}

ON_GPU void stores_are_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

ON_GPU void visible_to_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Shared memory.

ON_GPU float read1(u32 at) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at));
    return x;
}

ON_GPU float2 read2(u32 at) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(at));
    return x;
}

ON_GPU uint4 read4(u32 at) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(at));
    return x;
}

ON_GPU u32 read_half(u32 at) {
    u16 x;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(at));
    return x;
}

ON_GPU void write1(u32 at, u32 x) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(x) : "memory"); }

ON_GPU void write2(u32 at, float a, float b) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(a), "f"(b) : "memory");
}

ON_GPU void write4(u32 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Registers.

template <int NUMBER>
ON_GPU void few_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(NUMBER));
}

template <int NUMBER>
ON_GPU void many_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(NUMBER));
}

ON_GPU u32 of_lane(u32 x, int lane) { return __shfl_sync(~0u, x, lane); }

ON_GPU u32 of_lane_xor(u32 x, int mask) { return __shfl_xor_sync(~0u, x, mask); }

ON_GPU float as_float(u32 x) { return __uint_as_float(x); }

ON_GPU u32 as_bits(float x) { return __float_as_uint(x); }

// Global memory. A bulk copy from threads with different addresses becomes a loop over the threads, which takes longer
// than their own stores.

ON_GPU void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory"); }  // a line

ON_GPU void store4(void* to, uint4 x) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

ON_GPU void add4(float* to, uint4 x) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(as_float(x.x)),
                 "f"(as_float(x.y)), "f"(as_float(x.z)), "f"(as_float(x.w)) : "memory");
}

// Arithmetic, identical to that of triton/tiles.py.

ON_GPU float sigmoid(float x) {
    float y;
    asm("{ .reg .f32 t; mul.f32 t, %1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000; "
        "rcp.approx.ftz.f32 %0, t; }" : "=f"(y) : "f"(x));
    return y;
}

// Arithmetic, identical to that of triton/attention.py. The compiler may not join a product and a sum.

ON_GPU float product(float a, float b) { return __fmul_rn(a, b); }

ON_GPU float sum(float a, float b) { return __fadd_rn(a, b); }

ON_GPU float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }

ON_GPU float maximum(float a, float b) { return fmaxf(a, b); }

ON_GPU float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

ON_GPU float log_of_two(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

ON_GPU float quotient(float a, float b) {
    float y;
    asm("div.full.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

ON_GPU u32 fp16_pair(float a, float b) {  // a in the lower half
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(y) : "f"(a), "f"(b));
    return y;
}

ON_GPU u32 bf16_pair(float a, float b) {  // a in the lower half
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(y) : "f"(a), "f"(b));
    return y;
}

ON_GPU u32 bf16_product(u32 a, u32 b) {
    u32 y;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

ON_GPU u32 larger(u32 a, u32 b) {  // per 16-bit half
    u32 y;
    asm("max.u16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

ON_GPU u32 e4m3_bytes(float a, float b, float c, float d) {  // a in the lowest byte
    u32 y;
    asm("{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %2, %1; cvt.rn.satfinite.e4m3x2.f32 h, %4, %3; "
        "mov.b32 %0, {l, h}; }" : "=r"(y) : "f"(a), "f"(b), "f"(c), "f"(d));
    return y;
}

// Tensor cores (WGMMA): each warp group multiplies 64 lines by 128 or 192.

template <int NUMBERS>
ON_GPU void keep(float (&d)[NUMBERS]) {  // compiler fence: the tensor cores write d asynchronously
#pragma unroll
    for (int j = 0; j < NUMBERS; ++j) asm volatile("" : "+f"(d[j])::"memory");
}

template <int NUMBERS>
ON_GPU void products_begin(float (&d)[NUMBERS]) {
    keep(d);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

ON_GPU void products_asked() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int LATER, int NUMBERS>  // LATER: number of newer WGMMA groups that may stay in flight
ON_GPU void products_end(float (&d)[NUMBERS]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LATER) : "memory");
    keep(d);
}

// Matrix descriptor of 128-byte swizzled lines in shared memory; every 8 lines, 1024 bytes, form a swizzle atom.
ON_GPU u64 descriptor(u32 at) {
    return (u64)((at & 0x3FFFF) >> 4) | (u64(1) << 16) | (u64(1024 >> 4) << 32) | (u64(1) << 62);
}

// The same for an operand whose terms are lines: each line has 64 of its columns, and the next 64 stand ``next`` later.
ON_GPU u64 descriptor_of_columns(u32 at, u32 next) {
    return (u64)((at & 0x3FFFF) >> 4) | (u64(next >> 4) << 16) | (u64(1024 >> 4) << 32) | (u64(1) << 62);
}

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)

#define NUMBERS_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NUMBERS_64 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NUMBERS_96 \
    NUMBERS_64 ", " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"

// COLUMNS of d, NUMBERS: the accumulator operands of a thread; A, B and ADDS: the operands after them.
#define MULTIPLY(COLUMNS, NUMBERS, A, B, ADDS) \
    "{\n" \
    ".reg .pred adds;\n" \
    "setp.ne.b32 adds, " ADDS ", 0;\n" \
    "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k32.f32.e4m3.e4m3 {" NUMBERS "}, " A ", " B ", adds, 1, 1;\n" \
    "}\n"

// Per warp group: d = a b^T + (adds ? d : 0) over 32 terms, for 64 lines at a and one line at b per column of d.
ON_GPU void multiply(float (&d)[64], u32 a, u32 b, int adds) {
    asm volatile(MULTIPLY("128", NUMBERS_64, "%64", "%65", "%66")
                 : D16(0), D16(16), D16(32), D16(48)
                 : "l"(descriptor(a)), "l"(descriptor(b)), "r"(adds));
}

ON_GPU void multiply(float (&d)[96], u32 a, u32 b, int adds) {
    asm volatile(MULTIPLY("192", NUMBERS_96, "%96", "%97", "%98")
                 : D16(0), D16(16), D16(32), D16(48), D16(64), D16(80)
                 : "l"(descriptor(a)), "l"(descriptor(b)), "r"(adds));
}

#define MULTIPLY_FP16(COLUMNS, NUMBERS, A, B, ADDS, TURNS) \
    "{\n" \
    ".reg .pred adds;\n" \
    "setp.ne.b32 adds, " ADDS ", 0;\n" \
    "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32.f16.f16 {" NUMBERS "}, " A ", " B ", adds, 1, 1, " TURNS ";\n" \
    "}\n"

// The same over 16 terms in FP16.
ON_GPU void multiply_fp16(float (&d)[64], u32 a, u32 b, int adds) {
    asm volatile(MULTIPLY_FP16("128", NUMBERS_64, "%64", "%65", "%66", "0, 0")
                 : D16(0), D16(16), D16(32), D16(48)
                 : "l"(descriptor(a)), "l"(descriptor(b)), "r"(adds));
}

// d = a b + (adds ? d : 0): a in registers, as a thread's sums of 16 columns are rounded to pairs; b has a line per term.
ON_GPU void multiply_fp16(float (&d)[64], const u32* a, u32 b, u32 next, int adds) {
    asm volatile(MULTIPLY_FP16("128", NUMBERS_64, "{%64, %65, %66, %67}", "%68", "%69", "1")
                 : D16(0), D16(16), D16(32), D16(48)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor_of_columns(b, next)), "r"(adds));
}

ON_GPU void multiply_fp16(float (&d)[32], const u32* a, u32 b, u32 next, int adds) {
    asm volatile(MULTIPLY_FP16("64", NUMBERS_32, "{%32, %33, %34, %35}", "%36", "%37", "1")
                 : D16(0), D16(16)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor_of_columns(b, next)), "r"(adds));
}
#endif

ON_GPU int my_warp() { return of_lane(threadIdx.x / 32, 0); }  // the shuffle tells the compiler that it is warp-uniform

ON_GPU u32 weighted(u32 pair, float factor) {  // two BF16 values times factor, rounded to BF16
    return bf16_pair(as_float(pair << 16) * factor, as_float(pair & 0xFFFF0000) * factor);
}
