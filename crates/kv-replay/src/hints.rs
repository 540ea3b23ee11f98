//! What the clients of a trace's requests could say of the future: whether a session is over, and when it comes back.
//!
//! A client knows, when a request ends, what a server cannot see: that the user closed the chat, or that the agent is
//! waiting for a tool that takes so long. A trace does not say it, so it is derived from what follows: the declared
//! hint is the only look ahead.
//!
//! A later request *continues* an earlier one if it begins with all full blocks of its prompt. At its end, a request
//! that another continues says that its session comes back in the time between the two arrivals, and one that none
//! continues says that it is over.

use std::collections::HashMap;
use std::time::Duration;

use kv_pool::policy::ReuseHint;

use crate::trace::Request;

/// What each request says at its end, in the order of the requests. `None` for a prompt that fills no block.
///
/// `block_tokens` are the tokens of a hash id.
pub fn of_requests(requests: &[Request], block_tokens: u64) -> Vec<Option<ReuseHint>> {
    // Equal ids mean equal prefixes, so the id of the last full block stands for all of them.
    let mut next_arrival: HashMap<u64, u64> = HashMap::new();
    let said = requests.iter().rev().map(|request| {
        let full = usize::try_from(request.input_length / block_tokens.max(1)).unwrap_or(0);
        let last = full.checked_sub(1).and_then(|last| request.hash_ids.get(last));
        let hint = last.map(|id| match next_arrival.get(id) {
            Some(&next) => {
                let after = next.saturating_sub(request.timestamp_ms);
                ReuseHint::BackIn(Duration::from_millis(after))
            }
            None => ReuseHint::Over,
        });
        let arrivals = request.hash_ids.iter().map(|&id| (id, request.timestamp_ms));
        next_arrival.extend(arrivals);
        hint
    });
    let mut said: Vec<_> = said.collect();
    said.reverse();
    said
}
