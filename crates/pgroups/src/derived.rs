//! Groups that were not supplied: what may stand in for them, and what is an error.
//!
//! A missing group is derived only where the layout proves the result: its groups have one member, or are exactly
//! those of a supplied key. Everything else is an error that names the group and who needs it.

use crate::{
    axis::ParamClass,
    keys::Key,
    plan::{GroupsPlan, Planned},
    plan_error::PlanError,
};

/// What stands for a key on this rank.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Derived {
    /// The key's own group, which was supplied.
    Supplied,
    /// The group of this other key, which was supplied: the layout gives both the same members.
    SameAs(Key),
    /// This rank alone; there is nothing to communicate and no communicator is needed.
    Single,
    /// No group here: it, or the key it equals, was supplied as none or has other members.
    Empty,
}

/// A component that needs several groups at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Consumer {
    /// Gradient reduction.
    Ddp,
    /// The optimizer: norms and instances.
    Optimizer,
}

/// Something a component goes on without, which the user should know.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PlanWarning {
    /// Expert replicas are taken to be single ranks: expert gradients would not be reduced.
    ExpertReplicasSingle {
        /// The replicas that the layout has.
        expt_dp: u32,
    },
}

impl std::fmt::Display for PlanWarning {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            PlanWarning::ExpertReplicasSingle { expt_dp } => write!(
                f,
                "group 'expt_dp' was not supplied and stands for this rank alone, but the layout has {expt_dp} \
                 replicas of each expert: supply it if the model has experts"
            ),
        }
    }
}

/// What stands for each group that a component needs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Resolution {
    /// The groups in the order the component lists them.
    pub groups: Vec<(Key, Derived)>,
    /// What the component goes on without.
    pub warnings: Vec<PlanWarning>,
}

impl Resolution {
    /// What stands for a key; none if the component does not need it.
    #[must_use]
    pub fn of(&self, key: &Key) -> Option<&Derived> {
        let found = self.groups.iter().find(|(known, _)| known == key);
        found.map(|(_, derived)| derived)
    }
}

impl Consumer {
    /// The name that errors use.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Consumer::Ddp => "ddp",
            Consumer::Optimizer => "optimizer",
        }
    }

    fn needs(self) -> Vec<Key> {
        let own: &[Key] = match self {
            Consumer::Ddp => &[Key::DP, Key::TP, Key::PP, Key::EP, Key::EXPT_DP],
            Consumer::Optimizer => &[Key::DP, Key::EXPT_DP, Key::MP, Key::TP_EP_PP],
        };
        let both = [Key::DP_CP, Key::GTP, Key::EGTP];
        own.iter().cloned().chain(both).collect()
    }
}

impl GroupsPlan {
    /// What stands for a key: its own group whenever it was supplied, a custom one and "none" included; else what
    /// the layout proves.
    ///
    /// # Errors
    /// [`PlanError::MissingGroup`] if it was not supplied and nothing that was supplied has its members; those of
    /// [`GroupsPlan::supplied`].
    pub fn derive(&self, key: &Key, needed_by: &'static str) -> Result<Derived, PlanError> {
        match self.supplied(key)? {
            Planned::Member(_) => return Ok(Derived::Supplied),
            Planned::Empty(_) => return Ok(Derived::Empty),
            Planned::Absent => {}
        }
        let wanted = key.canonical(self.layout())?.recipe(self.layout())?;
        let wanted = wanted.ok_or_else(|| self.missing(key, needed_by))?;
        if wanted.group_size() == 1 {
            let member = wanted.own(self.rank()).is_some();
            return Ok(if member { Derived::Single } else { Derived::Empty });
        }
        for entry in self.entries() {
            let twin = entry.key().recipe(self.layout())?;
            if twin.is_some_and(|twin| twin.signature() == wanted.signature()) {
                return Ok(match entry.own() {
                    Some(_) => Derived::SameAs(entry.key().clone()),
                    None => Derived::Empty,
                });
            }
        }
        Err(self.missing(key, needed_by))
    }

    /// What stands for every group that a component needs.
    ///
    /// With one optimizer instance the groups inside an instance are the full ones and none goes across; with
    /// several the partial groups are needed too.
    ///
    /// # Errors
    /// [`PlanError::MissingGroups`] with all that are missing; those of [`GroupsPlan::supplied`].
    pub fn resolve(&self, consumer: Consumer) -> Result<Resolution, PlanError> {
        let mut keys = consumer.needs();
        let partial = [Key::INTRA_DP_CP, Key::INTER_DP_CP, Key::INTRA_EXPT_DP, Key::INTER_EXPT_DP];
        let instances = self.layout().optimizer_instances();
        if instances > 1 {
            keys.extend(partial);
        }
        let mut resolution = Resolution { groups: Vec::new(), warnings: Vec::new() };
        let mut missing = Vec::new();
        for key in keys {
            match self.derive(&key, consumer.name()) {
                Ok(derived) => resolution.groups.push((key, derived)),
                Err(PlanError::MissingGroup { key, .. }) if consumer == Consumer::Ddp && key == Key::EXPT_DP => {
                    let grid = self.layout().grid(ParamClass::Expert);
                    let expt_dp = grid.axis_size(&crate::axis::Axis::DP).unwrap_or(1);
                    let warning = PlanWarning::ExpertReplicasSingle { expt_dp };
                    resolution.warnings.push(warning);
                    resolution.groups.push((key, Derived::Single));
                }
                Err(PlanError::MissingGroup { key, .. }) => missing.push(key),
                Err(other) => return Err(other),
            }
        }
        if !missing.is_empty() {
            return Err(self.missing_all(&missing, consumer.name()));
        }
        if instances <= 1 {
            let full = [Key::DP_CP, Key::EXPT_DP];
            let inside = [Key::INTRA_DP_CP, Key::INTRA_EXPT_DP];
            for (inside, full) in inside.into_iter().zip(full) {
                let stands = self.inside_one_instance(&inside, &full, &resolution, consumer)?;
                resolution.groups.push((inside, stands));
            }
            let across = [Key::INTER_DP_CP, Key::INTER_EXPT_DP];
            let none = across.into_iter().map(|key| (key, Derived::Empty));
            resolution.groups.extend(none);
        }
        Ok(resolution)
    }

    /// The only instance holds all replicas: whatever stands for the full group stands for its part too.
    fn inside_one_instance(
        &self,
        inside: &Key,
        full: &Key,
        resolution: &Resolution,
        consumer: Consumer,
    ) -> Result<Derived, PlanError> {
        match self.derive(inside, consumer.name()) {
            Err(PlanError::MissingGroup { .. }) => {}
            decided => return decided,
        }
        Ok(match resolution.of(full) {
            Some(Derived::Supplied) => Derived::SameAs(full.clone()),
            Some(other) => other.clone(),
            None => Derived::Empty,
        })
    }
}
