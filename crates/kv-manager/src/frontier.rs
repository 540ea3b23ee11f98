//! Prompts that are being computed: the next block of each, so that requests with the same prefix wait.

use std::collections::BTreeMap;
use std::sync::Arc;

use kv_pool::BlockHash;
use kv_pool::guard;
use parking_lot::Mutex;

/// The position and the name of the next block of a prompt that has no KV yet.
type Frontier = (usize, BlockHash);

/// The frontiers of all prompts that are being computed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Frontiers {
    prompts: Arc<Mutex<Prompts>>,
}

#[derive(Debug, Default)]
struct Prompts {
    next: u64,
    /// Only those that are being computed now, since every request that may wait looks at all of them.
    all: BTreeMap<u64, Frontier>,
}

impl Frontiers {
    /// Notes a prompt whose next block is `frontier`.
    pub(crate) fn enter(&self, frontier: Frontier) -> FrontierLease {
        let mut prompts = self.prompts.lock();
        let number = prompts.next;
        prompts.next += 1;
        prompts.all.insert(number, frontier);
        FrontierLease { all: self.clone(), number }
    }

    /// Whether a prompt with these names is being computed: the position of the block that is next there.
    pub(crate) fn find(&self, names: &[BlockHash]) -> Option<usize> {
        let prompts = self.prompts.lock();
        #[cfg(test)]
        crate::proportion::looks(prompts.all.len());
        let mut here = prompts.all.values().filter(|(at, name)| names.get(*at) == Some(name));
        here.next().map(|&(at, _)| at)
    }
}

/// One prompt's frontier, until the prompt is computed or dropped.
#[derive(Debug)]
pub(crate) struct FrontierLease {
    all: Frontiers,
    number: u64,
}

impl FrontierLease {
    pub(crate) fn advance(&self, frontier: Frontier) {
        self.all.prompts.lock().all.insert(self.number, frontier);
    }
}

impl Drop for FrontierLease {
    fn drop(&mut self) {
        guard!("manager.the-dropped-keep-nobody-waiting", {
            self.all.prompts.lock().all.remove(&self.number);
        });
    }
}
