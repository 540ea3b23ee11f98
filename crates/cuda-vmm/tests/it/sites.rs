//! The call sites that a driver sees for pages, mappings and their clean-up: the line of the
//! program that caused them.

use std::sync::Arc;

use crate::common::{DEVICE_PAGES, Machine, PAGE};
use cuda_driver::Device;
use cuda_sim::{SimConfig, SimDriver};
use cuda_vmm::pages::{PagePool, PagePoolOptions, Reservation, ReservationOptions};
use cuda_vmm::sequences::{SequenceSpace, SpaceOptions};
use cuda_vmm::{ElasticPool, ElasticPoolOptions, MemoryLimit, MemoryRules, Worker};
use kv_testkit::{Watch, from_here};

fn machine() -> (Watch, Machine) {
    let config =
        SimConfig { device_bytes: DEVICE_PAGES * PAGE, granularity: PAGE, ..SimConfig::default() };
    let sim = SimDriver::new(config).unwrap();
    let watch = Watch::default();
    let device = Device::open(watch.over(Arc::new(sim.clone())), 0).unwrap();
    (watch, Machine { sim, device })
}

#[test]
fn pages_name_the_programs_line() {
    let (watch, machine) = machine();
    let options = PagePoolOptions { page_bytes: None, capacity_pages: 8 };
    let device = &machine.device;
    let pages = from_here!(watch, "cuMemGetAllocationGranularity", PagePool::new(device, options));
    let pages = pages.0.unwrap();
    let page = from_here!(watch, "cuMemCreate", pages.take()).0.unwrap();
    let many = from_here!(watch, "cuMemCreate", pages.take_many(2)).0.unwrap();
    for page in many.into_iter().chain([page]) {
        pages.give_back(page).unwrap();
    }
    from_here!(watch, "cuMemRelease", pages.trim(1)).0;
    from_here!(watch, "cuMemCreate", pages.prepare(2)).0.unwrap();
}

#[test]
fn mappings_name_the_line_that_changes_them() {
    let (watch, machine) = machine();
    let (stream, pages) = (machine.stream(), machine.pages(8));
    let options = ReservationOptions { bytes: 4 * PAGE, ..Default::default() };
    let device = &machine.device;
    let space =
        from_here!(watch, "cuMemAddressReserve", Reservation::new(device, options)).0.unwrap();
    from_here!(watch, "cuMemMap", space.map_range(0, [pages.take().unwrap()])).0.unwrap();
    let many = pages.take_many(3).unwrap();
    from_here!(watch, "cuMemSetAccess", space.map_range(1, many)).0.unwrap();
    let fence = || [crate::common::recorded(&stream)];
    let retiring = space.retire(0..1, &fence()).unwrap();
    let report = from_here!(watch, "cuMemUnmap", retiring.wait()).0.unwrap();
    assert!(report.failed.is_empty());
    stream.synchronize().unwrap();
    let retiring = space.retire(1..2, &fence()).unwrap();
    stream.synchronize().unwrap();
    drop(from_here!(watch, "cuMemUnmap", retiring.try_complete()).0.unwrap());
    drop(space.retire(2..3, &fence()).unwrap());
    stream.synchronize().unwrap();
    drop(from_here!(watch, "cuMemUnmap", space.poll_retired()).0);
    let closing = space.close(&fence());
    let closed = from_here!(watch, "cuMemUnmap", closing.wait()).0.unwrap();
    assert!(closed.is_clean());
}

#[test]
fn pools_name_the_line_that_grows_and_shrinks_them() {
    let (watch, machine) = machine();
    let (device, stream) = (&machine.device, machine.stream());
    let options = ElasticPoolOptions {
        block_bytes: PAGE,
        capacity_blocks: 8,
        page_bytes: None,
        initial_blocks: 0,
    };
    let pool =
        from_here!(watch, "cuMemAddressReserve", ElasticPool::new(device, options)).0.unwrap();
    let (_, through) = from_here!(watch, "cuMemMap", pool.grow_to(4));
    assert!(through, "a line of this crate maps it");
    pool.grow_to(6).unwrap();
    let fences = [crate::common::recorded(&stream)];
    stream.synchronize().unwrap();
    pool.shrink_to(4, &fences).unwrap();
    from_here!(watch, "cuMemUnmap", pool.poll_retired()).0;
    from_here!(watch, "cuMemRelease", pool.trim(0)).0;
    let fences = [crate::common::recorded(&stream)];
    pool.shrink_to(2, &fences).unwrap();
    let closing = pool.close(&fences);
    drop(from_here!(watch, "cuMemUnmap", closing.wait()).0.unwrap());
}

#[test]
fn a_limit_names_the_line_that_reclaims() {
    let (watch, machine) = machine();
    let limit = MemoryLimit::new(u64::MAX);
    let rules = MemoryRules { limit: Some(limit.clone()), admission: None };
    let options = PagePoolOptions { page_bytes: None, capacity_pages: 8 };
    let pages = PagePool::with_rules(&machine.device, options, rules).unwrap();
    pages.prepare(2).unwrap();
    limit.set(PAGE);
    from_here!(watch, "cuMemRelease", limit.reclaim()).0;
}

#[test]
fn sequences_name_the_line_that_maps_and_the_workers() {
    let (watch, machine) = machine();
    let (pages, worker, stream) = (machine.pages(32), Worker::manual(), machine.stream());
    let options = SpaceOptions {
        sequences: 2,
        planes: 1,
        token_bytes: PAGE,
        tokens_max: 4,
        ..SpaceOptions::default()
    };
    let space =
        from_here!(watch, "cuMemAddressReserve", SequenceSpace::new(&pages, &worker, options));
    let space = space.0.unwrap();
    let mut sequence = space.admit(1).unwrap();
    from_here!(watch, "cuMemMap", worker.poll()).0;
    from_here!(watch, "cuMemMap", sequence.extend_blocking(3)).0.unwrap();
    let _ = sequence.plane(0).unwrap();
    let fences = [crate::common::recorded(&stream)];
    sequence.shrink_to(1, &fences).unwrap();
    sequence.finish(&fences);
    stream.synchronize().unwrap();
    from_here!(watch, "cuMemUnmap", space.trim(PAGE)).0.unwrap();
    let closing = space.close(&[]).unwrap();
    drop(from_here!(watch, "cuMemUnmap", closing.wait()).0.unwrap());
}
