//! Metrics of a tier of files.

use kv_disk::{DiskStats, Miss, Unstored};

use super::Exposition;

impl Exposition {
    /// Adds what a tier of files holds and has done.
    pub fn disk(&mut self, stats: &DiskStats) -> &mut Self {
        for (name, help, count) in [
            ("kv_cache_disk_slots", "Slots of the files.", stats.slots),
            (
                "kv_cache_disk_used_slots",
                "Slots with a record that can be loaded.",
                stats.used_slots,
            ),
            ("kv_cache_disk_files_off", "Files that are off after too many errors.", stats.off),
        ] {
            self.gauge(name, help, &[], count);
        }
        for (name, help, count) in [
            ("kv_cache_disk_stored_blocks_total", "Blocks stored in files.", stats.stored),
            (
                "kv_cache_disk_loaded_blocks_total",
                "Blocks loaded from files, and right.",
                stats.loaded,
            ),
            (
                "kv_cache_disk_evicted_blocks_total",
                "Blocks in files that made room for others.",
                stats.evicted,
            ),
            (
                "kv_cache_disk_written_bytes_total",
                "Bytes written to files, all told.",
                stats.written_bytes,
            ),
            ("kv_cache_disk_read_bytes_total", "Bytes read from files.", stats.read_bytes),
            (
                "kv_cache_disk_failed_operations_total",
                "Reads and writes that ended with an error.",
                stats.failed_operations,
            ),
        ] {
            self.counter(name, help, &[], count);
        }
        let help = "Loads from files that were misses, by the reason.";
        let misses = Miss::ALL.map(|miss| (miss.name(), stats.missed_as(miss)));
        self.counters("kv_cache_disk_misses_total", help, "reason", misses);
        let help = "Blocks that files did not store, by the reason.";
        let unstored = Unstored::ALL.map(|reason| (reason.name(), stats.unstored_as(reason)));
        self.counters("kv_cache_disk_unstored_blocks_total", help, "reason", unstored);
        self
    }
}
