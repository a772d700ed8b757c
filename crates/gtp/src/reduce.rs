//! Gradients of whole weights become sums of this rank's shards.

use device::{
    Stream, View,
    ops::{Accumulate, BiasGrad, Factor, Fill, Scale},
};
use pgroups::{Keep, Turn};

use crate::{
    GradSum, GtpError, WeightIndex,
    core::{Core, Spare, State},
    gather::open_run,
    omit::Record,
    run::{Next, OpenGrad},
    schedule::Step,
    why,
};

impl Core {
    /// Memory for the gradient of one use of a weight, writable by what is submitted to `stream` from now on.
    pub(crate) fn grad(&self, weight: WeightIndex, turn: &Turn<'_>, stream: &Stream) -> Result<View, GtpError> {
        let mut state = self.lock();
        self.enter(&mut state, turn, stream)?;
        let run = open_run(&mut state)?;
        if run.grads.iter().any(|open| open.weight == weight) {
            return Err(GtpError::GradOpen { param: self.weights[weight.0].param.name().to_owned() });
        }
        let next = run.advance(Step::Grad(weight), self)?;
        let open = match next {
            Next::Grad(attached, grad) => {
                let run = open_run(&mut state)?;
                for before in &attached.plan.grads()[grad.0].after {
                    let slot = &attached.grads[before.0];
                    // Of this graph the gradient itself is not reduced yet, but it was by an earlier launch.
                    if self.has_gates(run) && (*before == grad || !run.is_of_part(*before)) {
                        stream.wait_external(&slot.gate, why::GRAD_AFTER_REDUCE)?;
                    } else {
                        stream.wait(&slot.reduced, why::GRAD_AFTER_REDUCE)?;
                    }
                }
                let slot = &attached.grads[grad.0];
                let (written, reduced) = (slot.written.clone(), slot.reduced.clone());
                OpenGrad { weight, view: slot.view.clone(), written, reduced }
            }
            Next::Left => {
                self.left(&mut state);
                self.spare_grad(&mut state, weight, stream)?
            }
            _ => self.spare_grad(&mut state, weight, stream)?,
        };
        let known = &self.weights[weight.0];
        if let Some(padding) = known.padding(&open.view)? {
            // Peers sum it too, and it must stay nothing in the shard that holds it.
            stream.launch(Fill { y: &padding, value: 0.0 }.op("gtp.padding")?)?;
        }
        let view = known.logical(&open.view)?;
        open_run(&mut state)?.grads.push(open);
        Ok(view)
    }

    fn spare_grad(&self, state: &mut State, weight: WeightIndex, stream: &Stream) -> Result<OpenGrad, GtpError> {
        let spare: &mut Spare = state.spare.entry(weight).or_default();
        if spare.grad.is_none() {
            let dtype = self.weights[weight.0].param.main_grad().dtype();
            spare.grad = Some(self.spare_slot(weight, "grad", dtype, stream)?);
        }
        let slot = spare.grad.clone().expect("BUG: just made");
        stream.wait(&slot.read, why::GRAD_AFTER_REDUCE)?;
        Ok(OpenGrad { weight, view: slot.view, written: slot.filled, reduced: slot.read })
    }

    /// The gradient has been written by what was submitted to `stream` so far: sums it over the peers, adds this rank's
    /// part to the main gradient and then tells whoever waits for it.
    pub(crate) fn grad_done(&self, weight: WeightIndex, turn: &mut Turn<'_>, stream: &Stream) -> Result<(), GtpError> {
        let mut state = self.lock();
        let run = open_run(&mut state)?;
        let open = run.grads.iter().rposition(|open| open.weight == weight);
        let open = open.ok_or_else(|| self.not_open(weight, "has its gradient done"))?;
        let open = run.grads.remove(open);
        if let Next::Left = run.advance(Step::GradDone(weight), self)? {
            self.left(&mut state);
        }
        self.omitted.record(Record::Written, stream, &open.written)?;
        let axis = self.weights[weight.0].lane;
        let run = open_run(&mut state)?;
        if self.has_gates(run) && run.reduces_first(axis) {
            let lane = self.lane(&self.weights[weight.0]);
            lane.reduce.wait_external(&lane.reduce_gate, why::REDUCE_AFTER_REDUCE)?;
        }
        self.reduce(weight, &open, turn)?;
        state.counters.reduced += u64::from(!turn.is_recorded());
        self.over(&mut state);
        Ok(())
    }

    /// Everything on the lane's own stream, in order: nobody waits for it but who needs it.
    fn reduce(&self, weight: WeightIndex, open: &OpenGrad, turn: &mut Turn<'_>) -> Result<(), GtpError> {
        let known = &self.weights[weight.0];
        let (lane, param) = (self.lane(known), &known.param);
        let (on, full, shard) = (&lane.reduce, &open.view, param.numel());
        on.wait(&open.written, why::REDUCE_AFTER_GRAD)?;
        if let Some(factor) = lane.factor {
            on.launch(Scale { x: full, factor: Factor::Const(factor), y: full }.op("gtp.mean")?)?;
        }
        // f32 sums take everybody's pieces; the addition below then has as many rows.
        let arrived = match lane.sum {
            GradSum::Collective => {
                let sum = lane.arrivals.flat(0..shard)?;
                lane.reduced.reduce_scatter(on, full, &sum, device::Reduce::Sum)?;
                sum.reshape(&[1, shard])?
            }
            GradSum::F32 => {
                let pieces = lane.arrivals.flat(0..full.numel())?;
                lane.reduced.all_to_all(on, full, &pieces)?;
                pieces.reshape(&[full.numel() / shard, shard])?
            }
        };
        self.omitted.record(Record::Reduced, on, &open.reduced)?;
        let keep = turn.open(param, on)?.unwrap_or(Keep::All);
        let into = match &keep {
            Keep::All => Accumulate::Add,
            Keep::Times(flag) => Accumulate::Keep(flag),
        };
        let main = param.main_grad();
        let main = main.flat(0..shard)?;
        on.launch(BiasGrad { dy: &arrived, dbias: &main, into }.op("gtp.add")?)?;
        if self.omitted.does(Record::Landed) {
            turn.landed(param, on)?;
        }
        Ok(())
    }
}
