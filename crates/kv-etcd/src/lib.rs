//! Which nodes of a remote KV cache are alive, by etcd.
#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

mod client;
mod error;
mod membership;

pub use error::{EtcdError, OptionsError};
pub use membership::{EtcdOptions, EtcdStats, Membership};
