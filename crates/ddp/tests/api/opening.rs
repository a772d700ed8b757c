//! Nobody writes a gradient before its buffer is free, whatever layout of weights hands it out.

use ddp::{DdpError, why};
use device::{Access, DType, Event, Machine, MemoryKind, Op, Stream, View, Why, ops::Accumulate};
use pgroups::{After, GradOut, Keep, Param, Pass, PgError, Turn, Weights};

use crate::support::{Caught, One, Setup, declared, ours, sim};

/// A user's own layout: gradients go through scratch and are added on a stream of its own, as sharded weights do.
struct Apart<'c> {
    turn: Turn<'c>,
    adds: Stream,
    written: Event,
    scratch: View,
}

const ADD_AFTER_WRITE: Why = Why("test.add_after_write");

impl Weights for Apart<'_> {
    fn take(&mut self, param: &Param, on: &Stream) -> Result<View, PgError> {
        self.turn.read(param, on)
    }

    fn give_back(&mut self, param: &Param, on: &Stream) -> Result<(), PgError> {
        self.turn.done(param, on)
    }

    fn grad(&mut self, _: &Param, _: &Stream) -> Result<GradOut, PgError> {
        Ok(GradOut::Scratch(self.scratch.clone()))
    }

    fn grad_done(&mut self, param: &Param, on: &Stream) -> Result<(), PgError> {
        on.record(&self.written)?;
        self.adds.wait(&self.written, ADD_AFTER_WRITE)?;
        let keep = self.turn.open(param, &self.adds)?.expect("a sink is attached");
        let grad = param.main_grad();
        let mut accesses = vec![Access::read(&self.scratch), Access::update(&grad)];
        if let Keep::Times(flag) = &keep {
            accesses.push(Access::read(flag));
        }
        self.adds.launch(Op::host("add", "test", accesses, |args| {
            let keep = if args.len() > 2 { args.read::<f32>(2)?[0] } else { 1.0 };
            let scratch = args.read::<f32>(0)?;
            let kept = |old: f32| if keep == 0.0 { 0.0 } else { old };
            args.write::<f32>(1)?.iter_mut().zip(scratch).for_each(|(g, s)| *g = kept(*g) + s);
            Ok(())
        }))?;
        self.turn.landed(param, &self.adds)
    }

    fn enter(&mut self, pass: Pass) -> Pass {
        self.turn.enter(pass)
    }
}

fn contribute(one: &One, adds: &Stream, value: f32) -> Result<(), Caught> {
    let scratch = one.device.alloc("scratch", &[50], DType::F32, MemoryKind::Grad)?;
    let (adds, written) = (adds.clone(), one.device.event("written"));
    let mut weights = Apart { turn: Turn::eager(Pass::Backward), adds, written, scratch };
    let out = weights.grad(one.param(0), &one.stream)?;
    let (into, Accumulate::Overwrite) = out.target() else { panic!("scratch is overwritten") };
    one.stream.upload(into, vec![value; 50])?;
    Ok(weights.grad_done(one.param(0), &one.stream)?)
}

/// The reduced gradients of three steps of two microbatches, as a logger copies them while the next step begins.
fn logged(machine: &Machine) -> Vec<Vec<Vec<f32>>> {
    let run = Setup::new(2, declared(&[50])).run(machine, |one| {
        let (logger, adds) = (one.device.stream("logger")?, one.device.stream("adds")?);
        let mut copies = Vec::new();
        for step in 0..3 {
            let value = (step + 1) as f32 * (one.rank + 1) as f32;
            {
                let paused = one.ddp.no_sync();
                paused.begin_microbatch(&one.stream)?;
                contribute(one, &adds, value)?;
                paused.end_microbatch(&one.stream)?;
            }
            one.microbatch(|one| contribute(one, &adds, 2.0 * value))?;
            one.ddp.finish_grads()?;
            one.ddp.read_grads(&logger)?;
            copies.push(logger.download::<f32>(&one.param(0).main_grad())?);
            one.ddp.done_grads(&logger)?;
        }
        Ok(copies.into_iter().map(|copy| copy.wait()).collect::<Result<_, _>>()?)
    });
    run.unwrap()
}

#[test]
fn a_layout_of_the_users_own_writes_a_gradient_only_behind_whoever_still_reads_it() {
    // Mean over ranks of three times 1 and 2, step by step.
    let want = vec![vec![vec![4.5; 50], vec![9.0; 50], vec![13.5; 50]]; 2];
    let without = |seed: u64| {
        let machine = sim(seed);
        machine.drop_waits(why::GRAD_AFTER_FREE);
        logged(&machine)
    };
    assert!((0..100).all(|seed| logged(&sim(seed)) == want));
    assert!((0..100).any(|seed| without(seed) != want), "the gate is what orders them");
}

#[test]
fn a_gradient_that_was_written_without_asking_is_refused() {
    Setup::new(1, declared(&[4, 4]))
        .run(&sim(1), |one| {
            let (param, stream) = (one.param(0).clone(), one.stream.clone());
            let mut turn = Turn::eager(Pass::Backward);
            let refused = |landed: Result<(), PgError>| {
                let error = landed.unwrap_err();
                assert!(matches!(ours(&error), DdpError::NotOpened { param } if param == "p0"), "{}", error.chain());
            };
            one.ddp.begin_microbatch(&stream)?;
            refused(turn.landed(&param, &stream));
            // Another parameter's question does not count, and a graph has to ask, too.
            one.contribute(1, 1.0)?;
            refused(turn.landed(&param, &stream));
            let gate = one.device.event("landed");
            stream.record(&gate)?;
            refused(param.landed_sink().unwrap().landed(&param, After::Gate(&gate)));
            // Nor does one of the microbatch before count.
            one.contribute(0, 1.0)?;
            one.ddp.end_microbatch(&stream)?;
            one.ddp.begin_microbatch(&stream)?;
            refused(turn.landed(&param, &stream));
            one.ddp.zero_grads(&stream)?;
            Ok(())
        })
        .unwrap();
}
