// Rotary positions: pairs (i, i + d/2) of every head are turned by the angles of their row's place in its sequence.

// Row t: cosines, then sines.
extern "C" __global__ void rotary_table(Mat table, u64 base_bits, Post post) {
    begin(post);
    u64 half = table.cols / 2;
    double base = __longlong_as_double((long long)base_bits);
    EACH(i, table.rows * half) {
        u64 t = i / half, at = i % half;
        double angle = (double)t * pow(base, -(double)at / (double)half);
        put(table, spot(table, t, at), (float)cos(angle));
        put(table, spot(table, t, half + at), (float)sin(angle));
    }
}

// x may be y: a thread reads both of a pair before it writes them.
extern "C" __global__ void rotary(Mat y, Mat table, Mat x, u64 seq_len, u64 back, Post post) {
    begin(post);
    u64 head = table.cols, half = head / 2, pairs = y.cols / 2;
    EACH(i, y.rows * pairs) {
        u64 row = i / pairs, pair = i % pairs, col = pair / half * head + pair % half, t = row % seq_len;
        float low = get(x, spot(x, row, col)), high = get(x, spot(x, row, col + half));
        float c = get(table, spot(table, t, pair % half)), s = get(table, spot(table, t, half + pair % half));
        if (back) s = -s;
        put(y, spot(y, row, col), low * c - high * s);
        put(y, spot(y, row, col + half), fmaf(high, c, low * s));
    }
}
