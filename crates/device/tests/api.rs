//! The driver conformance suite: what every driver promises, as claims that take a driver. A new driver joins in
//! `api/drivers.rs` and has then to keep all of them.

#[cfg(feature = "gpu-tests")]
#[path = "../../../tests/cards.rs"]
mod cards;

mod api {
    #[macro_use]
    mod drivers; // the drivers, and the table that runs each claim on each
    mod ranks; // programs of several ranks, a thread each
    mod work; // operations and values that claims are made of

    mod again; // operations that are submitted more than once
    mod capture_failures; // failures, races and drops in launches
    mod capture_gates; // external waits and records
    mod capture_graphs; // what a launched graph does
    mod capture_joint; // joint operations in graphs
    mod capture_order; // graphs in the order of their accesses
    mod capture_random; // random programs, eager and replayed
    mod capture_rules; // what a capture takes and refuses
    #[cfg(feature = "gpu-tests")]
    mod card_adamw; // AdamW on a card against its twin
    #[cfg(feature = "gpu-tests")]
    mod card_attention; // attention on a card
    #[cfg(feature = "gpu-tests")]
    mod card_bench; // what claims about kernels on a card are made of
    #[cfg(feature = "gpu-tests")]
    mod card_bf16; // kernels of bf16 on a card
    #[cfg(feature = "gpu-tests")]
    mod card_hopper; // products on a card of compute capability 9.0
    #[cfg(feature = "gpu-tests")]
    mod card_kernels; // kernels on a card against their twins
    #[cfg(feature = "gpu-tests")]
    mod card_layers; // kernels of other layers than GPT-2's
    #[cfg(feature = "gpu-tests")]
    mod card_memory; // the fast ways of kernels that wait for memory
    #[cfg(feature = "gpu-tests")]
    mod card_products; // products on a card
    #[cfg(feature = "gpu-tests")]
    mod card_rules; // what a card refuses, and what only a card can show
    mod compiled; // kernels compile without a card
    mod departures; // ranks that leave, fail, panic or never come
    mod determinism; // what may depend on workers and seeds: nothing that is ordered
    mod drops; // handles dropped in any order, with work queued
    mod errors; // operations that fail or panic
    mod events; // order within and between streams
    mod faults; // failures of other frameworks, as claims
    mod joint; // what joint operations compute
    mod joint_refusals; // joint operations whose members do not fit
    mod races; // forgotten waits
    mod refusals; // what is refused before it is queued
    mod reopening; // ranks and groups that come back
    mod search; // every order of a small program
    mod search_orders; // which orders a search leaves out
    mod stress; // random programs against a serial model
    mod transfers; // values to the device and back
    mod workers; // how workers of a host share themselves between streams
}
