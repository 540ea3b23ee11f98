//! A simulated CUDA device: address, stream, event, context and fault semantics of the driver, with
//! every access checked.
//!
//! A program that manages GPU memory goes wrong in ways that a GPU hides: an order that happened to
//! hold, a buffer that happened not to be reused yet, a read one page past the end that happened to
//! be mapped. [`SimDriver`] stands behind [`cuda_driver::Driver`] and makes these visible on any
//! machine: it is as strict as the hardware, as lazy as the memory model allows, and it says what it
//! saw.
//!
//! # Example
//! ```
//! use cuda_driver::Driver;
//! use cuda_sim::{FindingKind, SimConfig, SimDriver};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let sim = SimDriver::new(SimConfig::default())?;
//! let context = sim.device_primary_ctx_retain(0)?;
//! // SAFETY: the context was retained above and is released by nobody.
//! unsafe { sim.ctx_set_current(context) }?;
//! let memory = sim.mem_alloc(4096)?;
//! // One byte too many: refused, and explained.
//! // SAFETY: stream 0 is the default stream; a wrong device address is answered with an error.
//! assert!(unsafe { sim.memset_d8_async(memory, 0, 4097, 0) }.is_err());
//! let finding = &sim.findings()[0];
//! assert_eq!(finding.kind, FindingKind::InvalidRange);
//! assert_eq!(finding.nearest.map(|n| (n.base, n.missed_by)), Some((memory, 1)));
//! # Ok(())
//! # }
//! ```
//!
//! # Order
//! Streams are queues and nothing runs when it is enqueued. Whenever the host waits, a seeded
//! scheduler picks one ready stream after another and runs its next operation, until what the host
//! waits for has happened, and no further. Copies and kernels read pinned host memory when they run.
//! A query tells how far the device is at that moment, and up to three operations run after it. So an
//! order that the program did not ask for does not hold for every seed, and each run replays from its
//! seed as long as one thread makes the calls. Another [`Pace`] makes the devices as slow as is legal,
//! as fast as is legal, or keeps them one operation behind the host: set [`SimConfig::pace`], call
//! [`SimDriver::set_pace`], or let the variable `CUDA_SIM_PACE` of the environment say `slowest`,
//! `fastest`, `one-behind` or `random`, so that a suite of tests runs at each pace unchanged.
//!
//! For a small program, [`explore`] runs it under every order there is, from a host that runs far ahead
//! to a device that runs each operation at once; [`explore_random`] takes many at random. A failure
//! comes with a [`Script`] that [`replay`] takes, and with all that ran, in order.
//!
//! A function of the host that a stream calls runs on the thread that waits, with the machine locked:
//! its driver calls are refused (`NOT_PERMITTED`), and it must not wait for another thread's.
//!
//! # Races
//! Two accesses to the same bytes, at least one of which writes, that nothing orders are a finding,
//! whatever order the device took: of operations of different streams and devices, of the host (where
//! [`Driver::host_access`](cuda_driver::Driver::host_access) tells of it), and of the calls that map, unmap
//! and free. A [`Race`] names both, the lines of the program that made them, the bytes, and the order that
//! is missing. [`SimConfig::races`] and the variable `CUDA_SIM_RACES` of the environment (`off`, `report`,
//! `abort`) say what is done about one. What orders and what does not, what it costs and what it cannot see
//! stands in `docs/RACES.md` of the repository.
//!
//! # Memory
//! Device memory is host memory of this process, taken page by page when first touched and filled
//! with a pattern that depends on the seed and is never zero. Device addresses are of ranges that no
//! host memory has, are not reused by later allocations, and have gaps between them.
//!
//! Two machines stand for two processes: what one exports as a file descriptor, the other imports, and
//! both have the same bytes, until the last of them and the last descriptor let go. The memory counts
//! on the machine that created it. No event orders one machine after the other, as none does between
//! processes, and unordered accesses of two machines are not reported. A descriptor that reaches
//! another process of the operating system stands for nothing there.
//!
//! # Faults
//! A kernel or copy that touches what it may not access poisons its device: every later call in its
//! context answers the same sticky error, and so do the process's other devices, opened before or not.
//! Clean-up calls still do their work, and answer the error too, as on hardware; the calls of virtual
//! memory, which are of no context, do not answer it. [`SimDriver::fail_nth`] makes any call fail on order. [`SimDriver::lose_device`] loses
//! a device between two operations, [`SimDriver::delay_event`] makes an event late, and memory ends where
//! [`SimConfig`] says.
//!
//! # Kernels
//! A module's PTX is parsed when it is loaded; an instruction that cannot run here is refused then,
//! with its line. A launched kernel runs thread by thread. Every load and store must lie in one
//! live allocation, mapping or pinned region that the device may access, be aligned to its width, and
//! read only what was written; two accesses to the same bytes by threads that no barrier orders, one
//! of them a store, are a finding even where the values happen to be right. A barrier orders those who
//! come to it, be they all threads of the block, some warps or some lanes. Atomic operations, volatile
//! accesses and those of a memory scope do not conflict with each other, but with plain ones. A
//! finding names the line, the thread and the block.
//!
//! Not looked at for conflicts: what lies beyond the first 128 MiB that one launch touches between two
//! clearings of the record, and launches of more than 2^28 stretches of threads between barriers.
//!
//! Arithmetic gives the bits that cards give, NaNs included: one table of edge cases
//! (`cuda-driver/tests/fixtures/instructions.txt`) is held against this device and against cards.
//! Lanes that have ended are not waited for by exchanges within a warp; a lane that reads one which
//! takes no part is a finding.
//!
//! A kernel whose name [`SimDriver::register_kernels`] knows runs by that CPU reference instead,
//! which is much faster, unless [`SimDriver::prefer_ptx`] says otherwise. That is for programs around
//! the kernels. It proves nothing about a kernel: only a run from PTX does.
//!
//! What blocks order by atomics and fences rather than by barriers is not understood, and reported;
//! blocks run one after another, so one that waits for a later one is taken to be endless.
//!
//! # Time
//! [`SimDriver::virtual_now`] is the host's clock of the machine that [`SimConfig::profile`] describes.
//! Each call moves it by what the call costs there, and each wait to the end of what is waited for.
//! An operation begins when the call that enqueued it is over (and a latency later), all before it in
//! its stream has ended, and what it needs is free: a copy engine and the link in its direction, the
//! device's memory, or the way to another device. A copy over the link is slowed while one that came
//! before it goes the other way. A kernel takes the bytes that it loaded and stored,
//! at the rates of the profile. Event times are of the same clock. Time follows from the order that
//! the scheduler takes and never steers it; one seed has one time.
//!
//! What the program computes between calls takes no time, unless [`SimDriver::advance_host`] says so.
//! All host threads share one clock. Not modelled: caches, occupancy and the latency of single
//! accesses, kernels that share the memory with copies over the link, kernels that reach another
//! device's memory (it counts as near), write-combined memory, and host functions (they take no
//! time). A query that is answered with yes moves the clock to the end of what it asked about, and a
//! hold or a late event moves nothing.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod config;
mod contexts;
mod copies;
mod driver;
mod environment;
mod explore;
mod faults;
mod findings;
mod graphs;
mod host_functions;
mod host_memory;
mod kernels;
mod leaks;
mod memory;
mod ptx;
mod races;
mod random;
mod scheduler;
mod shareable;
mod sim;
mod state;
mod streams;
mod time;
mod work;

pub use cuda_driver;

pub use config::{SimConfig, SimConfigError};
pub use explore::{
    Exploration, ExploreLimits, FailedSchedule, Replay, Script, ScriptError, explore,
    explore_random, replay,
};
pub use findings::{Finding, FindingKind, KernelSite, NearMiss, RangeKind};
pub use leaks::LeakReport;
pub use races::{MissingEdge, Race, RaceAccess, RaceActor, RaceCheck, RaceUse};
pub use scheduler::Pace;
pub use sim::SimDriver;
pub use time::{Curve, Profile, ProfileError, Rate};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeDoctests;
