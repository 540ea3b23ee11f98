//! Work that takes its time and does nothing.

use std::time::Duration;

use cuda_driver::{KernelArgs, LaunchConfig, Stream};

use crate::KernelError;
use crate::launcher::Launcher;
use crate::lazy::LazyKernel;

/// See [`KvKernels::keep_busy`](crate::KvKernels::keep_busy).
pub(crate) fn keep_busy(
    (on, kernel): (&Launcher, &LazyKernel),
    stream: &Stream,
    time: Duration,
) -> Result<(), KernelError> {
    on.check_stream(stream)?;
    let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    if nanoseconds == 0 {
        return Ok(());
    }
    let args = KernelArgs::new().arg(nanoseconds);
    let kernel = kernel.get(on.device())?;
    // SAFETY: the argument is the parameter of `keep_busy` in `kernels/busy.cu`, which touches no memory.
    Ok(unsafe { kernel.launch(stream, &LaunchConfig::linear(1, 1), &args) }?)
}
