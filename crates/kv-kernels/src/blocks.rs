//! Blocks that kernels take apart: paged memory of a device, or a tier of blocks in pinned memory.

use std::sync::Arc;

use cuda_driver::{Device, DeviceBuffer, PinnedBuffer, Stream};

use crate::block_units::{plane_offset, plane_table};
use crate::operand::{Extent, check_length};
use crate::{
    KvShape, PagedKv, PagedLayout,
    error::{Operand, PagedKvError},
};

/// Blocks of KV in pinned host memory, with the table of their planes' addresses on a device whose
/// kernels reach them over the bus.
///
/// The buffer is shared and so cannot be written by the host while this lives
/// ([`PinnedBuffer::write_at`] asks for all of it).
///
/// # Ordering
/// A kernel that writes blocks here has written them when an event recorded after its launch has
/// completed; [`PinnedBuffer::read_at`] before that reads a mixture.
#[derive(Debug)]
pub struct HostBlocks {
    shape: KvShape,
    layout: PagedLayout,
    /// # Invariants
    /// Holds every row of `blocks` blocks under `layout` from `offset` on.
    buffer: Arc<PinnedBuffer>,
    offset: u64,
    /// Address of `offset`, for kernels of the driver object of `planes`, which is the buffer's too.
    address: u64,
    bytes: u64,
    blocks: u64,
    /// # Invariants
    /// Two addresses for each plane, as of `PagedKv`, written before `new` returned, and by nothing since.
    planes: DeviceBuffer,
}

impl HostBlocks {
    /// Describes `blocks` blocks from `offset` of `buffer` on, in one tensor, and uploads the
    /// addresses of their planes.
    ///
    /// # Ordering
    /// Waits on the host for all work on `stream`.
    ///
    /// # Errors
    /// [`PagedKvError`].
    #[track_caller]
    pub fn new(
        stream: &Stream,
        shape: KvShape,
        layout: PagedLayout,
        (buffer, offset): (Arc<PinnedBuffer>, u64),
        blocks: u64,
    ) -> Result<Self, PagedKvError> {
        let _site = cuda_driver::site::enter();
        let block_tokens = shape.block_tokens();
        if blocks == 0 || blocks > i32::MAX as u64 {
            return Err(PagedKvError::Blocks { blocks, block_tokens });
        }
        let needed = layout.tensors().count(&shape);
        if needed != 1 {
            return Err(PagedKvError::Tensors { given: 1, needed });
        }
        let bytes = layout.extent_bytes(&shape, blocks)?;
        check_length(Operand::HostBlocks, buffer.bytes().saturating_sub(offset), bytes)?;
        // No overflow: the extent lies in the buffer.
        let address = buffer.device_address_on(stream)? + offset;
        let addresses = plane_table(&shape, |layer, kv| address + layout.plane_offset(layer, kv))
            .ok_or(PagedKvError::OutOfMemory { planes: shape.planes() })?;
        let table = bytemuck::cast_slice::<u64, u8>(&addresses);
        let planes = DeviceBuffer::alloc(stream.device(), table.len() as u64)?;
        stream.upload(planes.span(), table)?;
        Ok(Self { shape, layout, buffer, offset, address, bytes, blocks, planes })
    }

    /// The device that launches over these blocks run on.
    pub(crate) fn device(&self) -> &Device {
        self.planes.device()
    }

    /// The shape of the KV.
    pub(crate) fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// How the rows are laid out.
    pub(crate) fn layout(&self) -> &PagedLayout {
        &self.layout
    }

    /// The memory of the blocks, from the offset on that was given.
    #[must_use]
    pub fn buffer(&self) -> &Arc<PinnedBuffer> {
        &self.buffer
    }

    /// Where the first block begins in the buffer, in bytes.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    /// How many blocks there are.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Where a plane begins, from the first block on.
    pub(crate) fn plane_offset(&self, plane: u64) -> u64 {
        plane_offset(&self.shape, &self.layout, plane)
    }
}

/// Blocks that a kernel reads or writes, wherever they are.
///
/// Blocks of a peer are device blocks like any other: [`PagedKv::new`] on a stream of the device that
/// shall run the kernel, over a span of the peer's memory to which that device has access.
#[derive(Clone, Copy, Debug)]
pub enum Blocks<'a> {
    /// Paged memory of the kernels' device, or of a peer to which access is enabled.
    Device(&'a PagedKv),
    /// Pinned host memory.
    Host(&'a HostBlocks),
}

impl<'a> From<&'a PagedKv> for Blocks<'a> {
    fn from(paged: &'a PagedKv) -> Self {
        Self::Device(paged)
    }
}

impl<'a> From<&'a HostBlocks> for Blocks<'a> {
    fn from(blocks: &'a HostBlocks) -> Self {
        Self::Host(blocks)
    }
}

impl<'a> Blocks<'a> {
    /// The shape of the KV.
    pub(crate) fn shape(self) -> &'a KvShape {
        match self {
            Self::Device(paged) => paged.shape(),
            Self::Host(blocks) => blocks.shape(),
        }
    }

    /// How the rows are laid out.
    pub(crate) fn layout(self) -> &'a PagedLayout {
        match self {
            Self::Device(paged) => paged.layout(),
            Self::Host(blocks) => blocks.layout(),
        }
    }

    /// How many blocks there is room for.
    #[must_use]
    pub fn count(self) -> u64 {
        match self {
            Self::Device(paged) => paged.blocks(),
            Self::Host(blocks) => blocks.blocks(),
        }
    }

    pub(crate) fn operand(self) -> Operand {
        match self {
            Self::Device(_) => Operand::Pages,
            Self::Host(_) => Operand::HostBlocks,
        }
    }

    /// Address of the table of plane addresses, in the order `layer * kv_count + kv`.
    pub(crate) fn planes_address(self) -> u64 {
        match self {
            Self::Device(paged) => paged.planes_address(),
            Self::Host(blocks) => blocks.planes.address(),
        }
    }

    /// Address of the table of plane addresses, in the order `kv * layers + layer`.
    pub(crate) fn chunk_planes_address(self) -> u64 {
        match self {
            Self::Device(paged) => paged.chunk_planes_address(),
            Self::Host(blocks) => blocks.planes.address() + blocks.planes.bytes() / 2,
        }
    }

    /// All of the memory, as kernels reach it.
    pub(crate) fn extents(self) -> Vec<Extent> {
        match self {
            Self::Device(paged) => paged.tensors().iter().map(|tensor| (*tensor).into()).collect(),
            Self::Host(blocks) => {
                vec![Extent { address: blocks.address, bytes: blocks.bytes }]
            }
        }
    }

    /// Every number of bytes that a vector must divide for the places of blocks, or-ed together.
    pub(crate) fn alignment_bits(self) -> u64 {
        let tensors = self.extents().into_iter().fold(0, |bits, extent| bits | extent.address);
        let layout = self.layout();
        tensors
            | layout.layer_stride_bytes()
            | layout.kv_stride_bytes()
            | layout.block_stride_bytes()
    }
}
