//! A request that is in the engine.

use kv_cache::{Request, Sequence};

use super::content::RequestContent;
use super::expected::ExpectedSums;

/// A request from its first admission until its last result was compared.
#[derive(Debug)]
pub(super) struct Live {
    pub(super) content: RequestContent,
    pub(super) expected: ExpectedSums,
    /// Its blocks; none while it is preempted.
    pub(super) sequence: Option<Sequence>,
    /// Tokens whose KV is written, or enqueued to be.
    pub(super) written: u64,
    /// Tokens that are known: the prompt, and what was generated so far.
    pub(super) known: u64,
    /// Tokens that the sequence will have in the end.
    pub(super) total: u64,
    /// Its cached tokens were counted already.
    pub(super) counted: bool,
    /// The step that wrote its last token.
    pub(super) finished_in: Option<u64>,
}

impl Live {
    pub(super) fn new(content: RequestContent, expected: ExpectedSums, answer_tokens: u64) -> Self {
        let prompt = content.prompt_tokens();
        Self {
            content,
            expected,
            sequence: None,
            written: 0,
            known: prompt,
            total: prompt + answer_tokens,
            counted: false,
            finished_in: None,
        }
    }

    /// What the cache is asked for.
    pub(super) fn to_admit(&self) -> Request<'_> {
        Request::new(self.known, self.content.full_block_hashes())
    }
}
