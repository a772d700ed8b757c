//! Layers of which each rank of a tensor group computes a part.
