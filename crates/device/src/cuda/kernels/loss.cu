// Cross-entropy, over all of the vocabulary or a shard of it: a block for each row. The gradient may be where the logits
// are. A target of -1 is ignored, any other one outside the vocabulary is refused.

// Whether the row counts; the same for the whole block. Where it does not, its loss is 0 and so is its gradient.
__device__ inline bool counts(const Mat& d, const Mat& losses, u64 size, u64 row, int target, const Post& post) {
    if (target >= 0 && (u64)target < size) return true;
    for (u64 c = threadIdx.x; c < d.cols; c += THREADS) put(d, spot(d, row, c), 0.0f);
    if (threadIdx.x == 0) {
        put(losses, row, 0.0f);
        if (target != -1) refuse(post, row, target);
    }
    return false;
}

// The largest of a row and the sum of exponentials below it, in one pass: each thread has a maximum of its own on the way.
__device__ inline double exponentials(const Mat& in, u64 row, float& most) {
    bool wide = is_wide(in);
    const float lowest = __uint_as_float(0xFF800000u);
    float own = lowest;
    double sum = 0.0;
    for (u64 c = threadIdx.x * RUN; c < in.cols; c += THREADS * RUN) {
        u32 n = run_length(in.cols, c);
        Run v = get_run(in, spot(in, row, c), n, wide);
        float top = own;
        for (u32 i = 0; i < RUN; i++) {
            if (i < n) top = larger(top, v.at[i]);
        }
        if (top == lowest) continue;
        sum *= expf(own - top);
        own = top;
        for (u32 i = 0; i < RUN; i++) v.at[i] = i < n ? expf(v.at[i] - own) : 0.0f;
        // Neighbours first: eight terms with the error of three.
        for (u32 step = 1; step < RUN; step *= 2) {
            for (u32 i = 0; i < RUN; i += 2 * step) v.at[i] += v.at[i + step];
        }
        sum += v.at[0];
    }
    most = block_max(own);
    return block_sum(sum == 0.0 ? 0.0 : sum * expf(own - most));
}

// target: its column, or one that there is not.
__device__ inline void put_gradient(const Mat& d, const Mat& in, u64 row, float most, float share, float scale, u64 target) {
    bool wide_d = is_wide(d), wide = is_wide(in);
    for (u64 c = threadIdx.x * RUN; c < d.cols; c += THREADS * RUN) {
        u32 n = run_length(d.cols, c);
        Run v = get_run(in, spot(in, row, c), n, wide);
        for (int i = 0; i < RUN; i++) {
            float p = share * expf(v.at[i] - most);
            v.at[i] = c + i == target ? p - scale : p;
        }
        put_run(d, spot(d, row, c), n, wide_d, v);
    }
}

extern "C" __global__ void cross_entropy(Mat d, Mat targets, Mat losses, Mat logits, Factor by, Post post) {
    begin(post);
    float scale = factor(by);
    for (u64 row = blockIdx.x; row < d.rows; row += gridDim.x) {
        int target = ((const int*)targets.address)[row];
        if (!counts(d, losses, d.cols, row, target, post)) continue;
        float logit = get(logits, spot(logits, row, target)), most;
        double sum = exponentials(logits, row, most);
        put_gradient(d, logits, row, most, (float)((double)scale / sum), scale, target);
        if (threadIdx.x == 0) put(losses, row, (float)((double)most - (double)logit + log(sum)));
    }
}

extern "C" __global__ void vocab_partials(
    Mat logits, Mat targets, Mat max, Mat sum, Mat target, u64 size, u64 start, Post post
) {
    begin(post);
    for (u64 row = blockIdx.x; row < logits.rows; row += gridDim.x) {
        int id = ((const int*)targets.address)[row];
        float most;
        double total = exponentials(logits, row, most);
        if (threadIdx.x != 0) continue;
        put(max, row, most);
        put(sum, row, (float)total);
        bool known = id >= 0 && (u64)id < size, own = known && (u64)id >= start && (u64)id - start < logits.cols;
        put(target, row, own ? get(logits, spot(logits, row, (u64)id - start)) : 0.0f);
        if (!known && id != -1) refuse(post, row, id);
    }
}

extern "C" __global__ void vocab_rescale(Mat local, Mat global, Mat sum, Post post) {
    begin(post);
    EACH(i, sum.rows * sum.cols) put(sum, i, get(sum, i) * expf(get(local, i) - get(global, i)));
}

extern "C" __global__ void vocab_finish(
    Mat d, Mat targets, Mat max, Mat sum, Mat target, Mat losses, Mat logits, u64 size, u64 start, Factor by, Post post
) {
    begin(post);
    float scale = factor(by);
    for (u64 row = blockIdx.x; row < d.rows; row += gridDim.x) {
        int id = ((const int*)targets.address)[row];
        if (!counts(d, losses, size, row, id, post)) continue;
        float most = get(max, row), total = get(sum, row);
        u64 own = (u64)id >= start ? (u64)id - start : d.cols;
        put_gradient(d, logits, row, most, scale / total, scale, own);
        if (threadIdx.x == 0) put(losses, row, (float)((double)most - (double)get(target, row) + log((double)total)));
    }
}
