// Products without the library: for what it does not take, and as its slow twin. Sums in f32, over k in order: DEPTH terms
// at a time, so that an error does not grow with every term.

#define SIDE 64
#define DEPTH 16

// What follows the product, as `GemmFinish`.
#define INTO 0
#define BIAS 1
#define BIAS_GELU 2
#define RESIDUAL 3
#define BIAS_RESIDUAL 4
#define GELU_BACKWARD 5

#define GELU_A 1.5957691216057308f
#define GELU_B 0.07135481282780998f

// As in elementwise.cu.
__device__ inline float gelu_of(float v) {
    if (v < -20.0f) v = -20.0f;
    return v / (1.0f + expf(v * fmaf(v * v, -GELU_B, -GELU_A)));
}

__device__ inline float gelu_slope_of(float v) {
    if (v < -10.0f) v = -10.0f;
    if (v > 10.0f) v = 10.0f;
    float vv = v * v, e = expf(v * fmaf(vv, -GELU_B, -GELU_A)), s = 1.0f / (1.0f + e);
    return fmaf(v * (e * s), fmaf(vv, 3.0f * GELU_B, GELU_A), 1.0f) * s;
}

// c = op(a) op(b) and what follows. bias has an entry for each column of c; other is pre or r, as large as c. Bit 0 of
// trans: a is stored transposed, bit 1: b is.
extern "C" __global__ void product(Mat a, Mat b, Mat c, Mat bias, Mat other, u64 trans, u64 finish, Keep keep, Post post) {
    begin(post);
    // By k, then by row of c, or column.
    __shared__ float as[DEPTH][SIDE + 1], bs[DEPTH][SIDE + 1];
    bool ta = trans & 1, tb = trans & 2;
    u64 m = c.rows, n = c.cols, k = ta ? a.rows : a.cols, across = (n + SIDE - 1) / SIDE;
    u64 tiles = (m + SIDE - 1) / SIDE * across;
    u32 ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    float kept = keep_factor(keep);
    for (u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        u64 row0 = tile / across * SIDE, col0 = tile % across * SIDE;
        float sum[4][4] = {};
        for (u64 k0 = 0; k0 < k; k0 += DEPTH) {
            __syncthreads();
            for (u32 i = threadIdx.x; i < SIDE * DEPTH; i += THREADS) {
                // Neighbouring threads read neighbouring addresses, whichever way a factor is stored.
                u32 ak = ta ? i / SIDE : i % DEPTH, ar = ta ? i % SIDE : i / DEPTH;
                bool there = k0 + ak < k && row0 + ar < m;
                as[ak][ar] = !there ? 0.0f : get(a, ta ? spot(a, k0 + ak, row0 + ar) : spot(a, row0 + ar, k0 + ak));
                u32 bk = tb ? i % DEPTH : i / SIDE, bc = tb ? i / DEPTH : i % SIDE;
                there = k0 + bk < k && col0 + bc < n;
                bs[bk][bc] = !there ? 0.0f : get(b, tb ? spot(b, col0 + bc, k0 + bk) : spot(b, k0 + bk, col0 + bc));
            }
            __syncthreads();
            float part[4][4] = {};
            for (u32 l = 0; l < DEPTH; l++) {
                float av[4], bv[4];
                for (u32 i = 0; i < 4; i++) av[i] = as[l][ty * 4 + i];
                for (u32 j = 0; j < 4; j++) bv[j] = bs[l][tx + 16 * j];
                for (u32 i = 0; i < 4; i++) {
                    for (u32 j = 0; j < 4; j++) part[i][j] = fmaf(av[i], bv[j], part[i][j]);
                }
            }
            for (u32 i = 0; i < 4; i++) {
                for (u32 j = 0; j < 4; j++) sum[i][j] += part[i][j];
            }
        }
        for (u32 i = 0; i < 4; i++) {
            for (u32 j = 0; j < 4; j++) {
                u64 row = row0 + ty * 4 + i, col = col0 + tx + 16 * j;
                if (row >= m || col >= n) continue;
                float value = sum[i][j];
                if (finish == BIAS || finish == BIAS_GELU || finish == BIAS_RESIDUAL) value += get(bias, col);
                if (finish == INTO) accumulate(c, spot(c, row, col), kept, value);
                else if (finish == BIAS_GELU) {
                    put(other, spot(other, row, col), value);
                    put(c, spot(c, row, col), gelu_of(value));
                } else {
                    if (finish == RESIDUAL || finish == BIAS_RESIDUAL) value += get(other, spot(other, row, col));
                    if (finish == GELU_BACKWARD) value *= gelu_slope_of(get(other, spot(other, row, col)));
                    put(c, spot(c, row, col), value);
                }
            }
        }
    }
}
