// Fill, copy with conversion, scale, add, activations.

extern "C" __global__ void fill(Mat y, u64 bits, Post post) {
    begin(post);
    // As many bits as an element has.
    EACH(i, y.rows * y.cols) {
        if (y.kind % 2 == 1) ((unsigned short*)y.address)[place(y, i)] = (unsigned short)bits;
        else ((u32*)y.address)[place(y, i)] = (u32)bits;
    }
}

extern "C" __global__ void cast(Mat y, Mat x, Post post) {
    begin(post);
    // Between equal types bits are copied, so that a NaN keeps its payload.
    EACH(i, y.rows * y.cols) {
        u64 to = place(y, i), from = place(x, i);
        if (y.kind != x.kind) put(y, to, get(x, from));
        else if (y.kind % 2 == 1) ((unsigned short*)y.address)[to] = ((const unsigned short*)x.address)[from];
        else ((u32*)y.address)[to] = ((const u32*)x.address)[from];
    }
}

extern "C" __global__ void scale(Mat y, Mat x, Factor by, Post post) {
    begin(post);
    float f = factor(by);
    EACH(i, y.rows * y.cols) put(y, place(y, i), f * get(x, place(x, i)));
}

extern "C" __global__ void add(Mat y, Mat a, Mat b, Post post) {
    begin(post);
    EACH(i, y.rows * y.cols) put(y, place(y, i), get(a, place(a, i)) + get(b, place(b, i)));
}

extern "C" __global__ void axpy(Mat y, Mat x, Factor by, Post post) {
    begin(post);
    float alpha = factor(by);
    EACH(i, y.rows * y.cols) {
        u64 at = place(y, i);
        put(y, at, fmaf(alpha, get(x, place(x, i)), get(y, at)));
    }
}

#define GELU_A 1.5957691216057308f
#define GELU_B 0.07135481282780998f

// The tanh form as a logistic function; a NaN passes both comparisons.
extern "C" __global__ void gelu(Mat y, Mat x, Post post) {
    begin(post);
    EACH(i, y.rows * y.cols) {
        float v = get(x, place(x, i));
        // Beyond -20 the result is 0 to f32, and -inf * 0 would be NaN.
        if (v < -20.0f) v = -20.0f;
        put(y, place(y, i), v / (1.0f + expf(v * fmaf(v * v, -GELU_B, -GELU_A))));
    }
}

extern "C" __global__ void gelu_backward(Mat dx, Mat x, Mat dy, Post post) {
    begin(post);
    EACH(i, dx.rows * dx.cols) {
        float v = get(x, place(x, i));
        // Beyond 10 the slope is 1, or 0 up to 1e-35. A little further the exponential is inf, and inf * 0 would be NaN.
        if (v < -10.0f) v = -10.0f;
        if (v > 10.0f) v = 10.0f;
        float vv = v * v, e = expf(v * fmaf(vv, -GELU_B, -GELU_A)), s = 1.0f / (1.0f + e);
        float slope = fmaf(v * (e * s), fmaf(vv, 3.0f * GELU_B, GELU_A), 1.0f) * s;
        put(dx, place(dx, i), get(dy, place(dy, i)) * slope);
    }
}

// Logistic function of z. Beyond -80 the exponential would be infinite, and the result is 0 to f32 all the same.
__device__ inline float logistic(float z) { return 1.0f / (1.0f + expf(z < -80.0f ? 80.0f : -z)); }

extern "C" __global__ void swiglu(Mat y, Mat gate, Mat up, Post post) {
    begin(post);
    EACH(i, y.rows * y.cols) {
        float g = get(gate, place(gate, i));
        put(y, place(y, i), g * logistic(g) * get(up, place(up, i)));
    }
}

extern "C" __global__ void swiglu_backward(Mat dgate, Mat dup, Mat gate, Mat up, Mat dy, Post post) {
    begin(post);
    EACH(i, dy.rows * dy.cols) {
        float g = get(gate, place(gate, i)), u = get(up, place(up, i)), d = get(dy, place(dy, i));
        float e = expf(g < 0.0f ? g : -g), near = 1.0f / (1.0f + e), far = e * near;
        float s = g < 0.0f ? far : near;
        put(dup, place(dup, i), d * g * s);
        // s * (1 - s), without the difference of numbers that are nearly equal.
        put(dgate, place(dgate, i), d * u * fmaf(g, near * far, s));
    }
}
