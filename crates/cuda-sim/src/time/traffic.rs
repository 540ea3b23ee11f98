//! Counts the bytes that kernels move, while they run.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::host_memory::HOST_END;

/// Number of counters that threads share. A reference may load on several threads; separate
/// counters are then several times faster than a single one.
pub(crate) const SHARDS: usize = 16;

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Traffic {
    pub(crate) loaded: u64,
    pub(crate) stored: u64,
    pub(crate) host_loaded: u64,
    pub(crate) host_stored: u64,
}

/// Counts the bytes that the running kernel moves.
#[derive(Debug, Default)]
pub(crate) struct TrafficCounter {
    loads: [Shard; SHARDS],
    stored: u64,
    host_stored: u64,
}

/// A counter on cache lines of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Shard {
    loaded: AtomicU64,
    host_loaded: AtomicU64,
}

thread_local! {
    static SHARD: usize = {
        static NEXT: AtomicUsize = const { AtomicUsize::new(0) };
        NEXT.fetch_add(1, Ordering::Relaxed) % SHARDS
    };
}

/// The counter of this thread.
#[inline]
pub(crate) fn shard() -> usize {
    SHARD.with(|&shard| shard)
}

impl TrafficCounter {
    #[inline]
    pub(crate) fn load(&self, address: u64, bytes: u64) {
        let shard = &self.loads[shard()];
        let count = if address < HOST_END { &shard.host_loaded } else { &shard.loaded };
        count.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn store(&mut self, address: u64, bytes: u64) {
        if address < HOST_END {
            self.host_stored += bytes;
        } else {
            self.stored += bytes;
        }
    }

    /// The counts since the last call.
    pub(crate) fn take(&mut self) -> Traffic {
        let mut traffic = Traffic {
            stored: std::mem::take(&mut self.stored),
            host_stored: std::mem::take(&mut self.host_stored),
            ..Traffic::default()
        };
        for shard in &mut self.loads {
            traffic.loaded += std::mem::take(shard.loaded.get_mut());
            traffic.host_loaded += std::mem::take(shard.host_loaded.get_mut());
        }
        traffic
    }
}
