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
}

/// The events of a slot.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) filled: Event,
    /// Recorded by the last transfer that used the slot, whichever stream it was on. Of a slot that was
    /// never used it was never recorded, which is no wait.
    pub(super) emptied: Event,
}

/// A slot while a piece travels through it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turn<'r> {
    /// First address, a multiple of 256.
    pub(super) address: u64,
    pub(super) slot: &'r Slot,
}

impl Ring {
    pub(super) fn new(device: &Device, slots: u32, slot_bytes: u64) -> Result<Self, DeviceError> {
        let slot_bytes = slot_bytes.checked_next_multiple_of(ALIGNMENT).unwrap_or(u64::MAX);
        let memory = DeviceBuffer::alloc(device, slot_bytes.saturating_mul(slots.into()))?;
        let slot = |_| Ok(Slot { filled: Event::new(device)?, emptied: Event::new(device)? });
        let slots: Result<_, DeviceError> = (0..slots).map(slot).collect();
        Ok(Self { memory, slots: slots?, slot_bytes, next: 0 })
    }

    pub(super) fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    /// The next slot.
    pub(super) fn turn(&mut self) -> Turn<'_> {
        let index = self.next;
        self.next = (index + 1) % self.slots.len();
        let address = self.memory.address() + index as u64 * self.slot_bytes;
        Turn { address, slot: &self.slots[index] }
    }

    /// Makes `stream`, which waits for everything that a refused transfer has enqueued, the last user
    /// of every slot.
    pub(super) fn settle(&self, stream: &Stream) -> Result<(), DeviceError> {
        self.slots.iter().try_for_each(|slot| {
            // Other streams' transfers that use the slot keep their turn.
            stream.wait(&slot.emptied)?;
            slot.emptied.record(stream)
        })
    }
}

/// Slots begin at multiples of it, so that rows in them are aligned as in memory of their own.
const ALIGNMENT: u64 = 256;
