//! Every synchronisation is needed, and everybody who waits waits for enough: with all of them there is nothing to object
//! to and every order gives the same bits; without any one of them the verifier objects, and some order gives others.

use device::{
    Machine, Trace,
    ops::{Axpy, Factor, Fill},
};
use graphcap::{
    GateMode, Scope,
    verify::{Finding, Report, VerifyOptions, verify},
};
use gtp::{Drain, PassKind, Record, why};
use pgroups::{LayoutConfig, Pass, PgError, Turn};

use crate::api::{
    backend::Backend,
    mixed::{capture, layers, set},
    rig::{Caught, options},
    script::{Act, forward, there_and_back},
    stand::{Found, Model, Stand},
};

/// Orders among which a missing synchronisation has to show.
const SEEDS: u64 = 200;

/// Programs that together make use of every synchronisation.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Program {
    /// Passes of two kinds on two streams; a weight that is used twice; one that is skipped; no plan at first.
    Submitted,
    /// Weights that nobody publishes: stepped where they are used.
    Alone,
    /// Graphs of layers and of microbatches, two passes in flight, passes that are submitted among them; weights that
    /// are written between two graphs.
    Replayed(Drain, GateMode),
}

const PROGRAMS: [Program; 6] = [
    Program::Submitted,
    Program::Alone,
    Program::Replayed(Drain::Whole, GateMode::BeforeReplay),
    Program::Replayed(Drain::Whole, GateMode::InGraph),
    Program::Replayed(Drain::TwoStage, GateMode::BeforeReplay),
    Program::Replayed(Drain::TwoStage, GateMode::InGraph),
];

impl Program {
    fn model(self) -> Model {
        let mut model = Model::new(2, &[(4, 4), (4, 4), (8, 4), (4, 4)]).look_ahead(2);
        model.layout = LayoutConfig { dp: Some(2), order: "dp-gtp-tp-cp-ep-pp".into(), ..model.layout };
        if let Program::Replayed(drain, _) = self {
            model.config.drain = drain;
        }
        model
    }

    fn body(self, stand: &mut Stand, mutate: Mutation<'_>) -> Result<Found, Caught> {
        if self == Program::Alone {
            mutate(stand);
            alone(stand)?;
            return stand.found();
        }
        let backend = Backend::attach(stand)?;
        mutate(stand);
        match self {
            Program::Submitted => submitted(stand, &backend)?,
            Program::Replayed(_, gates) => replayed(stand, &backend, gates)?,
            Program::Alone => unreachable!("has no backend"),
        }
        stand.rank.device.synchronize()?;
        stand.found()
    }
}

/// Forward on one stream, in part on another; gradients on the other.
fn branched() -> Vec<Act> {
    let forward = [
        forward(&[0]),
        vec![Act::Take(1), Act::On(1), Act::Take(1), Act::Back(1)],
        forward(&[2]),
        vec![Act::On(0), Act::Back(1)],
        forward(&[3]),
    ];
    let backward =
        [3, 2, 1, 0].map(|w| [Act::On(w % 2), Act::Take(w), Act::Back(w), Act::Grad(w), Act::Done(w)].to_vec());
    [forward.concat(), vec![Act::Enter(Pass::Backward)], backward.concat()].concat()
}

fn submitted(stand: &mut Stand, backend: &Backend) -> Result<(), Caught> {
    let evaluation = [vec![Act::On(1)], forward(&[3, 1]), vec![Act::On(0)], forward(&[0, 2])].concat();
    let skipped = there_and_back(&[0, 1, 3]);
    for (step, acts) in [branched(), branched(), branched(), skipped, branched(), branched()].iter().enumerate() {
        stand.pass(acts)?;
        backend.step(0.01 * (step + 1) as f32)?;
        if step % 2 == 1 {
            stand.pass_of(PassKind::EVAL, &evaluation)?;
            // Nothing but the end of its reads holds this write back.
            backend.load(0.5 * step as f32)?;
            stand.pass_of(PassKind::EVAL, &evaluation)?;
        }
    }
    Ok(())
}

fn alone(stand: &mut Stand) -> Result<(), Caught> {
    for _ in 0..5 {
        stand.pass(&there_and_back(&[0, 1, 2, 3]))?;
        let (on, params) = (&stand.script.streams[0], &stand.params);
        stand.gtp.account().join(on)?;
        on.launch(Axpy { alpha: Factor::Const(-0.01), x: params.grads(), y: params.values() }.op("descend")?)?;
        on.launch(Fill { y: params.grads(), value: 0.0 }.op("zero")?)?;
    }
    Ok(())
}

fn replayed(stand: &mut Stand, backend: &Backend, gates: GateMode) -> Result<(), Caught> {
    let (parts, evaluation) = (layers(&[0, 1, 2, 3]), forward(&[3, 1, 0, 2]));
    stand.pass(&parts.concat())?;
    backend.step(0.01)?;
    stand.pass_of(PassKind::EVAL, &evaluation)?;
    stand.gtp.plan()?;
    stand.rank.device.synchronize()?;
    let mut by_layer = set(stand, Scope::Layer, gates, 1)?;
    let layers = capture(stand, &mut by_layer, PassKind::TRAIN, &parts)?;
    let mut by_pass = set(stand, Scope::Microbatch, gates, 2)?;
    let whole = capture(stand, &mut by_pass, PassKind::TRAIN, &[parts.concat()])?;
    let evaluations = capture(stand, &mut by_pass, PassKind::EVAL, std::slice::from_ref(&evaluation))?;
    let lanes = [stand.rank.device.stream("lane a")?, stand.rank.device.stream("lane b")?];
    for round in 0..2 {
        for (i, graph) in layers.iter().enumerate() {
            graph.replay(&lanes[i % 2], &[])?;
            if (round, i) == (1, 1) {
                // What was gathered ahead is old now.
                backend.load(0.25)?;
            }
        }
        backend.step(0.01)?;
        evaluations[0].replay(&lanes[round], &[])?;
        whole[0].replay(&lanes[1 - round], &[])?;
        backend.step(0.01)?;
        // Without its producer; then the part in front of it as it is submitted.
        layers[1].replay(&lanes[0], &[])?;
        let mut weights = stand.gtp.pass(PassKind::TRAIN, Turn::eager(Pass::Forward))?;
        stand.script.play(&mut weights, &parts[0])?;
        weights.finish()?;
        layers[1..].iter().enumerate().try_for_each(|(i, graph)| graph.replay(&lanes[i % 2], &[]))?;
        backend.step(0.01)?;
        stand.pass_of(PassKind::EVAL, &evaluation)?;
        stand.pass(&parts.concat())?;
        backend.step(0.01)?;
    }
    // Before the lanes go.
    Ok(stand.rank.device.synchronize()?)
}

/// What a test does to a rank before its first pass.
type Mutation<'m> = &'m (dyn Fn(&Stand) + Sync);

fn run(program: Program, machine: &Machine, mutate: Mutation<'_>) -> (Result<Vec<Found>, PgError>, Trace) {
    program.model().traced(machine, None, |stand| program.body(stand, mutate))
}

fn nothing(_: &Stand) {}

fn sim(seed: u64) -> Machine {
    Machine::sim_with(seed, options())
}

/// All programs that somebody objects to: the verifier, or the program itself.
fn noticed(mutate_machine: &dyn Fn(&Machine), mutate: Mutation<'_>, object: &dyn Fn(&Report) -> bool) -> Vec<Program> {
    let objects = |program: &Program| {
        let machine = sim(0);
        mutate_machine(&machine);
        let (result, trace) = run(*program, &machine, mutate);
        result.is_err() || object(&verify(&trace, &VerifyOptions::default()))
    };
    PROGRAMS.into_iter().filter(objects).collect()
}

/// Runs orders until one gives another result.
fn shows(program: Program, mutate_machine: &dyn Fn(&Machine), mutate: Mutation<'_>) -> bool {
    let want = run(program, &sim(0), &nothing).0.unwrap();
    (0..SEEDS).any(|seed| {
        let machine = sim(seed);
        mutate_machine(&machine);
        run(program, &machine, mutate).0.map_or(true, |got| got != want)
    })
}

#[test]
fn with_every_synchronisation_there_is_nothing_to_object_to_and_all_orders_agree() {
    for program in PROGRAMS {
        let want = run(program, &sim(0), &nothing).0.unwrap();
        let logs = want.iter().flat_map(|found| found.logs.iter().flatten());
        assert!(logs.clone().all(|x| x.is_finite()) && logs.filter(|x| **x != 0.0).count() > 200);
        let machines = (1..12).map(sim).chain([Machine::cpu_with(2, options()).unwrap()]);
        for machine in machines {
            let (got, trace) = run(program, &machine, &nothing);
            let report = verify(&trace, &VerifyOptions::default());
            assert!(report.is_clean(), "{program:?} on {}: {report}", machine.driver());
            assert_eq!(got.unwrap(), want, "{program:?} on {}", machine.driver());
        }
    }
}

#[test]
fn every_missing_wait_is_noticed_by_name_and_shows_in_some_order() {
    let whys = why::ALL.into_iter().chain([Turn::READ_AFTER_PUBLISH]);
    let (mut silent, mut unseen) = (Vec::new(), Vec::new());
    for why in whys {
        let named = |report: &Report| {
            let names = |f: &Finding| matches!(f, Finding::Race(race) if race.dropped.iter().any(|d| *d == *why.0));
            report.findings().iter().any(names)
        };
        let drop_it = |machine: &Machine| machine.drop_waits(why);
        let programs = noticed(&drop_it, &nothing, &named);
        if programs.is_empty() {
            silent.push(why);
        }
        if !programs.iter().any(|program| shows(*program, &drop_it, &nothing)) {
            unseen.push(why);
        }
    }
    assert!(silent.is_empty(), "the verifier does not miss {silent:?}");
    assert!(unseen.is_empty(), "without one of {unseen:?} all {SEEDS} orders of all programs give the same result");
}

#[test]
fn everything_that_is_left_out_is_noticed_and_shows_in_some_order() {
    let (mut silent, mut unseen) = (Vec::new(), Vec::new());
    for record in Record::ALL {
        let omit = move |stand: &Stand| stand.gtp.omit(record);
        let programs = noticed(&|_| (), &omit, &|report| !report.is_clean());
        if programs.is_empty() {
            silent.push(record);
        }
        if !programs.iter().any(|program| shows(*program, &|_| (), &omit)) {
            unseen.push(record);
        }
    }
    assert!(silent.is_empty(), "nobody notices that {silent:?} are left out");
    assert!(unseen.is_empty(), "without one of {unseen:?} all {SEEDS} orders of all programs give the same result");
}
