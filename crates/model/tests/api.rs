//! Tests through the public interface.

#[path = "api/adamw.rs"]
mod adamw;
#[path = "api/bf16.rs"]
mod bf16;
#[path = "../../../tests/cards.rs"]
mod cards;
#[path = "api/config.rs"]
mod config;
#[path = "api/errors.rs"]
mod errors;
#[path = "api/files.rs"]
mod files;
#[path = "api/golden.rs"]
mod golden;
#[path = "api/golden_case.rs"]
mod golden_case;
#[path = "api/gradients.rs"]
mod gradients;
#[path = "api/layouts.rs"]
mod layouts;
#[path = "api/machines.rs"]
mod machines;
#[path = "api/memory.rs"]
mod memory;
#[path = "api/recompute.rs"]
mod recompute;
#[path = "api/reference.rs"]
mod reference;
#[path = "api/rig.rs"]
mod rig;
#[path = "api/tensor.rs"]
mod tensor;
#[path = "api/tensor_rig.rs"]
mod tensor_rig;
#[path = "api/twins.rs"]
mod twins;
