//! Planned memory for what a pass makes and forgets: a dry pass records the requests, an arena holds them all, and
//! every later pass gets the same addresses.

use std::{collections::HashMap, sync::Arc};

use crate::{DType, Error, MemoryKind, Shape, Stream, Trace, View, arena::FramePlan};

/// Hands out temporaries and saved tensors of one stream, in the order in which a program asks for them.
///
/// The same program runs three times: on the `dry` driver with [`Frame::recording`], whose trace tells when each
/// buffer is first and last used; then with [`Frame::planned`], pass after pass, each begun with
/// [`Frame::restart`]. Buffers whose uses do not meet share bytes, which is safe because one stream runs in order.
/// [`Frame::unplanned`] gives every request bytes of its own instead: the slow twin of a plan.
///
/// A planned buffer holds its values up to the last use that the dry pass made of it, and no longer: a program that
/// asks for the same buffers but reads one later than it did on `dry` reads the next tenant's values. What depends on
/// the driver (such as a read-back that only one of them makes) must therefore read memory of its own. Other streams
/// than the frame's are refused.
pub struct Frame {
    stream: Stream,
    name: String,
    /// By request. Without an arena, each is made when it is first asked for, and used again in later passes.
    views: Vec<View>,
    arena: Option<(Arc<FramePlan>, View)>,
    /// Requests of this pass so far.
    next: usize,
    saved: HashMap<SaveKey, View>,
    block: (u32, u32),
}

/// Block, microbatch slot, tag.
type SaveKey = (u32, u32, &'static str);

impl Frame {
    /// Records what is asked for, on a stream of the `dry` driver.
    pub fn recording(stream: &Stream, name: &str) -> Frame {
        Frame::unplanned(stream, name)
    }

    /// A buffer of its own for every request. The first pass allocates, later ones get the same addresses.
    pub fn unplanned(stream: &Stream, name: &str) -> Frame {
        Frame::new(stream, name, Vec::new(), None)
    }

    /// Buffers at the places of `plan`, in one arena that is allocated here.
    ///
    /// # Errors
    /// The device's sticky error.
    pub fn planned(stream: &Stream, plan: &Arc<FramePlan>) -> Result<Frame, Error> {
        let arena = Frame::shared_arena(stream, plan.name(), [&**plan])?;
        Frame::planned_in(&arena, stream, plan)
    }

    /// An arena for several kinds of pass that take turns on `stream`: as large as the largest of them needs.
    ///
    /// # Errors
    /// The device's sticky error.
    pub fn shared_arena<'p>(
        stream: &Stream,
        label: &str,
        plans: impl IntoIterator<Item = &'p FramePlan>,
    ) -> Result<View, Error> {
        let words = plans.into_iter().map(words).max().unwrap_or(0);
        let own = Some((stream.index(), stream.name().to_owned()));
        stream.device().alloc_for(label, &[words], DType::I32, MemoryKind::Arena, own)
    }

    /// Buffers at the places of `plan` in a [shared arena](Frame::shared_arena) of this stream. Whatever a pass leaves there
    /// lasts until a pass of another frame begins.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if the arena was made for smaller plans.
    pub fn planned_in(arena: &View, stream: &Stream, plan: &Arc<FramePlan>) -> Result<Frame, Error> {
        let arena = arena.flat(0..words(plan))?;
        let places = plan.places().iter();
        let views = places.map(|p| arena.carve(p.offset, p.shape, p.dtype)).collect();
        Ok(Frame::new(stream, plan.name(), views, Some((plan.clone(), arena))))
    }

    fn new(stream: &Stream, name: &str, views: Vec<View>, arena: Option<(Arc<FramePlan>, View)>) -> Frame {
        let (stream, name) = (stream.clone(), name.to_owned());
        Frame { stream, name, views, arena, next: 0, saved: HashMap::new(), block: (0, 0) }
    }

    /// The stream that all buffers belong to.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The arena, if the frame is planned: of a shared one as much as its plan needs.
    pub fn arena(&self) -> Option<&View> {
        self.arena.as_ref().map(|(_, view)| view)
    }

    /// Begins the next pass: what was saved is forgotten, requests start over.
    pub fn restart(&mut self) {
        self.next = 0;
        self.saved.clear();
        self.block = (0, 0);
    }

    /// What is saved from now on belongs to `block` and microbatch slot `slot`. Returns what to go back to.
    pub fn enter(&mut self, block: u32, slot: u32) -> (u32, u32) {
        std::mem::replace(&mut self.block, (block, slot))
    }

    /// A buffer that lives from its first use to its last. Holds anything before it is written.
    ///
    /// # Errors
    /// [`Error::PlanLeft`] when the plan has something else here; the device's sticky error.
    pub fn temp(&mut self, shape: &[usize], dtype: DType) -> Result<View, Error> {
        let at = self.next;
        let asked = Shape::new(shape).ok_or_else(|| Error::Reshape {
            label: self.name.clone(),
            from: Vec::new(),
            to: shape.to_vec(),
        })?;
        if at == self.views.len() && self.arena.is_none() {
            let label = format!("{}[{at}]", self.name);
            self.views.push(self.stream.device().alloc(&label, shape, dtype, MemoryKind::Arena)?);
        }
        let known = self.views.get(at);
        let view = known.filter(|v| v.shape() == shape && v.dtype() == dtype).cloned().ok_or_else(|| {
            let planned = known.map_or("nothing".into(), |v| format!("{:?} {}", v.shape_value(), v.dtype()));
            Error::PlanLeft { frame: self.name.clone(), request: at, planned, asked: format!("{asked} {dtype}") }
        })?;
        self.next += 1;
        Ok(view)
    }

    /// As [`Frame::temp`]; [`Frame::saved`] finds it again under `tag`, in the same block and slot.
    ///
    /// # Errors
    /// As [`Frame::temp`].
    pub fn save(&mut self, tag: &'static str, shape: &[usize], dtype: DType) -> Result<View, Error> {
        let view = self.temp(shape, dtype)?;
        self.keep(tag, &view);
        Ok(view)
    }

    /// Makes a view that is already there findable under `tag`, in the same block and slot.
    pub fn keep(&mut self, tag: &'static str, view: &View) {
        self.saved.insert((self.block.0, self.block.1, tag), view.clone());
    }

    /// What was saved under `tag` in this block and slot.
    ///
    /// # Errors
    /// [`Error::NotSaved`], with the tags there are.
    pub fn saved(&self, tag: &'static str) -> Result<View, Error> {
        let (block, slot) = self.block;
        self.saved.get(&(block, slot, tag)).cloned().ok_or_else(|| {
            let here = self.saved.keys().filter(|k| (k.0, k.1) == self.block);
            let mut saved: Vec<String> = here.map(|k| k.2.to_owned()).collect();
            saved.sort_unstable();
            Error::NotSaved { frame: self.name.clone(), tag: tag.to_owned(), saved }
        })
    }

    /// The plan of a recorded pass: `trace` is that of the dry machine, begun before the pass and ended after it.
    ///
    /// # Errors
    /// [`Error::PlannedElsewhere`] when another stream than the frame's touched a buffer.
    pub fn plan(&self, trace: &Trace) -> Result<FramePlan, Error> {
        match &self.arena {
            Some((plan, _)) => Ok((**plan).clone()),
            None => FramePlan::from_trace(&self.name, &self.stream, &self.views, trace),
        }
    }
}

/// Of an arena: whole ones, so that it can be read back as one view.
fn words(plan: &FramePlan) -> usize {
    plan.bytes().div_ceil(DType::I32.size_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Access, Exchange, Machine, Op, Reduce};

    #[test]
    fn planned_memory_is_refused_to_other_streams() {
        let dry = Machine::dry();
        dry.trace_start();
        let device = dry.device(0).expect("a device");
        let stream = device.stream("compute").expect("a stream");
        let mut frame = Frame::recording(&stream, "pass");
        let x = frame.temp(&[4], DType::F32).expect("a buffer");
        let touch = |view: &View| Op::host("touch", "test", vec![Access::write(view)], |_| Ok(()));
        stream.launch(touch(&x)).expect("its own stream");
        let plan = Arc::new(frame.plan(&dry.trace_stop()).expect("a plan"));

        let machine = Machine::cpu(1).expect("a worker");
        let device = machine.device(0).expect("a device");
        let (own, other) = (device.stream("compute").expect("a stream"), device.stream("copy").expect("a stream"));
        let x = Frame::planned(&own, &plan).and_then(|mut f| f.temp(&[4], DType::F32)).expect("a buffer");
        own.launch(touch(&x)).expect("its own stream");
        let refused = other.launch(touch(&x)).expect_err("another stream").to_string();
        assert!(refused.contains("'compute'") && refused.contains("'copy'"), "{refused}");
        // Also in what several ranks do together.
        let meeting = machine.meeting("tp", &[0], 0).expect("a group");
        let sum = |on: &Stream| on.joint(&meeting, Exchange::AllReduce(Reduce::Sum), "test", vec![Access::update(&x)]);
        assert!(matches!(sum(&other), Err(Error::PlannedElsewhere { .. })));
        let gather = (Exchange::AllReduce(Reduce::Max), vec![Access::update(&x)]);
        let all = other.joint_all(&meeting, "test", vec![gather]);
        assert!(matches!(all, Err(Error::PlannedElsewhere { .. })));
        sum(&own).expect("its own stream");
        device.synchronize().expect("no failure");
    }

    #[test]
    fn memory_that_is_not_there_is_an_error() {
        let machine = Machine::cpu(1).expect("a worker");
        let device = machine.device(0).expect("a device");
        let error = device.alloc("huge", &[1 << 50], DType::F32, MemoryKind::Other).expect_err("no such memory");
        assert_eq!(error.to_string(), format!("no memory for 'huge': {} bytes were asked for", 1u64 << 52));
    }
}
