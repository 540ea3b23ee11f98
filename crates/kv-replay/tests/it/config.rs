//! Options are checked before anything is allocated, and an error names the option and its value.

use kv_replay::config::RunConfig;
use kv_replay::trace::{Request, Trace};

fn message(change: impl FnOnce(&mut RunConfig)) -> String {
    let mut config = RunConfig::default();
    change(&mut config);
    config.check().map_or_else(|error| error.to_string(), |()| "fine".to_owned())
}

#[test]
fn each_option_is_named_with_its_value() {
    for (found, expected) in [
        (message(|c| c.device_blocks = 0), "--device-blocks is 0, expected at least 1"),
        (message(|c| c.max_batch = 0), "--max-batch is 0, expected at least 1"),
        (message(|c| c.step_tokens = 0), "--step-tokens is 0, expected at least 1"),
        (message(|c| c.block_tokens = 0), "--block-tokens is 0, expected at least 1"),
        (
            message(|c| c.device_blocks = 1 << 31),
            "--device-blocks is 2147483648, more than the largest allowed, 2147483647",
        ),
        (
            message(|c| c.host_blocks = 1 << 32),
            "--host-blocks is 4294967296, more than the largest allowed, 4294967295",
        ),
        (
            message(|c| (c.device_blocks, c.host_blocks) = (1, i32::MAX as u64)),
            "--device-blocks 1 and --host-blocks 2147483647 are together more than the largest allowed, 2147483647",
        ),
        (
            message(|c| c.step_tokens = (1 << 24) + 1),
            "--step-tokens is 16777217, more than the largest allowed, 16777216",
        ),
        (
            message(|c| c.max_batch = 65_537),
            "--max-batch is 65537, more than the largest allowed, 65536",
        ),
        (message(|c| c.shape.layers = 0), "--layers is 0, expected at least 1"),
        (
            message(|c| c.shape.layers = (1 << 16) + 1),
            "--layers is 65537, more than the largest allowed, 65536",
        ),
        (
            message(|c| {
                (c.device_blocks, c.host_blocks) = (i32::MAX as u64, 0);
                c.shape.head_size = 1 << 31;
            }),
            "--device-blocks 2147483647 of 2199023255552 bytes each overflow the address space",
        ),
    ] {
        assert_eq!(found, expected);
    }
}

#[test]
fn a_request_that_could_never_run_is_named() {
    let request = |input_length: u64| Request {
        timestamp_ms: 0,
        input_length,
        output_length: 1,
        hash_ids: vec![0; input_length.div_ceil(512) as usize],
        tenant: None,
    };
    let config = RunConfig { device_blocks: 8, block_tokens: 64, ..RunConfig::default() };
    let mut trace = Trace::new(vec![request(511)]);
    assert_eq!(config.check_trace(&trace), Ok(()));
    trace.requests.push(request(512));
    assert_eq!(
        config.check_trace(&trace).unwrap_err().to_string(),
        "request 1, counted from 0, has 513 tokens, which take 9 blocks of 64, but --device-blocks is 8"
    );
    let refused = |block_tokens, trace_block_tokens| {
        let config = RunConfig { block_tokens, ..RunConfig::default() };
        let trace = Trace { block_tokens: trace_block_tokens, ..Trace::new(Vec::new()) };
        config.check_trace(&trace).map_err(|error| error.to_string())
    };
    assert_eq!((refused(64, 16), refused(16, 64), refused(48, 16)), (Ok(()), Ok(()), Ok(())));
    assert_eq!(
        refused(48, 512).unwrap_err(),
        "--block-tokens is 48, expected a divisor or a multiple of 512, the tokens of a hash id in the trace"
    );
}
