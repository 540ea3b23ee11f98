//! The model checker, with what it needs to say when it finds something.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// How many of the orders are tried.
#[derive(Clone, Copy, Debug)]
pub enum Bound {
    /// Those in which threads are interrupted so often in all, where they need not be.
    Preemptions(usize),
}

/// Names the program when a check in it fails.
struct Program<'a>(&'a str);

impl Drop for Program<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("in the program {}", self.0);
        }
    }
}

/// Runs a program in every order within the bound; how many there were.
pub fn explore(name: &str, bound: Bound, program: impl Fn() + Send + Sync + 'static) -> u64 {
    let _named = Program(name);
    let orders = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&orders);
    let mut model = loom::model::Builder::new();
    let Bound::Preemptions(preemptions) = bound;
    model.preemption_bound = Some(preemptions);
    model.max_branches = 20_000;
    model.check(move || {
        count.fetch_add(1, Relaxed);
        program();
    });
    orders.load(Relaxed)
}
