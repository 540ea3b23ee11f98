//! What tiers have had since before their workers began, such as files of an earlier process.

use std::collections::HashMap;

use kv_pool::{guard, retention::Retention};
use smallvec::SmallVec;

use super::Key;
use crate::events::Below;
use crate::plan::{Gained, Survivors};
use crate::{CompletionError, GroupId, Manager, WorkerId};

/// Which workers have told what they have, until all have.
#[derive(Debug, Default)]
pub(super) struct Tally {
    told: SmallVec<[WorkerId; 4]>,
    /// At how many of them each block is.
    blocks: HashMap<Key, usize>,
    /// The tier was emptied before all had told.
    is_void: bool,
}

impl Tally {
    /// Forgets what was told, and not that it was told.
    pub(super) fn clear(&mut self) {
        self.blocks.clear();
        self.is_void = true;
    }
}

impl Manager {
    /// Takes in what a tier of a worker has had since before the worker began. Once all workers have told it of this
    /// tier, the blocks that are at all of them are found there, and the others are forgotten.
    ///
    /// Blocks of groups that there are not are forgotten, too. Readers of events are told of the others, whose
    /// [place](crate::StoredBlocks::is_placed) in a prefix is not known before they are loaded.
    ///
    /// # Errors
    /// [`CompletionError`]; nothing was taken in.
    pub fn take_survivors(&mut self, survivors: &Survivors) -> Result<(), CompletionError> {
        let &Survivors { worker, tier, ref blocks } = survivors;
        self.steps.workers().completed(worker)?;
        let at = self.lower.check_tier(tier)?;
        let (workers, groups) = (self.steps.workers().count(), self.groups.len());
        let tally = &mut self.lower.tiers[at].survivors;
        if tally.told.contains(&worker) {
            return Err(CompletionError::Again { worker, tier });
        }
        tally.told.push(worker);
        let mut blocks = blocks.clone();
        blocks.sort_unstable();
        blocks.dedup();
        for key in blocks {
            *tally.blocks.entry(key).or_default() += 1;
        }
        if tally.told.len() < workers {
            return Ok(());
        }
        // In the same order in every run, which plans and events have too.
        let is_void = guard!("manager.survivors-end-with-a-reset", tally.is_void, else false);
        let mut all: Vec<_> = std::mem::take(&mut tally.blocks).into_iter().collect();
        all.sort_unstable_by_key(|&(key, _)| key);
        for (key, count) in all {
            let GroupId(group) = key.0;
            let state = &mut self.lower.tiers[at];
            // What has been stored since is known, and what is being stored will be.
            if state.index.contains_key(&key) || state.asked.contains(&key) {
                continue;
            }
            let lacks = guard!("manager.survivors-are-at-all-workers", count < workers, else false);
            if lacks || is_void || usize::from(group) >= groups {
                self.forget_in(at, key);
                continue;
            }
            self.find_from_now(at, key);
        }
        Ok(())
    }

    /// Takes in what has come to a tier of a worker otherwise than by a store of this manager. The blocks are found there,
    /// on the word of one worker: where another one does not have a block, its load is a miss. Blocks of groups that
    /// there are not are passed over. Readers of events are told as of [survivors](Self::take_survivors).
    ///
    /// # Errors
    /// [`CompletionError`]; nothing was taken in.
    pub fn take_gained(&mut self, gained: &Gained) -> Result<(), CompletionError> {
        let &Gained { worker, tier, ref blocks } = gained;
        self.steps.workers().completed(worker)?;
        let at = self.lower.check_tier(tier)?;
        for &key in blocks {
            let state = &self.lower.tiers[at];
            // What is being stored will be known.
            let told = state.index.contains_key(&key) || state.asked.contains(&key);
            if !told && usize::from(key.0.0) < self.groups.len() {
                self.find_from_now(at, key);
            }
        }
        Ok(())
    }

    /// Content that this manager has not stored is found in a tier from now on, and readers of events are told.
    fn find_from_now(&mut self, at: usize, key: Key) {
        self.lower.tiers[at].index.insert(key, Retention::default());
        guard!("manager.survivors-are-told", self.home.note_below(at, key, Below::Survived));
    }
}
