//! A tier in a thread of its own.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use kv_pool::BlockHash;
use parking_lot::Mutex;

use super::{BlockSink, BlockSource, LowerTier};

/// How often an idle thread lets its tier work.
const LOOK: Duration = Duration::from_micros(200);

/// Runs a tier in a thread of its own, so that its calls may take time. The order of calls is kept.
///
/// Dropping it ends the thread after the call that it is in. Blocks that were not begun count as failed.
#[derive(Debug)]
pub struct Background {
    orders: Option<Sender<Order>>,
    dropped: Arc<Mutex<Vec<BlockHash>>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
enum Order {
    Store(Vec<BlockSource>),
    Load(Vec<BlockSink>),
    Forget(Vec<BlockHash>),
    Clear,
}

impl Background {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system's, if it has no thread.
    pub fn new(tier: impl LowerTier + 'static) -> std::io::Result<Self> {
        let (orders, received) = mpsc::channel();
        let dropped: Arc<Mutex<Vec<BlockHash>>> = Arc::default();
        let told = Arc::clone(&dropped);
        let thread = std::thread::Builder::new().name("kv-tier".to_owned());
        let thread = thread.spawn(move || work(tier, &received, &told))?;
        Ok(Self { orders: Some(orders), dropped, thread: Some(thread) })
    }

    fn send(&self, order: Order) {
        // Without the thread, the order is dropped, and its blocks have failed.
        if let Some(orders) = &self.orders {
            drop(orders.send(order));
        }
    }
}

fn work(mut tier: impl LowerTier, orders: &Receiver<Order>, told: &Mutex<Vec<BlockHash>>) {
    let mut dropped = Vec::new();
    loop {
        match orders.recv_timeout(LOOK) {
            Ok(Order::Store(blocks)) => tier.store(blocks),
            Ok(Order::Load(blocks)) => tier.load(blocks),
            Ok(Order::Forget(names)) => tier.forget(&names),
            Ok(Order::Clear) => tier.clear(),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        tier.poll(&mut dropped);
        if !dropped.is_empty() {
            told.lock().append(&mut dropped);
        }
    }
}

impl LowerTier for Background {
    fn store(&mut self, blocks: Vec<BlockSource>) {
        self.send(Order::Store(blocks));
    }

    fn load(&mut self, blocks: Vec<BlockSink>) {
        self.send(Order::Load(blocks));
    }

    fn forget(&mut self, names: &[BlockHash]) {
        self.send(Order::Forget(names.to_vec()));
    }

    fn clear(&mut self) {
        self.send(Order::Clear);
    }

    fn poll(&mut self, dropped: &mut Vec<BlockHash>) {
        dropped.append(&mut self.dropped.lock());
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            // What it panicked with was printed, and its blocks have failed.
            drop(thread.join());
        }
    }
}
