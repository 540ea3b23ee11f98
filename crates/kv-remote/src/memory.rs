//! Memory that a node serves, which peers read while it is written.

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::NodeError;

/// Bytes at addresses from 0 on, registered once for as long as they live. Any thread may read and write; what is read
/// while it is written is any mixture of old and new bytes. Who knows its type finds that by [`Any`].
pub trait Memory: Any + fmt::Debug + Send + Sync {
    /// How many bytes there are.
    fn bytes(&self) -> u64;

    /// Copies bytes from `address` on into `into`. False, and any bytes, if there are not as many.
    fn read(&self, address: u64, into: &mut [u8]) -> bool;

    /// Copies `from` to `address`. False, and nothing is changed, if there are not as many bytes.
    fn write(&self, address: u64, from: &[u8]) -> bool;

    /// What a [`Transfer`](crate::Transfer) of another process has to know to read this memory by itself, in a form that
    /// only it understands: 64 KiB at most. None if bytes come over connections alone.
    fn descriptor(&self) -> Option<Vec<u8>> {
        None
    }
}

/// Memory of this process.
pub struct HostMemory {
    /// Words, so that reading what others write is defined. No order is kept between words: readers check what they
    /// have read.
    words: Box<[AtomicU64]>,
}

const WORD: usize = 8;

impl HostMemory {
    /// Bytes that are zero, rounded up to whole words.
    ///
    /// # Errors
    /// [`NodeError::System`] if the system does not have as much.
    pub fn new(bytes: u64) -> Result<Self, NodeError> {
        let no_memory = || NodeError::System { bytes };
        let count = usize::try_from(bytes.div_ceil(WORD as u64)).map_err(|_| no_memory())?;
        let mut words = Vec::new();
        words.try_reserve_exact(count).map_err(|_| no_memory())?;
        words.resize_with(count, AtomicU64::default);
        Ok(Self { words: words.into_boxed_slice() })
    }

    /// Where it lies in this process, for a transport that registers it. It does not move as long as it lives, and any thread may
    /// write it at any time.
    #[must_use]
    pub fn as_ptr(&self) -> *const u8 {
        self.words.as_ptr().cast()
    }

    /// The words that a range of bytes touches, and where the range begins in the first.
    fn words(&self, address: u64, bytes: usize) -> Option<(&[AtomicU64], usize)> {
        let start = usize::try_from(address).ok()?;
        let end = start.checked_add(bytes)?;
        let words = self.words.get(start / WORD..end.div_ceil(WORD))?;
        Some((words, start % WORD))
    }
}

impl Memory for HostMemory {
    fn bytes(&self) -> u64 {
        (self.words.len() * WORD) as u64
    }

    fn read(&self, address: u64, into: &mut [u8]) -> bool {
        let Some((words, skip)) = self.words(address, into.len()) else { return false };
        let (head, body) = into.split_at_mut(((WORD - skip) % WORD).min(into.len()));
        let mut words = words.iter().map(|word| word.load(Ordering::Relaxed).to_le_bytes());
        if !head.is_empty()
            && let Some(word) = words.next()
        {
            head.copy_from_slice(&word[skip..skip + head.len()]);
        }
        for (to, word) in body.chunks_mut(WORD).zip(words) {
            to.copy_from_slice(&word[..to.len()]);
        }
        true
    }

    fn write(&self, address: u64, from: &[u8]) -> bool {
        let Some((words, skip)) = self.words(address, from.len()) else { return false };
        let (head, body) = from.split_at(((WORD - skip) % WORD).min(from.len()));
        let mut words = words.iter();
        let change = |word: &AtomicU64, at: usize, from: &[u8]| {
            let mut bytes = word.load(Ordering::Relaxed).to_le_bytes();
            bytes[at..at + from.len()].copy_from_slice(from);
            word.store(u64::from_le_bytes(bytes), Ordering::Relaxed);
        };
        if !head.is_empty()
            && let Some(word) = words.next()
        {
            change(word, skip, head);
        }
        for (from, word) in body.chunks(WORD).zip(words) {
            match from.first_chunk() {
                Some(whole) => word.store(u64::from_le_bytes(*whole), Ordering::Relaxed),
                None => change(word, 0, from),
            }
        }
        true
    }
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostMemory").field("bytes", &self.bytes()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_range_is_read_as_it_was_written_and_nothing_beside_it_changes() {
        let bytes: Vec<u8> = (1..=32).collect();
        for start in 0..20 {
            for end in start..=28 {
                let memory = HostMemory::new(30).unwrap();
                assert!(memory.write(start as u64, &bytes[start..end]));
                let mut all = vec![0xff; 32];
                assert!(memory.read(0, &mut all));
                let expected: Vec<u8> = (0..32)
                    .map(|at| if (start..end).contains(&at) { bytes[at] } else { 0 })
                    .collect();
                assert_eq!(all, expected, "{start}..{end}");
                let mut part = vec![0; end - start];
                assert!(memory.read(start as u64, &mut part));
                assert_eq!(part, bytes[start..end]);
            }
        }
    }
}
