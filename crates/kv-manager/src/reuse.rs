//! What the engine knows of a sequence's future, told to the pools when it leaves.

use kv_pool::{Pinned, policy::ReuseHint};

use crate::Sequence;
use crate::group::{Held, Shape};

/// How the blocks of a sequence will be used once it has left. Advice for
/// [eviction](kv_pool::policy), which is taken when the sequence is dropped, and void where other sequences
/// hold the blocks then, or find them later.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
///
/// use kv_manager::{Request, Reuse};
/// use kv_pool::policy::ReuseHint;
///
/// let mut request = Request::new((0..100).collect());
/// // 64 tokens of system prompt, and a tool that takes about two seconds to answer.
/// let then = Some(ReuseHint::BackIn(Duration::from_secs(2)));
/// request.reuse = Reuse { shared_head: 64, then };
/// ```
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Reuse {
    /// The first tokens, which other sessions begin with too, as a system prompt: blocks that are full of them. They
    /// are not over with the session.
    pub shared_head: u64,
    /// What becomes of the session; `None` if the engine does not know.
    pub then: Option<ReuseHint>,
}

impl Sequence {
    /// How its blocks will be used once it has left, as its [request](crate::Request::reuse) or
    /// [`set_reuse`](Self::set_reuse) said.
    #[must_use]
    pub fn reuse(&self) -> Reuse {
        self.reuse
    }

    /// Says how its blocks will be used once it has left; the last word before the drop counts. A
    /// [fork](crate::Manager::fork) has the reuse that its origin had.
    pub fn set_reuse(&mut self, reuse: Reuse) {
        self.reuse = reuse;
    }

    /// Tells the pools, once all blocks have names that get one.
    pub(crate) fn tell_reuse(&self) {
        let Reuse { shared_head, then } = self.reuse;
        if self.reuse == Reuse::default() {
            return;
        }
        for (held, shape) in self.held.iter().zip(self.home.shapes()) {
            let head = held.named_before(shape, shared_head);
            Pinned::hint(held.blocks.shared(), 0..head, ReuseHint::SharedHead);
        }
        match then {
            Some(ReuseHint::Over) => self.tell_over(shared_head),
            Some(then) => {
                for (held, shape) in self.held.iter().zip(self.home.shapes()) {
                    let head = held.named_before(shape, shared_head);
                    Pinned::hint(held.blocks.shared(), head..usize::MAX, then);
                }
            }
            None => {}
        }
    }

    /// Which blocks other sessions begin with is seen where blocks follow each other. The groups where they do not
    /// go by those where they do.
    fn tell_over(&self, shared_head: u64) {
        let mut over_from = u64::MAX;
        let groups = || self.held.iter().zip(self.home.shapes());
        for (held, shape) in groups().filter(|(_, shape)| shape.is_chained()) {
            let head = held.named_before(shape, shared_head);
            let over = Pinned::hint(held.blocks.shared(), head..usize::MAX, ReuseHint::Over);
            let kept = held.blocks.shared_before(usize::MAX).saturating_sub(over) as u64;
            over_from = over_from.min(kept.saturating_mul(shape.block_tokens.into()));
        }
        for (held, shape) in groups().filter(|(_, shape)| !shape.is_chained()) {
            let head = held.named_before(shape, shared_head.max(over_from));
            Pinned::hint(held.blocks.shared(), head..usize::MAX, ReuseHint::Over);
        }
    }
}

impl Held {
    /// Blocks with names that end before a token.
    fn named_before(&self, shape: &Shape, token: u64) -> usize {
        let full = shape.whole_blocks(token);
        self.blocks.shared_before(full)
    }
}
