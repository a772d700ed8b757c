// Instructions of compute capability 9.0 (sm_90a) as functions: its copy engine, barriers in shared memory, and products of
// warp groups on the tensor cores.

// Bytes of a row in shared memory. Swizzled by 128 bytes, all lies there as the copy engine and the tensor cores want it:
// the pieces of 16 bytes of a row are at their place xor the row's place in its group of eight.
#define LINE 128

// A tensor map, as the driver encodes it.
struct __align__(64) Map {
    u64 words[16];
};

#ifdef STUCK
// Tests only: a wait that does not end tells which one it is, and ends the launch.
__device__ u64 stuck_words;
__device__ inline void stuck(u32 what, u32 detail) {
    volatile u64* words = (volatile u64*)stuck_words;
    words[1] = ((u64)blockIdx.x << 32) | threadIdx.x;
    words[2] = detail;
    __threadfence_system();
    words[0] = what;
    __threadfence_system();
    asm volatile("trap;");
}
#endif

__device__ inline u32 shared_address(const void* p) {
    u32 at;
    asm("{ .reg .u64 full; cvta.to.shared.u64 full, %1; cvt.u32.u64 %0, full; }" : "=r"(at) : "l"(p));
    return at;
}

// Barriers in shared memory, by address.
__device__ inline void bar_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ inline void bar_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ inline void bar_arrive_at(u32 bar, u32 block) {
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
                 "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(bar), "r"(block)
                 : "memory");
}
__device__ inline void bar_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ inline bool bar_passed(u32 bar, u32 parity) {
    u32 passed;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(passed)
                 : "r"(bar), "r"(parity)
                 : "memory");
    return passed != 0;
}
// Until the phase of this parity is over; `what` and `detail` say which wait it is.
__device__ inline void bar_wait(u32 bar, u32 parity, u32 what, u32 detail) {
#ifdef STUCK
    u32 tries = 0;
    while (!bar_passed(bar, parity)) {
        if (++tries > 200000) stuck(what, detail);
    }
#else
    while (!bar_passed(bar, parity)) {}
#endif
}

// A box of a matrix into shared memory of this block, or at the same place of each block in `blocks`.
template <int SHARED_BY>
__device__ inline void fetch(u32 to, const Map& map, u32 col, u32 row, u32 bar, unsigned short blocks) {
    if constexpr (SHARED_BY > 1) {
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                     "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
                     "l"(&map), "r"(col), "r"(row), "r"(bar), "h"(blocks)
                     : "memory");
    } else {
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
                     "l"(&map), "r"(col), "r"(row), "r"(bar)
                     : "memory");
    }
}
__device__ inline void send(const Map& map, u32 col, u32 row, u32 from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(col), "r"(row),
                 "r"(from)
                 : "memory");
}
__device__ inline void sent_together() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until all but LEFT groups that this thread sent have been read.
template <int LEFT> __device__ inline void were_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}
// What this thread wrote to shared memory is seen by the copy engine.
__device__ inline void show_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// All 128 threads of a warp group; barrier 0 is that of the block.
__device__ inline void meet(u32 group) { asm volatile("bar.sync %0, 128;" ::"r"(group) : "memory"); }

// Starts of tiles in shared memory as the tensor cores want them: address, steps in bytes, swizzled by 128.
__device__ inline u64 tile_at(u32 address, u32 leading, u32 stride) {
    return (u64)((address & 0x3FFFF) >> 4) | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32 | 1ull << 62;
}

__device__ inline void mma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ inline void mma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }

#define F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(d, i) F4(d, i), F4(d, i + 4), F4(d, i + 8), F4(d, i + 12)
#define F64(d, i) F16(d, i), F16(d, i + 16), F16(d, i + 32), F16(d, i + 48)
#define P0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
#define P1 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
#define P2 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
#define P3 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define P4 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
#define P5 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"

// d = a b, plus d where `adds`, 64 rows and the depth 16; FLIPPED: b lies by rows of the depth.
template <int FLIPPED, int N> __device__ inline void mma(float (&d)[N], u64 a, u64 b, u32 adds) {
    static_assert(N == 64 || N == 96, "128 or 192 columns");
    if constexpr (N == 64) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" P0 P1 P2
                     P3 "}, %64, %65, p, 1, 1, 0, %67; }"
                     : F64(d, 0)
                     : "l"(a), "l"(b), "r"(adds), "n"(FLIPPED));
    } else {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %98, 0; wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" P0 P1 P2
                     P3 P4 P5 "}, %96, %97, p, 1, 1, 0, %99; }"
                     : F64(d, 0), F16(d, 64), F16(d, 80)
                     : "l"(a), "l"(b), "r"(adds), "n"(FLIPPED));
    }
}

// Four blocks of 8 rows and columns, whose rows lie where lanes 0-7, 8-15, 16-23 and 24-31 say.
__device__ inline void blocks_get(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}
__device__ inline void blocks_put(u32 at, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(r[0]), "r"(r[1]), "r"(r[2]),
                 "r"(r[3])
                 : "memory");
}

__device__ inline u32 pair(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
__device__ inline float exp2_of(float x) {
    float y;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline float inverse(float x) {
    float y;
    asm volatile("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// At least `bound`; NaN stays.
__device__ inline float at_least(float x, float bound) {
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(bound));
    return x;
}
// Both of a pair from -16 to 16; NaN stays.
__device__ inline u32 within_16(u32 both) {
    asm("min.NaN.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(both) : "r"(0x41804180u));
    return both;
}

// The same again, where the compiler would keep it in a register for later.
__device__ inline u32 again(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}
__device__ inline u32 again_thread() {
    u32 x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}
