//! Blocks that go from the device of one node to the device of another, by NIXL: neither host sees them. Each block is summed where it
//! is read and where it has come, by the kernel that sums blocks.

use std::sync::Arc;
use std::time::Instant;

use cuda_driver::guard;
use cuda_driver::{Device, DeviceBuffer, DeviceSpan, Stream};
use kv_nixl::{Library, NixlDeviceMemory, NixlDeviceTransfer, NixlError};
use kv_plane::manager::GroupId;
use kv_pool::BlockId;
use kv_remote::handover::{HandoverError, Offer, Part, Pull};
use kv_remote::{Peer, PeerError};
use parking_lot::Mutex;

use super::Form;
use super::prefill::GiveError;
use crate::engine::RunError;
use crate::engine::cache::Local;
use crate::nodes::NodeStartError;

const SUMS: usize = 1024;

fn nixl(error: impl Into<NixlError>) -> RunError {
    NodeStartError::from(error.into()).into()
}

#[derive(Debug)]
pub(super) struct Giving {
    memory: Arc<NixlDeviceMemory>,
    scratch: DeviceBuffer,
}

impl Giving {
    pub(super) fn new(memory: Arc<NixlDeviceMemory>, device: &Device) -> Result<Self, RunError> {
        let scratch = DeviceBuffer::alloc(device, 12 * SUMS as u64).map_err(nixl)?;
        Ok(Self { memory, scratch })
    }

    /// Copies blocks to the node's memory, and gives them.
    pub(super) fn give(
        &self,
        (cache, on): (&Local, &Stream),
        offer: &mut Offer,
        blocks: &[(u64, BlockId)],
    ) -> Result<(), GiveError> {
        for blocks in blocks.chunks(SUMS) {
            let part = |&(place, _): &(u64, BlockId)| Part {
                group: GroupId(0),
                place: place as u32,
                layer: 0,
                shard: 0,
            };
            let parts: Vec<_> = blocks.iter().map(part).collect();
            let room = offer.reserve(&parts)?;
            let copied = room.spans().zip(blocks).try_for_each(|(span, &(_, id))| {
                let to = self.memory.span(span).ok_or(RunError::HandoverElsewhere)?;
                cache.copy_out(on, id, to)
            });
            let ids: Vec<_> = blocks.iter().map(|&(_, id)| id).collect();
            // Waits for the copies, also where one was refused: the room is given to others when it is dropped.
            let sums = cache.sums(on, &ids, self.scratch.span());
            copied?;
            offer.give_written(room, &sums?)?;
        }
        Ok(())
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

    /// Copies these to blocks, as far as `block_of` names one for a place, and a number for it. The numbers of those that are
    /// right.
    pub(super) fn fill(
        &self,
        (cache, on): (&Local, &Stream),
        form: Form,
        block_of: impl Fn(usize) -> Option<(usize, BlockId)>,
    ) -> Result<Vec<usize>, RunError> {
        let bytes = form.block_bytes() as u64;
        let mut right = Vec::new();
        for sums in self.sums.chunks(SUMS) {
            let to = |&(place, sum): &(usize, u64)| Some((place, sum, block_of(place)?));
            let blocks: Vec<_> = sums.iter().filter_map(to).collect();
            for &(place, _, (_, id)) in &blocks {
                let from = self.pages.span().slice(place as u64 * bytes, bytes);
                cache.copy_in(on, id, from.map_err(|error| RunError::BlockCopy(error.into()))?)?;
            }
            let ids: Vec<_> = blocks.iter().map(|&(.., (_, id))| id).collect();
            if ids.is_empty() {
                continue;
            }
            // The sums wait for the copies: the pages may be used again.
            let here = cache.sums(on, &ids, self.spare.scratch.span())?;
            let same = blocks.iter().zip(here).filter(|((_, there, _), here)| {
                guard!("replay.device-copies-by-sum", there == here, else true)
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
}

impl Taking {
    pub(super) fn new(device: &Device) -> Result<Self, NodeStartError> {
        let stream = Stream::new(device).map_err(NixlError::from)?;
        let transfer = NixlDeviceTransfer::new(Library::open()?, &stream);
        let scratch = DeviceBuffer::alloc(device, 12 * SUMS as u64).map_err(NixlError::from)?;
        let spare = Arc::new(Spare { pages: Mutex::default(), scratch });
        Ok(Self { stream, transfer, spare })
    }

    fn pages(&self, bytes: u64) -> Result<Arc<DeviceBuffer>, PeerError> {
        let free =
            |pages: &mut Arc<DeviceBuffer>| pages.bytes() >= bytes && Arc::get_mut(pages).is_some();
        let mut spare = self.spare.pages.lock();
        if let Some(pages) = spare.iter_mut().find_map(|of| free(of).then(|| Arc::clone(of))) {
            return Ok(pages);
        }
        drop(spare);
        let bytes = bytes.max(1).next_power_of_two();
        let pages = DeviceBuffer::alloc(self.stream.device(), bytes).map_err(failed)?;
        let pages = Arc::new(pages);
        let mut spare = self.spare.pages.lock();
        if spare.len() < SPARE_MAX {
            spare.push(Arc::clone(&pages));
        }
        Ok(pages)
    }

    /// Takes all parts of a prompt, and says those that have come together.
    pub(super) fn wait(
        &mut self,
        (peer, pull): (&mut Peer, &mut Pull),
        form: Form,
        (call, until): (impl Fn() -> Instant, Instant),
        mut say: impl FnMut(Blocks),
    ) -> Result<(), HandoverError> {
        let (count, bytes) = (pull.left(), form.block_bytes() as u64);
        let pages = self.pages(count as u64 * bytes)?;
        let at = |place: usize| pages.span().slice(place as u64 * bytes, bytes);
        pull.wait_by(peer, until, |peer, parts, found| {
            let mut copied = Ok(());
            let mut each = |read: usize, from: DeviceSpan| {
                let Some(part) = parts.get(read) else { return };
                let to = at(part.place as usize);
                let copy =
                    to.map_err(Into::into).and_then(|to| self.stream.copy_on_device(to, from));
                if let Err(error) = copy {
                    copied = Err(failed(error));
                }
            };
            let read = self.transfer.read_each(peer, found, call(), &mut each);
            // In any case: what has come is copied before the memory is used for something else.
            self.stream.synchronize().map_err(failed)?;
            read.and(copied)?;
            let sums = parts.iter().zip(&found.blocks);
            let sums = sums.map(|(part, located)| (part.place as usize, located.sum)).collect();
            // Whether they are right is seen where they are filled in, by their sums there.
            say(Blocks { pages: Arc::clone(&pages), sums, spare: Arc::clone(&self.spare) });
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

    use super::*;
    use crate::device::{SimSizes, open};
    use crate::engine::build_cache;
    use crate::engine::cache::Cache as _;
    use crate::engine::handover::tests::{config, request};
    use crate::nodes::{NodeConfig, NodeTransfer};
    use crate::trace::Trace;

    #[test]
    fn blocks_are_copied_where_they_are_wanted_and_those_with_another_sum_are_not_right() {
        let config = config(16, 2);
        let key = kv_remote::Key::new(&[7; 32]).unwrap();
        let mut node = NodeConfig::new(1, 2, std::path::Path::new(""), key, 0);
        node.transfer = NodeTransfer::NixlDevice;
        let devices = open(&"sim".parse().unwrap(), SimSizes::for_config(&config)).unwrap();
        let device = &devices.devices[0];
        let cache =
            build_cache(&config, &Trace::new(vec![request((4, 0), 1, 0)]), &devices).unwrap();
        let mut cache = Local::new(cache).unwrap();
        let step = cache.begin_step().unwrap();
        let names = (1..=4).map(kv_pool::BlockHash::from_u128).collect();
        let mut queue = [(0, kv_plane::Request::named(256, names))].into();
        let (_, sequence) = cache.admit(&mut queue, u64::MAX).unwrap().admitted.remove(0);
        cache.finish_step(step).unwrap();
        cache.drain().unwrap();
        let form = Form::new(&config, &node, cache.manager().formats()[0]).unwrap();
        let on = Stream::new(device).unwrap();
        let pages = DeviceBuffer::alloc(device, 4 * form.block_bytes() as u64).unwrap();
        let scratch = DeviceBuffer::alloc(device, 12 * SUMS as u64).unwrap();
        let bytes: Vec<u8> = (0..4 * form.block_bytes()).map(|at| (at / 7) as u8).collect();
        on.upload(pages.span(), &bytes).unwrap();
        let block = |place: usize| sequence.block(place).unwrap();
        let (spare, pages) =
            (Arc::new(Spare { pages: Mutex::default(), scratch }), Arc::new(pages));
        let blocks = |sums| Blocks { pages: Arc::clone(&pages), sums, spare: Arc::clone(&spare) };
        // What they sum up to is found by filling in each.
        let all = |place: usize| Some((10 + place, block(place)));
        blocks((0..4).map(|place| (place, 0)).collect()).fill((&cache, &on), form, all).unwrap();
        let ids: Vec<_> = (0..4).map(block).collect();
        let sums = cache.sums(&on, &ids, spare.scratch.span()).unwrap();
        let mut read = vec![0; form.block_bytes()];
        for (place, bytes) in bytes.chunks(form.block_bytes()).enumerate() {
            cache.read_block(&on, block(place), &mut read).unwrap();
            assert_eq!(read, bytes);
        }
        // The second one is cached, and the third one came wrong.
        let sums = vec![(0, sums[0]), (1, 0), (2, sums[2] ^ 1), (3, sums[3])];
        let some = |place: usize| all(place).filter(|_| place != 1);
        let right = blocks(sums).fill((&cache, &on), form, some).unwrap();
        assert_eq!(right, [10, 13]);
    }
}
