//! The crate's API on the host drivers.

#[path = "api/accumulation.rs"]
mod accumulation;
#[path = "api/adam.rs"]
mod adam;
#[path = "../../../tests/cards.rs"]
mod cards;
#[path = "api/completion.rs"]
mod completion;
#[path = "api/decision.rs"]
mod decision;
#[path = "api/ledger.rs"]
mod ledger;
#[path = "api/mutation.rs"]
mod mutation;
#[path = "api/offload.rs"]
mod offload;
#[path = "api/opening.rs"]
mod opening;
#[path = "api/optimizer.rs"]
mod optimizer;
#[path = "api/orders.rs"]
mod orders;
#[path = "api/pictures.rs"]
mod pictures;
#[path = "api/plan.rs"]
mod plan;
#[path = "api/publication.rs"]
mod publication;
#[path = "api/reduction.rs"]
mod reduction;
#[path = "api/reordered.rs"]
mod reordered;
#[path = "api/scaling.rs"]
mod scaling;
#[path = "api/support.rs"]
mod support;
#[path = "api/verified.rs"]
mod verified;
#[path = "api/zeros.rs"]
mod zeros;
