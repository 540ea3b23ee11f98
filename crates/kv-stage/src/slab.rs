//! Slabs: the pinned allocations from which all buffers are cut.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cuda_driver::host_pages::{HostMemory, HostPagesOptions, PageKind, PinError};
use cuda_driver::{
    Device, FencePool, HostAccess, OutOfBounds, PinnedBuffer, PinnedSpan, Stream, guard,
};

use crate::StagingOptions;

/// Huge pages on the device's memory node, as far as the system has both.
pub(crate) const DEFAULT_MEMORY: HostMemory =
    HostMemory::Pages(HostPagesOptions::HUGE_BESIDE_DEVICE);

/// Buffers of a slab start at multiples of this number of bytes.
pub(crate) const BUFFER_ALIGNMENT: u64 = 256;

/// The kinds of pages of [`PinnedSlabs`](crate::PinnedSlabs), in bytes of everything pinned so far.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct SlabMemory {
    /// Allocated by the driver, which chose the pages.
    pub driver_bytes: u64,
    /// In huge pages that the system had reserved.
    pub huge_bytes: u64,
    /// In pages that the system was asked to make huge, where it had room.
    pub advised_bytes: u64,
    /// In ordinary pages.
    pub ordinary_bytes: u64,
    /// Of these bytes, those on the device's memory node, as far as the system reports it.
    pub beside_device_bytes: u64,
}

impl SlabMemory {
    pub(crate) fn of(pinned: &PinnedBuffer, device: &Device) -> Self {
        let bytes = pinned.pinned_bytes();
        let mut memory = Self::default();
        let Some(got) = pinned.pages() else {
            memory.driver_bytes = bytes;
            return memory;
        };
        match got.pages {
            PageKind::Huge => memory.huge_bytes = bytes,
            PageKind::Advised => memory.advised_bytes = bytes,
            _ => memory.ordinary_bytes = bytes,
        }
        if got.node.is_some() && got.node == device.host_node() {
            memory.beside_device_bytes = bytes;
        }
        memory
    }

    pub(crate) fn add(&mut self, more: Self) {
        self.driver_bytes += more.driver_bytes;
        self.huge_bytes += more.huge_bytes;
        self.advised_bytes += more.advised_bytes;
        self.ordinary_bytes += more.ordinary_bytes;
        self.beside_device_bytes += more.beside_device_bytes;
    }
}

/// One pinned allocation. It is retired when the last buffer cut from it is dropped.
#[derive(Debug)]
struct Slab {
    pinned: PinnedBuffer,
    /// Bytes of the pool's slab, until it is dropped.
    pinned_bytes: Arc<AtomicU64>,
}

impl Drop for Slab {
    fn drop(&mut self) {
        // A plain counter: it publishes nothing else.
        self.pinned_bytes.fetch_sub(self.pinned.pinned_bytes(), Ordering::Relaxed);
    }
}

/// The memory of one buffer: a range of a slab that no other buffer has.
#[derive(Debug)]
pub(crate) struct BufferMemory {
    slab: Arc<Slab>,
    /// # Invariants
    /// `offset..offset + bytes` lies inside the slab, and does not overlap any other
    /// `BufferMemory`.
    offset: u64,
    bytes: u64,
}

impl BufferMemory {
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The pinned allocation that contains the memory, and the offset in it.
    pub(crate) fn place(&self) -> (&PinnedBuffer, u64) {
        (&self.slab.pinned, self.offset)
    }

    /// The memory, for kernels on `reader` to read.
    pub(crate) fn span_for<'a>(&'a self, reader: &'a Stream) -> Option<PinnedSpan<'a>> {
        let pinned = &self.slab.pinned;
        let span = guard!(
            "stage.spans-are-for-one-stream",
            pinned.span_for(reader, self.offset, self.bytes),
            else pinned.span(self.offset, self.bytes)
        );
        span.ok()
    }

    /// Address by which kernels reach the first byte.
    pub(crate) fn device_address(&self) -> u64 {
        self.slab.pinned.device_address() + self.offset
    }

    /// Checks that `bytes` bytes at `offset` are the buffer's own; returns their offset in the slab.
    pub(crate) fn range(&self, offset: u64, bytes: u64) -> Result<u64, OutOfBounds> {
        match offset.checked_add(bytes) {
            Some(end) if guard!("stage.copies-stay-inside", end <= self.bytes, else true) => {
                Ok(self.offset + offset)
            }
            _ => Err(OutOfBounds { offset, bytes, capacity: self.bytes }),
        }
    }

    /// `bytes` bytes at `offset`, to be filled in place. Drivers that check orders record a write.
    ///
    /// # Errors
    /// [`OutOfBounds`] of the buffer.
    ///
    /// # Safety
    /// - no device operation that reads or writes this buffer is pending, and none is enqueued while
    ///   the slice is alive.
    ///
    /// Operations on other parts of the slab are harmless. This crate writes none of them from the
    /// device, and never gives out the slab itself.
    #[track_caller]
    pub(crate) unsafe fn slice_mut(
        &mut self,
        offset: u64,
        bytes: u64,
    ) -> Result<&mut [u8], OutOfBounds> {
        let pinned = &self.slab.pinned;
        let address = pinned.host_address() + self.range(offset, bytes)?;
        let access = HostAccess { address, bytes, writes: true };
        guard!("stage.fills-are-told", pinned.device().host_access(access));
        // SAFETY: the range lies inside a live pinned allocation (`range`, and invariant of
        // `offset`), which `slab` keeps, and which `PinnedBuffer::alloc` cleared, so it is
        // initialised. No other Rust code accesses these bytes: the slab's own `slice_mut` and
        // `write_at`, which need `&mut`, are never called, no other `BufferMemory` has them
        // (invariant of `offset`), and `&mut self` excludes other uses of this one. The caller
        // excludes the device's accesses. A slab is at most `isize::MAX` long.
        Ok(unsafe { std::slice::from_raw_parts_mut(address as *mut u8, bytes as usize) })
    }
}

/// One buffer's memory and the fences that retire it.
#[derive(Debug)]
pub(crate) struct PooledBuffer {
    pub(crate) memory: BufferMemory,
    /// Creates one event, which suffices for one reading stream, with the buffer.
    pub(crate) fences: FencePool,
}

/// Pins a slab and cuts it into the buffers of a pool, `stride` bytes apart, with an event for each. On
/// failure nothing is kept.
pub(crate) fn cut(
    device: &Device,
    StagingOptions { buffer_bytes, buffers_max }: StagingOptions,
    stride: u64,
    pinned_bytes: &Arc<AtomicU64>,
) -> Result<Vec<PooledBuffer>, PinError> {
    let prepared = |_| {
        let mut fences = FencePool::default();
        fences.prepare(device, 1).map(|()| fences)
    };
    let fences: Vec<_> = (0..buffers_max).map(prepared).collect::<Result<_, _>>()?;
    // The last buffer needs no padding after it.
    let bytes = stride * (buffers_max as u64 - 1) + buffer_bytes;
    let pinned = PinnedBuffer::pin(device, bytes, DEFAULT_MEMORY)?;
    pinned_bytes.fetch_add(pinned.pinned_bytes(), Ordering::Relaxed);
    let slab = Arc::new(Slab { pinned, pinned_bytes: pinned_bytes.clone() });
    let cut = |(number, fences): (u64, FencePool)| {
        // Inside the slab, because `number < buffers_max`; no overlap, because `stride` is at least
        // `buffer_bytes`.
        let offset = number * stride;
        PooledBuffer {
            memory: BufferMemory { slab: slab.clone(), offset, bytes: buffer_bytes },
            fences,
        }
    };
    Ok((0..).zip(fences).map(cut).collect())
}
