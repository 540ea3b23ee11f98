//! What `scatter_words` computes.

use cuda_driver::{DeviceMemory, KernelArgs, LaunchConfig, ReferenceError};

use super::{Arguments, at, load_array};
use crate::scatter::WORD_BYTES;

pub(super) fn run(
    memory: &mut dyn DeviceMemory,
    _: &LaunchConfig,
    args: &KernelArgs,
) -> Result<(), ReferenceError> {
    let mut args = Arguments::new(args);
    let out: u64 = args.take()?;
    let out_words: u64 = args.take()?;
    let data: u64 = args.take()?;
    let index: u64 = args.take()?;
    let count = u64::from(args.take::<u32>()?);
    if count == 0 {
        return Ok(());
    }

    let targets = load_array::<u32>(memory, index, count)?;
    let words = memory.load(data, count * WORD_BYTES)?.into_owned();
    for (target, word) in targets.into_iter().zip(words.chunks_exact(WORD_BYTES as usize)) {
        if u64::from(target) < out_words {
            memory.store(at(out, target.into(), WORD_BYTES), word)?;
        }
    }
    Ok(())
}
