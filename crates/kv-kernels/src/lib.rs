//! Kernels that move and read the paged KV of an LLM engine, launched only when every quantity has
//! been checked.
//!
//! A transfer kernel with a wrong slot, a rounded prefix or a 32-bit offset does not crash: it
//! overwrites another request's bytes. Here a launch is a typed request. Lengths, strides, alignment,
//! token counts, slots and block counts are checked on the host with 64-bit checked arithmetic before
//! anything is enqueued; what only the device can know, the kernel checks again. Each kernel has a CPU
//! reference beside it, which is the oracle of the tests and what a simulated device runs.
//!
//! * [`KvShape`] and [`PagedLayout`]: what a token's KV is, and where its rows lie. [`KvFormat`] names the
//!   layouts of serving engines.
//! * [`PagedKv`]: paged memory as kernels see it, in one tensor or in many.
//! * [`KvKernels`]: the kernels, loaded from PTX that is built into this crate.
//!   [`multi_layer_transfer`](KvKernels::multi_layer_transfer) moves tokens between a contiguous chunk
//!   and pages, all layers in one launch, and [`transfer_chunks`](KvKernels::transfer_chunks) several
//!   chunks, by slots or blocks, in device or pinned memory; [`paged_checksum`](KvKernels::paged_checksum) reads every
//!   live byte through a block table, as attention does;
//!   [`fill_pattern`](KvKernels::fill_pattern) writes bytes that only their token can have;
//!   [`gather_rows`](KvKernels::gather_rows) gathers rows of a table on the device;
//!   [`gather_block_offsets`](KvKernels::gather_block_offsets) makes offset tables of block ids.
//!   [`copy_blocks`](KvKernels::copy_blocks) copies blocks by pairs of ids, on a device, between peers,
//!   to and from pinned memory, from any layout to any other; with
//!   [`copy_block_rows`](KvKernels::copy_block_rows) from one tensor-parallel degree
//!   to another.
//!   [`append`](KvKernels::append) writes the rows of new tokens to their slots;
//!   [`sum_blocks`](KvKernels::sum_blocks) and [`verify::block_sum`] sum blocks alike in every layout.
//! * [`link::HostLink`]: chunks and blocks between pages and pinned host memory, by the cheapest of three ways
//!   ([`link::Transport`]) that a measured [`link::TransportProfile`] names, on few multiprocessors, and layer by
//!   layer where a model waits for it ([`link::LayerEvents`]); one behind the other without a gap, with the
//!   host's end in an order of its own ([`start_chunks`](link::HostLink::start_chunks), [`link::HostArrival`]).
//! * [`DeviceReport`]: where launches tell of indices that only the device sees to be out of range.
//! * [`verify`]: the pattern and its checksums from the keys of tokens, so that the host
//!   knows what every block must sum to without holding its bytes.
//! * [`references()`]: what the kernels compute, for simulated devices.
//!
//! # Example
//! ```
//! use std::sync::Arc;
//!
//! use cuda_driver::{Device, DeviceBuffer, Stream};
//! use cuda_sim::{SimConfig, SimDriver};
//! use kv_kernels::{
//!     Direction, KvKernels, KvShape, KvShapeOptions, PagedKv, PagedLayout, Slot, Transfer,
//!     references,
//! };
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // A simulated device; on a real one nothing else changes.
//! let sim = SimDriver::new(SimConfig::default())?;
//! sim.register_kernels(references());
//! let device = Device::open(Arc::new(sim), 0)?;
//! let stream = Stream::new(&device)?;
//! let kernels = KvKernels::load(&device)?;
//!
//! let shape =
//!     KvShape::new(KvShapeOptions { layers: 2, kv_count: 2, row_bytes: 64, block_tokens: 4 })?;
//! let pages = DeviceBuffer::alloc(&device, 8 * shape.block_bytes())?;
//! let paged = PagedKv::new(&stream, shape, PagedLayout::block_major(&shape), pages.span(), 8)?;
//!
//! // Six tokens go to blocks 2 and 3. The first is in a block that others read: it is skipped.
//! let chunk = DeviceBuffer::alloc(&device, 6 * shape.token_bytes())?;
//! let slots = [8, 9, 10, 11, 12, 13].map(Slot::from);
//! let slot_mapping = DeviceBuffer::alloc(&device, 6 * 8)?;
//! stream.upload(slot_mapping.span(), bytemuck::cast_slice(&slots))?;
//! let transfer = Transfer {
//!     chunk: chunk.span(),
//!     slot_mapping: slot_mapping.span(),
//!     host_slots: &slots,
//!     tokens: 6,
//!     skip_prefix_n_tokens: 1,
//!     direction: Direction::ChunkToPaged,
//!     num_blocks: 8,
//! };
//! kernels.multi_layer_transfer(&stream, &paged, transfer)?;
//! // With 3 blocks ready, slots 12 and 13 would be out of range: an error, and no launch.
//! let refused = kernels.multi_layer_transfer(&stream, &paged, Transfer { num_blocks: 3, ..transfer });
//! let text = "slot 12 of token 4 is out of range: 12 slots are ready";
//! assert_eq!(refused.unwrap_err().to_string(), text);
//! stream.synchronize()?;
//! # Ok(())
//! # }
//! ```
//!
//! # Ownership and ordering
//! Launches borrow nothing: they take spans, which are addresses and lengths. Nothing here waits,
//! except [`PagedKv::new`] for its upload. A kernel reads its operands when it runs, so they must stay
//! as they are until an event recorded after the launch has completed; see [`KvKernels`].
//!
//! # Skipped prefixes
//! `skip_prefix_n_tokens` is a parameter of the kernel. Skipped tokens are neither read nor written,
//! nothing is rounded to blocks or chunks, and nothing is sliced or copied to express it: token `t` is
//! at position `t` of chunk and mapping, skipped head or not. The token count is the chunk's own: a
//! chunk of another length is refused, because its planes are spaced by that count.
//!
//! # Features
//! * `sabotage` (debug builds only): a switch that makes transfers ignore the skip, so that tests can
//!   show what it is for. Off unless switched on at run time.
//!
//! # What it does not do
//! It allocates no KV memory, chooses no slots, and records no events. Rows are moved as bytes: no kernel
//! knows element types. The PTX is for compute capability 8.0 and later.

#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod chunks;
pub mod error;
pub mod layout;
pub mod link;
pub mod raw;
pub mod tables;
pub mod verify;

mod adopt;
mod append;
mod block_copy;
mod block_error;
mod block_offsets;
mod block_sum;
mod block_units;
mod blocks;
mod busy;
mod checksum;
mod divider;
mod fill;
mod format;
mod gather;
mod kernels;
mod launch;
mod lazy;
mod operand;
mod paged_kv;
mod paged_layout;
mod pairs;
mod pattern;
mod places;
mod references;
mod report;
mod shape;
mod source;
mod stored;
mod transfer;
mod walk;

use kernels::entry;

pub use append::Append;
pub use block_copy::BlockCopy;
pub use blocks::{Blocks, HostBlocks};
pub use error::KernelError;
pub use format::KvFormat;
pub use kernels::KvKernels;
pub use kv_pool::{BlockId, Slot, TableEntry};
pub use paged_kv::PagedKv;
pub use paged_layout::PagedLayout;
pub use pairs::{BlockPair, BlockPairs};
pub use references::references;
pub use report::DeviceReport;
pub use shape::{KvShape, KvShapeOptions};
pub use source::KernelSource;
pub use transfer::{Direction, Transfer};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeDoctests;
