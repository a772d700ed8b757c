//! The one test binary of this crate.

#[path = "../../../tests/cards.rs"]
mod cards;

mod api {
    mod arguments; // what a replay is given
    mod captures; // what a capture takes down
    mod claims; // each kind of finding, once with and once without the mistake
    mod conditions; // what must be published before a replay
    mod costs; // what captures take
    mod deletion; // everything goes, or is told
    mod files; // traces written and read back
    mod gates; // where graphs wait and what they tell
    mod invalidation; // what has changed since the capture
    mod machines; // programs on simulated machines: verdicts against results
    mod oracle; // random traces against reachability, counted out
    mod pictures; // pictures of the page
    mod purity; // captures and warm-up change nothing
    mod replays; // replays against eager passes
    mod runners_groups; // which groups share runners
    mod runners_pool; // which runner serves a call
    mod runners_turns; // forward and backward in turn
    mod schedule_layers; // orders by layer
    mod schedule_orders; // capture orders of pipelines
    mod schedule_rules; // setups that are refused
    mod schedule_slots; // memory of inputs
    mod schedule_support; // pipelines to test with
    mod shrinking; // smallest failing cases
    mod support; // publishers and sinks that say what is asked of them
    mod traces; // traces made by hand
    mod two_models; // two collections in one process
    mod whole_steps; // publications and reductions inside
}
