// What every kernel source begins with. No header of CUDA is included: users of the bare compiler have none.

typedef unsigned long long u64;
typedef unsigned int u32;
typedef long long i64;

// A matrix whose rows may have gaps between them; sizes and pitch in elements.
struct Mat {
    u64 address, rows, cols, pitch;
    // 0: f32, 1: bf16, 2: i32, 3: i16: odd ones have 2 bytes.
    u64 kind;
};

// Where the host looks for what has happened, and which operation of its stream or graph this is, from 1.
struct Post {
    u64 words;
    u64 operation;
};

#define THREADS 256

// The last operation that begins here is the one to name when the card breaks.
__device__ inline void begin(const Post& post) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *(volatile u64*)post.words = post.operation;
}

// Tells a value that cannot be used. The first one to come is kept.
__device__ inline void refuse(const Post& post, u64 position, int value) {
    volatile u64* words = (volatile u64*)post.words;
    if (words[2] == 0) {
        words[3] = (position << 32) | (u32)value;
        __threadfence_system();
        words[2] = post.operation;
    }
}

__device__ inline float from_bf16(unsigned short bits) { return __uint_as_float((u32)bits << 16); }

// Two values, the first one low: to nearest, ties to even; NaN keeps the upper bits of its payload, as on the host.
__device__ inline u32 to_bf16s(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    if (low != low) both = (both & 0xFFFF0000u) | (__float_as_uint(low) >> 16) | 0x40;
    if (high != high) both = (both & 0xFFFFu) | (__float_as_uint(high) & 0xFFFF0000u) | 0x400000;
    return both;
}
__device__ inline unsigned short to_bf16(float x) { return (unsigned short)to_bf16s(x, 0.0f); }

__device__ inline float get(const Mat& m, u64 at) {
    return m.kind == 1 ? from_bf16(((const unsigned short*)m.address)[at]) : ((const float*)m.address)[at];
}

__device__ inline void put(const Mat& m, u64 at, float x) {
    if (m.kind == 1) ((unsigned short*)m.address)[at] = to_bf16(x);
    else ((float*)m.address)[at] = x;
}

// Place of an element by row and column.
__device__ inline u64 spot(const Mat& m, u64 row, u64 col) { return row * m.pitch + col; }

// Place of element i, counted row by row.
__device__ inline u64 place(const Mat& m, u64 i) {
    return m.pitch == m.cols ? i : i / m.cols * m.pitch + i % m.cols;
}

// Eight neighbours of a row, or fewer at its end.
#define RUN 8
struct Run {
    float at[RUN];
};
// Aligned, or the compiler moves it word by word.
struct __align__(16) Vec4 {
    u32 x, y, z, w;
};

// Whether eight neighbours may be moved at once.
__device__ inline bool is_wide(const Mat& m) { return m.address % 16 == 0 && m.pitch % RUN == 0; }

// Whether it lies in one piece that runs of eight elements may be moved in, counted from its start.
__device__ inline bool is_flat(const Mat& m) { return m.address % 16 == 0 && (m.rows <= 1 || m.pitch == m.cols); }

// A run as it lies in memory, wide, of elements of one kind: loads of several can be on their way before the first is
// waited for.
template <int KIND> struct Raw {
    Vec4 part[KIND == 1 ? 1 : 2];
};
template <int KIND> __device__ inline Raw<KIND> raw_zeros() {
    Raw<KIND> raw;
    raw.part[0] = {0, 0, 0, 0};
    if constexpr (KIND != 1) raw.part[1] = {0, 0, 0, 0};
    return raw;
}
template <int KIND> __device__ inline Raw<KIND> raw_run(const Mat& m, u64 at) {
    const Vec4* from = (const Vec4*)(m.address + at * (KIND == 1 ? 2 : 4));
    Raw<KIND> raw;
    raw.part[0] = from[0];
    if constexpr (KIND != 1) raw.part[1] = from[1];
    return raw;
}
template <int KIND> __device__ inline Run opened(const Raw<KIND>& raw) {
    Run out;
#pragma unroll
    for (int i = 0; i < (KIND == 1 ? 1 : 2); i++) {
        u32 words[4] = {raw.part[i].x, raw.part[i].y, raw.part[i].z, raw.part[i].w};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if constexpr (KIND == 1) {
                out.at[2 * k] = __uint_as_float(words[k] << 16);
                out.at[2 * k + 1] = __uint_as_float(words[k] & 0xFFFF0000u);
            } else {
                out.at[4 * i + k] = __uint_as_float(words[k]);
            }
        }
    }
    return out;
}
template <int KIND> __device__ inline void put_wide(const Mat& m, u64 at, const Run& run) {
    Vec4* to = (Vec4*)(m.address + at * (KIND == 1 ? 2 : 4));
    if constexpr (KIND == 1) {
        *to = {
            to_bf16s(run.at[0], run.at[1]), to_bf16s(run.at[2], run.at[3]), to_bf16s(run.at[4], run.at[5]),
            to_bf16s(run.at[6], run.at[7])
        };
    } else {
        u32 words[RUN];
#pragma unroll
        for (int i = 0; i < RUN; i++) words[i] = __float_as_uint(run.at[i]);
        to[0] = {words[0], words[1], words[2], words[3]};
        to[1] = {words[4], words[5], words[6], words[7]};
    }
}

__device__ inline Run get_run(const Mat& m, u64 at, u32 count, bool wide) {
    if (!wide || count != RUN) {
        Run out;
#pragma unroll
        for (u32 i = 0; i < RUN; i++) out.at[i] = i < count ? get(m, at + i) : 0.0f;
        return out;
    }
    return m.kind == 1 ? opened(raw_run<1>(m, at)) : opened(raw_run<0>(m, at));
}

__device__ inline void put_run(const Mat& m, u64 at, u32 count, bool wide, const Run& run) {
    if (!wide || count != RUN) {
#pragma unroll
        for (u32 i = 0; i < RUN; i++) {
            if (i < count) put(m, at + i, run.at[i]);
        }
    } else if (m.kind == 1) {
        put_wide<1>(m, at, run);
    } else {
        put_wide<0>(m, at, run);
    }
}

// Pairwise, so that the error hardly grows.
__device__ inline float run_sum(const Run& run) {
    const float(&x)[RUN] = run.at;
    return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}

// As a part of a sum in f64. Of f32 its own additions are, too: else they would be the sum's whole error.
template <bool EXACT> __device__ inline double run_part(const Run& run) {
    const float(&x)[RUN] = run.at;
    if constexpr (EXACT) {
        return (((double)x[0] + x[1]) + ((double)x[2] + x[3])) + (((double)x[4] + x[5]) + ((double)x[6] + x[7]));
    } else {
        return (double)run_sum(run);
    }
}

__device__ inline u32 run_length(u64 cols, u64 c) { return cols - c < RUN ? (u32)(cols - c) : RUN; }

// Runs of a tensor in one piece.
#define EACH_RUN(i, count) \
    for (u64 i = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * RUN; i < (count); i += (u64)gridDim.x * blockDim.x * RUN)

#define EACH(i, count) \
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < (count); i += (u64)gridDim.x * blockDim.x)

// A constant, or a scalar on the device.
struct Factor {
    u64 address;
    u64 value;
};
__device__ inline float factor(const Factor& f) {
    return f.address ? *(const float*)f.address : __uint_as_float((u32)f.value);
}

// What an output keeps of its old value: 0 nothing, 1 all of it, 2 as much as a scalar on the device says. A factor of
// 0 reads nothing, so that NaN does not stay.
struct Keep {
    u64 how;
    u64 address;
};
__device__ inline float keep_factor(const Keep& k) {
    return k.how == 0 ? 0.0f : k.how == 1 ? 1.0f : *(const float*)k.address;
}
__device__ inline void accumulate(const Mat& out, u64 at, float keep, float value) {
    put(out, at, keep == 0.0f ? value : fmaf(keep, get(out, at), value));
}

// Sums over a block of THREADS, in an order that depends on nothing; every thread gets the total. In f64, so that the
// order hardly matters: these kernels wait for memory, not for arithmetic.
__device__ inline double block_sum(double x) {
    __shared__ double part[THREADS / 32];
    for (int step = 16; step > 0; step /= 2) x += __shfl_down_sync(0xFFFFFFFFu, x, step);
    __syncthreads();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
    __syncthreads();
    double total = 0.0;
    for (int i = 0; i < THREADS / 32; i++) total += part[i];
    return total;
}

// NaN wins, as it does on the host.
__device__ inline float larger(float a, float b) { return (a > b || a != a) ? a : b; }

__device__ inline float block_max(float x) {
    __shared__ float part[THREADS / 32];
    for (int step = 16; step > 0; step /= 2) x = larger(x, __shfl_down_sync(0xFFFFFFFFu, x, step));
    __syncthreads();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
    __syncthreads();
    float most = part[0];
    for (int i = 1; i < THREADS / 32; i++) most = larger(most, part[i]);
    return most;
}
