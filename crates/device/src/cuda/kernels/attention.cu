// Causal attention of any element type, in tiles of SIDE queries by SIDE keys through shared memory, sums in f32. The
// threads are a square of 16 by 16; each has ROWS rows and ROWS columns of a tile of scores, and ROWS rows and COLS
// columns of a tile as wide as a head. ROWS and COLS are by the width of a head.

extern __shared__ float shared[];

#define LOWEST __uint_as_float(0xFF800000u)

// Sizes of q and of k, and what else a pass needs.
struct Heads {
    u64 seq_len, head_dim, scale_bits;
};

struct Shape {
    u32 t, d, heads, kv_heads, batch, tiles;
    float scale;
};

__device__ inline Shape shape_of(const Heads& spec, const Mat& q, const Mat& k, u32 side) {
    Shape s;
    s.t = (u32)spec.seq_len;
    s.d = (u32)spec.head_dim;
    s.heads = (u32)(q.cols / s.d);
    s.kv_heads = (u32)(k.cols / s.d);
    s.batch = (u32)(q.rows / s.t);
    s.tiles = (s.t + side - 1) / side;
    s.scale = __uint_as_float((u32)spec.scale_bits);
    return s;
}

// Sums and maxima over the 16 threads that share rows.
__device__ inline float across_sum(float x) {
    for (int step = 8; step > 0; step /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
    return x;
}
__device__ inline float across_max(float x) {
    for (int step = 8; step > 0; step /= 2) x = larger(x, __shfl_xor_sync(0xFFFFFFFFu, x, step));
    return x;
}

// Rows from, from + 1, .. of a head's columns, 0 behind the end of the sequence. Rows of `to` are d + 1 apart.
__device__ inline void load(float* to, const Mat& m, const Shape& s, u32 b, u32 head, u32 from, u32 side) {
    for (u32 i = threadIdx.x; i < side * s.d; i += THREADS) {
        u32 r = i / s.d, c = i % s.d;
        to[r * (s.d + 1) + c] = from + r < s.t ? get(m, spot(m, (u64)b * s.t + from + r, (u64)head * s.d + c)) : 0.0f;
    }
}

// Columns whose products are added up first, so that the error of a score does not grow with every column.
#define PART 8

// Products of the thread's rows of a with its rows of b.
template <int ROWS> __device__ inline void scores(float (&out)[ROWS][ROWS], const float* a, const float* b, u32 d) {
    u32 ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    for (int i = 0; i < ROWS; i++) {
        for (int j = 0; j < ROWS; j++) out[i][j] = 0.0f;
    }
    for (u32 from = 0; from < d; from += PART) {
        u32 end = from + PART < d ? from + PART : d;
        float part[ROWS][ROWS] = {};
        for (u32 c = from; c < end; c++) {
            float av[ROWS], bv[ROWS];
#pragma unroll
            for (int i = 0; i < ROWS; i++) av[i] = a[(ty * ROWS + i) * (d + 1) + c];
#pragma unroll
            for (int j = 0; j < ROWS; j++) bv[j] = b[(tx + 16 * j) * (d + 1) + c];
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
#pragma unroll
                for (int j = 0; j < ROWS; j++) part[i][j] = fmaf(av[i], bv[j], part[i][j]);
            }
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
#pragma unroll
            for (int j = 0; j < ROWS; j++) out[i][j] += part[i][j];
        }
    }
}

// sum += p b over SIDE rows of b, whose products are added up first, so that an error does not grow with every row. p is
// [SIDE][SIDE + 1]; transposed, its columns are the thread's rows.
template <int ROWS, int COLS>
__device__ inline void gather(float (&sum)[ROWS][COLS], const float* p, bool transposed, const float* b, u32 d) {
    const u32 side = 16 * ROWS;
    u32 ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    float part[ROWS][COLS] = {};
    for (u32 l = 0; l < side; l++) {
        float pv[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            u32 own = ty * ROWS + i;
            pv[i] = transposed ? p[l * (side + 1) + own] : p[own * (side + 1) + l];
        }
#pragma unroll
        for (int j = 0; j < COLS; j++) {
            float bv = tx + 16 * j < d ? b[l * (d + 1) + tx + 16 * j] : 0.0f;
#pragma unroll
            for (int i = 0; i < ROWS; i++) part[i][j] = fmaf(pv[i], bv, part[i][j]);
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
#pragma unroll
        for (int j = 0; j < COLS; j++) sum[i][j] += part[i][j];
    }
}

template <int ROWS, int COLS>
__device__ inline void store(const Mat& to, const float (&sum)[ROWS][COLS], const Shape& s, u32 b, u32 head, u32 from) {
    u32 ty = threadIdx.x / 16, tx = threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        u32 row = from + ty * ROWS + i;
#pragma unroll
        for (int j = 0; j < COLS; j++) {
            u32 c = tx + 16 * j;
            if (row < s.t && c < s.d) put(to, spot(to, (u64)b * s.t + row, (u64)head * s.d + c), sum[i][j]);
        }
    }
}

template <int ROWS, int COLS>
__device__ inline void forward(const Mat& q, const Mat& k, const Mat& v, const Mat& o, const Mat& lse, const Heads& spec) {
    const u32 side = 16 * ROWS;
    Shape s = shape_of(spec, q, k, side);
    u32 ty = threadIdx.x / 16, tx = threadIdx.x % 16, each = s.batch * s.heads;
    float *sq = shared, *skv = sq + side * (s.d + 1), *sp = skv + side * (s.d + 1);
    for (u32 job = blockIdx.x; job < each * s.tiles; job += gridDim.x) {
        // The long ones first.
        u32 q0 = (s.tiles - 1 - job / each) * side, h = job % each % s.heads, b = job % each / s.heads;
        u32 kv = h / (s.heads / s.kv_heads);
        __syncthreads();
        load(sq, q, s, b, h, q0, side);
        float sum[ROWS][COLS] = {}, most[ROWS], total[ROWS];
        for (int i = 0; i < ROWS; i++) {
            most[i] = LOWEST;
            total[i] = 0.0f;
        }
        for (u32 k0 = 0; k0 <= q0; k0 += side) {
            __syncthreads();
            load(skv, k, s, b, kv, k0, side);
            __syncthreads();
            float p[ROWS][ROWS];
            scores<ROWS>(p, sq, skv, s.d);
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                u32 row = q0 + ty * ROWS + i;
                float own = LOWEST, part = 0.0f;
#pragma unroll
                for (int j = 0; j < ROWS; j++) {
                    u32 key = k0 + tx + 16 * j;
                    p[i][j] = key <= row && key < s.t ? p[i][j] * s.scale : LOWEST;
                    own = larger(own, p[i][j]);
                }
                own = larger(across_max(own), most[i]);
                float shrink = expf(most[i] - own);
                most[i] = own;
#pragma unroll
                for (int j = 0; j < ROWS; j++) {
                    float e = expf(p[i][j] - own);
                    part += e;
                    sp[(ty * ROWS + i) * (side + 1) + tx + 16 * j] = e;
                }
                total[i] = fmaf(total[i], shrink, across_sum(part));
#pragma unroll
                for (int j = 0; j < COLS; j++) sum[i][j] *= shrink;
            }
            __syncthreads();
            load(skv, v, s, b, kv, k0, side);
            __syncthreads();
            gather<ROWS, COLS>(sum, sp, false, skv, s.d);
        }
        for (int i = 0; i < ROWS; i++) {
            u32 row = q0 + ty * ROWS + i;
            for (int j = 0; j < COLS; j++) sum[i][j] /= total[i];
            if (tx == 0 && row < s.t) put(lse, ((u64)b * s.heads + h) * s.t + row, most[i] + logf(total[i]));
        }
        store<ROWS, COLS>(o, sum, s, b, h, q0);
    }
}

// What a backward pass reads.
struct Given {
    Mat q, k, v, o, d_o, lse;
};

// Queries of a tile with their gradients, and what there is of each: log of the sum, and the sum of d_o o.
struct Queries {
    float *q, *d_o, *lse, *delta;
};

__device__ inline void load_queries(const Queries& to, const Given& g, const Shape& s, u32 b, u32 h, u32 from, u32 side) {
    load(to.q, g.q, s, b, h, from, side);
    load(to.d_o, g.d_o, s, b, h, from, side);
    __syncthreads();
    // Four threads for a row, each with every fourth part. They are added as `scores` adds its own, for the gradient of a
    // score is a difference of the two: where there is one key, it must be nothing.
    u32 r = threadIdx.x / 4, lane = threadIdx.x % 4, first = threadIdx.x % 32 / 4 * 4;
    bool is_there = r < side && from + r < s.t;
    float delta = 0.0f;
    for (u32 four = 0; four < s.d; four += 4 * PART) {
        float part = 0.0f;
        u32 start = four + lane * PART, end = start + PART < s.d ? start + PART : s.d;
        for (u32 c = start; is_there && c < end; c++) {
            u64 at = spot(g.o, (u64)b * s.t + from + r, (u64)h * s.d + c);
            part = fmaf(to.d_o[r * (s.d + 1) + c], get(g.o, at), part);
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) delta += __shfl_sync(0xFFFFFFFFu, part, first + i);
    }
    if (r < side && lane == 0) {
        to.delta[r] = delta;
        to.lse[r] = from + r < s.t ? get(g.lse, ((u64)b * s.heads + h) * s.t + from + r) : 0.0f;
    }
}

// Probabilities of a tile and the gradients of its scores before their scale. Both are 0 where masked.
template <int ROWS>
__device__ inline void softness(
    const Queries& own, const float* sk, const float* sv, const Shape& s, u32 q0, u32 k0, float* sp, float* sds
) {
    const u32 side = 16 * ROWS;
    u32 ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    float p[ROWS][ROWS], dp[ROWS][ROWS];
    scores<ROWS>(p, own.q, sk, s.d);
    scores<ROWS>(dp, own.d_o, sv, s.d);
    for (int i = 0; i < ROWS; i++) {
        for (int j = 0; j < ROWS; j++) {
            u32 r = ty * ROWS + i, key = k0 + tx + 16 * j;
            bool seen = key <= q0 + r && q0 + r < s.t;
            float e = seen ? expf(p[i][j] * s.scale - own.lse[r]) : 0.0f;
            if (sp) sp[r * (side + 1) + tx + 16 * j] = e;
            sds[r * (side + 1) + tx + 16 * j] = seen ? e * (dp[i][j] - own.delta[r]) * s.scale : 0.0f;
        }
    }
}

// dk and dv: a block for each tile of keys, over the queries from there on.
template <int ROWS, int COLS> __device__ inline void backward_keys(const Given& g, const Mat& dk, const Mat& dv, const Heads& spec) {
    const u32 side = 16 * ROWS;
    Shape s = shape_of(spec, g.q, g.k, side);
    u32 each = s.batch * s.kv_heads, group = s.heads / s.kv_heads, tile = side * (s.d + 1);
    float *sk = shared, *sv = sk + tile, *sp = sv + 3 * tile, *sds = sp + side * (side + 1);
    Queries own = {sv + tile, sv + 2 * tile, sds + side * (side + 1), sds + side * (side + 2)};
    for (u32 job = blockIdx.x; job < each * s.tiles; job += gridDim.x) {
        u32 k0 = job / each * side, kv = job % each % s.kv_heads, b = job % each / s.kv_heads;
        __syncthreads();
        load(sk, g.k, s, b, kv, k0, side);
        load(sv, g.v, s, b, kv, k0, side);
        float sum_k[ROWS][COLS] = {}, sum_v[ROWS][COLS] = {};
        for (u32 h = kv * group; h < (kv + 1) * group; h++) {
            for (u32 q0 = k0; q0 < s.t; q0 += side) {
                __syncthreads();
                load_queries(own, g, s, b, h, q0, side);
                __syncthreads();
                softness<ROWS>(own, sk, sv, s, q0, k0, sp, sds);
                __syncthreads();
                gather<ROWS, COLS>(sum_v, sp, true, own.d_o, s.d);
                gather<ROWS, COLS>(sum_k, sds, true, own.q, s.d);
            }
        }
        store<ROWS, COLS>(dk, sum_k, s, b, kv, k0);
        store<ROWS, COLS>(dv, sum_v, s, b, kv, k0);
    }
}

// dq: a block for each tile of queries, over the keys up to there.
template <int ROWS, int COLS> __device__ inline void backward_queries(const Given& g, const Mat& dq, const Heads& spec) {
    const u32 side = 16 * ROWS;
    Shape s = shape_of(spec, g.q, g.k, side);
    u32 each = s.batch * s.heads, tile = side * (s.d + 1);
    float *sk = shared, *sv = sk + tile, *sds = sv + 3 * tile;
    Queries own = {sv + tile, sv + 2 * tile, sds + side * (side + 1), sds + side * (side + 2)};
    for (u32 job = blockIdx.x; job < each * s.tiles; job += gridDim.x) {
        u32 q0 = (s.tiles - 1 - job / each) * side, h = job % each % s.heads, b = job % each / s.heads;
        u32 kv = h / (s.heads / s.kv_heads);
        __syncthreads();
        load_queries(own, g, s, b, h, q0, side);
        float sum[ROWS][COLS] = {};
        for (u32 k0 = 0; k0 <= q0; k0 += side) {
            __syncthreads();
            load(sk, g.k, s, b, kv, k0, side);
            load(sv, g.v, s, b, kv, k0, side);
            __syncthreads();
            softness<ROWS>(own, sk, sv, s, q0, k0, (float*)0, sds);
            __syncthreads();
            gather<ROWS, COLS>(sum, sds, false, sk, s.d);
        }
        store<ROWS, COLS>(dq, sum, s, b, h, q0);
    }
}

// Heads of at most 64, 128 and 256 columns.
extern "C" __global__ void attention_64(Mat q, Mat k, Mat v, Mat o, Mat lse, Heads spec, Post post) {
    begin(post);
    forward<4, 4>(q, k, v, o, lse, spec);
}
extern "C" __global__ void attention_128(Mat q, Mat k, Mat v, Mat o, Mat lse, Heads spec, Post post) {
    begin(post);
    forward<4, 8>(q, k, v, o, lse, spec);
}
extern "C" __global__ void attention_256(Mat q, Mat k, Mat v, Mat o, Mat lse, Heads spec, Post post) {
    begin(post);
    forward<2, 16>(q, k, v, o, lse, spec);
}

extern "C" __global__ void attention_keys_64(
    Mat q, Mat k, Mat v, Mat o, Mat d_o, Mat lse, Mat dk, Mat dv, Heads spec, Post post
) {
    begin(post);
    backward_keys<4, 4>({q, k, v, o, d_o, lse}, dk, dv, spec);
}
extern "C" __global__ void attention_keys_128(
    Mat q, Mat k, Mat v, Mat o, Mat d_o, Mat lse, Mat dk, Mat dv, Heads spec, Post post
) {
    begin(post);
    backward_keys<4, 8>({q, k, v, o, d_o, lse}, dk, dv, spec);
}
extern "C" __global__ void attention_keys_256(
    Mat q, Mat k, Mat v, Mat o, Mat d_o, Mat lse, Mat dk, Mat dv, Heads spec, Post post
) {
    begin(post);
    backward_keys<2, 16>({q, k, v, o, d_o, lse}, dk, dv, spec);
}

extern "C" __global__ void attention_queries_64(
    Mat q, Mat k, Mat v, Mat o, Mat d_o, Mat lse, Mat dq, Heads spec, Post post
) {
    begin(post);
    backward_queries<4, 4>({q, k, v, o, d_o, lse}, dq, spec);
}
extern "C" __global__ void attention_queries_128(
    Mat q, Mat k, Mat v, Mat o, Mat d_o, Mat lse, Mat dq, Heads spec, Post post
) {
    begin(post);
    backward_queries<4, 8>({q, k, v, o, d_o, lse}, dq, spec);
}
extern "C" __global__ void attention_queries_256(
    Mat q, Mat k, Mat v, Mat o, Mat d_o, Mat lse, Mat dq, Heads spec, Post post
) {
    begin(post);
    backward_queries<2, 16>({q, k, v, o, d_o, lse}, dq, spec);
}
