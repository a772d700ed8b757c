//! A search leaves out orders that differ only by operations that commute, and no result: random small programs, against
//! the search that runs every order.

use std::collections::BTreeSet;

use device::*;
use proptest::prelude::*;

use super::{
    capture_graphs::{executable, order},
    ranks::run_ranks,
    work::{copy, floats, set, step, stepped},
};

const RANKS: u32 = 2;

const STREAMS: usize = 2;

const VIEWS: usize = 2;

/// One call of a program.
#[derive(Clone, Copy, Debug)]
enum Call {
    Step {
        rank: u32,
        stream: usize,
        view: usize,
        term: u8,
    },
    Copy {
        rank: u32,
        stream: usize,
        from: usize,
    },
    /// The other stream waits for what this one has.
    Order {
        rank: u32,
        from: usize,
    },
    HostWaits {
        rank: u32,
        stream: usize,
    },
    /// Both ranks sum a view, each on a stream of its own choice.
    Sum {
        streams: [usize; 2],
        view: usize,
    },
    /// A graph whose branches take a step on either view.
    Launch {
        rank: u32,
        stream: usize,
    },
    /// Fails where the value is odd.
    FailsIfOdd {
        rank: u32,
        stream: usize,
        view: usize,
    },
}

/// How a program waits for its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    /// For everything.
    All,
    /// For its first stream: the rest is thrown away.
    FirstStream,
}

fn calls(most: usize) -> impl Strategy<Value = Vec<Call>> {
    let (rank, stream, view) = (0..RANKS, 0..STREAMS, 0..VIEWS);
    let one = (rank, stream, view);
    let call = prop_oneof![
        4 => (one.clone(), 0u8..5).prop_map(|((rank, stream, view), term)| Call::Step { rank, stream, view, term }),
        2 => one.clone().prop_map(|(rank, stream, from)| Call::Copy { rank, stream, from }),
        2 => one.clone().prop_map(|(rank, from, _)| Call::Order { rank, from }),
        1 => one.clone().prop_map(|(rank, stream, _)| Call::HostWaits { rank, stream }),
        1 => ([0..STREAMS, 0..STREAMS], 0..VIEWS).prop_map(|(streams, view)| Call::Sum { streams, view }),
        1 => one.clone().prop_map(|(rank, stream, _)| Call::Launch { rank, stream }),
        1 => one.prop_map(|(rank, stream, view)| Call::FailsIfOdd { rank, stream, view }),
    ];
    prop::collection::vec(call, 1..=most)
}

fn ends() -> impl Strategy<Value = End> {
    prop_oneof![3 => Just(End::All), 1 => Just(End::FirstStream)]
}

/// One rank of a program.
struct Rank {
    device: Device,
    streams: Vec<Stream>,
    views: Vec<View>,
    graph: Executable,
    meeting: Meeting,
}

impl Rank {
    fn open(device: &Device) -> Result<Rank, Error> {
        let rank = device.rank();
        let streams = (0..STREAMS).map(|_| device.stream("s")).collect::<Result<Vec<_>, _>>()?;
        let views: Vec<View> = (0..VIEWS).map(|_| floats(device, "v", 1)).collect();
        views.iter().try_for_each(|view| streams[0].launch(set(view, 1.0 + rank as f32)))?;
        streams[0].synchronize()?;
        let graph = executable(&streams[0], || {
            order(&streams[0], &streams[1], "fork");
            streams[0].launch(step(&views[0], 2.0, 1.0)).unwrap();
            streams[1].launch(step(&views[1], 3.0, 1.0)).unwrap();
            order(&streams[1], &streams[0], "join");
        });
        let meeting = device.machine().meeting("all", &[0, 1], rank)?;
        Ok(Rank { device: device.clone(), streams, views, graph, meeting })
    }

    fn call(&self, call: Call) -> Result<(), Error> {
        let own = self.device.rank();
        match call {
            Call::Step { rank, stream, view, term } if rank == own => {
                self.streams[stream].launch(step(&self.views[view], 2.0, f32::from(term)))
            }
            Call::Copy { rank, stream, from } if rank == own => {
                self.streams[stream].launch(copy(&self.views[from], &self.views[1 - from]))
            }
            Call::Order { rank, from } if rank == own => {
                let event = self.device.event("order");
                self.streams[from].record(&event)?;
                self.streams[1 - from].wait(&event, Why("test.order"))
            }
            Call::HostWaits { rank, stream } if rank == own => self.streams[stream].synchronize(),
            Call::Sum { streams, view } => {
                let accesses = vec![Access::update(&self.views[view])];
                let sum = Exchange::AllReduce(Reduce::Sum);
                self.streams[streams[own as usize]].joint(&self.meeting, sum, "test", accesses)
            }
            Call::Launch { rank, stream } if rank == own => self.streams[stream].launch_graph(&self.graph),
            Call::FailsIfOdd { rank, stream, view } if rank == own => {
                let op = Op::host("odd", "test", vec![Access::read(&self.views[view])], |args| {
                    if args.read::<f32>(0)?[0] as u32 % 2 == 1 { Err("it is odd".into()) } else { Ok(()) }
                });
                self.streams[stream].launch(op)
            }
            _ => Ok(()),
        }
    }

    fn end(&self, end: End) -> Result<Vec<u32>, Error> {
        if end == End::All {
            self.device.synchronize()?;
        }
        let bits = |view| Ok(stepped(self.streams[0].download::<f32>(view)?.wait()?[0], 1.0, 0.0).to_bits());
        self.views.iter().map(bits).collect()
    }
}

/// By rank: its values, or why there are none.
type Outcome = Vec<Result<Vec<u32>, String>>;

/// The hosts of all ranks are one thread.
fn by_one_host(machine: &Machine, calls: &[Call], end: End) -> Outcome {
    let run = || -> Result<Vec<Vec<u32>>, Error> {
        let devices = (0..RANKS).map(|rank| machine.device(rank)).collect::<Result<Vec<_>, _>>()?;
        let ranks = devices.iter().map(Rank::open).collect::<Result<Vec<_>, _>>()?;
        calls.iter().try_for_each(|call| ranks.iter().try_for_each(|rank| rank.call(*call)))?;
        ranks.iter().map(|rank| rank.end(end)).collect()
    };
    match run() {
        Ok(values) => values.into_iter().map(Ok).collect(),
        Err(error) => vec![Err(error.to_string())],
    }
}

/// A thread for each rank.
fn by_threads(machine: &Machine, calls: &[Call], end: End) -> Outcome {
    let ended = run_ranks(machine, &[0, 1], |device| {
        let rank = Rank::open(device)?;
        calls.iter().try_for_each(|call| rank.call(*call))?;
        rank.end(end)
    });
    ended.into_iter().map(|ended| ended.expect("a rank panicked").map_err(|error| error.to_string())).collect()
}

type Runs = fn(&Machine, &[Call], End) -> Outcome;

/// Both searches; `None` where there are too many orders.
fn both(runs: Runs, calls: &[Call], end: End) -> Option<(Explored<Outcome>, Explored<Outcome>)> {
    let options = Options { fresh: Fresh::Zeroed, ..Options::default() };
    let every = explore_every_order(4_000, &options, |machine| Ok(runs(machine, calls, end))).unwrap();
    if !every.complete {
        return None;
    }
    let few = explore(usize::MAX, &options, |machine| Ok(runs(machine, calls, end))).unwrap();
    Some((every, few))
}

fn agree(runs: Runs, calls: &[Call], end: End) -> Result<(), TestCaseError> {
    let Some((every, few)) = both(runs, calls, end) else { return Ok(()) };
    let results = |explored: &Explored<Outcome>| explored.results.keys().cloned().collect::<BTreeSet<_>>();
    prop_assert_eq!(results(&every), results(&few), "{} and {} runs", every.runs, few.runs);
    prop_assert!(few.runs <= every.runs, "{} runs instead of {}", few.runs, every.runs);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]
    #[test]
    fn a_search_finds_what_every_order_gives(calls in calls(7), end in ends()) {
        agree(by_one_host, &calls, end)?;
    }

    #[test]
    fn a_search_of_rank_threads_finds_what_every_order_gives(calls in calls(6), end in ends()) {
        agree(by_threads, &calls, end)?;
    }
}

/// Slots that are filled on one stream and used on another, on each of two ranks, then a sum over both.
fn pipeline(rank: &Rank, weights: usize) -> Result<(), Error> {
    let free = rank.device.event("free");
    rank.streams[1].record(&free)?;
    for weight in 0..weights {
        let ready = rank.device.event("ready");
        rank.streams[0].wait(&free, Why("test.free"))?;
        rank.streams[0].launch(set(&rank.views[0], weight as f32))?;
        rank.streams[0].record(&ready)?;
        rank.streams[1].wait(&ready, Why("test.ready"))?;
        rank.streams[1].launch(copy(&rank.views[0], &rank.views[1]))?;
        rank.streams[1].record(&free)?;
    }
    rank.streams[1].joint(&rank.meeting, Exchange::AllReduce(Reduce::Sum), "test", vec![Access::update(&rank.views[1])])
}

#[test]
fn a_search_runs_far_fewer_orders_than_there_are() {
    let program = |weights: usize| {
        move |machine: &Machine| -> Result<Vec<u32>, Error> {
            let devices = (0..RANKS).map(|rank| machine.device(rank)).collect::<Result<Vec<_>, _>>()?;
            let ranks = devices.iter().map(Rank::open).collect::<Result<Vec<_>, _>>()?;
            ranks.iter().try_for_each(|rank| pipeline(rank, weights))?;
            ranks.iter().try_for_each(|rank| rank.device.synchronize())?;
            let value = |rank: &Rank| Ok(rank.streams[1].download::<f32>(&rank.views[1])?.wait()?[0] as u32);
            ranks.iter().map(value).collect()
        }
    };
    for weights in 1..=3 {
        let every = explore_every_order(100_000, &Options::default(), program(weights)).unwrap();
        let few = explore(100_000, &Options::default(), program(weights)).unwrap();
        println!("{weights} weights: {} runs of {} orders", few.runs, every.runs);
        assert!(every.complete && few.complete);
        assert!(few.results.keys().eq(every.results.keys()));
        assert_eq!(few.runs, 1, "all that conflicts is ordered: {} orders", every.runs);
    }
    // Without the waits of one name, orders that differ are many, and all others are left out.
    let forgetful = |machine: &Machine| {
        machine.drop_waits(Why("test.ready"));
        program(2)(machine)
    };
    let every = explore_every_order(100_000, &Options::default(), forgetful).unwrap();
    let few = explore(100_000, &Options::default(), forgetful).unwrap();
    println!("2 weights without a wait: {} runs of {} orders, {} results", few.runs, every.runs, few.results.len());
    assert!(every.complete && few.complete);
    assert!(few.results.keys().eq(every.results.keys()));
    assert!(few.results.len() > 1 && few.runs * 10 < every.runs, "{} of {}", few.runs, every.runs);
}
