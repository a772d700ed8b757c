//! Every synchronisation is needed: with all of them each order of execution gives the same bits, without any one of
//! them some order gives others.

use std::sync::Arc;

use ddp::{
    AdamConfig, BucketSize, Dispatch, GradCheck, GradType, Loaded, Optimizer, OptimizerConfig, Record, Scaling, why,
};
use device::{
    Access, DType, Event, Machine, MemoryKind, Note, Op, Stream, View, Why, bf16,
    ops::{Accumulate, Factor},
};
use pgroups::{After, Epochs, Keep, Landed, Param, Pass, PgError, Publish, Turn, Weights, Whole};

use crate::support::{Caught, One, Setup, bits, contribute, declared, ours, scalar, sim, wide};

const SIZES: [usize; 3] = [40, 90, 30];
const STEPS: usize = 3;
/// Orders among which a missing synchronisation has to show.
const SEEDS: u64 = 300;

/// Programs that together make use of every synchronisation.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Program {
    /// Mean, f32, norm and clip; two optimizer streams; logs of gradients, values, norms.
    Checked,
    /// Buckets stepped one by one, without any check, and twice over.
    Unchecked,
    /// Sums per token, bf16 values, a load between steps.
    Tokens,
}

impl Program {
    fn setup(self) -> Setup {
        let mut setup = Setup::new(2, declared(&SIZES)).sharded();
        setup.plan.bucket_size = BucketSize::PerUnit;
        if self == Program::Tokens {
            setup.declared.iter_mut().for_each(|param| param.stored = DType::Bf16);
            setup.plan.grad = GradType::AsStored;
            setup.ddp.scaling = Scaling::PerToken;
        }
        if self == Program::Unchecked {
            setup.ddp.dispatch = Dispatch::WithOptimizer;
        }
        setup
    }

    fn optimizer(self) -> OptimizerConfig {
        let plain = OptimizerConfig::default();
        if self == Program::Unchecked {
            let adam = AdamConfig { clip: 0.0, ..AdamConfig::default() };
            return OptimizerConfig { adam, check: GradCheck::WithClip, ..plain };
        }
        plain
    }
}

/// What a test does to a rank before its first step.
pub(crate) type Mutation<'m> = &'m (dyn Fn(&One) + Sync);

/// Adds the sum of a view to the next place of a log: a reader, however late.
fn log(stream: &Stream, view: &View, log: &View) -> Result<(), Caught> {
    let accesses = vec![Access::read(view), Access::update(log)];
    let op = Op::host("log", "test", accesses, |args| {
        let sum: f32 = match args.dtype(0)? {
            DType::Bf16 => args.read::<bf16>(0)?.iter().map(|x| x.to_f32()).sum(),
            DType::I32 => args.read::<i32>(0)?.iter().map(|&x| x as f32).sum(),
            _ => args.read::<f32>(0)?.iter().sum(),
        };
        let log = args.write::<f32>(1)?;
        log[0] += 1.0;
        let at = log[0] as usize;
        log[at] = sum;
        Ok(())
    });
    Ok(stream.launch(op)?)
}

fn fresh_log(stream: &Stream) -> Result<View, Caught> {
    let view = stream.device().alloc("log", &[80], DType::F32, MemoryKind::Other)?;
    stream.upload(&view, vec![0.0; 80])?;
    Ok(view)
}

struct Streams {
    wgrad: Stream,
    optimizers: [Stream; 2],
    logger: Stream,
    loader: Stream,
}

/// Forward on the compute stream; gradients that depend on the values there, others on a second stream that nothing
/// else orders.
fn microbatch(ddp: &ddp::Ddp, params: &[Param], on: &Stream, wgrad: &Stream, salt: f32) -> Result<(), Caught> {
    ddp.begin_microbatch(on)?;
    // The last parameter's first contribution needs nothing of forward.
    contribute(&params[2], wgrad, vec![0.25 * salt; params[2].numel()])?;
    let device = on.device();
    let out = device.alloc("out", &[80], DType::F32, MemoryKind::Other)?;
    on.upload(&out, vec![0.0; 80])?;
    let mut weights = Whole::new(Turn::eager(Pass::Forward));
    for param in params {
        let value = weights.take(param, on)?;
        log(on, &value, &out)?;
        weights.give_back(param, on)?;
    }
    weights.enter(Pass::Backward);
    for (i, param) in params.iter().enumerate().skip(1).rev() {
        let value = weights.take(param, on)?;
        let grad = weights.grad(param, on)?;
        let (into, how) = grad.target();
        on.launch(gradient(into, how, &value, &out, salt))?;
        weights.grad_done(param, on)?;
        weights.give_back(param, on)?;
        if i == 1 {
            // A second use of the middle parameter, on another stream.
            contribute(param, wgrad, vec![0.5 * salt; param.numel()])?;
        }
    }
    // The first one's only contribution.
    contribute(&params[0], wgrad, vec![0.75 * salt; params[0].numel()])?;
    Ok(ddp.end_microbatch(on)?)
}

/// Adds what depends on all that forward has read.
fn gradient(into: &View, how: Accumulate<'_>, value: &View, out: &View, salt: f32) -> Op {
    let mut accesses = vec![Access::update(into), Access::read(value), Access::read(out)];
    if let Accumulate::Keep(flag) = how {
        accesses.push(Access::read(flag));
    }
    Op::host("gradient", "test", accesses, move |args| {
        let keep = if args.len() > 3 { args.read::<f32>(3)?[0] } else { 1.0 };
        let added = 0.01 * args.read::<f32>(2)?[1..4].iter().sum::<f32>() + salt;
        let next = |old: f32| if keep == 0.0 { added } else { keep * old + added };
        match args.dtype(0)? {
            DType::Bf16 => args.write::<bf16>(0)?.iter_mut().for_each(|g| *g = bf16::from_f32(next(g.to_f32()))),
            _ => args.write::<f32>(0)?.iter_mut().for_each(|g| *g = next(*g)),
        }
        Ok(())
    })
}

/// All values and logs of all ranks.
pub(crate) fn run(program: Program, machine: &Machine, mutate: Mutation<'_>) -> Result<Vec<Vec<u32>>, PgError> {
    let mut setup = program.setup();
    // A log of what each publication has found, on the stream that publishes.
    let device_logs: Arc<std::sync::Mutex<std::collections::BTreeMap<u32, View>>> = Arc::default();
    let logs = device_logs.clone();
    setup.ddp.post_gather = Some(Arc::new(move |stream, values| {
        let view = logs.lock().unwrap().get(&stream.rank()).cloned();
        if let Some(view) = view {
            let logged = log(stream, values, &view);
            logged.expect("a log of a live device");
        }
        Ok(())
    }));
    setup.run(machine, |one| {
        let gathered = fresh_log(&one.stream)?;
        let logged = fresh_log(&one.stream)?;
        let mut optimizer = one.optimizer(program.optimizer())?;
        one.device.synchronize()?;
        device_logs.lock().unwrap().insert(one.rank, gathered.clone());
        mutate(one);
        let stream = |name: &str| one.device.stream(name);
        let streams = Streams {
            wgrad: stream("wgrad")?,
            optimizers: [stream("optimizer a")?, stream("optimizer b")?],
            logger: stream("logger")?,
            loader: stream("loader")?,
        };
        for step in 0..STEPS {
            run_step(program, one, &streams, &mut optimizer, &logged, step)?;
        }
        one.ddp.publish(&one.stream)?;
        let mut result = Vec::new();
        for memory in one.ddp.buckets() {
            result.extend(bits(&wide(&one.stream, &memory.values)?));
        }
        one.device.synchronize()?;
        result.extend(bits(&wide(&one.stream, &logged)?));
        result.extend(bits(&wide(&one.stream, &gathered)?));
        Ok(result)
    })
}

fn run_step(
    program: Program,
    one: &mut One,
    streams: &Streams,
    optimizer: &mut Optimizer,
    logged: &View,
    step: usize,
) -> Result<(), Caught> {
    one.device.note(|| Note::Step(step as u64));
    let params = one.buffers.params().to_vec();
    let on = one.stream.clone();
    let salt = 0.3 + 0.1 * one.rank as f32 + 0.01 * step as f32;
    {
        let paused = one.ddp.no_sync();
        microbatch(&paused, &params, &on, &streams.wgrad, salt)?;
    }
    microbatch(&one.ddp, &params, &on, &streams.wgrad, salt + 0.05)?;
    match program {
        Program::Tokens => {
            let tokens = scalar(&on, (3 + one.rank) as f32)?;
            on.launch(device::ops::Scale { x: &tokens, factor: Factor::Const(0.5), y: &tokens }.op("count")?)?;
            one.ddp.finish_grads_per_token(&on, &tokens)?;
        }
        Program::Checked | Program::Unchecked => one.ddp.finish_grads()?,
    }
    if program != Program::Unchecked {
        one.ddp.read_grads(&streams.logger)?;
        for bucket in one.ddp.buckets() {
            log(&streams.logger, &bucket.own_grads, logged)?;
        }
        one.ddp.done_grads(&streams.logger)?;
    }
    // An evaluation of the values that the step is about to overwrite.
    let mut turn = Turn::eager(Pass::Forward);
    for param in &params[1..] {
        let value = turn.read(param, &streams.logger)?;
        log(&streams.logger, &value, logged)?;
        turn.done(param, &streams.logger)?;
    }
    let rate = 0.01 * (step + 1) as f32;
    optimizer.step(&streams.optimizers[step % 2], &[rate])?;
    optimizer.read_state(&streams.logger)?;
    log(&streams.logger, optimizer.grad_norm(), logged)?;
    log(&streams.logger, optimizer.steps(0), logged)?;
    optimizer.done_state(&streams.logger)?;
    if program == Program::Unchecked {
        // Once more, over what nobody has read.
        optimizer.step(&streams.optimizers[step % 2], &[3.0 * rate])?;
    }
    if program == Program::Tokens {
        one.ddp.load(&streams.loader, Loaded::Shards, |bucket| {
            let (x, factor) = (&bucket.own_values, Factor::Const(0.5));
            Ok(streams.loader.launch(device::ops::Scale { x, factor, y: x }.op("load")?)?)
        })?;
        optimizer.refresh_masters(&streams.optimizers[step % 2])?;
    }
    Ok(())
}

pub(crate) fn nothing(_: &One) {}

/// The result of every correct order.
fn correct(program: Program) -> Vec<Vec<u32>> {
    run(program, &sim(0), &nothing).unwrap()
}

/// Runs orders until one gives another result.
fn shows(program: Program, mutate_machine: &dyn Fn(&Machine), mutate: Mutation<'_>) -> bool {
    let want = correct(program);
    (0..SEEDS).any(|seed| {
        let machine = sim(seed);
        mutate_machine(&machine);
        run(program, &machine, mutate).unwrap() != want
    })
}

#[test]
fn with_every_synchronisation_all_orders_agree() {
    for program in [Program::Checked, Program::Unchecked, Program::Tokens] {
        let want = correct(program);
        assert!(want[0].iter().map(|&b| f32::from_bits(b)).all(f32::is_finite));
        for seed in 1..100 {
            assert_eq!(run(program, &sim(seed), &nothing).unwrap(), want, "{program:?}, seed {seed}");
        }
        assert_eq!(run(program, &crate::support::cpu(), &nothing).unwrap(), want, "{program:?} on cpu");
    }
}

/// A program that needs a wait.
pub(crate) fn needs(why: Why) -> Program {
    match why {
        why::DIVIDE_AFTER_COUNT | why::WRITE_AFTER_WRITE => Program::Tokens,
        why::WRITE_AFTER_PUBLISH | why::STEP_AFTER_STEP | why::STEP_AFTER_STATE_READ => Program::Unchecked,
        _ => Program::Checked,
    }
}

#[test]
fn every_wait_is_needed() {
    let whys = why::ALL.into_iter().chain([Turn::READ_AFTER_PUBLISH]);
    let silent: Vec<Why> =
        whys.filter(|&why| !shows(needs(why), &|machine| machine.drop_waits(why), &nothing)).collect();
    assert!(silent.is_empty(), "without one of {silent:?} all {SEEDS} orders give the same result");
}

/// Every record, and a program that needs it.
pub(crate) const RECORDS: [(Record, Program); 7] = [
    (Record::Landed, Program::Checked),
    (Record::Reduced, Program::Unchecked),
    (Record::Written, Program::Checked),
    (Record::Published, Program::Checked),
    (Record::Free, Program::Checked),
    (Record::KeepSet, Program::Checked),
    (Record::Finished, Program::Checked),
];

#[test]
fn every_record_is_needed() {
    let silent = RECORDS.iter().filter(|&&(record, program)| !shows(program, &|_| (), &|one| one.ddp.omit(record)));
    let silent: Vec<_> = silent.collect();
    assert!(silent.is_empty(), "without one of {silent:?} all {SEEDS} orders give the same result");
}

/// A publisher with one thing left out.
struct Without {
    inner: Arc<dyn Publish>,
    left_out: LeftOut,
}

#[derive(Clone, Copy, PartialEq)]
pub(crate) enum LeftOut {
    Issue,
    Release,
    /// Nothing is issued, and what readers ask says that it was.
    IssueAndEpochs,
}

impl Publish for Without {
    fn epochs(&self) -> Epochs {
        let Epochs { written, issued } = self.inner.epochs();
        Epochs { written, issued: if self.left_out == LeftOut::IssueAndEpochs { written } else { issued } }
    }

    fn issue(&self) -> Result<(), PgError> {
        if self.left_out == LeftOut::Release { self.inner.issue() } else { Ok(()) }
    }

    fn event(&self) -> &Event {
        self.inner.event()
    }

    fn done(&self, after: After<'_>) -> Result<(), PgError> {
        if self.left_out == LeftOut::Release { Ok(()) } else { self.inner.done(after) }
    }
}

pub(crate) fn leave_out(one: &One, left_out: LeftOut) {
    for param in one.buffers.params() {
        let inner = param.publisher().unwrap();
        param.attach(Some(Arc::new(Without { inner, left_out })), param.landed_sink());
    }
}

#[test]
fn every_release_is_needed() {
    assert!(shows(Program::Checked, &|_| (), &|one| leave_out(one, LeftOut::Release)));
}

#[test]
fn a_read_that_issues_nothing_is_refused_not_stale() {
    let failed = run(Program::Checked, &sim(1), &|one| leave_out(one, LeftOut::Issue)).unwrap_err();
    let stale = crate::support::cause::<PgError>(&failed);
    let chain = format!("{failed:?}");
    assert!(chain.contains("Stale"), "{stale:?} {chain}");
}

#[test]
fn a_gradient_that_nobody_hears_of_is_missed_at_the_end() {
    struct Silent;
    impl Landed for Silent {
        fn open(&self, _: &Param, _: &Stream) -> Result<Keep, PgError> {
            Ok(Keep::All)
        }

        fn first_use(&self) -> Keep {
            Keep::All
        }

        fn landed(&self, _: &Param, _: After<'_>) -> Result<(), PgError> {
            Ok(())
        }
    }
    let mute = |one: &One| {
        let param = one.param(2);
        param.attach(param.publisher(), Some(Arc::new(Silent)));
    };
    let failed = run(Program::Checked, &sim(1), &mute).unwrap_err();
    assert!(ours(&failed).to_string().contains("(0/1 parameters ready, 'p2' is not)"));
}
