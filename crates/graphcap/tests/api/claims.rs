//! Each kind of finding: there with the mistake, not without it.

use std::sync::Arc;

use device::{Mode, Note, TraceEvent, TraceGraph, TraceNodeKind, WaitOutcome};
use graphcap::verify::{CallOrder, Finding, Hazard, Picture, Report, StaleReason, VerifyOptions, Window, verify};

use super::traces::{Script, access, node, op_node};

fn report(script: &Script) -> Report {
    verify(&script.trace, &VerifyOptions::default())
}

fn only(report: &Report) -> &Finding {
    assert_eq!(report.findings().len(), 1, "{report}");
    &report.findings()[0]
}

/// A write on one stream and a read on another, with or without the wait between them.
fn handed_over(outcome: WaitOutcome) -> Script {
    let mut script = Script::default();
    script.note(1, None, Note::Stream { stream: 0, name: "publish".into() });
    script.note(1, None, Note::Stream { stream: 2, name: "compute".into() });
    script.note(1, None, Note::Step(4));
    script.note(1, None, Note::Microbatch(2));
    script.op_named(1, 0, "all_gather", vec![access(1, 7, Mode::Write, 0..64)]);
    script.record(1, 0, "published");
    script.wait(1, 2, "published", "pgroups.read_after_publish", outcome);
    script.op_named(1, 2, "gemm", vec![access(1, 7, Mode::Read, 16..48)]);
    script
}

#[test]
fn a_race_is_told_with_everything_that_is_known_of_it() {
    assert!(report(&handed_over(WaitOutcome::Enforced)).is_clean());
    let script = handed_over(WaitOutcome::Dropped);
    let report = report(&script);
    let Finding::Race(race) = only(&report) else { panic!("{report}") };
    assert_eq!((race.bytes.clone(), race.hazard()), (16..48, Hazard::ReadWrite));
    let text = race.to_string();
    let want = "race (read and write) on bytes 16..48 of 'm7' (memory 7)\n  \
                writes rank 1 publish 0 'all_gather' at test (step 4, microbatch 2)\n  \
                reads rank 1 compute 0 'gemm' at test (step 4, microbatch 2)\n\
                no wait orders compute 0 'gemm' behind publish 0 'all_gather'; \
                a wait named 'pgroups.read_after_publish' was dropped here";
    assert_eq!(text, want);
    let picture = Picture::new(&script.trace, &report.findings()[0]);
    for drawn in [picture.to_dot(), picture.to_svg()] {
        for part in ["rank 1 publish", "rank 1 compute", "gemm", "pgroups.read_after_publish", "nothing orders these"] {
            assert!(drawn.contains(part), "no '{part}' in\n{drawn}");
        }
    }
    assert!(picture.to_svg().starts_with("<svg") && picture.to_svg().ends_with("</svg>\n"));
}

#[test]
fn a_wait_holds_for_the_record_it_was_bound_to_and_no_later_one() {
    let mut script = Script::default();
    script.record(0, 0, "e");
    script.wait(0, 1, "e", "test.wait", WaitOutcome::Enforced);
    script.op(0, 0, vec![access(0, 0, Mode::Write, 0..8)]);
    script.record(0, 0, "e");
    script.op(0, 1, vec![access(0, 0, Mode::Read, 0..8)]);
    assert!(matches!(only(&report(&script)), Finding::Race(_)));
}

#[test]
fn an_elided_wait_orders_nothing_by_itself() {
    let mut script = handed_over(WaitOutcome::Elided);
    assert!(matches!(only(&report(&script)), Finding::Race(_)));
    script.op(1, 2, vec![]);
}

/// Two ranks; member 0 writes what it reads into a gather, and then overwrites it, behind the gather or not.
#[test]
fn the_end_of_one_member_comes_before_nothing_on_another() {
    let gather = |script: &mut Script, rank: u32| {
        script.joint(
            rank,
            0,
            ("g", &[0, 1]),
            "all_gather of 1 f32",
            vec![access(rank, 0, Mode::Read, 0..4), access(rank, 1, Mode::Write, 0..8)],
        );
    };
    let mut script = Script::default();
    // What rank 0 writes before its call is before the end of rank 1's: a way back over another call.
    script.op(0, 1, vec![access(0, 2, Mode::Write, 0..8)]);
    script.record(0, 1, "ready");
    script.wait(0, 0, "ready", "test.ready", WaitOutcome::Enforced);
    (0..2).for_each(|rank| gather(&mut script, rank));
    for (rank, stream) in [(1, 0), (0, 2)] {
        script.joint(rank, stream, ("back", &[0, 1]), "all_reduce(Sum) of 1 f32", vec![]);
    }
    script.op(0, 2, vec![access(0, 2, Mode::Read, 0..8)]);
    assert!(report(&script).is_clean(), "{}", report(&script));
    // Its own call, however, is not: rank 1 may have gone on while rank 0's part is still being written.
    script.op(0, 2, vec![access(0, 1, Mode::Read, 0..8)]);
    let report = report(&script);
    assert!(matches!(only(&report), Finding::Race(race) if race.first.name == "all_gather"), "{report}");
}

#[test]
fn planned_memory_with_a_new_tenant_too_early_is_told_as_a_slot() {
    let mut script = Script::default();
    for (stream, range) in [(0, 0..32), (1, 16..64)] {
        let mut slot = access(0, 3, Mode::Write, range);
        slot.kind = device::MemoryKind::Arena;
        script.op(0, stream, vec![slot]);
    }
    let report = report(&script);
    let Finding::Race(race) = only(&report) else { panic!("{report}") };
    assert_eq!((race.hazard(), race.bytes.clone()), (Hazard::SlotReuse, 16..32));
}

/// A write of a shard, its publication and a read.
fn published(script: &mut Script, epoch: u64) {
    let shard = access(0, 0, Mode::Write, 0..8);
    script.op_named(0, 0, "adamw", vec![shard.clone()]);
    script.note(0, Some(0), Note::Written { publisher: "p".into(), epoch, regions: vec![shard] });
}

fn issued(script: &mut Script, epoch: u64, range: std::ops::Range<usize>) {
    let whole = access(0, 0, Mode::Write, range);
    script.note(
        0,
        Some(0),
        Note::Issued { publisher: "p".into(), epoch, group: "dp".into(), regions: vec![whole.clone()] },
    );
    script.joint(0, 0, ("dp", &[0]), "all_gather of 2 f32", vec![whole]);
}

fn read(script: &mut Script, written: u64, issued: u64) {
    let whole = access(0, 0, Mode::Read, 0..32);
    let (publisher, param, pass) = ("p".into(), "wte".into(), "forward".into());
    script.note(0, Some(0), Note::Read { publisher, param, pass, written, issued, regions: vec![whole.clone()] });
    script.op_named(0, 0, "gemm", vec![whole]);
}

#[test]
fn a_read_of_what_was_not_published_is_stale_whatever_it_claims() {
    for claimed in [[2, 1], [2, 2]] {
        let mut script = Script::default();
        published(&mut script, 1);
        issued(&mut script, 1, 0..32);
        read(&mut script, 1, 1);
        published(&mut script, 2);
        read(&mut script, claimed[0], claimed[1]);
        let report = report(&script);
        let Finding::Stale(stale) = only(&report) else { panic!("{report}") };
        assert_eq!(stale.reason, StaleReason::NotIssued { written: 2, issued: 1 });
        assert!(stale.to_string().contains("epoch 2 was written, and only epoch 1 published by then"));
    }
}

#[test]
fn a_publication_that_leaves_bytes_out_is_found_where_they_are_read() {
    for (range, missing) in [(0..32, None), (0..24, Some(24..32))] {
        let mut script = Script::default();
        published(&mut script, 1);
        issued(&mut script, 1, 0..32);
        published(&mut script, 2);
        issued(&mut script, 2, range);
        read(&mut script, 2, 2);
        let report = report(&script);
        let Some(missing) = missing else {
            assert!(report.is_clean(), "{report}");
            continue;
        };
        let Finding::Stale(stale) = only(&report) else { panic!("{report}") };
        let StaleReason::NotThere { epoch: 2, bytes, writer: Some(writer) } = &stale.reason else { panic!("{stale}") };
        assert_eq!((bytes, writer.name.as_str(), writer.on.seq), (&missing, "all_gather", 1));
    }
}

#[test]
fn a_second_publication_of_one_write_is_told() {
    let mut script = Script::default();
    published(&mut script, 1);
    issued(&mut script, 1, 0..32);
    assert!(report(&script).is_clean());
    issued(&mut script, 1, 0..32);
    let report = report(&script);
    assert!(matches!(only(&report), Finding::PublishedTwice { epoch: 1, .. }));
}

#[test]
fn a_gradient_that_lands_behind_its_reduction_is_told_and_the_next_step_s_is_not() {
    let landed = |script: &mut Script, range| {
        let grad = access(0, 1, Mode::Update, range);
        script.op_named(0, 0, "wgrad", vec![grad.clone()]);
        script.note(0, Some(0), Note::Landed { param: "fc".into(), regions: vec![grad] });
    };
    for late in [0..8, 16..24] {
        let mut script = Script::default();
        for _step in 0..2 {
            script.note(0, None, Note::Microbatch(1));
            landed(&mut script, 0..8);
            let bucket = access(0, 1, Mode::Update, 0..16);
            script.note(
                0,
                Some(0),
                Note::Reduced { bucket: "b".into(), group: "dp".into(), regions: vec![bucket.clone()] },
            );
            script.joint(0, 0, ("dp", &[0]), "all_reduce(Sum) of 4 f32", vec![bucket]);
        }
        assert!(report(&script).is_clean());
        landed(&mut script, late.clone());
        let report = report(&script);
        match late.start {
            0 => assert!(matches!(only(&report), Finding::ReducedEarly { .. }), "{report}"),
            _ => assert!(report.is_clean(), "not of that bucket: {report}"),
        }
    }
}

/// A graph with one call of a group.
fn calling(id: u64, group: &str) -> Arc<TraceGraph> {
    let what = TraceNodeKind::Joint {
        group: group.to_owned().into(),
        position: 0,
        what: "all_gather of 2 f32".into(),
        site: "inside".into(),
        accesses: vec![],
    };
    Arc::new(TraceGraph { id, name: "layer".into(), nodes: vec![node(&[], what)] })
}

#[test]
fn a_publication_inside_a_graph_is_told_unless_the_graph_is_a_step() {
    for (scope, group, is_told) in [("layer", "dp", true), ("step", "dp", false), ("layer", "tp", false)] {
        let mut script = Script::default();
        published(&mut script, 1);
        issued(&mut script, 1, 0..32);
        let graph = calling(5, group);
        script.note(0, None, Note::Scope { graph: 5, scope: scope.into() });
        (0..3).for_each(|_| script.launch(0, 0, &graph, &[0]));
        let report = report(&script);
        if is_told {
            let Finding::ForbiddenInGraph { act, .. } = only(&report) else { panic!("{report}") };
            assert_eq!(*act, "publication");
        } else {
            assert!(report.is_clean(), "{scope} {group}: {report}");
        }
    }
}

#[test]
fn a_gate_that_nobody_had_recorded_before_the_launch_is_told() {
    let gate = TraceNodeKind::Wait { why: "graph.in_gate".into(), event: "published".into() };
    let graph = Arc::new(TraceGraph { id: 0, name: "g".into(), nodes: vec![node(&[], gate)] });
    let mut script = Script::default();
    script.launch(0, 0, &graph, &[]);
    script.record(0, 1, "published");
    script.launch(0, 0, &graph, &[]);
    let report = report(&script);
    assert!(matches!(only(&report), Finding::ForeignWait { why, .. } if why == "graph.in_gate"), "{report}");
}

#[test]
fn an_inner_wait_that_was_dropped_is_named() {
    let write = op_node(&[], "write", vec![access(0, 0, Mode::Write, 0..8)]);
    let mut read = op_node(&[], "read", vec![access(0, 0, Mode::Read, 0..8)]);
    read.lane = 1;
    read.waits.push(device::NodeWait { why: "graph.inner".into(), node: 0, outcome: WaitOutcome::Dropped });
    let graph = Arc::new(TraceGraph { id: 0, name: "g".into(), nodes: vec![write, read] });
    let mut script = Script::default();
    script.launch(0, 0, &graph, &[]);
    let report = report(&script);
    let Finding::Race(race) = only(&report) else { panic!("{report}") };
    assert!(race.to_string().contains("in launch 1 of graph 'g'"), "{race}");
    assert_eq!(race.dropped.iter().map(|why| why.as_str()).collect::<Vec<_>>(), ["graph.inner"]);
}

#[test]
fn members_that_ask_for_different_things_are_told_with_rank_and_place() {
    let mut script = Script::default();
    for (rank, numel) in [(0, 8), (1, 8), (2, 9)] {
        script.joint(rank, 0, ("tp", &[0, 1, 2]), &format!("all_gather of {numel} f32"), vec![]);
    }
    let report = report(&script);
    let Finding::Disagree { group, seq: 0, asked } = only(&report) else { panic!("{report}") };
    assert_eq!((group.as_str(), asked[2].rank, asked[2].asks.as_str()), ("tp", 2, "all_gather of 9 f32"));
}

#[test]
fn a_call_that_a_member_never_makes_is_told_unless_the_trace_may_end_there() {
    let mut script = Script::default();
    for (rank, calls) in [(0, 2), (1, 1), (2, 2)] {
        (0..calls).for_each(|_| script.joint(rank, 0, ("tp", &[0, 1, 2]), "barrier", vec![]));
    }
    let report = report(&script);
    let Finding::Missing { seq: 1, missing, .. } = only(&report) else { panic!("{report}") };
    assert_eq!(*missing, [1]);
    let piece = VerifyOptions { window: Window::Piece, ..VerifyOptions::default() };
    assert!(verify(&script.trace, &piece).is_clean());
}

#[test]
fn a_trace_that_begins_in_the_middle_of_a_call_is_no_mistake() {
    let mut script = Script::default();
    for (rank, calls) in [(0, 3), (1, 3)] {
        (0..calls).for_each(|_| script.joint(rank, 0, ("tp", &[0, 1]), "barrier", vec![]));
    }
    // Rank 1's first call was before the recording.
    let first = script.trace.events.iter().position(|event| matches!(event, TraceEvent::Joint { rank: 1, .. }));
    script.trace.events.remove(first.unwrap());
    assert!(report(&script).is_clean());
}

/// Two groups on two streams; rank 1 calls them the other way round. On one stream that is a circle.
fn swapped(stream_of: impl Fn(u32, &str) -> u32) -> Script {
    let mut script = Script::default();
    for (rank, order) in [(0, ["a", "b"]), (1, ["b", "a"])] {
        for group in order {
            script.joint(rank, stream_of(rank, group), (group, &[0, 1]), "barrier", vec![]);
        }
    }
    script
}

#[test]
fn calls_swapped_on_one_stream_never_end() {
    let report = report(&swapped(|_, _| 0));
    let circle = report.findings().iter().find_map(|finding| match finding {
        Finding::Circle(circle) => Some(circle),
        _ => None,
    });
    let circle = circle.unwrap_or_else(|| panic!("{report}"));
    let ranks: Vec<u32> = circle.iter().map(|one| one.who.rank).collect();
    assert_eq!(ranks.len(), 2);
    assert!(circle.iter().any(|one| one.until.contains("group 'a'")), "{report}");
    assert!(circle.iter().any(|one| one.until.contains("group 'b'")), "{report}");
    let picture = Picture::new(&swapped(|_, _| 0).trace, &Finding::Circle(circle.clone()));
    assert!(picture.to_dot().contains("n1 -> n0"), "{}", picture.to_dot());
}

#[test]
fn calls_swapped_on_streams_of_their_own_might_lock_a_machine_that_is_full() {
    let script = swapped(|_, group| u32::from(group == "b"));
    let Finding::CallOrder(calls) = only(&report(&script)).clone() else { panic!("{}", report(&script)) };
    assert_eq!(calls.len(), 2);
    let free = VerifyOptions { call_order: CallOrder::Free, ..VerifyOptions::default() };
    assert!(verify(&script.trace, &free).is_clean());
}

#[test]
fn a_host_that_waits_for_what_its_peer_submits_later_is_a_circle() {
    let mut script = Script::default();
    // Each rank calls its own group first, and its host waits for that before it calls the other.
    for (rank, order) in [(0, ["a", "b"]), (1, ["b", "a"])] {
        script.joint(rank, 0, (order[0], &[0, 1]), "barrier", vec![]);
        script.host_wait(rank, 0);
        script.joint(rank, 1, (order[1], &[0, 1]), "barrier", vec![]);
    }
    let report = report(&script);
    assert!(report.findings().iter().any(|finding| matches!(finding, Finding::Circle(_))), "{report}");
}

#[test]
fn equal_mistakes_are_told_once_and_counted() {
    let mut script = Script::default();
    for i in 0..10 {
        let fresh = device::TraceAccess { label: "out".into(), ..access(0, i, Mode::Write, 0..8) };
        script.op_named(0, 0, "a", vec![fresh.clone()]);
        script.op_named(0, 1, "b", vec![fresh]);
    }
    let report = report(&script);
    only(&report);
    assert_eq!(report.repeats(), 9);
    assert!(report.to_string().ends_with("20 operations on 1 rank: 1 finding, and 9 more like them"), "{report}");
}

#[test]
fn findings_are_told_together_by_the_wait_that_is_missing_and_counted() {
    let mut script = Script::default();
    for buffer in 0..3u32 {
        script.op_named(0, 0, &format!("write{buffer}"), vec![access(0, buffer, Mode::Write, 0..8)]);
        script.record(0, 0, "e");
        let why = ["test.a", "test.b", "test.a"][buffer as usize];
        // Each reader has a stream of its own, so that no other wait covers the one that is missing.
        script.wait(0, 1 + buffer, "e", why, WaitOutcome::Dropped);
        script.op_named(0, 1 + buffer, &format!("read{buffer}"), vec![access(0, buffer, Mode::Read, 0..8)]);
    }
    let report = verify(&script.trace, &VerifyOptions::default());
    let text = report.to_string();
    let heads: Vec<&str> =
        text.lines().filter(|line| line.contains(": ") && line.starts_with(['w', '3', '6'])).collect();
    assert_eq!(
        heads,
        ["without 'test.a': 2 findings", "without 'test.b': 1 finding", "6 operations on 1 rank: 3 findings"]
    );
    let numbered: Vec<&str> =
        text.lines().filter_map(|line| line.split_once(". race")).map(|(number, _)| number).collect();
    assert_eq!(numbered, ["1", "2", "3"]);
    // The numbers are those of the list.
    assert!(report.findings()[2].to_string().contains("'m1'"), "{text}");
    let picture = Picture::new(&script.trace, &report.findings()[2]).to_svg();
    assert!(picture.contains("nothing orders these: no 'test.b'"), "{picture}");
}
