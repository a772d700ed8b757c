//! Everything that can go wrong on a device.

use std::{ops::Range, sync::Arc, time::Duration};

use thiserror::Error;

use crate::{Asked, DType, Departure, OpRef, Pending, cuda::CudaError};

/// Everything that can go wrong on a device. Asynchronous failures are sticky: the first one is returned by every
/// later call on that device.
#[derive(Debug, Clone, Error)]
#[non_exhaustive]
pub enum Error {
    /// An operation ran and failed.
    #[error("{op} failed")]
    Failed {
        /// The operation.
        op: OpRef,
        /// Why.
        #[source]
        source: Arc<dyn std::error::Error + Send + Sync>,
    },
    /// A host function panicked.
    #[error("{op} panicked: {message}")]
    Panicked {
        /// The operation.
        op: OpRef,
        /// The panic's text.
        message: String,
    },
    /// Two operations that no wait separates reached for the same bytes at the same time; the second did not run.
    #[error("race on '{label}': {second} started while {first} was running; order them with an event and a wait")]
    Race {
        /// Memory that both touch.
        label: String,
        /// The one that was running.
        first: Box<OpRef>,
        /// The one that was refused.
        second: Box<OpRef>,
    },
    /// A wait for an event that nobody has recorded. CUDA lets it pass; here it is refused.
    #[error("stream '{stream}' of rank {rank} waits for event '{event}', which was never recorded")]
    NeverRecorded {
        /// Rank.
        rank: u32,
        /// Waiting stream.
        stream: String,
        /// The event.
        event: String,
    },
    /// A member of a group has left or failed; its peers cannot go on.
    #[error("rank {rank} is gone, so {what} #{seq} on group '{group}' cannot happen: {how}")]
    PeerGone {
        /// The rank that failed first.
        rank: u32,
        /// Group in which it, or someone who waited for it, was missed.
        group: String,
        /// What this rank asked for there.
        what: String,
        /// Position in the group's sequence.
        seq: u64,
        /// How it left.
        how: Departure,
    },
    /// Members of a group asked for different things at the same point of its sequence.
    #[error("members of group '{group}' disagree at #{seq}: {asked}")]
    Disagree {
        /// Name of the group.
        group: String,
        /// Position in the group's sequence.
        seq: u64,
        /// What each asked.
        asked: Asked,
    },
    /// Nothing has moved for as long as the machine waits.
    #[error("rank {rank} waited {after:?} for {what} and nothing moved: {pending}")]
    Timeout {
        /// Rank that waited.
        rank: u32,
        /// Kind and name of what it waited for: a stream, an event, or values on their way to the host.
        what: String,
        /// The machine's limit.
        after: Duration,
        /// Who is missing where.
        pending: Pending,
    },
    /// Every rank waits and nothing can run.
    #[error("deadlock: {waiting}; {pending}")]
    Deadlock {
        /// What each rank's host waits for.
        waiting: Asked,
        /// Joint operations that cannot happen.
        pending: Pending,
    },
    /// A stream was dropped with operations in it that had not run.
    #[error("stream '{stream}' of rank {rank} was dropped with {queued} operations that had not run")]
    Cancelled {
        /// Rank.
        rank: u32,
        /// The stream.
        stream: String,
        /// Operations thrown away.
        queued: usize,
    },
    /// A handle of one device was used on another.
    #[error("{what} belongs to rank {owner} and was used by rank {used_by}; a handle belongs to one device")]
    Foreign {
        /// Kind and name of the handle.
        what: String,
        /// Rank whose device made it.
        owner: u32,
        /// Rank that used it.
        used_by: u32,
    },
    /// Two devices of one machine were made for the same rank.
    #[error("rank {rank} already has a device on this machine; clone it, or drop it first")]
    RankTaken {
        /// The rank.
        rank: u32,
    },
    /// A group was opened by ranks that disagree on its members.
    #[error(
        "group '{group}' has members {members:?}; rank {rank} opens it with {asked:?}: give all members the same list"
    )]
    Members {
        /// Name of the group.
        group: String,
        /// Members as first opened.
        members: Vec<u32>,
        /// The rank that disagrees.
        rank: u32,
        /// Members as it has them.
        asked: Vec<u32>,
    },
    /// A group was opened by a rank that is not in its list.
    #[error("rank {rank} opens group '{group}' of ranks {members:?}: only members open a group, so add it or leave it")]
    NotAMember {
        /// Name of the group.
        group: String,
        /// The rank.
        rank: u32,
        /// Members as it gives them; maybe none.
        members: Vec<u32>,
    },
    /// A group whose list has a rank more than once.
    #[error("group '{group}' of ranks {members:?} has rank {twice} more than once: each member has one place")]
    MemberTwice {
        /// Name of the group.
        group: String,
        /// The rank that stands there again.
        twice: u32,
        /// The list.
        members: Vec<u32>,
    },
    /// A broadcast from a place that its group does not have.
    #[error("{op}@{site}: the root is place {root} of a group of {size}; places are 0..{size}")]
    NoSuchRoot {
        /// Operation.
        op: &'static str,
        /// Place in the model.
        site: String,
        /// The place asked for.
        root: u32,
        /// Members of the group.
        size: usize,
    },
    /// Sizes of two tensors do not fit each other.
    #[error("{op}@{site}: {left} is {left_shape:?} and {right} is {right_shape:?}; {rule}")]
    Shapes {
        /// Operation.
        op: &'static str,
        /// Place in the model.
        site: String,
        /// First tensor.
        left: &'static str,
        /// Its sizes.
        left_shape: Vec<usize>,
        /// Second tensor.
        right: &'static str,
        /// Its sizes.
        right_shape: Vec<usize>,
        /// What must hold.
        rule: &'static str,
    },
    /// A tensor has the wrong element type.
    #[error("{op}@{site}: {tensor} is {have}, needs {need}")]
    ElementType {
        /// Operation.
        op: &'static str,
        /// Place in the model.
        site: String,
        /// The tensor.
        tensor: &'static str,
        /// Its type.
        have: DType,
        /// The type it needs.
        need: DType,
    },
    /// A setting of an operation is outside its range.
    #[error("{op}@{site}: {setting} is {value}, {rule}")]
    Setting {
        /// Operation.
        op: &'static str,
        /// Place in the model.
        site: String,
        /// The setting.
        setting: &'static str,
        /// Its value.
        value: f64,
        /// What must hold.
        rule: &'static str,
    },
    /// An operation declares two accesses that conflict with each other.
    #[error(
        "{op}@{site}: accesses {first} and {second} both touch '{label}' and one writes; declare one update, or make it two operations"
    )]
    SelfConflict {
        /// Operation.
        op: &'static str,
        /// Place in the model.
        site: String,
        /// First access, by position.
        first: usize,
        /// Second access, by position.
        second: usize,
        /// Memory that both touch.
        label: String,
    },
    /// More accesses than an operation can have.
    #[error("{op}@{site}: {have} accesses, at most 64 are possible")]
    TooManyAccesses {
        /// Operation.
        op: &'static str,
        /// Place in the model.
        site: String,
        /// Declared accesses.
        have: usize,
    },
    /// A piece of a view that the view does not have.
    #[error("{what} {range:?} of '{label}' with sizes {shape:?}: there are {have}")]
    OutOfRange {
        /// Memory.
        label: String,
        /// Sizes of the view.
        shape: Vec<usize>,
        /// Rows or columns.
        what: &'static str,
        /// Asked.
        range: Range<usize>,
        /// There.
        have: usize,
    },
    /// New sizes that do not hold the same elements.
    #[error(
        "'{label}' with sizes {from:?} cannot become {to:?}: as many elements, at most 4 dimensions, 2^59 elements"
    )]
    Reshape {
        /// Memory.
        label: String,
        /// Present sizes.
        from: Vec<usize>,
        /// Asked sizes.
        to: Vec<usize>,
    },
    /// A view with gaps where one without is needed.
    #[error("'{label}' with sizes {shape:?} has gaps between its rows")]
    Strided {
        /// Memory.
        label: String,
        /// Sizes of the view.
        shape: Vec<usize>,
    },
    /// There is not that much memory.
    #[error("no memory for '{label}': {bytes} bytes were asked for")]
    OutOfMemory {
        /// What it was for.
        label: String,
        /// Bytes.
        bytes: usize,
    },
    /// The host asked for values on a driver that has none.
    #[error("'{label}' has no values: the dry driver keeps shapes only")]
    NoValues {
        /// Memory.
        label: String,
    },
    /// A frame was asked for something else than its plan holds.
    #[error("frame '{frame}', request {request}: the plan has {planned}, the program asks for {asked}; plan again")]
    PlanLeft {
        /// Frame.
        frame: String,
        /// Position in the plan.
        request: usize,
        /// As recorded.
        planned: String,
        /// As asked now.
        asked: String,
    },
    /// A saved tensor was asked for that nobody saved.
    #[error("frame '{frame}': nothing is saved as '{tag}'; saved are {saved:?}")]
    NotSaved {
        /// Frame.
        frame: String,
        /// Asked tag.
        tag: String,
        /// Tags there are.
        saved: Vec<String>,
    },
    /// A planned temporary was touched by a second stream, where nothing orders its reuse.
    #[error("planned '{label}' of stream '{owner}' is touched by stream '{stream}'; give it a buffer of its own")]
    PlannedElsewhere {
        /// The buffer.
        label: String,
        /// Stream of the frame.
        owner: String,
        /// The other stream.
        stream: String,
    },
    /// A stream captures already.
    #[error("stream '{stream}' of rank {rank} captures '{graph}' and cannot begin another capture; end that one first")]
    AlreadyCapturing {
        /// Rank.
        rank: u32,
        /// The stream.
        stream: String,
        /// What it captures.
        graph: String,
    },
    /// A call that only a capturing stream takes.
    #[error("{call} on stream '{stream}' of rank {rank}, which captures nothing; begin a capture first")]
    NotCapturing {
        /// Rank.
        rank: u32,
        /// The stream.
        stream: String,
        /// The call.
        call: &'static str,
    },
    /// A capture ends where it began.
    #[error("stream '{stream}' of rank {rank} only joined the capture of '{graph}'; end it on stream '{origin}'")]
    NotOrigin {
        /// Rank.
        rank: u32,
        /// The stream.
        stream: String,
        /// What is captured.
        graph: String,
        /// Where the capture began.
        origin: String,
    },
    /// Streams have joined a capture, and at its end nothing of it is behind their last work.
    #[error(
        "the capture of '{graph}' on rank {rank} ended with streams {streams:?} not joined; record an event at their          end and let stream '{origin}' wait for it"
    )]
    Unjoined {
        /// Rank.
        rank: u32,
        /// What was captured.
        graph: String,
        /// Where the capture began.
        origin: String,
        /// Streams with work that nothing waits for.
        streams: Vec<String>,
    },
    /// A capturing stream was told to wait for something that is no part of the capture.
    #[error(
        "stream '{stream}' of rank {rank} captures '{graph}' and cannot wait for event '{event}', which was last          recorded outside it; use wait_external, or record it in the capture"
    )]
    ForeignWait {
        /// Rank.
        rank: u32,
        /// Waiting stream.
        stream: String,
        /// What it captures.
        graph: String,
        /// The event.
        event: String,
    },
    /// Something outside a capture waits for a point inside it.
    #[error(
        "stream '{stream}' of rank {rank} cannot wait for event '{event}', which was last recorded inside the capture \
         of '{graph}' and marks nothing that runs; use record_external there"
    )]
    CapturedEvent {
        /// Rank.
        rank: u32,
        /// Waiting stream.
        stream: String,
        /// The event.
        event: String,
        /// What was captured.
        graph: String,
    },
    /// The host would wait for what only runs after the capture has ended.
    #[error("rank {rank} would wait on the host for '{what}' while '{graph}' is captured; wait before or after")]
    HostWaitInCapture {
        /// Rank.
        rank: u32,
        /// What it would wait for.
        what: String,
        /// What is captured.
        graph: String,
    },
    /// Memory was asked for while a stream of the device captures.
    #[error(
        "'{label}' ({bytes} bytes) was asked for while rank {rank} captures '{graph}'; allocate before the capture"
    )]
    AllocationInCapture {
        /// Rank.
        rank: u32,
        /// What the memory is for.
        label: String,
        /// Bytes.
        bytes: usize,
        /// What is captured.
        graph: String,
    },
    /// A graph was launched on a capturing stream.
    #[error("graph '{graph}' cannot be launched on stream '{stream}' of rank {rank}, which captures '{capture}'")]
    LaunchInCapture {
        /// Rank.
        rank: u32,
        /// The stream.
        stream: String,
        /// What was to be launched.
        graph: String,
        /// What is captured.
        capture: String,
    },
    /// The stream in which a capture began was dropped before the end of the capture.
    #[error("stream '{stream}' of rank {rank} was dropped while it captured '{graph}'")]
    CaptureAbandoned {
        /// Rank.
        rank: u32,
        /// Where the capture began.
        stream: String,
        /// What was captured.
        graph: String,
    },
    /// A rule of the capture was broken before, so there will be no graph. The streams run again once it has ended.
    #[error("the capture of '{graph}' on rank {rank} is invalid; end it and capture again")]
    CaptureInvalid {
        /// Rank.
        rank: u32,
        /// What is captured.
        graph: String,
        /// The first broken rule.
        #[source]
        source: Box<Error>,
    },
    /// An event that no gate of the executable has.
    #[error("no gate of graph '{graph}' of rank {rank} has event '{event}'; gate_events lists those there are")]
    NoSuchGate {
        /// Rank.
        rank: u32,
        /// The graph.
        graph: String,
        /// The event.
        event: String,
    },
    /// The driver has no such kernel yet, for these element types. It is never computed elsewhere instead.
    #[error("{op}@{site}: driver '{driver}' has no kernel for it; write it as a host operation, or use another driver")]
    NoKernel {
        /// Operation.
        op: &'static str,
        /// Place in the model.
        site: String,
        /// Name of the driver.
        driver: &'static str,
    },
    /// A collective that failed on the card or was refused there.
    #[error("{op}@{site} on group '{group}', #{seq}, rank {rank}: failed on the card")]
    Collective {
        /// What it was.
        op: &'static str,
        /// Place in the model.
        site: String,
        /// The group.
        group: String,
        /// Position in the group's sequence, from 0.
        seq: u64,
        /// The member.
        rank: u32,
        /// What NCCL said.
        #[source]
        source: CudaError,
    },
    /// A card, its driver or its compiler refused, or failed outside of an operation.
    #[error("cuda: {what}")]
    Cuda {
        /// What was being done, and where.
        what: String,
        /// What the driver said.
        #[source]
        source: CudaError,
    },
    /// A kernel broke the card's context: every rank on that card fails. CUDA does not tell which kernel it was; these
    /// were the last ones begun on each stream.
    #[error("a kernel broke the card, one of: {begun}")]
    CardLost {
        /// Operations that had begun, separated by commas.
        begun: String,
        /// What the driver said.
        #[source]
        source: CudaError,
    },
    /// A machine was asked for with a setting that cannot be.
    #[error("machine setting {setting} is {value}, {rule}")]
    Machine {
        /// The setting.
        setting: &'static str,
        /// Its value.
        value: usize,
        /// What must hold.
        rule: &'static str,
    },
}

impl Error {
    /// This failure only repeats that of another rank.
    pub fn is_echo(&self) -> bool {
        // Whoever returned early has no error of its own to tell.
        matches!(self, Error::PeerGone { how, .. } if !matches!(how, Departure::Returned | Departure::NeverEntered))
    }
}

impl Error {
    /// The message with all causes behind it, as one line.
    pub fn chain(&self) -> String {
        let mut text = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            text.push_str(": ");
            text.push_str(&error.to_string());
            cause = error.source();
        }
        text
    }
}
