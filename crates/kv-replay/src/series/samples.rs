//! What a run did over time, in no more than [`SAMPLES_MAX`] samples however long it is.

use serde::{Deserialize, Serialize};

/// Most samples: when there are as many, every second one is given up, and from then on they are taken half as often.
pub const SAMPLES_MAX: usize = 400;

/// How two samples that follow each other become one.
#[derive(Clone, Copy)]
enum Join {
    /// The later value: of counts that only grow, and of what is there at a moment.
    Last,
    /// The larger value, so that no peak is lost.
    Most,
}

macro_rules! columns {
    ($($(#[$doc:meta])* $name:ident: $join:ident,)*) => {
        #[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
        pub struct Sample {
            $($(#[$doc])* pub $name: u64,)*
        }

        /// The samples of a run, a column for each figure. All columns have the same length.
        #[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
        pub struct Samples {
            /// Iterations of the engine in each sample but the last, which may have fewer.
            pub every: u64,
            $($(#[$doc])* pub $name: Vec<u64>,)*
        }

        impl Sample {
            /// This sample with a later one in it.
            fn then(self, later: Self) -> Self {
                Self { $($name: Join::$join.of(self.$name, later.$name),)* }
            }
        }

        impl Samples {
            fn add(&mut self, sample: &Sample) {
                $(self.$name.push(sample.$name);)*
            }

            /// Makes one sample of each two.
            fn halve(&mut self) {
                $(self.$name = self.$name.chunks(2).map(|pair| {
                    pair.iter().copied().reduce(|a, b| Join::$join.of(a, b)).unwrap_or(0)
                }).collect();)*
                self.every = self.every.saturating_mul(2);
            }

            /// Whether all columns have the same length.
            pub fn is_whole(&self) -> bool {
                [$(self.$name.len(),)*].iter().all(|&length| length == self.time_ns.len())
            }
        }
    };
}

columns! {
    /// When the sample ended, in nanoseconds since the run began.
    time_ns: Last,
    /// Iterations of the engine so far, also those without work.
    iterations: Last,
    /// Requests in the batch, at most in the sample.
    running: Most,
    /// Requests that wait to be admitted, at most in the sample.
    waiting: Most,
    /// Suspended requests, at most in the sample.
    suspended: Most,
    /// Device blocks in use.
    device_in_use: Last,
    /// Unused device blocks with content that a lookup may find.
    device_cached: Last,
    /// Device blocks without content.
    device_free: Last,
    /// Device blocks that were released, while steps may use them.
    device_retiring: Last,
    /// Host blocks in use, most of them by copies.
    host_in_use: Last,
    /// Unused host blocks with content that a lookup may find.
    host_cached: Last,
    /// Host blocks without content.
    host_free: Last,
    /// Host blocks that were released, while copies may use them.
    host_retiring: Last,
    /// Names that can be loaded from tiers below host memory.
    lower_names: Last,
    /// Blocks of prompts looked up so far.
    lookups: Last,
    /// Of these, blocks found on the device.
    hits_device: Last,
    /// Blocks found in host memory; what was loaded for the request from a tier below is among them.
    hits_host: Last,
    /// Blocks that were not found, though an earlier request had their content.
    lost: Last,
    /// Bytes of evicted and suspended blocks, copied to host memory so far.
    bytes_to_host: Last,
    /// Bytes of blocks that came back from host memory.
    bytes_to_device: Last,
    /// Bytes copied within devices.
    bytes_within: Last,
    /// Bytes stored in tiers below host memory.
    bytes_stored: Last,
    /// Bytes loaded from them.
    bytes_loaded: Last,
    /// Blocks whose device memory was reused for other content.
    evicted: Last,
    /// Of the evicted blocks, those that the store policy has not stored in host memory.
    refused: Last,
    /// Of these, blocks that were asked for while host memory would have had them still.
    regretted: Last,
    /// Answers to requests that wait for a prefix which another one computes.
    stalls_prefix: Last,
    /// Answers to requests that wait for a load from a tier below host memory.
    stalls_load: Last,
    /// Requests and reservations for which there was no room.
    stalls_room: Last,
    /// Requests for which no row of the block table was free.
    stalls_row: Last,
    /// Calls that found too little memory mapped, and mapped it themselves.
    stalls_growth: Last,
    /// Requests that were preempted to make room for others.
    preemptions: Last,
    /// Requests that have finished.
    finished: Last,
    /// Prompt tokens that were computed.
    prompt_tokens: Last,
    /// Tokens that were generated.
    generated_tokens: Last,
}

impl Join {
    fn of(self, earlier: u64, later: u64) -> u64 {
        match self {
            Self::Last => later,
            Self::Most => earlier.max(later),
        }
    }
}

#[derive(Debug)]
pub struct Sampler {
    kept: Samples,
    open: Option<Sample>,
    /// Iterations in the open sample.
    joined: u64,
}

impl Default for Sampler {
    fn default() -> Self {
        Self { kept: Samples { every: 1, ..Samples::default() }, open: None, joined: 0 }
    }
}

impl Sampler {
    /// Adds what an iteration has left.
    pub fn add(&mut self, sample: Sample) {
        self.open = Some(self.open.map_or(sample, |open| open.then(sample)));
        self.joined += 1;
        if self.joined < self.kept.every {
            return;
        }
        self.close();
        if self.kept.time_ns.len() >= SAMPLES_MAX {
            self.kept.halve();
        }
    }

    fn close(&mut self) {
        if let Some(open) = self.open.take() {
            self.kept.add(&open);
        }
        self.joined = 0;
    }

    pub fn samples(mut self) -> Samples {
        self.close();
        self.kept
    }
}
