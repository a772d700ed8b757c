// Sums over all rows of a matrix, by column: the gradients of norms' weights and of biases.
//
// A block takes 32 columns and one of `parts` runs of rows; lane l of the block sums every (THREADS / 32)-th row of the
// run, then the lanes are added in order. With one run that is the result; else it lies in `scratch`, f64, and `fold`
// adds the runs in order.

#define LANES (THREADS / 32)

// Which sum of a row and a column: dy, dy times the normalised x, or dy times x over its root mean square.
#define PLAIN 0
#define CENTRED 1
#define SCALED 2

__device__ inline float term(u64 what, const Mat& dy, const Mat& x, const Mat& mean, const Mat& rstd, u64 row, u64 col) {
    float d = get(dy, spot(dy, row, col));
    if (what == PLAIN) return d;
    float value = get(x, spot(x, row, col));
    if (what == CENTRED) value -= get(mean, row);
    return d * (value * get(rstd, row));
}

__device__ inline double lanes_sum(double (*parts)[32], double own) {
    u64 lane = threadIdx.x / 32, at = threadIdx.x % 32;
    __syncthreads();
    parts[lane][at] = own;
    __syncthreads();
    double sum = parts[0][at];
    for (int l = 1; l < LANES; l++) sum += parts[l][at];
    return sum;
}

// `what` into dweight; where there is a dbias, the plain sum into it.
extern "C" __global__ void column_sums(
    Mat dy, Mat x, Mat mean, Mat rstd, Mat dweight, Mat dbias, u64 what, Keep keep, u64 runs, u64 scratch, Post post
) {
    begin(post);
    __shared__ double parts[LANES][32];
    u64 tiles = (dy.cols + 31) / 32, lane = threadIdx.x / 32;
    double* out = (double*)scratch;
    float kept = keep_factor(keep);
    for (u64 job = blockIdx.x; job < tiles * runs; job += gridDim.x) {
        u64 run = job / tiles, col = job % tiles * 32 + threadIdx.x % 32;
        u64 step = (dy.rows + runs - 1) / runs, from = run * step, to = from + step < dy.rows ? from + step : dy.rows;
        double dw = 0.0, db = 0.0;
        if (col < dy.cols) {
            for (u64 row = from + lane; row < to; row += LANES) {
                dw += term(what, dy, x, mean, rstd, row, col);
                if (dbias.rows) db += get(dy, spot(dy, row, col));
            }
        }
        dw = lanes_sum(parts, dw);
        db = lanes_sum(parts, db);
        if (lane != 0 || col >= dy.cols) continue;
        if (runs > 1) {
            out[run * dy.cols + col] = dw;
            if (dbias.rows) out[(runs + run) * dy.cols + col] = db;
            continue;
        }
        accumulate(dweight, col, kept, (float)dw);
        if (dbias.rows) accumulate(dbias, col, kept, (float)db);
    }
}

extern "C" __global__ void fold(Mat dweight, Mat dbias, Keep keep, u64 runs, u64 scratch, Post post) {
    begin(post);
    const double* in = (const double*)scratch;
    float kept = keep_factor(keep);
    u64 cols = dweight.cols;
    EACH(i, cols * (dbias.rows ? 2 : 1)) {
        u64 second = i / cols, col = i % cols;
        double sum = 0.0;
        for (u64 run = 0; run < runs; run++) sum += in[(second * runs + run) * cols + col];
        accumulate(second ? dbias : dweight, col, kept, (float)sum);
    }
}
