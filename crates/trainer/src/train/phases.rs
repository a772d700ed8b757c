//! Where the time of a step goes, measured on the device's side: the host is ahead of it. The clock is read by host
//! functions, for each of which a card would stand still, so there it is not read; a timeline tells more.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use device::{Access, DType, Download, Error, Event, MemoryKind, Op, Reduce, Stream, View, Why};
use pgroups::{Group, Rank};

use crate::{PhaseTimes, Spread, TrainError};

/// What a rank does in a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    /// All forward passes, waits for gathered parameters included.
    Forward,
    /// All backward passes.
    Backward,
    /// From the end of the last backward pass to the end of the update: what is left of the reductions, norm, update.
    Update,
}

const PHASES: usize = 3;

/// Times of the step that is being submitted, and of the one before, whose update may still run.
pub(super) struct PhaseClock(Option<Laps>);

struct Laps {
    slots: [Slot; 2],
    at: usize,
    everyone: Group,
}

struct Slot {
    /// The end of the phase before.
    last: Arc<Mutex<Instant>>,
    /// f32 `[PHASES]`: of this rank.
    seconds: View,
    /// f32 `[2 * PHASES]`: the longest of all ranks, then the shortest, negated.
    spread: View,
    /// Behind the last backward pass.
    passed: Event,
}

/// The time of an update begins where the passes end.
const UPDATE_AFTER_PASSES: Why = Why("trainer.update_time_after_passes");

impl PhaseClock {
    /// `everyone` are all ranks; a communicator is opened here, on all of them.
    pub(super) fn alloc(rank: &Rank, everyone: &Group) -> Result<PhaseClock, TrainError> {
        let device = &rank.device;
        let slot = || -> Result<Slot, Error> {
            let alloc = |label, numel| device.alloc(label, &[numel], DType::F32, MemoryKind::Other);
            Ok(Slot {
                last: Arc::new(Mutex::new(Instant::now())),
                seconds: alloc("phases", PHASES)?,
                spread: alloc("phases.spread", 2 * PHASES)?,
                passed: device.event("passed"),
            })
        };
        if device.machine().driver() == "cuda" {
            return Ok(PhaseClock(None));
        }
        Ok(PhaseClock(Some(Laps { slots: [slot()?, slot()?], at: 0, everyone: everyone.second("phases")? })))
    }

    /// A step begins on `compute`. The results of the step before the last one are known.
    pub(super) fn begin(&mut self, compute: &Stream) -> Result<(), TrainError> {
        let Some(laps) = &mut self.0 else { return Ok(()) };
        laps.at = 1 - laps.at;
        let slot = &laps.slots[laps.at];
        let last = slot.last.clone();
        Ok(compute.launch(Op::host("begin_phases", "phases", vec![Access::write(&slot.seconds)], move |args| {
            args.write::<f32>(0)?.fill(0.0);
            *last.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
            Ok(())
        }))?)
    }

    /// What was submitted to `stream` since the phase before belongs to `phase`.
    pub(super) fn lap(&self, stream: &Stream, phase: Phase) -> Result<(), TrainError> {
        let Some(laps) = &self.0 else { return Ok(()) };
        let slot = &laps.slots[laps.at];
        let last = slot.last.clone();
        Ok(stream.launch(Op::host("end_phase", "phases", vec![Access::update(&slot.seconds)], move |args| {
            let now = Instant::now();
            let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
            args.write::<f32>(0)?[phase as usize] += now.duration_since(*last).as_secs_f32();
            *last = now;
            Ok(())
        }))?)
    }

    /// The last backward pass is submitted to `compute`.
    pub(super) fn passed(&self, compute: &Stream) -> Result<(), TrainError> {
        let Some(laps) = &self.0 else { return Ok(()) };
        Ok(compute.record(&laps.slots[laps.at].passed)?)
    }

    /// The update is submitted to `updates`. All ranks call it: their times meet there.
    pub(super) fn end(&self, updates: &Stream) -> Result<(), TrainError> {
        let Some(laps) = &self.0 else { return Ok(()) };
        let Slot { seconds, spread, passed, .. } = &laps.slots[laps.at];
        updates.wait(passed, UPDATE_AFTER_PASSES)?;
        self.lap(updates, Phase::Update)?;
        let accesses = vec![Access::read(seconds), Access::write(spread)];
        updates.launch(Op::host("spread", "phases", accesses, |args| {
            let (longest, shortest) = args.write::<f32>(1)?.split_at_mut(PHASES);
            for (i, &seconds) in args.read::<f32>(0)?.iter().enumerate() {
                (longest[i], shortest[i]) = (seconds, -seconds);
            }
            Ok(())
        }))?;
        Ok(laps.everyone.all_reduce(updates, spread, Reduce::Max)?)
    }

    /// What the last submitted step took.
    pub(super) fn download(&self, updates: &Stream) -> Result<Timed, Error> {
        let spread = self.0.as_ref().map(|laps| updates.download(&laps.slots[laps.at].spread));
        spread.transpose().map(Timed)
    }
}

/// Times on their way to the host, if any are.
pub(super) struct Timed(Option<Download<f32>>);

impl Timed {
    pub(super) fn wait(self) -> Result<PhaseTimes, Error> {
        let all = self.0.map_or_else(|| Ok(vec![f32::NAN; 2 * PHASES]), Download::wait)?;
        let of = |phase: Phase| Spread { slowest: all[phase as usize], fastest: -all[PHASES + phase as usize] };
        Ok(PhaseTimes { forward: of(Phase::Forward), backward: of(Phase::Backward), update: of(Phase::Update) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use device::{Fresh, Machine, Options};
    use pgroups::{Axis, Key, Layout, LayoutConfig, Needs, ProcessGroups};
    use std::{thread::sleep, time::Duration};

    fn work(stream: &Stream, on: &View, milliseconds: u64) -> Result<(), TrainError> {
        Ok(stream.launch(Op::host("work", "test", vec![Access::write(on)], move |_| {
            sleep(Duration::from_millis(milliseconds));
            Ok(())
        }))?)
    }

    #[test]
    fn phases_are_told_with_the_slowest_and_the_fastest_rank() {
        let key = || Key::over([Axis::DP]);
        let mut layout = LayoutConfig::parse("dp=2").unwrap();
        layout.world_size = Some(2);
        let layout = Layout::new(&layout).unwrap();
        let options = Options { fresh: Fresh::Poisoned, ..Options::default() };
        let machine = Machine::cpu_with(4, options).unwrap();
        // Two steps of two microbatches each; forward is rank 1's trouble. The second step is twice as long, and has no
        // update: what ends it must not begin before the passes end.
        let times = pgroups::local(&machine, 2, |rank| -> Result<_, TrainError> {
            let groups = ProcessGroups::build(&rank, &layout, &Needs::keys([key()]))?;
            let mut clock = PhaseClock::alloc(&rank, groups.get(&key(), "times")?)?;
            let (compute, updates) = (rank.device.stream("compute")?, rank.device.stream("updates")?);
            let alloc = |label| rank.device.alloc(label, &[1], DType::F32, MemoryKind::Other);
            let (x, y) = (alloc("x")?, alloc("y")?);
            let mut timed = Vec::new();
            for factor in [1, 2] {
                clock.begin(&compute)?;
                for _ in 0..2 {
                    work(&compute, &x, factor * if rank.global.0 == 0 { 10 } else { 40 })?;
                    clock.lap(&compute, Phase::Forward)?;
                    work(&compute, &x, factor * 20)?;
                    clock.lap(&compute, Phase::Backward)?;
                }
                clock.passed(&compute)?;
                if factor == 1 {
                    let laps = clock.0.as_ref().expect("a clock that is read");
                    updates.wait(&laps.slots[laps.at].passed, UPDATE_AFTER_PASSES)?;
                    work(&updates, &y, 30)?;
                }
                clock.end(&updates)?;
                timed.push(clock.download(&updates)?);
            }
            Ok(timed.into_iter().map(Timed::wait).collect::<Result<Vec<_>, _>>()?)
        });
        let times = times.unwrap();
        assert_eq!(times[0], times[1], "every rank knows the same");
        for (factor, PhaseTimes { forward, backward, update }) in [1.0f32, 2.0].into_iter().zip(&times[0]) {
            // Sleeps are never too short; how much too long they are is the machine's affair.
            let at_least = |seconds: f32, wanted: f32| seconds >= 0.999 * factor * wanted;
            assert!(at_least(forward.slowest, 0.08) && at_least(forward.fastest, 0.02), "{forward:?}");
            assert!(forward.slowest > forward.fastest + 0.02 * factor, "{forward:?}");
            assert!(at_least(backward.fastest, 0.04) && update.fastest > 0.0, "{backward:?} {update:?}");
            assert!(factor > 1.0 || at_least(update.fastest, 0.03), "{update:?}");
            assert!(backward.slowest >= backward.fastest && update.slowest >= update.fastest);
        }
    }
}
