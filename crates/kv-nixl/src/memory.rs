//! A node's memory, registered with NIXL, so that peers read it by themselves.

use std::sync::Arc;

use kv_remote::{HostMemory, Memory};

use crate::agent::{Agent, Kind, Role};
use crate::descriptor::Descriptor;
use crate::{Library, NixlError};

/// Memory of the host that is registered with an agent of its own, as long as it lives. Where peers read it by themselves, as in the
/// same machine or by RDMA, nothing runs here. A thread of NIXL serves peers whose reads are emulated: see
/// [`NixlTransfer::emulated`](crate::NixlTransfer::emulated).
///
/// It is one memory for all peers: which of them may read is a matter of who has the key of the nodes, since only they are told
/// how it is reached. What a peer reads after its lease has ended, it does not believe (see `kv-remote`).
#[derive(Debug)]
pub struct NixlMemory {
    /// Destroyed with its connections before the memory is freed, which it keeps.
    _agent: Agent,
    memory: Arc<HostMemory>,
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
        let address = memory.as_ptr() as usize;
        let kept = Box::new(Arc::clone(&memory));
        // SAFETY: `kept` keeps the memory, which does not move. Its words are atomic, so they may be read at any time; and
        // peers have no reason to write them, nor are believed if they do.
        unsafe { agent.register((Kind::Host, 0), address, bytes as usize, kept)? };
        let metadata = agent.metadata()?;
        let there =
            Descriptor { kind: Kind::Host, device: 0, base: address as u64, bytes, metadata };
        Ok(Self { _agent: agent, memory, descriptor: there.to_bytes() })
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
        Some(self.descriptor.clone())
    }
}
