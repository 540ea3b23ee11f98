//! Workloads in the trace format, generated from a seed.
//!
//! The project contains no recorded traffic. [`generate`] creates a workload with the traits that
//! matter for a KV cache: system prompts that many chats share, chats in which every turn repeats
//! the conversation so far, and long documents that are used once.
//!
//! # Shape
//!
//! Sessions start as a Poisson process: the gaps between them are exponential with a mean of
//! [`SESSION_GAP_MEAN_MS`]. [`DOCUMENT_PERCENT`] % of the sessions are documents, the others chats.
//!
//! | quantity | distribution |
//! | --- | --- |
//! | document: prompt | 4,096 to 131,071 tokens (8 to 256 blocks), by octaves; shared with nothing |
//! | document: answer | as a chat's |
//! | chat: system prompt | one of [`SYSTEM_PROMPTS`], the k-th most popular chosen with a weight of 1/k (Zipf) |
//! | system prompt: length | 1 to 8 whole blocks, evenly |
//! | chat: user text of each turn | 32 to 4,095 tokens, by octaves |
//! | chat: answer | 16 to 2,047 tokens, by octaves |
//! | chat: another turn follows | with [`NEXT_TURN_PERCENT`] %, up to [`TURNS_MAX`] turns: 4 on average |
//! | chat: from one turn to the next | [`MS_PER_ANSWER_TOKEN`] ms for each answer token, then a think time of 5 to 639 s, by octaves |
//!
//! "By octaves" means [`SplitMix64::octaves`]: the range is a number of doublings. One of them is
//! chosen uniformly, and then a number in it uniformly. The prompt of a chat's first turn is the
//! system prompt plus user text. The prompt of a later turn is the previous prompt, the previous
//! answer and new user text. Requests are listed in order of arrival up to the requested number, so
//! chats near the end are cut short. A longer workload with the same seed begins with the shorter
//! one.
//!
//! # Ids
//!
//! Ids count up from 0. The blocks of the system prompts come first. Two ids are equal if and only
//! if the prompts are equal up to the end of that block. A block that a prompt fills only partly
//! differs from the block that a later turn completes, so it has its own id, as in the published
//! traces.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::path::Path;

use crate::json_file::{WriteError, check_files, write_json};
use crate::rng::SplitMix64;
use crate::trace::{BLOCK_TOKENS_IN_TRACE, Request, Trace};

pub const SYSTEM_PROMPTS: usize = 32;

pub const DOCUMENT_PERCENT: u64 = 40;

/// Probability of another turn after a turn of a chat, in percent.
pub const NEXT_TURN_PERCENT: u64 = 75;

pub const TURNS_MAX: u32 = 32;

/// Mean gap between the starts of two sessions, in milliseconds: about three requests per second.
pub const SESSION_GAP_MEAN_MS: u64 = 900;

/// Time of an answer, in milliseconds per token.
pub const MS_PER_ANSWER_TOKEN: u64 = 20;

/// Maximum number of requests of a workload: its ids take about a gigabyte.
pub const REQUESTS_MAX: u64 = 4_000_000;

#[derive(Clone, Debug, Eq, PartialEq)]
pub struct GenerateOptions {
    /// Number of requests, from 1 to [`REQUESTS_MAX`].
    pub requests: u64,
    pub seed: u64,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self { requests: 1000, seed: 0 }
    }
}

#[derive(thiserror::Error)]
pub enum GenerateError {
    #[error("0 requests asked for, expected at least 1")]
    NoRequests,
    #[error("{requests} requests asked for, more than the largest allowed, {REQUESTS_MAX}")]
    TooManyRequests { requests: u64 },
    #[error(transparent)]
    Write(#[from] WriteError),
}

cuda_driver::messages::one_line_debug!(GenerateError);

/// Generates a workload with the shape described in the [module](self).
pub fn generate(options: &GenerateOptions) -> Result<Trace, GenerateError> {
    match options.requests {
        0 => return Err(GenerateError::NoRequests),
        1..=REQUESTS_MAX => {}
        requests => return Err(GenerateError::TooManyRequests { requests }),
    }
    let mut sessions = Sessions::new(options.seed);
    let requests = (0..options.requests).map(|_| sessions.next_request()).collect();
    Ok(Trace::new(requests))
}

/// The command `kv-replay generate`: writes the workload to the file `out` and what it has to `json`, and returns a line
/// that says so. Without a file, returns the workload itself.
pub fn run(
    requests: u64,
    seed: u64,
    (out, json): (Option<&Path>, Option<&Path>),
) -> Result<String, GenerateError> {
    check_files([], out.into_iter().chain(json))?;
    let trace = generate(&GenerateOptions { requests, seed })?;
    if let Some(json) = json {
        write_json(json, &trace.counts())?;
    }
    let Some(path) = out else {
        return Ok(trace.to_jsonl());
    };
    trace.write(path)?;
    let lookups = trace.block_lookups();
    Ok(format!(
        "wrote {requests} requests with {lookups} block lookups (seed {seed}) to {}\n",
        path.display()
    ))
}

/// The running sessions, and the source of new ones.
struct Sessions {
    rng: SplitMix64,
    /// Block ids of each system prompt, the most popular first.
    system_prompts: Vec<Vec<u64>>,
    /// Cumulative weights of the system prompts, each included.
    popularity: Vec<u64>,
    next_id: u64,
    /// Start of the next session, in milliseconds with a fraction.
    next_session_ms: f64,
    /// The waiting chats, with the time of their next request, earliest first. Equal times are
    /// ordered by number.
    waiting: BinaryHeap<Reverse<(u64, usize)>>,
    /// The waiting chats, by number; `None` if the number is free.
    chats: Vec<Option<Chat>>,
    free_numbers: Vec<usize>,
}

/// A chat between two of its turns.
struct Chat {
    /// Ids of the full blocks of the latest prompt.
    full_blocks: Vec<u64>,
    /// Number of tokens of the latest prompt and its answer. Every later prompt begins with these.
    tokens: u64,
    turns: u32,
}

impl Sessions {
    fn new(seed: u64) -> Self {
        let mut rng = SplitMix64::new(seed);
        let mut next_id = 0;
        let system_prompts = (0..SYSTEM_PROMPTS)
            .map(|_| {
                let first = next_id;
                next_id += rng.between(1, 8);
                (first..next_id).collect()
            })
            .collect();
        // Integer weights, so that the choice does not depend on floating-point rounding.
        let popularity = (1..=SYSTEM_PROMPTS as u64)
            .scan(0, |sum, rank| {
                *sum += 1_000_000 / rank;
                Some(*sum)
            })
            .collect();
        let next_session_ms = SESSION_GAP_MEAN_MS as f64 * rng.exponential();
        Self {
            rng,
            system_prompts,
            popularity,
            next_id,
            next_session_ms,
            waiting: BinaryHeap::new(),
            chats: Vec::new(),
            free_numbers: Vec::new(),
        }
    }

    /// The earliest future request: a chat's next turn, or the first turn of a new session.
    fn next_request(&mut self) -> Request {
        let new_session_ms = self.next_session_ms as u64;
        if let Some(&Reverse((timestamp_ms, number))) = self.waiting.peek()
            && timestamp_ms < new_session_ms
        {
            self.waiting.pop();
            self.free_numbers.push(number);
            // A number is in the queue exactly as long as its chat waits, so the chat exists.
            if let Some(chat) = self.chats[number].take() {
                return self.turn(timestamp_ms, chat);
            }
        }
        self.next_session_ms += SESSION_GAP_MEAN_MS as f64 * self.rng.exponential();
        if self.rng.percent(DOCUMENT_PERCENT) {
            return self.document(new_session_ms);
        }
        let full_blocks = self.system_prompt();
        let tokens = full_blocks.len() as u64 * BLOCK_TOKENS_IN_TRACE;
        self.turn(new_session_ms, Chat { full_blocks, tokens, turns: 0 })
    }

    fn document(&mut self, timestamp_ms: u64) -> Request {
        let input_length = self.rng.octaves(4096, 5);
        let output_length = self.answer_tokens();
        let mut blocks = Vec::new();
        let hash_ids = self.prompt_ids(&mut blocks, input_length);
        Request { timestamp_ms, input_length, output_length, hash_ids, tenant: None }
    }

    /// A turn of `chat`. The chat is queued again if another turn follows.
    fn turn(&mut self, timestamp_ms: u64, mut chat: Chat) -> Request {
        let input_length = chat.tokens + self.rng.octaves(32, 7);
        let output_length = self.answer_tokens();
        let hash_ids = self.prompt_ids(&mut chat.full_blocks, input_length);
        chat.tokens = input_length + output_length;
        chat.turns += 1;
        if chat.turns < TURNS_MAX && self.rng.percent(NEXT_TURN_PERCENT) {
            let think_ms = 1000 * self.rng.octaves(5, 7) + self.rng.below(1000);
            self.wait(timestamp_ms + output_length * MS_PER_ANSWER_TOKEN + think_ms, chat);
        }
        Request { timestamp_ms, input_length, output_length, hash_ids, tenant: None }
    }

    fn wait(&mut self, until_ms: u64, chat: Chat) {
        let number = self.free_numbers.pop().unwrap_or_else(|| {
            self.chats.push(None);
            self.chats.len() - 1
        });
        self.chats[number] = Some(chat);
        self.waiting.push(Reverse((until_ms, number)));
    }

    fn system_prompt(&mut self) -> Vec<u64> {
        let total = self.popularity.last().copied().unwrap_or_default();
        let draw = self.rng.below(total);
        let chosen = self.popularity.partition_point(|&sum| sum <= draw);
        self.system_prompts[chosen].clone()
    }

    fn answer_tokens(&mut self) -> u64 {
        self.rng.octaves(16, 7)
    }

    /// Ids of a prompt of `tokens` tokens that begins with `full_blocks`. Newly filled blocks are
    /// appended to `full_blocks`.
    fn prompt_ids(&mut self, full_blocks: &mut Vec<u64>, tokens: u64) -> Vec<u64> {
        while (full_blocks.len() as u64) < tokens / BLOCK_TOKENS_IN_TRACE {
            full_blocks.push(self.new_id());
        }
        let mut ids = full_blocks.clone();
        if !tokens.is_multiple_of(BLOCK_TOKENS_IN_TRACE) {
            ids.push(self.new_id());
        }
        ids
    }

    fn new_id(&mut self) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        id
    }
}
