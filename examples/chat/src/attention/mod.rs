//! Attention over the paged cache, by a kernel of this example's own.
//!
//! The cache knows nothing of attention. A kernel finds the keys and values of a step by what the cache stages: the block
//! table, positions and query starts of [`BatchBuffers`], and where planes and blocks lie by [`PagedKv`].

pub mod arithmetic;
mod reference;

use anyhow::{Context as _, ensure};
use bytemuck::{Pod, Zeroable};
use cuda_driver::{Device, DeviceSpan, Kernel, KernelArgs, LaunchConfig, Module, Stream};
use kv_kernels::PagedKv;
use kv_stage::BatchBuffers;
pub use reference::references;

/// The kernel, as built from `kernels/attention.cu` by `cargo xtask kernels`.
const PTX: &str = include_str!("../../ptx/attention.compute_80.ptx");
const ENTRY: &str = "chat_attention";
const THREADS_MAX: u32 = 256;

/// The heads of a model's attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Heads {
    /// Query heads; a multiple of the key heads.
    pub heads: u32,
    /// Heads of keys, and of values.
    pub kv_heads: u32,
    /// Elements of a head: a multiple of 32, at most 256.
    pub head_size: u32,
}

impl Heads {
    /// Floats of a token's query.
    #[must_use]
    pub fn query_floats(&self) -> usize {
        (self.heads * self.head_size) as usize
    }

    /// Floats of a token's keys, and of its values.
    #[must_use]
    pub fn kv_floats(&self) -> usize {
        (self.kv_heads * self.head_size) as usize
    }

    /// What products of queries and keys are multiplied by.
    #[must_use]
    pub fn scale(&self) -> f32 {
        1.0 / (self.head_size as f32).sqrt()
    }
}

/// `Pages` of `kernels/attention.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct Pages {
    keys: u64,
    values: u64,
    block_stride: u64,
    token_stride: u64,
    block_tokens: u32,
    num_blocks: u32,
}

/// `Batch` of `kernels/attention.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct Batch {
    block_table: u64,
    query_starts: u64,
    positions: u64,
    table_width: u32,
    sequences: u32,
    first_token: u32,
    unused: u32,
}

/// `Heads` of `kernels/attention.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct HeadArgs {
    heads: u32,
    kv_heads: u32,
    head_size: u32,
    scale: f32,
}

const _: () = assert!(size_of::<Pages>() == 40 && size_of::<Batch>() == 40);
const _: () = assert!(size_of::<HeadArgs>() == 16, "the kernel asserts the same");

/// The tokens that one launch is for.
#[derive(Clone, Copy, Debug)]
pub struct Attend<'a> {
    /// The pages of a device's layers.
    pub paged: &'a PagedKv,
    /// The layer, counted among those of the device.
    pub layer: u32,
    /// Blocks of the pages that have memory, from block 0 on.
    pub num_blocks: u64,
    /// The staged step.
    pub batch: &'a BatchBuffers,
    /// Sequences of the step.
    pub sequences: u32,
    /// The first token, counted among those of the step.
    pub first_token: u32,
    /// How many tokens.
    pub tokens: u32,
    /// `[tokens, heads, head size]` of `f32`.
    pub queries: DeviceSpan,
    /// The same, for the result.
    pub out: DeviceSpan,
}

/// The kernel, loaded on a device.
#[derive(Debug)]
pub struct Attention {
    kernel: Kernel,
    heads: Heads,
}

impl Attention {
    /// Loads the kernel for a model's heads.
    ///
    /// # Errors
    /// Heads that the kernel is not made for, and a device that refuses the PTX.
    pub fn load(device: &Device, heads: Heads) -> anyhow::Result<Self> {
        let Heads { heads: query_heads, kv_heads, head_size } = heads;
        ensure!(
            kv_heads > 0 && query_heads > 0 && query_heads.is_multiple_of(kv_heads),
            "{query_heads} query heads are not a multiple of {kv_heads} key heads"
        );
        ensure!(
            head_size > 0 && head_size.is_multiple_of(32) && head_size <= THREADS_MAX,
            "heads of {head_size} elements are not a multiple of 32 up to {THREADS_MAX}"
        );
        Ok(Self { kernel: Module::load(device, PTX)?.kernel(ENTRY)?, heads })
    }

    /// Enqueues attention of some tokens of a step in one layer.
    ///
    /// # Ordering
    /// The keys and values of the tokens themselves are read too, so they are written before, in the order of the
    /// stream. Positions, block table and query starts are those of the step that was staged last.
    ///
    /// # Errors
    /// Spans that are too short or misaligned, more tokens than a batch has, and a device that refuses the launch.
    pub fn launch(&self, stream: &Stream, attend: &Attend<'_>) -> anyhow::Result<()> {
        let Attend { paged, layer, batch, sequences, first_token, tokens, .. } = *attend;
        if tokens == 0 {
            return Ok(());
        }
        let Heads { heads, kv_heads, head_size } = self.heads;
        let (shape, layout) = (paged.shape(), paged.layout());
        ensure!(
            shape.row_bytes() == self.heads.kv_floats() as u64 * 4 && layout.has_whole_rows(),
            "rows of {} bytes are not {kv_heads} heads of {head_size} floats in one piece",
            shape.row_bytes()
        );
        ensure!(paged.alignment() == 16, "keys are aligned to {} bytes only", paged.alignment());
        let bytes = u64::from(tokens) * self.heads.query_floats() as u64 * 4;
        for span in [attend.queries, attend.out] {
            ensure!(span.bytes() >= bytes, "{} bytes for {bytes} of queries", span.bytes());
        }
        let last = u64::from(first_token) + u64::from(tokens);
        ensure!(last * 8 <= batch.positions.bytes(), "a batch without {last} tokens");
        let entries = u64::from(sequences) + 1;
        ensure!(entries * 4 <= batch.query_starts.bytes(), "a batch without {sequences} sequences");
        let table = batch.tables.first().context("a batch without a block table")?;
        let rows = u64::from(sequences) * u64::from(table.width) * 4;
        ensure!(rows <= table.block_table.bytes(), "a table without {sequences} rows");
        let plane = |kv| paged.plane_address(layer, kv).context("a layer without this plane");
        let num_blocks = u32::try_from(attend.num_blocks.min(paged.blocks()))?;
        let pages = Pages {
            keys: plane(0)?,
            values: plane(1)?,
            block_stride: layout.options().block_stride_bytes,
            token_stride: layout.parts_of(0)[0].token_stride_bytes,
            block_tokens: shape.block_tokens(),
            num_blocks,
        };
        let batch = Batch {
            block_table: table.block_table.address_on(stream)?,
            query_starts: batch.query_starts.address_on(stream)?,
            positions: batch.positions.address_on(stream)?,
            table_width: table.width,
            sequences,
            first_token,
            unused: 0,
        };
        let args = KernelArgs::new()
            .arg(pages)
            .arg(batch)
            .arg(HeadArgs { heads, kv_heads, head_size, scale: self.heads.scale() })
            .arg(attend.queries.address_on(stream)?)
            .arg(attend.out.address_on(stream)?);
        let config =
            LaunchConfig { grid: [tokens, heads, 1], block: [head_size, 1, 1], shared_bytes: 0 };
        // SAFETY: the five arguments are the parameters of `chat_attention`, in order and size (both sides assert
        // them). All memory is of the device. Queries and out are long enough, and so are positions, query starts and
        // the table (all checked above). Rows of blocks below `num_blocks`, to
        // which the kernel keeps, lie in the pages (invariant of `PagedKv`). No host memory is used.
        Ok(unsafe { self.kernel.launch(stream, &config, &args) }?)
    }
}
