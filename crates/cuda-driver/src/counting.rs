//! A driver that counts the calls made through it and passes them on.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::{
    AccessDesc, AllocationProp, BatchCopy, DeviceAttribute, DeviceInfo, Driver, DriverResult,
    Granularity, HostAccess, HostAllocFlags, HostRegisterFlags, KernelArgs, LaunchConfig,
    PeerAttribute, PeerCopy, PointerAttributes,
};

/// Counts every call by the driver's name for it, and the pinned bytes allocated, over any driver.
///
/// A claim such as "no driver call on the step path" is checked by comparing two counts.
pub struct CountingDriver {
    upstream: Arc<dyn Driver>,
    counts: [AtomicU64; CALLS.len()],
    pinned_bytes: AtomicU64,
    watcher: Option<Watcher>,
    access_watcher: Option<AccessWatcher>,
}

/// Told the name of each call.
type Watcher = Box<dyn Fn(&'static str) + Send + Sync>;

/// Told each access of the host.
type AccessWatcher = Box<dyn Fn(HostAccess) + Send + Sync>;

/// Forwards each method, counting it under the position of its name in `CALLS`.
macro_rules! counted {
    (
        safe { $($safe:ident($($sa:ident: $st:ty),*) -> $sr:ty = $safe_call:literal;)* }
        promised { $($uns:ident($($ua:ident: $ut:ty),*) -> $ur:ty = $unsafe_call:literal;)* }
    ) => {
        /// The driver's names of the counted calls.
        const CALLS: &[&str] = &["cuMemHostAlloc", "cuMemHostRegister", $($safe_call,)* $($unsafe_call,)*];

        #[allow(non_camel_case_types, reason = "one variant a method, named like it")]
        #[derive(Clone, Copy)]
        enum Call { mem_host_alloc, mem_host_register, $($safe,)* $($uns,)* }

        impl Driver for CountingDriver {
            fn name(&self) -> &'static str {
                self.upstream.name()
            }

            fn virtual_now(&self) -> Option<Duration> {
                self.upstream.virtual_now()
            }

            fn host_access(&self, access: HostAccess) {
                if let Some(watcher) = &self.access_watcher {
                    watcher(access);
                }
                self.upstream.host_access(access);
            }

            $(fn $safe(&self, $($sa: $st),*) -> DriverResult<$sr> {
                self.count(Call::$safe);
                self.upstream.$safe($($sa),*)
            })*

            $(unsafe fn $uns(&self, $($ua: $ut),*) -> DriverResult<$ur> {
                self.count(Call::$uns);
                // SAFETY: the arguments are passed on as they came, so what the caller promised
                // of this driver holds of the upstream one, whose handles these are.
                unsafe { self.upstream.$uns($($ua),*) }
            })*

            fn mem_host_alloc(&self, bytes: u64, flags: HostAllocFlags) -> DriverResult<u64> {
                self.count(Call::mem_host_alloc);
                let host = self.upstream.mem_host_alloc(bytes, flags)?;
                self.pinned_bytes.fetch_add(bytes, Ordering::Relaxed);
                Ok(host)
            }

            unsafe fn mem_host_register(
                &self,
                host: u64,
                bytes: u64,
                flags: HostRegisterFlags,
            ) -> DriverResult<()> {
                self.count(Call::mem_host_register);
                // SAFETY: as for the other calls.
                unsafe { self.upstream.mem_host_register(host, bytes, flags) }?;
                self.pinned_bytes.fetch_add(bytes, Ordering::Relaxed);
                Ok(())
            }
        }
    };
}

#[rustfmt::skip]
macro_rules! counted_all { () => { counted! {
    safe {
        driver_get_version() -> i32 = "cuDriverGetVersion";
        device_get_count() -> i32 = "cuDeviceGetCount";
        device_get_info(device: i32) -> DeviceInfo = "cuDeviceGetName";
        device_get_attribute(device: i32, attribute: DeviceAttribute) -> i32 = "cuDeviceGetAttribute";
        device_can_access_peer(device: i32, peer: i32) -> bool = "cuDeviceCanAccessPeer";
        device_get_p2p_attribute(attribute: PeerAttribute, device: i32, peer: i32) -> i32
            = "cuDeviceGetP2PAttribute";
        device_primary_ctx_retain(device: i32) -> u64 = "cuDevicePrimaryCtxRetain";
        ctx_get_current() -> u64 = "cuCtxGetCurrent";
        ctx_get_device() -> i32 = "cuCtxGetDevice";
        ctx_synchronize() -> () = "cuCtxSynchronize";
        stream_create(blocking: bool) -> u64 = "cuStreamCreate";
        event_create(timing: bool) -> u64 = "cuEventCreate";
        mem_get_info() -> (u64, u64) = "cuMemGetInfo";
        mem_alloc(bytes: u64) -> u64 = "cuMemAlloc";
        mem_host_get_device_pointer(host: u64) -> u64 = "cuMemHostGetDevicePointer";
        pointer_get_attributes(address: u64) -> PointerAttributes = "cuPointerGetAttributes";
        mem_get_allocation_granularity(prop: AllocationProp, which: Granularity) -> u64
            = "cuMemGetAllocationGranularity";
        mem_address_reserve(bytes: u64, alignment: u64, hint: u64) -> u64 = "cuMemAddressReserve";
        mem_address_free(address: u64, bytes: u64) -> () = "cuMemAddressFree";
        mem_create(bytes: u64, prop: AllocationProp) -> u64 = "cuMemCreate";
        mem_unmap(address: u64, bytes: u64) -> () = "cuMemUnmap";
        mem_set_access(address: u64, bytes: u64, access: &[AccessDesc]) -> () = "cuMemSetAccess";
        module_load_data(ptx: &str, log: &mut String) -> u64 = "cuModuleLoadDataEx";
        graph_create() -> u64 = "cuGraphCreate";
    }
    promised {
        device_primary_ctx_release(device: i32) -> () = "cuDevicePrimaryCtxRelease";
        ctx_set_current(context: u64) -> () = "cuCtxSetCurrent";
        ctx_enable_peer_access(peer_context: u64) -> () = "cuCtxEnablePeerAccess";
        ctx_disable_peer_access(peer_context: u64) -> () = "cuCtxDisablePeerAccess";
        stream_destroy(stream: u64) -> () = "cuStreamDestroy";
        stream_synchronize(stream: u64) -> () = "cuStreamSynchronize";
        stream_query(stream: u64) -> bool = "cuStreamQuery";
        stream_wait_event(stream: u64, event: u64) -> () = "cuStreamWaitEvent";
        stream_get_ctx(stream: u64) -> u64 = "cuStreamGetCtx";
        event_destroy(event: u64) -> () = "cuEventDestroy";
        event_record(event: u64, stream: u64) -> () = "cuEventRecord";
        event_query(event: u64) -> bool = "cuEventQuery";
        event_synchronize(event: u64) -> () = "cuEventSynchronize";
        event_elapsed_time(start: u64, end: u64) -> f32 = "cuEventElapsedTime";
        mem_free(address: u64) -> () = "cuMemFree";
        mem_free_host(host: u64) -> () = "cuMemFreeHost";
        mem_host_unregister(host: u64) -> () = "cuMemHostUnregister";
        memcpy_htod_async(destination: u64, host_source: u64, bytes: u64, stream: u64) -> ()
            = "cuMemcpyHtoDAsync";
        memcpy_dtoh_async(host_destination: u64, source: u64, bytes: u64, stream: u64) -> ()
            = "cuMemcpyDtoHAsync";
        memcpy_dtod_async(destination: u64, source: u64, bytes: u64, stream: u64) -> ()
            = "cuMemcpyDtoDAsync";
        memcpy_peer_async(copy: PeerCopy, stream: u64) -> () = "cuMemcpyPeerAsync";
        memcpy_batch_async(copies: &[BatchCopy], stream: u64) -> () = "cuMemcpyBatchAsync";
        memset_d8_async(destination: u64, value: u8, bytes: u64, stream: u64) -> ()
            = "cuMemsetD8Async";
        mem_release(handle: u64) -> () = "cuMemRelease";
        mem_map(address: u64, bytes: u64, offset: u64, handle: u64) -> () = "cuMemMap";
        module_unload(module: u64) -> () = "cuModuleUnload";
        module_get_function(module: u64, name: &str) -> u64 = "cuModuleGetFunction";
        launch_kernel(function: u64, config: &LaunchConfig, args: &KernelArgs, stream: u64) -> ()
            = "cuLaunchKernel";
        stream_begin_capture(stream: u64) -> () = "cuStreamBeginCapture";
        stream_end_capture(stream: u64) -> u64 = "cuStreamEndCapture";
        graph_destroy(graph: u64) -> () = "cuGraphDestroy";
        graph_add_kernel_node(graph: u64, function: u64, config: &LaunchConfig, args: &KernelArgs) -> u64
            = "cuGraphAddKernelNode";
        graph_instantiate(graph: u64) -> u64 = "cuGraphInstantiate";
        graph_exec_destroy(exec: u64) -> () = "cuGraphExecDestroy";
        graph_launch(exec: u64, stream: u64) -> () = "cuGraphLaunch";
    }
} } }
counted_all!();

impl CountingDriver {
    /// Counts the calls made on `upstream` from now on.
    #[must_use]
    pub fn new(upstream: Arc<dyn Driver>) -> Self {
        Self {
            upstream,
            counts: [const { AtomicU64::new(0) }; CALLS.len()],
            pinned_bytes: AtomicU64::new(0),
            watcher: None,
            access_watcher: None,
        }
    }

    /// Counts, and gives `watcher` the name of each call before the call, on the calling thread.
    /// This is for tests of the state during a call.
    #[must_use]
    pub fn watched(
        upstream: Arc<dyn Driver>,
        watcher: impl Fn(&'static str) + Send + Sync + 'static,
    ) -> Self {
        Self { watcher: Some(Box::new(watcher)), ..Self::new(upstream) }
    }

    /// Counts, and gives `watcher` each [access of the host](Driver::host_access) before the
    /// access, on its thread.
    #[must_use]
    pub fn watching_accesses(self, watcher: impl Fn(HostAccess) + Send + Sync + 'static) -> Self {
        Self { access_watcher: Some(Box::new(watcher)), ..self }
    }

    fn count(&self, call: Call) {
        self.counts[call as usize].fetch_add(1, Ordering::Relaxed);
        if let Some(watcher) = &self.watcher {
            watcher(CALLS[call as usize]);
        }
    }

    /// Number of calls, by name. Calls that were never made are left out.
    #[must_use]
    pub fn calls(&self) -> BTreeMap<&'static str, u64> {
        let counts = self.counts.iter().map(|count| count.load(Ordering::Relaxed));
        CALLS.iter().copied().zip(counts).filter(|&(_, count)| count > 0).collect()
    }

    /// Pinned host bytes allocated or registered so far, including those freed since.
    #[must_use]
    pub fn pinned_bytes_allocated(&self) -> u64 {
        self.pinned_bytes.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for CountingDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CountingDriver").field("upstream", &self.upstream).finish()
    }
}
