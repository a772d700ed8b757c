//! One binary: every test that crosses crates.
