//! Random growth, shrinking, leases and failures against a naive model. The message contains the
//! seed.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{PAGE, machine_with};
use cuda_driver::ErrorCode;
use cuda_vmm::{GrowError, Lease};

/// The expected pool: number of mapped pages, and for each retirement its pages and the youngest
/// lease that it waits for.
#[derive(Default)]
struct Model {
    ready: u64,
    mapped: u64,
    retiring: Vec<(std::ops::Range<u64>, u64)>,
    /// The end of the blocks that a shrink took out of use and left mapped, and the youngest lease
    /// that they wait for.
    parked: Option<(u64, u64)>,
}

const BLOCK: u64 = PAGE / 3 + 5;
const CAPACITY: u64 = 100;

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

impl Model {
    /// Drops retirements whose leases, all those numbered up to theirs, are closed.
    fn poll(&mut self, open: &[(u64, Lease)]) -> u64 {
        let mut unmapped = 0;
        self.retiring.retain(|(pages, last)| {
            let held = open.iter().any(|(number, _)| number <= last);
            unmapped += if held { 0 } else { pages.end - pages.start };
            held
        });
        unmapped
    }

    fn retiring_pages(&self) -> u64 {
        self.retiring.iter().map(|(pages, _)| pages.end - pages.start).sum()
    }

    fn grow(&mut self, blocks: u64, open: &[(u64, Lease)]) -> Result<u64, GrowError> {
        if blocks > CAPACITY {
            return Err(GrowError::OverCapacity {
                asked_blocks: blocks,
                capacity_blocks: CAPACITY,
            });
        }
        if blocks <= self.ready {
            return Ok(self.ready);
        }
        self.adopt(blocks, open);
        if blocks <= self.ready {
            return Ok(self.ready);
        }
        if self.parked.is_some() {
            let index = (self.ready * BLOCK).div_ceil(PAGE);
            return Err(GrowError::Retiring { index, ready_blocks: self.ready });
        }
        let wanted = (blocks * BLOCK).div_ceil(PAGE);
        if wanted > self.mapped {
            self.poll(open);
            let blocked = self.retiring.iter().map(|(pages, _)| pages.start).min();
            if let Some(index) = blocked.filter(|&index| index < wanted) {
                return Err(GrowError::Retiring { index, ready_blocks: self.ready });
            }
            self.mapped = wanted;
        }
        self.ready = (self.mapped * PAGE / BLOCK).min(CAPACITY);
        Ok(self.ready)
    }

    /// Takes back blocks that share a page with ready ones, once their leases are closed.
    fn adopt(&mut self, blocks: u64, open: &[(u64, Lease)]) {
        let at_rest = |last| open.iter().all(|&(number, _)| number > last);
        if let Some((end, _)) = self.parked.filter(|&(_, last)| at_rest(last)) {
            self.ready = self.ready.max(blocks.min(end));
            self.parked = self.parked.filter(|_| self.ready < end);
        }
    }

    fn shrink(&mut self, blocks: u64, last_lease: u64) {
        if blocks >= self.ready {
            return;
        }
        let keep = (blocks * BLOCK).div_ceil(PAGE);
        if keep < self.mapped {
            self.retiring.push((keep..self.mapped, last_lease));
        }
        (self.ready, self.mapped) = (blocks, keep);
        let end = (keep * PAGE / BLOCK).min(CAPACITY);
        self.parked = (end > blocks).then_some((end, last_lease));
    }
}

fn run(seed: u64) {
    let machine = machine_with(1, seed);
    let pool = machine.pool(BLOCK, CAPACITY, 0);
    let (mut model, mut random) = (Model::default(), Random(seed * 2 + 1));
    let mut open: Vec<(u64, Lease)> = Vec::new();
    let mut leases = 0;
    for step in 0..150 {
        let at = format!("seed {seed}, step {step}");
        match random.below(6) {
            0 | 1 => {
                let blocks = random.below(CAPACITY + 3);
                if random.below(4) == 0 {
                    machine.sim.fail_nth("cuMemMap", 1 + random.below(9), ErrorCode::INVALID_VALUE);
                }
                let grown = pool.grow_to(blocks);
                if !matches!(grown, Err(GrowError::Device { .. })) {
                    assert_eq!(grown, model.grow(blocks, &open), "{at}");
                } else {
                    // The model adopts and collects too. Apart from that, nothing may have changed.
                    model.adopt(blocks, &open);
                    model.poll(&open);
                }
            }
            2 => {
                let blocks = random.below(CAPACITY + 1);
                pool.shrink_to(blocks, &[]).unwrap();
                model.shrink(blocks, leases);
            }
            3 => {
                leases += 1;
                open.push((leases, pool.gate().lease()));
            }
            4 if !open.is_empty() => {
                let index = random.below(open.len() as u64) as usize;
                machine.end(open.swap_remove(index).1);
            }
            _ => {
                let report = pool.poll_retired();
                assert_eq!(report.unmapped_pages, model.poll(&open), "{at}");
                assert!(report.failed.is_empty(), "{at}");
            }
        }
        let (stats, pages) = (pool.stats(), pool.pages().stats());
        assert_eq!(stats.ready_blocks, model.ready, "{at}");
        assert_eq!(stats.mapped_bytes, model.mapped * PAGE, "{at}");
        assert_eq!(stats.retiring_bytes, model.retiring_pages() * PAGE, "{at}");
        assert_eq!(pages.in_use, model.mapped + model.retiring_pages(), "{at}");
        assert_eq!(machine.sim.device_used_bytes(0), pages.live * PAGE, "{at}");
    }
    drop(open);
    let report = pool.close(&[]).wait().unwrap();
    assert!(report.is_clean(), "seed {seed}: {:?}", report.errors);
    machine.assert_no_leak();
}

#[test]
fn the_pool_does_what_the_model_does() {
    (0..150).for_each(run);
}
