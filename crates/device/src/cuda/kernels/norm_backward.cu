// Gradients of layer norm and RMS norm: dx, and sums over stretches of rows for the weights'. A block has a stretch.
// Functions as in norm.cu.

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
template <bool CENTRED>
__device__ inline void add_means(double (&sums)[2], const Run& d, const Run& x, const Run& w, float m, float r) {
    Run g, h;
#pragma unroll
    for (int i = 0; i < RUN; i++) {
        g.at[i] = d.at[i] * w.at[i];
        h.at[i] = g.at[i] * hat<CENTRED>(x.at[i], m, r);
    }
    if (CENTRED) sums[0] += (double)run_sum(g);
    sums[1] += (double)run_sum(h);
}

template <bool CENTRED>
__device__ inline Run slope_of(const Run& d, const Run& x, const Run& w, float m, float r, const Means& means) {
    Run out;
#pragma unroll
    for (int i = 0; i < RUN; i++) {
        float along = hat<CENTRED>(x.at[i], m, r) * means.slope;
        out.at[i] = CENTRED ? r * (fmaf(d.at[i], w.at[i], -means.shift) - along) : r * fmaf(d.at[i], w.at[i], -along);
    }
    return out;
}

__device__ inline Means means_of(const double (&sums)[2], u64 cols) {
    return {(float)(sums[0] / (double)cols), (float)(sums[1] / (double)cols)};
}

// One for all widths of rows.
__device__ inline float* pile() {
    __shared__ Vec4 all[RUN * THREADS];
    return (float*)all;
}

// The teams' sums of a stretch, in their order, into row `row`.
template <int N> __device__ inline void put_sums(const Mat& sums, u64 row, const Team& team, const Run (&own)[N]) {
    float* teams = pile();
    u32 cols = (u32)sums.cols;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < N; j++) {
        u32 c = TEAM_RUN(j, team);
        if (c < cols) put_wide<0>({(u64)teams, 1, cols, cols, 0}, team.index * cols + c, own[j]);
    }
    __syncthreads();
    for (u32 c = threadIdx.x; c < cols; c += THREADS) {
        double sum = 0.0;
        for (u32 t = 0; t < team.count; t++) sum += teams[t * cols + c];
        put(sums, spot(sums, row, c), (float)sum);
    }
}

template <int KIND, int N, bool CENTRED> __device__ inline void backward(const Slope& s) {
    Team team = team_of(s.x.cols);
    u64 rows = s.x.rows, cols = s.x.cols, stretches = (rows + s.step - 1) / s.step;
    Row<KIND, N> none = no_row<KIND, N>(), w = none;
    load(w, s.weight, 0, team);
    for (u64 at = blockIdx.x; at < stretches; at += gridDim.x) {
        u64 from = at * s.step, to = from + s.step < rows ? from + s.step : rows;
        Run scaled[N] = {}, plain[N] = {};
        TEAM_ROWS(row, from, to, team.count, team) {
            keep_closed(w);
            bool is_there = row < to;
            Row<KIND, N> d = none, x = none, more = none;
            float m = 0.0f, r = 0.0f;
            if (is_there) {
                load(d, s.dy, row, team);
                load(x, s.x, row, team);
                if (s.past.rows) load(more, s.past, row, team);
                if (CENTRED) m = ((const float*)s.mean.address)[row];
                r = ((const float*)s.rstd.address)[row];
            }
            double sums[2] = {0.0, 0.0};
#pragma unroll
            for (int j = 0; j < N; j++) {
                Run own = opened(d.run[j]), v = opened(x.run[j]);
                add_means<CENTRED>(sums, own, v, opened(w.run[j]), m, r);
#pragma unroll
                for (int i = 0; i < RUN; i++) {
                    scaled[j].at[i] = fmaf(own.at[i], hat<CENTRED>(v.at[i], m, r), scaled[j].at[i]);
                    if (CENTRED) plain[j].at[i] += own.at[i];
                }
            }
            keep_closed(d);
            keep_closed(x);
            team_sum(team, sums);
            Means means = means_of(sums, cols);
            Run out[N];
#pragma unroll
            for (int j = 0; j < N; j++) {
                out[j] = slope_of<CENTRED>(opened(d.run[j]), opened(x.run[j]), opened(w.run[j]), m, r, means);
                if (!s.past.rows) continue;
                Run past = opened(more.run[j]);
#pragma unroll
                for (int i = 0; i < RUN; i++) out[j].at[i] = past.at[i] + out[j].at[i];
            }
            if (is_there) store<KIND>(s.dx, row, team, out);
        }
        if (s.dweight.rows) put_sums(s.dweight, at, team, scaled);
        if (CENTRED && s.dbias.rows) put_sums(s.dbias, at, team, plain);
    }
}

template <bool CENTRED> __device__ inline void backward_any(const Slope& s) {
    Team team = team_of(s.x.cols);
    u64 rows = s.x.rows, cols = s.x.cols, stretches = (rows + s.step - 1) / s.step;
    bool wide_d = is_wide(s.dy), wide_x = is_wide(s.x), wide_w = is_wide(s.weight);
    bool wide_dx = is_wide(s.dx), wide_past = is_wide(s.past);
    auto mean = [&](u64 row) { return CENTRED ? get(s.mean, row) : 0.0f; };
    for (u64 at = blockIdx.x; at < stretches; at += gridDim.x) {
        u64 from = at * s.step, to = from + s.step < rows ? from + s.step : rows;
        for (u64 c = threadIdx.x; s.dweight.rows && c < cols; c += THREADS) {
            double scaled = 0.0, plain = 0.0;
            for (u32 t = 0; t < team.count; t++) {
                float own_scaled = 0.0f, own_plain = 0.0f;
                for (u64 row = from + t; row < to; row += team.count) {
                    float d = get(s.dy, spot(s.dy, row, c)), x = get(s.x, spot(s.x, row, c));
                    own_scaled = fmaf(d, hat<CENTRED>(x, mean(row), get(s.rstd, row)), own_scaled);
                    own_plain += d;
                }
                scaled += own_scaled;
                plain += own_plain;
            }
            put(s.dweight, spot(s.dweight, at, c), (float)scaled);
            if (CENTRED) put(s.dbias, spot(s.dbias, at, c), (float)plain);
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
                    add_means<CENTRED>(sums, run(s.dy, c, wide_d), run(s.x, c, wide_x), w, m, r);
                }
            }
            team_sum(team, sums);
            Means means = means_of(sums, cols);
            if (!is_there) continue;
            TEAM_RUNS(c, cols, team) {
                Run w = get_run(s.weight, c, run_length(cols, c), wide_w);
                Run out = slope_of<CENTRED>(run(s.dy, c, wide_d), run(s.x, c, wide_x), w, m, r, means);
                if (s.past.rows) {
                    Run past = run(s.past, c, wide_past);
                    for (int i = 0; i < RUN; i++) out.at[i] = past.at[i] + out.at[i];
                }
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
    backward_any<true>({dy, x, weight, mean, rstd, dx, past, dweight, dbias, step});
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
    backward_any<false>({dy, x, weight, rstd, rstd, dx, past, dweight, dweight, step});
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
