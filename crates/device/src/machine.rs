//! One machine per process: what the devices of all its ranks share.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Mutex, MutexGuard, RwLock, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use crate::{
    Departure, Device, Error, Fresh, Label, Meeting, Pending, Trace, Why,
    apart::Apart,
    cpu::CpuEngine,
    cuda::{CudaEngine, CudaOptions, ProductChoices},
    device::{DeviceInner, Owner},
    engine::Engine,
    joint::Arrival,
    meeting::MeetingInner,
    ops::GemmShape,
    sim::{Chooser, SimEngine},
    survey::Survey,
    trace::Tracer,
};

/// Settings of a machine.
#[derive(Clone, Debug)]
pub struct Options {
    /// How long a host waits while nothing at all moves, before it gives up and says who is missing. `sim` and `dry`
    /// know at once; there it is the limit for a rank that was announced and whose thread never enters.
    pub timeout: Duration,
    /// What fresh memory holds.
    pub fresh: Fresh,
}

impl Default for Options {
    /// 60 s, zeros.
    fn default() -> Self {
        Options { timeout: Duration::from_secs(60), fresh: Fresh::Zeroed }
    }
}

/// One worker pool or one scheduler, shared by all ranks of a process. Cloning shares it.
#[derive(Clone)]
pub struct Machine(pub(crate) Arc<MachineInner>);

pub(crate) struct MachineInner {
    pub(crate) engine: Engine,
    pub(crate) options: Options,
    pub(crate) tracer: Tracer,
    /// On `dry` only.
    pub(crate) survey: Option<Survey>,
    /// Counts everything that completes; a host that waits looks whether it moves.
    pub(crate) progress: Apart<AtomicU64>,
    any_dropped: AtomicBool,
    dropped: RwLock<BTreeSet<Label>>,
    devices: Mutex<BTreeMap<u32, Weak<Owner>>>,
    meetings: Mutex<Meetings>,
    /// What its groups are known by.
    pub(crate) identity: Arc<()>,
}

#[derive(Default)]
struct Meetings {
    open: BTreeMap<Arc<str>, Weak<MeetingInner>>,
    /// The same by member: one who leaves looks at no others.
    of: BTreeMap<u32, BTreeMap<Arc<str>, Weak<MeetingInner>>>,
    /// Entries that were open when those that nobody holds were last thrown out.
    swept: usize,
    /// Ranks that left, and the root of it.
    gone: BTreeMap<u32, (u32, Departure)>,
}

impl Meetings {
    fn open(&mut self, meeting: &Arc<MeetingInner>) {
        // Not at every call: worlds of many ranks open a meeting for each pair.
        if self.open.len() > 2 * self.swept + 64 {
            let own = self.of.values_mut();
            own.chain([&mut self.open]).for_each(|some| some.retain(|_, meeting| meeting.strong_count() > 0));
            self.of.retain(|_, own| !own.is_empty());
            self.swept = self.open.len();
        }
        for member in &*meeting.members {
            self.of.entry(*member).or_default().insert(meeting.name.clone(), Arc::downgrade(meeting));
        }
        self.open.insert(meeting.name.clone(), Arc::downgrade(meeting));
    }
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(|poison| poison.into_inner())
}

impl Machine {
    /// Computes on `workers` threads of this host.
    ///
    /// # Errors
    /// [`Error::Machine`] with no workers or over 1024.
    pub fn cpu(workers: usize) -> Result<Machine, Error> {
        Machine::cpu_with(workers, Options::default())
    }

    /// As [`Machine::cpu`], with settings.
    ///
    /// # Errors
    /// [`Error::Machine`] with no workers or over 1024.
    pub fn cpu_with(workers: usize, options: Options) -> Result<Machine, Error> {
        if !(1..=1024).contains(&workers) {
            return Err(Error::Machine { setting: "workers", value: workers, rule: "from 1 to 1024" });
        }
        Ok(Machine::new(Engine::Cpu(CpuEngine::start(workers)), options))
    }

    /// Computes one thing at a time, the next one picked by `seed` among all that may run. Equal seeds give equal
    /// traces.
    pub fn sim(seed: u64) -> Machine {
        Machine::sim_with(seed, Options::default())
    }

    /// As [`Machine::sim`], with settings.
    pub fn sim_with(seed: u64, options: Options) -> Machine {
        Machine::new(Engine::Sim(SimEngine::new(Chooser::seeded(seed), true)), options)
    }

    pub(crate) fn scripted(chooser: Chooser, options: Options) -> Machine {
        Machine::new(Engine::Sim(SimEngine::new(chooser, true)), options)
    }

    /// Shapes only: no storage, no kernels; order, groups, errors and traces as everywhere.
    pub fn dry() -> Machine {
        Machine::new(Engine::Sim(SimEngine::new(Chooser::first(), false)), Options::default())
    }

    /// Computes on the first NVIDIA card of this host; see [`crate::cuda`].
    ///
    /// # Errors
    /// [`Error::Cuda`], whose source names what is missing: a library, a variable that
    /// [`cuda::prepare`](crate::cuda::prepare) sets, a card, a driver that is new enough.
    pub fn cuda() -> Result<Machine, Error> {
        Machine::cuda_with(CudaOptions::default(), Options::default())
    }

    /// As [`Machine::cuda`], with settings.
    ///
    /// # Errors
    /// As [`Machine::cuda`].
    pub fn cuda_with(cuda: CudaOptions, options: Options) -> Result<Machine, Error> {
        let engine = CudaEngine::open(&cuda)
            .map_err(|source| Error::Cuda { what: "the machine cannot be opened".to_owned(), source })?;
        Ok(Machine::new(Engine::Cuda(engine), options))
    }

    fn new(engine: Engine, options: Options) -> Machine {
        let survey = (!engine.computes()).then(Survey::default);
        Machine(Arc::new(MachineInner {
            engine,
            survey,
            options,
            tracer: Tracer::new(),
            progress: Apart(AtomicU64::new(0)),
            any_dropped: AtomicBool::new(false),
            dropped: RwLock::default(),
            devices: Mutex::default(),
            meetings: Mutex::default(),
            identity: Arc::default(),
        }))
    }

    /// Name of the driver: `cpu`, `sim`, `dry` or `cuda`.
    pub fn driver(&self) -> &'static str {
        self.0.engine.name()
    }

    /// Operations compute: there are values. False on `dry`.
    pub fn computes(&self) -> bool {
        self.0.engine.computes()
    }

    /// Settings.
    pub fn options(&self) -> &Options {
        &self.0.options
    }

    /// The device of `rank`.
    ///
    /// # Errors
    /// [`Error::RankTaken`] while a handle of another device of that rank lives: the device itself, a stream, an
    /// event or a download.
    pub fn device(&self, rank: u32) -> Result<Device, Error> {
        let mut devices = lock(&self.0.devices);
        if devices.get(&rank).is_some_and(|d| d.strong_count() > 0) {
            return Err(Error::RankTaken { rank });
        }
        let device = Device::new(DeviceInner::new(self.0.clone(), rank));
        devices.insert(rank, device.owner());
        lock(&self.0.meetings).gone.remove(&rank);
        Ok(device)
    }

    /// Opens the meeting place `name` of `members` (ranks in the order of the group) for `rank`. All members open it
    /// under the same name with the same list; the first makes it. A name that was closed by all, with no call under
    /// way, can be used again for another group.
    ///
    /// # Errors
    /// [`Error::NotAMember`] when `rank` is not in the list, [`Error::MemberTwice`] when a rank appears twice,
    /// [`Error::Members`] when the lists differ; [`Error::Cuda`] on cards whose ranks cannot communicate, which names
    /// what is missing.
    pub fn meeting(&self, name: &str, members: &[u32], rank: u32) -> Result<Meeting, Error> {
        self.0.engine.check_group(name, members)?;
        let mut meetings = lock(&self.0.meetings);
        let known = meetings.open.get(name).and_then(Weak::upgrade).filter(|m| !m.is_over());
        let mut seen = BTreeSet::new();
        if let Some(&twice) = members.iter().find(|m| !seen.insert(**m)) {
            return Err(Error::MemberTwice { group: name.to_owned(), twice, members: members.to_vec() });
        }
        let member = members.iter().position(|m| *m == rank);
        let member =
            member.ok_or_else(|| Error::NotAMember { group: name.to_owned(), rank, members: members.to_vec() })?;
        if let Some(inner) = known {
            if *inner.members != *members {
                let (group, first, asked) = (name.to_owned(), inner.members.to_vec(), members.to_vec());
                return Err(Error::Members { group, members: first, rank, asked });
            }
            return Ok(Meeting::open(inner, member));
        }
        let gone = members.iter().find_map(|m| meetings.gone.get(m).cloned());
        let machine = self.0.identity.clone();
        let inner = Arc::new(MeetingInner::new(name.to_owned(), members.to_vec(), machine, gone));
        meetings.open(&inner);
        Ok(Meeting::open(inner, member))
    }

    /// The products that operations were so far, each shape once: on `dry`, which sees a program before it computes. Empty
    /// on other drivers.
    pub fn products(&self) -> Vec<GemmShape> {
        self.0.survey.as_ref().map(Survey::products).unwrap_or_default()
    }

    /// Measures, on cards, which of the library's algorithms is the fastest for each of `products`, unless an earlier run
    /// has, and computes them by it from here on. Call it while nothing else runs on the cards, before any rank has its
    /// device. None on other drivers, which have no choice. What is not among `products` is computed by the library's
    /// first algorithm.
    ///
    /// Choices are kept beside compiled kernels ([`CudaOptions::kernel_cache`]); with the same choices a program gives
    /// the same bits in every run.
    ///
    /// # Errors
    /// [`Error::RankTaken`] while a rank has a device; [`Error::Cuda`].
    pub fn measure_products(&self, products: &[GemmShape]) -> Result<Option<ProductChoices>, Error> {
        let Engine::Cuda(cuda) = &self.0.engine else { return Ok(None) };
        let taken = lock(&self.0.devices).iter().find(|(_, device)| device.strong_count() > 0).map(|(rank, _)| *rank);
        match taken {
            Some(rank) => Err(Error::RankTaken { rank }),
            None => cuda.measure(products, |rank| self.device(rank)).map(Some),
        }
    }

    /// Begins to record a trace; what was recorded before is dropped. It begins with the names of the streams that are
    /// open.
    pub fn trace_start(&self) {
        self.0.tracer.start();
        let devices = lock(&self.0.devices).values().filter_map(Weak::upgrade).collect::<Vec<_>>();
        devices.iter().for_each(|device| device.name_streams());
    }

    /// Ends the recording and returns it.
    pub fn trace_stop(&self) -> Trace {
        self.0.tracer.stop()
    }

    /// For mutation tests: waits of this name do nothing from now on.
    pub fn drop_waits(&self, why: impl Into<Label>) {
        self.0.dropped.write().unwrap_or_else(|poison| poison.into_inner()).insert(why.into());
        self.0.any_dropped.store(true, Ordering::Release);
    }

    /// Makes `ranks` known before their threads start. Groups count on them again if they had left, and on `sim`
    /// and `dry` the scheduler waits for all of them. Each thread then begins with [`Machine::enter`]; one that has not
    /// within [`Options::timeout`] is gone from its groups ([`Departure::NeverEntered`]).
    pub fn expect(&self, ranks: impl IntoIterator<Item = u32>) {
        let ranks: Vec<u32> = ranks.into_iter().collect();
        // Whoever opens a group first must not take its peers of an earlier program for gone.
        lock(&self.0.meetings).gone.retain(|rank, _| !ranks.contains(rank));
        self.0.engine.expect(&ranks);
    }

    /// This thread is the host of `rank` until the guard is dropped. On `sim` and `dry` it blocks until it is this
    /// rank's turn.
    pub fn enter(&self, rank: u32) -> HostTurn {
        self.0.engine.enter(rank, &self.0);
        HostTurn { machine: self.clone(), rank }
    }

    /// `rank` will submit nothing more: whoever waits for it gets [`Error::PeerGone`] at once.
    pub fn leave(&self, rank: u32, how: Departure) {
        self.0.depart(rank, how);
    }
}

/// See [`Machine::enter`].
pub struct HostTurn {
    machine: Machine,
    rank: u32,
}

impl Drop for HostTurn {
    fn drop(&mut self) {
        self.machine.0.engine.exit(self.rank);
    }
}

impl MachineInner {
    /// Costs one load unless a test drops something.
    pub(crate) fn is_dropped(&self, why: Why) -> bool {
        self.any_dropped.load(Ordering::Relaxed)
            && self.dropped.read().unwrap_or_else(|poison| poison.into_inner()).contains(&Label::from(why))
    }

    /// Makes `error` sticky on `device` unless it has one, and tells its groups.
    pub(crate) fn fail(&self, device: &DeviceInner, error: Error) {
        let how = Departure::Failed(error.chain());
        self.fail_because(device, error, how);
    }

    /// As [`MachineInner::fail`], with what the groups are told.
    pub(crate) fn fail_because(&self, device: &DeviceInner, error: Error, how: Departure) {
        if device.set_error(error) {
            self.depart(device.rank, how);
        }
    }

    /// `rank` leaves all its groups. Those who wait there fail with it, and leave theirs; the root stays named.
    pub(crate) fn depart(&self, rank: u32, how: Departure) {
        self.depart_all(vec![rank], rank, how);
    }

    /// Ends the joint operation of `arrivals`, which was taken out of its meeting: their devices fail because of
    /// `root`, and their streams go on, skipping.
    pub(crate) fn poison(&self, arrivals: &[Arrival], root: u32, how: &Departure) {
        let failed = arrivals.iter().filter(|a| echo(a, root, how)).map(|a| a.stream.device.rank);
        self.depart_all(failed.collect(), root, how.clone());
    }

    fn depart_all(&self, mut leavers: Vec<u32>, root: u32, how: Departure) {
        while let Some(leaver) = leavers.pop() {
            let open: Vec<Arc<MeetingInner>> = {
                let mut meetings = lock(&self.meetings);
                meetings.gone.entry(leaver).or_insert_with(|| (root, how.clone()));
                meetings.of.get(&leaver).into_iter().flat_map(BTreeMap::values).filter_map(Weak::upgrade).collect()
            };
            if matches!(how, Departure::Failed(_)) {
                let told = self.engine.peers_of(leaver).into_iter().filter(|arrival| echo(arrival, root, &how));
                leavers.extend(told.map(|arrival| arrival.stream.device.rank));
            }
            for meeting in open {
                for arrival in meeting.depart(root, &how) {
                    if echo(&arrival, root, &how) {
                        leavers.push(arrival.stream.device.rank);
                    }
                    self.engine.resume(&arrival);
                }
            }
        }
    }

    /// All that some wait for and others have not reached.
    pub(crate) fn pending(&self) -> Pending {
        let open: Vec<_> = lock(&self.meetings).open.values().filter_map(Weak::upgrade).collect();
        Pending(open.iter().flat_map(|m| m.pending()).chain(self.engine.pending()).collect())
    }
}

/// True when the arrival's device had no error. A rank that left and meets all the same is told that it left.
fn echo(arrival: &Arrival, root: u32, how: &Departure) -> bool {
    let (device, body) = (&arrival.stream.device, arrival.joint.body());
    device.set_error(Error::PeerGone {
        rank: root,
        group: body.meeting.name.to_string(),
        what: body.request.to_string(),
        seq: arrival.joint.number(),
        how: how.clone(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_leaves_looks_at_its_own_groups_only_and_closed_ones_are_thrown_out() {
        let machine = Machine::dry();
        let open = |name: &str, members: &[u32]| machine.meeting(name, members, members[0]).unwrap();
        let own = |rank: u32| lock(&machine.0.meetings).of.get(&rank).map_or(0, BTreeMap::len);
        let (_dp, _pair) = (open("dp", &[0, 1, 2]), open("pair", &[1, 2]));
        assert_eq!([0, 1, 2, 3].map(own), [1, 2, 2, 0]);
        // Far more than are kept at once.
        for at in 0..1000 {
            drop(open(&format!("gone {at}"), &[3, 4]));
        }
        assert!(own(3) < 200, "{}", own(3));
        assert_eq!([0, 1, 2].map(own), [1, 2, 2], "those that are open stay");
    }
}
