//! Random programs: captured and replayed they give the bits of the same calls submitted one by one, the slow twin.

use device::*;
use proptest::prelude::*;

use super::{
    drivers::{Driver, cpu, sim},
    ranks::all_well,
    work::{floats, set, stepped},
};

const STREAMS: usize = 3;

const VIEWS: usize = 4;

/// One call of a program. Numbers are taken modulo what there is.
#[derive(Clone, Copy, Debug)]
enum Call {
    /// `to = step(from)`, ordered behind what touched either before.
    Combine { stream: usize, from: usize, to: usize, term: u32 },
    /// All ranks sum a view.
    Sum { stream: usize, view: usize },
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let combine = (0..STREAMS, 0..VIEWS, 0..VIEWS, 0u32..50).prop_map(|(stream, from, to, term)| Call::Combine {
        stream,
        from,
        to,
        term,
    });
    let sum = (0..STREAMS, 0..VIEWS).prop_map(|(stream, view)| Call::Sum { stream, view });
    prop::collection::vec(prop_oneof![4 => combine, 1 => sum], 1..24)
}

/// Who touched each view last, so that a program orders what it must and no more.
struct Program<'p> {
    streams: &'p [Stream],
    views: &'p [View],
    meeting: &'p Meeting,
    /// By view: an event behind the last call that touched it, and the stream.
    last: Vec<Option<(Event, usize)>>,
    rank: u32,
}

impl Program<'_> {
    fn run(&mut self, calls: &[Call]) -> Result<(), Error> {
        self.last.fill(None);
        // All streams take part, behind what is on the first.
        let start = self.streams[0].device().event("start");
        self.streams[0].record(&start)?;
        for stream in &self.streams[1..] {
            stream.wait(&start, Why("test.start"))?;
        }
        calls.iter().try_for_each(|call| self.call(*call))?;
        for stream in &self.streams[1..] {
            let end = stream.device().event("end");
            stream.record(&end)?;
            self.streams[0].wait(&end, Why("test.end"))?;
        }
        Ok(())
    }

    fn call(&mut self, call: Call) -> Result<(), Error> {
        match call {
            Call::Combine { stream, from, to, term } => {
                self.order(stream, &[from, to])?;
                let rank = self.rank;
                let step = move |x: f32| stepped(x, 3.0, (term + rank) as f32);
                let op = if from == to {
                    Op::host("step", "test", vec![Access::update(&self.views[to])], move |args| {
                        args.write::<f32>(0)?.iter_mut().for_each(|x| *x = step(*x));
                        Ok(())
                    })
                } else {
                    let accesses = vec![Access::read(&self.views[from]), Access::update(&self.views[to])];
                    Op::host("combine", "test", accesses, move |args| {
                        let from = args.read::<f32>(0)?;
                        args.write::<f32>(1)?.iter_mut().zip(from).for_each(|(x, f)| *x = step(*x + *f));
                        Ok(())
                    })
                };
                self.streams[stream].launch(op)?;
                self.touched(stream, &[from, to])
            }
            Call::Sum { stream, view } => {
                self.order(stream, &[view])?;
                let accesses = vec![Access::update(&self.views[view])];
                self.streams[stream].joint(self.meeting, Exchange::AllReduce(Reduce::Avg), "sum", accesses)?;
                self.touched(stream, &[view])
            }
        }
    }

    fn order(&self, stream: usize, views: &[usize]) -> Result<(), Error> {
        for (event, on) in views.iter().filter_map(|view| self.last[*view].as_ref()) {
            if *on != stream {
                self.streams[stream].wait(event, Why("test.last"))?;
            }
        }
        Ok(())
    }

    fn touched(&mut self, stream: usize, views: &[usize]) -> Result<(), Error> {
        let event = self.streams[stream].device().event("touched");
        self.streams[stream].record(&event)?;
        views.iter().for_each(|view| self.last[*view] = Some((event.clone(), stream)));
        Ok(())
    }
}

#[derive(Clone, Copy)]
enum How {
    Eager,
    /// Captured once, launched every round, on the first stream or on all in turn.
    Replayed,
    ReplayedInTurns,
}

/// The bits of all views on all ranks after some rounds.
fn bits(driver: &Driver, calls: &[Call], how: How) -> Vec<Vec<u32>> {
    let machine = driver.machine();
    let ranks = [2, 0];
    all_well(&machine, &ranks, |device| {
        let streams: Vec<Stream> = (0..STREAMS).map(|i| device.stream(&format!("s{i}"))).collect::<Result<_, _>>()?;
        let views: Vec<View> = (0..VIEWS).map(|i| floats(device, "v", 2 + i)).collect();
        let meeting = machine.meeting("all", &ranks, device.rank())?;
        for (i, view) in views.iter().enumerate() {
            streams[0].launch(set(view, (i as u32 + 7 * device.rank()) as f32))?;
        }
        let (streams, rank) = (&streams[..], device.rank());
        let mut program = Program { streams, views: &views, meeting: &meeting, last: vec![None; VIEWS], rank };
        let exec = match how {
            How::Eager => None,
            How::Replayed | How::ReplayedInTurns => {
                streams[0].begin_capture("program")?;
                program.run(calls)?;
                Some(streams[0].end_capture()?.instantiate()?)
            }
        };
        let ready = device.event("ready");
        streams[0].record(&ready)?;
        streams[1..].iter().try_for_each(|stream| stream.wait(&ready, Why("test.ready")))?;
        for round in 0..4 {
            match (&exec, how) {
                (Some(exec), How::ReplayedInTurns) => streams[round % STREAMS].launch_graph(exec)?,
                (Some(exec), _) => streams[0].launch_graph(exec)?,
                (None, _) => program.run(calls)?,
            }
        }
        device.synchronize()?;
        let mut bits = Vec::new();
        for view in &views {
            bits.extend(streams[0].download::<f32>(view)?.wait()?.into_iter().map(f32::to_bits));
        }
        Ok(bits)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn a_random_program_replayed_gives_the_bits_of_its_eager_twin(calls in calls(), seed in any::<u64>()) {
        let want = bits(&sim(seed), &calls, How::Eager);
        for driver in [cpu(1), cpu(2), sim(seed), sim(seed ^ 1), sim(seed ^ 2)] {
            prop_assert_eq!(&bits(&driver, &calls, How::Replayed), &want);
            prop_assert_eq!(&bits(&driver, &calls, How::ReplayedInTurns), &want);
        }
        prop_assert_eq!(&bits(&cpu(2), &calls, How::Eager), &want);
    }
}

#[cfg(feature = "gpu-tests")]
proptest! {
    #![proptest_config(ProptestConfig::with_cases(20))]

    #[test]
    fn a_random_program_replayed_on_a_card_gives_the_bits_of_its_eager_twin(calls in calls()) {
        let without_sums: Vec<Call> = calls.into_iter().filter(|call| matches!(call, Call::Combine { .. })).collect();
        let _turn = super::drivers::card_turn();
        let (want, card) = (bits(&sim(0), &without_sums, How::Eager), super::drivers::cuda());
        for how in [How::Eager, How::Replayed, How::ReplayedInTurns] {
            prop_assert_eq!(&bits(&card, &without_sums, how), &want);
        }
    }
}
