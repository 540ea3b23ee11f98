//! A tier in a thread of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use kv_pool::{BlockHash, GroupId, guard};
use parking_lot::Mutex;

use crate::{BlockSink, BlockSource, LowerTier};

/// How often an idle thread lets its tier work.
const LOOK: Duration = Duration::from_micros(200);

/// Runs a tier in a thread of its own, so that its calls may take time. The order of calls is kept.
///
/// Dropping it ends the thread after the call that it is in. Blocks that were not begun count as failed.
#[derive(Debug)]
pub struct Background {
    orders: Option<Sender<Order>>,
    /// Set when the orders that wait are not to be begun.
    ends: Arc<AtomicBool>,
    told: Arc<Mutex<Told>>,
    survivors: Vec<(GroupId, BlockHash)>,
    thread: Option<JoinHandle<()>>,
}

/// What the tier has said since it was asked.
#[derive(Debug, Default)]
struct Told {
    dropped: Vec<(GroupId, BlockHash)>,
    gained: Vec<(GroupId, BlockHash)>,
}

#[derive(Debug)]
enum Order {
    Format(u64),
    Store(Vec<BlockSource>),
    Load(Vec<BlockSink>),
    Forget(Vec<(GroupId, BlockHash)>),
    Clear,
}

impl Background {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system's, if it has no thread.
    pub fn new(mut tier: impl LowerTier + 'static) -> std::io::Result<Self> {
        let mut survivors = Vec::new();
        tier.survivors(&mut survivors);
        let (orders, received) = mpsc::channel();
        let told: Arc<Mutex<Told>> = Arc::default();
        let tells = Arc::clone(&told);
        let ends = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&ends);
        let thread = std::thread::Builder::new().name("kv-tier".to_owned());
        let thread = thread.spawn(move || work(tier, &received, &ended, &tells))?;
        Ok(Self { orders: Some(orders), ends, told, survivors, thread: Some(thread) })
    }

    fn send(&self, order: Order) {
        // Without the thread, the order is dropped, and its blocks have failed.
        if let Some(orders) = &self.orders {
            drop(orders.send(order));
        }
    }
}

fn work(mut tier: impl LowerTier, orders: &Receiver<Order>, ends: &AtomicBool, told: &Mutex<Told>) {
    let (mut dropped, mut gained) = (Vec::new(), Vec::new());
    loop {
        match orders.recv_timeout(LOOK) {
            // Its blocks, and those of the orders behind it, have failed: they are dropped.
            _ if guard!(
                "tier.begins-nothing-behind-its-drop",
                ends.load(Ordering::Acquire),
                else false
            ) =>
            {
                return;
            }
            Ok(Order::Format(format)) => tier.set_format(format),
            Ok(Order::Store(blocks)) => tier.store(blocks),
            Ok(Order::Load(blocks)) => tier.load(blocks),
            Ok(Order::Forget(blocks)) => tier.forget(&blocks),
            Ok(Order::Clear) => tier.clear(),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        tier.poll(&mut dropped);
        tier.gained(&mut gained);
        if !dropped.is_empty() || !gained.is_empty() {
            let mut told = told.lock();
            told.dropped.append(&mut dropped);
            told.gained.append(&mut gained);
        }
    }
}

impl LowerTier for Background {
    fn set_format(&mut self, format: u64) {
        self.send(Order::Format(format));
    }

    fn store(&mut self, blocks: Vec<BlockSource>) {
        self.send(Order::Store(blocks));
    }

    fn load(&mut self, blocks: Vec<BlockSink>) {
        self.send(Order::Load(blocks));
    }

    fn forget(&mut self, blocks: &[(GroupId, BlockHash)]) {
        self.send(Order::Forget(blocks.to_vec()));
    }

    fn clear(&mut self) {
        self.send(Order::Clear);
    }

    fn poll(&mut self, dropped: &mut Vec<(GroupId, BlockHash)>) {
        dropped.append(&mut self.told.lock().dropped);
    }

    fn survivors(&mut self, found: &mut Vec<(GroupId, BlockHash)>) {
        found.append(&mut self.survivors);
    }

    fn gained(&mut self, found: &mut Vec<(GroupId, BlockHash)>) {
        found.append(&mut self.told.lock().gained);
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Release);
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            // What it panicked with was printed, and its blocks have failed.
            drop(thread.join());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tier whose first call waits for a word.
    #[derive(Debug)]
    struct Slow {
        go: Receiver<()>,
        calls: Arc<Mutex<Vec<usize>>>,
    }

    impl LowerTier for Slow {
        fn store(&mut self, _: Vec<BlockSource>) {}
        fn load(&mut self, _: Vec<BlockSink>) {}
        fn forget(&mut self, blocks: &[(GroupId, BlockHash)]) {
            let first = self.calls.lock().is_empty();
            self.calls.lock().push(blocks.len());
            if first {
                let _ = self.go.recv();
            }
        }
        fn clear(&mut self) {}
        fn poll(&mut self, _: &mut Vec<(GroupId, BlockHash)>) {}
    }

    #[test]
    fn orders_that_wait_are_not_begun_after_the_drop() {
        let (word, go) = mpsc::channel();
        let calls: Arc<Mutex<Vec<usize>>> = Arc::default();
        let mut tier = Background::new(Slow { go, calls: Arc::clone(&calls) }).unwrap();
        for count in 1..4 {
            tier.forget(&vec![(GroupId(0), BlockHash::ROOT); count]);
        }
        while calls.lock().is_empty() {
            std::thread::yield_now();
        }
        let ends = Arc::clone(&tier.ends);
        let speaks = std::thread::spawn(move || {
            // The drop has begun, and waits for the call that the tier is in.
            while !ends.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            word.send(())
        });
        drop(tier);
        speaks.join().unwrap().unwrap();
        assert_eq!(*calls.lock(), [1]);
    }
}
