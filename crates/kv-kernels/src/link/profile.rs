//! What each way of moving bytes costs on a device and its link, and which is the cheapest for a
//! transfer.

use std::fmt;

use cuda_driver::{Device, DeviceAttribute, DeviceError, DeviceInfo};

use super::pieces::Taper;
use super::{HostDirection, Transport};

/// Bytes a second for pieces of some sizes, rising; between two sizes the cost of a piece is drawn as
/// a straight line.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct RateBySize {
    /// # Invariants
    /// Sizes rise; neither sizes nor rates are 0.
    points: Vec<(u64, u64)>,
}

impl RateBySize {
    /// Takes `(bytes of a piece, bytes a second)` in any order; what has a 0 is left out, and of two
    /// points with one size the first counts.
    #[must_use]
    pub fn new(points: &[(u64, u64)]) -> Self {
        let mut points: Vec<_> =
            points.iter().copied().filter(|&(bytes, rate)| bytes > 0 && rate > 0).collect();
        points.sort_by_key(|&(bytes, _)| bytes);
        points.dedup_by_key(|&mut (bytes, _)| bytes);
        Self { points }
    }

    /// The points.
    #[must_use]
    pub fn points(&self) -> &[(u64, u64)] {
        &self.points
    }

    /// Nanoseconds of one piece of `bytes` bytes; `None` where nothing was measured.
    ///
    /// Below the first point a piece costs what that one costs; above the last it goes at its rate.
    #[must_use]
    pub fn piece_ns(&self, bytes: u64) -> Option<f64> {
        let ns = |(bytes, rate): (u64, u64)| bytes as f64 * 1e9 / rate as f64;
        let after = self.points.partition_point(|&(size, _)| size < bytes);
        let above = self.points.get(after).copied();
        let below = after.checked_sub(1).map(|before| self.points[before]);
        Some(match (below, above) {
            (None, None) => return None,
            (None, Some(first)) => ns(first),
            (Some(last), None) => bytes as f64 * 1e9 / last.1 as f64,
            (Some(low), Some(high)) => {
                let part = (bytes - low.0) as f64 / (high.0 - low.0) as f64;
                ns(low) + part * (ns(high) - ns(low))
            }
        })
    }

    /// Nanoseconds of `total` bytes in pieces of `bytes` bytes.
    fn total_ns(&self, total: u64, bytes: u64) -> Option<f64> {
        let bytes = bytes.clamp(1, total.max(1));
        Some(self.piece_ns(bytes)? * total as f64 / bytes as f64)
    }
}

/// What moving bytes costs in one direction.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct DirectionCosts {
    /// What a copy engine takes for a copy beside its bytes, in nanoseconds.
    pub copy_setup_ns: u64,
    /// Bytes a second of a long copy; 0 where there is no engine that copies beside kernels.
    pub copy_bytes_per_s: u64,
    /// What two hops take at their start, and again at their end, beside the shortest piece's kernel
    /// and the copies, in nanoseconds.
    pub handover_ns: u64,
    /// What each of several kernels between pages and device memory takes beside its bytes, in
    /// nanoseconds.
    pub walk_setup_ns: u64,
    /// What a kernel over host memory takes beside its bytes, in nanoseconds.
    pub direct_setup_ns: u64,
    /// Kernels that access host memory, by the bytes that lie together in the pages.
    pub direct: RateBySize,
    /// Kernels between pages and device memory, limited as a transfer is, likewise.
    pub walk: RateBySize,
    /// Copies of fragments by one call, by the bytes of a fragment.
    pub fragments: RateBySize,
}

/// What a transfer is made of, for [`TransportProfile::choose`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Load {
    /// Bytes in all.
    pub bytes: u64,
    /// Bytes that lie together in the pages.
    pub fragment_bytes: u64,
    /// Bytes that lie together in the host's memory.
    pub window_bytes: u64,
    /// Bytes of a buffer of the ring; 0 where there is none.
    pub ring_buffer_bytes: u64,
    /// Buffers of the ring.
    pub ring_buffers: u32,
}

/// The costs of a device and its link, measured or assumed.
///
/// [`measure`](TransportProfile::measure) runs on the device for some tenths of a second; its result
/// is kept as text ([`Display`](fmt::Display), [`parse`](TransportProfile::parse)) and read back where
/// [`is_of`](TransportProfile::is_of) says that it is of this device and link. Fields are public: a
/// profile can be written by hand, and `forced` overrides the costs.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct TransportProfile {
    /// Name of the device.
    pub device: String,
    /// Name of the link: whatever tells two links of such a device apart, such as its PCI address.
    pub link: String,
    /// Multiprocessors that kernels were limited to.
    pub multiprocessors: u32,
    /// From the pages to the host.
    pub to_host: DirectionCosts,
    /// From the host to the pages.
    pub to_pages: DirectionCosts,
    /// The transport to use whatever the costs, for every transfer that it can carry.
    pub forced: Option<Transport>,
}

/// How many times its part of the memory's rate a multiprocessor takes that walks alone.
const WALK_PARTS: u64 = 3;
/// Fewest bytes of a piece: less than a launch is worth.
const PIECE_BYTES_MIN: u64 = 64 << 10;

impl TransportProfile {
    /// What is assumed of a device that nobody has measured, from its attributes: a guess.
    ///
    /// The link is taken to be the PCIe generation that came with the compute capability, kernels to
    /// reach 0.93 of the copy engine over it, and a multiprocessor to take three times its part of the
    /// memory's rate. Where a device has no copy engine that works beside kernels, kernels do everything.
    ///
    /// # Errors
    /// What the driver answers, for what every device tells.
    pub fn assumed(device: &Device, multiprocessors: u32) -> Result<Self, DeviceError> {
        let of = |attribute| device.attribute(attribute).map(|value| value.max(0) as u64);
        let count = of(DeviceAttribute::MULTIPROCESSOR_COUNT)?.max(1);
        let engines = of(DeviceAttribute::ASYNC_ENGINE_COUNT)?;
        let link = match of(DeviceAttribute::COMPUTE_CAPABILITY_MAJOR)? {
            9.. => 55_000_000_000,
            8 => 25_000_000_000,
            _ => 12_000_000_000_u64,
        };
        // In kHz and bits; data moves on both edges, and a walk reads and writes each byte.
        let clock = of(DeviceAttribute::MEMORY_CLOCK_RATE).unwrap_or(0);
        let width = of(DeviceAttribute::GLOBAL_MEMORY_BUS_WIDTH).unwrap_or(0);
        let memory = (clock * 1000 * width / 8).max(20 * link);
        // A few multiprocessors take more than their part of it: three times, on an H100.
        let walk = memory * (WALK_PARTS * u64::from(multiprocessors)).min(count) / count;
        let walk = RateBySize::new(&[(1, walk.max(link))]);
        let costs = DirectionCosts {
            copy_setup_ns: 2_500,
            copy_bytes_per_s: if engines > 0 { link } else { 0 },
            handover_ns: 6_000,
            walk_setup_ns: 3_500,
            direct_setup_ns: 5_000,
            direct: RateBySize::new(&[(1, link * 93 / 100)]),
            walk,
            fragments: RateBySize::default(),
        };
        Ok(Self {
            device: device.info().name.clone(),
            link: device.info().pci_bus_id.clone(),
            multiprocessors,
            to_host: costs.clone(),
            to_pages: costs,
            forced: None,
        })
    }

    /// Whether it is of such a device on a link of that name; `None` is the device's PCI address.
    #[must_use]
    pub fn is_of(&self, device: &DeviceInfo, link: Option<&str>) -> bool {
        self.device == device.name && self.link == link.unwrap_or(&device.pci_bus_id)
    }

    /// The costs of a direction.
    pub(crate) fn costs(&self, direction: HostDirection) -> &DirectionCosts {
        match direction {
            HostDirection::ToHost => &self.to_host,
            HostDirection::ToPages => &self.to_pages,
        }
    }

    /// What a transfer would take, in nanoseconds; `None` where the transport cannot carry it, or
    /// where its costs are not known.
    #[must_use]
    pub(crate) fn estimate_ns(
        &self,
        transport: Transport,
        direction: HostDirection,
        load: Load,
    ) -> Option<u64> {
        let costs = self.costs(direction);
        let ns = match transport {
            Transport::DirectKernel => {
                let moving = costs.direct.total_ns(load.bytes, load.fragment_bytes)?;
                costs.direct_setup_ns as f64 + moving
            }
            Transport::CopyEngine => {
                let piece = load.fragment_bytes.min(load.window_bytes);
                costs.copy_setup_ns as f64 + costs.fragments.total_ns(load.bytes, piece)?
            }
            Transport::TwoHop => costs.plan(direction, load)?.1,
        };
        Some(ns as u64)
    }

    /// The forced transport, if there is one; otherwise the one with the shortest estimate. A link
    /// without a ring uses a kernel in place of two hops.
    #[must_use]
    pub fn choose(&self, direction: HostDirection, load: Load) -> Transport {
        let all = [Transport::DirectKernel, Transport::TwoHop, Transport::CopyEngine];
        let ns = |of| self.estimate_ns(of, direction, load).unwrap_or(u64::MAX);
        // Of equals the first: a kernel is always possible.
        let cheapest = all.into_iter().min_by_key(|&of| ns(of));
        self.forced.or(cheapest).unwrap_or(Transport::DirectKernel)
    }
}

impl DirectionCosts {
    /// How the pieces of two hops grow or shrink so that they take the shortest, and how long that is,
    /// in nanoseconds; `None` where two hops are not possible.
    pub(crate) fn plan(&self, direction: HostDirection, load: Load) -> Option<(Taper, f64)> {
        if self.copy_bytes_per_s == 0 || load.ring_buffer_bytes == 0 || load.ring_buffers == 0 {
            return None;
        }
        // What a longer load takes is as many times what these pieces take.
        let modelled = load.bytes.min(load.ring_buffer_bytes.saturating_mul(PIECES_MODELLED));
        let times = load.bytes as f64 / modelled.max(1) as f64;
        let load = Load { bytes: modelled, ..load };
        let walk_ns = self.walk.total_ns(load.bytes, load.fragment_bytes)? / load.bytes as f64;
        let most = load.ring_buffer_bytes;
        let rising = direction == HostDirection::ToHost;
        let leasts = std::iter::successors(Some(PIECE_BYTES_MIN.min(most)), |&least| {
            (least < most).then(|| least.saturating_mul(2).min(most))
        });
        let tapers = leasts
            .flat_map(|least| [2, 3, 4, 6, 8].map(|growth| Taper { least, most, growth, rising }));
        let timed = tapers.map(|taper| (taper, times * self.pipeline_ns(taper, walk_ns, load)));
        timed.min_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// What a pipeline of such pieces takes: the kernel and the engine each do one piece after the
    /// other, each piece is handed from one to the other, and a buffer is filled when it was emptied.
    fn pipeline_ns(&self, taper: Taper, walk_ns: f64, load: Load) -> f64 {
        let handover = self.handover_ns as f64;
        let copy_ns = 1e9 / self.copy_bytes_per_s as f64;
        let buffers = load.ring_buffers as usize;
        // Ends of the last pieces that were emptied, one for each buffer; no ring has more than these.
        let mut emptied = [0.0_f64; BUFFERS_MODELLED];
        let (mut filled, mut last) = (0.0_f64, 0.0_f64);
        let (mut left, mut before, mut index) = (load.bytes, 0, 0);
        while left > 0 {
            before = taper.next(before, left).clamp(1, left);
            left -= before;
            let bytes = before as f64;
            let walking = self.walk_setup_ns as f64 + bytes * walk_ns;
            let copies = before.div_ceil(load.window_bytes.max(1)) as f64;
            let copying = copies * self.copy_setup_ns as f64 + bytes * copy_ns;
            let (fill, empty) = if taper.rising { (walking, copying) } else { (copying, walking) };
            let buffer = index % buffers.min(BUFFERS_MODELLED);
            filled = filled.max(emptied[buffer]) + fill;
            last = last.max(filled + handover) + empty;
            emptied[buffer] = last;
            index += 1;
        }
        last + handover
    }
}

/// Slots of pieces that the model goes through: the pipeline is long steady by then.
const PIECES_MODELLED: u64 = 1024;
/// Slots that the model knows of; of a longer ring, as many.
const BUFFERS_MODELLED: usize = 16;

/// Why a text is no profile.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TransportProfileError {
    /// A line has no `=`.
    #[error("line {line} is no `key = value`")]
    NoValue {
        /// Number of the line, from 1.
        line: usize,
    },
    /// There is no such key.
    #[error("line {line}: no key {key:?}")]
    Key {
        /// Number of the line, from 1.
        line: usize,
        /// What stands there.
        key: String,
    },
    /// The value is not of the key's form.
    #[error("line {line}: {key} cannot be {value:?}")]
    Value {
        /// Number of the line, from 1.
        line: usize,
        /// The key.
        key: String,
        /// What stands there.
        value: String,
    },
    /// A key that a profile needs is not there.
    #[error("no line has the key {key:?}")]
    Missing {
        /// The key.
        key: &'static str,
    },
}

impl fmt::Display for TransportProfile {
    /// The text that [`TransportProfile::parse`] reads back.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "device = {}", self.device)?;
        writeln!(f, "link = {}", self.link)?;
        writeln!(f, "multiprocessors = {}", self.multiprocessors)?;
        if let Some(forced) = self.forced {
            writeln!(f, "forced = {forced}")?;
        }
        for (name, costs) in [("to_host", &self.to_host), ("to_pages", &self.to_pages)] {
            writeln!(f, "{name}.copy_setup_ns = {}", costs.copy_setup_ns)?;
            writeln!(f, "{name}.copy_bytes_per_s = {}", costs.copy_bytes_per_s)?;
            writeln!(f, "{name}.handover_ns = {}", costs.handover_ns)?;
            writeln!(f, "{name}.walk_setup_ns = {}", costs.walk_setup_ns)?;
            writeln!(f, "{name}.direct_setup_ns = {}", costs.direct_setup_ns)?;
            for (key, rates) in
                [("direct", &costs.direct), ("walk", &costs.walk), ("fragments", &costs.fragments)]
            {
                let points: Vec<String> =
                    rates.points.iter().map(|(bytes, rate)| format!("{bytes}: {rate}")).collect();
                writeln!(f, "{name}.{key} = {}", points.join(", "))?;
            }
        }
        Ok(())
    }
}

impl TransportProfile {
    /// Reads a profile from the text that [`Display`](fmt::Display) writes: lines of `key = value`, of
    /// which empty ones and what follows a `#` are nothing.
    ///
    /// Costs that are left out are 0 or none, so that the transport that they are of is not chosen.
    ///
    /// # Errors
    /// [`TransportProfileError`] with the line of the first fault.
    pub fn parse(text: &str) -> Result<Self, TransportProfileError> {
        let mut profile = Self {
            device: String::new(),
            link: String::new(),
            multiprocessors: 0,
            to_host: DirectionCosts::default(),
            to_pages: DirectionCosts::default(),
            forced: None,
        };
        for (line, content) in (1..).zip(text.lines()) {
            let content = content.split('#').next().unwrap_or_default().trim();
            if content.is_empty() {
                continue;
            }
            let (key, value) =
                content.split_once('=').ok_or(TransportProfileError::NoValue { line })?;
            let (key, value) = (key.trim(), value.trim());
            match profile.set(key, value) {
                Some(true) => {}
                Some(false) => {
                    let (key, value) = (key.to_owned(), value.to_owned());
                    return Err(TransportProfileError::Value { line, key, value });
                }
                None => return Err(TransportProfileError::Key { line, key: key.to_owned() }),
            }
        }
        for (key, missing) in [
            ("device", profile.device.is_empty()),
            ("link", profile.link.is_empty()),
            ("multiprocessors", profile.multiprocessors == 0),
        ] {
            if missing {
                return Err(TransportProfileError::Missing { key });
            }
        }
        Ok(profile)
    }

    /// Takes a value: whether it had the form; `None` for a key that there is not.
    fn set(&mut self, key: &str, value: &str) -> Option<bool> {
        fn number<T: std::str::FromStr>(place: &mut T, value: &str) -> bool {
            value.parse().map(|value| *place = value).is_ok()
        }
        let Some((direction, cost)) = key.split_once('.') else {
            return Some(match key {
                "device" => number(&mut self.device, value),
                "link" => number(&mut self.link, value),
                "multiprocessors" => number(&mut self.multiprocessors, value),
                "forced" => {
                    self.forced = Transport::ALL.into_iter().find(|t| t.to_string() == value);
                    self.forced.is_some()
                }
                _ => return None,
            });
        };
        let costs = match direction {
            "to_host" => &mut self.to_host,
            "to_pages" => &mut self.to_pages,
            _ => return None,
        };
        Some(match cost {
            "copy_setup_ns" => number(&mut costs.copy_setup_ns, value),
            "copy_bytes_per_s" => number(&mut costs.copy_bytes_per_s, value),
            "handover_ns" => number(&mut costs.handover_ns, value),
            "walk_setup_ns" => number(&mut costs.walk_setup_ns, value),
            "direct_setup_ns" => number(&mut costs.direct_setup_ns, value),
            "direct" => rates(&mut costs.direct, value),
            "walk" => rates(&mut costs.walk, value),
            "fragments" => rates(&mut costs.fragments, value),
            _ => return None,
        })
    }
}

/// Reads points, `bytes: rate, bytes: rate`; whether they had that form.
fn rates(place: &mut RateBySize, value: &str) -> bool {
    let points = value.split(',').filter(|point| !point.trim().is_empty()).map(|point| {
        let (bytes, rate) = point.split_once(':')?;
        Some((bytes.trim().parse().ok()?, rate.trim().parse().ok()?))
    });
    let points: Option<Vec<(u64, u64)>> = points.collect();
    points.map(|points| *place = RateBySize::new(&points)).is_some()
}

cuda_driver::messages::one_line_debug!(TransportProfileError);

#[cfg(test)]
mod tests {
    use super::*;

    const GB: u64 = 1_000_000_000;

    fn profile() -> TransportProfile {
        let costs = DirectionCosts {
            copy_setup_ns: 2_000,
            copy_bytes_per_s: 55 * GB,
            handover_ns: 4_000,
            walk_setup_ns: 2_000,
            direct_setup_ns: 3_000,
            direct: RateBySize::new(&[(256, 52 * GB)]),
            walk: RateBySize::new(&[(256, 350 * GB)]),
            fragments: RateBySize::new(&[
                (4 << 10, 3 * GB),
                (32 << 10, 32 * GB),
                (2 << 20, 54 * GB),
            ]),
        };
        TransportProfile {
            device: "a card".into(),
            link: "0000:01:00.0".into(),
            multiprocessors: 8,
            to_host: costs.clone(),
            to_pages: costs,
            forced: None,
        }
    }

    fn load(bytes: u64, fragment_bytes: u64, window_bytes: u64) -> Load {
        Load { bytes, fragment_bytes, window_bytes, ring_buffer_bytes: 12 << 20, ring_buffers: 3 }
    }

    #[test]
    fn a_profile_is_read_back_from_its_text() {
        let forced = TransportProfile { forced: Some(Transport::CopyEngine), ..profile() };
        for profile in [profile(), forced] {
            assert_eq!(TransportProfile::parse(&profile.to_string()), Ok(profile));
        }
    }

    #[test]
    fn a_text_that_is_no_profile_is_refused_with_its_line() {
        let error = |text: &str| TransportProfile::parse(text).unwrap_err().to_string();
        assert_eq!(error("device"), "line 1 is no `key = value`");
        assert_eq!(error("\ncolour = red"), "line 2: no key \"colour\"");
        assert_eq!(error("to_moon.walk ="), "line 1: no key \"to_moon.walk\"");
        assert_eq!(error("multiprocessors = few"), "line 1: multiprocessors cannot be \"few\"");
        assert_eq!(error("to_host.walk = 1"), "line 1: to_host.walk cannot be \"1\"");
        assert_eq!(error("forced = Magic"), "line 1: forced cannot be \"Magic\"");
        assert_eq!(error("device = a # card"), "no line has the key \"link\"");
    }

    #[test]
    fn the_cheapest_transport_is_chosen() {
        use HostDirection::{ToHost, ToPages};
        let profile = profile();
        for direction in [ToHost, ToPages] {
            let choose = |load| profile.choose(direction, load);
            // Long transfers that lie together on the host go through the ring, short ones do not.
            assert_eq!(choose(load(256 << 20, 256, 256 << 20)), Transport::TwoHop);
            assert_eq!(choose(load(1 << 20, 256, 1 << 20)), Transport::DirectKernel);
            // Little that lies together on the host: each copy would cost its set-up.
            assert_eq!(choose(load(256 << 20, 256, 4 << 10)), Transport::DirectKernel);
            // Whole large blocks need no kernel; without a ring, nothing else is left.
            let blocks = Load { ring_buffer_bytes: 0, ..load(256 << 20, 2 << 20, 2 << 20) };
            assert_eq!(choose(blocks), Transport::CopyEngine);
            let forced =
                TransportProfile { forced: Some(Transport::DirectKernel), ..profile.clone() };
            assert_eq!(forced.choose(direction, blocks), Transport::DirectKernel);
        }
    }

    #[test]
    fn pieces_grow_as_the_kernel_is_ahead_and_the_pipeline_is_predicted() {
        let costs = profile().to_host;
        let (taper, ns) = costs.plan(HostDirection::ToHost, load(32 << 20, 256, 32 << 20)).unwrap();
        assert!(taper.rising && taper.least < taper.most && taper.growth > 2, "{taper:?}");
        // The bytes over the link, a handful of set-ups, two hand-overs, and a short first piece.
        let wire = (32 << 20) as f64 / 55.0;
        assert!(ns > wire + 14_000.0 && ns < wire + 30_000.0, "{ns} beside {wire}");
        let slow = DirectionCosts { walk: RateBySize::new(&[(256, 60 * GB)]), ..costs };
        let (slow, slower) =
            slow.plan(HostDirection::ToHost, load(32 << 20, 256, 32 << 20)).unwrap();
        assert!(slow.growth < taper.growth && slower > ns, "{slow:?}");
    }

    #[test]
    fn what_is_not_known_is_not_chosen() {
        let mut profile = profile();
        profile.to_host = DirectionCosts::default();
        let any = load(64 << 20, 1 << 20, 64 << 20);
        for transport in Transport::ALL {
            assert_eq!(profile.estimate_ns(transport, HostDirection::ToHost, any), None);
        }
        assert_eq!(profile.choose(HostDirection::ToHost, any), Transport::DirectKernel);
    }

    #[test]
    fn a_profile_is_of_one_device_and_link() {
        let info = DeviceInfo {
            name: "a card".into(),
            uuid: [0; 16],
            total_bytes: 0,
            pci_bus_id: "0000:01:00.0".into(),
        };
        assert!(profile().is_of(&info, None));
        assert!(!profile().is_of(&info, Some("the long riser")));
        assert!(!profile().is_of(&DeviceInfo { name: "another".into(), ..info }, None));
    }

    #[test]
    fn the_cost_of_a_piece_lies_between_its_neighbours() {
        let rates = RateBySize::new(&[(100, GB), (300, GB), (0, 5), (200, 0)]);
        assert_eq!(rates.points(), [(100, GB), (300, GB)]);
        assert_eq!(rates.piece_ns(10), Some(100.0), "as the smallest that was measured");
        assert_eq!(rates.piece_ns(200), Some(200.0));
        assert_eq!(rates.piece_ns(600), Some(600.0));
        assert_eq!(RateBySize::default().piece_ns(1), None);
    }
}
