//! A few slots of device memory that a kernel and the copy engine hand to each other.

use cuda_driver::{Device, DeviceBuffer, DeviceError, Event, Stream};

/// The slots, used in turn.
#[derive(Debug)]
pub(super) struct Ring {
    /// # Invariants
    /// `slots.len() * slot_bytes` bytes.
    memory: DeviceBuffer,
    slots: Box<[Slot]>,
    slot_bytes: u64,
    next: usize,
    #[cfg(all(feature = "sabotage", debug_assertions))]
    pub(super) skip_wait: bool,
}

/// The events of a slot.
#[derive(Debug)]
struct Slot {
    filled: Event,
    /// Recorded by the last transfer that used the slot, whichever stream it was on.
    emptied: Event,
}

/// A slot while a piece travels through it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turn<'r> {
    /// First address, a multiple of 256.
    pub(super) address: u64,
    slot: &'r Slot,
    #[cfg(all(feature = "sabotage", debug_assertions))]
    skip_wait: bool,
}

impl Ring {
    pub(super) fn new(device: &Device, slots: u32, slot_bytes: u64) -> Result<Self, DeviceError> {
        let slot_bytes = slot_bytes.checked_next_multiple_of(ALIGNMENT).unwrap_or(u64::MAX);
        let memory = DeviceBuffer::alloc(device, slot_bytes.saturating_mul(slots.into()))?;
        let slot = |_| Ok(Slot { filled: Event::new(device)?, emptied: Event::new(device)? });
        let slots: Result<_, DeviceError> = (0..slots).map(slot).collect();
        Ok(Self {
            memory,
            slots: slots?,
            slot_bytes,
            next: 0,
            #[cfg(all(feature = "sabotage", debug_assertions))]
            skip_wait: false,
        })
    }

    pub(super) fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    /// The next slot.
    pub(super) fn turn(&mut self) -> Turn<'_> {
        let index = self.next;
        self.next = (index + 1) % self.slots.len();
        Turn {
            address: self.memory.address() + index as u64 * self.slot_bytes,
            slot: &self.slots[index],
            #[cfg(all(feature = "sabotage", debug_assertions))]
            skip_wait: self.skip_wait,
        }
    }
}

impl Turn<'_> {
    /// Makes `filler` wait until the slot's last user is through with it.
    pub(super) fn wait_until_empty(&self, filler: &Stream) -> Result<(), DeviceError> {
        #[cfg(all(feature = "sabotage", debug_assertions))]
        if self.skip_wait {
            return Ok(());
        }
        // Of a slot that was never used the event was never recorded, which is no wait.
        filler.wait(&self.slot.emptied)
    }

    /// Hands the slot over: what `emptier` does from now on comes after what `filler` has done.
    pub(super) fn hand_over(&self, filler: &Stream, emptier: &Stream) -> Result<(), DeviceError> {
        self.slot.filled.record(filler)?;
        emptier.wait(&self.slot.filled)
    }

    /// Notes that `emptier` is through with the slot.
    pub(super) fn emptied(&self, emptier: &Stream) -> Result<(), DeviceError> {
        self.slot.emptied.record(emptier)
    }
}

/// Slots begin at multiples of it, so that rows in them are aligned as in memory of their own.
const ALIGNMENT: u64 = 256;
