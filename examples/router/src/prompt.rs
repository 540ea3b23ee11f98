//! Prompts: what a trace says of each request, as token ids and what the content depends on beside them.

use kv_plane::manager::Content;
use kv_replay::trace::{BLOCK_TOKENS_IN_TRACE, Request, Trace};

/// Tokens that all prompts begin with. Tenants and adapters have content of their own for them all the same: a
/// router that forgot their salts would find too much.
const PREAMBLE_TOKENS: u64 = 64;

/// Whose a prompt is, and which adapter computes it.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub struct Scope {
    /// The salt of its tenant. NVIDIA's router knows salts by this prefix among the other keys of a block.
    pub salt: Option<&'static str>,
    pub adapter: Option<&'static str>,
}

/// The prefix by which the router knows a salt. It routes by what follows.
pub const SALT_PREFIX: &str = dynamo_kv_router::zmq_wire::DYNAMO_CACHE_SALT_PREFIX;

const SCOPES: [Scope; 5] = [
    Scope { salt: None, adapter: None },
    Scope { salt: Some("tenant-a"), adapter: None },
    Scope { salt: Some("tenant-b"), adapter: None },
    Scope { salt: None, adapter: Some("french") },
    Scope { salt: Some("tenant-a"), adapter: Some("french") },
];

/// A request as an engine is given it.
#[derive(Clone, Debug)]
pub struct Prompt {
    /// Its place in the trace.
    pub number: usize,
    pub ids: Vec<u32>,
    pub scope: Scope,
    /// Tokens to generate.
    pub answer_tokens: u64,
}

impl Prompt {
    /// What the trace says of request `number`. Equal ids of the trace give equal tokens, and requests that begin
    /// with the same id have the same scope.
    pub fn of(trace: &Trace, number: usize) -> Self {
        let Request { input_length, output_length, hash_ids, .. } = &trace.requests[number];
        let ids = (0..*input_length).map(|at| {
            let id = match at < PREAMBLE_TOKENS {
                true => u64::MAX,
                false => hash_ids[(at / BLOCK_TOKENS_IN_TRACE) as usize],
            };
            token(id, at % BLOCK_TOKENS_IN_TRACE)
        });
        let first = hash_ids.first().copied().unwrap_or_default();
        let scope = SCOPES[(mixed(first) % SCOPES.len() as u64) as usize];
        Self { number, ids: ids.collect(), scope, answer_tokens: *output_length }
    }

    /// The token ids of its answer, `count` of them behind the first `from`. No other answer has them.
    pub fn answer(number: usize, from: u64, count: u64) -> Vec<u32> {
        (from..from + count).map(|at| token(!(number as u64), at)).collect()
    }

    /// What the content depends on beside the ids, for the cache.
    pub fn content(&self) -> Content {
        let salt = self.scope.salt.map(|salt| format!("{SALT_PREFIX}{salt}").into_bytes());
        let adapter = self.scope.adapter.map(|name| name.as_bytes().to_vec());
        Content {
            adapter: adapter.unwrap_or_default(),
            salt: salt.unwrap_or_default(),
            ..Content::default()
        }
    }
}

fn token(id: u64, at: u64) -> u32 {
    (mixed(id.wrapping_mul(BLOCK_TOKENS_IN_TRACE).wrapping_add(at)) >> 32) as u32
}

/// SplitMix64's last step.
pub fn mixed(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}
