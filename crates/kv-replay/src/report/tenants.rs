//! What requests of each tenant had.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::trace::Trace;

#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(default)]
pub struct TenantReport {
    /// Requests that finished.
    pub finished: u64,
    /// Blocks of their prompts that were looked up.
    pub block_lookups: u64,
    /// Of these, blocks found, in device or host memory.
    pub block_hits: u64,
    /// Prompt tokens of the finished requests.
    pub prompt_tokens: u64,
    /// Prompt tokens that were not written because the cache held them.
    pub prefix_tokens_reused: u64,
    pub generated_tokens: u64,
    /// Half of the requests had their first token within this many milliseconds; `None` unless requests waited for their arrival.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time_to_first_token_p50_ms: Option<f64>,
    /// The same of 99 %.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time_to_first_token_p99_ms: Option<f64>,
}

impl TenantReport {
    pub(crate) fn finish(&mut self, prompt_tokens: u64, generated_tokens: u64) {
        self.finished += 1;
        self.prompt_tokens += prompt_tokens;
        self.generated_tokens += generated_tokens;
    }

    /// Share of lookups that hit, from 0 to 1.
    pub fn hit_rate(&self) -> f64 {
        self.block_hits as f64 / self.block_lookups.max(1) as f64
    }
}

/// Each tenant of a trace, by name.
pub(crate) type Tenants = BTreeMap<String, TenantReport>;

/// Notes something of a request, if the trace says whose it is.
pub(crate) fn note(
    tenants: &mut Tenants,
    trace: &Trace,
    request: usize,
    note: impl FnOnce(&mut TenantReport),
) {
    let entry = trace.requests.get(request);
    if let Some(tenant) = entry.and_then(|entry| entry.tenant.as_deref()) {
        // Most are known, and a name is copied only once.
        match tenants.get_mut(tenant) {
            Some(known) => note(known),
            None => note(tenants.entry(tenant.to_owned()).or_default()),
        }
    }
}
