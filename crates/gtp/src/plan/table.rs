//! Plans as text.

use std::{fmt, sync::Arc};

use super::{GtpPlan, PassPlan, Slot, WeightPlan};
use crate::schedule::UseIndex;

impl GtpPlan {
    /// A line: weights, bytes of their slots, gathers of each kind of pass and how many nothing hides.
    #[must_use]
    pub fn summary(&self) -> String {
        let pass = |pass: &Arc<PassPlan>| {
            let open = pass.gathers().iter().filter(|gather| gather.issued_at == gather.uses[0]).count();
            format!("{} {} ({open} in the open)", pass.kind(), pass.gathers().len())
        };
        let passes: Vec<String> = self.passes.values().map(pass).collect();
        let (weights, mib) = (self.weights.len(), mib(self.bytes()));
        format!("{weights} sharded weights, slots of {mib:.2} MiB; gathers of a pass: {}", passes.join(", "))
    }
}

/// Weights, then for each kind of pass a line for each use and each gradient, with its slot: element type, first byte
/// in the arena of that type, bytes.
impl fmt::Display for GtpPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} sharded weights, slots of {:.2} MiB", self.weights.len(), mib(self.bytes()))?;
        for pass in self.passes.values() {
            let (gathers, grads) = (mib(pass.gather_bytes()), mib(pass.grad_bytes()));
            write!(f, "\npass '{}': gathered weights {gathers:.2} MiB, weight gradients {grads:.2} MiB", pass.kind())?;
            pass.table(&self.weights, f)?;
        }
        Ok(())
    }
}

impl PassPlan {
    fn table(&self, weights: &[WeightPlan], f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |at: UseIndex| &weights[self.schedule.uses()[at.0].weight.0].name;
        let width = weights.iter().map(|weight| weight.name.len()).max().unwrap_or(0).max("weight".len());
        write!(
            f,
            "\n  use  {:<width$}  {:<9} {:>4} {:>12} {:>12}  gathered",
            "weight", "in", "type", "at byte", "bytes"
        )?;
        for (i, taken) in self.schedule.uses().iter().enumerate() {
            let gather = &self.gathers[self.served[i].0];
            write!(
                f,
                "\n  {i:>3}  {:<width$}  {:<9} {}  ",
                name(UseIndex(i)),
                taken.pass.name(),
                Columns(&gather.slot)
            )?;
            match (gather.uses[0].0, gather.issued_at) {
                (first, _) if first != i => write!(f, "stays from use {first}")?,
                (_, at) if at.0 == i => write!(f, "in the open")?,
                (_, at) => write!(f, "behind use {} ({})", at.0, name(at))?,
            }
        }
        if self.grads.is_empty() {
            return Ok(());
        }
        write!(f, "\n grad  {:<width$}  {:<9} {:>4} {:>12} {:>12}", "weight", "", "type", "at byte", "bytes")?;
        for (i, (grad, opened)) in self.grads.iter().zip(self.schedule.grads()).enumerate() {
            let name = &weights[opened.weight.0].name;
            write!(f, "\n  {i:>3}  {name:<width$}  {:<9} {}", "", Columns(&grad.slot))?;
        }
        Ok(())
    }
}

/// Element type, first byte and bytes of a slot.
struct Columns<'a>(&'a Slot);

impl fmt::Display for Columns<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Slot { dtype, offset, numel } = *self.0;
        let size = dtype.size_bytes();
        write!(f, "{:>4} {:>12} {:>12}", dtype.to_string(), offset * size, numel * size)
    }
}

fn mib(bytes: usize) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
