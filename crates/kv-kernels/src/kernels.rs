//! The loaded kernels of one device, and all calls that launch them.

use std::time::Duration;

use cuda_driver::{Device, Kernel, Module, ModuleError, Stream};

use crate::GatherRows;
use crate::append::AppendKernels;
use crate::block_copy::BlockCopyKernels;
use crate::block_sum::SumKernels;
use crate::chunks::{ChunkTransfer, ChunkTransfers, LaunchLimits};
use crate::launch::TransferKernels;
use crate::launcher::Launcher;
use crate::lazy::LazyKernel;
use crate::verify::{BlockSums, ChecksumArgs, FillPattern};
use crate::{Append, BlockCopy, KernelError, KvShape, PagedKv, Transfer};
use crate::{busy, checksum, fill, gather};

/// Names of the kernels in their modules.
pub(crate) mod entry {
    /// By the logarithm of the bytes that a thread moves at once; for one chunk, and for several.
    pub(crate) const TRANSFERS: [[&str; 2]; 5] = [
        ["transfer_1", "transfers_1"],
        ["transfer_2", "transfers_2"],
        ["transfer_4", "transfers_4"],
        ["transfer_8", "transfers_8"],
        ["transfer_16", "transfers_16"],
    ];
    pub(crate) const WALKS: [&str; 5] = ["walk_1", "walk_2", "walk_4", "walk_8", "walk_16"];
    pub(crate) const CHECKSUM: &str = "paged_checksum";
    pub(crate) const FILL: &str = "fill_pattern";
    pub(crate) const GATHER: &str = "gather_rows";
    pub(crate) const BUSY: &str = "keep_busy";
    /// By the logarithm of the bytes that a thread takes at once, as the two that follow.
    pub(crate) const APPEND: [&str; 5] =
        ["append_1", "append_2", "append_4", "append_8", "append_16"];
    pub(crate) const SUM_BLOCKS: [&str; 5] =
        ["sum_blocks_1", "sum_blocks_2", "sum_blocks_4", "sum_blocks_8", "sum_blocks_16"];
    /// By the logarithm of the bytes of a vector; then the batched ones likewise.
    pub(crate) const COPY_BLOCKS: [&str; 10] = [
        "copy_blocks_1",
        "copy_blocks_2",
        "copy_blocks_4",
        "copy_blocks_8",
        "copy_blocks_16",
        "copy_blocks_batched_1",
        "copy_blocks_batched_2",
        "copy_blocks_batched_4",
        "copy_blocks_batched_8",
        "copy_blocks_batched_16",
    ];
}

const CHECKSUM_PTX: &str = include_str!("../ptx/checksum.compute_80.ptx");
const PATTERN_PTX: &str = include_str!("../ptx/pattern.compute_80.ptx");
const GATHER_PTX: &str = include_str!("../ptx/gather.compute_80.ptx");
const BUSY_PTX: &str = include_str!("../ptx/busy.compute_80.ptx");

/// The kernels of this crate, loaded on one device.
///
/// # Checks
/// Before a launch the host checks every quantity with checked 64-bit arithmetic: lengths and
/// alignment of all memory, token counts, slots, blocks. What only the device knows (the mapping, the
/// table and the lengths *as they are when the kernel runs*) the kernel checks again: a slot out of
/// range is skipped, a block out of range is not read, lengths are cut to the table's width.
///
/// # Ordering
/// Every method enqueues one launch on the stream it is given, or a few where rows are in two parts, where
/// keys and values lie differently and where numbers are too large for one, and waits for nothing. A
/// kernel reads its operands when it runs: until an event recorded after the call has completed,
/// they must stay allocated, what it reads must not change, and what it writes must not be read.
/// Work on other streams is ordered by events, by the caller. Memory that was freed or unmapped
/// meanwhile is an error of the device, never undefined behaviour on the host.
#[derive(Debug)]
pub struct KvKernels {
    launcher: Launcher,
    chunks: ChunkTransfers,
    append: AppendKernels,
    copies: BlockCopyKernels,
    sums: SumKernels,
    /// # Invariants
    /// Each the entry of its name, whose parameters are those of `kernels/*.cu`, as those that follow.
    checksum: Kernel,
    fill: Kernel,
    gather: Kernel,
    busy: LazyKernel,
}

impl KvKernels {
    /// Loads the kernels on `device`.
    ///
    /// The reader, the pattern and the small kernels that steps launch are compiled from their PTX now.
    /// Every other kernel is compiled at its first launch.
    ///
    /// # Ordering
    /// Waits for the compiler, tenths of a second the first time; not for the device's work.
    ///
    /// # Errors
    /// [`ModuleError`], with the compiler's log.
    #[track_caller]
    pub fn load(device: &Device) -> Result<Self, ModuleError> {
        let _site = cuda_driver::site::enter();
        let load = |ptx, entry| Module::load(device, ptx)?.kernel(entry);
        Ok(Self {
            launcher: Launcher::new(device),
            chunks: ChunkTransfers::new(),
            append: AppendKernels::new(),
            copies: BlockCopyKernels::new(device),
            sums: SumKernels::new(),
            checksum: load(CHECKSUM_PTX, entry::CHECKSUM)?,
            fill: load(PATTERN_PTX, entry::FILL)?,
            gather: load(GATHER_PTX, entry::GATHER)?,
            busy: LazyKernel::new(BUSY_PTX, entry::BUSY),
        })
    }

    /// The device that the kernels run on.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.launcher.device()
    }

    pub(crate) fn launcher(&self) -> &Launcher {
        &self.launcher
    }

    /// For launches that check no memory, as those that follow.
    pub(crate) fn transfers(&self) -> &TransferKernels {
        self.chunks.kernels()
    }

    pub(crate) fn copies(&self) -> &BlockCopyKernels {
        &self.copies
    }

    #[cfg(test)]
    pub(crate) fn append_kernels(&self) -> &AppendKernels {
        &self.append
    }

    #[cfg(test)]
    pub(crate) fn sum_kernels(&self) -> &SumKernels {
        &self.sums
    }

    /// Moves tokens between a chunk and paged memory.
    ///
    /// A slot that two tokens would be stored to is refused, as far as the host's copies tell; where only the
    /// device's mapping names it twice, one token wins, and it is not defined which.
    /// Nothing is launched when no token is left to move.
    /// [`transfer_chunks`](KvKernels::transfer_chunks) moves several chunks, some layers, or pinned memory.
    ///
    /// # Ordering
    /// Waits for nothing; see [`KvKernels`]. The mapping on the device is read when the kernel runs:
    /// a slot that is out of range then is skipped, whatever the host's copy said.
    ///
    /// # Errors
    /// [`KernelError`]; nothing was enqueued then. Slots of skipped tokens are not looked at.
    #[track_caller]
    pub fn multi_layer_transfer(
        &self,
        stream: &Stream,
        paged: &PagedKv,
        transfer: Transfer<'_>,
    ) -> Result<(), KernelError> {
        let _site = cuda_driver::site::enter();
        let transfer = ChunkTransfer {
            chunks: &[transfer.chunk()],
            layers: 0..paged.shape().layers(),
            direction: transfer.direction,
            num_blocks: transfer.num_blocks,
            limits: LaunchLimits::default(),
            report: None,
        };
        self.chunks.transfer(&self.launcher, stream, paged, &transfer)
    }

    /// Moves chunks to or from pages, sixteen in a launch.
    ///
    /// A slot that two tokens would be stored to is refused, as far as the host's copies tell; where only the
    /// device's mapping names it twice, one token wins, and it is not defined which.
    /// Nothing is launched for chunks of which no token is left to move.
    ///
    /// # Ordering
    /// Waits for nothing; see [`KvKernels`]. Mappings are read when the kernel runs: a slot or block out
    /// of range then is passed over, and told to the report, whatever the host's copy said.
    ///
    /// # Errors
    /// [`KernelError`]. Everything is checked before the first launch; with more than sixteen chunks,
    /// launches before one that the driver refuses stay enqueued. Slots and ids of skipped tokens are
    /// not looked at.
    #[track_caller]
    pub fn transfer_chunks(
        &self,
        stream: &Stream,
        paged: &PagedKv,
        transfer: &ChunkTransfer<'_>,
    ) -> Result<(), KernelError> {
        let _site = cuda_driver::site::enter();
        self.chunks.transfer(&self.launcher, stream, paged, transfer)
    }

    /// Writes the rows of new tokens to their slots: for each layer `l < layers`, tensor `k`, and token
    /// `n` whose slot `s = slot_mapping[n]` is not negative, byte `x` of the row of token
    /// `s % block_tokens` of block `s / block_tokens` in plane `(first_layer + l, k)` becomes
    /// `source[k][l * layer_stride_bytes + n * token_stride_bytes + x]`.
    ///
    /// Nothing is launched without tokens or layers.
    ///
    /// # Ordering
    /// Waits for nothing; see [`KvKernels`]. Slots are read when the kernel runs: one that is out of
    /// range then is passed over, whatever the host's copy said.
    ///
    /// # Errors
    /// [`KernelError`]; nothing was enqueued then, except where the device refuses one of several
    /// launches (a layout whose rows are in two parts takes two, and so does one whose values lie
    /// differently from its keys).
    #[track_caller]
    pub fn append(
        &self,
        stream: &Stream,
        paged: &PagedKv,
        append: Append<'_>,
    ) -> Result<(), KernelError> {
        let _site = cuda_driver::site::enter();
        self.append.append(&self.launcher, stream, paged, &append)
    }

    /// Copies whole blocks: for each pair `(s, d)`, plane `p`, token `t` and byte `x` of a row,
    /// `to[d][p][t][x] = from[s][p][t][x]`, each side by its own layout.
    ///
    /// Two different layouts make this the change of layout: layer-first to page-first and back, or
    /// tokens-first to heads-first. Nothing is launched without pairs.
    ///
    /// # Ordering
    /// Waits for nothing; see [`KvKernels`]. Pairs are read when the kernel runs; a pair that is out
    /// of range then is passed over, whatever the host's copy said. Host blocks that are written have
    /// been written when an event recorded after this call has completed.
    ///
    /// # Errors
    /// [`KernelError`]; nothing was enqueued then, except where the device refuses one of several
    /// launches (a layout whose rows are in two parts takes two, and so does one whose values lie
    /// differently from its keys).
    #[track_caller]
    pub fn copy_blocks(&self, stream: &Stream, copy: BlockCopy<'_>) -> Result<(), KernelError> {
        let _site = cuda_driver::site::enter();
        self.copies.copy(&self.launcher, stream, &copy)
    }

    /// Writes the sum of each block: `sums[n]` becomes [`block_sum`](crate::verify::block_sum) of the bytes of block `ids[n]` in
    /// the order `[plane][token][byte of the row]`, and [`BAD_BLOCK`](crate::verify::BAD_BLOCK) where the id
    /// names no ready block, which is then not read.
    ///
    /// The order is that of no layout in particular, so a block that was copied to another layout, to
    /// the host or to another machine has the same sum. Nothing is enqueued without ids.
    ///
    /// # Ordering
    /// Waits for nothing; see [`KvKernels`]. The sums are cleared and then added to: they are there when an event
    /// recorded after this call has completed.
    ///
    /// # Errors
    /// [`KernelError`]; no sum was computed then.
    #[track_caller]
    pub fn sum_blocks(&self, stream: &Stream, sums: BlockSums<'_>) -> Result<(), KernelError> {
        let _site = cuda_driver::site::enter();
        self.sums.sum(&self.launcher, stream, &sums)
    }

    /// Sums the shares ([`word_share`](crate::verify::word_share)) of the words of every block of every sequence, over the
    /// tokens that the sequence has in it: word `w` of plane `p` of token `t` has the index
    /// `(t * planes + p) * row_words + w`.
    ///
    /// Entries beyond a sequence's blocks are not written. An entry that names no ready block
    /// becomes [`BAD_BLOCK`](crate::verify::BAD_BLOCK). [`Expected`](crate::verify::Expected) says what a block must
    /// sum to. Nothing is launched without sequences or entries. Rows must be whole, and they and
    /// their addresses multiples of 8 bytes.
    ///
    /// # Ordering
    /// Waits for nothing; see [`KvKernels`]. Table and lengths are read when the kernel runs; a
    /// sequence longer than its row of the table is cut to it.
    ///
    /// # Errors
    /// [`KernelError`]; nothing was enqueued then.
    #[track_caller]
    pub fn paged_checksum(
        &self,
        stream: &Stream,
        paged: &PagedKv,
        checksum: ChecksumArgs,
    ) -> Result<(), KernelError> {
        let _site = cuda_driver::site::enter();
        checksum::checksum((&self.launcher, &self.checksum), stream, paged, checksum)
    }

    /// Writes the pattern of every token: word `plane * row_words + word` of a token becomes
    /// [`token_word`](crate::verify::token_word) of its key. Nothing is launched for no tokens.
    ///
    /// # Ordering
    /// Waits for nothing; see [`KvKernels`].
    ///
    /// # Errors
    /// [`KernelError`]; nothing was enqueued then.
    #[track_caller]
    pub fn fill_pattern(
        &self,
        stream: &Stream,
        shape: &KvShape,
        fill: FillPattern,
    ) -> Result<(), KernelError> {
        let _site = cuda_driver::site::enter();
        fill::fill((&self.launcher, &self.fill), stream, shape, fill)
    }

    /// Copies rows of a table: `out[r][c] = table[row_index[r]][c]`, and -1 where `row_index[r]` is
    /// not a row of the table.
    ///
    /// Entries of `out` beyond `width` are not written. Output and table share no byte. Nothing
    /// is launched without rows or columns.
    ///
    /// # Ordering
    /// Waits for nothing; see [`KvKernels`]. The index is read when the kernel runs.
    ///
    /// # Errors
    /// [`KernelError`]; nothing was enqueued then.
    #[track_caller]
    pub fn gather_rows(&self, stream: &Stream, gather: GatherRows) -> Result<(), KernelError> {
        let _site = cuda_driver::site::enter();
        gather::gather_rows((&self.launcher, &self.gather), stream, gather)
    }

    /// Keeps the stream busy for so long, by the device's own clock: in the place of a model, where what lies around it is measured.
    ///
    /// One thread waits, so work of other streams goes on beside it. The time is rounded up to the steps of that clock (32 ns on an
    /// H200, a microsecond on older cards). On a simulated device the clock counts the thread's instructions.
    ///
    /// # Ordering
    /// Waits for nothing; see [`KvKernels`]. What is enqueued on the stream behind it runs when the time is over.
    ///
    /// # Errors
    /// [`KernelError`]; nothing was enqueued then.
    #[track_caller]
    pub fn keep_busy(&self, stream: &Stream, time: Duration) -> Result<(), KernelError> {
        let _site = cuda_driver::site::enter();
        busy::keep_busy((&self.launcher, &self.busy), stream, time)
    }

    /// Lets chunks store to one slot twice, until it is switched off, so that tests see what lies behind
    /// that check.
    #[cfg(all(feature = "sabotage", debug_assertions))]
    pub fn sabotage_allow_stored_twice(&self, allow: bool) {
        self.chunks.allow_stored_twice(allow);
    }

    /// Makes transfers ignore the skip, as a store that rounds down to its chunk would, until it is
    /// switched off.
    ///
    /// This is the mistake that the parameter exists to prevent; tests use it to show that they
    /// would notice. Slots of skipped tokens that are out of range are still left alone.
    #[cfg(all(feature = "sabotage", debug_assertions))]
    pub fn sabotage_ignore_skip(&self, ignore: bool) {
        self.chunks.ignore_skip(ignore);
    }
}
