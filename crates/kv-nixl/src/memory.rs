//! A node's memory, registered with NIXL, so that peers read it by themselves.

use std::sync::Arc;

use cuda_driver::PinnedBuffer;
use kv_remote::message::DESCRIPTOR_MAX;
use kv_remote::{HostMemory, Memory, host_tier_address};
use kv_tier::HostShare;
use parking_lot::Mutex;

use crate::agent::{Agent, Kind, Role};
use crate::descriptor::{Descriptor, REGIONS_MAX, Region};
use crate::{Library, NixlError};

/// Memory of the host that is registered with an agent of its own, as long as it lives. Where peers read it by themselves, as in the
/// same machine or by RDMA, nothing runs here. A thread of NIXL serves peers whose reads are emulated: see
/// [`NixlTransfer::emulated`](crate::NixlTransfer::emulated).
///
/// It is one memory for all peers: which of them may read is a matter of who has the key of the nodes, since only they are told
/// how it is reached. What a peer reads after its lease has ended, it does not believe (see `kv-remote`).
#[derive(Debug)]
pub struct NixlMemory {
    memory: Arc<HostMemory>,
    registered: Mutex<Registered>,
}

#[derive(Debug)]
struct Registered {
    /// Destroyed with its connections before the memory is freed, which it keeps.
    agent: Agent,
    regions: Vec<Region>,
    descriptor: Vec<u8>,
}

impl NixlMemory {
    /// Registers all of `memory`, once.
    ///
    /// # Errors
    /// [`NixlError`].
    pub fn new(library: &Library, memory: Arc<HostMemory>) -> Result<Self, NixlError> {
        let mut agent = Agent::new(library, Role::Node)?;
        let bytes = memory.bytes();
        let base = memory.as_ptr() as usize;
        let kept = Box::new(Arc::clone(&memory));
        // SAFETY: `kept` keeps the memory, which does not move. Its words are atomic, so they may be read at any time; and
        // peers have no reason to write them, nor are believed if they do.
        unsafe { agent.register((Kind::Host, 0), base, bytes as usize, kept)? };
        let regions = vec![Region { address: 0, base: base as u64, bytes }];
        let mut registered = Registered { agent, regions, descriptor: Vec::new() };
        registered.describe()?;
        Ok(Self { memory, registered: Mutex::new(registered) })
    }

    /// Registers the host tier of an engine, too, for the node that is made over this memory and [shares](kv_remote::Node::share) the
    /// same tier; it has at least the tier's bytes as [`host_bytes`](kv_remote::NodeOptions::host_bytes). What is pinned by now is
    /// registered, and stays pinned as long as this lives, whatever the cache's budget. The rest is read over connections; so is all
    /// beyond some hundred pieces, as many as there are slabs, or blocks of several devices; and all for peers that have read here
    /// before. A second call registers nothing.
    ///
    /// # Errors
    /// [`NixlError`]. What was registered before is read as before.
    pub fn register_host_tier(&self, host: &HostShare) -> Result<(), NixlError> {
        let mut registered = self.registered.lock();
        if registered.regions.len() > 1 {
            return Ok(());
        }
        registered.add(host_tier_address(self.memory.bytes()), host)
    }
}

impl Registered {
    /// Registers as many pieces of a host tier as can be described, which begins at an address.
    fn add(&mut self, first: u64, host: &HostShare) -> Result<(), NixlError> {
        for (address, piece) in host.pieces() {
            // Memory of another type is not known here.
            let Ok(pinned) = piece.memory.downcast::<PinnedBuffer>() else { continue };
            let before = self.descriptor.len();
            let (base, kept) =
                (pinned.host_address() + piece.offset, Box::new(Arc::clone(&pinned)));
            // SAFETY: `kept` keeps the memory, which does not move and is pinned, so that it is there for whoever reads it. The device
            // and the library write and read it at any time, and nothing here takes a reference to it.
            unsafe { self.agent.register((Kind::Host, 0), base as usize, piece.bytes, kept)? };
            let bytes = piece.bytes as u64;
            self.regions.push(Region { address: first + address, base, bytes });
            if let Err(error) = self.describe() {
                self.regions.pop();
                return Err(error);
            }
            // The next one takes as much.
            let next = 2 * self.descriptor.len() - before;
            if next > DESCRIPTOR_MAX || self.regions.len() == REGIONS_MAX {
                break;
            }
        }
        Ok(())
    }

    fn describe(&mut self) -> Result<(), NixlError> {
        let (metadata, regions) = (self.agent.metadata()?, self.regions.clone());
        let there = Descriptor { kind: Kind::Host, device: 0, regions, metadata };
        self.descriptor = there.to_bytes();
        Ok(())
    }
}

impl Memory for NixlMemory {
    fn bytes(&self) -> u64 {
        self.memory.bytes()
    }

    fn read(&self, address: u64, into: &mut [u8]) -> bool {
        self.memory.read(address, into)
    }

    fn write(&self, address: u64, from: &[u8]) -> bool {
        self.memory.write(address, from)
    }

    fn descriptor(&self) -> Option<Vec<u8>> {
        Some(self.registered.lock().descriptor.clone())
    }
}
