//! What can go wrong, one variant per cause.

use thiserror::Error;

use crate::plan_error::PlanError;

/// Everything this crate refuses.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PgError {
    /// A layout, a plan or a placement that cannot be.
    #[error(transparent)]
    Plan(#[from] PlanError),
}
