//! The model checker, with what it needs to say when it finds something.

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use loom::model::Builder;

/// How many of the orders are tried.
#[derive(Clone, Copy, Debug)]
pub enum Bound {
    /// Those in which threads are interrupted so often in all, where they need not be.
    Preemptions(usize),
}

/// What became of a program that has a defect.
#[derive(Debug)]
pub struct Found {
    /// What the first failed check said; `None` if none of the orders showed the defect.
    pub failure: Option<String>,
    /// The order that showed it, counted from 1, or how many did not.
    pub order: u64,
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
    let mut model = Builder::new();
    let Bound::Preemptions(preemptions) = bound;
    model.preemption_bound = Some(preemptions);
    model.max_branches = 20_000;
    model.check(move || {
        count.fetch_add(1, Relaxed);
        program();
    });
    orders.load(Relaxed)
}

/// Set to the name of the test whose defect a process is to run into.
const DEFECT: &str = "KV_MODEL_DEFECT";
const ORDER: &str = "order ";

/// Runs the program of `test` with its defect, in a process of its own: after a failed check, what
/// the pool's lock guards is torn, and cleaning up may end the process.
///
/// `test` calls this with its own name; in that process the call does not return.
pub fn defect(test: &str, bound: Bound, program: impl Fn() + Send + Sync + 'static) -> Found {
    if std::env::var_os(DEFECT).is_some_and(|name| name == test) {
        let orders = AtomicU64::new(0);
        explore(test, bound, move || {
            eprintln!("{ORDER}{}", orders.fetch_add(1, Relaxed) + 1);
            program();
        });
        std::process::exit(0);
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads", "1"])
        .env(DEFECT, test)
        .env("RUST_BACKTRACE", "0")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    let order = text.lines().rev().find_map(|line| line.strip_prefix(ORDER)?.parse().ok());
    // The lines after the one that names the place.
    let failure = text.lines().skip_while(|line| !line.contains(" panicked at ")).skip(1);
    let failure = failure.take_while(|line| !line.starts_with("note:")).map(str::trim);
    let failure = failure.collect::<Vec<_>>().join(", ");
    Found {
        failure: (!output.status.success()).then_some(failure),
        order: order.unwrap_or_else(|| panic!("{test} did not begin: {text}")),
    }
}
