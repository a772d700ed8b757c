//! Training over tensor groups, weight shards and replicas together: the contract between whoever gathers weights,
//! whoever publishes them and whoever replays graphs, with the real parts.

mod cards; //    layouts for a card, and for hosts
mod captured; // a worker's passes as graphs
mod contents; // what graphs hold and ask for
mod mutation; // what the verifier notices
mod passes; //   passes of a model, piece by piece
mod permuted; // collections made by hand
mod plain; //    one shard is no shards
mod program; //  layout, architecture, schedule
mod races; //    what keeps gathers behind publications, taken away
mod seeds; //    no read is stale
mod support; //  machines
mod two_models; // two in one process
mod worker; //   one rank
mod writer; //   writers come behind readers
