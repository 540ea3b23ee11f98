//! CPU references of kernels, in terms that any simulated device can run.
//!
//! A crate with a kernel also has its meaning as a function over device memory. Tests use the
//! function as the oracle, and a simulated device runs it for speed.

use std::borrow::Cow;

use crate::{KernelArgs, LaunchConfig};

/// An access that the device would answer with an illegal-address error.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[error("illegal access of {bytes} bytes at {address:#x}: {reason}")]
pub struct AccessFault {
    /// First address of the access.
    pub address: u64,
    /// Its length in bytes.
    pub bytes: u64,
    /// Why the address may not be accessed.
    pub reason: String,
}

/// Device-visible memory, addressed as a kernel addresses it.
///
/// Every access is checked: mapped, accessible, inside one live allocation (or one mapped run).
pub trait DeviceMemory: Sync {
    /// The `bytes` bytes at `address`; borrowed if they lie in one piece.
    ///
    /// # Errors
    /// [`AccessFault`] where a kernel's load would fault.
    fn load(&self, address: u64, bytes: u64) -> Result<Cow<'_, [u8]>, AccessFault>;

    /// Writes `data` at `address`.
    ///
    /// # Errors
    /// [`AccessFault`] where a kernel's store would fault; nothing is written then.
    fn store(&mut self, address: u64, data: &[u8]) -> Result<(), AccessFault>;
}

/// Why a reference could not run.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ReferenceError {
    /// The kernel accessed memory it may not access.
    #[error("kernel faulted")]
    Fault(#[from] AccessFault),
    /// An argument is missing or has another size than the kernel's parameter.
    #[error("argument {index} is missing or not of the parameter's size")]
    Argument {
        /// Position of the argument.
        index: usize,
    },
}

crate::messages::one_line_debug!(AccessFault, ReferenceError);

/// A kernel's computation, as a function over device memory.
pub type ReferenceFn =
    fn(&mut dyn DeviceMemory, &LaunchConfig, &KernelArgs) -> Result<(), ReferenceError>;

/// The CPU reference of one kernel entry.
#[derive(Clone, Copy, Debug)]
pub struct KernelReference {
    /// The entry's name in its module.
    pub name: &'static str,
    /// The entry's computation.
    pub run: ReferenceFn,
}
