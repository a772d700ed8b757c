// Rows that stay in registers from their one load on, each spread over a team of warps: in front of the norms' sources.

#define WARPS (THREADS / 32)

// Threads that share a row: by its columns and nothing else, as the order of sums depends on it. So a lane has three
// runs at most, and four in rows of more than 6144 columns.
struct Team {
    u32 warps, lane, index, count;
};
__device__ inline Team team_of(u64 cols) {
    u32 warps = cols <= 768 ? 1 : cols <= 1536 ? 2 : cols <= 3072 ? 4 : 8, size = 32 * warps;
    return {warps, threadIdx.x % size, threadIdx.x / size, THREADS / size};
}

// The block's rows, one for each team at a time: teams with no row left go along, because they wait for each other.
#define TEAM_ROWS(row, from, to, step, team) \
    for (u64 row = (from) + (team).index, first_ = (from); first_ < (to); first_ += (step), row += (step))
#define TEAM_RUNS(c, cols, team) for (u64 c = (team).lane * RUN; c < (cols); c += (team).warps * 32 * RUN)
// Column of a lane's run j.
#define TEAM_RUN(j, team) (((j) * (team).warps * 32 + (team).lane) * RUN)

// Sums over each team, in f64, so that the order hardly matters; all its threads get the totals.
template <int COUNT> __device__ inline void team_sum(const Team& team, double (&x)[COUNT]) {
    __shared__ double part[COUNT][WARPS];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
#pragma unroll
        for (int k = 0; k < COUNT; k++) x[k] += __shfl_xor_sync(0xFFFFFFFFu, x[k], step);
    }
    if (team.warps == 1) return;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        if (threadIdx.x % 32 == 0) part[k][threadIdx.x / 32] = x[k];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < COUNT; k++) x[k] = part[k][team.index * team.warps + threadIdx.x % team.warps];
    for (u32 step = team.warps / 2; step > 0; step /= 2) {
#pragma unroll
        for (int k = 0; k < COUNT; k++) x[k] += __shfl_xor_sync(0xFFFFFFFFu, x[k], step);
    }
}

// The lane's runs of a row.
template <int KIND, int N> struct Row {
    Raw<KIND> run[N];
};
template <int KIND, int N> __device__ inline Row<KIND, N> no_row() {
    Row<KIND, N> row;
#pragma unroll
    for (int j = 0; j < N; j++) row.run[j] = raw_zeros<KIND>();
    return row;
}
template <int KIND, int N> __device__ inline void load(Row<KIND, N>& to, const Mat& m, u64 row, const Team& team) {
    u64 start = row * m.pitch;
#pragma unroll
    for (int j = 0; j < N; j++) {
        u32 c = TEAM_RUN(j, team);
        if (c < (u32)m.cols) to.run[j] = raw_run<KIND>(m, start + c);
    }
}
template <int KIND, int N> __device__ inline void store(const Mat& m, u64 row, const Team& team, const Run (&from)[N]) {
    u64 start = row * m.pitch;
#pragma unroll
    for (int j = 0; j < N; j++) {
        u32 c = TEAM_RUN(j, team);
        if (c < (u32)m.cols) put_wide<KIND>(m, start + c, from[j]);
    }
}

// Keeps a row as it was loaded: else the compiler opens it once for all of its uses, in twice the registers.
template <int KIND, int N> __device__ inline void keep_closed(Row<KIND, N>& row) {
#pragma unroll
    for (int j = 0; j < N; j++) {
#pragma unroll
        for (Vec4& part : row.run[j].part) asm volatile("" : "+r"(part.x), "+r"(part.y), "+r"(part.z), "+r"(part.w));
    }
}
// As `put_wide`, of what was computed: its NaN is the one that rounding gives.
template <int KIND> __device__ inline void put_results(const Mat& m, u64 at, const Run& run) {
    if constexpr (KIND == 1) {
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[i]) : "f"(run.at[2 * i + 1]), "f"(run.at[2 * i]));
        }
        *(Vec4*)(m.address + at * 2) = {words[0], words[1], words[2], words[3]};
    } else {
        put_wide<KIND>(m, at, run);
    }
}
