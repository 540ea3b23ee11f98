//! A simulated machine with small pages, and helpers that several tests use.

#![allow(dead_code, reason = "each program uses a part")]

pub(crate) mod ranges;
pub(crate) mod scenarios;
pub(crate) mod stress;

use std::sync::Arc;

use cuda_driver::{Device, ErrorCode, Fence, Stream};
use cuda_sim::{RaceCheck, SimConfig, SimDriver};
use cuda_vmm::pages::{PagePool, PagePoolOptions, PhysicalPage, Reservation, ReservationOptions};
use cuda_vmm::sequences::{SequenceSpace, SpaceOptions};
use cuda_vmm::{ElasticPool, ElasticPoolOptions, EpochGate, Lease, Worker};

/// Granularity of the simulated machine.
pub(crate) const PAGE: u64 = 64 << 10;

/// Pages of memory on each simulated device.
pub(crate) const DEVICE_PAGES: u64 = 64;

pub(crate) struct Machine {
    pub(crate) sim: SimDriver,
    pub(crate) device: Device,
}

pub(crate) fn machine() -> Machine {
    machine_with(1, 0)
}

pub(crate) fn machine_with(devices: u32, seed: u64) -> Machine {
    machine_of(SimConfig { devices, seed, ..SimConfig::default() })
}

/// A machine on which races are findings and do not end the test: for programs that race on
/// purpose.
pub(crate) fn machine_of_races() -> Machine {
    machine_of(SimConfig { races: RaceCheck::Report, ..SimConfig::default() })
}

fn machine_of(config: SimConfig) -> Machine {
    let device_bytes = DEVICE_PAGES * PAGE;
    let config = SimConfig { device_bytes, granularity: PAGE, ..config };
    let sim = SimDriver::new(config).unwrap();
    let device = Device::open(Arc::new(sim.clone()), 0).unwrap();
    Machine { sim, device }
}

impl Machine {
    pub(crate) fn stream(&self) -> Stream {
        Stream::new(&self.device).unwrap()
    }

    pub(crate) fn pages(&self, capacity_pages: u64) -> PagePool {
        PagePool::new(&self.device, PagePoolOptions { page_bytes: None, capacity_pages }).unwrap()
    }

    pub(crate) fn reservation(&self, pages: u64) -> Reservation {
        self.reservation_at(pages, EpochGate::new())
    }

    pub(crate) fn reservation_at(&self, pages: u64, gate: EpochGate) -> Reservation {
        let options = ReservationOptions { bytes: pages * PAGE, ..Default::default() };
        Reservation::with_gate(&self.device, options, gate).unwrap()
    }

    pub(crate) fn pool(
        &self,
        block_bytes: u64,
        capacity_blocks: u64,
        initial_blocks: u64,
    ) -> ElasticPool {
        let options =
            ElasticPoolOptions { block_bytes, capacity_blocks, page_bytes: None, initial_blocks };
        ElasticPool::new(&self.device, options).unwrap()
    }

    /// Closes the lease of a batch without work, with a completed fence.
    #[track_caller]
    pub(crate) fn end(&self, lease: Lease) {
        let fence = recorded(&self.stream());
        fence.wait().unwrap();
        lease.submitted(&[fence]).unwrap();
    }

    /// How often a driver call was made.
    pub(crate) fn calls(&self, call: &str) -> u64 {
        self.sim.calls().get(call).copied().unwrap_or(0)
    }

    /// Checks that the machine has found nothing wrong, and that everything created through it is gone.
    #[track_caller]
    pub(crate) fn assert_clean(self) {
        let Self { sim, device } = self;
        drop(device);
        assert_eq!(sim.findings(), []);
        let left = sim.check_leaks();
        assert!(left.is_clean(), "left behind: {left}");
    }
}

/// A fence after all work of `stream` so far.
pub(crate) fn recorded(stream: &Stream) -> Fence {
    Fence::record(stream).unwrap()
}

pub(crate) fn take(pages: &PagePool, count: u64) -> Vec<PhysicalPage> {
    pages.take_many(count).unwrap()
}

/// A space of one seat, with four rows of four tokens. A row has one page.
pub(crate) fn one_seat(pages: &PagePool, worker: &Worker) -> SequenceSpace {
    let options = SpaceOptions {
        sequences: 1,
        planes: 1,
        token_bytes: PAGE / 4,
        tokens_max: 16,
        ..SpaceOptions::default()
    };
    SequenceSpace::new(pages, worker, options).unwrap()
}

/// Closes a pool without users, which leaves nothing behind.
#[track_caller]
pub(crate) fn close(pool: ElasticPool) {
    let report = pool.close(&[]).wait().unwrap();
    assert!(report.is_clean(), "{:?}", report.errors);
    assert_eq!(report.leaked_bytes, 0);
}

/// Closes a reservation without users and returns its pages.
#[track_caller]
pub(crate) fn close_into(reservation: Reservation, pages: &PagePool) {
    let report = reservation.close(&[]).wait().unwrap();
    assert!(report.is_clean(), "{:?}", report.errors);
    for page in report.pages {
        pages.give_back(page).unwrap();
    }
}

/// Bytes that differ for every `tag`.
pub(crate) fn pattern(tag: u64, bytes: u64) -> Vec<u8> {
    let mut state = tag.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..bytes)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u8
        })
        .collect()
}

/// The error codes with which a fault sweep refuses a call, where nothing may be left over. For a
/// call that ends an object, other codes may mean that the object was ended, so the call is not
/// repeated and the driver may leak.
pub(crate) fn refusals(call: &str) -> &'static [ErrorCode] {
    if ["Destroy", "Free", "Release", "Unload"].iter().any(|end| call.contains(end)) {
        &[ErrorCode::OUT_OF_MEMORY]
    } else {
        &[ErrorCode::INVALID_VALUE, ErrorCode::OUT_OF_MEMORY]
    }
}
