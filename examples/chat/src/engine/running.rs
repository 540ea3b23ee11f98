//! A sequence as the engine sees it: its text, which is ahead of what the cache was told.

use std::collections::VecDeque;
use std::time::Instant;

use kv_plane::Sequence;

use crate::draft::drafts;
use crate::job::Job;

/// One answer to a job, which runs or is suspended.
#[derive(Debug)]
pub(super) struct Running {
    /// Counts the engine's sequences.
    pub(super) number: u64,
    pub(super) job: usize,
    pub(super) answer: u32,
    pub(super) asked: Job,
    pub(super) sequence: Sequence,
    /// Prompt and answer, as far as they are known here.
    pub(super) ids: Vec<u32>,
    /// Tokens of `ids` that have KV behind the last step, as far as its outcome is known here.
    pub(super) kv_end: u64,
    /// What came out of steps and was not committed yet, each with its step.
    pub(super) outcomes: VecDeque<(u64, Vec<u32>)>,
    /// Answers that are to branch off before the prompt's last token is computed.
    pub(super) forks: u32,
    /// Drafts in the step that is put together.
    pub(super) drafts: u32,
    pub(super) reuse: Reuse,
    pub(super) started: Instant,
    /// When the first token of the answer was there.
    pub(super) first_token: Option<Instant>,
}

/// Tokens of a prompt that were not computed, by where they came from.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Reuse {
    /// From blocks on the device.
    pub device_tokens: u64,
    /// From blocks in host memory.
    pub host_tokens: u64,
    /// From a tier below, by way of host memory.
    pub below_tokens: u64,
}

impl Reuse {
    /// All of them.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.device_tokens + self.host_tokens + self.below_tokens
    }
}

impl Running {
    /// Whether nothing is left to be computed.
    pub(super) fn is_over(&self) -> bool {
        self.asked.is_over(&self.ids)
    }

    /// Tokens for the next step, with at most `budget` of a prompt: known ones that have no KV, or the token that is being
    /// sampled, and drafts behind it.
    pub(super) fn tokens_wanted(&mut self, budget: u64) -> u32 {
        let left = self.sequence.to_compute();
        self.drafts = 0;
        if self.forks > 0 && left > 1 {
            // The last token of the prompt is left for each answer to compute.
            return (left - 1).min(budget) as u32;
        }
        if left > budget {
            return budget as u32;
        }
        let answered = self.ids.len().saturating_sub(self.asked.prompt.len());
        if answered > 0 && left <= 1 {
            let most =
                self.asked.tokens_max.saturating_sub(answered).min(self.asked.drafts as usize);
            // What is looked up here may lack the last token. The step's own drafts are looked up when it is there.
            self.drafts = drafts(&self.ids, most).len() as u32;
        }
        left.max(1) as u32 + self.drafts
    }

    /// The ids of the tokens that a step computes from `start` on, and the drafts among them.
    pub(super) fn ids_from(&self, start: u64, tokens: u32) -> (Vec<u32>, Vec<u32>) {
        let known = &self.ids[(start as usize).min(self.ids.len())..];
        if known.len() >= tokens as usize {
            return (known[..tokens as usize].to_vec(), Vec::new());
        }
        let count = tokens as usize - known.len();
        let mut tried = drafts(&self.ids, count).to_vec();
        // The step has room for more; one that is wrong does no harm.
        tried.resize(count, self.ids.last().copied().unwrap_or(0));
        ([known, &tried].concat(), tried)
    }
}
