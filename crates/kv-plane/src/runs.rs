//! Decided copies and scrubs that are not enqueued yet.

use kv_kernels::{BlockPair, link::HostDirection};
use kv_pool::BlockId;

/// Most blocks of a run: the room of one list of pairs.
pub(crate) const RUN_BLOCKS_MAX: usize = 8192;

/// Bytes of a run, about. While one runs, the other direction can use the places that the one before it
/// has left.
const RUN_BYTES: u64 = 16 << 20;

/// Streams of a device on which runs are enqueued.
pub(crate) const LANES: usize = 3;

/// The lane of the engine's work.
pub(crate) const COMPUTE: usize = 2;

/// What is done to blocks.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Kind {
    /// Copied between the device and host memory.
    Carry(HostDirection),
    /// Copied within the device.
    Within,
    /// Overwritten with zeros, where source and destination are the same.
    Scrub,
}

impl Kind {
    /// The stream that it runs on: one for each direction of the link, and the engine's own.
    pub(crate) const fn lane(self) -> usize {
        match self {
            Self::Carry(HostDirection::ToHost) => 0,
            Self::Carry(HostDirection::ToPages) => 1,
            Self::Within | Self::Scrub => COMPUTE,
        }
    }
}

/// Copies of one kind. Those to and from host memory may run in any order among themselves.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) kind: Kind,
    /// Whether a step in flight may still write what is read, so that the engine's work comes first.
    pub(crate) behind_work: bool,
    /// Ids of device and host blocks, in the order that the direction has.
    ///
    /// # Invariants
    /// No destination twice; no more than [`RUN_BLOCKS_MAX`].
    pub(crate) pairs: Vec<BlockPair>,
}

/// Runs in the order of their decision: each may read what the one before it writes, and write what
/// the one before it reads.
#[derive(Debug, Default)]
pub(crate) struct Runs {
    /// Most blocks of a run, less one.
    more_blocks_max: usize,
    list: Vec<Run>,
    /// For each block id, the number of the last run that it was a destination in, counted from 1.
    written: Vec<u64>,
    /// Runs so far.
    count: u64,
    /// Emptied lists, kept for their capacity.
    spare: Vec<Vec<BlockPair>>,
}

impl Runs {
    /// Runs of blocks of so many bytes.
    pub(crate) fn of(block_bytes: u64) -> Self {
        let blocks = (RUN_BYTES / block_bytes.max(1)).clamp(1, RUN_BLOCKS_MAX as u64);
        Self { more_blocks_max: blocks as usize - 1, ..Self::default() }
    }

    /// Adds a copy after all others.
    pub(crate) fn push(&mut self, kind: Kind, behind_work: bool, pair: BlockPair) {
        let alike = |run: &Run| run.kind == kind && run.behind_work == behind_work;
        let most = self.more_blocks_max + 1;
        let fits = |run: &Run| alike(run) && run.pairs.len() < most;
        // A copy within the device is enqueued whole or not at all, so that it can be tried again.
        let joins = kind != Kind::Within
            && self.list.last().is_some_and(fits)
            && self.written_in(pair.destination) != self.count;
        if !joins {
            self.count += 1;
            let pairs = self.spare.pop().unwrap_or_default();
            self.list.push(Run { kind, behind_work, pairs });
        }
        let destination = pair.destination.index();
        if self.written.len() <= destination {
            self.written.resize(destination + 1, 0);
        }
        self.written[destination] = self.count;
        if let Some(run) = self.list.last_mut() {
            run.pairs.push(pair);
        }
    }

    /// The last run that wrote a block; 0 for none.
    fn written_in(&self, destination: BlockId) -> u64 {
        self.written.get(destination.index()).copied().unwrap_or(0)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub(crate) fn as_slice(&self) -> &[Run] {
        &self.list
    }

    /// Removes all runs, after every device was sent them.
    pub(crate) fn clear(&mut self) {
        for Run { mut pairs, .. } in self.list.drain(..) {
            pairs.clear();
            self.spare.push(pairs);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BACK: Kind = Kind::Carry(HostDirection::ToPages);

    fn pair(source: u16, destination: u16) -> BlockPair {
        BlockPair { source: source.into(), destination: destination.into() }
    }

    fn lengths(runs: &Runs) -> Vec<usize> {
        runs.as_slice().iter().map(|run| run.pairs.len()).collect()
    }

    #[test]
    fn a_run_that_is_full_becomes_no_longer() {
        let mut runs = Runs::of(1);
        let all = 0..RUN_BLOCKS_MAX as u16 + 1;
        all.for_each(|id| runs.push(BACK, false, pair(id, id)));
        assert_eq!(lengths(&runs), [RUN_BLOCKS_MAX, 1]);
        let mut runs = Runs::of(6 << 20);
        (0..5).for_each(|id| runs.push(BACK, false, pair(id, id)));
        assert_eq!(lengths(&runs), [2, 2, 1], "of about 16 MiB");
    }
}
