//! The driver's calls. Each call is one step on the machine's state.

use std::cell::Cell;
use std::panic::Location;
use std::time::Duration;

use cuda_driver::guard;
use cuda_driver::site::Site;
use cuda_driver::{
    AccessDesc, AllocationProp, BatchCopy, DeviceAttribute, DeviceInfo, Driver, DriverError,
    DriverResult, ErrorCode, Granularity, HostAccess, HostAllocFlags, HostRegisterFlags,
    KernelArgs, LaunchConfig, PeerAttribute, PeerCopy, PointerAttributes,
};

use crate::SimDriver;
use crate::host_memory::{PageableRange, RegisteredRange};
use crate::kernels::{BLOCK_THREADS_MAX, GRID_MAX};
use crate::state::{Answer, Machine};
use crate::streams::Goal;
use crate::time::SizedCall;

/// The simulated driver version: that of CUDA 12.8.
const DRIVER_VERSION: i32 = 12_080;

/// Multiprocessors of an H100 SXM.
const MULTIPROCESSORS: i32 = 132;

/// Number of copy engines that CUDA reports for an H100.
const COPY_ENGINES: i32 = 3;

/// A simulated device belongs to no NUMA node.
const NO_NODE: i32 = -1;

/// Memory clock of an H100 SXM: 3.35 TB/s at two transfers per clock.
const MEMORY_CLOCK_KHZ: i32 = 2_619_000;
const MEMORY_BUS_BITS: i32 = 5_120;

thread_local! {
    /// Source location of the driver call that this thread makes.
    static CALLING: Cell<Option<&'static Location<'static>>> = const { Cell::new(None) };
}

/// Source location of this thread's driver call, if the call was made on the driver's own type.
/// Calls through the trait object carry no location.
pub(crate) fn calling() -> Option<Site> {
    let at = CALLING.get().filter(|at| at.file() != file!())?;
    Some(Site { at, through: None })
}

impl SimDriver {
    /// Records the caller's location, counts the call, applies an ordered failure, and runs the
    /// call under the machine's lock.
    #[track_caller]
    fn call<T>(
        &self,
        call: &'static str,
        body: impl FnOnce(&mut Machine) -> Answer<T>,
    ) -> DriverResult<T> {
        guard!("sim.call-site", CALLING.set(Some(Location::caller())));
        let mut state = self.state();
        let answer = state.enter(call).and_then(|()| body(&mut state));
        state.after_call(call);
        answer.map_err(|code| DriverError::new(call, code))
    }
}

/// Attributes for the device's position, which differ from device to device.
fn place(device: u32, which: DeviceAttribute) -> Option<i32> {
    match which {
        DeviceAttribute::PCI_DOMAIN_ID | DeviceAttribute::PCI_DEVICE_ID => Some(0),
        DeviceAttribute::PCI_BUS_ID => Some(pci_bus(device) as i32),
        _ => None,
    }
}

/// The PCI bus of a device. No other device is on that bus.
fn pci_bus(device: u32) -> u32 {
    device + 1
}

fn attribute(attribute: DeviceAttribute) -> Option<i32> {
    Some(match attribute {
        DeviceAttribute::MAX_THREADS_PER_BLOCK => BLOCK_THREADS_MAX as i32,
        DeviceAttribute::MAX_GRID_DIM_X => GRID_MAX[0] as i32,
        DeviceAttribute::MAX_GRID_DIM_Y => GRID_MAX[1] as i32,
        DeviceAttribute::MAX_GRID_DIM_Z => GRID_MAX[2] as i32,
        DeviceAttribute::MULTIPROCESSOR_COUNT => MULTIPROCESSORS,
        DeviceAttribute::UNIFIED_ADDRESSING
        | DeviceAttribute::HOST_REGISTER_SUPPORTED
        | DeviceAttribute::VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED => 1,
        DeviceAttribute::ASYNC_ENGINE_COUNT => COPY_ENGINES,
        DeviceAttribute::HOST_NUMA_ID => NO_NODE,
        DeviceAttribute::MEMORY_CLOCK_RATE => MEMORY_CLOCK_KHZ,
        DeviceAttribute::GLOBAL_MEMORY_BUS_WIDTH => MEMORY_BUS_BITS,
        _ => return None,
    })
}

impl Driver for SimDriver {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn virtual_now(&self) -> Option<Duration> {
        Some(SimDriver::virtual_now(self))
    }

    #[track_caller]
    fn host_access(&self, access: HostAccess) {
        CALLING.set(Some(Location::caller()));
        self.state().host_access(access);
    }

    fn driver_get_version(&self) -> DriverResult<i32> {
        self.call("cuDriverGetVersion", |_| Ok(DRIVER_VERSION))
    }

    fn device_get_count(&self) -> DriverResult<i32> {
        self.call("cuDeviceGetCount", |state| Ok(state.config.devices as i32))
    }

    fn device_get_info(&self, device: i32) -> DriverResult<DeviceInfo> {
        self.call("cuDeviceGetName", |state| {
            let device = state.device(device)?;
            let mut uuid = *b"simulated-gpu-00";
            uuid[14] += (device / 10) as u8;
            uuid[15] += (device % 10) as u8;
            Ok(DeviceInfo {
                name: state.config.name.clone(),
                uuid,
                total_bytes: state.config.device_bytes,
                pci_bus_id: format!("0000:{:02x}:00.0", pci_bus(device)),
            })
        })
    }

    fn device_get_attribute(&self, device: i32, which: DeviceAttribute) -> DriverResult<i32> {
        self.call("cuDeviceGetAttribute", |state| {
            let device = state.device(device)?;
            let (major, minor) = state.config.compute_capability;
            match which {
                DeviceAttribute::COMPUTE_CAPABILITY_MAJOR => Ok(major as i32),
                DeviceAttribute::COMPUTE_CAPABILITY_MINOR => Ok(minor as i32),
                _ => place(device, which)
                    .or_else(|| attribute(which))
                    .ok_or(ErrorCode::INVALID_VALUE),
            }
        })
    }

    fn device_can_access_peer(&self, device: i32, peer: i32) -> DriverResult<bool> {
        self.call("cuDeviceCanAccessPeer", |state| {
            let (device, peer) = (state.device(device)?, state.device(peer)?);
            Ok(device != peer && state.config.can_access(device, peer))
        })
    }

    fn device_get_p2p_attribute(
        &self,
        attribute: PeerAttribute,
        device: i32,
        peer: i32,
    ) -> DriverResult<i32> {
        self.call("cuDeviceGetP2PAttribute", |state| {
            let (device, peer) = (state.device(device)?, state.device(peer)?);
            if device == peer {
                return Err(ErrorCode::INVALID_DEVICE);
            }
            let can_access = state.config.can_access(device, peer);
            match attribute {
                // A direct path ranks first, and the path through the host second.
                PeerAttribute::PERFORMANCE_RANK => Ok(i32::from(!can_access)),
                PeerAttribute::ACCESS_SUPPORTED | PeerAttribute::NATIVE_ATOMIC_SUPPORTED => {
                    Ok(i32::from(can_access))
                }
                _ => Err(ErrorCode::INVALID_VALUE),
            }
        })
    }

    #[track_caller]
    fn device_primary_ctx_retain(&self, device: i32) -> DriverResult<u64> {
        self.call("cuDevicePrimaryCtxRetain", |state| state.ctx_retain(state.device(device)?))
    }

    #[track_caller]
    unsafe fn device_primary_ctx_release(&self, device: i32) -> DriverResult<()> {
        self.call("cuDevicePrimaryCtxRelease", |state| state.ctx_release(state.device(device)?))
    }

    #[track_caller]
    fn ctx_get_current(&self) -> DriverResult<u64> {
        self.call("cuCtxGetCurrent", |state| Ok(state.contexts.current()))
    }

    #[track_caller]
    unsafe fn ctx_set_current(&self, context: u64) -> DriverResult<()> {
        self.call("cuCtxSetCurrent", |state| state.contexts.set_current(context))
    }

    #[track_caller]
    fn ctx_get_device(&self) -> DriverResult<i32> {
        self.call("cuCtxGetDevice", |state| Ok(state.current_device()? as i32))
    }

    #[track_caller]
    fn ctx_synchronize(&self) -> DriverResult<()> {
        self.call("cuCtxSynchronize", |state| {
            let device = state.current()?;
            guard!("sim.capture-all", state.may_wait_for_device(device)?, else state.may_wait()?);
            state.wait("cuCtxSynchronize", Goal::Device(device))?;
            state.health(device)
        })
    }

    #[track_caller]
    unsafe fn ctx_enable_peer_access(&self, peer_context: u64) -> DriverResult<()> {
        self.call("cuCtxEnablePeerAccess", |state| state.enable_peer(peer_context))
    }

    #[track_caller]
    unsafe fn ctx_disable_peer_access(&self, peer_context: u64) -> DriverResult<()> {
        self.call("cuCtxDisablePeerAccess", |state| state.disable_peer(peer_context))
    }

    #[track_caller]
    fn stream_create(&self, blocking: bool) -> DriverResult<u64> {
        self.call("cuStreamCreate", |state| state.stream_create(blocking))
    }

    #[track_caller]
    unsafe fn stream_destroy(&self, stream: u64) -> DriverResult<()> {
        self.call("cuStreamDestroy", |state| state.stream_destroy(stream))
    }

    #[track_caller]
    unsafe fn stream_synchronize(&self, stream: u64) -> DriverResult<()> {
        self.call("cuStreamSynchronize", |state| state.stream_synchronize(stream))
    }

    #[track_caller]
    unsafe fn stream_query(&self, stream: u64) -> DriverResult<bool> {
        self.call("cuStreamQuery", |state| state.stream_query(stream))
    }

    #[track_caller]
    unsafe fn stream_wait_event(&self, stream: u64, event: u64) -> DriverResult<()> {
        self.call("cuStreamWaitEvent", |state| state.stream_wait_event(stream, event))
    }

    #[track_caller]
    unsafe fn stream_get_ctx(&self, stream: u64) -> DriverResult<u64> {
        self.call("cuStreamGetCtx", |state| state.stream_context(stream))
    }

    #[track_caller]
    fn event_create(&self, timing: bool) -> DriverResult<u64> {
        self.call("cuEventCreate", |state| state.event_create(timing))
    }

    #[track_caller]
    unsafe fn event_destroy(&self, event: u64) -> DriverResult<()> {
        self.call("cuEventDestroy", |state| state.event_destroy(event))
    }

    #[track_caller]
    unsafe fn event_record(&self, event: u64, stream: u64) -> DriverResult<()> {
        self.call("cuEventRecord", |state| state.event_record(event, stream))
    }

    #[track_caller]
    unsafe fn event_query(&self, event: u64) -> DriverResult<bool> {
        self.call("cuEventQuery", |state| state.event_query(event))
    }

    #[track_caller]
    unsafe fn event_synchronize(&self, event: u64) -> DriverResult<()> {
        self.call("cuEventSynchronize", |state| state.event_synchronize(event))
    }

    #[track_caller]
    unsafe fn event_elapsed_time(&self, start: u64, end: u64) -> DriverResult<f32> {
        self.call("cuEventElapsedTime", |state| state.event_elapsed(start, end))
    }

    #[track_caller]
    fn mem_get_info(&self) -> DriverResult<(u64, u64)> {
        self.call("cuMemGetInfo", |state| state.mem_info())
    }

    #[track_caller]
    fn mem_alloc(&self, bytes: u64) -> DriverResult<u64> {
        self.call("cuMemAlloc", |state| state.mem_alloc(bytes))
    }

    #[track_caller]
    unsafe fn mem_free(&self, address: u64) -> DriverResult<()> {
        self.call("cuMemFree", |state| state.mem_free(address))
    }

    #[track_caller]
    fn mem_host_alloc(&self, bytes: u64, flags: HostAllocFlags) -> DriverResult<u64> {
        self.call("cuMemHostAlloc", |state| state.host_alloc(bytes, flags))
    }

    #[track_caller]
    unsafe fn mem_free_host(&self, host: u64) -> DriverResult<()> {
        self.call("cuMemFreeHost", |state| state.host_free(host))
    }

    #[track_caller]
    unsafe fn mem_host_register(
        &self,
        host: u64,
        bytes: u64,
        flags: HostRegisterFlags,
    ) -> DriverResult<()> {
        // SAFETY: the caller promises that the range is initialised and stays mapped until it is
        // unregistered, and that every access meanwhile follows the safety rules of the seam.
        let range = unsafe { RegisteredRange::new(host, bytes) };
        self.call("cuMemHostRegister", |state| state.host_register(range, flags))
    }

    #[track_caller]
    unsafe fn mem_host_unregister(&self, host: u64) -> DriverResult<()> {
        self.call("cuMemHostUnregister", |state| state.host_unregister(host))
    }

    #[track_caller]
    fn mem_host_get_device_pointer(&self, host: u64) -> DriverResult<u64> {
        self.call("cuMemHostGetDevicePointer", |state| state.host_device_pointer(host))
    }

    #[track_caller]
    fn pointer_get_attributes(&self, address: u64) -> DriverResult<PointerAttributes> {
        self.call("cuPointerGetAttributes", |state| {
            state.current()?;
            Ok(state.memory.attributes_of(address))
        })
    }

    #[track_caller]
    unsafe fn memcpy_htod_async(
        &self,
        destination: u64,
        host_source: u64,
        bytes: u64,
        stream: u64,
    ) -> DriverResult<()> {
        // SAFETY: the caller promises that the range stays allocated, and therefore readable, until
        // the operation has completed. The operation completes after this call returns at the
        // earliest (safety rules of the seam).
        let host = unsafe { PageableRange::new(self, host_source, bytes) };
        self.call("cuMemcpyHtoDAsync", |state| state.copy_to_device(destination, host, stream))
    }

    #[track_caller]
    unsafe fn memcpy_dtoh_async(
        &self,
        host_destination: u64,
        source: u64,
        bytes: u64,
        stream: u64,
    ) -> DriverResult<()> {
        // SAFETY: the caller promises that the range stays allocated and that the host neither
        // reads nor writes it until the operation has completed (safety of the seam).
        let host = unsafe { PageableRange::new(self, host_destination, bytes) };
        self.call("cuMemcpyDtoHAsync", |state| state.copy_to_host(host, source, stream))
    }

    #[track_caller]
    unsafe fn memcpy_dtod_async(
        &self,
        destination: u64,
        source: u64,
        bytes: u64,
        stream: u64,
    ) -> DriverResult<()> {
        self.call("cuMemcpyDtoDAsync", |state| {
            state.copy_on_device(destination, source, bytes, stream)
        })
    }

    #[track_caller]
    unsafe fn memcpy_peer_async(&self, copy: PeerCopy, stream: u64) -> DriverResult<()> {
        self.call("cuMemcpyPeerAsync", |state| state.copy_peer(copy, stream))
    }

    #[track_caller]
    unsafe fn memcpy_batch_async(&self, copies: &[BatchCopy], stream: u64) -> DriverResult<()> {
        self.call("cuMemcpyBatchAsync", |state| state.copy_batch(copies, stream))
    }

    #[track_caller]
    unsafe fn memset_d8_async(
        &self,
        destination: u64,
        value: u8,
        bytes: u64,
        stream: u64,
    ) -> DriverResult<()> {
        self.call("cuMemsetD8Async", |state| state.fill(destination, value, bytes, stream))
    }

    #[track_caller]
    fn mem_get_allocation_granularity(
        &self,
        _prop: AllocationProp,
        _which: Granularity,
    ) -> DriverResult<u64> {
        // The driver does not check the device either, not even whether the device exists.
        self.call("cuMemGetAllocationGranularity", |state| {
            Ok(state.memory.virtual_memory.granularity())
        })
    }

    #[track_caller]
    fn mem_address_reserve(&self, bytes: u64, alignment: u64, hint: u64) -> DriverResult<u64> {
        self.call("cuMemAddressReserve", |state| {
            state.memory.virtual_memory.reserve(bytes, alignment, hint)
        })
    }

    #[track_caller]
    fn mem_address_free(&self, address: u64, bytes: u64) -> DriverResult<()> {
        self.call("cuMemAddressFree", |state| state.memory.address_free(address, bytes))
    }

    #[track_caller]
    fn mem_create(&self, bytes: u64, prop: AllocationProp) -> DriverResult<u64> {
        self.call("cuMemCreate", |state| state.mem_create(bytes, prop))
    }

    #[track_caller]
    unsafe fn mem_release(&self, handle: u64) -> DriverResult<()> {
        self.call("cuMemRelease", |state| {
            let bytes = state.memory.virtual_memory.handle_bytes(handle);
            state.memory.release(handle)?;
            state.clock.sized(SizedCall::Release, bytes.unwrap_or(0));
            Ok(())
        })
    }

    #[track_caller]
    unsafe fn mem_map(
        &self,
        address: u64,
        bytes: u64,
        offset: u64,
        handle: u64,
    ) -> DriverResult<()> {
        self.call("cuMemMap", |state| {
            state.memory.virtual_memory.map(address, bytes, offset, handle)?;
            state.clock.sized(SizedCall::Map, bytes);
            Ok(())
        })
    }

    #[track_caller]
    fn mem_unmap(&self, address: u64, bytes: u64) -> DriverResult<()> {
        self.call("cuMemUnmap", |state| {
            let (mappings, mapped) = state.memory.virtual_memory.mappings_in(address, bytes);
            state.memory.can_unmap(address, bytes)?;
            let pages = state.mapped_pages(address, bytes, false);
            state.note_change("cuMemUnmap", |races, memory, call| {
                races.unmapping(memory, call, &pages);
            });
            state.memory.unmap(address, bytes)?;
            state.clock.sized(SizedCall::Unmap(mappings), mapped);
            Ok(())
        })
    }

    #[track_caller]
    fn mem_set_access(&self, address: u64, bytes: u64, access: &[AccessDesc]) -> DriverResult<()> {
        self.call("cuMemSetAccess", |state| {
            let devices: Result<Vec<u32>, _> =
                access.iter().map(|desc| state.device(desc.device)).collect();
            let devices = devices.map_err(|_| ErrorCode::INVALID_VALUE)?;
            let denied = state.mapped_pages(address, bytes, true);
            let Machine { memory, config, .. } = state;
            let can_access = |device, peer| config.can_access(device, peer);
            memory.virtual_memory.set_access(address, bytes, &devices, can_access)?;
            // No operation could use these pages before.
            state.note_change("cuMemSetAccess", |races, memory, call| {
                races.mapped(call, &denied, memory.virtual_memory.granularity());
            });
            let (mappings, mapped) = state.memory.virtual_memory.mappings_in(address, bytes);
            state.clock.sized(SizedCall::SetAccess(mappings), mapped);
            Ok(())
        })
    }

    #[track_caller]
    fn module_load_data(&self, ptx: &str, log: &mut String) -> DriverResult<u64> {
        self.call("cuModuleLoadDataEx", |state| state.module_load(ptx, log))
    }

    #[track_caller]
    unsafe fn module_unload(&self, module: u64) -> DriverResult<()> {
        self.call("cuModuleUnload", |state| state.module_unload(module))
    }

    #[track_caller]
    unsafe fn module_get_function(&self, module: u64, name: &str) -> DriverResult<u64> {
        self.call("cuModuleGetFunction", |state| state.module_function(module, name))
    }

    #[track_caller]
    unsafe fn launch_kernel(
        &self,
        function: u64,
        config: &LaunchConfig,
        args: &KernelArgs,
        stream: u64,
    ) -> DriverResult<()> {
        self.call("cuLaunchKernel", |state| state.launch(function, config, args, stream))
    }

    #[track_caller]
    fn graph_create(&self) -> DriverResult<u64> {
        self.call("cuGraphCreate", |state| state.graph_create())
    }

    #[track_caller]
    unsafe fn stream_begin_capture(&self, stream: u64) -> DriverResult<()> {
        self.call("cuStreamBeginCapture", |state| state.stream_begin_capture(stream))
    }

    #[track_caller]
    unsafe fn stream_end_capture(&self, stream: u64) -> DriverResult<u64> {
        self.call("cuStreamEndCapture", |state| state.stream_end_capture(stream))
    }

    #[track_caller]
    unsafe fn graph_destroy(&self, graph: u64) -> DriverResult<()> {
        self.call("cuGraphDestroy", |state| state.graph_destroy(graph))
    }

    #[track_caller]
    unsafe fn graph_add_kernel_node(
        &self,
        graph: u64,
        function: u64,
        config: &LaunchConfig,
        args: &KernelArgs,
    ) -> DriverResult<u64> {
        self.call("cuGraphAddKernelNode", |state| {
            state.graph_add_kernel_node(graph, function, config, args)
        })
    }

    #[track_caller]
    unsafe fn graph_instantiate(&self, graph: u64) -> DriverResult<u64> {
        self.call("cuGraphInstantiate", |state| state.graph_instantiate(graph))
    }

    #[track_caller]
    unsafe fn graph_exec_destroy(&self, exec: u64) -> DriverResult<()> {
        self.call("cuGraphExecDestroy", |state| state.graph_exec_destroy(exec))
    }

    #[track_caller]
    unsafe fn graph_launch(&self, exec: u64, stream: u64) -> DriverResult<()> {
        self.call("cuGraphLaunch", |state| state.graph_launch(exec, stream))
    }
}
