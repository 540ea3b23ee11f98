//! The costs of a machine's operations and calls: the parameters of the cost model.

use std::fmt;
use std::time::Duration;

use super::values::{Curve, Rate, Value, without_comment};
use crate::SimConfigError;

/// Defines the profile and its keys in one place, so that parsing and printing cover every field.
macro_rules! profile {
    ($($(#[$doc:meta])* $key:ident: $type:ty,)*) => {
        /// The costs of the operations and calls of a machine.
        ///
        /// [`Profile::h100`] and [`Profile::built_in`] describe measured machines.
        /// [`Profile::parse`] reads others from a short text. A value marked "An estimate" was not
        /// measured by itself.
        #[derive(Clone, Debug, Eq, PartialEq)]
        pub struct Profile {
            $($(#[$doc])* pub $key: $type,)*
        }

        impl Profile {
            /// Sets `key` from `text`.
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

        /// The text that [`Profile::parse`] reads.
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

    /// Rate of the link from pinned host memory to a device, for one copy engine.
    htod: Rate,
    /// Rate of the link from a device to pinned host memory, for one copy engine.
    dtoh: Rate,
    /// Copies to and from pageable host memory, staging included.
    pageable: Rate,
    /// Number of copy engines of a device for each direction of the link. They share the link.
    copy_engines: u32,
    /// Time of a copy engine for each copy to a device, besides the bytes.
    htod_setup: Duration,
    /// Time of a copy engine for each copy to the host, besides the bytes.
    dtoh_setup: Duration,
    /// The part of each set-up that copies in both directions take one after the other. It matters
    /// when small copies go both ways at once. An estimate.
    shared_setup: Duration,
    /// The time of a copy over the link while an earlier copy goes the other way, in percent of its
    /// time alone. The earlier copy is not slowed. So two long copies that start together end after
    /// 2 - 100 / `duplex_percent` times the time of one.
    duplex_percent: u32,
    /// Rate of copies within one device: bytes copied, each read and written once.
    dtod: Rate,
    /// Time of each copy or fill within one device, besides its bytes. An estimate.
    dtod_setup: Duration,
    /// Time of each copy of a batch on its engine, besides its bytes.
    batch_setup: Duration,
    /// Copies between two devices, by size.
    peer: Curve,

    /// Rate of device memory that kernels read.
    kernel_load: Rate,
    /// Rate of device memory that kernels write.
    kernel_store: Rate,
    /// Rate of device memory that fills write.
    fill: Rate,
    /// Rate of pinned host memory that kernels read.
    kernel_host_load: Rate,
    /// Rate of pinned host memory that kernels write.
    kernel_host_store: Rate,
    /// Time of each kernel besides its bytes, and therefore the shortest time of a kernel. An
    /// estimate.
    kernel_overhead: Duration,

    /// Call that launches a kernel. An estimate.
    launch_call: Duration,
    /// Call that launches an instantiated graph of one kernel.
    graph_launch_call: Duration,
    /// Call that enqueues a copy to a device or between two. An estimate.
    htod_call: Duration,
    /// Call that enqueues a copy to the host. An estimate.
    dtoh_call: Duration,
    /// Call that enqueues a copy within one device. It costs nearly as much as a launch. An
    /// estimate.
    dtod_call: Duration,
    /// Call that enqueues a fill. It costs nearly as much as a launch. An estimate.
    fill_call: Duration,
    /// Call that records an event.
    event_record_call: Duration,
    /// Call that queries an event or a stream.
    query_call: Duration,
    /// Calls that query or set a context. An estimate.
    context_call: Duration,
    /// Any other call. An estimate.
    other_call: Duration,
    /// From the end of an enqueuing call until an idle device starts. An estimate.
    start_latency: Duration,
    /// From the end of a launch until an idle device starts the kernel, which takes longer. Hidden
    /// behind other work.
    kernel_start_latency: Duration,
    /// From the completion of another stream's event until the waiting stream continues. An event
    /// that completed earlier costs nothing. An estimate.
    event_wait_latency: Duration,
    /// From the end of the awaited work until the host continues. An estimate.
    wait_latency: Duration,

    /// Reserving addresses.
    reserve: Duration,
    /// Freeing a reservation. An estimate.
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
    /// Giving access to several mappings in one call, in percent of the cost of single calls.
    set_access_many_percent: u32,
    /// Unmapping several mappings in one call, in percent of the cost of single calls.
    unmap_many_percent: u32,

    /// Allocating pinned host memory, by size.
    pinned_alloc: Curve,
    /// Freeing pinned host memory, by size. An estimate.
    pinned_free: Curve,
    /// Registering memory of the program, in huge pages that were touched before, by size. Mapping
    /// and touching them is not a driver call, and takes about 33 ms for 256 MiB.
    register: Curve,
    /// Unregistering registered memory, by size.
    unregister: Curve,
    /// Allocating device memory with `cuMemAlloc`. An estimate.
    device_alloc: Duration,
    /// Freeing device memory with `cuMemFree`. An estimate.
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
    /// A copy over the link costs 2.55 µs to the device and 2.05 µs to the host besides its bytes.
    /// These values fit loops of 2,048 copies of 4 KiB to 2 MiB. In a batch of as many copies the
    /// cost is 0.42 µs a copy (to the device only from 32 KiB up: batches of smaller blocks are
    /// slower there). The start of kernels, the rate of fills, and the mutual slowdown of the
    /// link's directions were measured on a second host.
    ///
    /// Four estimates come from programs of several parts, here and on an H200. `shared_setup` is
    /// half of the time of a copy of 16 KiB each way in a loop (3.6 µs). `dtod_call` is the time of
    /// a copy of 1 MiB in a loop of 100. `fill_call` is the time of a fill of 16 MiB and a wait,
    /// without the other known parts. `event_wait_latency` is half of the time that rounds over two
    /// streams took besides their copies (5 to 13 µs).
    ///
    /// The rates of kernels are those of a reading kernel (3.09 TB/s) and of a transfer that reads
    /// and writes (2.84 TB/s in all).
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

    fn h200_pair() -> Self {
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
    /// The keys are the names of the fields. A first line `base = h100` or `base = h200` chooses
    /// the values of omitted keys; without it they come from [`Profile::h100`]. Empty lines, and
    /// text after a `#`, are ignored. A name with a `#` stands between quotation marks. The output of
    /// [`Display`](fmt::Display) can be parsed.
    ///
    /// # Errors
    /// [`SimConfigError`] with the line of the first error.
    ///
    /// # Examples
    /// ```
    /// use cuda_sim::{Profile, SimConfigError};
    ///
    /// let profile = Profile::parse("base = h200\nhtod = 25.2 GB/s  # PCIe Gen4\n")?;
    /// assert_eq!(profile.htod.to_string(), "25.200 GB/s");
    /// assert_eq!(profile.peer, Profile::built_in("h200").unwrap().peer);
    /// let error = Profile::parse("\nhtod = fast").unwrap_err();
    /// assert_eq!(error.to_string(), "line 2: `htod` takes a rate such as `55.1 GB/s`, not `fast`");
    /// # Ok::<(), SimConfigError>(())
    /// ```
    pub fn parse(text: &str) -> Result<Self, SimConfigError> {
        let mut profile = Self::h100();
        let mut keys = Vec::new();
        for (line, content) in (1..).zip(text.lines()) {
            let content = without_comment(content).trim();
            if content.is_empty() {
                continue;
            }
            let (key, value) =
                content.split_once('=').ok_or(SimConfigError::NoProfileValue { line })?;
            let (key, value) = (key.trim(), value.trim());
            if keys.contains(&key) {
                return Err(SimConfigError::ProfileKeyTwice { line, key: key.to_owned() });
            }
            if key == "base" {
                let late = !keys.is_empty();
                let found = || value.to_owned();
                profile = Self::built_in(value)
                    .filter(|_| !late)
                    .ok_or_else(|| SimConfigError::ProfileBase { line, found: found() })?;
            } else {
                profile.set(key, value).map_err(|refusal| refusal.at(line, key, value))?;
            }
            keys.push(key);
        }
        Ok(profile)
    }

    /// The built-in profile of that name: `h100`, or `h200` for two H200s of one host, joined by 18 NVLinks.
    ///
    /// Of the H200s, the link to the host and copies between the two were measured. Rates of device memory are
    /// the H100's times 4.8 / 3.35, the ratio of the two data sheets: an estimate. All other values
    /// are the H100's.
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

enum Refusal {
    Key,
    Value { form: &'static str },
}

impl Refusal {
    fn at(self, line: usize, key: &str, found: &str) -> SimConfigError {
        let (key, found) = (key.to_owned(), found.to_owned());
        match self {
            Self::Key => SimConfigError::UnknownProfileKey { line, key },
            Self::Value { form } => SimConfigError::ProfileValue { line, key, found, form },
        }
    }
}
