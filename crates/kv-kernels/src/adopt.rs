//! Paged memory that an engine allocated, checked against the tensors as they are.

use cuda_driver::{DeviceSpan, MemoryKind, ReaderError, ResidencyError, Stream, guard};

use crate::format::{FormatAxis, TensorAxis};
use crate::layout::{FormatOptions, LayoutError};
use crate::{KvFormat, PagedKv, error::PagedKvError};

/// A tensor as its engine has it, for [`PagedKv::adopt`].
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    /// The memory from the first element of the tensor on. It may be longer than the tensor.
    pub span: DeviceSpan,
    /// Bytes of an element.
    pub element_bytes: u64,
    /// Length of each axis, in the order in which the format's documentation names them.
    pub shape: &'a [u64],
    /// Elements from one place of each axis to the next.
    pub strides: &'a [i64],
}

impl PagedKv {
    /// Describes KV memory that an engine allocated: `tensors` are what the engine has, in the order of
    /// [`Tensors`](crate::layout::Tensors), `format` and `options` what it is held to be.
    ///
    /// Every number of the tensors is compared with the format's, and what does not fit is refused: another
    /// number of tensors, axes or elements, another order of axes, gaps that `options` do not tell of, other
    /// elements, memory that is too short, shared or of another device. Nothing is guessed. The stride of an
    /// axis of one place is not looked at. A view whose axes have another order, as some engines give it, is
    /// to be permuted to the order of its memory first.
    ///
    /// Two things no number shows: which of two tensors of equal shape is which (the engine's order counts),
    /// and the order of neighbouring axes of equal length (`NH` and `BS`), which is the format's.
    ///
    /// The memory is not owned. It must stay allocated while launches over it run, and keep its layout:
    /// where an engine allocates anew, it adopts anew.
    ///
    /// # Ordering
    /// As of [`over`](PagedKv::over): waits on the host for all work on `stream`.
    ///
    /// # Errors
    /// [`AdoptError`], which names the tensor and the axis.
    #[track_caller]
    pub fn adopt(
        stream: &Stream,
        format: KvFormat,
        options: &FormatOptions,
        tensors: &[TensorView<'_>],
    ) -> Result<Self, AdoptError> {
        let _site = cuda_driver::site::enter();
        let layout = format.layout(options)?;
        // The layout is there, so the shape is.
        let shape = format
            .shape(options)
            .map_err(|_| LayoutError::Size { block_bytes: u64::MAX, blocks: options.blocks })?;
        let (given, needed) = (tensors.len() as u64, layout.tensors().count(&shape));
        if given != needed {
            return Err(AdoptError::Tensors { format, given, needed });
        }
        let axes = [format.axes(options, 0)?, format.axes(options, 1)?];
        let extent_bytes = layout.extent_bytes(&shape, options.blocks)?;
        for (tensor, view) in tensors.iter().enumerate() {
            let checked = Checked { format, tensor, view };
            checked.elements(options.element_bytes)?;
            checked.axes(&axes[layout.tensors().kv_of(&shape, tensor as u64)])?;
            guard!("kernels.adopts-whole-tensors", checked.memory(stream, extent_bytes)?);
        }
        let spans: Vec<DeviceSpan> = tensors.iter().map(|view| view.span).collect();
        Ok(Self::over(stream, shape, layout, &spans, options.blocks)?)
    }
}

/// One of the tensors, on its way through the checks.
struct Checked<'a> {
    format: KvFormat,
    tensor: usize,
    view: &'a TensorView<'a>,
}

impl Checked<'_> {
    fn elements(&self, needed: u64) -> Result<(), AdoptError> {
        let Self { format, tensor, view } = *self;
        let (given, address) = (view.element_bytes, view.span.address());
        if given != needed {
            return Err(AdoptError::Elements { format, tensor, given, needed });
        }
        if !address.is_multiple_of(needed) {
            return Err(AdoptError::Misaligned { format, tensor, address, element_bytes: needed });
        }
        Ok(())
    }

    fn axes(&self, axes: &[FormatAxis]) -> Result<(), AdoptError> {
        let Self { format, tensor, view } = *self;
        let (shape, strides, needed) = (view.shape.len(), view.strides.len(), axes.len());
        if shape != needed || strides != needed {
            return Err(AdoptError::Axes { format, tensor, shape, strides, needed });
        }
        for (place, (axis, &given)) in axes.iter().zip(view.shape).enumerate() {
            let (axis, needed) = (axis.axis, axis.count);
            if given != needed {
                return Err(AdoptError::Length { format, tensor, place, axis, given, needed });
            }
        }
        for (place, (axis, &given)) in axes.iter().zip(view.strides).enumerate() {
            let (axis, needed, count) = (axis.axis, axis.stride, axis.count);
            let is_right = count <= 1 || u64::try_from(given) == Ok(needed);
            if !guard!("kernels.adopts-right-strides", is_right, else true) {
                return Err(AdoptError::Stride { format, tensor, place, axis, given, needed });
            }
        }
        Ok(())
    }

    /// Checks that the first `needed` bytes are there, on the stream's device.
    fn memory(&self, stream: &Stream, needed: u64) -> Result<(), AdoptError> {
        let Self { format, tensor, view } = *self;
        let given = view.span.bytes();
        if given < needed {
            return Err(AdoptError::Short { format, tensor, given, needed });
        }
        let unreadable = |error| AdoptError::Reader { format, tensor, error };
        let first = view.span.address_on(stream).map_err(unreadable)?;
        // No overflow: a span does not. A layout has a byte at least.
        for address in [first, first + (needed - 1)] {
            resides(stream, address).map_err(|error| AdoptError::Residency {
                format,
                tensor,
                error,
            })?;
        }
        Ok(())
    }
}

/// Checks that an address is of memory of the stream's device.
fn resides(stream: &Stream, address: u64) -> Result<(), ResidencyError> {
    let device = stream.device().ordinal();
    let found = stream.device().run(|driver| driver.pointer_get_attributes(address))?;
    match found.kind {
        Some(MemoryKind::Device) if found.device == device => Ok(()),
        Some(MemoryKind::Device) => {
            Err(ResidencyError::OtherDevice { address, device, found: found.device })
        }
        Some(kind) => Err(ResidencyError::Kind { address, kind }),
        None => Err(ResidencyError::Unknown { address }),
    }
}

/// Why an engine's tensors were not adopted: they are not what the format says. Tensors and axes are counted from 0.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AdoptError {
    /// The format spreads the planes over another number of tensors.
    #[error("{given} tensors cannot be adopted as {format:?}, which has {needed}")]
    Tensors {
        /// The format.
        format: KvFormat,
        /// Tensors given.
        given: u64,
        /// Tensors of the format.
        needed: u64,
    },
    /// Elements of another length.
    #[error(
        "tensor {tensor} cannot be adopted as {format:?}: its elements have {given} bytes, not {needed}"
    )]
    Elements {
        /// The format.
        format: KvFormat,
        /// Position of the tensor.
        tensor: usize,
        /// Bytes of an element of the tensor.
        given: u64,
        /// Bytes of an element of the format.
        needed: u64,
    },
    /// The address is not a multiple of an element's length.
    #[error(
        "tensor {tensor} cannot be adopted as {format:?}: {address:#x} is not aligned to elements of \
         {element_bytes} bytes"
    )]
    Misaligned {
        /// The format.
        format: KvFormat,
        /// Position of the tensor.
        tensor: usize,
        /// Its address.
        address: u64,
        /// Bytes of an element.
        element_bytes: u64,
    },
    /// Another number of axes.
    #[error(
        "tensor {tensor} cannot be adopted as {format:?}: {shape} lengths and {strides} strides are given \
         for {needed} axes"
    )]
    Axes {
        /// The format.
        format: KvFormat,
        /// Position of the tensor.
        tensor: usize,
        /// Lengths given.
        shape: usize,
        /// Strides given.
        strides: usize,
        /// Axes of the format's tensor.
        needed: usize,
    },
    /// An axis has another length.
    #[error(
        "tensor {tensor} cannot be adopted as {format:?}: axis {place} ({axis}) has {given} places, not \
         {needed}"
    )]
    Length {
        /// The format.
        format: KvFormat,
        /// Position of the tensor.
        tensor: usize,
        /// Position of the axis.
        place: usize,
        /// What it counts.
        axis: TensorAxis,
        /// Its places.
        given: u64,
        /// Those of the format.
        needed: u64,
    },
    /// An axis has another stride: axes lie in another order, or with gaps.
    #[error(
        "tensor {tensor} cannot be adopted as {format:?}: axis {place} ({axis}) has a stride of {given} \
         elements, not {needed}"
    )]
    Stride {
        /// The format.
        format: KvFormat,
        /// Position of the tensor.
        tensor: usize,
        /// Position of the axis.
        place: usize,
        /// What it counts.
        axis: TensorAxis,
        /// Its stride, in elements.
        given: i64,
        /// That of the format.
        needed: u64,
    },
    /// The memory ends before the tensor does.
    #[error("tensor {tensor} cannot be adopted as {format:?}: it has {given} bytes, of {needed}")]
    Short {
        /// The format.
        format: KvFormat,
        /// Position of the tensor.
        tensor: usize,
        /// Bytes of its memory.
        given: u64,
        /// Bytes from its first element to its last.
        needed: u64,
    },
    /// The memory is not the device's.
    #[error("tensor {tensor} cannot be adopted as {format:?} on this device")]
    Residency {
        /// The format.
        format: KvFormat,
        /// Position of the tensor.
        tensor: usize,
        /// What lies there.
        #[source]
        error: ResidencyError,
    },
    /// The owner of the memory is gone, or of another driver object.
    #[error("tensor {tensor} cannot be adopted as {format:?}")]
    Reader {
        /// The format.
        format: KvFormat,
        /// Position of the tensor.
        tensor: usize,
        /// Why.
        #[source]
        error: ReaderError,
    },
    /// The numbers make no layout.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// Two tensors overlap, or the device has refused.
    #[error(transparent)]
    Paged(#[from] PagedKvError),
}

cuda_driver::messages::one_line_debug!(AdoptError);
