//! What joint operations compute, on every driver against one serial reference.

use device::*;

use super::{
    drivers::{Driver, cpu, sim},
    ranks::all_well,
    work::{Counter, expect_values, floats, open, set, step, stepped},
};

conformance! {
    every:
        every_exchange_moves_what_its_definition_says,
        exchanges_in_place_give_the_same,
        members_are_ordered_by_the_list_and_not_by_rank,
        a_group_of_one_meets_itself,
        an_empty_exchange_is_still_a_meeting,
        one_call_makes_several_exchanges,
        an_empty_call_takes_no_place_in_the_sequence;
    computing_on_hosts:
        sums_run_in_the_order_of_the_members,
        low_precision_is_summed_in_f32;
    computing:
        a_barrier_orders_streams_of_different_ranks,
        a_member_may_use_several_streams_in_turn,
        handles_of_one_member_share_one_sequence,
        a_greatest_value_keeps_nan,
        integers_are_summed_exactly,
        rank_threads_meet_a_thousand_times,
        two_groups_over_the_same_ranks_do_not_mix
}

/// Unequal, and exact in f32 under the sums below.
fn value(place: usize, i: usize) -> f32 {
    ((place * 31 + i * 7) % 101) as f32 + place as f32 * 0.5
}

fn reduce(kind: Reduce, column: &[f32]) -> f32 {
    match kind {
        Reduce::Sum => column.iter().skip(1).fold(column[0], |a, b| a + b),
        Reduce::Avg => column.iter().skip(1).fold(column[0], |a, b| a + b) / column.len() as f32,
        Reduce::Max => column.iter().copied().fold(f32::MIN, f32::max),
    }
}

/// Elements of a member's source and destination; `None` where it has none.
fn sizes(exchange: Exchange, n: usize, place: usize, k: usize) -> (Option<usize>, Option<usize>) {
    match exchange {
        Exchange::Barrier => (None, None),
        Exchange::AllGather => (Some(k), Some(n * k)),
        Exchange::ReduceScatter(_) => (Some(n * k), Some(k)),
        Exchange::AllReduce(_) => (Some(k), Some(k)),
        Exchange::Broadcast { root } if root as usize == place => (Some(k), None),
        Exchange::Broadcast { .. } => (None, Some(k)),
        Exchange::AllToAll => (Some(n * k), Some(n * k)),
        Exchange::SendRecv => {
            if place == 0 {
                (Some(k), None)
            } else {
                (None, Some(k))
            }
        }
    }
}

/// What the member at `place` must receive.
fn reference(exchange: Exchange, n: usize, place: usize, k: usize) -> Vec<f32> {
    let column = |i: usize| (0..n).map(|m| value(m, i)).collect::<Vec<f32>>();
    match exchange {
        Exchange::Barrier => Vec::new(),
        Exchange::AllGather => (0..n * k).map(|i| value(i / k, i % k)).collect(),
        Exchange::ReduceScatter(kind) => (0..k).map(|i| reduce(kind, &column(place * k + i))).collect(),
        Exchange::AllReduce(kind) => (0..k).map(|i| reduce(kind, &column(i))).collect(),
        Exchange::Broadcast { root } => (0..k).map(|i| value(root as usize, i)).collect(),
        Exchange::AllToAll => (0..n * k).map(|i| value(i / k, place * k + i % k)).collect(),
        Exchange::SendRecv => (0..k).map(|i| value(0, i)).collect(),
    }
}

fn exchanges(n: u32) -> Vec<Exchange> {
    use Reduce::{Avg, Max, Sum};
    let mut list = vec![Exchange::Barrier, Exchange::AllGather, Exchange::AllToAll];
    list.extend([Sum, Avg, Max].map(Exchange::ReduceScatter));
    list.extend([Sum, Avg, Max].map(Exchange::AllReduce));
    list.extend((0..n).map(|root| Exchange::Broadcast { root }));
    if n == 2 {
        list.push(Exchange::SendRecv);
    }
    list
}

/// Members' ranks: permuted and with gaps.
const MEMBERS: [&[u32]; 4] = [&[4], &[7, 2], &[5, 1, 3], &[6, 0, 9, 3]];

struct Member {
    device: Device,
    stream: Stream,
    meeting: Meeting,
}

fn members(machine: &Machine, ranks: &[u32]) -> Vec<Member> {
    let open_one = |rank: &u32| {
        let (device, stream) = open(machine, *rank, "comm");
        let meeting = machine.meeting("g", ranks, *rank).unwrap();
        Member { device, stream, meeting }
    };
    ranks.iter().map(open_one).collect()
}

/// Every member's result, in the order of the members. In place, each uses a piece of one buffer for both ends.
fn exchange(machine: &Machine, ranks: &[u32], exchange: Exchange, k: usize, in_place: bool) -> Vec<Vec<f32>> {
    let (n, members) = (ranks.len(), members(machine, ranks));
    let results: Vec<Option<View>> = members
        .iter()
        .enumerate()
        .map(|(place, m)| {
            let (source, dest) = sizes(exchange, n, place, k);
            let (from, to) = (source.unwrap_or(0), dest.unwrap_or(0));
            let whole = floats(&m.device, "buffer", if in_place { from.max(to) } else { from + to });
            let (source_view, dest_view) = if in_place {
                let part = |len: usize| if len < from.max(to) { place * k..place * k + len } else { 0..len };
                (whole.flat(part(from)).unwrap(), whole.flat(part(to)).unwrap())
            } else {
                (whole.flat(0..from).unwrap(), whole.flat(from..from + to).unwrap())
            };
            if source.is_some() {
                m.stream.upload(&source_view, (0..from).map(|i| value(place, i)).collect()).unwrap();
            }
            let one_view = in_place && matches!(exchange, Exchange::AllReduce(_));
            let accesses = if one_view {
                vec![Access::update(&whole)]
            } else {
                let read = source.map(|_| Access::read(&source_view));
                read.into_iter().chain(dest.map(|_| Access::write(&dest_view))).collect()
            };
            m.stream.joint(&m.meeting, exchange, "test", accesses).unwrap();
            dest.map(|_| dest_view)
        })
        .collect();
    // Waited for in reverse, so that no member depends on the host's order.
    let waited = members.iter().zip(&results).rev().map(|(m, view)| {
        m.stream.synchronize().unwrap();
        let computed = view.as_ref().filter(|_| machine.computes());
        computed.map_or(Vec::new(), |v| m.stream.download::<f32>(v).unwrap().wait().unwrap())
    });
    let mut waited: Vec<Vec<f32>> = waited.collect();
    waited.reverse();
    waited
}

#[track_caller]
fn check(machine: &Machine, ranks: &[u32], kind: Exchange, k: usize, in_place: bool) {
    let n = ranks.len();
    for (place, got) in exchange(machine, ranks, kind, k, in_place).into_iter().enumerate() {
        let receives = sizes(kind, n, place, k).1.is_some() && machine.computes();
        let want = if receives { reference(kind, n, place, k) } else { Vec::new() };
        let here = format!("{kind:?} of {k} at place {place} of {ranks:?}, in place: {in_place}");
        let mean = matches!(kind, Exchange::AllReduce(Reduce::Avg) | Exchange::ReduceScatter(Reduce::Avg));
        if machine.driver() == "cuda" && mean {
            // NCCL multiplies every addend by 1/n before it adds: n roundings of the factor and the products, n of sums.
            let close = |(got, want): (&f32, &f32)| (got - want).abs() <= 2.0 * n as f32 * f32::EPSILON * want.abs();
            assert!(got.len() == want.len() && got.iter().zip(&want).all(close), "{here}: {got:?}, not {want:?}");
        } else {
            assert_eq!(got, want, "{here}");
        }
    }
}

fn every_exchange_moves_what_its_definition_says(driver: &Driver) {
    for ranks in MEMBERS {
        let machine = driver.machine();
        for kind in exchanges(ranks.len() as u32) {
            [1, 3, 1100].into_iter().for_each(|k| check(&machine, ranks, kind, k, false));
        }
    }
}

fn exchanges_in_place_give_the_same(driver: &Driver) {
    use Reduce::{Avg, Max, Sum};
    let kinds = [Sum, Avg, Max].map(|r| [Exchange::AllReduce(r), Exchange::ReduceScatter(r)]);
    for ranks in MEMBERS {
        let machine = driver.machine();
        for kind in kinds.into_iter().flatten().chain([Exchange::AllGather]) {
            [1, 5, 1030].into_iter().for_each(|k| check(&machine, ranks, kind, k, true));
        }
    }
}

#[test]
fn large_exchanges_that_workers_share_equal_their_slow_twin_bit_for_bit() {
    // Over the size at which a copy is cut into pieces, and no multiple of it.
    let k = 70_001;
    let (slow, ranks) = (sim(3).machine(), MEMBERS[2]);
    for kind in exchanges(3) {
        let bits = |machine: &Machine| -> Vec<Vec<u32>> {
            let all = exchange(machine, ranks, kind, k, false);
            all.iter().map(|v| v.iter().map(|x| x.to_bits()).collect()).collect()
        };
        let want = bits(&slow);
        for workers in [1, 2, 3] {
            assert!(bits(&cpu(workers).machine()) == want, "{kind:?} on {workers} workers");
        }
    }
}

fn members_are_ordered_by_the_list_and_not_by_rank(driver: &Driver) {
    let machine = driver.machine();
    let members = members(&machine, &[5, 1, 3]);
    let places: Vec<u32> = members.iter().map(|m| m.meeting.place()).collect();
    assert_eq!((places, members[0].meeting.members()), (vec![0, 1, 2], &[5, 1, 3][..]));
    let all: Vec<View> = members
        .iter()
        .map(|m| {
            let (own, all) = (floats(&m.device, "own", 1), floats(&m.device, "all", 3));
            m.stream.launch(set(&own, m.device.rank() as f32)).unwrap();
            let accesses = vec![Access::read(&own), Access::write(&all)];
            m.stream.joint(&m.meeting, Exchange::AllGather, "test", accesses).unwrap();
            all
        })
        .collect();
    members.iter().zip(&all).for_each(|(m, all)| expect_values(&m.stream, all, &[5.0, 1.0, 3.0]));
}

fn a_group_of_one_meets_itself(driver: &Driver) {
    let (machine, ranks) = (driver.machine(), [4]);
    let m = &members(&machine, &ranks)[0];
    (0..10).for_each(|_| m.stream.joint(&m.meeting, Exchange::Barrier, "test", Vec::new()).unwrap());
    m.stream.synchronize().unwrap();
}

fn an_empty_exchange_is_still_a_meeting(driver: &Driver) {
    for ranks in MEMBERS {
        let machine = driver.machine();
        exchanges(ranks.len() as u32).into_iter().for_each(|kind| check(&machine, ranks, kind, 0, false));
    }
}

/// Rank 1 writes what rank 0's operations counted before the barrier.
fn a_barrier_orders_streams_of_different_ranks(driver: &Driver) {
    let machine = driver.machine();
    let all = members(&machine, &[0, 1]);
    for round in 1..30 {
        let (before, seen) = (Counter::default(), Counter::default());
        (0..round).for_each(|_| all[0].stream.launch(before.op(Vec::new())).unwrap());
        all.iter().for_each(|m| m.stream.joint(&m.meeting, Exchange::Barrier, "test", Vec::new()).unwrap());
        let look = Op::host("look", "test", Vec::new(), {
            let (before, seen) = (before.clone(), seen.clone());
            move |_| {
                seen.add(before.get());
                Ok(())
            }
        });
        all[1].stream.launch(look).unwrap();
        all[1].stream.synchronize().unwrap();
        assert_eq!(seen.get(), round);
    }
    all[0].stream.synchronize().unwrap();
}

/// A member's calls are numbered in the order of submission, whatever streams they are submitted to.
fn a_member_may_use_several_streams_in_turn(driver: &Driver) {
    let machine = driver.machine();
    let all = members(&machine, &[0, 1]);
    let second = all[0].device.stream("second").unwrap();
    let (mine, got) = (floats(&all[0].device, "mine", 40), floats(&all[1].device, "got", 40));
    all[0].stream.upload(&mine, (0..40).map(|i| i as f32).collect()).unwrap();
    let e = all[0].device.event("uploaded");
    all[0].stream.record(&e).unwrap();
    second.wait(&e, Why("test.uploaded")).unwrap();
    for i in 0..40 {
        let part = i..i + 1;
        let from = if i % 3 == 0 { &second } else { &all[0].stream };
        let send = vec![Access::read(&mine.flat(part.clone()).unwrap())];
        from.joint(&all[0].meeting, Exchange::SendRecv, "test", send).unwrap();
        let receive = vec![Access::write(&got.flat(part).unwrap())];
        all[1].stream.joint(&all[1].meeting, Exchange::SendRecv, "test", receive).unwrap();
    }
    let want: Vec<f32> = (0..40).map(|i| i as f32).collect();
    assert_eq!(all[1].stream.download::<f32>(&got).unwrap().wait().unwrap(), want);
}

fn handles_of_one_member_share_one_sequence(driver: &Driver) {
    let machine = driver.machine();
    let all = members(&machine, &[0, 1]);
    let again = machine.meeting("g", &[0, 1], 0).unwrap();
    let views: Vec<View> = all.iter().map(|m| floats(&m.device, "v", 1)).collect();
    for (i, handle) in [&all[0].meeting, &again, &again, &all[0].meeting].into_iter().enumerate() {
        all[0].stream.launch(set(&views[0], i as f32)).unwrap();
        all[0].stream.joint(handle, Exchange::SendRecv, "test", vec![Access::read(&views[0])]).unwrap();
        let receive = vec![Access::write(&views[1])];
        all[1].stream.joint(&all[1].meeting, Exchange::SendRecv, "test", receive).unwrap();
        expect_values(&all[1].stream, &views[1], &[i as f32]);
    }
}

/// One all-reduce of one value per member, over all of `T`.
fn all_reduce<T: Element>(machine: &Machine, kind: Reduce, values: &[T]) -> Vec<T> {
    let ranks: Vec<u32> = (0..values.len() as u32).rev().collect();
    let all = members(machine, &ranks);
    let views: Vec<View> = all
        .iter()
        .zip(values)
        .map(|(m, value)| {
            let v = m.device.alloc("v", &[1], T::DTYPE, MemoryKind::Other).unwrap();
            m.stream.upload(&v, vec![*value]).unwrap();
            m.stream.joint(&m.meeting, Exchange::AllReduce(kind), "test", vec![Access::update(&v)]).unwrap();
            v
        })
        .collect();
    all.iter().zip(&views).map(|(m, v)| m.stream.download::<T>(v).unwrap().wait().unwrap()[0]).collect()
}

fn a_greatest_value_keeps_nan(driver: &Driver) {
    let machine = driver.machine();
    assert_eq!(all_reduce(&machine, Reduce::Max, &[-3f32, -1.5, f32::NEG_INFINITY]), [-1.5; 3]);
    for (at, nan) in [f32::NAN, -f32::NAN, f32::NAN].into_iter().enumerate() {
        let mut values = [1f32, 5.0, f32::INFINITY];
        assert_eq!(all_reduce(&machine, Reduce::Max, &values), [f32::INFINITY; 3]);
        values[at] = nan;
        let got = all_reduce(&machine, Reduce::Max, &values);
        assert!(got.iter().all(|x| x.is_nan()), "{got:?}");
    }
}

fn sums_run_in_the_order_of_the_members(driver: &Driver) {
    // In f32 the one is lost beside 1e8, and kept where that has gone before.
    assert_eq!(all_reduce(&driver.machine(), Reduce::Sum, &[1e8f32, 1.0, -1e8]), [0.0; 3]);
    assert_eq!(all_reduce(&driver.machine(), Reduce::Sum, &[1e8f32, -1e8, 1.0]), [1.0; 3]);
    assert_eq!(all_reduce(&driver.machine(), Reduce::Avg, &[1e8f32, -1e8, 3.0]), [1.0; 3]);
}

fn low_precision_is_summed_in_f32(driver: &Driver) {
    // Each addend alone is below half a step of bf16 at 256 and would vanish one by one.
    let values = [256.0, 0.75, 0.75, 0.75].map(bf16::from_f32);
    assert_eq!(all_reduce(&driver.machine(), Reduce::Sum, &values), [bf16::from_f32(258.0); 4]);
}

fn integers_are_summed_exactly(driver: &Driver) {
    let values = [16_777_217, 2, i32::MIN];
    assert_eq!(all_reduce(&driver.machine(), Reduce::Sum, &values), [16_777_219 + i32::MIN; 3]);
    assert_eq!(all_reduce(&driver.machine(), Reduce::Max, &values), [16_777_217; 3]);
}

fn rank_threads_meet_a_thousand_times(driver: &Driver) {
    let ranks = [3, 0, 2, 1];
    let sums = all_well(&driver.machine(), &ranks, |device| {
        let stream = device.stream("comm")?;
        let meeting = device.machine().meeting("all", &ranks, device.rank())?;
        let v = floats(device, "v", 2);
        for i in 0..1000 {
            stream.launch(set(&v, device.rank() as f32 + i as f32))?;
            stream.joint(&meeting, Exchange::AllReduce(Reduce::Sum), "test", vec![Access::update(&v)])?;
        }
        stream.download::<f32>(&v)?.wait()
    });
    assert_eq!(sums, vec![vec![6.0 + 4.0 * 999.0; 2]; 4]);
}

fn two_groups_over_the_same_ranks_do_not_mix(driver: &Driver) {
    let machine = driver.machine();
    let all = members(&machine, &[0, 1]);
    let others = [0, 1].map(|rank| machine.meeting("h", &[1, 0], rank).unwrap());
    let views: Vec<View> = all.iter().map(|m| floats(&m.device, "v", 1)).collect();
    for (place, m) in all.iter().enumerate() {
        m.stream.launch(set(&views[place], 10.0 + place as f32)).unwrap();
    }
    // Rank 0 sends to rank 1 in 'g', and gets it back in 'h'.
    for (place, m) in all.iter().enumerate() {
        let (send, receive) = (Access::read(&views[place]), Access::write(&views[place]));
        let first = if place == 0 { send.clone() } else { receive.clone() };
        m.stream.joint(&m.meeting, Exchange::SendRecv, "test", vec![first]).unwrap();
        m.stream.launch(step(&views[place], 2.0, 1.0)).unwrap();
        let second = if place == 0 { receive } else { send };
        m.stream.joint(&others[place], Exchange::SendRecv, "test", vec![second]).unwrap();
    }
    expect_values(&all[0].stream, &views[0], &[stepped(10.0, 2.0, 1.0)]);
    all[1].stream.synchronize().unwrap();
}

/// A gather, a sum in place and a broadcast as one call; member 1 is not in place.
fn one_call_makes_several_exchanges(driver: &Driver) {
    let machine = driver.machine();
    let all = members(&machine, &[5, 1, 3]);
    let views: Vec<[View; 4]> = all
        .iter()
        .enumerate()
        .map(|(place, m)| {
            let views = [("own", 2), ("all", 6), ("sum", 1), ("out", 1)].map(|(l, n)| floats(&m.device, l, n));
            m.stream.launch(set(&views[0], place as f32)).unwrap();
            m.stream.launch(set(&views[2], 1.0 + place as f32)).unwrap();
            let gather = vec![Access::read(&views[0]), Access::write(&views[1])];
            let sum = match place {
                1 => vec![Access::read(&views[2]), Access::write(&views[3])],
                _ => vec![Access::update(&views[2])],
            };
            let calls = vec![(Exchange::AllGather, gather), (Exchange::AllReduce(Reduce::Sum), sum)];
            m.stream.joint_all(&m.meeting, "test", calls).unwrap();
            m.stream.joint(&m.meeting, Exchange::Barrier, "test", Vec::new()).unwrap();
            views
        })
        .collect();
    for (place, (m, views)) in all.iter().zip(&views).enumerate() {
        expect_values(&m.stream, &views[1], &[0.0, 0.0, 1.0, 1.0, 2.0, 2.0]);
        expect_values(&m.stream, &views[if place == 1 { 3 } else { 2 }], &[6.0]);
    }
}

fn an_empty_call_takes_no_place_in_the_sequence(driver: &Driver) {
    let machine = driver.machine();
    let all = members(&machine, &[0, 1]);
    all[0].stream.joint_all(&all[0].meeting, "test", Vec::new()).unwrap();
    all.iter().for_each(|m| m.stream.joint(&m.meeting, Exchange::Barrier, "test", Vec::new()).unwrap());
    all.iter().for_each(|m| m.stream.synchronize().unwrap());
}
