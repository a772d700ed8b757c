//! A parameter that has memory.

use std::{
    fmt,
    sync::{
        Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak,
        atomic::{AtomicU64, Ordering},
    },
};

use device::{DType, Label, Region, View};

use crate::{
    error::PgError,
    publish::{Landed, Publish},
};

/// A parameter of one rank. Its identity is the object, not its name: clones are the same parameter, and equal.
///
/// Its address is fixed for life, or until an explicit [`Param::rebind`]. Its value has no getter; a
/// [`Turn`](crate::Turn) is the only way to it, so that nobody reads what was not published:
///
/// ```compile_fail,E0599
/// # fn value(param: &pgroups::Param) -> device::View {
/// param.value()
/// # }
/// ```
#[derive(Clone)]
pub struct Param(Arc<ParamCell>);

/// Which parameter it is: no two that live at the same time have the same. A key for maps; hold the parameter as well.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ParamId(usize);

/// A parameter held without keeping it alive.
#[derive(Clone)]
pub struct WeakParam(Weak<ParamCell>);

/// Notices when a parameter is bound to other memory or to other owners, or goes, without keeping it alive.
#[derive(Clone, Debug)]
pub struct Watch {
    changes: Arc<AtomicU64>,
    seen: u64,
}

impl Watch {
    /// Something has changed since the watch began. Costs one load.
    #[must_use]
    pub fn has_changed(&self) -> bool {
        self.changes.load(Ordering::Acquire) != self.seen
    }
}

struct ParamCell {
    name: Arc<str>,
    /// Counts attachments and moves, and the end.
    changes: Arc<AtomicU64>,
    state: RwLock<State>,
}

impl Drop for ParamCell {
    fn drop(&mut self) {
        self.changes.fetch_add(1, Ordering::AcqRel);
    }
}

struct State {
    value: View,
    main_grad: View,
    generation: u64,
    publisher: Option<Arc<dyn Publish>>,
    landed: Option<Arc<dyn Landed>>,
}

/// Where a parameter's value lies: what a captured graph compares before it runs again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Address {
    /// Rank whose memory it is.
    pub rank: u32,
    /// Number of the allocation on that rank.
    pub allocation: u32,
    /// Bytes in it.
    pub region: Region,
    /// How often the parameter was bound to other memory.
    pub generation: u64,
}

impl Param {
    /// A parameter in memory that is there already. `value` is f32 or bf16; `main_grad` has the same sizes and lies
    /// on the same rank.
    ///
    /// # Errors
    /// [`PgError::GradShape`], [`PgError::ParamType`].
    pub fn new(name: &str, value: &View, main_grad: &View) -> Result<Param, PgError> {
        for (what, view) in [("a parameter's value", value), ("a parameter's gradient", main_grad)] {
            check_type(what, view.dtype())?;
        }
        if value.shape() != main_grad.shape() || value.rank() != main_grad.rank() {
            return Err(PgError::GradShape {
                param: name.to_owned(),
                value: value.shape().to_vec(),
                value_rank: value.rank(),
                grad: main_grad.shape().to_vec(),
                grad_rank: main_grad.rank(),
            });
        }
        let (value, main_grad) = (value.clone(), main_grad.clone());
        let state = State { value, main_grad, generation: 0, publisher: None, landed: None };
        Ok(Param(Arc::new(ParamCell { name: name.into(), changes: Arc::default(), state: RwLock::new(state) })))
    }

    /// Which one it is.
    #[must_use]
    pub fn id(&self) -> ParamId {
        ParamId(Arc::as_ptr(&self.0).addr())
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Its name, shared, for traces.
    pub(crate) fn label(&self) -> Label {
        (&self.0.name).into()
    }

    /// Sizes of this rank's part, padding included.
    #[must_use]
    pub fn shape(&self) -> device::Shape {
        self.state().value.shape_value()
    }

    /// Element type of the value.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.state().value.dtype()
    }

    /// Elements of this rank's part.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.state().value.numel()
    }

    /// Where its gradients are summed: same sizes, written by whoever computes them.
    #[must_use]
    pub fn main_grad(&self) -> View {
        self.state().main_grad.clone()
    }

    /// Where its value lies.
    #[must_use]
    pub fn address(&self) -> Address {
        let state = self.state();
        Address {
            rank: state.value.rank(),
            allocation: state.value.allocation_id(),
            region: state.value.region(),
            generation: state.generation,
        }
    }

    /// Replaces whoever publishes the value and whoever waits for the gradient; what was attached before is let go.
    pub fn attach(&self, publisher: Option<Arc<dyn Publish>>, landed: Option<Arc<dyn Landed>>) {
        let before = {
            let mut state = self.state_mut();
            self.0.changes.fetch_add(1, Ordering::AcqRel);
            (std::mem::replace(&mut state.publisher, publisher), std::mem::replace(&mut state.landed, landed))
        };
        // Outside the lock: what is let go may look at this parameter.
        drop(before);
    }

    /// Moves the parameter to other memory of the same sizes, types and rank. Returns its new generation, which
    /// everyone who has planned with the old address compares.
    ///
    /// # Errors
    /// [`PgError::Rebind`]; nothing has changed then.
    pub fn rebind(&self, value: &View, main_grad: &View) -> Result<u64, PgError> {
        let mut state = self.state_mut();
        for (what, have, asked) in [("value", &state.value, value), ("gradient", &state.main_grad, main_grad)] {
            let fits = have.shape() == asked.shape() && have.dtype() == asked.dtype() && have.rank() == asked.rank();
            if !fits {
                return Err(PgError::Rebind {
                    param: self.name().to_owned(),
                    what,
                    have: have.shape().to_vec(),
                    have_dtype: have.dtype(),
                    have_rank: have.rank(),
                    asked: asked.shape().to_vec(),
                    asked_dtype: asked.dtype(),
                    asked_rank: asked.rank(),
                });
            }
        }
        (state.value, state.main_grad) = (value.clone(), main_grad.clone());
        state.generation += 1;
        self.0.changes.fetch_add(1, Ordering::AcqRel);
        Ok(state.generation)
    }

    /// Who publishes the value now.
    #[must_use]
    pub fn publisher(&self) -> Option<Arc<dyn Publish>> {
        self.state().publisher.clone()
    }

    /// Who waits for the gradient now.
    #[must_use]
    pub fn landed_sink(&self) -> Option<Arc<dyn Landed>> {
        self.state().landed.clone()
    }

    /// Begins to watch for [`Param::attach`], [`Param::rebind`], and the end of the parameter.
    #[must_use]
    pub fn watch(&self) -> Watch {
        let changes = self.0.changes.clone();
        Watch { seen: changes.load(Ordering::Acquire), changes }
    }

    /// A handle that does not keep the parameter alive.
    #[must_use]
    pub fn downgrade(&self) -> WeakParam {
        WeakParam(Arc::downgrade(&self.0))
    }

    pub(crate) fn view(&self) -> View {
        self.state().value.clone()
    }

    fn state(&self) -> RwLockReadGuard<'_, State> {
        self.0.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn state_mut(&self) -> RwLockWriteGuard<'_, State> {
        self.0.state.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WeakParam {
    /// The parameter, if it is still there.
    #[must_use]
    pub fn upgrade(&self) -> Option<Param> {
        self.0.upgrade().map(Param)
    }
}

impl PartialEq for Param {
    fn eq(&self, other: &Param) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Param {}

impl fmt::Debug for Param {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state();
        write!(f, "{} {:?} {}", self.0.name, state.value.shape(), state.value.dtype())
    }
}

pub(crate) fn check_type(what: &'static str, dtype: DType) -> Result<(), PgError> {
    match dtype {
        DType::F32 | DType::Bf16 => Ok(()),
        DType::I32 | DType::I16 => Err(PgError::ParamType { what, dtype }),
    }
}
