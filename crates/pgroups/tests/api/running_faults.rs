//! Members that disagree, never come, leave, fail or panic: an error that names them, never a hang.

use std::{
    error::Error as StdError,
    fmt, io,
    sync::Arc,
    time::{Duration, Instant},
};

use device::{Access, DType, Departure, Error, Machine, Op, Reduce, Stream};
use pgroups::{GlobalRank, Group, GroupRank, Key, Needs, PgError, ProcessGroups, Rank, local};

use crate::running_support::*;

/// How long an error may take on a busy machine. Where members are lost it comes at once; the limit of a cpu machine,
/// which is this, must not be what ends the wait.
const LIMIT: Duration = Duration::from_secs(30);

/// The error of ranks that run `body`, on workers and in several orders.
fn failing<T: Send>(world: u32, body: impl Fn(Rank) -> Result<T, PgError> + Sync) -> Vec<(Machine, PgError)> {
    failing_on([cpu(1), cpu(2)], world, body)
}

/// The same of ranks that are all alive and wait for each other: on workers, the machine's limit ends it.
fn locked<T: Send>(world: u32, body: impl Fn(Rank) -> Result<T, PgError> + Sync) -> Vec<(Machine, PgError)> {
    failing_on([impatient(1), impatient(2)], world, body)
}

fn failing_on<T: Send>(
    cpus: [Machine; 2],
    world: u32,
    body: impl Fn(Rank) -> Result<T, PgError> + Sync,
) -> Vec<(Machine, PgError)> {
    let run = |machine: Machine| {
        let begin = Instant::now();
        let error = local(&machine, world, &body).err().expect("the ranks finished");
        assert!(begin.elapsed() < LIMIT, "{} took {:?}", machine.driver(), begin.elapsed());
        (machine, error)
    };
    cpus.into_iter().chain([1, 2, 3].map(Machine::sim)).map(run).collect()
}

fn tell(errors: &[(Machine, PgError)], wanted: &[&str]) {
    for (machine, error) in errors {
        let text = error.chain();
        for part in wanted {
            assert!(text.contains(part), "no '{part}' on {}: {text}", machine.driver());
        }
    }
}

/// Two members of one group, and a stream.
fn pair(rank: &Rank) -> Result<(Group, Stream), PgError> {
    Ok((group_of(rank, &custom("mine", &[&[1, 0]]), "mine")?, rank.device.stream("compute")?))
}

/// Rank 0 submits one thing, rank 1 another, and both wait.
fn disagreement(
    submit: impl Fn(u32, &Group, &Stream, &dyn Fn(usize) -> device::View) -> Result<(), PgError> + Sync,
) -> Vec<(Machine, PgError)> {
    failing(2, |rank| {
        let (group, stream) = pair(&rank)?;
        group.barrier(&stream)?;
        let data = |numel| put(&stream, "data", vec![1f32; numel]);
        submit(rank.global.0, &group, &stream, &data)?;
        Ok(stream.synchronize()?)
    })
}

// B59 a
#[test]
fn members_with_different_sizes_are_told_both() {
    let errors = disagreement(|rank, group, stream, data| {
        group.all_reduce(stream, &data(if rank == 0 { 4 } else { 8 }), Reduce::Sum)
    });
    tell(&errors, &["group 'mine[0]@0..2#0'", "#1", "rank 0 asks all_reduce(Sum) of 4 f32"]);
    tell(&errors, &["rank 1 asks all_reduce(Sum) of 8 f32"]);
}

#[test]
fn members_with_different_kinds_are_told_both() {
    let errors = disagreement(|rank, group, stream, data| match rank {
        0 => group.all_reduce(stream, &data(4), Reduce::Sum),
        _ => group.all_gather(stream, &data(2), &data(4)),
    });
    tell(&errors, &["rank 0 asks all_reduce(Sum) of 4 f32", "rank 1 asks all_gather of 2 f32", "#1"]);
    let errors = disagreement(|rank, group, stream, data| {
        group.all_reduce(stream, &data(4), if rank == 0 { Reduce::Sum } else { Reduce::Max })
    });
    tell(&errors, &["rank 0 asks all_reduce(Sum)", "rank 1 asks all_reduce(Max)"]);
    let errors = disagreement(|rank, group, stream, data| group.broadcast(stream, &data(4), GroupRank(rank)));
    tell(&errors, &["rank 0 asks broadcast(root 0)", "rank 1 asks broadcast(root 1)"]);
}

#[test]
fn members_with_different_types_are_told_both() {
    let errors = disagreement(|rank, group, stream, data| match rank {
        0 => group.all_reduce(stream, &data(4), Reduce::Sum),
        _ => group.all_reduce(stream, &put(stream, "ids", vec![1i32; 4]), Reduce::Sum),
    });
    tell(&errors, &["rank 0 asks all_reduce(Sum) of 4 f32", "rank 1 asks all_reduce(Sum) of 4 i32"]);
}

#[test]
fn a_pair_that_disagrees_is_told_both() {
    let errors = disagreement(|rank, group, stream, data| match rank {
        0 => group.send(stream, &data(4), GroupRank(0)),
        _ => group.recv(stream, &data(5), GroupRank(1)),
    });
    tell(&errors, &["'mine[0]@0..2#0:0>1'", "rank 0 asks send_recv of 4 f32", "rank 1 asks send_recv of 5 f32"]);
}

// B59 b
#[test]
fn a_member_that_never_comes_is_named() {
    let errors = failing(2, |rank| {
        let (group, stream) = pair(&rank)?;
        if rank.global.0 == 0 {
            group.all_reduce(&stream, &put(&stream, "data", vec![1f32; 4]), Reduce::Sum)?;
            stream.synchronize()?;
        }
        Ok(())
    });
    tell(&errors, &["rank 0 failed", "rank 1 is gone", "all_reduce(Sum) of 4 f32 #0", "its program returned"]);
    // One that is alive but busy elsewhere: the limit of the machine ends it.
    let begin = Instant::now();
    let error = local(&impatient(1), 2, |rank| {
        let (group, stream) = pair(&rank)?;
        if rank.global.0 == 1 {
            std::thread::sleep(Duration::from_millis(2500));
            return Ok(());
        }
        group.all_gather(&stream, &put(&stream, "a", vec![1f32; 2]), &put(&stream, "b", vec![1f32; 4]))?;
        Ok::<_, PgError>(stream.synchronize()?)
    });
    assert!(begin.elapsed() < LIMIT);
    let text = error.unwrap_err().chain();
    for part in ["rank 0 waited 1s", "all_gather of 2 f32 #0", "'mine[0]@0..2#0'", "ranks [0] wait for ranks [1]"] {
        assert!(text.contains(part), "no '{part}' in {text}");
    }
}

// B59 b
#[test]
fn a_rank_that_never_builds_is_named() {
    let errors = failing(3, |rank| {
        if rank.global.0 == 2 {
            return Ok(());
        }
        ProcessGroups::build(&rank, &flat(3), &Needs::keys([Key::DP])).map(|_| ())
    });
    tell(&errors, &["rank 0 failed", "rank 2 is gone", "group 'build@0..3#0'", "all_gather"]);
}

// B59 c
#[test]
fn communicators_in_two_orders_on_one_stream_are_told_apart() {
    let errors = locked(2, |rank| {
        let needs = Needs {
            custom: [custom("a", &[&[0, 1]]).custom, custom("b", &[&[1, 0]]).custom].concat(),
            ..Needs::default()
        };
        let groups = ProcessGroups::build(&rank, &flat(2), &needs)?;
        let group = |name| Ok::<_, PgError>(groups.get(&Key::named(name)?, "test")?.clone());
        let mut order = [group("a")?, group("b")?];
        if rank.global.0 == 1 {
            order.reverse();
        }
        let stream = rank.device.stream("compute")?;
        let data = put(&stream, "data", vec![1f32; 4]);
        for group in &order {
            group.all_reduce(&stream, &data, Reduce::Sum)?;
        }
        Ok(stream.synchronize()?)
    });
    tell(&errors, &["'a[0]@0..2#0': ranks [0] wait for ranks [1]", "'b[0]@0..2#0': ranks [1] wait for ranks [0]"]);
    let sim = errors.iter().filter(|(machine, _)| machine.driver() == "sim");
    sim.for_each(|(_, e)| assert!(matches!(e.cause(), Some(Error::Deadlock { .. })), "{}", e.chain()));
}

// B59 d
#[test]
fn a_thousand_all_reduces_leave_nothing_behind() {
    for machine in [cpu(1), cpu(2), Machine::sim(1)] {
        let got = local(&machine, 4, |rank| {
            let group = group_of(&rank, &custom("mine", &[&[0, 1, 2, 3]]), "mine")?;
            let stream = rank.device.stream("compute")?;
            let (id, sum) = (put(&stream, "id", vec![rank.global.0 as f32]), put(&stream, "sum", vec![0f32]));
            for i in 0..1000 {
                group.all_reduce_into(&stream, &id, &sum, Reduce::Sum)?;
                if i % 100 == 0 {
                    assert_eq!(get::<f32>(&stream, &sum)?, [6.0]);
                }
            }
            Ok::<_, PgError>(get::<f32>(&stream, &sum)?)
        });
        assert_eq!(got.unwrap(), [[6.0]; 4]);
    }
}

#[test]
fn two_sends_against_each_other_on_one_stream_are_told() {
    let errors = locked(2, |rank| {
        let (group, stream) = pair(&rank)?;
        let peer = GroupRank(rank.global.0); // places are swapped
        group.send(&stream, &put(&stream, "out", vec![1f32; 2]), peer)?;
        group.recv(&stream, &put(&stream, "in", vec![1f32; 2]), peer)?;
        Ok(stream.synchronize()?)
    });
    tell(&errors, &["'mine[0]@0..2#0:0>1': ranks [0] wait for ranks [1]"]);
    tell(&errors, &["'mine[0]@0..2#0:1>0': ranks [1] wait for ranks [0]"]);
}

/// The points at which a rank can go.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Point {
    BeforeBuild,
    BeforeFirst,
    Between,
    Submitted,
    Synchronized,
}

const POINTS: [Point; 5] =
    [Point::BeforeBuild, Point::BeforeFirst, Point::Between, Point::Submitted, Point::Synchronized];

#[derive(Debug)]
struct NoData;

impl fmt::Display for NoData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no data left")
    }
}

impl std::error::Error for NoData {}

/// Three ranks with two collectives; rank 1 goes at `point`.
fn program(
    rank: &Rank,
    point: Point,
    go: impl Fn() -> Result<(), NoData>,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let at = |here: Point| if rank.global.0 == 1 && here == point { go() } else { Ok(()) };
    at(Point::BeforeBuild)?;
    let group = group_of(rank, &custom("mine", &[&[2, 1, 0]]), "mine")?;
    let (stream, side) = (rank.device.stream("compute")?, rank.device.stream("side")?);
    let data = put(&stream, "data", vec![1f32; 100]);
    at(Point::BeforeFirst)?;
    group.all_reduce(&stream, &data, Reduce::Sum)?;
    at(Point::Between)?;
    group.all_reduce(&stream, &data, Reduce::Sum)?;
    // A second stream that waits behind the first must not keep a dying rank.
    let event = rank.device.event("reduced");
    stream.record(&event)?;
    side.wait(&event, device::Why("test.behind"))?;
    side.launch(Op::host("read", "test", vec![Access::read(&data)], |_| Ok(())))?;
    at(Point::Submitted)?;
    stream.synchronize()?;
    side.synchronize()?;
    at(Point::Synchronized)?;
    group.barrier(&stream)?;
    Ok(stream.synchronize()?)
}

#[test]
fn a_panic_at_any_point_is_the_error_that_comes_back() {
    for point in POINTS {
        for machine in [cpu(1), cpu(2), Machine::sim(1), Machine::sim(2), Machine::dry()] {
            let begin = Instant::now();
            let error =
                local(&machine, 3, |rank| program(&rank, point, || panic!("rank 1 dies on purpose at {point:?}")));
            assert!(begin.elapsed() < LIMIT, "{point:?} on {}", machine.driver());
            let error = error.unwrap_err();
            let wanted = format!("rank 1 dies on purpose at {point:?}");
            assert!(
                matches!(&error, PgError::RankPanicked { rank: GlobalRank(1), message } if *message == wanted),
                "{point:?} on {}: {}",
                machine.driver(),
                error.chain()
            );
        }
    }
}

#[test]
fn an_error_at_any_point_is_the_error_that_comes_back() {
    for point in POINTS {
        for machine in [cpu(1), cpu(2), Machine::sim(1), Machine::sim(2), Machine::dry()] {
            let begin = Instant::now();
            let error = local(&machine, 3, |rank| program(&rank, point, || Err(NoData)));
            assert!(begin.elapsed() < LIMIT, "{point:?} on {}", machine.driver());
            let error = error.unwrap_err();
            assert!(error.cause::<NoData>().is_some(), "{point:?} on {}: {}", machine.driver(), error.chain());
            assert!(matches!(error, PgError::RankFailed { rank: GlobalRank(1), .. }));
        }
    }
}

#[test]
fn a_rank_dies_at_once_also_with_streams_that_wait_behind_a_peer() {
    for (machine, how) in [Machine::cpu(2).unwrap(), Machine::sim(1)].into_iter().flat_map(|m| [(m.clone(), 0), (m, 1)])
    {
        let begin = Instant::now();
        let error = local(&machine, 2, |rank| {
            let (group, stream) = pair(&rank)?;
            let data = put(&stream, "data", vec![1f32; 4]);
            if rank.global.0 == 0 {
                group.recv(&stream, &data, GroupRank(0))?;
                stream.synchronize()?;
            }
            group.all_reduce(&stream, &data, Reduce::Sum)?;
            // Dropped before `stream`, and can only go on behind it.
            let side = rank.device.stream("side")?;
            let event = rank.device.event("reduced");
            stream.record(&event)?;
            side.wait(&event, device::Why("test.behind"))?;
            side.launch(Op::host("read", "test", vec![Access::read(&data)], |_| Ok(())))?;
            if how == 0 {
                panic!("rank 1 dies on purpose");
            }
            Err::<(), Box<dyn std::error::Error + Send + Sync>>(NoData.into())
        });
        assert!(begin.elapsed() < LIMIT, "{} took {:?}", machine.driver(), begin.elapsed());
        let text = error.unwrap_err().chain();
        assert!(text.contains(["rank 1 panicked: rank 1 dies", "rank 1 failed: no data left"][how]), "{text}");
    }
}

#[test]
fn peers_of_a_lost_rank_learn_who_and_how() {
    for machine in [cpu(2), Machine::sim(1)] {
        let seen = std::sync::Mutex::new(Vec::new());
        let _root = local(&machine, 3, |rank| {
            let global = rank.global.0;
            let got = program(&rank, Point::Synchronized, || panic!("rank 1 dies on purpose"));
            let told = rank.device.error();
            if global != 1 {
                seen.lock().unwrap().push(told);
            }
            got
        });
        for told in seen.into_inner().unwrap() {
            let Some(Error::PeerGone { rank: 1, group, seq: 2, what, how }) = told else {
                panic!("{}: {told:?}", machine.driver());
            };
            assert_eq!((group.as_str(), what.as_str()), ("mine[0]@0..3#0", "barrier"));
            assert_eq!(how, Departure::Panicked);
        }
    }
}

#[test]
fn an_operation_that_fails_is_the_root_and_not_its_echo() {
    let errors = failing(4, |rank| {
        let group = group_of(&rank, &custom("mine", &[&[0, 1, 2, 3]]), "mine")?;
        let stream = rank.device.stream("compute")?;
        let data = put(&stream, "data", vec![1f32; 4]);
        if rank.global.0 == 2 {
            stream.launch(Op::host("read_file", "wte", vec![Access::update(&data)], |_| Err(Box::new(NoData))))?;
        }
        for _ in 0..3 {
            group.all_reduce(&stream, &data, Reduce::Sum)?;
        }
        Ok(stream.synchronize()?)
    });
    tell(&errors, &["rank 2 failed", "read_file@wte (rank 2, stream 'compute'", "no data left"]);
}

#[test]
fn work_left_in_a_dropped_stream_is_an_error() {
    let error = local(&Machine::sim(1), 1, |rank| {
        let stream = rank.device.stream("compute")?;
        stream.launch(Op::host("late", "test", Vec::new(), |_| Ok(())))
    });
    let error = error.unwrap_err();
    assert!(matches!(error.cause(), Some(Error::Cancelled { queued: 1, .. })), "{}", error.chain());
}

#[test]
fn a_refused_call_names_group_place_and_both_shapes() {
    for machine in [cpu(1), Machine::sim(1), Machine::dry()] {
        local(&machine, 2, |rank| {
            let (group, stream) = pair(&rank)?;
            let view = |numel| alloc(&rank.device, "data", numel, DType::F32);
            let error = group.all_gather(&stream, &view(4), &view(7)).unwrap_err();
            let PgError::Refused { op: "all_gather", rank: at, size: 2, place, .. } = &error else { panic!("{error}") };
            assert_eq!((*at, *place), (rank.global, group.place()));
            let text = error.chain();
            for part in ["'mine[0]@0..2#0'", "source is [4]", "destination is [7]", "group size x source"] {
                assert!(text.contains(part), "{text}");
            }
            let ids = alloc(&rank.device, "ids", 4, DType::I32);
            let error = group.all_to_all(&stream, &view(4), &ids).unwrap_err();
            assert!(error.chain().contains("destination is i32, needs f32"), "{}", error.chain());
            let columns = rank.device.alloc("m", &[4, 4], DType::F32, device::MemoryKind::Other)?.columns(0..2)?;
            let error = group.all_reduce(&stream, &columns, Reduce::Sum).unwrap_err();
            assert!(matches!(error.cause(), Some(Error::Strided { .. })), "{}", error.chain());
            for peer in [group.place(), GroupRank(2)] {
                let error = group.send(&stream, &view(1), peer).unwrap_err();
                assert!(matches!(error, PgError::NoSuchPeer { op: "send", .. }), "{error}");
            }
            assert!(matches!(group.broadcast(&stream, &view(1), GroupRank(2)), Err(PgError::NoSuchPeer { .. })));
            // Nothing of all that was queued.
            group.barrier(&stream)?;
            Ok::<_, PgError>(stream.synchronize()?)
        })
        .unwrap();
    }
}

#[test]
fn a_group_is_used_on_streams_of_its_own_rank_only() {
    let machine = cpu(1);
    let [a, b] = [0, 1].map(|rank| Rank::alone(&machine, GlobalRank(rank), 2).unwrap());
    let layout = flat(2);
    let plan = pgroups::GroupsPlan::new(&layout, &custom("mine", &[&[0], &[1]]), GlobalRank(0)).unwrap();
    let stream = b.device.stream("compute").unwrap();
    let other = std::thread::spawn({
        let b = b.clone();
        move || group_of(&b, &custom("mine", &[&[0], &[1]]), "mine").map(|_| ())
    });
    let groups = ProcessGroups::from_plan(&a, plan).unwrap();
    other.join().unwrap().unwrap();
    let group = groups.get(&Key::named("mine").unwrap(), "test").unwrap();
    let error = group.barrier(&stream).unwrap_err();
    assert!(matches!(error.cause(), Some(Error::Foreign { owner: 0, used_by: 1, .. })), "{}", error.chain());
}

/// An error whose cause is shared, boxed, or both.
#[derive(Debug)]
struct Wrapped<E>(E);

impl<E: StdError> fmt::Display for Wrapped<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("wrapped")
    }
}

impl<E: StdError + 'static> StdError for Wrapped<E> {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        Some(&self.0)
    }
}

#[test]
fn a_cause_is_found_behind_any_arc_or_box() {
    let rank = GlobalRank(1);
    let io = || io::Error::other("no more threads");
    let threadless = PgError::NoThread { rank, source: Arc::new(io()) };
    assert_eq!(threadless.cause::<io::Error>().unwrap().to_string(), "no more threads");
    let failed = |source: Arc<dyn StdError + Send + Sync>| PgError::RankFailed { rank, source };
    assert!(failed(Arc::new(Wrapped(Arc::new(NoData)))).cause::<NoData>().is_some());
    assert!(failed(Arc::new(Wrapped(Box::new(NoData)))).cause::<NoData>().is_some());
    let group_error = || PgError::from(Error::Cancelled { rank: 1, stream: "compute".into(), queued: 7 });
    let found = |error: PgError| match error.cause() {
        Some(Error::Cancelled { queued, .. }) => *queued,
        other => panic!("{other:?} in {error:?}"),
    };
    assert_eq!(found(failed(Arc::new(Wrapped(Box::new(group_error()))))), 7);
    assert_eq!(found(failed(Arc::new(Wrapped(Arc::new(group_error()))))), 7);
    let shared: Arc<dyn StdError + Send + Sync> = Arc::new(Wrapped(group_error()));
    assert_eq!(found(failed(Arc::new(Wrapped(Arc::new(Wrapped(shared)))))), 7);
    let backend = PgError::backend("ddp", "wte", Wrapped(Arc::new(io())));
    assert!(failed(Arc::new(Wrapped(Arc::new(backend)))).cause::<io::Error>().is_some());
    assert!(threadless.cause::<NoData>().is_none());
}
