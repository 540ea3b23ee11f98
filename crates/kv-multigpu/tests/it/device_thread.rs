//! A device's thread: order, back-pressure, cancelling, panics, its end, and a device that is lost.
//!
//! Where a task must stand still it waits for a channel, so nothing here depends on time.

use std::cell::RefCell;
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Barrier, Mutex};
use std::task::{Context, Poll, Wake, Waker};

use crate::common::machine;
use cuda_driver::{Device, DeviceBuffer, DeviceError, ErrorCode, Stream};
use cuda_sim::SimDriver;
use kv_multigpu::threads::{
    Completion, DeviceThread, DeviceThreadOptions, Refusal, Room, TaskError,
};

fn open() -> (SimDriver, Device) {
    let (sim, registry) = machine(1, true);
    let device = registry.device(0).unwrap();
    (sim, device)
}

fn spawn(device: &Device, tasks_max: usize) -> DeviceThread {
    let options = DeviceThreadOptions { tasks_max, ..DeviceThreadOptions::default() };
    DeviceThread::spawn(device, options).unwrap()
}

/// Keeps the thread busy until the sender is dropped or used; returns once it is busy.
fn occupy(thread: &DeviceThread) -> (Sender<()>, Completion<()>) {
    let (begun, is_begun) = channel();
    let (go, gate) = channel();
    let task = thread.submit(move |_| {
        begun.send(()).unwrap();
        let _ = gate.recv();
    });
    is_begun.recv().unwrap();
    (go, task.unwrap())
}

/// Counts its own drop.
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_add(1, SeqCst);
    }
}

/// Panics when it is dropped.
struct Explosive;

impl Drop for Explosive {
    fn drop(&mut self) {
        panic!("dropped");
    }
}

#[derive(Default)]
struct Wakes(AtomicUsize);

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, SeqCst);
    }
}

#[test]
fn tasks_run_in_the_order_of_submission_with_the_context_current() {
    let (sim, device) = open();
    let thread = spawn(&device, 64);
    let (go, busy) = occupy(&thread);
    let order = Arc::new(Mutex::new(Vec::new()));
    let tasks: Vec<_> = (0..64)
        .map(|i| {
            let order = Arc::clone(&order);
            let task = thread.submit(move |device: &Device| {
                order.lock().unwrap().push(i);
                (i, device.driver().ctx_get_current() == Ok(device.context()))
            });
            task.unwrap()
        })
        .collect();
    assert_eq!(thread.waiting(), 64);
    drop(go);
    busy.wait().unwrap();
    for (i, task) in tasks.into_iter().enumerate() {
        assert_eq!(task.wait(), Ok((i, true)));
    }
    assert_eq!(*order.lock().unwrap(), (0..64).collect::<Vec<_>>());
    thread.close().unwrap();
    drop((thread, device));
    assert!(sim.check_leaks().is_clean());
}

#[test]
fn a_full_queue_is_an_outcome_and_gives_the_task_back() {
    let (_, device) = open();
    let thread = spawn(&device, 2);
    let (go, busy) = occupy(&thread);
    let waiting = [0, 1].map(|i| thread.submit(move |_| i).unwrap());
    let refused = thread.submit(|_| 7).unwrap_err();
    assert_eq!(refused.refusal, Refusal::Full { tasks_max: 2 });
    drop(go);
    busy.wait().unwrap();
    assert_eq!(waiting.map(Completion::wait), [Ok(0), Ok(1)]);
    assert_eq!(thread.submit(refused.task).unwrap().wait(), Ok(7));
    assert_eq!(spawn(&device, 1).submit(|_| 8).unwrap().wait(), Ok(8));
}

#[test]
fn a_task_is_cancelled_until_it_begins() {
    let (_, device) = open();
    let thread = spawn(&device, 8);
    let (go, busy) = occupy(&thread);
    let (ran, drops) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let submit = || {
        let (ran, owned) = (Arc::clone(&ran), Counted(Arc::clone(&drops)));
        let task = thread.submit(move |_| {
            let _owned = owned;
            ran.fetch_add(1, SeqCst);
        });
        task.unwrap()
    };
    submit().cancel().unwrap();
    assert_eq!(drops.load(SeqCst), 1, "what it owned is dropped at once");
    drop(submit());
    assert_eq!((drops.load(SeqCst), thread.waiting()), (2, 0), "dropping cancels");
    let [first, second] = [submit(), submit()];
    assert_eq!(thread.cancel_waiting(), 2);
    assert_eq!(
        [first.wait(), second.wait()],
        [Err(TaskError::Cancelled), Err(TaskError::Cancelled)]
    );
    submit().detach();
    assert_eq!((drops.load(SeqCst), ran.load(SeqCst)), (4, 0));

    let busy = busy.cancel().unwrap_err();
    assert!(!busy.is_done(), "it has begun");
    drop(go);
    busy.wait().unwrap();
    thread.close().unwrap();
    assert_eq!((drops.load(SeqCst), ran.load(SeqCst)), (5, 1), "detached is not cancelled");
}

#[test]
fn a_completion_dropped_while_its_task_runs_lets_it_end() {
    let (_, device) = open();
    let thread = spawn(&device, 8);
    let drops = Arc::new(AtomicUsize::new(0));
    let (begun, is_begun) = channel();
    let (go, gate) = channel::<()>();
    let result = Counted(Arc::clone(&drops));
    let task = thread.submit(move |_| {
        begun.send(()).unwrap();
        let _ = gate.recv();
        result
    });
    is_begun.recv().unwrap();
    drop(task.unwrap());
    assert_eq!(drops.load(SeqCst), 0);
    drop(go);
    thread.close().unwrap();
    assert_eq!(drops.load(SeqCst), 1, "its result was dropped on the thread");
}

#[test]
fn panics_are_errors_and_the_thread_goes_on() {
    let (_, device) = open();
    let thread = spawn(&device, 8);
    let panicked = |message: &str| Err(TaskError::Panicked { message: message.to_owned() });
    let wait = |task: fn(&Device)| thread.submit(task).unwrap().wait();
    assert_eq!(wait(|_| panic!("as text")), panicked("as text"));
    let number = 7;
    let formatted = thread.submit(move |_| {
        if number > 0 {
            panic!("number {number}");
        }
    });
    assert_eq!(formatted.unwrap().wait(), panicked("number 7"));
    assert_eq!(wait(|_| std::panic::panic_any(7)), panicked("no text in the panic"));
    assert_eq!(wait(|_| std::panic::panic_any(Explosive)), panicked("no text in the panic"));
    // Nobody takes this result, and it panics as it is dropped; so does what this task owns.
    let (go, busy) = occupy(&thread);
    thread.submit(|_| Explosive).unwrap().detach();
    drop(go);
    busy.wait().unwrap();
    let owned = Explosive;
    let owns = thread.submit(move |_| drop(owned)).unwrap();
    assert_eq!(owns.wait(), panicked("dropped"));
    let owned = Explosive;
    let (go, busy) = occupy(&thread);
    drop(thread.submit(move |_| drop(owned)).unwrap());
    drop(go);
    busy.wait().unwrap();
    assert_eq!(thread.submit(|device: &Device| device.ordinal()).unwrap().wait(), Ok(0));
    thread.close().unwrap();
}

#[test]
fn a_task_submits_to_its_own_thread_and_cannot_wait_for_it() {
    let (_, device) = open();
    let thread = Arc::new(spawn(&device, 1));
    let ran = Arc::new(AtomicUsize::new(0));
    let (inner, count) = (Arc::clone(&thread), Arc::clone(&ran));
    let task = thread.submit(move |_| {
        let nested = inner.submit({
            let count = Arc::clone(&count);
            move |_| count.fetch_add(1, SeqCst)
        });
        let full = inner.submit(|_| ()).unwrap_err().refusal;
        let close = inner.close();
        (nested.unwrap().wait().unwrap_err(), full, close)
    });
    let (waited, full, close) = task.unwrap().wait().unwrap();
    assert_eq!(waited, TaskError::WaitsForItself);
    assert_eq!(full, Refusal::Full { tasks_max: 1 });
    assert_eq!(close, Err(TaskError::FromItsOwnTask));
    thread.close().unwrap();
    assert_eq!(ran.load(SeqCst), 1, "it was left to run");
    assert_eq!(thread.submit(|_| ()).unwrap_err().refusal, Refusal::Closed);
    thread.close().unwrap();
}

#[test]
fn a_task_may_wait_for_what_is_over() {
    let (_, device) = open();
    let thread = spawn(&device, 8);
    let done = thread.submit(|_| 5).unwrap();
    thread.submit(|_| ()).unwrap().wait().unwrap();
    assert!(done.is_done());
    assert_eq!(thread.submit(move |_| done.wait()).unwrap().wait(), Ok(Ok(5)));
}

#[test]
fn dropping_waits_for_nothing_and_what_was_taken_still_runs() {
    let (sim, device) = open();
    let thread = spawn(&device, 8);
    let (go, busy) = occupy(&thread);
    let last = thread.submit(|device: &Device| device.ordinal()).unwrap();
    // The thread stands still until `go` is dropped, which is after this.
    drop(thread);
    drop(go);
    busy.wait().unwrap();
    assert_eq!(last.wait(), Ok(0));
    // The thread has the last handle of the device then, or this is it.
    drop(device);
    assert!(sim.findings().is_empty());
}

#[test]
fn the_last_owner_may_be_a_task_of_its_own() {
    let (_, device) = open();
    let thread = Arc::new(spawn(&device, 8));
    let (go, busy) = occupy(&thread);
    let own = Arc::clone(&thread);
    let task = thread.submit(move |_| drop(own)).unwrap();
    drop(thread);
    drop(go);
    busy.wait().unwrap();
    task.wait().unwrap();
}

#[test]
fn several_threads_close_at_once() {
    let (_, device) = open();
    let thread = spawn(&device, 64);
    let ran = Arc::new(AtomicUsize::new(0));
    for _ in 0..32 {
        let ran = Arc::clone(&ran);
        thread.submit(move |_| ran.fetch_add(1, SeqCst)).unwrap().detach();
    }
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                thread.close().unwrap();
                assert_eq!(ran.load(SeqCst), 32);
            });
        }
    });
    assert!(thread.submit(|_| ()).is_err());
}

/// Says that a thread has ended, a while after its last task.
struct Slow(Arc<AtomicUsize>);

impl Drop for Slow {
    fn drop(&mut self) {
        (0..2000).for_each(|_| std::thread::yield_now());
        self.0.fetch_add(1, SeqCst);
    }
}

thread_local! {
    static KEPT: RefCell<Option<Slow>> = const { RefCell::new(None) };
}

#[test]
fn who_closes_beside_another_waits_for_the_threads_end_too() {
    let (_sim, device) = open();
    for _ in 0..10 {
        let thread = spawn(&device, 2);
        let ended = Arc::new(AtomicUsize::new(0));
        let slow = Slow(Arc::clone(&ended));
        // What a thread keeps for itself is dropped at its very end.
        let task = thread.submit(move |_| KEPT.with(|kept| *kept.borrow_mut() = Some(slow)));
        task.unwrap().wait().unwrap();
        let start = Barrier::new(3);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    start.wait();
                    thread.close().unwrap();
                    assert_eq!(ended.load(SeqCst), 1, "the thread has not ended");
                });
            }
        });
    }
}

/// Notes, when it is dropped, whether its task's receiver was told before.
struct Asks(Arc<Wakes>, Sender<usize>);

impl Drop for Asks {
    fn drop(&mut self) {
        self.1.send(self.0.0.load(SeqCst)).unwrap();
    }
}

#[test]
fn a_cancelled_task_is_told_of_when_its_values_are_gone() {
    let (sim, device) = open();
    let thread = spawn(&device, 4);
    for lost in [false, true] {
        let (go, busy) = occupy(&thread);
        let wakes = Arc::new(Wakes::default());
        let (tell, told) = channel();
        let asks = Asks(Arc::clone(&wakes), tell);
        let mut task = pin!(thread.submit(move |_| drop(asks)).unwrap());
        let waker = Waker::from(wakes);
        assert!(task.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        if lost {
            sim.lose_device(0, 0, ErrorCode::ILLEGAL_ADDRESS);
            assert!(device.synchronize().is_err());
        } else {
            assert_eq!(thread.cancel_waiting(), 1);
        }
        drop(go);
        assert_eq!(told.recv().unwrap(), 0, "told before the values were dropped");
        busy.wait().unwrap();
        if lost {
            thread.close().unwrap();
        }
        let outcome = task.as_mut().poll(&mut Context::from_waker(&waker));
        assert!(matches!(outcome, Poll::Ready(Err(_))), "{outcome:?}");
    }
}

/// Threads in a circle, each with a task that waits for one of the next: the last to wait is refused, and all end.
#[test]
fn threads_that_wait_for_each_other_in_a_circle_do_not_hang() {
    for count in [2, 3] {
        let (_sim, device) = open();
        let threads: Vec<_> = (0..count).map(|_| Arc::new(spawn(&device, 4))).collect();
        let start = Arc::new(Barrier::new(count));
        let outcomes: Vec<_> = (0..count)
            .map(|i| {
                let (next, start) = (Arc::clone(&threads[(i + 1) % count]), Arc::clone(&start));
                let task = move |_: &Device| {
                    start.wait();
                    next.submit(|_| 7).unwrap().wait()
                };
                threads[i].submit(task).unwrap()
            })
            .collect();
        let outcomes: Vec<_> = outcomes.into_iter().map(|task| task.wait().unwrap()).collect();
        let refused = outcomes.iter().filter(|outcome| **outcome != Ok(7)).collect::<Vec<_>>();
        assert_eq!(refused, [&Err(TaskError::WaitsForItself)], "{outcomes:?}");
    }
}

#[test]
fn a_task_cannot_close_a_thread_that_waits_for_its_own() {
    let (_sim, device) = open();
    let [first, second] = [0, 1].map(|_| Arc::new(spawn(&device, 4)));
    let (here, other) = (Arc::clone(&first), Arc::clone(&second));
    let (begun, is_begun) = channel();
    // A task of the first waits for one of the second, which closes the first.
    let outcome = first.submit(move |_| {
        let task = other.submit(move |_| {
            is_begun.recv().unwrap();
            here.close()
        });
        begun.send(()).unwrap();
        task.unwrap().wait()
    });
    let outcome = outcome.unwrap().wait().unwrap();
    // Whichever waits last is refused.
    match outcome {
        Ok(closed) => assert_eq!(closed, Err(TaskError::FromItsOwnTask)),
        Err(error) => assert_eq!(error, TaskError::WaitsForItself),
    }
    second.close().unwrap();
    first.close().unwrap();
}

#[test]
fn a_future_wakes_the_last_one_who_asked_and_gives_its_result_once() {
    let (_, device) = open();
    let thread = spawn(&device, 8);
    let (go, busy) = occupy(&thread);
    let mut task = pin!(thread.submit(|_| 6).unwrap());
    let wakes = [(); 2].map(|()| Arc::new(Wakes::default()));
    for wakes in &wakes {
        let waker = Waker::from(Arc::clone(wakes));
        assert_eq!(task.as_mut().poll(&mut Context::from_waker(&waker)), Poll::Pending);
    }
    drop(go);
    busy.wait().unwrap();
    thread.close().unwrap();
    assert_eq!(wakes.map(|wakes| wakes.0.load(SeqCst)), [0, 1]);
    let mut context = Context::from_waker(Waker::noop());
    assert_eq!(task.as_mut().poll(&mut context), Poll::Ready(Ok(6)));
    assert_eq!(task.as_mut().poll(&mut context), Poll::Ready(Err(TaskError::Taken)));
}

#[test]
fn a_waker_that_panics_is_nobody_elses_problem() {
    struct Panics;
    impl Wake for Panics {
        fn wake(self: Arc<Self>) {
            panic!("waker");
        }
    }
    let (_, device) = open();
    let thread = spawn(&device, 8);
    let (go, busy) = occupy(&thread);
    let mut task = pin!(thread.submit(|_| 6).unwrap());
    let waker = Waker::from(Arc::new(Panics));
    assert_eq!(task.as_mut().poll(&mut Context::from_waker(&waker)), Poll::Pending);
    drop(go);
    busy.wait().unwrap();
    assert_eq!(thread.submit(|_| 7).unwrap().wait(), Ok(7));
}

#[test]
fn room_is_waited_for_and_given_up() {
    let (_, device) = open();
    let thread = spawn(&device, 1);
    let poll = |room: std::pin::Pin<&mut Room<'_>>, wakes: &Arc<Wakes>| {
        room.poll(&mut Context::from_waker(&Waker::from(Arc::clone(wakes)))).is_ready()
    };
    let wakes = [(); 4].map(|()| Arc::new(Wakes::default()));
    let counts = || wakes.each_ref().map(|wakes| wakes.0.load(SeqCst));
    assert!(poll(pin!(thread.room()), &wakes[0]), "there is room");
    let (go, busy) = occupy(&thread);
    let waiting = thread.submit(|_| ()).unwrap();
    let (mut kept, mut given_up) = (pin!(thread.room()), Box::pin(thread.room()));
    assert!(!poll(kept.as_mut(), &wakes[0]) && !poll(kept.as_mut(), &wakes[1]));
    assert!(!poll(given_up.as_mut(), &wakes[2]));
    drop(given_up);
    assert_eq!(Arc::strong_count(&wakes[2]), 1, "its waker is let go of");
    waiting.cancel().unwrap();
    assert_eq!(counts(), [0, 1, 0, 0], "the last one who asked is woken");
    assert!(poll(kept.as_mut(), &wakes[1]));

    thread.submit(|_| ()).unwrap().detach();
    assert!(!poll(kept.as_mut(), &wakes[3]));
    drop(go);
    busy.wait().unwrap();
    thread.close().unwrap();
    assert_eq!(counts(), [0, 1, 0, 1]);
    assert!(poll(kept.as_mut(), &wakes[3]), "closed is no reason to wait");
}

#[test]
fn a_lost_device_answers_its_cause_at_once() {
    let (sim, device) = open();
    let stream = Stream::new(&device).unwrap();
    let thread = spawn(&device, 8);
    let (go, busy) = occupy(&thread);
    let drops = Arc::new(AtomicUsize::new(0));
    let memory = DeviceBuffer::alloc(&device, 64).unwrap();
    let owned = Counted(Arc::clone(&drops));
    let waiting = thread.submit(move |_| drop((owned, memory))).unwrap();
    sim.lose_device(0, 0, ErrorCode::ILLEGAL_ADDRESS);
    let DeviceError::Driver(first) = stream.synchronize().unwrap_err() else {
        panic!("the first error comes from the driver");
    };
    // The thread still stands still: nobody has to wait for it to learn this.
    let calls = sim.calls();
    assert_eq!(thread.submit(|_| ()).unwrap_err().refusal, Refusal::Lost { first });
    assert_eq!(stream.synchronize(), Err(DeviceError::Poisoned { first }));
    assert_eq!(sim.calls(), calls, "the driver is not asked again");
    drop(go);
    busy.wait().unwrap();
    assert_eq!(waiting.wait(), Err(TaskError::Lost { first }));
    assert_eq!(drops.load(SeqCst), 1, "what it owned is cleaned up");
    thread.close().unwrap();
    drop((thread, stream, device));
    assert!(sim.check_leaks().is_clean());
}

#[test]
fn a_context_that_cannot_be_bound_is_the_tasks_error() {
    let (sim, device) = open();
    let thread = spawn(&device, 8);
    let (go, busy) = occupy(&thread);
    let task = thread.submit(|_| 3).unwrap();
    sim.fail_nth("cuCtxSetCurrent", 2, ErrorCode::INVALID_CONTEXT);
    drop(go);
    // The first call takes the context of the task before off the thread.
    busy.wait().unwrap();
    let TaskError::Device(error) = task.wait().unwrap_err() else {
        panic!("the driver refused");
    };
    assert_eq!(error.driver_error().code, ErrorCode::INVALID_CONTEXT);
    assert_eq!(thread.submit(|_| 4).unwrap().wait(), Ok(4));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_runtime_awaits_tasks_of_several_devices() {
    let (_, registry) = machine(8, true);
    let threads: Vec<_> = (0..8).map(|i| spawn(&registry.device(i).unwrap(), 4)).collect();
    let tasks: Vec<_> = threads
        .iter()
        .flat_map(|thread| (0..4).map(|_| thread.submit(|device: &Device| device.ordinal())))
        .collect();
    for (i, task) in tasks.into_iter().enumerate() {
        match task {
            Ok(task) => assert_eq!(task.await, Ok(i as i32 / 4)),
            Err(refused) => panic!("{refused:?}"),
        }
    }
}
