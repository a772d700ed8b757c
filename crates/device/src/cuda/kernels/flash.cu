// Causal attention of bf16 with heads of 64 columns, on tensor cores: probabilities stay in registers and are rounded to
// bf16 where they are multiplied, sums are f32. Rows begin at multiples of 16 bytes.
//
// A warp has 16 rows of a tile. Its part of a product of 16 by 8 is, in lane 4 g + t: rows g and g + 8, columns 2 t and
// 2 t + 1 (`mma.m16n8k16`).

extern __shared__ Vec4 shared[];

#define WIDTH 64
// Pieces of 16 bytes of a row.
#define PIECES (WIDTH / 8)
#define WARPS (THREADS / 32)
// Rows that a block owns, and rows that pass by at a time.
#define OWN (16 * WARPS)
#define PASSING 64
#define LOG2E 1.4426950408889634f
#define INFINITE __uint_as_float(0x7F800000u)

struct Heads {
    u64 seq_len, head_dim, scale_bits;
};

// A head's columns of a sequence.
struct Head {
    const unsigned short* first;
    u64 pitch;
    u32 rows;
};

__device__ inline Head head_of(const Mat& m, u32 t, u32 b, u32 head) {
    const unsigned short* first = (const unsigned short*)m.address + (u64)b * t * m.pitch + (u64)head * WIDTH;
    return {first, m.pitch, t};
}

__device__ inline u32 address_of(const void* p) {
    u32 at;
    asm("{ .reg .u64 full; cvta.to.shared.u64 full, %1; cvt.u32.u64 %0, full; }" : "=r"(at) : "l"(p));
    return at;
}

// Pieces of eight rows that lie below each other are in different banks.
__device__ inline u32 piece(u32 tile, u32 row, u32 at) { return tile + (row * PIECES + (at ^ (row % 8))) * 16; }

__device__ inline void copy_piece(u32 to, const void* from, bool there) {
    u32 bytes = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ inline void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ inline void arrived() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

// Rows from, from + 1, .. to a tile; 0 behind the end of the sequence.
template <int ROWS> __device__ inline void load(u32 tile, const Head& h, u32 from) {
    for (u32 i = threadIdx.x; i < ROWS * PIECES; i += THREADS) {
        u32 r = i / PIECES, at = i % PIECES;
        bool there = from + r < h.rows;
        copy_piece(piece(tile, r, at), h.first + (u64)(there ? from + r : 0) * h.pitch + at * 8, there);
    }
}

// Four matrices of 8 by 8; a lane gives the address of a row of one.
__device__ inline void matrices(u32 (&out)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(at)
                 : "memory");
}
__device__ inline void transposed_matrices(u32 (&out)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(at)
                 : "memory");
}
__device__ inline void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ inline float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline u32 pack(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

typedef u32 Rows[WIDTH / 16][4];    // 16 rows of a head, to be multiplied from the left
typedef float Scores[PASSING / 8][4]; // 16 rows against those that pass by
typedef float Sums[WIDTH / 8][4];   // 16 rows of a result

// The warp's rows of a tile of OWN rows.
__device__ inline void take_rows(Rows& out, u32 tile) {
    u32 lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane % 16;
    for (u32 k = 0; k < WIDTH / 16; k++) matrices(out[k], piece(tile, row, 2 * k + lane / 16));
}

// scores = rows times the transposed tile of PASSING rows.
__device__ inline void score(Scores& out, const Rows& rows, u32 tile) {
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 n = 0; n < PASSING / 8; n++) {
        for (u32 i = 0; i < 4; i++) out[n][i] = 0.0f;
#pragma unroll
        for (u32 k = 0; k < WIDTH / 16; k += 2) {
            u32 b[4];
            matrices(b, piece(tile, n * 8 + lane % 8, 2 * k + lane / 8));
            multiply(out[n], rows[k], b[0], b[1]);
            multiply(out[n], rows[k + 1], b[2], b[3]);
        }
    }
}

// sums += p times the tile of PASSING rows.
__device__ inline void gather(Sums& sums, const Scores& p, u32 tile) {
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 k = 0; k < PASSING / 16; k++) {
        const float(&low)[4] = p[2 * k], (&high)[4] = p[2 * k + 1];
        u32 a[4] = {pack(low[0], low[1]), pack(low[2], low[3]), pack(high[0], high[1]), pack(high[2], high[3])};
#pragma unroll
        for (u32 n = 0; n < WIDTH / 8; n += 2) {
            u32 b[4];
            transposed_matrices(b, piece(tile, k * 16 + lane % 16, n + lane / 16));
            multiply(sums[n], a, b[0], b[1]);
            multiply(sums[n + 1], a, b[2], b[3]);
        }
    }
}

__device__ inline void put_rows(const Mat& m, u32 t, u32 b, u32 head, u32 first_row, const Sums& sums, float low, float high) {
    u32 lane = threadIdx.x % 32, row = first_row + threadIdx.x / 32 * 16 + lane / 4;
    unsigned short* to = (unsigned short*)m.address + ((u64)b * t + row) * m.pitch + (u64)head * WIDTH + lane % 4 * 2;
#pragma unroll
    for (u32 n = 0; n < WIDTH / 8; n++) {
        if (row < t) *(u32*)(to + n * 8) = pack(sums[n][0] * low, sums[n][1] * low);
        if (row + 8 < t) *(u32*)(to + 8 * m.pitch + n * 8) = pack(sums[n][2] * high, sums[n][3] * high);
    }
}

__device__ inline float quad_sum(float x) {
    x += __shfl_xor_sync(0xFFFFFFFFu, x, 1);
    return x + __shfl_xor_sync(0xFFFFFFFFu, x, 2);
}
__device__ inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
}

// Which tile a block has: the long ones first.
struct Job {
    u32 t, b, head, first;
};
__device__ inline Job job_of(u32 at, const Heads& spec, u32 batch, u32 heads, bool from_end) {
    u32 t = (u32)spec.seq_len, tiles = (t + OWN - 1) / OWN, each = batch * heads, tile = at / each;
    return {t, at % each / heads, at % each % heads, (from_end ? tiles - 1 - tile : tile) * OWN};
}
__device__ inline u32 jobs(const Heads& spec, u64 rows, u64 heads) {
    u64 t = spec.seq_len;
    return (u32)(rows / t * heads * ((t + OWN - 1) / OWN));
}

extern "C" __global__ __launch_bounds__(THREADS, 2) void flash(Mat q, Mat k, Mat v, Mat o, Mat lse, Heads spec, Post post) {
    begin(post);
    const u32 passing = PASSING * WIDTH * 2;
    u32 own = address_of(shared), keys = own + OWN * WIDTH * 2, values = keys + 2 * passing;
    u32 heads = (u32)(q.cols / WIDTH), kv_heads = (u32)(k.cols / WIDTH), batch = (u32)(q.rows / spec.seq_len);
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float scale = __uint_as_float((u32)spec.scale_bits), scale2 = scale * LOG2E;
    for (u32 at = blockIdx.x; at < jobs(spec, q.rows, heads); at += gridDim.x) {
        Job job = job_of(at, spec, batch, heads, true);
        u32 kv = job.head / (heads / kv_heads), row = job.first + warp * 16 + lane / 4;
        Head hk = head_of(k, job.t, job.b, kv), hv = head_of(v, job.t, job.b, kv);
        u32 last = job.first + OWN < job.t ? job.first + OWN : job.t, tiles = (last + PASSING - 1) / PASSING;
        __syncthreads();
        load<OWN>(own, head_of(q, job.t, job.b, job.head), job.first);
        load<PASSING>(keys, hk, 0);
        load<PASSING>(values, hv, 0);
        commit();
        Rows rows;
        Sums sums = {};
        float most[2] = {-INFINITE, -INFINITE}, total[2] = {0.0f, 0.0f};
        for (u32 tile = 0; tile < tiles; tile++) {
            u32 k0 = tile * PASSING, slot = tile % 2 * passing;
            if (tile + 1 < tiles) {
                load<PASSING>(keys + passing - slot, hk, k0 + PASSING);
                load<PASSING>(values + passing - slot, hv, k0 + PASSING);
            }
            commit();
            arrived<1>();
            __syncthreads();
            if (tile == 0) take_rows(rows, own);
            // Behind the last row of this warp nothing is seen.
            if (k0 <= job.first + warp * 16 + 15) {
                Scores p;
                score(p, rows, keys + slot);
#pragma unroll
                for (u32 half = 0; half < 2; half++) {
                    u32 mine = row + 8 * half;
                    float largest = most[half];
#pragma unroll
                    for (u32 n = 0; n < PASSING / 8; n++) {
#pragma unroll
                        for (u32 i = 0; i < 2; i++) {
                            float& s = p[n][2 * half + i];
                            if (k0 + n * 8 + lane % 4 * 2 + i > mine) s = -INFINITE;
                            largest = fmaxf(largest, s);
                        }
                    }
                    largest = quad_max(largest);
                    float shrink = power((most[half] - largest) * scale2), shift = largest * scale2, part = 0.0f;
                    most[half] = largest;
#pragma unroll
                    for (u32 n = 0; n < PASSING / 8; n++) {
#pragma unroll
                        for (u32 i = 0; i < 2; i++) {
                            float& s = p[n][2 * half + i];
                            s = power(fmaf(s, scale2, -shift));
                            part += s;
                        }
                    }
                    total[half] = fmaf(total[half], shrink, part);
#pragma unroll
                    for (u32 n = 0; n < WIDTH / 8; n++) {
                        sums[n][2 * half] *= shrink;
                        sums[n][2 * half + 1] *= shrink;
                    }
                }
                gather(sums, p, values + slot);
            }
            __syncthreads();
        }
        float low = quad_sum(total[0]), high = quad_sum(total[1]);
        put_rows(o, job.t, job.b, job.head, job.first, sums, 1.0f / low, 1.0f / high);
        float* ends = (float*)lse.address + ((u64)job.b * heads + job.head) * job.t;
        if (lane % 4 == 0 && row < job.t) ends[row] = fmaf(most[0], scale, logf(low));
        if (lane % 4 == 0 && row + 8 < job.t) ends[row + 8] = fmaf(most[1], scale, logf(high));
    }
}

// p = probabilities, ds = gradients of scores before their scale, from products; for rows of queries or, `turned`, of keys.
// `ends` and `deltas` are those of the two rows, or of the columns.
template <bool TURNED>
__device__ inline void soften(
    Scores& p, Scores& ds, u32 row, u32 column, const float* ends, const float* deltas, float scale, float scale2
) {
    u32 t = threadIdx.x % 4;
#pragma unroll
    for (u32 n = 0; n < PASSING / 8; n++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 r = row + i / 2 * 8, at = n * 8 + t * 2 + i % 2, c = column + at, own = TURNED ? at : i / 2;
            bool seen = TURNED ? r <= c : c <= r;
            float e = seen ? power(fmaf(p[n][i], scale2, -ends[own])) : 0.0f;
            p[n][i] = e;
            ds[n][i] = e * (ds[n][i] - deltas[own]) * scale;
        }
    }
}

// dq; and the sums of d_o o for `flash_keys`, by [batch, heads, seq_len].
extern "C" __global__ __launch_bounds__(THREADS, 1) void flash_queries(
    Mat q, Mat k, Mat v, Mat o, Mat d_o, Mat lse, Mat dq, Heads spec, u64 scratch, Post post
) {
    begin(post);
    const u32 passing = PASSING * WIDTH * 2;
    u32 own = address_of(shared), own_d = own + OWN * WIDTH * 2, keys = own_d + OWN * WIDTH * 2, values = keys + 2 * passing;
    u32 heads = (u32)(q.cols / WIDTH), kv_heads = (u32)(k.cols / WIDTH), batch = (u32)(q.rows / spec.seq_len);
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float scale = __uint_as_float((u32)spec.scale_bits), scale2 = scale * LOG2E;
    for (u32 at = blockIdx.x; at < jobs(spec, q.rows, heads); at += gridDim.x) {
        Job job = job_of(at, spec, batch, heads, true);
        u32 kv = job.head / (heads / kv_heads), row = job.first + warp * 16 + lane / 4;
        Head hk = head_of(k, job.t, job.b, kv), hv = head_of(v, job.t, job.b, kv), ho = head_of(o, job.t, job.b, job.head);
        u32 last = job.first + OWN < job.t ? job.first + OWN : job.t, tiles = (last + PASSING - 1) / PASSING;
        __syncthreads();
        load<OWN>(own, head_of(q, job.t, job.b, job.head), job.first);
        load<OWN>(own_d, head_of(d_o, job.t, job.b, job.head), job.first);
        load<PASSING>(keys, hk, 0);
        load<PASSING>(values, hv, 0);
        commit();
        Rows rows, rows_d;
        Sums sums = {};
        float ends[2] = {}, deltas[2] = {};
        for (u32 tile = 0; tile < tiles; tile++) {
            u32 k0 = tile * PASSING, slot = tile % 2 * passing;
            if (tile + 1 < tiles) {
                load<PASSING>(keys + passing - slot, hk, k0 + PASSING);
                load<PASSING>(values + passing - slot, hv, k0 + PASSING);
            }
            commit();
            arrived<1>();
            __syncthreads();
            if (tile == 0) {
                take_rows(rows, own);
                take_rows(rows_d, own_d);
                u64 place = ((u64)job.b * heads + job.head) * job.t + row;
                for (u32 half = 0; half < 2; half++) {
                    u32 mine = row + 8 * half;
                    float part = 0.0f;
                    for (u32 i = 0; i < 2 * (WIDTH / 16) && mine < job.t; i++) {
                        u32 both = *(const u32*)(ho.first + mine * ho.pitch + i * 8 + lane % 4 * 2);
                        u32 grad = rows_d[i / 2][i % 2 * 2 + half];
                        part = fmaf(__uint_as_float(both << 16), __uint_as_float(grad << 16), part);
                        part = fmaf(__uint_as_float(both & 0xFFFF0000u), __uint_as_float(grad & 0xFFFF0000u), part);
                    }
                    deltas[half] = quad_sum(part);
                    bool there = mine < job.t;
                    ends[half] = there ? ((const float*)lse.address)[place + 8 * half] * LOG2E : INFINITE;
                    if (there && lane % 4 == 0) ((float*)scratch)[place + 8 * half] = deltas[half];
                }
            }
            if (k0 <= job.first + warp * 16 + 15) {
                Scores p, ds;
                score(p, rows, keys + slot);
                score(ds, rows_d, values + slot);
                soften<false>(p, ds, row, k0, ends, deltas, scale, scale2);
                gather(sums, ds, keys + slot);
            }
            __syncthreads();
        }
        put_rows(dq, job.t, job.b, job.head, job.first, sums, 1.0f, 1.0f);
    }
}

// dk and dv, over the queries of all heads of the group from the tile's first key on.
extern "C" __global__ __launch_bounds__(THREADS, 1) void flash_keys(
    Mat q, Mat k, Mat v, Mat d_o, Mat lse, Mat dk, Mat dv, Heads spec, u64 scratch, Post post
) {
    begin(post);
    const u32 passing = PASSING * WIDTH * 2;
    __shared__ float ends[2][PASSING], deltas[2][PASSING];
    u32 own = address_of(shared), own_v = own + OWN * WIDTH * 2, queries = own_v + OWN * WIDTH * 2;
    u32 grads = queries + 2 * passing;
    u32 heads = (u32)(q.cols / WIDTH), kv_heads = (u32)(k.cols / WIDTH), batch = (u32)(q.rows / spec.seq_len);
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = heads / kv_heads;
    float scale = __uint_as_float((u32)spec.scale_bits), scale2 = scale * LOG2E;
    for (u32 at = blockIdx.x; at < jobs(spec, q.rows, kv_heads); at += gridDim.x) {
        Job job = job_of(at, spec, batch, kv_heads, false);
        u32 row = job.first + warp * 16 + lane / 4, steps = (job.t - job.first + PASSING - 1) / PASSING;
        // Tile i of the queries that pass by.
        auto fetch = [&](u32 i) {
            u32 head = job.head * group + i / steps, q0 = job.first + i % steps * PASSING, slot = i % 2;
            load<PASSING>(queries + slot * passing, head_of(q, job.t, job.b, head), q0);
            load<PASSING>(grads + slot * passing, head_of(d_o, job.t, job.b, head), q0);
            if (threadIdx.x < PASSING) {
                u64 place = ((u64)job.b * heads + head) * job.t + q0 + threadIdx.x;
                bool there = q0 + threadIdx.x < job.t;
                // Nothing of a query that is not there.
                ends[slot][threadIdx.x] = there ? ((const float*)lse.address)[place] * LOG2E : INFINITE;
                deltas[slot][threadIdx.x] = there ? ((const float*)scratch)[place] : 0.0f;
            }
        };
        __syncthreads();
        load<OWN>(own, head_of(k, job.t, job.b, job.head), job.first);
        load<OWN>(own_v, head_of(v, job.t, job.b, job.head), job.first);
        fetch(0);
        commit();
        Rows rows, rows_v;
        Sums sums_k = {}, sums_v = {};
        for (u32 i = 0; i < group * steps; i++) {
            u32 q0 = job.first + i % steps * PASSING, slot = i % 2;
            if (i + 1 < group * steps) fetch(i + 1);
            commit();
            arrived<1>();
            __syncthreads();
            if (i == 0) {
                take_rows(rows, own);
                take_rows(rows_v, own_v);
            }
            // Queries in front of the first key of this warp see none of its keys.
            if (q0 + PASSING > job.first + warp * 16) {
                Scores p, ds;
                score(p, rows, queries + slot * passing);
                score(ds, rows_v, grads + slot * passing);
                soften<true>(p, ds, row, q0, ends[slot], deltas[slot], scale, scale2);
                gather(sums_v, p, grads + slot * passing);
                gather(sums_k, ds, queries + slot * passing);
            }
            __syncthreads();
        }
        put_rows(dk, job.t, job.b, job.head, job.first, sums_k, 1.0f, 1.0f);
        put_rows(dv, job.t, job.b, job.head, job.first, sums_v, 1.0f, 1.0f);
    }
}
