//! Paged memory as the kernels see it: where its planes start, and how many blocks it has.

use cuda_driver::{Device, DeviceBuffer, DeviceSpan, OutOfBounds, Stream};

use crate::operand::{check_aligned, check_length};
use crate::shape::WORD_BYTES;
use crate::{KvShape, Operand, PagedKvError, PagedLayout};

/// Paged KV memory of one device, with the table of its planes' addresses on that device.
///
/// It describes memory and does not own it: the memory must stay allocated while kernels run over
/// it. It may be a reservation of which only the first blocks are mapped yet; each launch names how
/// many blocks are ready and touches no other.
///
/// Dropping it frees the table only after the work that reads it (see
/// [`DeviceBuffer`]).
#[derive(Debug)]
pub struct PagedKv {
    shape: KvShape,
    layout: PagedLayout,
    /// # Invariants
    /// Holds every row of `blocks` blocks under `layout`; its address is a multiple of 8.
    span: DeviceSpan,
    /// # Invariants
    /// 1 to `i32::MAX`.
    blocks: u64,
    /// # Invariants
    /// One address for each plane, written before `new` returned, and by nothing since.
    planes: DeviceBuffer,
}

impl PagedKv {
    /// Describes `blocks` blocks in `span` and uploads the addresses of the planes.
    ///
    /// # Ordering
    /// Waits on the host for all work on `stream`; when it returns, the table has arrived, so that
    /// launches on any stream may use it.
    ///
    /// # Errors
    /// [`PagedKvError`].
    pub fn new(
        stream: &Stream,
        shape: KvShape,
        layout: PagedLayout,
        span: DeviceSpan,
        blocks: u64,
    ) -> Result<Self, PagedKvError> {
        let block_tokens = shape.block_tokens();
        if blocks == 0 || blocks > i32::MAX as u64 {
            return Err(PagedKvError::Blocks { blocks, block_tokens });
        }
        let extent_bytes = layout.extent_bytes(&shape, blocks)?;
        check_aligned(Operand::Pages, span.address(), WORD_BYTES)?;
        check_length(Operand::Pages, span.bytes(), extent_bytes)?;
        // No product or sum overflows: the last plane starts within the extent.
        let mut addresses: Vec<u64> = Vec::new();
        addresses
            .try_reserve_exact(shape.planes() as usize)
            .map_err(|_| PagedKvError::OutOfMemory { planes: shape.planes() })?;
        let plane_address = |plane| span.address() + plane * layout.plane_stride_bytes();
        addresses.extend((0..shape.planes()).map(plane_address));
        let bytes = bytemuck::cast_slice::<u64, u8>(&addresses);
        let planes = DeviceBuffer::alloc(stream.device(), bytes.len() as u64)?;
        stream.upload(planes.span(), bytes).map_err(PagedKvError::from_copy)?;
        Ok(Self { shape, layout, span, blocks, planes })
    }

    /// The device that launches over this memory run on.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.planes.device()
    }

    /// The shape of the KV.
    #[must_use]
    pub fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// How the rows are laid out.
    #[must_use]
    pub fn layout(&self) -> &PagedLayout {
        &self.layout
    }

    /// All of the memory.
    #[must_use]
    pub fn span(&self) -> DeviceSpan {
        self.span
    }

    /// Blocks that the memory has room for, ready or not.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Slots, one for each token: slot `s` is token `s % block_tokens` of block `s / block_tokens`.
    #[must_use]
    pub fn slots(&self) -> u64 {
        self.blocks * u64::from(self.shape.block_tokens())
    }

    /// The memory of one block, in a layout that has it in one piece, such as
    /// [`PagedLayout::block_major`]; `None` in any other.
    ///
    /// # Errors
    /// [`OutOfBounds`] for a block that is not there.
    pub fn block_span(&self, block: u64) -> Result<Option<DeviceSpan>, OutOfBounds> {
        let bytes = self.shape.block_bytes();
        if block >= self.blocks {
            let offset = block.saturating_mul(bytes);
            return Err(OutOfBounds { offset, bytes, capacity: self.span.bytes() });
        }
        if !self.layout.has_whole_blocks(&self.shape) {
            return Ok(None);
        }
        self.span.slice(block * bytes, bytes).map(Some)
    }

    /// Address of the table of plane addresses.
    pub(crate) fn planes_address(&self) -> u64 {
        self.planes.address()
    }
}
