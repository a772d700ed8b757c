//! Tests through the public interface.

#[path = "api/config.rs"]
mod config;
#[path = "api/errors.rs"]
mod errors;
#[path = "api/golden.rs"]
mod golden;
#[path = "api/golden_case.rs"]
mod golden_case;
#[path = "api/gradients.rs"]
mod gradients;
#[path = "api/memory.rs"]
mod memory;
#[path = "api/reference.rs"]
mod reference;
#[path = "api/rig.rs"]
mod rig;
#[path = "api/twins.rs"]
mod twins;
