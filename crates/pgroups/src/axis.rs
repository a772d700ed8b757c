//! Axes and the order they are laid out in.

use std::{borrow::Cow, fmt};

use crate::{grid::Grid, plan_error::PlanError, rank::GlobalRank, violation::LayoutViolation};

/// One direction of parallelism, known by its whole name.
///
/// A name is a lower-case letter followed by lower-case letters, digits or `_`. Names are compared
/// whole: `tp` is not found inside `gtp`.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Axis(Cow<'static, str>);

impl Axis {
    /// Tensor parallelism: weights stay cut through the product.
    pub const TP: Axis = Axis(Cow::Borrowed("tp"));
    /// Weight sharding: weights are gathered before use, every peer reads its own samples.
    pub const GTP: Axis = Axis(Cow::Borrowed("gtp"));
    /// Context parallelism: the sequence is cut.
    pub const CP: Axis = Axis(Cow::Borrowed("cp"));
    /// Expert parallelism: whole experts live on different ranks.
    pub const EP: Axis = Axis(Cow::Borrowed("ep"));
    /// Data parallelism: replicas.
    pub const DP: Axis = Axis(Cow::Borrowed("dp"));
    /// Pipeline parallelism: stages of layers.
    pub const PP: Axis = Axis(Cow::Borrowed("pp"));

    /// The six standard axes in default order, fastest first.
    pub const STANDARD: [Axis; 6] = [Axis::TP, Axis::GTP, Axis::CP, Axis::EP, Axis::DP, Axis::PP];

    /// Names an axis.
    ///
    /// # Errors
    /// [`PlanError::BadName`] if `name` has other characters than those above.
    pub fn new(name: &str) -> Result<Axis, PlanError> {
        check_name(name, "an axis")?;
        Ok(Axis(Cow::Owned(name.to_owned())))
    }

    /// The name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0
    }

    /// Where the axis stands in the default order; none for a user's own axis.
    pub(crate) fn standard_position(&self) -> Option<usize> {
        Axis::STANDARD.iter().position(|known| known == self)
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Names appear in order strings, keys and layout texts, so their separators may not be part of one.
pub(crate) fn check_name(name: &str, what: &'static str) -> Result<(), PlanError> {
    let mut bytes = name.bytes();
    let starts_well = bytes.next().is_some_and(|b| b.is_ascii_lowercase());
    if starts_well && bytes.all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_') {
        return Ok(());
    }
    Err(PlanError::BadName { what, name: name.to_owned() })
}

/// Axis names joined for a message or a dump: `tp-gtp-dp`.
pub(crate) fn join<'a>(axes: impl IntoIterator<Item = &'a Axis>, separator: &str) -> String {
    let names: Vec<&str> = axes.into_iter().map(Axis::name).collect();
    names.join(separator)
}

/// The order axes are laid out in, fastest-varying first: `tp-gtp-cp-ep-dp-pp`.
///
/// Member order inside a group follows it, never the order in which a group's axes were asked for.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Order(Vec<Axis>);

/// Which parameters a grid serves: experts are cut over the same ranks by axes of their own.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum ParamClass {
    /// Every parameter that is not an expert's.
    Dense,
    /// Parameters of experts.
    Expert,
}

impl fmt::Display for ParamClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ParamClass::Dense => "dense",
            ParamClass::Expert => "expert",
        })
    }
}

impl Order {
    /// The default order of the dense grid, as a text.
    pub const DEFAULT: &'static str = "tp-gtp-cp-ep-dp-pp";

    /// Reads an order string: axis names between `-`.
    ///
    /// # Errors
    /// [`PlanError::BadName`] for a token that is no axis name, [`PlanError::DuplicateAxis`] for a repeated one.
    pub fn parse(text: &str) -> Result<Order, PlanError> {
        let axes: Vec<Axis> = text.split('-').map(Axis::new).collect::<Result<_, _>>()?;
        refuse_repeats(&axes, "the order")?;
        Ok(Order(axes))
    }

    /// The axes, fastest first.
    #[must_use]
    pub fn axes(&self) -> &[Axis] {
        &self.0
    }

    /// Whether `axis` is one of the order's whole tokens.
    #[must_use]
    pub fn names(&self, axis: &Axis) -> bool {
        self.0.contains(axis)
    }

    /// Puts `gtp` in its place unless the order already names it: right after `tp` in the dense grid; right
    /// after `ep` in the expert grid, after `tp` if there is no `ep`; first if there is neither.
    ///
    /// Source: Megatron-LM, `parallel_state._inject_gtp_remat_axis` (behaviour only).
    #[must_use]
    pub fn with_shard_axis(&self, class: ParamClass) -> Order {
        if self.names(&Axis::GTP) {
            return self.clone();
        }
        let after = |axis: &Axis| self.0.iter().position(|a| a == axis).map(|i| i + 1);
        let place = match class {
            ParamClass::Dense => after(&Axis::TP),
            ParamClass::Expert => after(&Axis::EP).or_else(|| after(&Axis::TP)),
        };
        let mut axes = self.0.clone();
        axes.insert(place.unwrap_or(0), Axis::GTP);
        Order(axes)
    }

    /// The order without `axes`.
    pub(crate) fn without(&self, axes: &[Axis]) -> Order {
        Order(self.0.iter().filter(|a| !axes.contains(a)).cloned().collect())
    }

    /// The order with `axis` where the default order has it: behind the nearest axis that comes before it there.
    pub(crate) fn with_nearest(&self, axis: &Axis) -> Order {
        let before = axis.standard_position().unwrap_or(Axis::STANDARD.len());
        let place = Axis::STANDARD[..before]
            .iter()
            .rev()
            .find_map(|earlier| self.0.iter().position(|a| a == earlier))
            .map_or(0, |i| i + 1);
        let mut axes = self.0.clone();
        axes.insert(place, axis.clone());
        Order(axes)
    }

    /// Pairs every token with its size and appends axes of size 1 that the order leaves out.
    ///
    /// Every disagreement is added to `violations`; the result is then not to be used.
    pub(crate) fn sized(&self, sizes: &[(Axis, u32)], violations: &mut Vec<LayoutViolation>) -> Vec<(Axis, u32)> {
        let size_of = |axis: &Axis| sizes.iter().find(|(a, _)| a == axis).map(|&(_, n)| n);
        let mut axes = Vec::with_capacity(sizes.len().max(self.0.len()));
        for axis in &self.0 {
            let size = size_of(axis).or(axis.standard_position().map(|_| 1));
            if size.is_none() {
                violations.push(LayoutViolation::TokenWithoutSize {
                    token: axis.clone(),
                    order: self.to_string(),
                    nearest: self.without(std::slice::from_ref(axis)).to_string(),
                });
            }
            axes.push((axis.clone(), size.unwrap_or(1)));
        }
        for (axis, size) in sizes.iter().filter(|(axis, _)| !self.names(axis)) {
            if *size > 1 {
                violations.push(LayoutViolation::AxisNotInOrder {
                    axis: axis.clone(),
                    size: *size,
                    order: self.to_string(),
                    nearest: self.with_nearest(axis).to_string(),
                });
            }
            axes.push((axis.clone(), *size));
        }
        axes
    }

    /// The grid of one order string and its sizes, as Megatron's `RankGenerator` lays it out.
    ///
    /// Axes that the order leaves out are appended if their size is 1. Standard axes without a size have size 1.
    ///
    /// # Errors
    /// [`PlanError::Layout`] with every violation: an axis over 1 that the order lacks, a token without a size,
    /// `ep` and `cp` over 1 in one grid; else those of [`Grid::new`].
    pub fn grid(&self, sizes: &[(Axis, u32)], offset: GlobalRank, world_size: u32) -> Result<Grid, PlanError> {
        let mut violations = Vec::new();
        let axes = self.sized(sizes, &mut violations);
        let size_of = |axis: &Axis| axes.iter().find(|(a, _)| a == axis).map_or(1, |&(_, n)| n);
        let (ep, cp) = (size_of(&Axis::EP), size_of(&Axis::CP));
        if ep > 1 && cp > 1 {
            violations.push(LayoutViolation::ContextAndExpert { cp, ep });
        }
        if !violations.is_empty() {
            return Err(PlanError::layout(violations));
        }
        Grid::new(&axes, offset, world_size)
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&join(&self.0, "-"))
    }
}

/// Refuses an axis list with the same axis twice.
pub(crate) fn refuse_repeats(axes: &[Axis], whose: &'static str) -> Result<(), PlanError> {
    match axes.iter().enumerate().find(|(i, a)| axes[..*i].contains(a)) {
        Some((_, axis)) => Err(PlanError::DuplicateAxis { axis: axis.clone(), list: join(axes, "-"), whose }),
        None => Ok(()),
    }
}
