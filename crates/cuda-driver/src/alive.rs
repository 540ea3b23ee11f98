//! The live objects of a device, for a caller whose close is refused.

use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use crate::Device;

/// The kind of object that a handle owns.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Stream,
    Event,
    DeviceBuffer,
    PinnedBuffer,
    AddressRange,
    PhysicalMemory,
    Module,
}

const KINDS: usize = 7;

/// The handles of one device, counted by kind. The counts are for reports and for tests of leaks.
/// No decision depends on them, so they are relaxed.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    handles: [AtomicUsize; KINDS],
    bytes: [AtomicU64; KINDS],
}

impl Tally {
    fn add(&self, kind: Kind, bytes: u64) {
        self.handles[kind as usize].fetch_add(1, Relaxed);
        self.bytes[kind as usize].fetch_add(bytes, Relaxed);
    }

    fn remove(&self, kind: Kind, bytes: u64) {
        self.handles[kind as usize].fetch_sub(1, Relaxed);
        self.bytes[kind as usize].fetch_sub(bytes, Relaxed);
    }

    fn of(&self, kind: Kind) -> (usize, u64) {
        let index = kind as usize;
        (self.handles[index].load(Relaxed), self.bytes[index].load(Relaxed))
    }

    /// The live objects, where the device has `owners` owners, the caller among them.
    pub(crate) fn alive(&self, owners: usize, retired: usize) -> LiveHandles {
        let (streams, _) = self.of(Kind::Stream);
        let (events, _) = self.of(Kind::Event);
        let (device_buffers, device_bytes) = self.of(Kind::DeviceBuffer);
        let (pinned_buffers, pinned_bytes) = self.of(Kind::PinnedBuffer);
        let (address_ranges, reserved_bytes) = self.of(Kind::AddressRange);
        let (physical_memories, physical_bytes) = self.of(Kind::PhysicalMemory);
        let (modules, _) = self.of(Kind::Module);
        let mut alive = LiveHandles {
            streams,
            events,
            device_buffers,
            device_bytes,
            pinned_buffers,
            pinned_bytes,
            address_ranges,
            reserved_bytes,
            physical_memories,
            physical_bytes,
            modules,
            devices: 0,
            retired,
        };
        // Each handle owns the device once, and the caller owns it once.
        alive.devices = owners.saturating_sub(alive.handles() + 1);
        alive
    }
}

/// The device of one handle: counted as long as the handle lives.
pub(crate) struct Held {
    device: Device,
    kind: Kind,
    bytes: u64,
}

impl Held {
    pub(crate) fn new(device: &Device, kind: Kind, bytes: u64) -> Self {
        device.tally().add(kind, bytes);
        Self { device: device.clone(), kind, bytes }
    }
}

impl Deref for Held {
    type Target = Device;

    fn deref(&self) -> &Device {
        &self.device
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.device.tally().remove(self.kind, self.bytes);
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.device.fmt(f)
    }
}

/// The live objects of a device, by kind: they keep it from being closed.
///
/// While other threads make and drop handles, the counts may be of different moments.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub struct LiveHandles {
    /// Streams, our own and adopted ones; clones count as one.
    pub streams: usize,
    /// Events.
    pub events: usize,
    /// [`DeviceBuffer`](crate::DeviceBuffer)s.
    pub device_buffers: usize,
    /// Their bytes.
    pub device_bytes: u64,
    /// [`PinnedBuffer`](crate::PinnedBuffer)s.
    pub pinned_buffers: usize,
    /// Their bytes.
    pub pinned_bytes: u64,
    /// [`AddressRange`](crate::AddressRange)s.
    pub address_ranges: usize,
    /// Their bytes, mapped or not.
    pub reserved_bytes: u64,
    /// [`PhysicalMemory`](crate::PhysicalMemory) handles.
    pub physical_memories: usize,
    /// Their bytes.
    pub physical_bytes: u64,
    /// Modules; clones, and the kernels of one module, count as one.
    pub modules: usize,
    /// Handles of the device itself, except the one that was asked.
    pub devices: usize,
    /// Buffers that were dropped and whose memory waits to be freed, and objects that the driver refused to
    /// destroy when they were dropped ([`Device::free_retired`]). They do not keep the device from
    /// being closed; closing frees them.
    pub retired: usize,
}

impl LiveHandles {
    /// Number of live objects, without the device's own handles and retired memory.
    #[must_use]
    pub fn handles(&self) -> usize {
        self.streams
            + self.events
            + self.device_buffers
            + self.pinned_buffers
            + self.address_ranges
            + self.physical_memories
            + self.modules
    }
}

impl fmt::Display for LiveHandles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kinds = [
            (self.streams, "streams", None),
            (self.events, "events", None),
            (self.device_buffers, "device buffers", Some(self.device_bytes)),
            (self.pinned_buffers, "pinned buffers", Some(self.pinned_bytes)),
            (self.address_ranges, "address ranges", Some(self.reserved_bytes)),
            (self.physical_memories, "physical memories", Some(self.physical_bytes)),
            (self.modules, "modules", None),
            (self.devices, "handles of the device", None),
            (self.retired, "dropped buffers and modules to free", None),
        ];
        let mut separator = "";
        for (count, kind, bytes) in kinds.into_iter().filter(|(count, ..)| *count > 0) {
            write!(f, "{separator}{count} {kind}")?;
            if let Some(bytes) = bytes {
                write!(f, " ({bytes} bytes)")?;
            }
            separator = ", ";
        }
        if separator.is_empty() { f.write_str("nothing") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_alive_is_named_and_what_is_not_is_left_out() {
        let tally = Tally::default();
        assert_eq!(tally.alive(1, 0).to_string(), "nothing");
        tally.add(Kind::Stream, 0);
        tally.add(Kind::DeviceBuffer, 4096);
        tally.add(Kind::DeviceBuffer, 64);
        let alive = tally.alive(5, 3);
        assert_eq!((alive.handles(), alive.devices), (3, 1));
        assert_eq!(
            alive.to_string(),
            "1 streams, 2 device buffers (4160 bytes), 1 handles of the device, \
             3 dropped buffers and modules to free"
        );
        tally.remove(Kind::Stream, 0);
        tally.remove(Kind::DeviceBuffer, 64);
        tally.remove(Kind::DeviceBuffer, 4096);
        let alive = tally.alive(1, 3);
        assert_eq!((alive.handles(), alive.devices), (0, 0), "retired memory is in nobody's way");
    }
}
