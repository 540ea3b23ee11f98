//! The parameters of a transfer kernel, put together by hand from `kernels/transfer.cuh`, so that
//! tests and benches can launch its PTX and its reference without the crate.

use cuda_driver::KernelArgs;

/// One chunk.
#[allow(missing_docs, reason = "named like the kernel's parameters")]
#[derive(Clone, Copy, Debug)]
pub struct RawArgs {
    pub chunk: u64,
    /// Table of plane addresses, in the order of the chunk's planes.
    pub planes: u64,
    /// Slots, or block ids.
    pub mapping: u64,
    pub by_blocks: bool,
    pub tokens: u64,
    pub skip: u64,
    pub layers: u32,
    pub kv_count: u32,
    /// How many of the moved rows are given as a chunk of their own, before the others.
    pub split_rows: u64,
    pub row_bytes: u64,
    pub block_tokens: u64,
    pub block_stride: u64,
    /// Pieces of a row, all tokens' first pieces before all tokens' second ones; 1 for whole rows.
    pub segments: u64,
    /// Bytes at the end of a row that lie in a second part, behind the first part of all tokens; of walks.
    pub tail_bytes: u64,
    /// 0 from the chunk to the pages, 1 back.
    pub direction: u32,
    pub num_blocks: u64,
    /// Bytes that a thread moves at once: that of the entry.
    pub vector_bytes: u64,
    /// Whether loads of rows are streamed.
    pub streams: bool,
}

/// Rows in one piece, by slots; the rest is to be filled in.
pub const WHOLE_ROWS: RawArgs = RawArgs {
    chunk: 0,
    planes: 0,
    mapping: 0,
    by_blocks: false,
    tokens: 0,
    skip: 0,
    layers: 0,
    kv_count: 0,
    split_rows: 0,
    row_bytes: 0,
    block_tokens: 0,
    block_stride: 0,
    segments: 1,
    tail_bytes: 0,
    direction: 0,
    num_blocks: 0,
    vector_bytes: 0,
    streams: false,
};

impl RawArgs {
    /// The parameters of a transfer of one chunk; bad places are told to `report`.
    pub fn one(&self, report: u64) -> KernelArgs {
        assert_eq!(self.split_rows, 0, "one chunk");
        let chunk: [u32; 12] = self.chunk(0, self.rows()).try_into().expect("12 words");
        KernelArgs::new().arg(self.pages(report)).arg(chunk)
    }

    /// Those of a transfer of several chunks.
    pub fn several(&self, report: u64) -> KernelArgs {
        KernelArgs::new().arg(self.pages(report)).arg(self.chunks())
    }

    /// Those of a walk; rows in parts are wide.
    pub fn walk(&self, report: u64, wide: bool) -> KernelArgs {
        let ready = if self.by_blocks { 1 } else { self.block_tokens };
        let [segment, token, block] = self.strides();
        let vectors = |bytes: u64| divider31((bytes / self.vector_bytes).max(1));
        let mut rows = words(&[block, self.num_blocks * ready]);
        rows.extend(words(&[self.block_tokens, u64::MAX / self.block_tokens]));
        rows.extend(words(&[0, token, segment]));
        rows.extend(vectors(self.first_bytes() / self.segments));
        rows.push(0);
        let tail = self.tail_bytes;
        rows.extend(words(&[self.block_tokens * self.first_bytes(), tail, tail]));
        rows.extend(vectors(tail));
        rows.extend([0, (self.first_bytes() / self.vector_bytes) as u32, 0]);
        let rows: [u32; 30] = rows.try_into().expect("as many words as there are");
        let rows = if wide { rows } else { [0; 30] };
        KernelArgs::new().arg(self.pages(report)).arg(rows).arg(self.chunks())
    }

    fn first_bytes(&self) -> u64 {
        self.row_bytes - self.tail_bytes
    }

    fn row_vectors(&self) -> u64 {
        self.row_bytes / self.vector_bytes
    }

    fn rows(&self) -> u64 {
        (self.tokens - self.skip) * u64::from(self.layers) * u64::from(self.kv_count)
    }

    /// Of segments, tokens and blocks.
    fn strides(&self) -> [u64; 3] {
        let segment_bytes = self.first_bytes() / self.segments;
        [self.block_tokens * segment_bytes, segment_bytes, self.block_stride]
    }

    fn pages(&self, report: u64) -> [u32; 26] {
        let segment_bytes = self.first_bytes() / self.segments;
        let ready = if self.by_blocks { 1 } else { self.block_tokens };
        let mut pages = words(&[self.planes, report]);
        pages.extend(divider31(self.row_vectors()));
        pages.extend(divider31(segment_bytes / self.vector_bytes));
        pages.extend(divider31(self.block_tokens));
        pages.extend(divider31(self.layers.into()));
        let [segment, token, block] = self.strides();
        pages.push((self.num_blocks * ready) as u32);
        pages.extend([block, token, segment].map(|stride| stride as u32));
        // No layer is left out.
        pages.extend([0, self.direction, self.by_blocks.into()]);
        let chunks = 1 + u32::from(self.split_rows > 0);
        pages.extend([chunks, self.vector_bytes as u32, self.streams.into()]);
        pages.try_into().expect("as many words as there are")
    }

    fn chunk(&self, first: u64, end: u64) -> Vec<u32> {
        let address = self.chunk + (first + self.skip) * self.row_bytes;
        let mut chunk = words(&[address, self.mapping]);
        chunk.extend(divider31(self.tokens - self.skip));
        chunk.extend([self.skip, self.skip * self.row_bytes, first].map(|n| n as u32));
        chunk.extend([((end - first) * self.row_vectors()) as u32, 0]);
        chunk
    }

    fn chunks(&self) -> [u32; 16 * 12] {
        let mut chunks = [0u32; 16 * 12];
        if self.split_rows == 0 {
            chunks[..12].copy_from_slice(&self.chunk(0, self.rows()));
        } else {
            chunks[..12].copy_from_slice(&self.chunk(0, self.split_rows));
            chunks[12..24].copy_from_slice(&self.chunk(self.split_rows, self.rows()));
        }
        chunks
    }
}

/// Halves of 64-bit numbers, in the order of memory.
fn words(numbers: &[u64]) -> Vec<u32> {
    numbers.iter().flat_map(|n| [*n as u32, (n >> 32) as u32]).collect()
}

/// A divisor of numbers of 31 bits, with its magic number and shift.
fn divider31(divisor: u64) -> [u32; 3] {
    let power = divisor.next_power_of_two();
    let magic = ((power - divisor) << 32) / divisor + 1;
    [divisor as u32, magic as u32, power.trailing_zeros()]
}
