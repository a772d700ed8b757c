//! What a capture takes down: reads, releases and gradients of parameters, by bucket.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use device::{Event, Stream, Why};
use pgroups::{HandOver, Keep, Param, ParamId, PgError, Publish, Recorder, Turn, WeakParam};

use crate::{FirstUse, GateMode, inputs::Inputs, why};

/// Parameters with one publisher share their gates. One without a publisher is alone.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum BucketKey {
    Publisher(usize),
    Param(ParamId),
}

/// The captured part of a bucket's life.
pub(crate) struct Bucket {
    /// The parameter that was mentioned first.
    pub(crate) first: Param,
    pub(crate) publisher: Option<Arc<dyn Publish>>,
    /// What gives the gradients away; none if nobody writes them, or if replays wait for it before they begin.
    pub(crate) free: Option<Event>,
    /// Behind the last read so far, by stream.
    pub(crate) released: Vec<Mark>,
    /// Behind the last gradient so far, by stream.
    pub(crate) landed: Vec<Mark>,
}

/// A point of a captured stream.
pub(crate) struct Mark {
    stream: u32,
    event: Event,
    /// Counts all marks of the capture.
    at: u64,
}

/// A parameter and its bucket.
#[derive(Clone)]
pub(crate) struct Mention {
    pub(crate) param: Param,
    pub(crate) bucket: usize,
}

/// A gradient that is written.
pub(crate) struct Opening {
    pub(crate) mention: Mention,
    /// What its first use does with what it finds; none if that use is in an earlier graph.
    pub(crate) first_use: Option<FirstUse>,
}

/// Everything of one capture.
pub(crate) struct Recording<'s> {
    mode: GateMode,
    /// Parameters that had their first gradient of the pass: in this capture, or in an earlier one of the set.
    first_uses: &'s mut HashMap<ParamId, WeakParam>,
    keys: HashMap<BucketKey, usize>,
    pub(crate) buckets: Vec<Bucket>,
    /// Forward reads: each parameter once, in the order of first reads.
    pub(crate) reads: Vec<Mention>,
    /// Gradients that are written: each parameter once, in the order of first uses.
    pub(crate) opens: Vec<Opening>,
    /// Gradients that are there: each use once, in order.
    pub(crate) landings: Vec<Mention>,
    pub(crate) inputs: Inputs,
    /// What it counts on and leaves beside parameters, in order.
    pub(crate) hand_overs: Vec<Arc<dyn HandOver>>,
    marks: u64,
}

impl<'s> Recording<'s> {
    pub(crate) fn new(mode: GateMode, first_uses: &'s mut HashMap<ParamId, WeakParam>) -> Recording<'s> {
        Recording {
            mode,
            first_uses,
            keys: HashMap::new(),
            buckets: Vec::new(),
            reads: Vec::new(),
            opens: Vec::new(),
            landings: Vec::new(),
            inputs: Inputs::default(),
            hand_overs: Vec::new(),
            marks: 0,
        }
    }

    fn bucket(&mut self, param: &Param) -> usize {
        let publisher = param.publisher();
        let key = match &publisher {
            Some(publisher) => BucketKey::Publisher(Arc::as_ptr(publisher).cast::<()>().addr()),
            None => BucketKey::Param(param.id()),
        };
        *self.keys.entry(key).or_insert_with(|| {
            self.buckets.push(Bucket {
                first: param.clone(),
                publisher,
                free: None,
                released: Vec::new(),
                landed: Vec::new(),
            });
            self.buckets.len() - 1
        })
    }

    /// The next mark of the capture is on `stream`: of a bucket's reads or gradients.
    fn mark(
        &mut self,
        param: &Param,
        stream: &Stream,
        of: fn(&mut Bucket) -> &mut Vec<Mark>,
    ) -> Result<usize, PgError> {
        let bucket = self.bucket(param);
        self.marks += 1;
        let (at, index) = (self.marks, stream.index());
        let marks = of(&mut self.buckets[bucket]);
        let mark = match marks.iter().position(|mark| mark.stream == index) {
            Some(known) => &mut marks[known],
            None => {
                let event = stream.device().event("graphcap.mark");
                marks.push(Mark { stream: index, event, at });
                marks.last_mut().expect("BUG: just pushed")
            }
        };
        mark.at = at;
        stream.record(&mark.event)?;
        Ok(bucket)
    }
}

impl Recording<'_> {
    fn opening(&mut self, param: &Param, bucket: usize, first_use: Option<FirstUse>) {
        if !self.opens.iter().any(|known| known.mention.param == *param) {
            self.opens.push(Opening { mention: Mention { param: param.clone(), bucket }, first_use });
        }
    }
}

fn mention(list: &mut Vec<Mention>, param: &Param, bucket: usize) {
    if !list.iter().rev().any(|known| known.param == *param) {
        list.push(Mention { param: param.clone(), bucket });
    }
}

impl Recorder for Recording<'_> {
    fn read(&mut self, param: &Param, stream: &Stream) -> Result<(), PgError> {
        // Noted first: whatever fails later, the read is known.
        let bucket = self.bucket(param);
        mention(&mut self.reads, param, bucket);
        match &self.buckets[bucket].publisher {
            // Branches that are behind such a gate already get no other.
            Some(publisher) if self.mode == GateMode::InGraph => {
                Ok(stream.wait_external(publisher.event(), Turn::READ_AFTER_PUBLISH)?)
            }
            _ => Ok(()),
        }
    }

    fn done(&mut self, param: &Param, stream: &Stream) -> Result<(), PgError> {
        self.mark(param, stream, |bucket| &mut bucket.released).map(drop)
    }

    fn open(&mut self, param: &Param, stream: &Stream) -> Result<Option<Keep>, PgError> {
        let (bucket, sink) = (self.bucket(param), param.landed_sink());
        let Some(sink) = sink else {
            self.opening(param, bucket, Some(FirstUse::Nobodys));
            return Ok(None);
        };
        if self.mode == GateMode::InGraph {
            let Bucket { first, free, .. } = &mut self.buckets[bucket];
            let event = free.get_or_insert_with(|| stream.device().event(&format!("graphcap.free.{}", first.name())));
            stream.wait_external(event, why::GRAD_AFTER_FREE)?;
        }
        let is_first = self.first_uses.insert(param.id(), param.downgrade()).is_none();
        let keep = if is_first { sink.first_use() } else { Keep::All };
        self.opening(param, bucket, is_first.then(|| FirstUse::of(&keep)));
        Ok(Some(keep))
    }

    fn landed(&mut self, param: &Param, stream: &Stream) -> Result<(), PgError> {
        let bucket = self.mark(param, stream, |bucket| &mut bucket.landed)?;
        self.landings.push(Mention { param: param.clone(), bucket });
        Ok(())
    }

    fn hand_over(&mut self, what: Arc<dyn HandOver>) -> Result<(), PgError> {
        self.hand_overs.push(what);
        Ok(())
    }
}

/// Gates that tell what has happened: recorded in every launch, each behind its marks.
#[derive(Default)]
pub(crate) struct OutGates {
    pub(crate) events: Vec<Event>,
    /// By bucket: the gate behind its last gradient.
    pub(crate) landed: Vec<Option<usize>>,
    /// By bucket: the gate behind its last read.
    pub(crate) released: Vec<Option<usize>>,
}

impl Recording<'_> {
    /// Adds the gates at the end of a capture: `gates` joins it, `origin` is behind them. A bucket whose gradients land
    /// behind its last read in every stream has one gate for both.
    pub(crate) fn add_out_gates(&self, origin: &Stream, gates: &Stream) -> Result<OutGates, device::Error> {
        let mut out = OutGates {
            events: Vec::new(),
            landed: vec![None; self.buckets.len()],
            released: vec![None; self.buckets.len()],
        };
        let mut wanted: Vec<(u64, usize, Kind)> = Vec::new();
        for (i, bucket) in self.buckets.iter().enumerate() {
            let last = |marks: &[Mark]| marks.iter().map(|mark| mark.at).max();
            wanted.extend(last(&bucket.landed).map(|at| (at, i, Kind::Landed)));
            let own = bucket.publisher.is_some() && !bucket.lands_behind_its_reads();
            wanted.extend(last(&bucket.released).filter(|_| own).map(|at| (at, i, Kind::Released)));
        }
        // One stream records them all: what is ready first is told first.
        wanted.sort_unstable_by_key(|(at, ..)| *at);
        for (_, i, kind) in &wanted {
            let bucket = &self.buckets[*i];
            let (marks, why) = kind.marks(bucket);
            marks.iter().try_for_each(|mark| gates.wait(&mark.event, why))?;
            let event = origin.device().event(&format!("graphcap.{}.{}", kind.name(), bucket.first.name()));
            gates.record_external(&event)?;
            out.events.push(event);
            let gate = out.events.len() - 1;
            kind.gates(&mut out)[*i] = Some(gate);
        }
        for (i, bucket) in self.buckets.iter().enumerate() {
            if out.released[i].is_none() && bucket.publisher.is_some() && !bucket.released.is_empty() {
                out.released[i] = out.landed[i];
            }
        }
        if !wanted.is_empty() {
            let end = origin.device().event("graphcap.gates");
            gates.record(&end)?;
            origin.wait(&end, why::END_AFTER_GATES)?;
        }
        Ok(out)
    }

    /// Everyone mentioned, each once.
    pub(crate) fn params(&self) -> Vec<Mention> {
        let mut seen = HashSet::new();
        let opens = self.opens.iter().map(|opening| &opening.mention);
        let all = self.reads.iter().chain(opens).chain(&self.landings);
        all.filter(|mention| seen.insert(mention.param.id())).cloned().collect()
    }
}

impl Bucket {
    fn lands_behind_its_reads(&self) -> bool {
        let behind = |read: &Mark| self.landed.iter().any(|mark| mark.stream == read.stream && mark.at >= read.at);
        self.released.iter().all(behind)
    }
}

#[derive(Clone, Copy)]
enum Kind {
    Landed,
    Released,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Landed => "landed",
            Kind::Released => "released",
        }
    }

    fn marks(self, bucket: &Bucket) -> (&[Mark], Why) {
        match self {
            Kind::Landed => (&bucket.landed, why::GATE_AFTER_LANDED),
            Kind::Released => (&bucket.released, why::GATE_AFTER_READ),
        }
    }

    fn gates(self, out: &mut OutGates) -> &mut Vec<Option<usize>> {
        match self {
            Kind::Landed => &mut out.landed,
            Kind::Released => &mut out.released,
        }
    }
}
