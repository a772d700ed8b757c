//! What a group is asked for by.

use std::fmt;

use crate::{
    axis::{Axis, ParamClass, check_name, join},
    layout::Layout,
    plan_error::PlanError,
    recipe::{Recipe, Select},
    views::{ViewKey, ViewName},
};

/// What a group is asked for by: a standard name, a set of axes, or a user's own name.
///
/// Keys that mean the same group are equal: `Key::over([Axis::CP, Axis::DP])` is [`Key::DP_CP`]. Their order is the
/// order in which groups are created.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Key(Kind);

#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
enum Kind {
    Standard(Standard),
    Over(ViewKey),
    Named(String),
}

/// The groups that every layout has; each says its axes, on the dense or on the expert grid.
///
/// Embedding groups choose stages of the pipeline, partial groups cut the replicas by optimizer instance.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[non_exhaustive]
pub enum Standard {
    /// Dense `tp`.
    Tp,
    /// Dense `gtp`: the peers that hold the shards of one weight.
    Gtp,
    /// Dense `cp`.
    Cp,
    /// Dense `dp`: replicas of one weight shard.
    Dp,
    /// `pp`, the same on both grids.
    Pp,
    /// `tp x gtp x pp`: one copy of the dense model, so no two shard peers share a checkpoint coordinate.
    Mp,
    /// `dp x cp`: replicas only.
    DpCp,
    /// `gtp x dp x cp`: everyone who sees data of their own; losses and token counts are reduced here.
    DpCpGtp,
    /// `tp x cp`.
    TpCp,
    /// `tp x gtp x dp`.
    TpDp,
    /// `tp x gtp x dp x cp`: everyone at one stage.
    TpDpCp,
    /// Expert `ep`.
    Ep,
    /// Expert `tp`.
    ExptTp,
    /// Expert `gtp`: the peers that hold the shards of one expert weight.
    Egtp,
    /// Expert `dp`: replicas of one expert weight shard.
    ExptDp,
    /// Expert `gtp x dp`.
    ExptDpEgtp,
    /// Expert `tp x ep`.
    TpEp,
    /// Expert `tp x ep x gtp x pp`: one copy of the expert model.
    TpEpPp,
    /// The stages that hold the word embedding.
    Embd,
    /// The stages that hold the position embedding.
    PosEmbd,
    /// The part of `dp x cp` inside one optimizer instance: a contiguous slice.
    IntraDpCp,
    /// Equal places of all optimizer instances' slices of `dp x cp`.
    InterDpCp,
    /// The part of expert `dp` inside one optimizer instance.
    IntraExptDp,
    /// Equal places of all optimizer instances' slices of expert `dp`.
    InterExptDp,
    /// Everyone in one optimizer instance, expert model copy after expert model copy.
    IntraDistOpt,
    /// One level of hierarchical context groups, 1 the innermost.
    HierarchicalCp {
        /// The level, from 1.
        level: u32,
    },
    /// `dp x cp` in slices of a size chosen while running.
    DynamicDpCp {
        /// The slice size.
        size: u32,
    },
}

/// Standard keys without a parameter, in creation order: name, key, whether on the expert grid, axes.
type Row = (&'static str, Standard, &'static ViewName, &'static [Axis]);

const DENSE: &ViewName = &ViewName::DENSE;
const EXPERT: &ViewName = &ViewName::EXPERT;
const TP: Axis = Axis::TP;
const GTP: Axis = Axis::GTP;
const CP: Axis = Axis::CP;
const EP: Axis = Axis::EP;
const DP: Axis = Axis::DP;
const PP: Axis = Axis::PP;

/// Keys that are exactly the groups of an axis set.
const OVER_AXES: [Row; 18] = [
    ("tp", Standard::Tp, DENSE, &[TP]),
    ("gtp", Standard::Gtp, DENSE, &[GTP]),
    ("cp", Standard::Cp, DENSE, &[CP]),
    ("dp", Standard::Dp, DENSE, &[DP]),
    ("pp", Standard::Pp, DENSE, &[PP]),
    ("mp", Standard::Mp, DENSE, &[TP, GTP, PP]),
    ("dp_cp", Standard::DpCp, DENSE, &[CP, DP]),
    ("dp_cp_gtp", Standard::DpCpGtp, DENSE, &[GTP, CP, DP]),
    ("tp_cp", Standard::TpCp, DENSE, &[TP, CP]),
    ("tp_dp", Standard::TpDp, DENSE, &[TP, GTP, DP]),
    ("tp_dp_cp", Standard::TpDpCp, DENSE, &[TP, GTP, CP, DP]),
    ("ep", Standard::Ep, EXPERT, &[EP]),
    ("expt_tp", Standard::ExptTp, EXPERT, &[TP]),
    ("egtp", Standard::Egtp, EXPERT, &[GTP]),
    ("expt_dp", Standard::ExptDp, EXPERT, &[DP]),
    ("expt_dp_egtp", Standard::ExptDpEgtp, EXPERT, &[GTP, DP]),
    ("tp_ep", Standard::TpEp, EXPERT, &[TP, EP]),
    ("tp_ep_pp", Standard::TpEpPp, EXPERT, &[TP, GTP, EP, PP]),
];

/// Keys that choose or cut the groups of an axis set.
const CHOSEN: [Row; 7] = [
    ("embd", Standard::Embd, DENSE, &[PP]),
    ("pos_embd", Standard::PosEmbd, DENSE, &[PP]),
    ("intra_dp_cp", Standard::IntraDpCp, DENSE, &[CP, DP]),
    ("inter_dp_cp", Standard::InterDpCp, DENSE, &[CP, DP]),
    ("intra_expt_dp", Standard::IntraExptDp, EXPERT, &[DP]),
    ("inter_expt_dp", Standard::InterExptDp, EXPERT, &[DP]),
    ("intra_dist_opt", Standard::IntraDistOpt, EXPERT, &[TP, GTP, EP, PP]),
];

const LEVEL_PREFIX: &str = "cp_level_";
const DYNAMIC_PREFIX: &str = "dyn_dp_cp_";

impl Standard {
    /// All keys of a layout, in creation order: with its context levels and dynamic sizes.
    #[must_use]
    pub fn all(layout: &Layout) -> Vec<Standard> {
        let mut keys: Vec<Standard> = rows().map(|row| row.1).collect();
        let levels = 1..=layout.cp_levels.len() as u32;
        keys.extend(levels.map(|level| Standard::HierarchicalCp { level }));
        let sizes = layout.dynamic_dp_cp_sizes().into_iter();
        keys.extend(sizes.map(|size| Standard::DynamicDpCp { size }));
        keys
    }

    /// The view and the axes that the groups come from.
    #[must_use]
    pub fn axes(self) -> (ViewName, &'static [Axis]) {
        match rows().find(|row| row.1 == self) {
            Some(row) => (row.2.clone(), row.3),
            None => match self {
                Standard::HierarchicalCp { .. } => (ViewName::DENSE, &[CP]),
                _ => (ViewName::DENSE, &[CP, DP]),
            },
        }
    }

    fn parse(name: &str) -> Option<Standard> {
        if let Some(row) = rows().find(|row| row.0 == name) {
            return Some(row.1);
        }
        let number = |prefix| name.strip_prefix(prefix)?.parse().ok();
        if let Some(level) = number(LEVEL_PREFIX) {
            return Some(Standard::HierarchicalCp { level });
        }
        number(DYNAMIC_PREFIX).map(|size| Standard::DynamicDpCp { size })
    }

    fn select(self, layout: &Layout) -> Result<Select, PlanError> {
        let dense = |axis| layout.size(ParamClass::Dense, &axis);
        let instances = layout.optimizer_instances;
        let intra = dense(DP) * dense(CP) / instances;
        let expt_dp = layout.size(ParamClass::Expert, &DP);
        let intra_expert = expt_dp / instances;
        let digit = |stride, size| Select::Digit { stride, size };
        Ok(match self {
            Standard::Embd => Select::At(layout.embedding_stages.clone()),
            Standard::PosEmbd => Select::At(layout.position_stages.clone()),
            Standard::IntraDpCp => digit(1, intra),
            Standard::InterDpCp => digit(intra, instances),
            Standard::IntraExptDp => digit(1, intra_expert),
            Standard::InterExptDp => digit(intra_expert, instances),
            Standard::IntraDistOpt => Select::Joined(intra_expert),
            Standard::HierarchicalCp { level } => {
                let levels = &layout.cp_levels;
                let place = (level as usize).checked_sub(1);
                let place = place.filter(|&i| i < levels.len());
                let place = place.ok_or_else(|| PlanError::NoSuchLevel { level, levels: levels.clone() })?;
                digit(levels[..place].iter().product(), levels[place])
            }
            Standard::DynamicDpCp { size } => {
                let sizes = layout.dynamic_dp_cp_sizes();
                if !sizes.contains(&size) {
                    return Err(PlanError::NoSuchDynamicSize { size, sizes });
                }
                digit(1, size)
            }
            _ => Select::All,
        })
    }
}

fn rows() -> impl Iterator<Item = &'static Row> {
    OVER_AXES.iter().chain(&CHOSEN)
}

impl fmt::Display for Standard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Standard::HierarchicalCp { level } => write!(f, "{LEVEL_PREFIX}{level}"),
            Standard::DynamicDpCp { size } => write!(f, "{DYNAMIC_PREFIX}{size}"),
            plain => {
                let row = rows().find(|row| row.1 == *plain);
                f.write_str(row.expect("BUG: every key without a parameter has a row").0)
            }
        }
    }
}

macro_rules! standard_keys {
    ($($(#[$doc:meta])* $name:ident = $standard:ident;)*) => {
        impl Key {
            $(
                #[doc = concat!("[`Standard::", stringify!($standard), "`].")]
                pub const $name: Key = Key(Kind::Standard(Standard::$standard));
            )*
        }
    };
}

standard_keys! {
    TP = Tp;
    GTP = Gtp;
    CP = Cp;
    DP = Dp;
    PP = Pp;
    MP = Mp;
    DP_CP = DpCp;
    DP_CP_GTP = DpCpGtp;
    TP_CP = TpCp;
    TP_DP = TpDp;
    TP_DP_CP = TpDpCp;
    EP = Ep;
    EXPT_TP = ExptTp;
    EGTP = Egtp;
    EXPT_DP = ExptDp;
    EXPT_DP_EGTP = ExptDpEgtp;
    TP_EP = TpEp;
    TP_EP_PP = TpEpPp;
    EMBD = Embd;
    POS_EMBD = PosEmbd;
    INTRA_DP_CP = IntraDpCp;
    INTER_DP_CP = InterDpCp;
    INTRA_EXPT_DP = IntraExptDp;
    INTER_EXPT_DP = InterExptDp;
    INTRA_DIST_OPT = IntraDistOpt;
}

impl Key {
    /// The groups of a set of axes of the dense grid, in any order.
    #[must_use]
    pub fn over(axes: impl IntoIterator<Item = Axis>) -> Key {
        Key::in_view(ViewName::DENSE, axes)
    }

    /// The groups of a set of axes of the expert grid, in any order.
    #[must_use]
    pub fn expert_over(axes: impl IntoIterator<Item = Axis>) -> Key {
        Key::in_view(ViewName::EXPERT, axes)
    }

    /// The groups of a set of axes of any view, in any order.
    #[must_use]
    pub fn in_view(view: ViewName, axes: impl IntoIterator<Item = Axis>) -> Key {
        let mut axes: Vec<Axis> = axes.into_iter().collect();
        axes.sort_by_key(|a| (a.standard_position().unwrap_or(usize::MAX), a.clone()));
        // The experts' pipelines are the dense ones, in every layout.
        let view = if view == ViewName::EXPERT && axes == [PP] { ViewName::DENSE } else { view };
        match OVER_AXES.iter().find(|r| *r.2 == view && *r.3 == axes[..]) {
            Some(row) => Key(Kind::Standard(row.1)),
            None => Key(Kind::Over(ViewKey { view, axes })),
        }
    }

    /// One level of hierarchical context groups, 1 the innermost.
    #[must_use]
    pub fn cp_level(level: u32) -> Key {
        Key(Kind::Standard(Standard::HierarchicalCp { level }))
    }

    /// `dp x cp` in slices of `size`.
    #[must_use]
    pub fn dynamic_dp_cp(size: u32) -> Key {
        Key(Kind::Standard(Standard::DynamicDpCp { size }))
    }

    /// A standard key by its name, else a user's own name.
    ///
    /// # Errors
    /// [`PlanError::BadName`] unless the name is a lower-case letter followed by such letters, digits or `_`.
    pub fn named(name: &str) -> Result<Key, PlanError> {
        check_name(name, "a group")?;
        Ok(Key(match Standard::parse(name) {
            Some(standard) => Kind::Standard(standard),
            None => Kind::Named(name.to_owned()),
        }))
    }

    /// The standard key that this is.
    #[must_use]
    pub fn standard(&self) -> Option<Standard> {
        match self.0 {
            Kind::Standard(standard) => Some(standard),
            Kind::Over(_) | Kind::Named(_) => None,
        }
    }

    /// How the groups come from a layout; none for a user's own name, which only member lists explain.
    pub(crate) fn recipe(&self, layout: &Layout) -> Result<Option<Recipe>, PlanError> {
        let (view, axes, select) = match &self.0 {
            Kind::Standard(standard) => {
                let (view, axes) = standard.axes();
                (view, axes.to_vec(), standard.select(layout)?)
            }
            Kind::Over(over) if over.axes.is_empty() => {
                return Err(PlanError::KeyWithoutAxes { view: over.view.clone() });
            }
            Kind::Over(over) => (over.view.clone(), over.axes.clone(), Select::All),
            Kind::Named(_) => return Ok(None),
        };
        let grid = layout.views.grid(&view)?;
        Ok(Some(Recipe::new(grid, grid.mask(&axes)?, select)))
    }

    /// The same key with a view's shared axes under the base, where they are one object for all views.
    pub(crate) fn canonical(&self, layout: &Layout) -> Result<Key, PlanError> {
        match &self.0 {
            Kind::Over(over) => {
                let key = layout.views.key(&over.view, &over.axes)?;
                Ok(Key::in_view(key.view, key.axes))
            }
            Kind::Standard(_) | Kind::Named(_) => Ok(self.clone()),
        }
    }
}

impl From<Standard> for Key {
    fn from(standard: Standard) -> Key {
        Key(Kind::Standard(standard))
    }
}

/// The standard or own name, or the view and the axes: `tp_cp`, `dense:tp+pp`.
impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Standard(standard) => standard.fmt(f),
            Kind::Over(over) => write!(f, "{}:{}", over.view, join(&over.axes, "+")),
            Kind::Named(name) => f.write_str(name),
        }
    }
}
