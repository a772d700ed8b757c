// Copies into shared memory that are waited for later: in front of the sources that stage rows.

__device__ inline u32 address_of(const void* p) {
    u32 at;
    asm("{ .reg .u64 full; cvta.to.shared.u64 full, %1; cvt.u32.u64 %0, full; }" : "=r"(at) : "l"(p));
    return at;
}

// Sixteen bytes to shared memory; or some of them, and zeros behind.
__device__ inline void fetch(u32 to, u64 from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ inline void fetch_some(u32 to, u64 from, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ inline void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ inline void arrived() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

