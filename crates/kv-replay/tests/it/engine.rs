//! The engine on the simulated device: every request finishes, and every byte is right.

use crate::common::{devices, generated, leave, request};
use cuda_driver::{AddressRange, Device, HostAllocFlags, PhysicalMemory, PinnedBuffer, Stream};
use cuda_sim::{Pace, Profile};
use kv_multigpu::place::Placement;
use kv_plane::TransportChoice;
use kv_pool::policy::PolicyKind;
use kv_pool::store::StoreKind;
use kv_replay::config::{Progress, ProgressState, RunConfig, Verify};
use kv_replay::device::{SimSizes, open};
use kv_replay::engine::{self, RunError};
use kv_replay::generate::{GenerateOptions, generate};
use kv_replay::report::RunReport;
use kv_replay::shape::{Dtype, KvModelShape};
use kv_replay::trace::{Request, Trace};

fn small(blocks: u64) -> RunConfig {
    RunConfig {
        block_tokens: 64,
        device_blocks: blocks,
        host_blocks: 0,
        max_batch: 8,
        step_tokens: 2048,
        ..RunConfig::default()
    }
}

/// A generated workload with very short answers, which takes few iterations.
fn short_answers(requests: u64, seed: u64) -> Trace {
    generated(requests, seed, (u64::MAX, 3))
}

fn replay_on(device: &str, config: &RunConfig, trace: &Trace) -> RunReport {
    config.check().unwrap();
    config.check_trace(trace).unwrap();
    let devices = devices(device, config);
    let report = engine::run(config, trace, &devices, &mut ()).unwrap();
    assert_eq!(report.finished, report.requests);
    assert_eq!(report.corrupt_blocks, 0, "{:?}", report.corruptions);
    leave(devices);
    report
}

fn untimed(report: RunReport) -> RunReport {
    RunReport { setup_s: 0.0, wall_s: 0.0, ..report }
}

fn replay(config: &RunConfig, trace: &Trace) -> RunReport {
    replay_on("sim", config, trace)
}

#[test]
fn tokens_blocks_and_iterations_are_counted_exactly() {
    // 100 tokens are two blocks, the second partly full. The budget fits the whole prompt.
    let trace = Trace::new(vec![request(100, 3, 0)]);
    let report = replay(&small(8), &trace);
    assert_eq!((report.prompt_tokens, report.generated_tokens), (100, 3));
    assert_eq!(report.iterations, 4);
    assert_eq!(report.verified_blocks, 2 * 4);
    assert_eq!((report.block_lookups, report.block_hits), (1, 0));
    // 103 tokens of 16 bytes.
    assert_eq!(report.bytes_transferred, 103 * 16);
    assert_eq!(report.peak_device_blocks, 2);
}

#[test]
fn a_prompt_longer_than_the_budget_is_written_in_pieces() {
    let config = RunConfig { step_tokens: 100, ..small(32) };
    let report = replay(&config, &Trace::new(vec![request(1000, 1, 0)]));
    assert_eq!(report.iterations, 10 + 1);
}

#[test]
fn an_equal_prompt_is_found_and_not_written_again() {
    let requests = vec![request(1000, 5, 0), request(1000, 5, 0)];
    let config = RunConfig { max_batch: 1, ..small(64) };
    let report = replay(&config, &Trace::new(requests));
    // 15 full blocks. The last token is in the sixteenth.
    assert_eq!((report.block_lookups, report.block_hits), (30, 15));
    assert_eq!(report.prefix_tokens_reused, 15 * 64);
    assert!((report.hit_rate - 0.5).abs() < 1e-9);
}

#[test]
fn requests_that_outgrow_the_pool_together_are_preempted_and_finish() {
    // Four requests that grow to 40 blocks each, admitted with 10 each into a pool of 64.
    let requests = (0..4).map(|n| request(640, 1900, n * 10)).collect();
    let report = replay(&small(64), &Trace::new(requests));
    assert!(report.preemptions > 0, "{report:?}");
    assert_eq!(report.generated_tokens, 4 * 1900);
}

#[test]
fn layers_and_heads_are_placed_on_two_and_four_devices_and_every_byte_is_right() {
    let trace = short_answers(6, 5);
    let shape = KvModelShape { layers: 5, kv_heads: 4, head_size: 4, dtype: Dtype::Bf16 };
    let config = RunConfig { shape, host_blocks: 512, ..small(2600) };
    let one = replay_on("sim", &config, &trace);
    assert_eq!(one.placement, None);
    for devices in [2, 4] {
        for place in ["layers", "layers:round-robin", "layers:free-memory", "heads"] {
            let config = RunConfig { place: place.parse().unwrap(), ..config.clone() };
            let several = replay_on(&format!("sim:{devices}"), &config, &trace);
            assert_eq!(several.verified_blocks, devices * one.verified_blocks, "{place}");
            assert_eq!(several.bytes_transferred, one.bytes_transferred, "{place}");
            assert_eq!(several.block_hits, one.block_hits, "{place}");
            let placed = several.placement.unwrap();
            assert_eq!(placed.place, place);
            let placement: Placement = placed.placement.parse().unwrap();
            assert_eq!(placement.gpus().len() as u64, devices);
            assert_eq!(placement.explain().to_string(), placed.explanation.join("\n"));
        }
    }
    // Everything fits on one device, so no activations need to be handed over.
    let place = "layers:least-cost".parse().unwrap();
    let cheapest = replay_on("sim:4", &RunConfig { place, ..config }, &trace);
    assert_eq!(cheapest.verified_blocks, one.verified_blocks);
}

#[test]
fn nothing_is_pinned_or_mapped_after_the_pool_has_grown() {
    let trace = generate(&GenerateOptions { requests: 16, seed: 2 }).unwrap();
    let config = RunConfig { host_blocks: 4096, ..small(2600) };
    let report = replay(&config, &trace);
    assert_eq!(report.pinned_bytes_allocated_after_warmup, Some(0));
    // A block is 1 KiB, so two pages of 2 MiB hold all of the pool.
    assert_eq!(report.driver_calls["cuMemMap"], 2);
    assert!(report.iterations > 500);
}

#[test]
fn a_run_follows_from_its_seed_and_a_sample_is_a_part_of_it() {
    let trace = short_answers(20, 9);
    let config = RunConfig { host_blocks: 1024, ..small(2600) };
    let one = replay(&config, &trace);
    let again = replay(&config, &trace);
    assert_eq!(untimed(one.clone()), untimed(again));
    let sample = replay(&RunConfig { verify: Verify::Sample, ..config.clone() }, &trace);
    assert!(sample.verified_blocks > 0);
    assert!(sample.verified_blocks * 8 < one.verified_blocks, "{}", sample.verified_blocks);
    let none = replay(&RunConfig { verify: Verify::None, ..config }, &trace);
    assert_eq!((none.verified_blocks, none.iterations), (0, one.iterations));
}

#[test]
fn every_policy_serves_every_request_and_equal_runs_evict_alike() {
    let trace = short_answers(60, 3);
    let hits = PolicyKind::ALL.map(|policy| {
        let config = RunConfig { policy, host_blocks: 400, ..small(2600) };
        let report = replay(&config, &trace);
        assert_eq!(report.policy, policy.name());
        assert!(report.blocks_evicted > 1000, "{policy}: {report:?}");
        assert_eq!(untimed(report.clone()), untimed(replay(&config, &trace)));
        report.block_hits
    });
    assert!(hits.iter().any(|&other| other != hits[0]), "the policies decide alike: {hits:?}");
}

#[test]
fn what_the_budget_has_room_for_is_admitted_in_one_batch() {
    let requests = (0..6).map(|n| request(600, 3, n * 10)).collect();
    let report = replay(&small(256), &Trace::new(requests));
    // 2,048 tokens: three prompts and the beginning of a fourth. The others come later.
    assert_eq!(report.most_admitted_at_once, 4);
    assert_eq!((report.admissions, report.block_lookups), (2, 6 * 9));
    // There is room for two of them at a time, so the batch is reduced until it fits.
    let requests = (0..6).map(|n| request(600, 3, n * 10)).collect();
    let report = replay(&small(22), &Trace::new(requests));
    assert_eq!(report.most_admitted_at_once, 2);
}

#[test]
fn every_interleaving_of_the_streams_gives_the_same_blocks() {
    let trace = short_answers(10, 4);
    for seed in 0..5 {
        let config = RunConfig { seed, host_blocks: 512, ..small(2200) };
        replay(&config, &trace);
    }
}

/// Number of calls that bind a context, and of all calls.
fn calls(report: &RunReport) -> (u64, u64) {
    let binds = report.driver_calls.iter().filter(|(name, _)| name.starts_with("cuCtx"));
    (binds.map(|(_, count)| count).sum(), report.driver_calls.values().sum())
}

#[test]
fn every_transport_serves_every_request_alike_and_batches_take_fewer_calls() {
    let trace = short_answers(40, 3);
    let config = RunConfig { host_blocks: 4096, store: StoreKind::All, ..small(2600) };
    let by = |transport| replay(&RunConfig { transport, ..config.clone() }, &trace);
    let each = by(TransportChoice::EachBlock);
    let moved = each.blocks_offloaded + each.blocks_onboarded;
    assert!(each.blocks_offloaded > 1000 && each.blocks_onboarded > 50, "{each:?}");
    for choice in TransportChoice::ALL {
        let report = by(choice);
        assert_eq!(report.transport, choice.name());
        let carried: u64 = report.transports.values().map(|way| way.blocks).sum();
        assert_eq!(carried, moved, "{choice}");
        if !matches!(choice.name(), "each-block" | "two-hop") {
            assert!(calls(&report).1 + moved / 2 < calls(&each).1, "{choice}: {report:?}");
        }
        // Everything else is the same: lookups, evictions, writes, reads and verification.
        let alike = RunReport {
            transport: each.transport,
            transports: each.transports.clone(),
            driver_calls: each.driver_calls.clone(),
            predicted_s: each.predicted_s,
            // When ids arrive is a matter of time.
            staged_behind_open_ids: each.staged_behind_open_ids,
            ..report
        };
        assert_eq!(untimed(alike), untimed(each.clone()), "{choice}");
    }
}

#[test]
fn the_thread_that_drives_devices_binds_their_contexts_seldom() {
    let trace = short_answers(20, 3);
    let config = RunConfig { shape: KvModelShape { layers: 2, ..small(1).shape }, ..small(2600) };
    let one = replay(&config, &trace);
    let (binds, all) = calls(&one);
    // Contexts are bound only for opening, building and closing.
    assert!(binds < 200 && binds < all / 10, "{binds} of {all}");
    let two = replay_on("sim:2", &config, &trace);
    let (binds, all) = calls(&two);
    assert!(binds < all * 2 / 5, "{binds} of {all}");
}

struct Watch(Vec<ProgressState>);

impl Progress for Watch {
    fn update(&mut self, state: &ProgressState) {
        self.0.push(state.clone());
    }
}

#[test]
fn progress_is_told_in_every_iteration() {
    let trace = Trace::new(vec![request(100, 3, 0), request(64, 2, 5)]);
    let config = small(8);
    let devices = devices("sim", &config);
    let mut watch = Watch(Vec::new());
    let report = engine::run(&config, &trace, &devices, &mut watch).unwrap();
    let last = watch.0.last().unwrap();
    assert_eq!((last.finished, last.requests), (2, 2));
    assert_eq!(last.verified_blocks, report.verified_blocks);
    assert!(watch.0.len() as u64 >= report.iterations);
    assert!(watch.0.iter().any(|state| state.running == 2 && state.device_blocks_in_use > 0));
}

#[test]
fn every_byte_is_right_on_devices_that_are_always_late_or_never() {
    let trace = short_answers(6, 5);
    let config = RunConfig { host_blocks: 512, ..small(2200) };
    for device in ["sim", "sim:2"] {
        let shape = KvModelShape { layers: 2, ..config.shape };
        let config = RunConfig { shape, ..config.clone() };
        for pace in [Pace::Slowest, Pace::OneBehind, Pace::Fastest] {
            let devices = devices(device, &config);
            devices.sim.as_ref().unwrap().set_pace(pace);
            let report = engine::run(&config, &trace, &devices, &mut ()).unwrap();
            assert_eq!((report.finished, report.corrupt_blocks), (6, 0), "{pace:?}");
            assert!(report.verified_blocks > 100);
        }
    }
}

/// Pins memory in the iteration that ends the warm-up, and counts the updates for that iteration.
struct Pins<'a> {
    device: &'a Device,
    pinned: Vec<PinnedBuffer>,
    updates_then: u32,
}

impl Progress for Pins<'_> {
    fn update(&mut self, state: &ProgressState) {
        if state.iterations == 4 {
            self.updates_then += 1;
            if self.pinned.is_empty() {
                let flags = HostAllocFlags::CACHED;
                self.pinned.push(PinnedBuffer::alloc(self.device, 4096, flags).unwrap());
            }
        }
    }
}

#[test]
fn memory_pinned_after_the_warm_up_is_counted_from_its_end() {
    // One request at a time: four iterations each, and an idle one until its last token was
    // compared.
    let requests = vec![request(100, 3, 0), request(100, 3, 5)];
    let config = RunConfig { max_batch: 1, ..small(8) };
    let devices = devices("sim", &config);
    // There is something to compare when all is computed.
    devices.sim.as_ref().unwrap().set_pace(Pace::Slowest);
    let mut pins = Pins { device: &devices.devices[0], pinned: Vec::new(), updates_then: 0 };
    let report = engine::run(&config, &Trace::new(requests), &devices, &mut pins).unwrap();
    assert_eq!(report.iterations, 8);
    assert!(pins.updates_then > 1, "no idle iteration followed");
    assert_eq!(report.pinned_bytes_allocated_after_warmup, Some(4096));
    let report = replay(&config, &Trace::new(vec![request(100, 2, 0)]));
    assert_eq!((report.iterations, report.pinned_bytes_allocated_after_warmup), (3, None));
}

/// Fills unmapped addresses, which a device may or may not survive.
struct FillsUnmapped<'a>(&'a Device);

impl Progress for FillsUnmapped<'_> {
    fn update(&mut self, state: &ProgressState) {
        if state.iterations == 1 {
            let bytes = PhysicalMemory::granularity(self.0).unwrap();
            let addresses = AddressRange::reserve(self.0, bytes).unwrap();
            let span = addresses.span(0, 4096).unwrap();
            assert!(Stream::new(self.0).unwrap().fill(span, 0).is_err());
        }
    }
}

#[test]
fn a_finding_of_the_simulated_device_fails_the_run() {
    let trace = Trace::new(vec![request(100, 3, 0)]);
    let devices = devices("sim", &small(8));
    let mut fills = FillsUnmapped(&devices.devices[0]);
    let failed = engine::run(&small(8), &trace, &devices, &mut fills).unwrap_err();
    assert!(matches!(failed, RunError::Findings { count: 1, .. }), "{failed:?}");
}

#[test]
fn what_nobody_checked_is_refused_and_not_played() {
    let devices = devices("sim", &small(8));
    let refusal = |config: &RunConfig, request: Request| {
        let trace = Trace::new(vec![request]);
        engine::run(config, &trace, &devices, &mut ()).unwrap_err().to_string()
    };
    let good = request(100, 3, 0);
    for (found, expected) in [
        (
            refusal(&RunConfig { block_tokens: 768, ..small(8) }, good.clone()),
            "--block-tokens is 768, expected a divisor or a multiple of 512, the tokens of a hash id in the trace",
        ),
        (
            refusal(&RunConfig { step_tokens: 0, ..small(8) }, good.clone()),
            "--step-tokens is 0, expected at least 1",
        ),
        (
            refusal(&small(8), Request { hash_ids: vec![], ..good.clone() }),
            "request 0, counted from 0: hash_ids has 0 ids, but input_length 100 makes 1 blocks of 512 tokens",
        ),
        (
            refusal(&small(8), Request { output_length: u64::MAX, ..good }),
            "request 0, counted from 0: output_length is 18446744073709551615, more than the largest allowed, 2147483648",
        ),
    ] {
        assert_eq!(found, expected);
    }
}

#[test]
fn a_slower_machine_is_predicted_to_take_longer() {
    let config = small(1024);
    let trace = generate(&GenerateOptions { requests: 6, seed: 4 }).unwrap();
    let predicted = |profile: &str| {
        let profile = Profile::parse(profile).unwrap();
        let sizes = SimSizes { profile, ..SimSizes::for_config(&config) };
        let devices = open(&"sim".parse().unwrap(), sizes).unwrap();
        devices.sim.as_ref().unwrap().set_pace(Pace::Slowest);
        let report = engine::run(&config, &trace, &devices, &mut ()).unwrap();
        (report.iterations, report.predicted_s.unwrap())
    };
    let (iterations, fast) = predicted("base = h100");
    // In each iteration the host waits for the end, which takes a millisecond longer.
    let (same, slow) = predicted("wait_latency = 1.0008 ms");
    assert_eq!(iterations, same);
    assert!(slow > fast && slow < fast + 1e-3 * (iterations as f64 * 2.0 + 10.0), "{fast} {slow}");
    let (_, slower_kernels) = predicted("kernel_load = 1 GB/s");
    assert!(slower_kernels > 2.0 * fast, "{fast} {slower_kernels}");
}
