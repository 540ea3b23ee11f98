//! What most tests name.

#![allow(unused_imports, reason = "each set of features uses a part")]

pub(crate) use kv_disk::parts::{
    Crash, DiskFault, ENTRY_BYTES, Entry, FaultPlan, Geometry, Heading, Image, MemoryFile, Place,
    SlotFile,
};
pub(crate) use kv_disk::*;
pub(crate) use kv_pool::{BlockHash, GroupId};
pub(crate) use kv_tier::{BlockFault, TicketId};
pub(crate) use std::collections::{BTreeMap, BTreeSet};
pub(crate) use std::fs;
pub(crate) use std::path::{Path, PathBuf};
pub(crate) use std::sync::atomic::Ordering;
pub(crate) use std::sync::atomic::Ordering::Relaxed;
pub(crate) use std::sync::{Arc, Mutex};
pub(crate) use std::time::Duration;

pub(crate) use crate::common::{
    BLOCK_BYTES, PAGED_BYTES, PAGED_RECORD_BYTES, RECORD_BYTES, Seen, Worker, bytes_of, counted,
    number_of, random,
};
