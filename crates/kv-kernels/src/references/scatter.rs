//! What `scatter_words` and `scatter_packet` compute.

use cuda_driver::{DeviceMemory, KernelArgs, LaunchConfig, ReferenceError};

use super::{Arguments, at, load_array};
use crate::ScatterPackets;
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

    scatter(memory, (out, out_words), (data, index), count)
}

pub(super) fn run_packet(
    memory: &mut dyn DeviceMemory,
    config: &LaunchConfig,
    args: &KernelArgs,
) -> Result<(), ReferenceError> {
    let mut args = Arguments::new(args);
    let out: u64 = args.take()?;
    let out_words: u64 = args.take()?;
    let packet: u64 = args.take()?;
    let index = at(packet, 1, ScatterPackets::INDEX_OFFSET);
    let count = load_array::<u32>(memory, at(packet, 1, ScatterPackets::COUNT_OFFSET), 1)?[0];
    let threads = config.block[0].min(ScatterPackets::WORDS_MAX);
    match count.min(threads) {
        0 => Ok(()),
        count => scatter(memory, (out, out_words), (packet, index), count.into()),
    }
}

fn scatter(
    memory: &mut dyn DeviceMemory,
    (out, out_words): (u64, u64),
    (data, index): (u64, u64),
    count: u64,
) -> Result<(), ReferenceError> {
    let targets = load_array::<u32>(memory, index, count)?;
    let words = memory.load(data, count * WORD_BYTES)?.into_owned();
    for (target, word) in targets.into_iter().zip(words.chunks_exact(WORD_BYTES as usize)) {
        if u64::from(target) < out_words {
            memory.store(at(out, target.into(), WORD_BYTES), word)?;
        }
    }
    Ok(())
}
