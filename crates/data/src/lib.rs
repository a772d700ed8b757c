//! Training text: files to tokens to samples, in an order that depends on the seed and the consumed count only.
