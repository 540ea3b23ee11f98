//! Pinned tables with the pairs of blocks that a kernel moves.

use cuda_driver::{Device, HostAllocFlags, PinnedBuffer, guard};
use kv_kernels::BlockPair;

use super::held::Fences;
use super::{MoveError, MoverConfig};

/// Maximum number of planes of a table on each side.
pub(super) const PLANES_MAX: usize = 1024;

const WORD: u64 = 8;

/// Tables. Each is written only after its last reader has completed.
#[derive(Debug)]
pub(super) struct PairTables {
    tables: Vec<Option<PairTable>>,
    /// The table after the last used one. The table with the oldest readers is queried first.
    next: usize,
    pairs: usize,
    /// The words of a table before they are copied into it.
    words: Vec<u64>,
}

#[derive(Debug)]
struct PairTable {
    memory: PinnedBuffer,
    /// # Invariants
    /// Covers all enqueued work that reads the memory.
    readers: Fences,
}

/// Device addresses of the parts of a table.
#[derive(Clone, Copy, Debug)]
pub(super) struct WrittenTable {
    pub(super) from_planes: u64,
    pub(super) to_planes: u64,
    pub(super) pairs: u64,
}

impl PairTables {
    /// Number of bytes of one table. The check of the configuration bounds the pairs.
    pub(super) fn table_bytes(config: &MoverConfig) -> u64 {
        (2 * PLANES_MAX + config.table_pairs) as u64 * WORD
    }

    pub(super) fn new(device: &Device, config: &MoverConfig) -> Result<Self, MoveError> {
        let bytes = Self::table_bytes(config);
        let words = (bytes / WORD) as usize;
        let table = || {
            let memory = PinnedBuffer::alloc(device, bytes, HostAllocFlags::CACHED)?;
            Ok::<_, MoveError>(Some(PairTable { memory, readers: Fences::default() }))
        };
        Ok(Self {
            tables: (0..config.tables).map(|_| table()).collect::<Result<_, _>>()?,
            next: 0,
            pairs: config.table_pairs,
            words: if config.tables == 0 { Vec::new() } else { Vec::with_capacity(words) },
        })
    }

    /// Number of pairs that a table holds.
    pub(super) fn pairs(&self) -> usize {
        self.pairs
    }

    /// Unused tables, as many as `pairs` pairs need.
    pub(super) fn free_for(&mut self, pairs: usize) -> Result<Vec<usize>, MoveError> {
        let (needed, tables) = (pairs.div_ceil(self.pairs), self.tables.len());
        if needed > tables {
            return Err(MoveError::TooManyPairs { pairs, most: tables.saturating_mul(self.pairs) });
        }
        let mut free = Vec::with_capacity(needed);
        for index in (self.next..tables).chain(0..self.next) {
            if free.len() == needed {
                return Ok(free);
            }
            let Some(table) = &mut self.tables[index] else { continue };
            if guard!("multigpu.table-waits-readers", table.readers.are_at_rest()?, else true) {
                table.readers = Fences::default();
                free.push(index);
            }
        }
        if free.len() == needed {
            return Ok(free);
        }
        Err(MoveError::Busy { needed, in_use: tables - free.len(), tables })
    }

    /// Writes a table returned by [`free_for`](PairTables::free_for).
    pub(super) fn write(
        &mut self,
        index: usize,
        [from_planes, to_planes]: [&[u64]; 2],
        pairs: &[BlockPair],
    ) -> Result<WrittenTable, MoveError> {
        self.words.clear();
        self.words.extend_from_slice(from_planes);
        self.words.extend_from_slice(to_planes);
        self.words.extend(pairs.iter().map(|pair| bytemuck::cast::<BlockPair, u64>(*pair)));
        let Some(Some(table)) = self.tables.get_mut(index) else {
            return Err(MoveError::Zero { what: "tables" });
        };
        table.memory.write_at(0, bytemuck::cast_slice(&self.words))?;
        let start = table.memory.device_address();
        let to_planes_at = start + from_planes.len() as u64 * WORD;
        let pairs = to_planes_at + to_planes.len() as u64 * WORD;
        Ok(WrittenTable { from_planes: start, to_planes: to_planes_at, pairs })
    }

    /// Records the readers of the tables `used`.
    pub(super) fn read_by(&mut self, used: &[usize], readers: &Fences) {
        for &index in used {
            self.next = (index + 1) % self.tables.len();
            if let Some(Some(table)) = self.tables.get_mut(index) {
                table.readers.clone_from(readers);
            }
        }
    }
}

impl Drop for PairTables {
    fn drop(&mut self) {
        for table in &mut self.tables {
            let read = table.take_if(|table| !matches!(table.readers.are_at_rest(), Ok(true)));
            if let Some(read) = read {
                tracing::warn!("a pinned table still in use is leaked");
                guard!("multigpu.tables-in-use-leak", std::mem::forget(read));
            }
        }
    }
}
