//! A run whose prompts are computed on some nodes and continued on others: which side a process is of,
//! and which of the others a request goes to.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::Duration;

use kv_plane::handover::{Came, Coming, Decode, HandoverId, Prefill, SourceId};
use kv_plane::{KvCache, Sequence};

use super::RunError;
use super::live::Live;
use crate::config::RunConfig;
use crate::nodes::{HandoverReport, NodeConfig, NodeMemory, NodeTransfer};
use crate::report::{LatencyReport, RunReport};

/// What a process has to do with other nodes' sequences.
#[derive(Debug, Default)]
pub(super) enum Handover {
    /// It computes prompts and answers.
    #[default]
    None,
    /// It computes prompts for others.
    Prefill(Box<Computes>),
    /// It goes on with what others have computed.
    Decode(Box<GoesOn>),
}

/// The side that computes prompts.
#[derive(Debug)]
pub(super) struct Computes {
    pub(super) side: Prefill,
    numbers: Numbers,
    open_max: usize,
}

/// The side that goes on.
#[derive(Debug)]
pub(super) struct GoesOn {
    pub(super) side: Decode,
    numbers: Numbers,
    /// The nodes that compute prompts.
    sources: Vec<SourceId>,
    /// How long each prompt was waited for, from when it was known of.
    times: Vec<Duration>,
}

/// Which requests of the whole trace are this process's.
#[derive(Clone, Copy, Debug)]
struct Numbers {
    index: u64,
    of: u64,
}

impl Numbers {
    fn new(node: &NodeConfig) -> Self {
        let (index, of) = node.turn();
        Self { index: index as u64, of: of as u64 }
    }

    /// The number of a request of this process in the whole trace.
    fn whole(self, request: usize) -> u64 {
        request as u64 * self.of + self.index
    }

    /// The number of its hand-over, which both sides count alike.
    fn id(self, request: usize) -> HandoverId {
        HandoverId(u128::from(self.whole(request)) + 1)
    }

    fn request(self, id: HandoverId) -> usize {
        ((id.0 as u64 - 1 - self.index) / self.of) as usize
    }
}

impl Handover {
    /// Serves the node of a process that computes prompts for others, or finds those that do.
    pub(super) fn start(config: &RunConfig, cache: &KvCache) -> Result<Self, RunError> {
        let Some(node) = config.node.as_ref().filter(|node| node.prefill > 0) else {
            return Ok(Self::None);
        };
        let layers = match node.transfer {
            NodeTransfer::NixlDevice => 1,
            NodeTransfer::Sockets | NodeTransfer::Nixl => config.shape.layers,
        };
        // Pieces of a sheet are records, too.
        let record_bytes = (config.block_bytes()? / u64::from(layers).max(1)).max(4096);
        let part = cache.parts().first().ok_or(RunError::HandoverElsewhere)?;
        let (served, memory) = node.serve(record_bytes, node.handover, part.device())?;
        let numbers = Numbers::new(node);
        if node.is_prefill() {
            let side = match memory {
                #[cfg(feature = "nixl")]
                NodeMemory::Device(_) => Prefill::on_device(cache, served, node.handover)?,
                #[cfg(feature = "nixl")]
                NodeMemory::Nixl(_) => Prefill::new(cache, served, node.handover)?,
                NodeMemory::Host(_) => Prefill::new(cache, served, node.handover)?,
            };
            // As many that wait for the other side as there are that are computed.
            let open_max = 2 * config.max_batch as usize;
            return Ok(Self::Prefill(Box::new(Computes { side, numbers, open_max })));
        }
        let mut side = Decode::new(cache, node.key.clone(), node.handover)?;
        let mut add = |of| match node.transfer {
            #[cfg(feature = "nixl")]
            NodeTransfer::NixlDevice => {
                let library =
                    kv_nixl::Library::open().map_err(crate::nodes::NodeStartError::from)?;
                Ok(side.add_on_device(node.member(of), library)?)
            }
            transfer => Ok(side.add(node.member(of), transfer.open()?)?),
        };
        let sources = (0..node.prefill).map(&mut add).collect::<Result<_, RunError>>()?;
        Ok(Self::Decode(Box::new(GoesOn { side, numbers, sources, times: Vec::new() })))
    }

    /// Whether this process has something to do beside its requests.
    pub(super) fn has_work(&self) -> bool {
        matches!(self, Self::Prefill(computes) if computes.side.open() > 0)
    }

    /// Whether an iteration without work waits for other nodes.
    pub(super) fn waits(&self) -> bool {
        match self {
            Self::None => false,
            Self::Prefill(_) => self.has_work(),
            Self::Decode(goes_on) => goes_on.side.waits(),
        }
    }

    /// A request is over, whose blocks may be being filled.
    pub(super) fn forget(&mut self, request: usize) {
        if let Self::Decode(goes_on) = self {
            goes_on.side.cancel(goes_on.numbers.id(request));
        }
    }

    pub(super) fn note(&self, report: &mut RunReport) {
        report.handover = self.report();
    }

    pub(super) fn report(&self) -> Option<HandoverReport> {
        match self {
            Self::None => None,
            Self::Prefill(computes) => {
                let stats = computes.side.stats();
                Some(HandoverReport {
                    handed_over: stats.taken,
                    handover_blocks: stats.blocks,
                    handover_bytes: stats.bytes,
                    handover_failed: stats.failed,
                    handover_cancelled: stats.cancelled,
                    ..HandoverReport::default()
                })
            }
            Self::Decode(goes_on) => {
                let stats = goes_on.side.stats();
                Some(HandoverReport {
                    handed_over: stats.whole,
                    handover_blocks: stats.blocks,
                    handover_bytes: stats.bytes,
                    handover_cancelled: stats.cancelled,
                    handover_recomputed: stats.failed,
                    handover_blocks_wrong: stats.blocks_wrong,
                    handover_early_parts: stats.early_parts,
                    handover_ms: Some(LatencyReport::of(&goes_on.times)),
                    ..HandoverReport::default()
                })
            }
        }
    }
}

impl Computes {
    /// Whether no more requests are to be begun: the other side is slower.
    pub(super) fn is_full(&self) -> bool {
        self.side.open() >= self.open_max
    }

    pub(super) fn begin(&mut self, request: usize, sequence: &Sequence) {
        self.side.offer(self.numbers.id(request), sequence);
    }

    /// Gives what steps have completed of these requests.
    pub(super) fn give(
        &mut self,
        cache: &KvCache,
        live: &mut BTreeMap<usize, Live>,
    ) -> Result<(), RunError> {
        for (&number, request) in live {
            if let Some(sequence) = &mut request.sequence {
                self.side.give(cache, self.numbers.id(number), sequence)?;
            }
        }
        Ok(())
    }

    pub(super) fn finish(
        &mut self,
        cache: &mut KvCache,
        request: usize,
        sequence: Sequence,
    ) -> Result<(), RunError> {
        Ok(self.side.finish(cache, self.numbers.id(request), sequence)?)
    }

    pub(super) fn cancel(&mut self, request: usize) {
        self.side.cancel(self.numbers.id(request));
    }
}

impl GoesOn {
    /// Has a node compute a prompt. Without its thread, it is computed here.
    pub(super) fn want(&mut self, request: usize, prompt_tokens: u64) {
        let of = self.numbers.whole(request) as usize % self.sources.len().max(1);
        if let Some(&source) = self.sources.get(of) {
            let _ = self.side.want(self.numbers.id(request), source, prompt_tokens);
        }
    }

    pub(super) fn coming(&self, request: usize) -> Option<Coming> {
        self.side.coming(self.numbers.id(request))
    }

    /// Whether a request can go on as soon as there is room.
    pub(super) fn lacks_room_only(&self, request: usize) -> bool {
        matches!(self.coming(request), None | Some(Coming::Whole))
    }

    pub(super) fn id(&self, request: usize) -> HandoverId {
        self.numbers.id(request)
    }

    /// Hears from the nodes, and fills blocks; the sequences that go on.
    pub(super) fn poll(&mut self, cache: &mut KvCache) -> Result<Vec<(usize, Sequence)>, RunError> {
        let mut ready = Vec::new();
        for (id, came) in self.side.poll(cache)? {
            match came {
                Came::Whole(time) => self.times.push(time),
                Came::Ready { sequence, end } => {
                    end.map_err(RunError::Adopted)?;
                    ready.push((self.numbers.request(id), sequence));
                }
                // It is computed here.
                _ => {}
            }
        }
        Ok(ready)
    }

    /// Takes back the blocks of a request that is filled; see [`Decode::give_way`].
    pub(super) fn give_way(&mut self, cache: &mut KvCache) -> Option<(usize, Sequence)> {
        let (id, sequence) = self.side.give_way(cache)?;
        Some((self.numbers.request(id), sequence))
    }
}
