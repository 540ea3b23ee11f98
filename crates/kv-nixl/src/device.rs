//! A device's memory that peers read, and reads of peers' memory into a device's.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use cuda_driver::{Device, DeviceBuffer, DeviceSpan, Stream, guard};
use kv_remote::message::{Found, Span};
use kv_remote::{Joined, Memory, Peer, PeerError, SocketTransfer, Transfer as _};

use crate::agent::{Agent, Kind, Role};
use crate::descriptor::{Descriptor, Region};
use crate::landing::{Came, Home};
use crate::reader::until;
use crate::readers::{Readers, Way, failed};
use crate::{Library, NixlError};

/// Bytes that are read as one, at most, unless one record has more.
const JOINED_MAX: u64 = 16 << 20;

/// Memory of a device, registered as [`NixlMemory`](crate::NixlMemory) is: what a node on it keeps, peers read into memory of their own
/// devices, over the link between the devices where there is one.
///
/// It is freed when it is dropped, though a peer's process may still have it open: drop it with the process, or when no peer is left.
///
/// Records that the node keeps for a peer go through the host, as all that a [`Memory`] copies. Those of this process need not:
/// [`Node::reserve`](kv_remote::Node::reserve) makes room for them, [`span`](Self::span) says where that is on the device, and work of the device
/// writes them.
pub struct NixlDeviceMemory {
    /// Destroyed with its connections before the memory is freed, which it keeps.
    agent: Option<Agent>,
    buffer: Arc<DeviceBuffer>,
    /// Copies to the host and from it.
    stream: Stream,
    descriptor: Vec<u8>,
}

impl NixlDeviceMemory {
    /// Allocates memory of the device, filled with zeros, and registers all of it, once. Copies to the host and from it have a stream of
    /// their own.
    ///
    /// # Errors
    /// [`NixlError`].
    pub fn new(library: &Library, device: &Device, bytes: u64) -> Result<Self, NixlError> {
        let stream = Stream::new(device)?;
        let buffer = Arc::new(DeviceBuffer::alloc(device, bytes)?);
        stream.fill(buffer.span(), 0)?;
        stream.synchronize()?;
        // An ordinal is not negative.
        let ordinal = u64::try_from(device.ordinal()).unwrap_or(0);
        let registered = device.while_current(|| {
            let mut agent = Agent::new(library, Role::Node)?;
            let (address, kept) = (buffer.address() as usize, Box::new(Arc::clone(&buffer)));
            // SAFETY: `kept` keeps the memory, which does not move. It may be read at any time; and peers have no reason to write it,
            // nor are believed if they do.
            unsafe { agent.register((Kind::Device, ordinal), address, bytes as usize, kept)? };
            let metadata = agent.metadata()?;
            Ok::<_, NixlError>((agent, metadata))
        })?;
        let (agent, metadata) = registered?;
        let (kind, base) = (Kind::Device, buffer.address());
        let regions = vec![Region { address: 0, base, bytes }];
        let there = Descriptor { kind, device: ordinal, regions, metadata };
        let descriptor = there.to_bytes();
        Ok(Self { agent: Some(agent), buffer, stream, descriptor })
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.buffer.device()
    }

    /// Where bytes of it are on the device; none if there are not as many.
    ///
    /// # Ordering
    /// What is enqueued there is the caller's to order.
    #[must_use]
    pub fn span(&self, of: Span) -> Option<DeviceSpan> {
        self.buffer.span().slice(of.address, of.bytes.into()).ok()
    }

    fn bytes_at(&self, address: u64, bytes: usize) -> Option<DeviceSpan> {
        self.buffer.span().slice(address, bytes as u64).ok()
    }
}

impl Memory for NixlDeviceMemory {
    fn bytes(&self) -> u64 {
        self.buffer.bytes()
    }

    fn read(&self, address: u64, into: &mut [u8]) -> bool {
        let span = self.bytes_at(address, into.len());
        span.is_some_and(|span| self.stream.download(into, span).is_ok())
    }

    fn write(&self, address: u64, from: &[u8]) -> bool {
        let span = self.bytes_at(address, from.len());
        span.is_some_and(|span| self.stream.upload(span, from).is_ok())
    }

    fn descriptor(&self) -> Option<Vec<u8>> {
        Some(self.descriptor.clone())
    }
}

impl Drop for NixlDeviceMemory {
    fn drop(&mut self) {
        let agent = self.agent.take();
        // Without a context, nothing of the device is left to be given back.
        let _ = self.buffer.device().while_current(|| drop(agent));
    }
}

impl fmt::Debug for NixlDeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("NixlDeviceMemory");
        shown
            .field("bytes", &self.buffer.bytes())
            .field("agent", &self.agent)
            .finish_non_exhaustive()
    }
}

/// Reads one peer's records into memory of a device by NIXL, without the peer: from memory of its device or its host, over whatever is
/// quickest there. Where there is no way but the connection, they come over it and through the host.
///
/// As with [`NixlTransfer`](crate::NixlTransfer), the memory of a read whose time is over is not used again before the read has ended.
/// Up to three pieces of 32 MiB are on their way at a time; a record has 64 MiB at most.
///
/// The first read of a peer, and the first one after one that has failed or was late, waits for the device whatever its deadline: UCX
/// does, when memory of a device is registered (seen with NIXL 1.5.1).
#[derive(Debug)]
pub struct NixlDeviceTransfer {
    /// None only while it is dropped.
    readers: Option<Readers>,
    stream: Stream,
    /// Where bytes are that have come over the connection.
    by_hand: Option<DeviceBuffer>,
}

impl NixlDeviceTransfer {
    /// Reads a peer by this library to the device of this stream. Nothing is opened or allocated before the first read.
    #[must_use]
    pub fn new(library: Library, stream: &Stream) -> Self {
        let readers = Some(Readers::new(library, Home::Device(stream.clone())));
        Self { readers, stream: stream.clone(), by_hand: None }
    }

    /// Reads that have not ended though their time was over.
    #[must_use]
    pub fn late(&self) -> usize {
        self.readers.as_ref().map_or(0, Readers::late)
    }

    /// Reads the records of an answer, without their entries, and says `each` the place in the answer and where the record is on the
    /// device. What it holds is right only if its sum is [that of the answer](kv_remote::message::Located::sum).
    ///
    /// # Ordering
    /// `each` uses the record by work that it enqueues on the stream of [`new`](Self::new), and by nothing else: others are read
    /// to the same place once this work is done. The stream is not waited for at the end.
    ///
    /// # Errors
    /// [`PeerError`]. What was said before has come all the same. [`PeerError::Late`] also if that work is not done by the deadline.
    pub fn read_each(
        &mut self,
        peer: &mut Peer,
        found: &Found,
        deadline: Instant,
        each: &mut dyn FnMut(usize, DeviceSpan),
    ) -> Result<(), PeerError> {
        let (Some(lease), Some(readers)) = (found.lease, &mut self.readers) else { return Ok(()) };
        let joined = Joined::of(found, JOINED_MAX);
        let device = self.stream.device();
        let read = device.while_current(|| {
            readers.read(peer, joined.spans(), deadline, &mut |span, came| {
                let Came::Device(came) = came else { return };
                for (place, offset) in joined.blocks_of(span) {
                    let Some(at) = found.blocks.get(place) else { continue };
                    let head = at.record_span().address - at.span.address;
                    let record = came.slice(offset as u64 + head, at.record_span().bytes.into());
                    if let Ok(record) = record {
                        each(place, record);
                    }
                }
            })
        });
        if read.map_err(failed)?? == Way::Memory {
            return Ok(());
        }
        // One behind the other: it is slow in any case.
        for (place, at) in found.blocks.iter().enumerate() {
            let mut bytes = Vec::new();
            let mut take = |_, came: &[u8]| bytes.extend_from_slice(came);
            SocketTransfer.read(peer, lease, &[at.record_span()], deadline, &mut take)?;
            let record = self.put(&bytes, deadline)?;
            each(place, record);
        }
        Ok(())
    }

    /// Puts bytes on the device, when what uses those before is done: an upload waits for all that is on the stream.
    fn put(&mut self, bytes: &[u8], deadline: Instant) -> Result<DeviceSpan, PeerError> {
        let length = bytes.len() as u64;
        let idle = || self.stream.is_idle().map(|idle| idle.then_some(())).transpose();
        let was_idle =
            guard!("nixl.device-lag-has-an-end", until(deadline, idle), else Some(Ok(())));
        was_idle.ok_or(PeerError::Late)?.map_err(failed)?;
        let buffer = match self.by_hand.take().filter(|buffer| buffer.bytes() >= length) {
            Some(buffer) => buffer,
            None => DeviceBuffer::alloc(self.stream.device(), length.max(1)).map_err(failed)?,
        };
        let span = self.by_hand.insert(buffer).span().slice(0, length).map_err(failed)?;
        self.stream.upload(span, bytes).map_err(failed)?;
        Ok(span)
    }
}

impl Drop for NixlDeviceTransfer {
    fn drop(&mut self) {
        let readers = self.readers.take();
        let device: &Device = self.stream.device();
        let _ = device.while_current(|| drop(readers));
    }
}
