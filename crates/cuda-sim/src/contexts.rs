//! Primary contexts, and the current context of each thread.

use std::collections::HashMap;
use std::thread::ThreadId;

use cuda_driver::ErrorCode;
use cuda_driver::guard;

use crate::RangeKind;
use crate::findings::{Finding, FindingKind};
use crate::state::{Answer, Machine};
use crate::streams::Goal;

/// The call that ends a context.
const END: &str = "cuDevicePrimaryCtxRelease";

#[derive(Debug, Default)]
struct SimDevice {
    retained: u32,
    /// Handle of the live context.
    context: Option<u64>,
    /// Devices whose `cuMemAlloc` memory this device may access, one bit each.
    peers: u64,
    /// The error that lost the device. It stays until the process ends.
    poison: Option<ErrorCode>,
}

/// The devices, their contexts, and which context is current where.
#[derive(Debug)]
pub(crate) struct Contexts {
    devices: Vec<SimDevice>,
    /// Live context handles, and their devices.
    live: HashMap<u64, u32>,
    /// Current context of each thread. A thread without a current context has no entry.
    current: HashMap<ThreadId, u64>,
}

impl Contexts {
    pub(crate) fn new(devices: u32) -> Self {
        let devices = (0..devices).map(|_| SimDevice::default()).collect();
        Self { devices, live: HashMap::new(), current: HashMap::new() }
    }

    /// Fails with the sticky error if the device is lost.
    pub(crate) fn health(&self, device: u32) -> Answer<()> {
        self.devices[device as usize].poison.map_or(Ok(()), Err)
    }

    /// The live context of a device.
    pub(crate) fn of_device(&self, device: u32) -> Option<u64> {
        self.devices[device as usize].context
    }

    /// The device of a live context.
    pub(crate) fn device_of(&self, context: u64) -> Answer<u32> {
        self.live.get(&context).copied().ok_or(ErrorCode::INVALID_CONTEXT)
    }

    /// Devices whose `cuMemAlloc` memory `device` may access, one bit each.
    pub(crate) fn peers(&self, device: u32) -> u64 {
        self.devices[device as usize].peers
    }

    /// The calling thread's context; 0 without one.
    pub(crate) fn current(&self) -> u64 {
        self.current.get(&std::thread::current().id()).copied().unwrap_or(0)
    }

    pub(crate) fn set_current(&mut self, context: u64) -> Answer<()> {
        let thread = std::thread::current().id();
        if context == 0 {
            self.current.remove(&thread);
            return Ok(());
        }
        self.device_of(context)?;
        self.current.insert(thread, context);
        Ok(())
    }

    fn begin(&mut self, device: u32, context: u64) {
        self.live.insert(context, device);
        self.devices[device as usize].context = Some(context);
    }

    fn end(&mut self, device: u32) {
        let state = &mut self.devices[device as usize];
        state.peers = 0;
        if let Some(context) = state.context.take() {
            self.live.remove(&context);
        }
        for other in &mut self.devices {
            other.peers &= !(1 << device);
        }
    }
}

impl Machine {
    /// Fails with the sticky error if the device is lost.
    pub(crate) fn health(&self, device: u32) -> Answer<()> {
        self.contexts.health(device)
    }

    /// Marks a device as lost: its pending work never runs.
    pub(crate) fn poison(&mut self, device: u32, code: ErrorCode) {
        self.contexts.devices[device as usize].poison.get_or_insert(code);
        self.streams.discard(device);
        guard!("sim.lost-is-over", self.races.device_stopped(device));
    }

    /// Loses a device because its work faulted. NVIDIA's driver fails the whole process then: all
    /// other devices return the same error, even those without a context.
    pub(crate) fn poison_process(&mut self, device: u32, code: ErrorCode) {
        self.poison(device, code);
        for other in 0..self.config.devices {
            self.poison(other, code);
        }
    }

    /// Device of the calling thread's context, lost or not. Clean-up calls need this form.
    pub(crate) fn current_device(&self) -> Answer<u32> {
        let context = self.contexts.current();
        if context == 0 {
            return Err(ErrorCode::INVALID_CONTEXT);
        }
        self.contexts.device_of(context).map_err(|_| ErrorCode::CONTEXT_IS_DESTROYED)
    }

    /// Device of the calling thread's context. Fails if the device is lost.
    pub(crate) fn current(&self) -> Answer<u32> {
        let device = self.current_device()?;
        self.health(device)?;
        Ok(device)
    }

    pub(crate) fn ctx_retain(&mut self, device: u32) -> Answer<u64> {
        self.health(device)?;
        self.contexts.devices[device as usize].retained += 1;
        if let Some(context) = self.contexts.of_device(device) {
            return Ok(context);
        }
        self.clock.created_context();
        let context = self.new_handle();
        let legacy_stream = self.new_handle();
        self.contexts.begin(device, context);
        self.streams.open_legacy(legacy_stream, device);
        Ok(context)
    }

    pub(crate) fn ctx_release(&mut self, device: u32) -> Answer<()> {
        let state = &mut self.contexts.devices[device as usize];
        state.retained = state.retained.checked_sub(1).ok_or(ErrorCode::INVALID_CONTEXT)?;
        if state.retained > 0 {
            return Ok(());
        }
        // Blocked work is lost with the context. A finding already reports it.
        let _ = self.wait_to_end(END, Goal::Device(device));
        let call = (END, self.next_sequence());
        self.races.context_ended(call, device);
        self.tell_races();
        self.streams.discard(device);
        self.tear_down(call, device);
        Ok(())
    }

    fn tear_down(&mut self, call: (&'static str, u64), device: u32) {
        let before = self.leaks();
        for stream in self.streams.end_device(device) {
            self.races.stream_ended(stream);
        }
        self.events.end_device(device);
        for module in self.kernels.end_device(device) {
            self.races.forget_module(module);
        }
        self.graphs.end_device(device);
        while let Some(index) =
            self.memory.allocations.live().iter().position(|a| a.device == device)
        {
            let allocation = &self.memory.allocations.live()[index];
            let range = (allocation.base, allocation.bytes());
            guard!("sim.context-ends-memory", self.races.freed(call, RangeKind::Allocation, range));
            self.tell_races();
            self.memory.free(index);
        }
        while let Some(index) = self.memory.host.live().iter().position(|r| r.owner == device) {
            let region = &self.memory.host.live()[index];
            let range = (region.base(), region.bytes());
            self.races.freed(call, RangeKind::PinnedHost, range);
            self.tell_races();
            self.memory.host.free(index);
        }
        let after = self.leaks();
        if before != after {
            let detail = format!("alive before: {before}; after: {after}");
            let mut finding = Finding::new(FindingKind::LostObjects, END, detail);
            finding.device = Some(device);
            self.findings.add(finding);
        }
        self.contexts.end(device);
    }

    /// The current device and the device of the peer context.
    fn peer(&self, peer_context: u64) -> Answer<(usize, u32)> {
        let device = self.current()?;
        Ok((device as usize, self.contexts.device_of(peer_context)?))
    }

    pub(crate) fn enable_peer(&mut self, peer_context: u64) -> Answer<()> {
        let (device, peer) = self.peer(peer_context)?;
        if peer as usize == device || !self.config.can_access(device as u32, peer) {
            return Err(ErrorCode::PEER_ACCESS_UNSUPPORTED);
        }
        let peers = &mut self.contexts.devices[device].peers;
        if *peers >> peer & 1 == 1 {
            return Err(ErrorCode::PEER_ACCESS_ALREADY_ENABLED);
        }
        *peers |= 1 << peer;
        Ok(())
    }

    pub(crate) fn disable_peer(&mut self, peer_context: u64) -> Answer<()> {
        let (device, peer) = self.peer(peer_context)?;
        let peers = &mut self.contexts.devices[device].peers;
        if *peers >> peer & 1 == 0 {
            return Err(ErrorCode::PEER_ACCESS_NOT_ENABLED);
        }
        *peers &= !(1 << peer);
        Ok(())
    }
}
