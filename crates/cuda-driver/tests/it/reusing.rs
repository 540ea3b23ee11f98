//! A driver that destroys an object, returns an error of earlier work, and uses the number again.
//! CUDA's documentation allows this, and the simulated device does not do it.

use std::sync::Arc;

use cuda_driver::{
    AccessDesc, AllocationProp, BatchCopy, DeviceAttribute, DeviceInfo, Driver, DriverError,
    DriverResult, ErrorCode, Granularity, HostAllocFlags, HostRegisterFlags, KernelArgs,
    LaunchConfig, PeerAttribute, PeerCopy, PointerAttributes,
};
use parking_lot::Mutex;

/// Over any driver. The objects that [`fail`](Reusing::fail) is about live on upstream: to the caller they
/// are gone, and the next one of their kind that is made has their number.
#[derive(Debug)]
pub(crate) struct Reusing {
    upstream: Arc<dyn Driver>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The call whose next answer is an error, and that error's code.
    fails: Option<(&'static str, ErrorCode)>,
    /// Numbers to give out again, each with the call that ended the object.
    free: Vec<(&'static str, u64)>,
    /// Numbers that were given out again.
    again: Vec<(&'static str, u64)>,
    /// Second ends of a number, each the end of a new object or of none.
    stolen: Vec<(&'static str, u64)>,
}

impl Reusing {
    pub(crate) fn new(upstream: Arc<dyn Driver>) -> Self {
        Self { upstream, state: Mutex::default() }
    }

    /// The next `call` does its work and answers `code`.
    pub(crate) fn fail(&self, call: &'static str, code: ErrorCode) {
        self.state.lock().fails = Some((call, code));
    }

    /// How many numbers were given out again, and which were ended a second time.
    pub(crate) fn again(&self) -> (usize, Vec<(&'static str, u64)>) {
        let state = self.state.lock();
        (state.again.len(), state.stolen.clone())
    }

    fn made(
        &self,
        end: &'static str,
        make: impl FnOnce() -> DriverResult<u64>,
    ) -> DriverResult<u64> {
        let mut state = self.state.lock();
        let Some(place) = state.free.iter().position(|(call, _)| *call == end) else {
            drop(state);
            return make();
        };
        let number = state.free.swap_remove(place);
        state.again.push(number);
        Ok(number.1)
    }

    fn ended(
        &self,
        call: &'static str,
        number: u64,
        end: impl FnOnce() -> DriverResult<()>,
    ) -> DriverResult<()> {
        let mut state = self.state.lock();
        if let Some((_, code)) = state.fails.take_if(|(fails, _)| *fails == call) {
            state.free.push((call, number));
            return Err(DriverError::new(call, code));
        }
        if state.free.contains(&(call, number)) || state.again.contains(&(call, number)) {
            state.stolen.push((call, number));
            return Ok(());
        }
        drop(state);
        end()
    }
}

/// Forwards each method: those that make objects and those that end them through the book of numbers.
macro_rules! forward {
    (
        make { $($make:ident($($ma:ident: $mt:ty),*) = $made:literal;)* }
        end { $($end:ident = $ended:literal;)* }
        safe { $($safe:ident($($sa:ident: $st:ty),*) -> $sr:ty;)* }
        unsafe { $($uns:ident($($ua:ident: $ut:ty),*) -> $ur:ty;)* }
    ) => {
        impl Driver for Reusing {
            fn name(&self) -> &'static str {
                self.upstream.name()
            }

            fn graph_create(&self) -> DriverResult<u64> {
                self.made("cuGraphDestroy", || self.upstream.graph_create())
            }

            unsafe fn device_primary_ctx_release(&self, device: i32) -> DriverResult<()> {
                // SAFETY: as for the other calls.
                unsafe { self.upstream.device_primary_ctx_release(device) }?;
                let call = "cuDevicePrimaryCtxRelease";
                let fails = self.state.lock().fails.take_if(|(fails, _)| *fails == call);
                fails.map_or(Ok(()), |(_, code)| Err(DriverError::new(call, code)))
            }

            unsafe fn graph_instantiate(&self, graph: u64) -> DriverResult<u64> {
                // SAFETY: as for the other calls.
                self.made("cuGraphExecDestroy", || unsafe { self.upstream.graph_instantiate(graph) })
            }

            $(fn $make(&self, $($ma: $mt),*) -> DriverResult<u64> {
                self.made($made, || self.upstream.$make($($ma),*))
            })*

            $(unsafe fn $end(&self, number: u64) -> DriverResult<()> {
                // SAFETY: the arguments are passed on as they came, and the numbers are upstream's.
                self.ended($ended, number, || unsafe { self.upstream.$end(number) })
            })*

            $(fn $safe(&self, $($sa: $st),*) -> DriverResult<$sr> {
                self.upstream.$safe($($sa),*)
            })*

            $(unsafe fn $uns(&self, $($ua: $ut),*) -> DriverResult<$ur> {
                // SAFETY: the arguments are passed on as they came, and the numbers are upstream's.
                unsafe { self.upstream.$uns($($ua),*) }
            })*
        }
    };
}

forward! {
    make {
        stream_create(blocking: bool) = "cuStreamDestroy";
        event_create(timing: bool) = "cuEventDestroy";
        mem_alloc(bytes: u64) = "cuMemFree";
        mem_host_alloc(bytes: u64, flags: HostAllocFlags) = "cuMemFreeHost";
        mem_create(bytes: u64, prop: AllocationProp) = "cuMemRelease";
        module_load_data(ptx: &str, log: &mut String) = "cuModuleUnload";
    }
    end {
        stream_destroy = "cuStreamDestroy";
        event_destroy = "cuEventDestroy";
        mem_free = "cuMemFree";
        mem_free_host = "cuMemFreeHost";
        mem_release = "cuMemRelease";
        module_unload = "cuModuleUnload";
        graph_destroy = "cuGraphDestroy";
        graph_exec_destroy = "cuGraphExecDestroy";
    }
    safe {
        driver_get_version() -> i32;
        device_get_count() -> i32;
        device_get_info(device: i32) -> DeviceInfo;
        device_get_attribute(device: i32, attribute: DeviceAttribute) -> i32;
        device_can_access_peer(device: i32, peer: i32) -> bool;
        device_get_p2p_attribute(attribute: PeerAttribute, device: i32, peer: i32) -> i32;
        device_primary_ctx_retain(device: i32) -> u64;
        ctx_get_current() -> u64;
        ctx_get_device() -> i32;
        ctx_synchronize() -> ();
        mem_get_info() -> (u64, u64);
        mem_host_get_device_pointer(host: u64) -> u64;
        pointer_get_attributes(address: u64) -> PointerAttributes;
        mem_get_allocation_granularity(prop: AllocationProp, which: Granularity) -> u64;
        mem_address_reserve(bytes: u64, alignment: u64, hint: u64) -> u64;
        mem_address_free(address: u64, bytes: u64) -> ();
        mem_unmap(address: u64, bytes: u64) -> ();
        mem_set_access(address: u64, bytes: u64, access: &[AccessDesc]) -> ();
    }
    unsafe {
        ctx_set_current(context: u64) -> ();
        ctx_enable_peer_access(peer_context: u64) -> ();
        ctx_disable_peer_access(peer_context: u64) -> ();
        stream_synchronize(stream: u64) -> ();
        stream_query(stream: u64) -> bool;
        stream_wait_event(stream: u64, event: u64) -> ();
        stream_get_ctx(stream: u64) -> u64;
        event_record(event: u64, stream: u64) -> ();
        event_query(event: u64) -> bool;
        event_synchronize(event: u64) -> ();
        event_elapsed_time(start: u64, end: u64) -> f32;
        mem_host_register(host: u64, bytes: u64, flags: HostRegisterFlags) -> ();
        mem_host_unregister(host: u64) -> ();
        memcpy_htod_async(destination: u64, host_source: u64, bytes: u64, stream: u64) -> ();
        memcpy_dtoh_async(host_destination: u64, source: u64, bytes: u64, stream: u64) -> ();
        memcpy_dtod_async(destination: u64, source: u64, bytes: u64, stream: u64) -> ();
        memcpy_peer_async(copy: PeerCopy, stream: u64) -> ();
        memcpy_batch_async(copies: &[BatchCopy], stream: u64) -> ();
        memset_d8_async(destination: u64, value: u8, bytes: u64, stream: u64) -> ();
        mem_map(address: u64, bytes: u64, offset: u64, handle: u64) -> ();
        module_get_function(module: u64, name: &str) -> u64;
        launch_kernel(function: u64, config: &LaunchConfig, args: &KernelArgs, stream: u64) -> ();
        stream_begin_capture(stream: u64) -> ();
        stream_end_capture(stream: u64) -> u64;
        graph_add_kernel_node(graph: u64, function: u64, config: &LaunchConfig, args: &KernelArgs) -> u64;
        graph_launch(exec: u64, stream: u64) -> ();
    }
}
