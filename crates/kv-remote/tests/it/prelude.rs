//! What most tests name.

pub(crate) use kv_manager::{TierTransfers, WorkerId};
pub(crate) use kv_pool::clock::{Clock, ManualClock, SystemClock};
pub(crate) use kv_pool::{BlockHash, BlockId, GroupId, Tier};
pub(crate) use kv_remote::handover::{GroupSheet, HandoverId, Offer, Part, Pull, Sheet};
pub(crate) use kv_remote::message::{
    Changes, Cursor, Found, LIST_MAX, LeaseId, Located, Reply, Span,
};
pub(crate) use kv_remote::*;
pub(crate) use kv_tier::{
    BlockFault, Direction, GroupFormat, GroupKind, HostBlocks, LowerTier, RecordKey, TicketId,
};
pub(crate) use std::collections::{BTreeMap, BTreeSet};
pub(crate) use std::io::{Read, Write};
pub(crate) use std::net::{SocketAddr, TcpListener, TcpStream};
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
pub(crate) use std::sync::{Arc, Mutex};
pub(crate) use std::time::{Duration, Instant};

pub(crate) use crate::common;
pub(crate) use crate::common::worker::Worker;
pub(crate) use crate::common::{
    FORMAT, Noted, blocks, connect, far, key, node_of, node_with, number_of, record, serve,
    serve_node, until,
};
