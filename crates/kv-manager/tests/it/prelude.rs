//! What most tests name.

pub(crate) use kv_manager::*;
pub(crate) use kv_pool::clock::ManualClock;
pub(crate) use kv_pool::events::BlockUse;
pub(crate) use kv_pool::policy::ReuseHint;
pub(crate) use kv_pool::store::{Candidate, StoreAll, StorePolicy};
pub(crate) use kv_pool::tenants::{TenantError, TenantId, TenantQuota};
pub(crate) use kv_pool::{
    BlockHash, BlockHasher, BlockId, ClaimError, ExtraKey, Location, PoolBuilder, PoolConfig,
    PoolView, Priority, TableEntry, Tier,
};
pub(crate) use kv_testkit::{Random, mix};
pub(crate) use kv_tier::{
    BlockFault, BlockSink, BlockSource, Direction, FaultRules, GroupKind, HostBlocks, HostShare,
    LowerTier, MemoryTier, MemoryTierOptions, RecordKey, TicketId, Transfer,
};
pub(crate) use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
pub(crate) use std::ops::Range;
pub(crate) use std::rc::Rc;
pub(crate) use std::sync::Arc;
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
pub(crate) use std::time::Duration;

pub(crate) use crate::common;
pub(crate) use crate::common::below::{Rig, StoreNone, WAIT, by_layers, lower, request};
pub(crate) use crate::common::{
    Asks as _, BLOCK, admit, admit_now, admit_within, admitted, adopt, ask, cache_prompt,
    cached_names, check_empty, complete, computed, decode, done, finish, go_on, go_on_staged,
    group, made, manager, names, of, options, staged, step, twins, with_groups,
};
