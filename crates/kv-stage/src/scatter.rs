//! The kernel that writes the changed words of a step to the device, and the layout of its input.

use std::collections::HashMap;

use cuda_driver::{
    Device, DeviceError, DeviceSpan, Kernel, KernelArgs, LaunchConfig, Module, ModuleError,
    PreparedLaunch,
};

use crate::SubmittedView;

/// Built from `kernels/stage/scatter.cu` by `cargo xtask kernels`.
const PTX: &str = include_str!("../ptx/scatter.compute_80.ptx");

/// Bytes of a word.
pub(crate) const WORD_BYTES: u64 = 16;
/// Bytes of a word's index.
pub(crate) const INDEX_BYTES: u64 = 4;

/// Maximum number of threads of a block: `THREADS_MAX` of the source.
const THREADS: u64 = 256;
/// More blocks are not faster: the bus is the limit.
const BLOCKS_MAX: u64 = 16;

/// The layout of a packet: the words of a step without other data, in the form that a prepared
/// launch reads. First the words, from the start of the buffer, then their indices, then their
/// number.
pub(crate) struct Packet;

impl Packet {
    /// Maximum number of words of a packet.
    const WORDS_MAX: u32 = 240;
    /// Packets with at most this many words have a separate launch, which reads less.
    const WORDS_FEW: u32 = 32;
    /// Offset of the indices (`u32`), in bytes.
    pub(crate) const INDEX_OFFSET: u64 = Self::WORDS_MAX as u64 * WORD_BYTES;
    /// Offset of the number of words, a `u32`, in bytes.
    pub(crate) const COUNT_OFFSET: u64 = Self::INDEX_OFFSET + Self::WORDS_MAX as u64 * INDEX_BYTES;
    /// Bytes of a packet.
    const BYTES: u64 = Self::COUNT_OFFSET + 4;

    /// Whether a step of `count` words fits in a packet, in a buffer of `buffer_bytes` bytes.
    pub(crate) fn fits(count: u32, buffer_bytes: u64) -> bool {
        count <= Self::WORDS_MAX && Self::BYTES <= buffer_bytes
    }
}

/// The scattered words of a step, at the start of the buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScatteredWords {
    /// # Invariants
    /// `count` indices begin at this byte offset of the buffer, aligned to [`INDEX_BYTES`]; in a
    /// packet at [`Packet::INDEX_OFFSET`]. No index occurs twice.
    pub(crate) index_offset: u64,
    /// # Invariants
    /// The buffer has this many words at its start, at least 1.
    pub(crate) count: u32,
    /// # Invariants
    /// Whether the buffer holds only these, as a packet that [fits](Packet::fits).
    pub(crate) packet: bool,
}

/// The kernel, loaded on one device, and the launches of packets that were made ready.
#[derive(Debug)]
pub(crate) struct ScatterKernel {
    words: Kernel,
    packet: Kernel,
    /// # Invariants
    /// By the address of the staging buffer and the most words, launches whose arguments are these and
    /// the stager's memory, which is always the same. No more than twice as many as the pool has buffers.
    ready: HashMap<(u64, u32), PreparedLaunch>,
}

impl ScatterKernel {
    pub(crate) fn load(device: &Device) -> Result<Self, ModuleError> {
        let module = Module::load(device, PTX)?;
        Ok(Self {
            words: module.kernel("scatter_words")?,
            packet: module.kernel("scatter_packet")?,
            ready: HashMap::new(),
        })
    }

    /// Enqueues the scatter of the words in the view's buffer over `out`, by a launch that is ready if
    /// there is one.
    ///
    /// `out` is the same memory in every call, at an address that is a multiple of [`WORD_BYTES`].
    pub(crate) fn send(
        &mut self,
        view: &SubmittedView<'_>,
        out: DeviceSpan,
        words: ScatteredWords,
    ) -> Result<(), DeviceError> {
        match words.packet {
            true => self.send_packet(view, out, words),
            false => self.send_words(view, out, words),
        }
    }

    fn send_words(
        &self,
        view: &SubmittedView<'_>,
        out: DeviceSpan,
        ScatteredWords { index_offset, count, .. }: ScatteredWords,
    ) -> Result<(), DeviceError> {
        let args = KernelArgs::new()
            .arg(out.address())
            .arg(out.bytes() / WORD_BYTES)
            .arg(view.address())
            .arg(view.address() + index_offset)
            .arg(count);
        let blocks = u64::from(count).div_ceil(THREADS).min(BLOCKS_MAX);
        let config = LaunchConfig::linear(blocks as u32, THREADS as u32);
        // SAFETY: the 5 arguments are the parameters of `scatter_words` in
        // `kernels/stage/scatter.cu`, in order and size. The kernel reads `count` words and `count`
        // indices of the submitted buffer (invariants of `ScatteredWords`). The buffer stays
        // allocated, and is not written, until an event recorded after this submission has
        // completed. The kernel writes only inside `out`, which is device memory.
        unsafe { self.words.launch(view.stream(), &config, &args) }
    }

    fn send_packet(
        &mut self,
        view: &SubmittedView<'_>,
        out: DeviceSpan,
        words: ScatteredWords,
    ) -> Result<(), DeviceError> {
        let few = words.count <= Packet::WORDS_FEW;
        let words_max = if few { Packet::WORDS_FEW } else { Packet::WORDS_MAX };
        let key = (view.address(), words_max);
        if !self.ready.contains_key(&key) {
            match self.prepare(view.address(), out, words_max) {
                Ok(ready) => drop(self.ready.insert(key, ready)),
                Err(error) => {
                    // Tried again by the next step that uses the buffer.
                    tracing::debug!(%error, "a launch was not made ready");
                    return self.send_words(view, out, words);
                }
            }
        }
        let Some(ready) = self.ready.get(&key) else { unreachable!("inserted above") };
        // SAFETY: the launch reads the packet at the start of the submitted buffer, which it was made ready
        // for (invariant of `ready`): as much of the buffer as a packet has (invariant of `ScatteredWords`),
        // which stays allocated, and is not written, until an event recorded after this submission has
        // completed. It writes device memory only.
        unsafe { ready.launch(view.stream()) }
    }

    /// Makes the launch of packets in one buffer ready. Takes tens of microseconds.
    fn prepare(
        &self,
        packet: u64,
        out: DeviceSpan,
        words_max: u32,
    ) -> Result<PreparedLaunch, DeviceError> {
        let args = KernelArgs::new()
            .arg(out.address())
            .arg(out.bytes() / WORD_BYTES)
            .arg(packet)
            .arg(Packet::WORDS_MAX);
        let config = LaunchConfig::linear(1, words_max.next_multiple_of(32));
        // SAFETY: the 4 arguments are the parameters of `scatter_packet` in `kernels/stage/scatter.cu`, in
        // order and size.
        unsafe { self.packet.prepare(&config, &args) }
    }
}
