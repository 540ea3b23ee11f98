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

    /// The parameters of the narrow kernels, for the same chunks; bad places are told to `report`. A
    /// chunk that is alone is given `alone` or as the first of several.
    #[allow(dead_code, reason = "each program uses a part")]
    pub(crate) fn narrow(&self, report: u64, alone: bool) -> KernelArgs {
        let row_vectors = self.row_bytes / self.vector_bytes;
        let moved = self.tokens - self.skip;
        let rows = moved * u64::from(self.layers) * u64::from(self.kv_count);
        let segment_bytes = self.row_bytes / self.segments;
        let ready = if self.by_blocks { 1 } else { self.block_tokens };
        let mut pages = words(&[self.planes, report]);
        pages.extend(divider31(row_vectors));
        pages.extend(divider31(segment_bytes / self.vector_bytes));
        pages.extend(divider31(self.block_tokens));
        pages.extend(divider31(self.layers.into()));
        let strides = [self.block_stride, segment_bytes, self.block_tokens * segment_bytes];
        pages.push((self.num_blocks * ready) as u32);
        pages.extend(strides.map(|stride| stride as u32));
        // No layer is left out.
        pages.extend([0, self.direction, self.by_blocks.into()]);
        pages.extend([1 + u32::from(self.split_rows > 0), self.vector_bytes as u32, 0]);
        let chunk = |first: u64, end: u64| {
            let mut chunk =
                words(&[self.chunk + (first + self.skip) * self.row_bytes, self.mapping]);
            chunk.extend(divider31(moved));
            chunk.extend([self.skip, self.skip * self.row_bytes, first].map(|n| n as u32));
            chunk.extend([((end - first) * row_vectors) as u32, 0]);
            chunk
        };
        let pages: [u32; 26] = pages.try_into().expect("as many words as there are");
        let args = KernelArgs::new().arg(pages);
        if alone {
            assert_eq!(self.split_rows, 0, "one chunk");
            let chunk: [u32; 12] = chunk(0, rows).try_into().expect("as many words as there are");
            return args.arg(chunk);
        }
        let mut chunks = [0u32; 16 * 12];
        if self.split_rows == 0 {
            chunks[..12].copy_from_slice(&chunk(0, rows));
        } else {
            chunks[..12].copy_from_slice(&chunk(0, self.split_rows));
            chunks[12..24].copy_from_slice(&chunk(self.split_rows, rows));
        }
        args.arg(chunks)
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
