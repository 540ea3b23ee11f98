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
//! A [`Mover`] goes from device to device where they can access each other, and else through a ring
//! of pinned chunks that one device fills while the other drains; [`Route`] says which.
//!
//! # Order and ownership
//! Every move names a stream on each side ([`MoveOrder`]): it comes after what is on the source's, and
//! in the order of the destination's. The host waits for nothing. A move owns both ends until it has
//! completed, so a source cannot be freed or reused under it: it is given back by
//! [`Move::try_finish`], or for work that waits on the device by [`Move::reclaim_on`]. A move that is
//! dropped leaves its ends with the mover until it has completed. A move that failed withholds both ends
//! until nothing of it is under way ([`Withheld`]).
//!
//! # Resharding
//! A [`ReshardPlan`] says which heads go from which GPU to which when KV in tensor-parallel shards is to lie
//! in another number of them; each part is one [`Mover::move_blocks`].
//!
//! # What it does not do
//! It allocates no destination, moves nothing to where it reads, and takes access of devices to each
//! other back from nobody.

mod blocks;
mod error;
mod handover;
mod held;
mod mover;
mod pairs;
mod reshard;
mod ring;
#[cfg(all(feature = "sabotage", debug_assertions))]
pub mod sabotage;
mod table;

pub use blocks::{BlockGrid, BlockMemory, BlockMove};
pub use error::{MoveError, MoveFailed};
pub use handover::{HandOver, Incoming, Outgoing, SendFailed};
pub use held::{Held, Move, Withheld};
pub use kv_kernels::BlockPair;
pub use kv_kernels::error::Side;
pub use mover::{MoveOrder, Mover, MoverConfig, Route};
pub use pairs::BlockPairs;
pub use reshard::{BlockOfHeads, HeadOrder, HeadTransfer, ReshardError, ReshardPlan};
