//! Blocks that go from the device of one node to the device of another, by NIXL: neither host sees them.
//! Each block is summed where it is read and where it has come, by the kernel that sums blocks.

use std::any::Any;
use std::sync::Arc;
use std::time::Instant;

use cuda_driver::{Device, DeviceBuffer, DeviceSpan, Stream, guard};
use kv_nixl::{Library, NixlDeviceMemory, NixlDeviceTransfer};
use kv_pool::BlockId;
use kv_remote::handover::{HandoverError as OfferError, Offer, Pull};
use kv_remote::{Node, Peer, PeerError};
use parking_lot::Mutex;

use super::HandoverError;
use super::form::{Copies, Form};
use super::prefill::{NotGiven, part};
use super::source::Piece;
use crate::KvCache;

/// Blocks that are summed by one launch, at most.
pub(super) const SUMS: usize = 1024;
/// Bytes of a sum and a block id, for each of these.
const SCRATCH: u64 = 12 * SUMS as u64;

#[derive(Debug)]
pub(super) struct Giving {
    memory: Arc<NixlDeviceMemory>,
    scratch: DeviceBuffer,
}

impl Giving {
    pub(super) fn new(node: &Node, device: &Device) -> Result<Self, HandoverError> {
        let memory: Arc<dyn Any + Send + Sync> = Arc::clone(node.memory()) as _;
        let memory = memory.downcast::<NixlDeviceMemory>().ok();
        let memory = memory.filter(|memory| memory.device() == device);
        let memory = memory.ok_or(HandoverError::NodeMemory)?;
        let scratch = DeviceBuffer::alloc(device, SCRATCH)?;
        Ok(Self { memory, scratch })
    }

    /// Copies [some](SUMS) blocks to the node's memory, and gives them.
    pub(super) fn give(
        &self,
        (cache, copies): (&KvCache, &Copies),
        offer: &mut Offer,
        blocks: &[(usize, BlockId)],
    ) -> Result<(), NotGiven> {
        let parts: Vec<_> = blocks.iter().map(|&(place, _)| part(place, 0)).collect();
        let room = offer.reserve(&parts)?;
        let to = room.spans().map(|span| self.memory.span(span));
        let pairs: Option<Vec<_>> =
            blocks.iter().zip(to).map(|(&(_, id), to)| Some((id, to?))).collect();
        let pairs = pairs.ok_or(HandoverError::Layout)?;
        // Nothing is being copied behind it: the room is given to others when it is dropped.
        let sums = copies.beside(cache, &pairs, true, self.scratch.span())?;
        Ok(offer.give_written(room, &sums)?)
    }
}

/// Blocks that have come to memory of this node's device.
#[derive(Debug)]
pub(super) struct Blocks {
    /// Those of the whole prompt, block behind block.
    pages: Arc<DeviceBuffer>,
    /// Their places, and what they sum up to in the other node's device.
    sums: Vec<(usize, u64)>,
    spare: Arc<Spare>,
}

/// Memory that is used again: allocating and freeing wait for the device.
#[derive(Debug)]
struct Spare {
    /// Each is free while nobody else has it.
    pages: Mutex<Vec<Arc<DeviceBuffer>>>,
    /// For the thread that fills in.
    scratch: DeviceBuffer,
}

/// Pages that are kept for the next prompts, at most.
const SPARE_MAX: usize = 32;

impl Blocks {
    pub(super) fn count(&self) -> usize {
        self.sums.len()
    }

    /// Copies these to blocks, as far as `block_of` names one for a place, and a number for it. The
    /// numbers of those that are right.
    pub(super) fn fill(
        &self,
        (cache, copies): (&KvCache, &Copies),
        form: Form,
        block_of: impl Fn(usize) -> Option<(usize, BlockId)>,
    ) -> Result<Vec<usize>, HandoverError> {
        let bytes = form.block_bytes() as u64;
        let mut right = Vec::new();
        for sums in self.sums.chunks(SUMS) {
            let wanted = |&(place, sum): &(usize, u64)| Some((place, sum, block_of(place)?));
            let wanted: Vec<_> = sums.iter().filter_map(wanted).collect();
            if wanted.is_empty() {
                continue;
            }
            let from = |&(place, _, (_, id)): &(usize, u64, (usize, BlockId))| {
                let from = self.pages.span().slice(place as u64 * bytes, bytes);
                Ok((id, from.map_err(cuda_driver::CopyError::from)?))
            };
            let pairs = wanted.iter().map(from).collect::<Result<Vec<_>, HandoverError>>()?;
            // Nothing is being copied behind it: the pages may be used again.
            let here = copies.beside(cache, &pairs, false, self.spare.scratch.span())?;
            let same = wanted.iter().zip(here).filter(|((_, there, _), here)| {
                guard!("handover.device-copies-by-sum", there == here, else true)
            });
            right.extend(same.map(|((.., (number, _)), _)| *number));
        }
        Ok(right)
    }
}

/// The side that goes on: reads one node's memory to that of its device.
#[derive(Debug)]
pub(super) struct Taking {
    stream: Stream,
    transfer: NixlDeviceTransfer,
    spare: Arc<Spare>,
    /// Of the prompt that is being taken.
    pages: Option<Arc<DeviceBuffer>>,
}

impl Taking {
    pub(super) fn new(library: Library, device: &Device) -> Result<Self, HandoverError> {
        let stream = Stream::new(device)?;
        let transfer = NixlDeviceTransfer::new(library, &stream);
        let scratch = DeviceBuffer::alloc(device, SCRATCH)?;
        let spare = Arc::new(Spare { pages: Mutex::default(), scratch });
        Ok(Self { stream, transfer, spare, pages: None })
    }

    /// Makes room for a prompt of so many bytes.
    pub(super) fn begin(&mut self, bytes: u64) -> Result<(), PeerError> {
        self.pages = None;
        let free =
            |pages: &mut Arc<DeviceBuffer>| pages.bytes() >= bytes && Arc::get_mut(pages).is_some();
        let mut spare = self.spare.pages.lock();
        self.pages = spare.iter_mut().find_map(|of| free(of).then(|| Arc::clone(of)));
        drop(spare);
        if self.pages.is_none() {
            let bytes = bytes.max(1).next_power_of_two();
            let pages = DeviceBuffer::alloc(self.stream.device(), bytes).map_err(failed)?;
            let pages = Arc::clone(self.pages.insert(Arc::new(pages)));
            let mut spare = self.spare.pages.lock();
            if spare.len() < SPARE_MAX {
                spare.push(pages);
            }
        }
        Ok(())
    }

    /// Takes the parts of the prompt that was begun, and says those that have come together.
    pub(super) fn wait(
        &mut self,
        (peer, pull): (&mut Peer, &mut Pull),
        form: Form,
        (call, until): (impl Fn() -> Instant, Instant),
        say: &mut dyn FnMut(Piece),
    ) -> Result<(), OfferError> {
        let Self { stream, transfer, spare, pages } = self;
        let Some(pages) = pages else { return Err(OfferError::Late { left: pull.left() }) };
        let bytes = form.block_bytes() as u64;
        let at = |place: usize| pages.span().slice(place as u64 * bytes, bytes);
        pull.wait_by(peer, until, |peer, parts, found| {
            let mut copied = Ok(());
            let mut each = |read: usize, from: DeviceSpan| {
                let Some(part) = parts.get(read) else { return };
                let to = at(part.place as usize);
                let copy = to.map_err(Into::into).and_then(|to| stream.copy_on_device(to, from));
                if let Err(error) = copy {
                    copied = Err(failed(error));
                }
            };
            let read = transfer.read_each(peer, found, call(), &mut each);
            // In any case: what has come is copied before the memory is used for something else.
            stream.synchronize().map_err(failed)?;
            read.and(copied)?;
            let sums = parts.iter().zip(&found.blocks);
            let sums = sums.map(|(part, located)| (part.place as usize, located.sum)).collect();
            // Whether they are right is seen where they are filled in, by their sums there.
            let blocks = Blocks { pages: Arc::clone(pages), sums, spare: Arc::clone(spare) };
            say(Piece::Device(blocks));
            Ok(vec![true; parts.len()])
        })
    }
}

fn failed(error: impl std::error::Error + Send + Sync + 'static) -> PeerError {
    let error = std::io::Error::other(error);
    PeerError::Io { operation: "reading another node's device", error }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use cuda_sim::{SimConfig, SimDriver};
    use kv_kernels::{KvShape, KvShapeOptions};
    use kv_manager::{GroupId, Request};

    use super::*;
    use crate::KvCacheOptions;

    #[test]
    fn blocks_are_copied_where_they_are_wanted_and_those_with_another_sum_are_not_right() {
        let sim = SimDriver::new(SimConfig::default()).unwrap();
        sim.register_kernels(&crate::references());
        let device = Device::open(Arc::new(sim), 0).unwrap();
        let on = Stream::new(&device).unwrap();
        let shape = KvShapeOptions { layers: 2, kv_count: 2, row_bytes: 32, block_tokens: 4 };
        let options = KvCacheOptions::new(KvShape::new(shape).unwrap(), 16);
        let mut cache = KvCache::new(std::slice::from_ref(&on), options).unwrap();
        let step = cache.begin_step().unwrap();
        let mut queue = [Request::new((0..16).collect())].into();
        let (_, sequence) = cache.admit(&mut queue, 16).unwrap().admitted.remove(0);
        cache.finish_step(step).unwrap();
        cache.drain().unwrap();
        let (copies, form) =
            (Copies::new(&cache).unwrap(), Form::new(&cache).unwrap().by_blocks().unwrap());
        let block_bytes = form.block_bytes();
        let pages = DeviceBuffer::alloc(&device, 4 * block_bytes as u64).unwrap();
        let scratch = DeviceBuffer::alloc(&device, SCRATCH).unwrap();
        let bytes: Vec<u8> = (0..4 * block_bytes).map(|at| (at / 7) as u8).collect();
        on.upload(pages.span(), &bytes).unwrap();
        let block = |place: usize| sequence.block(GroupId(0), place).unwrap();
        let spare = Arc::new(Spare { pages: Mutex::default(), scratch });
        let pages = Arc::new(pages);
        let blocks = |sums| Blocks { pages: Arc::clone(&pages), sums, spare: Arc::clone(&spare) };
        // What they sum up to is found by filling in each.
        let all = |place: usize| Some((10 + place, block(place)));
        let with = (&cache, &copies);
        blocks((0..4).map(|place| (place, 0)).collect()).fill(with, form, all).unwrap();
        let out = DeviceBuffer::alloc(&device, 4 * block_bytes as u64).unwrap();
        let to = |place: usize| {
            let bytes = block_bytes as u64;
            (block(place), out.span().slice(place as u64 * bytes, bytes).unwrap())
        };
        let pairs: Vec<_> = (0..4).map(to).collect();
        let sums = copies.beside(&cache, &pairs, true, spare.scratch.span()).unwrap();
        let mut read = vec![0; 4 * block_bytes];
        on.download(&mut read, out.span()).unwrap();
        assert_eq!(read, bytes, "they went in and out again");
        // The second one is cached, and the third one came wrong.
        let sums = vec![(0, sums[0]), (1, 0), (2, sums[2] ^ 1), (3, sums[3])];
        let some = |place: usize| all(place).filter(|_| place != 1);
        let right = blocks(sums).fill(with, form, some).unwrap();
        assert_eq!(right, [10, 13]);
    }
}
