//! The operations of a stream, and what each does when it runs.

use cuda_driver::{
    AccessFault, ErrorCode, KernelArgs, KernelReference, LaunchConfig, ReferenceError,
};

use crate::findings::{Finding, FindingKind};
use crate::host_functions::HostCall;
use crate::memory::View;
use crate::state::State;
use crate::streams::{DefaultOrder, Point};

/// One operation in a stream.
#[derive(Debug)]
pub(crate) struct Operation {
    pub(crate) sequence: u64,
    /// The host's clock when the call was over.
    pub(crate) enqueued_ns: u64,
    /// The driver call that enqueued it.
    pub(crate) call: &'static str,
    pub(crate) work: Work,
}

/// What an operation does.
#[derive(Debug)]
pub(crate) enum Work {
    /// Copies between addresses of any memory, each side with the rights of a device.
    Copy { destination: (u32, u64), source: (u32, u64), bytes: u64 },
    /// Writes bytes that were staged when the call was made.
    WriteStaged { destination: u64, data: Box<[u8]> },
    /// Reads bytes for a caller that waits for them.
    Fetch { source: u64, bytes: u64 },
    /// Sets bytes.
    Fill { destination: u64, bytes: u64, value: u8 },
    /// Runs a kernel.
    Launch(Box<Launch>),
    /// Calls a function of the host.
    CallHost(HostCall),
    /// Completes an event.
    Record(u64),
    /// Waits for a point of another stream.
    Wait(Point),
}

/// A kernel with its arguments as they were at the launch.
#[derive(Debug)]
pub(crate) struct Launch {
    pub(crate) reference: KernelReference,
    pub(crate) config: LaunchConfig,
    pub(crate) args: KernelArgs,
}

impl State {
    /// Runs an operation of the stream `place.1` on the device `place.0`.
    pub(crate) fn run(&mut self, place: (u32, u64), operation: Operation) {
        let (device, _) = place;
        let viewer = self.viewer(device);
        let mut name = operation.call;
        let outcome = match operation.work {
            Work::Copy { destination, source, bytes } => {
                let to = (self.viewer(destination.0), destination.1);
                let from = (self.viewer(source.0), source.1);
                self.memory.copy(to, from, bytes).map_err(ReferenceError::from)
            }
            Work::WriteStaged { destination, data } => {
                self.memory.store(viewer, destination, &data).map_err(ReferenceError::from)
            }
            Work::Fetch { source, bytes } => self
                .memory
                .read(viewer, source, bytes)
                .map(|data| self.fetched = Some(data))
                .map_err(ReferenceError::from),
            Work::Fill { destination, bytes, value } => {
                self.memory.fill(viewer, destination, bytes, value).map_err(ReferenceError::from)
            }
            Work::Launch(launch) => {
                name = launch.reference.name;
                let mut view = View::new(&mut self.memory, viewer);
                (launch.reference.run)(&mut view, &launch.config, &launch.args)
            }
            Work::CallHost(call) => {
                call.run();
                Ok(())
            }
            // What a record completes is told with its time.
            Work::Record(_) | Work::Wait(_) => Ok(()),
        };
        if let Err(error) = outcome {
            self.fail(place, name, error);
        }
    }

    /// Loses the device of a failed operation.
    #[cold]
    fn fail(&mut self, (device, stream): (u32, u64), name: &str, error: ReferenceError) {
        let is_legacy =
            self.streams.get(&stream).is_some_and(|found| found.order == DefaultOrder::Legacy);
        let stream = if is_legacy { 0 } else { stream };
        let code = match error {
            ReferenceError::Fault(AccessFault { address, bytes, reason }) => {
                let nearest = self.memory.nearest(address, bytes);
                self.findings.add(Finding {
                    device: Some(device),
                    stream: Some(stream),
                    address: Some(address),
                    bytes,
                    nearest,
                    ..Finding::new(FindingKind::IllegalAccess, name, reason)
                });
                ErrorCode::ILLEGAL_ADDRESS
            }
            other => {
                self.findings.add(Finding {
                    device: Some(device),
                    stream: Some(stream),
                    ..Finding::new(FindingKind::KernelFailed, name, other.to_string())
                });
                ErrorCode::LAUNCH_FAILED
            }
        };
        self.poison(device, code);
    }
}
