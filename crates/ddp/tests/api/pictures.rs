//! The schedules of docs/ddp.md are those of real traces; set UPDATE_DOCS to draw them anew.

use std::path::PathBuf;

use ddp::{AdamConfig, DdpConfig, Dispatch, GradCheck, OptimizerConfig};
use device::{Columns, Machine, MemoryKind, Note, Trace, TraceEvent, ops::Cast};
use pgroups::{Pass, Turn};

use crate::support::{Caught, One, Setup, declared};

/// Buckets of one parameter each.
const BUCKETS: usize = 4;

fn forward(one: &One) -> Result<(), Caught> {
    for i in 0..BUCKETS {
        let (param, mut turn) = (one.param(i), Turn::eager(Pass::Forward));
        let value = turn.read(param, &one.stream)?;
        let seen = one.device.alloc("seen", param.shape().dims(), param.dtype(), MemoryKind::Other)?;
        one.stream.launch(Cast { x: &value, y: &seen }.op("forward")?)?;
        turn.done(param, &one.stream)?;
    }
    Ok(())
}

/// Elements of a parameter, and bytes of its bucket with padding.
const NUMEL: usize = 100;
const BUCKET_BYTES: usize = 128 * 4;

/// What an operation is called: by what it does, and the parameter whose bucket it touches.
fn word(event: &TraceEvent) -> Option<String> {
    let (letter, accesses) = match event {
        TraceEvent::Op { name, site, accesses, .. } => match (name.as_str(), site.as_str()) {
            (_, "forward") => ("f", accesses),
            ("contribute", _) => ("b", accesses),
            ("adamw", _) => ("u", accesses),
            _ => return None,
        },
        TraceEvent::Joint { group, accesses, .. } if group.ends_with("ddp_reduce") => ("r", accesses),
        TraceEvent::Joint { group, accesses, .. } if group.ends_with("ddp_gather") => ("g", accesses),
        // The norm of all gradients.
        TraceEvent::Joint { .. } => return Some("n".to_owned()),
        _ => return None,
    };
    let in_bucket = accesses.iter().find(|access| matches!(access.kind, MemoryKind::Param | MemoryKind::Grad));
    // Last declared first.
    Some(format!("{letter}{}", BUCKETS - 1 - in_bucket?.region.start / BUCKET_BYTES))
}

/// The second step on two ranks, and the forward pass behind it: the first step counts what lands.
fn schedule(clip: f32, dispatch: Dispatch) -> String {
    let ddp = DdpConfig { dispatch, ..DdpConfig::default() };
    let setup = Setup { ddp, ..Setup::new(2, declared(&[NUMEL; BUCKETS])) }.sharded();
    let adam = AdamConfig { clip: clip.into(), ..AdamConfig::default() };
    let config = OptimizerConfig { adam, check: GradCheck::WithClip, ..OptimizerConfig::default() };
    let machine = Machine::dry();
    machine.trace_start();
    let names = setup.run(&machine, |one| {
        let updates = one.device.stream("optimizer")?;
        let mut optimizer = one.optimizer(config.clone())?;
        for step in 0..2 {
            forward(one)?;
            one.microbatch(|one| (0..BUCKETS).rev().try_for_each(|i| one.contribute(i, 1.0)))?;
            one.ddp.finish_grads()?;
            optimizer.step(&updates, &[0.1])?;
            if step == 0 {
                one.device.note(|| Note::Step(1));
            }
        }
        forward(one)?;
        one.device.synchronize()?;
        Ok(one.device.stream_names())
    });
    let Trace { events } = machine.trace_stop();
    let is_begin = |event: &TraceEvent| matches!(event, TraceEvent::Note { rank: 0, note: Note::Step(1), .. });
    let begin = events.iter().position(is_begin).expect("a second step");
    Columns::of(&events[begin..], 0, |_, event| word(event)).draw(&names.unwrap()[0])
}

#[test]
fn the_pages_schedules_are_those_of_real_traces() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/ddp.md");
    let mut page = std::fs::read_to_string(&path).unwrap();
    for (title, clip, dispatch) in [
        ("clipped, Dispatch::Chain", 1.0, Dispatch::Chain),
        ("not clipped, Dispatch::WithOptimizer", 0.0, Dispatch::WithOptimizer),
    ] {
        let (begin, drawn) = (format!("```text\n{title}\n"), schedule(clip, dispatch));
        let from = page.find(&begin).expect("a place for the drawing") + begin.len();
        let to = from + page[from..].find("```").unwrap();
        if std::env::var_os("UPDATE_DOCS").is_some() {
            page.replace_range(from..to, &drawn);
            std::fs::write(&path, &page).unwrap();
            continue;
        }
        assert_eq!(&page[from..to], drawn, "UPDATE_DOCS=1 draws it");
    }
}
