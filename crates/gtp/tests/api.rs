//! What the crate promises to its users.
