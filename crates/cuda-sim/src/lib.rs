//! A simulated CUDA device: the driver's semantics, with every access checked.
#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod config;
mod contexts;
mod copies;
mod driver;
mod environment;
mod events;
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
    Exploration, ExploreLimits, FailedSchedule, Replay, Script, explore, explore_random, replay,
};
pub use findings::{Finding, FindingKind, KernelSite, NearMiss, RangeKind};
pub use leaks::LeakReport;
pub use races::{MissingEdge, Race, RaceAccess, RaceActor, RaceCheck, RaceUse};
pub use scheduler::Pace;
pub use sim::SimDriver;
pub use time::{Curve, OperationTime, Profile, Rate};
