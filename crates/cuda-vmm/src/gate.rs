//! Refusals of an [`EpochGate`](crate::EpochGate): what is not at rest, and why.

pub use crate::epoch::{CoverError, UncoveredLease, Unrest};
pub use crate::rest::{NotAtRest, UsersUnknown};
