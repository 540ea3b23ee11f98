//! All memory that a device can address: its own, that of its peers, and pinned host memory.

mod allocations;
mod initialised;
mod miss;
mod pages;
mod view;
mod virtual_memory;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cuda_driver::guard;
use cuda_driver::reference::AccessFault;
use cuda_driver::{ErrorCode, MemoryKind, PointerAttributes};

use allocations::Allocations;
use miss::FreedRange;
pub(crate) use miss::describe;
use pages::Fresh;
pub(crate) use view::View;
use virtual_memory::VirtualMemory;

use crate::SimConfig;
use crate::host_memory::{HOST_END, HostMemory};
use crate::races::Recorder;
use crate::time::TrafficCounter;

/// Device addresses of `cuMemAlloc` lie between here and [`VIRTUAL_START`].
const ALLOCATION_START: u64 = HOST_END;

const VIRTUAL_START: u64 = 1 << 52;

/// Page size of `cuMemAlloc` memory: 2 MiB, as a shift.
const ALLOCATION_PAGE_SHIFT: u32 = 21;

/// Maximum number of bytes that one copy step moves through a temporary buffer.
const COPY_STEP_BYTES: u64 = 1 << 20;

/// Number of freed ranges that are remembered, to explain late accesses.
const FREED_MAX: usize = 1024;

/// The accessor of memory, and its access rights.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Viewer {
    /// Devices whose `cuMemAlloc` memory it can access, one bit each.
    allocations: u64,
    /// Access bits; a mapping is accessible if its rights contain one of them.
    mappings: u64,
}

/// An access bit that every mapping has.
const MAPPED: u64 = 1 << 63;

impl Viewer {
    /// Can access everything that is allocated or mapped.
    pub(crate) const ANY: Self = Self { allocations: u64::MAX, mappings: MAPPED };

    /// The driver's view of a device when it checks an operation being enqueued: every allocation,
    /// and the mappings that the device may access.
    pub(crate) fn enqueuing(device: u32) -> Self {
        Self { allocations: u64::MAX, mappings: 1 << device }
    }

    /// A device that can access the `cuMemAlloc` memory of `peers`, one bit each.
    pub(crate) fn device(device: u32, peers: u64) -> Self {
        Self { allocations: peers | 1 << device, mappings: 1 << device }
    }
}

#[derive(Clone, Copy, Debug)]
enum Located {
    Allocation { index: usize, offset: u64 },
    Physical { index: u32, offset: u64 },
    Host { address: u64 },
}

/// A contiguous piece of memory, with an identity that does not depend on the address used.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) key: u64,
    pub(crate) bytes: u64,
    pub(crate) is_mapped: bool,
    pub(crate) is_host: bool,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Denied {
    /// No memory is at the address.
    Nothing,
    /// The address is reserved, but not mapped.
    Unmapped,
    /// The memory is mapped or allocated, but this device has no access.
    NoAccess,
}

/// Bytes taken from one device's memory. Dropping the value returns them.
#[derive(Debug)]
struct Charge {
    used: Arc<AtomicU64>,
    bytes: u64,
}

impl Charge {
    fn take(used: &Arc<AtomicU64>, bytes: u64, capacity: u64) -> Option<Self> {
        // Relaxed: all is done under the machine's lock.
        let taken = used.load(Ordering::Relaxed).checked_add(bytes)?;
        (taken <= capacity).then(|| {
            used.fetch_add(bytes, Ordering::Relaxed);
            Self { used: Arc::clone(used), bytes }
        })
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) allocations: Allocations,
    pub(crate) virtual_memory: VirtualMemory,
    pub(crate) host: HostMemory,
    /// Bytes in use on each device.
    used: Vec<Arc<AtomicU64>>,
    capacity: u64,
    freed: VecDeque<FreedRange>,
    seed: u64,
    patterns: u64,
    track_initialised: bool,
    /// Bytes that the last copy to pageable memory fetched.
    fetched: Option<Box<[u8]>>,
    /// Number of bytes that the running kernel has moved.
    pub(crate) traffic: TrafficCounter,
    /// Ranges that the running kernel has touched.
    pub(crate) recorder: Recorder,
}

impl Memory {
    pub(crate) fn new(config: &SimConfig) -> Self {
        Self {
            allocations: Allocations::new(),
            virtual_memory: VirtualMemory::new(config.granularity),
            host: HostMemory::new(config.pinned_bytes, crate::random::mix(config.seed) as u8 | 1),
            used: (0..config.devices).map(|_| Arc::default()).collect(),
            capacity: config.device_bytes,
            freed: VecDeque::new(),
            seed: config.seed,
            patterns: 0,
            track_initialised: config.track_initialised,
            fetched: None,
            traffic: TrafficCounter::default(),
            recorder: Recorder::default(),
        }
    }

    pub(crate) fn used(&self, device: u32) -> u64 {
        self.used.get(device as usize).map_or(0, |used| used.load(Ordering::Relaxed))
    }

    pub(crate) fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Takes `bytes` of `device`'s memory until the result is dropped.
    fn take(&self, device: u32, bytes: u64) -> Result<Charge, ErrorCode> {
        let used = self.used.get(device as usize).ok_or(ErrorCode::INVALID_DEVICE)?;
        Charge::take(used, bytes, self.capacity).ok_or(ErrorCode::OUT_OF_MEMORY)
    }

    /// Properties of the next new memory. Its byte pattern differs from that of any other memory.
    fn fresh(&mut self) -> Fresh {
        self.patterns += 1;
        Fresh {
            pattern: crate::random::mix(self.seed ^ self.patterns.rotate_left(32)),
            track_initialised: self.track_initialised,
        }
    }

    /// The location of `address`, and the number of bytes from there on in the same piece.
    fn locate(&self, viewer: Viewer, address: u64) -> Result<(Located, u64), Denied> {
        if address >= VIRTUAL_START {
            self.virtual_memory.locate(viewer, address)
        } else if address >= ALLOCATION_START {
            self.allocations.locate(viewer, address)
        } else {
            let rest = self.host.find(address).ok_or(Denied::Nothing)?;
            Ok((Located::Host { address }, rest))
        }
    }

    /// The piece of memory that begins at `address`.
    pub(crate) fn piece_at(&self, viewer: Viewer, address: u64) -> Option<Piece> {
        let (place, bytes) = self.locate(viewer, address).ok()?;
        Some(match place {
            Located::Host { .. } => Piece { key: address, bytes, is_mapped: false, is_host: true },
            Located::Allocation { .. } => {
                Piece { key: address, bytes, is_mapped: false, is_host: false }
            }
            Located::Physical { index, offset } => {
                let own = self.virtual_memory.key(index) + offset;
                let key = guard!("sim.key-of-memory", own, else address);
                Piece { key, bytes, is_mapped: true, is_host: false }
            }
        })
    }

    /// The attributes of `address`, for any accessor.
    pub(crate) fn attributes_of(&self, address: u64) -> PointerAttributes {
        let nothing = PointerAttributes { kind: None, device: 0, start: 0, bytes: 0 };
        if address >= VIRTUAL_START {
            let found = self.virtual_memory.mapping_at(address);
            return found.map_or(nothing, |(start, bytes, device)| PointerAttributes {
                kind: Some(MemoryKind::Device),
                device: device as i32,
                start,
                bytes,
            });
        }
        match self.locate(Viewer::ANY, address) {
            Ok((Located::Allocation { index, .. }, _)) => {
                let found = &self.allocations.live()[index];
                PointerAttributes {
                    kind: Some(MemoryKind::Device),
                    device: found.device as i32,
                    start: found.base,
                    bytes: found.bytes(),
                }
            }
            Ok((Located::Host { .. }, rest)) => PointerAttributes {
                kind: Some(MemoryKind::Host),
                start: address,
                bytes: rest,
                ..nothing
            },
            _ => nothing,
        }
    }

    /// Whether `viewer` may access the whole range.
    pub(crate) fn check(
        &self,
        viewer: Viewer,
        address: u64,
        bytes: u64,
    ) -> Result<(), AccessFault> {
        let mut done = 0;
        while done < bytes {
            let at = address.checked_add(done).ok_or(Denied::Nothing);
            match at.and_then(|at| self.locate(viewer, at)) {
                Ok((_, rest)) => done += rest.min(bytes - done),
                Err(denied) => return Err(self.fault(address, bytes, denied)),
            }
        }
        Ok(())
    }

    /// Copies the range, which passed [`check`](Memory::check), into `into`.
    fn read_checked(&self, viewer: Viewer, address: u64, into: &mut [u8]) {
        let mut done = 0;
        while done < into.len() {
            let most = (into.len() - done) as u64;
            let Ok((place, rest)) = self.locate(viewer, address + done as u64) else { return };
            let most = most.min(rest);
            let moved = match place {
                Located::Host { address } => {
                    let part = &mut into[done..done + most as usize];
                    self.host.read(address, part);
                    part.len()
                }
                Located::Allocation { index, offset } => {
                    let piece = self.allocations.pages(index).piece(offset, most);
                    into[done..done + piece.len()].copy_from_slice(piece);
                    piece.len()
                }
                Located::Physical { index, offset } => {
                    let part = &mut into[done..];
                    let piece = self.virtual_memory.pages(index).piece(offset, most);
                    part[..piece.len()].copy_from_slice(piece);
                    piece.len()
                }
            };
            done += moved;
        }
    }

    /// Passes each piece of the range, which passed [`check`](Memory::check), to `write`, with its
    /// offset in the range. Host pieces go through a temporary buffer.
    fn write_checked(
        &mut self,
        viewer: Viewer,
        address: u64,
        bytes: u64,
        mut write: impl FnMut(&HostMemory, &mut [u8], usize),
    ) {
        let mut done = 0;
        while done < bytes {
            let Ok((place, rest)) = self.locate(viewer, address + done) else { return };
            let most = rest.min(bytes - done);
            let moved = match place {
                Located::Host { address } => {
                    let mut part = vec![0; most.min(COPY_STEP_BYTES) as usize];
                    write(&self.host, &mut part, done as usize);
                    self.host.write(address, &part);
                    part.len()
                }
                Located::Allocation { index, offset } => {
                    let piece = self.allocations.pages_mut(index).piece_mut(offset, most);
                    write(&self.host, piece, done as usize);
                    piece.len()
                }
                Located::Physical { index, offset } => {
                    let piece = self.virtual_memory.pages_mut(index).piece_mut(offset, most);
                    write(&self.host, piece, done as usize);
                    piece.len()
                }
            };
            done += moved as u64;
        }
    }

    pub(crate) fn store(
        &mut self,
        viewer: Viewer,
        address: u64,
        data: &[u8],
    ) -> Result<(), AccessFault> {
        self.check(viewer, address, data.len() as u64)?;
        self.write_checked(viewer, address, data.len() as u64, |_, piece, offset| {
            piece.copy_from_slice(&data[offset..offset + piece.len()]);
        });
        Ok(())
    }

    pub(crate) fn fill(
        &mut self,
        viewer: Viewer,
        address: u64,
        bytes: u64,
        value: u8,
    ) -> Result<(), AccessFault> {
        self.check(viewer, address, bytes)?;
        self.write_checked(viewer, address, bytes, |_, piece, _| piece.fill(value));
        Ok(())
    }

    /// Copies `bytes` bytes, each side with the rights of its viewer. If either side is denied,
    /// nothing is written.
    pub(crate) fn copy(
        &mut self,
        (to, destination): (Viewer, u64),
        (from, source): (Viewer, u64),
        bytes: u64,
    ) -> Result<(), AccessFault> {
        self.check(from, source, bytes)?;
        self.check(to, destination, bytes)?;
        if source < HOST_END {
            // Copies directly from pinned memory into the pages, in one pass.
            self.write_checked(to, destination, bytes, |host, piece, offset| {
                host.read(source + offset as u64, piece);
            });
            return Ok(());
        }
        let mut buffer = vec![0; bytes.min(COPY_STEP_BYTES) as usize];
        let mut done = 0;
        while done < bytes {
            let step = (bytes - done).min(COPY_STEP_BYTES);
            let part = &mut buffer[..step as usize];
            let gaps = self.gaps(from, source + done, step);
            self.read_checked(from, source + done, part);
            self.write_checked(to, destination + done, step, |_, piece, offset| {
                piece.copy_from_slice(&part[offset..offset + piece.len()]);
            });
            // Bytes that were never written stay marked as never written in the copy.
            for (offset, length) in gaps {
                self.forget(to, destination + done + offset, length);
            }
            done += step;
        }
        Ok(())
    }

    /// Whether every byte of the range, which passed [`check`](Memory::check), was written before,
    /// by a copy, a fill or a kernel. Pinned host memory counts as written, because the host may
    /// write it without a call.
    pub(crate) fn initialised(&self, viewer: Viewer, address: u64, bytes: u64) -> bool {
        !self.track_initialised || self.first_gap(viewer, address, bytes).is_none()
    }

    /// The runs of never-written bytes in the range, by their offsets.
    fn gaps(&self, viewer: Viewer, address: u64, bytes: u64) -> Vec<(u64, u64)> {
        let mut gaps = Vec::new();
        let mut done = 0;
        while self.track_initialised
            && let Some((offset, length)) = self.first_gap(viewer, address + done, bytes - done)
        {
            gaps.push((done + offset, length));
            done += offset + length;
        }
        gaps
    }

    /// The first run of never-written bytes in the range. It ends at the latest with its page.
    fn first_gap(&self, viewer: Viewer, address: u64, bytes: u64) -> Option<(u64, u64)> {
        let mut done = 0;
        while done < bytes {
            let (place, rest) = self.locate(viewer, address + done).ok()?;
            let most = rest.min(bytes - done);
            let (looked_at, gap) = match place {
                Located::Host { .. } => (most, None),
                Located::Allocation { index, offset } => {
                    self.allocations.pages(index).gap(offset, most)
                }
                Located::Physical { index, offset } => {
                    self.virtual_memory.pages(index).gap(offset, most)
                }
            };
            if let Some((start, length)) = gap {
                return Some((done + start, length));
            }
            done += looked_at;
        }
        None
    }

    /// Marks the range, which passed [`check`](Memory::check), as never written.
    #[cold]
    fn forget(&mut self, viewer: Viewer, address: u64, bytes: u64) {
        let mut done = 0;
        while done < bytes {
            let Ok((place, rest)) = self.locate(viewer, address + done) else { return };
            let most = rest.min(bytes - done);
            done += match place {
                Located::Host { .. } => most,
                Located::Allocation { index, offset } => {
                    self.allocations.pages_mut(index).forget(offset, most)
                }
                Located::Physical { index, offset } => {
                    self.virtual_memory.pages_mut(index).forget(offset, most)
                }
            };
        }
    }

    /// Fetches bytes for the call that waits for them, which [takes](Self::take_fetched) them.
    pub(crate) fn fetch(
        &mut self,
        viewer: Viewer,
        address: u64,
        bytes: u64,
    ) -> Result<(), AccessFault> {
        self.fetched = Some(self.read(viewer, address, bytes)?);
        Ok(())
    }

    pub(crate) fn read(
        &self,
        viewer: Viewer,
        address: u64,
        bytes: u64,
    ) -> Result<Box<[u8]>, AccessFault> {
        self.check(viewer, address, bytes)?;
        let mut copy = vec![0; bytes as usize].into_boxed_slice();
        self.read_checked(viewer, address, &mut copy);
        Ok(copy)
    }

    pub(crate) fn take_fetched(&mut self) -> Option<Box<[u8]>> {
        self.fetched.take()
    }
}
