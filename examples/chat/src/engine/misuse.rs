//! Rules broken on purpose, to show what they are for: the text of such a run is another one.

use kv_plane::{GroupId, KvCache, Sequence};

use super::Sabotage;
use super::lane::{Lane, LayerStep, Piece};
use crate::model::Qkv;

/// What a run does wrong in its layers. Nothing, as a rule.
#[derive(Debug, Default)]
pub(super) struct Misuse {
    ignores_skip: bool,
    /// Tokens of the step whose rows are stored over slots of the prefix before them, too.
    early: Vec<(usize, Vec<kv_kernels::Slot>)>,
}

impl Misuse {
    pub(super) fn new(sabotage: Option<Sabotage>, lanes: &[Lane]) -> anyhow::Result<Self> {
        if sabotage == Some(Sabotage::StagingReuse) {
            reuse_staging(lanes)?;
        }
        Ok(Self { ignores_skip: sabotage == Some(Sabotage::IgnoredSkip), early: Vec::new() })
    }

    /// Notes where a sequence begins in a step, and at which of its tokens.
    pub(super) fn note_start(
        &mut self,
        cache: &KvCache,
        sequence: &Sequence,
        (start, token): (u64, usize),
    ) -> anyhow::Result<()> {
        if self.ignores_skip && start > 0 && start == sequence.cached_tokens() {
            let block = u64::from(cache.options().groups[0].shape.block_tokens());
            let mut slots = Vec::new();
            cache.manager().slot_mapping(
                GroupId(0),
                sequence,
                start.saturating_sub(block)..start,
                &mut slots,
            )?;
            self.early.push((token, slots));
        }
        Ok(())
    }

    /// Stores the first row of a sequence over the end of the prefix before it, as a store would that rounds down to
    /// whole blocks.
    pub(super) fn store_early(
        &self,
        lane: &Lane,
        step: LayerStep<'_>,
        (piece, qkv): (Piece, &Qkv),
    ) -> anyhow::Result<()> {
        for (token, slots) in &self.early {
            if (piece.first_token..piece.first_token + piece.tokens).contains(token) {
                lane.store_over(step, slots, (qkv, token - piece.first_token))?;
            }
        }
        Ok(())
    }

    pub(super) fn end_step(&mut self) {
        self.early.clear();
    }
}

#[cfg(all(feature = "sabotage", debug_assertions))]
#[expect(clippy::unnecessary_wraps, reason = "other builds cannot")]
fn reuse_staging(lanes: &[Lane]) -> anyhow::Result<()> {
    lanes.iter().for_each(|lane| lane.staging().sabotage_reuse_before_event());
    Ok(())
}

#[cfg(not(all(feature = "sabotage", debug_assertions)))]
fn reuse_staging(_lanes: &[Lane]) -> anyhow::Result<()> {
    anyhow::bail!(
        "staging is sabotaged in builds with the feature `sabotage` and debug assertions only"
    )
}
