// Layer norm and RMS norm. Functions of one kind take whole runs at wide addresses, in up to 8192 columns, and hold a
// row; the others take everything, and read it again for each pass. They add in the same order: the same bits.

// 1 / sqrt(x): a step of Newton's makes the guess exact to f64's half.
__device__ inline float inverse_root(double x) {
    double guess = rsqrtf((float)x);
    return (float)(guess * (1.5 - 0.5 * x * guess * guess));
}

struct Norm {
    Mat x, weight, bias, y, mean, rstd, r, sum;
    u64 residual;
    float eps;
};

// Squares of distances from the mean.
template <bool EXACT> __device__ inline double square_sum(const Run& v, float shift, u32 n) {
    Run squares;
#pragma unroll
    for (u32 i = 0; i < RUN; i++) {
        float away = v.at[i] - shift;
        squares.at[i] = i < n ? away * away : 0.0f;
    }
    return run_part<EXACT>(squares);
}

// From the squares of distances from `shift`, which is the mean rounded.
__device__ inline float scale_of(double squares, double mean, float shift, u64 cols, float eps) {
    double off = mean - (double)shift;
    return inverse_root(squares / (double)cols - off * off + (double)eps);
}

template <bool CENTRED>
__device__ inline Run normed(const Run& v, float shift, float scale, const Run& w, const Run& b) {
    Run out;
#pragma unroll
    for (int i = 0; i < RUN; i++) {
        out.at[i] = CENTRED ? fmaf((v.at[i] - shift) * scale, w.at[i], b.at[i]) : v.at[i] * scale * w.at[i];
    }
    return out;
}

template <int KIND, int N, bool CENTRED> __device__ inline void forward(const Norm& n) {
    Team team = team_of(n.x.cols);
    u64 rows = n.x.rows, step = (u64)gridDim.x * team.count;
    Row<KIND, N> w = no_row<KIND, N>(), b = w, x = w, r = w;
    load(w, n.weight, 0, team);
    if (CENTRED) load(b, n.bias, 0, team);
    auto fetch = [&](u64 row) {
        if (row >= rows) return;
        load(x, n.x, row, team);
        if (n.residual) load(r, n.r, row, team);
    };
    u64 start = (u64)blockIdx.x * team.count;
    fetch(start + team.index);
    TEAM_ROWS(row, start, rows, step, team) {
        keep_closed(w);
        if (CENTRED) keep_closed(b);
        Run v[N];
#pragma unroll
        for (int j = 0; j < N; j++) {
            v[j] = opened(x.run[j]);
            if (!n.residual) continue;
            Run more = opened(r.run[j]);
#pragma unroll
            for (int i = 0; i < RUN; i++) v[j].at[i] += more.at[i];
        }
        // The next row is on its way while this one is worked on.
        fetch(row + step);
        if (n.residual && row < rows) store<KIND>(n.sum, row, team, v);
        double total[1] = {0.0}, squares[1] = {0.0};
        if (CENTRED) {
#pragma unroll
            for (int j = 0; j < N; j++) total[0] += run_part<KIND == 0>(v[j]);
            team_sum(team, total);
        }
        double mean = total[0] / (double)n.x.cols;
        float shift = (float)mean;
#pragma unroll
        for (int j = 0; j < N; j++) {
            squares[0] += square_sum<KIND == 0>(v[j], shift, TEAM_RUN(j, team) < (u32)n.x.cols ? RUN : 0);
        }
        team_sum(team, squares);
        float scale = scale_of(squares[0], mean, shift, n.x.cols, n.eps);
        if (row >= rows) continue;
        if (team.lane == 0) {
            if (CENTRED) put(n.mean, row, shift);
            put(n.rstd, row, scale);
        }
#pragma unroll
        for (int j = 0; j < N; j++) v[j] = normed<CENTRED>(v[j], shift, scale, opened(w.run[j]), opened(b.run[j]));
        store<KIND>(n.y, row, team, v);
    }
}

template <bool CENTRED> __device__ inline void forward_any(const Norm& n) {
    Team team = team_of(n.x.cols);
    u64 rows = n.x.rows, cols = n.x.cols, step = (u64)gridDim.x * team.count;
    bool wide_x = is_wide(n.x), wide_r = is_wide(n.r), wide_sum = is_wide(n.sum), wide_y = is_wide(n.y);
    bool wide_w = is_wide(n.weight), wide_b = is_wide(n.bias), exact = n.x.kind == 0;
    TEAM_ROWS(row, (u64)blockIdx.x * team.count, rows, step, team) {
        // x, or its sum with the residual before it is rounded.
        auto input = [&](u64 c, u32 count) {
            Run v = get_run(n.x, spot(n.x, row, c), count, wide_x);
            if (!n.residual) return v;
            Run r = get_run(n.r, spot(n.r, row, c), count, wide_r);
            for (int i = 0; i < RUN; i++) v.at[i] += r.at[i];
            return v;
        };
        bool is_there = row < rows;
        double total[1] = {0.0}, squares[1] = {0.0};
        if (is_there) {
            TEAM_RUNS(c, cols, team) {
                u32 count = run_length(cols, c);
                Run v = input(c, count);
                if (n.residual) put_run(n.sum, spot(n.sum, row, c), count, wide_sum, v);
                total[0] += exact ? run_part<true>(v) : run_part<false>(v);
            }
        }
        if (CENTRED) team_sum(team, total);
        double mean = CENTRED ? total[0] / (double)cols : 0.0;
        float shift = (float)mean;
        if (is_there) {
            TEAM_RUNS(c, cols, team) {
                u32 count = run_length(cols, c);
                Run v = input(c, count);
                squares[0] += exact ? square_sum<true>(v, shift, count) : square_sum<false>(v, shift, count);
            }
        }
        team_sum(team, squares);
        float scale = scale_of(squares[0], mean, shift, cols, n.eps);
        if (!is_there) continue;
        if (team.lane == 0) {
            if (CENTRED) put(n.mean, row, shift);
            put(n.rstd, row, scale);
        }
        TEAM_RUNS(c, cols, team) {
            u32 count = run_length(cols, c);
            Run w = get_run(n.weight, c, count, wide_w), b = w;
            if (CENTRED) b = get_run(n.bias, c, count, wide_b);
            Run y = normed<CENTRED>(input(c, count), shift, scale, w, b);
            put_run(n.y, spot(n.y, row, c), count, wide_y, y);
        }
    }
}

// Of one kind, at addresses and pitches that are wide, in whole runs, and no wider than registers hold.
template <int KIND, bool CENTRED> __device__ inline void forward_held(const Norm& n) {
    u32 size = team_of(n.x.cols).warps * 32 * RUN, held = ((u32)n.x.cols + size - 1) / size;
    if (held <= 1) forward<KIND, 1, CENTRED>(n);
    else if (held == 2) forward<KIND, 2, CENTRED>(n);
    else if (held == 3) forward<KIND, 3, CENTRED>(n);
    else forward<KIND, 4, CENTRED>(n);
}

extern "C" __global__ void layer_norm(
    Mat x, Mat weight, Mat bias, Mat y, Mat mean, Mat rstd, Mat r, Mat sum, u64 residual, u64 eps, Post post
) {
    begin(post);
    forward_any<true>({x, weight, bias, y, mean, rstd, r, sum, residual, __uint_as_float((u32)eps)});
}

extern "C" __global__ __launch_bounds__(THREADS, 1) void layer_norm_f32(
    Mat x, Mat weight, Mat bias, Mat y, Mat mean, Mat rstd, Mat r, Mat sum, u64 residual, u64 eps, Post post
) {
    begin(post);
    forward_held<0, true>({x, weight, bias, y, mean, rstd, r, sum, residual, __uint_as_float((u32)eps)});
}

extern "C" __global__ __launch_bounds__(THREADS, 2) void layer_norm_bf16(
    Mat x, Mat weight, Mat bias, Mat y, Mat mean, Mat rstd, Mat r, Mat sum, u64 residual, u64 eps, Post post
) {
    begin(post);
    forward_held<1, true>({x, weight, bias, y, mean, rstd, r, sum, residual, __uint_as_float((u32)eps)});
}

extern "C" __global__ void rms_norm(
    Mat x, Mat weight, Mat y, Mat rstd, Mat r, Mat sum, u64 residual, u64 eps, Post post
) {
    begin(post);
    forward_any<false>({x, weight, weight, y, rstd, rstd, r, sum, residual, __uint_as_float((u32)eps)});
}

extern "C" __global__ __launch_bounds__(THREADS, 1) void rms_norm_f32(
    Mat x, Mat weight, Mat y, Mat rstd, Mat r, Mat sum, u64 residual, u64 eps, Post post
) {
    begin(post);
    forward_held<0, false>({x, weight, weight, y, rstd, rstd, r, sum, residual, __uint_as_float((u32)eps)});
}

extern "C" __global__ __launch_bounds__(THREADS, 2) void rms_norm_bf16(
    Mat x, Mat weight, Mat y, Mat rstd, Mat r, Mat sum, u64 residual, u64 eps, Post post
) {
    begin(post);
    forward_held<1, false>({x, weight, weight, y, rstd, rstd, r, sum, residual, __uint_as_float((u32)eps)});
}
