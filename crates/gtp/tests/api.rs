//! What the crate promises to its users.

mod api {
    mod captured; // graphs of passes and of layers
    mod chains; // sharded chains compute what whole ones do
    mod deviation; // passes that do something else than planned
    mod layers; // products, tables, losses and norms over a tensor group
    mod layers_rig; // their parts, cut and put together
    mod mixed; //  submitted and replayed parts of passes
    mod moves; //  moves that a weight cannot make, and branches
    mod prefetch; // what is gathered when, and where to
    mod rig; //    a chain of products on several ranks
    mod stand; //  weights of any layout, passes of single calls
}
