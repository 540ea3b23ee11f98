//! Paged memory that an engine allocated, checked against the tensors as they are.

use cuda_driver::{DeviceSpan, MemoryKind, ResidencyError, Stream, guard};

use crate::format::FormatAxis;
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
    /// [`PagedKvError`], which names the tensor and the axis.
    #[track_caller]
    pub fn adopt(
        stream: &Stream,
        format: KvFormat,
        options: &FormatOptions,
        tensors: &[TensorView<'_>],
    ) -> Result<Self, PagedKvError> {
        let _site = cuda_driver::site::enter();
        let layout = format.layout(options)?;
        // The layout is there, so the shape is.
        let shape = format
            .shape(options)
            .map_err(|_| LayoutError::Size { block_bytes: u64::MAX, blocks: options.blocks })?;
        let (given, needed) = (tensors.len() as u64, layout.tensors().count(&shape));
        if given != needed {
            return Err(PagedKvError::AdoptedTensors { format, given, needed });
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
        Self::over(stream, shape, layout, &spans, options.blocks)
    }
}

/// One of the tensors, on its way through the checks.
struct Checked<'a> {
    format: KvFormat,
    tensor: usize,
    view: &'a TensorView<'a>,
}

impl Checked<'_> {
    fn elements(&self, needed: u64) -> Result<(), PagedKvError> {
        let Self { format, tensor, view } = *self;
        let (given, address) = (view.element_bytes, view.span.address());
        if given != needed {
            return Err(PagedKvError::Elements { format, tensor, given, needed });
        }
        if !address.is_multiple_of(needed) {
            return Err(PagedKvError::Misaligned {
                format,
                tensor,
                address,
                element_bytes: needed,
            });
        }
        Ok(())
    }

    fn axes(&self, axes: &[FormatAxis]) -> Result<(), PagedKvError> {
        let Self { format, tensor, view } = *self;
        let (shape, strides, needed) = (view.shape.len(), view.strides.len(), axes.len());
        if shape != needed || strides != needed {
            return Err(PagedKvError::Axes { format, tensor, shape, strides, needed });
        }
        for (place, (axis, &given)) in axes.iter().zip(view.shape).enumerate() {
            let (axis, needed) = (axis.axis, axis.count);
            if given != needed {
                return Err(PagedKvError::Length { format, tensor, place, axis, given, needed });
            }
        }
        for (place, (axis, &given)) in axes.iter().zip(view.strides).enumerate() {
            let (axis, needed, count) = (axis.axis, axis.stride, axis.count);
            let is_right = count <= 1 || u64::try_from(given) == Ok(needed);
            if !guard!("kernels.adopts-right-strides", is_right, else true) {
                return Err(PagedKvError::Stride { format, tensor, place, axis, given, needed });
            }
        }
        Ok(())
    }

    /// Checks that the first `needed` bytes are there, on the stream's device.
    fn memory(&self, stream: &Stream, needed: u64) -> Result<(), PagedKvError> {
        let Self { format, tensor, view } = *self;
        let given = view.span.bytes();
        if given < needed {
            return Err(PagedKvError::Short { format, tensor, given, needed });
        }
        let unreadable = |error| PagedKvError::Owner { format, tensor, error };
        let first = view.span.address_on(stream).map_err(unreadable)?;
        // No overflow: a span does not. A layout has a byte at least.
        for address in [first, first + (needed - 1)] {
            resides(stream, address).map_err(|error| PagedKvError::Residency {
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
