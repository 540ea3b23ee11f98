//! What an engine knows of the future, and a pool cannot see.

use std::time::Duration;

/// How cached content is going to be used, said by whoever holds it.
///
/// A hint is advice: content that was hinted to be over is found as long as it is cached, and what is to come
/// back may have been evicted. To keep content for certain, [pin](crate::Pinned) it. To keep it before
/// other content for a time, [retain](crate::BlockPool::retain) it.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum ReuseHint {
    /// Its session has ended: nothing is expected to look it up again.
    Over,
    /// It will be looked up again in about this long, as after a tool call.
    BackIn(Duration),
    /// Sessions that are yet to begin start with it, as with a system prompt.
    SharedHead,
}
