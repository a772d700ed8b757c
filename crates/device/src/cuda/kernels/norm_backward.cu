// Gradients of layer norm and RMS norm: dx, and sums over stretches of rows for the weights'. A block has a stretch.
// Functions as in norm.cu.

// Rows of bf16 that a team has in shared memory.
#define STAGES 2

// past: what reaches dx past the norm, which may be what dx holds. dweight: for each stretch of `step` rows the sums of
// dy times the normalised x; dbias: those of dy. They may have no rows: there is none.
struct Slope {
    Mat dy, x, weight, mean, rstd, dx, past, dweight, dbias;
    u64 step;
};

// Of a layer norm the x that was normalised, of an RMS norm x over its root mean square.
template <bool CENTRED> __device__ inline float hat(float x, float m, float r) { return (CENTRED ? x - m : x) * r; }

// What dx is made from: the means of g = dy * weight and of g * hat.
struct Means {
    float shift, slope;
};

// Adds a run's part of the sums behind them.
template <bool CENTRED, bool EXACT>
__device__ inline void add_means(double (&sums)[2], const Run& d, const Run& x, const Run& w, float m, float r) {
    Run g, h;
#pragma unroll
    for (int i = 0; i < RUN; i++) {
        g.at[i] = d.at[i] * w.at[i];
        h.at[i] = g.at[i] * hat<CENTRED>(x.at[i], m, r);
    }
    if (CENTRED) sums[0] += run_part<EXACT>(g);
    sums[1] += run_part<EXACT>(h);
}

// dx without what reaches it past the norm, over r.
template <bool CENTRED>
__device__ inline Run slope_of(const Run& d, const Run& x, const Run& w, float m, float r, const Means& means) {
    Run out;
    float along = r * means.slope;
#pragma unroll
    for (int i = 0; i < RUN; i++) {
        float across = CENTRED ? fmaf(d.at[i], w.at[i], -means.shift) : d.at[i] * w.at[i];
        out.at[i] = fmaf(CENTRED ? x.at[i] - m : x.at[i], -along, across);
    }
    return out;
}

__device__ inline Means means_of(const double (&sums)[2], double share) {
    return {(float)(sums[0] * share), (float)(sums[1] * share)};
}

// Rows on their way to shared memory while others are worked on. A thread fetches the runs that it will use and nobody
// else does, so it waits for nobody. Of all its runs of a row, only the last may be columns that there are not.
extern __shared__ Vec4 staged[];

// Where a thread's runs of the matrices of a row lie, one matrix behind the other.
template <int KIND, int N> struct Stage {
    // Of f32, a row fills what two of bf16 do.
    static constexpr u32 COUNT = KIND == 1 ? STAGES : 1, PARTS = KIND == 1 ? 1 : 2;
    static constexpr u32 PART = THREADS * 16, MATRIX = N * PARTS * PART;
    u32 at;

    __device__ Run run(u32 which, u32 j) const {
        const char* from = (const char*)staged + at + which * MATRIX + j * PARTS * PART;
        Raw<KIND> raw;
#pragma unroll
        for (u32 i = 0; i < PARTS; i++) raw.part[i] = *(const Vec4*)(from + i * PART);
        return opened(raw);
    }
    __device__ void fetch_row(u32 first, u32 which, const Mat& m, u64 row, const Team& team, bool has_last) const {
        constexpr u32 SIZE = KIND == 1 ? 2 : 4;
        u64 from = m.address + (row * m.pitch + TEAM_RUN(0, team)) * SIZE;
        u32 to = first + at + which * MATRIX, step = team.warps * 32 * RUN * SIZE;
#pragma unroll
        for (int j = 0; j < N; j++) {
#pragma unroll
            for (u32 i = 0; i < PARTS; i++) {
                if (j < N - 1 || has_last) fetch(to + (j * PARTS + i) * PART, from + i * 16);
            }
            from += step;
        }
    }
    __device__ void clear_last(u32 which) const {
        char* to = (char*)staged + at + which * MATRIX + (N - 1) * PARTS * PART;
        for (u32 i = 0; i < PARTS; i++) *(Vec4*)(to + i * PART) = {0, 0, 0, 0};
    }
};

// A run of sums over rows: of f32 in f64, or these additions would be all of the result's error.
template <bool EXACT> struct Sums {
    float at[RUN];
    __device__ void add(int i, float d, float h) { at[i] = fmaf(d, h, at[i]); }
    __device__ void add(int i, float d) { at[i] += d; }
};
template <> struct Sums<true> {
    double at[RUN];
    __device__ void add(int i, float d, float h) { at[i] = fma((double)d, (double)h, at[i]); }
    __device__ void add(int i, float d) { at[i] += (double)d; }
};
__device__ inline Run run_of(const Sums<false>& sums) {
    Run run;
#pragma unroll
    for (int i = 0; i < RUN; i++) run.at[i] = sums.at[i];
    return run;
}
// Of all teams, pairwise.
__device__ inline float teams_sum(const Sums<false>& teams) { return run_sum(run_of(teams)); }
__device__ inline float teams_sum(const Sums<true>& teams) {
    const double(&x)[RUN] = teams.at;
    return (float)(((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7])));
}

// The teams' sums of a stretch, added in f64, into row `row` of each matrix of sums, one matrix after the other: where
// rows were staged, of two matrices at least.
template <int N, int PLANES>
__device__ inline void put_sums(
    const Mat (&sums)[PLANES], u64 row, const Team& team, bool has_last, const Sums<true> (&own)[PLANES][N]
) {
    static_assert(2 * Stage<0, N>::COUNT * Stage<0, N>::MATRIX >= N * THREADS * RUN * 8, "a matrix of sums needs more room");
    double* teams = (double*)staged;
    u32 cols = (u32)sums[0].cols;
#pragma unroll
    for (int p = 0; p < PLANES; p++) {
        __syncthreads();
#pragma unroll
        for (int j = 0; j < N; j++) {
            if (j == N - 1 && !has_last) continue;
#pragma unroll
            for (int i = 0; i < RUN; i++) teams[team.index * cols + TEAM_RUN(j, team) + i] = own[p][j].at[i];
        }
        __syncthreads();
        float* to = (float*)sums[p].address + row * sums[p].pitch;
        for (u32 c = threadIdx.x; c < cols; c += THREADS) {
            Sums<true> each = {};
#pragma unroll
            for (u32 t = 0; t < WARPS; t++) {
                if (t < team.count) each.at[t] = teams[t * cols + c];
            }
            to[c] = teams_sum(each);
        }
    }
    __syncthreads();
}

// The teams' sums of a stretch, pairwise, into row `row` of each matrix of sums: where rows were staged, of two
// matrices at least.
template <int KIND, int N, int PLANES>
__device__ inline void put_sums(
    const Mat (&sums)[PLANES], u64 row, const Team& team, bool has_last, const Sums<false> (&own)[PLANES][N]
) {
    constexpr u32 STAGED = 2 * Stage<KIND, N>::COUNT * Stage<KIND, N>::MATRIX;
    static_assert(STAGED >= PLANES * N * THREADS * RUN * 4, "sums need more room than the rows of two matrices");
    float* teams = (float*)staged;
    u32 cols = (u32)sums[0].cols, plane = team.count * cols, fours = cols / 4;
    __syncthreads();
#pragma unroll
    for (int p = 0; p < PLANES; p++) {
#pragma unroll
        for (int j = 0; j < N; j++) {
            u32 at = p * plane + team.index * cols + TEAM_RUN(j, team);
            if (j < N - 1 || has_last) put_wide<0>({(u64)teams, 1, cols, cols, 0}, at, run_of(own[p][j]));
        }
    }
    __syncthreads();
    for (u32 at = threadIdx.x; at < PLANES * fours; at += THREADS) {
        u32 p = at / fours, c = at % fours * 4;
        Run each[4] = {};
#pragma unroll
        for (u32 t = 0; t < WARPS; t++) {
            if (t >= team.count) continue;
            Vec4 four = *(const Vec4*)(teams + p * plane + t * cols + c);
            each[0].at[t] = __uint_as_float(four.x);
            each[1].at[t] = __uint_as_float(four.y);
            each[2].at[t] = __uint_as_float(four.z);
            each[3].at[t] = __uint_as_float(four.w);
        }
        float* to = (float*)sums[0].address + row * sums[0].pitch;
        if (PLANES > 1 && p == 1) to = (float*)sums[PLANES - 1].address + row * sums[PLANES - 1].pitch;
#pragma unroll
        for (int i = 0; i < 4; i++) to[c + i] = run_sum(each[i]);
    }
    __syncthreads();
}

template <int KIND, int N, bool CENTRED> __device__ inline void backward(const Slope& s) {
    constexpr u32 COUNT = Stage<KIND, N>::COUNT;
    Team team = team_of(s.x.cols);
    u64 rows = s.x.rows, stretches = (rows + s.step - 1) / s.step;
    double share = 1.0 / (double)s.x.cols;
    bool has_past = s.past.rows, has_last = TEAM_RUN(N - 1, team) < (u32)s.x.cols;
    const u32 first = address_of(staged), mats = has_past ? 3 : 2, size = mats * Stage<KIND, N>::MATRIX;
    const u32 begin_at = threadIdx.x * 16, end_at = begin_at + COUNT * size;
    Row<KIND, N> w = no_row<KIND, N>();
    for (u64 at = blockIdx.x; at < stretches; at += gridDim.x) {
        u64 from = at * s.step, to = from + s.step < rows ? from + s.step : rows;
        auto fetch_rows = [&](u64 row, Stage<KIND, N> stage) {
            if (row < to) {
                stage.fetch_row(first, 0, s.dy, row, team, has_last);
                stage.fetch_row(first, 1, s.x, row, team, has_last);
                if (has_past) stage.fetch_row(first, 2, s.past, row, team, has_last);
            }
            commit();
        };
        Stage<KIND, N> stage = {begin_at};
        for (u64 row = from + team.index; stage.at < end_at; stage.at += size, row += team.count) {
            fetch_rows(row, stage);
            for (u32 m = 0; !has_last && m < mats; m++) stage.clear_last(m);
        }
        stage = {begin_at};
        float next_m = 0.0f, next_r = 0.0f;
        auto fetch_moments = [&](u64 row) {
            if (row >= to) return;
            if (CENTRED) next_m = ((const float*)s.mean.address)[row];
            next_r = ((const float*)s.rstd.address)[row];
        };
        fetch_moments(from + team.index);
        load(w, s.weight, 0, team);
        Sums<KIND == 0> own[CENTRED ? 2 : 1][N] = {};
        TEAM_ROWS(row, from, to, team.count, team) {
            keep_closed(w);
            bool is_there = row < to;
            float m = next_m, r = next_r;
            fetch_moments(row + team.count);
            arrived<COUNT - 1>();
            double sums[2] = {0.0, 0.0};
            if (is_there) {
#pragma unroll
                for (int j = 0; j < N; j++) {
                    Run d = stage.run(0, j), x = stage.run(1, j);
                    add_means<CENTRED, KIND == 0>(sums, d, x, opened(w.run[j]), m, r);
#pragma unroll
                    for (int i = 0; i < RUN; i++) {
                        own[0][j].add(i, d.at[i], hat<CENTRED>(x.at[i], m, r));
                        if constexpr (CENTRED) own[1][j].add(i, d.at[i]);
                    }
                }
            }
            keep_closed(w);
            // The row is opened again, not kept open.
            asm volatile("" ::: "memory");
            team_sum(team, sums);
            Means means = means_of(sums, share);
            if (is_there) {
                u64 start = row * s.dx.pitch;
#pragma unroll
                for (int j = 0; j < N; j++) {
                    Run out = slope_of<CENTRED>(stage.run(0, j), stage.run(1, j), opened(w.run[j]), m, r, means);
                    if (has_past) {
                        Run past = stage.run(2, j);
#pragma unroll
                        for (int i = 0; i < RUN; i++) out.at[i] = fmaf(r, out.at[i], past.at[i]);
                    } else {
#pragma unroll
                        for (int i = 0; i < RUN; i++) out.at[i] *= r;
                    }
                    if (j < N - 1 || has_last) put_results<KIND>(s.dx, start + TEAM_RUN(j, team), out);
                }
            }
            fetch_rows(row + COUNT * team.count, stage);
            stage.at = stage.at + size < end_at ? stage.at + size : begin_at;
        }
        if (!s.dweight.rows) continue;
        if constexpr (CENTRED && KIND == 0) put_sums<N, 2>({s.dweight, s.dbias}, at, team, has_last, own);
        else if constexpr (CENTRED) put_sums<KIND, N, 2>({s.dweight, s.dbias}, at, team, has_last, own);
        else if constexpr (KIND == 0) put_sums<N, 1>({s.dweight}, at, team, has_last, own);
        else put_sums<KIND, N, 1>({s.dweight}, at, team, has_last, own);
    }
}

template <bool CENTRED, bool EXACT> __device__ inline void backward_any(const Slope& s) {
    Team team = team_of(s.x.cols);
    u64 rows = s.x.rows, cols = s.x.cols, stretches = (rows + s.step - 1) / s.step;
    bool wide_d = is_wide(s.dy), wide_x = is_wide(s.x), wide_w = is_wide(s.weight);
    bool wide_dx = is_wide(s.dx), wide_past = is_wide(s.past);
    auto mean = [&](u64 row) { return CENTRED ? get(s.mean, row) : 0.0f; };
    for (u64 at = blockIdx.x; at < stretches; at += gridDim.x) {
        u64 from = at * s.step, to = from + s.step < rows ? from + s.step : rows;
        for (u64 c = threadIdx.x; s.dweight.rows && c < cols; c += THREADS) {
            Sums<EXACT> scaled = {}, plain = {};
#pragma unroll
            for (u32 t = 0; t < WARPS; t++) {
                if (t >= team.count) continue;
                for (u64 row = from + t; row < to; row += team.count) {
                    float d = get(s.dy, spot(s.dy, row, c)), x = get(s.x, spot(s.x, row, c));
                    scaled.add(t, d, hat<CENTRED>(x, mean(row), get(s.rstd, row)));
                    plain.add(t, d);
                }
            }
            put(s.dweight, spot(s.dweight, at, c), teams_sum(scaled));
            if (CENTRED) put(s.dbias, spot(s.dbias, at, c), teams_sum(plain));
        }
        TEAM_ROWS(row, from, to, team.count, team) {
            bool is_there = row < to;
            float m = is_there ? mean(row) : 0.0f, r = is_there ? get(s.rstd, row) : 0.0f;
            auto run = [&](const Mat& mat, u64 c, bool wide) {
                return get_run(mat, spot(mat, row, c), run_length(cols, c), wide);
            };
            double sums[2] = {0.0, 0.0};
            if (is_there) {
                TEAM_RUNS(c, cols, team) {
                    Run w = get_run(s.weight, c, run_length(cols, c), wide_w);
                    add_means<CENTRED, EXACT>(sums, run(s.dy, c, wide_d), run(s.x, c, wide_x), w, m, r);
                }
            }
            team_sum(team, sums);
            Means means = means_of(sums, 1.0 / (double)cols);
            if (!is_there) continue;
            TEAM_RUNS(c, cols, team) {
                Run w = get_run(s.weight, c, run_length(cols, c), wide_w);
                Run out = slope_of<CENTRED>(run(s.dy, c, wide_d), run(s.x, c, wide_x), w, m, r, means);
                Run past = {};
                if (s.past.rows) past = run(s.past, c, wide_past);
                for (int i = 0; i < RUN; i++) out.at[i] = s.past.rows ? fmaf(r, out.at[i], past.at[i]) : r * out.at[i];
                put_run(s.dx, spot(s.dx, row, c), run_length(cols, c), wide_dx, out);
            }
        }
    }
}

template <int KIND, bool CENTRED> __device__ inline void backward_held(const Slope& s) {
    u32 size = team_of(s.x.cols).warps * 32 * RUN, held = ((u32)s.x.cols + size - 1) / size;
    if (held <= 1) backward<KIND, 1, CENTRED>(s);
    else if (held == 2) backward<KIND, 2, CENTRED>(s);
    else if (held == 3) backward<KIND, 3, CENTRED>(s);
    else backward<KIND, 4, CENTRED>(s);
}

extern "C" __global__ void layer_norm_backward(
    Mat dy, Mat x, Mat weight, Mat mean, Mat rstd, Mat dx, Mat past, Mat dweight, Mat dbias, u64 step,
    Post post
) {
    begin(post);
    Slope s = {dy, x, weight, mean, rstd, dx, past, dweight, dbias, step};
    if (x.kind == 0) backward_any<true, true>(s);
    else backward_any<true, false>(s);
}

extern "C" __global__ __launch_bounds__(THREADS, 1) void layer_norm_backward_f32(
    Mat dy, Mat x, Mat weight, Mat mean, Mat rstd, Mat dx, Mat past, Mat dweight, Mat dbias, u64 step,
    Post post
) {
    begin(post);
    backward_held<0, true>({dy, x, weight, mean, rstd, dx, past, dweight, dbias, step});
}

extern "C" __global__ __launch_bounds__(THREADS, 2) void layer_norm_backward_bf16(
    Mat dy, Mat x, Mat weight, Mat mean, Mat rstd, Mat dx, Mat past, Mat dweight, Mat dbias, u64 step,
    Post post
) {
    begin(post);
    backward_held<1, true>({dy, x, weight, mean, rstd, dx, past, dweight, dbias, step});
}

extern "C" __global__ void rms_norm_backward(
    Mat dy, Mat x, Mat weight, Mat rstd, Mat dx, Mat past, Mat dweight, u64 step, Post post
) {
    begin(post);
    Slope s = {dy, x, weight, rstd, rstd, dx, past, dweight, dweight, step};
    if (x.kind == 0) backward_any<false, true>(s);
    else backward_any<false, false>(s);
}

extern "C" __global__ __launch_bounds__(THREADS, 1) void rms_norm_backward_f32(
    Mat dy, Mat x, Mat weight, Mat rstd, Mat dx, Mat past, Mat dweight, u64 step, Post post
) {
    begin(post);
    backward_held<0, false>({dy, x, weight, rstd, rstd, dx, past, dweight, dweight, step});
}

extern "C" __global__ __launch_bounds__(THREADS, 2) void rms_norm_backward_bf16(
    Mat dy, Mat x, Mat weight, Mat rstd, Mat dx, Mat past, Mat dweight, u64 step, Post post
) {
    begin(post);
    backward_held<1, false>({dy, x, weight, rstd, rstd, dx, past, dweight, dweight, step});
}
