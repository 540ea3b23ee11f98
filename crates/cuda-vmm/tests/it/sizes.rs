//! Every size and count that the crate takes, at 0, 1, a usual value, the maximum, and values that
//! overflow together with others. The result is `Ok` or a typed error, with little memory and few
//! steps.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::common::{Machine, recorded};
use cuda_driver::{Device, DeviceError};
use cuda_sim::{SimConfig, SimDriver};
use cuda_vmm::limit::{AdmissionPolicy, MemoryFigures, MemoryProbe, Verdict};
use cuda_vmm::pages::{PagePool, PagePoolOptions, Reservation, ReservationOptions};
use cuda_vmm::sequences::{Layout, SequenceSpace, SpaceOptions};
use cuda_vmm::worker::Health;
use cuda_vmm::{
    ElasticPool, ElasticPoolOptions, EpochGate, MemoryLimit, MemoryRules, Worker, WorkerOptions,
};

/// Page size of GPUs. The simulated device keeps a record for each reserved page.
const PAGE: u64 = 2 << 20;

/// Pages of memory on each device.
const DEVICE_PAGES: u64 = 16;

fn machine() -> Machine {
    let config = SimConfig {
        devices: 2,
        device_bytes: DEVICE_PAGES * PAGE,
        granularity: PAGE,
        ..SimConfig::default()
    };
    let sim = SimDriver::new(config).unwrap();
    let device = Device::open(Arc::new(sim.clone()), 0).unwrap();
    Machine { sim, device }
}

/// Values for sizes and counts.
const NUMBERS: [u64; 12] = [
    0,
    1,
    2,
    7,
    PAGE - 1,
    PAGE,
    3 * PAGE,
    1 << 32,
    1 << 40,
    1 << 63,
    u64::MAX - PAGE + 1,
    u64::MAX,
];

fn page_sizes() -> impl Iterator<Item = Option<u64>> {
    NUMBERS.into_iter().map(Some).chain([None])
}

/// The number of driver calls is bounded by the pages of the device, whatever is requested.
fn bounded<T>(machine: &Machine, work: impl FnOnce() -> T) -> T {
    let sum = || machine.sim.calls().values().sum::<u64>();
    let before = sum();
    let done = work();
    let calls = sum() - before;
    assert!(calls < 100 * DEVICE_PAGES, "{calls} driver calls");
    done
}

fn polled(machine: &Machine, worker: &Worker) {
    let rounds = bounded(machine, || (0..1_000).take_while(|_| worker.poll()).count());
    assert!(rounds < 1_000, "the worker does not finish");
}

#[test]
fn pools_of_pages() {
    let machine = machine();
    for page_bytes in page_sizes() {
        for capacity_pages in NUMBERS {
            for limit in NUMBERS {
                let limit = MemoryLimit::new(limit);
                let rules = MemoryRules { limit: Some(limit.clone()), admission: None };
                let options = PagePoolOptions { page_bytes, capacity_pages };
                let Ok(pages) = PagePool::with_rules(&machine.device, options, rules) else {
                    continue;
                };
                bounded(&machine, || {
                    drop(pages.take());
                    let _ = pages.prepare(3);
                    limit.set(limit.stats().limit_bytes / 2);
                    let _ = limit.reclaim();
                    let _ = pages.trim(2);
                });
                let used = pages.stats().live * pages.page_bytes();
                assert_eq!(limit.stats().used_bytes, used);
            }
        }
    }
    for count in NUMBERS {
        let pages = machine.pages(u64::MAX);
        bounded(&machine, || {
            let taken = pages.take_many(count);
            assert_eq!(taken.is_ok(), count <= DEVICE_PAGES);
            drop(taken);
            assert_eq!(pages.prepare(count).is_ok(), count <= DEVICE_PAGES);
            let _ = pages.trim(count);
        });
        assert!(pages.stats().idle <= count);
    }
    machine.assert_clean();
}

/// Impossible figures.
#[derive(Debug, Default)]
struct Told(AtomicU64);

impl MemoryProbe for Told {
    fn figures(&self, _: &Device) -> Result<MemoryFigures, DeviceError> {
        let bytes = self.0.load(Ordering::Relaxed);
        Ok(MemoryFigures { free_bytes: bytes, total_bytes: bytes, others_bytes: Some(bytes) })
    }
}

#[test]
fn limits_and_admission() {
    let machine = machine();
    let told = Arc::new(Told::default());
    for keep_free_bytes in NUMBERS {
        let policy = AdmissionPolicy::with_probe(keep_free_bytes, told.clone());
        for free_bytes in NUMBERS {
            told.0.store(free_bytes, Ordering::Relaxed);
            for wanted_bytes in NUMBERS {
                let verdict = policy.judge(&machine.device, wanted_bytes).unwrap();
                let fits = u128::from(wanted_bytes) + u128::from(keep_free_bytes)
                    <= u128::from(free_bytes);
                assert_eq!(verdict.is_admitted(), fits);
                let full = Verdict { pending_bytes: u64::MAX, ..verdict };
                assert!(!full.is_admitted() || free_bytes == u64::MAX, "{full}");
            }
            let rules = MemoryRules { limit: None, admission: Some(policy.clone()) };
            let options = PagePoolOptions { page_bytes: None, capacity_pages: u64::MAX };
            let pages = PagePool::with_rules(&machine.device, options, rules).unwrap();
            for count in NUMBERS {
                bounded(&machine, || drop(pages.take_many(count)));
                bounded(&machine, || pages.prepare(count).is_ok());
                drop(pages.trim(0));
            }
        }
    }
    machine.assert_clean();
}

#[test]
fn reservations() {
    let machine = machine();
    let pages = machine.pages(8);
    for page_bytes in page_sizes() {
        for bytes in NUMBERS {
            for peers in [vec![], vec![-1], vec![i32::MAX], vec![1; 1 << 16]] {
                let options = ReservationOptions { bytes, page_bytes, peers };
                let gated =
                    Reservation::with_gate(&machine.device, options.clone(), EpochGate::new());
                let made = Reservation::new(&machine.device, options);
                assert_eq!(gated.is_ok(), made.is_ok(), "{bytes} bytes by {page_bytes:?}");
                let (Ok(space), Ok(gated)) = (made, gated) else { continue };
                drop(gated.close(&[]).wait().unwrap());
                for index in NUMBERS {
                    let _ = space.page_state(index);
                    if let Ok(page) = pages.take() {
                        drop(space.map_range(index, [page]));
                    }
                    drop(space.map_range(index, Vec::<cuda_vmm::pages::Page>::new()));
                    for end in NUMBERS {
                        let _ = space.mapped_span(index..end);
                        drop(space.retire(index..end, &[recorded(&machine.stream())]));
                    }
                }
                drop(space.close(&[recorded(&machine.stream())]).wait().unwrap());
            }
        }
    }
    drop(pages);
    machine.assert_clean();
}

#[test]
fn elastic_pools() {
    let machine = machine();
    let worker = Worker::manual();
    let stream = machine.stream();
    for page_bytes in [None, Some(0), Some(3 * PAGE), Some(1 << 40), Some(1 << 63)] {
        for block_bytes in NUMBERS {
            for capacity_blocks in NUMBERS {
                for initial_blocks in [0, 1, 1 << 40, u64::MAX] {
                    let options = ElasticPoolOptions {
                        block_bytes,
                        capacity_blocks,
                        page_bytes,
                        initial_blocks,
                    };
                    let made = bounded(&machine, || ElasticPool::new(&machine.device, options));
                    let Ok(mut pool) = made else { continue };
                    pool.work_on(&worker);
                    sweep_pool(&machine, &worker, &pool, &stream);
                    let fences = [recorded(&stream)];
                    assert!(pool.close(&fences).wait().unwrap().is_clean());
                }
            }
        }
    }
    drop((worker, stream));
    machine.assert_clean();
}

#[test]
fn elastic_pools_of_gates_and_limits() {
    let machine = machine();
    for bytes in NUMBERS {
        for limit in [0, 1, PAGE, 3 * PAGE, u64::MAX] {
            let options = ElasticPoolOptions {
                block_bytes: bytes,
                capacity_blocks: 3,
                page_bytes: None,
                initial_blocks: 1,
            };
            let rules = MemoryRules { limit: Some(MemoryLimit::new(limit)), admission: None };
            let made = [
                ElasticPool::new(&machine.device, options),
                ElasticPool::with_rules(&machine.device, options, EpochGate::new(), rules),
            ];
            let fits = (1..=DEVICE_PAGES * PAGE).contains(&bytes);
            assert_eq!(made[0].is_ok(), fits, "blocks of {bytes} bytes");
            let pages = bytes.div_ceil(PAGE).saturating_mul(PAGE);
            assert_eq!(made[1].is_ok(), fits && pages <= limit, "{bytes} bytes under {limit}");
            for pool in made.into_iter().flatten() {
                assert!(pool.close(&[]).wait().unwrap().is_clean());
            }
        }
    }
    machine.assert_clean();
}

fn sweep_pool(
    machine: &Machine,
    worker: &Worker,
    pool: &ElasticPool,
    stream: &cuda_driver::Stream,
) {
    for blocks in [0, 1, 5, pool.capacity_blocks(), u64::MAX] {
        bounded(machine, || {
            let _ = pool.grow_to(blocks);
            let _ = pool.demand(blocks);
            pool.set_ahead(blocks);
            let _ = pool.block_span(blocks);
            let _ = pool.stats();
        });
        polled(machine, worker);
        bounded(machine, || {
            pool.set_ahead(0);
            let _ = pool.demand(0);
            pool.shrink_to(blocks / 2, &[recorded(stream)]).unwrap();
            pool.shrink_to(blocks / 4, &[recorded(stream)]).unwrap();
            stream.synchronize().unwrap();
            let _ = (pool.poll_retired(), pool.trim(blocks));
        });
    }
}

/// Options of a very large space, with one or two of the numbers replaced.
fn spaces() -> Vec<SpaceOptions> {
    let usual = SpaceOptions {
        sequences: 2,
        planes: 2,
        token_bytes: PAGE / 4,
        tokens_max: 24,
        look_ahead_tokens: 2,
        ..SpaceOptions::default()
    };
    let set: [fn(&mut SpaceOptions, u64); 7] = [
        |options, number| options.sequences = number,
        |options, number| options.planes = number,
        |options, number| options.token_bytes = number,
        |options, number| options.tokens_max = number,
        |options, number| options.look_ahead_tokens = number,
        |options, number| options.parked_pages_max = number,
        |options, number| options.prepared_pages = number,
    ];
    let mut all = Vec::new();
    for layout in [Layout::PlaneMajor, Layout::TokenMajor] {
        // The maximum number of seats.
        all.push(SpaceOptions { sequences: 1 << 19, layout, ..usual.clone() });
        for (index, first) in set.iter().enumerate() {
            for number in NUMBERS {
                let mut options = SpaceOptions { layout, ..usual.clone() };
                first(&mut options, number);
                all.push(options.clone());
                for second in &set[..index] {
                    for other in [1, 1 << 40, u64::MAX] {
                        let mut options = options.clone();
                        second(&mut options, other);
                        all.push(options);
                    }
                }
            }
        }
    }
    all
}

#[test]
fn spaces_and_their_sequences() {
    let mut made = 0;
    for options in spaces() {
        let machine = machine();
        let (pages, worker) = (machine.pages(u64::MAX), Worker::manual());
        let gate = EpochGate::new();
        let gated = SequenceSpace::with_gate(&pages, &worker, options.clone(), gate);
        let gated = gated.map(|space| space.close(&[]).unwrap().wait().unwrap().is_clean());
        let space = SequenceSpace::new(&pages, &worker, options.clone());
        assert_eq!(gated.ok(), space.is_ok().then_some(true), "{options:?}");
        let Ok(space) = space else { continue };
        made += 1;
        polled(&machine, &worker);
        for tokens in [0, 1, options.tokens_max, u64::MAX] {
            let Ok(mut sequence) = space.admit(tokens) else { continue };
            for tokens in [1, 25, options.tokens_max, u64::MAX] {
                let _ = sequence.extend_to(tokens);
                polled(&machine, &worker);
                bounded(&machine, || sequence.extend_blocking(tokens).is_ok());
                let _ = space.extend([(&mut sequence, tokens)]);
                polled(&machine, &worker);
                for plane in [0, options.planes, u64::MAX] {
                    let Ok(plane) = sequence.plane(plane) else { continue };
                    for start in NUMBERS {
                        for end in NUMBERS {
                            let _ = plane.span(start..end);
                        }
                    }
                }
                let _ = space.stats();
            }
            let done = recorded(&machine.stream());
            for tokens in [u64::MAX, 3, 0] {
                sequence.shrink_to(tokens, std::slice::from_ref(&done)).unwrap();
                polled(&machine, &worker);
            }
            sequence.finish(&[done]);
            polled(&machine, &worker);
        }
        for bytes in NUMBERS {
            bounded(&machine, || space.trim(bytes)).unwrap();
        }
        assert!(space.close(&[]).unwrap().wait().unwrap().is_clean());
        worker.close();
        drop(pages);
        machine.assert_clean();
    }
    assert!(made > 50, "{made} of the sizes made a space");
}

#[test]
fn workers() {
    let machine = machine();
    let mut pool = machine.pool(PAGE, 4, 0);
    for nap in [Duration::ZERO, Duration::from_nanos(1), Duration::MAX] {
        for naps_before_sleep in [0, 1, u32::MAX] {
            for retry in [Duration::ZERO, Duration::MAX] {
                let worker =
                    Worker::spawn(WorkerOptions { nap, naps_before_sleep, retry }).unwrap();
                pool.work_on(&worker);
                assert_eq!(pool.demand(0), Ok(0));
                assert!(pool.ahead_stats().health == Health::Healthy);
                // Waits for the thread.
                worker.close();
            }
        }
    }
}

#[test]
fn gates_of_many_leases() {
    let machine = machine();
    let (gate, stream) = (EpochGate::new(), machine.stream());
    let leases: Vec<_> = (0..1 << 16).map(|_| gate.lease()).collect();
    let fence = recorded(&stream);
    for lease in leases {
        // The lease is refused, and therefore dropped.
        assert_eq!(lease.submitted(&[]).unwrap_err().fences, 0);
    }
    let fences = vec![fence; 1 << 16];
    gate.lease().submitted(&fences).unwrap();
    gate.cover_dropped(|| Ok::<_, DeviceError>(fences)).unwrap();
    gate.cover_dropped::<()>(|| panic!("all is covered")).unwrap();
    assert_eq!(gate.open_leases(), 0);
}
