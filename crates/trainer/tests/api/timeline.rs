//! Traces as pictures.

use std::{collections::BTreeSet, fs, path::PathBuf};

use crate::fixture::Folder;
use device::{DType, Machine, MemoryKind, Reduce, Why, ops::Fill, ops::Scale};
use pgroups::{Key, Layout, LayoutConfig, Needs, ProcessGroups};
use serde_json::Value;
use trainer::{Clock, StreamNames, TimelineConfig, timeline};

const TRAIN: &str = "[layout]\ndp = 2\n[train]\nsteps = 6\nglobal_batch = 8\nmicro_batch = 2\nseed = 7\n";

/// Two ranks, two streams each: a wait that holds, one that is elided, an all-reduce.
fn small_program() -> String {
    let machine = Machine::sim(3);
    let mut layout = LayoutConfig::parse("dp=2").unwrap();
    layout.world_size = Some(2);
    let layout = Layout::new(&layout).unwrap();
    let streams = pgroups::local(&machine, 2, |rank| -> Result<_, pgroups::PgError> {
        let groups = ProcessGroups::build(&rank, &layout, &Needs::keys([Key::DP]))?;
        let group = groups.get(&Key::DP, "the picture")?;
        let (compute, reduce) = (rank.device.stream("compute")?, rank.device.stream("reduce")?);
        // From here on: how groups come to be is no part of the picture.
        group.barrier(&compute)?;
        rank.device.synchronize()?;
        if rank.global.0 == 0 {
            machine.trace_start();
        }
        group.barrier(&compute)?;
        rank.device.synchronize()?;
        let grad = rank.device.alloc("grad", &[4, 8], DType::F32, MemoryKind::Grad)?;
        let (landed, reduced) = (rank.device.event("landed"), rank.device.event("reduced"));
        compute.launch(Fill { y: &grad, value: 1.0 + rank.global.0 as f32 }.op("h.0")?)?;
        compute.record(&landed)?;
        reduce.wait(&landed, Why("ddp.reduce_after_landed"))?;
        group.all_reduce(&reduce, &grad, Reduce::Sum)?;
        reduce.record(&reduced)?;
        compute.wait(&reduced, Why("ddp.step_after_reduced"))?;
        compute.wait(&reduced, Why("ddp.step_after_reduced"))?;
        let half = device::ops::Factor::Const(0.5);
        compute.launch(Scale { x: &grad, factor: half, y: &grad }.op("step")?)?;
        rank.device.synchronize()?;
        Ok(rank.device.stream_names())
    });
    let trace = machine.trace_stop();
    timeline(&trace, Clock::of(&machine), &StreamNames::new(streams.unwrap().into_iter()))
}

/// Set UPDATE_GOLDEN to write the file anew.
#[test]
fn a_small_program_is_drawn_as_its_golden_picture() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/timeline.json");
    let drawn = small_program();
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, &drawn).unwrap();
    }
    assert_eq!(drawn, fs::read_to_string(&path).unwrap());
}

fn events(picture: &str) -> Vec<Value> {
    let picture: Value = serde_json::from_str(picture).unwrap();
    picture["traceEvents"].as_array().unwrap().clone()
}

/// What Perfetto needs of every event, and that arrows begin and end within slices.
fn check(events: &[Value]) {
    let slices: Vec<&Value> = events.iter().filter(|e| e["ph"] == "X").collect();
    for event in events {
        let phase = event["ph"].as_str().unwrap();
        assert!(event["pid"].is_u64() && event["tid"].is_u64() && event["name"].is_string(), "{event}");
        assert!(phase == "M" || event["ts"].is_number(), "{event}");
        match phase {
            "M" => assert!(event["args"].is_object(), "{event}"),
            "X" => assert!(event["dur"].as_f64().unwrap() > 0.0, "{event}"),
            "i" => assert_eq!(event["s"], "t"),
            "s" | "f" => {
                let at = event["ts"].as_f64().unwrap();
                let open = slices.iter().any(|slice| {
                    let start = slice["ts"].as_f64().unwrap();
                    let within = start <= at && at < start + slice["dur"].as_f64().unwrap();
                    slice["pid"] == event["pid"] && slice["tid"] == event["tid"] && within
                });
                assert!(open, "no slice around {event}");
                let ends = events.iter().filter(|e| e["id"] == event["id"] && e["id"].is_u64()).count();
                assert_eq!(ends, 2, "{event}");
            }
            other => panic!("phase {other}"),
        }
    }
    // Slices of a row do not overlap.
    for (i, a) in slices.iter().enumerate() {
        let end = |e: &Value| e["ts"].as_f64().unwrap() + e["dur"].as_f64().unwrap();
        for b in &slices[..i] {
            let apart = end(a) <= b["ts"].as_f64().unwrap() + 1e-9 || end(b) <= a["ts"].as_f64().unwrap() + 1e-9;
            assert!(apart || a["pid"] != b["pid"] || a["tid"] != b["tid"], "{a} and {b}");
        }
    }
}

#[test]
fn a_picture_has_rows_slices_arrows_and_marks() {
    let events = events(&small_program());
    check(&events);
    let of = |phase: &str| events.iter().filter(|e| e["ph"] == phase).collect::<Vec<_>>();
    let rows = of("M").into_iter().filter(|e| e["name"] == "thread_name");
    let rows: BTreeSet<String> = rows.map(|e| format!("{} {}", e["pid"], e["args"]["name"])).collect();
    assert!(
        rows.contains("1 \"1 compute\"") && rows.contains("2 \"2 reduce\"") && rows.contains("2 \"host\""),
        "{rows:?}"
    );
    let fill = of("X").into_iter().find(|e| e["name"] == "fill@h.0" && e["pid"] == 2).unwrap();
    assert_eq!((&fill["args"]["bytes_written"], &fill["args"]["bytes_read"]), (&128.into(), &0.into()));
    let joint = of("X").into_iter().filter(|e| e["cat"] == "joint" && e["name"] != "barrier@dp[0]@0..2#0");
    let joint: Vec<_> = joint.collect();
    assert_eq!(joint.len(), 2);
    assert!(joint.iter().all(|e| e["args"]["what"] == "all_reduce(Sum) of 32 f32" && e["args"]["group_seq"] == 2));
    let arrows: Vec<&str> = of("s").iter().map(|e| e["name"].as_str().unwrap()).collect();
    assert_eq!(arrows.iter().filter(|why| **why == "ddp.reduce_after_landed").count(), 2);
    assert_eq!(arrows.iter().filter(|why| **why == "ddp.step_after_reduced").count(), 2);
    let elided: Vec<_> = of("i").into_iter().filter(|e| e["cat"] == "wait").collect();
    assert!(elided.len() == 2 && elided.iter().all(|e| e["args"]["outcome"] == "Elided"), "{elided:?}");
}

#[test]
fn a_run_draws_the_steps_it_is_asked_for_and_trains_as_without() {
    let folder = Folder::with_config(TRAIN);
    let plain = folder.train(&[]);
    for kind in ["cpu", "sim"] {
        let path = folder.path().join(format!("pictures/{kind}.json"));
        let wanted = TimelineConfig { path: path.clone(), steps: 2..=3 };
        let run = folder.train_with(&[&format!("device.kind={kind}")], |options| options.timeline = Some(wanted));
        assert_eq!(run.timeline.as_ref(), Some(&path));
        assert_eq!(crate::fixture::bits(&run), crate::fixture::bits(&plain));
        let events = events(&fs::read_to_string(&path).unwrap());
        check(&events);
        // How ranks met around the steps is not shown.
        assert!(!events.iter().any(|e| e["name"].as_str().unwrap().starts_with("barrier")));
        for process in [1, 2] {
            let losses = |e: &&Value| e["name"] == "sum@loss" && e["pid"] == process && e["ph"] == "X";
            // Two microbatches and the step's mean, in two steps.
            assert_eq!(events.iter().filter(losses).count(), 6, "process {process} on {kind}");
        }
    }
}

#[test]
fn a_timeline_behind_the_end_of_the_run_is_refused() {
    let folder = Folder::with_config(TRAIN);
    let config = trainer::Config::load(&folder.config(), &["train.steps=1"]).unwrap();
    let mut options = trainer::RunOptions::new(folder.path().join("run"));
    options.timeline = Some(TimelineConfig { path: folder.path().join("t.json"), steps: TimelineConfig::USUAL_STEPS });
    let error = trainer::train(&config, options).unwrap_err().to_string();
    assert!(error.contains("step 2, but the run ends with step 1"), "{error}");
}
