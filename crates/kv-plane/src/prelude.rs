//! What an engine's loop names: `use kv_plane::prelude::*;`.

pub use crate::driver::{Device, Driver, Stream};
pub use crate::kernels::{KvShape, KvShapeOptions};
pub use crate::{
    Admission, Answer, Classed, Committed, ErrorClass, GroupId, GroupKind, GroupOptions, KvCache,
    KvCacheOptions, NoRoom, OpenStep, Request, Room, Sequence, Tokens, Waiting,
};
