// AdamW, the sums behind the global norm, and what is done with them.

struct Betas {
    double beta1, beta2, eps;
};

// Places in the optimizer's scalars.
#define LR 0
#define CORRECTION1 1
#define CORRECTION2 2
#define CLIP 3

// Elements that share a weight decay and a group's scalars, in order. The end of a run is in the low 48 bits, its group
// above.
#define MOST_RUNS 64
struct Runs {
    u64 count;
    u64 ends[MOST_RUNS];
    double decays[MOST_RUNS];
};

// What a step multiplies with in a run, each rounded to f32 once.
struct Factors {
    float clip, shrink, rate, spread;
};
struct Rules {
    float beta1, rest1, beta2, rest2, eps;
};

__device__ inline void take_step(float& value, float& m1, float& m2, float g, const Rules& r, const Factors& f) {
    g *= f.clip;
    m1 = fmaf(r.beta1, m1, r.rest1 * g);
    m2 = fmaf(r.beta2, m2, r.rest2 * g * g);
    value = fmaf(value, f.shrink, -(f.rate * m1 / fmaf(sqrtf(m2), f.spread, r.eps)));
}

// The run of element i.
__device__ inline u32 run_of(const u64* ends, u32 count, u64 i) {
    u32 low = 0, high = count - 1;
    while (low < high) {
        u32 middle = (low + high) / 2;
        if (i < ends[middle]) high = middle;
        else low = middle + 1;
    }
    return low;
}

#define QUAD 4
struct Quad {
    float at[QUAD];
};
struct alignas(8) Vec2 {
    u32 x, y;
};
// Neighbours of a tensor in one piece, f32 or bf16.
__device__ inline Quad get_quad(const Mat& m, u64 i) {
    if (m.kind == 1) {
        Vec2 v = *(const Vec2*)((const unsigned short*)m.address + i);
        return {__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xFFFF0000u), __uint_as_float(v.y << 16),
                __uint_as_float(v.y & 0xFFFF0000u)};
    }
    Vec4 v = *(const Vec4*)((const float*)m.address + i);
    return {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
}
__device__ inline void put_quad(const Mat& m, u64 i, const Quad& q) {
    *(Vec4*)((float*)m.address + i) = {__float_as_uint(q.at[0]), __float_as_uint(q.at[1]), __float_as_uint(q.at[2]),
                                       __float_as_uint(q.at[3])};
}

// An f32 master as a bf16 value, in the upper half, and a rest, below it: to nearest, ties away from zero. The rest is
// signed, so that together they are the master to the bit; a NaN keeps the upper half of its payload.
__device__ inline u32 split_master(float master) {
    u32 bits = __float_as_uint(master);
    if (master != master) return (bits | 0x400000u) & 0xFFFF0000u;
    return ((bits + 0x8000u) & 0xFFFF0000u) | (bits & 0xFFFFu);
}
__device__ inline float join_master(unsigned short value, unsigned short rest) {
    return __uint_as_float(((u32)value << 16) + (u32)(int)(short)rest);
}

// Masters: f32 values, or bf16 values with their rests.
__device__ inline Quad get_masters(const Mat& param, const Mat& rest, u64 i) {
    if (param.kind == 0) return get_quad(param, i);
    Vec2 v = *(const Vec2*)((const unsigned short*)param.address + i);
    Vec2 r = *(const Vec2*)((const unsigned short*)rest.address + i);
    return {join_master(v.x, r.x), join_master(v.x >> 16, r.x >> 16), join_master(v.y, r.y),
            join_master(v.y >> 16, r.y >> 16)};
}
__device__ inline void put_masters(const Mat& param, const Mat& rest, u64 i, const Quad& q) {
    if (param.kind == 0) return put_quad(param, i, q);
    u32 s[QUAD];
    for (int j = 0; j < QUAD; j++) s[j] = split_master(q.at[j]);
    *(Vec2*)((unsigned short*)param.address + i) = {s[0] >> 16 | (s[1] & 0xFFFF0000u), s[2] >> 16 | (s[3] & 0xFFFF0000u)};
    *(Vec2*)((unsigned short*)rest.address + i) = {(s[0] & 0xFFFFu) | s[1] << 16, (s[2] & 0xFFFFu) | s[3] << 16};
}

// Quads of a thread that are on their way at a time.
#define QUADS 2

extern "C" __global__ void adamw(
    Mat param, Mat m, Mat v, Mat grad, Mat scalars, Mat rest, u64 skip_flag, Betas betas, Runs runs, Post post
) {
    begin(post);
    if (skip_flag && *(const int*)skip_flag != 0) return;
    __shared__ u64 ends[MOST_RUNS];
    __shared__ Factors factors[MOST_RUNS];
    u32 count = (u32)runs.count;
    if (threadIdx.x < count) {
        u64 end = runs.ends[threadIdx.x];
        const float* s = (const float*)scalars.address + (end >> 48) * 4;
        ends[threadIdx.x] = end & 0xFFFFFFFFFFFFull;
        float shrink = (float)(1.0 - (double)s[LR] * runs.decays[threadIdx.x]);
        float rate = (float)((double)s[LR] / (double)s[CORRECTION1]);
        factors[threadIdx.x] = {s[CLIP], shrink, rate, (float)(1.0 / sqrt((double)s[CORRECTION2]))};
    }
    Rules rules = {(float)betas.beta1, (float)(1.0 - betas.beta1), (float)betas.beta2, (float)(1.0 - betas.beta2),
                   (float)betas.eps};
    __syncthreads();
    u64 numel = param.rows * param.cols, whole = 0;
    if (is_flat(param) && is_flat(m) && is_flat(v) && is_flat(grad) && is_flat(rest)) whole = numel / QUAD * QUAD;
    u64 step = (u64)gridDim.x * blockDim.x * QUAD;
    for (u64 from = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * QUAD; from < whole; from += QUADS * step) {
        Quad value[QUADS], m1[QUADS], m2[QUADS], g[QUADS];
#pragma unroll
        for (int q = 0; q < QUADS; q++) {
            u64 i = from + q * step;
            if (i >= whole) continue;
            value[q] = get_masters(param, rest, i);
            m1[q] = get_quad(m, i);
            m2[q] = get_quad(v, i);
            g[q] = get_quad(grad, i);
        }
#pragma unroll
        for (int q = 0; q < QUADS; q++) {
            u64 i = from + q * step;
            if (i >= whole) continue;
            u32 run = run_of(ends, count, i);
            Factors f = factors[run];
            u64 end = ends[run];
            for (int j = 0; j < QUAD; j++) {
                if (i + j >= end) {
                    run = run_of(ends, count, i + j);
                    f = factors[run];
                    end = ends[run];
                }
                take_step(value[q].at[j], m1[q].at[j], m2[q].at[j], g[q].at[j], rules, f);
            }
            put_quad(m, i, m1[q]);
            put_quad(v, i, m2[q]);
            put_masters(param, rest, i, value[q]);
        }
    }
    // What is not in one piece, and the last elements of what is.
    EACH(left, numel - whole) {
        u64 i = whole + left, at = place(param, i);
        float *m1 = (float*)m.address + place(m, i), *m2 = (float*)v.address + place(v, i);
        float g = get(grad, place(grad, i));
        Factors f = factors[run_of(ends, count, i)];
        if (param.kind == 0) {
            take_step(((float*)param.address)[at], *m1, *m2, g, rules, f);
            continue;
        }
        unsigned short *value = (unsigned short*)param.address + at, *low = (unsigned short*)rest.address + place(rest, i);
        float master = join_master(*value, *low);
        take_step(master, *m1, *m2, g, rules, f);
        u32 halves = split_master(master);
        *value = (unsigned short)(halves >> 16);
        *low = (unsigned short)halves;
    }
}

extern "C" __global__ void advance_adam(Mat step, Mat scalars, u64 skip_flag, Betas betas, Post post) {
    begin(post);
    if (blockIdx.x != 0 || threadIdx.x != 0 || (skip_flag && *(const int*)skip_flag != 0)) return;
    int taken = *(int*)step.address;
    if (taken != 0x7FFFFFFF) taken++;
    *(int*)step.address = taken;
    float* s = (float*)scalars.address;
    s[CORRECTION1] = (float)(1.0 - pow(betas.beta1, (double)taken));
    s[CORRECTION2] = (float)(1.0 - pow(betas.beta2, (double)taken));
}

// One block: for losses, partial sums and the like.
extern "C" __global__ void sum(Mat x, Mat total, Factor by, Post post) {
    begin(post);
    double part = 0.0;
    for (u64 i = threadIdx.x; i < x.rows * x.cols; i += THREADS) part += get(x, place(x, i));
    double all = block_sum(part);
    if (threadIdx.x == 0) *(float*)total.address = (float)((double)factor(by) * all);
}

// Threads of a block of the next one: there are few blocks, and each must keep its multiprocessor busy.
#define NORM_THREADS 1024
// Runs of a thread that are on their way at a time.
#define NORM_RUNS 2

// Neighbours first: eight terms with the error of three.
__device__ inline float squares(const Run& x) {
    float s[RUN];
    for (int i = 0; i < RUN; i++) s[i] = x.at[i] * x.at[i];
    return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}

// Block p sums the squares of elements p * piece to (p + 1) * piece.
extern "C" __global__ __launch_bounds__(NORM_THREADS) void squared_norm(Mat x, Mat partials, u64 piece, Post post) {
    begin(post);
    __shared__ double part[NORM_THREADS / 32];
    for (u64 p = blockIdx.x; p < partials.rows * partials.cols; p += gridDim.x) {
        u64 count = x.rows * x.cols, from = p * piece < count ? p * piece : count;
        u64 to = from + piece < count ? from + piece : count, i = from + threadIdx.x * RUN;
        bool wide = is_flat(x) && from % RUN == 0;
        double sum = 0.0;
        for (; wide && i + (NORM_RUNS - 1) * NORM_THREADS * RUN + RUN <= to; i += NORM_RUNS * NORM_THREADS * RUN) {
            Run run[NORM_RUNS];
#pragma unroll
            for (int k = 0; k < NORM_RUNS; k++) run[k] = get_run(x, i + k * NORM_THREADS * RUN, RUN, true);
#pragma unroll
            for (int k = 0; k < NORM_RUNS; k++) sum += squares(run[k]);
        }
        for (; i < to; i += NORM_THREADS * RUN) sum += squares(get_run(x, i, run_length(to, i), wide));
        for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(0xFFFFFFFFu, sum, step);
        __syncthreads();
        if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
        __syncthreads();
        if (threadIdx.x != 0) continue;
        double all = 0.0;
        for (int w = 0; w < NORM_THREADS / 32; w++) all += part[w];
        ((float*)partials.address)[p] = (float)all;
    }
}

extern "C" __global__ void clip_factor(Mat squared, Mat norm, Mat clip, Mat nonfinite, u64 limit_bits, Post post) {
    begin(post);
    if (blockIdx.x != 0 || threadIdx.x != 0) return;
    double limit = (double)__uint_as_float((u32)limit_bits), length = sqrt((double)*(const float*)squared.address);
    // False for NaN too.
    bool finite = length <= 1.7976931348623157e308;
    double share = limit / (length + 1e-6);
    *(float*)norm.address = (float)length;
    *(float*)clip.address = !finite ? 0.0f : limit == 0.0 ? 1.0f : (float)(share < 1.0 ? share : 1.0);
    *(int*)nonfinite.address = finite ? 0 : 1;
}
