// Layer norm and RMS norm: a block for each row, two passes for the variance.

// What is normalised: x, or its sum with the residual before it is rounded.
struct Input {
    Mat x, r;
    u64 residual;
};
__device__ inline float input(const Input& in, u64 row, u64 c) {
    float x = get(in.x, spot(in.x, row, c));
    return in.residual ? x + get(in.r, spot(in.r, row, c)) : x;
}

__device__ inline void keep_sum(const Input& in, const Mat& sum, u64 row) {
    if (!in.residual) return;
    for (u64 c = threadIdx.x; c < sum.cols; c += THREADS) put(sum, spot(sum, row, c), input(in, row, c));
}

extern "C" __global__ void layer_norm(
    Mat x, Mat weight, Mat bias, Mat y, Mat mean, Mat rstd, Mat r, Mat sum, u64 residual, u64 eps_bits, Post post
) {
    begin(post);
    Input in = {x, r, residual};
    for (u64 row = blockIdx.x; row < x.rows; row += gridDim.x) {
        keep_sum(in, sum, row);
        double total = 0.0, squares = 0.0;
        for (u64 c = threadIdx.x; c < x.cols; c += THREADS) total += input(in, row, c);
        double m = block_sum(total) / (double)x.cols;
        for (u64 c = threadIdx.x; c < x.cols; c += THREADS) {
            double away = (double)input(in, row, c) - m;
            squares += away * away;
        }
        double variance = block_sum(squares) / (double)x.cols;
        float shift = (float)m, scale = (float)(1.0 / sqrt(variance + (double)__uint_as_float((u32)eps_bits)));
        if (threadIdx.x == 0) {
            put(mean, row, shift);
            put(rstd, row, scale);
        }
        for (u64 c = threadIdx.x; c < x.cols; c += THREADS) {
            put(y, spot(y, row, c), fmaf((input(in, row, c) - shift) * scale, get(weight, c), get(bias, c)));
        }
    }
}

// skip: 0 nothing past the norm, 1 what dx holds, 2 what `past` holds.
__device__ inline void put_dx(const Mat& dx, const Mat& past, u64 skip, u64 row, u64 c, float value) {
    u64 to = spot(dx, row, c);
    put(dx, to, skip == 0 ? value : (skip == 1 ? get(dx, to) : get(past, spot(past, row, c))) + value);
}

extern "C" __global__ void layer_norm_backward(
    Mat dy, Mat x, Mat weight, Mat mean, Mat rstd, Mat dx, Mat past, u64 skip, Post post
) {
    begin(post);
    for (u64 row = blockIdx.x; row < x.rows; row += gridDim.x) {
        float m = get(mean, row), r = get(rstd, row);
        double shift_sum = 0.0, slope_sum = 0.0;
        for (u64 c = threadIdx.x; c < x.cols; c += THREADS) {
            double g = (double)get(dy, spot(dy, row, c)) * get(weight, c);
            shift_sum += g;
            slope_sum += g * ((double)(get(x, spot(x, row, c)) - m) * r);
        }
        float shift = (float)(block_sum(shift_sum) / (double)x.cols);
        float slope = (float)(block_sum(slope_sum) / (double)x.cols);
        for (u64 c = threadIdx.x; c < x.cols; c += THREADS) {
            float g = fmaf(get(dy, spot(dy, row, c)), get(weight, c), -shift);
            put_dx(dx, past, skip, row, c, r * (g - (get(x, spot(x, row, c)) - m) * r * slope));
        }
    }
}

extern "C" __global__ void rms_norm(
    Mat x, Mat weight, Mat y, Mat rstd, Mat r, Mat sum, u64 residual, u64 eps_bits, Post post
) {
    begin(post);
    Input in = {x, r, residual};
    for (u64 row = blockIdx.x; row < x.rows; row += gridDim.x) {
        keep_sum(in, sum, row);
        double squares = 0.0;
        for (u64 c = threadIdx.x; c < x.cols; c += THREADS) {
            double value = input(in, row, c);
            squares += value * value;
        }
        double mean = block_sum(squares) / (double)x.cols;
        float scale = (float)(1.0 / sqrt(mean + (double)__uint_as_float((u32)eps_bits)));
        if (threadIdx.x == 0) put(rstd, row, scale);
        for (u64 c = threadIdx.x; c < x.cols; c += THREADS) {
            put(y, spot(y, row, c), input(in, row, c) * scale * get(weight, c));
        }
    }
}

extern "C" __global__ void rms_norm_backward(
    Mat dy, Mat x, Mat weight, Mat rstd, Mat dx, Mat past, u64 skip, Post post
) {
    begin(post);
    for (u64 row = blockIdx.x; row < x.rows; row += gridDim.x) {
        float r = get(rstd, row);
        double slope_sum = 0.0;
        for (u64 c = threadIdx.x; c < x.cols; c += THREADS) {
            slope_sum += (double)get(dy, spot(dy, row, c)) * get(weight, c) * ((double)get(x, spot(x, row, c)) * r);
        }
        float slope = (float)(block_sum(slope_sum) / (double)x.cols);
        for (u64 c = threadIdx.x; c < x.cols; c += THREADS) {
            float off = get(x, spot(x, row, c)) * r * slope;
            put_dx(dx, past, skip, row, c, r * fmaf(get(dy, spot(dy, row, c)), get(weight, c), -off));
        }
    }
}
