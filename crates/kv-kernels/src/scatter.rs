//! Scattering words of a pinned buffer over device memory.

use cuda_driver::{DeviceSpan, KernelArgs, LaunchConfig, PinnedSpan, Stream};

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
    pub fn scatter_words(
        &self,
        stream: &Stream,
        scatter: ScatterWords<'_>,
    ) -> Result<(), KernelError> {
        self.check_stream(stream)?;
        let ScatterWords { out, source, data_offset, index_offset, count } = scatter;
        check_aligned(Operand::Out, out.address(), WORD_BYTES)?;
        let data = pinned(Operand::Words, source, data_offset, count, WORD_BYTES)?;
        let index = pinned(Operand::WordIndex, source, index_offset, count, 4)?;
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

/// The address by which a kernel reads `count` values of `size` bytes at `offset` of `source`.
fn pinned(
    operand: Operand,
    source: PinnedSpan<'_>,
    offset: u64,
    count: u32,
    size: u64,
) -> Result<u64, OperandError> {
    // 2^32 values of 16 bytes fit in 64 bits.
    let bytes = u64::from(count) * size;
    let overflow = OperandError::Overflow { operand, rows: count.into(), row_bytes: size };
    let needed_bytes = offset.checked_add(bytes).ok_or(overflow)?;
    check_length(operand, source.bytes(), needed_bytes)?;
    let address = source.device_address() + offset;
    check_aligned(operand, address, size)?;
    Ok(address)
}
