//! Memory from one device to another: whole ranges, scattered blocks, activations between stages.
//!
//! ```
//! use std::sync::Arc;
//!
//! use cuda_driver::{DeviceBuffer, Driver, Stream};
//! use cuda_sim::{SimConfig, SimDriver};
//! use kv_multigpu::DeviceRegistry;
//! use kv_multigpu::moves::{MoveOrder, Mover, MoverConfig};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let driver = SimDriver::new(SimConfig { devices: 2, ..SimConfig::default() })?;
//! let registry = DeviceRegistry::new(Arc::new(driver))?;
//! let (near, far) = (registry.device(0)?, registry.device(1)?);
//! let (producer, consumer) = (Stream::new(&near)?, Stream::new(&far)?);
//! let mut mover = Mover::new(&near, &far, MoverConfig::default())?;
//!
//! let source = DeviceBuffer::alloc(&near, 4096)?;
//! let destination = DeviceBuffer::alloc(&far, 4096)?;
//! producer.fill(source.span(), 7)?; // still to run: the move comes after it
//! let order = MoveOrder { after: &producer, on: &consumer };
//! let mut moved = mover.move_tensor(source.into(), destination.into(), order)?;
//!
//! // The destination is good for work on `consumer` at once; the source is still the move's.
//! let destination = moved.take_destination().ok_or("it was there")?;
//! let mut seen = [0; 4096];
//! consumer.download(&mut seen, destination.span())?;
//! assert_eq!(seen, [7; 4096]);
//! let (source, _) = moved.try_finish().map_err(|_| "complete, since its reader is")?;
//! assert!(source.is_some());
//! # Ok(())
//! # }
//! ```
//!
//! # Ways
//! Where two devices can access each other, a [`Mover`] goes from device to device. Elsewhere it goes through a ring
//! of pinned chunks, which one device fills while the other drains. [`Route`] says which way a mover goes.
//!
//! # Order and ownership
//! Every move names a stream on each side ([`MoveOrder`]). The move runs after the work on the source's stream, and
//! in the order of the destination's stream. The host waits for nothing. A move owns both ends until it has
//! completed, so its source cannot be freed or reused under it. [`Move::try_finish`] gives the source back when the
//! move has completed, and [`Move::reclaim_on`] at once for work that waits on the device. The ends of a dropped move
//! stay with the mover until the move has completed. The ends of a failed move are withheld until no part of it is
//! under way ([`Withheld`]).
//!
//! # What it does not do
//! It allocates no destination, and refuses a destination that overlaps its source. Access between devices that it
//! has enabled stays enabled.

mod blocks;
mod error;
mod handover;
mod held;
mod mover;
mod ring;
mod table;

pub use blocks::{BlockGrid, BlockMemory, BlockMove};
pub use error::{MoveError, MoveFailed};
pub use handover::{HandOver, Incoming, Outgoing, SendFailed};
pub use held::{Held, Move, Withheld};
pub use kv_kernels::error::Side;
pub use kv_kernels::{BlockPair, BlockPairs};
pub use mover::{MoveOrder, Mover, MoverConfig, Route};
