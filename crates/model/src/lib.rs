//! Reference GPT with explicit forward and backward over planned memory.
