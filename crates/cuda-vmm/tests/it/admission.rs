//! Before memory is created, the device's free memory is queried, and a refusal names the figures.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::time::Duration;

use crate::common::{DEVICE_PAGES, Machine, PAGE, machine};
use cuda_driver::{Device, DeviceError, DriverError, ErrorCode};
use cuda_sim::{SimConfig, SimDriver};
use cuda_vmm::limit::{AdmissionPolicy, MemoryFigures, MemoryProbe, Verdict};
use cuda_vmm::pages::{PageError, PagePool, PagePoolOptions, PhysicalPage};
use cuda_vmm::{ElasticPool, ElasticPoolOptions, EpochGate, GrowError, MemoryRules};

fn headroom(pages: u64) -> u64 {
    pages * PAGE
}

fn rules(policy: &AdmissionPolicy) -> MemoryRules {
    MemoryRules { limit: None, admission: Some(policy.clone()) }
}

fn pages(machine: &Machine, policy: &AdmissionPolicy) -> PagePool {
    let options = PagePoolOptions { page_bytes: None, capacity_pages: u64::MAX };
    PagePool::with_rules(&machine.device, options, rules(policy)).unwrap()
}

/// Figures set by the test.
#[derive(Debug, Default)]
struct Told {
    free_pages: AtomicU64,
    asked: AtomicU64,
}

impl MemoryProbe for Told {
    fn figures(&self, _: &Device) -> Result<MemoryFigures, DeviceError> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let free_bytes = self.free_pages.load(Ordering::Relaxed) * PAGE;
        Ok(MemoryFigures { free_bytes, total_bytes: 100 * PAGE, others_bytes: Some(7) })
    }
}

#[test]
fn what_is_to_stay_free_stays_free() {
    let machine = machine();
    let policy = AdmissionPolicy::new(headroom(10));
    let pool = pages(&machine, &policy);
    let taken = pool.take_many(DEVICE_PAGES - 12).unwrap();
    let verdict = Verdict {
        wanted_bytes: 3 * PAGE,
        free_bytes: 12 * PAGE,
        pending_bytes: 0,
        keep_free_bytes: 10 * PAGE,
        others_bytes: None,
    };
    let error = pool.take_many(3).unwrap_err();
    assert_eq!(error, PageError::NoHeadroom(verdict));
    assert_eq!((verdict.short_by(), verdict.is_admitted()), (PAGE, false));
    assert_eq!(policy.judge(&machine.device, 3 * PAGE), Ok(verdict));
    let more = pool.take_many(2).unwrap();
    assert_eq!(machine.sim.device_used_bytes(0), (DEVICE_PAGES - 10) * PAGE);
    assert!(matches!(pool.take().unwrap_err(), PageError::NoHeadroom(_)));
    assert!(matches!(pool.prepare(1).unwrap_err(), PageError::NoHeadroom(_)));
    assert_eq!(pool.stats().live, DEVICE_PAGES - 10);
    // Pages that exist need no new memory.
    for page in more {
        pool.give_back(page).unwrap();
    }
    assert_eq!(pool.take_many(2).unwrap().len(), 2);
    drop((taken, pool));
    machine.assert_clean();
}

#[test]
fn one_question_covers_a_batch_and_a_pool_that_reuses_asks_none() {
    let machine = machine();
    let told = Arc::new(Told::default());
    told.free_pages.store(8, Ordering::Relaxed);
    let policy = AdmissionPolicy::with_probe(headroom(2), told.clone());
    let options = ElasticPoolOptions {
        block_bytes: PAGE,
        capacity_blocks: 32,
        page_bytes: None,
        initial_blocks: 6,
    };
    let gate = EpochGate::new();
    let pool = ElasticPool::with_rules(&machine.device, options, gate, rules(&policy)).unwrap();
    assert_eq!((pool.ready_blocks(), told.asked.load(Ordering::Relaxed)), (6, 1));
    pool.shrink_to(0, &[]).unwrap();
    assert_eq!(pool.grow_to(6), Ok(6));
    assert_eq!(told.asked.load(Ordering::Relaxed), 1);

    told.free_pages.store(3, Ordering::Relaxed);
    let error = pool.grow_to(8).unwrap_err();
    let GrowError::NoHeadroom { asked_blocks: 8, ready_blocks: 6, source } = error else {
        panic!("{error:?}");
    };
    assert_eq!((source.wanted_bytes, source.short_by()), (2 * PAGE, PAGE));
    assert_eq!(source.others_bytes, Some(7));
    assert!(error.is_retryable() && error.is_out_of_memory());
    assert_eq!((pool.stats().mapped_bytes, pool.pages().stats().live), (6 * PAGE, 6));
    told.free_pages.store(4, Ordering::Relaxed);
    assert_eq!(pool.grow_to(8), Ok(8));
    assert!(pool.close(&[]).wait().unwrap().is_clean());
    machine.assert_clean();
}

#[test]
fn a_device_that_runs_out_all_the_same_is_told_as_such() {
    let machine = machine();
    let told = Arc::new(Told::default());
    told.free_pages.store(u64::MAX / PAGE, Ordering::Relaxed);
    let pool = pages(&machine, &AdmissionPolicy::with_probe(headroom(0), told));
    let error = pool.take_many(DEVICE_PAGES + 1).unwrap_err();
    assert_eq!(error, PageError::OutOfMemory { page_bytes: PAGE, live: DEVICE_PAGES });
    assert_eq!((pool.stats().live, machine.sim.device_used_bytes(0)), (0, 0));
    drop(pool);
    machine.assert_clean();
}

#[test]
fn a_device_that_cannot_be_asked_gets_no_new_memory() {
    let machine = machine();
    let pool = pages(&machine, &AdmissionPolicy::new(headroom(1)));
    machine.sim.fail_nth("cuMemGetInfo", 1, ErrorCode::UNKNOWN);
    let refused = DriverError::new("cuMemGetInfo", ErrorCode::UNKNOWN);
    let error = pool.take().unwrap_err();
    assert_eq!(error, PageError::Device(DeviceError::Driver(refused)));
    assert_eq!(pool.stats().live, 0);
    drop(pool.take().unwrap());
    drop(pool);
    machine.assert_clean();
}

#[test]
fn askers_that_share_a_policy_do_not_count_the_same_bytes_twice() {
    const THREADS: u64 = 8;
    for _ in 0..20 {
        let machine = machine();
        let policy = AdmissionPolicy::new(headroom(20));
        let pools: Vec<_> = (0..THREADS).map(|_| pages(&machine, &policy)).collect();
        let taken: u64 = std::thread::scope(|scope| {
            let takers: Vec<_> = pools
                .iter()
                .map(|pool| {
                    scope.spawn(|| {
                        let mut taken = Vec::new();
                        while let Ok(pages) = pool.take_many(3) {
                            taken.extend(pages);
                        }
                        let count = taken.len() as u64;
                        std::mem::forget(taken);
                        count
                    })
                })
                .collect();
            takers.into_iter().map(|taker| taker.join().unwrap()).sum()
        });
        assert!(taken > 0 && taken <= DEVICE_PAGES - 20, "{taken} pages taken");
        assert_eq!(machine.sim.device_used_bytes(0), taken * PAGE);
    }
}

#[test]
fn what_is_being_created_is_refused_to_nobody_a_second_time() {
    const THREADS: u64 = 8;
    const BATCHES: u64 = 4;
    const BATCH: u64 = 16;
    for round in 0..100 {
        let config = SimConfig {
            device_bytes: THREADS * BATCHES * BATCH * PAGE,
            granularity: PAGE,
            seed: round,
            ..SimConfig::default()
        };
        let device = Device::open(Arc::new(SimDriver::new(config).unwrap()), 0).unwrap();
        let policy = AdmissionPolicy::new(headroom(0));
        let options = PagePoolOptions { page_bytes: None, capacity_pages: u64::MAX };
        let pool = PagePool::with_rules(&device, options, rules(&policy)).unwrap();
        // Exactly all pages of the device: no call may be refused.
        let take = || (0..BATCHES).map(|_| pool.take_many(BATCH)).collect::<Result<Vec<_>, _>>();
        let taken: Vec<_> = std::thread::scope(|scope| {
            let takers: Vec<_> = (0..THREADS).map(|_| scope.spawn(take)).collect();
            takers.into_iter().map(|taker| taker.join().unwrap()).collect()
        });
        for taken in taken {
            assert_eq!(taken.map(|batches| batches.len() as u64), Ok(BATCHES), "round {round}");
        }
    }
}

/// A probe that asks the policy which it serves, as a log of verdicts does.
#[derive(Debug, Default)]
struct Curious {
    policy: OnceLock<AdmissionPolicy>,
    asked: AtomicU64,
}

impl MemoryProbe for Curious {
    fn figures(&self, device: &Device) -> Result<MemoryFigures, DeviceError> {
        if self.asked.fetch_add(1, Ordering::Relaxed) == 0 {
            let policy = self.policy.get().unwrap();
            assert!(policy.judge(device, PAGE)?.is_admitted());
        }
        driver_figures(device)
    }
}

#[test]
fn a_probe_may_ask_the_policy_that_asks_it() {
    let (tell, told) = mpsc::channel();
    // A thread of its own, so that a deadlock ends the test.
    std::thread::spawn(move || {
        let (machine, curious) = (machine(), Arc::new(Curious::default()));
        let policy = AdmissionPolicy::with_probe(headroom(0), curious.clone());
        curious.policy.set(policy.clone()).unwrap();
        let taken = pages(&machine, &policy).take().is_ok();
        let _ = tell.send((taken, curious.asked.load(Ordering::Relaxed)));
    });
    assert_eq!(told.recv_timeout(Duration::from_secs(60)), Ok((true, 2)));
}

/// What a policy without a probe of its own asks.
fn driver_figures(device: &Device) -> Result<MemoryFigures, DeviceError> {
    let (free_bytes, total_bytes) = device.memory_info()?;
    Ok(MemoryFigures { free_bytes, total_bytes, others_bytes: None })
}

/// A probe during which another caller creates pages.
#[derive(Debug)]
struct Overtaken {
    other: OnceLock<PagePool>,
    taken: Mutex<Vec<PhysicalPage>>,
}

impl MemoryProbe for Overtaken {
    fn figures(&self, device: &Device) -> Result<MemoryFigures, DeviceError> {
        let figures = driver_figures(device)?;
        if let Some(other) = self.other.get()
            && self.taken.try_lock().is_ok_and(|taken| taken.len() < 2)
            && let Ok(mut taken) = self.taken.lock()
        {
            // Its own question comes back to this probe, which then adds nothing.
            taken.push(other.take().unwrap());
        }
        Ok(figures)
    }
}

#[test]
fn figures_that_another_caller_has_overtaken_admit_nothing_twice_and_refuse_nothing_for_good() {
    let machine = machine();
    let probe = Arc::new(Overtaken { other: OnceLock::new(), taken: Mutex::default() });
    let policy = AdmissionPolicy::with_probe(headroom(0), probe.clone());
    let ours = pages(&machine, &policy);
    let held = ours.take_many(DEVICE_PAGES - 4).unwrap();
    probe.other.set(pages(&machine, &policy)).unwrap();
    // Four pages are free when the question is asked first, two when it has its answer.
    let error = ours.take_many(4).unwrap_err();
    let PageError::NoHeadroom(verdict) = error else { panic!("{error:?}") };
    assert_eq!((verdict.free_bytes, verdict.pending_bytes), (2 * PAGE, 0));
    assert_eq!(ours.take_many(2).unwrap().len(), 2);
    drop(held);
}
