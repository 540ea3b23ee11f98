//! Filling a chunk as a model's prefill would, with bytes that only its tokens can have.

use cuda_driver::{DeviceSpan, KernelArgs, Stream};

use crate::kernels::{check_chunk, check_words};
use crate::operand::{check_aligned, check_array, check_disjoint};
use crate::shape::WORD_BYTES;
use crate::{KernelError, KvKernels, KvShape, error::Operand};

/// What [`KvKernels::fill_pattern`] fills.
#[derive(Clone, Copy, Debug)]
pub struct FillPattern {
    /// The chunk, `[kv, layer, token, row]`: exactly `tokens` tokens of all planes.
    pub chunk: DeviceSpan,
    /// One key (`u64`) for each token, on the device; at least `tokens` of them.
    pub token_keys: DeviceSpan,
    /// Tokens of the chunk.
    pub tokens: u64,
}

impl KvKernels {
    /// Writes the pattern of every token: word `plane * row_words + word` of a token becomes
    /// [`token_word`](crate::verify::token_word) of its key. Nothing is launched for no tokens.
    ///
    /// # Ordering
    /// Waits for nothing; see [`KvKernels`].
    ///
    /// # Errors
    /// [`KernelError`]; nothing was enqueued then.
    #[track_caller]
    pub fn fill_pattern(
        &self,
        stream: &Stream,
        shape: &KvShape,
        fill: FillPattern,
    ) -> Result<(), KernelError> {
        let _site = cuda_driver::site::enter();
        self.check_stream(stream)?;
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
        let config = self.row_launch(tokens * shape.planes(), shape);
        // SAFETY: the 6 arguments are the parameters of `fill_pattern` in `kernels/pattern.cu`, in
        // order and size. Both addresses come from device spans, and the kernel stays inside them:
        // it reads `tokens` keys (`check_array`) and writes `tokens` tokens (`check_chunk`).
        unsafe { self.launch(&self.fill, stream, &config, &args) }
    }
}
