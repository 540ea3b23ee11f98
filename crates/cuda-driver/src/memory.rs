//! Device memory and pinned host memory, dropped without a wait.

use std::sync::{PoisonError, RwLock};

use crate::guard;

use crate::alive::{Held, Kind};
use crate::device::Retired;
use crate::pin::Origin;
use crate::span::Life;
use crate::{
    Device, DeviceError, DeviceSpan, DriverError, ErrorCode, GrantedPages, HostAccess,
    HostAllocFlags, HostRegion, Stream,
};

/// A range outside its memory.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[error("{bytes} bytes at offset {offset} lie outside memory of {capacity} bytes")]
pub struct OutOfBounds {
    /// Offset asked for, in bytes.
    pub offset: u64,
    /// Length asked for, in bytes.
    pub bytes: u64,
    /// Length of the memory, in bytes.
    pub capacity: u64,
}

impl OutOfBounds {
    /// Checks that `bytes` bytes at `offset` lie inside `capacity` bytes.
    pub(crate) fn check(offset: u64, bytes: u64, capacity: u64) -> Result<(), Self> {
        match offset.checked_add(bytes) {
            Some(end) if end <= capacity => Ok(()),
            _ => Err(Self { offset, bytes, capacity }),
        }
    }
}

/// Why a copy was not enqueued, or memory was not given to work that its owner does not wait for.
#[derive(Clone, Copy, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CopyError {
    /// The range lies outside its memory.
    #[error(transparent)]
    OutOfBounds(#[from] OutOfBounds),
    /// Source and destination differ in length.
    #[error("a copy of {source_bytes} bytes into {destination} bytes")]
    Lengths {
        /// Length of the destination, in bytes.
        destination: u64,
        /// Length of the source, in bytes.
        source_bytes: u64,
    },
    /// The work is on another stream than the pinned memory's.
    #[error("pinned memory for work on stream {reader:#x} was given to work on stream {stream:#x}")]
    OtherStream {
        /// Raw handle of the memory's stream.
        reader: u64,
        /// Raw handle of the stream given.
        stream: u64,
    },
    /// The work is of another driver object, which is not waited for before the memory is freed.
    #[error("memory of another driver object was given to work on stream {stream:#x}")]
    OtherDriver {
        /// Raw handle of the stream given.
        stream: u64,
    },
    /// After the owner of the device memory was dropped.
    #[error("the owner of the {bytes} bytes of device memory at {address:#x} was dropped")]
    Gone {
        /// First address.
        address: u64,
        /// Length in bytes.
        bytes: u64,
    },
    /// The device refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

kv_errors::one_line_debug!(OutOfBounds, CopyError);

/// Device memory of its own (`cuMemAlloc`).
///
/// Dropping it does not wait: the memory is freed by the next allocation on the device, by
/// [`Device::free_retired`], or with the device. [`free`](DeviceBuffer::free) frees it now.
#[derive(Debug)]
pub struct DeviceBuffer {
    device: Held,
    span: DeviceSpan,
    life: Life,
}

impl DeviceBuffer {
    /// Allocates `bytes` bytes, aligned to at least 256; the contents are undefined.
    ///
    /// # Ordering
    /// May wait for the device, if dropped memory is freed first.
    ///
    /// # Errors
    /// `INVALID_VALUE` for 0 bytes, `OUT_OF_MEMORY`.
    #[track_caller]
    pub fn alloc(device: &Device, bytes: u64) -> Result<Self, DeviceError> {
        let address = device
            .allocate(|driver| driver.mem_alloc(bytes).map_err(|error| error.of_bytes(bytes)))?;
        let life = Life::begin(device);
        let device = Held::new(device, Kind::DeviceBuffer, bytes);
        Ok(Self { device, span: DeviceSpan::owned(address, bytes, &life), life })
    }

    /// The device that holds the memory.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// All of it.
    #[must_use]
    pub fn span(&self) -> DeviceSpan {
        self.span
    }

    /// First address.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.span.address()
    }

    /// Length in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.span.bytes()
    }

    /// Frees the memory now.
    ///
    /// # Ordering
    /// Waits for the work that uses it (`cuMemFree`).
    ///
    /// # Errors
    /// What the driver answers.
    #[track_caller]
    pub fn free(self) -> Result<(), DeviceError> {
        let device = self.device.clone();
        drop(self);
        device.free_retired().map(drop)
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        self.device.retire(Retired::Device(self.span.address(), self.life.end()));
    }
}

/// Pinned host memory that the device reads and writes directly.
///
/// It copies bytes in and out, and hands out no references to them, because the device may be
/// writing them. Dropping it does not wait: see [`Device::free_retired`].
#[derive(Debug)]
pub struct PinnedBuffer {
    device: Held,
    /// # Invariants
    /// Start of a live pinned allocation, or of a registered region, of at least `bytes` bytes, at most
    /// `isize::MAX`, owned by this struct.
    host: u64,
    device_address: u64,
    bytes: u64,
    /// Held by host accesses through `&self`: shared by reads, alone by writes.
    accesses: RwLock<()>,
    pub(crate) origin: Origin,
}

impl PinnedBuffer {
    /// Allocates `bytes` bytes. Slow: about 0.4 s a GiB; never on a step's path.
    ///
    /// # Ordering
    /// May wait for the device, when what was dropped is freed first.
    ///
    /// # Errors
    /// `INVALID_VALUE` for 0 bytes, `OUT_OF_MEMORY`.
    #[track_caller]
    pub fn alloc(device: &Device, bytes: u64, flags: HostAllocFlags) -> Result<Self, DeviceError> {
        let (host, device_address) = device.allocate(|driver| {
            let refused = |error: DriverError| error.of_bytes(bytes);
            if bytes == 0 {
                // The driver answers that with success and the address 0.
                return Err(refused(DriverError::new("cuMemHostAlloc", ErrorCode::INVALID_VALUE)));
            }
            let host = driver.mem_host_alloc(bytes, flags).map_err(refused)?;
            match driver.mem_host_get_device_pointer(host) {
                Ok(address) => Ok((host, address)),
                Err(error) => {
                    // SAFETY: nothing else knows of the memory allocated just now.
                    match unsafe { driver.mem_free_host(host) } {
                        Ok(()) => {}
                        Err(error) if error.code.is_of_call_not_made() => {
                            guard!("driver.unreached-kept", device.retire(Retired::Host(host)));
                        }
                        Err(error) => {
                            device.give_up(error, "pinned memory may not have been freed");
                        }
                    }
                    Err(error)
                }
            }
        })?;
        let device = Held::new(device, Kind::PinnedBuffer, bytes);
        let origin = Origin::Driver;
        let accesses = RwLock::default();
        let mut buffer = Self { device, host, device_address, bytes, accesses, origin };
        // The driver does not say that it clears the memory, and Rust may not read it before.
        buffer.clear();
        Ok(buffer)
    }

    /// A buffer of all of a region that was just registered.
    pub(crate) fn of_region(
        device: &Device,
        region: Box<dyn HostRegion>,
        device_address: u64,
    ) -> Self {
        let (host, bytes) = (region.address(), region.bytes());
        let origin = Origin::Region(region, None);
        let device = Held::new(device, Kind::PinnedBuffer, bytes);
        Self { device, host, device_address, bytes, accesses: RwLock::default(), origin }
    }

    /// Cuts the buffer to its first `bytes` bytes, and notes the granted page options.
    pub(crate) fn shorten(&mut self, bytes: u64, granted: GrantedPages) {
        self.bytes = self.bytes.min(bytes);
        if let Origin::Region(_, known) = &mut self.origin {
            *known = Some(granted);
        }
    }

    /// The device that the memory was pinned for.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Length in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Address of the first byte for the host.
    #[must_use]
    pub fn host_address(&self) -> u64 {
        self.host
    }

    /// Address of the first byte for kernels.
    #[must_use]
    pub fn device_address(&self) -> u64 {
        self.device_address
    }

    /// As [`device_address`](PinnedBuffer::device_address), for kernels on `stream`. Checked
    /// launches use this for buffers of their callers.
    ///
    /// # Errors
    /// [`CopyError::OtherDriver`].
    pub fn device_address_on(&self, stream: &Stream) -> Result<u64, CopyError> {
        let is_own = self.device.is_of_driver(stream.device());
        if guard!("driver.kernel-own-driver", is_own, else true) {
            Ok(self.device_address)
        } else {
            Err(CopyError::OtherDriver { stream: stream.raw() })
        }
    }

    /// Tells the driver of an access to a range of the buffer, just before it is made.
    #[track_caller]
    fn tell(&self, offset: u64, bytes: u64, writes: bool) {
        self.device.host_access(HostAccess { address: self.host + offset, bytes, writes });
    }

    #[track_caller]
    fn clear(&mut self) {
        self.tell(0, self.bytes, true);
        // SAFETY: the allocation is `bytes` long, owned, and not yet known to the device.
        unsafe { std::ptr::write_bytes(self.host as *mut u8, 0, self.bytes as usize) };
    }

    /// The `bytes` bytes at `offset`, for kernels to read.
    ///
    /// # Errors
    /// [`OutOfBounds`].
    pub fn span(&self, offset: u64, bytes: u64) -> Result<PinnedSpan<'_>, OutOfBounds> {
        OutOfBounds::check(offset, bytes, self.bytes)?;
        Ok(PinnedSpan { buffer: self, offset, bytes, reader: None })
    }

    /// As [`span`](PinnedBuffer::span), for work on `reader` only. The owner of such memory writes
    /// it again when the work on that stream has completed.
    ///
    /// # Errors
    /// [`OutOfBounds`].
    pub fn span_for<'a>(
        &'a self,
        reader: &'a Stream,
        offset: u64,
        bytes: u64,
    ) -> Result<PinnedSpan<'a>, OutOfBounds> {
        Ok(PinnedSpan { reader: Some(reader), ..self.span(offset, bytes)? })
    }

    pub(crate) fn host_range(&self, offset: u64, bytes: u64) -> Result<u64, OutOfBounds> {
        OutOfBounds::check(offset, bytes, self.bytes)?;
        Ok(self.host + offset)
    }

    /// The host address of a range that the operating system is about to read or write, such as for a file. Tells drivers
    /// that check orders of that access.
    ///
    /// # Ordering
    /// As for [`read_at`](Self::read_at) or [`write_at`](Self::write_at), from this call until the system has ended. The
    /// address is one of the buffer as long as it lives.
    ///
    /// # Errors
    /// [`OutOfBounds`].
    #[track_caller]
    pub fn lend(&self, offset: u64, bytes: u64, writes: bool) -> Result<u64, OutOfBounds> {
        let host = self.host_range(offset, bytes)?;
        self.tell(offset, bytes, writes);
        Ok(host)
    }

    /// Copies `data` into the buffer at `offset`.
    ///
    /// # Ordering
    /// No pending device operation may read the range, or it would read a mixture of old and new
    /// bytes.
    ///
    /// # Errors
    /// [`OutOfBounds`].
    #[track_caller]
    pub fn write_at(&mut self, offset: u64, data: &[u8]) -> Result<(), OutOfBounds> {
        self.write_shared(offset, data)
    }

    /// Copies `data` into the buffer at `offset`, as [`write_at`](Self::write_at), for several threads that have the
    /// buffer. One writes at a time, and none reads meanwhile.
    ///
    /// # Ordering
    /// As for [`write_at`](Self::write_at).
    ///
    /// # Errors
    /// [`OutOfBounds`].
    #[track_caller]
    pub fn write_shared(&self, offset: u64, data: &[u8]) -> Result<(), OutOfBounds> {
        let host = self.host_range(offset, data.len() as u64)?;
        self.tell(offset, data.len() as u64, true);
        let _access = self.accesses.write().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the range lies in the owned allocation, and `data` cannot overlap it, since no
        // reference to the allocation exists outside `slice_mut`'s borrow of `self`. With the
        // lock, no other thread reads or writes it through `&self`; what `slice_mut` returns excludes `&self`.
        unsafe {
            std::ptr::copy_nonoverlapping(data.as_ptr(), host as *mut u8, data.len());
        }
        Ok(())
    }

    /// Copies bytes at `offset` out of the buffer.
    ///
    /// # Ordering
    /// Device operations that write the range must have completed, or the bytes are a mixture of
    /// old and new ones.
    ///
    /// # Errors
    /// [`OutOfBounds`].
    #[track_caller]
    pub fn read_at(&self, offset: u64, data: &mut [u8]) -> Result<(), OutOfBounds> {
        let host = self.host_range(offset, data.len() as u64)?;
        guard!("driver.read-told", self.tell(offset, data.len() as u64, false));
        let _access = self.accesses.read().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the range lies in the owned, initialised allocation and does not overlap `data`. No other thread
        // writes it: `write_shared` waits for the lock, and `slice_mut` needs `&mut self`.
        unsafe {
            std::ptr::copy_nonoverlapping(host as *const u8, data.as_mut_ptr(), data.len());
        }
        Ok(())
    }

    /// The bytes, to be filled in place. This call tells drivers that check orders about one write
    /// of all bytes. Writes through the slice are not told.
    ///
    /// # Safety
    /// - no device operation that writes the buffer is pending, and none is enqueued while the
    ///   slice is alive;
    /// - no device operation that reads it is pending, unless a torn read is acceptable.
    #[track_caller]
    pub unsafe fn slice_mut(&mut self) -> &mut [u8] {
        guard!("driver.slice-told", self.tell(0, self.bytes, true));
        // SAFETY: the allocation is owned, initialised since `alloc`, and `bytes` long; `&mut
        // self` excludes other Rust accesses, the caller excludes the device's.
        unsafe { std::slice::from_raw_parts_mut(self.host as *mut u8, self.bytes as usize) }
    }
}

/// A range of pinned host memory that the device may read. Neither host nor device can write
/// through it.
///
/// # Ordering
/// As for a copy, the bytes must not change before an event recorded after the launch of a reading
/// kernel has completed.
#[derive(Clone, Copy, Debug)]
pub struct PinnedSpan<'a> {
    buffer: &'a PinnedBuffer,
    /// # Invariants
    /// `offset..offset + bytes` lies inside the buffer.
    offset: u64,
    bytes: u64,
    /// # Invariants
    /// If this is a stream, the buffer's owner waits for work on this stream and on no other. Only
    /// the constructor sets it.
    reader: Option<&'a Stream>,
}

impl PinnedSpan<'_> {
    /// Address of the first byte for kernels on `stream`. Checked launches use this for spans of
    /// their callers.
    ///
    /// # Errors
    /// [`CopyError`] for a span that is for [another stream](PinnedBuffer::span_for), and for memory of
    /// another driver object.
    pub fn device_address(self, stream: &Stream) -> Result<u64, CopyError> {
        let first = self.buffer.device_address_on(stream)?;
        match self.reader {
            Some(reader) if guard!("driver.for-stream", !reader.is_same(stream), else false) => {
                Err(CopyError::OtherStream { reader: reader.raw(), stream: stream.raw() })
            }
            _ => Ok(first + self.offset),
        }
    }

    /// The address as a number, for comparisons. A launch with this number is not checked; its
    /// caller is responsible for the order, as with [`PinnedBuffer::device_address`].
    #[must_use]
    pub fn raw_address(self) -> u64 {
        self.buffer.device_address + self.offset
    }

    /// Length in bytes.
    #[must_use]
    pub fn bytes(self) -> u64 {
        self.bytes
    }

    /// `bytes` bytes from `offset` on.
    ///
    /// # Errors
    /// [`OutOfBounds`].
    pub fn slice(self, offset: u64, bytes: u64) -> Result<Self, OutOfBounds> {
        OutOfBounds::check(offset, bytes, self.bytes)?;
        Ok(Self { offset: self.offset + offset, bytes, ..self })
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        self.device.retire(match std::mem::replace(&mut self.origin, Origin::Driver) {
            Origin::Driver => Retired::Host(self.host),
            Origin::Region(region, _) => Retired::Registered(region),
        });
    }
}
