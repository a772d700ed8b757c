//! Several factorisations of the same ranks: views of one grid.

use std::{borrow::Cow, fmt, sync::Arc};

use crate::{
    axis::{Axis, check_name, join, refuse_repeats},
    grid::{AxisMask, Grid},
    plan_error::PlanError,
    rank::GlobalRank,
    violation::Steps,
};

/// The name of a view; the base grid is the view `dense`.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct ViewName(Cow<'static, str>);

impl ViewName {
    /// The base grid.
    pub const DENSE: ViewName = ViewName(Cow::Borrowed("dense"));
    /// The grid that experts are cut over.
    pub const EXPERT: ViewName = ViewName(Cow::Borrowed("expert"));

    /// Names a view.
    ///
    /// # Errors
    /// [`PlanError::BadName`] unless the name is a lower-case letter followed by such letters, digits or `_`.
    pub fn new(name: &str) -> Result<ViewName, PlanError> {
        check_name(name, "a view")?;
        Ok(ViewName(Cow::Owned(name.to_owned())))
    }
}

impl fmt::Display for ViewName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A set of axes of one view. Two requests for the same group have equal keys.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct ViewKey {
    /// The view; `dense` for axes that the view shares with the base.
    pub view: ViewName,
    /// The axes in layout order.
    pub axes: Vec<Axis>,
}

impl fmt::Display for ViewKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.view != ViewName::DENSE {
            write!(f, "{}:", self.view)?;
        }
        f.write_str(&join(&self.axes, "+"))
    }
}

/// A base grid and named views of it: the same ranks on other axes.
///
/// A view declares the axes it shares with the base; their groups are equal in both and are one object.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Views {
    base: Arc<Grid>,
    world_size: u32,
    views: Vec<View>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct View {
    name: ViewName,
    grid: Arc<Grid>,
    shared: Vec<Axis>,
}

impl Views {
    /// Starts with the base grid, known as `dense`, in a world of `world_size` ranks.
    #[must_use]
    pub fn new(base: Grid, world_size: u32) -> Views {
        Views { base: Arc::new(base), world_size, views: Vec::new() }
    }

    /// Adds a view: `axes` (name, size, fastest first) over the base's ranks, of which `shared` are the base's too.
    ///
    /// # Errors
    /// [`PlanError::ViewTwice`], [`PlanError::ViewSize`] for a product other than the base's, those of
    /// [`Grid::new`], [`PlanError::SharedAxisMissing`] and [`PlanError::SharedAxisDiffers`].
    pub fn register(&mut self, name: ViewName, axes: &[(Axis, u32)], shared: &[Axis]) -> Result<(), PlanError> {
        if name == ViewName::DENSE || self.views.iter().any(|v| v.name == name) {
            return Err(PlanError::ViewTwice { view: name });
        }
        refuse_repeats(shared, "the shared axes")?;
        let product = crate::grid::product(axes.iter().map(|&(_, n)| n));
        // A size of zero is Grid::new's to refuse: it names the axis.
        if product != 0 && product != u128::from(self.base.size()) {
            return Err(PlanError::ViewSize { view: name, product, base: self.base.size() });
        }
        let grid = Grid::new(axes, self.base.offset(), self.world_size)?;
        for axis in shared {
            self.check_shared(&name, &grid, axis)?;
        }
        self.views.push(View { name, grid: Arc::new(grid), shared: shared.to_vec() });
        Ok(())
    }

    /// The grid of a view.
    ///
    /// # Errors
    /// [`PlanError::UnknownView`].
    pub fn grid(&self, view: &ViewName) -> Result<&Arc<Grid>, PlanError> {
        if *view == ViewName::DENSE {
            return Ok(&self.base);
        }
        self.find(view).map(|v| &v.grid)
    }

    /// The key of a set of axes: layout order, and the base if the view shares all of them.
    ///
    /// # Errors
    /// [`PlanError::UnknownView`], [`PlanError::UnknownAxis`], [`PlanError::DuplicateAxis`].
    pub fn key(&self, view: &ViewName, axes: &[Axis]) -> Result<ViewKey, PlanError> {
        let grid = self.grid(view)?;
        grid.mask(axes)?;
        let shared = *view != ViewName::DENSE && {
            let shared = &self.find(view)?.shared;
            !axes.is_empty() && axes.iter().all(|axis| shared.contains(axis))
        };
        let view = if shared { ViewName::DENSE } else { view.clone() };
        let laid_out = self.grid(&view)?.axes().map(|(axis, _)| axis);
        let axes = laid_out.filter(|a| axes.contains(a)).cloned().collect();
        Ok(ViewKey { view, axes })
    }

    /// All groups of a set of axes of a view.
    ///
    /// # Errors
    /// As [`Views::key`].
    pub fn groups(&self, view: &ViewName, axes: &[Axis]) -> Result<Vec<Vec<GlobalRank>>, PlanError> {
        self.grid(view)?.groups(axes)
    }

    fn find(&self, view: &ViewName) -> Result<&View, PlanError> {
        let found = self.views.iter().find(|v| v.name == *view);
        found.ok_or_else(|| {
            let mut known = vec![ViewName::DENSE.to_string()];
            known.extend(self.views.iter().map(|v| v.name.to_string()));
            PlanError::UnknownView { view: view.clone(), known: known.join(", ") }
        })
    }

    fn check_shared(&self, view: &ViewName, grid: &Grid, axis: &Axis) -> Result<(), PlanError> {
        let mask_in = |grid: &Grid, place: ViewName| -> Result<AxisMask, PlanError> {
            grid.mask(std::slice::from_ref(axis)).map_err(|_| PlanError::SharedAxisMissing {
                axis: axis.clone(),
                view: view.clone(),
                missing_in: place,
            })
        };
        let base_steps = self.base.steps(mask_in(&self.base, ViewName::DENSE)?);
        let view_steps = grid.steps(mask_in(grid, view.clone())?);
        if base_steps != view_steps {
            return Err(PlanError::SharedAxisDiffers {
                axis: axis.clone(),
                view: view.clone(),
                base_steps: Steps(base_steps),
                view_steps: Steps(view_steps),
            });
        }
        Ok(())
    }
}
