//! Graphs with calls of several groups in several branches, as those of whole steps have, launched beside eager calls.

use device::{Machine, Reduce, Stream, View, Why, ops::Add};
use pgroups::{Group, Key, Needs, PgError, ProcessGroups, Rank, local};

use crate::{running_cards_support::*, running_support::*};

const RANKS: u32 = 8;
const BRANCHES: usize = 3;
/// Rounds of a graph: with each, the groups go to other branches.
const ROUNDS: usize = 9;
const NUMEL: usize = 3000;

/// A rank of a cube: the groups of its three axes, two members each, and values in each branch.
struct Cube {
    axes: Vec<Group>,
    streams: Vec<Stream>,
    data: Vec<View>,
    own: View,
}

impl Cube {
    fn new(rank: &Rank) -> Result<Cube, PgError> {
        let key = |axis: usize| Key::named(&format!("axis{axis}")).unwrap();
        let lines = |axis: usize| {
            let firsts = (0..RANKS).filter(|rank| rank & (1 << axis) == 0);
            let lines: Vec<[u32; 2]> = firsts.map(|first| [first | (1 << axis), first]).collect();
            let lines: Vec<&[u32]> = lines.iter().map(<[u32; 2]>::as_slice).collect();
            custom("line", &lines).custom.remove(0).1
        };
        let needs = Needs { custom: (0..BRANCHES).map(|axis| (key(axis), lines(axis))).collect(), ..Needs::default() };
        let groups = ProcessGroups::build(rank, &flat(RANKS), &needs)?;
        let axes =
            (0..BRANCHES).map(|axis| groups.get(&key(axis), "a test").cloned()).collect::<Result<Vec<_>, _>>()?;
        let streams: Vec<Stream> =
            ["a", "b", "c"].into_iter().map(|name| rank.device.stream(name)).collect::<Result<_, _>>()?;
        let data = (0..BRANCHES as u32).map(|i| put(&streams[0], "data", values::<f32>(8 * i + rank.global.0, NUMEL)));
        let data = data.collect();
        let own = put(&streams[0], "own", values::<f32>(100 + rank.global.0, NUMEL));
        streams[0].synchronize()?;
        Ok(Cube { axes, streams, data, own })
    }

    /// One call of `group` on branch `i`. A mean of two values rounds once, in whatever order, so its bits are known.
    fn call(&self, group: &Group, i: usize, gathered: bool) -> Result<(), PgError> {
        let (stream, data) = (&self.streams[i], &self.data[i]);
        if !gathered {
            return group.all_reduce(stream, data, Reduce::Avg);
        }
        let (place, half) = (group.place().index(), NUMEL / 2);
        let shard = data.flat(place * half..(place + 1) * half)?;
        group.reduce_scatter(stream, data, &shard, Reduce::Avg)?;
        group.all_gather(stream, &shard, data)
    }

    /// Forks into branches; each group's calls go from one to the next.
    fn submit(&self) -> Result<(), PgError> {
        let first = &self.streams[0];
        let fork = first.device().event("fork");
        first.record(&fork)?;
        self.streams[1..].iter().try_for_each(|stream| stream.wait(&fork, Why("test.fork")))?;
        for round in 0..ROUNDS {
            for (i, data) in self.data.iter().enumerate() {
                self.call(&self.axes[(i + round) % BRANCHES], i, (i + round) % 2 == 0)?;
                self.streams[i].launch(Add { a: data, b: &self.own, y: data }.op("test.own")?)?;
            }
        }
        for stream in &self.streams[1..] {
            let join = stream.device().event("join");
            stream.record(&join)?;
            first.wait(&join, Why("test.join"))?;
        }
        Ok(())
    }

    /// Calls of every group outside, on streams of other branches than those that they ended on.
    fn beside(&self) -> Result<(), PgError> {
        for (i, stream) in self.streams.iter().enumerate().skip(1) {
            let event = stream.device().event("behind");
            self.streams[0].record(&event)?;
            stream.wait(&event, Why("test.behind"))?;
            self.call(&self.axes[i - 1], i, false)?;
        }
        for stream in &self.streams[1..] {
            let event = stream.device().event("before");
            stream.record(&event)?;
            self.streams[0].wait(&event, Why("test.before"))?;
        }
        Ok(())
    }

    fn bits(&self) -> Result<Vec<u32>, PgError> {
        let mut bits = Vec::new();
        for data in &self.data {
            bits.extend(get::<f32>(&self.streams[0], data)?.iter().map(|value| value.to_bits()));
        }
        Ok(bits)
    }
}

#[derive(Clone, Copy)]
enum Exec {
    Eager,
    /// Every second launch is of a second executable.
    Replayed,
}

fn run(machine: &Machine, exec: Exec, steps: usize) -> Vec<Vec<u32>> {
    let ran = local(machine, RANKS, |rank| {
        let cube = Cube::new(&rank)?;
        let first = &cube.streams[0];
        let graphs = match exec {
            Exec::Eager => None,
            Exec::Replayed => {
                first.begin_capture("step")?;
                cube.submit()?;
                let graph = first.end_capture()?;
                Some([graph.instantiate()?, graph.instantiate()?])
            }
        };
        for step in 0..steps {
            match &graphs {
                None => cube.submit()?,
                Some(graphs) => first.launch_graph(&graphs[step % 2])?,
            }
            if step % 3 == 2 {
                cube.beside()?;
            }
        }
        first.synchronize()?;
        cube.bits()
    });
    ran.unwrap_or_else(|error| panic!("{}", error.chain()))
}

#[test]
fn graphs_whose_groups_go_from_branch_to_branch_are_launched_again_and_again_and_equal_eager_calls_on_hosts() {
    let card = card();
    let steps = 12;
    let want = run(&cpu(2), Exec::Eager, steps);
    assert!(want.iter().all(|bits| bits.iter().all(|bits| f32::from_bits(*bits).is_finite())), "values overflow");
    assert_ne!(want[0][..10], want[0][NUMEL..NUMEL + 10], "branches do the same");
    for exec in [Exec::Replayed, Exec::Eager] {
        assert!(run(&card.machine, exec, steps) == want, "values differ");
    }
}

/// Two executables that use the same communicators, on streams that nothing orders: the driver does.
#[test]
fn launches_and_calls_of_one_communicator_on_streams_that_nothing_orders_run_one_behind_the_other() {
    let sums = |machine: &Machine| {
        let ran = local(machine, 4, |rank| {
            let group = group_of(&rank, &custom("mine", &[&[2, 0, 3, 1]]), "mine")?;
            let streams: Vec<Stream> =
                ["a", "b", "c"].into_iter().map(|name| rank.device.stream(name)).collect::<Result<_, _>>()?;
            // Whole numbers, so that no order of sums rounds.
            let mine = |i: usize| vec![(rank.global.0 + 4 * i as u32) as f32; 200_000];
            let data: Vec<View> = streams.iter().enumerate().map(|(i, stream)| put(stream, "data", mine(i))).collect();
            let mut execs = Vec::new();
            for (stream, data) in streams.iter().zip(&data) {
                stream.synchronize()?;
                stream.begin_capture("some")?;
                (0..4).try_for_each(|_| group.all_reduce(stream, data, Reduce::Avg))?;
                group.all_reduce(stream, data, Reduce::Max)?;
                execs.push(stream.end_capture()?.instantiate()?);
            }
            for _ in 0..20 {
                streams[0].launch_graph(&execs[0])?;
                streams[1].launch_graph(&execs[1])?;
                group.all_reduce(&streams[2], &data[2], Reduce::Avg)?;
            }
            streams
                .iter()
                .zip(&data)
                .map(|(stream, data)| Ok(get::<f32>(stream, data)?))
                .collect::<Result<Vec<_>, PgError>>()
        });
        ran.unwrap_or_else(|error| panic!("{}", error.chain()))
    };
    for got in sums(&card().machine) {
        for (i, got) in got.iter().enumerate() {
            let want = 1.5 + 4.0 * i as f32;
            assert!(got.iter().all(|value| *value == want), "branch {i}: not {want} everywhere");
        }
    }
}
