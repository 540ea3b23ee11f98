//! Which nodes there are, and which of them keep a block: a list that is the same everywhere, and rendezvous hashing.

use kv_pool::BlockHash;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::address::Address;
use crate::message::Block;

/// A node, as its peers know it.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Member {
    /// Its name, which it proves.
    pub name: String,
    /// Where it listens.
    pub address: Address,
}

/// How much a member wants a block: the same on every host, and independent of the other members. So a member that
/// joins or leaves changes nothing but the places that it takes or gives up.
pub(crate) fn score(name: &str, (group, block): Block) -> u64 {
    let hash: BlockHash = block;
    let seed = xxh3_64_with_seed(&hash.to_u128().to_le_bytes(), group.0.into());
    xxh3_64_with_seed(name.as_bytes(), seed)
}

/// The members that keep a block, the first one first: those of the highest scores, `replicas` at most. Each is a
/// position in `members`.
#[must_use]
pub fn replicas(members: &[Member], block: Block, replicas: usize) -> Vec<usize> {
    let scores = members.iter().map(|member| score(&member.name, block));
    let mut order: Vec<_> = scores.zip(0..).collect();
    // Two of one score, which are as good as never, have an order that does not depend on the list's.
    order.sort_unstable_by(|a, b| {
        let name = |at: usize| members.get(at).map(|member| &member.name);
        b.0.cmp(&a.0).then_with(|| name(a.1).cmp(&name(b.1)))
    });
    order.into_iter().take(replicas).map(|(_, at)| at).collect()
}

#[cfg(test)]
mod tests {
    use kv_pool::GroupId;

    use super::*;

    fn members(names: &[&str]) -> Vec<Member> {
        let member = |name: &&str| Member {
            name: (*name).to_owned(),
            address: Address::Unix((*name).into()),
        };
        names.iter().map(member).collect()
    }

    fn names_of(members: &[Member], block: Block, count: usize) -> Vec<String> {
        replicas(members, block, count).into_iter().map(|at| members[at].name.clone()).collect()
    }

    #[test]
    fn a_member_that_joins_or_leaves_moves_only_the_blocks_that_it_has() {
        let all = members(&["a", "b", "c", "d", "e"]);
        let without = members(&["e", "b", "a", "d"]);
        let (mut moved, mut counts) = (0, [0; 5]);
        for name in 0..10_000_u128 {
            let block = (GroupId((name % 3) as u16), BlockHash::from_u128(name * 77));
            let (before, after) = (names_of(&all, block, 2), names_of(&without, block, 2));
            let rest: Vec<_> = before.iter().filter(|of| *of != "c").cloned().collect();
            assert_eq!(after[..rest.len()], rest[..]);
            moved += usize::from(rest.len() < 2);
            counts[replicas(&all, block, 1)[0]] += 1;
        }
        // Two of five have a block, so c has two fifths of all; and each is the first for a fifth.
        assert!((3700..4300).contains(&moved), "{moved}");
        assert!(counts.iter().all(|count| (1800..2200).contains(count)), "{counts:?}");
    }
}
