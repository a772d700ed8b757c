//! The one test binary of this package: whatever crosses crates, and the rules of the house.

#[path = "../cards.rs"]
mod cards; // the first card, if there is one
#[path = "../graphs.rs"]
mod graphs; // all ways to train from graphs

mod captured; // captured training with a real backend
mod layouts; // layouts of whole training runs under the verifier
mod proved; // what the verifier says of whole training runs
mod sharded; // training over tensor groups, weight shards and replicas
mod tidy; // what lints cannot see: sizes, statics, who may depend on whom, pages that name missing tests
