//! The seam: our driver calls, as one object-safe trait over plain integers.

use core::fmt;
use core::time::Duration;

use crate::{
    AccessDesc, DeviceAttribute, DeviceInfo, DriverError, Granularity, HostAllocFlags,
    HostRegisterFlags, KernelArgs, LaunchConfig, PeerAttribute, PointerAttributes,
};

/// `Result` of a driver call.
pub type DriverResult<T> = Result<T, DriverError>;

/// An access of the host to memory that devices can reach too.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct HostAccess {
    /// First address, as the host knows it.
    pub address: u64,
    /// Length, in bytes.
    pub bytes: u64,
    /// Whether the access may change the bytes.
    pub writes: bool,
}

/// Physical memory to create: pinned memory on one device (`CUmemAllocationProp`).
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct AllocationProp {
    /// Ordinal of the device that holds the memory.
    pub device: i32,
}

impl AllocationProp {
    /// Memory of `device`.
    #[must_use]
    pub const fn on(device: i32) -> Self {
        Self { device }
    }
}

/// The driver calls that these crates make.
///
/// One method per call, named like the call (`cuMemMap` is [`mem_map`](Driver::mem_map)), plain
/// integers in, [`DriverError`] out. Handles and device addresses are `u64`; 0 is the null handle
/// (for a stream: the legacy default stream). Host addresses are `u64` as well, since under unified
/// addressing they are of one space. Calls act on the calling thread's current context wherever the
/// driver's do; the handles of this crate bind it, callers of the trait must.
///
/// Beside the calls, a driver is told two things: the host's [accesses](Driver::host_access) to
/// memory that devices reach too, and, on the thread of each call, the [line](crate::site) of the
/// program that made it. Drivers use them for reports. No call, argument or answer depends on them.
///
/// The trait is object safe on purpose: a virtual call costs nanoseconds and the cheapest driver
/// call about 0.3 µs.
///
/// # Safety of the seam
///
/// A driver follows the handles and host addresses it is given. Each `unsafe` method asks of its caller:
///
/// * every handle argument came from this driver object, is of the right kind and was not
///   destroyed;
/// * every host range that an operation reads stays allocated until the operation has completed on
///   the device, not only until the call returned, and is not written by the host meanwhile; a host
///   range that it writes is, until then, neither read nor written by the host;
/// * every device range that an operation writes is not host memory that Rust code accesses (with
///   unified addressing a device address may name host memory);
/// * a kernel's arguments have the number, order and sizes of its parameters, and all that it
///   accesses through them obeys the two points before this one.
///
/// Device memory is outside Rust's memory model. The device answers a wrong device address with an
/// error, and the order of operations is a matter of correctness, not of soundness.
pub trait Driver: fmt::Debug + Send + Sync {
    /// Short name of the implementation for reports: `cuda` or `sim`.
    fn name(&self) -> &'static str;

    /// Time on the host's clock of a simulated machine; `None` on a real one.
    fn virtual_now(&self) -> Option<Duration> {
        None
    }

    /// Tells a driver that checks orders about an access of this thread to memory that devices can
    /// reach too. It is no call of CUDA. A driver that does not check orders ignores it.
    ///
    /// Code that reads or writes pinned memory calls this just before each access. Inside a
    /// function that a stream calls, it counts as an access of that stream.
    fn host_access(&self, access: HostAccess) {
        let _ = access;
    }

    // --- Devices -------------------------------------------------------------------------------

    /// `cuDriverGetVersion`: 12080 for CUDA 12.8.
    ///
    /// # Errors
    /// What the driver answers.
    fn driver_get_version(&self) -> DriverResult<i32>;

    /// `cuDeviceGetCount`.
    ///
    /// # Errors
    /// What the driver answers.
    fn device_get_count(&self) -> DriverResult<i32>;

    /// `cuDeviceGetName`, `cuDeviceGetUuid_v2`, `cuDeviceTotalMem` and `cuDeviceGetPCIBusId`.
    ///
    /// # Errors
    /// `INVALID_DEVICE` for an ordinal that names no device.
    fn device_get_info(&self, device: i32) -> DriverResult<DeviceInfo>;

    /// `cuDeviceGetAttribute`.
    ///
    /// # Errors
    /// `INVALID_DEVICE`, or `INVALID_VALUE` for an attribute the driver does not know.
    fn device_get_attribute(&self, device: i32, attribute: DeviceAttribute) -> DriverResult<i32>;

    /// `cuDeviceCanAccessPeer`: whether `device` may map memory of `peer`.
    ///
    /// # Errors
    /// `INVALID_DEVICE`.
    fn device_can_access_peer(&self, device: i32, peer: i32) -> DriverResult<bool>;

    /// `cuDeviceGetP2PAttribute`: an attribute of the way from `device` to `peer`.
    ///
    /// # Errors
    /// `INVALID_DEVICE`, also for a device and itself; `INVALID_VALUE` for an attribute the driver does
    /// not know.
    fn device_get_p2p_attribute(
        &self,
        attribute: PeerAttribute,
        device: i32,
        peer: i32,
    ) -> DriverResult<i32>;

    // --- Contexts ------------------------------------------------------------------------------

    /// `cuDevicePrimaryCtxRetain`: the primary context of `device`, its count raised by one.
    ///
    /// # Errors
    /// `INVALID_DEVICE`, `OUT_OF_MEMORY`.
    fn device_primary_ctx_retain(&self, device: i32) -> DriverResult<u64>;

    /// `cuDevicePrimaryCtxRelease`: lowers the count; at zero everything in the context is gone.
    ///
    /// # Errors
    /// `INVALID_CONTEXT` when it is not retained.
    ///
    /// # Safety
    /// See [Safety of the seam](Driver#safety-of-the-seam): no handle of the context is used after the
    /// last release.
    unsafe fn device_primary_ctx_release(&self, device: i32) -> DriverResult<()>;

    /// `cuCtxGetCurrent`: the calling thread's context, 0 for none.
    ///
    /// # Errors
    /// What the driver answers.
    fn ctx_get_current(&self) -> DriverResult<u64>;

    /// `cuCtxSetCurrent`: binds `context` (0 unbinds) to the calling thread.
    ///
    /// # Errors
    /// `INVALID_CONTEXT`.
    ///
    /// # Safety
    /// See [Safety of the seam](Driver#safety-of-the-seam).
    unsafe fn ctx_set_current(&self, context: u64) -> DriverResult<()>;

    /// `cuCtxGetDevice`: ordinal of the current context's device.
    ///
    /// # Errors
    /// `INVALID_CONTEXT` when none is current.
    fn ctx_get_device(&self) -> DriverResult<i32>;

    /// `cuCtxSynchronize`: waits for all work of the current context.
    ///
    /// # Errors
    /// The sticky error of the work, if it failed.
    fn ctx_synchronize(&self) -> DriverResult<()>;

    /// `cuCtxEnablePeerAccess`: lets the current context access memory of `peer_context`.
    ///
    /// Covers `cuMemAlloc` memory, not virtual mappings: those take an [`AccessDesc`] a peer.
    ///
    /// # Errors
    /// `PEER_ACCESS_ALREADY_ENABLED`, `PEER_ACCESS_UNSUPPORTED`.
    ///
    /// # Safety
    /// See [Safety of the seam](Driver#safety-of-the-seam).
    unsafe fn ctx_enable_peer_access(&self, peer_context: u64) -> DriverResult<()>;

    /// `cuCtxDisablePeerAccess`.
    ///
    /// # Errors
    /// `PEER_ACCESS_NOT_ENABLED`.
    ///
    /// # Safety
    /// See [Safety of the seam](Driver#safety-of-the-seam).
    unsafe fn ctx_disable_peer_access(&self, peer_context: u64) -> DriverResult<()>;

    // --- Streams and events --------------------------------------------------------------------

    /// `cuStreamCreate`, with `CU_STREAM_NON_BLOCKING` unless `blocking`.
    ///
    /// # Errors
    /// `INVALID_CONTEXT`, `OUT_OF_MEMORY`.
    fn stream_create(&self, blocking: bool) -> DriverResult<u64>;

    /// `cuStreamDestroy`: returns at once; work already enqueued still runs.
    ///
    /// # Errors
    /// `INVALID_HANDLE`.
    ///
    /// # Safety
    /// See [Safety of the seam](Driver#safety-of-the-seam).
    unsafe fn stream_destroy(&self, stream: u64) -> DriverResult<()>;

    /// `cuStreamSynchronize`.
    ///
    /// # Errors
    /// The sticky error of the work, if it failed.
    ///
    /// # Safety
    /// See [Safety of the seam](Driver#safety-of-the-seam).
    unsafe fn stream_synchronize(&self, stream: u64) -> DriverResult<()>;

    /// `cuStreamQuery`: whether all work of the stream has completed.
    ///
    /// # Errors
    /// The sticky error of the work, if it failed. Unfinished work is `Ok(false)`.
    ///
    /// # Safety
    /// See [Safety of the seam](Driver#safety-of-the-seam).
    unsafe fn stream_query(&self, stream: u64) -> DriverResult<bool>;

    /// `cuStreamWaitEvent`: later work of `stream` waits for the last record of `event`.
    ///
    /// # Errors
    /// `INVALID_HANDLE`.
    ///
    /// # Safety
    /// See [Safety of the seam](Driver#safety-of-the-seam).
    unsafe fn stream_wait_event(&self, stream: u64, event: u64) -> DriverResult<()>;

    /// `cuStreamGetCtx`: the context that the stream belongs to.
    ///
    /// # Errors
    /// `INVALID_HANDLE`.
    ///
    /// # Safety
    /// See [Safety of the seam](Driver#safety-of-the-seam).
    unsafe fn stream_get_ctx(&self, stream: u64) -> DriverResult<u64>;

    /// `cuEventCreate`, with `CU_EVENT_DISABLE_TIMING` unless `timing`.
    ///
    /// # Errors
    /// `INVALID_CONTEXT`, `OUT_OF_MEMORY`.
    fn event_create(&self, timing: bool) -> DriverResult<u64>;

    /// `cuEventDestroy`: returns at once, whether or not the event has completed.
    ///
    /// # Errors
    /// `INVALID_HANDLE`.
    ///
    /// # Safety
    /// See [Safety of the seam](Driver#safety-of-the-seam).
    unsafe fn event_destroy(&self, event: u64) -> DriverResult<()>;

    /// `cuEventRecord`: the event completes when the stream's work enqueued so far has.
    ///
    /// # Errors
    /// `INVALID_HANDLE` also when stream and event are of different contexts.
    ///
    /// # Safety
    /// See [Safety of the seam](Driver#safety-of-the-seam).
    unsafe fn event_record(&self, event: u64, stream: u64) -> DriverResult<()>;

    /// `cuEventQuery`: whether the last record has completed; true if there was none.
    ///
    /// # Errors
    /// The sticky error of the work, if it failed. Not ready is `Ok(false)`.
    ///
    /// # Safety
    /// See [Safety of the seam](Driver#safety-of-the-seam).
    unsafe fn event_query(&self, event: u64) -> DriverResult<bool>;

    /// `cuEventSynchronize`.
    ///
    /// # Errors
    /// The sticky error of the work, if it failed.
    ///
    /// # Safety
    /// See [Safety of the seam](Driver#safety-of-the-seam).
    unsafe fn event_synchronize(&self, event: u64) -> DriverResult<()>;

    /// `cuEventElapsedTime` between two completed timing events, in milliseconds.
    ///
    /// # Errors
    /// `NOT_READY` before both have completed, `INVALID_HANDLE` without timing or record.
    ///
    /// # Safety
    /// See [Safety of the seam](Driver#safety-of-the-seam).
    unsafe fn event_elapsed_time(&self, start: u64, end: u64) -> DriverResult<f32>;

    // --- Memory --------------------------------------------------------------------------------

    /// `cuMemGetInfo`: free and total bytes of the current context's device.
    ///
    /// # Errors
    /// `INVALID_CONTEXT`.
    fn mem_get_info(&self) -> DriverResult<(u64, u64)>;

    /// `cuMemAlloc`: at least `bytes` bytes, aligned to at least 256.
    ///
    /// # Errors
    /// `INVALID_VALUE` for 0 bytes, `OUT_OF_MEMORY`.
    fn mem_alloc(&self, bytes: u64) -> DriverResult<u64>;

    /// `cuMemFree`: waits until no work uses the memory, then frees it.
    ///
    /// # Errors
    /// `INVALID_VALUE` for an address that is not the start of a live allocation.
    ///
    /// # Safety
    /// See [Safety of the seam](Driver#safety-of-the-seam).
    unsafe fn mem_free(&self, address: u64) -> DriverResult<()>;

    /// `cuMemHostAlloc`: pinned host memory; the result is a host address, page aligned.
    ///
    /// 0 bytes are a success with the address 0.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY`.
    fn mem_host_alloc(&self, bytes: u64, flags: HostAllocFlags) -> DriverResult<u64>;

    /// `cuMemFreeHost`: waits for work that uses the memory, then frees it.
    ///
    /// # Errors
    /// `INVALID_VALUE` for an address that is not the start of such memory.
    ///
    /// # Safety
    /// See [Safety of the seam](Driver#safety-of-the-seam); nothing refers to the memory any more.
    unsafe fn mem_free_host(&self, host: u64) -> DriverResult<()>;

    /// `cuMemHostRegister`: pins memory that the host program has. Whole pages are pinned. The
    /// driver then accepts exactly `bytes` bytes from `host` on as pinned memory.
    ///
    /// # Errors
    /// `INVALID_VALUE` for no bytes and for addresses that nothing is mapped at;
    /// `HOST_MEMORY_ALREADY_REGISTERED` for a range that overlaps pinned memory; `OUT_OF_MEMORY`,
    /// `NOT_SUPPORTED`.
    ///
    /// # Safety
    /// See [Safety of the seam](Driver#safety-of-the-seam); and
    /// - the range is initialised memory of the process, and stays mapped there until it is
    ///   unregistered.
    unsafe fn mem_host_register(
        &self,
        host: u64,
        bytes: u64,
        flags: HostRegisterFlags,
    ) -> DriverResult<()>;

    /// `cuMemHostUnregister`: waits for all work of the context that registered the memory, and for
    /// no other context, then unpins the memory. A pending copy of the memory by another context
    /// loses that context's device.
    ///
    /// # Errors
    /// `HOST_MEMORY_NOT_REGISTERED` for memory that is not registered; `INVALID_VALUE` for an address
    /// inside a registration.
    ///
    /// # Safety
    /// See [Safety of the seam](Driver#safety-of-the-seam); the device uses the memory no more.
    unsafe fn mem_host_unregister(&self, host: u64) -> DriverResult<()>;

    /// `cuMemHostGetDevicePointer`: the address by which kernels reach pinned host memory.
    ///
    /// # Errors
    /// `INVALID_VALUE` for memory that is not pinned or not mapped for devices.
    fn mem_host_get_device_pointer(&self, host: u64) -> DriverResult<u64>;

    /// `cuPointerGetAttributes`: the memory at an address. The address is looked up, not followed.
    /// An unknown address is no error.
    ///
    /// # Errors
    /// `INVALID_CONTEXT`.
    fn pointer_get_attributes(&self, address: u64) -> DriverResult<PointerAttributes>;

    /// `cuMemcpyHtoDAsync`. Pinned memory is read when the copy runs, not when it is enqueued;
    /// pageable memory is staged before the call returns.
    ///
    /// # Errors
    /// `INVALID_VALUE` for a range that is not of one allocation or mapping.
    ///
    /// # Safety
    /// See [Safety of the seam](Driver#safety-of-the-seam).
    unsafe fn memcpy_htod_async(
        &self,
        destination: u64,
        host_source: u64,
        bytes: u64,
        stream: u64,
    ) -> DriverResult<()>;

    /// `cuMemcpyDtoHAsync`. For pageable memory the call returns after the copy has completed.
    ///
    /// # Errors
    /// As [`memcpy_htod_async`](Driver::memcpy_htod_async).
    ///
    /// # Safety
    /// See [Safety of the seam](Driver#safety-of-the-seam).
    unsafe fn memcpy_dtoh_async(
        &self,
        host_destination: u64,
        source: u64,
        bytes: u64,
        stream: u64,
    ) -> DriverResult<()>;

    /// `cuMemcpyDtoDAsync`, within one device or between peers that have access.
    ///
    /// # Errors
    /// As [`memcpy_htod_async`](Driver::memcpy_htod_async).
    ///
    /// # Safety
    /// See [Safety of the seam](Driver#safety-of-the-seam).
    unsafe fn memcpy_dtod_async(
        &self,
        destination: u64,
        source: u64,
        bytes: u64,
        stream: u64,
    ) -> DriverResult<()>;

    /// `cuMemcpyPeerAsync`: works without peer access too, then through host memory.
    ///
    /// # Errors
    /// As [`memcpy_htod_async`](Driver::memcpy_htod_async).
    ///
    /// # Safety
    /// See [Safety of the seam](Driver#safety-of-the-seam).
    unsafe fn memcpy_peer_async(&self, copy: PeerCopy, stream: u64) -> DriverResult<()>;

    /// `cuMemcpyBatchAsync` of CUDA 12.8: many copies, between any memories, by one call.
    ///
    /// The batch runs in stream order as a whole; its copies may run in any order and at once, so
    /// none may overlap what another writes. Sources are accessed in stream order: they are read
    /// when the batch runs.
    ///
    /// # Errors
    /// `NOT_SUPPORTED` from a driver that lacks the call; nothing was enqueued then.
    /// `INVALID_VALUE` for the legacy default stream, for a batch of no copies, for a copy of no
    /// bytes, and for a range that leaves its allocation or mapping; the copies before the one that is
    /// refused still run. An address of neither pinned nor device memory counts as pageable memory,
    /// and is followed during the call.
    ///
    /// # Safety
    /// See [Safety of the seam](Driver#safety-of-the-seam).
    unsafe fn memcpy_batch_async(&self, copies: &[BatchCopy], stream: u64) -> DriverResult<()>;

    /// `cuMemsetD8Async`.
    ///
    /// # Errors
    /// As [`memcpy_htod_async`](Driver::memcpy_htod_async).
    ///
    /// # Safety
    /// See [Safety of the seam](Driver#safety-of-the-seam).
    unsafe fn memset_d8_async(
        &self,
        destination: u64,
        value: u8,
        bytes: u64,
        stream: u64,
    ) -> DriverResult<()>;

    // --- Virtual memory ------------------------------------------------------------------------

    /// `cuMemGetAllocationGranularity`: sizes and addresses must be multiples of it.
    ///
    /// Driver 580 answers for a device that is not there as well.
    ///
    /// # Errors
    /// `NOT_SUPPORTED`.
    fn mem_get_allocation_granularity(
        &self,
        prop: AllocationProp,
        which: Granularity,
    ) -> DriverResult<u64>;

    /// `cuMemAddressReserve`: addresses without memory. `alignment` 0 means the granularity,
    /// `hint` 0 means anywhere.
    ///
    /// # Errors
    /// `INVALID_VALUE` for a size that is 0 or not a multiple of the granularity, `OUT_OF_MEMORY`.
    fn mem_address_reserve(&self, bytes: u64, alignment: u64, hint: u64) -> DriverResult<u64>;

    /// `cuMemAddressFree`: the whole of one reservation, with nothing mapped in it.
    ///
    /// # Errors
    /// `INVALID_VALUE` while something is mapped, for a part, and a second time.
    fn mem_address_free(&self, address: u64, bytes: u64) -> DriverResult<()>;

    /// `cuMemCreate`: physical memory, as a handle with one reference.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY`; `INVALID_VALUE` for a size that is not a multiple of the granularity.
    fn mem_create(&self, bytes: u64, prop: AllocationProp) -> DriverResult<u64>;

    /// `cuMemRelease`: releases the handle. The memory lives on until its last mapping is gone.
    ///
    /// Driver 580 answers `INVALID_VALUE` to some released handles and follows others.
    ///
    /// # Errors
    /// What the driver answers.
    ///
    /// # Safety
    /// See [Safety of the seam](Driver#safety-of-the-seam): `handle` came from
    /// [`mem_create`](Driver::mem_create) of this driver object, and this is its one release.
    unsafe fn mem_release(&self, handle: u64) -> DriverResult<()>;

    /// `cuMemMap`: maps physical memory at reserved addresses. Grants no access.
    ///
    /// # Errors
    /// `INVALID_VALUE` over a mapped page, for the same handle too, and for unaligned addresses;
    /// `NOT_SUPPORTED` for an offset, or for a size that is not the handle's.
    ///
    /// # Safety
    /// See [Safety of the seam](Driver#safety-of-the-seam): `handle` came from
    /// [`mem_create`](Driver::mem_create) of this driver object and was not released. Addresses may be any.
    unsafe fn mem_map(
        &self,
        address: u64,
        bytes: u64,
        offset: u64,
        handle: u64,
    ) -> DriverResult<()>;

    /// `cuMemUnmap`. Waits for no stream: the caller waits for every user first. A range that is
    /// not mapped, or only in part, is a success.
    ///
    /// # Errors
    /// `INVALID_VALUE` for addresses that are not reserved or that split a mapping.
    fn mem_unmap(&self, address: u64, bytes: u64) -> DriverResult<()>;

    /// `cuMemSetAccess`: gives each named device read-write access to a mapped range.
    ///
    /// # Errors
    /// `INVALID_VALUE` on a hole, or for a device that cannot reach the memory.
    fn mem_set_access(&self, address: u64, bytes: u64, access: &[AccessDesc]) -> DriverResult<()>;

    // --- Modules and kernels -------------------------------------------------------------------

    /// `cuModuleLoadDataEx`: compiles PTX for the current context's device. The compiler's messages
    /// are appended to `log`, on success and on failure.
    ///
    /// # Errors
    /// `INVALID_PTX`, `UNSUPPORTED_PTX_VERSION`, `INVALID_IMAGE`.
    fn module_load_data(&self, ptx: &str, log: &mut String) -> DriverResult<u64>;

    /// `cuModuleUnload`.
    ///
    /// # Errors
    /// `INVALID_HANDLE`.
    ///
    /// # Safety
    /// See [Safety of the seam](Driver#safety-of-the-seam); no kernel of the module is used after.
    unsafe fn module_unload(&self, module: u64) -> DriverResult<()>;

    /// `cuModuleGetFunction`.
    ///
    /// # Errors
    /// `NOT_FOUND`.
    ///
    /// # Safety
    /// See [Safety of the seam](Driver#safety-of-the-seam).
    unsafe fn module_get_function(&self, module: u64, name: &str) -> DriverResult<u64>;

    /// `cuLaunchKernel`.
    ///
    /// # Errors
    /// `INVALID_VALUE` for a geometry over the limits, `LAUNCH_OUT_OF_RESOURCES`. A fault inside
    /// the kernel shows at a later call, as a sticky error.
    ///
    /// # Safety
    /// See [Safety of the seam](Driver#safety-of-the-seam).
    unsafe fn launch_kernel(
        &self,
        function: u64,
        config: &LaunchConfig,
        args: &KernelArgs,
        stream: u64,
    ) -> DriverResult<()>;

    // --- Graphs --------------------------------------------------------------------------------

    /// `cuStreamBeginCapture`, with `CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`: what this thread launches in
    /// the stream from here on becomes nodes of a graph, in its order, and does not run. Until the end of
    /// the capture, a call of this thread that may wait is refused with `STREAM_CAPTURE_UNSUPPORTED`, and
    /// the capture has no graph.
    ///
    /// # Errors
    /// `STREAM_CAPTURE_UNSUPPORTED` for the default stream, `ILLEGAL_STATE` for a stream that is captured.
    ///
    /// # Safety
    /// See [Safety of the seam](Driver#safety-of-the-seam).
    unsafe fn stream_begin_capture(&self, stream: u64) -> DriverResult<()>;

    /// `cuStreamEndCapture`: the graph that was captured. The stream is as it was before, also after an
    /// error.
    ///
    /// # Errors
    /// `STREAM_CAPTURE_INVALIDATED` after a call that cannot be captured; `ILLEGAL_STATE` for a stream
    /// that is not captured.
    ///
    /// # Safety
    /// See [Safety of the seam](Driver#safety-of-the-seam); modules of the captured kernels stay loaded as
    /// long as the graph and its instances.
    unsafe fn stream_end_capture(&self, stream: u64) -> DriverResult<u64>;

    /// `cuGraphCreate`: a graph without nodes.
    ///
    /// # Errors
    /// What the driver answers.
    fn graph_create(&self) -> DriverResult<u64>;

    /// `cuGraphDestroy`. Instances of the graph live on.
    ///
    /// # Errors
    /// What the driver answers.
    ///
    /// # Safety
    /// See [Safety of the seam](Driver#safety-of-the-seam).
    unsafe fn graph_destroy(&self, graph: u64) -> DriverResult<()>;

    /// `cuGraphAddKernelNode`: a launch that waits for no other node. The arguments are copied.
    ///
    /// # Errors
    /// What the driver answers.
    ///
    /// # Safety
    /// See [Safety of the seam](Driver#safety-of-the-seam); the function's module stays loaded as long
    /// as the graph and its instances.
    unsafe fn graph_add_kernel_node(
        &self,
        graph: u64,
        function: u64,
        config: &LaunchConfig,
        args: &KernelArgs,
    ) -> DriverResult<u64>;

    /// `cuGraphInstantiate`: an instance of the graph as it is now, which can be launched.
    ///
    /// # Errors
    /// What the driver answers.
    ///
    /// # Safety
    /// See [Safety of the seam](Driver#safety-of-the-seam).
    unsafe fn graph_instantiate(&self, graph: u64) -> DriverResult<u64>;

    /// `cuGraphExecDestroy`: returns at once; launches already enqueued still run.
    ///
    /// # Errors
    /// What the driver answers.
    ///
    /// # Safety
    /// See [Safety of the seam](Driver#safety-of-the-seam).
    unsafe fn graph_exec_destroy(&self, exec: u64) -> DriverResult<()>;

    /// `cuGraphLaunch`: enqueues an instantiated graph. Two launches of one instance never run at
    /// once.
    ///
    /// # Errors
    /// What the driver answers. A fault inside a kernel shows at a later call, as a sticky error.
    ///
    /// # Safety
    /// See [Safety of the seam](Driver#safety-of-the-seam), of every kernel of the graph.
    unsafe fn graph_launch(&self, exec: u64, stream: u64) -> DriverResult<()>;
}

/// One copy of a batch: addresses of any memory that the current context's device reaches.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct BatchCopy {
    /// Destination address.
    pub destination: u64,
    /// Source address.
    pub source: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// A copy between the memories of two contexts.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PeerCopy {
    /// Destination address.
    pub destination: u64,
    /// Context that the destination belongs to.
    pub destination_context: u64,
    /// Source address.
    pub source: u64,
    /// Context that the source belongs to.
    pub source_context: u64,
    /// Length in bytes.
    pub bytes: u64,
}
