//! What the crate promises to its users.

mod api {
    mod captured; // graphs of passes and of layers
    mod chains; // sharded chains compute what whole ones do
    mod rig; //    a chain of products on several ranks
}
