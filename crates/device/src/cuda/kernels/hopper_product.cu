// Products of bf16 on the tensor cores of compute capability 9.0 (sm_90a), with what follows them done on the way out.
//
// Blocks stay and take tiles of c in turn. Of a block's three warp groups the first fetches: one thread keeps a ring of
// stages of both factors filled. The other two compute, each a tile of its own: while one multiplies, the other finishes its
// last tile, so the tensor cores do not wait for what follows a product. Blocks of a cluster work on neighbouring tiles,
// and each fetches a part of what they have in common for all of them.

// Parts of 64 rows and columns that a tile has.
#ifndef PARTS
#define PARTS 2
#endif
#ifndef COLS
#define COLS 192
#endif
// Stages of the ring.
#ifndef STAGES
#define STAGES 4
#endif
// Blocks of a cluster, by rows of c (they share b) and by columns (they share a).
#ifndef CLUSTER_ROWS
#define CLUSTER_ROWS 2
#endif
#ifndef CLUSTER_COLS
#define CLUSTER_COLS 1
#endif
// Pieces of 64 rows and columns of c on their way through shared memory, for each warp group.
#ifndef PIECES
#define PIECES 4
#endif

#define ROWS (64 * PARTS)
#define DEPTH 64
#define CLUSTER (CLUSTER_ROWS * CLUSTER_COLS)
#define STAGE_A (ROWS * LINE)
#define STAGE_B (COLS * LINE)
#define STAGE (STAGE_A + STAGE_B)
#define PIECE (64 * LINE)
// Floats that a warp group has for biases of columns.
#define NOTES 256

// Blocks that read what another one fetches, itself among them.
#define SHARERS (CLUSTER_ROWS + CLUSTER_COLS - 1)

// Where things are in shared memory, in bytes.
#define AT_PIECES (STAGES * STAGE)
#define AT_NOTES (AT_PIECES + 2 * PIECES * PIECE)
#define AT_FULL (AT_NOTES + 2 * NOTES * 4)
#define AT_EMPTY (AT_FULL + STAGES * 8)
#define AT_OTHER_FULL (AT_EMPTY + STAGES * 8)
#define AT_OTHER_EMPTY (AT_OTHER_FULL + 2 * PIECES * 8)
#define AT_TURN (AT_OTHER_EMPTY + 2 * PIECES * 8)
#define SHARED (AT_TURN + 2 * 8)
static_assert(SHARED <= 232448, "a block has no more");

// What follows the product: GELU of it and biases of columns, with what it is taken of kept, or a factor, the slope of GELU.
#define GELU 1
#define SLOPE 2

// Of c; rows of clusters that are gone through together.
struct Sizes {
    u64 rows, cols, depth, group;
};

// The functions of elementwise.cu, of powers of two in place of e, for eight values in step: one warp of a scheduler is
// here at a time, and what a value waits for, the others fill.
#define GELU_A 1.5957691216057308f
#define GELU_B 0.07135481282780998f
#define LOG2_E 1.4426950408889634f
// v = GELU(v).
__device__ inline void gelu_of(float (&v)[8]) {
    float s[8];
#pragma unroll
    for (u32 i = 0; i < 8; i++) s[i] = v[i] * fmaf(v[i] * v[i], -GELU_B * LOG2_E, -GELU_A * LOG2_E);
#pragma unroll
    for (u32 i = 0; i < 8; i++) s[i] = exp2_of(s[i]);
#pragma unroll
    for (u32 i = 0; i < 8; i++) s[i] = inverse(1.0f + s[i]);
    // Of -infinity -0.
#pragma unroll
    for (u32 i = 0; i < 8; i++) v[i] = at_least(v[i], -20.0f) * s[i];
}
// v = v * slope of GELU at x. Beyond 16 that is 0 or 1 to f32.
__device__ inline void slope_times(float (&v)[8], const u32 (&x)[4]) {
    float s[8], q[8];
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        u32 both = within_16(x[i / 2]);
        float one = __uint_as_float(i % 2 ? both & 0xFFFF0000u : both << 16), two = one * one;
        s[i] = one * fmaf(two, -GELU_B * LOG2_E, -GELU_A * LOG2_E), q[i] = one * fmaf(two, 3.0f * GELU_B, GELU_A);
    }
#pragma unroll
    for (u32 i = 0; i < 8; i++) s[i] = exp2_of(s[i]);
#pragma unroll
    for (u32 i = 0; i < 8; i++) s[i] = inverse(1.0f + s[i]);
    // v s (1 + q (1 - s))
#pragma unroll
    for (u32 i = 0; i < 8; i++) v[i] *= s[i], v[i] = fmaf(v[i], fmaf(-q[i], s[i], q[i]), v[i]);
}

// Which tile a cluster has next: `GROUP` rows of clusters are gone through column by column, so that what blocks read at
// the same time is little.
struct Walk {
    u32 down, across, group, count;
    __device__ Walk(const Sizes& s, u32 zero) {
        down = ((u32)s.rows + zero + ROWS * CLUSTER_ROWS - 1) / (ROWS * CLUSTER_ROWS);
        across = ((u32)s.cols + zero + COLS * CLUSTER_COLS - 1) / (COLS * CLUSTER_COLS);
        group = (u32)s.group + zero, count = down * across;
    }
    // First row and column of this block's tile of number t.
    __device__ void at(u32 t, u32 block, u32& row, u32& col) const {
        u32 first = t / (group * across) * group, height = min(group, down - first), rest = t % (group * across);
        row = ((first + rest % height) * CLUSTER_ROWS + block / CLUSTER_COLS) * ROWS;
        col = (rest / height * CLUSTER_COLS + block % CLUSTER_COLS) * COLS;
    }
};

// One thread: the factors of all tiles, stage by stage.
template <int FLIPPED>
__device__ inline void fetch_factors(const Map& a, const Map& b, const Walk& walk, u32 steps, u32 base, u32 block) {
    constexpr u32 A_SHARE = ROWS / CLUSTER_COLS, B_SHARE = COLS / CLUSTER_ROWS;
    u32 down = block / CLUSTER_COLS, across = block % CLUSTER_COLS, step = 0;
    unsigned short beside = ((1 << CLUSTER_COLS) - 1) << (down * CLUSTER_COLS), below = 0;
    for (u32 i = 0; i < CLUSTER_ROWS; i++) below |= 1 << (across + i * CLUSTER_COLS);
    for (u32 t = blockIdx.x / CLUSTER; t < walk.count; t += gridDim.x / CLUSTER) {
        u32 row, col;
        walk.at(t, block, row, col);
        for (u32 k = 0; k < steps; k++, step++) {
            u32 s = step % STAGES, full = base + AT_FULL + s * 8, to = base + s * STAGE;
            bar_wait(base + AT_EMPTY + s * 8, (step / STAGES & 1) ^ 1, 1, step);
            bar_expect(full, STAGE);
            fetch<CLUSTER_COLS>(to + across * A_SHARE * LINE, a, k * DEPTH, row + across * A_SHARE, full, beside);
            to += STAGE_A;
            if constexpr (!FLIPPED) {
                fetch<CLUSTER_ROWS>(to + down * B_SHARE * LINE, b, k * DEPTH, col + down * B_SHARE, full, below);
            } else {
                // Boxes of 64 columns, of a part of the depth each: all blocks fetch as many.
                constexpr u32 PART = DEPTH / CLUSTER_ROWS;
                for (u32 j = 0; j < COLS / 64; j++) {
                    u32 there = to + j * DEPTH * LINE + down * PART * LINE;
                    fetch<CLUSTER_ROWS>(there, b, col + j * 64, k * DEPTH + down * PART, full, below);
                }
            }
        }
    }
}

// One thread for each warp group: the pieces of the other matrix that it needs behind its products.
__device__ inline void fetch_other(const Map& other, const Walk& walk, u32 base, u32 block, u32 who) {
    u32 piece = 0, clusters = gridDim.x / CLUSTER;
    for (u32 t = blockIdx.x / CLUSTER + who * clusters; t < walk.count; t += 2 * clusters) {
        u32 row, col;
        walk.at(t, block, row, col);
        for (u32 c = 0; c < COLS / 64; c++) {
            for (u32 p = 0; p < PARTS; p++, piece++) {
                u32 slot = who * PIECES + piece % PIECES, full = base + AT_OTHER_FULL + slot * 8;
                bar_wait(base + AT_OTHER_EMPTY + slot * 8, (piece / PIECES & 1) ^ 1, 2, piece);
                bar_expect(full, PIECE);
                fetch<1>(base + AT_PIECES + slot * PIECE, other, col + c * 64, row + p * 64, full, 0);
            }
        }
    }
}

struct Out {
    const Map& c;
    const Map& other;
    u32 base, who, row, col;
};

// What follows the product, for a tile: 64 rows and columns after each other through shared memory, where each warp has 16
// rows to itself. `turn` counts tiles of the warp group.
template <int FINISH> __device__ inline void finish(const float (&d)[PARTS][COLS / 2], const Out& out, u32 turn) {
    // Slots that a piece needs, and pieces that may be on their way.
    constexpr u32 SLOTS = FINISH == GELU ? 2 : 1, WAYS = PIECES / SLOTS, ALL = PARTS * COLS / 64;
    u32 thread = again_thread(), lane = thread % 32, warp = thread / 32 % 4;
    u32 pieces = out.base + AT_PIECES + out.who * PIECES * PIECE + warp * 16 * LINE, bars = out.base + out.who * PIECES * 8;
    u32 line = lane % 16 * LINE + (((lane / 16) ^ (lane & 7)) << 4);
    u32 note = out.base + AT_NOTES + out.who * NOTES * 4 + lane % 4 * 8;
#pragma unroll
    for (u32 c = 0; c < COLS / 64; c++) {
#pragma unroll
        for (u32 p = 0; p < PARTS; p++) {
            u32 number = c * PARTS + p, piece = turn * ALL + number;
            // As many slots as pieces: each has its own.
            u32 way = ALL % WAYS == 0 ? number % WAYS : piece % WAYS, round = ALL == WAYS ? turn : piece / WAYS;
            u32 to = pieces + way * (SLOTS * PIECE), at = to + line;
            if constexpr (FINISH == SLOPE) {
                bar_wait(bars + AT_OTHER_FULL + way * 8, round & 1, 3, piece);
            } else {
                if (lane == 0) were_read<WAYS - 1>();
                __syncwarp();
            }
            u32 old[2][4];
            if constexpr (FINISH == SLOPE) blocks_get(old[0], at);
#pragma unroll
            for (u32 g = 0; g < 4; g++) {
                // Columns c * 64 + g * 16 + h / 2 * 8 and the lane's two of eight; rows of the upper or lower eight.
                u32 news[4], there = at ^ (g << 5);
                float v[8];
#pragma unroll
                for (u32 i = 0; i < 8; i++) v[i] = d[p][(c * 8 + g * 2) * 4 + i];
                if constexpr (FINISH == SLOPE) {
                    // The next ones come meanwhile.
                    if (g < 3) blocks_get(old[(g + 1) % 2], at ^ ((g + 1) << 5));
                    slope_times(v, old[g % 2]);
                }
                if constexpr (FINISH == GELU) {
#pragma unroll
                    for (u32 i = 0; i < 8; i += 4) {
                        float low, high;
                        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(low), "=f"(high) : "r"(note + (c * 64 + g * 16 + i * 2) * 4) : "memory");
                        v[i] += low, v[i + 1] += high, v[i + 2] += low, v[i + 3] += high;
                    }
#pragma unroll
                    for (u32 i = 0; i < 4; i++) news[i] = pair(v[2 * i], v[2 * i + 1]);
                    blocks_put(there + PIECE, news);
                    gelu_of(v);
                }
#pragma unroll
                for (u32 i = 0; i < 4; i++) news[i] = pair(v[2 * i], v[2 * i + 1]);
                blocks_put(there, news);
            }
            show_copies();
            __syncwarp();
            if (lane == 0) {
                u32 col = out.col + c * 64, row = out.row + p * 64 + warp * 16;
                send(out.c, col, row, to);
                if constexpr (FINISH == GELU) send(out.other, col, row, to + PIECE);
                sent_together();
                if constexpr (FINISH == SLOPE) {
                    // The slot before this one has been read by now, or will be soon. The last of a tile is waited for below.
                    were_read<1>();
                    if (number > 0) bar_arrive(bars + AT_OTHER_EMPTY + (ALL % WAYS == 0 ? (number - 1) % WAYS : (piece - 1) % WAYS) * 8);
                }
            }
            __syncwarp();
        }
    }
    if constexpr (FINISH == SLOPE) {
        if (lane == 0) {
            were_read<0>();
            bar_arrive(bars + AT_OTHER_EMPTY + (ALL % WAYS == 0 ? (ALL - 1) % WAYS : (turn * ALL + ALL - 1) % WAYS) * 8);
        }
        __syncwarp();
    }
}

// A warp group that computes every other tile of its block.
template <int FINISH, int FLIPPED>
__device__ inline void compute(
    const Map& c, const Map& other, const Mat& bias, const Sizes& s, u32 base, u32 block, u32 who
) {
    constexpr u32 NEXT_B = FLIPPED ? 16 * LINE / 16 : 2;
    u32 turn = 0, t = blockIdx.x / CLUSTER + who * (gridDim.x / CLUSTER);
    float d[PARTS][COLS / 2];
    for (;; turn++, t += 2 * (gridDim.x / CLUSTER)) {
        // All that can be had again is, for each tile: sums need nearly all registers.
        u32 here = again(base), lane = again_thread() % 32;
        Walk walk(s, again(0));
        if (t >= walk.count) break;
        u32 row, col, steps = ((u32)s.depth + again(0) + DEPTH - 1) / DEPTH, first = (2 * turn + who) * steps;
        u32 stage = first % STAGES, phase = first / STAGES & 1;
        u64 a_first = tile_at(here, 16, 8 * LINE), b_first = tile_at(here + STAGE_A, FLIPPED ? DEPTH * LINE : 16, 8 * LINE);
        // Lane l tells block `sharer` that a stage is free: those of this block's row, then those of its column.
        u32 down = block / CLUSTER_COLS, across = block % CLUSTER_COLS, above = lane - CLUSTER_COLS;
        u32 sharer = lane < CLUSTER_COLS ? down * CLUSTER_COLS + lane : (above + (above >= down)) * CLUSTER_COLS + across;
        walk.at(t, block, row, col);
        if constexpr (FINISH == GELU) {
            // When everybody has read the old ones.
            meet(1 + who);
            float* notes;
            asm("{ .reg .u64 full; cvt.u64.u32 full, %1; cvta.shared.u64 %0, full; }" : "=l"(notes) : "r"(base + AT_NOTES + who * NOTES * 4));
            for (u32 n = again_thread() % 128; n < COLS; n += 128) notes[n] = col + n < s.cols ? get(bias, col + n) : 0.0f;
            meet(1 + who);
        }
        bar_wait(here + AT_TURN + who * 8, who ? turn & 1 : (turn & 1) ^ 1, 4, turn);
        for (u32 k = 0, last = 0; k < steps; k++) {
            bar_wait(here + AT_FULL + stage * 8, phase, 5, first + k);
            u64 a = a_first + stage * (STAGE / 16), b = b_first + stage * (STAGE / 16);
            mma_begin();
#pragma unroll
            for (u32 j = 0; j < DEPTH / 16; j++) {
#pragma unroll
                for (u32 p = 0; p < PARTS; p++) mma<FLIPPED>(d[p], a + p * (64 * LINE / 16) + j * 2, b + j * NEXT_B, k | j);
            }
            mma_commit();
            // The stage before has been used.
            mma_wait<1>();
            if (k > 0 && lane < SHARERS) bar_arrive_at(here + AT_EMPTY + last * 8, sharer);
            last = stage, stage++;
            if (stage == STAGES) stage = 0, phase ^= 1;
        }
        if (lane == 0) bar_arrive(here + AT_TURN + (who ^ 1) * 8);
        mma_wait<0>();
        if (lane < SHARERS) bar_arrive_at(here + AT_EMPTY + (stage == 0 ? STAGES - 1 : stage - 1) * 8, sharer);
#pragma unroll
        for (u32 p = 0; p < PARTS; p++) {
#pragma unroll
            for (u32 n = 0; n < COLS / 2; n++) asm volatile("" : "+f"(d[p][n])::"memory");
        }
        finish<FINISH>(d, Out{c, other, again(base), who, row, col}, turn);
    }
    // Shared memory stays until it has been read.
    if (threadIdx.x % 32 == 0) were_read<0>();
}

template <int FINISH, int FLIPPED>
__device__ inline void product_of(
    const Map& a, const Map& b, const Map& c, const Map& other, const Mat& bias, const Sizes& s
) {
    extern __shared__ __align__(1024) unsigned char memory[];
    u32 base = shared_address(memory), block = 0, warp = threadIdx.x / 32;
    if constexpr (CLUSTER > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
#ifdef STUCK
    if (base % 1024 != 0) stuck(9, base);
#endif
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < STAGES; i++) {
            bar_init(base + AT_FULL + i * 8, 1);
            bar_init(base + AT_EMPTY + i * 8, 4 * SHARERS);
        }
        for (u32 i = 0; i < 2 * PIECES; i++) {
            bar_init(base + AT_OTHER_FULL + i * 8, 1);
            bar_init(base + AT_OTHER_EMPTY + i * 8, 4);
        }
        for (u32 i = 0; i < 2; i++) bar_init(base + AT_TURN + i * 8, 4);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        show_copies();
    }
    __syncthreads();
    if constexpr (CLUSTER > 1) {
        asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
    }
    if (warp < 4) {
        Walk walk(s, 0);
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 0) fetch_factors<FLIPPED>(a, b, walk, ((u32)s.depth + DEPTH - 1) / DEPTH, base, block);
        if constexpr (FINISH == SLOPE) {
            if ((warp == 1 || warp == 2) && threadIdx.x % 32 == 0) fetch_other(other, walk, base, block, warp - 1);
        }
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        compute<FINISH, FLIPPED>(c, other, bias, s, base, block, warp / 4 - 1);
        __syncwarp();
    }
    // Others may still tell this block that its stages are free.
    if constexpr (CLUSTER > 1) {
        asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
    }
}

#define LAUNCH __launch_bounds__(384, 1) __cluster_dims__(CLUSTER, 1, 1)
#define ARGUMENTS \
    const __grid_constant__ Map a, const __grid_constant__ Map b, const __grid_constant__ Map c, \
        const __grid_constant__ Map other, Mat bias, Sizes sizes, Post post

// b lies by rows of c's columns, and by rows of the depth.
extern "C" __global__ LAUNCH void gelu_nt(ARGUMENTS) { begin(post), product_of<GELU, 0>(a, b, c, other, bias, sizes); }
extern "C" __global__ LAUNCH void slope_nn(ARGUMENTS) { begin(post), product_of<SLOPE, 1>(a, b, c, other, bias, sizes); }
