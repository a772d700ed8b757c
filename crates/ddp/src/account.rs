//! What a captured step must leave on the host at each replay, and nothing of at its capture.

use std::{any::Any, sync::atomic::Ordering};

use device::{Event, Stream};
use pgroups::{After, HostState, PgError};

use crate::{
    Dispatch, Publication,
    core::{Core, Phase},
    gates::{Crowd, lock},
    readiness::Readiness,
    why,
};

/// The account of one rank's data parallelism.
struct Saved {
    readiness: Readiness,
    phase: Phase,
    microbatch: u32,
    used: Vec<u32>,
    opened: Vec<u32>,
    publications: Vec<Option<Publication>>,
    groups: Vec<Epoch>,
    counts: [u64; 4],
}

/// The epochs of one bucket group.
#[derive(Clone, Copy)]
struct Epoch {
    written: u64,
    issued: u64,
    quiet: bool,
}

/// What a step adds.
struct Added {
    groups: Vec<AddedGroup>,
    counts: [u64; 4],
}

struct AddedGroup {
    writes: u64,
    published: Published,
    quiet: bool,
    publication: Option<Publication>,
}

/// Which values a step publishes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Published {
    None,
    /// Those that it finds.
    Before,
    /// Those that it writes.
    Own,
}

fn own<T: 'static>(any: &(dyn Any + Send + Sync)) -> &T {
    any.downcast_ref().expect("BUG: an account is given what it gave")
}

impl Core {
    fn epochs(&self) -> Vec<Epoch> {
        let epoch = |gates: &crate::gates::Gates| {
            let epochs = gates.epochs();
            Epoch { written: epochs.written, issued: epochs.issued, quiet: gates.is_quiet() }
        };
        self.groups.iter().map(|group| epoch(&group.gates)).collect()
    }

    fn counters(&self) -> [u64; 4] {
        let counts = &self.counts;
        [&counts.reductions, &counts.publications, &counts.lookups, &counts.early].map(|c| c.load(Ordering::Relaxed))
    }

    fn set_counters(&self, values: [u64; 4]) {
        let counts = &self.counts;
        let all = [&counts.reductions, &counts.publications, &counts.lookups, &counts.early];
        all.iter().zip(values).for_each(|(counter, value)| counter.store(value, Ordering::Relaxed));
    }

    /// Everyone who has left an event, by what waits for it.
    fn crowds(&self) -> impl Iterator<Item = (&Crowd, device::Why)> {
        self.groups.iter().flat_map(|group| {
            [
                (&group.landed, why::REDUCE_AFTER_LANDED),
                (&group.free, why::GRAD_AFTER_FREE),
                (&group.gates.releases, why::WRITE_AFTER_READ),
            ]
        })
    }

    fn events(&self) -> impl Iterator<Item = (&Event, device::Why)> {
        let own = [(&self.keep_set, why::GRAD_AFTER_FLAG), (&self.finished, why::READ_GRADS_AFTER_REDUCE)];
        own.into_iter().chain(self.groups.iter().flat_map(|group| {
            [
                (&group.gates.published, why::READ_AFTER_PUBLISH),
                (&group.written, why::GATHER_AFTER_WRITE),
                (&group.reduced, why::STEP_AFTER_REDUCE),
            ]
        }))
    }
}

impl HostState for Core {
    fn save(&self) -> Box<dyn Any + Send + Sync> {
        let state = lock(&self.state);
        Box::new(Saved {
            readiness: state.readiness.clone(),
            phase: state.phase,
            microbatch: state.microbatch,
            used: state.used.clone(),
            opened: state.opened.clone(),
            publications: state.publications.clone(),
            groups: self.epochs(),
            counts: self.counters(),
        })
    }

    fn restore(&self, saved: &(dyn Any + Send + Sync)) {
        let saved: &Saved = own(saved);
        let mut state = lock(&self.state);
        state.readiness = saved.readiness.clone();
        (state.phase, state.microbatch) = (saved.phase, saved.microbatch);
        state.used.clone_from(&saved.used);
        state.opened.clone_from(&saved.opened);
        state.publications.clone_from(&saved.publications);
        for (group, epoch) in self.groups.iter().zip(&saved.groups) {
            group.gates.set(epoch.written, epoch.issued, epoch.quiet);
        }
        self.set_counters(saved.counts);
    }

    fn begin_step(&self) {
        // Where reads publish, a step finds values that are written and not published.
        if matches!(self.config.dispatch, Dispatch::Chain | Dispatch::Aligned) {
            for group in &self.groups {
                let written = group.gates.epochs().written;
                group.gates.set(written, written - 1, false);
            }
        }
    }

    fn since(&self, before: &(dyn Any + Send + Sync)) -> Box<dyn Any + Send + Sync> {
        let before: &Saved = own(before);
        let state = lock(&self.state);
        let group = |(at, (now, then)): (usize, (Epoch, &Epoch))| AddedGroup {
            writes: now.written - then.written,
            published: match now.issued {
                issued if issued == now.written => Published::Own,
                issued if issued == then.written => Published::Before,
                _ => Published::None,
            },
            quiet: now.quiet,
            publication: state.publications[at],
        };
        let counts = self.counters();
        Box::new(Added {
            groups: self.epochs().into_iter().zip(&before.groups).enumerate().map(group).collect(),
            counts: std::array::from_fn(|i| counts[i] - before.counts[i]),
        })
    }

    fn announce(&self, effects: &(dyn Any + Send + Sync), stream: &Stream) {
        let added: &Added = own(effects);
        for (group, added) in added.groups.iter().enumerate() {
            let gates = &self.groups[group].gates;
            let written = gates.epochs().written;
            match added.published {
                Published::None => {}
                // Someone read it since, outside the graph, which gathers the same bytes once more.
                Published::Before if gates.is_current() => {}
                Published::Before => self.note_issued(group, written, stream),
                Published::Own => {
                    self.note_written(group, written + added.writes, stream);
                    self.note_issued(group, written + added.writes, stream);
                }
            }
        }
    }

    fn add(&self, effects: &(dyn Any + Send + Sync), stream: &Stream) {
        let added: &Added = own(effects);
        let mut state = lock(&self.state);
        for (at, (group, added)) in self.groups.iter().zip(&added.groups).enumerate() {
            let before = group.gates.epochs().written;
            let written = before + added.writes;
            let issued = match added.published {
                Published::None => group.gates.epochs().issued,
                Published::Before => before,
                Published::Own => written,
            };
            group.gates.set(written, issued, added.quiet);
            state.publications[at] = added.publication.map(|p| Publication { epoch: issued, ..p });
            if added.published != Published::Own {
                self.note_written(at, written, stream);
            }
        }
        let now = self.counters();
        self.set_counters(std::array::from_fn(|i| now[i] + added.counts[i]));
    }

    fn join(&self, stream: &Stream) -> Result<(), PgError> {
        // Where the optimizer publishes, a step finds everything published.
        if matches!(self.config.dispatch, Dispatch::WithOptimizer | Dispatch::AtStep) && !stream.is_capturing() {
            self.publish_all(None).map_err(|error| error.into_backend("(before a captured step)"))?;
        }
        for (event, why) in self.events() {
            stream.wait(event, why)?;
        }
        for (crowd, why) in self.crowds() {
            crowd.settle(stream, why)?;
        }
        Ok(stream.wait(&self.tokens.counted, why::DIVIDE_AFTER_COUNT)?)
    }

    fn mark(&self, stream: &Stream) -> Result<(), PgError> {
        for (event, _) in self.events().chain([(&self.tokens.counted, why::DIVIDE_AFTER_COUNT)]) {
            stream.record(event)?;
        }
        for (crowd, _) in self.crowds() {
            crowd.begin_anew();
            crowd.note(After::Stream(stream))?;
        }
        Ok(())
    }
}

/// The account of an optimizer: who is behind its state.
pub(crate) struct StateGates {
    /// Behind everything that has written the state: its creation, the last step, a refresh.
    pub(crate) stepped: Event,
    /// Streams that have read norm, flag, counts or loss scale.
    pub(crate) readers: Crowd,
}

impl HostState for StateGates {
    fn save(&self) -> Box<dyn Any + Send + Sync> {
        Box::new(())
    }

    fn restore(&self, _saved: &(dyn Any + Send + Sync)) {}

    fn begin_step(&self) {}

    fn since(&self, _before: &(dyn Any + Send + Sync)) -> Box<dyn Any + Send + Sync> {
        Box::new(())
    }

    fn announce(&self, _effects: &(dyn Any + Send + Sync), _stream: &Stream) {}

    fn add(&self, _effects: &(dyn Any + Send + Sync), _stream: &Stream) {}

    fn join(&self, stream: &Stream) -> Result<(), PgError> {
        stream.wait(&self.stepped, why::STEP_AFTER_STEP)?;
        Ok(self.readers.settle(stream, why::STEP_AFTER_STATE_READ)?)
    }

    fn mark(&self, stream: &Stream) -> Result<(), PgError> {
        stream.record(&self.stepped)?;
        self.readers.begin_anew();
        Ok(self.readers.note(After::Stream(stream))?)
    }
}
