//! What most tests name.

#![allow(unused_imports, reason = "each set of features uses a part")]

pub(crate) use cuda_driver::{
    CountingDriver, Device, DeviceBuffer, DeviceSpan, Driver, ErrorCode, PinnedBuffer, Stream,
};
pub(crate) use cuda_sim::{Finding, FindingKind, Pace, SimConfig, SimDriver};
pub(crate) use kv_kernels::link::Transport;
pub(crate) use kv_kernels::{KvFormat, KvShape, KvShapeOptions, PagedKv, PagedLayout};
#[cfg(feature = "remote")]
pub(crate) use kv_plane::handover::{
    Adopted, Came, Coming, Decode, Ended, HandoverError, HandoverId, OfferError, Prefill,
};
pub(crate) use kv_plane::manager::{
    BlockCopy, BudgetError, ChangeError, CommitError, LowerOptions, LowerStats, ManagerStats,
    Outcome, PlanError, SequenceError, Snapshot, SnapshotTable, StageError, Waiting, WorkerId,
};
#[cfg(feature = "processes")]
pub(crate) use kv_plane::processes::{Connection, Processes, WorkerFault, serve};
#[cfg(feature = "remote")]
pub(crate) use kv_plane::remote::{HostMemory, Node, NodeOptions, SocketTransfer};
pub(crate) use kv_plane::tier::{
    Background, BlockSink, BlockSource, FaultRules, LowerTier, MemoryTier, MemoryTierOptions,
    RecordKey, TicketId,
};
pub(crate) use kv_plane::*;
pub(crate) use kv_pool::clock::{ManualClock, SystemClock};
pub(crate) use kv_pool::policy::PolicyKind;
pub(crate) use kv_pool::stats::PoolCounters;
pub(crate) use kv_pool::tenants::{TenantId, TenantQuota};
pub(crate) use kv_pool::{
    BlockHash, BlockHasher, BlockId, ClaimError, Location, Slot, TableEntry, Tier,
};
pub(crate) use kv_stage::error::BatchError;
pub(crate) use kv_testkit::machine::read;
pub(crate) use kv_testkit::{Random, mix};
pub(crate) use std::collections::{BTreeMap, HashMap, VecDeque};
pub(crate) use std::fmt::Debug;
pub(crate) use std::net::Shutdown;
pub(crate) use std::os::unix::net::UnixStream;
pub(crate) use std::sync::mpsc::Receiver;
pub(crate) use std::sync::{Arc, Mutex, mpsc};
pub(crate) use std::thread;
pub(crate) use std::time::{Duration, Instant};

pub(crate) use crate::common::engine::tensors::Tensors;
pub(crate) use crate::common::engine::{
    Engine, Failure, Live, Load, Prompt, Refused, admit_to, admitted, by, decode, group,
    one_answer, one_step, options, shape, streams, with_first,
};
pub(crate) use crate::common::place::Place;
pub(crate) use crate::common::scenarios::{self, ALONE};
pub(crate) use crate::machine::{
    Machine, PAGE, Told, config, device, open, read_words, refusal, rig, sim, small,
};
