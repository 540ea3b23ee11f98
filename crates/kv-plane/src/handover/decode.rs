//! The side that goes on: adopts prompts that others compute as soon as they are offered, fills their
//! blocks as the parts come, and computes itself what does not come.

use std::collections::BTreeMap;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use cuda_driver::guard;
use kv_manager::{Adoption, Answer, GroupId, Request, Sequence, SequenceError};
use kv_pool::BlockId;
use kv_remote::handover::HandoverError as OfferError;
use kv_remote::{Key, Member, Transfer};

use super::form::{Copies, Form};
use super::source::{Bytes, Order, Piece, Room, Said, Source, Taking, Wanted, Word};
use super::{HandoverError, HandoverId};
use crate::KvCache;

/// A node that computes prompts, as [`Decode::add`] has numbered it.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct SourceId(pub(super) usize);

/// How far a prompt that is wanted has come.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Coming {
    /// It is not offered yet, or has given its blocks back since: its request is not to be admitted
    /// before all of it has come.
    Far,
    /// It is being computed: its request may be [adopted](Decode::adopt), and its blocks are filled as
    /// they come.
    Offered,
    /// All of it has come.
    Whole,
    /// No more of it comes, and its sequence has not gone on yet.
    Failed,
}

/// What has come of prompts that are wanted.
#[derive(Debug)]
#[non_exhaustive]
#[allow(clippy::large_enum_variant, reason = "it is taken apart at once")]
pub enum Came {
    /// All of it has come, so long after it was wanted. A request that was not adopted yet is to be.
    Whole(Duration),
    /// The sequence goes on: all of it has come that comes, and it computes what is left.
    Ready {
        /// The sequence.
        sequence: Sequence,
        /// Where its KV ends; or what else its next call would say, such as that a step has failed that
        /// wrote some of it.
        end: Result<u64, SequenceError>,
    },
    /// It does not come. A request that was not adopted is admitted as any other; a sequence that was, is
    /// [`Ready`](Self::Ready) in this call or a later one, with what has come.
    Failed(OfferError),
}

/// What came of a request that was to be adopted.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "an answer is taken apart at once")]
pub enum Adopted {
    /// It has blocks, which are filled: a later [`Decode::poll`] answers [`Came::Ready`].
    Filling,
    /// All of its prompt is cached here: it goes on at once, and nothing more is taken of it.
    Cached(Sequence),
    /// It was not admitted. The request is as it was.
    Not(Answer),
    /// It cannot be adopted now: it is [far](Coming::Far), or was adopted already. It is not to be
    /// admitted either. The request is as it was.
    Later,
    /// Nothing comes of it: it is admitted as any other. The request is as it was.
    Here,
}

/// Counts of what was taken.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct DecodeStats {
    /// Prompts that have come.
    pub whole: u64,
    /// Their blocks, the partly full ones included.
    pub blocks: u64,
    /// Bytes of these.
    pub bytes: u64,
    /// Prompts that did not come.
    pub failed: u64,
    /// Prompts that were not wanted any more before they had come.
    pub cancelled: u64,
    /// Blocks of prompts that have come that were not right, by their sums, and those behind them.
    pub blocks_wrong: u64,
    /// Layers of blocks, or from device to device blocks, that were in place before all of their prompt
    /// had come.
    pub early_parts: u64,
}

/// A prompt that is wanted.
#[derive(Debug)]
struct Prompt {
    coming: Coming,
    tokens: u64,
    /// What is offered.
    content: u128,
    form: Form,
    number: u64,
    /// Of the cache's names when it was wanted.
    generation: u64,
    /// What has come. It is kept until the sequence goes on, which may have to give its blocks back
    /// before.
    pieces: Vec<Piece>,
    filling: Option<Filling>,
    /// Its thread is told when this is dropped.
    wanted: Wanted,
}

/// A sequence whose blocks are filled.
#[derive(Debug)]
struct Filling {
    sequence: Sequence,
    adoption: Adoption,
    /// The last step that was staged before it was admitted. The next one scrubs its blocks, and copies
    /// what they held: they may be written when that is complete.
    after: u64,
    /// The blocks, each with its place, in the order of the places.
    blocks: Vec<(usize, BlockId)>,
    /// Layers of each that are in place.
    layers: Vec<u32>,
    /// Pieces that were looked at.
    taken: usize,
}

impl Filling {
    fn new(sequence: Sequence, adoption: Adoption, after: u64) -> Self {
        let blocks: Vec<_> = adoption.blocks(GroupId(0)).collect();
        let layers = vec![0; blocks.len()];
        Self { sequence, adoption, after, blocks, layers, taken: 0 }
    }

    /// Whether its blocks are written by nobody else.
    fn is_at_rest(&self, cache: &KvCache) -> bool {
        let completed = cache.manager().completed_step();
        guard!("handover.filled-behind-copies", completed > self.after, else true)
    }

    /// Where a place is among the blocks, and its block; none if it is cached here.
    fn at(&self, place: usize) -> Option<(usize, BlockId)> {
        let at = self.blocks.binary_search_by_key(&place, |(place, _)| *place).ok()?;
        Some((at, self.blocks.get(at)?.1))
    }

    /// Writes the pieces that were not looked at; how many parts these are.
    fn fill(
        &mut self,
        (cache, copies): (&KvCache, &Copies),
        form: Form,
        pieces: &[Piece],
    ) -> Result<u64, HandoverError> {
        let mut parts = 0;
        for piece in pieces.get(self.taken..).unwrap_or_default() {
            match piece {
                Piece::Host(Bytes { place, from, bytes }) => {
                    if let Some((at, id)) = self.at(*place) {
                        copies.write(cache, (id, *from), bytes)?;
                        let count = form.layers_of(bytes.len());
                        self.layers[at] += count;
                        parts += u64::from(count);
                    }
                }
                #[cfg(feature = "nixl")]
                Piece::Device(blocks) => {
                    for at in blocks.fill((cache, copies), form, |place| self.at(place))? {
                        self.layers[at] = form.layers;
                        parts += u64::from(form.layers);
                    }
                }
            }
            self.taken += 1;
        }
        Ok(parts)
    }

    /// How many of the first blocks are right.
    fn right(&self, form: Form) -> usize {
        let all = form.layers;
        let whole =
            |of: &&u32| guard!("handover.partly-come-is-wrong", **of == all, else **of <= all);
        self.layers.iter().take_while(whole).count()
    }

    /// Ends it with what is right, which stays cached.
    fn end(self, cache: &mut KvCache, form: Form) -> (Sequence, Result<u64, SequenceError>) {
        let right = self.right(form);
        let Self { mut sequence, adoption, .. } = self;
        let end = cache.adopted(&mut sequence, adoption, right);
        (sequence, end)
    }
}

/// The prompts that others compute for a cache.
///
/// A thread for each node takes prompts from it, one behind the other. It ends when this is dropped, and
/// no hand-over is waited for then; nodes are told that what had not come is not wanted.
///
/// # Ordering
/// Blocks of an adopted request are written when the step that is staged after its admission is complete,
/// by copies that the host waits for, on a stream of their own beside the steps.
///
/// # Memory
/// What comes is kept beside the cache until its sequence goes on, which may have to give its blocks back
/// before. Where that is as much as the cache has blocks for, no further prompt is begun: it stays with
/// its node, whose engine sees that by [`Prefill::open`](super::Prefill::open), and its time passes.
#[derive(Debug)]
pub struct Decode {
    key: Key,
    lasts: Duration,
    form: Form,
    /// Of the cache.
    blocks: u64,
    copies: Copies,
    room: Room,
    sources: Vec<(Form, Sender<Order>)>,
    /// The threads' end of the next.
    say: Sender<Said>,
    said: Receiver<Said>,
    orders: u64,
    prompts: BTreeMap<HandoverId, Prompt>,
    came: Vec<(HandoverId, Came)>,
    stats: DecodeStats,
    /// Of the cache's names, as it was seen last.
    generation: u64,
}

impl Decode {
    /// Takes prompts for `cache` from nodes that have `key`, and waits for each so long at most, from
    /// when those before it have come from its node.
    ///
    /// # Errors
    /// [`HandoverError`] for a cache that hands nothing over.
    pub fn new(cache: &KvCache, key: Key, lasts: Duration) -> Result<Self, HandoverError> {
        let (say, said) = mpsc::channel();
        let (copies, form) = (Copies::new(cache)?, Form::new(cache)?);
        let blocks = copies.part(cache)?.paged().blocks();
        Ok(Self {
            key,
            lasts,
            form,
            blocks,
            copies,
            room: Room::new(blocks.saturating_mul(form.block_bytes() as u64)),
            sources: Vec::new(),
            say,
            said,
            orders: 0,
            prompts: BTreeMap::new(),
            came: Vec::new(),
            stats: DecodeStats::default(),
            generation: cache.manager().generation(),
        })
    }

    /// Adds a node that computes prompts, whose bytes come by `transfer`, and starts its thread. Nothing
    /// is asked of the node before a prompt is wanted from it.
    ///
    /// # Errors
    /// [`HandoverError`].
    pub fn add(
        &mut self,
        member: Member,
        transfer: Box<dyn Transfer>,
    ) -> Result<SourceId, HandoverError> {
        self.start(member, Taking::Host(transfer), self.form)
    }

    /// The same with the bytes coming from the memory of the node's [device](super::Prefill::on_device)
    /// to that of this one.
    ///
    /// # Errors
    /// [`HandoverError`].
    #[cfg(feature = "nixl")]
    pub fn add_on_device(
        &mut self,
        member: Member,
        library: kv_nixl::Library,
    ) -> Result<SourceId, HandoverError> {
        let taking = super::on_device::Taking::new(library, self.copies.device())?;
        self.start(member, Taking::Device(Box::new(taking)), self.form.by_blocks()?)
    }

    fn start(
        &mut self,
        member: Member,
        taking: Taking,
        form: Form,
    ) -> Result<SourceId, HandoverError> {
        let (orders, received) = mpsc::channel();
        let number = self.sources.len();
        let limits = (self.lasts, self.room.clone());
        let source = Source::new((member, self.key.clone()), (taking, form), limits);
        let say = self.say.clone();
        let thread = std::thread::Builder::new().name(format!("handover-{number}"));
        thread.spawn(move || source.run(&received, &say))?;
        self.sources.push((form, orders));
        Ok(SourceId(number))
    }

    /// Asks a node for a prompt of so many tokens, which it computes.
    ///
    /// # Errors
    /// [`HandoverError::NoSource`], [`HandoverError::Again`], [`HandoverError::TooLong`]; the request is
    /// admitted, or refused, as any other.
    pub fn want(
        &mut self,
        id: HandoverId,
        from: SourceId,
        tokens: u64,
    ) -> Result<(), HandoverError> {
        if self.prompts.contains_key(&id) {
            return Err(HandoverError::Again { id });
        }
        let no_source = HandoverError::NoSource { from };
        let Some((form, orders)) = self.sources.get(from.0) else { return Err(no_source) };
        if form.blocks(tokens) > self.blocks {
            let (blocks, block_tokens) = (self.blocks, form.format.block_tokens);
            return Err(HandoverError::TooLong { tokens, blocks, block_tokens });
        }
        self.orders += 1;
        let (number, wanted) = (self.orders, Wanted::default());
        let (sheet, since, watch) = (form.sheet(tokens, 0), Instant::now(), wanted.watch());
        let order = Order { id, number, sheet, since, watch };
        if orders.send(order).is_err() {
            return Err(no_source);
        }
        let prompt = Prompt {
            coming: Coming::Far,
            tokens,
            content: 0,
            form: *form,
            number,
            generation: self.generation,
            pieces: Vec::new(),
            filling: None,
            wanted,
        };
        self.prompts.insert(id, prompt);
        Ok(())
    }

    /// How far a prompt has come, as [`poll`](Self::poll) has heard. None if nothing comes of it, or no
    /// more: its request is admitted as any other, or has gone on.
    #[must_use]
    pub fn coming(&self, id: HandoverId) -> Option<Coming> {
        Some(self.prompts.get(&id)?.coming)
    }

    /// Whether prompts are wanted that have not gone on.
    #[must_use]
    pub fn waits(&self) -> bool {
        !self.prompts.is_empty()
    }

    /// Whether sequences have blocks here that are being filled.
    #[must_use]
    pub fn fills(&self) -> bool {
        self.prompts.values().any(|prompt| prompt.filling.is_some())
    }

    /// Counts so far.
    #[must_use]
    pub fn stats(&self) -> DecodeStats {
        self.stats
    }

    /// Admits the request of a prompt that is [offered](Coming::Offered) or has [come](Coming::Whole),
    /// with blocks for all of it, which are filled but for what is cached here. Of a prompt that is another
    /// one than the request's, nothing is taken: the sequence is [`Ready`](Came::Ready) with what is cached
    /// here. Which of those that wait
    /// get room, and whether one that is only offered is to have any while others lack it, is the
    /// engine's choice.
    ///
    /// # Errors
    /// [`HandoverError::Memory`] if memory could not be mapped though some is left, and
    /// [`HandoverError::OtherCache`]; nothing was admitted then.
    pub fn adopt(
        &mut self,
        cache: &mut KvCache,
        id: HandoverId,
        request: &mut Request,
    ) -> Result<Adopted, HandoverError> {
        self.notice_reset(cache)?;
        let Some(prompt) = self.prompts.get_mut(&id) else { return Ok(Adopted::Here) };
        if !prompt.is_adoptable() {
            return Ok(Adopted::Later);
        }
        // What a longer request has behind the prompt is in none of the blocks that come.
        let wanted = request.tokens().min(prompt.tokens);
        let tokens = guard!("handover.ends-with-its-prompt", wanted, else request.tokens());
        let there = cache.manager().formats();
        let (answer, adoption) = cache.adopt(request, tokens, &there)?;
        let Answer::Admitted(sequence) = answer else { return Ok(Adopted::Not(answer)) };
        let Some(adoption) = adoption else {
            self.cancel(id);
            return Ok(Adopted::Cached(sequence));
        };
        let after = cache.manager().last_plan().step;
        let is_its = sequence.fingerprint(prompt.tokens) == prompt.content;
        if !guard!("handover.takes-its-own-prompt", is_its, else true) {
            prompt.give_up();
            self.stats.failed += 1;
        }
        prompt.filling = Some(Filling::new(sequence, adoption, after));
        Ok(Adopted::Filling)
    }

    /// Forgets a prompt whose request is over, whose blocks are released; the node is told.
    pub fn cancel(&mut self, id: HandoverId) {
        let prompt = self.prompts.remove(&id);
        let is_open = |prompt: Prompt| matches!(prompt.coming, Coming::Far | Coming::Offered);
        self.stats.cancelled += u64::from(prompt.is_some_and(is_open));
    }

    /// Hears what has come, fills the blocks of adopted requests, and answers what is new. To be called
    /// in each iteration, behind [`begin_step`](KvCache::begin_step).
    ///
    /// What was wanted before the cache was [reset](KvCache::reset) and not adopted fails in the next call:
    /// it was computed by the model of before. Want it again behind that call, under another number.
    ///
    /// # Errors
    /// [`HandoverError::OtherCache`]. Another [`HandoverError`] if a block could not be written, which is
    /// tried again by the next call; that answers what this one has heard, too.
    pub fn poll(&mut self, cache: &mut KvCache) -> Result<Vec<(HandoverId, Came)>, HandoverError> {
        self.notice_reset(cache)?;
        self.hear();
        self.fill(cache)?;
        Ok(std::mem::take(&mut self.came))
    }

    /// Has all fail that was wanted before the cache was reset: nothing of it may get names of now. A
    /// sequence that was adopted before names nothing any more, and goes on.
    fn notice_reset(&mut self, cache: &KvCache) -> Result<(), HandoverError> {
        self.copies.part(cache)?;
        let generation = cache.manager().generation();
        self.generation = guard!("handover.nothing-of-before-a-reset", generation, else 0);
        let late =
            |prompt: &Prompt| prompt.generation != self.generation && prompt.filling.is_none();
        let before: Vec<_> =
            self.prompts.iter().filter(|(_, prompt)| late(prompt)).map(|(&id, _)| id).collect();
        before.into_iter().for_each(|id| self.withdraw(id));
        Ok(())
    }

    /// Forgets a prompt of a model that is there no more; the node is told.
    fn withdraw(&mut self, id: HandoverId) {
        self.prompts.remove(&id);
        self.stats.failed += 1;
        self.came.push((id, Came::Failed(OfferError::Withdrawn)));
    }

    fn hear(&mut self) {
        for Said { id, number, word } in self.said.try_iter() {
            // Of others, nobody wants to know any more.
            let prompt = self.prompts.get_mut(&id);
            let prompt = prompt.filter(|prompt| {
                let is_of = prompt.number == number;
                guard!("handover.words-are-of-their-order", is_of, else true)
            });
            let Some(prompt) = prompt else { continue };
            match word {
                Word::Offered(content) => {
                    (prompt.coming, prompt.content) = (Coming::Offered, content);
                }
                Word::Part(piece) => prompt.pieces.push(piece),
                Word::Whole(time) => {
                    prompt.coming = Coming::Whole;
                    let (form, pieces) = (prompt.form, prompt.pieces.iter());
                    let parts: u64 = pieces.map(|piece| piece.parts(form)).sum();
                    self.stats.whole += 1;
                    self.stats.blocks += parts / u64::from(form.layers);
                    self.stats.bytes += parts * u64::from(form.part_bytes);
                    self.came.push((id, Came::Whole(time)));
                }
                Word::Failed(error) => {
                    prompt.coming = Coming::Failed;
                    if prompt.filling.is_none() {
                        self.prompts.remove(&id);
                    }
                    self.stats.failed += 1;
                    self.came.push((id, Came::Failed(error)));
                }
            }
        }
    }

    /// Fills each, whatever has become of the others.
    fn fill(&mut self, cache: &mut KvCache) -> Result<(), HandoverError> {
        let mut filled = Ok(());
        for id in self.prompts.keys().copied().collect::<Vec<_>>() {
            filled = filled.and(self.fill_prompt(cache, id));
        }
        filled
    }

    fn fill_prompt(&mut self, cache: &mut KvCache, id: HandoverId) -> Result<(), HandoverError> {
        let Some(prompt) = self.prompts.get_mut(&id) else { return Ok(()) };
        let Prompt { coming, form, pieces, filling, .. } = prompt;
        let at_rest = filling.as_mut().filter(|filling| filling.is_at_rest(cache));
        let Some(filling) = at_rest else { return Ok(()) };
        let parts = filling.fill((cache, &self.copies), *form, pieces)?;
        match coming {
            Coming::Far => return Ok(()),
            Coming::Offered => {
                self.stats.early_parts += parts;
                return Ok(());
            }
            Coming::Whole => {
                let wrong = filling.blocks.len() - filling.right(*form);
                self.stats.blocks_wrong += wrong as u64;
            }
            Coming::Failed => {}
        }
        let Some(Prompt { form, filling: Some(filling), .. }) = self.prompts.remove(&id) else {
            return Ok(());
        };
        let (sequence, end) = filling.end(cache, form);
        self.came.push((id, Came::Ready { sequence, end }));
        Ok(())
    }

    /// Takes the blocks of the request that was adopted last, of those that others still compute: for a
    /// request that lacks them and can go on. What of them is right stays cached. The sequence, which is
    /// dropped or suspended, is of a request that is adopted again when all has come, so that it gives
    /// way once.
    pub fn give_way(&mut self, cache: &mut KvCache) -> Option<(HandoverId, Sequence)> {
        self.copies.part(cache).ok()?;
        let offered = self.prompts.iter_mut().filter(|(_, of)| of.coming == Coming::Offered);
        let filled = offered.filter_map(|(id, prompt)| {
            let after = prompt.filling.as_ref()?.after;
            Some(((after, *id), prompt))
        });
        let ((_, id), prompt) = filled.max_by_key(|(last, _)| *last)?;
        let filling = prompt.filling.take()?;
        guard!("handover.gives-way-once", prompt.coming = Coming::Far);
        let is_late = prompt.generation != cache.manager().generation();
        let (sequence, _) = filling.end(cache, prompt.form);
        if is_late {
            self.withdraw(id);
        }
        Some((id, sequence))
    }
}

impl Prompt {
    /// Takes no more of it, and nothing that has come; the node is told.
    fn give_up(&mut self) {
        self.coming = Coming::Failed;
        // No order has this number: what its thread says from now on is nobody's.
        self.number = 0;
        self.pieces.clear();
        drop(std::mem::take(&mut self.wanted));
    }

    fn is_adoptable(&self) -> bool {
        self.filling.is_none() && matches!(self.coming, Coming::Offered | Coming::Whole)
    }
}

impl Piece {
    /// Layers of it.
    fn parts(&self, form: Form) -> u64 {
        match self {
            Self::Host(bytes) => form.layers_of(bytes.bytes.len()).into(),
            #[cfg(feature = "nixl")]
            Self::Device(blocks) => blocks.count() as u64 * u64::from(form.layers),
        }
    }
}
