//! The crate's API on the host drivers.

#[path = "api/runners_groups.rs"]
mod runners_groups;
#[path = "api/runners_pool.rs"]
mod runners_pool;
#[path = "api/runners_turns.rs"]
mod runners_turns;
#[path = "api/schedule_layers.rs"]
mod schedule_layers;
#[path = "api/schedule_orders.rs"]
mod schedule_orders;
#[path = "api/schedule_rules.rs"]
mod schedule_rules;
#[path = "api/schedule_slots.rs"]
mod schedule_slots;
#[path = "api/schedule_support.rs"]
mod schedule_support;
