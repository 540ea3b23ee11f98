//! What the engine is asked for: answers to a prompt.

use crate::sampling::Sampling;

/// A prompt, and how many answers to it.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// The ids of the prompt.
    pub prompt: Vec<u32>,
    /// Answers to the same prompt, 1 or more. They share its KV.
    pub answers: u32,
    /// Most tokens of an answer.
    pub tokens_max: usize,
    /// Ids that end an answer.
    pub ends: Vec<u32>,
    /// How tokens are chosen; answers differ by it.
    pub sampling: Sampling,
    /// Drafts that a step tries at most; 0 for none.
    pub drafts: u32,
}

impl Job {
    /// Whether prompt and answer are complete.
    #[must_use]
    pub fn is_over(&self, ids: &[u32]) -> bool {
        let answer = ids.get(self.prompt.len()..).unwrap_or_default();
        answer.len() >= self.tokens_max || answer.last().is_some_and(|id| self.ends.contains(id))
    }
}
