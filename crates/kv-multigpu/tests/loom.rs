//! The queue of a device's thread and its completions, in every order that the model checker knows.
//!
//! `cargo xtask model` runs it. What runs is the queue and the completions that are shipped; the threads are
//! the checker's, and the tasks count.

#![cfg(loom)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

use std::future::Future;
use std::panic::catch_unwind;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use kv_multigpu::threads::model::{ModelThread, poll_in_two_steps};
use kv_multigpu::threads::{Completion, TaskError};
use loom::model::Builder;
use loom::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use loom::sync::{Condvar, Mutex};
use loom::thread::{self, JoinHandle};

/// Runs a program in every order of up to three preemptions; with `KV_MODEL_DEEP=1`, of up to five.
fn explore(program: impl Fn() + Send + Sync + 'static) {
    let deep = std::env::var_os("KV_MODEL_DEEP").is_some_and(|value| value == "1");
    let mut model = Builder::new();
    model.preemption_bound = Some(if deep { 5 } else { 3 });
    model.check(program);
}

/// Counts its drops: what is owned by a task, or its result.
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_add(1, SeqCst);
    }
}

fn counter() -> Arc<AtomicUsize> {
    Arc::new(AtomicUsize::new(0))
}

fn work(thread: &ModelThread) -> JoinHandle<()> {
    let thread = thread.clone();
    thread::spawn(move || thread.work_off())
}

/// Wakes a thread of the model that waits for it.
#[derive(Default)]
struct Signal {
    woken: Mutex<bool>,
    changed: Condvar,
}

impl Wake for Signal {
    fn wake(self: Arc<Self>) {
        *self.woken.lock().unwrap() = true;
        self.changed.notify_one();
    }
}

/// Polls until there is a result, and between two polls waits to be woken; a wake that is lost is a deadlock,
/// which the checker reports.
fn block_on<T>(mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>) -> T {
    let signal = Arc::new(Signal::default());
    let waker = Waker::from(Arc::clone(&signal));
    loop {
        if let Poll::Ready(result) = poll(&mut Context::from_waker(&waker)) {
            return result;
        }
        let mut woken = signal.woken.lock().unwrap();
        while !std::mem::take(&mut *woken) {
            woken = signal.changed.wait(woken).unwrap();
        }
    }
}

#[test]
fn tasks_of_one_thread_run_in_order_and_are_waited_for() {
    explore(|| {
        let device = ModelThread::new(2);
        let worker = work(&device);
        let order = counter();
        let tasks = [(); 2].map(|()| {
            let order = Arc::clone(&order);
            device.submit(move || order.fetch_add(1, SeqCst)).ok().unwrap()
        });
        assert_eq!(tasks.map(Completion::wait), [Ok(0), Ok(1)]);
        device.close();
        worker.join().unwrap();
    });
}

#[test]
fn a_task_is_cancelled_or_runs_and_never_both() {
    explore(|| {
        let device = ModelThread::new(1);
        let worker = work(&device);
        let (ran, drops) = (counter(), counter());
        let task = {
            let (ran, owned) = (Arc::clone(&ran), Counted(Arc::clone(&drops)));
            device.submit(move || {
                let _owned = owned;
                ran.fetch_add(1, SeqCst) + 5
            })
        };
        match task.ok().unwrap().cancel() {
            Ok(()) => assert_eq!(ran.load(SeqCst), 0, "cancelled, and it ran"),
            Err(task) => assert_eq!(task.wait(), Ok(5)),
        }
        assert_eq!(drops.load(SeqCst), 1);
        device.close();
        worker.join().unwrap();
        assert!(ran.load(SeqCst) <= 1);
    });
}

#[test]
fn a_completion_that_is_dropped_loses_neither_task_nor_result() {
    explore(|| {
        let device = ModelThread::new(2);
        let worker = work(&device);
        let (owned, results) = (counter(), counter());
        let made = counter();
        let submit = || {
            let (own, result) = (Counted(Arc::clone(&owned)), Arc::clone(&results));
            let made = Arc::clone(&made);
            let task = device.submit(move || {
                let _own = own;
                made.fetch_add(1, SeqCst);
                Counted(result)
            });
            task.ok().unwrap()
        };
        drop(submit());
        submit().detach();
        device.close();
        worker.join().unwrap();
        assert_eq!(owned.load(SeqCst), 2, "what a task owns is dropped once");
        assert!((1..=2).contains(&made.load(SeqCst)), "a detached task runs");
        assert_eq!(results.load(SeqCst), made.load(SeqCst), "a result is dropped once");
    });
}

#[test]
fn what_is_taken_before_the_end_runs_and_the_rest_comes_back() {
    explore(|| {
        let device = ModelThread::new(1);
        let worker = work(&device);
        let submitter = {
            let device = device.clone();
            thread::spawn(move || {
                // Refused because the queue is full, or closed; or it runs.
                device.submit(|| 4).ok().map(Completion::wait)
            })
        };
        let own = device.submit(|| 3).ok().map(Completion::wait);
        device.close_and_wait();
        assert!(own == Some(Ok(3)) || own.is_none());
        let theirs = submitter.join().unwrap();
        assert!(theirs == Some(Ok(4)) || theirs.is_none(), "{theirs:?}");
        assert!(device.submit(|| ()).is_err());
        worker.join().unwrap();
    });
}

#[test]
fn two_threads_close_and_both_see_the_end() {
    explore(|| {
        let device = ModelThread::new(1);
        let ran = counter();
        let count = Arc::clone(&ran);
        device.submit(move || count.fetch_add(1, SeqCst)).ok().unwrap().detach();
        let worker = work(&device);
        let other = {
            let (device, ran) = (device.clone(), Arc::clone(&ran));
            thread::spawn(move || {
                device.close_and_wait();
                assert_eq!(ran.load(SeqCst), 1);
            })
        };
        device.close_and_wait();
        assert_eq!(ran.load(SeqCst), 1);
        other.join().unwrap();
        worker.join().unwrap();
    });
}

#[test]
fn a_future_is_woken() {
    explore(|| {
        let device = ModelThread::new(1);
        let worker = work(&device);
        let mut task = pin!(device.submit(|| 6).ok().unwrap());
        assert_eq!(block_on(|context| task.as_mut().poll(context)), Ok(6));
        device.close();
        worker.join().unwrap();
    });
}

#[test]
fn a_future_is_woken_when_its_task_is_taken_back() {
    explore(|| {
        let device = ModelThread::new(2);
        let worker = work(&device);
        let tasks = [1, 2].map(|i| device.submit(move || i).ok().unwrap());
        let canceller = {
            let device = device.clone();
            thread::spawn(move || {
                device.cancel_waiting();
                device.close();
            })
        };
        let results = tasks.map(|task| {
            let mut task = pin!(task);
            block_on(|context| task.as_mut().poll(context))
        });
        for (result, i) in results.into_iter().zip([1, 2]) {
            assert!(result == Ok(i) || result == Err(TaskError::Cancelled), "{result:?}");
        }
        canceller.join().unwrap();
        worker.join().unwrap();
    });
}

#[test]
fn a_task_that_submits_waits_for_nobody() {
    explore(|| {
        let device = ModelThread::new(1);
        let ran = counter();
        let (inner, count) = (device.clone(), Arc::clone(&ran));
        let task = device.submit(move || {
            let nested = inner.submit(move || count.fetch_add(1, SeqCst));
            nested.map(Completion::detach).is_ok()
        });
        let worker = work(&device);
        let other = {
            let device = device.clone();
            thread::spawn(move || device.submit(|| ()).map(Completion::detach).is_ok())
        };
        let taken = task.ok().unwrap().wait().unwrap();
        other.join().unwrap();
        device.close();
        worker.join().unwrap();
        assert_eq!(ran.load(SeqCst), usize::from(taken));
    });
}

/// Room comes when the task begins that took it, when that is taken back, and with the end.
#[test]
fn who_waits_for_room_is_woken() {
    explore(|| {
        let device = ModelThread::new(1);
        let first = device.submit(|| 1).ok().unwrap();
        let worker = work(&device);
        let submitter = {
            let device = device.clone();
            thread::spawn(move || {
                loop {
                    match device.submit(|| 2) {
                        Ok(task) => return task.wait(),
                        Err(_) => {
                            let mut room = pin!(device.room());
                            block_on(|context| room.as_mut().poll(context));
                        }
                    }
                }
            })
        };
        drop(first);
        assert_eq!(submitter.join().unwrap(), Ok(2));
        device.close();
        let mut room = pin!(device.room());
        block_on(|context| room.as_mut().poll(context));
        worker.join().unwrap();
    });
}

/// The checker sees a wake that is lost, where a completion looks and asks in two steps.
#[test]
fn a_lost_wake_would_be_found() {
    let found = catch_unwind(|| {
        explore(|| {
            let device = ModelThread::new(1);
            let worker = work(&device);
            let task = device.submit(|| 6).ok().unwrap();
            assert_eq!(block_on(|context| poll_in_two_steps(&task, context)), Ok(6));
            device.close();
            worker.join().unwrap();
        });
    });
    let message = found.unwrap_err().downcast::<String>().map(|text| *text).unwrap_or_default();
    assert!(message.contains("deadlock"), "{message}");
}
