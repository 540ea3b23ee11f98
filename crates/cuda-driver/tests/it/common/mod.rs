//! Scenarios for every driver, the simulated one and a GPU's.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(dead_code, reason = "each test binary uses a part")]

pub(crate) mod conformance;
pub(crate) mod kernel;
pub(crate) mod pairs;
pub(crate) mod scenarios;
pub(crate) mod traps;

use std::sync::Arc;

use cuda_driver::{Device, DeviceBuffer, Driver, DriverResult, ErrorCode, Stream};

/// What must hold of the given driver.
pub(crate) type Scenario = fn(&Arc<dyn Driver>);

pub(crate) fn open(driver: &Arc<dyn Driver>, ordinal: i32) -> Device {
    Device::open(Arc::clone(driver), ordinal).unwrap()
}

/// Bytes that only `tag` has.
pub(crate) fn pattern(tag: u8, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| (i as u8).wrapping_mul(31).wrapping_add((i >> 8) as u8) ^ tag).collect()
}

/// Everything in `buffer`, by way of `stream`.
pub(crate) fn contents(stream: &Stream, buffer: &DeviceBuffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.bytes() as usize];
    stream.download(&mut bytes, buffer.span()).unwrap();
    bytes
}

/// The code that a call was refused with.
#[track_caller]
pub(crate) fn code<T: std::fmt::Debug>(answer: DriverResult<T>) -> ErrorCode {
    answer.unwrap_err().code
}
