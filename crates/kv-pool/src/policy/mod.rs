//! Which cached block goes when one must: a trait, and the policy of this crate.
//!
//! A pool tells an [`EvictionPolicy`] what becomes of its cached blocks and asks it for a victim
//! when it needs one. The policy decides on the order and on nothing else: it never sees a block
//! that is in use, and it neither drops content nor names it.
//!
//! A pool without a policy evicts by priority LRU. [`PolicyKind`] names that order and this crate's own policy,
//! for configurations.
//!
//! # The life of a block, as a policy sees it
//!
//! ```text
//!            stored         evictable             victim
//!  unknown ─────────> held ───────────> evictable ────────> unknown
//!                     ^  │                │    │
//!                     │  │ removed   held │    │ removed
//!                     │  └──> unknown     │    └──> unknown
//!                     └───────────────────┘
//! ```
//!
//! A lookup that does not find a block is [`missed`](EvictionPolicy::missed), one that does
//! [`found`](EvictionPolicy::found); the latter comes before `held` if nobody held the block. Calls
//! that the picture does not have are ignored, and so are those about blocks beyond the number that
//! a policy was made for; a block that becomes evictable without having been stored is taken in.
//!
//! # Tails before heads
//!
//! A block is of use only while all blocks before it are cached, so a block with cached children
//! must not go before them, whatever a policy thinks of it. The pool says so with
//! [`BlockFacts::has_children`] and [`children`](EvictionPolicy::children), and a policy never
//! chooses a block that has some. Neither side searches: the pool counts children, and a policy
//! that comes upon such a block in its order sets it aside until its last child is gone, once for
//! each time that the block was made evictable. Every operation therefore takes constant time, amortised over the calls of `evictable`, however many children
//! one parent has.
//!
//! # Memory and time
//!
//! Tables are allocated when a policy is made, for a fixed number of blocks; no operation
//! allocates. What a policy remembers of evicted content is bounded by that number too. Two
//! policies that were made with the same options and told the same give the same victims.

mod hit_density;
mod kind;
mod tables;

use std::fmt;
use std::time::Duration;

pub use crate::ids::RecordId;
pub use kind::PolicyKind;

use hit_density::HitDensity;
pub(crate) use tables::{check_blocks, table};

use crate::{BlockHash, Priority};

/// When something happens, by two clocks that never run backwards.
#[derive(Clone, Copy, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
pub struct PolicyTime {
    /// Blocks looked up in the pool so far.
    pub lookups: u64,
    /// Milliseconds of the pool's clock.
    pub ms: u64,
}

/// What a pool knows of a cached block when nobody holds it any more.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct BlockFacts {
    /// The name of its content.
    pub hash: BlockHash,
    /// The block of the same level that holds the content before it, if one does.
    pub parent: Option<RecordId>,
    /// Blocks before it in its chain: 0 for the first block of a prompt.
    pub depth: u32,
    /// Tokens that it holds; fewer than a block has room for at most in the last one of a chain.
    pub tokens: u32,
    /// Whether it is full: one that is not is found again only by the same prompt, not by a longer one.
    pub full: bool,
    /// How often a lookup found it since it was cached.
    pub found: u32,
    /// Whether blocks that follow it in its chain are cached in the same level.
    pub has_children: bool,
    /// Its priority.
    pub priority: Priority,
    /// Whose it is, a number of the pool's choice.
    pub tenant: u64,
    /// When it was last looked up, or cached if it never was.
    pub used: PolicyTime,
}

impl BlockFacts {
    /// What a full block of default priority is before anything is known of it: the first of its
    /// chain, never found, without children, looked up at the beginning of time.
    #[must_use]
    pub const fn new(hash: BlockHash) -> Self {
        Self {
            hash,
            parent: None,
            depth: 0,
            tokens: 1,
            full: true,
            found: 0,
            has_children: false,
            priority: Priority::DEFAULT,
            tenant: 0,
            used: PolicyTime { lookups: 0, ms: 0 },
        }
    }
}

/// How cached content is going to be used, said by whoever holds it: what an engine knows of the future, and a pool
/// cannot see.
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

/// Decides which evictable block of one level goes next.
///
/// The caller keeps to the life of a block that the [module](self) describes. A policy is called
/// under the pool's lock: no operation may block, allocate, or take time that grows with the number
/// of blocks, other than amortised.
///
/// A pool checks what it is answered. A policy that chooses a block that is not evictable, that has
/// lost one, or that panics, is called no more: its level goes on with priority LRU. The pool counts a
/// [policy fault](crate::stats::PoolCounters::policy_faults) when the level needs its next victim. A panic ends
/// in the pool, whose operation goes on; the panic hook runs. [`len`](Self::len) is called by
/// [`check_integrity`](crate::PoolView::check_integrity) alone, and a panic there goes to that caller.
#[allow(clippy::len_without_is_empty, reason = "only a check of integrity counts them")]
pub trait EvictionPolicy: fmt::Debug + Send {
    /// The name that reports give the policy, such as `lru`.
    fn name(&self) -> &'static str;

    /// A lookup asked for `hash`, which is not cached in this level.
    ///
    /// Policies that remember evicted content learn from it. Come several misses before a victim is
    /// asked for, the last one counts.
    fn missed(&mut self, hash: BlockHash, now: PolicyTime) {
        let _ = (hash, now);
    }

    /// `block` was cached. Somebody holds it still.
    ///
    /// Of one request's blocks the head comes first, so that what is known of its parent is there.
    fn stored(&mut self, block: RecordId, facts: &BlockFacts) {
        let _ = (block, facts);
    }

    /// A lookup found `block`, whether somebody holds it already or not.
    ///
    /// All blocks that one lookup finds are found at the same time.
    fn found(&mut self, block: RecordId, now: PolicyTime) {
        let _ = (block, now);
    }

    /// Whoever holds `block` says how it will be used, which nothing that the pool sees tells.
    ///
    /// The next [`found`](Self::found) of the block makes a hint void, and so does its removal. A
    /// policy that can make no use of a hint ignores it.
    fn hinted(&mut self, block: RecordId, hint: ReuseHint, now: PolicyTime) {
        let _ = (block, hint, now);
    }

    /// Nobody holds the cached `block` any more: it may be chosen, unless it has children.
    ///
    /// Of one request's blocks the tail is to come first, which makes the head the most recent.
    fn evictable(&mut self, block: RecordId, facts: &BlockFacts);

    /// Whether the evictable `block` has cached children has changed to `has_children`.
    ///
    /// Of a block that is held nothing needs to be said: [`evictable`](Self::evictable) will tell.
    fn children(&mut self, block: RecordId, has_children: bool);

    /// Somebody holds `block`: it is not to be chosen until it is evictable again.
    fn held(&mut self, block: RecordId);

    /// The content of `block` was dropped, or has left the level, other than as a victim.
    fn removed(&mut self, block: RecordId);

    /// Finds the next block and takes it out, in one step; `None` if none is evictable.
    ///
    /// The caller tells its name with [`evicted`](Self::evicted), drops or moves its content, and calls
    /// [`children`](Self::children) for its parent if it was the last child.
    fn victim(&mut self, now: PolicyTime) -> Option<RecordId>;

    /// `block`, the last victim, held content of the name `hash`, which is dropped or moved now.
    ///
    /// Policies that remember evicted content learn its name from this.
    fn evicted(&mut self, block: RecordId, hash: BlockHash) {
        let _ = (block, hash);
    }

    /// Blocks that the policy would rather have evicted together with the last victim.
    ///
    /// They are the next victims in any case, so a caller that needs no more room may leave them.
    fn overdue(&self) -> usize {
        0
    }

    /// Evictable blocks, those with cached children among them.
    fn len(&self) -> usize;
}

impl RecordId {
    /// The block with an index below the number of blocks that a policy was made for.
    ///
    /// Policies are usable without a pool; a pool gives its blocks their ids itself.
    #[must_use]
    pub const fn from_index(index: u32) -> Self {
        Self(index)
    }
}
