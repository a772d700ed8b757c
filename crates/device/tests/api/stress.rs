//! Long random programs of many ranks and streams, against a model that runs them one operation after the other.

use device::*;
use proptest::prelude::*;

use super::{
    drivers::{Driver, cpu, sim},
    ranks::all_well,
    work::{floats, set, step, stepped},
};

const RANKS: u32 = 8;
const STREAMS: usize = 3;
const CELLS: usize = 4;

/// Groups with permuted members, gaps and different sizes; every rank is in several.
const GROUPS: [&[u32]; 6] = [&[0, 1], &[5, 2, 7], &[6, 3], &[4, 1, 0, 5], &[7, 6, 5, 4, 3, 2, 1, 0], &[2, 4, 6]];

/// One entry of a program. Streams and cells of joint operations are per member.
#[derive(Clone, Debug)]
enum Action {
    Step {
        rank: u32,
        stream: usize,
        cell: usize,
        factor: f32,
        term: f32,
    },
    Copy {
        rank: u32,
        stream: usize,
        from: usize,
        to: usize,
    },
    /// An order that nobody needs.
    Order {
        rank: u32,
        from: usize,
        to: usize,
    },
    Joint {
        group: usize,
        exchange: Exchange,
        at: Vec<(usize, usize)>,
    },
}

/// Numbers from a seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        // Knuth's 64-bit linear congruential generator, its high bits.
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % n
    }

    fn action(&mut self) -> Action {
        let (rank, stream) = (self.below(RANKS as usize) as u32, self.below(STREAMS));
        match self.below(10) {
            0..5 => {
                let (factor, term) = (1.0 + self.below(3) as f32, self.below(50) as f32);
                Action::Step { rank, stream, cell: self.below(CELLS), factor, term }
            }
            5..7 => {
                let from = self.below(CELLS);
                Action::Copy { rank, stream, from, to: (from + 1 + self.below(CELLS - 1)) % CELLS }
            }
            7 => Action::Order { rank, from: stream, to: self.below(STREAMS) },
            _ => {
                let group = self.below(GROUPS.len());
                let n = GROUPS[group].len();
                let exchange = match self.below(4) {
                    0 => Exchange::Barrier,
                    1 => Exchange::Broadcast { root: self.below(n) as u32 },
                    _ => Exchange::AllReduce(Reduce::Max),
                };
                Action::Joint {
                    group,
                    exchange,
                    at: (0..n).map(|_| (self.below(STREAMS), self.below(CELLS))).collect(),
                }
            }
        }
    }
}

fn start(rank: u32, cell: usize) -> f32 {
    (rank as usize * 10 + cell) as f32
}

/// The values of all cells after the program.
fn model(program: &[Action]) -> Vec<Vec<f32>> {
    let mut cells: Vec<Vec<f32>> = (0..RANKS).map(|r| (0..CELLS).map(|c| start(r, c)).collect()).collect();
    for action in program {
        match action {
            Action::Step { rank, cell, factor, term, .. } => {
                let x = &mut cells[*rank as usize][*cell];
                *x = stepped(*x, *factor, *term);
            }
            Action::Copy { rank, from, to, .. } => cells[*rank as usize][*to] = cells[*rank as usize][*from],
            Action::Order { .. } | Action::Joint { exchange: Exchange::Barrier, .. } => {}
            Action::Joint { group, exchange, at } => {
                let places: Vec<(usize, usize)> =
                    GROUPS[*group].iter().zip(at).map(|(rank, (_, cell))| (*rank as usize, *cell)).collect();
                let value = match exchange {
                    Exchange::Broadcast { root } => cells[places[*root as usize].0][places[*root as usize].1],
                    _ => places.iter().map(|(rank, cell)| cells[*rank][*cell]).fold(f32::MIN, f32::max),
                };
                places.into_iter().for_each(|(rank, cell)| cells[rank][cell] = value);
            }
        }
    }
    cells
}

/// One rank's part of the program: each touch of a cell is ordered behind what touched it last on other streams.
struct Rank {
    rank: u32,
    streams: Vec<Stream>,
    cells: Vec<View>,
    /// By cell and stream: recorded behind the last operation of that stream on that cell.
    last: Vec<Vec<Event>>,
    spare: Event,
    groups: Vec<Option<Meeting>>,
}

impl Rank {
    fn open(device: &Device) -> Result<Rank, Error> {
        let rank = device.rank();
        let streams = (0..STREAMS).map(|_| device.stream("s")).collect::<Result<Vec<_>, _>>()?;
        let cells: Vec<View> = (0..CELLS).map(|_| floats(device, "cell", 3)).collect();
        for (c, cell) in cells.iter().enumerate() {
            streams[0].launch(set(cell, start(rank, c)))?;
        }
        streams[0].synchronize()?;
        let last = (0..CELLS).map(|_| (0..STREAMS).map(|_| device.event("last")).collect()).collect();
        let open = |(i, members): (usize, &&[u32])| {
            let member = members.contains(&rank);
            member.then(|| device.machine().meeting(&format!("g{i}"), members, rank)).transpose()
        };
        let groups = GROUPS.iter().enumerate().map(open).collect::<Result<Vec<_>, _>>()?;
        Ok(Rank { rank, streams, cells, last, spare: device.event("spare"), groups })
    }

    fn touch(
        &self,
        stream: usize,
        cells: &[usize],
        submit: impl FnOnce(&Stream) -> Result<(), Error>,
    ) -> Result<(), Error> {
        for cell in cells {
            for event in self.last[*cell].iter().filter(|e| e.generation() > 0) {
                self.streams[stream].wait(event, Why("test.last_touch"))?;
            }
        }
        submit(&self.streams[stream])?;
        cells.iter().try_for_each(|cell| self.streams[stream].record(&self.last[*cell][stream]))
    }

    fn submit(&self, action: &Action) -> Result<(), Error> {
        match action {
            Action::Step { rank, stream, cell, factor, term } if *rank == self.rank => {
                self.touch(*stream, &[*cell], |s| s.launch(step(&self.cells[*cell], *factor, *term)))
            }
            Action::Copy { rank, stream, from, to } if *rank == self.rank => self
                .touch(*stream, &[*from, *to], |s| s.launch(super::work::copy(&self.cells[*from], &self.cells[*to]))),
            Action::Order { rank, from, to } if *rank == self.rank => {
                self.streams[*from].record(&self.spare)?;
                self.streams[*to].wait(&self.spare, Why("test.spare"))
            }
            Action::Joint { group, exchange, at } => {
                let Some(meeting) = &self.groups[*group] else { return Ok(()) };
                let (stream, cell) = at[meeting.place() as usize];
                let view = &self.cells[cell];
                let access = match exchange {
                    Exchange::Barrier => None,
                    Exchange::Broadcast { root } if *root == meeting.place() => Some(Access::read(view)),
                    Exchange::Broadcast { .. } => Some(Access::write(view)),
                    _ => Some(Access::update(view)),
                };
                let touched: &[usize] = if access.is_some() { &[cell] } else { &[] };
                let accesses = access.into_iter().collect();
                self.touch(stream, touched, |s| s.joint(meeting, *exchange, "test", accesses))
            }
            _ => Ok(()),
        }
    }

    fn values(&self) -> Result<Vec<f32>, Error> {
        self.streams.iter().try_for_each(Stream::synchronize)?;
        self.cells.iter().map(|c| Ok(self.streams[0].download::<f32>(c)?.wait()?[2])).collect()
    }
}

/// All ranks submitted by one thread, entry by entry.
fn by_one_thread(driver: &Driver, program: &[Action]) -> Vec<Vec<f32>> {
    let machine = driver.machine();
    let ranks: Vec<Rank> = (0..RANKS).map(|r| Rank::open(&machine.device(r).unwrap()).unwrap()).collect();
    for action in program {
        ranks.iter().for_each(|rank| rank.submit(action).unwrap());
    }
    ranks.iter().map(|rank| rank.values().unwrap()).collect()
}

/// Each rank in a thread of its own, as far ahead as it likes.
fn by_rank_threads(driver: &Driver, program: &[Action]) -> Vec<Vec<f32>> {
    let ranks: Vec<u32> = (0..RANKS).collect();
    all_well(&driver.machine(), &ranks, |device| {
        let rank = Rank::open(device)?;
        program.iter().try_for_each(|action| rank.submit(action))?;
        rank.values()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3, max_shrink_iters: 30, ..ProptestConfig::default() })]
    #[test]
    fn random_programs_of_many_ranks_give_what_a_serial_run_gives(seed: u64, len in 6_000usize..12_000) {
        let mut dice = Dice(seed);
        let program: Vec<Action> = (0..len).map(|_| dice.action()).collect();
        let want = model(&program);
        for workers in 1..=4 {
            prop_assert_eq!(&by_one_thread(&cpu(workers), &program), &want, "{} workers, one thread", workers);
            prop_assert_eq!(&by_rank_threads(&cpu(workers), &program), &want, "{} workers, rank threads", workers);
        }
        prop_assert_eq!(&by_one_thread(&sim(seed), &program), &want);
        prop_assert_eq!(&by_rank_threads(&sim(seed ^ 1), &program), &want);
    }

    #[test]
    fn short_random_programs_give_what_a_serial_run_gives(seed: u64, len in 1usize..60) {
        let mut dice = Dice(seed);
        let program: Vec<Action> = (0..len).map(|_| dice.action()).collect();
        let want = model(&program);
        for round in 0..4u64 {
            prop_assert_eq!(&by_one_thread(&cpu(1 + (seed % 4) as usize), &program), &want);
            prop_assert_eq!(&by_rank_threads(&cpu(1 + (seed % 4) as usize), &program), &want);
            prop_assert_eq!(&by_one_thread(&sim(seed ^ round), &program), &want);
        }
    }
}
