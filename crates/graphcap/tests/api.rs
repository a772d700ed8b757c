//! The one test binary of this crate.

mod api {
    mod arguments; // what a replay is given
    mod captures; // what a capture takes down
    mod claims; // each kind of finding, once with and once without the mistake
    mod conditions; // what must be published before a replay
    mod files; // traces written and read back
    mod machines; // programs on simulated machines: verdicts against results
    mod oracle; // random traces against reachability, counted out
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
}
