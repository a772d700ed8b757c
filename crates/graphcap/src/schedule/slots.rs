//! Memory of sample inputs.
//!
//! A captured graph reads its inputs at fixed addresses. A graph belongs to a (chunk, layer, microbatch), but
//! microbatches that are never in flight together can have the same addresses: from a forward to the end of its
//! backward a sample input owns a *slot*, then the slot is free for the next forward with the same signature. So a
//! step of any number of microbatches needs as many slots as are in flight at once: with equal signatures and `l`
//! layers a chunk, `l` times (warm-up + 1).

use std::{
    collections::{HashMap, VecDeque},
    fmt,
    hash::Hash,
    ops::RangeInclusive,
};

use super::{
    error::ScheduleError,
    index::{ChunkIndex, LayerIndex, MicrobatchIndex},
    layers::LayerOrder,
    steps::{Direction, Schedule},
};

/// A slot. Slots count from 0 in the order in which entries first name them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SlotIndex(pub u32);

impl fmt::Display for SlotIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "slot {}", self.0)
    }
}

/// The sample inputs of one graph.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SlotEntry {
    /// The chunk.
    pub chunk: ChunkIndex,
    /// The microbatch.
    pub microbatch: MicrobatchIndex,
    /// The layer, counted inside the chunk.
    pub layer: LayerIndex,
    /// Where they lie.
    pub slot: SlotIndex,
    /// The steps during which they own the slot, as places in the order that was planned for: from their forward to
    /// the last step that reads them.
    pub live: RangeInclusive<usize>,
}

/// Who has which slot.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SlotPlan {
    /// By chunk, then microbatch, then layer.
    entries: Vec<SlotEntry>,
    shape: Shape,
    distinct: usize,
}

impl SlotPlan {
    /// Slots for graphs that run chunk by chunk: all layers of a chunk give up their slots with its backward.
    /// `signatures` are those of each layer of each chunk; equal ones can share.
    ///
    /// # Errors
    /// [`ScheduleError::ChunkCount`] unless there is one list a chunk.
    ///
    /// Source: Megatron-LM, `transformer/cuda_graphs.py`, `_get_sample_arguments`.
    pub fn by_chunk<S: Eq + Hash>(schedule: &Schedule, signatures: &[Vec<S>]) -> Result<SlotPlan, ScheduleError> {
        if signatures.len() != schedule.chunks() {
            return Err(ScheduleError::ChunkCount { given: signatures.len(), chunks: schedule.chunks() });
        }
        let layers = signatures.iter().map(|chunk| chunk.len() as u32).collect();
        let mut desk = Desk::new(Shape::new(layers, schedule.microbatches()), signatures);
        let last = if schedule.is_forward_only() { Last::Forward } else { Last::Backward };
        for (at, step) in schedule.steps().iter().enumerate() {
            let graphs = desk.shape.layers_of(step.chunk, step.microbatch);
            desk.pass(at, graphs, step.direction, last);
        }
        Ok(desk.plan())
    }

    /// Slots for graphs that run layer by layer: each layer gives its slot up with its own last step, the weight
    /// gradients if backward comes in two parts, since they read the inputs too.
    ///
    /// # Errors
    /// [`ScheduleError::ChunkCount`] unless there is one list a chunk, [`ScheduleError::SignatureCount`] unless it has
    /// one signature a layer.
    pub fn by_layer<S: Eq + Hash>(order: &LayerOrder, signatures: &[Vec<S>]) -> Result<SlotPlan, ScheduleError> {
        let layers = order.layers();
        if signatures.len() != layers.len() {
            return Err(ScheduleError::ChunkCount { given: signatures.len(), chunks: layers.len() });
        }
        for (chunk, (&layers, given)) in (0..).map(ChunkIndex).zip(layers.iter().zip(signatures)) {
            let (layers, given) = (layers as usize, given.len());
            if layers != given {
                return Err(ScheduleError::SignatureCount { chunk, layers, given });
            }
        }
        let mut desk = Desk::new(Shape::new(layers.to_vec(), order.microbatches()), signatures);
        let forward_only = order.steps().iter().all(|step| step.direction == Direction::Forward);
        let last = if forward_only { Last::Forward } else { Last::Backward };
        for (at, step) in order.steps().iter().enumerate() {
            let graph = desk.shape.at(step.chunk, step.microbatch, step.layer);
            desk.pass(at, graph..graph + 1, step.direction, last);
        }
        Ok(desk.plan())
    }

    /// By chunk, then microbatch, then layer.
    #[must_use]
    pub fn entries(&self) -> &[SlotEntry] {
        &self.entries
    }

    /// The entry of one graph; none beyond the last of either.
    #[must_use]
    pub fn entry(&self, chunk: ChunkIndex, microbatch: MicrobatchIndex, layer: LayerIndex) -> Option<&SlotEntry> {
        let known = self.shape.contains(chunk, microbatch, layer);
        known.then(|| &self.entries[self.shape.at(chunk, microbatch, layer)])
    }

    /// Number of slots.
    #[must_use]
    pub fn distinct(&self) -> usize {
        self.distinct
    }
}

/// Entries by chunk, then microbatch, then layer.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Shape {
    layers: Vec<u32>,
    microbatches: Vec<u32>,
    /// By chunk: entries before it.
    first: Vec<usize>,
    entries: usize,
}

impl Shape {
    fn new(layers: Vec<u32>, microbatches: &[u32]) -> Shape {
        let mut entries = 0;
        let mut first = Vec::with_capacity(layers.len());
        for (&layers, &microbatches) in layers.iter().zip(microbatches) {
            first.push(entries);
            entries += layers as usize * microbatches as usize;
        }
        Shape { layers, microbatches: microbatches.to_vec(), first, entries }
    }

    fn contains(&self, chunk: ChunkIndex, microbatch: MicrobatchIndex, layer: LayerIndex) -> bool {
        let chunk = chunk.index();
        self.microbatches.get(chunk).is_some_and(|&n| microbatch.0 < n) && layer.0 < self.layers[chunk]
    }

    fn at(&self, chunk: ChunkIndex, microbatch: MicrobatchIndex, layer: LayerIndex) -> usize {
        let layers = self.layers[chunk.index()] as usize;
        self.first[chunk.index()] + microbatch.index() * layers + layer.index()
    }

    fn layers_of(&self, chunk: ChunkIndex, microbatch: MicrobatchIndex) -> std::ops::Range<usize> {
        let first = self.at(chunk, microbatch, LayerIndex(0));
        first..first + self.layers[chunk.index()] as usize
    }

    /// Chunk, microbatch and layer of every entry.
    fn graphs(&self) -> impl Iterator<Item = (ChunkIndex, MicrobatchIndex, LayerIndex)> + '_ {
        self.layers.iter().zip(&self.microbatches).zip(0..).flat_map(|((&layers, &microbatches), chunk)| {
            let graphs = move |mb| (0..layers).map(move |l| (ChunkIndex(chunk), MicrobatchIndex(mb), LayerIndex(l)));
            (0..microbatches).flat_map(graphs)
        })
    }
}

/// Which step is the last to read a sample input.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Last {
    Forward,
    Backward,
}

/// Hands slots out: the longest free one of a signature first, a new one if none is free.
struct Desk {
    shape: Shape,
    /// By entry: which of the different signatures.
    signature: Vec<usize>,
    /// By signature.
    free: Vec<VecDeque<usize>>,
    made: usize,
    /// By entry: slot in the order of making, first and last step.
    held: Vec<Option<(usize, usize, usize)>>,
}

impl Desk {
    fn new<S: Eq + Hash>(shape: Shape, signatures: &[Vec<S>]) -> Desk {
        let mut known: HashMap<&S, usize> = HashMap::new();
        let mut number = |chunk: ChunkIndex, layer: LayerIndex| {
            let next = known.len();
            *known.entry(&signatures[chunk.index()][layer.index()]).or_insert(next)
        };
        let signature = shape.graphs().map(|(chunk, _, layer)| number(chunk, layer)).collect();
        let free = vec![VecDeque::new(); known.len()];
        let held = vec![None; shape.entries];
        Desk { shape, signature, free, made: 0, held }
    }

    fn pass(&mut self, at: usize, graphs: std::ops::Range<usize>, direction: Direction, last: Last) {
        if direction == Direction::Forward {
            graphs.clone().for_each(|graph| self.take(at, graph));
        }
        if direction.is_last() || last == Last::Forward {
            graphs.for_each(|graph| self.give_back(at, graph));
        }
    }

    fn take(&mut self, at: usize, graph: usize) {
        let slot = self.free[self.signature[graph]].pop_front().unwrap_or_else(|| {
            self.made += 1;
            self.made - 1
        });
        self.held[graph] = Some((slot, at, at));
    }

    fn give_back(&mut self, at: usize, graph: usize) {
        let (slot, _, last) = self.held[graph].as_mut().expect("BUG: a schedule runs backward without forward");
        *last = at;
        self.free[self.signature[graph]].push_back(*slot);
    }

    fn plan(self) -> SlotPlan {
        let mut numbers: Vec<Option<u32>> = vec![None; self.made];
        let mut next = 0;
        let mut entries = Vec::with_capacity(self.shape.entries);
        for ((chunk, microbatch, layer), held) in self.shape.graphs().zip(&self.held) {
            let (slot, first, last) = held.expect("BUG: a schedule leaves a microbatch out");
            let slot = *numbers[slot].get_or_insert_with(|| {
                next += 1;
                next - 1
            });
            entries.push(SlotEntry { chunk, microbatch, layer, slot: SlotIndex(slot), live: first..=last });
        }
        SlotPlan { entries, shape: self.shape, distinct: self.made }
    }
}
