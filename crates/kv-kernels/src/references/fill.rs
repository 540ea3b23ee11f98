//! What `fill_pattern` computes.

use cuda_driver::{DeviceMemory, KernelArgs, LaunchConfig, ReferenceError};

use super::{Arguments, load_array};
use crate::pattern::plane_word;

/// Bytes made before they are stored.
const PIECE_BYTES: usize = 64 << 10;

pub(super) fn run(
    memory: &mut dyn DeviceMemory,
    _: &LaunchConfig,
    args: &KernelArgs,
) -> Result<(), ReferenceError> {
    let mut args = Arguments::new(args);
    let chunk: u64 = args.take()?;
    let token_keys: u64 = args.take()?;
    let tokens: u64 = args.take()?;
    let layers = u64::from(args.take::<u32>()?);
    let kv_count = u64::from(args.take::<u32>()?);
    let row_bytes: u64 = args.take()?;

    let keys = load_array::<u64>(memory, token_keys, tokens)?;
    let row_words = row_bytes / 8;
    let mut at = chunk;
    let mut piece: Vec<u64> = Vec::new();
    for kv in 0..kv_count {
        for layer in 0..layers {
            let first = (layer * kv_count + kv) * row_words;
            let words: Vec<u64> = (first..first + row_words).map(plane_word).collect();
            for &key in &keys {
                piece.extend(words.iter().map(|word| key.wrapping_add(*word)));
                if piece.len() * 8 >= PIECE_BYTES {
                    at = store(memory, at, &mut piece)?;
                }
            }
            at = store(memory, at, &mut piece)?;
        }
    }
    Ok(())
}

/// Stores the piece and empties it; where the next one goes.
fn store(
    memory: &mut dyn DeviceMemory,
    address: u64,
    piece: &mut Vec<u64>,
) -> Result<u64, ReferenceError> {
    if piece.is_empty() {
        return Ok(address);
    }
    let bytes = bytemuck::cast_slice::<u64, u8>(piece);
    memory.store(address, bytes)?;
    let next = address + bytes.len() as u64;
    piece.clear();
    Ok(next)
}
