//! What a run did over time: samples, histograms and a timeline, of bounded length however long it is. While it plays, a run that records
//! also keeps when each block of the trace was last asked for, which takes as much memory as the trace.
//!
//! On simulated devices the time is virtual, and the series of two equal runs are equal but for
//! [`Series::calls_ns`], which are measured by the host's clock.

mod asked;
mod histogram;
mod samples;
mod timeline;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub(crate) use asked::Asked;
pub use histogram::{Histogram, HistogramReport};
pub use samples::{SAMPLES_MAX, Sample, Sampler, Samples};
pub use timeline::{Name, SPANS_MAX, Span, Timeline, TimelineBuilder, Track};

#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Series {
    /// Whose time it is: `virtual`, or `host` where there is no virtual time.
    pub clock: String,
    /// Bytes a second that the link of a device carries at most, to the device and to host memory, where that is known.
    pub link_bytes_per_s: Option<[u64; 2]>,
    pub samples: Samples,
    /// How long requests waited to be admitted, in nanoseconds, by what they waited for: `prefix`, `load`, `room` or `row`.
    pub waits_ns: BTreeMap<String, HistogramReport>,
    /// How long copies between a device and host memory took from the moment that they could begin, in nanoseconds:
    /// `onboard` and `offload`. Empty where devices do not tell.
    pub moves_ns: BTreeMap<String, HistogramReport>,
    /// How long calls took by the host's clock, in nanoseconds: `admit`, `reserve`, `stage` and others. On simulated devices
    /// a call may run what a device would do meanwhile.
    pub calls_ns: BTreeMap<String, HistogramReport>,
    /// How long ago the content of found blocks had been asked for, in milliseconds of arrivals; a value for each block.
    pub age_at_reuse_ms: HistogramReport,
    /// How long ago the content of blocks had been asked for that was not there any more; a value for each block.
    pub age_at_loss_ms: HistogramReport,
    /// Blocks that a cache of prompts had to have to find blocks that were not there any more, if it evicted in the order of
    /// last use; a value for each block. Empty in reports of older versions.
    #[serde(default)]
    pub cache_at_loss_blocks: HistogramReport,
    /// How long evicted blocks had been unused, in milliseconds; of the blocks of one iteration their mean.
    pub age_at_eviction_ms: HistogramReport,
    pub timeline: Timeline,
}

impl Series {
    /// Whether all columns and indices fit each other, as those of a file may not.
    pub fn is_whole(&self) -> bool {
        self.samples.is_whole() && self.timeline.is_whole()
    }
}
