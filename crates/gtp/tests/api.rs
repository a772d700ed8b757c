//! What the crate promises to its users.

#[path = "../../../tests/cards.rs"]
mod cards;

mod api {
    mod backend; // publications and reductions of the smallest kind
    mod captured; // graphs of passes and of layers
    mod chains; // sharded chains compute what whole ones do
    mod deviation; // passes that do something else than planned
    mod gradients; // means and sums, once each
    mod layouts; // permuted groups, padding, axes, classes
    mod layers; // products, tables, losses and norms over a tensor group
    mod layers_rig; // their parts, cut and put together
    mod mixed; //  submitted and replayed parts of passes
    mod moves; //  moves that a weight cannot make, and branches
    mod pictures; // the schedules of the page
    mod plain; //  one shard is none
    mod prefetch; // what is gathered when, and where to
    mod proof; //  every synchronisation is needed
    mod publish; // weights that others write and publish
    mod random; // passes of any shape
    mod report; // what gathers hide behind
    mod rig; //    a chain of products on several ranks
    mod script; // passes made of single calls
    mod steps; //  graphs of whole steps
    mod stand; //  weights of any layout, and what whole ones give
}
