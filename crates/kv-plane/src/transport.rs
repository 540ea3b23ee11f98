//! How blocks travel between device and host memory: options and counts.

use std::fmt;
use std::str::FromStr;

use cuda_driver::{Device, DeviceError};
use kv_kernels::link::{HostLinkOptions, RateBySize, Transport, TransportProfile};

/// How blocks travel between the devices and host memory.
///
/// The blocks that a step evicts or brings back travel together, with one call for each change of
/// direction. Every choice gives the same bytes in the same order.
#[derive(Clone, Debug, Default)]
pub struct TransportRules {
    /// The way.
    pub choice: TransportChoice,
    /// Costs by which the cheapest way is chosen: for each device the first profile that [is of
    /// it](TransportProfile::is_of), or assumed costs if there is none.
    pub profiles: Vec<TransportProfile>,
    /// The resources of a device that transfers may take. There is no ring if only a kernel or the
    /// copy engine is chosen, or if the device has no memory for a ring.
    pub link: HostLinkOptions,
}

/// Which way blocks travel between device and host memory.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub enum TransportChoice {
    /// The copy engine where it reaches a third of the link's rate with such blocks, by the profile: it takes no
    /// multiprocessors, for which the other ways wait while the engine's kernels run. With shorter blocks the
    /// quickest way by the profile: two hops where many blocks are in a row in host memory, otherwise a
    /// kernel.
    #[default]
    Quickest,
    /// This way, wherever it can carry the blocks.
    Only(Transport),
    /// One asynchronous copy, with a call of its own, for each block: no kernel and no list of
    /// blocks.
    EachBlock,
}

impl TransportChoice {
    /// Every one.
    pub const ALL: [Self; 5] = [
        Self::Quickest,
        Self::Only(Transport::CopyEngine),
        Self::Only(Transport::DirectKernel),
        Self::Only(Transport::TwoHop),
        Self::EachBlock,
    ];

    /// Its name, which is read back: `auto`, `copy-engine`, `kernel`, `two-hop` or `each-block`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Quickest => "auto",
            Self::Only(Transport::CopyEngine) => "copy-engine",
            Self::Only(Transport::DirectKernel) => "kernel",
            Self::Only(Transport::TwoHop) => "two-hop",
            Self::EachBlock => "each-block",
        }
    }
}

impl fmt::Display for TransportChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A text that is not the name of a way.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[error("unknown transport {found:?}; expected auto, copy-engine, kernel, two-hop or each-block")]
pub struct UnknownTransport {
    /// The text.
    pub found: String,
}

cuda_driver::messages::one_line_debug!(UnknownTransport);

impl FromStr for TransportChoice {
    type Err = UnknownTransport;

    fn from_str(text: &str) -> Result<Self, UnknownTransport> {
        let known = Self::ALL.into_iter().find(|choice| choice.name() == text);
        known.ok_or_else(|| UnknownTransport { found: text.to_owned() })
    }
}

/// Counts of one way, where a batch on two devices counts twice.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub struct Carried {
    /// Batches of blocks.
    pub batches: u64,
    /// Blocks in them.
    pub blocks: u64,
}

impl Carried {
    pub(crate) fn add(&mut self, other: Self) {
        self.batches += other.batches;
        self.blocks += other.blocks;
    }
}

/// Counts of blocks enqueued between device and host memory, by way.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct TransportStats {
    /// A kernel that reads or writes host memory.
    pub direct_kernel: Carried,
    /// The copy engine, by one call for a batch where the driver has it.
    pub copy_engine: Carried,
    /// A kernel and the copy engine, through a ring of device memory.
    pub two_hop: Carried,
    /// One copy for each block; each is a batch of its own.
    pub each_block: Carried,
}

impl TransportStats {
    /// Each way by its name, in the order of the fields.
    #[must_use]
    pub fn by_name(&self) -> [(&'static str, Carried); 4] {
        [
            ("kernel", self.direct_kernel),
            ("copy engine", self.copy_engine),
            ("two hops", self.two_hop),
            ("a copy each", self.each_block),
        ]
    }

    pub(crate) fn count(&mut self, transport: Option<Transport>, carried: Carried) {
        let way = match transport {
            Some(Transport::DirectKernel) => &mut self.direct_kernel,
            Some(Transport::CopyEngine) => &mut self.copy_engine,
            Some(Transport::TwoHop) => &mut self.two_hop,
            None => &mut self.each_block,
        };
        way.add(carried);
    }

    pub(crate) fn add(&mut self, other: &Self) {
        self.direct_kernel.add(other.direct_kernel);
        self.copy_engine.add(other.copy_engine);
        self.two_hop.add(other.two_hop);
        self.each_block.add(other.each_block);
    }
}

/// Assumed cost of one copy of a batch beside its bytes, in nanoseconds, without a measurement.
const ASSUMED_COPY_NS: u64 = 600;

impl TransportRules {
    /// The profile that decides for a device, where blocks lie in pieces of `piece_bytes` bytes; `None` if
    /// blocks are copied one by one.
    pub(crate) fn profile(
        &self,
        device: &Device,
        piece_bytes: u64,
    ) -> Result<Option<TransportProfile>, DeviceError> {
        if self.choice == TransportChoice::EachBlock {
            return Ok(None);
        }
        let known = self.profiles.iter().find(|profile| profile.is_of(device.info(), None));
        let mut profile = match known {
            Some(profile) => profile.clone(),
            None => assumed(device, self.link.multiprocessors)?,
        };
        profile.forced = match self.choice {
            TransportChoice::Only(transport) => Some(transport),
            _ if engine_suffices(&profile, piece_bytes) => {
                profile.forced.or(Some(Transport::CopyEngine))
            }
            _ => profile.forced,
        };
        Ok(Some(profile))
    }

    /// The resources of a device's link, with a ring only if two hops are possible.
    pub(crate) fn link_options(&self, profile: &TransportProfile) -> HostLinkOptions {
        match profile.forced {
            None | Some(Transport::TwoHop) => self.link,
            Some(_) => HostLinkOptions { ring_buffers: 0, ..self.link },
        }
    }
}

/// Whether the copy engine reaches a third of the link's rate both ways with copies of so many bytes.
fn engine_suffices(profile: &TransportProfile, bytes: u64) -> bool {
    [&profile.to_host, &profile.to_pages].into_iter().all(|costs| {
        let most_ns = 3e9 * bytes as f64 / costs.copy_bytes_per_s as f64;
        costs.copy_bytes_per_s > 0
            && costs.fragments.piece_ns(bytes).is_some_and(|ns| ns <= most_ns)
    })
}

/// Assumed costs of a device without a measurement, batches of copies included.
fn assumed(device: &Device, multiprocessors: u32) -> Result<TransportProfile, DeviceError> {
    let mut profile = TransportProfile::assumed(device, multiprocessors.max(1))?;
    for costs in [&mut profile.to_host, &mut profile.to_pages] {
        let link = u128::from(costs.copy_bytes_per_s);
        if link == 0 || !costs.fragments.points().is_empty() {
            continue;
        }
        let rate = |bytes: u64| {
            let ns = u128::from(bytes) * 1_000_000_000 / link + u128::from(ASSUMED_COPY_NS);
            (bytes, (u128::from(bytes) * 1_000_000_000 / ns) as u64)
        };
        let sizes: [u64; 5] = [4 << 10, 32 << 10, 128 << 10, 512 << 10, 2 << 20];
        costs.fragments = RateBySize::new(&sizes.map(rate));
    }
    Ok(profile)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use cuda_sim::{SimConfig, SimDriver};
    use kv_kernels::link::DirectionCosts;

    use super::*;

    #[test]
    fn the_copy_engine_takes_what_it_carries_at_a_third_of_the_link() {
        let sim = Arc::new(SimDriver::new(SimConfig::default()).unwrap());
        let device = Device::open(sim, 0).unwrap();
        let forced = |rules: &TransportRules, bytes| {
            rules.profile(&device, bytes).unwrap().and_then(|profile| profile.forced)
        };
        let rules = TransportRules::default();
        let engine = Some(Transport::CopyEngine);
        let sizes = [2 << 20, 128 << 10, 32 << 10, 16 << 10, 4 << 10, 0];
        let assumed = sizes.map(|bytes| forced(&rules, bytes));
        assert_eq!(assumed, [engine, engine, engine, None, None, None]);

        // A measurement counts, in the direction in which the engine is slower.
        let mut measured = rules.profile(&device, 0).unwrap().unwrap();
        measured.to_pages.copy_bytes_per_s = 30_000_000_000;
        measured.to_pages.fragments = RateBySize::new(&[(64 << 10, 9_000_000_000)]);
        let by = |profile: &TransportProfile| TransportRules {
            profiles: vec![profile.clone()],
            ..TransportRules::default()
        };
        assert_eq!(forced(&by(&measured), 64 << 10), None);
        measured.to_pages.fragments = RateBySize::new(&[(64 << 10, 11_000_000_000)]);
        assert_eq!(forced(&by(&measured), 64 << 10), engine);
        // Nothing is known of an engine that is not there, or not measured.
        measured.to_host.copy_bytes_per_s = 0;
        assert_eq!(forced(&by(&measured), 64 << 10), None);
        measured.to_host = DirectionCosts::default();
        assert_eq!(forced(&by(&measured), 64 << 10), None);
        // What the caller forces comes first.
        let mut profile = rules.profile(&device, 0).unwrap().unwrap();
        profile.forced = Some(Transport::TwoHop);
        assert_eq!(forced(&by(&profile), 2 << 20), Some(Transport::TwoHop));
        let choice = TransportChoice::Only(Transport::DirectKernel);
        let only = TransportRules { choice, ..by(&profile) };
        assert_eq!(forced(&only, 2 << 20), Some(Transport::DirectKernel));
    }

    #[test]
    fn names_are_read_back() {
        for choice in TransportChoice::ALL {
            assert_eq!(choice.to_string().parse(), Ok(choice));
        }
        let unknown = "dma".parse::<TransportChoice>().unwrap_err();
        let line =
            "unknown transport \"dma\"; expected auto, copy-engine, kernel, two-hop or each-block";
        assert_eq!((unknown.to_string(), format!("{unknown:?}")), (line.into(), line.into()));
    }
}
