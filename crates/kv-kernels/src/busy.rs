//! Work that takes its time and does nothing.

use std::time::Duration;

use cuda_driver::{KernelArgs, LaunchConfig, Stream};

use crate::{KernelError, KvKernels};

impl KvKernels {
    /// Keeps the stream busy for so long, by the device's own clock: in the place of a model, where what lies around it is measured.
    ///
    /// One thread waits, so work of other streams goes on beside it. The time is rounded up to the steps of that clock (32 ns on an
    /// H200, a microsecond on older cards). On a simulated device the clock counts the thread's instructions.
    ///
    /// # Ordering
    /// Waits for nothing; see [`KvKernels`]. What is enqueued on the stream behind it runs when the time is over.
    ///
    /// # Errors
    /// [`KernelError`]; nothing was enqueued then.
    #[track_caller]
    pub fn keep_busy(&self, stream: &Stream, time: Duration) -> Result<(), KernelError> {
        let _site = cuda_driver::site::enter();
        self.check_stream(stream)?;
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        if nanoseconds == 0 {
            return Ok(());
        }
        let args = KernelArgs::new().arg(nanoseconds);
        let kernel = self.busy.get(self.device())?;
        // SAFETY: the argument is the parameter of `keep_busy` in `kernels/busy.cu`, which touches no memory.
        Ok(unsafe { kernel.launch(stream, &LaunchConfig::linear(1, 1), &args) }?)
    }
}
