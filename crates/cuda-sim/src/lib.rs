//! A simulated CUDA device. It has the driver's semantics of addresses, streams, events, contexts
//! and faults, and checks every access.
//!
//! A GPU hides many mistakes of programs that manage its memory: two operations happen to run in
//! the right order, a buffer happens not to be reused yet, a read past the end happens to hit
//! mapped memory. [`SimDriver`] implements [`cuda_driver::Driver`] and shows these mistakes on any
//! machine. It is as strict as the hardware, delays work as far as the memory model allows, and
//! reports what it found.
//!
//! # Example
//! ```
//! use cuda_driver::Driver;
//! use cuda_sim::{FindingKind, SimConfig, SimDriver};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let sim = SimDriver::new(SimConfig::default())?;
//! let context = sim.device_primary_ctx_retain(0)?;
//! // SAFETY: the context was retained above and is never released.
//! unsafe { sim.ctx_set_current(context) }?;
//! let memory = sim.mem_alloc(4096)?;
//! // One byte too many: the call is refused, with a finding.
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
//! Streams are queues, and enqueuing runs nothing. When the host waits, a seeded scheduler
//! repeatedly picks a ready stream and runs its next operation. It stops as soon as the host's wait
//! is satisfied. Copies and kernels read pinned host memory when they run. A query reports the
//! device's progress at that moment, and up to three operations run after it. An order that the
//! program did not request therefore fails for some seeds. A run replays from its seed if a single
//! thread makes the calls. Another [`Pace`] makes the devices as slow as is legal, as fast as is
//! legal, or keeps them one operation behind the host. Set [`SimConfig::pace`], call
//! [`SimDriver::set_pace`], or set the environment variable `CUDA_SIM_PACE` to `slowest`,
//! `fastest`, `one-behind` or `random`. With the variable, an unchanged test suite runs at each
//! pace.
//!
//! [`explore()`] runs a small program under every possible order, from a host that runs far ahead to
//! a device that runs each operation at once. [`explore_random`] runs many random orders. A failure
//! comes with a [`Script`] for [`replay`], and with a list of all that ran, in order.
//!
//! # Races
//! A race is two accesses to the same bytes that nothing orders, at least one of them a write. A
//! race is a finding in every run, whichever order the device took. Accesses by operations of all
//! streams and devices are checked, and by calls that map, unmap and free. Accesses by the host are
//! checked if [`Driver::host_access`](cuda_driver::Driver::host_access) reports them. A [`Race`]
//! names both accesses, the program lines that made them, the bytes, and the missing order.
//! [`SimConfig::races`] and the environment variable `CUDA_SIM_RACES` (`off`, `report`, `abort`)
//! choose the reaction. The page `docs/RACES.md` of the repository tells what orders accesses, what
//! the check costs and what it cannot see.
//!
//! # Memory
//! Device memory is host memory of this process. A page is allocated when first touched, and filled
//! with a pattern that depends on the seed and is never zero. Device addresses never equal host
//! addresses, have gaps between allocations, and are not reused.
//!
//! # Faults
//! A kernel or copy that accesses memory without the right to do so poisons its device. Every later
//! call in its context returns the same sticky error, and so do all other devices of the process,
//! opened before or later. As on hardware, clean-up calls still work, and also return the error.
//! The calls of virtual memory belong to no context and do not return it. [`SimDriver::fail_nth`]
//! makes any call fail. [`SimDriver::lose_device`] loses a device between two operations,
//! [`SimDriver::delay_event`] delays an event, and [`SimConfig`] sets the size of the memory.
//!
//! # Kernels
//! A module's PTX is parsed when it is loaded. An instruction that cannot run here is refused then,
//! with its line. A launched kernel runs thread by thread. Every load and store must lie in one
//! live allocation, mapping or pinned region that the device may access, must be aligned to its
//! width, and may read only written bytes. Two accesses to the same bytes by threads that no
//! barrier orders, at least one of them a store, are a finding, even if the values happen to be
//! right. A barrier orders the threads that arrive at it: a whole block, some warps or some lanes.
//! Atomic operations, volatile accesses and accesses with a memory scope do not conflict with each
//! other, but they conflict with plain accesses. A finding names the line, the thread and the
//! block.
//!
//! The conflict check has two limits. In one launch it covers the first 128 MiB touched between two
//! clearings of the record. It skips launches with more than 2^28 stretches of threads between
//! barriers.
//!
//! Arithmetic gives the same bits as real GPUs, including NaNs: tests compare one table of edge
//! cases (`cuda-driver/tests/fixtures/instructions.txt`) with this device and with GPUs. Exchanges
//! within a warp do not wait for lanes that have ended. A lane that reads from a lane outside the
//! exchange is a finding.
//!
//! A kernel whose name was given to [`SimDriver::register_kernels`] runs as its CPU reference
//! instead, which is much faster, unless [`SimDriver::prefer_ptx`] chooses PTX. References serve
//! tests of programs around the kernels. Only a run from PTX tests the kernel itself.
//!
//! Order between blocks made by atomics and fences instead of barriers is not understood, and is
//! reported. Blocks run one after another, so a block that waits for a later one is reported as
//! endless.
//!
//! # Time
//! [`SimDriver::virtual_now`] is the host's clock on the machine that [`SimConfig::profile`]
//! describes. Each call advances the clock by its cost there, and each wait advances it to the end
//! of the awaited work. An operation starts when three conditions hold: its enqueuing call is over
//! (plus a latency), all earlier work of its stream has ended, and its resource is free. A resource
//! is a copy engine with one direction of the link, the device's memory, or the path to another
//! device. A copy over the link slows down while an earlier copy goes in the other direction. A
//! kernel's time is the bytes it loaded and stored, at the rates of the profile. Event times use
//! the same clock. Time follows from the scheduler's order and never influences it; one seed always
//! gives the same times.
//!
//! Computation of the program between calls takes no time, unless [`SimDriver::advance_host`] adds
//! it. All host threads share one clock. Not modelled: caches, occupancy, the latency of single
//! accesses, contention between kernels and link copies for memory, kernels that access another
//! device's memory (counted as local), and write-combined memory. A query answered "done" moves the
//! clock to the end of the queried work. A hold or a delayed event does not move the clock.

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
mod host_memory;
mod kernels;
mod leaks;
mod memory;
mod ptx;
mod races;
mod random;
mod scheduler;
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
pub use time::{Curve, OperationTime, Profile, ProfileError, Rate};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeDoctests;
