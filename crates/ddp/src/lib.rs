//! Data parallelism: gradients reduced over replicas, and the optimizer step.
