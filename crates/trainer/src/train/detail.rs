//! Gathers of sharded weights and publications of buckets, one by one.

use std::fmt::Write;

use ddp::Ledger;
use device::{Machine, Tick, Trace};
use gtp::GatherReport;

use super::{plan::RunPlan, traced::trace_steps};
use crate::{Config, GraphScope, TrainError};

/// How much a run tells about itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Detail {
    /// A few lines.
    #[default]
    Brief,
    /// Every gather of a sharded weight and every publication, too.
    Full,
}

/// What the first two steps of a run will do on rank 0, from the `dry` driver, submitted as they are whatever graphs
/// the run has: where weights are gathered to and what hides their gathers; who publishes which bucket when.
///
/// # Errors
/// What the run itself would fail with; [`TrainError::Ddp`] if a bucket is published twice, or read and never published.
pub fn planned_detail(config: &Config, plan: &RunPlan) -> Result<String, TrainError> {
    let mut eager = config.clone();
    eager.graph.scope = GraphScope::None;
    let trace = trace_steps(&eager, &Machine::dry(), 2)?;
    let mut text = String::new();
    if !plan.gtp.weights().is_empty() {
        writeln!(text, "{}", plan.gtp).expect("BUG: writing to a string");
        text.push_str("what gathers hide behind\n");
        text.push_str(&GatherReport::new(&plan.gtp, &trace, 0).table(Tick::Step));
    }
    publications(&mut text, &trace, Tick::Step)?;
    Ok(text)
}

/// The same of traced steps, with times.
pub(super) fn traced_detail(trace: &Trace, plan: &RunPlan, tick: Tick) -> Result<String, TrainError> {
    let mut text = GatherReport::new(&plan.gtp, trace, 0).table(tick);
    publications(&mut text, trace, tick)?;
    Ok(text.trim_end().to_owned())
}

fn publications(text: &mut String, trace: &Trace, tick: Tick) -> Result<(), TrainError> {
    let ledger = Ledger::of(trace, 0);
    ledger.check()?;
    let issued: Vec<String> = ledger.by_cause().into_iter().map(|(by, times)| format!("{by} {times}")).collect();
    if issued.is_empty() {
        return Ok(());
    }
    let exposed = ledger.exposed().filter(|_| tick == Tick::Nanosecond);
    let exposed = exposed.map_or(String::new(), |sum| format!("; exposed {} in all", tick.tell(sum)));
    writeln!(text, "publications: {}; each write once{exposed}", issued.join(", ")).expect("BUG: writing to a string");
    text.push_str(&ledger.table(tick));
    Ok(())
}
