// Layer norm and RMS norm: a warp for each row, two passes for the variance.

#define WARPS (THREADS / 32)

// The warp's rows, one after the other; and its lane's runs of a row.
#define ROWS(row, count) \
    for (u64 row = (u64)blockIdx.x * WARPS + threadIdx.x / 32; row < (count); row += (u64)gridDim.x * WARPS)
#define RUNS(c, cols) for (u64 c = threadIdx.x % 32 * RUN; c < (cols); c += 32 * RUN)

// In f64, so that the order hardly matters; every lane gets the total.
__device__ inline double warp_sum(double x) {
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
    return x;
}

// What is normalised: x, or its sum with the residual before it is rounded.
struct Input {
    Mat x, r;
    u64 residual;
    bool wide_x, wide_r;
};
__device__ inline Input input_of(const Mat& x, const Mat& r, u64 residual) { return {x, r, residual, is_wide(x), is_wide(r)}; }

__device__ inline Run input(const Input& in, u64 row, u64 c, u32 n) {
    Run out = get_run(in.x, spot(in.x, row, c), n, in.wide_x);
    if (!in.residual) return out;
    Run r = get_run(in.r, spot(in.r, row, c), n, in.wide_r);
    for (int i = 0; i < RUN; i++) out.at[i] += r.at[i];
    return out;
}

__device__ inline void keep_sum(const Input& in, const Mat& sum, u64 row) {
    if (!in.residual) return;
    bool wide = is_wide(sum);
    RUNS(c, sum.cols) {
        u32 n = run_length(sum.cols, c);
        put_run(sum, spot(sum, row, c), n, wide, input(in, row, c, n));
    }
}

extern "C" __global__ void layer_norm(
    Mat x, Mat weight, Mat bias, Mat y, Mat mean, Mat rstd, Mat r, Mat sum, u64 residual, u64 eps_bits, Post post
) {
    begin(post);
    Input in = input_of(x, r, residual);
    bool wide_w = is_wide(weight), wide_b = is_wide(bias), wide_y = is_wide(y);
    ROWS(row, x.rows) {
        keep_sum(in, sum, row);
        double total = 0.0, squares = 0.0;
        RUNS(c, x.cols) {
            Run v = input(in, row, c, run_length(x.cols, c));
            for (int i = 0; i < RUN; i++) total += v.at[i];
        }
        double m = warp_sum(total) / (double)x.cols;
        RUNS(c, x.cols) {
            u32 n = run_length(x.cols, c);
            Run v = input(in, row, c, n);
            for (u32 i = 0; i < RUN; i++) {
                double away = i < n ? (double)v.at[i] - m : 0.0;
                squares += away * away;
            }
        }
        double variance = warp_sum(squares) / (double)x.cols;
        float shift = (float)m, scale = (float)(1.0 / sqrt(variance + (double)__uint_as_float((u32)eps_bits)));
        if (threadIdx.x % 32 == 0) {
            put(mean, row, shift);
            put(rstd, row, scale);
        }
        RUNS(c, x.cols) {
            u32 n = run_length(x.cols, c);
            Run v = input(in, row, c, n), w = get_run(weight, c, n, wide_w), b = get_run(bias, c, n, wide_b);
            for (int i = 0; i < RUN; i++) v.at[i] = fmaf((v.at[i] - shift) * scale, w.at[i], b.at[i]);
            put_run(y, spot(y, row, c), n, wide_y, v);
        }
    }
}

// skip: 0 nothing past the norm, 1 what dx holds, 2 what `past` holds.
struct Out {
    Mat dx, past;
    u64 skip;
    bool wide_dx, wide_past;
};
__device__ inline Out out_of(const Mat& dx, const Mat& past, u64 skip) { return {dx, past, skip, is_wide(dx), is_wide(past)}; }

__device__ inline void put_dx(const Out& out, u64 row, u64 c, u32 n, Run value) {
    u64 to = spot(out.dx, row, c);
    if (out.skip) {
        Run more = out.skip == 1 ? get_run(out.dx, to, n, out.wide_dx)
                                 : get_run(out.past, spot(out.past, row, c), n, out.wide_past);
        for (int i = 0; i < RUN; i++) value.at[i] = more.at[i] + value.at[i];
    }
    put_run(out.dx, to, n, out.wide_dx, value);
}

extern "C" __global__ void layer_norm_backward(
    Mat dy, Mat x, Mat weight, Mat mean, Mat rstd, Mat dx, Mat past, u64 skip, Post post
) {
    begin(post);
    Out out = out_of(dx, past, skip);
    bool wide_d = is_wide(dy), wide_x = is_wide(x), wide_w = is_wide(weight);
    ROWS(row, x.rows) {
        float m = get(mean, row), r = get(rstd, row);
        double shift_sum = 0.0, slope_sum = 0.0;
        RUNS(c, x.cols) {
            u32 n = run_length(x.cols, c);
            Run d = get_run(dy, spot(dy, row, c), n, wide_d), v = get_run(x, spot(x, row, c), n, wide_x);
            Run w = get_run(weight, c, n, wide_w);
            for (int i = 0; i < RUN; i++) {
                double g = (double)d.at[i] * w.at[i];
                shift_sum += g;
                slope_sum += g * ((double)(v.at[i] - m) * r);
            }
        }
        float shift = (float)(warp_sum(shift_sum) / (double)x.cols);
        float slope = (float)(warp_sum(slope_sum) / (double)x.cols);
        RUNS(c, x.cols) {
            u32 n = run_length(x.cols, c);
            Run d = get_run(dy, spot(dy, row, c), n, wide_d), v = get_run(x, spot(x, row, c), n, wide_x);
            Run w = get_run(weight, c, n, wide_w), value;
            for (int i = 0; i < RUN; i++) {
                value.at[i] = r * (fmaf(d.at[i], w.at[i], -shift) - (v.at[i] - m) * r * slope);
            }
            put_dx(out, row, c, n, value);
        }
    }
}

extern "C" __global__ void rms_norm(
    Mat x, Mat weight, Mat y, Mat rstd, Mat r, Mat sum, u64 residual, u64 eps_bits, Post post
) {
    begin(post);
    Input in = input_of(x, r, residual);
    bool wide_w = is_wide(weight), wide_y = is_wide(y);
    ROWS(row, x.rows) {
        keep_sum(in, sum, row);
        double squares = 0.0;
        RUNS(c, x.cols) {
            Run v = input(in, row, c, run_length(x.cols, c));
            for (int i = 0; i < RUN; i++) squares += (double)v.at[i] * (double)v.at[i];
        }
        double mean = warp_sum(squares) / (double)x.cols;
        float scale = (float)(1.0 / sqrt(mean + (double)__uint_as_float((u32)eps_bits)));
        if (threadIdx.x % 32 == 0) put(rstd, row, scale);
        RUNS(c, x.cols) {
            u32 n = run_length(x.cols, c);
            Run v = input(in, row, c, n), w = get_run(weight, c, n, wide_w);
            for (int i = 0; i < RUN; i++) v.at[i] = v.at[i] * scale * w.at[i];
            put_run(y, spot(y, row, c), n, wide_y, v);
        }
    }
}

extern "C" __global__ void rms_norm_backward(
    Mat dy, Mat x, Mat weight, Mat rstd, Mat dx, Mat past, u64 skip, Post post
) {
    begin(post);
    Out out = out_of(dx, past, skip);
    bool wide_d = is_wide(dy), wide_x = is_wide(x), wide_w = is_wide(weight);
    ROWS(row, x.rows) {
        float r = get(rstd, row);
        double slope_sum = 0.0;
        RUNS(c, x.cols) {
            u32 n = run_length(x.cols, c);
            Run d = get_run(dy, spot(dy, row, c), n, wide_d), v = get_run(x, spot(x, row, c), n, wide_x);
            Run w = get_run(weight, c, n, wide_w);
            for (int i = 0; i < RUN; i++) slope_sum += (double)d.at[i] * w.at[i] * ((double)v.at[i] * r);
        }
        float slope = (float)(warp_sum(slope_sum) / (double)x.cols);
        RUNS(c, x.cols) {
            u32 n = run_length(x.cols, c);
            Run d = get_run(dy, spot(dy, row, c), n, wide_d), v = get_run(x, spot(x, row, c), n, wide_x);
            Run w = get_run(weight, c, n, wide_w), value;
            for (int i = 0; i < RUN; i++) value.at[i] = r * fmaf(d.at[i], w.at[i], -(v.at[i] * r * slope));
            put_dx(out, row, c, n, value);
        }
    }
}
