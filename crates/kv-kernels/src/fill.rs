//! Filling a chunk as a model's prefill would, with bytes that only its tokens can have.

use cuda_driver::{DeviceSpan, Kernel, KernelArgs, Stream};

use crate::launcher::{Launcher, check_chunk, check_words};
use crate::operand::{check_aligned, check_array, check_disjoint};
use crate::shape::WORD_BYTES;
use crate::{KernelError, KvShape, error::Operand};

/// What [`KvKernels::fill_pattern`](crate::KvKernels::fill_pattern) fills.
#[derive(Clone, Copy, Debug)]
pub struct FillPattern {
    /// The chunk, `[kv, layer, token, row]`: exactly `tokens` tokens of all planes.
    pub chunk: DeviceSpan,
    /// One key (`u64`) for each token, on the device; at least `tokens` of them.
    pub token_keys: DeviceSpan,
    /// Tokens of the chunk.
    pub tokens: u64,
}

/// See [`KvKernels::fill_pattern`](crate::KvKernels::fill_pattern).
pub(crate) fn fill(
    (on, kernel): (&Launcher, &Kernel),
    stream: &Stream,
    shape: &KvShape,
    fill: FillPattern,
) -> Result<(), KernelError> {
    on.check_stream(stream)?;
    let FillPattern { chunk, token_keys, tokens } = fill;
    check_words(shape.row_bytes())?;
    check_chunk(shape, chunk, tokens)?;
    check_aligned(Operand::Chunk, chunk.address(), WORD_BYTES)?;
    check_array(Operand::TokenKeys, token_keys, tokens, size_of::<u64>() as u64)?;
    check_disjoint((Operand::Chunk, chunk), (Operand::TokenKeys, token_keys))?;
    if tokens == 0 {
        return Ok(());
    }

    let args = KernelArgs::new()
        .arg(chunk.address_on(stream)?)
        .arg(token_keys.address_on(stream)?)
        .arg(tokens)
        .arg(shape.layers())
        .arg(shape.kv_count())
        .arg(shape.row_bytes());
    // No overflow: the rows of all tokens fit in the chunk.
    let config = on.row_launch(tokens * shape.planes(), shape);
    // SAFETY: the 6 arguments are the parameters of `fill_pattern` in `kernels/pattern.cu`, in
    // order and size. Both addresses come from device spans, and the kernel stays inside them:
    // it reads `tokens` keys (`check_array`) and writes `tokens` tokens (`check_chunk`).
    unsafe { on.launch(kernel, stream, &config, &args) }
}
