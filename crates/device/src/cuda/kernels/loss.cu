// Cross-entropy over all of the vocabulary, and what vocab.cu needs for a shard of it: a block for each row, or several
// rows one behind the other. The gradient may be where the logits are. A target of -1 is ignored, any other one outside
// the vocabulary is refused.
//
// A row is runs of eight neighbours; of n threads, thread t has runs t, t + n and so on, for both element types, so that
// sums have one order. Blocks have LOSS_THREADS for rows of a whole vocabulary and THREADS for shards.
#define LOSS_THREADS 512

#define LOWEST __uint_as_float(0xFF800000u)

__device__ inline u32 runs_of(const Mat& m) { return ((u32)m.cols + RUN - 1) / RUN; }
__device__ inline u32 run_at(const Mat& m, u32 k) { return run_length(m.cols, (u64)k * RUN); }

// NaN wins.
__device__ inline float greater(float a, float b) {
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
    return most;
}

// 2 to the power of x; 0 for what is too small to be normal.
__device__ inline float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Exponents are of two, so that one multiply-add makes them, rounded once.
#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453
// What LOG2_E is rounded by.
#define LOG2_E_REST 1.9259630e-8f

// The same to half a unit in the last place, of most x. What the card's own instruction is off by is off one way, and
// sums of many would have all of it.
__device__ inline float exact_power_of_two(float whole, float rest) {
    if (whole < -125.0f) return 0.0f;
    float sum = 1.5252734e-5f;
    sum = fmaf(sum, rest, 1.5403530e-4f);
    sum = fmaf(sum, rest, 1.3333558e-3f);
    sum = fmaf(sum, rest, 9.6181291e-3f);
    sum = fmaf(sum, rest, 5.5504109e-2f);
    sum = fmaf(sum, rest, 2.4022651e-1f);
    sum = fmaf(sum, rest, 6.9314718e-1f);
    return fmaf(sum, rest, 1.0f) * __uint_as_float((u32)((int)whole + 127) << 23);
}

template <bool HALF> __device__ inline float power(float x, float base) {
    float exponent = fmaf(x, LOG2_E, -base);
    if (HALF) return power_of_two(exponent);
    float whole = rintf(exponent);
    return exact_power_of_two(whole, fmaf(x, LOG2_E_REST, exponent - whole));
}
template <bool HALF> __device__ inline double exponent_of(float x) {
    return (double)x * (HALF ? (double)LOG2_E : (double)LOG2_E + (double)LOG2_E_REST);
}

// Eight neighbours as they lie in memory.
template <bool HALF> struct Words {
    Vec4 at[HALF ? 1 : 2];
};
template <bool HALF> __device__ inline Words<HALF> get_words(const Mat& m, u64 row, u32 k) {
    const Vec4* from = (const Vec4*)(m.address + (spot(m, row, (u64)k * RUN) << (HALF ? 1 : 2)));
    Words<HALF> words;
#pragma unroll
    for (int i = 0; i < (HALF ? 1 : 2); i++) words.at[i] = from[i];
    return words;
}
template <bool HALF> __device__ inline void put_words(const Mat& m, u64 row, u32 k, const Words<HALF>& words) {
    Vec4* to = (Vec4*)(m.address + (spot(m, row, (u64)k * RUN) << (HALF ? 1 : 2)));
#pragma unroll
    for (int i = 0; i < (HALF ? 1 : 2); i++) to[i] = words.at[i];
}
template <bool HALF> __device__ inline Run unpacked(const Words<HALF>& words) {
    Run v;
#pragma unroll
    for (int i = 0; i < (HALF ? 1 : 2); i++) {
        u32 word[4] = {words.at[i].x, words.at[i].y, words.at[i].z, words.at[i].w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if constexpr (HALF) {
                v.at[2 * j] = __uint_as_float(word[j] << 16);
                v.at[2 * j + 1] = __uint_as_float(word[j] & 0xFFFF0000u);
            } else {
                v.at[4 * i + j] = __uint_as_float(word[j]);
            }
        }
    }
    return v;
}
template <bool HALF> __device__ inline Words<HALF> packed(const Run& v) {
    Words<HALF> words;
#pragma unroll
    for (int i = 0; i < (HALF ? 1 : 2); i++) {
        u32 word[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if constexpr (HALF) {
                asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word[j]) : "f"(v.at[2 * j + 1]), "f"(v.at[2 * j]));
            } else {
                word[j] = __float_as_uint(v.at[4 * i + j]);
            }
        }
        words.at[i] = {word[0], word[1], word[2], word[3]};
    }
    return words;
}

// Behind the end of a row there is nothing.
__device__ inline void cut_off(Run& v, u32 n) {
#pragma unroll
    for (u32 i = 0; i < RUN; i++) {
        if (i >= n) v.at[i] = LOWEST;
    }
}

// A target in this run: its place; RUN and more if it is elsewhere.
__device__ inline u32 place_in(u32 k, u32 target) { return target - k * RUN; }
__device__ inline float pick(const Run& v, u32 at) {
    float value = v.at[0];
#pragma unroll
    for (u32 i = 1; i < RUN; i++) value = i == at ? v.at[i] : value;
    return value;
}

// The greatest of what was seen, and the sum of its exponentials over 2 to the power of `base`. That is not far below
// the greatest one's exponent, and follows it in strides: most runs leave the sum as it is.
struct Tally {
    float most, base;
    double sum;
};
#define STRIDE 8.0f
// Below all exponents, and finite: a logit may be minus infinity.
#define NO_BASE -3e38f
__device__ inline Tally nothing() { return {LOWEST, NO_BASE, 0.0}; }

// What a sum becomes when its base does.
template <bool HALF> __device__ inline double shrinkage(float from, float to) {
    return HALF ? (double)power_of_two(from - to) : exp2((double)from - (double)to);
}

template <bool HALF> __device__ inline void count(Tally& t, const Run& v) {
    float pair[4];
#pragma unroll
    for (int i = 0; i < 4; i++) pair[i] = greater(v.at[2 * i], v.at[2 * i + 1]);
    float top = greater(greater(pair[0], pair[1]), greater(pair[2], pair[3])), high = top * LOG2_E;
    t.most = greater(t.most, top);
    // NaN gets in here, and stays.
    if (!(high <= t.base + STRIDE)) {
        t.sum *= shrinkage<HALF>(t.base, high);
        t.base = high;
    }
    float e[RUN];
#pragma unroll
    for (int i = 0; i < RUN; i++) e[i] = power<HALF>(v.at[i], t.base);
    // Neighbours first: eight terms with the error of three.
    t.sum += ((e[0] + e[1]) + (e[2] + e[3])) + ((e[4] + e[5]) + (e[6] + e[7]));
}

// Of all lanes of a warp, in every lane.
template <bool HALF, bool MOST> __device__ inline Tally of_warp(Tally own) {
    float base = own.base;
    for (int step = 16; step > 0; step /= 2) {
        base = greater(base, __shfl_xor_sync(0xFFFFFFFFu, base, step));
        if (MOST) own.most = greater(own.most, __shfl_xor_sync(0xFFFFFFFFu, own.most, step));
    }
    own.sum *= shrinkage<HALF>(own.base, base);
    for (int step = 16; step > 0; step /= 2) own.sum += __shfl_xor_sync(0xFFFFFFFFu, own.sum, step);
    return {own.most, base, own.sum};
}

// Of all threads of a block, in every thread. `turn` is another one than the last time's, of 0 and 1: threads may still
// read what the last time left.
template <bool HALF, bool MOST> __device__ inline Tally together(const Tally& own, u32 turn) {
    __shared__ Tally warps[2][LOSS_THREADS / 32];
    Tally all = of_warp<HALF, MOST>(own);
    if (threadIdx.x % 32 == 0) warps[turn][threadIdx.x / 32] = all;
    __syncthreads();
    return of_warp<HALF, MOST>(threadIdx.x % 32 < blockDim.x / 32 ? warps[turn][threadIdx.x % 32] : nothing());
}

// What the gradient of a row is made from. A row that does not count has no target and a gradient of 0.
struct Slope {
    float base, share, scale;
    u32 target;
    bool counts;
};

template <bool HALF> __device__ inline float away_from_target(float x, const Slope& s) {
    return s.share * power<HALF>(x, s.base);
}

template <bool HALF> __device__ inline void to_gradient(Run& v, u32 k, const Slope& s) {
#pragma unroll
    for (int i = 0; i < RUN; i++) v.at[i] = s.counts ? away_from_target<HALF>(v.at[i], s) : 0.0f;
    u32 at = place_in(k, s.target);
    if (at >= RUN) return;
#pragma unroll
    for (u32 i = 0; i < RUN; i++) {
        if (i == at) v.at[i] -= s.scale;
    }
}

// Whether the row counts; the same for the whole block. Where it does not, its loss is 0.
__device__ inline bool counts(const Mat& losses, u64 size, u64 row, int target, const Post& post) {
    if (target >= 0 && (u64)target < size) return true;
    if (threadIdx.x == 0) {
        put(losses, row, 0.0f);
        if (target != -1) refuse(post, row, target);
    }
    return false;
}

template <bool HALF> __device__ inline float loss_of(const Tally& all, float logit) {
    return (float)(((double)all.base - exponent_of<HALF>(logit)) * LN_2 + log(all.sum));
}

__device__ inline Slope slope_of(const Tally& all, float scale, int id) {
    return {all.base, (float)((double)scale / all.sum), scale, (u32)id, true};
}

// Runs that a thread asks for before it looks at the first.
#define AHEAD 4

// Calls f with each of the thread's runs of a row, in order: its number and what is there.
template <bool HALF, typename F> __device__ inline void each_run(const Mat& in, u64 row, const F& f) {
    u32 runs = runs_of(in), whole = is_wide(in) ? (u32)in.cols / RUN : 0, k = threadIdx.x;
    for (; k + (AHEAD - 1) * blockDim.x < whole; k += AHEAD * blockDim.x) {
        Words<HALF> words[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) words[i] = get_words<HALF>(in, row, k + i * blockDim.x);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) f(k + i * blockDim.x, unpacked<HALF>(words[i]));
    }
    for (; k < whole; k += blockDim.x) f(k, unpacked<HALF>(get_words<HALF>(in, row, k)));
    for (; k < runs; k += blockDim.x) {
        Run v = get_run(in, spot(in, row, (u64)k * RUN), run_at(in, k), false);
        cut_off(v, run_at(in, k));
        f(k, v);
    }
}

template <bool HALF> __device__ inline void put_gradient(const Mat& d, const Mat& in, u64 row, const Slope& s) {
    bool wide = is_wide(d);
    each_run<HALF>(in, row, [&](u32 k, Run v) {
        to_gradient<HALF>(v, k, s);
        u32 n = run_at(d, k);
        if (wide && n == RUN) put_words(d, row, k, packed<HALF>(v));
        else put_run(d, spot(d, row, (u64)k * RUN), n, false, v);
    });
}

template <bool HALF, bool MOST> __device__ inline Tally tally(const Mat& in, u64 row, u32 turn) {
    Tally own = nothing();
    each_run<HALF>(in, row, [&](u32, const Run& v) { count<HALF>(own, v); });
    return together<HALF, MOST>(own, turn);
}

template <bool HALF>
__device__ inline void two_reads(const Mat& d, const Mat& targets, const Mat& losses, const Mat& in, float scale, const Post& post) {
    u32 turn = 0;
    for (u64 row = blockIdx.x; row < d.rows; row += gridDim.x) {
        int id = ((const int*)targets.address)[row];
        Slope s = {0.0f, 0.0f, scale, 0xFFFFFFFFu, counts(losses, d.cols, row, id, post)};
        if (s.counts) {
            float logit = get(in, spot(in, row, id));
            // A barrier behind the logit: its place may be where the gradient goes.
            Tally all = tally<HALF, false>(in, row, turn ^= 1);
            s = slope_of(all, scale, id);
            if (threadIdx.x == 0) put(losses, row, loss_of<HALF>(all, logit));
        }
        put_gradient<HALF>(d, in, row, s);
    }
}

// For any row.
extern "C" __global__ void cross_entropy_twice(Mat d, Mat targets, Mat losses, Mat logits, Factor by, Post post) {
    begin(post);
    if (logits.kind == 1) two_reads<true>(d, targets, losses, logits, factor(by), post);
    else two_reads<false>(d, targets, losses, logits, factor(by), post);
}

// Rows that shared memory holds: each is read once. A thread fetches the runs that it will use and nobody else does, so
// it waits for nobody; where it has put a run's gradient, it fetches the same run of the block's next row.
extern __shared__ Vec4 held[];

// A row is fetched in so many parts that are waited for one by one.
#define PARTS 4

template <bool HALF>
__device__ inline void one_read(const Mat& d, const Mat& targets, const Mat& losses, const Mat& in, float scale, const Post& post) {
    const u32 runs = runs_of(in), whole = (u32)in.cols / RUN, rest = (u32)in.cols % RUN;
    const u32 part = (runs + PARTS * blockDim.x - 1) / (PARTS * blockDim.x) * blockDim.x;
    const u32 first = address_of(held);
    // Who has the run that is not whole.
    const bool has_rest = rest > 0 && whole % blockDim.x == threadIdx.x;
    const int* ids = (const int*)targets.address;
    auto row_of = [](const Mat& m, u64 row) { return m.address + (row * m.pitch << (HALF ? 1 : 2)); };
    // For f32, second halves of runs lie behind all first ones.
    auto fetch_run = [&](u64 from, u32 k) {
        from += (u64)k * (HALF ? 16 : 32);
        fetch(first + k * 16, from);
        if (!HALF) fetch(first + (runs + k) * 16, from + 16);
    };
    auto fetch_rest = [&](u64 from) {
        from += (u64)whole * (HALF ? 16 : 32);
        if (HALF) fetch_some(first + whole * 16, from, rest * 2);
        else {
            fetch_some(first + whole * 16, from, rest < 4 ? rest * 4 : 16);
            fetch_some(first + (runs + whole) * 16, from + (rest > 4 ? 16 : 0), rest > 4 ? (rest - 4) * 4 : 0);
        }
    };
    auto run = [&](u32 k) {
        Words<HALF> words;
#pragma unroll
        for (int i = 0; i < (HALF ? 1 : 2); i++) words.at[i] = held[i * runs + k];
        return unpacked<HALF>(words);
    };
    auto run_of_rest = [&]() {
        Run v = run(whole);
        cut_off(v, rest);
        return v;
    };
    u64 row = blockIdx.x;
    if (row >= d.rows) return;
    for (u32 from = 0; from < PARTS * part; from += part) {
        for (u32 k = from + threadIdx.x; k < from + part && k < whole; k += blockDim.x) fetch_run(row_of(in, row), k);
        if (has_rest && from + part == PARTS * part) fetch_rest(row_of(in, row));
        commit();
    }
    int id = ids[row];
    u32 turn = 0;
    while (row < d.rows) {
        u64 next = row + gridDim.x;
        bool more = next < d.rows;
        int next_id = more ? ids[next] : -1;
        Slope s = {0.0f, 0.0f, scale, 0xFFFFFFFFu, counts(losses, d.cols, row, id, post)};
        Tally own = nothing();
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            if (p == 0) arrived<PARTS - 1>();
            if (p == 1) arrived<PARTS - 2>();
            if (p == 2) arrived<PARTS - 3>();
            if (p == 3) arrived<0>();
            if (!s.counts) continue;
            u32 end = (p + 1) * part < whole ? (p + 1) * part : whole;
            for (u32 k = p * part + threadIdx.x; k < end; k += blockDim.x) count<HALF>(own, run(k));
        }
        bool has_target = false;
        float at_target = 0.0f;
        if (s.counts) {
            if (has_rest) count<HALF>(own, run_of_rest());
            Tally all = together<HALF, false>(own, turn ^= 1);
            s = slope_of(all, scale, id);
            has_target = s.target / RUN % blockDim.x == threadIdx.x;
            if (has_target) {
                float logit = pick(run(s.target / RUN), s.target % RUN);
                put(losses, row, loss_of<HALF>(all, logit));
                at_target = away_from_target<HALF>(logit, s) - scale;
            }
        }
        u64 to = row_of(d, row), from_next = row_of(in, next);
        for (u32 from = 0; from < PARTS * part; from += part) {
            u32 end = from + part < whole ? from + part : whole;
            for (u32 k = from + threadIdx.x; k < end; k += blockDim.x) {
                Run v = {};
                if (s.counts) {
                    v = run(k);
#pragma unroll
                    for (int i = 0; i < RUN; i++) v.at[i] = away_from_target<HALF>(v.at[i], s);
                }
                Words<HALF> words = packed<HALF>(v);
#pragma unroll
                for (int i = 0; i < (HALF ? 1 : 2); i++) ((Vec4*)(to + (u64)k * (HALF ? 16 : 32)))[i] = words.at[i];
                if (more) fetch_run(from_next, k);
            }
            if (has_rest && from + part == PARTS * part) {
                Run v = run_of_rest();
                to_gradient<HALF>(v, whole, {s.base, s.share, scale, 0xFFFFFFFFu, s.counts});
                put_run(d, spot(d, row, (u64)whole * RUN), rest, false, v);
                if (more) fetch_rest(from_next);
            }
            commit();
        }
        // Behind the run that it is in, by the same thread.
        if (has_target) put(d, spot(d, row, s.target), at_target);
        row = next;
        id = next_id;
    }
}

// For rows at multiples of 16 bytes that fit into the shared memory of the launch.
extern "C" __global__ __launch_bounds__(LOSS_THREADS, 2) void cross_entropy(Mat d, Mat targets, Mat losses, Mat logits, Factor by, Post post) {
    begin(post);
    if (logits.kind == 1) one_read<true>(d, targets, losses, logits, factor(by), post);
    else one_read<false>(d, targets, losses, logits, factor(by), post);
}
