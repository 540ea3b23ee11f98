//! Trials that need what is not part of the project: public traces, NIXL, a server of etcd. Those that have not are ignored.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

#[cfg(any(feature = "etcd", feature = "nixl"))]
#[path = "../it/common/mod.rs"]
mod common;
#[cfg(feature = "etcd")]
mod etcd;
#[cfg(feature = "nixl")]
mod nixl;
mod traces;

fn main() {
    #[allow(unused_mut, reason = "without nodes, there are traces alone")]
    let mut trials = traces::trials();
    #[cfg(feature = "etcd")]
    trials.extend(etcd::trials());
    #[cfg(feature = "nixl")]
    trials.extend(nixl::trials());
    libtest_mimic::run(&libtest_mimic::Arguments::from_args(), trials).exit();
}
