//! A request in the engine.

use kv_cache::{Request, Sequence};

use super::content::RequestContent;
use super::expected::ExpectedSums;

/// A request from its first admission until its last result was compared.
#[derive(Debug)]
pub(super) struct Live {
    pub(super) content: RequestContent,
    pub(super) expected: ExpectedSums,
    /// Its blocks; `None` while it is preempted.
    pub(super) sequence: Option<Sequence>,
    /// Number of tokens whose KV is written, or enqueued to be written.
    pub(super) written: u64,
    /// Number of known tokens: the prompt, and the tokens generated so far.
    pub(super) known: u64,
    /// Number of tokens that the sequence will have at its end.
    pub(super) total: u64,
    /// Whether its cached tokens were counted already.
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

    /// The request in the form that the cache's admission takes.
    pub(super) fn to_admit(&self) -> Request<'_> {
        Request::new(self.known, self.content.full_block_hashes())
    }
}
