//! A run whose prompts are computed on some nodes and continued on others: what each side does between iterations.

mod decode;
#[cfg(feature = "nixl")]
mod on_device;
mod prefill;
mod pulling;
#[cfg(test)]
mod tests;

use kv_plane::tier::GroupFormat;
use kv_remote::handover::{GroupSheet, HandoverId, Sheet};

use cuda_driver::Device;

use super::RunError;
use crate::config::RunConfig;
use crate::nodes::{HandoverReport, NodeConfig, NodeTransfer};
use crate::report::{LatencyReport, RunReport};

pub(super) use decode::Decode;
pub(super) use prefill::Prefill;

/// What a process has to do with other nodes' sequences.
#[derive(Debug, Default)]
pub(super) enum Handover {
    /// It computes prompts and answers.
    #[default]
    None,
    /// It computes prompts for others.
    Prefill(Box<Prefill>),
    /// It goes on with what others have computed.
    Decode(Box<Decode>),
}

/// What is handed over, and how it lies in a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Form {
    pub(super) format: GroupFormat,
    pub(super) block_tokens: u64,
    /// Layers that are handed over apart; 1 for whole blocks.
    pub(super) layers: u32,
    pub(super) part_bytes: u32,
}

impl Form {
    fn new(config: &RunConfig, node: &NodeConfig, format: GroupFormat) -> Result<Self, RunError> {
        // What is summed on the devices of both sides is a block.
        let layers = match node.transfer {
            NodeTransfer::NixlDevice => 1,
            NodeTransfer::Sockets | NodeTransfer::Nixl => config.shape.layers,
        };
        let bytes = config.block_bytes()? / u64::from(layers).max(1);
        let what = "the bytes of a part of a block";
        let part_bytes = u32::try_from(bytes);
        let part_bytes = part_bytes.map_err(|_| RunError::TooLarge { what, value: bytes })?;
        Ok(Self { format, block_tokens: config.block_tokens.into(), layers, part_bytes })
    }

    /// Blocks of so many tokens, the last one partly full.
    fn blocks(&self, tokens: u64) -> u64 {
        tokens.div_ceil(self.block_tokens)
    }

    fn block_bytes(&self) -> usize {
        self.layers as usize * self.part_bytes as usize
    }

    fn parts(&self, bytes: usize) -> u32 {
        (bytes / (self.part_bytes as usize).max(1)) as u32
    }

    /// The sheet of a prompt: block by block, so that what is complete is taken at once.
    fn sheet(&self, tokens: u64) -> Sheet {
        let places = (0..self.blocks(tokens)).map(|place| place as u32).collect();
        let (format, layers, part_bytes) = (self.format, self.layers, self.part_bytes);
        Sheet {
            tokens,
            draft_tokens: 0,
            ids: Vec::new(),
            shards: 1,
            readers: 1,
            chunk_places: 1,
            groups: vec![GroupSheet { format, layers, part_bytes, places }],
        }
    }
}

/// The number of the hand-over of a request, counted through the whole trace.
fn id_of(request: u64) -> HandoverId {
    HandoverId(u128::from(request) + 1)
}

impl Handover {
    /// Serves the node of a process that computes prompts for others, or finds those that do.
    pub(super) fn start(
        config: &RunConfig,
        format: GroupFormat,
        device: &Device,
    ) -> Result<Self, RunError> {
        let Some(node) = config.node.as_ref().filter(|node| node.prefill > 0) else {
            return Ok(Self::None);
        };
        let form = Form::new(config, node, format)?;
        // Pieces of a sheet are records, too.
        let record_bytes = u64::from(form.part_bytes).max(4096);
        let (served, memory) = node.serve(record_bytes, node.handover, device)?;
        Ok(match node.is_prefill() {
            true => {
                let served = (served, &memory, device);
                Self::Prefill(Box::new(Prefill::new(served, node.clone(), form, config)?))
            }
            false => Self::Decode(Box::new(Decode::new(node, form, device)?)),
        })
    }

    /// Whether this process has something to do beside its requests.
    pub(super) fn has_work(&self) -> bool {
        match self {
            Self::Prefill(prefill) => prefill.has_work(),
            Self::None | Self::Decode(_) => false,
        }
    }

    /// Whether an iteration without work waits for other nodes.
    pub(super) fn waits(&self) -> bool {
        match self {
            Self::None => false,
            Self::Prefill(prefill) => prefill.has_work(),
            Self::Decode(decode) => decode.waits(),
        }
    }

    /// A request is over, whose blocks may be being filled.
    pub(super) fn forget(&mut self, request: usize) {
        if let Self::Decode(decode) = self {
            decode.forget(request);
        }
    }

    pub(super) fn note(&self, report: &mut RunReport) {
        report.handover = match self {
            Self::None => None,
            Self::Prefill(prefill) => Some(prefill.report.clone()),
            Self::Decode(decode) => {
                let latency = LatencyReport::of(&decode.times);
                Some(HandoverReport { handover_ms: Some(latency), ..decode.report.clone() })
            }
        };
    }
}

/// The number of a request of this process in the whole trace.
fn whole_number(node: &NodeConfig, request: usize) -> u64 {
    let (index, of) = node.turn();
    request as u64 * of as u64 + index as u64
}
