// Sums over all rows of a matrix, by column: the gradients of norms' weights and of biases.
//
// A lane has a run of columns, a block as many as the lanes of a warp have, and one of `runs` stretches of rows; warp w of
// the block sums every (THREADS / 32)-th row of the stretch, then the warps are added in order. With one stretch that is
// the result; else it lies in `scratch`, f64, and `fold` adds the stretches in order.

#define WARPS (THREADS / 32)
#define TILE (32 * RUN)

// Which sum of a row and a column: dy, dy times the normalised x, or dy times x over its root mean square.
#define PLAIN 0
#define CENTRED 1
#define SCALED 2

// The warps' sums of the thread's column.
__device__ inline double warps_sum(double (*parts)[TILE], const double (&own)[RUN]) {
    __syncthreads();
    for (int i = 0; i < RUN; i++) parts[threadIdx.x / 32][threadIdx.x % 32 * RUN + i] = own[i];
    __syncthreads();
    double sum = parts[0][threadIdx.x];
    for (int w = 1; w < WARPS; w++) sum += parts[w][threadIdx.x];
    return sum;
}

// `what` into dweight; where there is a dbias, the plain sum into it.
extern "C" __global__ void column_sums(
    Mat dy, Mat x, Mat mean, Mat rstd, Mat dweight, Mat dbias, u64 what, Keep keep, u64 runs, u64 scratch, Post post
) {
    begin(post);
    __shared__ double parts[WARPS][TILE];
    u64 tiles = (dy.cols + TILE - 1) / TILE, step = (dy.rows + runs - 1) / runs;
    double* out = (double*)scratch;
    float kept = keep_factor(keep);
    bool wide_d = is_wide(dy), wide_x = is_wide(x);
    for (u64 job = blockIdx.x; job < tiles * runs; job += gridDim.x) {
        u64 run = job / tiles, first = job % tiles * TILE, c = first + threadIdx.x % 32 * RUN;
        u64 from = run * step, to = from + step < dy.rows ? from + step : dy.rows;
        double dw[RUN] = {}, db[RUN] = {};
        for (u64 row = from + threadIdx.x / 32; row < to && c < dy.cols; row += WARPS) {
            u32 n = run_length(dy.cols, c);
            Run d = get_run(dy, spot(dy, row, c), n, wide_d);
            if (what == PLAIN) {
                for (int i = 0; i < RUN; i++) dw[i] += d.at[i];
                continue;
            }
            Run v = get_run(x, spot(x, row, c), n, wide_x);
            float shift = what == CENTRED ? get(mean, row) : 0.0f, scale = get(rstd, row);
            for (int i = 0; i < RUN; i++) {
                dw[i] += d.at[i] * ((v.at[i] - shift) * scale);
                db[i] += d.at[i];
            }
        }
        double weight = warps_sum(parts, dw), bias = dbias.rows ? warps_sum(parts, db) : 0.0;
        u64 own = first + threadIdx.x;
        if (own >= dy.cols) continue;
        if (runs > 1) {
            out[run * dy.cols + own] = weight;
            if (dbias.rows) out[(runs + run) * dy.cols + own] = bias;
            continue;
        }
        accumulate(dweight, own, kept, (float)weight);
        if (dbias.rows) accumulate(dbias, own, kept, (float)bias);
    }
}

// A warp for each column.
extern "C" __global__ void fold(Mat dweight, Mat dbias, Keep keep, u64 runs, u64 scratch, Post post) {
    begin(post);
    const double* in = (const double*)scratch;
    float kept = keep_factor(keep);
    u64 cols = dweight.cols, all = cols * (dbias.rows ? 2 : 1);
    for (u64 i = (u64)blockIdx.x * WARPS + threadIdx.x / 32; i < all; i += (u64)gridDim.x * WARPS) {
        u64 second = i / cols, col = i % cols;
        double sum = 0.0;
        for (u64 run = threadIdx.x % 32; run < runs; run += 32) sum += in[(second * runs + run) * cols + col];
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
        if (threadIdx.x % 32 == 0) accumulate(second ? dbias : dweight, col, kept, (float)sum);
    }
}
