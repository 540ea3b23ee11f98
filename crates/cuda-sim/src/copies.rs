//! Allocation, copies and fills: the driver's checks before the work is enqueued.

use cuda_driver::guard;
use cuda_driver::{
    AllocationProp, BatchCopy, ErrorCode, HostAllocFlags, HostRegisterFlags, PeerCopy,
};

use crate::RangeKind;
use crate::findings::FindingKind;
use crate::host_memory::{HOST_END, HostRange, PageableRange, RegisteredRange};
use crate::memory::Viewer;
use crate::state::{Answer, Machine};
use crate::streams::{Goal, is_legacy};
use crate::time::SizedCall;
use crate::work::Work;

impl Machine {
    pub(crate) fn mem_info(&self) -> Answer<(u64, u64)> {
        let device = self.current()?;
        let total = self.memory.capacity();
        Ok((total - self.memory.used(device), total))
    }

    pub(crate) fn mem_alloc(&mut self, bytes: u64) -> Answer<u64> {
        let device = self.current()?;
        self.may_wait()?;
        self.memory.allocate(device, bytes)
    }

    pub(crate) fn mem_free(&mut self, address: u64) -> Answer<()> {
        if address == 0 {
            return Ok(());
        }
        let index = self.memory.allocations.starting_at(address);
        let index = index.ok_or(ErrorCode::INVALID_VALUE)?;
        self.may_wait()?;
        let device = self.memory.allocations.live()[index].device;
        let bytes = self.memory.allocations.live()[index].bytes();
        // The driver also waits for other devices, because their copies may read this memory.
        self.wait_to_end("cuMemFree", Goal::Everything)?;
        self.note_freed("cuMemFree", RangeKind::Allocation, (address, bytes));
        self.memory.free(index);
        self.health(device)
    }

    pub(crate) fn host_alloc(&mut self, bytes: u64, flags: HostAllocFlags) -> Answer<u64> {
        let device = self.current()?;
        if bytes == 0 {
            // The call succeeds without an address. Null can be freed as well.
            return Ok(0);
        }
        self.may_wait()?;
        let host = self.memory.host.alloc(bytes, device, flags.portable)?;
        self.clock.sized(SizedCall::PinnedAlloc, bytes);
        Ok(host)
    }

    pub(crate) fn host_free(&mut self, host: u64) -> Answer<()> {
        if host == 0 {
            return Ok(());
        }
        let index = self.memory.host.starting_at(host).ok_or(ErrorCode::INVALID_VALUE)?;
        let region = &self.memory.host.live()[index];
        if region.is_registered() {
            return Err(ErrorCode::INVALID_VALUE);
        }
        self.may_wait()?;
        let (owner, bytes) = (region.owner, region.bytes());
        let goal = if region.portable { Goal::Everything } else { Goal::Device(owner) };
        self.wait_to_end("cuMemFreeHost", goal)?;
        self.note_freed("cuMemFreeHost", RangeKind::PinnedHost, (host, bytes));
        self.memory.host.free(index);
        self.clock.sized(SizedCall::PinnedFree, bytes);
        self.health(owner)
    }

    pub(crate) fn host_register(
        &mut self,
        range: RegisteredRange,
        flags: HostRegisterFlags,
    ) -> Answer<()> {
        let device = self.current()?;
        self.may_wait()?;
        self.memory.host.register(range, device, flags.portable)?;
        self.clock.sized(SizedCall::Register, range.bytes());
        Ok(())
    }

    pub(crate) fn host_unregister(&mut self, host: u64) -> Answer<()> {
        let index = self.memory.host.starting_at(host);
        let region = index.map(|index| (index, &self.memory.host.live()[index]));
        let Some((index, region)) = region.filter(|(_, region)| region.is_registered()) else {
            // The host address is null, unregistered pinned memory, or device memory.
            let known = host == 0 || self.memory.check(Viewer::ANY, host, 1).is_ok();
            return Err(if known {
                ErrorCode::INVALID_VALUE
            } else {
                ErrorCode::HOST_MEMORY_NOT_REGISTERED
            });
        };
        self.may_wait()?;
        let (owner, bytes) = (region.owner, region.bytes());
        // The driver waits for all work of this device, but not for other devices.
        self.wait_to_end("cuMemHostUnregister", Goal::Device(owner))?;
        self.note_freed("cuMemHostUnregister", RangeKind::PinnedHost, (host, bytes));
        self.memory.host.free(index);
        self.clock.sized(SizedCall::Unregister, bytes);
        self.health(owner)
    }

    /// With unified addressing, pinned memory has one address, regardless of its flags.
    pub(crate) fn host_device_pointer(&self, host: u64) -> Answer<u64> {
        self.current()?;
        self.memory.host.find(host).map(|_| host).ok_or(ErrorCode::INVALID_VALUE)
    }

    /// Refuses a device range that is not inside one live allocation or mapped run, or that device
    /// `at.0` may not access. Copies reach a peer's allocations whether or not peer access is
    /// enabled.
    fn check_device_range(
        &mut self,
        call: &'static str,
        at: (u32, u64),
        address: u64,
        bytes: u64,
    ) -> Answer<()> {
        // A kernel sees neighbouring pinned ranges as one memory. The driver's checks do not.
        let host = address < HOST_END;
        let whole = !host || self.memory.host.classify(address, bytes) == HostRange::Pinned;
        if whole && self.memory.check(Viewer::enqueuing(at.0), address, bytes).is_ok() {
            return Ok(());
        }
        let reason = if host {
            "not of one pinned range"
        } else if self.memory.check(Viewer::ANY, address, bytes).is_ok() {
            "mapped without access for the device"
        } else {
            "not of one live allocation or mapping"
        };
        self.note_range(FindingKind::InvalidRange, call, at, (address, bytes), reason);
        Err(ErrorCode::INVALID_VALUE)
    }

    /// Refuses a host range that spans several allocations or was freed.
    fn check_host_range(
        &mut self,
        call: &'static str,
        at: (u32, u64),
        range: PageableRange<'_>,
    ) -> Answer<HostRange> {
        let (address, bytes) = (range.address(), range.bytes());
        let class = self.memory.host.classify(address, bytes);
        let (kind, reason) = match class {
            HostRange::Pinned | HostRange::Pageable(_) => return Ok(class),
            HostRange::Straddles => (FindingKind::InvalidRange, "only partly pinned"),
            HostRange::Freed => (FindingKind::FreedHostMemory, "pinned memory that was freed"),
            // All addresses share one space, so device memory is accepted like pinned memory.
            HostRange::NotHost
                if self.memory.check(Viewer::enqueuing(at.0), address, bytes).is_ok() =>
            {
                return Ok(HostRange::Pinned);
            }
            HostRange::NotHost => (FindingKind::InvalidRange, "not a host address"),
        };
        self.note_range(kind, call, at, (address, bytes), reason);
        Err(ErrorCode::INVALID_VALUE)
    }

    pub(crate) fn copy_to_device(
        &mut self,
        destination: u64,
        host: PageableRange<'_>,
        stream_argument: u64,
    ) -> Answer<()> {
        const CALL: &str = "cuMemcpyHtoDAsync";
        let (stream, device) = self.stream(stream_argument)?;
        let bytes = host.bytes();
        if bytes == 0 {
            return Ok(());
        }
        let at = (device, stream_argument);
        self.check_device_range(CALL, at, destination, bytes)?;
        let work = match self.check_host_range(CALL, at, host)? {
            HostRange::Pageable(class) => {
                self.clock.sized(SizedCall::Pageable, bytes);
                Work::WriteStaged { destination, data: host.snapshot(class) }
            }
            _ => {
                let (to, from) = ((device, destination), (device, host.address()));
                self.note_overlap(CALL, at, (to, from), bytes);
                Work::Copy { destination: to, source: from, bytes }
            }
        };
        self.enqueue(stream, CALL, work);
        Ok(())
    }

    pub(crate) fn copy_to_host(
        &mut self,
        host: PageableRange<'_>,
        source: u64,
        stream_argument: u64,
    ) -> Answer<()> {
        const CALL: &str = "cuMemcpyDtoHAsync";
        let (stream, device) = self.stream(stream_argument)?;
        let bytes = host.bytes();
        if bytes == 0 {
            return Ok(());
        }
        let at = (device, stream_argument);
        self.check_device_range(CALL, at, source, bytes)?;
        let class = self.check_host_range(CALL, at, host)?;
        let HostRange::Pageable(class) = class else {
            let (destination, source) = ((device, host.address()), (device, source));
            self.note_overlap(CALL, at, (destination, source), bytes);
            self.enqueue(stream, CALL, Work::Copy { destination, source, bytes });
            return Ok(());
        };
        // The caller's memory is valid only during this call, so wait for the bytes.
        self.memory.take_fetched();
        let point = self.enqueue(stream, CALL, Work::Fetch { source, bytes });
        if let Err(code) = self.wait(CALL, Goal::Point(point)) {
            self.take_back(point);
            return Err(code);
        }
        guard!("sim.pageable-copy-waits", self.races.host_knows_point(point));
        self.health(device)?;
        if let Some(data) = self.memory.take_fetched() {
            host.fill_from(class, &data);
        }
        Ok(())
    }

    pub(crate) fn copy_on_device(
        &mut self,
        destination: u64,
        source: u64,
        bytes: u64,
        stream_argument: u64,
    ) -> Answer<()> {
        const CALL: &str = "cuMemcpyDtoDAsync";
        let (stream, device) = self.stream(stream_argument)?;
        if bytes == 0 {
            return Ok(());
        }
        let at = (device, stream_argument);
        self.check_device_range(CALL, at, source, bytes)?;
        self.check_device_range(CALL, at, destination, bytes)?;
        let (destination, source) = ((device, destination), (device, source));
        self.note_overlap(CALL, at, (destination, source), bytes);
        self.enqueue(stream, CALL, Work::Copy { destination, source, bytes });
        Ok(())
    }

    pub(crate) fn copy_peer(&mut self, copy: PeerCopy, stream_argument: u64) -> Answer<()> {
        const CALL: &str = "cuMemcpyPeerAsync";
        let (stream, _) = self.stream(stream_argument)?;
        let to = self.contexts.device_of(copy.destination_context)?;
        let from = self.contexts.device_of(copy.source_context)?;
        let (destination, source) = ((to, copy.destination), (from, copy.source));
        if copy.bytes == 0 {
            return Ok(());
        }
        self.check_device_range(CALL, (source.0, stream_argument), source.1, copy.bytes)?;
        let at = (destination.0, stream_argument);
        self.check_device_range(CALL, at, destination.1, copy.bytes)?;
        self.note_overlap(CALL, at, (destination, source), copy.bytes);
        self.enqueue(stream, CALL, Work::Copy { destination, source, bytes: copy.bytes });
        Ok(())
    }

    /// Copies of one batch. The checks are stricter than the driver's where the driver would hide a
    /// mistake: pageable memory is refused, and so is a copy that writes bytes which another copy
    /// of the batch accesses.
    pub(crate) fn copy_batch(&mut self, copies: &[BatchCopy], stream_argument: u64) -> Answer<()> {
        const CALL: &str = "cuMemcpyBatchAsync";
        let (stream, device) = self.stream(stream_argument)?;
        if copies.is_empty() || is_legacy(stream_argument) {
            return Err(ErrorCode::INVALID_VALUE);
        }
        let at = (device, stream_argument);
        let mut check = |copy: &BatchCopy| {
            // Unlike a single copy, a copy of a batch may not be empty.
            if copy.bytes == 0 {
                return Err(ErrorCode::INVALID_VALUE);
            }
            self.check_device_range(CALL, at, copy.source, copy.bytes)?;
            self.check_device_range(CALL, at, copy.destination, copy.bytes)
        };
        let refused = copies
            .iter()
            .enumerate()
            .find_map(|(index, copy)| check(copy).err().map(|code| (index, code)));
        // As in driver 580, the copies before the refused one still run.
        let good = &copies[..refused.map_or(copies.len(), |(index, _)| index)];
        if !good.is_empty() {
            self.note_batch_conflicts(CALL, at, good);
            for copy in good {
                let ends = ((device, copy.destination), (device, copy.source));
                self.note_overlap(CALL, at, ends, copy.bytes);
            }
            self.enqueue(stream, CALL, Work::CopyBatch(good.into()));
        }
        refused.map_or(Ok(()), |(_, code)| Err(code))
    }

    /// Reports a copy that writes bytes which it also reads from elsewhere: it may read them before
    /// or after.
    fn note_overlap(
        &mut self,
        call: &'static str,
        at: (u32, u64),
        (destination, source): ((u32, u64), (u32, u64)),
        bytes: u64,
    ) {
        let mut written = self.pieces(destination, bytes);
        written.sort_unstable();
        // By where the bytes lie: memory that is mapped twice has two addresses.
        let overlaps = self.pieces(source, bytes).into_iter().any(|(key, length, offset)| {
            let first = written.partition_point(|&(start, long, _)| start + long <= key);
            let mut near = written[first..].iter().take_while(|&&(start, ..)| start < key + length);
            near.any(|&(start, _, other)| {
                // Whether one byte is read and written at different places of the copy.
                other.wrapping_sub(start) != offset.wrapping_sub(key)
            })
        });
        if guard!("sim.copy-over-itself", overlaps, else false) {
            let reason = "the copy writes bytes that it reads, and nothing orders them";
            self.note_range(FindingKind::Conflict, call, at, (destination.1, bytes), reason);
        }
    }

    /// Where the bytes of a range lie: key, length and offset in the range, one for each piece.
    fn pieces(&self, (device, address): (u32, u64), bytes: u64) -> Vec<(u64, u64, u64)> {
        let (mut pieces, mut done) = (Vec::new(), 0);
        while done < bytes {
            let piece = self.memory.piece_at(Viewer::enqueuing(device), address + done);
            let Some(piece) = piece.filter(|piece| piece.bytes > 0) else { break };
            let length = piece.bytes.min(bytes - done);
            pieces.push((piece.key, length, done));
            done += length;
        }
        pieces
    }

    /// Reports ranges that one copy of a batch writes and another copy accesses. Nothing orders the
    /// two.
    fn note_batch_conflicts(&mut self, call: &'static str, at: (u32, u64), copies: &[BatchCopy]) {
        let mut written: Vec<(u64, u64, usize)> = copies
            .iter()
            .enumerate()
            .map(|(index, copy)| (copy.destination, copy.bytes, index))
            .collect();
        written.sort_unstable();
        let mut accessed = copies.iter().enumerate().flat_map(|(index, copy)| {
            [(copy.destination, copy.bytes, index), (copy.source, copy.bytes, index)]
        });
        // Comparing neighbours suffices: if any two writes overlap, two neighbours in this order do
        // too.
        let conflict = accessed.find(|&(address, bytes, index)| {
            let end = address.saturating_add(bytes);
            let next = written.partition_point(|&(start, ..)| start < end);
            written[..next].iter().rev().take(2).any(|&(start, length, other)| {
                other != index && address < start.saturating_add(length)
            })
        });
        if let Some((address, bytes, _)) = conflict {
            let reason =
                "one copy of a batch writes bytes that another accesses, and nothing orders them";
            self.note_range(FindingKind::Conflict, call, at, (address, bytes), reason);
        }
    }

    pub(crate) fn fill(
        &mut self,
        destination: u64,
        value: u8,
        bytes: u64,
        stream_argument: u64,
    ) -> Answer<()> {
        const CALL: &str = "cuMemsetD8Async";
        let (stream, device) = self.stream(stream_argument)?;
        if bytes == 0 {
            return Ok(());
        }
        let at = (device, stream_argument);
        self.check_device_range(CALL, at, destination, bytes)?;
        // Unlike a copy, a fill needs peer access.
        if self.memory.check(self.viewer(device), destination, bytes).is_err() {
            let reason = "memory of a peer without peer access";
            self.note_range(FindingKind::InvalidRange, CALL, at, (destination, bytes), reason);
            return Err(ErrorCode::INVALID_VALUE);
        }
        self.enqueue(stream, CALL, Work::Fill { destination, bytes, value });
        Ok(())
    }

    pub(crate) fn mem_create(&mut self, bytes: u64, prop: AllocationProp) -> Answer<u64> {
        let device = self.device(prop.device)?;
        let handle = self.new_handle();
        self.memory.create(handle, device, bytes)?;
        self.clock.sized(SizedCall::Create, bytes);
        Ok(handle)
    }
}
