//! A record of when operations ran, for those who draw a timeline.

use std::time::Duration;

use cuda_driver::guard;

use super::{Charge, Demand};
use crate::work::{Body, Work};

/// When an operation of a stream was ready and when it ended, in virtual time since the machine was built.
///
/// An operation is ready when its enqueuing call is over and all that is ordered before it has ended. It may then wait for
/// its engine; that is part of its time.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct OperationTime {
    /// The device.
    pub device: u32,
    /// Handle of the stream.
    pub stream: u64,
    /// Name of the kernel, if it runs by a reference, or of the call that enqueued the operation.
    pub name: &'static str,
    /// When it was ready.
    pub ready: Duration,
    /// When it ended.
    pub end: Duration,
    /// Handle of the stream whose work it waits for, if it is a wait.
    pub awaits: Option<u64>,
    /// Bytes over the link from host memory to the device.
    pub to_device: u64,
    /// Bytes over the link from the device to host memory.
    pub to_host: u64,
}

/// The operations whose times were computed since they were last taken.
#[derive(Debug, Default)]
pub(super) struct Record {
    /// Most operations that are kept; 0 keeps none.
    pub(super) limit: usize,
    kept: Vec<OperationTime>,
}

impl Record {
    pub(super) fn note(&mut self, charge: &Charge, ready: u64, end: u64) {
        if self.kept.len() >= guard!("sim.times-bounded", self.limit, else usize::MAX) {
            return;
        }
        let (to_device, to_host) = charge.demand.link_bytes();
        self.kept.push(OperationTime {
            device: charge.device,
            stream: charge.point.stream,
            name: charge.name,
            ready: Duration::from_nanos(ready),
            end: Duration::from_nanos(end),
            awaits: match charge.demand {
                Demand::Wait(point) => Some(point.stream),
                _ => None,
            },
            to_device,
            to_host,
        });
    }

    pub(super) fn take(&mut self) -> Vec<OperationTime> {
        std::mem::take(&mut self.kept)
    }
}

impl Demand {
    /// Bytes over the link to the device and to the host.
    fn link_bytes(self) -> (u64, u64) {
        match self {
            Self::Down(bytes) => (bytes, 0),
            Self::Up(bytes) | Self::Fetch(bytes) => (0, bytes),
            Self::Batch([(_, down), (_, up), _]) => (down, up),
            Self::Kernel(traffic) => (traffic.host_loaded, traffic.host_stored),
            _ => (0, 0),
        }
    }
}

/// The name of an operation that `call` has enqueued.
pub(super) fn name(work: &Work, call: &'static str) -> &'static str {
    match work {
        Work::Launch(launch) => match &launch.body {
            Body::Reference(reference) => reference.name,
            Body::Ptx(..) => call,
        },
        _ => call,
    }
}
