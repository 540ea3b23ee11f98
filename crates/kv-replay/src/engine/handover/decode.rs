//! The side that goes on: adopts prompts that other nodes compute as soon as they are offered, fills their blocks as the parts
//! come, and computes itself what does not come.

use std::collections::BTreeMap;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use cuda_driver::guard;
use cuda_driver::{Device, Stream};
use kv_plane::Sequence;
use kv_plane::manager::{Adoption, GroupId};
use kv_pool::BlockId;

use super::pulling::{Bytes, Order, Piece, Puller, Word};
use super::{Form, whole_number};
use crate::engine::RunError;
use crate::engine::cache::Local;
use crate::nodes::{HandoverReport, NodeConfig, NodeStartError};

/// How far the way of a prompt is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Way {
    /// Its request is not admitted before all of it has come.
    Far,
    /// It is offered: its request may be admitted, and its blocks be filled as they come.
    Offered,
    /// All of it has come.
    Whole,
    Failed,
}

#[derive(Debug)]
struct Coming {
    way: Way,
    /// What has come. It is kept until the sequence goes on, which may have to give its blocks back before.
    pieces: Vec<Piece>,
    adopted: Option<Adopted>,
}

/// A sequence whose blocks are filled.
#[derive(Debug)]
struct Adopted {
    sequence: Sequence,
    adoption: Adoption,
    /// Its blocks may be written when this step is complete.
    step: u64,
    /// The blocks, each with its place, in the order of the places.
    blocks: Vec<(usize, BlockId)>,
    layers: Vec<u32>,
    taken: usize,
}

impl Adopted {
    fn new(sequence: Sequence, adoption: Adoption, step: u64) -> Self {
        let blocks: Vec<_> = adoption.blocks(GroupId(0)).collect();
        let layers = vec![0; blocks.len()];
        Self { sequence, adoption, step, blocks, layers, taken: 0 }
    }

    /// Where a place is among the blocks, and its block; none if it is cached here.
    fn at(&self, place: usize) -> Option<(usize, BlockId)> {
        let at = self.blocks.binary_search_by_key(&place, |(place, _)| *place).ok()?;
        Some((at, self.blocks.get(at)?.1))
    }

    /// Writes the pieces that were not looked at; how many parts these are.
    fn fill(
        &mut self,
        (cache, on): (&Local, &Stream),
        form: Form,
        pieces: &[Piece],
    ) -> Result<u64, RunError> {
        let mut parts = 0;
        for piece in pieces.get(self.taken..).unwrap_or_default() {
            self.taken += 1;
            match piece {
                Piece::Host(Bytes { place, from, bytes }) => {
                    let Some((at, id)) = self.at(*place) else { continue };
                    cache.write_block(on, (id, *from as u64), bytes)?;
                    let count = form.parts(bytes.len());
                    self.layers[at] += count;
                    parts += u64::from(count);
                }
                #[cfg(feature = "nixl")]
                Piece::Device(blocks) => {
                    for at in blocks.fill((cache, on), form, |place| self.at(place))? {
                        self.layers[at] = form.layers;
                        parts += u64::from(form.layers);
                    }
                }
            }
        }
        Ok(parts)
    }

    /// How many of the first blocks are right.
    fn right(&self, form: Form) -> usize {
        let whole = |layers: &u32| guard!("replay.partly-come-is-wrong", *layers == form.layers, else *layers <= form.layers);
        self.layers.iter().take_while(|layers| whole(layers)).count()
    }

    fn end(mut self, cache: &mut Local, form: Form) -> Result<Sequence, RunError> {
        let right = self.right(form);
        let adopted = cache.cache.adopted(&mut self.sequence, self.adoption, right);
        adopted.map_err(RunError::Adopted)?;
        Ok(self.sequence)
    }
}

#[derive(Debug)]
pub(in crate::engine) struct Decode {
    config: NodeConfig,
    form: Form,
    /// What fills blocks: not the stream of the steps, for which the host would wait.
    copies: Stream,
    orders: Vec<Sender<Order>>,
    said: Receiver<(usize, Word)>,
    coming: BTreeMap<usize, Coming>,
    pub(super) report: HandoverReport,
    /// How long each prompt was waited for, from when it was known of.
    pub(super) times: Vec<Duration>,
}

impl Decode {
    pub(super) fn new(node: &NodeConfig, form: Form, device: &Device) -> Result<Self, RunError> {
        let (say, said) = mpsc::channel();
        let orders = (0..node.prefill).map(|of| {
            let (orders, received) = mpsc::channel();
            let from = (node.member(of), node.key.clone());
            let puller = Puller::new(from, (node.transfer, device), form, node.handover)?;
            let say = say.clone();
            let thread = std::thread::Builder::new().name(format!("pull-{of}"));
            thread.spawn(move || puller.run(&received, &say))?;
            Ok(orders)
        });
        let orders = orders.collect::<Result<_, NodeStartError>>()?;
        Ok(Self {
            config: node.clone(),
            form,
            copies: Stream::new(device)?,
            orders,
            said,
            coming: BTreeMap::new(),
            report: HandoverReport::default(),
            times: Vec::new(),
        })
    }

    pub(in crate::engine) fn want(&mut self, request: usize, prompt_tokens: u64) {
        let number = whole_number(&self.config, request);
        let of = (number % self.orders.len().max(1) as u64) as usize;
        let (sheet, since) = (self.form.sheet(prompt_tokens), Instant::now());
        let order = Order { request, number, sheet, since };
        // Without its thread, the prompt is computed here.
        if self.orders.get(of).is_some_and(|orders| orders.send(order).is_ok()) {
            let coming = Coming { way: Way::Far, pieces: Vec::new(), adopted: None };
            self.coming.insert(request, coming);
        }
    }

    pub(in crate::engine) fn hear(&mut self) {
        for (request, word) in self.said.try_iter() {
            // Of others, nobody wants to know any more.
            let Some(coming) = self.coming.get_mut(&request) else { continue };
            match word {
                Word::Offered => coming.way = Way::Offered,
                Word::Came(piece) => coming.pieces.push(piece),
                Word::Whole(time) => {
                    coming.way = Way::Whole;
                    self.report.handed_over += 1;
                    let parts: u64 = coming.pieces.iter().map(|of| of.parts(self.form)).sum();
                    self.report.handover_blocks += parts / u64::from(self.form.layers).max(1);
                    self.report.handover_bytes += parts * u64::from(self.form.part_bytes);
                    self.times.push(time);
                }
                Word::Failed => {
                    self.report.handover_recomputed += 1;
                    coming.way = Way::Failed;
                    if coming.adopted.is_none() {
                        self.coming.remove(&request);
                    }
                }
            }
        }
    }

    fn way(&self, request: usize) -> Option<Way> {
        Some(self.coming.get(&request)?.way)
    }

    pub(in crate::engine) fn is_whole(&self, request: usize) -> bool {
        self.way(request) == Some(Way::Whole)
    }

    /// Whether a request's prompt is offered, and has not come.
    pub(in crate::engine) fn is_offered(&self, request: usize) -> bool {
        self.way(request) == Some(Way::Offered)
    }

    /// Whether a request is computed here as any other.
    pub(in crate::engine) fn is_here(&self, request: usize) -> bool {
        !self.coming.contains_key(&request)
    }

    pub(super) fn waits(&self) -> bool {
        !self.coming.is_empty()
    }

    pub(in crate::engine) fn fills(&self) -> bool {
        self.coming.values().any(|coming| coming.adopted.is_some())
    }

    /// Whole blocks of a request that were filled.
    #[cfg(test)]
    pub(super) fn filled(&self, request: usize) -> usize {
        let coming = self.coming.get(&request);
        coming.and_then(|coming| coming.adopted.as_ref()).map_or(0, |of| of.right(self.form))
    }

    /// A request was admitted whose blocks a transfer fills behind step `step`. What is cached here, is not filled.
    pub(in crate::engine) fn adopt(
        &mut self,
        request: usize,
        sequence: Sequence,
        adoption: Adoption,
        step: u64,
    ) {
        if let Some(coming) = self.coming.get_mut(&request) {
            coming.adopted = Some(Adopted::new(sequence, adoption, step));
        }
    }

    /// Forgets a request that is over, or whose blocks are all cached here.
    pub(in crate::engine) fn forget(&mut self, request: usize) {
        let coming = self.coming.remove(&request);
        if coming.is_some_and(|coming| matches!(coming.way, Way::Far | Way::Offered)) {
            self.report.handover_cancelled += 1;
        }
    }

    /// Takes the blocks of the request that was admitted last, of those that other nodes still compute. What of them is right stays
    /// cached. It is admitted again when all has come, so that it gives way once.
    pub(in crate::engine) fn give_way(
        &mut self,
        cache: &mut Local,
    ) -> Result<Option<(usize, Sequence)>, RunError> {
        let offered = self.coming.iter_mut().filter(|(_, coming)| coming.way == Way::Offered);
        let filled = offered.filter(|(_, coming)| coming.adopted.is_some());
        let step = |coming: &Coming| coming.adopted.as_ref().map(|adopted| adopted.step);
        let last = filled.max_by_key(|(request, coming)| (step(coming), **request));
        let Some((&request, coming)) = last else { return Ok(None) };
        let Some(adopted) = coming.adopted.take() else { return Ok(None) };
        guard!("replay.gives-way-once", coming.way = Way::Far);
        Ok(Some((request, adopted.end(cache, self.form)?)))
    }

    /// Fills the blocks of sequences whose step is complete. Those of which no more comes go on.
    pub(in crate::engine) fn fill(
        &mut self,
        cache: &mut Local,
        completed: u64,
    ) -> Result<Vec<(usize, Sequence)>, RunError> {
        let form = self.form;
        for Coming { way, pieces, adopted } in self.coming.values_mut() {
            let may_fill = |of: &&mut Adopted| guard!("replay.filled-behind-copies", of.step <= completed, else true);
            let Some(adopted) = adopted.as_mut().filter(may_fill) else { continue };
            let parts = adopted.fill((cache, &self.copies), form, pieces)?;
            match way {
                Way::Offered => self.report.handover_early_parts += parts,
                Way::Whole => {
                    let wrong = adopted.blocks.len() - adopted.right(form);
                    self.report.handover_blocks_wrong += wrong as u64;
                }
                Way::Far | Way::Failed => {}
            }
        }
        let ended = self.coming.extract_if(.., |_, coming| {
            let adopted = coming.adopted.as_ref();
            matches!(coming.way, Way::Whole | Way::Failed)
                && adopted.is_some_and(|adopted| adopted.step <= completed)
        });
        let ended = ended.filter_map(|(request, coming)| Some((request, coming.adopted?)));
        ended.map(|(request, adopted)| Ok((request, adopted.end(cache, form)?))).collect()
    }
}

impl Piece {
    fn parts(&self, form: Form) -> u64 {
        match self {
            Self::Host(bytes) => form.parts(bytes.bytes.len()).into(),
            #[cfg(feature = "nixl")]
            Self::Device(blocks) => blocks.count() as u64 * u64::from(form.layers),
        }
    }
}
