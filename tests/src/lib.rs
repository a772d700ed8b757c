//! Tests that cross crates, and the checks of the repository itself. There is no library code here: start at
//! `tests/all.rs`.
