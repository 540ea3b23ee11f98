//! A sequence that one host computes and another one goes on with: what its KV is, part by part, as it comes to be.
//!
//! The parts are records of the node of the host that computes, under names that only this hand-over has. So they are pinned, found,
//! read by any [`Transfer`](crate::Transfer) and checked like all records, and no part can be taken for another one.

mod offer;
mod pull;
mod sheet;

use kv_pool::{BlockHash, GroupId};
use kv_tier::RecordKey;
use kv_tier::codec::Writer;
use xxhash_rust::xxh3::xxh3_128;

use crate::{PeerError, Refusal};

pub use offer::{Offer, Places, Verdict};
pub use pull::{Progress, Pull};
pub use sheet::{GroupSheet, Sheet};

/// The number of a hand-over, which both hosts are told by whoever sends them the request. No two have the same: choose it at random.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct HandoverId(pub u128);

/// One layer of one block of one shard.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Part {
    /// The group.
    pub group: GroupId,
    /// The block's place in the sequence.
    pub place: u32,
    /// The layer, counted within the group.
    pub layer: u32,
    /// The rank of the shard, below the degree of tensor parallelism there.
    pub shard: u32,
}

/// Why a hand-over does not go on.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum HandoverError {
    /// A field of the sheet has a value that no sheet has.
    #[error("the sheet of a hand-over is wrong in its field {field}")]
    Sheet {
        /// The field.
        field: &'static str,
    },
    /// The sheet names no such part, or it was given before.
    #[error("{part:?} is no part of the hand-over, or was given before")]
    NoPart {
        /// The part.
        part: Part,
    },
    /// A part has another length than the sheet says.
    #[error("{part:?} has {bytes} bytes, and the sheet says {expected}")]
    Length {
        /// The part.
        part: Part,
        /// Its bytes.
        bytes: usize,
        /// Bytes by the sheet.
        expected: u32,
    },
    /// The node has not kept a part: all others are pinned or being written, or it was given too many leases.
    #[error("the node has no room for the parts of a hand-over")]
    Node(#[from] Refusal),
    /// The host that computes has withdrawn it, its time was over, or another host has taken it.
    #[error("the hand-over was withdrawn, was taken, or its time was over")]
    Withdrawn,
    /// The sheet has no such reader, or shard.
    #[error("{number} is none of the {count} {what} of the hand-over")]
    None {
        /// Readers or shards.
        what: &'static str,
        /// The number given.
        number: u32,
        /// How many there are.
        count: u32,
    },
    /// The deadline has come before all parts have.
    #[error("{left} parts had not come by the deadline")]
    Late {
        /// Parts that had not come.
        left: usize,
    },
    /// The node does not answer as it should. Its connection may be of no use.
    #[error("the node of a hand-over")]
    Peer(#[from] PeerError),
}

kv_pool::one_line_debug!(HandoverError);

/// What a record of a hand-over is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Kind {
    /// A piece of the sheet, which may be longer than a record.
    Sheet(u32),
    Part(Part),
    /// What a reader has said.
    Verdict(u32),
}

/// The format of the records of hand-overs. What their bytes mean, the sheet says.
const FORMAT: u64 = 0;

/// The key of a record of a hand-over.
fn key(id: HandoverId, kind: Kind) -> RecordKey {
    let mut bytes = Writer(Vec::with_capacity(32));
    bytes.raw(b"handover");
    bytes.raw(&id.0.to_le_bytes());
    let group = match kind {
        Kind::Sheet(piece) => {
            bytes.u32(piece);
            GroupId(0)
        }
        Kind::Verdict(reader) => {
            bytes.u32(reader);
            GroupId(1)
        }
        Kind::Part(Part { group, place, layer, shard }) => {
            [place, layer, shard].into_iter().for_each(|number| bytes.u32(number));
            group
        }
    };
    bytes.u8(matches!(kind, Kind::Part(_)).into());
    RecordKey { format: FORMAT, group, name: BlockHash::from_u128(xxh3_128(&bytes.0)) }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// A host that computes and one that generates may be of two builds.
    #[test]
    fn names_of_records_are_what_they_were() {
        let part = Part { group: GroupId(3), place: 5, layer: 7, shard: 1 };
        let kinds = [Kind::Sheet(2), Kind::Part(part), Kind::Verdict(4)];
        let names = kinds.map(|kind| {
            let RecordKey { format: 0, group, name } = key(HandoverId(0x1234_5678), kind) else {
                panic!("another format")
            };
            (group.0, name.to_u128())
        });
        let expected = [
            (0, 0x27093838183efc6790d2a964f4cbf91a),
            (3, 0xa86e2c4bb22fa700766b832d01efec09),
            (1, 0x3fa954c91856a189eb6da6895e301fa7),
        ];
        assert_eq!(names, expected);
    }

    #[test]
    fn no_two_records_of_two_handovers_have_one_name() {
        let mut names = HashSet::new();
        for id in [0, 1, u128::MAX] {
            for kind in [Kind::Sheet(0), Kind::Sheet(1), Kind::Verdict(0), Kind::Verdict(1)] {
                assert!(names.insert(key(HandoverId(id), kind)), "{id}, {kind:?}");
            }
            for number in 0..4_u32.pow(4) {
                let digit = |at: u32| number / 4_u32.pow(at) % 4;
                let group = GroupId(digit(0) as u16);
                let part = Part { group, place: digit(1), layer: digit(2), shard: digit(3) };
                assert!(names.insert(key(HandoverId(id), Kind::Part(part))), "{id}, {part:?}");
            }
        }
    }
}
