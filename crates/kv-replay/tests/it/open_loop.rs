//! Requests wait for their arrival by virtual time, and the latencies that a run reports are those that the trace, the
//! profile and the cost of the model make.

use crate::common::devices;
use kv_replay::config::{ModelCost, RunConfig, Verify};
use kv_replay::engine;
use kv_replay::report::{LatencyReport, OpenLoopReport, RunReport};
use kv_replay::trace::{Request, Trace};

/// A model that computes 1,000 prompt tokens a second, and takes 100 ms for each iteration that generates.
const MODEL: ModelCost = ModelCost { prefill_tokens_per_s: 1000, decode_step_us: 100_000 };

/// How much longer than the model anything may take, in milliseconds: calls, copies and kernels of the profile. The first
/// iteration also loads a module, which takes 10 ms.
const BESIDE_MS: f64 = 50.0;

fn config() -> RunConfig {
    RunConfig {
        block_tokens: 64,
        device_blocks: 64,
        host_blocks: 64,
        max_batch: 2,
        step_tokens: 512,
        verify: Verify::Full,
        open_loop: true,
        model: MODEL,
        ..RunConfig::default()
    }
}

fn request(timestamp_ms: u64, input_length: u64, output_length: u64, first_id: u64) -> Request {
    Request { timestamp_ms, ..crate::common::request(input_length, output_length, first_id) }
}

fn replay(config: &RunConfig, requests: Vec<Request>) -> RunReport {
    let devices = devices("sim", config);
    engine::run(config, &Trace::new(requests), &devices, &mut ()).unwrap()
}

fn latencies(config: &RunConfig, requests: Vec<Request>) -> OpenLoopReport {
    let count = requests.len() as u64;
    let report = replay(config, requests);
    assert_eq!((report.finished, report.corrupt_blocks), (count, 0));
    report.open_loop.unwrap()
}

#[track_caller]
fn assert_about(found: f64, expected: f64) {
    assert!((expected..expected + BESIDE_MS).contains(&found), "{found} ms, expected {expected}");
}

#[test]
fn a_request_alone_takes_what_the_model_takes() {
    let open = latencies(&config(), vec![request(5000, 500, 11, 0)]);
    assert_about(open.time_to_first_token_ms.p50, 500.0);
    // The engine also computes the KV of the last token.
    assert_about(open.end_to_end_ms.max, 500.0 + 1100.0);
    assert_about(open.time_per_output_token_ms.p50, 110.0);
    assert!(open.queued_ms.max < BESIDE_MS);
    assert_about(open.elapsed_s * 1e3, 5000.0 + 1600.0);
    assert_eq!((open.prefill_tokens_per_s, open.decode_step_us), (1000, 100_000));
}

#[test]
fn requests_do_not_start_before_they_arrive() {
    let far = vec![request(0, 500, 2, 0), request(60_000, 500, 2, 8)];
    let open = latencies(&config(), far.clone());
    assert_about(open.time_to_first_token_ms.max, 500.0);
    assert_about(open.elapsed_s * 1e3, 60_000.0 + 700.0);
    let closed = replay(&RunConfig { open_loop: false, ..config() }, far);
    assert!(closed.open_loop.is_none());
    assert!(closed.predicted_s.unwrap() < 2.0, "{:?}", closed.predicted_s);
}

#[test]
fn a_queue_shows_in_the_time_to_the_first_token() {
    let alone = RunConfig { max_batch: 1, ..config() };
    let two = vec![request(0, 500, 101, 0), request(100, 500, 2, 8)];
    let open = latencies(&alone, two);
    // The second waits for 500 ms of prompt and 101 steps of the first.
    assert_about(open.queued_ms.max, 500.0 + 10_100.0 - 100.0);
    assert_about(open.time_to_first_token_ms.max, 11_000.0);
    assert_about(open.time_to_first_token_ms.p50, 500.0);
}

#[test]
fn a_cached_prefix_is_not_computed() {
    let twice = vec![request(0, 2000, 2, 0), request(10_000, 2000, 2, 0)];
    let open = latencies(&config(), twice);
    assert_about(open.time_to_first_token_ms.max, 2000.0);
    // 31 blocks of 64 tokens are found; the last, which is part full, is computed.
    assert_about(open.time_to_first_token_ms.p50, 16.0);
}

#[test]
fn each_tenant_has_its_own_figures() {
    let of = |tenant: Option<&str>, request: Request| Request {
        tenant: tenant.map(Into::into),
        ..request
    };
    let requests = vec![
        of(Some("a"), request(0, 2000, 2, 0)),
        of(Some("b"), request(10_000, 1000, 3, 50)),
        of(None, request(20_000, 500, 4, 70)),
        of(Some("a"), request(30_000, 2000, 2, 0)),
    ];
    let report = replay(&config(), requests.clone());
    assert_eq!(report.tenants.keys().collect::<Vec<_>>(), ["a", "b"]);
    let [a, b] = ["a", "b"].map(|name| &report.tenants[name]);
    assert_eq!((a.finished, a.prompt_tokens, a.generated_tokens), (2, 4000, 4));
    assert_eq!((b.finished, b.prompt_tokens, b.generated_tokens), (1, 1000, 3));
    // 31 full blocks of 64 tokens, asked for twice and found once.
    assert_eq!((a.block_lookups, a.block_hits, a.prefix_tokens_reused), (62, 31, 1984));
    assert_eq!((b.block_lookups, b.block_hits, b.hit_rate()), (15, 0, 0.0));
    assert_eq!(a.hit_rate(), 0.5);
    assert_about(a.time_to_first_token_p50_ms.unwrap(), 16.0);
    assert_about(a.time_to_first_token_p99_ms.unwrap(), 2000.0);
    assert_about(b.time_to_first_token_p50_ms.unwrap(), 1000.0);
    assert!(report.summary().contains("2, with hit rates from 0.0 % (b) to 50.0 % (a)"));
    let closed = replay(&RunConfig { open_loop: false, ..config() }, requests);
    assert_eq!(closed.tenants["b"].time_to_first_token_p50_ms, None);
}

#[test]
fn runs_repeat_exactly() {
    let trace = || (0..12).map(|n| request(40 * n, 300 + 50 * n, 5 + n, 8 * (n % 5))).collect();
    let life = kv_replay::config::Life { suspend: 5, cancel: 5, ..Default::default() };
    let config = RunConfig { life, device_blocks: 24, ..config() };
    let first = replay(&config, trace());
    assert_eq!(first.open_loop, replay(&config, trace()).open_loop);
    let LatencyReport { count, .. } = first.open_loop.unwrap().end_to_end_ms;
    assert_eq!(count, first.finished);
}

#[test]
fn several_processes_have_no_clock_in_common() {
    let refused = |change: &dyn Fn(&mut RunConfig)| {
        let mut config = RunConfig { open_loop: false, model: ModelCost::default(), ..config() };
        assert_eq!(config.check_untimed(), Ok(()));
        change(&mut config);
        config.check_untimed().unwrap_err().to_string()
    };
    assert_eq!(
        refused(&|config| config.model.decode_step_us = 7),
        "--decode-step-us 7 cannot be combined with --workers"
    );
    assert!(refused(&|config| config.open_loop = true).starts_with("--open-loop"));
}

/// As on a GPU, but that its clock counts instructions: arrivals are waited for by the host's clock, and a kernel stands for
/// the model.
#[test]
fn without_virtual_time_the_hosts_clock_and_a_kernel_take_its_place() {
    let model = ModelCost { prefill_tokens_per_s: 1_000_000_000, decode_step_us: 1 };
    let transport = kv_plane::TransportChoice::EachBlock;
    // One at a time, however long this machine takes for the first.
    let config = RunConfig { model, transport, max_batch: 1, ..config() };
    let launches = |config: &RunConfig, requests: Vec<Request>| {
        let devices = devices("sim", config);
        let devices = kv_replay::device::OpenDevices { sim: None, ..devices };
        let report = engine::run(config, &Trace::new(requests), &devices, &mut ()).unwrap();
        assert_eq!((report.finished, report.corrupt_blocks), (2, 0));
        let launches = report.driver_calls["cuLaunchKernel"];
        (launches, report)
    };
    let requests = vec![request(30, 500, 11, 0), request(90, 500, 11, 0)];
    let (with, report) = launches(&config, requests.clone());
    let open = report.open_loop.unwrap();
    assert_eq!(open.clock, "host");
    // The second does not come before it arrives.
    assert!(open.elapsed_s >= 0.09, "{}", open.elapsed_s);
    assert_eq!(open.time_to_first_token_ms.count, 2);
    let iterations = report.iterations;
    let (without, free) = launches(&RunConfig { model: ModelCost::default(), ..config }, requests);
    assert_eq!(free.iterations, iterations);
    // One of each iteration, and one before the first.
    assert_eq!(with, without + iterations + 1);
}

#[test]
fn an_iteration_that_would_keep_a_gpu_for_minutes_is_refused() {
    let refused = |model| {
        // Not measured, which takes minutes where kernels count instructions.
        let transport = kv_plane::TransportChoice::EachBlock;
        let config = RunConfig { model, transport, ..config() };
        let devices = devices("sim", &config);
        let devices = kv_replay::device::OpenDevices { sim: None, ..devices };
        let trace = Trace::new(vec![request(0, 100, 2, 0)]);
        engine::run(&config, &trace, &devices, &mut ()).unwrap_err().to_string()
    };
    let slow = ModelCost { prefill_tokens_per_s: 8, decode_step_us: 0 };
    let said = refused(slow);
    assert!(said.contains("takes up to 64 s, more than 60 s on a GPU"), "{said}");
    assert!(said.contains("--prefill-rate"), "{said}");
    refused(ModelCost { decode_step_us: u64::MAX, ..slow });
}

#[test]
fn blocks_larger_and_smaller_than_those_of_the_trace_share_what_is_equal() {
    let request = |hash_ids: &[u64], input_length| Request {
        timestamp_ms: 0,
        input_length,
        output_length: 2,
        hash_ids: hash_ids.to_vec(),
        tenant: None,
    };
    let ids: Vec<u64> = (0..12).collect();
    let mut other = ids.clone();
    other[7] = 99;
    for (block_tokens, hits) in
        [(16, 4 * 11 + 3 + 4 * 7), (64, 11 + 7), (128, 5 + 3), (192, 3 + 2), (256, 2 + 1)]
    {
        let config = RunConfig {
            block_tokens,
            max_batch: 1,
            open_loop: false,
            device_blocks: 256,
            ..config()
        };
        let requests = vec![request(&ids, 768), request(&ids, 768), request(&other, 768)];
        let trace = Trace { block_tokens: 64, ..Trace::new(requests) };
        let devices = devices("sim", &config);
        let report = engine::run(&config, &trace, &devices, &mut ()).unwrap();
        assert_eq!((report.finished, report.corrupt_blocks), (3, 0), "{block_tokens}");
        assert_eq!(report.block_hits, hits, "{block_tokens}");
    }
}
