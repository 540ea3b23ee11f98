//! Physical pages, and reserved addresses to which they are mapped.
//!
//! A [`PagePool`] creates [`PhysicalPage`]s. A [`Reservation`] maps them, and unmaps them with
//! proof of rest. Clean-up runs every step in order and reports all refusals once: [`Closing`].

pub(crate) mod access;
pub(crate) mod close;
mod error;
mod map;
pub(crate) mod page;
mod pool;
pub(crate) mod reservation;
mod retire;
mod table;

pub use close::Closing;
pub use error::{
    CloseError, CloseStep, ForeignPage, MapError, MapRefusal, NotMapped, PageError, RetireError,
};
pub use page::{Page, PageId, PhysicalPage, SharedPage};
pub use pool::{PagePool, PagePoolOptions, PagePoolStats};
pub use reservation::{Reservation, ReservationOptions, ReservationStats};
pub use retire::{Retiring, UnmapReport};
pub use table::PageState;
