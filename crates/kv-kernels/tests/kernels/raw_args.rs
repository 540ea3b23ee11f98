//! The parameters of a transfer kernel, put together by hand from `kernels/transfer.cuh`, so that
//! tests and benches can launch its PTX and its reference without the crate.

use cuda_driver::KernelArgs;

/// One chunk.
#[derive(Clone, Copy)]
pub(crate) struct RawArgs {
    pub(crate) chunk: u64,
    /// Table of plane addresses, in the order of the chunk's planes.
    pub(crate) planes: u64,
    /// Slots, or block ids.
    pub(crate) mapping: u64,
    pub(crate) by_blocks: bool,
    pub(crate) tokens: u64,
    pub(crate) skip: u64,
    pub(crate) layers: u32,
    pub(crate) kv_count: u32,
    /// How many of the moved rows are given as a chunk of their own, before the others.
    pub(crate) split_rows: u64,
    pub(crate) row_bytes: u64,
    pub(crate) block_tokens: u64,
    pub(crate) block_stride: u64,
    /// Pieces of a row, all tokens' first pieces before all tokens' second ones; 1 for whole rows.
    pub(crate) segments: u64,
    /// Bytes at the end of a row that lie in a second part, behind the first part of all tokens.
    pub(crate) tail_bytes: u64,
    /// 0 from the chunk to the pages, 1 back.
    pub(crate) direction: u32,
    pub(crate) num_blocks: u64,
    /// Threads of a block that the launch will have; only matters with two chunks.
    pub(crate) threads: u64,
    /// Bytes that a thread moves at once: that of the entry.
    pub(crate) vector_bytes: u64,
}

/// Rows in one piece, by slots; the rest is to be filled in.
pub(crate) const WHOLE_ROWS: RawArgs = RawArgs {
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
    threads: 256,
    vector_bytes: 0,
};

/// A 32-bit divisor and its magic number.
fn divider(divisor: u64) -> u64 {
    divisor | u64::from(u32::MAX / divisor as u32) << 32
}

fn pair(low: u64, high: u64) -> u64 {
    low | high << 32
}

impl RawArgs {
    pub(crate) fn args(&self) -> KernelArgs {
        let row_vectors = self.row_bytes / self.vector_bytes;
        let moved = self.tokens - self.skip;
        let rows = moved * u64::from(self.layers) * u64::from(self.kv_count);
        let first_bytes = self.row_bytes - self.tail_bytes;
        let segment_bytes = first_bytes / self.segments;
        let tail_vectors = (self.tail_bytes / self.vector_bytes).max(1);
        let pages: [u64; 22] = [
            self.planes,
            0,
            self.num_blocks,
            self.block_stride,
            self.block_tokens,
            u64::MAX / self.block_tokens,
            0,
            segment_bytes,
            self.block_tokens * segment_bytes,
            divider(segment_bytes / self.vector_bytes),
            self.block_tokens * first_bytes,
            self.tail_bytes,
            self.tail_bytes,
            divider(tail_vectors),
            row_vectors,
            u64::MAX / row_vectors,
            divider(row_vectors),
            divider(self.layers.into()),
            pair(first_bytes / self.vector_bytes, self.layers.into()),
            pair(0, self.direction.into()),
            pair(self.by_blocks.into(), 1 + u64::from(self.split_rows > 0)),
            pair(self.vector_bytes, 0),
        ];
        let mut chunks = [[0u64; 12]; 16];
        let layer_stride = self.tokens * self.row_bytes;
        let chunk = |first: u64, end: u64, first_tile| {
            [
                self.chunk,
                self.mapping,
                first,
                (end - first) * row_vectors,
                first_tile,
                layer_stride * u64::from(self.layers),
                layer_stride,
                self.row_bytes,
                moved,
                u64::MAX / moved,
                divider(moved),
                self.skip,
            ]
        };
        if self.split_rows == 0 {
            chunks[0] = chunk(0, rows, 0);
        } else {
            let tiles = (self.split_rows * row_vectors).div_ceil(self.threads * 4);
            chunks[0] = chunk(0, self.split_rows, 0);
            chunks[1] = chunk(self.split_rows, rows, tiles);
        }
        KernelArgs::new().arg(pages).arg(chunks)
    }

    /// The parameters of the kernel for one chunk: `split_rows` are left out at its start.
    #[allow(dead_code, reason = "each program uses a part")]
    pub(crate) fn one_chunk(&self) -> KernelArgs {
        let row_vectors = self.row_bytes / self.vector_bytes;
        let moved = self.tokens - self.skip;
        let rows = moved * u64::from(self.layers) * u64::from(self.kv_count) - self.split_rows;
        let segment_bytes = self.row_bytes / self.segments;
        let layer_stride = self.tokens * self.row_bytes;
        let one: [u64; 20] = [
            self.planes,
            self.mapping,
            0,
            self.chunk,
            layer_stride * u64::from(self.layers),
            layer_stride,
            self.row_bytes,
            self.block_stride,
            segment_bytes,
            self.block_tokens * segment_bytes,
            divider(self.block_tokens),
            divider(row_vectors),
            divider(segment_bytes / self.vector_bytes),
            divider(self.layers.into()),
            divider(moved),
            pair(self.skip, self.split_rows),
            pair(rows * row_vectors, self.num_blocks),
            pair(self.num_blocks * self.block_tokens, self.layers.into()),
            pair(0, self.direction.into()),
            pair(self.by_blocks.into(), self.vector_bytes),
        ];
        KernelArgs::new().arg(one)
    }
}
