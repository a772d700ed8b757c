// Embedding: what reads token ids, and refuses those that the vocabulary does not have.

extern "C" __global__ void embedding(Mat ids, Mat table, Mat y, Mat positions, u64 size, u64 start, u64 seq_len, Post post) {
    begin(post);
    EACH(i, y.rows * y.cols) {
        u64 row = i / y.cols, col = i % y.cols;
        int id = ((const int*)ids.address)[row];
        if (id < 0 || (u64)id >= size) {
            refuse(post, row, id);
            continue;
        }
        float value = seq_len ? get(positions, spot(positions, row % seq_len, col)) : 0.0f;
        if ((u64)id >= start && (u64)id - start < table.rows) {
            float token = get(table, spot(table, (u64)id - start, col));
            value = seq_len ? token + value : token;
        }
        put(y, spot(y, row, col), value);
    }
}

// What a table keeps of its old values, before rows are added to it.
extern "C" __global__ void embedding_keep(Mat dtable, Keep keep, Post post) {
    begin(post);
    float kept = keep_factor(keep);
    if (kept == 1.0f) return;
    EACH(i, dtable.rows * dtable.cols) {
        u64 at = place(dtable, i);
        put(dtable, at, kept == 0.0f ? 0.0f : kept * get(dtable, at));
    }
}

// A block for each row that is the first with its id: it adds all rows with that id in their order, as the host does.
extern "C" __global__ void embedding_grad(Mat ids, Mat dy, Mat dtable, u64 size, u64 start, Post post) {
    begin(post);
    __shared__ int found[THREADS];
    __shared__ int count;
    const int* all = (const int*)ids.address;
    for (u64 row = blockIdx.x; row < dy.rows; row += gridDim.x) {
        int id = all[row];
        if (id < 0 || (u64)id >= size) {
            if (threadIdx.x == 0) refuse(post, row, id);
            continue;
        }
        if ((u64)id < start || (u64)id - start >= dtable.rows) continue;
        bool earlier = false;
        for (u64 from = 0; from < row && !earlier; from += 4 * THREADS) {
            bool seen = false;
            for (u64 i = from + threadIdx.x; i < from + 4 * THREADS && i < row; i += THREADS) seen |= all[i] == id;
            earlier = __syncthreads_or(seen) != 0;
        }
        if (earlier) continue;
        for (u64 from = row; from < dy.rows; from += THREADS) {
            u64 own = from + threadIdx.x;
            bool match = own < dy.rows && all[own] == id;
            // Nobody reads the list of the run before any more.
            if (!__syncthreads_or(match)) continue;
            u32 matches = __ballot_sync(0xFFFFFFFFu, match);
            if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = (int)matches;
            __syncthreads();
            if (threadIdx.x == 0) {
                int n = 0;
                u32 words[THREADS / 32];
                for (int w = 0; w < THREADS / 32; w++) words[w] = (u32)found[w];
                for (int i = 0; i < THREADS; i++) {
                    if (words[i / 32] >> (i % 32) & 1) found[n++] = i;
                }
                count = n;
            }
            __syncthreads();
            for (u64 col = threadIdx.x; col < dy.cols; col += THREADS) {
                u64 to = spot(dtable, (u64)id - start, col);
                float sum = get(dtable, to);
                for (int i = 0; i < count; i++) sum += get(dy, spot(dy, from + found[i], col));
                put(dtable, to, sum);
            }
        }
    }
}

extern "C" __global__ void position_grad(Mat dy, Mat dtable, u64 seq_len, Keep keep, Post post) {
    begin(post);
    float kept = keep_factor(keep);
    EACH(i, dtable.rows * dtable.cols) {
        u64 t = i / dtable.cols, col = i % dtable.cols, to = spot(dtable, t, col);
        float sum = kept == 0.0f ? 0.0f : kept * get(dtable, to);
        for (u64 row = t; t < seq_len && row < dy.rows; row += seq_len) sum += get(dy, spot(dy, row, col));
        put(dtable, to, sum);
    }
}
