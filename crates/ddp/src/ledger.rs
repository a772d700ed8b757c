//! The publications of a traced run: who has started each, who has waited for it, and how long.

use std::{collections::BTreeMap, fmt};

use device::{Label, Note, Tick, Trace, TraceEvent};
use pgroups::Turn;

use crate::{DdpError, why};

/// Every write of every bucket group on one rank, in the order of the writes, with its publications. Read off a trace:
/// what `Ddp` counts on the host is not asked.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Ledger {
    entries: Vec<LedgerEntry>,
}

/// One write of a bucket group's values, and what has become of it.
#[derive(Clone, Debug, PartialEq)]
pub struct LedgerEntry {
    /// Rank.
    pub rank: u32,
    /// The group's event in traces.
    pub publisher: String,
    /// Number of the write; the initial values are write 1.
    pub epoch: u64,
    /// Whether the write itself is in the trace: one that precedes it may have been published before, too.
    pub begun: bool,
    /// Its publications, in order.
    pub issued: Vec<Issuance>,
    /// Reads of its values: by a pass that is submitted, or by a launch of a graph, once for each parameter.
    pub reads: u64,
    /// Streams and graphs that were held up by its publication.
    pub waits: Vec<Waiting>,
}

/// Who has started a publication, and when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issuance {
    /// `read`, `chain`, `optimizer` or `forced` as [`Cause`](crate::Cause) says; `load` for values that were loaded
    /// whole, `graph` for a publication inside a captured step.
    pub by: String,
    /// The step, as the host numbers them; 0 before the first.
    pub step: u64,
    /// The microbatch of that step, from 1; 0 outside.
    pub microbatch: u64,
}

/// A wait for a publication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// Stream, by number on its device.
    pub stream: u32,
    /// How long nothing could run behind it, in the unit of the trace: nanoseconds on `cpu`, steps on `sim`. None where
    /// nothing ran.
    pub exposed: Option<u64>,
}

impl LedgerEntry {
    /// The group's name, without that of its communicator.
    #[must_use]
    pub fn bucket(&self) -> &str {
        let name = self.publisher.strip_prefix("ddp.published.").unwrap_or(&self.publisher);
        name.split_once('@').map_or(name, |(name, _)| name)
    }
}

impl Ledger {
    /// Of the publications of `rank`.
    #[must_use]
    pub fn of(trace: &Trace, rank: u32) -> Ledger {
        let mut ledger = Ledger::default();
        let mut at: BTreeMap<(Label, u64), usize> = BTreeMap::new();
        // By event: which write each record of it has published.
        let mut published: BTreeMap<Label, Vec<(usize, usize)>> = BTreeMap::new();
        let (mut step, mut microbatch) = (0, 0);
        for (index, event) in trace.events.iter().enumerate() {
            let TraceEvent::Note { rank: of, note, .. } = event else { continue };
            if *of != rank {
                continue;
            }
            match note {
                Note::Step(number) => (step, microbatch) = (*number, 0),
                Note::Microbatch(number) => microbatch = *number,
                Note::Written { publisher, epoch, .. } => {
                    let entry = ledger.entry(&mut at, (rank, publisher, *epoch));
                    ledger.entries[entry].begun = true;
                    // The step's microbatches are over; what follows until the next one is outside.
                    microbatch = 0;
                }
                Note::Issued { publisher, epoch, by, .. } => {
                    let entry = ledger.entry(&mut at, (rank, publisher, *epoch));
                    ledger.entries[entry].issued.push(Issuance { by: by.to_string(), step, microbatch });
                    published.entry(publisher.clone()).or_default().push((index, entry));
                }
                Note::Read { publisher, written, .. } => {
                    let entry = ledger.entry(&mut at, (rank, publisher, *written));
                    ledger.entries[entry].reads += 1;
                }
                _ => {}
            }
        }
        ledger.take_waits(trace, rank, &published);
        ledger
    }

    fn entry(&mut self, at: &mut BTreeMap<(Label, u64), usize>, (rank, name, epoch): (u32, &Label, u64)) -> usize {
        *at.entry((name.clone(), epoch)).or_insert_with(|| {
            let (publisher, issued, waits) = (name.to_string(), Vec::new(), Vec::new());
            self.entries.push(LedgerEntry { rank, publisher, epoch, begun: false, issued, reads: 0, waits });
            self.entries.len() - 1
        })
    }

    /// A wait is for the publication that was started last when it was submitted.
    fn take_waits(&mut self, trace: &Trace, rank: u32, published: &BTreeMap<Label, Vec<(usize, usize)>>) {
        let reads = [Turn::READ_AFTER_PUBLISH, why::READ_AFTER_PUBLISH];
        for span in trace.wait_spans(rank) {
            if !reads.iter().any(|why| *why.0 == *span.why) {
                continue;
            }
            let last = published.get(&span.event).and_then(|all| all.iter().rfind(|(index, _)| *index < span.index));
            if let Some((_, entry)) = last {
                self.entries[*entry].waits.push(Waiting { stream: span.at.stream, exposed: span.exposed() });
            }
        }
    }

    /// The writes.
    #[must_use]
    pub fn entries(&self) -> &[LedgerEntry] {
        &self.entries
    }

    /// Strict: each write that the trace holds and that was read has been published once, and none twice.
    ///
    /// # Errors
    /// [`DdpError::NeverPublished`], [`DdpError::PublishedAgain`] for the first that was not.
    pub fn check(&self) -> Result<(), DdpError> {
        for entry in &self.entries {
            let LedgerEntry { rank, epoch, ref issued, reads, begun, .. } = *entry;
            let group = entry.bucket().to_owned();
            if issued.len() > 1 {
                let by = issued.iter().map(Issuance::to_string).collect::<Vec<_>>().join(", ");
                return Err(DdpError::PublishedAgain { group, rank, epoch, times: issued.len(), by });
            }
            if begun && reads > 0 && issued.is_empty() {
                return Err(DdpError::NeverPublished { group, rank, epoch, reads });
            }
        }
        Ok(())
    }

    /// All exposed times together; none where nothing ran.
    #[must_use]
    pub fn exposed(&self) -> Option<u64> {
        let waits = self.entries.iter().flat_map(|entry| &entry.waits);
        waits.filter_map(|wait| wait.exposed).fold(None, |sum, exposed| Some(sum.unwrap_or(0) + exposed))
    }

    /// A line for each write that was published. How long it was exposed is told where the trace has a clock.
    #[must_use]
    pub fn table(&self, tick: Tick) -> String {
        let published = || self.entries.iter().filter(|entry| !entry.issued.is_empty());
        let width = published().map(|entry| entry.bucket().chars().count()).max().unwrap_or(0).max(18);
        let line = |bucket: &str, write: &str, by: &str, reads: &str, waits: &str, exposed: &str| {
            let exposed = if tick == Tick::Nanosecond { format!(" {exposed:>12}") } else { String::new() };
            format!("  {bucket:<width$} {write:>5}  {by:<32} {reads:>5} {waits:>5}{exposed}\n")
        };
        let mut text = line("bucket", "write", "published by", "reads", "waits", "exposed");
        for entry in published() {
            let LedgerEntry { epoch, issued, reads, waits, .. } = entry;
            let by = issued.iter().map(Issuance::to_string).collect::<Vec<_>>().join("; ");
            let exposed = waits.iter().filter_map(|wait| wait.exposed).max();
            let exposed = exposed.map_or("-".to_owned(), |exposed| tick.tell(exposed));
            let numbers = (epoch.to_string(), reads.to_string(), waits.len().to_string());
            text.push_str(&line(entry.bucket(), &numbers.0, &by, &numbers.1, &numbers.2, &exposed));
        }
        text
    }

    /// Publications by who has started them.
    #[must_use]
    pub fn by_cause(&self) -> BTreeMap<&str, usize> {
        let mut causes = BTreeMap::new();
        let issued = self.entries.iter().flat_map(|entry| &entry.issued);
        issued.for_each(|one| *causes.entry(one.by.as_str()).or_default() += 1);
        causes
    }
}

impl fmt::Display for Issuance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Issuance { by, step, microbatch } = self;
        match microbatch {
            0 => write!(f, "{by} in step {step}"),
            _ => write!(f, "{by} in step {step}, microbatch {microbatch}"),
        }
    }
}
