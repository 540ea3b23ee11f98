//! A few buffers of device memory that a kernel and the copy engine hand to each other.

use cuda_driver::{Device, DeviceBuffer, DeviceError, Event, Stream, guard};

/// The buffers, used in turn.
#[derive(Debug)]
pub(super) struct Ring {
    /// # Invariants
    /// `buffers.len() * ring_buffer_bytes` bytes.
    memory: DeviceBuffer,
    buffers: Box<[RingBuffer]>,
    ring_buffer_bytes: u64,
    next: usize,
}

/// The events of a buffer.
#[derive(Debug)]
pub(super) struct RingBuffer {
    pub(super) filled: Event,
    /// Recorded by the last transfer that used the buffer, whichever stream it was on. Of a buffer that was
    /// never used it was never recorded, which is no wait.
    pub(super) emptied: Event,
}

/// A buffer while a piece travels through it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turn<'r> {
    /// First address, a multiple of 256.
    pub(super) address: u64,
    pub(super) buffer: &'r RingBuffer,
}

impl Ring {
    pub(super) fn new(
        device: &Device,
        buffers: u32,
        ring_buffer_bytes: u64,
    ) -> Result<Self, DeviceError> {
        let ring_buffer_bytes =
            ring_buffer_bytes.checked_next_multiple_of(ALIGNMENT).unwrap_or(u64::MAX);
        let memory = DeviceBuffer::alloc(device, ring_buffer_bytes.saturating_mul(buffers.into()))?;
        let buffer =
            |_| Ok(RingBuffer { filled: Event::new(device)?, emptied: Event::new(device)? });
        let buffers: Result<_, DeviceError> = (0..buffers).map(buffer).collect();
        Ok(Self { memory, buffers: buffers?, ring_buffer_bytes, next: 0 })
    }

    pub(super) fn ring_buffer_bytes(&self) -> u64 {
        self.ring_buffer_bytes
    }

    /// The next buffer.
    pub(super) fn turn(&mut self) -> Turn<'_> {
        let index = self.next;
        self.next = (index + 1) % self.buffers.len();
        let address = self.memory.address() + index as u64 * self.ring_buffer_bytes;
        Turn { address, buffer: &self.buffers[index] }
    }

    /// Makes `stream`, which waits for everything that a refused transfer has enqueued, the last user
    /// of every buffer.
    pub(super) fn settle(&self, stream: &Stream) -> Result<(), DeviceError> {
        self.buffers.iter().try_for_each(|buffer| {
            // Other streams' transfers that use the buffer keep their turn.
            guard!("kernels.refusal-keeps-turns", stream.wait(&buffer.emptied)?);
            guard!("kernels.refusal-settles", buffer.emptied.record(stream), else Ok(()))
        })
    }
}

/// Slots begin at multiples of it, so that rows in them are aligned as in memory of their own.
const ALIGNMENT: u64 = 256;
