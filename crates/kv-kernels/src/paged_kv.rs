//! Paged memory as the kernels see it: where its planes start, and how many blocks it has.

use cuda_driver::{Device, DeviceBuffer, DeviceSpan, OutOfBounds, Stream, guard};

use crate::block_units::plane_table;
use crate::operand::{Extent, check_length};
use crate::paged_layout::alignment_of;
use crate::{
    KvShape, PagedLayout,
    error::{Operand, PagedKvError},
};

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
    /// As many as the layout asks for, at least 1. Each holds every row of `blocks` blocks of its
    /// planes under `layout`, and within that extent no two share a byte.
    tensors: Box<[DeviceSpan]>,
    /// # Invariants
    /// The addresses of the tensors, rising.
    starts: Box<[u64]>,
    /// # Invariants
    /// 1 to `i32::MAX`.
    blocks: u64,
    /// # Invariants
    /// What each tensor takes from its start on.
    extent_bytes: u64,
    /// # Invariants
    /// Divides every tensor's address.
    alignment: u64,
    /// # Invariants
    /// One address for each plane in the order `layer * kv_count + kv`, and then for each in the order
    /// `kv * layers + layer`; written before `new` returned, and by nothing since.
    planes: DeviceBuffer,
}

impl PagedKv {
    /// Describes `blocks` blocks in `span`, for layouts of one tensor, and uploads the addresses of
    /// the planes.
    ///
    /// # Ordering
    /// As [`over`](PagedKv::over).
    ///
    /// # Errors
    /// [`PagedKvError`].
    #[track_caller]
    pub fn new(
        stream: &Stream,
        shape: KvShape,
        layout: PagedLayout,
        span: DeviceSpan,
        blocks: u64,
    ) -> Result<Self, PagedKvError> {
        Self::over(stream, shape, layout, &[span], blocks)
    }

    /// Describes `blocks` blocks in the tensors of a layout, in the order that
    /// [`PagedLayout::tensors`] tells, and uploads the addresses of the planes.
    ///
    /// # Ordering
    /// Waits on the host for all work on `stream`; when it returns, the table has arrived, so that
    /// launches on any stream may use it.
    ///
    /// # Errors
    /// [`PagedKvError`].
    #[track_caller]
    pub fn over(
        stream: &Stream,
        shape: KvShape,
        layout: PagedLayout,
        tensors: &[DeviceSpan],
        blocks: u64,
    ) -> Result<Self, PagedKvError> {
        let _site = cuda_driver::site::enter();
        let block_tokens = shape.block_tokens();
        if blocks == 0 || blocks > i32::MAX as u64 {
            return Err(PagedKvError::Blocks { blocks, block_tokens });
        }
        let (given, needed) = (tensors.len() as u64, layout.tensors().count(&shape));
        if given != needed {
            return Err(PagedKvError::Tensors { given, needed });
        }
        let extent_bytes = layout.extent_bytes(&shape, blocks)?;
        for tensor in tensors {
            check_length(Operand::Pages, tensor.bytes(), extent_bytes)?;
        }
        let out_of_memory = |_| PagedKvError::OutOfMemory { planes: shape.planes() };
        let mut starts: Vec<(u64, usize)> = Vec::new();
        starts.try_reserve_exact(tensors.len()).map_err(out_of_memory)?;
        starts.extend(tensors.iter().map(|tensor| tensor.address()).zip(0..));
        starts.sort_unstable();
        guard!("kernels.tensors-apart", check_apart(&starts, extent_bytes)?);
        let bits = tensors.iter().fold(0, |bits, tensor| bits | tensor.address());

        // No overflow: a plane begins within its tensor's extent.
        let plane_address = |layer, kv| {
            let tensor = tensors[layout.tensors().index(&shape, layer, kv) as usize];
            tensor.address() + layout.plane_offset(layer, kv)
        };
        let addresses = plane_table(&shape, plane_address)
            .ok_or(PagedKvError::OutOfMemory { planes: shape.planes() })?;
        let bytes = bytemuck::cast_slice::<u64, u8>(&addresses);
        let planes = DeviceBuffer::alloc(stream.device(), bytes.len() as u64)?;
        stream.upload(planes.span(), bytes)?;
        let alignment = alignment_of(bits);
        let tensors = tensors.into();
        let starts = starts.into_iter().map(|(address, _)| address).collect();
        Ok(Self { shape, layout, tensors, starts, blocks, extent_bytes, alignment, planes })
    }

    /// A tensor that shares bytes with other memory, if one does.
    pub(crate) fn tensor_meeting(&self, other: Extent) -> Option<Extent> {
        // Tensors are apart, so the last that begins before the memory's end is the one that reaches
        // furthest.
        let before = self.starts.partition_point(|&start| start < other.end());
        let address = *self.starts.get(before.checked_sub(1)?)?;
        let tensor = Extent { address, bytes: self.extent_bytes };
        (other.bytes > 0 && tensor.end() > other.address).then_some(tensor)
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

    /// The memory of the first tensor: all of it where the layout has one.
    #[must_use]
    pub fn span(&self) -> DeviceSpan {
        self.tensors[0]
    }

    /// The memory of every tensor.
    #[must_use]
    pub fn tensors(&self) -> &[DeviceSpan] {
        &self.tensors
    }

    /// What the address of every segment of every row is a multiple of, and its length: 1, 2, 4, 8 or
    /// 16 bytes. Kernels access as much at once.
    #[must_use]
    pub fn alignment(&self) -> u64 {
        self.alignment.min(self.layout.alignment())
    }

    /// The same of tensor `kv` of every layer.
    pub(crate) fn alignment_of(&self, kv: u64) -> u64 {
        self.alignment.min(self.layout.alignment_of(kv))
    }

    /// Bytes from the start of each tensor to the end of its last row.
    #[must_use]
    pub fn extent_bytes(&self) -> u64 {
        self.extent_bytes
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

    /// The address of the first row of a plane, which is token 0 of block 0 in tensor `kv` of a layer: 0 for keys, 1 for
    /// values. For kernels of one's own, with the strides of the [`layout`](Self::layout). `None` for a plane that the
    /// [`shape`](Self::shape) does not have.
    ///
    /// Where rows are not one piece of memory ([`PagedLayout::has_whole_rows`]), their parts begin at the offsets of
    /// [`PagedLayout::parts_of`] from there.
    #[must_use]
    pub fn plane_address(&self, layer: u32, kv: u32) -> Option<u64> {
        if layer >= self.shape.layers() || kv >= self.shape.kv_count() {
            return None;
        }
        let (layer, kv) = (u64::from(layer), u64::from(kv));
        let tensor =
            self.tensors.get(self.layout.tensors().index(&self.shape, layer, kv) as usize)?;
        // No overflow: a plane begins within its tensor's extent.
        Some(tensor.address() + self.layout.plane_offset(layer, kv))
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
            return Err(OutOfBounds { offset, bytes, capacity: self.span().bytes() });
        }
        if !self.layout.has_whole_blocks(&self.shape) {
            return Ok(None);
        }
        self.span().slice(block * bytes, bytes).map(Some)
    }

    /// Address of the table of plane addresses, in the order `layer * kv_count + kv`.
    pub(crate) fn planes_address(&self) -> u64 {
        self.planes.address()
    }

    /// Address of the table of plane addresses, in the order `kv * layers + layer`.
    pub(crate) fn chunk_planes_address(&self) -> u64 {
        self.planes.address() + self.planes.bytes() / 2
    }
}

/// Checks that tensors of `extent_bytes` bytes share none; `starts` are their addresses and places.
fn check_apart(starts: &[(u64, usize)], extent_bytes: u64) -> Result<(), PagedKvError> {
    for pair in starts.windows(2) {
        let [(first_at, first), (second_at, second)] = [pair[0], pair[1]];
        if second_at - first_at < extent_bytes {
            return Err(PagedKvError::TensorsOverlap { first, second, extent_bytes });
        }
    }
    Ok(())
}
