//! Host memory: the pinned regions that the device reaches, and the only raw pointers of the crate.
//!
//! The rest of the crate is safe Rust over integers. This module reaches two things through
//! pointers:
//!
//! * pinned regions, which this module allocates and checks against its table on each access;
//! * pageable memory of the caller, held as a [`PageableRange`]. The caller of the trait method
//!   promised its validity.

use std::alloc::Layout;
use std::collections::VecDeque;
use std::marker::PhantomData;

use cuda_driver::ErrorCode;

const PAGE_BYTES: usize = 4096;

/// End of the host addresses. Device addresses begin here.
pub(crate) const HOST_END: u64 = 1 << 48;

/// Amount of freed pinned memory kept in quarantine, so that a late access is reported and
/// harmless.
const QUARANTINE_BYTES: u64 = 64 << 20;

const FREED_BYTE: u8 = 0xDD;

/// Memory that a caller of `cuMemHostRegister` keeps mapped.
///
/// # Invariants
/// The range is initialised memory with exposed provenance that stays mapped until the last driver
/// call that unregisters it has returned.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RegisteredRange {
    base: u64,
    bytes: u64,
}

impl RegisteredRange {
    /// # Safety
    /// - The range meets the invariants of this type.
    pub(crate) unsafe fn new(base: u64, bytes: u64) -> Self {
        Self { base, bytes }
    }

    pub(crate) fn bytes(self) -> u64 {
        self.bytes
    }
}

/// The owner of a region's memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Origin {
    /// Memory that this module allocated for `cuMemHostAlloc`.
    Allocated,
    /// Memory of the program, which registered it.
    Registered,
}

/// One pinned allocation, or one registration.
///
/// # Invariants
/// An allocated region owns an allocation of `bytes` initialised bytes. `base` is its exposed
/// address. [`Region::new`] made it with the layout of [`Region::layout`], and it lives until this
/// value is dropped. A registered region was made from a [`RegisteredRange`], and is dropped before
/// the call that unregisters it returns.
#[derive(Debug)]
pub(crate) struct Region {
    base: u64,
    bytes: u64,
    origin: Origin,
    /// Device whose context allocated it.
    pub(crate) owner: u32,
    /// Whether all contexts share it.
    pub(crate) portable: bool,
}

impl Region {
    fn layout(bytes: u64) -> Option<Layout> {
        let bytes = usize::try_from(bytes).ok().filter(|&bytes| bytes > 0)?;
        Layout::from_size_align(bytes, PAGE_BYTES).ok()
    }

    fn new(bytes: u64, fill: u8, owner: u32, portable: bool) -> Option<Self> {
        let layout = Self::layout(bytes)?;
        // SAFETY: the size of `layout` is not zero (`Region::layout`).
        let start = unsafe { std::alloc::alloc(layout) };
        if start.is_null() {
            return None;
        }
        // SAFETY: `start` is a new allocation of `layout.size()` bytes, and no other code knows it
        // yet.
        unsafe { start.write_bytes(fill, layout.size()) };
        let base = start.expose_provenance() as u64;
        Some(Self { base, bytes, origin: Origin::Allocated, owner, portable })
    }

    pub(crate) fn base(&self) -> u64 {
        self.base
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn is_registered(&self) -> bool {
        self.origin == Origin::Registered
    }

    fn end(&self) -> u64 {
        self.base + self.bytes
    }

    fn overlaps(&self, address: u64, bytes: u64) -> bool {
        address < self.end() && self.base < address.saturating_add(bytes)
    }

    fn fill(&mut self, byte: u8) {
        let start = std::ptr::with_exposed_provenance_mut::<u8>(self.base as usize);
        // SAFETY: the region is allocated (only allocated regions reach this line), live and
        // `bytes` long (invariants), and its provenance is exposed. Only `cuMemFreeHost` and the
        // last `cuDevicePrimaryCtxRelease` lead here. Their callers promised that nothing refers to
        // the memory any more.
        unsafe { start.write_bytes(byte, self.bytes as usize) };
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.origin == Origin::Allocated
            && let Some(layout) = Self::layout(self.bytes)
        {
            let start = std::ptr::with_exposed_provenance_mut::<u8>(self.base as usize);
            // SAFETY: `start` was allocated with this same layout (invariants of an allocated
            // region), and only this line frees it.
            unsafe { std::alloc::dealloc(start, layout) };
        }
    }
}

/// Proof that a range is neither pinned, freed nor device memory. Only [`HostMemory::classify`]
/// makes it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Pageable(());

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum HostRange {
    /// Inside one live pinned region: accessed when the operation runs.
    Pinned,
    /// Ordinary memory of the caller: accessed during the call.
    Pageable(Pageable),
    /// Partly pinned: the range spans several kinds of memory.
    Straddles,
    /// Pinned memory that was freed.
    Freed,
    /// Null, an address of a device, or past the end of the address space.
    NotHost,
}

#[derive(Debug)]
pub(crate) struct HostMemory {
    /// Live regions, by address.
    live: Vec<Region>,
    live_bytes: u64,
    limit_bytes: u64,
    quarantine: VecDeque<Region>,
    quarantine_bytes: u64,
    fill: u8,
}

impl HostMemory {
    pub(crate) fn new(limit_bytes: u64, fill: u8) -> Self {
        Self {
            live: Vec::new(),
            live_bytes: 0,
            limit_bytes,
            quarantine: VecDeque::new(),
            quarantine_bytes: 0,
            fill,
        }
    }

    pub(crate) fn live(&self) -> &[Region] {
        &self.live
    }

    pub(crate) fn quarantine(&self) -> impl Iterator<Item = &Region> {
        self.quarantine.iter()
    }

    pub(crate) fn live_bytes(&self) -> u64 {
        self.live_bytes
    }

    pub(crate) fn alloc(
        &mut self,
        bytes: u64,
        owner: u32,
        portable: bool,
    ) -> Result<u64, ErrorCode> {
        if bytes == 0 {
            return Err(ErrorCode::INVALID_VALUE);
        }
        if bytes > self.limit_bytes - self.live_bytes {
            return Err(ErrorCode::OUT_OF_MEMORY);
        }
        let region =
            Region::new(bytes, self.fill, owner, portable).ok_or(ErrorCode::OUT_OF_MEMORY)?;
        Ok(self.insert(region))
    }

    pub(crate) fn register(
        &mut self,
        range: RegisteredRange,
        owner: u32,
        portable: bool,
    ) -> Result<(), ErrorCode> {
        let RegisteredRange { base, bytes } = range;
        let is_host = base != 0 && base.checked_add(bytes).is_some_and(|end| end <= HOST_END);
        if bytes == 0 || !is_host {
            return Err(ErrorCode::INVALID_VALUE);
        }
        let mut overlapped = self.live.iter().filter(|region| region.overlaps(base, bytes));
        if let Some(region) = overlapped.next() {
            return Err(match region.origin {
                Origin::Registered => ErrorCode::HOST_MEMORY_ALREADY_REGISTERED,
                Origin::Allocated => ErrorCode::INVALID_VALUE,
            });
        }
        if bytes > self.limit_bytes - self.live_bytes {
            return Err(ErrorCode::OUT_OF_MEMORY);
        }
        self.insert(Region { base, bytes, origin: Origin::Registered, owner, portable });
        Ok(())
    }

    fn insert(&mut self, region: Region) -> u64 {
        let base = region.base;
        let place = self.live.partition_point(|other| other.base < base);
        self.live_bytes += region.bytes;
        self.live.insert(place, region);
        base
    }

    /// Index of the live region that starts at `base`.
    pub(crate) fn starting_at(&self, base: u64) -> Option<usize> {
        self.live.binary_search_by_key(&base, |region| region.base).ok()
    }

    /// Frees region `index`. Memory of this module stays in quarantine for a while.
    pub(crate) fn free(&mut self, index: usize) {
        let mut region = self.live.remove(index);
        self.live_bytes -= region.bytes;
        // Registered memory belongs to the program again.
        if region.origin == Origin::Registered || region.bytes > QUARANTINE_BYTES {
            return;
        }
        region.fill(FREED_BYTE);
        self.quarantine_bytes += region.bytes;
        self.quarantine.push_back(region);
        while self.quarantine_bytes > QUARANTINE_BYTES {
            let Some(oldest) = self.quarantine.pop_front() else { break };
            self.quarantine_bytes -= oldest.bytes;
        }
    }

    /// The bytes from `address` to the end of the live region that holds it.
    pub(crate) fn find(&self, address: u64) -> Option<u64> {
        let next = self.live.partition_point(|region| region.base <= address);
        let region = self.live.get(next.checked_sub(1)?)?;
        region.end().checked_sub(address).filter(|&rest| rest > 0)
    }

    /// The parts of a range inside live regions, as addresses and lengths.
    pub(crate) fn pinned_parts(&self, (address, bytes): (u64, u64)) -> Vec<(u64, u64)> {
        let end = address.saturating_add(bytes);
        let first = self.live.partition_point(|region| region.end() <= address);
        let inside = self.live[first..].iter().take_while(|region| region.base < end);
        let part = |region: &Region| {
            let start = region.base.max(address);
            (start, region.end().min(end) - start)
        };
        inside.map(part).filter(|&(_, length)| length > 0).collect()
    }

    pub(crate) fn classify(&self, address: u64, bytes: u64) -> HostRange {
        let is_host = address != 0 && address.checked_add(bytes).is_some_and(|end| end <= HOST_END);
        if !is_host {
            HostRange::NotHost
        } else if self.find(address).is_some_and(|rest| bytes <= rest) {
            HostRange::Pinned
        } else if self.live.iter().any(|region| region.overlaps(address, bytes)) {
            HostRange::Straddles
        } else if self.quarantine.iter().any(|region| region.overlaps(address, bytes)) {
            HostRange::Freed
        } else {
            HostRange::Pageable(Pageable(()))
        }
    }

    /// Copies pinned bytes out; `None` if the range is not inside one live region.
    pub(crate) fn read(&self, address: u64, into: &mut [u8]) -> Option<()> {
        self.find(address).filter(|&rest| into.len() as u64 <= rest)?;
        let source = std::ptr::with_exposed_provenance::<u8>(address as usize);
        // SAFETY: the range is inside a live, initialised region (the check above and the
        // invariants of `Region`), whose provenance is exposed. `into` is an exclusive borrow, so
        // it does not overlap: Rust code holds no exclusive reference into a region while an
        // operation that reads the region is pending (safety of the seam). If a host thread writes
        // the bytes meanwhile, that is an error of the program, which a real device would show as
        // torn bytes; no reference to the bytes is formed here.
        unsafe { std::ptr::copy_nonoverlapping(source, into.as_mut_ptr(), into.len()) };
        Some(())
    }

    /// Copies bytes into pinned memory; `None` if the range is not inside one live region.
    pub(crate) fn write(&mut self, address: u64, from: &[u8]) -> Option<()> {
        self.find(address).filter(|&rest| from.len() as u64 <= rest)?;
        let destination = std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
        // SAFETY: the range is inside a live region whose provenance is exposed. The caller of the
        // trait method that enqueued the operation promised that the host neither reads nor writes
        // the range until the operation has completed (safety of the seam). Therefore `from` is not
        // in the range either.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), destination, from.len()) };
        Some(())
    }
}

/// Unpinned memory of the caller, borrowed for the driver call. An operation that runs later cannot
/// hold it.
///
/// # Invariants
/// The tables tell whether the range is pinned, freed or device memory. Otherwise its `bytes` bytes
/// at `address` may be read (a source) or written (a destination) for `'call`, and no other code
/// makes a conflicting access meanwhile.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageableRange<'call> {
    address: u64,
    bytes: u64,
    call: PhantomData<&'call mut [u8]>,
}

impl<'call> PageableRange<'call> {
    /// A range that is valid as long as `_call`, which the driver call borrows.
    ///
    /// # Safety
    /// - The range meets the invariants of this type for `'call`.
    pub(crate) unsafe fn new<T>(_call: &'call T, address: u64, bytes: u64) -> Self {
        Self { address, bytes, call: PhantomData }
    }

    pub(crate) fn address(self) -> u64 {
        self.address
    }

    pub(crate) fn bytes(self) -> u64 {
        self.bytes
    }

    /// A copy of the bytes, like the driver's own staging copy.
    pub(crate) fn snapshot(self, class: Pageable) -> Box<[u8]> {
        let Pageable(()) = class;
        let mut bytes = vec![0; self.bytes as usize].into_boxed_slice();
        let source = std::ptr::with_exposed_provenance::<u8>(self.address as usize);
        // SAFETY: the range is readable (invariants; `class` proves that it is the caller's own
        // memory); `bytes` is new memory of that length.
        unsafe { std::ptr::copy_nonoverlapping(source, bytes.as_mut_ptr(), bytes.len()) };
        bytes
    }

    /// Fills the range with `from`. Both have the same length.
    pub(crate) fn fill_from(self, class: Pageable, from: &[u8]) {
        let Pageable(()) = class;
        assert_eq!(from.len() as u64, self.bytes, "a copy changed its length");
        let destination = std::ptr::with_exposed_provenance_mut::<u8>(self.address as usize);
        // SAFETY: the range is writable (invariants; `class` proves that it is the caller's own
        // memory) and has this length (asserted); `from` is memory of this crate and does not
        // overlap it.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), destination, from.len()) };
    }
}
