//! The calls of the driver library: one table of typed addresses, filled once.
//!
//! cudarc's own bindings return `CUresult`, a Rust enum that a newer driver's code would make
//! invalid, and look each call up at its first use, with a panic when it is missing. This table
//! takes the argument types from those bindings, which the compiler checks below, and returns
//! plain numbers.

#![allow(non_snake_case, reason = "calls keep the driver's names")]

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};

use cudarc::driver::sys::{self, CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction};
use cudarc::driver::sys::{CUgraph, CUgraphExec, CUgraphNode, CUmodule, CUstream, CUuuid};
use cudarc::driver::sys::{CUmemAccessDesc, CUmemAllocationProp, CUmemGenericAllocationHandle};

use super::descriptors::{Access, MemoryProp};
use crate::{DriverError, DriverResult, ErrorCode, Unavailable};

/// The type that we pass where `=>` names one, otherwise the binding's.
macro_rules! passed {
    ($bound:ty) => {
        $bound
    };
    ($bound:ty => $ours:ty) => {
        $ours
    };
}

/// Compares the argument types with those of cudarc's binding, which is made from NVIDIA's headers.
/// A line with `unbound` is not compared, because not every version of the bindings has the call.
macro_rules! checked {
    (unbound $symbol:ident($($bound:ty),*)) => {};
    ($symbol:ident($($bound:ty),*)) => {
        const _: unsafe fn($($bound),*) -> sys::CUresult = sys::$symbol;
    };
}

macro_rules! api {
    ($($call:ident = $symbol:ident $([$unbound:ident])? (
        $($arg:ident: $bound:ty $(=> $ours:ty)?),* $(,)?
    );)*) => {
        /// Addresses of the driver's calls.
        ///
        /// # Invariants
        /// Each is the address of the call of its name, in a library that is never unloaded.
        pub(super) struct Api {
            $($call: unsafe extern "C" fn($(passed!($bound $(=> $ours)?)),*) -> u32,)*
        }

        $(checked!($($unbound)? $symbol($($bound),*));)*

        impl Api {
            /// Looks every call up; null means that the library lacks it.
            ///
            /// # Safety
            /// - `address_of` answers null or the address of the CUDA driver's function of that
            ///   name, good until the process ends.
            pub(super) unsafe fn resolve(
                address_of: &mut dyn FnMut(&'static str) -> *mut c_void,
            ) -> Result<Self, Unavailable> {
                Ok(Self {
                    $($call: {
                        let address = address_of(stringify!($symbol));
                        if address.is_null() {
                            return Err(Unavailable::MissingSymbol { symbol: stringify!($symbol) });
                        }
                        // SAFETY: the address is not null and, as the caller promises, of the
                        // driver's function of this name, which takes the arguments checked above
                        // and returns a C enum: 32 bits, of which any are a valid `u32`. Where
                        // our argument type differs from the bound one, it is the integer type
                        // of that C enum, or points to the same struct with such integers in it.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($(passed!($bound $(=> $ours)?)),*) -> u32,
                            >(address)
                        }
                    },)*
                })
            }

            $(
                /// The driver's call of this name; an error carries the name.
                ///
                /// # Safety
                /// - What NVIDIA's driver API asks of the arguments: pointers written through or
                ///   read are live and of the right length, handles are live.
                #[allow(clippy::too_many_arguments, reason = "the driver's signature")]
                pub(super) unsafe fn $call(
                    &self,
                    $($arg: passed!($bound $(=> $ours)?)),*
                ) -> DriverResult<()> {
                    // SAFETY: the address is of this call (invariant of `Api`); the arguments
                    // are the caller's promise.
                    let result = unsafe { (self.$call)($($arg),*) };
                    check(stringify!($call), result)
                }
            )*
        }
    };
}

// The names on the right are those that NVIDIA's headers map the plain names to (`cuMemAlloc` is a
// macro for `cuMemAlloc_v2`), without per-thread default streams.
api! {
    cuInit = cuInit(flags: c_uint);
    cuDriverGetVersion = cuDriverGetVersion(version: *mut c_int);

    cuDeviceGet = cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
    cuDeviceGetCount = cuDeviceGetCount(count: *mut c_int);
    cuDeviceGetName = cuDeviceGetName(name: *mut c_char, length: c_int, device: CUdevice);
    cuDeviceGetUuid = cuDeviceGetUuid_v2(uuid: *mut CUuuid, device: CUdevice);
    cuDeviceTotalMem = cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice);
    cuDeviceGetPCIBusId = cuDeviceGetPCIBusId(id: *mut c_char, length: c_int, device: CUdevice);
    cuDeviceGetAttribute = cuDeviceGetAttribute(
        value: *mut c_int,
        attribute: sys::CUdevice_attribute => u32,
        device: CUdevice,
    );
    cuDeviceCanAccessPeer = cuDeviceCanAccessPeer(
        can_access: *mut c_int,
        device: CUdevice,
        peer: CUdevice,
    );
    cuDeviceGetP2PAttribute = cuDeviceGetP2PAttribute(
        value: *mut c_int,
        attribute: sys::CUdevice_P2PAttribute => u32,
        device: CUdevice,
        peer: CUdevice,
    );
    cuDevicePrimaryCtxRetain = cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
    cuDevicePrimaryCtxRelease = cuDevicePrimaryCtxRelease_v2(device: CUdevice);

    cuCtxGetCurrent = cuCtxGetCurrent(context: *mut CUcontext);
    cuCtxSetCurrent = cuCtxSetCurrent(context: CUcontext);
    cuCtxGetDevice = cuCtxGetDevice(device: *mut CUdevice);
    cuCtxSynchronize = cuCtxSynchronize();
    cuCtxEnablePeerAccess = cuCtxEnablePeerAccess(peer: CUcontext, flags: c_uint);
    cuCtxDisablePeerAccess = cuCtxDisablePeerAccess(peer: CUcontext);

    cuStreamCreate = cuStreamCreate(stream: *mut CUstream, flags: c_uint);
    cuStreamDestroy = cuStreamDestroy_v2(stream: CUstream);
    cuStreamSynchronize = cuStreamSynchronize(stream: CUstream);
    cuStreamQuery = cuStreamQuery(stream: CUstream);
    cuStreamWaitEvent = cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
    cuStreamGetCtx = cuStreamGetCtx(stream: CUstream, context: *mut CUcontext);
    cuEventCreate = cuEventCreate(event: *mut CUevent, flags: c_uint);
    cuEventDestroy = cuEventDestroy_v2(event: CUevent);
    cuEventRecord = cuEventRecord(event: CUevent, stream: CUstream);
    cuEventQuery = cuEventQuery(event: CUevent);
    cuEventSynchronize = cuEventSynchronize(event: CUevent);
    // Bindings of CUDA 13 have only `cuEventElapsedTime_v2`, which drivers before 12.8 lack. The
    // library of CUDA 13 has both.
    cuEventElapsedTime = cuEventElapsedTime [unbound] (
        milliseconds: *mut f32,
        start: CUevent,
        end: CUevent,
    );

    cuPointerGetAttributes = cuPointerGetAttributes(
        count: c_uint,
        attributes: *mut sys::CUpointer_attribute => *mut u32,
        data: *mut *mut c_void,
        address: CUdeviceptr,
    );
    cuMemGetInfo = cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    cuMemAlloc = cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize);
    cuMemFree = cuMemFree_v2(address: CUdeviceptr);
    cuMemHostAlloc = cuMemHostAlloc(host: *mut *mut c_void, bytes: usize, flags: c_uint);
    cuMemFreeHost = cuMemFreeHost(host: *mut c_void);
    cuMemHostRegister = cuMemHostRegister_v2(host: *mut c_void, bytes: usize, flags: c_uint);
    cuMemHostUnregister = cuMemHostUnregister(host: *mut c_void);
    cuMemHostGetDevicePointer = cuMemHostGetDevicePointer_v2(
        address: *mut CUdeviceptr,
        host: *mut c_void,
        flags: c_uint,
    );
    cuMemcpyHtoDAsync = cuMemcpyHtoDAsync_v2(
        destination: CUdeviceptr,
        source: *const c_void,
        bytes: usize,
        stream: CUstream,
    );
    cuMemcpyDtoHAsync = cuMemcpyDtoHAsync_v2(
        destination: *mut c_void,
        source: CUdeviceptr,
        bytes: usize,
        stream: CUstream,
    );
    cuMemcpyDtoDAsync = cuMemcpyDtoDAsync_v2(
        destination: CUdeviceptr,
        source: CUdeviceptr,
        bytes: usize,
        stream: CUstream,
    );
    cuMemcpyPeerAsync = cuMemcpyPeerAsync(
        destination: CUdeviceptr,
        destination_context: CUcontext,
        source: CUdeviceptr,
        source_context: CUcontext,
        bytes: usize,
        stream: CUstream,
    );
    cuMemsetD8Async = cuMemsetD8Async(
        destination: CUdeviceptr,
        value: c_uchar,
        bytes: usize,
        stream: CUstream,
    );

    cuMemGetAllocationGranularity = cuMemGetAllocationGranularity(
        granularity: *mut usize,
        prop: *const CUmemAllocationProp => *const MemoryProp,
        option: sys::CUmemAllocationGranularity_flags,
    );
    cuMemAddressReserve = cuMemAddressReserve(
        address: *mut CUdeviceptr,
        bytes: usize,
        alignment: usize,
        hint: CUdeviceptr,
        flags: c_ulonglong,
    );
    cuMemAddressFree = cuMemAddressFree(address: CUdeviceptr, bytes: usize);
    cuMemCreate = cuMemCreate(
        handle: *mut CUmemGenericAllocationHandle,
        bytes: usize,
        prop: *const CUmemAllocationProp => *const MemoryProp,
        flags: c_ulonglong,
    );
    cuMemRelease = cuMemRelease(handle: CUmemGenericAllocationHandle);
    cuMemMap = cuMemMap(
        address: CUdeviceptr,
        bytes: usize,
        offset: usize,
        handle: CUmemGenericAllocationHandle,
        flags: c_ulonglong,
    );
    cuMemUnmap = cuMemUnmap(address: CUdeviceptr, bytes: usize);
    cuMemSetAccess = cuMemSetAccess(
        address: CUdeviceptr,
        bytes: usize,
        descriptors: *const CUmemAccessDesc => *const Access,
        count: usize,
    );

    cuModuleLoadDataEx = cuModuleLoadDataEx(
        module: *mut CUmodule,
        image: *const c_void,
        option_count: c_uint,
        options: *mut sys::CUjit_option,
        values: *mut *mut c_void,
    );
    cuModuleUnload = cuModuleUnload(module: CUmodule);
    cuModuleGetFunction = cuModuleGetFunction(
        function: *mut CUfunction,
        module: CUmodule,
        name: *const c_char,
    );
    cuLaunchKernel = cuLaunchKernel(
        function: CUfunction,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        stream: CUstream,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    );
    cuStreamBeginCapture = cuStreamBeginCapture_v2(
        stream: CUstream,
        mode: sys::CUstreamCaptureMode,
    );
    cuStreamEndCapture = cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph);
    cuGraphCreate = cuGraphCreate(graph: *mut CUgraph, flags: c_uint);
    cuGraphDestroy = cuGraphDestroy(graph: CUgraph);
    cuGraphAddKernelNode = cuGraphAddKernelNode_v2(
        node: *mut CUgraphNode,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        dependency_count: usize,
        parameters: *const sys::CUDA_KERNEL_NODE_PARAMS,
    );
    cuGraphInstantiate = cuGraphInstantiateWithFlags(
        exec: *mut CUgraphExec,
        graph: CUgraph,
        flags: c_ulonglong,
    );
    cuGraphExecDestroy = cuGraphExecDestroy(exec: CUgraphExec);
    cuGraphLaunch = cuGraphLaunch(exec: CUgraphExec, stream: CUstream);
}

// Where `=>` stands above, the integer has the size of the enum that it replaces.
const _: () = assert!(size_of::<sys::CUdevice_attribute>() == size_of::<u32>());
const _: () = assert!(size_of::<sys::CUresult>() == size_of::<u32>());

/// The answer `result` of the call `call`; 0 is success.
fn check(call: &'static str, result: u32) -> DriverResult<()> {
    match result {
        0 => Ok(()),
        code => Err(DriverError::new(call, ErrorCode(code))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" fn never_called() -> u32 {
        unreachable!("the table is only filled")
    }

    #[test]
    fn a_missing_call_is_named_before_anything_is_called() {
        let mut asked = Vec::new();
        let mut address_of = |symbol: &'static str| {
            asked.push(symbol);
            let missing = symbol == "cuMemMap";
            if missing { std::ptr::null_mut() } else { never_called as *mut c_void }
        };
        // SAFETY: the table is dropped without a call through it.
        let refused = unsafe { Api::resolve(&mut address_of) }.err();
        assert_eq!(refused, Some(Unavailable::MissingSymbol { symbol: "cuMemMap" }));
        assert!(asked.contains(&"cuMemAlloc_v2"));
        assert!(!asked.contains(&"cuMemUnmap"), "the first missing call ends the search");
    }

    #[test]
    fn a_code_without_a_name_is_carried() {
        assert_eq!(check("cuInit", 0), Ok(()));
        let error = check("cuMemAlloc", 987_654).unwrap_err();
        assert_eq!(error, DriverError::new("cuMemAlloc", ErrorCode(987_654)));
        assert_eq!(error.to_string(), "cuMemAlloc: CUDA error 987654");
    }
}
