//! When each block of a trace was last asked for, and how many other blocks were since.

use std::collections::HashMap;

/// What was asked for so far. It grows with the trace: a number for each lookup, and an entry for each hash id.
#[derive(Debug)]
pub(crate) struct Asked {
    last: HashMap<u64, Last>,
    /// A Fenwick tree over the lookups in order: the blocks of each hash id where it was last asked for, and 0 elsewhere.
    blocks: Vec<u64>,
    next: usize,
}

#[derive(Clone, Copy, Debug)]
struct Last {
    at: usize,
    blocks: u64,
    time_ms: u64,
}

/// A hash id that was asked for before.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Before {
    pub(crate) time_ms: u64,
    /// Blocks that were asked for since, each counted once, and its own: the smallest cache that evicts what was not used for
    /// longest and still has it.
    pub(crate) cache_blocks: u64,
}

impl Asked {
    /// Nothing yet, of a trace with so many lookups.
    pub(crate) fn new(lookups: usize) -> Self {
        Self { last: HashMap::new(), blocks: vec![0; lookups + 1], next: 0 }
    }

    /// Asks for a hash id that stands for so many blocks.
    pub(crate) fn ask(&mut self, id: u64, blocks: u64, time_ms: u64) -> Option<Before> {
        let at = self.next;
        self.next += 1;
        let last = self.last.insert(id, Last { at, blocks, time_ms });
        let before = last.map(|last| {
            let since = self.until(at) - self.until(last.at + 1);
            self.change(last.at, |sum| sum - last.blocks);
            Before { time_ms: last.time_ms, cache_blocks: since + blocks }
        });
        self.change(at, |sum| sum + blocks);
        before
    }

    fn change(&mut self, at: usize, by: impl Fn(u64) -> u64) {
        let mut node = at + 1;
        while let Some(sum) = self.blocks.get_mut(node) {
            *sum = by(*sum);
            node += node & node.wrapping_neg();
        }
    }

    /// The sum of the numbers before a lookup.
    fn until(&self, at: usize) -> u64 {
        let (mut node, mut sum) = (at.min(self.blocks.len() - 1), 0);
        while node > 0 {
            sum += self.blocks[node];
            node &= node - 1;
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::SplitMix64;

    #[test]
    fn distances_are_those_of_a_list_in_the_order_of_use() {
        let mut rng = SplitMix64::new(11);
        let mut asked = Asked::new(3000);
        // The most recently used one last.
        let mut list: Vec<(u64, u64, u64)> = Vec::new();
        for now in 0..3000 {
            let (id, blocks) = (rng.next_u64() % 200, rng.next_u64() % 4);
            let found = list.iter().position(|one| one.0 == id);
            let expected = found.map(|at| {
                let since: u64 = list[at + 1..].iter().map(|one| one.1).sum();
                Before { time_ms: list.remove(at).2, cache_blocks: since + blocks }
            });
            list.push((id, blocks, now));
            assert_eq!(asked.ask(id, blocks, now), expected, "lookup {now}");
        }
    }
}
