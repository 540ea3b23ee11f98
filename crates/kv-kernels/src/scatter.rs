//! Scattering words of a pinned buffer over device memory.

use cuda_driver::{DeviceSpan, KernelArgs, LaunchConfig, PinnedSpan, PreparedLaunch, Stream};

use crate::kernels::ROW_THREADS;
use crate::operand::{check_aligned, check_length};
use crate::{KernelError, KvKernels, Operand, OperandError};

/// Bytes of a word.
pub(crate) const WORD_BYTES: u64 = 16;
/// Blocks beyond which more bring nothing: the bus is the limit.
const BLOCKS_MAX: u64 = 16;

/// What [`KvKernels::scatter_words`] writes.
#[derive(Clone, Copy, Debug)]
pub struct ScatterWords<'a> {
    /// Where the words go; an index counts words of 16 bytes from its start, which is aligned to 16.
    pub out: DeviceSpan,
    /// Pinned memory that holds words and indices.
    pub source: PinnedSpan<'a>,
    /// Where `count` words of 16 bytes begin in it, in bytes; their address is a multiple of 16.
    pub data_offset: u64,
    /// Where `count` indices (`u32`) begin in it, in bytes; their address is a multiple of 4.
    pub index_offset: u64,
    /// Words to write.
    pub count: u32,
}

impl KvKernels {
    /// Writes words to scattered places: `out[index[i]] = data[i]`, and nothing where `index[i]` is
    /// beyond the end of `out`. Of a place that is named twice either word may stay.
    ///
    /// Words and indices are read from host memory by the kernel, so few changes cost one launch and
    /// one trip over the bus. Nothing is launched without words.
    ///
    /// # Ordering
    /// Waits for nothing; see [`KvKernels`]. The source is read when the kernel runs: its bytes must
    /// not change before an event recorded after this call has completed.
    ///
    /// # Errors
    /// [`KernelError`]; nothing was enqueued then.
    #[track_caller]
    pub fn scatter_words(
        &self,
        stream: &Stream,
        scatter: ScatterWords<'_>,
    ) -> Result<(), KernelError> {
        let _site = cuda_driver::site::enter();
        self.check_stream(stream)?;
        let ScatterWords { out, source, data_offset, index_offset, count } = scatter;
        check_aligned(Operand::Out, out.address(), WORD_BYTES)?;
        let from = source.device_address(stream)?;
        let data = pinned(Operand::Words, (source, from), data_offset, count, WORD_BYTES)?;
        let index = pinned(Operand::WordIndex, (source, from), index_offset, count, 4)?;
        if count == 0 {
            return Ok(());
        }
        let args = KernelArgs::new()
            .arg(out.address())
            .arg(out.bytes() / WORD_BYTES)
            .arg(data)
            .arg(index)
            .arg(count);
        let blocks = u64::from(count).div_ceil(ROW_THREADS).min(BLOCKS_MAX);
        let config = LaunchConfig::linear(blocks as u32, ROW_THREADS as u32);
        // SAFETY: the 5 arguments are the parameters of `scatter_words` in `kernels/scatter.cu`, in
        // order and size. The kernel writes inside `out` only, which is device memory (invariant of
        // `DeviceSpan`). It reads `count` words and `count` indices of the span (`pinned`), whose
        // memory is not freed before the device has finished (a dropped buffer is only retired), and
        // writes no host memory.
        Ok(unsafe { self.scatter.launch(stream, &config, &args) }?)
    }
}

/// Launches that scatter the few words of a packet, made ready beforehand: what packet and destination
/// are is the same for every launch, and what the packet holds is not.
///
/// A packet has up to [`WORDS_MAX`](Self::WORDS_MAX) words of 16 bytes from its start on, their indices
/// (`u32`) at [`INDEX_OFFSET`](Self::INDEX_OFFSET), and their number (`u32`) at
/// [`COUNT_OFFSET`](Self::COUNT_OFFSET).
#[derive(Debug)]
pub struct ScatterPackets {
    launch: PreparedLaunch,
    /// Address of the packet.
    packet: u64,
}

impl ScatterPackets {
    /// Words of a packet, at most.
    pub const WORDS_MAX: u32 = 240;
    /// Where the indices begin in a packet, in bytes.
    pub const INDEX_OFFSET: u64 = Self::WORDS_MAX as u64 * WORD_BYTES;
    /// Where the number of words is in a packet, in bytes.
    pub const COUNT_OFFSET: u64 = Self::INDEX_OFFSET + Self::WORDS_MAX as u64 * 4;
    /// Length of a packet, in bytes.
    pub const BYTES: u64 = Self::COUNT_OFFSET + 4;

    /// Writes the words of the packet at the start of `packet`, as
    /// [`scatter_words`](KvKernels::scatter_words) does.
    ///
    /// # Ordering
    /// As `scatter_words`; two launches of one object never run at once.
    ///
    /// # Errors
    /// [`KernelError`]; nothing was enqueued then. `packet` has to begin where it did when this was made.
    #[track_caller]
    pub fn launch(&self, stream: &Stream, packet: PinnedSpan<'_>) -> Result<(), KernelError> {
        let _site = cuda_driver::site::enter();
        let device = self.launch.kernel().device();
        if stream.device().context() != device.context() {
            let (kernels, other) = (device.ordinal(), stream.device().ordinal());
            return Err(KernelError::OtherDevice { kernels, operand: "stream", other });
        }
        check_length(Operand::Words, packet.bytes(), Self::BYTES)?;
        let (address, prepared) = (packet.device_address(stream)?, self.packet);
        if address != prepared {
            return Err(KernelError::OtherPacket { address, prepared });
        }
        // SAFETY: the kernel reads the packet, which is at the address that it was prepared for and
        // lies in the span, whose memory is not freed before the device has finished (a dropped buffer
        // is only retired). It writes device memory only.
        Ok(unsafe { self.launch.launch(stream) }?)
    }
}

impl KvKernels {
    /// Makes ready the launches of packets that begin where `packet` does and have `words_max` words at
    /// most, to `out`. Takes tens of microseconds.
    ///
    /// # Errors
    /// [`KernelError`].
    #[track_caller]
    pub fn scatter_packets(
        &self,
        out: DeviceSpan,
        packet: PinnedSpan<'_>,
        words_max: u32,
    ) -> Result<ScatterPackets, KernelError> {
        let _site = cuda_driver::site::enter();
        check_aligned(Operand::Out, out.address(), WORD_BYTES)?;
        check_length(Operand::Words, packet.bytes(), ScatterPackets::BYTES)?;
        let address = packet.raw_address();
        check_aligned(Operand::Words, address, WORD_BYTES)?;
        if words_max > ScatterPackets::WORDS_MAX {
            return Err(KernelError::PacketWords { words_max, most: ScatterPackets::WORDS_MAX });
        }
        let args = KernelArgs::new().arg(out.address()).arg(out.bytes() / WORD_BYTES).arg(address);
        let threads = words_max.max(1).next_multiple_of(32);
        let config = LaunchConfig::linear(1, threads);
        // SAFETY: the 3 arguments are the parameters of `scatter_packet` in `kernels/scatter.cu`, in
        // order and size.
        let launch = unsafe { self.scatter_packet.prepare(&config, &args) }?;
        Ok(ScatterPackets { launch, packet: address })
    }
}

/// The address by which a kernel reads `count` values of `size` bytes at `offset` of `source`, which
/// begins at `from`.
fn pinned(
    operand: Operand,
    (source, from): (PinnedSpan<'_>, u64),
    offset: u64,
    count: u32,
    size: u64,
) -> Result<u64, OperandError> {
    // 2^32 values of 16 bytes fit in 64 bits.
    let bytes = u64::from(count) * size;
    let overflow = OperandError::Overflow { operand, rows: count.into(), row_bytes: size };
    let needed_bytes = offset.checked_add(bytes).ok_or(overflow)?;
    check_length(operand, source.bytes(), needed_bytes)?;
    let address = from + offset;
    check_aligned(operand, address, size)?;
    Ok(address)
}
