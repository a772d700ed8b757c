// Floats as integers of the same order, with every NaN above infinity: NCCL's greatest of floats passes NaN over, its
// greatest of integers keeps it.

struct Values {
    u64 from, to, count;
};

extern "C" __global__ void to_ordered(Values v, Post post) {
    begin(post);
    EACH(i, v.count) {
        float x = ((const float*)v.from)[i];
        int bits = __float_as_int(x);
        ((int*)v.to)[i] = x != x ? 0x7FFFFFFF : bits < 0 ? bits ^ 0x7FFFFFFF : bits;
    }
}

extern "C" __global__ void from_ordered(Values v, Post post) {
    begin(post);
    EACH(i, v.count) {
        int key = ((const int*)v.from)[i];
        ((int*)v.to)[i] = key < 0 ? key ^ 0x7FFFFFFF : key;
    }
}
