//! What is checked while a program runs: conflicting accesses are ordered, reads find what was published.

use std::{
    collections::{HashMap, HashSet},
    ops::Range,
};

use device::{Label, Mode, Note, TraceAccess, TraceEvent};

use super::{
    cells::{Cells, Clash, Toucher},
    clock::Point,
    finding::{Finding, Race, Stale, StaleReason},
    notes::{Expected, overlap},
    order::{PassedDropped, Run, Step, Visitor},
    place::{OpAt, Places, accesses, shared},
    program::Program,
};

/// Told of every access, in an order that the trace's waits allow.
pub(super) struct Checks<'p, 't> {
    program: &'p Program<'t>,
    reads: &'p HashMap<u32, Expected>,
    limit: usize,
    cells: Cells,
    operations: u32,
    races: Vec<FoundRace>,
    told: HashSet<[Label; 5]>,
    stale: Vec<FoundStale>,
    told_stale: HashSet<Label>,
    repeats: u64,
}

/// A race.
pub(super) struct FoundRace {
    clash: Clash,
}

pub(super) struct FoundStale {
    note: u32,
    epoch: u64,
    bytes: Range<usize>,
    writer: Option<OpAt>,
}

impl<'p, 't> Checks<'p, 't> {
    pub(super) fn new(program: &'p Program<'t>, reads: &'p HashMap<u32, Expected>, limit: usize) -> Self {
        Checks {
            program,
            reads,
            limit,
            cells: Cells::default(),
            operations: 0,
            races: Vec::new(),
            told: HashSet::new(),
            stale: Vec::new(),
            told_stale: HashSet::new(),
            repeats: 0,
        }
    }

    pub(super) fn operations(&self) -> u64 {
        u64::from(self.operations)
    }

    /// Races, stale reads, and how many more there were like them.
    pub(super) fn take(&mut self) -> (Vec<FoundRace>, Vec<FoundStale>, u64) {
        (std::mem::take(&mut self.races), std::mem::take(&mut self.stale), self.repeats)
    }

    /// Kept once for each pair of operations at places in the model.
    fn clash(&mut self, clash: Clash) {
        let trace = self.program.trace;
        let of = |toucher: &Toucher| {
            let event = &trace.events[toucher.event as usize];
            let (name, site) = super::place::named(event, toucher.node);
            (name, site, accesses(event, toucher.node)[toucher.access as usize].label.clone())
        };
        let ((a, at_a, buffer), (b, at_b, _)) = (of(&clash.first), of(&clash.second));
        if self.races.len() < self.limit && self.told.insert([a, at_a, b, at_b, buffer]) {
            self.races.push(FoundRace { clash });
        } else {
            self.repeats += 1;
        }
    }
}

impl Visitor for Checks<'_, '_> {
    fn touch(&mut self, step: Step<'_>) {
        let order = self.operations;
        self.operations += 1;
        let incarnation = self.program.streams[step.stream as usize].incarnation;
        let event = &self.program.trace.events[step.event as usize];
        let mut clashes: Vec<Clash> = Vec::new();
        for (access, declared) in (0..).zip(accesses(event, step.node)) {
            let Some(cell) = self.cells.find(declared, incarnation) else { continue };
            let by = Toucher { epoch: step.point.at, event: step.event, node: step.node, order, access };
            self.cells.touch(cell, declared.mode, by, step.point, |clash| clashes.push(clash));
        }
        clashes.into_iter().for_each(|clash| self.clash(clash));
    }

    fn read(&mut self, step: Step<'_>) {
        let Some(expected) = self.reads.get(&step.event) else { return };
        let (Some(written), Some(issued)) = (&expected.written, expected.issued) else { return };
        let TraceEvent::Note { note, .. } = &self.program.trace.events[step.event as usize] else { return };
        let (Note::Read { param, regions, .. } | Note::Used { param, regions, .. }) = note else { return };
        let incarnation = self.program.streams[step.stream as usize].incarnation;
        for region in regions {
            let Some(cell) = self.cells.find(region, incarnation) else { continue };
            for (bytes, writer) in self.cells.writers(cell) {
                // Behind the publication, or this rank's own part of the write that it publishes.
                let fits = |event: u32, bytes: &Range<usize>| {
                    let part = device::Region::contiguous(bytes.start, bytes.len());
                    let part = TraceAccess { region: part, ..region.clone() };
                    event > issued || (event > expected.before && written.regions.iter().any(|own| overlap(own, &part)))
                };
                if writer.is_some_and(|writer| fits(writer.event, &bytes)) {
                    continue;
                }
                let writer = writer.map(|writer| OpAt { event: writer.event, node: writer.node });
                if self.stale.len() < self.limit && self.told_stale.insert(param.clone()) {
                    self.stale.push(FoundStale { note: step.event, epoch: written.epoch, bytes, writer });
                } else {
                    self.repeats += 1;
                }
            }
        }
    }
}

impl FoundStale {
    pub(super) fn told(self, places: &Places<'_>) -> Finding {
        let FoundStale { note, epoch, bytes, writer } = self;
        let (param, publisher) = match &places.trace.events[note as usize] {
            TraceEvent::Note { note: Note::Read { param, publisher, .. }, .. } => (param.clone(), publisher.clone()),
            TraceEvent::Note { note: Note::Used { param, .. }, .. } => (param.clone(), "a gather".into()),
            _ => unreachable!("BUG: only reads are stale"),
        };
        let writer = writer.map(|at| Box::new(places.op(at)));
        let reason = StaleReason::NotThere { epoch, bytes, writer };
        Finding::Stale(Stale { param, publisher, read: places.note(note), reason })
    }
}

/// What some operations are ordered behind: a second look, taken only when there are races.
pub(super) struct Behind {
    wanted: HashSet<OpAt>,
    points: HashMap<OpAt, Point>,
}

impl Behind {
    pub(super) fn of(races: &[FoundRace]) -> Behind {
        let ends = races.iter().flat_map(|race| [race.clash.first, race.clash.second]);
        Behind { wanted: ends.map(|end| OpAt { event: end.event, node: end.node }).collect(), points: HashMap::new() }
    }
}

impl Visitor for Behind {
    fn touch(&mut self, step: Step<'_>) {
        let at = OpAt { event: step.event, node: step.node };
        if self.wanted.contains(&at) {
            self.points.insert(at, step.point.clone());
        }
    }

    fn read(&mut self, _: Step<'_>) {}
}

/// Races with both operations named, in the order of submission, and the waits whose absence made them. Those that
/// have such waits come first.
pub(super) fn explain(races: Vec<FoundRace>, program: &Program<'_>, places: &Places<'_>) -> Vec<Finding> {
    if races.is_empty() {
        return Vec::new();
    }
    let mut run = Run::new(program, Behind::of(&races));
    run.run();
    let mut told: Vec<Race> = races.iter().map(|race| explain_one(race, &run, places)).collect();
    told.sort_by_key(|race| race.dropped.is_empty());
    told.into_iter().map(|race| Finding::Race(Box::new(race))).collect()
}

fn explain_one(race: &FoundRace, run: &Run<'_, '_, Behind>, places: &Places<'_>) -> Race {
    let mut ends = [race.clash.first, race.clash.second];
    ends.sort_by_key(|end| (end.event, end.node));
    let at = ends.map(|end| OpAt { event: end.event, node: end.node });
    let declared = |i: usize| -> &TraceAccess {
        &accesses(&places.trace.events[ends[i].event as usize], ends[i].node)[ends[i].access as usize]
    };
    let (a, b) = (declared(0), declared(1));
    // A dropped wait would have ordered the two if it lies before one of them, and what it was bound to behind the other.
    let orders = |passed: &PassedDropped, before: usize, behind: usize| {
        let on = run.program.dropped[passed.number as usize].on.and_then(|on| run.reached(on));
        let waits = run.visitor.points.get(&at[behind]).is_some_and(|point| point.is_behind(passed.at));
        waits && on.is_some_and(|on| on.is_behind(ends[before].epoch))
    };
    let mut dropped: Vec<Label> = Vec::new();
    for passed in run.passed.iter().filter(|passed| orders(passed, 0, 1) || orders(passed, 1, 0)) {
        let why = &run.program.dropped[passed.number as usize].why;
        if !dropped.contains(why) {
            dropped.push(why.clone());
        }
    }
    let [first, second] = at.map(|at| places.op(at));
    let modes: [Mode; 2] = [a.mode, b.mode];
    let bytes = shared(a.region, b.region);
    let (buffer, memory, allocation) = (a.label.clone(), a.kind, a.allocation);
    Race { first, second, modes, buffer, memory, allocation, bytes, dropped }
}
