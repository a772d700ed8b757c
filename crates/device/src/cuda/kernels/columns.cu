// Sums over all rows of a matrix, by column: the gradients of norms' weights and of biases.
//
// A lane has a run of columns, a warp those of a tile, and the warps of a block share one of `runs` stretches of `step`
// rows: each takes groups of rows that it loads at once. Of plain sums a group is added pairwise, groups in f32; for
// norms' weights all is in f64, and so are warps and stretches of both. With one stretch that is the result; else it lies
// in `scratch`, and `fold` adds the stretches in order.

#define WARPS (THREADS / 32)
#define TILE (32 * RUN)

// Which sum of a row and a column: dy, dy times the normalised x, or dy times x over its root mean square.
#define PLAIN 0
#define CENTRED 1
#define SCALED 2

// Rows of a group.
#define GROUP 8

struct Columns {
    Mat dy, x, mean, rstd, dweight, dbias;
    Keep keep;
    u64 runs, step, scratch;
};

// Elements of any kind at any address.
#define ANY 3
template <int KIND> struct Held {
    Raw<KIND> raw;
};
template <> struct Held<ANY> {
    Run run;
};
template <int KIND> __device__ inline Held<KIND> held(const Mat& m, u64 at, u32 n) {
    if constexpr (KIND == ANY) return {get_run(m, at, n, false)};
    else return {raw_run<KIND>(m, at)};
}
template <int KIND> __device__ inline Held<KIND> held_zeros() {
    if constexpr (KIND == ANY) return {};
    else return {raw_zeros<KIND>()};
}
template <int KIND> __device__ inline Run opened(const Held<KIND>& held) {
    if constexpr (KIND == ANY) return held.run;
    else return opened(held.raw);
}

// Adds rows pairwise, `count` of them a power of two, into the first.
template <int COUNT> __device__ inline void add_pairs(Run (&rows)[COUNT]) {
#pragma unroll
    for (int step = 1; step < COUNT; step *= 2) {
#pragma unroll
        for (int k = 0; k < COUNT; k += 2 * step) {
#pragma unroll
            for (int i = 0; i < RUN; i++) rows[k].at[i] += rows[k + step].at[i];
        }
    }
}

// What a lane adds up in.
template <class T> struct Totals {
    T at[RUN];
};
template <int> struct TotalOf {
    using Type = double;
};
template <> struct TotalOf<PLAIN> {
    using Type = float;
};

// The sums of the lane's columns over the warp's rows of from..to: of dy.
template <int KIND>
__device__ inline void warp_sums(const Columns& s, u64 c, u32 n, u64 from, u64 to, Totals<float>& sums) {
    for (u64 first = from + threadIdx.x / 32 * GROUP; first < to; first += WARPS * GROUP) {
        Held<KIND> d[GROUP];
        Run rows[GROUP];
#pragma unroll
        for (int k = 0; k < GROUP; k++) {
            d[k] = first + k < to ? held<KIND>(s.dy, (first + k) * s.dy.pitch + c, n) : held_zeros<KIND>();
        }
#pragma unroll
        for (int k = 0; k < GROUP; k++) rows[k] = opened(d[k]);
        add_pairs(rows);
#pragma unroll
        for (int i = 0; i < RUN; i++) sums.at[i] += rows[0].at[i];
    }
}

// Of dy times x as the norm made it, and of dy beside it if the norm was centred.
template <int KIND, bool CENTRES>
__device__ inline void warp_sums(
    const Columns& s, u64 c, u32 n, u64 from, u64 to, Totals<double>& dweight, Totals<double>& dbias
) {
    // Two matrices: half as many rows, so that as much is on its way.
    constexpr int ROWS = GROUP / 2;
    for (u64 first = from + threadIdx.x / 32 * ROWS; first < to; first += WARPS * ROWS) {
        Held<KIND> d[ROWS], v[ROWS];
        float shift[ROWS], scale[ROWS];
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            u64 row = first + k;
            bool is_there = row < to;
            d[k] = is_there ? held<KIND>(s.dy, row * s.dy.pitch + c, n) : held_zeros<KIND>();
            v[k] = is_there ? held<KIND>(s.x, row * s.x.pitch + c, n) : held_zeros<KIND>();
            shift[k] = is_there && CENTRES ? ((const float*)s.mean.address)[row] : 0.0f;
            scale[k] = is_there ? ((const float*)s.rstd.address)[row] : 0.0f;
        }
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            Run dy = opened(d[k]), x = opened(v[k]);
#pragma unroll
            for (int i = 0; i < RUN; i++) {
                double hat = ((double)x.at[i] - (double)shift[k]) * (double)scale[k];
                dweight.at[i] = fma((double)dy.at[i], hat, dweight.at[i]);
                if (CENTRES) dbias.at[i] += (double)dy.at[i];
            }
        }
    }
}

// The warps' sums of the thread's column of the tile.
template <class T> __device__ inline double warps_sum(const Totals<T>& own) {
    __shared__ T parts[WARPS][TILE];
    __syncthreads();
    for (int i = 0; i < RUN; i++) parts[threadIdx.x / 32][threadIdx.x % 32 * RUN + i] = own.at[i];
    __syncthreads();
    double sum = 0.0;
    for (int w = 0; w < WARPS; w++) sum += parts[w][threadIdx.x];
    return sum;
}

template <int KIND, int WHAT> __device__ inline void sums(const Columns& s) {
    u64 cols = s.dy.cols, tiles = (cols + TILE - 1) / TILE;
    double* out = (double*)s.scratch;
    float kept = keep_factor(s.keep);
    for (u64 job = blockIdx.x; job < tiles * s.runs; job += gridDim.x) {
        u64 run = job / tiles, first = job % tiles * TILE, c = first + threadIdx.x % 32 * RUN;
        u64 from = run * s.step, to = c >= cols ? from : min(from + s.step, s.dy.rows);
        u32 n = c < cols ? run_length(cols, c) : 0;
        Totals<typename TotalOf<WHAT>::Type> dweight = {}, dbias = {};
        if constexpr (WHAT == PLAIN) warp_sums<KIND>(s, c, n, from, to, dweight);
        else warp_sums<KIND, WHAT == CENTRED>(s, c, n, from, to, dweight, dbias);
        double weight = warps_sum(dweight), bias = WHAT == CENTRED ? warps_sum(dbias) : 0.0;
        u64 own = first + threadIdx.x;
        if (own >= cols) continue;
        if (s.runs > 1) {
            out[run * cols + own] = weight;
            if (WHAT == CENTRED) out[(s.runs + run) * cols + own] = bias;
            continue;
        }
        accumulate(s.dweight, own, kept, (float)weight);
        if (WHAT == CENTRED) accumulate(s.dbias, own, kept, (float)bias);
    }
}

template <int WHAT> __device__ inline void sums_of_kind(const Columns& s) {
    bool wide = s.dy.cols % RUN == 0 && is_wide(s.dy) && (WHAT == PLAIN || is_wide(s.x));
    if (!wide) sums<ANY, WHAT>(s);
    else if (s.dy.kind == 1) sums<1, WHAT>(s);
    else sums<0, WHAT>(s);
}

extern "C" __global__ void column_sums(Mat dy, Mat dbias, Keep keep, u64 runs, u64 step, u64 scratch, Post post) {
    begin(post);
    sums_of_kind<PLAIN>({dy, dy, dy, dy, dbias, dbias, keep, runs, step, scratch});
}

extern "C" __global__ void column_sums_centred(
    Mat dy, Mat x, Mat mean, Mat rstd, Mat dweight, Mat dbias, Keep keep, u64 runs, u64 step, u64 scratch, Post post
) {
    begin(post);
    sums_of_kind<CENTRED>({dy, x, mean, rstd, dweight, dbias, keep, runs, step, scratch});
}

extern "C" __global__ void column_sums_scaled(
    Mat dy, Mat x, Mat rstd, Mat dweight, Keep keep, u64 runs, u64 step, u64 scratch, Post post
) {
    begin(post);
    sums_of_kind<SCALED>({dy, x, rstd, rstd, dweight, dweight, keep, runs, step, scratch});
}

// The sum in f64 of `count` entries of a column: of a block, thread t has column t % lanes of as many, and every so many
// entries, of which it loads a group at once. The first `lanes` threads get the sums. So a block has few columns, and
// there are many blocks.
template <class Entry> __device__ inline double column_of(u32 lanes, u64 count, const Entry& entry) {
    __shared__ double parts[WARPS][32];
    u32 step = THREADS / lanes;
    double own = 0.0;
    for (u64 first = threadIdx.x / lanes; first < count; first += step * GROUP) {
        decltype(entry(first)) some[GROUP];
#pragma unroll
        for (int k = 0; k < GROUP; k++) some[k] = first + k * step < count ? entry(first + k * step) : 0;
#pragma unroll
        for (int k = 0; k < GROUP; k++) own += (double)some[k];
    }
    for (u32 away = 16; away >= lanes; away /= 2) own += __shfl_xor_sync(0xFFFFFFFFu, own, away);
    __syncthreads();
    if (threadIdx.x % 32 < lanes) parts[threadIdx.x / 32][threadIdx.x % 32] = own;
    __syncthreads();
    double sum = 0.0;
    for (int w = 0; w < WARPS && threadIdx.x < lanes; w++) sum += parts[w][threadIdx.x];
    return sum;
}

// An entry of a result, whose old value is on its way before the new one is known.
struct Result {
    float kept, old;
};
__device__ inline Result result_of(const Mat& out, u64 at, const Keep& keep) {
    float kept = keep_factor(keep);
    return {kept, kept == 0.0f ? 0.0f : get(out, at)};
}
__device__ inline void put_result(const Mat& out, u64 at, const Result& r, double sum) {
    put(out, at, r.kept == 0.0f ? (float)sum : fmaf(r.kept, r.old, (float)sum));
}

// Columns of a block of `fold`.
#define FOLDED 8

extern "C" __global__ void fold(Mat dweight, Mat dbias, Keep keep, u64 runs, u64 scratch, Post post) {
    begin(post);
    u64 cols = dweight.cols, tiles = (cols + FOLDED - 1) / FOLDED;
    for (u64 job = blockIdx.x; job < tiles * (dbias.rows ? 2 : 1); job += gridDim.x) {
        u64 second = job / tiles, col = job % tiles * FOLDED + threadIdx.x % FOLDED;
        const double* in = (const double*)scratch + second * runs * cols + col;
        const Mat out = second ? dbias : dweight;
        bool is_there = col < cols, has_result = is_there && threadIdx.x < FOLDED;
        Result result = {};
        if (has_result) result = result_of(out, col, keep);
        double sum = column_of(FOLDED, is_there ? runs : 0, [&](u64 run) { return in[run * cols]; });
        if (has_result) put_result(out, col, result, sum);
    }
}

// Of rows that are one group: a lane adds them by itself.
template <int KIND> __device__ inline void group_sums(const Mat& dy, const Mat& dbias, float kept) {
    bool wide = is_wide(dbias);
    EACH_RUN(c, dy.cols) {
        u32 n = run_length(dy.cols, c);
        Held<KIND> held_rows[GROUP];
        Run rows[GROUP];
#pragma unroll
        for (int k = 0; k < GROUP; k++) {
            held_rows[k] = k < dy.rows ? held<KIND>(dy, k * dy.pitch + c, n) : held_zeros<KIND>();
        }
#pragma unroll
        for (int k = 0; k < GROUP; k++) rows[k] = opened(held_rows[k]);
        add_pairs(rows);
        if (kept != 0.0f) {
            Run old = get_run(dbias, c, n, wide);
#pragma unroll
            for (int i = 0; i < RUN; i++) rows[0].at[i] = fmaf(kept, old.at[i], rows[0].at[i]);
        }
        put_run(dbias, c, n, wide, rows[0]);
    }
}

extern "C" __global__ void column_sums_of_group(Mat dy, Mat dbias, Keep keep, Post post) {
    begin(post);
    float kept = keep_factor(keep);
    bool wide = dy.cols % RUN == 0 && is_wide(dy);
    if (!wide) group_sums<ANY>(dy, dbias, kept);
    else if (dy.kind == 1) group_sums<1>(dy, dbias, kept);
    else group_sums<0>(dy, dbias, kept);
}

struct Few {
    Mat dy, dbias;
    Keep keep;
};

// Of so few rows that one launch is faster than two; of up to two matrices. A block has as many columns as a sector of
// memory.
#define SECTOR 32

extern "C" __global__ void column_sums_of_few(
    Mat dy, Mat dbias, Keep keep, Mat second_dy, Mat second_dbias, Keep second_keep, Post post
) {
    begin(post);
    u32 lanes = dy.kind == 1 ? SECTOR / 2 : SECTOR / 4;
    u64 cols = dy.cols, tiles = (cols + lanes - 1) / lanes;
    for (u64 job = blockIdx.x; job < tiles * (second_dy.rows ? 2 : 1); job += gridDim.x) {
        Few s = job < tiles ? Few{dy, dbias, keep} : Few{second_dy, second_dbias, second_keep};
        u64 col = job % tiles * lanes + threadIdx.x % lanes;
        bool is_there = col < cols, has_result = is_there && threadIdx.x < lanes;
        Result result = {};
        if (has_result) result = result_of(s.dbias, col, s.keep);
        auto entry = [&](u64 row) { return get(s.dy, spot(s.dy, row, col)); };
        double sum = column_of(lanes, is_there ? s.dy.rows : 0, entry);
        if (has_result) put_result(s.dbias, col, result, sum);
    }
}
