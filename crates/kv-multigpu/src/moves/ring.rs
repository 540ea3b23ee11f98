//! The path through the host: chunks of pinned memory, filled by one device and drained by the
//! other.

use cuda_driver::guard;
use cuda_driver::{Device, DeviceError, DeviceSpan, Event, HostAllocFlags, PinnedBuffer, Stream};

use super::{MoveError, MoverConfig};

/// A ring of pinned chunks with a stream on each side, allocated once.
///
/// # Invariants
/// `down` fills a chunk after its last `drained` record has completed, and `up` drains it after its
/// last `filled` record has. If a record may be missing, `stale` is set.
#[derive(Debug)]
pub(super) struct Ring {
    /// A stream of the source's device, which fills chunks.
    pub(super) down: Stream,
    /// A stream of the destination's device, which drains them.
    pub(super) up: Stream,
    chunks: Vec<Option<RingChunk>>,
    next: usize,
    chunk_bytes: u64,
    /// Whether a chunk may be in use although no event was recorded for it.
    stale: bool,
}

#[derive(Debug)]
struct RingChunk {
    memory: PinnedBuffer,
    filled: Event,
    drained: Event,
}

/// A chunk's memory, for kernels and copies.
pub(super) struct ChunkInUse<'a> {
    pub(super) memory: &'a PinnedBuffer,
    pub(super) down: &'a Stream,
    pub(super) up: &'a Stream,
}

impl Ring {
    pub(super) fn new(from: &Device, to: &Device, config: &MoverConfig) -> Result<Self, MoveError> {
        let chunk = || {
            Ok::<_, MoveError>(Some(RingChunk {
                memory: PinnedBuffer::alloc(from, config.chunk_bytes, HostAllocFlags::CACHED)?,
                filled: Event::new(from)?,
                drained: Event::new(to)?,
            }))
        };
        Ok(Self {
            down: Stream::new(from)?,
            up: Stream::new(to)?,
            chunks: (0..config.chunks).map(|_| chunk()).collect::<Result<_, _>>()?,
            next: 0,
            chunk_bytes: config.chunk_bytes,
            stale: false,
        })
    }

    pub(super) fn chunk_bytes(&self) -> u64 {
        self.chunk_bytes
    }

    /// Makes the ring usable after a failure. Both streams run in order, so events recorded now cover all
    /// earlier uses.
    pub(super) fn refresh(&mut self) -> Result<(), DeviceError> {
        if self.stale {
            for chunk in self.chunks.iter().flatten() {
                chunk.filled.record(&self.down)?;
                chunk.drained.record(&self.up)?;
            }
            self.stale = false;
        }
        Ok(())
    }

    /// Passes one chunk: `fill` enqueues the fill on `down`, `drain` the drain on `up`.
    pub(super) fn pass(
        &mut self,
        fill: impl FnOnce(&ChunkInUse<'_>) -> Result<(), MoveError>,
        drain: impl FnOnce(&ChunkInUse<'_>) -> Result<(), MoveError>,
    ) -> Result<(), MoveError> {
        let Some(Some(chunk)) = self.chunks.get(self.next) else {
            return Err(MoveError::Zero { what: "chunks" });
        };
        let memory = ChunkInUse { memory: &chunk.memory, down: &self.down, up: &self.up };
        self.stale = true;
        guard!("multigpu.chunk-drained", self.down.wait(&chunk.drained)?);
        fill(&memory)?;
        guard!("multigpu.chunk-filled", self.up.wait_for(&self.down, &chunk.filled)?);
        drain(&memory)?;
        chunk.drained.record(&self.up)?;
        self.stale = false;
        self.next = (self.next + 1) % self.chunks.len();
        Ok(())
    }

    /// Copies `source` to `destination`, of the same length, chunk by chunk. All chunks except the
    /// last have equal length, so that the ring starts and ends quickly.
    pub(super) fn copy(
        &mut self,
        source: DeviceSpan,
        destination: DeviceSpan,
    ) -> Result<(), MoveError> {
        let bytes = source.bytes();
        let mut offset = 0;
        while offset < bytes {
            let length = self.chunk_bytes.min(bytes - offset);
            let (from, to) = (source.slice(offset, length)?, destination.slice(offset, length)?);
            self.pass(
                |chunk| Ok(chunk.down.copy_to_host(chunk.memory, 0, from)?),
                |chunk| Ok(chunk.up.copy_to_device(to, chunk.memory, 0)?),
            )?;
            offset += length;
        }
        Ok(())
    }
}

/// Whether what was asked for is over. On a lost device, all is.
fn is_over(answer: Result<bool, DeviceError>, device: &Device) -> bool {
    answer.unwrap_or_else(|_| device.poison().is_some())
}

impl RingChunk {
    fn is_at_rest(&self) -> bool {
        let is_over = |event: &Event| is_over(event.is_complete(), event.device());
        is_over(&self.filled) && is_over(&self.drained)
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // The chunks belong to the source's device. Freeing them there would not wait for copies of
        // the destination's device. The streams may have work that uses no chunk: a move that is refused
        // before it begins leaves waits there.
        let is_idle = |stream: &Stream| is_over(stream.is_idle(), stream.device());
        let is_at_rest = if self.stale {
            is_idle(&self.up) && is_idle(&self.down)
        } else {
            self.chunks.iter().flatten().all(RingChunk::is_at_rest)
        };
        if !is_at_rest {
            tracing::warn!(chunks = self.chunks.len(), "pinned chunks still in use are leaked");
            let chunks = std::mem::take(&mut self.chunks);
            guard!("multigpu.chunks-in-use-leak", std::mem::forget(chunks));
        }
    }
}
