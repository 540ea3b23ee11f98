//! Work ahead of need: stepped by hand or by a thread, with what goes wrong as a state.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::ThreadId;
use std::time::Duration;

use super::{Fault, Health, Progress, Waker, WorkHandle, WorkSource, Worker, WorkerOptions};

/// Steps that were agreed on beforehand, then nothing.
#[derive(Default)]
struct Scripted {
    steps: Mutex<VecDeque<Result<Progress, Fault>>>,
    taken: AtomicU64,
}

impl Scripted {
    fn new(steps: impl IntoIterator<Item = Result<Progress, Fault>>) -> Arc<Self> {
        Arc::new(Self { steps: Mutex::new(steps.into_iter().collect()), ..Self::default() })
    }

    fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }
}

impl WorkSource for Scripted {
    fn step(&self) -> Result<Progress, Fault> {
        self.taken.fetch_add(1, Ordering::Relaxed);
        self.steps.lock().unwrap().pop_front().unwrap_or(Ok(Progress::Done))
    }
}

struct Panics;

impl WorkSource for Panics {
    fn step(&self) -> Result<Progress, Fault> {
        panic!("the map is torn")
    }
}

/// Tells of every step.
struct Tells(Mutex<Sender<ThreadId>>);

impl WorkSource for Tells {
    fn step(&self) -> Result<Progress, Fault> {
        let _ = self.0.lock().unwrap().send(std::thread::current().id());
        Ok(Progress::Done)
    }
}

fn tells() -> (Arc<Tells>, Receiver<ThreadId>) {
    let (sender, receiver) = channel();
    (Arc::new(Tells(Mutex::new(sender))), receiver)
}

/// What a source tells next. Fails, rather than waits, once its worker has ended.
#[track_caller]
fn next<T>(told: &Receiver<T>, place: &WorkHandle) -> T {
    loop {
        if let Ok(next) = told.try_recv() {
            return next;
        }
        assert!(place.health() == Health::Healthy, "{:?}", place.health());
        std::thread::yield_now();
    }
}

const SHORT: Fault = Fault::OutOfMemory { bytes: 1 };
const LIMIT: Fault = Fault::Limit { bytes: 2 };

#[test]
fn a_source_is_stepped_when_attached_when_woken_and_while_it_has_more() {
    let worker = Worker::manual();
    let source = Scripted::new([Ok(Progress::More), Ok(Progress::Waiting), Ok(Progress::Done)]);
    let place = worker.attach(source.clone());
    assert!(worker.poll());
    assert_eq!(source.taken(), 1);
    assert!(!worker.poll());
    assert!(!worker.poll());
    assert_eq!(source.taken(), 3);
    assert!(!worker.poll());
    assert_eq!(source.taken(), 3, "it was done and nobody woke it");
    place.waker().wake();
    place.waker().wake();
    assert!(!worker.poll());
    assert!(!worker.poll());
    assert_eq!(source.taken(), 4);
}

#[test]
fn a_fault_that_may_pass_is_tried_again_and_its_first_cause_is_kept() {
    let worker = Worker::manual();
    let source = Scripted::new([Err(SHORT), Err(LIMIT), Ok(Progress::Done), Err(LIMIT)]);
    let place = worker.attach(source.clone());
    worker.poll();
    assert_eq!(place.health(), Health::Degraded { cause: SHORT });
    worker.poll();
    assert_eq!(worker.health(), Health::Degraded { cause: SHORT });
    worker.poll();
    assert_eq!(place.health(), Health::Healthy);
    place.waker().wake();
    worker.poll();
    assert_eq!(place.health(), Health::Degraded { cause: LIMIT });
    assert_eq!(source.taken(), 4);
}

#[test]
fn a_panic_ends_the_work_of_its_source_alone() {
    let worker = Worker::manual();
    let (broken, sound) = (worker.attach(Arc::new(Panics)), Scripted::new([]));
    let sound_place = worker.attach(sound.clone());
    worker.poll();
    let cause = Fault::Panicked { message: "the map is torn".into() };
    assert_eq!(broken.health(), Health::Failed { cause: cause.clone() });
    assert_eq!(worker.health(), broken.health());
    assert!(sound_place.health() == Health::Healthy);
    broken.waker().wake();
    sound_place.waker().wake();
    worker.poll();
    assert_eq!(sound.taken(), 2);
    assert_eq!(broken.waker().run(|| Ok(())), Err(cause));
}

#[test]
fn work_by_hand_counts_as_the_sources_own() {
    let worker = Worker::manual();
    let place = worker.attach(Scripted::new([]));
    assert_eq!(place.waker().run(|| Ok(7)), Ok(7));
    assert_eq!(place.waker().run::<()>(|| Err(SHORT)), Err(SHORT));
    assert_eq!(place.health(), Health::Degraded { cause: SHORT });
    let waker = place.waker().clone();
    let torn = waker.run::<()>(|| panic!("torn by hand")).unwrap_err();
    assert_eq!(torn, Fault::Panicked { message: "torn by hand".into() });
    place.detach();
    assert_eq!(waker.run(|| Ok(())), Err(Fault::Stopped));
}

#[test]
fn a_detached_source_is_dropped_and_never_stepped() {
    let worker = Worker::manual();
    let (kept, dropped) = (Scripted::new([]), Scripted::new([]));
    let place = worker.attach(kept.clone());
    drop(worker.attach(dropped.clone()));
    assert_eq!(Arc::strong_count(&dropped), 1);
    place.detach();
    assert_eq!(Arc::strong_count(&kept), 1);
    worker.poll();
    assert_eq!((kept.taken(), dropped.taken()), (0, 0));
}

/// Wakes itself in each of its first steps, as somebody else might meanwhile.
struct Insists {
    left: AtomicU64,
    waker: OnceLock<Waker>,
}

impl WorkSource for Insists {
    fn step(&self) -> Result<Progress, Fault> {
        if self.left.load(Ordering::Relaxed) > 0 {
            self.left.fetch_sub(1, Ordering::Relaxed);
            self.waker.get().unwrap().wake();
        }
        Ok(Progress::Done)
    }
}

#[test]
fn a_demand_that_comes_while_a_step_runs_causes_another() {
    let worker = Worker::manual();
    let source = Arc::new(Insists { left: AtomicU64::new(5), waker: OnceLock::new() });
    let place = worker.attach(source.clone());
    source.waker.set(place.waker().clone()).unwrap();
    let mut rounds = 1;
    while worker.poll() {
        rounds += 1;
    }
    assert_eq!((rounds, source.left.load(Ordering::Relaxed)), (6, 0));
}

/// Takes one long step: tells of its beginning, and ends it when told to.
struct Long {
    begun: Mutex<Sender<()>>,
    end: Mutex<Receiver<()>>,
    ended: AtomicBool,
}

fn long() -> (Arc<Long>, Receiver<()>, Sender<()>) {
    let ((begun, has_begun), (end, wait)) = (channel(), channel());
    let ended = AtomicBool::new(false);
    (Arc::new(Long { begun: Mutex::new(begun), end: Mutex::new(wait), ended }), has_begun, end)
}

impl WorkSource for Long {
    fn step(&self) -> Result<Progress, Fault> {
        self.begun.lock().unwrap().send(()).unwrap();
        self.end.lock().unwrap().recv().unwrap();
        self.ended.store(true, Ordering::SeqCst);
        Ok(Progress::Done)
    }
}

#[test]
fn detaching_waits_for_a_step_and_dropping_does_not() {
    let worker = Worker::spawn(WorkerOptions::default()).unwrap();
    let (source, has_begun, end) = long();
    let place = worker.attach(source.clone());
    next(&has_begun, &place);
    let entry = Arc::clone(&place.waker().entry);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // The step ends once it is waited for. Who does not wait has gone on by then.
            while !entry.is_detached() {
                std::thread::yield_now();
            }
            (0..1000).for_each(|_| std::thread::yield_now());
            end.send(()).unwrap();
        });
        place.detach();
        assert!(source.ended.load(Ordering::SeqCst));
    });
    assert_eq!(Arc::strong_count(&source), 1);

    let (source, has_begun, end) = long();
    let place = worker.attach(source.clone());
    next(&has_begun, &place);
    let waker = place.waker().clone();
    drop(place);
    assert!(!source.ended.load(Ordering::SeqCst));
    end.send(()).unwrap();
    worker.close();
    // The thread has let go of it after the step, whoever still has its waker.
    assert_eq!(Arc::strong_count(&source), 1);
    assert_eq!(waker.run(|| Ok(())), Err(Fault::Stopped));
}

#[test]
fn the_thread_steps_what_is_woken_from_naps_and_from_sleep() {
    for naps_before_sleep in [0, 1, u32::MAX] {
        let nap = Duration::from_micros(50);
        let options = WorkerOptions { nap, naps_before_sleep, ..WorkerOptions::default() };
        let worker = Worker::spawn(options).unwrap();
        let (source, steps) = tells();
        let place = worker.attach(source);
        let thread = next(&steps, &place);
        assert_ne!(thread, std::thread::current().id());
        for round in 0..200 {
            if round % 2 == 0 {
                place.waker().wake()
            } else {
                place.waker().wake_now()
            }
            assert_eq!(next(&steps, &place), thread);
        }
        drop(place);
        worker.close();
    }
}

#[test]
fn the_thread_tries_again_by_itself() {
    let options = WorkerOptions { retry: Duration::from_micros(100), ..WorkerOptions::default() };
    let worker = Worker::spawn(options).unwrap();
    let (source, steps) = tells();
    let refused = Scripted::new([Err(SHORT), Err(SHORT), Ok(Progress::Waiting)]);
    let place = worker.attach(refused.clone());
    // Steps of a second source show that the thread goes round.
    let other = worker.attach(source);
    while refused.taken() < 4 {
        other.waker().wake();
        next(&steps, &other);
    }
    assert!(place.health() == Health::Healthy);
    worker.close();
}

#[test]
fn a_closed_worker_leaves_its_sources_failed_but_usable_by_hand() {
    let worker = Worker::spawn(WorkerOptions::default()).unwrap();
    let place = worker.attach(Scripted::new([]));
    worker.clone().close();
    assert_eq!(place.health(), Health::Failed { cause: Fault::Stopped });
    assert_eq!(place.waker().run(|| Ok(1)), Ok(1));
    let late = worker.attach(Scripted::new([]));
    assert_eq!(late.health(), Health::Failed { cause: Fault::Stopped });
}

#[test]
fn a_panic_on_the_thread_is_a_state() {
    let worker = Worker::spawn(WorkerOptions::default()).unwrap();
    let broken = worker.attach(Arc::new(Panics));
    let (source, steps) = tells();
    let other = worker.attach(source);
    // The second round of the other source comes after the step that panicked.
    next(&steps, &other);
    other.waker().wake();
    next(&steps, &other);
    let cause = Fault::Panicked { message: "the map is torn".into() };
    assert_eq!(broken.health(), Health::Failed { cause });
    assert!(other.health() == Health::Healthy);
    drop((broken, other));
    worker.close();
}
