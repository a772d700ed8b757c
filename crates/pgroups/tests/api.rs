//! The crate's public behaviour; test names are the claims.

#[cfg(feature = "gpu-tests")]
#[path = "../../../tests/cards.rs"]
mod cards;
#[path = "api/planning_claims.rs"]
mod planning_claims;
#[path = "api/planning_groups.rs"]
mod planning_groups;
#[path = "api/planning_init.rs"]
mod planning_init;
#[path = "api/planning_laws.rs"]
mod planning_laws;
#[path = "api/planning_placement.rs"]
mod planning_placement;
#[path = "api/planning_plans.rs"]
mod planning_plans;
#[path = "api/planning_support.rs"]
mod planning_support;
#[path = "api/planning_world.rs"]
mod planning_world;
#[path = "api/running_collectives.rs"]
mod running_collectives;
#[path = "api/running_support.rs"]
mod running_support;
#[path = "api/running_batches.rs"]
mod running_batches;
#[cfg(feature = "gpu-tests")]
#[path = "api/running_cards.rs"]
mod running_cards;
#[cfg(feature = "gpu-tests")]
#[path = "api/running_cards_branches.rs"]
mod running_cards_branches;
#[cfg(feature = "gpu-tests")]
#[path = "api/running_cards_support.rs"]
mod running_cards_support;
#[cfg(feature = "gpu-tests")]
#[path = "api/running_cards_faults.rs"]
mod running_cards_faults;
#[path = "api/running_faults.rs"]
mod running_faults;
#[path = "api/running_groups.rs"]
mod running_groups;
#[path = "api/running_worlds.rs"]
mod running_worlds;
#[path = "api/running_params.rs"]
mod running_params;
#[path = "api/running_turns.rs"]
mod running_turns;
#[path = "api/running_models.rs"]
mod running_models;
#[path = "api/running_replicas.rs"]
mod running_replicas;
