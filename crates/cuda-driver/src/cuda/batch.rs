//! `cuMemcpyBatchAsync`: the one call that a driver may lack.

use std::ffi::c_void;
use std::ptr;

use cudarc::driver::sys::{CUdeviceptr, CUstream};

use super::descriptors::Location;
use crate::{BatchCopy, DriverError, DriverResult, ErrorCode};

/// The driver's name of the call. Without a suffix it is the one of CUDA 12.8 in newer libraries too.
const CALL: &str = "cuMemcpyBatchAsync";

/// `CUmemcpyAttributes`, as NVIDIA's header of CUDA 12.8 declares it; bindings before that have none.
#[repr(C)]
struct Attributes {
    source_order: u32,
    source_hint: Location,
    destination_hint: Location,
    flags: u32,
}

const _: () = assert!(size_of::<Attributes>() == 4 + 8 + 8 + 4);

/// `CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`.
const IN_STREAM_ORDER: u32 = 1;

/// The signature in that header. The call of CUDA 13's bindings is `cuMemcpyBatchAsync_v2`, without the last
/// argument but one; a library of CUDA 13 has both. Returns any 32 bits.
type Address = unsafe extern "C" fn(
    *mut CUdeviceptr,
    *mut CUdeviceptr,
    *mut usize,
    usize,
    *mut Attributes,
    *mut usize,
    usize,
    *mut usize,
    CUstream,
) -> u32;

/// The call, where the library has it.
///
/// # Invariants
/// The address is that of `cuMemcpyBatchAsync`, in a library that is never unloaded.
pub(super) struct BatchCall(Option<Address>);

impl BatchCall {
    /// # Safety
    /// - `address_of` answers null or the address of the CUDA driver's function of that name, good
    ///   until the process ends.
    pub(super) unsafe fn resolve(address_of: &mut dyn FnMut(&'static str) -> *mut c_void) -> Self {
        let address = address_of(CALL);
        if address.is_null() {
            return Self(None);
        }
        // SAFETY: the address is not null and, as the caller promises, of the driver's function of
        // this name, which takes the arguments of `Address` and returns a C enum: 32 bits, of
        // which any are a valid `u32`.
        Self(Some(unsafe { std::mem::transmute::<*mut c_void, Address>(address) }))
    }

    /// Enqueues the copies, in any order among themselves.
    ///
    /// # Safety
    /// - What the driver's API asks: `stream` is live; host ranges stay allocated until the batch
    ///   has run, and no range written is memory that Rust code accesses meanwhile.
    pub(super) unsafe fn enqueue(
        &self,
        copies: &[BatchCopy],
        stream: CUstream,
    ) -> DriverResult<()> {
        let Self(Some(call)) = *self else {
            return Err(DriverError::new(CALL, ErrorCode::NOT_SUPPORTED));
        };
        if copies.is_empty() {
            // An empty batch has no ranges to point at.
            return Err(DriverError::new(CALL, ErrorCode::INVALID_VALUE));
        }
        let mut destinations: Vec<CUdeviceptr> = copies.iter().map(|c| c.destination).collect();
        let mut sources: Vec<CUdeviceptr> = copies.iter().map(|copy| copy.source).collect();
        let mut sizes: Vec<usize> = copies.iter().map(|copy| copy.bytes as usize).collect();
        let mut attributes = attributes();
        let (mut first, mut failed) = (0, usize::MAX);
        // SAFETY: the three arrays are live and of the length passed, `attributes` is the one set of
        // attributes, which begins with copy 0, and `failed` is live for the call to write. The
        // call reads them before it returns. Stream and ranges are the caller's promise.
        let code = unsafe {
            call(
                destinations.as_mut_ptr(),
                sources.as_mut_ptr(),
                sizes.as_mut_ptr(),
                copies.len(),
                ptr::from_mut(&mut attributes),
                ptr::from_mut(&mut first),
                1,
                ptr::from_mut(&mut failed),
                stream,
            )
        };
        match code {
            0 => Ok(()),
            code => {
                tracing::debug!(failed, copies = copies.len(), "a batch of copies was refused");
                Err(DriverError::new(CALL, ErrorCode(code)))
            }
        }
    }
}

/// Sources are read in stream order, as for every other copy, without hints.
fn attributes() -> Attributes {
    Attributes {
        source_order: IN_STREAM_ORDER,
        source_hint: Location::default(),
        destination_hint: Location::default(),
        flags: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_without_the_call_is_told_from_one_that_refuses() {
        // SAFETY: null says that the library lacks the call.
        let absent = unsafe { BatchCall::resolve(&mut |_| ptr::null_mut()) };
        // SAFETY: without the call nothing is followed.
        let answer = unsafe { absent.enqueue(&[], ptr::null_mut()) };
        assert_eq!(answer, Err(DriverError::new("cuMemcpyBatchAsync", ErrorCode::NOT_SUPPORTED)));
    }

    #[test]
    fn sources_are_read_in_stream_order() {
        let attributes = attributes();
        assert_eq!((attributes.source_order, attributes.flags), (1, 0));
        for hint in [attributes.source_hint, attributes.destination_hint] {
            assert_eq!((hint.kind, hint.id), (0, 0));
        }
    }
}
