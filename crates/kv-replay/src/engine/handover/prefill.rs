//! The side that computes prompts: gives blocks as steps complete, and keeps them until the other side has spoken.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use cuda_driver::{Device, Stream};
use kv_plane::Sequence;
use kv_plane::manager::{Export, GroupId};
use kv_pool::BlockId;
use kv_remote::Node;
use kv_remote::handover::{HandoverError, Offer, Part, Verdict};

use super::{Form, id_of, whole_number};
use crate::config::RunConfig;
use crate::engine::RunError;
use crate::engine::cache::Local;
use crate::nodes::{HandoverReport, NodeConfig, NodeMemory};

/// What is offered, and what is known of it.
#[derive(Debug)]
struct Open {
    /// None if it could not be offered, or was withdrawn: the other side computes it.
    offer: Option<Offer>,
    given: u64,
    /// The whole sequence, once its prompt is computed. It keeps the blocks.
    export: Option<Export>,
}

#[derive(Debug)]
enum Way {
    ThroughHost,
    #[cfg(feature = "nixl")]
    OnDevice(super::on_device::Giving),
}

#[derive(Debug)]
pub(in crate::engine) struct Prefill {
    node: Arc<Node>,
    way: Way,
    /// What reads blocks: not the stream of the steps, of which the next one may run.
    copies: Stream,
    config: NodeConfig,
    form: Form,
    open: BTreeMap<usize, Open>,
    open_max: usize,
    /// Steps, each with a request and the tokens of it that have KV when the step is complete.
    written: VecDeque<(u64, usize, u64)>,
    pub(super) report: HandoverReport,
}

impl Prefill {
    pub(super) fn new(
        (node, memory, device): (Arc<Node>, &NodeMemory, &Device),
        config: NodeConfig,
        form: Form,
        run: &RunConfig,
    ) -> Result<Self, RunError> {
        let way = match memory {
            NodeMemory::Host(_) => Way::ThroughHost,
            #[cfg(feature = "nixl")]
            NodeMemory::Nixl(_) => Way::ThroughHost,
            #[cfg(feature = "nixl")]
            NodeMemory::Device(memory) => {
                Way::OnDevice(super::on_device::Giving::new(Arc::clone(memory), device)?)
            }
        };
        let (open, written) = (BTreeMap::new(), VecDeque::new());
        // As many that wait for the other side as there are that are computed.
        let open_max = 2 * run.max_batch as usize;
        let report = HandoverReport::default();
        let copies = Stream::new(device)?;
        Ok(Self { node, way, copies, config, form, open, open_max, written, report })
    }

    pub(super) fn has_work(&self) -> bool {
        !self.open.is_empty()
    }

    /// Whether no more requests are to be begun: the other side is slower.
    pub(in crate::engine) fn is_full(&self) -> bool {
        self.open.len() >= self.open_max
    }

    pub(in crate::engine) fn begin(&mut self, request: usize, prompt_tokens: u64) {
        if self.open.contains_key(&request) {
            // Admitted again: what was given is right.
            return;
        }
        let id = id_of(whole_number(&self.config, request));
        let offer =
            Offer::new(&self.node, id, self.form.sheet(prompt_tokens), self.config.handover);
        let offer = self.usable(offer);
        self.open.insert(request, Open { offer, given: 0, export: None });
    }

    /// A request's tokens up to this one have KV when a step is complete.
    pub(in crate::engine) fn writes(&mut self, step: u64, request: usize, tokens: u64) {
        self.written.push_back((step, request, tokens));
    }

    fn usable<T>(&mut self, outcome: Result<T, HandoverError>) -> Option<T> {
        outcome.inspect_err(|_| self.report.handover_failed += 1).ok()
    }

    /// Gives the whole blocks that steps up to this one have filled.
    pub(in crate::engine) fn completed<'a>(
        &mut self,
        cache: &Local,
        step: u64,
        sequence_of: impl Fn(usize) -> Option<&'a Sequence>,
    ) -> Result<(), RunError> {
        while let Some((_, request, tokens)) = self.written.pop_front_if(|(at, ..)| *at <= step) {
            let Some(sequence) = sequence_of(request) else { continue };
            let full = tokens / self.form.block_tokens;
            let from = self.open.get(&request).map_or(full, |open| open.given);
            let block = |place: u64| Some((place, sequence.block(place as usize)?));
            let blocks: Vec<_> = (from..full).map_while(block).collect();
            self.give(cache, request, &blocks)?;
        }
        Ok(())
    }

    /// Copies blocks out of the device, and gives them.
    fn give(
        &mut self,
        cache: &Local,
        request: usize,
        blocks: &[(u64, BlockId)],
    ) -> Result<(), RunError> {
        let Some(open) = self.open.get_mut(&request) else { return Ok(()) };
        let Some(offer) = &mut open.offer else { return Ok(()) };
        let given = match &self.way {
            Way::ThroughHost => give_through_host((cache, &self.copies), self.form, offer, blocks),
            #[cfg(feature = "nixl")]
            Way::OnDevice(giving) => giving.give((cache, &self.copies), offer, blocks),
        };
        match given {
            Ok(()) => {
                open.given = blocks.last().map_or(open.given, |(place, _)| place + 1);
                self.report.handover_blocks += blocks.len() as u64;
                self.report.handover_bytes += (blocks.len() * self.form.block_bytes()) as u64;
            }
            // There is no room for it, or its time is over: it is withdrawn.
            Err(GiveError::Handover) => {
                open.offer = None;
                self.report.handover_failed += 1;
            }
            Err(GiveError::Run(error)) => return Err(error),
        }
        Ok(())
    }

    /// A request's prompt is computed: gives what is left of it, and keeps its blocks until the other side has spoken.
    pub(in crate::engine) fn finish(
        &mut self,
        cache: &mut Local,
        request: usize,
        sequence: Sequence,
    ) -> Result<(), RunError> {
        let export = cache.cache.export(sequence);
        let export = export.map_err(|source| RunError::Export { request, source })?;
        let from = self.open.get(&request).map_or(0, |open| open.given);
        let blocks = export.blocks(GroupId(0)).iter().map(|&(place, id)| (place as u64, id));
        let blocks: Vec<_> = blocks.filter(|(place, _)| *place >= from).collect();
        self.give(cache, request, &blocks)?;
        if let Some(open) = self.open.get_mut(&request) {
            open.export = Some(export);
        }
        Ok(())
    }

    pub(in crate::engine) fn cancel(&mut self, request: usize) {
        if self.open.remove(&request).is_some() {
            self.report.handover_cancelled += 1;
        }
    }

    /// Hears what the other side has said. A prompt that is still computed then is computed to its end: others find its blocks.
    pub(in crate::engine) fn hear(&mut self) {
        let report = &mut self.report;
        self.open.retain(|_, Open { offer, export, .. }| {
            let verdict = offer.as_mut().map(Offer::verdict);
            match verdict {
                Some(Verdict::Waiting) => return true,
                Some(Verdict::Taken) => report.handed_over += 1,
                Some(Verdict::Cancelled) => report.handover_cancelled += 1,
                Some(_) => report.handover_failed += 1,
                None => {}
            }
            *offer = None;
            export.is_none()
        });
    }
}

pub(super) enum GiveError {
    /// The offer is of no use any more.
    Handover,
    Run(RunError),
}

impl From<HandoverError> for GiveError {
    fn from(_: HandoverError) -> Self {
        Self::Handover
    }
}

impl From<RunError> for GiveError {
    fn from(error: RunError) -> Self {
        Self::Run(error)
    }
}

/// Gives blocks layer by layer, through memory of the host.
fn give_through_host(
    (cache, on): (&Local, &Stream),
    form: Form,
    offer: &mut Offer,
    blocks: &[(u64, BlockId)],
) -> Result<(), GiveError> {
    let mut bytes = vec![0; form.block_bytes()];
    for &(place, id) in blocks {
        cache.read_block(on, id, &mut bytes)?;
        let layers = bytes.chunks(form.part_bytes as usize).zip(0..);
        let parts: Vec<_> = layers
            .map(|(bytes, layer)| {
                let part = Part { group: GroupId(0), place: place as u32, layer, shard: 0 };
                (part, bytes)
            })
            .collect();
        offer.give(&parts)?;
    }
    Ok(())
}
