//! The engine over contiguous ranges: each request has one range of addresses for each plane, in vAttention's way.
//!
//! A [`SequenceSpace`] reserves addresses for `max_batch` requests of the longest length. Pages are
//! mapped as tokens are written, and a later request takes over the pages of one that has ended.
//! There is no pool of blocks, no sharing and no host memory. As over blocks, the host is one
//! iteration ahead of the device, and every iteration reads the whole KV of the requests that it
//! advances; the kernel finds it through a table that is written once and never changes, because a
//! range never moves.
//!
//! Tokens are written on one stream and read on another, so that an iteration writes while the one
//! before it is still read. Only the fence that a request leaves with keeps its pages from the next
//! one until then.

mod ranges;
mod scheduler;

use std::collections::BTreeMap;
use std::time::Instant;

use cuda_vmm::sequences::SequenceSpace;

pub use ranges::Ranges;

use super::{Begun, RunError, check_run};
use crate::config::{Progress, RunConfig};
use crate::device::OpenDevices;
use crate::report::{RangesReport, RunReport};
use crate::trace::Trace;
use scheduler::Scheduler;

/// Replays `trace` on one device over contiguous ranges, and returns the results, with
/// [`RunReport::contiguous`]. Corrupt blocks are not an error: the report contains them.
///
/// `config.device_blocks` is the limit of device memory: that of so many blocks, rounded down to
/// whole pages. `config.block_tokens` is the number of tokens of one checksum.
pub fn run(
    config: &RunConfig,
    trace: &Trace,
    devices: &OpenDevices,
    progress: &mut dyn Progress,
) -> Result<RunReport, RunError> {
    let begun = Instant::now();
    let ranges = build(config, trace, devices)?;
    let setup_s = begun.elapsed().as_secs_f64();
    Ok(RunReport { setup_s, ..run_on(ranges, config, trace, devices, progress)? })
}

pub fn build(config: &RunConfig, trace: &Trace, devices: &OpenDevices) -> Result<Ranges, RunError> {
    check_all(config, trace, devices)?;
    Ranges::new(config, trace, devices)
}

pub fn run_on(
    ranges: Ranges,
    config: &RunConfig,
    trace: &Trace,
    devices: &OpenDevices,
    progress: &mut dyn Progress,
) -> Result<RunReport, RunError> {
    check_all(config, trace, devices)?;
    let device = ranges.space().device().clone();
    device.while_current(|| play(ranges, config, trace, devices, progress))?
}

fn check_all(config: &RunConfig, trace: &Trace, devices: &OpenDevices) -> Result<(), RunError> {
    check_run(config, devices.devices.len(), trace)?;
    Ok(config.check_contiguous(devices.devices.len())?)
}

fn play(
    ranges: Ranges,
    config: &RunConfig,
    trace: &Trace,
    devices: &OpenDevices,
    progress: &mut dyn Progress,
) -> Result<RunReport, RunError> {
    let begun = Begun::now(devices);
    let mapped_before = pages_mapped(&devices.driver.calls());
    let mut report = RunReport::new(config, &devices.description)?;
    report.requests_skipped = trace.skipped;
    report.requests = trace.requests.len() as u64;
    report.contiguous = Some(ranges.report());
    let mut scheduler = Scheduler::new(ranges, config, trace)?;
    let played = scheduler.play(devices, &mut report, progress);
    let ranges = scheduler.into_ranges();
    if let Some(figures) = &mut report.contiguous {
        let mapped = pages_mapped(&devices.driver.calls()) - mapped_before;
        note_pages(figures, ranges.space(), mapped);
    }
    report.growth_stalls = ranges.space().stats().stalls;
    // Also after a failure: closing waits for enqueued work, and releases the memory.
    let closed = ranges.close();
    let ended = played.and(closed);
    begun.conclude(ended, report, devices)
}

/// Number of pages mapped so far: only the space maps any.
fn pages_mapped(calls: &BTreeMap<&'static str, u64>) -> u64 {
    calls.get("cuMemMap").copied().unwrap_or(0)
}

fn note_pages(figures: &mut RangesReport, space: &SequenceSpace, mapped: u64) {
    let adopted = space.stats().adopted_bytes / space.pages().page_bytes();
    figures.pages_mapped = mapped;
    figures.pages_created = space.pages().stats().created;
    figures.pages_recycled = adopted + mapped.saturating_sub(figures.pages_created);
}
