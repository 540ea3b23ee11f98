//! The best that any router could do: one cache without an end, which all requests share.

use std::collections::HashSet;

use kv_pool::BlockHash;
use kv_replay::trace::Trace;

use crate::instance::BLOCK_TOKENS;
use crate::prompt::{Prompt, SALT_PREFIX};

/// Prompt tokens that such a cache would have found. It is never reset, so this is more than can be had.
pub fn of(trace: &Trace) -> u64 {
    let mut seen = HashSet::new();
    let mut tokens = 0;
    for number in 0..trace.requests.len() {
        let prompt = Prompt::of(trace, number);
        let scope = [prompt.scope.salt, prompt.scope.adapter].map(Option::unwrap_or_default);
        let mut parent = BlockHash::salted(scope.join(SALT_PREFIX).as_bytes());
        let names = prompt.ids.chunks_exact(BLOCK_TOKENS as usize).map(|ids| {
            parent = BlockHash::chain(parent, ids);
            parent
        });
        let names: Vec<_> = names.collect();
        // A model computes the last token of a prompt at least.
        let most = (prompt.ids.len() - 1) / BLOCK_TOKENS as usize;
        let found = names.iter().take(most).take_while(|name| seen.contains(*name)).count();
        tokens += found as u64 * u64::from(BLOCK_TOKENS);
        seen.extend(names);
    }
    tokens
}
