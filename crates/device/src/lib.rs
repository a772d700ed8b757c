//! One asynchronous machine with several drivers: streams, events, memory and kernels.
