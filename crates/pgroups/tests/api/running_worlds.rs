//! Ranks as threads: what comes back, in which order, and what survives what.

use device::{DType, Error, Machine, Reduce};
use pgroups::{GlobalRank, Key, Needs, PgError, ProcessGroups, Rank, local};

use crate::running_support::*;

#[test]
fn results_come_back_by_rank() {
    for machine in machines() {
        let got = local(&machine, 5, |rank| Ok::<_, PgError>((rank.global.0 * 10, rank.world_size)));
        assert_eq!(got.unwrap(), [(0, 5), (10, 5), (20, 5), (30, 5), (40, 5)]);
    }
    let none: Vec<()> = local(&cpu(1), 0, |_| Ok::<_, PgError>(())).unwrap();
    assert!(none.is_empty());
}

#[test]
fn a_machine_runs_one_world_after_another() {
    for machine in machines() {
        for world in [3, 1, 4] {
            let sums = local(&machine, world, |rank| {
                let groups = ProcessGroups::build(&rank, &flat(world), &Needs::keys([Key::DP]))?;
                let stream = rank.device.stream("compute")?;
                let one = put(&stream, "one", vec![1f32]);
                groups.get(&Key::DP, "test")?.all_reduce(&stream, &one, Reduce::Sum)?;
                Ok::<_, PgError>(get::<f32>(&stream, &one)?[0])
            });
            assert_eq!(sums.unwrap(), vec![world as f32; world as usize]);
        }
    }
}

#[test]
fn a_world_after_a_failed_one_is_a_new_world() {
    for machine in [cpu(2), Machine::sim(1)] {
        let run = |dies: bool| {
            local(&machine, 3, |rank| {
                let groups = ProcessGroups::build(&rank, &flat(3), &Needs::keys([Key::DP]))?;
                let stream = rank.device.stream("compute")?;
                let one = put(&stream, "one", vec![1f32]);
                assert!(!(dies && rank.global.0 == 1), "rank 1 dies on purpose");
                groups.get(&Key::DP, "test")?.all_reduce(&stream, &one, Reduce::Sum)?;
                Ok::<_, PgError>(get::<f32>(&stream, &one)?[0])
            })
        };
        assert!(matches!(run(true), Err(PgError::RankPanicked { rank: GlobalRank(1), .. })));
        assert_eq!(run(false).unwrap(), [3.0; 3]);
    }
}

#[test]
fn devices_that_outlive_their_world_are_told() {
    let machine = cpu(1);
    let kept = local(&machine, 2, |rank| Ok::<_, PgError>(rank.device.clone())).unwrap();
    let error = local(&machine, 2, |_| Ok::<_, PgError>(())).unwrap_err();
    assert!(matches!(error, PgError::Device(Error::RankTaken { rank: 0 })), "{error}");
    drop(kept);
    local(&machine, 2, |_| Ok::<_, PgError>(())).unwrap();
}

#[test]
fn a_failure_that_nobody_looked_at_still_comes_back() {
    // The body returns while its operation is still queued in a stream that lives on.
    for machine in [cpu(1), Machine::sim(1)] {
        let error = local(&machine, 1, |rank| {
            let stream = rank.device.stream("compute")?;
            stream.launch(device::Op::host("late", "test", Vec::new(), |_| Err("too late".into())))?;
            Ok::<_, PgError>(stream)
        });
        let text = error.map(|_| ()).unwrap_err().chain();
        assert!(text.contains("rank 0 failed") && text.contains("late@test") && text.contains("too late"), "{text}");
    }
}

#[test]
fn equal_seeds_give_equal_traces_over_all_ranks() {
    let run = |seed: u64| {
        let machine = Machine::sim(seed);
        machine.trace_start();
        local(&machine, 4, |rank| {
            let groups = ProcessGroups::build(&rank, &flat(4), &Needs::keys([Key::DP]))?;
            let (stream, side) = (rank.device.stream("compute")?, rank.device.stream("side")?);
            let (a, b) = (put(&stream, "a", values::<f32>(rank.global.0, 9)), put(&side, "b", vec![1f32; 4]));
            let dp = groups.get(&Key::DP, "test")?;
            dp.all_reduce(&stream, &a, Reduce::Sum)?;
            dp.second("side")?.all_reduce(&side, &b, Reduce::Max)?;
            side.synchronize()?;
            Ok::<_, PgError>(stream.synchronize()?)
        })
        .unwrap();
        machine.trace_stop().to_text()
    };
    assert_eq!(run(7), run(7));
    assert_ne!(run(7), run(8), "a seed that changes nothing tests nothing");
}

#[test]
fn the_dry_driver_runs_ranks_without_values() {
    local(&Machine::dry(), 4, |rank| {
        let groups = ProcessGroups::build(&rank, &flat(4), &Needs::keys([Key::DP]))?;
        let stream = rank.device.stream("compute")?;
        let data = alloc(&rank.device, "data", 1 << 40, DType::F32);
        groups.get(&Key::DP, "test")?.all_reduce(&stream, &data, Reduce::Sum)?;
        stream.synchronize()?;
        let none = stream.download::<f32>(&data).map(|_| ()).unwrap_err();
        assert!(matches!(none, Error::NoValues { .. }));
        Ok::<_, PgError>(())
    })
    .unwrap();
}

#[test]
fn one_rank_alone_is_a_world_of_one() {
    for machine in machines() {
        let rank = Rank::alone(&machine, GlobalRank(0), 1).unwrap();
        let groups = ProcessGroups::build(&rank, &flat(1), &Needs::keys([Key::DP, Key::MP])).unwrap();
        let stream = rank.device.stream("compute").unwrap();
        let data = put(&stream, "data", vec![2f32, 3.0]);
        groups.get(&Key::DP, "test").unwrap().all_reduce(&stream, &data, Reduce::Avg).unwrap();
        assert_eq!(get::<f32>(&stream, &data).unwrap(), [2.0, 3.0]);
    }
}
