//! A recomputed block is the twin of one that keeps.

use std::{collections::HashMap, num::NonZeroUsize};

use device::{
    DType, Frame, Fresh, Machine, MemoryKind, Options, Stream, View,
    ops::{Axpy, Factor, Fill, Scale},
};
use model::{Block, GptConfig, GptPlan, Microbatch, ModelError, Recompute, RecomputeLayers};
use pgroups::{GradOut, Keep, Param, Pass, PgError, Recorder, Turn, Weights};

use crate::{
    rig::{Case, Layout, Results, Rig, cut, cut_llama, tiny, tiny_llama, values},
    twins::{differing, inputs},
};

fn poisoned(workers: u32) -> Machine {
    Machine::cpu_with(workers as usize, Options { fresh: Fresh::Poisoned, ..Options::default() }).unwrap()
}

fn every(n: usize) -> RecomputeLayers {
    RecomputeLayers::Every(NonZeroUsize::new(n).unwrap())
}

#[test]
fn losses_and_gradients_have_the_bits_of_keeping_everything() {
    let three = |config| GptConfig { layers: 3, ..config };
    for (config, len, batch) in
        [(three(tiny()), 7, 2), (three(tiny_llama()), 5, 3), (cut(), 129, 2), (cut_llama(), 129, 2)]
    {
        let values = values(&GptPlan::new(config.clone()).unwrap(), 21);
        let microbatches = [inputs(&config, batch * len, 1), inputs(&config, batch * len, 5)];
        let case =
            |recompute| Case { config: config.clone(), values: &values, microbatches: &microbatches, len, recompute };
        let [kept, through_scratch] = [Layout::Main, Layout::Scratch]
            .map(|layout| case(RecomputeLayers::None).run(&Machine::cpu(2).unwrap(), layout));
        for which in [RecomputeLayers::All, every(2), RecomputeLayers::These(vec![1])] {
            let case = case(which.clone());
            let plan = case.plan();
            for machine in [poisoned(1), poisoned(2)] {
                let again = case.run_in(&machine, Layout::Main, Some(&plan));
                assert_eq!(differing(&kept, &again), [""; 0], "{which:?}");
            }
            let again = case.run_in(&Machine::sim(3), Layout::Scratch, Some(&plan));
            assert_eq!(differing(&through_scratch, &again), [""; 0], "sim, {which:?}");
        }
    }
}

#[test]
fn layers_are_chosen_by_number_from_the_first() {
    let chosen = |which: RecomputeLayers| (0..7).filter(|layer| which.contains(*layer)).collect::<Vec<_>>();
    assert_eq!(chosen(RecomputeLayers::None), [0; 0]);
    assert_eq!(chosen(RecomputeLayers::All), [0, 1, 2, 3, 4, 5, 6]);
    assert_eq!(chosen(every(3)), [0, 3, 6]);
    assert_eq!(chosen(every(1)), [0, 1, 2, 3, 4, 5, 6]);
    assert_eq!(chosen(RecomputeLayers::These(vec![5, 2])), [2, 5]);
}

/// Loss and gradients of one microbatch over `blocks`, the weights' gradients in the order of `order` behind all
/// inputs'.
fn drive(rig: &Rig, blocks: &[Box<dyn Block>], order: &[usize]) -> Results {
    let (tokens, targets) = inputs(rig.plan.config(), 2 * 7, 9);
    let (tokens, targets) = (rig.ids("tokens", &tokens, 7), rig.ids("targets", &targets, 7));
    let mut f = Frame::unplanned(&rig.stream, "frame");
    rig.set_keep(0.0);
    let mut w = rig.weights(Layout::Main, Pass::Forward);
    let mut x = tokens.clone();
    for (at, block) in blocks.iter().enumerate() {
        f.enter(at as u32, 5);
        x = block.forward(&mut f, &mut w, &x).unwrap();
    }
    let token_scale = Factor::Const(1.0 / 14.0);
    let m = Microbatch { tokens: &tokens, targets: &targets, loss: &rig.loss, token_scale, slot: 5 };
    rig.gpt.loss(&mut f, &w, &m, &x).unwrap();
    w.settled();
    let mut w = rig.weights(Layout::Main, Pass::Backward);
    let mut dy = Some(x);
    for (at, block) in blocks.iter().enumerate().rev() {
        f.enter(at as u32, 5);
        dy = block.backward_input(&mut f, &mut w, &dy.unwrap()).unwrap();
    }
    assert!(dy.is_none(), "tokens have no gradient");
    for at in order {
        f.enter(*at as u32, 5);
        blocks[*at].backward_weight(&mut f, &mut w).unwrap();
    }
    w.settled();
    let (loss, gradients) = rig.results();
    (vec![loss], gradients)
}

#[test]
fn embedding_head_and_blocks_can_all_be_wrapped_and_wrapped_again_and_weights_may_come_later() {
    for config in [tiny(), tiny_llama()] {
        let values = values(&GptPlan::new(config.clone()).unwrap(), 3);
        let rig = Rig::new(&poisoned(2), config, Some(&values));
        let blocks = || rig.plan.build(&rig.params).unwrap().into_blocks();
        let wrap = |blocks: Vec<Box<dyn Block>>| -> Vec<Box<dyn Block>> {
            blocks.into_iter().map(|block| Box::new(Recompute::new(block)) as Box<dyn Block>).collect()
        };
        let kept = drive(&rig, &blocks(), &[3, 2, 1, 0]);
        assert!(kept.0[0].is_finite());
        for order in [[3, 2, 1, 0], [3, 0, 2, 1], [1, 3, 2, 0]] {
            assert_eq!(differing(&kept, &drive(&rig, &wrap(blocks()), &order)), [""; 0], "{order:?}");
        }
        assert_eq!(differing(&kept, &drive(&rig, &wrap(wrap(blocks())), &[3, 2, 1, 0])), [""; 0]);
    }
}

#[test]
fn what_a_recomputed_block_forgot_is_not_found() {
    let values = values(&GptPlan::new(tiny()).unwrap(), 3);
    let rig = Rig::recomputing(&poisoned(1), tiny(), Some(&values), &RecomputeLayers::All);
    let (tokens, targets) = inputs(&tiny(), 14, 9);
    let (tokens, targets) = (rig.ids("tokens", &tokens, 7), rig.ids("targets", &targets, 7));
    let mut f = Frame::unplanned(&rig.stream, "frame");
    let mut w = rig.weights(Layout::Main, Pass::Forward);
    let token_scale = Factor::Const(1.0);
    let m = Microbatch { tokens: &tokens, targets: &targets, loss: &rig.loss, token_scale, slot: 0 };
    rig.gpt.forward_loss(&mut f, &mut w, &m).unwrap();
    f.enter(1, 0);
    let dy = rig.device.alloc("dy", &[2, 7, 6], DType::F32, MemoryKind::Other).unwrap();
    let kept = rig.plan.build(&rig.params).unwrap();
    let error = kept.blocks()[1].backward_input(&mut f, &mut w, &dy).unwrap_err();
    assert!(matches!(error, ModelError::Device(device::Error::NotSaved { .. })), "{error}");
    // What was kept of it is enough for the wrapper.
    rig.gpt.blocks()[1].backward_input(&mut f, &mut w, &dy).unwrap();
}

/// Weights as sharded layouts hand them out: a fresh copy for each use, in memory that is NaN again once it is given
/// back, and gradients through scratch.
struct Gathers<'a> {
    rig: &'a Rig,
    turn: Turn<'a>,
    /// Every take with its pass.
    takes: Vec<(Pass, String)>,
    out: HashMap<String, View>,
    scratch: HashMap<String, View>,
}

impl Gathers<'_> {
    fn new<'a>(rig: &'a Rig, turn: Turn<'a>) -> Gathers<'a> {
        Gathers { rig, turn, takes: Vec::new(), out: HashMap::new(), scratch: HashMap::new() }
    }

    fn like(&self, p: &Param, kind: MemoryKind) -> View {
        self.rig.device.alloc(p.name(), p.shape().dims(), DType::F32, kind).unwrap()
    }

    fn taken(&self, pass: Pass) -> Vec<&str> {
        self.takes.iter().filter(|(p, _)| *p == pass).map(|(_, name)| name.as_str()).collect()
    }
}

impl Weights for Gathers<'_> {
    fn take(&mut self, p: &Param, on: &Stream) -> Result<View, PgError> {
        self.takes.push((self.turn.pass(), p.name().to_owned()));
        let (shard, whole) = (self.turn.read(p, on)?, self.like(p, MemoryKind::Other));
        on.launch(Scale { x: &shard, factor: Factor::Const(1.0), y: &whole }.op("gather")?)?;
        assert!(self.out.insert(p.name().to_owned(), whole.clone()).is_none(), "{} is taken twice at once", p.name());
        Ok(whole)
    }

    fn give_back(&mut self, p: &Param, on: &Stream) -> Result<(), PgError> {
        let whole = self.out.remove(p.name()).expect("taken before it is given back");
        on.launch(Fill { y: &whole, value: f32::NAN }.op("free")?)?;
        self.turn.done(p, on)
    }

    fn grad(&mut self, p: &Param, _: &Stream) -> Result<GradOut, PgError> {
        let scratch = self.like(p, MemoryKind::Grad);
        self.scratch.insert(p.name().to_owned(), scratch.clone());
        Ok(GradOut::Scratch(scratch))
    }

    fn grad_done(&mut self, p: &Param, on: &Stream) -> Result<(), PgError> {
        let scratch = self.scratch.remove(p.name()).expect("asked for before it is done");
        self.turn.open(p, on)?;
        on.launch(Axpy { alpha: Factor::Const(1.0), x: &scratch, y: &p.main_grad() }.op("reduce")?)?;
        self.turn.landed(p, on)
    }

    fn enter(&mut self, pass: Pass) -> Pass {
        self.turn.enter(pass)
    }
}

/// What a capture would list.
#[derive(Default)]
struct Notes {
    reads: Vec<String>,
    releases: usize,
}

impl Recorder for Notes {
    fn read(&mut self, p: &Param, _: &Stream) -> Result<(), PgError> {
        self.reads.push(p.name().to_owned());
        Ok(())
    }

    fn done(&mut self, _: &Param, _: &Stream) -> Result<(), PgError> {
        self.releases += 1;
        Ok(())
    }

    fn open(&mut self, _: &Param, _: &Stream) -> Result<Option<Keep>, PgError> {
        Ok(None)
    }

    fn landed(&mut self, _: &Param, _: &Stream) -> Result<(), PgError> {
        Ok(())
    }

    fn hand_over(&mut self, _: std::sync::Arc<dyn pgroups::HandOver>) -> Result<(), PgError> {
        unreachable!("whole weights hand nothing over")
    }
}

/// Weights that recomputing layer `layer` takes: all but those of the output, which nobody needs again.
fn needed_again(config: &GptConfig, layer: usize) -> Vec<String> {
    let plan = GptPlan::new(config.clone()).unwrap();
    let of_layer = |name: &str| name.contains(&format!("h.{layer}.")) || name.contains(&format!("layers.{layer}."));
    let last = |name: &str| name.contains("mlp.c_proj") || name.contains("down_proj");
    plan.params().iter().map(|p| p.spec.name.clone()).filter(|name| of_layer(name) && !last(name)).collect()
}

#[test]
fn weights_taken_again_are_recompute_takes_that_register_nothing_and_release_each_time() {
    for config in [tiny(), tiny_llama()] {
        let values = values(&GptPlan::new(config.clone()).unwrap(), 7);
        let microbatches = [inputs(&config, 14, 9)];
        let rig = Rig::recomputing(&poisoned(2), config.clone(), Some(&values), &RecomputeLayers::All);
        for p in &rig.params {
            rig.stream.launch(Fill { y: &p.main_grad(), value: 0.0 }.op("zero").unwrap()).unwrap();
        }
        let (tokens, targets) = (rig.ids("tokens", &microbatches[0].0, 7), rig.ids("targets", &microbatches[0].1, 7));
        let token_scale = Factor::Const(1.0 / 14.0);
        let m = Microbatch { tokens: &tokens, targets: &targets, loss: &rig.loss, token_scale, slot: 0 };
        let mut f = Frame::unplanned(&rig.stream, "frame");
        let mut notes = Notes::default();
        let mut w = Gathers::new(&rig, Turn::recorded(Pass::Forward, &mut notes));
        rig.gpt.forward_loss(&mut f, &mut w, &m).unwrap();
        let forward = w.takes.len();
        assert_eq!(w.taken(Pass::Forward).len(), forward);
        assert_eq!((notes.reads.len(), notes.releases), (forward, forward));

        let mut notes = Notes::default();
        let mut w = Gathers::new(&rig, Turn::recorded(Pass::Backward, &mut notes));
        rig.gpt.backward(&mut f, &mut w, 0).unwrap();
        let want: Vec<String> = [1, 0].iter().flat_map(|layer| needed_again(&config, *layer)).collect();
        assert_eq!(w.taken(Pass::Recompute), want);
        assert!(w.taken(Pass::Forward).is_empty() && !w.taken(Pass::Backward).is_empty());
        assert!(w.out.is_empty() && w.scratch.is_empty());
        let taken = w.takes.len();
        assert_eq!(notes.reads, [""; 0], "backward and recompute register nothing");
        assert_eq!(notes.releases, taken);

        let recompute = RecomputeLayers::None;
        let case = Case { config, values: &values, microbatches: &microbatches, len: 7, recompute };
        let (losses, kept) = case.run(&Machine::cpu(2).unwrap(), Layout::Scratch);
        let (loss, gathered) = rig.results();
        assert_eq!(losses, [loss]);
        let differ: Vec<&String> = kept.keys().filter(|name| kept[*name] != gathered[*name]).collect();
        assert!(differ.is_empty(), "{differ:?}");
    }
}
