//! Contiguous ranges on the simulated device: they grow page by page, are recycled, and every byte is right.

use std::sync::Arc;

use crate::common::{generated, request};
use cuda_driver::{CountingDriver, Device, DeviceSpan, Stream};
use cuda_sim::{Pace, RaceCheck, SimConfig, SimDriver};
use kv_pool::clock::ManualClock;
use kv_replay::config::{ConfigError, Life, Progress, ProgressState, RunConfig, Verify};
use kv_replay::device::OpenDevices;
use kv_replay::engine::RunError;
use kv_replay::engine::contiguous;
use kv_replay::report::{RangesReport, RunReport};
use kv_replay::shape::KvModelShape;
use kv_replay::trace::Trace;

/// A page of a plane: 512 tokens of 8 bytes.
const PAGE: u64 = 4096;

fn machine(pace: Pace) -> OpenDevices {
    machine_with(pace, RaceCheck::Report)
}

fn machine_with(pace: Pace, races: RaceCheck) -> OpenDevices {
    let config = SimConfig { granularity: PAGE, pace, races, ..SimConfig::default() };
    let sim = Arc::new(SimDriver::new(config).unwrap());
    sim.register_kernels(kv_kernels::references());
    let driver = Arc::new(CountingDriver::new(sim.clone()));
    let devices = vec![Device::open(driver.clone(), 0).unwrap()];
    OpenDevices {
        driver,
        devices,
        description: "pages of 4 KiB".to_owned(),
        sim: Some(sim),
        clock: ManualClock::new(),
    }
}

/// Memory for `pages` pages: two planes of one layer, blocks of 64 tokens.
fn config(pages: u64) -> RunConfig {
    RunConfig {
        block_tokens: 64,
        device_blocks: pages * PAGE / 1024,
        host_blocks: 0,
        max_batch: 4,
        step_tokens: 1024,
        ..RunConfig::default()
    }
}

/// A generated workload of requests of at most 3,000 tokens, with answers of at most 600.
fn workload(requests: u64, seed: u64) -> Trace {
    generated(requests, seed, (3000, 600))
}

fn replay(config: &RunConfig, trace: &Trace, pace: Pace) -> (RunReport, RangesReport) {
    let devices = machine(pace);
    let report = contiguous::run(config, trace, &devices, &mut ()).unwrap();
    assert_eq!(report.corrupt_blocks, 0, "{:?}", report.corruptions);
    assert_eq!(report.finished + report.cancelled, report.requests);
    let sim = devices.sim.clone().unwrap();
    drop(devices);
    assert!(sim.races().is_empty(), "{:?}", sim.races());
    assert!(sim.check_leaks().is_clean(), "{:?}", sim.check_leaks());
    let figures = report.contiguous.unwrap();
    (report, figures)
}

#[test]
fn a_range_grows_page_by_page_and_every_block_is_read_in_every_iteration() {
    let trace = Trace::new(vec![request(100, 1000, 0)]);
    let (report, figures) = replay(&config(64), &trace, Pace::Slowest);
    assert_eq!((report.finished, report.prompt_tokens, report.generated_tokens), (1, 100, 1000));
    // The prompt, and then a token each.
    assert_eq!((report.iterations, figures.growth_calls), (1001, 1001));
    let blocks: u64 = (100..=1100u64).map(|tokens| tokens.div_ceil(64)).sum();
    assert_eq!(report.verified_blocks, blocks);
    assert_eq!(report.bytes_transferred, 1100 * 16);
    // 1,100 tokens take three pages of either plane, and each was mapped once.
    assert_eq!((figures.pages_mapped, figures.pages_recycled), (6, 0));
    assert_eq!((figures.page_bytes, figures.limit_pages), (PAGE, 64));
    assert_eq!((figures.peak_mapped_bytes, figures.peak_used_bytes), (6 * PAGE, 1100 * 16));
    // The first page alone was not mapped ahead of need.
    assert_eq!(report.growth_stalls, 1);
}

#[test]
fn a_request_takes_over_the_pages_of_one_that_has_left() {
    let trace = Trace::new((0..3).map(|id| request(600, 2, 8 * id)).collect());
    let config = RunConfig { max_batch: 1, ..config(64) };
    let (_, figures) = replay(&config, &trace, Pace::Slowest);
    assert_eq!((figures.pages_mapped, figures.pages_recycled), (4, 8));
}

#[test]
fn requests_that_outgrow_the_memory_together_are_preempted_and_finish() {
    for pace in [Pace::Slowest, Pace::Random, Pace::Fastest] {
        for seed in [1, 2] {
            let trace = workload(16, seed);
            // The longest request takes 16 pages.
            let (report, figures) = replay(&config(24), &trace, pace);
            assert!(report.preemptions > 0, "{pace:?} {seed}");
            assert!(figures.pages_recycled > figures.pages_created, "{pace:?} {seed}");
            assert!(figures.pages_created <= 24 && figures.peak_mapped_bytes <= 24 * PAGE);
        }
    }
}

#[test]
fn prompts_are_computed_in_chunks_and_requests_cancelled_at_any_moment() {
    let trace = workload(16, 5);
    let (whole, _) = replay(&config(40), &trace, Pace::Slowest);
    let life = Life { chunk: 100, ..Life::default() };
    let (chunked, _) = replay(&RunConfig { life, ..config(40) }, &trace, Pace::Slowest);
    assert_eq!(chunked.generated_tokens, whole.generated_tokens);
    assert!(chunked.iterations > whole.iterations, "{}", chunked.iterations);
    let life = Life { cancel: 50, ..life };
    let (cancelled, _) = replay(&RunConfig { life, ..config(40) }, &trace, Pace::Random);
    assert!(cancelled.cancelled > 0 && cancelled.finished > 0);
}

#[test]
fn rows_that_divide_neither_page_nor_block_are_read_right() {
    let shape = KvModelShape { layers: 3, kv_heads: 3, ..RunConfig::default().shape };
    let config = RunConfig { shape, device_blocks: 400, ..config(1) };
    let (report, figures) = replay(&config, &workload(6, 3), Pace::Random);
    assert!(report.verified_blocks > 1000 && figures.pages_recycled > 0);
}

#[test]
fn equal_runs_have_equal_reports() {
    let untimed = |(report, _): (RunReport, _)| RunReport { setup_s: 0.0, wall_s: 0.0, ..report };
    let run = || untimed(replay(&config(24), &workload(12, 4), Pace::Slowest));
    assert_eq!(run(), run());
}

#[test]
fn each_tenant_has_its_own_figures() {
    let mut trace = workload(6, 4);
    trace.requests[2].tenant = Some("a".into());
    let (prompt, generated) = (trace.requests[2].input_length, trace.requests[2].output_length);
    let (report, _) = replay(&config(24), &trace, Pace::Slowest);
    let found: Vec<_> = report.tenants.iter().collect();
    let [(name, tenant)] = found[..] else { panic!("{found:?}") };
    assert_eq!((&**name, tenant.finished), ("a", 1));
    assert_eq!((tenant.prompt_tokens, tenant.generated_tokens), (prompt, generated));
}

#[test]
fn a_thread_that_maps_ahead_of_need_as_on_a_gpu_loses_no_byte() {
    for seed in [6, 7] {
        let devices = machine(Pace::Random);
        let sim = devices.sim.clone().unwrap();
        // What is not known to be simulated is driven as a GPU is.
        let devices = OpenDevices { sim: None, ..devices };
        let trace = workload(16, seed);
        let report = contiguous::run(&config(24), &trace, &devices, &mut ()).unwrap();
        assert_eq!((report.finished, report.corrupt_blocks), (16, 0), "{:?}", report.corruptions);
        drop(devices);
        assert!(sim.findings().is_empty(), "{:?}", sim.findings());
        assert!(sim.check_leaks().is_clean(), "{:?}", sim.check_leaks());
    }
}

#[test]
fn the_kernels_of_a_gpu_read_ranges_as_their_references_do() {
    let trace = Trace::new(vec![request(700, 3, 0), request(90, 3, 8)]);
    let devices = machine(Pace::Random);
    devices.sim.as_ref().unwrap().prefer_ptx(true);
    let shape = KvModelShape { layers: 2, kv_heads: 2, ..RunConfig::default().shape };
    let config = RunConfig { shape, ..config(64) };
    let report = contiguous::run(&config, &trace, &devices, &mut ()).unwrap();
    assert_eq!((report.finished, report.corrupt_blocks), (2, 0), "{:?}", report.corruptions);
}

#[test]
fn nothing_is_read_back_if_nothing_is_to_be_verified() {
    let config = RunConfig { verify: Verify::None, ..config(24) };
    let (report, _) = replay(&config, &workload(8, 1), Pace::Slowest);
    assert_eq!(report.verified_blocks, 0);
    let (sampled, _) =
        replay(&RunConfig { verify: Verify::Sample, ..config }, &workload(8, 1), Pace::Slowest);
    assert!(sampled.verified_blocks > 0);
}

#[test]
fn a_request_beyond_the_memory_and_options_without_meaning_are_refused() {
    let trace = Trace::new(vec![request(100, 1, 0), request(3000, 1, 8)]);
    let devices = machine(Pace::Slowest);
    let refused = |config: &RunConfig| contiguous::build(config, &trace, &devices).unwrap_err();
    let error = refused(&RunConfig { device_blocks: 47, ..config(1) });
    assert_eq!(
        error.to_string(),
        "request 1, counted from 0, has 3001 tokens, whose ranges take 12 pages of 4096 bytes, but \
         --device-blocks is memory for 10"
    );
    assert!(matches!(error, RunError::RangeTooLarge { request: 1, .. }));
    let error = refused(&RunConfig { host_blocks: 5, ..config(24) });
    assert!(matches!(error, RunError::Config(ConfigError::NotContiguous { .. })), "{error}");
}

/// Changes a byte of a range once so many iterations have passed.
struct ChangesAByte {
    stream: Stream,
    byte: DeviceSpan,
    in_iteration: u64,
}

impl Progress for ChangesAByte {
    fn update(&mut self, state: &ProgressState) {
        if state.iterations == self.in_iteration {
            // The work in flight is waited for: no race, only a wrong byte.
            self.stream.device().synchronize().unwrap();
            let mut byte = [0];
            self.stream.download(&mut byte, self.byte).unwrap();
            self.stream.fill(self.byte, !byte[0]).unwrap();
            self.stream.synchronize().unwrap();
        }
    }
}

#[test]
fn one_changed_byte_of_a_range_is_named() {
    let trace = Trace::new(vec![request(100, 20, 0)]);
    let (config, devices) = (config(24), machine(Pace::Slowest));
    let ranges = contiguous::build(&config, &trace, &devices).unwrap();
    // Token 70 of the keys of the first seat, in its second block.
    let byte = ranges.space().span().slice(70 * 8 + 3, 1).unwrap();
    let stream = Stream::new(&devices.devices[0]).unwrap();
    let mut change = ChangesAByte { stream, byte, in_iteration: 10 };
    let report = contiguous::run_on(ranges, &config, &trace, &devices, &mut change).unwrap();
    assert_eq!(report.finished, 1);
    // The tenth iteration has read it before; the other eleven have not.
    assert_eq!(report.corrupt_blocks, 11, "{:?}", report.corruptions);
    let first = &report.corruptions[0];
    assert_eq!((first.request, first.block, first.iteration), (0, 1, 11));
    assert_eq!(first.physical_block, 1);
}

/// Runs requests that follow each other in one range, with the protection disabled or not.
#[cfg(all(feature = "sabotage", debug_assertions))]
fn follow_each_other(protected: bool, races: RaceCheck) -> Result<RunReport, RunError> {
    let trace = Trace::new((0..24).map(|id| request(700, 2, 8 * id)).collect());
    let config = RunConfig { max_batch: 1, ..config(24) };
    let devices = machine_with(Pace::Random, races);
    let ranges = contiguous::build(&config, &trace, &devices).unwrap();
    if !protected {
        ranges.space().sabotage_rest_at_once();
    }
    contiguous::run_on(ranges, &config, &trace, &devices, &mut ())
}

#[cfg(all(feature = "sabotage", debug_assertions))]
#[test]
fn pages_that_are_recycled_before_their_reader_has_finished_are_caught() {
    assert_eq!(follow_each_other(true, RaceCheck::Report).unwrap().corrupt_blocks, 0);
    // The bytes tell, and so does the missing order.
    let report = follow_each_other(false, RaceCheck::Off).unwrap();
    assert!(report.corrupt_blocks > 0);
    let owner = |corrupt: &kv_replay::report::CorruptBlock| {
        corrupt.message.starts_with("it holds the content of request")
    };
    assert!(report.corruptions.iter().any(owner), "{:?}", report.corruptions);
    let failed = follow_each_other(false, RaceCheck::Report).unwrap_err();
    let RunError::Corrupted { source, .. } = failed else { panic!("{failed:?}") };
    assert!(matches!(*source, RunError::Findings { .. }), "{source:?}");
}
