//! How ranks are laid out over the axes.

use super::violation::{Rule, Setting, Violation};
use pgroups::{LayoutViolation, Order, PlanError};
use serde::Serialize;

/// `[layout]`: ranks along each axis. Their product, but for ep, is the world; see [`pgroups::LayoutConfig`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LayoutConfig {
    /// Tensor parallelism. Default 1.
    pub tp: u32,
    /// Weights gathered on demand. Default 1.
    pub gtp: u32,
    /// Context parallelism. Default 1.
    pub cp: u32,
    /// Expert parallelism, over the same ranks once more. Default 1.
    pub ep: u32,
    /// Replicas. Default 1.
    pub dp: u32,
    /// Pipeline stages. Default 1.
    pub pp: u32,
    /// Axes from the fastest to the slowest. Default `tp-gtp-cp-ep-dp-pp`.
    pub order: String,
    /// Whether each rank of a tensor group keeps its part of the tokens between the parallel layers; none without such
    /// a group. Default false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sequence_parallel: Option<bool>,
}

impl LayoutConfig {
    /// The layout that these sizes make.
    ///
    /// # Errors
    /// Those of [`pgroups::Layout::new`].
    pub fn plan(&self) -> Result<pgroups::Layout, PlanError> {
        let LayoutConfig { tp, gtp, cp, ep, dp, pp, ref order, .. } = *self;
        let config =
            pgroups::LayoutConfig { tp, gtp, cp, ep, dp: Some(dp), pp, order: order.clone(), ..Default::default() };
        pgroups::Layout::new(&config)
    }

    /// Ranks that read distinct data: replicas and weight-shard peers.
    pub fn data_ranks(&self) -> u64 {
        u64::from(self.dp) * u64::from(self.gtp)
    }
}

/// A refused layout, in the words of a configuration.
pub(crate) fn violations(layout: &LayoutConfig, error: &PlanError) -> Vec<Violation> {
    let order = |text: &str| Setting::text("layout.order", text);
    let sizes = || {
        let LayoutConfig { tp, gtp, cp, ep, dp, pp, .. } = *layout;
        let sizes = [("tp", tp), ("gtp", gtp), ("cp", cp), ("ep", ep), ("dp", dp), ("pp", pp)];
        let above_one = sizes.into_iter().filter(|(_, size)| *size > 1);
        above_one.map(|(axis, size)| Setting::new(format!("layout.{axis}"), size)).collect()
    };
    let told = |settings, nearest, problem: &dyn ToString| Violation {
        settings,
        rule: Rule::Layout { problem: problem.to_string() },
        nearest,
    };
    let mut found: Vec<Violation> = match error {
        PlanError::Layout { violations } => violations
            .0
            .iter()
            .map(|violation| match violation {
                LayoutViolation::AxisNotInOrder { nearest, .. } | LayoutViolation::TokenWithoutSize { nearest, .. } => {
                    told(vec![order(&layout.order)], vec![order(nearest)], violation)
                }
                // Its own text names the nearest setting.
                other => told(sizes(), vec![], other),
            })
            .collect(),
        // What is left is an order that is none.
        other => vec![told(vec![order(&layout.order)], vec![order(Order::DEFAULT)], other)],
    };
    // The dense and the expert grid may break the same rule.
    found.dedup();
    found
}
