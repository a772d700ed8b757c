//! Operations: a name, a place in the model, declared accesses and what to run.

use std::{
    ops::Deref,
    sync::{Arc, Mutex, OnceLock},
};

use crate::{View, cpu::Args, cuda::Ready, ops::Kernel};

/// How an operation touches a view.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Mode {
    /// Read only.
    Read,
    /// Every element is written, none is read.
    Write,
    /// Read and written.
    Update,
}

impl Mode {
    /// Writes at least some elements.
    pub const fn writes(self) -> bool {
        !matches!(self, Mode::Read)
    }

    /// Two accesses of shared bytes that no order separates are a race.
    pub const fn conflicts(self, other: Mode) -> bool {
        self.writes() || other.writes()
    }
}

/// A view and what is done to it.
#[derive(Clone, Debug)]
pub struct Access {
    /// The memory.
    pub view: View,
    /// The way it is touched.
    pub mode: Mode,
}

impl Access {
    /// Declares a read.
    pub fn read(view: &View) -> Access {
        Access { view: view.clone(), mode: Mode::Read }
    }

    /// Declares that every element is written and none is read.
    pub fn write(view: &View) -> Access {
        Access { view: view.clone(), mode: Mode::Write }
    }

    /// Declares a read and a write.
    pub fn update(view: &View) -> Access {
        Access { view: view.clone(), mode: Mode::Update }
    }

    /// The two may not run at the same time.
    pub fn conflicts(&self, other: &Access) -> bool {
        self.mode.conflicts(other.mode) && self.view.overlaps(&other.view)
    }
}

/// Where in the model an operation belongs (`h0.attn.qkv`). Cloning shares the text.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Site {
    /// Known when the program was written.
    Static(&'static str),
    /// Made once, when the model is built.
    Shared(Arc<str>),
}

impl Site {
    /// The text.
    pub fn as_str(&self) -> &str {
        match self {
            Site::Static(s) => s,
            Site::Shared(s) => s,
        }
    }
}

impl From<&'static str> for Site {
    fn from(s: &'static str) -> Site {
        Site::Static(s)
    }
}

impl From<String> for Site {
    fn from(s: String) -> Site {
        Site::Shared(s.into())
    }
}

impl From<&Site> for Site {
    fn from(s: &Site) -> Site {
        s.clone()
    }
}

/// The cause of a failed operation, as a host function reports it.
pub type OpError = Box<dyn std::error::Error + Send + Sync>;

/// A user's own operation. `Fn`: replay and search run it again.
pub type HostFn = dyn Fn(&mut Args<'_>) -> Result<(), OpError> + Send + Sync;

/// What runs.
#[derive(Clone)]
pub enum Launch {
    /// One of the known kernels.
    Kernel(Kernel),
    /// A function on the host's memory. Skipped on the `dry` driver, like all that computes.
    Host(Arc<HostFn>),
    /// Writes values of its own to memory. A driver with memory of its own may have it done when it is submitted, and
    /// copies in the order of the stream.
    Upload(Arc<HostFn>),
    /// Takes values of memory. Such a driver copies in the order of the stream, and has it done when they are asked for.
    Download(Arc<Landing>),
}

impl Launch {
    /// The function that runs on the host's memory; none for a kernel.
    pub(crate) fn on_host(&self) -> Option<&Arc<HostFn>> {
        match self {
            Launch::Kernel(_) => None,
            Launch::Host(run) | Launch::Upload(run) => Some(run),
            Launch::Download(landing) => Some(&landing.run),
        }
    }
}

/// Takes values that have come to the host.
pub struct Landing {
    run: Arc<HostFn>,
    /// Done when somebody asks, where the copy was made before.
    later: Mutex<Option<Later>>,
}

/// Whatever is left to do when a copy has been made.
type Later = Box<dyn FnOnce() + Send>;

impl Landing {
    pub(crate) fn new(run: impl Fn(&mut Args<'_>) -> Result<(), OpError> + Send + Sync + 'static) -> Arc<Landing> {
        Arc::new(Landing { run: Arc::new(run), later: Mutex::default() })
    }

    /// The copy will be made in the order of a stream; `later` takes it.
    pub(crate) fn put_off(&self, later: impl FnOnce() + Send + 'static) {
        *self.later.lock().unwrap_or_else(|poison| poison.into_inner()) = Some(Box::new(later));
    }

    /// The copy has been made: what was put off is done.
    pub(crate) fn land(&self) {
        let later = self.later.lock().unwrap_or_else(|poison| poison.into_inner()).take();
        if let Some(later) = later {
            later();
        }
    }
}

/// One unit of work on a stream. Cloning gives another handle of it, and costs less than making it again; so does
/// submitting it again.
#[derive(Clone)]
pub struct Op(Arc<OpParts>);

/// What an [`Op`] is made of.
pub struct OpParts {
    /// What a card launches for it; none: it is to be asked anew each time.
    ready: OnceLock<Option<Vec<Ready>>>,
    /// What it does (`gemm`).
    pub name: &'static str,
    /// Where in the model.
    pub site: Site,
    /// All the memory it can reach.
    pub accesses: Vec<Access>,
    /// What runs.
    pub launch: Launch,
}

impl Op {
    /// An operation that reaches no other memory than `accesses`.
    #[inline]
    pub fn new(name: &'static str, site: Site, accesses: Vec<Access>, launch: Launch) -> Op {
        Op(Arc::new(OpParts { ready: OnceLock::new(), name, site, accesses, launch }))
    }

    /// A user's own operation.
    pub fn host(
        name: &'static str,
        site: impl Into<Site>,
        accesses: Vec<Access>,
        run: impl Fn(&mut Args<'_>) -> Result<(), OpError> + Send + Sync + 'static,
    ) -> Op {
        Op::new(name, site.into(), accesses, Launch::Host(Arc::new(run)))
    }

    /// Floating-point operations, multiply and add counted separately; 0 for a user's own operation.
    pub fn flops(&self) -> u64 {
        match &self.launch {
            Launch::Kernel(kernel) => kernel.flops(&self.accesses),
            _ => 0,
        }
    }

    /// Somebody has another handle, and may submit it again.
    pub(crate) fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// What the card of its memory launches for it, as somebody found who kept it.
    pub(crate) fn ready(&self) -> Option<&Option<Vec<Ready>>> {
        self.0.ready.get()
    }

    /// Keeps what was found, unless somebody has.
    pub(crate) fn keep_ready(&self, ready: Option<Vec<Ready>>) -> &Option<Vec<Ready>> {
        self.0.ready.get_or_init(|| ready)
    }
}

impl Deref for Op {
    type Target = OpParts;

    fn deref(&self) -> &OpParts {
        &self.0
    }
}
