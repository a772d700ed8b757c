//! The loss on text that is not trained on.

use std::sync::Arc;

use data::{Corpus, Part, SampleId, Windows};
use device::ops::{Cast, Factor, Fill, IGNORE, Sum};
use device::{DType, Frame, FramePlan, MemoryKind, Reduce, Stream, View};
use graphcap::{CaptureCost, GraphConfig, Scope};
use gtp::PassKind;
use model::Microbatch;
use pgroups::{Group, Key, Pass, Rank, Turn};

use super::{
    eval_graphs::EvalGraphs,
    rank::{RankRun, aside},
    stop::Signal,
};
use crate::{Config, TrainError};

/// Which sequences are read in which pass of which rank: a pure function of its four numbers.
///
/// Passes are counted over all ranks and dealt out in turn, so that a pass reads the same sequences whatever the
/// number of ranks. The last one that reads anything may be part empty, and ranks may have passes that read nothing:
/// they run all the same, because all ranks run the same program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EvalPlan {
    /// Sequences that the part has.
    available: u64,
    /// Sequences that are read.
    samples: u64,
    /// Sequences in a pass.
    micro_batch: u64,
    /// Ranks that read distinct data.
    ranks: u64,
}

impl EvalPlan {
    pub(super) fn new(config: &Config, available: u64) -> EvalPlan {
        let wanted = config.train.eval_samples;
        EvalPlan {
            available,
            samples: if wanted == 0 { available } else { wanted.min(available) },
            micro_batch: config.train.micro_batch,
            ranks: config.layout.data_ranks(),
        }
    }

    /// Passes of every rank.
    fn passes(&self) -> u64 {
        self.samples.div_ceil(self.micro_batch).div_ceil(self.ranks)
    }

    /// Place of a rank's pass among all ranks' passes.
    fn place(&self, rank: u64, pass: u64) -> u64 {
        pass * self.ranks + rank
    }

    /// The sequences of the pass at `place`.
    fn ids(&self, place: u64) -> impl ExactSizeIterator<Item = SampleId> + use<> {
        let EvalPlan { available, samples, micro_batch, .. } = *self;
        let end = |place: u64| (place * micro_batch).min(samples) as usize;
        // Spread over the part: its beginning need not be like the rest.
        (end(place)..end(place + 1)).map(move |i| SampleId((i as u128 * available as u128 / samples as u128) as u64))
    }
}

/// One rank's part in evaluations.
pub(super) struct Evaluator {
    plan: EvalPlan,
    windows: Windows,
    rank: u64,
    seq_len: usize,
    /// Forward passes only: what backward would read is not kept.
    pub(super) frame: Frame,
    losses: PassLosses,
    graphs: Option<EvalGraphs>,
}

impl Evaluator {
    /// For a run that evaluates. Without a frame plan the frame records.
    pub(super) fn open(
        run: &RankRun,
        rank: &Rank,
        config: &Config,
        windows: Windows,
        frame: Option<&Arc<FramePlan>>,
    ) -> Result<Evaluator, TrainError> {
        let plan = EvalPlan::new(config, windows.samples());
        let data = run.groups.get(&Key::DP_CP_GTP, "evaluation")?;
        let slots = (plan.passes() * plan.ranks) as usize;
        Ok(Evaluator {
            plan,
            windows,
            rank: u64::from(data.place().0),
            seq_len: config.model.seq_len,
            frame: run.frame_of("eval", frame)?,
            losses: PassLosses::alloc(rank, data, slots)?,
            graphs: None,
        })
    }

    /// Captures what later passes replay. All ranks call it, where training's graphs are captured: with no collective
    /// under way.
    pub(super) fn capture(&mut self, run: &mut RankRun, config: &Config) -> Result<(), TrainError> {
        let Some(scope) = config.graph.scope() else { return Ok(()) };
        let _span = tracing::info_span!("trainer.capture_eval_graphs", %scope).entered();
        run.meet()?;
        let (tokens, targets) = (&run.tokens().clone(), &run.targets().clone());
        let loss = &self.losses.pass;
        let microbatch = Microbatch { tokens, targets, loss, token_scale: Factor::Const(1.0), slot: 0 };
        let set = GraphConfig {
            gates: config.graph.gate_mode(),
            order: config.graph.node_order(),
            ..GraphConfig::new(if scope == Scope::Layer { Scope::Layer } else { Scope::Chunk })
        };
        self.graphs = Some(EvalGraphs::capture(set, (&run.model, &mut run.gtp), &mut self.frame, &microbatch)?);
        run.meet()
    }

    /// What the capture has taken; none without graphs.
    pub(super) fn capture_cost(&self) -> Option<CaptureCost> {
        self.graphs.as_ref()?.cost()
    }

    /// Submits one evaluation of the weights as they are then. All ranks call it. `asked` is called before each pass; if
    /// it knows of a signal, which must be so on all ranks before the same pass, the evaluation ends there, without a
    /// loss.
    pub(super) fn submit(
        &mut self,
        run: &mut RankRun,
        mut asked: impl FnMut(&RankRun) -> Result<Option<Signal>, TrainError>,
    ) -> Result<Option<Signal>, TrainError> {
        let _span = tracing::info_span!("trainer.evaluate_model", samples = self.plan.samples).entered();
        let stream = &run.stream.clone();
        self.losses.begin(stream)?;
        for pass in 0..self.plan.passes() {
            if let Some(signal) = asked(run)? {
                return Ok(Some(signal));
            }
            let place = self.plan.place(self.rank, pass);
            let (tokens, targets) = self.read(place)?;
            stream.upload(run.tokens(), tokens)?;
            stream.upload(run.targets(), targets)?;
            let loss = self.losses.of(place as usize)?;
            if let Some(graphs) = &self.graphs {
                graphs.replay(stream, &run.gtp)?;
                stream.launch(Cast { x: &self.losses.pass, y: &loss }.op("eval")?)?;
                continue;
            }
            let microbatch = Microbatch {
                tokens: &run.tokens().clone(),
                targets: &run.targets().clone(),
                loss: &loss,
                token_scale: Factor::Const(1.0),
                slot: 0,
            };
            let mut aside = aside(&self.frame, pass as usize);
            let frame = aside.as_mut().unwrap_or(&mut self.frame);
            frame.restart();
            let mut weights = run.gtp.pass(PassKind::EVAL, Turn::eager(Pass::Forward))?;
            run.model.forward_loss(frame, &mut weights, &microbatch)?;
            weights.finish()?;
        }
        // A pass gives its sum over all its places divided by their number, empty ones included.
        let places = self.plan.micro_batch * self.seq_len as u64;
        let counted = self.plan.samples * self.seq_len as u64;
        self.losses.finish(stream, places as f64 / counted as f64)?;
        Ok(None)
    }

    /// f32 `[1]`: mean over all sequences of the last evaluation, in nats per token.
    pub(super) fn loss(&self) -> &View {
        &self.losses.mean
    }

    /// Inputs and targets of a pass; empty places have targets that do not count.
    fn read(&self, place: u64) -> Result<(Vec<i32>, Vec<i32>), TrainError> {
        let places = self.plan.micro_batch as usize * self.seq_len;
        let (mut inputs, mut targets) = (Vec::with_capacity(places), Vec::with_capacity(places));
        for id in self.plan.ids(place) {
            inputs.extend(self.windows.window(id)?.take(self.seq_len));
            targets.extend(self.windows.window(id)?.skip(1));
        }
        inputs.resize(places, 0);
        targets.resize(places, IGNORE);
        Ok((inputs, targets))
    }
}

/// The eval part as windows, if the configuration asks for evaluation.
///
/// # Errors
/// Too little text, with what is needed.
pub(super) fn eval_windows(config: &Config, corpus: &Corpus) -> Result<Option<Windows>, TrainError> {
    let wanted = config.train.eval_interval > 0;
    Ok(wanted.then(|| corpus.windows(Part::Eval, config.model.seq_len)).transpose()?)
}

/// One loss for each pass of each rank. The ranks' losses meet in one vector, where each rank has written its own
/// places and zeros elsewhere: the sum over ranks is exact, and what follows does not depend on their number.
struct PassLosses {
    /// f32 `[passes of all ranks]`.
    slots: View,
    /// f32 `[1]`: where a captured pass leaves its loss.
    pass: View,
    /// f32 `[1]`.
    mean: View,
    /// Everyone who reads data of their own: a mean over replicas only would leave the shard peers' samples out.
    data: Group,
}

impl PassLosses {
    fn alloc(rank: &Rank, data: &Group, slots: usize) -> Result<PassLosses, TrainError> {
        let alloc = |label: &str, numel| rank.device.alloc(label, &[numel], DType::F32, MemoryKind::Other);
        let (slots, pass) = (alloc("eval.losses", slots)?, alloc("eval.pass_loss", 1)?);
        Ok(PassLosses { slots, pass, mean: alloc("eval.loss", 1)?, data: data.clone() })
    }

    fn begin(&self, stream: &Stream) -> Result<(), TrainError> {
        Ok(stream.launch(Fill { y: &self.slots, value: 0.0 }.op("eval")?)?)
    }

    fn of(&self, place: usize) -> Result<View, TrainError> {
        Ok(self.slots.flat(place..place + 1)?)
    }

    /// mean = factor · the sum of all slots of all ranks.
    fn finish(&self, stream: &Stream, factor: f64) -> Result<(), TrainError> {
        self.data.all_reduce(stream, &self.slots, Reduce::Sum)?;
        let sum = Sum { x: &self.slots, factor: Factor::Const(factor as f32), total: &self.mean };
        Ok(stream.launch(sum.op("eval")?)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use device::Machine;
    use pgroups::{Layout, LayoutConfig, Needs, ProcessGroups};
    use proptest::prelude::*;

    /// What every rank has as mean if rank `r` brings `losses[r]`, one sample each.
    fn mean_over(layout: &str, losses: &[f32]) -> Vec<f32> {
        let mut config = LayoutConfig::parse(layout).unwrap();
        config.world_size = Some(losses.len() as u32);
        let layout = Layout::new(&config).unwrap();
        pgroups::local(&Machine::sim(2), losses.len() as u32, |rank| -> Result<_, TrainError> {
            let groups = ProcessGroups::build(&rank, &layout, &Needs::keys([Key::DP_CP_GTP]))?;
            let data = groups.get(&Key::DP_CP_GTP, "evaluation")?;
            let stream = rank.device.stream("compute")?;
            let all = PassLosses::alloc(&rank, data, data.size() as usize)?;
            all.begin(&stream)?;
            stream.upload(&all.of(data.place().index())?, vec![losses[rank.global.0 as usize]])?;
            all.finish(&stream, 1.0 / f64::from(data.size()))?;
            Ok(stream.download::<f32>(&all.mean)?.wait()?[0])
        })
        .unwrap()
    }

    #[test]
    fn the_mean_is_over_everyone_who_read_other_samples_not_over_replicas() {
        // Over replicas only, ranks 0 and 2 would have 2.0, ranks 1 and 3 would have 3.0.
        assert_eq!(mean_over("gtp=2,dp=2", &[1.0, 2.0, 3.0, 4.0]), [2.5; 4]);
        // Tensor-parallel peers read the same samples.
        assert_eq!(mean_over("tp=2,dp=2", &[1.0, 1.0, 3.0, 3.0]), [2.0; 4]);
    }

    #[test]
    fn samples_are_spread_over_the_part_and_dealt_out_in_turn() {
        let plan = EvalPlan { available: 30, samples: 7, micro_batch: 2, ranks: 3 };
        let ids = |rank, pass| plan.ids(plan.place(rank, pass)).map(|id| id.0).collect::<Vec<_>>();
        assert_eq!(plan.passes(), 2);
        assert_eq!([ids(0, 0), ids(1, 0), ids(2, 0)], [vec![0, 4], vec![8, 12], vec![17, 21]]);
        // Seven samples for three ranks: one more sample for rank 0, nothing for the others.
        assert_eq!([ids(0, 1), ids(1, 1), ids(2, 1)], [vec![25], vec![], vec![]]);
    }

    proptest! {
        #[test]
        fn every_sample_is_read_once_in_an_order_that_ranks_do_not_change(
            available in 1u64..200, wanted in 1u64..200, micro_batch in 1u64..9, ranks in 1u64..9,
        ) {
            let plan = EvalPlan { available, samples: wanted.min(available), micro_batch, ranks };
            let alone = EvalPlan { ranks: 1, ..plan };
            let all = |plan: EvalPlan| (0..plan.passes() * plan.ranks).flat_map(move |place| plan.ids(place).collect::<Vec<_>>());
            prop_assert!(all(plan).eq(all(alone)));
            let ids: Vec<u64> = all(plan).map(|id| id.0).collect();
            prop_assert_eq!(ids.len() as u64, plan.samples);
            prop_assert!(ids.is_sorted_by(|a, b| a < b) && ids.iter().all(|id| *id < available));
        }
    }
}
