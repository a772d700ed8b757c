// Layer norm: a block for each row, two passes for the variance.

extern "C" __global__ void layer_norm(
    Mat x, Mat weight, Mat bias, Mat y, Mat mean, Mat rstd, Mat r, Mat sum, u64 residual, u64 eps_bits, Post post
) {
    begin(post);
    const float *w = row_of(weight, 0), *b = row_of(bias, 0);
    for (u64 row = blockIdx.x; row < x.rows; row += gridDim.x) {
        const float* in = row_of(x, row);
        if (residual) {
            const float* other = row_of(r, row);
            float* both = row_to(sum, row);
            for (u64 c = threadIdx.x; c < x.cols; c += THREADS) both[c] = in[c] + other[c];
            // Each thread reads again what it has written itself.
            in = both;
        }
        double total = 0.0, squares = 0.0;
        for (u64 c = threadIdx.x; c < x.cols; c += THREADS) total += in[c];
        double m = block_sum(total) / (double)x.cols;
        for (u64 c = threadIdx.x; c < x.cols; c += THREADS) squares += ((double)in[c] - m) * ((double)in[c] - m);
        double variance = block_sum(squares) / (double)x.cols;
        float shift = (float)m, scale = (float)(1.0 / sqrt(variance + (double)__uint_as_float((u32)eps_bits)));
        if (threadIdx.x == 0) {
            row_to(mean, 0)[row] = shift;
            row_to(rstd, 0)[row] = scale;
        }
        float* out = row_to(y, row);
        for (u64 c = threadIdx.x; c < x.cols; c += THREADS) out[c] = fmaf((in[c] - shift) * scale, w[c], b[c]);
    }
}

// skip: 0 nothing past the norm, 1 what dx holds, 2 what `past` holds.
extern "C" __global__ void layer_norm_backward(
    Mat dy, Mat x, Mat weight, Mat mean, Mat rstd, Mat dx, Mat past, u64 skip, Post post
) {
    begin(post);
    const float* w = row_of(weight, 0);
    for (u64 row = blockIdx.x; row < x.rows; row += gridDim.x) {
        const float *in = row_of(x, row), *d = row_of(dy, row);
        float m = row_of(mean, 0)[row], r = row_of(rstd, 0)[row];
        double shift_sum = 0.0, slope_sum = 0.0;
        for (u64 c = threadIdx.x; c < x.cols; c += THREADS) {
            shift_sum += (double)d[c] * w[c];
            slope_sum += (double)d[c] * w[c] * ((double)(in[c] - m) * r);
        }
        float shift = (float)(block_sum(shift_sum) / (double)x.cols);
        float slope = (float)(block_sum(slope_sum) / (double)x.cols);
        float* out = row_to(dx, row);
        for (u64 c = threadIdx.x; c < x.cols; c += THREADS) {
            float value = r * (fmaf(d[c], w[c], -shift) - (in[c] - m) * r * slope);
            out[c] = skip == 0 ? value : (skip == 1 ? out[c] : row_of(past, row)[c]) + value;
        }
    }
}

// A block for each 32 columns; lane l of the block sums every (THREADS / 32)-th row, then the lanes are added in order.
#define LANES (THREADS / 32)

extern "C" __global__ void layer_norm_grad(
    Mat dy, Mat x, Mat mean, Mat rstd, Mat dweight, Mat dbias, Keep keep, Post post
) {
    begin(post);
    __shared__ double parts[2][LANES][32];
    u64 lane = threadIdx.x / 32, col = (u64)blockIdx.x * 32 + threadIdx.x % 32;
    double dw = 0.0, db = 0.0;
    if (col < x.cols) {
        for (u64 row = lane; row < x.rows; row += LANES) {
            float d = row_of(dy, row)[col];
            dw += (double)d * ((double)(row_of(x, row)[col] - row_of(mean, 0)[row]) * row_of(rstd, 0)[row]);
            db += d;
        }
    }
    parts[0][lane][threadIdx.x % 32] = dw;
    parts[1][lane][threadIdx.x % 32] = db;
    __syncthreads();
    if (lane == 0 && col < x.cols) {
        for (int l = 1; l < LANES; l++) {
            dw += parts[0][l][threadIdx.x];
            db += parts[1][l][threadIdx.x];
        }
        float kept = keep_factor(keep);
        accumulate(row_to(dweight, 0) + col, kept, (float)dw);
        accumulate(row_to(dbias, 0) + col, kept, (float)db);
    }
}

extern "C" __global__ void bias_grad(Mat dy, Mat dbias, Keep keep, Post post) {
    begin(post);
    __shared__ double parts[LANES][32];
    u64 lane = threadIdx.x / 32, col = (u64)blockIdx.x * 32 + threadIdx.x % 32;
    double db = 0.0;
    if (col < dy.cols) {
        for (u64 row = lane; row < dy.rows; row += LANES) db += row_of(dy, row)[col];
    }
    parts[lane][threadIdx.x % 32] = db;
    __syncthreads();
    if (lane == 0 && col < dy.cols) {
        for (int l = 1; l < LANES; l++) db += parts[l][threadIdx.x];
        accumulate(row_to(dbias, 0) + col, keep_factor(keep), (float)db);
    }
}
