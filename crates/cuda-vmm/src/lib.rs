//! Virtual reservations, physical pages and mappings for KV memory on CUDA devices, transactional and ordered after use.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

mod access;
mod close;
mod elastic_pool;
mod epoch;
mod error;
mod map;
mod page;
mod page_pool;
mod reservation;
mod rest;
mod retire;
mod table;

pub use close::{CloseReport, Closing};
pub use elastic_pool::{
    ElasticPool, ElasticPoolOptions, ElasticPoolStats, PollReport, PoolClosing, Shrink,
};
pub use epoch::{EpochGate, Lease, Unrest};
pub use error::{
    BlockNotReady, CloseError, CloseStep, ForeignPage, GrowError, MapError, MapRefusal, MapStep,
    NotAtRest, NotMapped, PageError, PoolError, ReserveError,
};
pub use page::{Page, PageId, PhysicalPage, SharedPage};
pub use page_pool::{PagePool, PagePoolOptions, PagePoolStats};
pub use reservation::{Mapped, Reservation, ReservationOptions, ReservationStats, leaked_bytes};
pub use retire::{Retiring, UnmapFailure, UnmapReport};
pub use table::PageState;
