//! The communicators of a group's members, and how many there may be on a card.
//!
//! All members of a group are ranks of this process, so whoever first needs the communicators makes all of them, and
//! nobody waits for another rank. When a group is over they are kept for the next one of the same cards: closing them
//! would wait for every stream.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use super::{
    CudaError,
    card::{Card, RawStream, lock},
    event::CardEvent,
    fault::Post,
    memory::DeviceMemory,
    nccl::{self, Comm, Ends, Id, Part, Type},
    prepare::check_collectives,
    uses::LastUse,
};
use crate::{DType, Fresh, Reduce};

/// Multiprocessors that groups leave to everything else on a card.
const SPARE: u32 = 8;
/// How long closing the last ones is waited for; then they are left to the process.
const CLOSING: Duration = Duration::from_secs(20);
/// How long making one and its first calls may take.
const MAKING: Duration = Duration::from_secs(60);

/// All communicators of a machine.
pub(crate) struct Cliques {
    /// Rank `r` is on card `r % cards.len()`.
    cards: Vec<Arc<Card>>,
    ctas: Option<u32>,
    library: OnceLock<Result<i32, CudaError>>,
    /// NCCL is called by one thread at a time, so that all calls of all members have one order.
    turn: Mutex<()>,
    state: Mutex<State>,
    /// Communicators that are being made.
    making: AtomicUsize,
}

#[derive(Default)]
struct State {
    /// By the cards of their members.
    idle: HashMap<Vec<u32>, Vec<Clique>>,
    open: Vec<Weak<Lease>>,
    /// By card: blocks that the open ones may take.
    taken: BTreeMap<u32, u32>,
}

/// The right to call NCCL.
pub(super) struct Turn<'a>(#[expect(dead_code, reason = "held until it is dropped")] MutexGuard<'a, ()>);

/// The communicator of one group, all members' ends of it.
pub(super) struct Clique {
    pub(super) seats: Vec<Seat>,
    ctas: Option<u32>,
}

/// One member's end.
pub(super) struct Seat {
    pub(super) card: Arc<Card>,
    pub(super) comm: Comm,
    /// For first calls and for captures.
    pub(super) stream: RawStream,
    /// What a barrier reduces.
    pub(super) word: DeviceMemory,
    /// For kernels before and behind its calls.
    pub(super) post: Post,
    pub(super) last: LastUse,
}

/// A clique for as long as its group is open.
pub(crate) struct Lease {
    clique: Option<Clique>,
    given_up: AtomicBool,
    cliques: Arc<Cliques>,
}

impl Cliques {
    pub(super) fn new(cards: Vec<Arc<Card>>, ctas: Option<u32>) -> Arc<Cliques> {
        Arc::new(Cliques {
            cards,
            ctas,
            library: OnceLock::new(),
            turn: Mutex::default(),
            state: Mutex::default(),
            making: AtomicUsize::new(0),
        })
    }

    fn cards_of(&self, members: &[u32]) -> Vec<Arc<Card>> {
        members.iter().map(|rank| self.cards[*rank as usize % self.cards.len()].clone()).collect()
    }

    /// Refuses a group of `members` that could not communicate.
    pub(super) fn check(&self, members: &[u32]) -> Result<(), CudaError> {
        let version = self.library.get_or_init(nccl::open).clone()?;
        check_collectives()?;
        if version < nccl::OLDEST_SHARING && most_on_one(self.cards_of(members).iter().map(|card| card.ordinal)) > 1 {
            let what_for = "several ranks of a group on one card ";
            return Err(CudaError::OldNccl { have: version, need: nccl::OLDEST_SHARING, what_for });
        }
        Ok(())
    }

    pub(super) fn turn(&self) -> Turn<'_> {
        Turn(lock(&self.turn))
    }

    /// Some thread makes communicators: that takes longer than hosts look for progress.
    pub(super) fn makes_some(&self) -> bool {
        self.making.load(Ordering::Relaxed) > 0
    }

    /// Some were given up: what is on the cards may not end.
    pub(super) fn some_stand(&self) -> bool {
        self.cards[0].beginnings.some_stand()
    }

    /// Communicators for a group of `members`.
    pub(super) fn lease(self: &Arc<Self>, _turn: &Turn<'_>, members: &[u32]) -> Result<Arc<Lease>, CudaError> {
        self.check(members)?;
        let cards = self.cards_of(members);
        let numbers: Vec<u32> = cards.iter().map(|card| card.ordinal).collect();
        let ctas = self.ctas.or((most_on_one(numbers.iter().copied()) > 1).then_some(1));
        self.take_blocks(&cards, ctas)?;
        let kept = lock(&self.state).idle.get_mut(&numbers).and_then(Vec::pop);
        self.making.fetch_add(1, Ordering::Relaxed);
        let made = kept.map_or_else(|| Clique::make(&cards, ctas), Ok);
        self.making.fetch_sub(1, Ordering::Relaxed);
        let clique = made.inspect_err(|_| self.give_blocks_back(&cards, ctas))?;
        let lease = Arc::new(Lease { clique: Some(clique), given_up: AtomicBool::new(false), cliques: self.clone() });
        let mut state = lock(&self.state);
        state.open.retain(|open| open.strong_count() > 0);
        state.open.push(Arc::downgrade(&lease));
        Ok(lease)
    }

    /// Members wait on their cards for each other, so all that can be called at once must run at once.
    fn take_blocks(&self, cards: &[Arc<Card>], ctas: Option<u32>) -> Result<(), CudaError> {
        let Some(ctas) = ctas else { return Ok(()) };
        let mut state = lock(&self.state);
        let mut more: BTreeMap<u32, (u32, u32)> = BTreeMap::new();
        for card in cards {
            more.entry(card.ordinal).or_insert((0, card.multiprocessors)).0 += 1;
        }
        for (&card, &(members, multiprocessors)) in &more {
            let taken = state.taken.get(&card).copied().unwrap_or(0);
            if taken + members * ctas > multiprocessors.saturating_sub(SPARE) {
                return Err(CudaError::Crowded { card, multiprocessors, spare: SPARE, taken, members, ctas });
            }
        }
        more.into_iter().for_each(|(card, (members, _))| *state.taken.entry(card).or_default() += members * ctas);
        Ok(())
    }

    fn give_blocks_back(&self, cards: &[Arc<Card>], ctas: Option<u32>) {
        let mut state = lock(&self.state);
        for card in cards {
            *state.taken.entry(card.ordinal).or_default() -= ctas.unwrap_or(0);
        }
    }

    /// Open communicators that have failed, with what NCCL says. Nothing while somebody else calls NCCL.
    pub(super) fn failures(&self) -> Vec<(Arc<Lease>, CudaError)> {
        let Ok(_turn) = self.turn.try_lock() else { return Vec::new() };
        let open: Vec<Arc<Lease>> = lock(&self.state).open.iter().filter_map(Weak::upgrade).collect();
        let failed = open.into_iter().filter_map(|lease| {
            let comms = lease.clique().ok()?.seats.iter().map(|seat| seat.comm);
            let error = comms.into_iter().find_map(Comm::failure)?;
            Some((lease, error))
        });
        failed.collect()
    }
}

/// The most members that share a card.
fn most_on_one(cards: impl Iterator<Item = u32> + Clone) -> usize {
    let all = cards.clone();
    cards.map(|card| all.clone().filter(|other| *other == card).count()).max().unwrap_or(0)
}

impl Clique {
    /// On a thread of its own, because NCCL may wait for ever, and its callers do not.
    fn make(cards: &[Arc<Card>], ctas: Option<u32>) -> Result<Clique, CudaError> {
        let card = cards[0].ordinal;
        let (done, made) = mpsc::channel();
        let own = cards.to_vec();
        let make = move || {
            // Whoever has given up drops what comes.
            let _ = done.send(Clique::new(&own, ctas));
        };
        let started = thread::Builder::new().name("cuda-communicator".to_owned()).spawn(make);
        started.map_err(|_| CudaError::Unable { card, what: "get a thread that makes a communicator" })?;
        let too_long = CudaError::Unable { card, what: "make a communicator in 60 s; NCCL_DEBUG=INFO tells more" };
        made.recv_timeout(MAKING).unwrap_or(Err(too_long))
    }

    fn new(cards: &[Arc<Card>], ctas: Option<u32>) -> Result<Clique, CudaError> {
        let begin = Instant::now();
        let comms = nccl::comms(&Id::new()?, cards, ctas)?;
        let seat = |(card, comm): (&Arc<Card>, Comm)| {
            card.bind()?;
            let no_room = || CudaError::Unable { card: card.ordinal, what: "give four bytes to a communicator" };
            let word = DeviceMemory::new(card, comms.len() * 4, Fresh::Zeroed)?.ok_or_else(no_room)?;
            Ok(Seat {
                card: card.clone(),
                comm,
                stream: card.new_stream()?,
                word,
                post: Post::new(card)?,
                last: LastUse::default(),
            })
        };
        let seats = cards.iter().zip(comms.iter().copied()).map(seat).collect::<Result<Vec<_>, CudaError>>()?;
        let clique = Clique { seats, ctas };
        clique.warm()?;
        tracing::debug!(members = cards.len(), took = ?begin.elapsed(), "cuda.make_communicator");
        Ok(clique)
    }

    /// Calls everything once that connects members: a capture of one member alone could not.
    fn warm(&self) -> Result<(), CudaError> {
        let (n, dtype) = (self.seats.len(), Type::of(DType::I32));
        let begins = self.seats[0].card.beginnings.begin();
        nccl::group(|| {
            self.seats.iter().try_for_each(|seat| {
                let at = seat.word.address();
                // SAFETY: the seat's own memory and stream.
                unsafe { seat.comm.all_reduce(Ends { from: at, to: at, count: 1, dtype }, Reduce::Max, seat.stream) }
            })
        })?;
        nccl::group(|| {
            self.seats.iter().try_for_each(|seat| {
                (0..n).try_for_each(|peer| {
                    // Zeros, and sent nowhere else than to where they come from on the other side.
                    let (at, part) = (seat.word.address() + 4 * peer as u64, Part { count: 1, dtype });
                    // SAFETY: as above; the memory has a word for each peer, which holds the same before and behind.
                    unsafe {
                        seat.comm.send(at, part, peer, seat.stream)?;
                        seat.comm.recv(at, part, peer, seat.stream)
                    }
                })
            })
        })?;
        drop(begins);
        let begin = Instant::now();
        for seat in &self.seats {
            seat.card.bind()?;
            let event = CardEvent::record(&seat.card, seat.stream)?;
            while !seat.card.is_reached(event.raw())? {
                if begin.elapsed() > MAKING {
                    let what = "finish the first calls of a communicator; NCCL_DEBUG=INFO tells more";
                    return Err(CudaError::Unable { card: seat.card.ordinal, what });
                }
                thread::sleep(Duration::from_micros(50));
            }
        }
        Ok(())
    }

    fn numbers(&self) -> Vec<u32> {
        self.seats.iter().map(|seat| seat.card.ordinal).collect()
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.card.end_stream(self.stream);
    }
}

impl Lease {
    /// The communicators, unless they were given up.
    pub(super) fn clique(&self) -> Result<&Clique, CudaError> {
        if self.given_up.load(Ordering::Acquire) {
            return Err(CudaError::GivenUp);
        }
        Ok(self.clique.as_ref().expect("BUG: a lease without a clique"))
    }

    /// Whether some of its members meet on one card.
    pub(super) fn shares_a_card(&self) -> bool {
        let clique = self.clique.as_ref().expect("BUG: a lease without a clique");
        most_on_one(clique.seats.iter().map(|seat| seat.card.ordinal)) > 1
    }

    /// Refuses later calls. Those that were made stay on the card and end when the last member comes: NCCL could stop them,
    /// but frees then what a late member writes into, which breaks the card for the process.
    pub(super) fn give_up(&self) {
        self.given_up.store(true, Ordering::Release);
        self.cliques.cards[0].beginnings.stand();
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let clique = self.clique.take().expect("BUG: a lease is dropped once");
        let cards: Vec<_> = clique.seats.iter().map(|seat| seat.card.clone()).collect();
        self.cliques.give_blocks_back(&cards, clique.ctas);
        if self.given_up.load(Ordering::Acquire) {
            // Kernels of members that were late may still end; nothing they touch is used again.
            std::mem::forget(clique);
            return;
        }
        lock(&self.cliques.state).idle.entry(clique.numbers()).or_default().push(clique);
    }
}

impl Drop for Cliques {
    fn drop(&mut self) {
        let idle: Vec<Clique> = lock(&self.state).idle.drain().flat_map(|(_, cliques)| cliques).collect();
        if idle.is_empty() {
            return;
        }
        let (done, ended) = mpsc::channel();
        let close = move || {
            for clique in idle {
                let closed = nccl::group(|| {
                    clique.seats.iter().try_for_each(|seat| seat.card.bind().and_then(|()| seat.comm.close()))
                });
                if let Err(error) = closed {
                    tracing::error!(%error, "cuda.close_communicator");
                }
            }
            let _ = done.send(());
        };
        let closing = thread::Builder::new().name("cuda-close".to_owned()).spawn(close);
        if closing.is_err() || ended.recv_timeout(CLOSING).is_err() {
            tracing::error!("cuda.abandon_communicators");
        }
    }
}
