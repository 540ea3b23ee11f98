//! The trait's methods, each as the driver call of its name.
//!
//! Handles are opaque numbers to this crate and pointers to the driver; `as` turns one into the
//! other and changes nothing.

use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr;

use cudarc::driver::sys::{
    CU_MEMHOSTALLOC_DEVICEMAP, CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_WRITECOMBINED,
    CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_PORTABLE, CUDA_KERNEL_NODE_PARAMS, CUcontext,
    CUevent, CUevent_flags, CUfunction, CUgraph, CUgraphExec, CUgraphNode,
    CUmemAllocationGranularity_flags, CUmodule, CUstream, CUstream_flags, CUstreamCaptureMode,
    CUuuid,
};
use smallvec::SmallVec;

use super::{CudaDriver, descriptors, jit};
use crate::{
    AccessDesc, AllocationProp, BatchCopy, DeviceAttribute, DeviceInfo, Driver, DriverError,
    DriverResult, ErrorCode, Granularity, HostAllocFlags, HostRegisterFlags, KernelArgs,
    LaunchConfig, MemoryKind, PeerAttribute, PeerCopy, PointerAttributes,
};

/// Room for a device's name, and for its bus id.
const TEXT_BYTES: usize = 256;

impl Driver for CudaDriver {
    fn name(&self) -> &'static str {
        "cuda"
    }

    // --- Devices -------------------------------------------------------------------------------
    //
    // A `CUdevice` is the ordinal (`load` checks it), and the driver answers `INVALID_DEVICE` to
    // any other number.

    fn driver_get_version(&self) -> DriverResult<i32> {
        let mut version = 0;
        // SAFETY: `version` is live and of the type that the call writes.
        unsafe { self.api.cuDriverGetVersion(&mut version) }?;
        Ok(version)
    }

    fn device_get_count(&self) -> DriverResult<i32> {
        let mut count = 0;
        // SAFETY: `count` is live and of the type that the call writes.
        unsafe { self.api.cuDeviceGetCount(&mut count) }?;
        Ok(count)
    }

    fn device_get_info(&self, device: i32) -> DriverResult<DeviceInfo> {
        let mut name = [0u8; TEXT_BYTES];
        let buffer = name.as_mut_ptr().cast::<c_char>();
        // SAFETY: the buffer is live and as long as the call is told.
        unsafe { self.api.cuDeviceGetName(buffer, TEXT_BYTES as i32, device) }?;
        let mut uuid = CUuuid { bytes: [0; 16] };
        // SAFETY: `uuid` is live and of the type that the call writes.
        unsafe { self.api.cuDeviceGetUuid(&mut uuid, device) }?;
        let mut total_bytes = 0;
        // SAFETY: `total_bytes` is live and of the type that the call writes.
        unsafe { self.api.cuDeviceTotalMem(&mut total_bytes, device) }?;
        let mut bus_id = [0u8; TEXT_BYTES];
        let buffer = bus_id.as_mut_ptr().cast::<c_char>();
        // SAFETY: the buffer is live and as long as the call is told.
        unsafe { self.api.cuDeviceGetPCIBusId(buffer, TEXT_BYTES as i32, device) }?;
        Ok(DeviceInfo {
            name: text(&name),
            uuid: uuid.bytes.map(|byte| byte as u8),
            total_bytes: total_bytes as u64,
            pci_bus_id: text(&bus_id),
        })
    }

    fn device_get_attribute(&self, device: i32, attribute: DeviceAttribute) -> DriverResult<i32> {
        let mut value = 0;
        // SAFETY: `value` is live and of the type that the call writes; any number is allowed as
        // an attribute, unknown ones are answered with an error.
        unsafe { self.api.cuDeviceGetAttribute(&mut value, attribute.0, device) }?;
        Ok(value)
    }

    fn device_can_access_peer(&self, device: i32, peer: i32) -> DriverResult<bool> {
        let mut can_access = 0;
        // SAFETY: `can_access` is live and of the type that the call writes.
        unsafe { self.api.cuDeviceCanAccessPeer(&mut can_access, device, peer) }?;
        Ok(can_access != 0)
    }

    fn device_get_p2p_attribute(
        &self,
        attribute: PeerAttribute,
        device: i32,
        peer: i32,
    ) -> DriverResult<i32> {
        let mut value = 0;
        // SAFETY: `value` is live and of the type that the call writes; any number is allowed as
        // an attribute, unknown ones are answered with an error.
        unsafe { self.api.cuDeviceGetP2PAttribute(&mut value, attribute.0, device, peer) }?;
        Ok(value)
    }

    // --- Contexts ------------------------------------------------------------------------------

    fn device_primary_ctx_retain(&self, device: i32) -> DriverResult<u64> {
        let mut context: CUcontext = ptr::null_mut();
        // SAFETY: `context` is live and of the type that the call writes.
        unsafe { self.api.cuDevicePrimaryCtxRetain(&mut context, device) }?;
        Ok(context as u64)
    }

    unsafe fn device_primary_ctx_release(&self, device: i32) -> DriverResult<()> {
        // SAFETY: the caller uses no handle of the context after its last release.
        unsafe { self.api.cuDevicePrimaryCtxRelease(device) }
    }

    fn ctx_get_current(&self) -> DriverResult<u64> {
        let mut context: CUcontext = ptr::null_mut();
        // SAFETY: `context` is live and of the type that the call writes.
        unsafe { self.api.cuCtxGetCurrent(&mut context) }?;
        Ok(context as u64)
    }

    unsafe fn ctx_set_current(&self, context: u64) -> DriverResult<()> {
        // SAFETY: the caller passes a live context or 0, which is the null that unbinds.
        unsafe { self.api.cuCtxSetCurrent(context as CUcontext) }
    }

    fn ctx_get_device(&self) -> DriverResult<i32> {
        let mut device = 0;
        // SAFETY: `device` is live and of the type that the call writes.
        unsafe { self.api.cuCtxGetDevice(&mut device) }?;
        Ok(device)
    }

    fn ctx_synchronize(&self) -> DriverResult<()> {
        // SAFETY: no arguments; without a current context the driver answers with an error.
        unsafe { self.api.cuCtxSynchronize() }
    }

    unsafe fn ctx_enable_peer_access(&self, peer_context: u64) -> DriverResult<()> {
        // SAFETY: the caller passes a live context; the flags must be 0.
        unsafe { self.api.cuCtxEnablePeerAccess(peer_context as CUcontext, 0) }
    }

    unsafe fn ctx_disable_peer_access(&self, peer_context: u64) -> DriverResult<()> {
        // SAFETY: the caller passes a live context.
        unsafe { self.api.cuCtxDisablePeerAccess(peer_context as CUcontext) }
    }

    // --- Streams and events --------------------------------------------------------------------

    fn stream_create(&self, blocking: bool) -> DriverResult<u64> {
        let flags = if blocking {
            CUstream_flags::CU_STREAM_DEFAULT
        } else {
            CUstream_flags::CU_STREAM_NON_BLOCKING
        };
        let mut stream: CUstream = ptr::null_mut();
        // SAFETY: `stream` is live and of the type that the call writes.
        unsafe { self.api.cuStreamCreate(&mut stream, flags as u32) }?;
        Ok(stream as u64)
    }

    unsafe fn stream_destroy(&self, stream: u64) -> DriverResult<()> {
        // SAFETY: the caller passes a live stream and uses it no more.
        unsafe { self.api.cuStreamDestroy(stream as CUstream) }
    }

    unsafe fn stream_synchronize(&self, stream: u64) -> DriverResult<()> {
        // SAFETY: the caller passes a live stream, or 0 for the default one.
        unsafe { self.api.cuStreamSynchronize(stream as CUstream) }
    }

    unsafe fn stream_query(&self, stream: u64) -> DriverResult<bool> {
        // SAFETY: the caller passes a live stream, or 0 for the default one.
        finished(unsafe { self.api.cuStreamQuery(stream as CUstream) })
    }

    unsafe fn stream_wait_event(&self, stream: u64, event: u64) -> DriverResult<()> {
        // SAFETY: the caller passes a live stream, or 0 for the default one, and a live event;
        // flags of 0 ask for the ordinary wait.
        unsafe { self.api.cuStreamWaitEvent(stream as CUstream, event as CUevent, 0) }
    }

    unsafe fn stream_get_ctx(&self, stream: u64) -> DriverResult<u64> {
        let mut context: CUcontext = ptr::null_mut();
        // SAFETY: the caller passes a live stream, or 0 for the default one; `context` is live and
        // of the type that the call writes.
        unsafe { self.api.cuStreamGetCtx(stream as CUstream, &mut context) }?;
        Ok(context as u64)
    }

    fn event_create(&self, timing: bool) -> DriverResult<u64> {
        let flags = if timing {
            CUevent_flags::CU_EVENT_DEFAULT
        } else {
            CUevent_flags::CU_EVENT_DISABLE_TIMING
        };
        let mut event: CUevent = ptr::null_mut();
        // SAFETY: `event` is live and of the type that the call writes.
        unsafe { self.api.cuEventCreate(&mut event, flags as u32) }?;
        Ok(event as u64)
    }

    unsafe fn event_destroy(&self, event: u64) -> DriverResult<()> {
        // SAFETY: the caller passes a live event and uses it no more.
        unsafe { self.api.cuEventDestroy(event as CUevent) }
    }

    unsafe fn event_record(&self, event: u64, stream: u64) -> DriverResult<()> {
        // SAFETY: the caller passes a live event and a live stream, or 0 for the default one.
        unsafe { self.api.cuEventRecord(event as CUevent, stream as CUstream) }
    }

    unsafe fn event_query(&self, event: u64) -> DriverResult<bool> {
        // SAFETY: the caller passes a live event.
        finished(unsafe { self.api.cuEventQuery(event as CUevent) })
    }

    unsafe fn event_synchronize(&self, event: u64) -> DriverResult<()> {
        // SAFETY: the caller passes a live event.
        unsafe { self.api.cuEventSynchronize(event as CUevent) }
    }

    unsafe fn event_elapsed_time(&self, start: u64, end: u64) -> DriverResult<f32> {
        let mut milliseconds = 0.0;
        // SAFETY: the caller passes live events; `milliseconds` is live and of the type that the
        // call writes.
        unsafe {
            self.api.cuEventElapsedTime(&mut milliseconds, start as CUevent, end as CUevent)
        }?;
        Ok(milliseconds)
    }

    // --- Memory --------------------------------------------------------------------------------

    fn mem_get_info(&self) -> DriverResult<(u64, u64)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: `free` and `total` are live and of the type that the call writes.
        unsafe { self.api.cuMemGetInfo(&mut free, &mut total) }?;
        Ok((free as u64, total as u64))
    }

    fn mem_alloc(&self, bytes: u64) -> DriverResult<u64> {
        let mut address = 0;
        // SAFETY: `address` is live and of the type that the call writes.
        unsafe { self.api.cuMemAlloc(&mut address, bytes as usize) }?;
        Ok(address)
    }

    unsafe fn mem_free(&self, address: u64) -> DriverResult<()> {
        // SAFETY: a device address is not followed by the host; the driver answers with an error
        // to one that it did not give out. Nothing that Rust knows lies in device memory.
        unsafe { self.api.cuMemFree(address) }
    }

    fn mem_host_alloc(&self, bytes: u64, flags: HostAllocFlags) -> DriverResult<u64> {
        let HostAllocFlags { portable, device_map, write_combined } = flags;
        let flags = flags_of(&[
            (portable, CU_MEMHOSTALLOC_PORTABLE),
            (device_map, CU_MEMHOSTALLOC_DEVICEMAP),
            (write_combined, CU_MEMHOSTALLOC_WRITECOMBINED),
        ]);
        let mut host: *mut c_void = ptr::null_mut();
        // SAFETY: `host` is live and of the type that the call writes.
        unsafe { self.api.cuMemHostAlloc(&mut host, bytes as usize, flags) }?;
        // Exposed: code that accesses the memory makes its pointers from this number.
        Ok(host.expose_provenance() as u64)
    }

    unsafe fn mem_free_host(&self, host: u64) -> DriverResult<()> {
        // SAFETY: the caller promises that nothing refers to the memory any more; the driver
        // answers with an error to an address that it did not give out.
        unsafe { self.api.cuMemFreeHost(host_address(host)) }
    }

    unsafe fn mem_host_register(
        &self,
        host: u64,
        bytes: u64,
        flags: HostRegisterFlags,
    ) -> DriverResult<()> {
        let HostRegisterFlags { portable, device_map } = flags;
        let flags = flags_of(&[
            (portable, CU_MEMHOSTREGISTER_PORTABLE),
            (device_map, CU_MEMHOSTREGISTER_DEVICEMAP),
        ]);
        // SAFETY: the caller keeps the memory mapped until it is unregistered; the driver answers
        // with an error to a range that is not.
        unsafe { self.api.cuMemHostRegister(host_address(host), bytes as usize, flags) }
    }

    unsafe fn mem_host_unregister(&self, host: u64) -> DriverResult<()> {
        // SAFETY: the caller promises that the device uses the memory no more; the driver answers
        // with an error to an address that was not registered.
        unsafe { self.api.cuMemHostUnregister(host_address(host)) }
    }

    fn mem_host_get_device_pointer(&self, host: u64) -> DriverResult<u64> {
        let mut address = 0;
        // SAFETY: `address` is live and of the type that the call writes; the host address is
        // looked up, not followed; the flags must be 0.
        unsafe { self.api.cuMemHostGetDevicePointer(&mut address, host_address(host), 0) }?;
        Ok(address)
    }

    fn pointer_get_attributes(&self, address: u64) -> DriverResult<PointerAttributes> {
        let (mut kind, mut device, mut start, mut bytes) = (0u32, 0i32, 0u64, 0usize);
        // CU_POINTER_ATTRIBUTE_MEMORY_TYPE, DEVICE_ORDINAL, RANGE_START_ADDR and RANGE_SIZE.
        let mut attributes = [2u32, 9, 11, 12];
        let mut data: [*mut c_void; 4] = [
            (&raw mut kind).cast(),
            (&raw mut device).cast(),
            (&raw mut start).cast(),
            (&raw mut bytes).cast(),
        ];
        // SAFETY: each of the 4 attributes has room of its type, as the driver's documentation names
        // it (`CUmemorytype`, `int`, `CUdeviceptr`, `size_t`); the address is looked up, not followed.
        unsafe {
            self.api.cuPointerGetAttributes(4, attributes.as_mut_ptr(), data.as_mut_ptr(), address)
        }?;
        // CU_MEMORYTYPE_HOST and DEVICE; of an address that it does not know the driver says 0.
        let kind = match kind {
            1 => Some(MemoryKind::Host),
            2 => Some(MemoryKind::Device),
            _ => None,
        };
        Ok(PointerAttributes { kind, device, start, bytes: bytes as u64 })
    }

    unsafe fn memcpy_htod_async(
        &self,
        destination: u64,
        host_source: u64,
        bytes: u64,
        stream: u64,
    ) -> DriverResult<()> {
        let source = host_address(host_source);
        // SAFETY: the caller keeps the source allocated until the copy has completed and passes a
        // live stream; the destination is no memory that Rust code accesses.
        unsafe {
            self.api.cuMemcpyHtoDAsync(destination, source, bytes as usize, stream as CUstream)
        }
    }

    unsafe fn memcpy_dtoh_async(
        &self,
        host_destination: u64,
        source: u64,
        bytes: u64,
        stream: u64,
    ) -> DriverResult<()> {
        let destination = host_address(host_destination);
        // SAFETY: the caller keeps the destination allocated, and neither reads nor writes it,
        // until the copy has completed, and passes a live stream.
        unsafe {
            self.api.cuMemcpyDtoHAsync(destination, source, bytes as usize, stream as CUstream)
        }
    }

    unsafe fn memcpy_dtod_async(
        &self,
        destination: u64,
        source: u64,
        bytes: u64,
        stream: u64,
    ) -> DriverResult<()> {
        // SAFETY: the caller passes a live stream and no destination that Rust code accesses.
        unsafe {
            self.api.cuMemcpyDtoDAsync(destination, source, bytes as usize, stream as CUstream)
        }
    }

    unsafe fn memcpy_peer_async(&self, copy: PeerCopy, stream: u64) -> DriverResult<()> {
        // SAFETY: the caller passes live contexts, a live stream and no destination that Rust code
        // accesses.
        unsafe {
            self.api.cuMemcpyPeerAsync(
                copy.destination,
                copy.destination_context as CUcontext,
                copy.source,
                copy.source_context as CUcontext,
                copy.bytes as usize,
                stream as CUstream,
            )
        }
    }

    unsafe fn memcpy_batch_async(&self, copies: &[BatchCopy], stream: u64) -> DriverResult<()> {
        // SAFETY: the caller passes a live stream, keeps host ranges until the batch has run, and
        // no destination that Rust code accesses meanwhile.
        unsafe { self.batch.enqueue(copies, stream as CUstream) }
    }

    unsafe fn memset_d8_async(
        &self,
        destination: u64,
        value: u8,
        bytes: u64,
        stream: u64,
    ) -> DriverResult<()> {
        // SAFETY: the caller passes a live stream and no destination that Rust code accesses.
        unsafe { self.api.cuMemsetD8Async(destination, value, bytes as usize, stream as CUstream) }
    }

    // --- Virtual memory ------------------------------------------------------------------------
    //
    // Addresses that these calls take are looked up by the driver, never followed: a wrong one is
    // an error value, also a second free. Handles of physical memory are followed.

    fn mem_get_allocation_granularity(
        &self,
        prop: AllocationProp,
        which: Granularity,
    ) -> DriverResult<u64> {
        use CUmemAllocationGranularity_flags as Flags;
        let which = match which {
            Granularity::Minimum => Flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM,
            Granularity::Recommended => Flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
        };
        let prop = descriptors::allocation_prop(prop);
        let mut granularity = 0;
        // SAFETY: `granularity` is live and of the type that the call writes; `prop` is live and
        // fully initialised.
        unsafe { self.api.cuMemGetAllocationGranularity(&mut granularity, &prop, which) }?;
        Ok(granularity as u64)
    }

    fn mem_address_reserve(&self, bytes: u64, alignment: u64, hint: u64) -> DriverResult<u64> {
        let (bytes, alignment) = (bytes as usize, alignment as usize);
        let mut address = 0;
        // SAFETY: `address` is live and of the type that the call writes; the flags must be 0.
        unsafe { self.api.cuMemAddressReserve(&mut address, bytes, alignment, hint, 0) }?;
        Ok(address)
    }

    fn mem_address_free(&self, address: u64, bytes: u64) -> DriverResult<()> {
        // SAFETY: the range is looked up, see above.
        unsafe { self.api.cuMemAddressFree(address, bytes as usize) }
    }

    fn mem_create(&self, bytes: u64, prop: AllocationProp) -> DriverResult<u64> {
        let prop = descriptors::allocation_prop(prop);
        let mut handle = 0;
        // SAFETY: `handle` is live and of the type that the call writes; `prop` is live and fully
        // initialised; the flags must be 0.
        unsafe { self.api.cuMemCreate(&mut handle, bytes as usize, &prop, 0) }?;
        Ok(handle)
    }

    unsafe fn mem_release(&self, handle: u64) -> DriverResult<()> {
        // SAFETY: the caller passes a live handle, and uses it no more.
        unsafe { self.api.cuMemRelease(handle) }
    }

    unsafe fn mem_map(
        &self,
        address: u64,
        bytes: u64,
        offset: u64,
        handle: u64,
    ) -> DriverResult<()> {
        // SAFETY: the caller passes a live handle; the range is looked up, see above; the flags
        // must be 0.
        unsafe { self.api.cuMemMap(address, bytes as usize, offset as usize, handle, 0) }
    }

    fn mem_unmap(&self, address: u64, bytes: u64) -> DriverResult<()> {
        // SAFETY: the range is looked up, see above. Work that still uses it faults on the device.
        unsafe { self.api.cuMemUnmap(address, bytes as usize) }
    }

    fn mem_set_access(&self, address: u64, bytes: u64, access: &[AccessDesc]) -> DriverResult<()> {
        let access: SmallVec<[descriptors::Access; 8]> =
            access.iter().copied().map(descriptors::access_desc).collect();
        // SAFETY: the range is looked up, see above; there are as many fully initialised
        // descriptors as the call is told, and they outlive it.
        unsafe { self.api.cuMemSetAccess(address, bytes as usize, access.as_ptr(), access.len()) }
    }

    // --- Modules and kernels -------------------------------------------------------------------

    fn module_load_data(&self, ptx: &str, log: &mut String) -> DriverResult<u64> {
        Ok(jit::load(&self.api, ptx, log)? as u64)
    }

    unsafe fn module_unload(&self, module: u64) -> DriverResult<()> {
        // SAFETY: the caller passes a live module and uses neither it nor its kernels any more.
        unsafe { self.api.cuModuleUnload(module as CUmodule) }
    }

    unsafe fn module_get_function(&self, module: u64, name: &str) -> DriverResult<u64> {
        let Ok(name) = CString::new(name) else {
            return Err(DriverError::new("cuModuleGetFunction", ErrorCode::NOT_FOUND));
        };
        let mut function: CUfunction = ptr::null_mut();
        // SAFETY: the caller passes a live module; `function` is live and of the type that the
        // call writes; the name ends with a NUL and outlives the call.
        unsafe { self.api.cuModuleGetFunction(&mut function, module as CUmodule, name.as_ptr()) }?;
        Ok(function as u64)
    }

    unsafe fn launch_kernel(
        &self,
        function: u64,
        config: &LaunchConfig,
        args: &KernelArgs,
        stream: u64,
    ) -> DriverResult<()> {
        let [grid_x, grid_y, grid_z] = config.grid;
        let [block_x, block_y, block_z] = config.block;
        let mut parameters = pointers(args);
        // SAFETY: the caller passes a live function and a live stream, and arguments of the number,
        // order and sizes of the parameters: the driver reads, and does not write, as many
        // pointers as there are parameters, and behind each the parameter's bytes. It has copied
        // them when the call returns, and `args` is borrowed until then.
        unsafe {
            self.api.cuLaunchKernel(
                function as CUfunction,
                grid_x,
                grid_y,
                grid_z,
                block_x,
                block_y,
                block_z,
                config.shared_bytes,
                stream as CUstream,
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        }
    }

    // --- Graphs --------------------------------------------------------------------------------

    fn graph_create(&self) -> DriverResult<u64> {
        let mut graph: CUgraph = ptr::null_mut();
        // SAFETY: `graph` is live and of the type that the call writes; the flags must be 0.
        unsafe { self.api.cuGraphCreate(&mut graph, 0) }?;
        Ok(graph as u64)
    }

    unsafe fn stream_begin_capture(&self, stream: u64) -> DriverResult<()> {
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the caller passes a live stream, or 0 for the default one.
        unsafe { self.api.cuStreamBeginCapture(stream as CUstream, mode) }
    }

    unsafe fn stream_end_capture(&self, stream: u64) -> DriverResult<u64> {
        let mut graph: CUgraph = ptr::null_mut();
        // SAFETY: the caller passes a live stream, or 0 for the default one; `graph` is live and of the
        // type that the call writes.
        unsafe { self.api.cuStreamEndCapture(stream as CUstream, &mut graph) }?;
        Ok(graph as u64)
    }

    unsafe fn graph_destroy(&self, graph: u64) -> DriverResult<()> {
        // SAFETY: the caller passes a live graph and uses it no more.
        unsafe { self.api.cuGraphDestroy(graph as CUgraph) }
    }

    unsafe fn graph_add_kernel_node(
        &self,
        graph: u64,
        function: u64,
        config: &LaunchConfig,
        args: &KernelArgs,
    ) -> DriverResult<u64> {
        let mut arguments = pointers(args);
        let node_of = CUDA_KERNEL_NODE_PARAMS {
            func: function as CUfunction,
            gridDimX: config.grid[0],
            gridDimY: config.grid[1],
            gridDimZ: config.grid[2],
            blockDimX: config.block[0],
            blockDimY: config.block[1],
            blockDimZ: config.block[2],
            sharedMemBytes: config.shared_bytes,
            kernelParams: arguments.as_mut_ptr(),
            extra: ptr::null_mut(),
            kern: ptr::null_mut(),
            ctx: ptr::null_mut(),
        };
        let mut node: CUgraphNode = ptr::null_mut();
        // SAFETY: the caller passes a live graph, a live function, and arguments of the number, order
        // and sizes of its parameters; the driver copies them, and `args` is borrowed until the call
        // returns. `node` is live and of the type that the call writes. There are no dependencies.
        unsafe {
            self.api.cuGraphAddKernelNode(&mut node, graph as CUgraph, ptr::null(), 0, &node_of)
        }?;
        Ok(node as u64)
    }

    unsafe fn graph_instantiate(&self, graph: u64) -> DriverResult<u64> {
        let mut exec: CUgraphExec = ptr::null_mut();
        // SAFETY: the caller passes a live graph; `exec` is live and of the type that the call writes;
        // flags of 0 ask for nothing special.
        unsafe { self.api.cuGraphInstantiate(&mut exec, graph as CUgraph, 0) }?;
        Ok(exec as u64)
    }

    unsafe fn graph_exec_destroy(&self, exec: u64) -> DriverResult<()> {
        // SAFETY: the caller passes a live instance and uses it no more.
        unsafe { self.api.cuGraphExecDestroy(exec as CUgraphExec) }
    }

    unsafe fn graph_launch(&self, exec: u64, stream: u64) -> DriverResult<()> {
        // SAFETY: the caller passes a live instance, whose kernels access what they may, and a live
        // stream, or 0 for the default one.
        unsafe { self.api.cuGraphLaunch(exec as CUgraphExec, stream as CUstream) }
    }
}

/// The pointer behind a host address, with the provenance that was exposed for it.
fn host_address(address: u64) -> *mut c_void {
    ptr::with_exposed_provenance_mut(address as usize)
}

/// A pointer to each argument.
fn pointers(args: &KernelArgs) -> SmallVec<[*mut c_void; 16]> {
    let each = (0..args.count()).filter_map(|index| args.bytes(index));
    each.map(|bytes| bytes.as_ptr().cast_mut().cast()).collect()
}

/// The flags that were asked for, together.
fn flags_of(flags: &[(bool, u32)]) -> u32 {
    flags.iter().filter(|(asked, _)| *asked).fold(0, |all, (_, flag)| all | flag)
}

/// Whether a queried piece of work has completed; not yet is no error.
fn finished(queried: DriverResult<()>) -> DriverResult<bool> {
    match queried {
        Ok(()) => Ok(true),
        Err(error) if error.code == ErrorCode::NOT_READY => Ok(false),
        Err(error) => Err(error),
    }
}

/// The text before the first NUL.
fn text(buffer: &[u8]) -> String {
    let text = CStr::from_bytes_until_nul(buffer).map_or(buffer, CStr::to_bytes);
    String::from_utf8_lossy(text).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unfinished_work_is_an_answer_and_not_an_error() {
        assert_eq!(finished(Ok(())), Ok(true));
        let query = |code| Err(DriverError::new("cuEventQuery", code));
        assert_eq!(finished(query(ErrorCode::NOT_READY)), Ok(false));
        let fault = DriverError::new("cuEventQuery", ErrorCode::ILLEGAL_ADDRESS);
        assert_eq!(finished(Err(fault)), Err(fault));
    }

    #[test]
    fn text_ends_at_the_first_nul_or_with_the_buffer() {
        assert_eq!(text(b"NVIDIA H100\0rest"), "NVIDIA H100");
        assert_eq!(text(b"full"), "full");
        assert_eq!(text(b"\xff\0"), "\u{fffd}");
    }
}
