//! experiment
use std::cell::Cell;
use std::sync::OnceLock;
use parking_lot::{Mutex as Inner, MutexGuard};

#[derive(Debug)]
pub(crate) struct Mutex<T>(Inner<T>);

struct Par { first: u32, cap: u32, total: u32, adapt: bool }
static PAR: OnceLock<Par> = OnceLock::new();
fn par() -> &'static Par {
    PAR.get_or_init(|| {
        let get = |name: &str, or: u32| std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(or);
        Par { first: get("KVL_FIRST", 0), cap: get("KVL_CAP", 64), total: get("KVL_TOTAL", 4096), adapt: get("KVL_ADAPT", 0) != 0 }
    })
}
thread_local! { static LAST: Cell<u32> = const { Cell::new(0) }; }

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self { Self(Inner::new(value)) }
    #[inline]
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        match self.0.try_lock() { Some(guard) => guard, None => self.wait() }
    }
    #[inline]
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> { self.0.try_lock() }

    #[cold]
    fn wait(&self) -> MutexGuard<'_, T> {
        let par = par();
        if par.first == 0 { return self.0.lock(); }
        let mut pause = if par.adapt { LAST.get().max(par.first) } else { par.first };
        let mut spent = 0;
        while spent < par.total {
            for _ in 0..pause { std::hint::spin_loop(); }
            spent += pause;
            if let Some(guard) = self.0.try_lock() {
                if par.adapt { LAST.set(pause / 2); }
                return guard;
            }
            pause = (pause * 2).min(par.cap);
        }
        if par.adapt { LAST.set(par.cap); }
        self.0.lock()
    }
}
