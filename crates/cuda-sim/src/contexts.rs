//! Primary contexts, and the current context of each thread.

use cuda_driver::ErrorCode;
use cuda_driver::guard;

use crate::RangeKind;
use crate::findings::{Finding, FindingKind};
use crate::scheduler::Goal;
use crate::state::{Answer, Machine};
use crate::streams::Stream;

/// The call that ends a context.
const END: &str = "cuDevicePrimaryCtxRelease";

#[derive(Debug, Default)]
pub(crate) struct SimDevice {
    retained: u32,
    /// Handle of the live context.
    pub(crate) context: Option<u64>,
    pub(crate) legacy_stream: u64,
    /// Devices whose `cuMemAlloc` memory this device may access, one bit each.
    pub(crate) peers: u64,
    /// The error that lost the device. It stays until the process ends.
    pub(crate) poison: Option<ErrorCode>,
}

impl Machine {
    /// Fails with the sticky error if the device is lost.
    pub(crate) fn health(&self, device: u32) -> Answer<()> {
        match self.devices[device as usize].poison {
            Some(code) => Err(code),
            None => Ok(()),
        }
    }

    /// Marks a device as lost: its pending work never runs.
    pub(crate) fn poison(&mut self, device: u32, code: ErrorCode) {
        self.devices[device as usize].poison.get_or_insert(code);
        self.discard_work(device);
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
        let context = self.ctx_get_current();
        if context == 0 {
            return Err(ErrorCode::INVALID_CONTEXT);
        }
        self.contexts.get(&context).copied().ok_or(ErrorCode::CONTEXT_IS_DESTROYED)
    }

    /// Device of the calling thread's context. Fails if the device is lost.
    pub(crate) fn current(&self) -> Answer<u32> {
        let device = self.current_device()?;
        self.health(device)?;
        Ok(device)
    }

    pub(crate) fn ctx_retain(&mut self, device: u32) -> Answer<u64> {
        self.health(device)?;
        let index = device as usize;
        self.devices[index].retained += 1;
        if let Some(context) = self.devices[index].context {
            return Ok(context);
        }
        self.clock.created_context();
        let context = self.new_handle();
        let legacy_stream = self.new_handle();
        self.contexts.insert(context, device);
        self.streams.insert(legacy_stream, Stream::legacy(device));
        let state = &mut self.devices[index];
        state.context = Some(context);
        state.legacy_stream = legacy_stream;
        Ok(context)
    }

    pub(crate) fn ctx_release(&mut self, device: u32) -> Answer<()> {
        let state = &mut self.devices[device as usize];
        state.retained = state.retained.checked_sub(1).ok_or(ErrorCode::INVALID_CONTEXT)?;
        if state.retained > 0 {
            return Ok(());
        }
        // Blocked work is lost with the context. A finding already reports it.
        let _ = self.wait_to_end(END, Goal::Device(device));
        let call = (END, self.next_sequence());
        self.races.context_ended(call, device);
        self.tell_races();
        self.discard_work(device);
        self.tear_down(call, device);
        Ok(())
    }

    fn tear_down(&mut self, call: (&'static str, u64), device: u32) {
        let before = self.leaks();
        for (&handle, _) in self.streams.iter().filter(|(_, stream)| stream.device == device) {
            self.races.stream_ended(handle);
        }
        self.streams.retain(|_, stream| stream.device != device);
        self.events.retain(|_, event| event.device != device);
        for (&handle, _) in self.modules.iter().filter(|(_, module)| module.device == device) {
            self.races.forget_module(handle);
        }
        self.modules.retain(|_, module| module.device != device);
        self.graphs.retain(|_, graph| graph.device != device);
        self.graph_execs.retain(|_, exec| exec.device != device);
        let modules = &self.modules;
        self.functions.retain(|_, function| modules.contains_key(&function.module));
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
        let state = &mut self.devices[device as usize];
        state.peers = 0;
        if let Some(context) = state.context.take() {
            self.contexts.remove(&context);
        }
        for other in &mut self.devices {
            other.peers &= !(1 << device);
        }
    }

    pub(crate) fn ctx_get_current(&self) -> u64 {
        self.current.get(&std::thread::current().id()).copied().unwrap_or(0)
    }

    pub(crate) fn ctx_set_current(&mut self, context: u64) -> Answer<()> {
        let thread = std::thread::current().id();
        if context == 0 {
            self.current.remove(&thread);
            return Ok(());
        }
        if !self.contexts.contains_key(&context) {
            return Err(ErrorCode::INVALID_CONTEXT);
        }
        self.current.insert(thread, context);
        Ok(())
    }

    /// The current device and the device of the peer context.
    fn peer(&self, peer_context: u64) -> Answer<(usize, u32)> {
        let device = self.current()?;
        let &peer = self.contexts.get(&peer_context).ok_or(ErrorCode::INVALID_CONTEXT)?;
        Ok((device as usize, peer))
    }

    pub(crate) fn enable_peer(&mut self, peer_context: u64) -> Answer<()> {
        let (device, peer) = self.peer(peer_context)?;
        if peer as usize == device || !self.config.can_access(device as u32, peer) {
            return Err(ErrorCode::PEER_ACCESS_UNSUPPORTED);
        }
        let peers = &mut self.devices[device].peers;
        if *peers >> peer & 1 == 1 {
            return Err(ErrorCode::PEER_ACCESS_ALREADY_ENABLED);
        }
        *peers |= 1 << peer;
        Ok(())
    }

    pub(crate) fn disable_peer(&mut self, peer_context: u64) -> Answer<()> {
        let (device, peer) = self.peer(peer_context)?;
        let peers = &mut self.devices[device].peers;
        if *peers >> peer & 1 == 0 {
            return Err(ErrorCode::PEER_ACCESS_NOT_ENABLED);
        }
        *peers &= !(1 << peer);
        Ok(())
    }
}
