//! What an engine asks for when a request is to run.

use std::sync::Arc;

use kv_pool::{BlockHash, RetentionPolicy, TenantId};

/// A request to be admitted.
///
/// # Examples
///
/// ```
/// use kv_cache::Request;
/// use kv_pool::{BlockHash, TenantId};
///
/// let hashes = [BlockHash::chain(BlockHash::ROOT, &[7; 16])];
/// let anybody = Request::new(20, &hashes);
/// assert_eq!(anybody.tenant, TenantId::NOBODY);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Tokens of the prompt.
    pub tokens: u64,
    /// Names of the prompt's full blocks, from the first on, as far as others may share them.
    pub hashes: &'a [BlockHash],
    /// Whose blocks they are, for a cache that [counts tenants](crate::KvCache::add_tenant).
    pub tenant: TenantId,
    /// What the sequence's blocks are worth when nobody uses them, by token, from the moment that
    /// they are [sealed](crate::KvCache::seal). Blocks that it finds in the cache keep what they have.
    pub retention: Option<&'a Arc<RetentionPolicy>>,
}

impl<'a> Request<'a> {
    /// A prompt of `tokens` tokens whose full blocks are named `hashes`, of nobody in particular.
    #[must_use]
    pub fn new(tokens: u64, hashes: &'a [BlockHash]) -> Self {
        Self { tokens, hashes, tenant: TenantId::NOBODY, retention: None }
    }
}
