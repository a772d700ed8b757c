//! Composes the other crates into a training run; owns no mechanism.
