//! The side that computes: gives blocks as steps complete, and hears what has become of them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use cuda_driver::guard;
use kv_manager::{GroupId, Sequence};
use kv_pool::BlockId;
use kv_remote::Node;
use kv_remote::handover::{HandoverError as OfferError, Offer, Part, Verdict};

use super::form::{Copies, Form};
use super::{HandoverError, HandoverId};
use crate::KvCache;

/// How an offered sequence has ended.
#[derive(Debug)]
#[non_exhaustive]
pub enum Ended {
    /// The other side has all of it.
    Taken,
    /// The other side does not want it any more.
    Cancelled,
    /// Its time was over. The other side may be gone, or may have taken it and not have been heard.
    Expired,
    /// It could not be offered or given, such as for want of room at the node. The other side computes
    /// it.
    Failed(OfferError),
}

/// Counts of what was offered.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct PrefillStats {
    /// Sequences that the other side has taken.
    pub taken: u64,
    /// Sequences that were cancelled, by either side.
    pub cancelled: u64,
    /// Sequences that could not be offered or given, or whose time was over.
    pub failed: u64,
    /// Blocks given, the partly full ones included.
    pub blocks: u64,
    /// Bytes of these.
    pub bytes: u64,
}

/// A sequence that is offered.
#[derive(Debug)]
struct Open {
    /// None once it has ended.
    offer: Option<Offer>,
    tokens: u64,
    /// Of its names.
    generation: u64,
    /// Blocks.
    given: usize,
    /// Nothing more is given of it.
    is_finished: bool,
}

/// What blocks are copied to.
#[derive(Debug)]
enum Way {
    /// Room for one of them.
    Host(Vec<u8>),
    #[cfg(feature = "nixl")]
    Device(super::on_device::Giving),
}

impl Way {
    /// Blocks that are given at a time, at most.
    fn at_once(&self) -> usize {
        match self {
            Self::Host(_) => 1,
            #[cfg(feature = "nixl")]
            Self::Device(_) => super::on_device::SUMS,
        }
    }
}

/// The sequences that a cache computes for others.
///
/// Bytes of blocks are copied to the node's memory, from which the other side reads them: the blocks
/// themselves are the cache's own again with [`finish`](Self::finish), and the node's memory when the
/// hand-over has [ended](Ended). Dropping it withdraws all that has not. What sequences from before a
/// [reset](KvCache::reset) hold is of another model than the other side goes on with: it is withdrawn by
/// the next call that is given the cache.
///
/// # Ordering
/// Only what all workers have completed writing is given
/// ([`Manager::written`](kv_manager::Manager::written)). The host waits for copies, which run on a stream
/// of their own beside the steps.
#[derive(Debug)]
pub struct Prefill {
    node: Arc<Node>,
    way: Way,
    copies: Copies,
    form: Form,
    lasts: Duration,
    open: BTreeMap<HandoverId, Open>,
    ended: Vec<(HandoverId, Ended)>,
    stats: PrefillStats,
}

impl Prefill {
    /// Offers sequences of `cache` in the memory of `node`, each for so long, or for the longest lease of
    /// the node if that is shorter. The node keeps records of at least a layer of a block. A prompt takes a
    /// slot for each layer of each block, and one for each record that its sheet fills, by 4 bytes a block;
    /// all together have seven eighths of the slots.
    ///
    /// # Errors
    /// [`HandoverError`] for a cache that hands nothing over.
    pub fn new(cache: &KvCache, node: Arc<Node>, lasts: Duration) -> Result<Self, HandoverError> {
        Self::with((cache, Form::new(cache)?), node, lasts)
    }

    /// The same in the memory of a node that is a [`NixlDeviceMemory`](kv_nixl::NixlDeviceMemory) of the
    /// cache's device: blocks are copied there on the device, and read by the devices of others. The node
    /// keeps records of at least a block.
    ///
    /// # Errors
    /// [`HandoverError`].
    #[cfg(feature = "nixl")]
    pub fn on_device(
        cache: &KvCache,
        node: Arc<Node>,
        lasts: Duration,
    ) -> Result<Self, HandoverError> {
        let mut prefill = Self::with((cache, Form::new(cache)?.by_blocks()?), node, lasts)?;
        let giving = super::on_device::Giving::new(&prefill.node, prefill.copies.device())?;
        prefill.way = Way::Device(giving);
        Ok(prefill)
    }

    fn with(
        (cache, form): (&KvCache, Form),
        node: Arc<Node>,
        lasts: Duration,
    ) -> Result<Self, HandoverError> {
        let (record_bytes, bytes) = (node.record_bytes(), form.part_bytes);
        if record_bytes < u64::from(bytes) {
            return Err(HandoverError::Records { record_bytes, bytes });
        }
        let copies = Copies::new(cache)?;
        let (open, ended, stats) = (BTreeMap::new(), Vec::new(), PrefillStats::default());
        let way = Way::Host(vec![0; form.block_bytes()]);
        Ok(Self { node, way, copies, form, lasts, open, ended, stats })
    }

    /// Offers a sequence that was admitted: all tokens that it knows now, which are its prompt. The other
    /// side finds it from now on. One that is offered already, because it was admitted a second time,
    /// stays as it is.
    ///
    /// If there is no room for it, [`poll`](Self::poll) says so.
    pub fn offer(&mut self, id: HandoverId, sequence: &Sequence) {
        if self.open.contains_key(&id) {
            return;
        }
        let tokens = sequence.known();
        let sheet = self.form.sheet(tokens, sequence.fingerprint(tokens));
        let offer = Offer::new(&self.node, id, sheet, self.lasts);
        let offer = offer.map_err(|error| self.end(id, Ended::Failed(error))).ok();
        let generation = sequence.generation();
        self.open.insert(id, Open { offer, tokens, generation, given: 0, is_finished: false });
    }

    /// Gives the whole blocks of an offered sequence that steps have completed, and that were not given:
    /// the other side fills its own while the rest is computed. To be called in each iteration, behind
    /// [`begin_step`](KvCache::begin_step). Does nothing for a hand-over that has ended, or was not
    /// begun.
    ///
    /// # Errors
    /// [`HandoverError`] if blocks could not be copied.
    pub fn give(
        &mut self,
        cache: &KvCache,
        id: HandoverId,
        sequence: &mut Sequence,
    ) -> Result<(), HandoverError> {
        self.notice_reset(cache);
        let Some(open) = self.open.get(&id).filter(|open| open.offer.is_some()) else {
            return Ok(());
        };
        let full = self.form.full_blocks(cache.manager().written(sequence).min(open.tokens));
        let block = |place| Some((place, sequence.block(GroupId(0), place)?));
        let blocks: Vec<_> = (open.given..full).map_while(block).collect();
        self.give_blocks(cache, id, &blocks)
    }

    /// Takes a sequence whose prompt is computed, gives what is left of it, and releases its blocks;
    /// their content stays cached. Of a hand-over that has ended, or was not begun, nothing is given.
    ///
    /// # Errors
    /// [`HandoverError::Export`], with the sequence, such as while a step that writes it is not complete,
    /// or its ids are to come: finish it in a later iteration. Another [`HandoverError`] if blocks could
    /// not be copied; the hand-over is withdrawn then.
    pub fn finish(
        &mut self,
        cache: &mut KvCache,
        id: HandoverId,
        sequence: Sequence,
    ) -> Result<(), HandoverError> {
        let export = cache.export(sequence)?;
        self.notice_reset(cache);
        let Some(open) = self.open.get_mut(&id) else { return Ok(()) };
        open.is_finished = true;
        let places = open.given..self.form.blocks(open.tokens) as usize;
        let is_whole = export.tokens() >= open.tokens;
        if guard!("handover.what-lacks-tokens-is-withdrawn", !is_whole, else false) {
            if open.offer.take().is_some() {
                self.end(id, Ended::Failed(OfferError::Withdrawn));
            }
            self.forget_ended();
            return Ok(());
        }
        let blocks = export.blocks(GroupId(0)).iter();
        let blocks: Vec<_> = blocks.filter(|(place, _)| places.contains(place)).copied().collect();
        let given = self.give_blocks(cache, id, &blocks);
        if given.is_err() {
            self.cancel(id);
        }
        self.forget_ended();
        given
    }

    /// Copies blocks out of the cache, and gives them.
    fn give_blocks(
        &mut self,
        cache: &KvCache,
        id: HandoverId,
        blocks: &[(usize, BlockId)],
    ) -> Result<(), HandoverError> {
        let Some(open) = self.open.get_mut(&id) else { return Ok(()) };
        let Some(offer) = &mut open.offer else { return Ok(()) };
        for blocks in blocks.chunks(self.way.at_once()) {
            let with = (cache, &self.copies);
            let given = match &mut self.way {
                Way::Host(bytes) => give_by_layers(with, (self.form, bytes), offer, blocks),
                #[cfg(feature = "nixl")]
                Way::Device(giving) => giving.give(with, offer, blocks),
            };
            match given {
                Ok(()) => {
                    // They are given once, also where one behind them cannot be copied.
                    open.given = blocks.last().map_or(open.given, |(place, _)| place + 1);
                    self.stats.blocks += blocks.len() as u64;
                    self.stats.bytes += (blocks.len() * self.form.block_bytes()) as u64;
                }
                Err(NotGiven::Offer(error)) => {
                    open.offer = None;
                    self.end(id, Ended::Failed(error));
                    break;
                }
                Err(NotGiven::Copy(error)) => return Err(error),
            }
        }
        Ok(())
    }

    /// Withdraws a sequence, and forgets it: the other side computes it. Nothing is told of it any more.
    /// So it does if the sequence was not offered yet, and is not to be.
    pub fn cancel(&mut self, id: HandoverId) {
        match self.open.remove(&id) {
            Some(open) => self.stats.cancelled += u64::from(open.offer.is_some()),
            // If there is no room to say so, the other side waits until its deadline.
            None => {
                guard!("handover.who-waits-hears-of-a-cancel", drop(Offer::decline(&self.node, id)))
            }
        }
    }

    /// What has ended since the last call, each once. The node has its memory back. A sequence that is
    /// still computed is of no use to the other side any more: compute it to its end for the cache, or
    /// drop it and [`cancel`](Self::cancel) it.
    pub fn poll(&mut self, cache: &KvCache) -> Vec<(HandoverId, Ended)> {
        self.notice_reset(cache);
        let heard = self.open.iter_mut().filter_map(|(&id, open)| {
            let ended = match open.offer.as_mut()?.verdict() {
                Verdict::Waiting => return None,
                Verdict::Taken => Ended::Taken,
                Verdict::Cancelled => Ended::Cancelled,
                _ => Ended::Expired,
            };
            open.offer = None;
            Some((id, ended))
        });
        heard.collect::<Vec<_>>().into_iter().for_each(|(id, ended)| self.end(id, ended));
        self.forget_ended();
        std::mem::take(&mut self.ended)
    }

    /// Hand-overs that were begun and have not ended, or whose sequences are not finished. Where there
    /// are many, the other side is slower: admit no more.
    #[must_use]
    pub fn open(&self) -> usize {
        self.open.len()
    }

    /// Counts so far.
    #[must_use]
    pub fn stats(&self) -> PrefillStats {
        self.stats
    }

    /// Withdraws what the model of before computes. Of another cache's, nothing is known.
    fn notice_reset(&mut self, cache: &KvCache) {
        if self.copies.part(cache).is_err() {
            return;
        }
        let now = cache.manager().generation();
        let before = self.open.iter_mut().filter_map(|(&id, open)| {
            let late = open.offer.take_if(|_| {
                let of_before = open.generation != now;
                guard!("handover.nothing-leaves-of-before-a-reset", of_before, else false)
            });
            late.map(|_| id)
        });
        let before: Vec<_> = before.collect();
        before.into_iter().for_each(|id| self.end(id, Ended::Failed(OfferError::Withdrawn)));
    }

    fn end(&mut self, id: HandoverId, ended: Ended) {
        match ended {
            Ended::Taken => self.stats.taken += 1,
            Ended::Cancelled => self.stats.cancelled += 1,
            Ended::Expired | Ended::Failed(_) => self.stats.failed += 1,
        }
        self.ended.push((id, ended));
    }

    fn forget_ended(&mut self) {
        self.open.retain(|_, open| open.offer.is_some() || !open.is_finished);
    }
}

/// Why blocks were not given.
pub(super) enum NotGiven {
    /// The offer is of no use any more: there is no room for it, or its time is over.
    Offer(OfferError),
    Copy(HandoverError),
}

impl From<OfferError> for NotGiven {
    fn from(error: OfferError) -> Self {
        Self::Offer(error)
    }
}

impl From<HandoverError> for NotGiven {
    fn from(error: HandoverError) -> Self {
        Self::Copy(error)
    }
}

/// Gives blocks layer by layer, through memory of the host that has room for one.
fn give_by_layers(
    (cache, copies): (&KvCache, &Copies),
    (form, bytes): (Form, &mut [u8]),
    offer: &mut Offer,
    blocks: &[(usize, BlockId)],
) -> Result<(), NotGiven> {
    for &(place, id) in blocks {
        copies.read(cache, id, bytes)?;
        let layers = bytes.chunks(form.part_bytes as usize).zip(0..);
        let parts: Vec<_> = layers.map(|(bytes, layer)| (part(place, layer), bytes)).collect();
        offer.give(&parts)?;
    }
    Ok(())
}

/// A layer of a block.
pub(super) fn part(place: usize, layer: u32) -> Part {
    Part { group: GroupId(0), place: place as u32, layer, shard: 0 }
}
