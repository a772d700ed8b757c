// Cross-entropy over a shard of the vocabulary: behind loss.cu.

extern "C" __global__ void vocab_partials(
    Mat logits, Mat targets, Mat max, Mat sum, Mat target, u64 size, u64 start, Post post
) {
    begin(post);
    u32 turn = 0;
    for (u64 row = blockIdx.x; row < logits.rows; row += gridDim.x) {
        turn ^= 1;
        Tally all = logits.kind == 1 ? tally<true, true>(logits, row, turn) : tally<false, true>(logits, row, turn);
        if (threadIdx.x != 0) continue;
        int id = ((const int*)targets.address)[row];
        put(max, row, all.most);
        // Over the greatest itself. If there is none, nothing was added.
        double most = logits.kind == 1 ? exponent_of<true>(all.most) : exponent_of<false>(all.most);
        double off = ((double)all.base - most) * LN_2;
        put(sum, row, all.most == LOWEST ? 0.0f : (float)(all.sum * exp(off)));
        bool known = id >= 0 && (u64)id < size, own = known && (u64)id >= start && (u64)id - start < logits.cols;
        put(target, row, own ? get(logits, spot(logits, row, (u64)id - start)) : 0.0f);
        if (!known && id != -1) refuse(post, row, id);
    }
}

extern "C" __global__ void vocab_rescale(Mat local, Mat global, Mat sum, Post post) {
    begin(post);
    EACH(i, sum.rows * sum.cols) put(sum, i, (float)(get(sum, i) * exp((double)get(local, i) - get(global, i))));
}

extern "C" __global__ void vocab_finish(
    Mat d, Mat targets, Mat max, Mat sum, Mat target, Mat losses, Mat logits, u64 size, u64 start, Factor by, Post post
) {
    begin(post);
    float scale = factor(by);
    for (u64 row = blockIdx.x; row < d.rows; row += gridDim.x) {
        int id = ((const int*)targets.address)[row];
        Slope s = {0.0f, 0.0f, scale, 0xFFFFFFFFu, counts(losses, size, row, id, post)};
        if (s.counts) {
            float total = get(sum, row);
            // Elsewhere it is a column that there is not.
            u64 own = (u64)id >= start ? (u64)id - start : d.cols;
            float most = get(max, row), base = most * LOG2_E, lost = fmaf(most, LOG2_E, -base), share = scale / total;
            if (logits.kind != 1) lost = fmaf(most, LOG2_E_REST, lost);
            share = fmaf(share, lost * -(float)LN_2, share);
            s = {base, share, scale, own < d.cols ? (u32)own : 0xFFFFFFFFu, true};
            double loss = (double)most - (double)get(target, row) + log((double)total);
            if (threadIdx.x == 0) put(losses, row, (float)loss);
        }
        if (logits.kind == 1) put_gradient<true>(d, logits, row, s);
        else put_gradient<false>(d, logits, row, s);
    }
}
