//! What a loop does about each error of this crate.

use kv_pool::{Classed, ErrorClass};

#[cfg(feature = "etcd")]
use crate::etcd::EtcdError;
use crate::handover::HandoverError;
use crate::{FrameError, Lie, NodeError, PeerError, Refusal};

use ErrorClass::{Restart, Retry, Shed};

impl Classed for NodeError {
    fn class(&self) -> ErrorClass {
        Shed
    }
}

impl Classed for FrameError {
    /// The connection is at no frame's beginning any more.
    fn class(&self) -> ErrorClass {
        Restart
    }
}

impl Classed for Lie {
    fn class(&self) -> ErrorClass {
        Restart
    }
}

impl Classed for Refusal {
    fn class(&self) -> ErrorClass {
        match self {
            Self::NoRoom | Self::Busy => Retry,
            Self::NoLease | Self::OutsideLease | Self::Length => Shed,
        }
    }
}

impl Classed for PeerError {
    /// But for a refusal, the connection is of no use any more.
    fn class(&self) -> ErrorClass {
        match self {
            Self::Refused(refusal) => refusal.class(),
            Self::Late
            | Self::Closed
            | Self::Io { .. }
            | Self::Frame(_)
            | Self::Foreign { .. }
            | Self::Version { .. }
            | Self::Key
            | Self::OtherNode
            | Self::Lie(_) => Restart,
        }
    }
}

impl Classed for HandoverError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Node(refusal) => refusal.class(),
            Self::Peer(error) => error.class(),
            Self::Sheet { .. }
            | Self::NoPart { .. }
            | Self::Length { .. }
            | Self::Withdrawn
            | Self::None { .. }
            | Self::Late { .. } => Shed,
        }
    }
}

#[cfg(feature = "etcd")]
impl Classed for EtcdError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Unreached { .. } | Self::Status { .. } | Self::Answer { .. } => Retry,
            Self::Taken { .. } => Shed,
        }
    }
}
