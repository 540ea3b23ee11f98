//! Which GPU holds which layers, KV blocks and heads: decided from plain numbers, without a device.
//!
//! ```
//! use kv_multigpu::place::{
//!     GpuCapacity, LayerShape, Link, LinkMatrix, ModelShape, Placement, Strategy,
//! };
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let layer = LayerShape {
//!     weight_bytes: 400 << 20,
//!     kv_block_bytes: 64 << 10,
//!     output_token_bytes: 8 << 10,
//! };
//! let model = ModelShape::uniform(48, layer, 4096)?;
//! let gpu = |i| GpuCapacity {
//!     uuid: [i; 16],
//!     free_bytes: 20 << 30,
//!     memory_bytes_per_second: 3_000_000_000_000,
//! };
//! let links = LinkMatrix::uniform(2, Link { latency_ns: 5_000, bytes_per_second: 397_000_000_000 })?;
//!
//! let placement = Placement::layers(&model, &[gpu(1), gpu(2)], &links, Strategy::LeastCost)?;
//! assert_eq!(placement.crossings().count(), 1, "one GPU does not hold 31 GiB; two need one crossing");
//! println!("{}", placement.explain());
//!
//! let kept = placement.to_string();
//! assert_eq!(kept.parse::<Placement>()?, placement);
//! # Ok(())
//! # }
//! ```
//!
//! KV blocks are on the GPU of their layer, under the same ids: block `b` of layer `l` is on the
//! GPU of `l`, at the same position as in a cache with any other number of layers. With tensor
//! parallelism every GPU holds every layer, and its own heads of every block.
//!
//! # The predicted time
//! A decode step reads every weight once, at the speed of its memory. It hands the activations of
//! [`step_tokens`](ModelShape::step_tokens) tokens from layer to layer. That costs nothing if both
//! layers share a GPU, and otherwise the link's latency plus the bytes at its speed. With tensor
//! parallelism each layer takes two ring reductions of its output. Not counted: attention's reads
//! of KV, which depend on the requests, arithmetic, launches, and the transfer from the last layer
//! back to the first. The time serves to compare placements, not to predict real times.
//!
//! # What it does not do
//! It makes no device call and knows no driver: sizes and speeds come from the caller.
//! [`topology`](crate::topology) can measure them.

#![forbid(unsafe_code)]

mod error;
mod explanation;
mod heads;
mod least_cost;
mod placement;
mod problem;
mod shape;
mod strategy;
mod text;

pub use error::{PlacementError, Shortage};
pub use explanation::{Crossing, GpuLoad, StepTime};
pub use heads::{HeadShards, KvReplication};
pub use placement::{Placement, PlacementKind};
pub(crate) use shape::GPUS_MAX;
pub use shape::{GpuCapacity, LayerShape, Link, LinkMatrix, ModelShape};
pub use strategy::Strategy;
