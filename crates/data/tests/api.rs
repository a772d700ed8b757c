//! The API of `data`, from the outside.

#[path = "api/folders.rs"]
mod folders;

#[path = "api/dealing.rs"]
mod dealing;
#[path = "api/files.rs"]
mod files;
#[path = "api/random.rs"]
mod random;
#[path = "api/too_little.rs"]
mod too_little;
