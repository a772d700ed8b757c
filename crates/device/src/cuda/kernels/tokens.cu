// Embedding and cross-entropy: what reads token ids, and refuses those that the vocabulary does not have.

extern "C" __global__ void embedding(Mat ids, Mat table, Mat y, Mat positions, u64 size, u64 start, u64 seq_len, Post post) {
    begin(post);
    EACH(i, y.rows * y.cols) {
        u64 row = i / y.cols, col = i % y.cols;
        int id = ((const int*)ids.address)[row];
        if (id < 0 || (u64)id >= size) {
            refuse(post, row, id);
            continue;
        }
        float value = seq_len ? row_of(positions, row % seq_len)[col] : 0.0f;
        if ((u64)id >= start && (u64)id - start < table.rows) {
            float token = row_of(table, (u64)id - start)[col];
            value = seq_len ? token + value : token;
        }
        row_to(y, row)[col] = value;
    }
}

// A thread owns a column and adds the rows in their order, as the host does.
extern "C" __global__ void embedding_grad(Mat ids, Mat dy, Mat dtable, u64 size, u64 start, Keep keep, Post post) {
    begin(post);
    float kept = keep_factor(keep);
    EACH(col, dy.cols) {
        for (u64 row = 0; row < dtable.rows && kept != 1.0f; row++) {
            float* out = row_to(dtable, row) + col;
            *out = kept == 0.0f ? 0.0f : kept * *out;
        }
        for (u64 row = 0; row < dy.rows; row++) {
            int id = ((const int*)ids.address)[row];
            if (id < 0 || (u64)id >= size) {
                refuse(post, row, id);
                break;
            }
            if ((u64)id >= start && (u64)id - start < dtable.rows) row_to(dtable, (u64)id - start)[col] += row_of(dy, row)[col];
        }
    }
}

extern "C" __global__ void position_grad(Mat dy, Mat dtable, u64 seq_len, Keep keep, Post post) {
    begin(post);
    float kept = keep_factor(keep);
    EACH(i, dtable.rows * dtable.cols) {
        u64 t = i / dtable.cols, col = i % dtable.cols;
        float* out = row_to(dtable, t) + col;
        float sum = kept == 0.0f ? 0.0f : kept * *out;
        for (u64 row = t; t < seq_len && row < dy.rows; row += seq_len) sum += row_of(dy, row)[col];
        *out = sum;
    }
}

// A block for each row. The gradient may be where the logits are.
extern "C" __global__ void cross_entropy(Mat d, Mat targets, Mat losses, Mat logits, Factor by, Post post) {
    begin(post);
    float scale = factor(by);
    for (u64 row = blockIdx.x; row < d.rows; row += gridDim.x) {
        int target = ((const int*)targets.address)[row];
        const float* in = row_of(logits, row);
        float* out = row_to(d, row);
        // The same for the whole block. -1 is ignored, any other target outside the vocabulary is refused.
        if (target < 0 || (u64)target >= d.cols) {
            for (u64 c = threadIdx.x; c < d.cols; c += THREADS) out[c] = 0.0f;
            if (threadIdx.x == 0) {
                row_to(losses, 0)[row] = 0.0f;
                if (target != -1) refuse(post, row, target);
            }
            continue;
        }
        float logit = in[target], most = __uint_as_float(0xFF800000u);
        for (u64 c = threadIdx.x; c < d.cols; c += THREADS) most = larger(most, in[c]);
        most = block_max(most);
        double part = 0.0;
        for (u64 c = threadIdx.x; c < d.cols; c += THREADS) part += expf(in[c] - most);
        double sum = block_sum(part);
        float share = (float)((double)scale / sum);
        for (u64 c = threadIdx.x; c < d.cols; c += THREADS) {
            float p = share * expf(in[c] - most);
            out[c] = c == (u64)target ? p - scale : p;
        }
        if (threadIdx.x == 0) row_to(losses, 0)[row] = (float)((double)most - (double)logit + log(sum));
    }
}
