//! What happens to requests beside prefill and decoding.

/// What happens to requests beside prefill and decoding. Chances are in percent.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Life {
    /// Most tokens of a prompt that one iteration computes; 0 for as many as its budget allows.
    pub chunk: u32,
    /// Draft tokens that are computed behind each sampled one.
    pub drafts: u32,
    /// The chance that a draft is accepted, if those before it are.
    pub accept: u32,
    /// Answers to each request: when its prompt is computed, it is forked into so many. 0 and 1 fork none.
    pub fork: u32,
    /// The chance that a running request is suspended in an iteration, for up to 16 of them.
    pub suspend: u32,
    /// The chance that a request is cancelled before its end.
    pub cancel: u32,
    /// By how much of the device blocks the budget falls and rises again, every 64 iterations.
    pub budget_swing: u32,
    /// Whether each request [says](crate::hints), when it ends, what becomes of its session.
    pub hints: bool,
}

impl Life {
    /// The most tokens of a prompt in an iteration.
    #[must_use]
    pub fn chunk(&self) -> u64 {
        if self.chunk == 0 { u64::MAX } else { self.chunk.into() }
    }
}
