//! The one place where access descriptors are built and checked.

use cuda_driver::{AccessDesc, Device};
use smallvec::SmallVec;

use crate::ReserveError;

/// Read-write access of the owner, first, and of peers, checked before any mapping is made.
///
/// # Invariants
/// Not empty; no device twice; every peer was said to reach the owner's memory.
#[derive(Clone, Debug)]
pub(crate) struct AccessList(SmallVec<[AccessDesc; 8]>);

impl AccessList {
    pub(crate) fn new(owner: &Device, peers: &[i32]) -> Result<Self, ReserveError> {
        let mut list: SmallVec<[AccessDesc; 8]> = SmallVec::new();
        list.push(AccessDesc { device: owner.ordinal() });
        for &peer in peers {
            if list.iter().any(|desc| desc.device == peer) {
                return Err(ReserveError::PeerTwice { peer });
            }
            let reaches =
                owner.run(|driver| driver.device_can_access_peer(peer, owner.ordinal()))?;
            if !reaches {
                return Err(ReserveError::PeerUnreachable { peer, owner: owner.ordinal() });
            }
            list.push(AccessDesc { device: peer });
        }
        Ok(Self(list))
    }

    pub(crate) fn as_slice(&self) -> &[AccessDesc] {
        &self.0
    }
}
