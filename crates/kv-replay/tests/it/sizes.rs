//! Sizes and counts of the library and the program, at 0, 1, a usual value, the maximum, and values whose products overflow: each
//! is accepted or refused with a typed error, without panic, abort or hang, in bounded memory.

use std::process::{Command, Stdio};

use crate::common::{devices, request};
use cuda_sim::Profile;
use kv_replay::config::{ModelCost, RunConfig};
use kv_replay::device::{DeviceSpec, SimSizes, open};
use kv_replay::disk::DiskConfig;
use kv_replay::engine;
use kv_replay::nodes::NodeConfig;
use kv_replay::place;
use kv_replay::report::RunReport;
use kv_replay::rng::SplitMix64;
use kv_replay::series::Histogram;
use kv_replay::shape::KvModelShape;
use kv_replay::trace::{LENGTH_MAX_TOKENS, ReadOptions, Request, Trace};

const U32: [u32; 7] = [0, 1, 2, 7, 1 << 16, 1 << 31, u32::MAX];
const U64: [u64; 9] = [0, 1, 2, 4096, 1 << 31, 1 << 40, i64::MAX as u64, u64::MAX - 1, u64::MAX];

fn small() -> RunConfig {
    RunConfig {
        block_tokens: 64,
        device_blocks: 32,
        host_blocks: 8,
        max_batch: 2,
        step_tokens: 512,
        ..RunConfig::default()
    }
}

fn trace() -> Trace {
    Trace::new([0, 1].map(|id| request(200, 2, id)).into())
}

/// Uses a configuration in every possible way; returns whether it could be run.
fn try_config(config: &RunConfig) -> bool {
    let trace = trace();
    let checked = config.check().is_ok() && config.check_trace(&trace).is_ok();
    let divides =
        [0, 1, 2, 3, 1 << 20, usize::MAX].map(|devices| config.check_devices(devices).is_ok());
    assert_eq!(
        RunReport::new(config, "sim").is_ok(),
        config.shape.block_bytes(config.block_tokens).is_ok()
    );
    assert_eq!(config.block_bytes().is_ok(), config.shape.block_bytes(config.block_tokens).is_ok());
    for (devices, divides) in [(1, divides[1]), (2, divides[2])] {
        let spec = DeviceSpec::Sim { devices };
        let Ok(opened) = open(&spec, SimSizes::for_config(config)) else { continue };
        let _ = place::place(config, &opened.devices);
        let fits = opened.check_fits(config).is_ok();
        if checked && !fits {
            // The simulated device needs some bytes for each page of a reservation, which exceeds
            // the bound.
            continue;
        }
        // Written bytes take memory of this process.
        let is_small = config.block_bytes().is_ok_and(|bytes| bytes <= 1 << 20);
        let outcome = engine::build_cache(config, &trace, &opened).and_then(|cache| {
            assert!(checked && divides && fits, "{config:?} on {devices}");
            match is_small {
                true => engine::run_on(cache, config, &trace, &opened, &mut ()).map(Some),
                false => Ok(None),
            }
        });
        match outcome {
            Ok(None) => {}
            Ok(Some(report)) => assert_eq!((report.finished, report.corrupt_blocks), (2, 0)),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
    checked && divides[1]
}

#[test]
fn shared_memory_and_states_of_any_size() {
    let states = RunConfig { state_layers: 2, ..small() };
    let mut played = 0;
    // Many millions of blocks of a few bytes, which fit between these sizes, take more than the bound.
    for bytes in [0, 1, 4096, 1 << 22, 1 << 24, 1 << 26, 1 << 60, 1 << 62, u64::MAX] {
        let shared = RunConfig { device_memory: Some(bytes), ..states.clone() };
        played += usize::from(try_config(&shared));
        for state_tokens in [0, 7, u32::MAX] {
            try_config(&RunConfig { state_tokens, ..shared.clone() });
        }
    }
    for state_tokens in U32 {
        played += usize::from(try_config(&RunConfig { state_tokens, ..states.clone() }));
    }
    assert!(played > 8, "{played}");
}

#[test]
fn configurations_alone_and_in_pairs() {
    type Setter = fn(&mut RunConfig, u64);
    let setters: [Setter; 8] = [
        |config, value| config.device_blocks = value,
        |config, value| config.host_blocks = value,
        |config, value| config.max_batch = value.min(u32::MAX.into()) as u32,
        |config, value| config.step_tokens = value.min(u32::MAX.into()) as u32,
        |config, value| config.block_tokens = value.min(u32::MAX.into()) as u32,
        |config, value| config.shape.layers = value.min(u32::MAX.into()) as u32,
        |config, value| config.shape.kv_heads = value.min(u32::MAX.into()) as u32,
        |config, value| config.shape.head_size = value.min(u32::MAX.into()) as u32,
    ];
    let (mut played, mut refused) = (0, 0);
    let mut count = |config: RunConfig| match try_config(&config) {
        true => played += 1,
        false => refused += 1,
    };
    for (index, set) in setters.iter().enumerate() {
        for value in U64 {
            let mut config = small();
            set(&mut config, value);
            count(config.clone());
            // Between the least and the most, one number at a time.
            let others = &setters[index + 1..];
            for set_other in others.iter().filter(|_| matches!(value, 0 | 1 | u64::MAX)) {
                for other in [0, u64::MAX] {
                    let mut config = config.clone();
                    set_other(&mut config, other);
                    count(config);
                }
            }
        }
    }
    for seed in U64 {
        count(RunConfig { seed, ..small() });
    }
    for place in ["heads", "layers:round-robin", "layers:free-memory", "layers:least-cost"] {
        for (layers, kv_heads) in [(1, 1), (2, 2), (1 << 16, 1), (1, 1 << 16), (u32::MAX, u32::MAX)]
        {
            let shape = KvModelShape { layers, kv_heads, ..small().shape };
            count(RunConfig { place: place.parse().unwrap(), shape, ..small() });
        }
    }
    assert!(played > 30 && refused > 100, "{played} played, {refused} refused");
}

#[test]
fn machines() {
    for text in [
        "sim:0",
        "sim:1",
        "sim:32",
        "sim:33",
        "sim:4294967295",
        "sim:4294967296",
        "cuda:2147483647",
        "cuda:2147483648",
    ] {
        let Ok(spec) = text.parse::<DeviceSpec>() else { continue };
        if matches!(spec, DeviceSpec::Sim { .. }) {
            let _ = open(&spec, SimSizes::for_config(&small()));
        }
    }
    for device_bytes in U64 {
        for pinned_bytes in U64 {
            let sizes =
                SimSizes { device_bytes, pinned_bytes, seed: u64::MAX, profile: Profile::h100() };
            let Ok(opened) = open(&DeviceSpec::default(), sizes) else { continue };
            if let Err(error) = engine::run(&small(), &trace(), &opened, &mut ()) {
                assert!(!error.to_string().is_empty());
            }
        }
    }
}

#[test]
fn lengths_of_requests() {
    let opened = devices("sim", &small());
    for input_length in U64.into_iter().chain([LENGTH_MAX_TOKENS, LENGTH_MAX_TOKENS + 1]) {
        for output_length in U64.into_iter().chain([LENGTH_MAX_TOKENS]) {
            for timestamp_ms in [0, u64::MAX] {
                let hash_ids = vec![u64::MAX; input_length.div_ceil(512).min(1 << 10) as usize];
                let request =
                    Request { timestamp_ms, input_length, output_length, hash_ids, tenant: None };
                let trace = Trace::new(vec![request]);
                let checked = trace.requests[0].check(trace.block_tokens).is_ok();
                let played = engine::run(&small(), &trace, &opened, &mut ());
                assert!(checked || played.is_err());
            }
        }
    }
    for requests_max in [0, 1, 2, usize::MAX] {
        assert_eq!(trace().limit(requests_max).requests.len(), requests_max.min(2));
    }
}

#[test]
fn tokens_of_a_hash_id() {
    let line =
        "{\"timestamp\": 0, \"input_length\": 700, \"output_length\": 2, \"hash_ids\": [0, 1]}\n";
    for tokens in U64.into_iter().chain([350, 512, 699, 700]) {
        let options = ReadOptions { block_tokens: Some(tokens), skip_unusable: tokens % 2 == 0 };
        let read = Trace::parse_with(line.as_bytes(), "text", &options);
        let in_range = (1..=LENGTH_MAX_TOKENS).contains(&tokens);
        assert!(in_range || read.is_err(), "{tokens}");
        assert!(Trace::read_with(std::path::Path::new("/absent"), &options).is_err());
        let trace = Trace { block_tokens: tokens, ..trace() };
        let checked = small().check_trace(&trace).is_ok();
        let opened = devices("sim", &small());
        let played = engine::run(&small(), &trace, &opened, &mut ());
        assert!(checked || played.is_err(), "{tokens}");
    }
}

#[test]
fn costs_of_a_model() {
    for prefill_tokens_per_s in U64 {
        for decode_step_us in U64 {
            let cost = ModelCost { prefill_tokens_per_s, decode_step_us };
            for tokens in U64 {
                assert!(cost.of_iteration(tokens, false) <= cost.of_iteration(tokens, true));
            }
        }
        let model = ModelCost { prefill_tokens_per_s, decode_step_us: prefill_tokens_per_s };
        let config = RunConfig { open_loop: true, model, ..small() };
        let opened = devices("sim", &config);
        let report = engine::run(&config, &trace(), &opened, &mut ()).unwrap();
        assert_eq!(report.finished, 2, "{model:?}");
    }
}

#[test]
fn random_numbers() {
    for seed in U64 {
        let mut random = SplitMix64::new(seed);
        for low in U64 {
            assert!(low == 0 || random.below(low) < low);
            for high in U64 {
                let number = random.between(low, high);
                assert!(number >= low && (number <= high || high < low), "{low} {high}: {number}");
            }
            for octaves in U32 {
                let number = random.octaves(low, octaves);
                assert!(number >= low, "{low} {octaves}: {number}");
            }
            let _ = random.percent(low);
        }
    }
}

/// The exit status of the program, whose memory is limited.
fn status_of(args: &[&str]) -> Option<i32> {
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -v 8388608; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_kv-replay")]);
    command.args(args).stdout(Stdio::null()).stderr(Stdio::null());
    command.env("CUDA_VISIBLE_DEVICES", "-1").status().unwrap().code()
}

#[test]
fn numbers_of_the_command_line() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace.jsonl");
    std::fs::write(&trace, crate::common::GOOD).unwrap();
    let trace = trace.to_str().unwrap();
    let run = ["--trace", trace, "--device-blocks", "64", "--host-blocks", "0"];
    for option in [
        "--layers",
        "--kv-heads",
        "--head-size",
        "--block-tokens",
        "--device-blocks",
        "--host-blocks",
        "--max-batch",
        "--step-tokens",
        "--requests",
        "--seed",
        "--trace-block-tokens",
        "--prefill-rate",
        "--decode-step-us",
        "--worker-timeout",
    ] {
        for value in
            ["0", "1", "4294967295", "4294967296", "18446744073709551615", "18446744073709551616"]
        {
            if (option, value) == ("--worker-timeout", "1") {
                // On a busy machine a process may take longer to begin.
                continue;
            }
            // A repeated option would be refused.
            let rest = run.chunks(2).filter(|pair| pair[0] != option).flatten().copied();
            let workers = ["--workers", "1"].into_iter().filter(|_| option == "--worker-timeout");
            let all = ["run"].into_iter().chain(rest).chain(workers);
            let args: Vec<&str> = all.chain([option, value]).collect();
            let status = status_of(&args);
            assert!(matches!(status, Some(0 | 2)), "{args:?} ended with {status:?}");
        }
    }
    for value in ["0", "1", "64", "65", "65535", "65536"] {
        // Every worker of 64 would need a layer.
        let status = status_of(&[&["run", "--layers", "1", "--workers", value], &run[..]].concat());
        assert!(matches!(status, Some(0 | 2)), "{value} workers ended with {status:?}");
    }
    for value in ["0@18446744073709551615:1", "0@1:18446744073709551615", "65536@1:1"] {
        for (drill, value) in [("stop-worker", value), ("kill-worker", &value[..value.len() - 2])] {
            let drill = format!("--drill={drill}={value}");
            let workers = ["run", "--workers", "1", "--worker-timeout", "1", &drill];
            let status = status_of(&[&workers, &run[..]].concat());
            // A step that never comes fails the run. The wait of a stop is bounded by the timeout.
            assert!(matches!(status, Some(0..=2)), "{drill} ended with {status:?}");
        }
    }
    for value in ["sim:0", "sim:1", "sim:33", "sim:4294967296", "cuda:2147483648"] {
        let status = status_of(&[&["run"], &run[..], &["--device", value]].concat());
        assert!(matches!(status, Some(0 | 2)), "{value} ended with {status:?}");
    }
    for value in ["0", "1", "18446744073709551615", "18446744073709551616"] {
        for args in [["generate", "--requests", value], ["generate", "--seed", value]] {
            let status = status_of(&args);
            assert!(matches!(status, Some(0 | 2)), "{args:?} ended with {status:?}");
        }
    }
}

#[test]
fn files_below_the_host_of_any_size_are_opened_or_refused() {
    let folder = std::env::temp_dir().join(format!("kv-replay-sizes-{}", std::process::id()));
    for bytes in [0, 1, 8192, 1 << 20, u64::MAX] {
        let disk = DiskConfig::new(folder.clone(), bytes);
        let config = RunConfig { disk: Some(disk), ..RunConfig::default() };
        assert_eq!(config.check(), Ok(()));
        let opened = engine::build_cache(&config, &trace(), &devices("sim", &config));
        assert_eq!(opened.is_ok(), bytes == 1 << 20, "{bytes}: {:?}", opened.err());
    }
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn nodes_of_any_numbers_are_started_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    let key = kv_remote::Key::new(&[1; 16]).unwrap();
    for (index, bytes) in [(0, 0), (0, 1), (u16::MAX, 1 << 20), (0, u64::MAX)] {
        assert_ne!(
            NodeConfig::own_socket(folder.path(), index),
            NodeConfig::socket_through_wall(folder.path(), index, index)
        );
        let node = NodeConfig::new(index, 0, folder.path(), key.clone(), bytes);
        let config = RunConfig { node: Some(node), ..RunConfig::default() };
        assert_eq!(config.check(), Ok(()));
        let built = engine::build_cache(&config, &trace(), &devices("sim", &config));
        // Memory for one record at least.
        assert_eq!(built.is_ok(), bytes == 1 << 20, "{bytes}");
    }
    for value in ["0", "1@0", "65", "65535", "65536"] {
        let status = status_of(&["run", "--nodes", value]);
        assert_eq!(status, Some(2), "{value}");
    }
}

#[test]
fn histograms() {
    let mut histogram = Histogram::default();
    let sizes = [0, 1, 7, 8, 1 << 32, u64::MAX - 1, u64::MAX];
    for value in sizes {
        for times in sizes {
            histogram.add(value, times);
            let report = histogram.report();
            assert!(report.p50 <= report.p99 && report.p999 <= report.max, "{value} {times}");
        }
    }
}
