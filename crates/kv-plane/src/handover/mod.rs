//! Prefill here, decode there: the engine's side of sequences that one cache computes and another one
//! goes on with.
//!
//! A router gives a request to two engines, with a [`HandoverId`] that it has chosen at random. The first
//! engine has a [`Prefill`] over its cache and a node of `kv-remote`; the second one a [`Decode`] over
//! its own cache, which takes from the nodes of others:
//!
//! - *A request comes.* The first engine admits it and [offers](Prefill::offer) its sequence; the second
//!   one [wants](Decode::want) it.
//! - *In each iteration*, behind `begin_step`, the first [gives](Prefill::give) what its steps have
//!   completed, and [polls](Prefill::poll) how hand-overs have [ended](Ended). The second
//!   [polls](Decode::poll), and [adopts](Decode::adopt) requests that are offered, or have come, where it
//!   has room for them.
//! - *The prompt is computed.* The first commits the id that came out, and [finishes](Prefill::finish)
//!   the sequence.
//! - *All has come, or no more does.* The second has the sequence, from where its KV is right:
//!   [`Came::Ready`].
//! - *The request is not wanted any more.* Either side cancels it, and the other one hears of that.
//!
//! What does not come is computed by the engine that goes on: a node that dies, has no room, lags or lies
//! costs time and nothing else. Blocks are filled while the rest of the prompt is computed elsewhere, and
//! count only if every layer of them has come, whole and right by its checksum. Either engine may go, in
//! any order.
//!
//! The cache has one group that keeps all, on one device, in memory of its own; [`HandoverError`] says so
//! of any other. Bytes go through the hosts of both, in parts of a layer of a block. With the feature
//! `nixl` they may go from device to device, block by block. `examples/handover.rs` is both engines in
//! one program.

mod decode;
mod error;
mod form;
#[cfg(feature = "nixl")]
mod on_device;
mod prefill;
mod source;

pub use decode::{Adopted, Came, Coming, Decode, DecodeStats, SourceId};
pub use error::HandoverError;
pub use kv_remote::handover::{HandoverError as OfferError, HandoverId};
pub use prefill::{Ended, Prefill, PrefillStats};
