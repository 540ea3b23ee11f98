//! Kernels whose modules are compiled when they are first wanted.

use std::sync::OnceLock;

use cuda_driver::{Device, Kernel, Module, ModuleError};

/// A kernel of one device, compiled at its first use.
#[derive(Debug)]
pub(crate) struct LazyKernel {
    ptx: &'static str,
    entry: &'static str,
    loaded: OnceLock<Kernel>,
}

impl LazyKernel {
    pub(crate) const fn new(ptx: &'static str, entry: &'static str) -> Self {
        Self { ptx, entry, loaded: OnceLock::new() }
    }

    /// The kernel. The first call waits for the compiler; `device` is the same at every call.
    pub(crate) fn get(&self, device: &Device) -> Result<&Kernel, ModuleError> {
        if let Some(kernel) = self.loaded.get() {
            return Ok(kernel);
        }
        // No lock is held while the driver compiles: of two threads that meet here both compile,
        // and the second result is dropped.
        let kernel = Module::load(device, self.ptx)?.kernel(self.entry)?;
        Ok(self.loaded.get_or_init(|| kernel))
    }
}

/// Kernels of one module and one device, compiled together when the first of them is wanted.
#[derive(Debug)]
pub(crate) struct LazyModule<const N: usize> {
    ptx: &'static str,
    entries: [&'static str; N],
    loaded: OnceLock<Box<[Kernel]>>,
}

impl<const N: usize> LazyModule<N> {
    pub(crate) const fn new(ptx: &'static str, entries: [&'static str; N]) -> Self {
        Self { ptx, entries, loaded: OnceLock::new() }
    }

    /// The kernels, in the order of their entries. The first call waits for the compiler; `device` is
    /// the same at every call.
    pub(crate) fn get(&self, device: &Device) -> Result<&[Kernel], ModuleError> {
        if let Some(kernels) = self.loaded.get() {
            return Ok(kernels);
        }
        // No lock is held, as above.
        let module = Module::load(device, self.ptx)?;
        let kernels: Result<Box<[Kernel]>, _> =
            self.entries.iter().map(|entry| module.kernel(entry)).collect();
        let kernels = kernels?;
        Ok(self.loaded.get_or_init(|| kernels))
    }
}
