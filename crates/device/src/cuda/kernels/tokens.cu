// What reads token ids, and refuses those that the vocabulary does not have; and the gradient of positions.

#define WARPS (THREADS / 32)

__device__ inline void add(Run& sum, const Run& more) {
#pragma unroll
    for (int i = 0; i < RUN; i++) sum.at[i] += more.at[i];
}

// Rows of y, a warp each.
template <int KIND, bool TOKEN, bool POSITION>
__device__ inline void put_embedding(
    const Mat& y, u64 row, const Mat& table, u64 token, const Mat& positions, u64 position
) {
    // Runs that a lane loads before it waits for the first.
    constexpr int AHEAD = KIND == 1 ? 4 : 2;
    for (u32 first = threadIdx.x % 32 * RUN; first < (u32)y.cols; first += AHEAD * 32 * RUN) {
        Raw<KIND> a[AHEAD], b[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            u32 c = first + j * 32 * RUN;
            if (c >= (u32)y.cols) continue;
            if (TOKEN) a[j] = raw_run<KIND>(table, token * table.pitch + c);
            if (POSITION) b[j] = raw_run<KIND>(positions, position * positions.pitch + c);
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            u32 c = first + j * 32 * RUN;
            if (c >= (u32)y.cols) continue;
            Run value = TOKEN ? opened(a[j]) : POSITION ? opened(b[j]) : Run{};
            if (TOKEN && POSITION) add(value, opened(b[j]));
            put_wide<KIND>(y, row * y.pitch + c, value);
        }
    }
}

template <int KIND>
__device__ inline void put_wide_row(
    const Mat& y, u64 row, const Mat& table, i64 token, const Mat& positions, i64 position
) {
    if (token >= 0 && position >= 0) put_embedding<KIND, true, true>(y, row, table, token, positions, position);
    else if (token >= 0) put_embedding<KIND, true, false>(y, row, table, token, positions, 0);
    else if (position >= 0) put_embedding<KIND, false, true>(y, row, table, 0, positions, position);
    else put_embedding<KIND, false, false>(y, row, table, 0, positions, 0);
}

extern "C" __global__ __launch_bounds__(THREADS, 3) void embedding(
    Mat ids, Mat table, Mat y, Mat positions, u64 size, u64 start, u64 seq_len, Post post
) {
    begin(post);
    bool wide = y.cols % RUN == 0 && is_wide(y) && is_wide(table) && is_wide(positions);
    for (u64 row = (u64)blockIdx.x * WARPS + threadIdx.x / 32; row < y.rows; row += (u64)gridDim.x * WARPS) {
        int id = ((const int*)ids.address)[row];
        if (id < 0 || (u64)id >= size) {
            if (threadIdx.x % 32 == 0) refuse(post, row, id);
            continue;
        }
        // Of the tables; below 0 where there is none for it.
        i64 token = (u64)id >= start && (u64)id - start < table.rows ? (i64)((u64)id - start) : -1;
        i64 position = seq_len ? (i64)(row % seq_len) : -1;
        if (wide && y.kind == 1) {
            put_wide_row<1>(y, row, table, token, positions, position);
            continue;
        }
        if (wide) {
            put_wide_row<0>(y, row, table, token, positions, position);
            continue;
        }
        for (u64 col = threadIdx.x % 32; col < y.cols; col += 32) {
            float value = position >= 0 ? get(positions, spot(positions, position, col)) : 0.0f;
            if (token >= 0) {
                float own = get(table, spot(table, token, col));
                value = position >= 0 ? own + value : own;
            }
            put(y, spot(y, row, col), value);
        }
    }
}

// What a table keeps of its old values, before rows are added to it.
extern "C" __global__ void embedding_keep(Mat dtable, Keep keep, Post post) {
    begin(post);
    float kept = keep_factor(keep);
    if (kept == 1.0f) return;
    u64 count = dtable.rows * dtable.cols;
    if (is_flat(dtable)) {
        EACH_RUN(i, count) {
            u32 n = run_length(count, i);
            Run run = {};
            if (kept != 0.0f) {
                run = get_run(dtable, i, n, true);
                for (int k = 0; k < RUN; k++) run.at[k] *= kept;
            }
            put_run(dtable, i, n, true, run);
        }
        return;
    }
    EACH(i, count) {
        u64 at = place(dtable, i);
        put(dtable, at, kept == 0.0f ? 0.0f : kept * get(dtable, at));
    }
}

// The gradient of an embedding: first rows are put into the order of their ids, those with the same id in their own
// order, by a block for each BUCKET ids; then a warp for each id and tile of columns adds its rows, as the host does.
#define BUCKET THREADS
#define TILE (32 * RUN)

// What is loaded at once.
#define GROUP 8

// A row with an id of the table; of the first with that id also where its gradient goes: 1 and the row of the table.
struct Sorted {
    u32 row, target;
};

// Adds over the block's threads, those before the own one.
__device__ inline u32 before(u32 own) {
    __shared__ u32 sums[WARPS];
    u32 sum = own;
    for (int step = 1; step < 32; step *= 2) {
        u32 other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
        if (threadIdx.x % 32 >= step) sum += other;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 31) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    for (u32 w = 0; w < threadIdx.x / 32; w++) sum += sums[w];
    return sum - own;
}

// The table's row for an id, or more than any.
__device__ inline u32 row_of(int id, u64 size, u64 start) {
    return id < 0 || (u64)id >= size || (u64)id < start ? 0xFFFFFFFFu : (u32)((u64)id - start);
}

// Rows from..to. `scratch`: how many of them the table has, and those in order.
extern "C" __global__ void embedding_sort(
    Mat ids, Mat dtable, u64 size, u64 start, u64 from, u64 to, u64 scratch, Post post
) {
    begin(post);
    // By warp and id: first how many of the warp's rows have it, then the place of the next one.
    __shared__ u32 places[WARPS][BUCKET];
    __shared__ u32 firsts[BUCKET];
    __shared__ u32 lower;
    const int* all = (const int*)ids.address + from;
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, count = (u32)(to - from);
    u32 share = (count + WARPS - 1) / WARPS, own_from = warp * share, own_to = min(own_from + share, count);
    Sorted* sorted = (Sorted*)(scratch + 8);
    u32 buckets = max(1u, (u32)((dtable.rows + BUCKET - 1) / BUCKET));
    for (u32 bucket = blockIdx.x; bucket < buckets; bucket += gridDim.x) {
        u32 least = bucket * BUCKET, most = (u32)min(dtable.rows, (u64)least + BUCKET), smaller = 0;
        __syncthreads();
        for (u32 w = 0; w < WARPS; w++) places[w][threadIdx.x] = 0;
        __syncthreads();
        // Counts the rows of each id, then gives them their places.
        for (u32 pass = 0; pass < 2; pass++) {
            for (u32 next = own_from; next < own_to; next += 32 * GROUP) {
                u32 targets[GROUP];
#pragma unroll
                for (u32 k = 0; k < GROUP; k++) {
                    u32 i = next + k * 32 + lane;
                    targets[k] = i < own_to ? row_of(all[i], size, start) : 0xFFFFFFFFu;
                }
#pragma unroll
                for (u32 k = 0; k < GROUP; k++) {
                    u32 target = targets[k], key = target - least;
                    if (pass == 0) smaller += target < least;
                    bool is_mine = target >= least && target < most;
                    u32 mine = __ballot_sync(0xFFFFFFFFu, is_mine);
                    if (is_mine) {
                        u32 peers = __match_any_sync(mine, target);
                        if (pass == 1) {
                            u32 at = places[warp][key] + __popc(peers & ((1u << lane) - 1));
                            sorted[at] = {next + k * 32 + lane, at == firsts[key] ? least + key + 1 : 0};
                            __syncwarp(peers);
                        }
                        if (lane == __ffs(peers) - 1) places[warp][key] += __popc(peers);
                    }
                    __syncwarp();
                }
            }
            if (pass == 1) break;
            u32 ahead = before(smaller), own = 0;
            if (threadIdx.x == THREADS - 1) lower = ahead + smaller;
            __syncthreads();
            for (u32 w = 0; w < WARPS; w++) own += places[w][threadIdx.x];
            u32 place = lower + before(own);
            firsts[threadIdx.x] = place;
            if (bucket == buckets - 1 && threadIdx.x == THREADS - 1) *(u64*)scratch = place + own;
            for (u32 w = 0; w < WARPS; w++) {
                u32 of_warp = places[w][threadIdx.x];
                places[w][threadIdx.x] = place;
                place += of_warp;
            }
            __syncthreads();
        }
        if (bucket != 0) continue;
        for (u32 i = threadIdx.x; i < count; i += THREADS) {
            if (all[i] < 0 || (u64)all[i] >= size) refuse(post, from + i, all[i]);
        }
    }
}

// Elements of any kind at any address.
#define ANY 3

template <int KIND>
__device__ inline void add_rows(
    const Mat& dy, const Mat& dtable, u64 from, const Sorted* sorted, u32 at, u32 placed, u32 c
) {
    u32 lane = threadIdx.x % 32, n = c < (u32)dy.cols ? run_length(dy.cols, c) : 0;
    bool wide_d = KIND == ANY && is_wide(dy), wide_t = is_wide(dtable);
    u64 to = 0;
    Run sum;
    for (bool first = true;; first = false, at += 32) {
        // The next rows, up to one with another id.
        Sorted next = at + lane < placed ? sorted[at + lane] : Sorted{0, 1};
        u32 others = __ballot_sync(0xFFFFFFFFu, next.target != 0);
        if (first) {
            others &= ~1u;
            to = (u64)(__shfl_sync(0xFFFFFFFFu, next.target, 0) - 1) * dtable.pitch + c;
            if (n) sum = get_run(dtable, to, n, wide_t);
        }
        u32 count = others ? __ffs(others) - 1 : 32;
        if constexpr (KIND == ANY) {
            for (u32 k = 0; k < count; k++) {
                u64 row = from + __shfl_sync(0xFFFFFFFFu, next.row, k);
                if (n) add(sum, get_run(dy, row * dy.pitch + c, n, wide_d));
            }
        } else {
            constexpr u32 ONCE = KIND == 1 ? GROUP : GROUP / 2;
            for (u32 done = 0; done < count; done += ONCE) {
                Raw<KIND> raw[ONCE];
#pragma unroll
                for (u32 k = 0; k < ONCE; k++) {
                    u64 row = from + __shfl_sync(0xFFFFFFFFu, next.row, (done + k) % 32);
                    if (done + k < count && n) raw[k] = raw_run<KIND>(dy, row * dy.pitch + c);
                }
#pragma unroll
                for (u32 k = 0; k < ONCE; k++) {
                    if (done + k < count && n) add(sum, opened(raw[k]));
                }
            }
        }
        if (others) break;
    }
    if (n) put_run(dtable, to, n, wide_t, sum);
}

extern "C" __global__ __launch_bounds__(THREADS, 3) void embedding_add(
    Mat dy, Mat dtable, u64 from, u64 scratch, Post post
) {
    begin(post);
    const Sorted* sorted = (const Sorted*)(scratch + 8);
    u32 placed = *(const u32*)scratch, tiles = (u32)((dy.cols + TILE - 1) / TILE);
    bool wide = dy.cols % RUN == 0 && is_wide(dy);
    u64 jobs = (u64)placed * tiles;
    for (u64 job = (u64)blockIdx.x * WARPS + threadIdx.x / 32; job < jobs; job += (u64)gridDim.x * WARPS) {
        u32 at = (u32)(job / tiles), c = (u32)(job % tiles) * TILE + threadIdx.x % 32 * RUN;
        if (sorted[at].target == 0) continue;
        if (wide && dy.kind == 1) add_rows<1>(dy, dtable, from, sorted, at, placed, c);
        else if (wide) add_rows<0>(dy, dtable, from, sorted, at, placed, c);
        else add_rows<ANY>(dy, dtable, from, sorted, at, placed, c);
    }
}

// Adds every seq_len-th row from `row` on, as long as there are whole groups of them; the next one.
template <int KIND> __device__ inline u64 add_groups(Run& sum, const Mat& dy, u64 row, u64 seq_len, u64 c) {
    for (; row + (GROUP - 1) * seq_len < dy.rows; row += GROUP * seq_len) {
        Raw<KIND> raw[GROUP];
#pragma unroll
        for (int k = 0; k < GROUP; k++) raw[k] = raw_run<KIND>(dy, spot(dy, row + k * seq_len, c));
#pragma unroll
        for (int k = 0; k < GROUP; k++) add(sum, opened(raw[k]));
    }
    return row;
}

// A lane for each run of a position's columns, which adds its rows in order.
extern "C" __global__ void position_grad(Mat dy, Mat dtable, u64 seq_len, Keep keep, Post post) {
    begin(post);
    float kept = keep_factor(keep);
    bool wide_d = is_wide(dy), wide_t = is_wide(dtable);
    u64 per_row = (dtable.cols + RUN - 1) / RUN;
    EACH(i, dtable.rows * per_row) {
        u64 t = i / per_row, c = i % per_row * RUN, to = spot(dtable, t, c);
        u32 n = run_length(dtable.cols, c);
        Run sum = {};
        if (kept != 0.0f) {
            sum = get_run(dtable, to, n, wide_t);
#pragma unroll
            for (int k = 0; k < RUN; k++) sum.at[k] *= kept;
        }
        u64 row = t < seq_len ? t : dy.rows;
        bool whole = wide_d && n == RUN;
        if (whole && dy.kind == 1) row = add_groups<1>(sum, dy, row, seq_len, c);
        else if (whole) row = add_groups<0>(sum, dy, row, seq_len, c);
        for (; row < dy.rows; row += seq_len) add(sum, get_run(dy, spot(dy, row, c), n, wide_d));
        put_run(dtable, to, n, wide_t, sum);
    }
}
