//! Requests on a simulated GPU: what is known of each, from its arrival to its end.

use std::collections::VecDeque;

use kv_plane::{Request as Asked, Sequence};
use kv_pool::BlockHash;

use kv_replay::trace::Request;

/// A multiplier that distributes numbers over names: 2^64 divided by the golden ratio.
const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;

/// A request that waits or runs.
#[derive(Debug)]
pub(super) struct Job {
    /// Its place in the trace.
    pub(super) number: usize,
    /// Names of all blocks that its prompt and its answer fill.
    names: Vec<BlockHash>,
    /// What is to be admitted; `None` while it has a sequence.
    pub(super) asked: Option<Asked>,
    /// Its blocks; `None` while it waits.
    pub(super) sequence: Option<Sequence>,
    pub(super) prompt: u64,
    /// Tokens that it has at its end.
    pub(super) total: u64,
    /// Whether its lookups were counted.
    pub(super) counted: bool,
    /// Whether it has generated a token.
    pub(super) answers: bool,
    /// Tokens that end with the last step's.
    pub(super) end: u64,
    /// What the step in progress computes of it.
    pub(super) part: Part,
    /// Steps whose ids are to come, each with their number.
    pub(super) outcomes: VecDeque<(u64, u64)>,
    /// The step that computes its last token.
    pub(super) over_in: Option<u64>,
}

/// What a step computes of a request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Part {
    Nothing,
    Prompt,
    EndOfPrompt,
    Answer,
}

impl Job {
    pub(super) fn new(number: usize, request: &Request, tokens: u64, trace_tokens: u64) -> Self {
        let prompt = request.input_length;
        let total = prompt.saturating_add(request.output_length);
        let name = |block| name_of(request, number, block, tokens, trace_tokens);
        let names: Vec<_> = (0..total / tokens).map(name).collect();
        let full = (prompt / tokens) as usize;
        Self {
            number,
            asked: Some(Asked::named(prompt, names[..full].to_vec())),
            names,
            sequence: None,
            prompt,
            total,
            counted: false,
            answers: false,
            end: 0,
            part: Part::Nothing,
            outcomes: VecDeque::new(),
            over_in: None,
        }
    }

    /// Names of the blocks that these tokens fill.
    pub(super) fn names(&self, from: u64, to: u64, tokens: u64) -> &[BlockHash] {
        &self.names[(from / tokens) as usize..(to / tokens) as usize]
    }

    /// Takes its blocks away. It is admitted again with what is known of it by then.
    pub(super) fn preempt(&mut self, tokens: u64) {
        let Some(sequence) = self.sequence.take() else { return };
        let known = sequence.known();
        self.asked = Some(Asked::named(known, self.names(0, known, tokens).to_vec()));
        self.outcomes.clear();
        self.part = Part::Nothing;
    }
}

/// The name of a block of a request: of its prompt by the hash id that its last token is in, and of its answer by itself.
fn name_of(
    request: &Request,
    number: usize,
    block: u64,
    tokens: u64,
    trace_tokens: u64,
) -> BlockHash {
    let last = block * tokens + tokens - 1;
    let id = if last < request.input_length {
        request.hash_ids.get((last / trace_tokens) as usize)
    } else {
        None
    };
    let (content, piece) = match id {
        Some(&id) => (id, 2 * ((last % trace_tokens) / tokens)),
        None => (number as u64, 2 * block + 1),
    };
    // Equal for equal content and piece only; the low bits are spread.
    let mut low = content.wrapping_mul(SPREAD).wrapping_add(piece);
    low = (low ^ (low >> 30)).wrapping_mul(SPREAD);
    low = (low ^ (low >> 27)).wrapping_mul(SPREAD);
    BlockHash::from_u128(u128::from(content) << 64 | u128::from(low ^ (low >> 31)))
}
