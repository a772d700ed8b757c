// What every kernel source begins with. No header of CUDA is included: users of the bare compiler have none.

typedef unsigned long long u64;
typedef unsigned int u32;

// A matrix whose rows may have gaps between them; sizes and pitch in elements.
struct Mat {
    u64 address, rows, cols, pitch;
    // 0: f32, 1: bf16, 2: i32.
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

// To nearest, ties to even; NaN stays NaN.
__device__ inline unsigned short to_bf16(float x) {
    u32 bits = __float_as_uint(x);
    if (x != x) return (unsigned short)((bits >> 16) | 0x40);
    return (unsigned short)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

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
struct alignas(16) Vec4 {
    u32 x, y, z, w;
};

// Whether eight neighbours may be moved at once.
__device__ inline bool is_wide(const Mat& m) { return m.address % 16 == 0 && m.pitch % RUN == 0; }

// Whether it lies in one piece that runs of eight elements may be moved in, counted from its start.
__device__ inline bool is_flat(const Mat& m) { return m.address % 16 == 0 && (m.rows <= 1 || m.pitch == m.cols); }

__device__ inline Run get_run(const Mat& m, u64 at, u32 count, bool wide) {
    Run out;
    if (wide && count == RUN && m.kind == 1) {
        Vec4 v = *(const Vec4*)((const unsigned short*)m.address + at);
        u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            out.at[2 * i] = __uint_as_float(words[i] << 16);
            out.at[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
        }
    } else if (wide && count == RUN) {
        const Vec4* from = (const Vec4*)((const float*)m.address + at);
        Vec4 low = from[0], high = from[1];
        u32 words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < RUN; i++) out.at[i] = __uint_as_float(words[i]);
    } else {
#pragma unroll
        for (u32 i = 0; i < RUN; i++) out.at[i] = i < count ? get(m, at + i) : 0.0f;
    }
    return out;
}

__device__ inline void put_run(const Mat& m, u64 at, u32 count, bool wide, const Run& run) {
    if (wide && count == RUN && m.kind == 1) {
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) words[i] = to_bf16(run.at[2 * i]) | (u32)to_bf16(run.at[2 * i + 1]) << 16;
        *(Vec4*)((unsigned short*)m.address + at) = {words[0], words[1], words[2], words[3]};
    } else if (wide && count == RUN) {
        u32 words[8];
#pragma unroll
        for (int i = 0; i < RUN; i++) words[i] = __float_as_uint(run.at[i]);
        Vec4* to = (Vec4*)((float*)m.address + at);
        to[0] = {words[0], words[1], words[2], words[3]};
        to[1] = {words[4], words[5], words[6], words[7]};
    } else {
#pragma unroll
        for (u32 i = 0; i < RUN; i++) {
            if (i < count) put(m, at + i, run.at[i]);
        }
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
