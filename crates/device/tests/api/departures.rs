//! Ranks that leave, fail, panic or never come: whoever waits for them is told at once, or in the machine's limit.

use std::time::{Duration, Instant};

use device::*;

use super::{
    drivers::{Driver, LIMIT, SHORT},
    ranks::{all_well, run_ranks},
    work::{failing, open},
};

conformance! {
    every:
        a_member_that_never_comes_is_named,
        two_groups_met_in_different_orders_are_told,
        a_departure_before_the_arrival_is_told,
        a_departure_after_the_arrival_is_told,
        a_rank_that_left_meets_nobody,
        a_rank_that_returns_early_is_missed_at_once,
        a_rank_that_panics_is_missed_at_once,
        a_rank_that_returns_after_its_last_meeting_harms_nobody,
        a_departure_reaches_every_group_of_the_rank;
    computing:
        a_failure_before_the_arrival_is_told
}

fn barrier(stream: &Stream, group: &str, ranks: &[u32]) -> Result<(), Error> {
    let meeting = stream.device().machine().meeting(group, ranks, stream.rank())?;
    stream.joint(&meeting, Exchange::Barrier, "test", Vec::new())
}

/// What is pending where nothing can move: at once where the driver can tell, else after its limit.
fn stuck(error: &Error) -> &Pending {
    match error {
        Error::Timeout { pending, .. } | Error::Deadlock { pending, .. } => pending,
        other => panic!("not stuck: {other}"),
    }
}

fn a_member_that_never_comes_is_named(driver: &Driver) {
    let machine = driver.limited(SHORT);
    let (_zero, s0) = open(&machine, 0, "comm");
    let (_two, s2) = open(&machine, 2, "comm");
    let (_one, _s1) = open(&machine, 1, "comm");
    barrier(&s2, "dp", &[2, 1, 0]).unwrap();
    barrier(&s0, "dp", &[2, 1, 0]).unwrap();
    // Everything submitted has come up before the host of rank 0 waits.
    if machine.driver() == "cpu" {
        std::thread::sleep(Duration::from_millis(20));
    }
    let error = s0.synchronize().unwrap_err();
    let (arrived, missing) = (vec![2, 0], vec![1]);
    let want = PendingJoint { group: "dp".into(), seq: 0, what: "barrier".into(), arrived, missing };
    if ["cpu", "cuda"].contains(&machine.driver()) {
        assert_eq!(stuck(&error), &Pending(vec![want]));
    } else {
        assert!(matches!(&error, Error::Deadlock { .. }) && stuck(&error).0.contains(&want), "{error}");
    }
    let text = "barrier #0 on group 'dp': ranks [2, 0] wait for ranks [1]";
    assert!(error.to_string().contains(text), "{error}");
    let echo = s2.synchronize().unwrap_err();
    assert!(matches!(&echo, Error::PeerGone { rank: 0, .. }) && echo.is_echo(), "{echo}");
}

fn two_groups_met_in_different_orders_are_told(driver: &Driver) {
    let machine = driver.limited(SHORT);
    let ended = run_ranks(&machine, &[0, 1], |device| {
        let stream = device.stream("comm")?;
        let order = if device.rank() == 0 { ["a", "b"] } else { ["b", "a"] };
        order.iter().try_for_each(|group| barrier(&stream, group, &[0, 1]))?;
        stream.synchronize()
    });
    let errors: Vec<Error> = ended.into_iter().map(|e| e.unwrap().unwrap_err()).collect();
    let root = errors.iter().find(|e| !e.is_echo()).expect("one is no echo");
    let mut groups: Vec<(&str, &[u32])> = stuck(root).0.iter().map(|p| (&p.group[..], &p.missing[..])).collect();
    groups.sort();
    assert_eq!(groups, [("a", &[1][..]), ("b", &[0])]);
}

/// Ways to leave, each with what peers are told.
type Leave = fn(&Machine, Stream, Device) -> Departure;

const LEAVES: [Leave; 4] = [
    |machine, stream, _device| {
        machine.leave(stream.rank(), Departure::Returned);
        Departure::Returned
    },
    |machine, stream, _device| {
        machine.leave(stream.rank(), Departure::Panicked);
        Departure::Panicked
    },
    |machine, stream, device| {
        // Work that cannot run: its rank waits for one that is not there.
        let elsewhere = machine.meeting("elsewhere", &[stream.rank(), 50], stream.rank()).unwrap();
        stream.joint(&elsewhere, Exchange::Barrier, "test", Vec::new()).unwrap();
        drop(stream);
        assert!(matches!(device.error(), Some(Error::Cancelled { queued: 1, .. })));
        Departure::Dropped
    },
    |_, stream, device| {
        // The stream ends while its thread unwinds.
        let thread = std::thread::spawn(move || {
            let _stream = stream;
            let meeting = _stream.device().machine().meeting("elsewhere", &[_stream.rank(), 50], _stream.rank());
            _stream.joint(&meeting.unwrap(), Exchange::Barrier, "test", Vec::new()).unwrap();
            panic!("a planted panic");
        });
        thread.join().unwrap_err();
        assert!(device.error().is_some());
        Departure::Panicked
    },
];

fn check_departure(driver: &Driver, leave: Leave, arrived_first: bool) {
    let machine = driver.machine();
    let (_zero, s0) = open(&machine, 0, "comm");
    let (one, s1) = open(&machine, 1, "comm");
    let _known = machine.meeting("tp", &[1, 0], 1).unwrap();
    let begin = Instant::now();
    let how = if arrived_first {
        barrier(&s0, "tp", &[1, 0]).unwrap();
        if machine.driver() == "cpu" {
            std::thread::sleep(Duration::from_millis(10));
        }
        leave(&machine, s1, one)
    } else {
        let how = leave(&machine, s1, one);
        barrier(&s0, "tp", &[1, 0]).unwrap();
        how
    };
    let error = s0.synchronize().unwrap_err();
    let Error::PeerGone { rank: 1, seq: 0, group, how: told, .. } = &error else { panic!("{error}") };
    assert_eq!((&group[..], told), ("tp", &how));
    assert_eq!(error.is_echo(), how != Departure::Returned, "only who returned has no error of its own");
    assert!(begin.elapsed() < LIMIT, "told after {:?}", begin.elapsed());
}

fn a_departure_before_the_arrival_is_told(driver: &Driver) {
    LEAVES.iter().for_each(|leave| check_departure(driver, *leave, false));
}

fn a_departure_after_the_arrival_is_told(driver: &Driver) {
    LEAVES.iter().for_each(|leave| check_departure(driver, *leave, true));
}

fn a_failure_before_the_arrival_is_told(driver: &Driver) {
    let fail: Leave = |_, stream, device| {
        stream.launch(failing("h1.attn", "out of range")).unwrap();
        stream.synchronize().unwrap_err();
        Departure::Failed(device.error().unwrap().chain())
    };
    check_departure(driver, fail, false);
    check_departure(driver, fail, true);
}

fn a_rank_that_left_meets_nobody(driver: &Driver) {
    let machine = driver.machine();
    let (_zero, s0) = open(&machine, 0, "comm");
    machine.leave(0, Departure::Returned);
    barrier(&s0, "tp", &[0, 1]).unwrap();
    let error = s0.synchronize().unwrap_err();
    assert_eq!(error.to_string(), "rank 0 is gone, so barrier #0 on group 'tp' cannot happen: its program returned");
}

fn a_rank_that_returns_early_is_missed_at_once(driver: &Driver) {
    let (machine, begin) = (driver.machine(), Instant::now());
    let ended = run_ranks(&machine, &[0, 1, 2], |device| {
        let stream = device.stream("comm")?;
        for _ in 0..if device.rank() == 1 { 2 } else { 3 } {
            barrier(&stream, "dp", &[0, 1, 2])?;
            stream.synchronize()?;
        }
        Ok(())
    });
    let ended: Vec<_> = ended.into_iter().map(Option::unwrap).collect();
    assert!(ended[1].is_ok());
    for rank in [0, 2] {
        let error = ended[rank].as_ref().unwrap_err();
        assert!(matches!(error, Error::PeerGone { rank: 1, how: Departure::Returned, .. }), "{error}");
        assert!(!error.is_echo(), "nobody else reports this one");
    }
    assert!(begin.elapsed() < LIMIT);
}

fn a_rank_that_panics_is_missed_at_once(driver: &Driver) {
    let (machine, begin) = (driver.machine(), Instant::now());
    let ended = run_ranks(&machine, &[0, 1, 2], |device| {
        let stream = device.stream("comm")?;
        barrier(&stream, "dp", &[0, 1, 2])?;
        assert_ne!(device.rank(), 2, "a planted panic, with work in the stream");
        barrier(&stream, "dp", &[0, 1, 2])?;
        stream.synchronize()
    });
    assert!(ended[2].is_none());
    for ended in &ended[..2] {
        let error = ended.as_ref().unwrap().as_ref().unwrap_err();
        assert!(matches!(error, Error::PeerGone { rank: 2, how: Departure::Panicked, .. }), "{error}");
    }
    assert!(begin.elapsed() < LIMIT);
}

fn a_rank_that_returns_after_its_last_meeting_harms_nobody(driver: &Driver) {
    let machine = driver.machine();
    for _ in 0..20 {
        all_well(&machine, &[0, 1, 2, 3], |device| {
            let stream = device.stream("comm")?;
            // Rank r takes part in the groups of all ranks from some lower one up to 3: rank 0 ends first.
            for first in 0..=device.rank().min(2) {
                let ranks: Vec<u32> = (first..4).collect();
                barrier(&stream, &format!("from {first}"), &ranks)?;
            }
            stream.synchronize()
        });
    }
}

fn a_departure_reaches_every_group_of_the_rank(driver: &Driver) {
    let machine = driver.machine();
    let peers: Vec<(Device, Stream)> = (1..5).map(|rank| open(&machine, rank, "comm")).collect();
    let group = |rank: u32| format!("with {rank}");
    peers.iter().for_each(|(d, s)| barrier(s, &group(d.rank()), &[d.rank(), 0]).unwrap());
    machine.leave(0, Departure::Panicked);
    for (device, stream) in &peers {
        let error = stream.synchronize().unwrap_err();
        let want = format!(
            "rank 0 is gone, so barrier #0 on group 'with {}' cannot happen: its program panicked",
            device.rank()
        );
        assert_eq!(error.to_string(), want);
    }
}

/// Not on `dry`, whose limit is a minute; there it is the same scheduler.
#[test]
fn a_rank_that_was_announced_and_never_enters_is_gone_from_its_groups() {
    super::drivers::on_seeds(|driver| {
        let machine = driver.limited(SHORT);
        machine.expect([1, 2, 4]);
        let errors = std::thread::scope(|scope| {
            // Rank 1 has no thread: it is the lowest, so the turn is its to begin with.
            let ranks = [4, 2].map(|rank| {
                let machine = &machine;
                scope.spawn(move || {
                    let _turn = machine.enter(rank);
                    let (_device, stream) = open(machine, rank, "comm");
                    barrier(&stream, "dp", &[4, 1, 2]).and_then(|()| stream.synchronize()).unwrap_err()
                })
            });
            ranks.map(|rank| rank.join().unwrap())
        });
        for error in errors {
            assert!(matches!(&error, Error::PeerGone { rank: 1, how: Departure::NeverEntered, .. }), "{error}");
            assert!(!error.is_echo(), "nobody else has the cause");
            assert!(error.to_string().contains("its thread never entered"), "{error}");
        }
        // Whoever comes late finds that the others have given it up.
        let _turn = machine.enter(1);
        let (_device, late) = open(&machine, 1, "comm");
        let error = barrier(&late, "dp", &[4, 1, 2]).and_then(|()| late.synchronize()).unwrap_err();
        assert!(matches!(error, Error::PeerGone { .. }), "{error}");
    });
}
