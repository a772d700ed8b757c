//! How each kernel computes on the host: plain loops over rows, no knowledge of streams.
