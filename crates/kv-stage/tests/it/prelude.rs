//! What most tests name.

pub(crate) use cuda_driver::{
    CopyError, CountingDriver, Device, DeviceBuffer, DeviceError, DeviceSpan, ErrorCode, Event,
    HostAllocFlags, PinnedBuffer, Stream,
};
pub(crate) use cuda_sim::{Pace, RaceCheck, SimConfig, SimDriver};
pub(crate) use kv_stage::error::{AcquireError, BatchError, StagingError, SubmitError};
pub(crate) use kv_stage::*;
pub(crate) use kv_testkit::pattern;
pub(crate) use std::sync::{Arc, Mutex};

pub(crate) use crate::machine::{Machine, entries};
