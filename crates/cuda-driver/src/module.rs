//! Modules compiled from PTX, and the kernels in them.

use std::sync::Arc;

use crate::guard;

use crate::alive::{Held, Kind};
use crate::device::{Object, Retired};
use crate::{Device, DeviceError, KernelArgs, LaunchConfig, Stream};

/// Why a module or a kernel could not be loaded.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ModuleError {
    /// The driver did not compile the PTX.
    #[error("the PTX was refused; the compiler says: {log}")]
    Load {
        /// The log of the driver's compiler.
        log: String,
        /// The driver's answer.
        #[source]
        source: DeviceError,
    },
    /// The module has no kernel of that name.
    #[error("the module has no kernel {name:?}")]
    Kernel {
        /// The name asked for.
        name: String,
        /// The driver's answer.
        #[source]
        source: DeviceError,
    },
}

crate::messages::one_line_debug!(ModuleError);

/// A module: PTX, compiled for one device. A cheap handle; clones are the same module.
#[derive(Clone, Debug)]
pub struct Module {
    inner: Arc<ModuleInner>,
}

#[derive(Debug)]
struct ModuleInner {
    device: Held,
    /// # Invariants
    /// A live module of `device`'s context until this struct is dropped.
    raw: u64,
}

impl Module {
    /// Compiles `ptx` for `device`.
    ///
    /// After its kernels too are dropped, a dropped module is unloaded by the next allocation on
    /// the device, by [`Device::free_retired`], or with the device. Loading does not wait and
    /// unloads no module, so a program that loads and drops many modules without allocating calls
    /// [`Device::free_retired`] itself.
    ///
    /// # Errors
    /// [`ModuleError::Load`] with the compiler's log.
    #[track_caller]
    pub fn load(device: &Device, ptx: &str) -> Result<Self, ModuleError> {
        let mut log = String::new();
        match device.run(|driver| driver.module_load_data(ptx, &mut log)) {
            Ok(raw) => {
                if !log.trim().is_empty() {
                    tracing::debug!(%log, "module loaded");
                }
                let device = Held::new(device, Kind::Module, 0);
                Ok(Self { inner: Arc::new(ModuleInner { device, raw }) })
            }
            Err(source) => Err(ModuleError::Load { log: log.trim().to_owned(), source }),
        }
    }

    /// The kernel `name`, which keeps the module loaded.
    ///
    /// # Errors
    /// [`ModuleError::Kernel`] when there is none.
    #[track_caller]
    pub fn kernel(&self, name: &str) -> Result<Kernel, ModuleError> {
        let raw = self.inner.raw;
        // SAFETY: the module is live (invariant of `raw`).
        let function = self
            .inner
            .device
            .run(|driver| unsafe { driver.module_get_function(raw, name) })
            .map_err(|source| ModuleError::Kernel { name: name.to_owned(), source })?;
        Ok(Kernel { module: self.clone(), function })
    }
}

impl Drop for ModuleInner {
    fn drop(&mut self) {
        // Unloading waits for all work of the device, which a drop must not do. Kernels hold a
        // handle of the module, so none is left.
        guard!(
            "driver.module-unloaded-later",
            self.device.retire(Retired::Object(Object::Module(self.raw))),
            else self.device.run(|driver| unsafe { driver.module_unload(self.raw) }).unwrap_or(())
        );
    }
}

/// A kernel of a loaded module.
#[derive(Clone, Debug)]
pub struct Kernel {
    module: Module,
    /// # Invariants
    /// A function of `module`, which this struct keeps loaded.
    pub(crate) function: u64,
}

impl Kernel {
    pub(crate) fn device(&self) -> &Device {
        &self.module.inner.device
    }

    /// Enqueues the kernel on `stream`.
    ///
    /// # Ordering
    /// Runs after what was enqueued on `stream` before. Memory that the kernel reads, host memory
    /// too, is read when it runs, not now.
    ///
    /// # Errors
    /// `INVALID_VALUE` for a geometry over the device's limits; [`DeviceError::OtherDevice`];
    /// `INVALID_HANDLE` for a stream of another driver object. A fault inside the kernel shows at a
    /// later call.
    ///
    /// # Safety
    /// - `args` has the number, order and sizes of the kernel's parameters;
    /// - host memory that the kernel reads stays allocated until it has completed;
    /// - host memory that it writes is not accessed by the host until it has completed.
    #[track_caller]
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        config: &LaunchConfig,
        args: &KernelArgs,
    ) -> Result<(), DeviceError> {
        let device = self.device();
        guard!("driver.launch-own-driver", device.check_stream(stream, "cuLaunchKernel")?);
        device.run(|driver| {
            // SAFETY: function and stream are live (their invariants) and of this driver object;
            // the rest is the caller's.
            unsafe { driver.launch_kernel(self.function, config, args, stream.raw()) }
                .map_err(|error| error.of_launch(config))
        })
    }
}
