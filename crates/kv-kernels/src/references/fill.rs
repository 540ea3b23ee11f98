//! What `fill_pattern` computes.

use cuda_driver::reference::{DeviceMemory, ReferenceError};
use cuda_driver::{KernelArgs, LaunchConfig};

use super::{Arguments, at, load_array};
use crate::pattern::plane_word;

/// Bytes made before they are stored.
const PIECE_BYTES: u64 = 64 << 10;

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
    if row_words == 0 {
        return Ok(());
    }
    let piece_rows = (PIECE_BYTES / row_bytes).max(1);
    let mut to = chunk;
    for kv in 0..kv_count {
        for layer in 0..layers {
            let first = (layer * kv_count + kv).wrapping_mul(row_words);
            let words: Vec<u64> =
                (0..row_words).map(|word| plane_word(first.wrapping_add(word))).collect();
            for keys in keys.chunks(piece_rows as usize) {
                let piece = fill_rows(&words, keys);
                memory.store(to, bytemuck::cast_slice(&piece))?;
                to = at(to, keys.len() as u64, row_bytes);
            }
        }
    }
    Ok(())
}

/// The rows of tokens with these keys in the plane with these constants.
fn fill_rows(words: &[u64], keys: &[u64]) -> Vec<u64> {
    if let &[a, b] = words {
        // The shortest rows in use, for which the general loop is mostly overhead.
        return keys.iter().flat_map(|key| [key.wrapping_add(a), key.wrapping_add(b)]).collect();
    }
    let mut rows = vec![0; words.len() * keys.len()];
    for (row, key) in rows.chunks_exact_mut(words.len()).zip(keys) {
        for (out, word) in row.iter_mut().zip(words) {
            *out = key.wrapping_add(*word);
        }
    }
    rows
}
