// AdamW, the sums behind the global norm, and what is done with them.

struct Betas {
    double beta1, beta2, eps, decay;
};

// Places in the optimizer's scalars.
#define LR 0
#define CORRECTION1 1
#define CORRECTION2 2
#define CLIP 3

extern "C" __global__ void adamw(
    Mat param, Mat m, Mat v, Mat grad, Mat scalars, Mat copy, u64 has_copy, u64 skip_flag, Betas betas, Post post
) {
    begin(post);
    const float* s = (const float*)scalars.address;
    bool skip = skip_flag && *(const int*)skip_flag != 0;
    float beta1 = (float)betas.beta1, rest1 = (float)(1.0 - betas.beta1);
    float beta2 = (float)betas.beta2, rest2 = (float)(1.0 - betas.beta2);
    float shrink = (float)(1.0 - (double)s[LR] * betas.decay), rate = (float)((double)s[LR] / (double)s[CORRECTION1]);
    float spread = (float)(1.0 / sqrt((double)s[CORRECTION2])), eps = (float)betas.eps, clip = s[CLIP];
    auto step = [&](float& value, float& m1, float& m2, float g) {
        g *= clip;
        m1 = fmaf(beta1, m1, rest1 * g);
        m2 = fmaf(beta2, m2, rest2 * g * g);
        value = fmaf(value, shrink, -(rate * m1 / fmaf(sqrtf(m2), spread, eps)));
    };
    u64 count = param.rows * param.cols;
    if (is_flat(param) && is_flat(m) && is_flat(v) && is_flat(grad) && is_flat(copy)) {
        EACH_RUN(i, count) {
            u32 n = run_length(count, i);
            Run value = get_run(param, i, n, true);
            if (!skip) {
                Run m1 = get_run(m, i, n, true), m2 = get_run(v, i, n, true), g = get_run(grad, i, n, true);
                for (int j = 0; j < RUN; j++) step(value.at[j], m1.at[j], m2.at[j], g.at[j]);
                put_run(m, i, n, true, m1);
                put_run(v, i, n, true, m2);
                put_run(param, i, n, true, value);
            }
            if (has_copy) put_run(copy, i, n, true, value);
        }
        return;
    }
    EACH(i, count) {
        float* value = (float*)param.address + place(param, i);
        if (!skip) {
            step(*value, *((float*)m.address + place(m, i)), *((float*)v.address + place(v, i)), get(grad, place(grad, i)));
        }
        if (has_copy) put(copy, place(copy, i), *value);
    }
}

extern "C" __global__ void advance_adam(Mat step, Mat scalars, u64 skip_flag, Betas betas, Post post) {
    begin(post);
    if (blockIdx.x != 0 || threadIdx.x != 0 || (skip_flag && *(const int*)skip_flag != 0)) return;
    int taken = *(int*)step.address;
    if (taken != 0x7FFFFFFF) taken++;
    *(int*)step.address = taken;
    float* s = (float*)scalars.address;
    s[CORRECTION1] = (float)(1.0 - pow(betas.beta1, (double)taken));
    s[CORRECTION2] = (float)(1.0 - pow(betas.beta2, (double)taken));
}

// One block: for losses, partial sums and the like.
extern "C" __global__ void sum(Mat x, Mat total, Factor by, Post post) {
    begin(post);
    double part = 0.0;
    for (u64 i = threadIdx.x; i < x.rows * x.cols; i += THREADS) part += get(x, place(x, i));
    double all = block_sum(part);
    if (threadIdx.x == 0) *(float*)total.address = (float)((double)factor(by) * all);
}

// Block p sums the squares of elements p * piece to (p + 1) * piece.
extern "C" __global__ void squared_norm(Mat x, Mat partials, u64 piece, Post post) {
    begin(post);
    for (u64 p = blockIdx.x; p < partials.rows * partials.cols; p += gridDim.x) {
        u64 count = x.rows * x.cols, from = p * piece < count ? p * piece : count;
        u64 to = from + piece < count ? from + piece : count;
        double part = 0.0;
        if (is_flat(x) && from % RUN == 0) {
            for (u64 i = from + threadIdx.x * RUN; i < to; i += THREADS * RUN) {
                Run value = get_run(x, i, run_length(to, i), true);
                for (int j = 0; j < RUN; j++) part += (double)value.at[j] * (double)value.at[j];
            }
        } else {
            for (u64 i = from + threadIdx.x; i < to; i += THREADS) {
                double value = get(x, place(x, i));
                part += value * value;
            }
        }
        double all = block_sum(part);
        if (threadIdx.x == 0) ((float*)partials.address)[p] = (float)all;
    }
}

extern "C" __global__ void clip_factor(Mat squared, Mat norm, Mat clip, Mat nonfinite, u64 limit_bits, Post post) {
    begin(post);
    if (blockIdx.x != 0 || threadIdx.x != 0) return;
    double limit = (double)__uint_as_float((u32)limit_bits), length = sqrt((double)*(const float*)squared.address);
    // False for NaN too.
    bool finite = length <= 1.7976931348623157e308;
    double share = limit / (length + 1e-6);
    *(float*)norm.address = (float)length;
    *(float*)clip.address = !finite ? 0.0f : limit == 0.0 ? 1.0f : (float)(share < 1.0 ? share : 1.0);
    *(int*)nonfinite.address = finite ? 0 : 1;
}
