//! The only place where access descriptors are built and checked.

use std::sync::Arc;

use cuda_driver::{AccessDesc, Device, Driver, Fence, guard};
use smallvec::SmallVec;

use crate::SpaceError;

/// Read-write access of the owner, first, and of peers, checked before any mapping is made.
///
/// # Invariants
/// `devices` is not empty and contains no device twice. Every peer can access the owner's memory.
#[derive(Debug)]
pub(crate) struct AccessList {
    driver: Arc<dyn Driver>,
    /// The owner's context, which lives as long as the memory.
    context: u64,
    devices: SmallVec<[AccessDesc; 8]>,
}

impl AccessList {
    pub(crate) fn new(owner: &Device, peers: &[i32]) -> Result<Self, SpaceError> {
        let mut list: SmallVec<[AccessDesc; 8]> = SmallVec::new();
        list.push(AccessDesc { device: owner.ordinal() });
        for &peer in peers {
            if list.iter().any(|desc| desc.device == peer) {
                return Err(SpaceError::PeerTwice { peer });
            }
            let reaches =
                owner.run(|driver| driver.device_can_access_peer(peer, owner.ordinal()))?;
            if !reaches {
                return Err(SpaceError::PeerUnreachable { peer, owner: owner.ordinal() });
            }
            list.push(AccessDesc { device: peer });
        }
        Ok(Self { driver: Arc::clone(owner.driver()), context: owner.context(), devices: list })
    }

    /// Whether work of `device` counts as a user of the memory: the owner's own context, or a peer.
    pub(crate) fn reaches(&self, device: &Device) -> bool {
        // Compared by address: one driver's method table may exist twice.
        let same = std::ptr::addr_eq(Arc::as_ptr(device.driver()), Arc::as_ptr(&self.driver));
        guard!("vmm.own-driver", same, else true) && self.names(device.ordinal(), device.context())
    }

    /// Peers are identified by their ordinals. Another context of the owner's device, which a
    /// program may have created and adopted, is not the owner: a wait for all work of the owner
    /// does not wait for that context.
    fn names(&self, ordinal: i32, context: u64) -> bool {
        let (owner, peers) = (self.devices[0].device, &self.devices[1..]);
        if ordinal == owner {
            guard!("vmm.own-context", context == self.context, else true)
        } else {
            peers.iter().any(|peer| peer.device == ordinal)
        }
    }

    /// Whether work before one of `fences` can touch the memory.
    pub(crate) fn reaches_any(&self, fences: &[Fence]) -> bool {
        fences.iter().any(|fence| self.reaches(fence.device()))
    }

    pub(crate) fn as_slice(&self) -> &[AccessDesc] {
        &self.devices
    }
}

#[cfg(test)]
mod tests {
    use cuda_sim::{SimConfig, SimDriver};

    use super::*;

    #[test]
    fn the_owner_comes_first_and_every_device_once() {
        let config = SimConfig { devices: 4, ..SimConfig::default() };
        let sim = SimDriver::new(config).unwrap();
        let owner = Device::open(Arc::new(sim), 2).unwrap();
        let list = AccessList::new(&owner, &[3, 0]).unwrap();
        assert_eq!(list.as_slice(), [2, 3, 0].map(|device| AccessDesc { device }));
        let twice = SpaceError::PeerTwice { peer: 3 };
        assert_eq!(AccessList::new(&owner, &[3, 0, 3]).unwrap_err(), twice);
    }

    #[test]
    fn another_context_of_the_owners_device_is_not_the_owner() {
        let sim = SimDriver::new(SimConfig { devices: 3, ..SimConfig::default() }).unwrap();
        let owner = Device::open(Arc::new(sim), 0).unwrap();
        let list = AccessList::new(&owner, &[1]).unwrap();
        let (own, other) = (owner.context(), owner.context() + 1);
        assert!(list.reaches(&owner) && list.names(0, own) && list.names(1, other));
        assert!(!list.names(0, other) && !list.names(2, other));
    }

    #[test]
    fn a_peer_that_cannot_reach_the_owner_is_refused() {
        let config = SimConfig { devices: 2, peer_access: false, ..SimConfig::default() };
        let sim = SimDriver::new(config).unwrap();
        let owner = Device::open(Arc::new(sim), 0).unwrap();
        let refused = SpaceError::PeerUnreachable { peer: 1, owner: 0 };
        assert_eq!(AccessList::new(&owner, &[1]).unwrap_err(), refused);
    }
}
