//! Worker processes: a scheduler in one process, and its devices in others.
//!
//! The scheduler has a [`KvCache`](crate::KvCache) of [`Processes`], and no driver. Each worker process [serves](serve) with a
//! [`KvWorker`](crate::KvWorker) of its own devices: a share of the layers, or of the heads of all layers. Plans, snapshots and
//! completions pass as the bytes of `kv-manager` over a [`Connection`], and with them what the engine's two sides tell each other.
//!
//! A step counts when all workers have completed it. A worker that ends, says what cannot be read, or is
//! silent for too long is ended, and a new process takes its place. It begins with the block table and no
//! content: every request is computed again.

mod connection;
mod error;
mod fleet;
mod frame;
mod handshake;
mod member;
mod replace;
mod serve;

pub use connection::Connection;
pub use error::{FrameError, ServeError, WorkerError, WorkerFault};
pub use fleet::Processes;
pub use replace::Replaced;
pub use serve::{Order, Orders, serve};
