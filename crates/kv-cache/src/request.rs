//! Requests for admission.

use std::sync::Arc;

use kv_pool::{BlockHash, retention::RetentionPolicy, tenants::TenantId};

/// A request to be admitted.
///
/// # Examples
///
/// ```
/// use kv_cache::Request;
/// use kv_pool::{BlockHash, tenants::TenantId};
///
/// let hashes = [BlockHash::chain(BlockHash::ROOT, &[7; 16])];
/// let anybody = Request::new(20, &hashes);
/// assert_eq!(anybody.tenant, TenantId::NOBODY);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Tokens of the prompt.
    pub tokens: u64,
    /// Names of the prompt's full blocks, from the first on, up to the last that others may share.
    pub hashes: &'a [BlockHash],
    /// The tenant whose block counts include the sequence; see
    /// [`add_tenant`](crate::KvCache::add_tenant).
    pub tenant: TenantId,
    /// The priorities of the sequence's cached blocks, by token, from the moment when they are
    /// [sealed](crate::KvCache::seal). Blocks found in the cache keep their priorities.
    pub retention: Option<&'a Arc<RetentionPolicy>>,
}

impl<'a> Request<'a> {
    /// A prompt of `tokens` tokens whose full blocks have the names `hashes`, without a tenant.
    #[must_use]
    pub fn new(tokens: u64, hashes: &'a [BlockHash]) -> Self {
        Self { tokens, hashes, tenant: TenantId::NOBODY, retention: None }
    }
}
