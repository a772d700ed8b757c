//! A layout: how many ranks each kind of parallelism gets, checked once.

use std::sync::Arc;

use crate::{
    axis::{Axis, Order, ParamClass},
    grid::Grid,
    layout_rules,
    plan_error::PlanError,
    rank::GlobalRank,
    views::{ViewName, Views},
    violation::LayoutViolation,
};

/// What a user asks for. [`Layout::new`] checks it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LayoutConfig {
    /// Ranks in the world; none: as many as the sizes take.
    pub world_size: Option<u32>,
    /// The ranks that the layout covers.
    pub part: WorldPart,
    /// Tensor size.
    pub tp: u32,
    /// Weight-shard size.
    pub gtp: u32,
    /// Context size.
    pub cp: u32,
    /// Expert size.
    pub ep: u32,
    /// Replicas; none: what the other sizes leave. With `gtp` on it counts replicas only.
    pub dp: Option<u32>,
    /// Pipeline stages.
    pub pp: u32,
    /// Tensor size of experts; none: `tp`.
    pub expt_tp: Option<u32>,
    /// Weight-shard size of experts.
    pub egtp: u32,
    /// Replicas of experts; none: what the other sizes leave.
    pub expt_dp: Option<u32>,
    /// The user's own axes of the dense grid; the order names them. Experts' replicas take their ranks.
    pub own_axes: Vec<(Axis, u32)>,
    /// Axis order, fastest first, for both grids; `gtp` is put in its place where the order leaves it out.
    /// The default order is Megatron's for both grids: `tp-gtp-cp-ep-dp-pp` and, for experts, `tp-cp-ep-gtp-dp-pp`.
    pub order: String,
    /// Axis order of the expert grid; none: `order`.
    pub expert_order: Option<String>,
    /// Optimizer instances: the replicas are cut into as many sets, each with a whole optimizer state.
    pub optimizer_instances: u32,
    /// Sizes of hierarchical context groups, innermost first; empty: none. Their product is `cp`.
    pub cp_levels: Vec<u32>,
    /// Stages that hold the word embedding.
    pub embedding_stages: Stages,
    /// Stages that hold the position embedding.
    pub position_stages: Stages,
    /// Further views of the same ranks, besides `dense` and `expert`.
    pub views: Vec<ViewConfig>,
}

/// The ranks that a layout covers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum WorldPart {
    /// All of them.
    #[default]
    Whole,
    /// From `offset` on; ranks outside are members of no group.
    From {
        /// The first rank.
        offset: GlobalRank,
        /// How many; none: as many as the sizes take if `dp` is given, else to the end of the world.
        ranks: Option<u32>,
    },
}

/// A choice of pipeline stages.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Stages {
    /// The first stage.
    First,
    /// The first and the last stage: one if there is but one.
    FirstAndLast,
    /// These stages, in this order.
    At(Vec<u32>),
}

impl Stages {
    /// The stages chosen out of `pp`.
    #[must_use]
    pub fn of(&self, pp: u32) -> Vec<u32> {
        match self {
            Stages::First => vec![0],
            Stages::FirstAndLast if pp <= 1 => vec![0],
            Stages::FirstAndLast => vec![0, pp - 1],
            Stages::At(stages) => stages.clone(),
        }
    }
}

/// A further view, for [`Views::register`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ViewConfig {
    /// Its name.
    pub name: ViewName,
    /// Its axes and sizes, fastest first.
    pub axes: Vec<(Axis, u32)>,
    /// Axes shared with the dense grid.
    pub shared: Vec<Axis>,
}

impl Default for LayoutConfig {
    fn default() -> LayoutConfig {
        LayoutConfig {
            world_size: None,
            part: WorldPart::Whole,
            tp: 1,
            gtp: 1,
            cp: 1,
            ep: 1,
            dp: None,
            pp: 1,
            expt_tp: None,
            egtp: 1,
            expt_dp: None,
            own_axes: Vec::new(),
            order: Order::DEFAULT.to_owned(),
            expert_order: None,
            optimizer_instances: 1,
            cp_levels: Vec::new(),
            embedding_stages: Stages::FirstAndLast,
            position_stages: Stages::First,
            views: Vec::new(),
        }
    }
}

impl LayoutConfig {
    /// Reads sizes from a text such as `tp=2,gtp=2,dp=2`.
    ///
    /// Names are `tp`, `gtp`, `cp`, `ep`, `dp`, `pp`, `etp` (or `expt_tp`), `egtp`, `edp` (or `expt_dp`),
    /// `instances`, `offset`, `ranks`, or a user's own axis, which the order then has to name.
    ///
    /// # Errors
    /// [`PlanError::Layout`] with every word that is wrong.
    pub fn parse(text: &str) -> Result<LayoutConfig, PlanError> {
        let mut config = LayoutConfig::default();
        let mut seen: Vec<(String, u32)> = Vec::new();
        let mut violations = Vec::new();
        for word in text.split(',').map(str::trim).filter(|w| !w.is_empty()) {
            let Some((name, value)) = read_word(word, &mut violations) else {
                continue;
            };
            if let Some((_, first)) = seen.iter().find(|(known, _)| known == name) {
                violations.push(LayoutViolation::SetTwice { field: name.to_owned(), first: *first, second: value });
                continue;
            }
            seen.push((name.to_owned(), value));
            config.set(name, value, &mut violations);
        }
        if violations.is_empty() { Ok(config) } else { Err(PlanError::layout(violations)) }
    }

    fn set(&mut self, name: &str, value: u32, violations: &mut Vec<LayoutViolation>) {
        match name {
            "tp" => self.tp = value,
            "gtp" => self.gtp = value,
            "cp" => self.cp = value,
            "ep" => self.ep = value,
            "dp" => self.dp = Some(value),
            "pp" => self.pp = value,
            "expt_tp" => self.expt_tp = Some(value),
            "egtp" => self.egtp = value,
            "expt_dp" => self.expt_dp = Some(value),
            "instances" => self.optimizer_instances = value,
            "offset" => self.part = self.part.starting_at(GlobalRank(value)),
            "ranks" => self.part = self.part.covering(value),
            own => match Axis::new(own) {
                Ok(axis) => self.own_axes.push((axis, value)),
                Err(_) => violations.push(LayoutViolation::BadWord {
                    word: format!("{own}={value}"),
                    nearest: format!("axis={value}"),
                }),
            },
        }
    }
}

impl WorldPart {
    /// The first rank.
    #[must_use]
    pub fn offset(self) -> GlobalRank {
        match self {
            WorldPart::Whole => GlobalRank(0),
            WorldPart::From { offset, .. } => offset,
        }
    }

    fn ranks(self) -> Option<u32> {
        match self {
            WorldPart::Whole => None,
            WorldPart::From { ranks, .. } => ranks,
        }
    }

    fn starting_at(self, offset: GlobalRank) -> WorldPart {
        let ranks = self.ranks();
        WorldPart::From { offset, ranks }
    }

    fn covering(self, ranks: u32) -> WorldPart {
        WorldPart::From { offset: self.offset(), ranks: Some(ranks) }
    }
}

/// Splits `name=number`; the two short names of expert sizes become the long ones.
fn read_word<'w>(word: &'w str, violations: &mut Vec<LayoutViolation>) -> Option<(&'w str, u32)> {
    let (name, number) = word.split_once('=').unwrap_or((word, ""));
    let name = match name.trim() {
        "etp" => "expt_tp",
        "edp" => "expt_dp",
        name => name,
    };
    let number = number.trim().parse::<u32>();
    let lowest = u32::from(name != "offset");
    match number {
        Ok(value) if value >= lowest => Some((name, value)),
        _ => {
            violations.push(LayoutViolation::BadWord { word: word.to_owned(), nearest: format!("{name}={lowest}") });
            None
        }
    }
}

/// A layout that keeps all rules: two grids and their views over the same ranks.
///
/// It knows sizes and ranks; it creates nothing.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Layout {
    pub(crate) world_size: u32,
    pub(crate) views: Views,
    pub(crate) optimizer_instances: u32,
    pub(crate) cp_levels: Vec<u32>,
    pub(crate) embedding_stages: Vec<u32>,
    pub(crate) position_stages: Vec<u32>,
    pub(crate) view_names: Vec<ViewName>,
}

impl Layout {
    /// Checks a layout.
    ///
    /// # Errors
    /// [`PlanError::Layout`] with every rule it breaks, each with its values and the nearest valid setting;
    /// [`PlanError::BadName`] or [`PlanError::DuplicateAxis`] for an order that is none; those of
    /// [`Views::register`] for a further view.
    pub fn new(config: &LayoutConfig) -> Result<Layout, PlanError> {
        layout_rules::check(config)
    }

    /// Ranks in the world.
    #[must_use]
    pub fn world_size(&self) -> u32 {
        self.world_size
    }

    /// The grid of a class of parameters: scales and replica counts differ between them.
    #[must_use]
    pub fn grid(&self, class: ParamClass) -> &Arc<Grid> {
        let view = match class {
            ParamClass::Dense => &ViewName::DENSE,
            ParamClass::Expert => &ViewName::EXPERT,
        };
        let grid = self.views.grid(view);
        grid.expect("BUG: a layout registers both grids when it is made")
    }

    /// The size of an axis on the grid of a class; 1 if that grid does not have it.
    #[must_use]
    pub fn size(&self, class: ParamClass, axis: &Axis) -> u32 {
        self.grid(class).axis_size(axis).unwrap_or(1)
    }

    /// All views: `dense`, `expert` and the user's.
    #[must_use]
    pub fn views(&self) -> &Views {
        &self.views
    }

    /// Optimizer instances.
    #[must_use]
    pub fn optimizer_instances(&self) -> u32 {
        self.optimizer_instances
    }

    /// Group sizes that data-and-context groups can be cut into while running: powers of two from 2 on, below the
    /// size of the group, that divide it.
    ///
    /// Source: Megatron-LM, `parallel_state.create_hybrid_dp_cp_groups` (behaviour only), where sizes that do not
    /// divide leave a last group that is smaller than its name says; here they are left out.
    #[must_use]
    pub fn dynamic_dp_cp_sizes(&self) -> Vec<u32> {
        let dense = |axis| self.size(ParamClass::Dense, &axis);
        let whole = dense(Axis::DP) * dense(Axis::CP);
        let powers = (1..32).map(|bit| 1u32 << bit);
        powers.take_while(|size| *size < whole).filter(|size| whole.is_multiple_of(*size)).collect()
    }

    /// Everything that decides the groups, in one line: equal lines, equal groups.
    #[must_use]
    pub fn canonical_text(&self) -> String {
        let mut text = format!(
            "world={} offset={} ranks={}",
            self.world_size,
            self.grid(ParamClass::Dense).offset(),
            self.grid(ParamClass::Dense).size()
        );
        for view in &self.view_names {
            let grid = self.views.grid(view);
            let grid = grid.expect("BUG: view names are taken from the registered views");
            text += &format!(" {view}={}", grid.describe());
        }
        text + &format!(
            " instances={} cp_levels={:?} embedding={:?} position={:?}",
            self.optimizer_instances, self.cp_levels, self.embedding_stages, self.position_stages
        )
    }
}

/// Weight shards in all and per tensor rank: `(tp x gtp, gtp)`, from either input.
///
/// `shards`, where given, decides; otherwise there are `tp x gtp`.
///
/// # Errors
/// [`PlanError::WeightShards`] if `shards` is below `tp` or no multiple of it.
pub fn weight_shards(tp: u32, shards: Option<u32>, gtp: u32) -> Result<(u32, u32), PlanError> {
    let total = shards.unwrap_or(tp.saturating_mul(gtp));
    if tp == 0 || total < tp || !total.is_multiple_of(tp) {
        return Err(PlanError::WeightShards {
            shards: total,
            tp,
            nearest: total.div_ceil(tp.max(1)).max(1) * tp.max(1),
        });
    }
    Ok((total, total / tp))
}
