//! What a machine's operations and calls cost: the numbers of the cost model.

use std::fmt;
use std::time::Duration;

use super::values::{Curve, Rate, Value};

/// Defines the profile and its keys in one place, so that none of them is forgotten in a file.
macro_rules! profile {
    ($($(#[$doc:meta])* $key:ident: $type:ty,)*) => {
        /// What the operations and calls of a machine cost.
        ///
        /// [`Profile::h100`] and [`Profile::h200_pair`] are of measured machines; others are read from a
        /// small text with [`Profile::parse`]. What a comment calls an estimate was not measured on its
        /// own.
        #[derive(Clone, Debug, Eq, PartialEq)]
        pub struct Profile {
            $($(#[$doc])* pub $key: $type,)*
        }

        impl Profile {
            /// Takes `text` as the value of `key`.
            fn set(&mut self, key: &str, text: &str) -> Result<(), Refusal> {
                match key {
                    $(stringify!($key) => {
                        let form = <$type as Value>::FORM;
                        if self.$key.read(text) { Ok(()) } else { Err(Refusal::Value { form }) }
                    })*
                    _ => Err(Refusal::Key),
                }
            }
        }

        /// The text that [`Profile::parse`] reads back.
        impl fmt::Display for Profile {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                $(
                    f.write_str(concat!(stringify!($key), " = "))?;
                    Value::write(&self.$key, f)?;
                    f.write_str("\n")?;
                )*
                Ok(())
            }
        }
    };
}

profile! {
    /// Name of the device, as in `H100`.
    name: String,

    /// Link from pinned host memory to a device, by copy engine.
    htod: Rate,
    /// Link from a device to pinned host memory, by copy engine.
    dtoh: Rate,
    /// Copies to and from pageable host memory, staging included.
    pageable: Rate,
    /// Copy engines of a device for each direction of the link, which they share.
    copy_engines: u32,
    /// What a copy engine takes for each copy to a device, beside the bytes.
    htod_setup: Duration,
    /// What a copy engine takes for each copy to the host, beside the bytes.
    dtoh_setup: Duration,
    /// The part of each set-up that copies in both directions take one after the other. It is seen
    /// when small copies go both ways at once. An estimate.
    shared_setup: Duration,
    /// A copy over the link, while another that came before it goes the other way: its time, in
    /// percent of its time alone. The one that came before is not slowed, so two long copies that
    /// begin together end after 2 - 100 / this times what one takes.
    duplex_percent: u32,
    /// Copies on one device: bytes copied, each of which is read and written.
    dtod: Rate,
    /// What each copy or fill on one device takes beside its bytes. An estimate.
    dtod_setup: Duration,
    /// What each copy of a batch takes on its engine beside its bytes.
    batch_setup: Duration,
    /// Copies between two devices, by size.
    peer: Curve,

    /// Device memory that kernels read.
    kernel_load: Rate,
    /// Device memory that kernels write.
    kernel_store: Rate,
    /// Device memory that fills write.
    fill: Rate,
    /// Pinned host memory that kernels read.
    kernel_host_load: Rate,
    /// Pinned host memory that kernels write.
    kernel_host_store: Rate,
    /// What each kernel takes beside its bytes, and so the least that one takes. An estimate.
    kernel_overhead: Duration,

    /// Call that launches a kernel. An estimate.
    launch_call: Duration,
    /// Call that launches an instantiated graph of one kernel.
    graph_launch_call: Duration,
    /// Call that enqueues a copy to a device or between two. An estimate.
    htod_call: Duration,
    /// Call that enqueues a copy to the host. An estimate.
    dtoh_call: Duration,
    /// Call that enqueues a copy on one device, which is nearly a launch. An estimate.
    dtod_call: Duration,
    /// Call that enqueues a fill, likewise. An estimate.
    fill_call: Duration,
    /// Call that records an event.
    event_record_call: Duration,
    /// Call that queries an event or a stream.
    query_call: Duration,
    /// Calls that ask for or bind a context. An estimate.
    context_call: Duration,
    /// Any other call. An estimate.
    other_call: Duration,
    /// From the end of a call that enqueues until an idle device begins. An estimate.
    start_latency: Duration,
    /// Likewise for a kernel, which takes longer to begin; behind other work it is not seen.
    kernel_start_latency: Duration,
    /// From the end of what an event of another stream stands for until a stream that waits for the
    /// event goes on. An event that was over for longer costs nothing. An estimate.
    event_wait_latency: Duration,
    /// From the end of what the host waits for until it goes on. An estimate.
    wait_latency: Duration,

    /// Reserving addresses.
    reserve: Duration,
    /// Giving a reservation back. An estimate.
    address_free: Duration,
    /// Creating physical memory, by size.
    create: Curve,
    /// Mapping physical memory, by size.
    map: Curve,
    /// Giving access to one mapping, by size.
    set_access: Curve,
    /// Unmapping one mapping, by size.
    unmap: Curve,
    /// Releasing physical memory, by size.
    release: Curve,
    /// Giving access to several mappings in one call, in percent of as many calls.
    set_access_many_percent: u32,
    /// Unmapping several mappings in one call, in percent of as many calls.
    unmap_many_percent: u32,

    /// Allocating pinned host memory, by size.
    pinned_alloc: Curve,
    /// Freeing pinned host memory, by size. An estimate.
    pinned_free: Curve,
    /// Registering memory of the program, in huge pages that were touched before, by size. Mapping and
    /// touching them is no call of the driver: it takes about 33 ms for 256 MiB.
    register: Curve,
    /// Unregistering it, by size.
    unregister: Curve,
    /// Allocating device memory with `cuMemAlloc`. An estimate.
    device_alloc: Duration,
    /// Freeing it. An estimate.
    device_free: Duration,
    /// Creating a device's primary context. An estimate.
    context_create: Duration,
    /// Loading a module and compiling its PTX. An estimate.
    module_load: Duration,
}

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// A curve through points of bytes and nanoseconds.
fn curve(points: &[(u64, u64)]) -> Curve {
    let points: Vec<_> =
        points.iter().map(|&(bytes, nanos)| (bytes, Duration::from_nanos(nanos))).collect();
    Curve::new(&points)
}

impl Profile {
    /// One H100 80GB HBM3 on PCIe Gen5 x16, driver 580.
    ///
    /// The cost of a copy over the link beside its bytes, 2.55 µs, is what fits loops of 2,048 copies
    /// of 4 KiB to 2 MiB to the device; to the host it is 2.05 µs. Of a batch of as many it is 0.42 µs a copy
    /// (to the device only from 32 KiB up: batches of smaller blocks go slower there). What kernels take to begin, the rate of
    /// fills, and what the two directions of the link cost each other were measured on a second host.
    ///
    /// Four estimates are from programs of several parts, here and on an H200: `shared_setup` is half of
    /// what a copy of 16 KiB each way takes in a loop (3.6 µs), `dtod_call` what a copy of 1 MiB takes in a
    /// loop of 100, `fill_call` what a fill of 16 MiB and a wait take beside all else, and
    /// `event_wait_latency` half of what rounds over two streams took beside their copies (5 to 13 µs).
    ///
    /// The rates of kernels are those of a reader (3.09 TB/s) and of a transfer
    /// that reads and writes (2.84 TB/s in all).
    #[must_use]
    pub fn h100() -> Self {
        let micros = |tenths: u64| Duration::from_nanos(tenths * 100);
        Self {
            name: "H100".to_owned(),
            htod: Rate::mb_per_s(55_100),
            dtoh: Rate::mb_per_s(55_200),
            pageable: Rate::mb_per_s(8_400),
            copy_engines: 1,
            htod_setup: Duration::from_nanos(2_550),
            dtoh_setup: Duration::from_nanos(2_050),
            shared_setup: micros(18),
            duplex_percent: 114,
            dtod: Rate::mb_per_s(1_513_500),
            dtod_setup: micros(25),
            batch_setup: Duration::from_nanos(420),
            peer: pair_peer(),
            kernel_load: Rate::mb_per_s(3_090_000),
            kernel_store: Rate::mb_per_s(2_627_000),
            fill: Rate::mb_per_s(3_210_000),
            kernel_host_load: Rate::mb_per_s(51_000),
            kernel_host_store: Rate::mb_per_s(52_000),
            kernel_overhead: micros(20),
            launch_call: micros(20),
            graph_launch_call: micros(20),
            htod_call: micros(13),
            dtoh_call: micros(13),
            dtod_call: micros(35),
            fill_call: micros(30),
            event_record_call: micros(12),
            query_call: Duration::from_nanos(360),
            context_call: Duration::from_nanos(50),
            other_call: micros(3),
            start_latency: micros(10),
            kernel_start_latency: micros(33),
            event_wait_latency: micros(37),
            wait_latency: micros(8),
            reserve: micros(310),
            address_free: micros(200),
            create: curve(&[(2 * MIB, 11_800), (16 * MIB, 16_400), (64 * MIB, 19_300)]),
            map: curve(&[(2 * MIB, 1_700), (16 * MIB, 700), (64 * MIB, 1_100)]),
            set_access: curve(&[(2 * MIB, 29_300), (16 * MIB, 25_800), (64 * MIB, 34_400)]),
            unmap: curve(&[(2 * MIB, 27_200), (16 * MIB, 22_300), (64 * MIB, 22_500)]),
            release: curve(&[(2 * MIB, 20_500), (16 * MIB, 25_200), (64 * MIB, 43_100)]),
            set_access_many_percent: 153,
            unmap_many_percent: 113,
            pinned_alloc: curve(&[
                (MIB, 650_000),
                (16 * MIB, 5_600_000),
                (256 * MIB, 125_000_000),
                (GIB, 405_000_000),
            ]),
            pinned_free: curve(&[(MIB, 200_000), (GIB, 120_000_000)]),
            register: curve(&[(32 * MIB, 640_000), (256 * MIB, 5_100_000)]),
            unregister: curve(&[(32 * MIB, 580_000), (256 * MIB, 4_500_000)]),
            device_alloc: micros(1_000),
            device_free: micros(1_000),
            context_create: Duration::from_millis(250),
            module_load: Duration::from_millis(10),
        }
    }

    /// Two H200s of one host, joined by 18 NVLinks.
    ///
    /// The link to the host and copies between the two were measured. Rates of device memory are
    /// those of the H100 times 4.8 to 3.35, the ratio of the two data sheets: an estimate. All else is
    /// as on the H100.
    #[must_use]
    pub fn h200_pair() -> Self {
        Self {
            name: "H200".to_owned(),
            htod: Rate::mb_per_s(55_200),
            dtod: Rate::mb_per_s(2_168_600),
            kernel_load: Rate::mb_per_s(4_427_500),
            kernel_store: Rate::mb_per_s(3_764_000),
            fill: Rate::mb_per_s(4_599_000),
            ..Self::h100()
        }
    }

    /// Reads a profile from lines of `key = value`.
    ///
    /// The keys are the names of the fields. A first line `base = h100` or `base = h200` says where
    /// keys that the text leaves out come from; without it that is [`Profile::h100`]. Empty lines,
    /// and what follows a `#`, are nothing. What [`Display`](fmt::Display) writes is read back.
    ///
    /// # Errors
    /// [`ProfileError`] with the line of the first fault.
    ///
    /// # Examples
    /// ```
    /// use cuda_sim::{Profile, ProfileError};
    ///
    /// let profile = Profile::parse("base = h200\nhtod = 25.2 GB/s  # PCIe Gen4\n")?;
    /// assert_eq!(profile.htod.to_string(), "25.200 GB/s");
    /// assert_eq!(profile.peer, Profile::h200_pair().peer);
    /// let error = Profile::parse("\nhtod = fast").unwrap_err();
    /// assert_eq!(error.to_string(), "line 2: `htod` takes a rate such as `55.1 GB/s`, not `fast`");
    /// # Ok::<(), ProfileError>(())
    /// ```
    pub fn parse(text: &str) -> Result<Self, ProfileError> {
        let mut profile = Self::h100();
        let mut keys = Vec::new();
        for (line, content) in (1..).zip(text.lines()) {
            let content = content.split('#').next().unwrap_or_default().trim();
            if content.is_empty() {
                continue;
            }
            let (key, value) = content.split_once('=').ok_or(ProfileError::NoValue { line })?;
            let (key, value) = (key.trim(), value.trim());
            if keys.contains(&key) {
                return Err(ProfileError::Twice { line, key: key.to_owned() });
            }
            if key == "base" {
                let late = !keys.is_empty();
                let found = || value.to_owned();
                profile = Self::built_in(value)
                    .filter(|_| !late)
                    .ok_or_else(|| ProfileError::Base { line, found: found() })?;
            } else {
                profile.set(key, value).map_err(|refusal| refusal.at(line, key, value))?;
            }
            keys.push(key);
        }
        Ok(profile)
    }

    /// The built-in profile of that name: `h100` or `h200`.
    #[must_use]
    pub fn built_in(name: &str) -> Option<Self> {
        match name {
            "h100" => Some(Self::h100()),
            "h200" => Some(Self::h200_pair()),
            _ => None,
        }
    }
}

impl Default for Profile {
    fn default() -> Self {
        Self::h100()
    }
}

fn pair_peer() -> Curve {
    curve(&[
        (64 * KIB, 5_461),
        (MIB, 7_825),
        (16 * MIB, 48_913),
        (256 * MIB, 681_308),
        (2 * GIB, 5_409_280),
    ])
}

/// Why a value was not taken.
enum Refusal {
    Key,
    Value { form: &'static str },
}

impl Refusal {
    fn at(self, line: usize, key: &str, found: &str) -> ProfileError {
        let (key, found) = (key.to_owned(), found.to_owned());
        match self {
            Self::Key => ProfileError::UnknownKey { line, key },
            Self::Value { form } => ProfileError::Value { line, key, found, form },
        }
    }
}

/// Why a text is no profile.
#[derive(Clone, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ProfileError {
    /// A line has no equals sign.
    #[error("line {line}: expected `key = value`")]
    NoValue {
        /// The line, counted from 1.
        line: usize,
    },
    /// A key that profiles do not have.
    #[error("line {line}: unknown key `{key}`")]
    UnknownKey {
        /// The line, counted from 1.
        line: usize,
        /// The key.
        key: String,
    },
    /// A key that an earlier line has.
    #[error("line {line}: `{key}` is given a second time")]
    Twice {
        /// The line, counted from 1.
        line: usize,
        /// The key.
        key: String,
    },
    /// The base is no built-in profile, or comes after other keys.
    #[error("line {line}: `base` takes h100 or h200 and comes first, found `{found}`")]
    Base {
        /// The line, counted from 1.
        line: usize,
        /// The text.
        found: String,
    },
    /// A value of another form than its key takes.
    #[error("line {line}: `{key}` takes {form}, not `{found}`")]
    Value {
        /// The line, counted from 1.
        line: usize,
        /// The key.
        key: String,
        /// The text.
        found: String,
        /// What the key takes.
        form: &'static str,
    },
}

cuda_driver::messages::one_line_debug!(ProfileError);
