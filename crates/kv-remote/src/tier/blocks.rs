//! Blocks on their way to members or from them: each ends once, whichever member is first.

use std::sync::OnceLock;
use std::time::Duration;

use kv_tier::{BlockFault, BlockSink, BlockSource, RecordKey};
use parking_lot::Mutex;

/// A block to be loaded, which one member after the other is asked for.
#[derive(Debug)]
pub(super) struct Loading {
    pub(super) key: RecordKey,
    /// When it has failed, by the tier's clock.
    pub(super) until: Duration,
    state: Mutex<Load>,
}

#[derive(Debug)]
struct Load {
    /// Taken by the first who ends it.
    sink: Option<BlockSink>,
    /// The members that keep it and were not asked, the next one last.
    places: Vec<usize>,
    /// Members that were asked and have not answered.
    asked: usize,
    /// When another one is asked.
    hedge: Option<Duration>,
}

impl Loading {
    pub(super) fn new(
        sink: BlockSink,
        mut places: Vec<usize>,
        hedge: Duration,
        until: Duration,
    ) -> Self {
        places.reverse();
        let key = sink.key();
        let load = Load { sink: Some(sink), places, asked: 0, hedge: Some(hedge) };
        Self { key, until, state: Mutex::new(load) }
    }

    pub(super) fn has_ended(&self) -> bool {
        self.state.lock().sink.is_none()
    }

    /// Whether the first member is late, and there is another one. True once.
    pub(super) fn is_to_be_hedged(&self, now: Duration) -> bool {
        let mut load = self.state.lock();
        let is_late = load.hedge.is_some_and(|at| at <= now);
        is_late && load.sink.is_some() && !load.places.is_empty() && load.hedge.take().is_some()
    }

    /// The next member to be asked. If there is none, and no answer is open, the load has failed.
    pub(super) fn next(&self) -> Option<usize> {
        let mut load = self.state.lock();
        load.sink.as_ref()?;
        if let Some(member) = load.places.pop() {
            load.asked += 1;
            return Some(member);
        }
        if load.asked == 0
            && let Some(sink) = load.sink.take()
        {
            sink.failed(BlockFault::Missing);
        }
        None
    }

    /// A member has answered that it does not give the block.
    pub(super) fn missed(&self) {
        let mut load = self.state.lock();
        load.asked = load.asked.saturating_sub(1);
    }

    /// Takes a record that has come. None if another one came before; else whether the worker has taken it.
    pub(super) fn arrived(&self, record: &[u8]) -> Option<bool> {
        // Not under the lock: a copy takes its time, and only one has the sink.
        let mut sink = self.state.lock().sink.take()?;
        let written = sink.write_at(0, record).and_then(|()| {
            // Fewer bytes than a record has are found out here.
            sink.done()
        });
        Some(written.is_ok())
    }

    /// Ends the load; whether it had not ended.
    pub(super) fn give_up(&self) -> bool {
        let sink = self.state.lock().sink.take();
        let had = sink.is_some();
        sink.into_iter().for_each(|sink| sink.failed(BlockFault::Failed));
        had
    }
}

/// A block to be stored, which several members are to keep.
#[derive(Debug)]
pub(super) struct Storing {
    pub(super) key: RecordKey,
    /// When it has failed, by the tier's clock.
    pub(super) until: Duration,
    state: Mutex<Store>,
    /// Read once, by the first member's thread.
    record: OnceLock<Option<Vec<u8>>>,
}

#[derive(Debug)]
struct Store {
    source: Option<BlockSource>,
    /// Members that have not answered.
    left: usize,
    /// Members that keep it.
    kept: usize,
}

impl Storing {
    pub(super) fn new(source: BlockSource, places: usize, until: Duration) -> Self {
        let key = source.key();
        let store = Store { source: Some(source), left: places, kept: 0 };
        Self { key, until, state: Mutex::new(store), record: OnceLock::new() }
    }

    pub(super) fn has_ended(&self) -> bool {
        self.state.lock().source.is_none()
    }

    /// The record; none if the block has ended.
    pub(super) fn record(&self) -> Option<&[u8]> {
        let read = || {
            let store = self.state.lock();
            store.source.as_ref().and_then(|source| source.record().ok())
        };
        // One that was given up meanwhile is not put any more.
        self.record.get_or_init(read).as_deref().filter(|_| !self.has_ended())
    }

    /// A member has answered. Once all have, the store has ended: the outcome, unless it had ended before.
    pub(super) fn answered(&self, keeps: bool) -> Option<bool> {
        let mut store = self.state.lock();
        store.left = store.left.saturating_sub(1);
        store.kept += usize::from(keeps);
        if store.left > 0 {
            return None;
        }
        let source = store.source.take()?;
        match store.kept {
            0 => source.failed(BlockFault::Failed),
            _ => source.done(),
        }
        Some(store.kept > 0)
    }

    /// Ends the store as one that some members keep, if any does; whether it has failed now.
    pub(super) fn give_up(&self) -> bool {
        let mut store = self.state.lock();
        let Some(source) = store.source.take() else { return false };
        let kept = store.kept > 0;
        if kept {
            source.done();
        } else {
            source.failed(BlockFault::Failed);
        }
        !kept
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kv_manager::TierTransfers;
    use kv_pool::{BlockHash, BlockId, GroupId, Tier};
    use kv_tier::{Direction, HostBlocks, LowerTier, TicketId, Transfer};

    use super::*;

    /// Keeps what it is to load.
    #[derive(Clone, Debug, Default)]
    struct Keeps(Arc<Mutex<Vec<BlockSink>>>);

    impl LowerTier for Keeps {
        fn store(&mut self, _: Vec<BlockSource>) {}

        fn load(&mut self, blocks: Vec<BlockSink>) {
            self.0.lock().extend(blocks);
        }

        fn forget(&mut self, _: &[(GroupId, BlockHash)]) {}

        fn clear(&mut self) {}

        fn poll(&mut self, _: &mut Vec<(GroupId, BlockHash)>) {}
    }

    #[derive(Debug)]
    struct Host;

    impl HostBlocks for Host {
        fn block_bytes(&self) -> usize {
            16
        }

        fn read(&self, _: BlockId, _: usize, _: &mut [u8]) -> bool {
            true
        }

        fn write(&self, _: BlockId, _: usize, _: &[u8]) -> bool {
            true
        }
    }

    /// A load that these members are asked for, with the worker that waits for it.
    fn loading(places: &[usize]) -> (Loading, TierTransfers) {
        let keeps = Keeps::default();
        let mut worker = TierTransfers::new(vec![Box::new(keeps.clone())], 1);
        let host: Arc<dyn HostBlocks> = Arc::new(Host);
        let blocks = vec![(BlockHash::from_u128(1), BlockId::from(0))];
        let (ticket, group) = (TicketId(1), GroupId(0));
        let (tier, direction) = (Tier::Third, Direction::Load);
        worker.begin(&Transfer { ticket, tier, group, direction, blocks }, &host).unwrap();
        let sink = keeps.0.lock().pop().unwrap();
        (Loading::new(sink, places.to_vec(), Duration::MAX, Duration::MAX), worker)
    }

    #[test]
    fn members_are_asked_in_their_order_and_a_load_fails_when_the_last_has_answered() {
        let (load, _worker) = loading(&[7, 3]);
        assert_eq!((load.next(), load.next()), (Some(7), Some(3)));
        load.missed();
        assert_eq!((load.next(), load.has_ended()), (None, false), "one may give it yet");
        load.missed();
        assert_eq!((load.next(), load.has_ended()), (None, true));
    }

    #[test]
    fn nobody_is_asked_for_what_was_given_up() {
        let (load, _worker) = loading(&[7, 3]);
        assert_eq!(load.next(), Some(7));
        assert!(load.give_up() && !load.give_up());
        assert_eq!((load.next(), load.has_ended()), (None, true));
    }
}
