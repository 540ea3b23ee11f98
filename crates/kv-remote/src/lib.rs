//! Another host's KV cache as a tier.
#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

mod address;
mod auth;
mod channel;
mod class;
mod entry;
mod error;
#[cfg(feature = "etcd")]
pub mod etcd;
#[cfg(test)]
mod golden;
pub mod handover;
mod host_tier;
mod joined;
mod leases;
mod liars;
mod log;
mod members;
mod memory;
pub mod message;
mod node;
mod peer;
mod server;
mod tier;
mod transfer;

pub use address::Address;
pub use auth::Key;
pub use entry::Unfit;
pub use error::{FrameError, Lie, NodeError, PeerError, Refusal};
pub use host_tier::host_tier_address;
pub use joined::Joined;
pub use leases::{LeaseCounts, ReaderId};
pub use members::{Member, replicas};
pub use memory::{HostMemory, Memory};
pub use node::{Node, NodeOptions, NodeStats, Reserved};
pub use peer::{Peer, Read};
pub use server::{Server, ServerOptions, ServerStats};
pub use tier::{Miss, RemoteOptions, RemoteStats, RemoteTier, RemoteWatch};
pub use transfer::{SocketTransfer, Transfer};
