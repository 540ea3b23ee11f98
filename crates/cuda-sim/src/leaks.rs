//! Live objects and memory, for leak checks.

use std::fmt;

/// Objects and memory that were created and not freed.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct LeakReport {
    /// Live `cuMemAlloc` allocations.
    pub allocations: usize,
    /// Bytes of these allocations.
    pub allocated_bytes: u64,
    /// Live pinned host allocations.
    pub pinned_regions: usize,
    /// Bytes of these regions.
    pub pinned_bytes: u64,
    /// Live address reservations.
    pub reservations: usize,
    /// Live mappings.
    pub mappings: usize,
    /// Physical handles not released.
    pub physical_handles: usize,
    /// Physical bytes that a mapping or a handle keeps alive.
    pub physical_bytes: u64,
    /// Streams not destroyed.
    pub streams: usize,
    /// Events not destroyed.
    pub events: usize,
    /// Modules not unloaded.
    pub modules: usize,
    /// Graphs and instantiated graphs not destroyed.
    pub graphs: usize,
}

impl LeakReport {
    /// Whether nothing is alive.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for LeakReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} allocations ({} bytes), {} pinned regions ({} bytes), {} reservations, {} mappings, \
             {} physical handles ({} physical bytes), {} streams, {} events, {} modules, {} graphs",
            self.allocations,
            self.allocated_bytes,
            self.pinned_regions,
            self.pinned_bytes,
            self.reservations,
            self.mappings,
            self.physical_handles,
            self.physical_bytes,
            self.streams,
            self.events,
            self.modules,
            self.graphs,
        )
    }
}
