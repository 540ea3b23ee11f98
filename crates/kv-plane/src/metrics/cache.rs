//! Metrics of a whole cache: bytes, transports and memory that grows.

use super::Exposition;
use crate::CacheStats;

impl Exposition {
    /// Adds the bytes that a cache has moved and the memory that it has mapped. Blocks and tokens are its
    /// [manager's](Self::manager).
    pub fn cache(&mut self, stats: &CacheStats) -> &mut Self {
        let ready = "Blocks of the first group that have memory, by tier.";
        self.gauge("kv_cache_ready_blocks", ready, &[("tier", "device")], stats.ready_blocks);
        self.gauge("kv_cache_ready_blocks", ready, &[("tier", "host")], stats.host_blocks);
        let help =
            "Pages mapped for the first group, ahead of need or by the call that needed them.";
        let pages = [("ahead", stats.pages_ahead), ("inline", stats.pages_inline)];
        self.counters("kv_cache_mapped_pages_total", help, "when", pages);
        let help = "Calls that found too few blocks ready and mapped pages themselves.";
        self.counter("kv_cache_growth_stalls_total", help, &[], stats.growth_stalls);
        let [lower_stored, lowest_stored] = stats.ways.stored;
        let [lower_loaded, lowest_loaded] = stats.ways.loaded;
        let ways = [
            ("device_to_host", stats.ways.device_to_host),
            ("host_to_device", stats.ways.host_to_device),
            ("copy_on_write", stats.ways.copy_on_write),
            ("host_to_lower", lower_stored),
            ("host_to_lowest", lowest_stored),
            ("lower_to_host", lower_loaded),
            ("lowest_to_host", lowest_loaded),
        ];
        let help = "Bytes of whole blocks moved, by the way.";
        self.counters("kv_cache_moved_bytes_total", help, "way", ways);
        for (name, carried) in stats.transports.by_name() {
            let name = name.replace(' ', "_");
            let labels = [("transport", name.as_str())];
            let help = "Blocks carried between device and host memory, by the transport.";
            self.counter("kv_cache_transport_blocks_total", help, &labels, carried.blocks);
            let help =
                "Batches of blocks carried between device and host memory, by the transport.";
            self.counter("kv_cache_transport_batches_total", help, &labels, carried.batches);
        }
        self
    }
}
