//! Devices are read and written alike, and have room for a run or are refused.

use kv_replay::config::RunConfig;
use kv_replay::device::{
    DeviceOpenError, DeviceSpec, DeviceSpecError, SimSizes, machine_bytes, open,
};
use kv_replay::shape::{Dtype, KvModelShape};

fn parsed(text: &str) -> Result<DeviceSpec, DeviceSpecError> {
    text.parse()
}

#[test]
fn devices_are_read_and_written_alike() {
    for (text, devices) in
        [("sim", 1), ("sim:4", 4), ("cuda", 0), ("cuda:0", 1), ("cuda:3,cuda:1", 2)]
    {
        let spec = parsed(text).unwrap();
        assert_eq!((spec.to_string(), spec.count()), (text.to_owned(), devices));
    }
    assert_eq!(parsed("sim:1").unwrap(), DeviceSpec::default());
    assert_eq!(parsed("cuda:2,cuda:0"), Ok(DeviceSpec::Cuda { ordinals: vec![2, 0] }));
}

#[test]
fn what_is_no_device_is_named() {
    for (text, token) in [
        ("gpu0", "gpu0"),
        ("", ""),
        ("sim:0", "sim:0"),
        ("sim:-1", "sim:-1"),
        ("sim:+1", "sim:+1"),
        ("sim:x", "sim:x"),
        ("cuda:", "cuda:"),
        ("cuda:-1", "cuda:-1"),
        ("cuda:0,", ""),
        ("cuda:0,1", "1"),
        ("cuda:99999999999", "cuda:99999999999"),
        ("SIM", "SIM"),
    ] {
        let expected = DeviceSpecError::Unknown { token: token.to_owned() };
        assert_eq!(parsed(text), Err(expected), "{text:?}");
    }
}

#[test]
fn simulated_devices_have_room_for_the_pools() {
    let shape = KvModelShape { layers: 2, ..RunConfig::default().shape };
    let config = RunConfig { shape, device_blocks: 1 << 20, ..RunConfig::default() };
    let devices = open(&parsed("sim:2").unwrap(), SimSizes::for_config(&config)).unwrap();
    assert!(devices.sim.is_some());
    devices.check_fits(&config).unwrap();
    let larger = RunConfig { device_blocks: 1 << 30, ..config };
    assert!(matches!(
        devices.check_fits(&larger),
        Err(DeviceOpenError::TooSmall { needed_bytes, .. }) if needed_bytes == 8 << 40
    ));
    assert!(devices.driver.calls().contains_key("cuDevicePrimaryCtxRetain"));
}

#[test]
fn a_host_tier_larger_than_the_machine_is_refused() {
    let config = RunConfig { host_blocks: 1 << 31, device_blocks: 1, ..RunConfig::default() };
    let devices = open(&parsed("sim").unwrap(), SimSizes::for_config(&config)).unwrap();
    match devices.check_fits(&config) {
        Err(DeviceOpenError::HostTooSmall { needed_bytes, total_bytes }) => {
            assert_eq!(needed_bytes, 16 << 40);
            assert_eq!(machine_bytes(), Some(total_bytes));
        }
        other => assert_eq!((other.is_ok(), machine_bytes()), (true, None), "{other:?}"),
    }
}

#[test]
fn simulated_devices_have_room_for_an_iteration_of_a_large_model() {
    let shape = KvModelShape { layers: 80, kv_heads: 8, head_size: 128, dtype: Dtype::Bf16 };
    let config = RunConfig { shape, block_tokens: 16, device_blocks: 100, ..RunConfig::default() };
    let chunk_bytes = u64::from(config.step_tokens) * 80 * 2 * 8 * 128 * 2;
    assert!(chunk_bytes > 4 << 30);
    assert!(SimSizes::for_config(&config).device_bytes > chunk_bytes + (4 << 30));
}
