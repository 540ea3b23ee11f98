//! Requests: what is to be admitted, the names of its blocks, and what came of it.

use std::sync::Arc;

use kv_pool::{BlockHash, guard, retention::RetentionPolicy, tenants::TenantId};
use kv_tier::TicketId;
use smallvec::SmallVec;

use crate::group::Marks;
use crate::lower::LoadWait;
use crate::names::{Frontier, Known, Namer};
use crate::{AdmitError, Content, Missing, Reuse, Sequence};

/// A request to be admitted. It keeps the names of its blocks, so that asking again is cheap.
///
/// # Examples
///
/// ```
/// use kv_manager::Request;
///
/// let mut request = Request::new(vec![1, 2, 3]);
/// request.tokens_max = 128;
/// assert_eq!(request.tokens(), 3);
/// ```
#[derive(Clone, Debug)]
pub struct Request {
    pub(crate) tokens: Wanted,
    /// What the content depends on beside token ids.
    pub content: Content,
    /// The tenant whose block counts include the sequence.
    pub tenant: TenantId,
    /// The priorities of the sequence's blocks once they are named, by token. Blocks found in the cache
    /// keep theirs.
    pub retention: Option<Arc<RetentionPolicy>>,
    /// What is known of the sequence's future.
    pub reuse: Reuse,
    /// Tokens that the sequence may come to have, if that is known: room for their ids is reserved.
    pub tokens_max: u64,
    /// The longest prefix that may be taken from the cache, in tokens; 0 looks nothing up.
    pub hit_max: u64,
    /// Whether it waits while another sequence computes the next block of its prefix, or while that is loaded,
    /// instead of computing the block as well.
    pub waits: bool,
    /// Whether it is admitted while loads bring a part of its prefix, once the worker has begun them, instead of when
    /// they have ended. The engine waits for each layer before it launches that layer. Until the loads have ended, ids
    /// that come out of its steps are not taken ([`Loading`](crate::SequenceError::Loading)), and if one is wrong or
    /// late, [`commit`](crate::Manager::commit) answers [`Redo`](crate::Committed::Redo). Of no effect without
    /// [`waits`](Self::waits).
    pub by_layers: bool,
    /// The load that it waits for, or has waited for.
    pub(crate) load: Option<LoadWait>,
}

/// The tokens of a request, in the form that the latest call has left.
#[derive(Clone, Debug)]
pub(crate) enum Wanted {
    Ids(Vec<u32>),
    Named(u64, Vec<BlockHash>),
    /// With names, of a generation.
    Known(Known),
    /// A sequence has them.
    Taken,
}

impl Request {
    /// A prompt of these token ids, without a tenant, that uses whatever is cached and waits for prefixes
    /// that are being computed.
    #[must_use]
    pub fn new(ids: Vec<u32>) -> Self {
        Self::of(Wanted::Ids(ids))
    }

    /// The same for an engine that names its blocks itself: `tokens` tokens, and the names of all blocks
    /// that they fill.
    #[must_use]
    pub fn named(tokens: u64, names: Vec<BlockHash>) -> Self {
        Self::of(Wanted::Named(tokens, names))
    }

    fn of(tokens: Wanted) -> Self {
        Self {
            tokens,
            content: Content::default(),
            tenant: TenantId::NOBODY,
            retention: None,
            reuse: Reuse::default(),
            tokens_max: 0,
            hit_max: u64::MAX,
            waits: true,
            by_layers: false,
            load: None,
        }
    }

    /// Tokens of the prompt; 0 once it is admitted.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        match &self.tokens {
            Wanted::Ids(ids) => ids.len() as u64,
            Wanted::Named(tokens, _) => *tokens,
            Wanted::Known(known) => known.tokens(),
            Wanted::Taken => 0,
        }
    }

    pub(crate) fn marks(&self) -> Marks {
        Marks { prompt: self.tokens(), shared: self.content.shared_tokens }
    }

    /// Whether it is admitted with the loads that are open.
    pub(crate) fn enters(&self) -> bool {
        self.load.as_ref().is_some_and(|load| load.enters)
    }
}

/// What a request waits for.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Waiting {
    /// Another sequence computes the next block of the same prefix, behind so many tokens.
    Prefix {
        /// Tokens of the prefix that are computed or being computed.
        tokens: u64,
    },
    /// A ticket brings what follows the cached part of its prefix from a tier below host memory.
    Load {
        /// The ticket.
        ticket: TicketId,
        /// Blocks of the ticket.
        blocks: u64,
    },
    /// Its tenant holds as much as it may ([`TenantError::HeldMax`](kv_pool::tenants::TenantError::HeldMax)), or an
    /// earlier request of the same tenant waits for that.
    Bound(Missing),
}

impl AsMut<Request> for Request {
    fn as_mut(&mut self) -> &mut Request {
        self
    }
}

/// A request, and what an engine knows it by.
impl<K> AsMut<Request> for (K, Request) {
    fn as_mut(&mut self) -> &mut Request {
        &mut self.1
    }
}

/// What came of one request, of which no queue is kept.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "an answer is taken apart at once")]
pub enum Answer {
    /// It is a sequence now, with blocks for its whole prompt, or for the first chunk of it in groups with a
    /// window, and that chunk reserved.
    Admitted(Sequence),
    /// Nothing has changed. Ask again in a later step.
    Waiting(Waiting),
    /// So much is missing. Ask again in a later step.
    NoRoom(Missing),
    /// All rows of the block table are in use. Ask again in a later step.
    NoRow,
    /// It can never be admitted.
    Refused(AdmitError),
}

/// What came of a queue of requests: what was admitted or refused has left it, and all others wait there in their order.
///
/// Positions are those in the queue as it is then. What is behind [`no_room`](Self::no_room), or behind the budget, was
/// not looked at, but for [loads](crate::Manager::admit) that may have begun.
#[derive(Debug)]
pub struct Admission<R = Request> {
    /// Requests that are sequences now, in their order. Each sequence has blocks for its whole prompt, or for the first
    /// chunk of it in groups with a window, and that chunk reserved. One is admitted without a list on the heap.
    pub admitted: SmallVec<[(R, Sequence); 1]>,
    /// Requests that can never be admitted, as they were, and why.
    pub refused: Vec<(R, AdmitError)>,
    /// Requests that wait for something of their own, which stops nobody behind them: their positions, and for what.
    pub waiting: Vec<(usize, Waiting)>,
    /// The first request for which there was no room, if there was one: its position, and what is missing.
    pub no_room: Option<(usize, NoRoom)>,
}

impl<R> Default for Admission<R> {
    fn default() -> Self {
        Self { admitted: SmallVec::new(), refused: Vec::new(), waiting: Vec::new(), no_room: None }
    }
}

/// What is missing where there is no room.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
pub enum NoRoom {
    /// A row: all of the block table are in use.
    #[error("all rows of the block table are in use")]
    Row,
    /// Blocks: of the device, or such as are not [kept for other
    /// tenants](kv_pool::tenants::TenantError::KeptForOthers). What other sequences give back helps.
    #[error("too few blocks: {0}")]
    Blocks(Missing),
    /// Blocks that the sequence's own tenant may hold: only what sequences of that tenant give back helps. Of a request that is
    /// [`Waiting::Bound`].
    #[error("its tenant may hold no more: {0}")]
    Bound(Missing),
}

kv_pool::one_line_debug!(NoRoom);

impl From<Missing> for NoRoom {
    fn from(missing: Missing) -> Self {
        if missing.is_bound() { Self::Bound(missing) } else { Self::Blocks(missing) }
    }
}

/// What came of a call that takes room for a sequence: all that it asked for, or nothing.
#[derive(Clone, Debug, Eq, PartialEq)]
#[must_use = "without room, nothing has changed"]
pub enum Room<T> {
    /// There was room.
    Given(T),
    /// So much is missing, and nothing has changed: suspend or drop another sequence, or ask again in a later step.
    Lacks(NoRoom),
}

impl<T> Room<T> {
    /// The same for a caller with nobody to suspend.
    ///
    /// # Errors
    /// [`NoRoom`].
    pub fn given(self) -> Result<T, NoRoom> {
        match self {
            Self::Given(given) => Ok(given),
            Self::Lacks(no_room) => Err(no_room),
        }
    }
}

impl Request {
    /// Has it know its names, unless it knows them and they are up to date.
    pub(crate) fn name(&mut self, namer: &Namer) -> Result<(), AdmitError> {
        let (content, salted_by_tenant) = namer.salted(self.tenant, &self.content)?;
        let known = match &mut self.tokens {
            Wanted::Ids(ids) => {
                namer.check_prompt(ids, &content)?;
                Known::of_ids(namer, std::mem::take(ids), content, salted_by_tenant)
            }
            Wanted::Named(count, names) => {
                namer.check_prompt(&[], &content)?;
                Known::of_names(namer, (*count, names), content, salted_by_tenant)?
            }
            Wanted::Known(known)
                if guard!(
                    "manager.renames-what-has-changed",
                    known.is_of(namer)
                        && known.generation() == namer.generation()
                        && known.has(&content, salted_by_tenant),
                    else true
                ) =>
            {
                return Ok(());
            }
            Wanted::Known(known) => known.renamed(namer, content, salted_by_tenant)?,
            Wanted::Taken => return Ok(()),
        };
        self.tokens = Wanted::Known(known);
        Ok(())
    }

    /// Its names, and how many of its tokens may be found in the cache.
    pub(crate) fn wanted(&self) -> (&[BlockHash], u64) {
        let Wanted::Known(known) = &self.tokens else { return (&[], 0) };
        (known.names(), self.hit_max.min(known.tokens().saturating_sub(1)))
    }

    /// Its names that may be found in the cache.
    pub(crate) fn findable(&self, namer: &Namer) -> &[BlockHash] {
        let (names, most) = self.wanted();
        &names[..(most / namer.unit()) as usize]
    }

    /// The position and the name of the next block behind `tokens` tokens that others could find.
    pub(crate) fn next_block(&self, namer: &Namer, tokens: u64) -> Option<Frontier> {
        let at = (tokens / namer.unit()) as usize;
        self.findable(namer).get(at).map(|&name| (at, name))
    }
}
