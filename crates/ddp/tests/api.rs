//! The crate's API on the host drivers.

#[path = "api/adam.rs"]
mod adam;
#[path = "api/plan.rs"]
mod plan;
