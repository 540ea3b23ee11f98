//! The device records which bytes of its memory were ever written.

use crate::common::{
    PAGE, copy, download, fill, free, host_write, launch_copy, machine, map, map_page, paced,
    pinned, reserve, seeded, sync, upload, upload_async,
};
use cuda_driver::Driver;
use cuda_sim::{Pace, SimConfig, SimDriver};

/// The positions of written bytes among the first `bytes` of `address`.
fn written(sim: &SimDriver, address: u64, bytes: u64) -> Vec<u64> {
    (0..bytes).filter(|at| sim.is_initialised(0, address + at, 1)).collect()
}

#[test]
fn new_memory_is_not_written_and_every_kind_of_write_counts() {
    let sim = paced(Pace::Slowest, 0);
    let memory = sim.mem_alloc(4096).unwrap();
    assert!(!sim.is_initialised(0, memory, 4096));
    assert!(sim.is_initialised(0, memory, 0));

    upload(&sim, memory, &[1, 2, 3], 0).unwrap();
    fill(&sim, memory + 10, 0, 2, 0).unwrap();
    let host = pinned(&sim, 64);
    host_write(host, &[9; 64]);
    upload_async(&sim, memory + 20, host, 1, 0).unwrap();
    launch_copy(&sim, (memory + 30, memory), 2, 0).unwrap();
    // Neither a read nor a copy that has not run counts as a write.
    assert!(written(&sim, memory, 100).is_empty());
    download(&sim, memory + 40, 8, 0).unwrap();
    assert_eq!(written(&sim, memory, 100), [0, 1, 2, 10, 11, 20, 30, 31]);
    assert!(sim.is_initialised(0, memory + 10, 2) && !sim.is_initialised(0, memory + 10, 3));
    assert!(sim.is_initialised(0, host, 64), "the host may have written its own memory");
    assert!(!sim.is_initialised(0, 4096, 1), "nothing is there");
    assert!(!sim.is_initialised(1, memory, 1), "no such device");
    assert_eq!(sim.findings(), []);
}

#[test]
fn a_copy_takes_along_what_was_not_written() {
    let sim = seeded(0);
    let [from, to] = [0; 2].map(|_| sim.mem_alloc(3 * PAGE).unwrap());
    fill(&sim, to, 7, 3 * PAGE, 0).unwrap();
    fill(&sim, from, 7, PAGE + 100, 0).unwrap();
    fill(&sim, from + PAGE + 200, 7, PAGE, 0).unwrap();
    copy(&sim, to + 50, from + 50, 2 * PAGE + 1000, 0).unwrap();
    sync(&sim, 0).unwrap();
    for (start, bytes) in [(PAGE + 100, 100), (2 * PAGE + 200, 850)] {
        assert!(sim.is_initialised(0, to + start - 50, 50), "before {start}");
        assert!(written(&sim, to + start, bytes).is_empty(), "from {start}");
        assert!(sim.is_initialised(0, to + start + bytes, 50), "after {start}");
    }
    assert!(sim.is_initialised(0, to + 2 * PAGE + 1050, PAGE - 1050));
}

#[test]
fn memory_that_is_mapped_anew_is_not_written_and_a_page_mapped_again_still_is() {
    let sim = seeded(0);
    let address = reserve(&sim, 2);
    let first = map_page(&sim, address);
    map_page(&sim, address + PAGE);
    fill(&sim, address + 8, 1, 2 * PAGE - 8, 0).unwrap();
    sync(&sim, 0).unwrap();
    assert!(!sim.is_initialised(0, address, 2 * PAGE));
    assert!(sim.is_initialised(0, address + 8, 2 * PAGE - 8), "over the end of a page");

    sim.mem_unmap(address, 2 * PAGE).unwrap();
    assert!(!sim.is_initialised(0, address + 8, 1), "not mapped");
    map_page(&sim, address);
    map(&sim, address + PAGE, PAGE, 0, first).unwrap();
    let access = [cuda_driver::AccessDesc { device: 0 }];
    sim.mem_set_access(address + PAGE, PAGE, &access).unwrap();
    assert!(!sim.is_initialised(0, address + 8, 1), "other memory");
    assert!(sim.is_initialised(0, address + PAGE + 8, PAGE - 8), "the same memory elsewhere");
}

#[test]
fn tracking_can_be_switched_off() {
    let sim = machine(SimConfig { track_initialised: false, ..SimConfig::default() });
    let memory = sim.mem_alloc(64).unwrap();
    assert!(sim.is_initialised(0, memory, 64));
    free(&sim, memory).unwrap();
    assert!(!sim.is_initialised(0, memory, 64));
}
