//! Ranges of device memory that name their owner, so that none is used after its owner is gone.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};

use parking_lot::Mutex;

use crate::guard;

use crate::{CopyError, Device, OutOfBounds, Stream};

/// A range of device memory: an address and a length, without ownership.
///
/// A span of a [`DeviceBuffer`](crate::DeviceBuffer) or an [`AddressRange`](crate::AddressRange) names its owner:
/// when that is dropped, calls that are given the span refuse it ([`CopyError::Gone`]), and a call that is
/// under way ends before the memory is freed. Whether something is mapped in a range of addresses, and in which
/// order accesses are made, a span does not say: access without a mapping is an error of the device.
///
/// Spans are equal that have one address and one length.
#[derive(Clone, Copy)]
pub struct DeviceSpan {
    /// # Invariants
    /// `address..address + bytes` does not overflow. It is device memory or addresses for it, never host memory
    /// that Rust code accesses, as long as the owner lives, or, without one, as the caller of `from_raw` or
    /// `of_device` has promised.
    address: u64,
    bytes: u64,
    owner: Option<Mark>,
}

impl DeviceSpan {
    /// A span over memory that the host program allocated.
    ///
    /// # Errors
    /// [`OutOfBounds`] when the range overflows the address space.
    ///
    /// # Safety
    /// - the range is device memory (`cuMemAlloc`, a mapped reservation), not pinned host memory;
    /// - it stays so until all work has run that is given the span or a part of it.
    pub unsafe fn from_raw(address: u64, bytes: u64) -> Result<Self, OutOfBounds> {
        OutOfBounds::check(address, bytes, u64::MAX)?;
        Ok(Self { address, bytes, owner: None })
    }

    pub(crate) fn owned(address: u64, bytes: u64, life: &Life) -> Self {
        Self { address, bytes, owner: Some(life.0) }
    }

    /// First address.
    #[must_use]
    pub fn address(self) -> u64 {
        self.address
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
        Ok(Self { address: self.address + offset, bytes, owner: self.owner })
    }

    /// First address, for work on `stream`. What launches a kernel with a span that a caller passed asks for it
    /// here.
    ///
    /// # Errors
    /// [`CopyError::Gone`] when the owner of the memory was dropped, [`CopyError::OtherDriver`] when it is of
    /// another driver object than the stream.
    pub fn address_on(self, stream: &Stream) -> Result<u64, CopyError> {
        self.used_by(stream).map(|_| self.address)
    }

    /// Whether the owner of the memory is there; true of memory without one.
    #[must_use]
    pub fn is_alive(self) -> bool {
        self.owner.is_none_or(Mark::is_alive)
    }

    /// Keeps the memory from being freed until the result is dropped: for the call that enqueues its use.
    pub(crate) fn used_by(self, stream: &Stream) -> Result<Use, CopyError> {
        let (address, bytes) = (self.address, self.bytes);
        let Some(owner) = self.owner else { return Ok(Use(None)) };
        let held = owner.enter().ok_or(CopyError::Gone { address, bytes })?;
        let is_own = owner.slot.driver.load(SeqCst) == driver_of(stream.device());
        if guard!("driver.span-own-driver", is_own, else true) {
            Ok(held)
        } else {
            Err(CopyError::OtherDriver { stream: stream.raw() })
        }
    }
}

impl PartialEq for DeviceSpan {
    fn eq(&self, other: &Self) -> bool {
        (self.address, self.bytes) == (other.address, other.bytes)
    }
}

impl Eq for DeviceSpan {}

impl Hash for DeviceSpan {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.address, self.bytes).hash(state);
    }
}

impl fmt::Debug for DeviceSpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, bytes, owner: _ } = self;
        f.debug_struct("DeviceSpan").field("address", address).field("bytes", bytes).finish()
    }
}

/// A driver object, told from others by its address: by that alone, since one driver's table of methods may
/// exist twice.
fn driver_of(device: &Device) -> usize {
    std::sync::Arc::as_ptr(device.driver()).addr()
}

/// What owners and their spans share. Never freed; used again by another owner.
#[derive(Debug)]
struct Slot {
    /// Calls under way that use the memory in the low bits, and above them which owner the slot is of.
    ///
    /// `SeqCst`, so that a call either counts before the owner ends, which then waits for it, or sees that
    /// the owner has ended.
    state: AtomicU64,
    /// The owner's driver object.
    driver: AtomicUsize,
}

/// In `Slot::state`, the first owner after another.
const NEXT_OWNER: u64 = 1 << 16;
/// In `Slot::state`, the calls under way. Each is a thread's, so there are fewer.
const CALLS: u64 = NEXT_OWNER - 1;

/// Slots without an owner. Held for a push or a pop.
static SPARE: Mutex<Vec<&'static Slot>> = Mutex::new(Vec::new());

/// The owner that a span is of.
#[derive(Clone, Copy, Debug)]
struct Mark {
    slot: &'static Slot,
    owner: u64,
}

impl Mark {
    fn is_alive(self) -> bool {
        self.slot.state.load(SeqCst) & !CALLS == self.owner
    }

    fn enter(self) -> Option<Use> {
        let before = self.slot.state.fetch_add(1, SeqCst);
        let held = Use(Some(self.slot));
        guard!("driver.ended-owner-refused", before & !CALLS == self.owner, else true)
            .then_some(held)
    }
}

/// A call under way that uses the memory of a span.
#[derive(Debug)]
pub(crate) struct Use(Option<&'static Slot>);

impl Drop for Use {
    fn drop(&mut self) {
        if let Some(slot) = self.0 {
            slot.state.fetch_sub(1, SeqCst);
        }
    }
}

/// The life of an owner of device memory, which its spans look at.
#[derive(Debug)]
pub(crate) struct Life(Mark);

impl Life {
    pub(crate) fn begin(device: &Device) -> Self {
        let slot = SPARE.lock().pop().unwrap_or_else(|| {
            Box::leak(Box::new(Slot { state: AtomicU64::new(0), driver: AtomicUsize::new(0) }))
        });
        // Nobody is told of the owner's number before this returns.
        slot.driver.store(driver_of(device), SeqCst);
        Self(Mark { slot, owner: slot.state.load(SeqCst) & !CALLS })
    }

    /// Has calls refuse the spans from now on. Called once, when the owner goes.
    pub(crate) fn end(&self) -> LastUses {
        self.0.slot.state.fetch_add(NEXT_OWNER, SeqCst);
        LastUses(Some(self.0.slot))
    }
}

/// Calls that were under way when an owner ended; none once they were waited for.
#[derive(Debug)]
pub(crate) struct LastUses(Option<&'static Slot>);

impl LastUses {
    fn are_over(&self) -> bool {
        self.0.is_none_or(|slot| {
            let is_idle = slot.state.load(SeqCst) & CALLS == 0;
            guard!("driver.last-uses", is_idle, else true)
        })
    }

    /// Waits until they have returned, for no longer than one driver call takes. To be called before the memory is
    /// freed.
    pub(crate) fn wait(&mut self) {
        while !self.are_over() {
            std::thread::yield_now();
        }
        SPARE.lock().extend(self.0.take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_that_ends_waits_for_calls_under_way_and_admits_no_other() {
        let slot =
            Box::leak(Box::new(Slot { state: AtomicU64::new(0), driver: AtomicUsize::new(0) }));
        let life = Life(Mark { slot, owner: 0 });
        let [one, other] = [(); 2].map(|()| life.0.enter().unwrap());
        let last = life.end();
        assert!(life.0.enter().is_none());
        drop(one);
        assert!(!last.are_over(), "a call under way would find its memory freed");
        drop(other);
        assert!(last.are_over());
        let next = Mark { slot, owner: NEXT_OWNER };
        assert!(next.enter().is_some() && life.0.enter().is_none());
        assert!(last.are_over(), "a call that was refused counts no more");
    }
}
