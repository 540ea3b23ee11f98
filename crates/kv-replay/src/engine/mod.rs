//! The engine: plays an overlap scheduler over the whole stack.

use crate::config::{Progress, RunConfig};
use crate::device::OpenDevices;
use crate::report::RunReport;
use crate::shape::ShapeError;
use crate::trace::Trace;

/// Why a run ended early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// The shape cannot be laid out.
    #[error(transparent)]
    Shape(#[from] ShapeError),
}

/// Replays `trace` on `devices`.
///
/// # Errors
///
/// [`RunError`].
pub fn run(
    config: &RunConfig,
    trace: &Trace,
    devices: &OpenDevices,
    _progress: &mut dyn Progress,
) -> Result<RunReport, RunError> {
    let mut report = RunReport::new(config, &devices.description)?;
    report.requests = trace.requests.len() as u64;
    Ok(report)
}
