//! Written values become readable: once for each write, by whoever reads first, and never stale.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use ddp::{BucketSize, Cause, Counters, Ddp, DdpConfig, DdpError, Dispatch, Loaded, PostGather, why};
use device::{DType, MemoryKind, TraceEvent, ops::Cast};
use pgroups::{Epochs, Pass, PgError, Turn};

use crate::support::{Caught, One, Setup, constant, cpu, declared, machines, ours, sim};

/// Three buckets of one parameter each; parameter 0 is read first, and lies in the last bucket.
fn three(dispatch: Dispatch) -> Setup {
    let ddp = DdpConfig { dispatch, ..DdpConfig::default() };
    Setup { ddp, ..Setup::new(2, declared(&[100, 60, 20])) }.sharded()
}

/// A step of a user's own optimizer: every value falls by 1.
fn step(one: &One) -> Result<(), Caught> {
    let params = one.buffers.params().len();
    one.microbatch(|one| (0..params).rev().try_for_each(|i| one.contribute(i, 1.0)))?;
    one.ddp.finish_grads()?;
    one.descend(&one.stream, 1.0)
}

/// Publications that each action starts, and how many there are to begin with.
fn published(one: &One) -> u64 {
    one.ddp.counters().publications
}

/// Asks for a parameter as a forward pass does. The publications that this started.
fn ask(one: &One, i: usize) -> Result<u64, Caught> {
    let before = published(one);
    let mut turn = Turn::eager(Pass::Forward);
    turn.read(one.param(i), &one.stream)?;
    turn.done(one.param(i), &one.stream)?;
    Ok(published(one) - before)
}

fn asks(one: &One, order: &[usize]) -> Result<Vec<u64>, Caught> {
    order.iter().map(|&i| ask(one, i)).collect()
}

fn on_all(setup: &Setup, body: impl Fn(&mut One) -> Result<(), Caught> + Sync) {
    for machine in machines() {
        setup.run(&machine, &body).unwrap();
    }
}

#[test]
fn a_first_read_publishes_its_bucket_and_the_next_and_later_microbatches_nothing() {
    on_all(&three(Dispatch::Chain), |one| {
        assert_eq!(asks(one, &[0, 1, 2])?, [0, 0, 0], "initial values are published");
        for _ in 0..3 {
            step(one)?;
            assert_eq!(asks(one, &[0, 1, 2])?, [2, 1, 0]);
            assert_eq!(asks(one, &[0, 1, 2, 2, 0])?, [0; 5]);
        }
        assert_eq!(one.ddp.counters().early, 0);
        let causes: Vec<_> = one.ddp.publications().into_iter().map(|p| p.unwrap().cause).collect();
        assert_eq!(causes, [Cause::Chain, Cause::Chain, Cause::Read], "by bucket: the last one is read first");
        Ok(())
    });
}

#[test]
fn a_published_read_asks_nobody() {
    on_all(&three(Dispatch::Chain), |one| {
        step(one)?;
        asks(one, &[0, 1, 2])?;
        let lookups = one.ddp.counters().lookups;
        assert_eq!(lookups, 3);
        for _ in 0..4 {
            asks(one, &[0, 1, 2])?;
        }
        assert_eq!(one.ddp.counters().lookups, lookups);
        Ok(())
    });
}

#[test]
fn a_read_out_of_turn_publishes_itself_and_the_chain_notices_once() {
    // The parameter that is declared last is read first.
    on_all(&three(Dispatch::Chain), |one| {
        step(one)?;
        assert_eq!(asks(one, &[2, 0, 1])?, [1, 2, 0]);
        assert_eq!(one.ddp.counters().early, 1);
        // What a read makes ready is ready for the next: the middle one, then the first.
        step(one)?;
        assert_eq!(asks(one, &[0, 1, 1, 2])?, [2, 1, 0, 0]);
        assert_eq!(one.ddp.counters().early, 1);
        Ok(())
    });
}

#[test]
fn aligned_reads_start_no_other_bucket() {
    on_all(&three(Dispatch::Aligned), |one| {
        step(one)?;
        assert_eq!(asks(one, &[0, 0, 1, 2])?, [1, 0, 1, 1]);
        step(one)?;
        one.ddp.dispatch()?;
        assert_eq!(published(one), 6);
        assert_eq!(asks(one, &[0, 1, 2])?, [0, 0, 0]);
        Ok(())
    });
}

#[test]
fn the_optimizer_publishes_where_it_is_told_to() {
    for dispatch in [Dispatch::WithOptimizer, Dispatch::AtStep] {
        on_all(&three(dispatch), |one| {
            let mut optimizer = one.optimizer(ddp::OptimizerConfig::default())?;
            for round in 1..4 {
                one.microbatch(|one| (0..3).rev().try_for_each(|i| one.contribute(i, 1.0)))?;
                one.ddp.finish_grads()?;
                optimizer.step(&one.stream, &[0.1])?;
                assert_eq!(published(one), 3 * round);
                assert_eq!(asks(one, &[0, 1, 2])?, [0, 0, 0]);
            }
            assert_eq!(one.ddp.counters().lookups, 0, "readers find everything done");
            Ok(())
        });
    }
}

#[test]
fn a_captured_read_issues_nothing_and_the_next_eager_one_all() {
    struct Deaf;
    impl pgroups::Recorder for Deaf {
        fn read(&mut self, _: &pgroups::Param, _: &device::Stream) -> Result<(), PgError> {
            Ok(())
        }
        fn done(&mut self, _: &pgroups::Param, _: &device::Stream) -> Result<(), PgError> {
            Ok(())
        }
        fn open(&mut self, _: &pgroups::Param, _: &device::Stream) -> Result<Option<pgroups::Keep>, PgError> {
            Ok(None)
        }
        fn landed(&mut self, _: &pgroups::Param, _: &device::Stream) -> Result<(), PgError> {
            Ok(())
        }
        fn hand_over(&mut self, _: std::sync::Arc<dyn pgroups::HandOver>) -> Result<(), pgroups::PgError> {
            unreachable!("whole weights hand nothing over")
        }
    }
    on_all(&three(Dispatch::Chain), |one| {
        step(one)?;
        Turn::recorded(Pass::Forward, &mut Deaf).read(one.param(0), &one.stream)?;
        assert_eq!(published(one), 0);
        assert_eq!(ask(one, 0)?, 2);
        Ok(())
    });
}

#[test]
fn backward_and_recompute_never_publish() {
    on_all(&three(Dispatch::Chain), |one| {
        step(one)?;
        for pass in [Pass::Backward, Pass::Recompute] {
            let mut turn = Turn::eager(pass);
            turn.read(one.param(0), &one.stream)?;
            turn.done(one.param(0), &one.stream)?;
        }
        assert_eq!(one.ddp.counters().lookups, 0);
        assert_eq!(published(one), 0);
        Ok(())
    });
}

#[test]
fn whoever_owns_the_schedule_gets_stale_values_refused_and_what_is_in_flight_waited_for() {
    on_all(&three(Dispatch::Chain), |one| {
        // Before any step nothing is stale.
        {
            let _own = one.ddp.own_schedule();
            assert_eq!(asks(one, &[0, 1, 2])?, [0, 0, 0]);
        }
        step(one)?;
        {
            let _own = one.ddp.own_schedule();
            let stale = ask(one, 0).unwrap_err();
            let stale = stale.downcast_ref::<PgError>();
            assert!(
                matches!(stale, Some(PgError::Stale { param, written: 2, issued: 1 }) if param == "p0"),
                "{stale:?}"
            );
            assert_eq!(published(one), 0);
        }
        // In flight: the first read started its own and the next.
        assert_eq!(ask(one, 0)?, 2);
        {
            let _own = one.ddp.own_schedule();
            assert_eq!(ask(one, 1)?, 0, "waited for, and no next one");
            assert!(ask(one, 2).is_err());
            one.ddp.publish(&one.stream)?;
            assert_eq!(published(one), 3);
            assert_eq!(ask(one, 2)?, 0);
        }
        step(one)?;
        assert_eq!(asks(one, &[0, 1, 2])?, [2, 1, 0], "the guard is gone");
        Ok(())
    });
}

#[test]
fn a_forced_publication_waits_for_what_is_in_flight_and_repeats_nothing() {
    on_all(&three(Dispatch::Chain), |one| {
        step(one)?;
        assert_eq!(ask(one, 0)?, 2);
        let lookups = one.ddp.counters().lookups;
        one.ddp.publish(&one.stream)?;
        one.ddp.publish(&one.stream)?;
        assert_eq!(published(one), 3);
        assert_eq!(one.ddp.publications()[0].unwrap().cause, Cause::Forced);
        asks(one, &[0, 1, 2])?;
        assert_eq!(one.ddp.counters().lookups, lookups, "nothing is left to ask");
        Ok(())
    });
}

#[test]
fn a_second_dispatch_of_a_bucket_is_refused_in_flight_and_behind_it() {
    on_all(&three(Dispatch::Aligned), |one| {
        let twice = |group| match one.ddp.dispatch_group(group) {
            Err(DdpError::PublishedTwice { epoch, .. }) => epoch,
            other => panic!("{other:?}"),
        };
        assert_eq!(twice(0), 1, "initial values are published");
        step(one)?;
        one.ddp.dispatch_group(2)?;
        assert_eq!(twice(2), 2, "in flight");
        assert_eq!(asks(one, &[0, 1, 2])?, [0, 1, 1]);
        assert_eq!([0, 1, 2].map(twice), [2; 3], "read");
        assert_eq!(one.ddp.counters().publications, 3);
        let lost = one.ddp.dispatch_group(3).unwrap_err();
        assert!(matches!(lost, DdpError::NoBucketGroup { group: 3, groups: 3 }), "{lost}");
        Ok(())
    });
}

#[test]
fn forced_right_after_a_step_the_values_are_the_stepped_ones() {
    let mut setup = Setup::new(2, vec![constant("a", &[300], 1.0), constant("b", &[70], 1.0)]).sharded();
    for stored in [DType::F32, DType::Bf16] {
        setup.declared.iter_mut().for_each(|param| param.stored = stored);
        on_all(&setup, |one| {
            let mut optimizer = one.optimizer(ddp::OptimizerConfig::default())?;
            let side = one.device.stream("optimizer")?;
            one.microbatch(|one| (0..2).rev().try_for_each(|i| one.contribute(i, 1.0)))?;
            one.ddp.finish_grads()?;
            optimizer.step(&side, &[0.5])?;
            one.ddp.publish(&one.stream)?;
            for memory in one.ddp.buckets() {
                let values = crate::support::wide(&one.stream, &memory.values)?;
                let stepped = values.iter().filter(|value| (**value - 0.5).abs() < 1e-2).count();
                assert!(stepped == 300 || stepped == 70, "{stored} {:?}", &values[..100]);
            }
            Ok(())
        });
    }
}

#[test]
fn a_second_load_over_a_publication_in_flight_is_refused_and_changes_nothing() {
    on_all(&three(Dispatch::Chain), |one| {
        step(one)?;
        assert_eq!(ask(one, 0)?, 2); // the second bucket is on its way, unread
        let write = |_: &ddp::BucketMemory| -> Result<(), DdpError> { panic!("a write over a publication in flight") };
        let refused = one.ddp.load(&one.stream, Loaded::Shards, write).unwrap_err();
        assert!(matches!(&refused, DdpError::PublicationInFlight { group } if group.contains("'p1'")), "{refused}");
        let epochs = |i: usize| one.param(i).publisher().unwrap().epochs();
        let at = |issued| Epochs { written: 2, issued };
        assert_eq!([0, 1, 2].map(epochs), [at(2), at(2), at(1)]);
        one.ddp.publish(&one.stream)?;
        one.ddp.load(&one.stream, Loaded::Shards, |_| Ok(()))?;
        assert_eq!(epochs(1), Epochs { written: 3, issued: 2 });
        Ok(())
    });
}

#[test]
fn a_full_load_counts_as_published_a_load_of_shards_does_not() {
    on_all(&three(Dispatch::Chain), |one| {
        let fill = |view: &device::View, value| -> Result<(), DdpError> {
            Ok(one.stream.launch(device::ops::Fill { y: view, value }.op("load")?)?)
        };
        one.ddp.load(&one.stream, Loaded::Whole, |bucket| fill(&bucket.values, 4.0))?;
        assert_eq!(asks(one, &[0, 1, 2])?, [0, 0, 0]);
        assert_eq!(one.read(1)?, [4.0; 60]);
        let own = one.rank as f32;
        one.ddp.load(&one.stream, Loaded::Shards, |bucket| fill(&bucket.own_values, own))?;
        assert_eq!(asks(one, &[0, 1, 2])?, [2, 1, 0]);
        // 100 elements in a bucket of 128: the second half is the other rank's.
        let want: Vec<f32> = (0..100).map(|i| if i < 64 { 0.0 } else { 1.0 }).collect();
        assert_eq!(one.read(0)?, want);
        Ok(())
    });
}

#[test]
fn work_behind_a_gather_is_done_once_for_each_publication() {
    // A bf16 copy of the values is made behind each gather; readers of the copy see this step's.
    let calls = Arc::new(AtomicU64::new(0));
    let counted = calls.clone();
    let post: PostGather = Arc::new(move |stream, values| {
        counted.fetch_add(1, Ordering::Relaxed);
        let device = stream.device();
        let copy = device.alloc("copy", &[values.numel()], DType::Bf16, MemoryKind::Other)?;
        Ok(stream.launch(Cast { x: values, y: &copy }.op("post")?)?)
    });
    let mut setup = three(Dispatch::Chain);
    setup.ddp.post_gather = Some(post);
    for (round, machine) in (0..).zip([cpu(), sim(4)]) {
        setup
            .run(&machine, |one| {
                step(one)?;
                ask(one, 0)?;
                one.ddp.publish(&one.stream)?; // completes the one in flight, with its work
                one.ddp.publish(&one.stream)?;
                asks(one, &[0, 1, 2])?;
                Ok(())
            })
            .unwrap();
        assert_eq!(calls.load(Ordering::Relaxed), 6 * (round + 1), "three buckets on two ranks");
    }
}

#[test]
fn parameters_keep_no_replaced_wrapper_alive() {
    on_all(&three(Dispatch::Chain), |one| {
        let config = DdpConfig { dispatch: Dispatch::Aligned, ..DdpConfig::default() };
        let again = Ddp::attach(&one.buffers, &one.groups, config, &one.stream)?;
        one.device.synchronize()?;
        let old = std::mem::replace(&mut one.ddp, again);
        let publisher = one.param(0).publisher().unwrap();
        drop(old);
        assert!(Arc::ptr_eq(&publisher, &one.param(0).publisher().unwrap()), "the new one's");
        step(one)?;
        assert_eq!(asks(one, &[0, 1, 2])?, [1, 1, 1], "aligned, as the new wrapper says");
        Ok(())
    });
}

#[test]
fn without_an_owner_current_values_are_read_and_stale_ones_refused() {
    on_all(&three(Dispatch::Chain), |one| {
        step(one)?;
        ask(one, 0)?;
        one.device.synchronize()?;
        let setup = three(Dispatch::Chain);
        let publishers: Vec<_> = (0..3).map(|i| one.param(i).publisher().unwrap()).collect();
        // Another model takes the wrapper's place in this rank, and the wrapper goes.
        let other = Setup { declared: declared(&[5]), ..setup };
        let layout = pgroups::Layout::new(&other.layout).unwrap();
        let buffers = ddp::ParamBuffers::allocate(&one.handle, &layout, &other.declared, other.plan)?;
        let replaced = Ddp::attach(&buffers, &one.groups, other.ddp, &one.stream)?;
        drop(std::mem::replace(&mut one.ddp, replaced));
        publishers.iter().try_for_each(|publisher| publisher.issue())?;
        let mut turn = Turn::eager(Pass::Forward);
        turn.read(one.param(0), &one.stream)?;
        turn.read(one.param(1), &one.stream)?; // was on its way
        let stale = turn.read(one.param(2), &one.stream).unwrap_err();
        assert!(matches!(stale, PgError::Stale { .. }), "{stale}");
        one.param(2).landed_sink().unwrap().landed(one.param(2), pgroups::After::Stream(&one.stream))?;
        Ok(())
    });
}

#[test]
fn a_plan_for_another_group_is_refused() {
    let mut setup = three(Dispatch::Chain);
    setup.plan.sharding = ddp::Sharding::On { dense: 4, expert: 1 };
    let text = ours(&setup.run(&sim(1), |_| Ok(())).unwrap_err()).to_string();
    assert!(text.contains("dense parameters are cut into 4 shards") && text.contains("has 2 members"), "{text}");
}

#[test]
fn a_read_in_another_order_than_declared_is_never_stale() {
    // Buckets A, B, C with one parameter each; forward reads A, C, B; w = 1, gradient 1, descent at rate 1.
    let setup = Setup::new(2, ["A", "B", "C"].map(|name| constant(name, &[40], 1.0)).to_vec());
    for setup in [setup.clone(), setup.sharded()] {
        for seed in 0..50 {
            let outputs = setup.run(&sim(seed), |one| {
                [0, 2, 1].map(|i| one.read(i)).into_iter().collect::<Result<Vec<_>, _>>()?;
                step(one)?;
                [0, 2, 1].map(|i| one.read(i)).into_iter().collect::<Result<Vec<_>, _>>()
            });
            assert!(outputs.unwrap().iter().flatten().flatten().all(|&w| w == 0.0), "seed {seed}");
        }
    }
}

#[test]
fn a_reader_one_bucket_ahead_sees_this_steps_values() {
    // What a prefetch does: a stream of its own asks for the next layer's weight before this layer's is used.
    let setup = Setup::new(2, ["layer0", "layer1"].map(|name| constant(name, &[40], 1.0)).to_vec()).sharded();
    for seed in 0..100 {
        let outputs = setup.run(&sim(seed), |one| {
            let prefetch = one.device.stream("prefetch")?;
            let side = one.device.stream("optimizer")?;
            for round in 0..3 {
                one.microbatch(|one| (0..2).rev().try_for_each(|i| one.contribute(i, 1.0)))?;
                one.ddp.finish_grads()?;
                one.descend(&side, 1.0)?;
                assert_eq!(one.read_on(&prefetch, 1)?, [-(round as f32); 40]);
                assert_eq!(one.read(0)?, [-(round as f32); 40]);
            }
            Ok(())
        });
        outputs.unwrap();
    }
}

#[test]
fn each_bucket_is_gathered_once_a_write_whatever_reads_it() {
    let machine = sim(9);
    machine.trace_start();
    let setup = three(Dispatch::Chain);
    setup
        .run(&machine, |one| {
            let side = one.device.stream("side")?;
            for _ in 0..4 {
                step(one)?;
                for _ in 0..3 {
                    asks(one, &[0, 1, 2])?;
                    one.read_on(&side, 1)?;
                }
            }
            Ok(())
        })
        .unwrap();
    let trace = machine.trace_stop();
    let gathers = |rank: u32| {
        let calls = trace.events.iter().filter(|event| match event {
            TraceEvent::Joint { rank: r, group, what, .. } => {
                *r == rank && group.contains("ddp_gather") && what.starts_with("all_gather")
            }
            _ => false,
        });
        calls.count()
    };
    assert_eq!([gathers(0), gathers(1)], [12, 12]);
}

#[test]
fn buckets_of_one_group_travel_together() {
    let mut setup = three(Dispatch::Chain);
    setup.plan.joining = ddp::Joining::One;
    setup.plan.bucket_size = BucketSize::PerUnit;
    on_all(&setup, |one| {
        let before: Vec<_> = (0..3).map(|i| one.read(i)).collect::<Result<_, _>>()?;
        step(one)?;
        assert_eq!(asks(one, &[1, 0, 2])?, [1, 0, 0]);
        assert_eq!(one.ddp.counters(), Counters { reductions: 1, publications: 1, lookups: 1, early: 0 });
        for (i, before) in before.into_iter().enumerate() {
            let want: Vec<f32> = before.iter().map(|value| value - 1.0).collect();
            assert_eq!(one.read(i)?, want);
        }
        Ok(())
    });
}

#[test]
fn parameters_of_a_bucket_group_share_one_publisher() {
    // Buckets {p3, p2} and {p1, p0}: by hand, two publishers.
    let mut setup = Setup { plan: three(Dispatch::Chain).plan, ..Setup::new(2, declared(&[40, 70, 30, 90])) };
    setup.plan.bucket_size = BucketSize::Numel(100);
    let setup = setup.sharded();
    on_all(&setup, |one| {
        assert_eq!(one.ddp.plan().groups().len(), 2);
        let publishers: Vec<_> = (0..4).map(|i| one.param(i).publisher().unwrap()).collect();
        let same = |a: usize, b: usize| Arc::ptr_eq(&publishers[a], &publishers[b]);
        assert_eq!([same(3, 2), same(1, 0), same(2, 1)], [true, true, false]);
        // Whoever asks first, the others find it done.
        step(one)?;
        assert_eq!(asks(one, &[1, 0, 2, 3])?, [2, 0, 0, 0]);
        assert_eq!(one.ddp.counters().lookups, 2);
        Ok(())
    });
}

#[test]
fn every_synchronisation_has_its_own_name() {
    let names: std::collections::BTreeSet<&str> = why::ALL.iter().map(|why| why.0).collect();
    assert_eq!(names.len(), why::ALL.len());
    assert!(names.iter().all(|name| name.starts_with("ddp.")));
}

#[test]
fn a_publication_while_a_graph_is_captured_is_refused_and_goes_out_behind_it() {
    on_all(&three(Dispatch::Chain), |one| {
        step(one)?;
        let other = one.device.stream("captured")?;
        other.begin_capture("g")?;
        let error = one.ddp.publish(&one.stream).expect_err("a graph is captured");
        assert!(matches!(&error, ddp::DdpError::PublishInCapture { epoch: 2, .. }), "{error}");
        assert!(one.ddp.dispatch_group(0).is_err() && published(one) == 0);
        other.end_capture()?;
        one.ddp.publish(&one.stream)?;
        assert_eq!(published(one), 3);
        Ok(())
    });
}
