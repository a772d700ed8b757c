//! Coalesced collectives, and second communicators.

use device::{DType, Machine, Reduce, Stream, TraceEvent, View, bf16};
use pgroups::{Group, GroupRank, PgError, PlanError, local};

use crate::running_support::*;

const MEMBERS: &[&[u32]] = &[&[2, 0, 3, 1]];

/// What a batch of everything brings: sources and destinations of one rank.
struct Bundle {
    shard: View,
    full: View,
    grads: View,
    part: View,
    sum: View,
    weights: View,
    source: View,
    dest: View,
}

impl Bundle {
    fn new(stream: &Stream, rank: u32) -> Bundle {
        let (n, device) = (4, stream.device());
        Bundle {
            shard: put(stream, "shard", values::<f32>(rank, 7)),
            full: alloc(&device, "full", 7 * n, DType::F32),
            grads: put(stream, "grads", values::<bf16>(rank, 5 * n)),
            part: alloc(&device, "part", 5, DType::Bf16),
            sum: put(stream, "sum", values::<f32>(rank, 1)),
            weights: put(stream, "weights", values::<bf16>(rank, 9)),
            source: put(stream, "source", values::<f32>(rank, 3 * n)),
            dest: alloc(&device, "dest", 3 * n, DType::F32),
        }
    }

    fn read(&self, stream: &Stream) -> Result<Vec<u32>, PgError> {
        let mut bits = Vec::new();
        for view in [&self.full, &self.part, &self.sum, &self.weights, &self.dest] {
            match view.dtype() {
                DType::Bf16 => bits.extend(get::<bf16>(stream, view)?.iter().map(|v| u32::from(v.to_bits()))),
                _ => bits.extend(get::<f32>(stream, view)?.iter().map(|v| v.to_bits())),
            }
        }
        Ok(bits)
    }
}

fn run(machine: &Machine, submit: impl Fn(&Group, &Stream, &Bundle) -> Result<(), PgError> + Sync) -> Vec<Vec<u32>> {
    let got = local(machine, 4, |rank| {
        let group = group_of(&rank, &custom("mine", MEMBERS), "mine")?;
        let stream = rank.device.stream("compute")?;
        let bundle = Bundle::new(&stream, rank.global.0);
        submit(&group, &stream, &bundle)?;
        bundle.read(&stream)
    });
    got.unwrap_or_else(|e| panic!("{}: {}", machine.driver(), e.chain()))
}

fn together(group: &Group, stream: &Stream, b: &Bundle) -> Result<(), PgError> {
    let batch = group.batch().all_gather(&b.shard, &b.full).reduce_scatter(&b.grads, &b.part, Reduce::Avg);
    let batch = batch.all_reduce(&b.sum, Reduce::Max).broadcast(&b.weights, GroupRank(1));
    batch.all_to_all(&b.source, &b.dest).submit(stream)
}

fn apart(group: &Group, stream: &Stream, b: &Bundle) -> Result<(), PgError> {
    group.all_gather(stream, &b.shard, &b.full)?;
    group.reduce_scatter(stream, &b.grads, &b.part, Reduce::Avg)?;
    group.all_reduce(stream, &b.sum, Reduce::Max)?;
    group.broadcast(stream, &b.weights, GroupRank(1))?;
    group.all_to_all(stream, &b.source, &b.dest)
}

#[test]
fn coalesced_collectives_give_the_bits_of_single_ones() {
    let want = run(&cpu(2), apart);
    for machine in machines() {
        assert_eq!(run(&machine, together), want, "{}", machine.driver());
        assert_eq!(run(&machine, apart), want, "{}", machine.driver());
    }
}

#[test]
fn a_batch_is_one_call_with_one_number() {
    let machine = Machine::sim(4);
    machine.trace_start();
    run(&machine, |group, stream, bundle| {
        together(group, stream, bundle)?;
        group.barrier(stream)
    });
    let trace = machine.trace_stop();
    let joints: Vec<(u64, &str)> = trace
        .events
        .iter()
        .filter_map(|event| match event {
            TraceEvent::Joint { rank: 3, group, group_seq, what, .. } if group.starts_with("mine") => {
                Some((*group_seq, what.as_str()))
            }
            _ => None,
        })
        .collect();
    let all = "all_gather of 7 f32 + reduce_scatter(Avg) of 5 bf16 + all_reduce(Max) of 1 f32 + \
               broadcast(root 1) of 9 bf16 + all_to_all of 3 f32";
    assert_eq!(joints, [(0, all), (1, "barrier")]);
}

#[test]
fn of_a_batch_with_one_bad_call_nothing_is_queued() {
    for machine in [cpu(2), Machine::sim(1), Machine::dry()] {
        local(&machine, 4, |rank| {
            let group = group_of(&rank, &custom("mine", MEMBERS), "mine")?;
            let stream = rank.device.stream("compute")?;
            let (a, b) = (alloc(&rank.device, "a", 4, DType::F32), alloc(&rank.device, "b", 9, DType::F32));
            let uneven = group.batch().all_reduce(&a, Reduce::Sum).all_to_all(&b, &b).submit(&stream).unwrap_err();
            assert!(matches!(uneven, PgError::Refused { op: "coalesced", .. }), "{uneven}");
            let twice = group.batch().all_reduce(&a, Reduce::Sum).broadcast(&a.flat(3..4)?, GroupRank(0));
            let twice = twice.submit(&stream).unwrap_err();
            let why = twice.cause::<device::Error>();
            assert!(matches!(why, Some(device::Error::SelfConflict { .. })), "{}", twice.chain());
            let lost = group.batch().broadcast(&b, GroupRank(9)).submit(&stream).unwrap_err();
            let text = lost.chain();
            assert!(text.ends_with("the root is place 9 of a group of 4; places are 0..4"), "{text}");
            assert!(group.batch().is_empty());
            group.batch().submit(&stream)?;
            // Had any of these been queued, the members would disagree here.
            group.barrier(&stream)?;
            stream.synchronize().map_err(PgError::from)
        })
        .unwrap();
    }
}

#[test]
fn members_with_different_batches_are_told_both_lists() {
    for machine in [cpu(2), Machine::sim(1), Machine::sim(2)] {
        let error = local(&machine, 4, |rank| {
            let group = group_of(&rank, &custom("mine", MEMBERS), "mine")?;
            let stream = rank.device.stream("compute")?;
            let (a, b) = (put(&stream, "a", vec![1f32; 4]), put(&stream, "b", vec![1f32; 2]));
            let batch = group.batch().all_reduce(&a, Reduce::Sum);
            let batch = if rank.global.0 == 3 { batch } else { batch.all_reduce(&b, Reduce::Sum) };
            batch.submit(&stream)?;
            stream.synchronize().map_err(PgError::from)
        });
        let text = error.unwrap_err().chain();
        assert!(text.contains("disagree at #0"), "{text}");
        assert!(text.contains("rank 3 asks all_reduce(Sum) of 4 f32"), "{text}");
        assert!(text.contains("rank 2 asks all_reduce(Sum) of 4 f32 + all_reduce(Sum) of 2 f32"), "{text}");
    }
}

#[test]
fn a_group_of_one_coalesces_too() {
    local(&cpu(1), 1, |rank| {
        let group = group_of(&rank, &custom("mine", &[&[0]]), "mine")?;
        let stream = rank.device.stream("compute")?;
        let (a, b) = (put(&stream, "a", vec![1f32, 2.0]), alloc(&rank.device, "b", 2, DType::F32));
        let overlap = group.batch().all_gather(&a, &b).all_reduce(&b, Reduce::Sum).submit(&stream);
        assert!(matches!(overlap, Err(PgError::Refused { .. })));
        group.batch().all_gather(&a, &b).submit(&stream)?;
        assert_eq!(get::<f32>(&stream, &b)?, [1.0, 2.0]);
        Ok::<_, PgError>(())
    })
    .unwrap();
}

#[test]
fn a_second_communicator_has_an_order_of_its_own() {
    for machine in machines() {
        let got = local(&machine, 3, |rank| {
            let group = group_of(&rank, &custom("mine", &[&[1, 2, 0]]), "mine")?;
            let second = group.second("grads")?;
            assert_eq!((second.members(), second.place()), (group.members(), group.place()));
            let (compute, side) = (rank.device.stream("compute")?, rank.device.stream("side")?);
            let a = put(&compute, "a", values::<f32>(rank.global.0, 5));
            let b = put(&side, "b", values::<f32>(rank.global.0 + 10, 3));
            // The order over both differs from rank to rank, and on two streams that is allowed.
            if rank.global.0 == 1 {
                second.all_reduce(&side, &b, Reduce::Sum)?;
                group.all_reduce(&compute, &a, Reduce::Sum)?;
            } else {
                group.all_reduce(&compute, &a, Reduce::Sum)?;
                second.all_reduce(&side, &b, Reduce::Sum)?;
            }
            Ok::<_, PgError>((get::<f32>(&compute, &a)?, get::<f32>(&side, &b)?))
        })
        .unwrap();
        let sum = |base: u32, at: usize| [1, 2, 0].iter().map(|r| value::<f32>(base + r, at)).reduce(|a, b| a + b);
        for (a, b) in got {
            assert_eq!(a.into_iter().map(Some).collect::<Vec<_>>(), (0..5).map(|i| sum(0, i)).collect::<Vec<_>>());
            assert_eq!(b.into_iter().map(Some).collect::<Vec<_>>(), (0..3).map(|i| sum(10, i)).collect::<Vec<_>>());
        }
    }
}

#[test]
fn a_label_makes_one_second_communicator() {
    local(&cpu(1), 2, |rank| {
        let group = group_of(&rank, &custom("mine", &[&[0, 1]]), "mine")?;
        let second = group.second("grads")?;
        let twice = group.second("grads").unwrap_err();
        assert!(matches!(&twice, PgError::SecondTwice { label, .. } if label == "grads"), "{twice}");
        // Of the second communicator it is another label.
        assert!(second.second("grads")?.name().ends_with("/grads/grads"));
        let joined = group.second("grads/grads").unwrap_err();
        assert!(matches!(joined.cause(), Some(PlanError::BadName { .. })), "{joined}");
        Ok::<_, PgError>(())
    })
    .unwrap();
}
