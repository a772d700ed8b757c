//! From a graph to the parameters it touches, their publishers and whoever waits for their gradients: held weakly,
//! looked up again when something has changed.

use std::sync::Arc;

use device::{Access, Event, Note, Stream, TraceAccess};
use pgroups::{Address, After, Epochs, Landed, Param, Pass, PgError, Publish, Quiet, Turn, Watch, WeakParam};

use crate::{
    FirstUse, GateMode, GraphError,
    error::Change,
    ready::Known,
    recording::{Mention, OutGates, Recording},
};

/// A parameter that a graph reads, or whose gradient it writes.
struct Link {
    param: WeakParam,
    name: String,
    address: Address,
    watch: Watch,
    bucket: usize,
    gradient: Gradient,
}

/// What a graph does with a gradient.
#[derive(Clone, Copy)]
enum Gradient {
    Untouched,
    /// As captured; none: an earlier graph begins it.
    Opened(Option<FirstUse>),
}

/// Parameters of one publisher.
struct Bucket {
    /// A parameter of it.
    first: usize,
    /// It had a publisher when the graph was captured.
    was_published: bool,
    /// Gates of the graph wait for this event: in front of its reads.
    in_gate: Option<Event>,
    condition: Option<Condition>,
    landed: Option<usize>,
    /// None if it had no publisher: one that came later hears of the end of the launch.
    released: Option<usize>,
}

/// What must hold before a replay: the bucket's last write is published.
struct Condition {
    /// The bucket's first read.
    read: usize,
    quiet: Option<Quiet>,
    event: Event,
}

/// What a replay asks for and what it leaves.
pub(crate) struct Links {
    mode: GateMode,
    links: Vec<Link>,
    buckets: Vec<Bucket>,
    /// Buckets that are read, in the order of first reads.
    conditions: Vec<usize>,
    /// Names of what is read, in the order of first reads.
    reads: Vec<usize>,
    opens: Vec<usize>,
    landings: Vec<usize>,
    /// Buckets with reads, in the order of first mentions.
    releases: Vec<usize>,
}

/// The gates of one executable.
pub(crate) struct Gates<'g> {
    /// As [`OutGates::events`].
    pub(crate) out: &'g [Event],
    /// By bucket.
    pub(crate) free: &'g [Option<Event>],
    /// Where replays wait until gradients are free.
    pub(crate) stream: &'g Stream,
}

/// Who publishes a bucket now, with the parameter that was asked.
type Found<'l> = Option<(Option<Arc<dyn Publish>>, &'l str)>;

impl Links {
    pub(crate) fn new(mode: GateMode, recording: &Recording<'_>, out: &OutGates) -> Links {
        let params = recording.params();
        let place = |mention: &Mention| {
            params.iter().position(|known| known.param == mention.param).expect("BUG: every mention is listed")
        };
        let all = |list: &[Mention]| list.iter().map(place).collect::<Vec<usize>>();
        let reads = all(&recording.reads);
        let mut links: Vec<Link> = params.iter().map(Link::new).collect();
        let opens: Vec<usize> = recording.opens.iter().map(|opening| place(&opening.mention)).collect();
        for (&at, opening) in opens.iter().zip(&recording.opens) {
            links[at].gradient = Gradient::Opened(opening.first_use);
        }
        let mut conditions = Vec::new();
        let mut buckets = Vec::new();
        for (i, bucket) in recording.buckets.iter().enumerate() {
            // A bucket of which there are releases only is linked by the parameter that was mentioned first.
            let first = links.iter().position(|link| link.bucket == i).unwrap_or_else(|| {
                links.push(Link::new(&Mention { param: bucket.first.clone(), bucket: i }));
                links.len() - 1
            });
            let is_read = reads.iter().any(|read| links[*read].bucket == i);
            let in_gate = bucket.publisher.as_ref().filter(|_| is_read && mode == GateMode::InGraph);
            buckets.push(Bucket {
                first,
                was_published: bucket.publisher.is_some(),
                in_gate: in_gate.map(|publisher| publisher.event().clone()),
                condition: None,
                landed: out.landed[i],
                released: out.released[i],
            });
        }
        for &read in &reads {
            if !conditions.contains(&links[read].bucket) {
                conditions.push(links[read].bucket);
            }
        }
        let releases = (0..buckets.len()).filter(|i| !recording.buckets[*i].released.is_empty()).collect();
        let landings = all(&recording.landings);
        let mut this = Links { mode, links, buckets, conditions, reads, opens, landings, releases };
        this.look_up_conditions();
        this
    }

    /// Names of what the graph reads in forward, in the order of first reads.
    pub(crate) fn reads(&self) -> impl Iterator<Item = &str> {
        self.reads.iter().map(|read| self.links[*read].name.as_str())
    }

    /// Names of the first reads of its conditions, in order.
    pub(crate) fn conditions(&self) -> impl Iterator<Item = &str> {
        let conditions = self.conditions.iter().filter_map(|bucket| self.buckets[*bucket].condition.as_ref());
        conditions.map(|condition| self.links[condition.read].name.as_str())
    }

    pub(crate) fn uses(&self, param: &Param) -> bool {
        self.links.iter().any(|link| link.param.upgrade().is_some_and(|known| known == *param))
    }

    /// None if nothing has changed; else everything is compared with the capture and looked up anew. Returns events
    /// that gates have to be exchanged for.
    pub(crate) fn refresh(&mut self, graph: &str) -> Result<Option<Vec<(Event, Event)>>, GraphError> {
        if !self.links.iter().any(|link| link.watch.has_changed()) {
            return Ok(None);
        }
        let changes = self.changes();
        if !changes.is_empty() {
            return Err(GraphError::Invalid { graph: graph.to_owned(), changes });
        }
        let mut exchange = Vec::new();
        for bucket in &mut self.buckets {
            let param = self.links[bucket.first].param.upgrade();
            let publisher = param.and_then(|param| param.publisher());
            if let (Some(gate), Some(publisher)) = (&mut bucket.in_gate, publisher)
                && !gate.same_as(publisher.event())
            {
                let to = publisher.event().clone();
                exchange.push((std::mem::replace(gate, to.clone()), to));
            }
        }
        for link in &mut self.links {
            if let Some(param) = link.param.upgrade() {
                link.watch = param.watch();
            }
        }
        self.look_up_conditions();
        Ok(Some(exchange))
    }

    /// What says, without a look at the links, that there is nothing to do.
    pub(crate) fn known(&self) -> Known {
        let watches = self.links.iter().map(|link| link.watch.clone()).collect();
        let conditions = self.conditions.iter().filter_map(|bucket| self.buckets[*bucket].condition.as_ref());
        Known::new(watches, conditions.map(|condition| condition.quiet.clone()).collect())
    }

    /// In what the parameters differ from when they were captured.
    pub(crate) fn changes(&self) -> Vec<Change> {
        let mut changes = Vec::new();
        let mut publishers: Vec<Found<'_>> = vec![None; self.buckets.len()];
        for link in &self.links {
            let name = || link.name.clone();
            let Some(param) = link.param.upgrade() else {
                changes.push(Change::Gone { param: name() });
                continue;
            };
            let now = param.address();
            if now != link.address {
                changes.push(Change::Moved { param: name(), captured: link.address, now });
            }
            let own = param.publisher();
            match &publishers[link.bucket] {
                None => publishers[link.bucket] = Some((own, &link.name)),
                Some((first, with)) if !same(first.as_ref(), own.as_ref()) => {
                    changes.push(Change::Regrouped { param: name(), with: (*with).to_owned() });
                }
                Some(_) => {}
            }
            changes.extend(link.governed(&param));
        }
        changes.extend(self.joined(&publishers));
        changes
    }

    /// Buckets that were apart and share a publisher now.
    fn joined(&self, publishers: &[Found<'_>]) -> Vec<Change> {
        let known = publishers.iter().zip(&self.buckets).filter(|(_, bucket)| bucket.was_published);
        let known: Vec<_> = known.filter_map(|(found, _)| found.as_ref()).collect();
        let known: Vec<_> = known.into_iter().filter_map(|(p, name)| Some((p.as_ref()?, *name))).collect();
        let shared = |(at, (publisher, name)): (usize, &(&Arc<dyn Publish>, &str))| {
            let (_, with) = known[..at].iter().find(|(other, _)| Arc::ptr_eq(other, publisher))?;
            Some(Change::Regrouped { param: (*name).to_owned(), with: (*with).to_owned() })
        };
        known.iter().enumerate().filter_map(shared).collect()
    }

    fn look_up_conditions(&mut self) {
        for &at in &self.conditions {
            let read = self.reads.iter().copied().find(|read| self.links[*read].bucket == at);
            let read = read.expect("BUG: a condition has a read");
            let publisher = self.links[read].param.upgrade().and_then(|param| param.publisher());
            self.buckets[at].condition = publisher.map(|publisher| Condition {
                read,
                quiet: publisher.quiet(),
                event: publisher.event().clone(),
            });
        }
    }

    /// Makes every condition true, in order, or refuses the replay. Costs one load a condition when all are.
    pub(crate) fn issue(&self) -> Result<(), GraphError> {
        let mut asked: Vec<(&str, Arc<dyn Publish>)> = Vec::new();
        for &at in &self.conditions {
            let Some(condition) = &self.buckets[at].condition else { continue };
            if condition.quiet.as_ref().is_some_and(Quiet::get) {
                continue;
            }
            let link = &self.links[condition.read];
            if let Some(publisher) = link.param.upgrade().and_then(|param| param.publisher()) {
                asked.push((&link.name, publisher));
            }
        }
        for (param, publisher) in &asked {
            publisher.issue()?;
            let Epochs { written, issued } = publisher.epochs();
            if issued < written {
                return Err(PgError::Stale { param: (*param).to_owned(), written, issued }.into());
            }
        }
        Ok(())
    }

    /// Orders `stream` behind every publication whose readers have no gate inside the graph.
    pub(crate) fn wait_for_reads(&self, stream: &Stream) -> Result<(), GraphError> {
        for &at in &self.conditions {
            let bucket = &self.buckets[at];
            if let Some(condition) = bucket.condition.as_ref().filter(|_| bucket.in_gate.is_none()) {
                stream.wait(&condition.event, Turn::READ_AFTER_PUBLISH)?;
            }
        }
        Ok(())
    }

    /// Makes every gradient that the graph writes writable: for the gates inside, or for `stream`.
    pub(crate) fn open_gradients(&self, gates: &Gates<'_>, stream: &Stream) -> Result<(), GraphError> {
        let on = if self.mode == GateMode::InGraph { gates.stream } else { stream };
        let mut open: Option<usize> = None;
        let record = |bucket: Option<usize>| match bucket.and_then(|bucket| gates.free[bucket].as_ref()) {
            Some(event) => on.record(event),
            None => Ok(()),
        };
        for &at in &self.opens {
            let link = &self.links[at];
            if open.is_some_and(|bucket| bucket != link.bucket) {
                record(open)?;
            }
            open = Some(link.bucket);
            if let Some(sink) = self.sink(at) {
                sink.1.open(&sink.0, on)?;
            }
        }
        Ok(record(open)?)
    }

    /// What a replay leaves for others: reads that have ended and gradients that have landed, behind its gates.
    pub(crate) fn apply(&self, gates: &Gates<'_>, stream: &Stream) -> Result<(), GraphError> {
        for &at in &self.releases {
            let bucket = &self.buckets[at];
            let publisher = self.links[bucket.first].param.upgrade().and_then(|param| param.publisher());
            let Some(publisher) = publisher else { continue };
            stream.note(|| Note::Released { publisher: publisher.event().name().to_owned().into() });
            publisher.done(bucket.released.map_or(After::Stream(stream), |gate| After::Gate(&gates.out[gate])))?;
        }
        for &at in &self.landings {
            if let (Some((param, sink)), Some(gate)) = (self.sink(at), self.buckets[self.links[at].bucket].landed) {
                // Before the sink hears of it: it may reduce at once.
                stream.note(|| Note::Landed {
                    param: param.name().to_owned().into(),
                    regions: vec![TraceAccess::from(&Access::update(&param.main_grad()))],
                });
                sink.landed(&param, After::Gate(&gates.out[gate]))?;
            }
        }
        Ok(())
    }

    /// What is about to be read, for whoever checks a trace: which epoch it has to be. That it is there is shown by the
    /// order of the nodes.
    pub(crate) fn note_reads(&self, stream: &Stream) {
        if !stream.is_traced() {
            return;
        }
        for link in self.reads.iter().map(|read| &self.links[*read]) {
            let Some(publisher) = link.param.upgrade().and_then(|param| param.publisher()) else { continue };
            let Epochs { written, issued } = publisher.epochs();
            stream.note(|| Note::Read {
                publisher: publisher.event().name().to_owned().into(),
                param: link.name.clone().into(),
                pass: Pass::Forward.name().into(),
                written,
                issued,
                regions: Vec::new(),
            });
        }
    }

    fn sink(&self, at: usize) -> Option<(Param, Arc<dyn Landed>)> {
        let param = self.links[at].param.upgrade()?;
        let sink = param.landed_sink()?;
        Some((param, sink))
    }
}

impl Link {
    fn new(mention: &Mention) -> Link {
        let param = &mention.param;
        Link {
            param: param.downgrade(),
            name: param.name().to_owned(),
            address: param.address(),
            watch: param.watch(),
            bucket: mention.bucket,
            gradient: Gradient::Untouched,
        }
    }

    /// Other flags than the captured one would be set, and nobody would look at them.
    fn governed(&self, param: &Param) -> Option<Change> {
        let Gradient::Opened(captured) = self.gradient else { return None };
        let now = param.landed_sink().map_or(FirstUse::Nobodys, |sink| FirstUse::of(&sink.first_use()));
        let is_same = captured.map_or(now != FirstUse::Nobodys, |captured| captured == now);
        (!is_same).then(|| Change::Governed { param: self.name.clone(), captured, now })
    }
}

fn same(a: Option<&Arc<dyn Publish>>, b: Option<&Arc<dyn Publish>>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => Arc::ptr_eq(a, b),
        (None, None) => true,
        _ => false,
    }
}
