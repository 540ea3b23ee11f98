//! Which copies wait for which: those of the other direction that touch one of their blocks, and no others.

use kv_kernels::link::HostDirection;

use crate::runs::Run;

/// The number of a direction, for lists of two.
pub(crate) const fn index_of(direction: HostDirection) -> usize {
    match direction {
        HostDirection::ToHost => 0,
        HostDirection::ToPages => 1,
    }
}

/// What copies have touched, in the order in which they were decided.
///
/// Copies of one direction run in one stream, in order. Those of two directions run at the same time,
/// unless a block of the device or of the host is in both: then the later one waits.
#[derive(Debug)]
pub(crate) struct CopyOrder {
    /// For each direction: the number of the last run that touched each device block, and then each host
    /// block; 0 for none.
    touched: [Vec<u64>; 2],
    device_blocks: usize,
    /// For each direction, the last run of the other one that its stream comes after.
    after: [u64; 2],
    runs: u64,
}

impl CopyOrder {
    pub(crate) fn new(device_blocks: usize, host_blocks: usize) -> Self {
        // Without a host tier there are no copies.
        let blocks = if host_blocks == 0 { 0 } else { device_blocks + host_blocks };
        let (touched, after) = ([vec![0; blocks], vec![0; blocks]], [0; 2]);
        Self { touched, device_blocks, after, runs: 0 }
    }

    /// The last run of the other direction that this one must come after and does not yet.
    pub(crate) fn conflict(&self, run: &Run) -> Option<u64> {
        let here = index_of(run.direction);
        let (there, after) = (&self.touched[1 - here], self.after[here]);
        let touched = self.places(run).filter_map(|place| there.get(place).copied());
        touched.filter(|&number| number > after).max()
    }

    /// Notes a run, and returns its number.
    pub(crate) fn touch(&mut self, run: &Run) -> u64 {
        self.runs += 1;
        let here = index_of(run.direction);
        let mut touched = std::mem::take(&mut self.touched[here]);
        for place in self.places(run) {
            if let Some(last) = touched.get_mut(place) {
                *last = self.runs;
            }
        }
        self.touched[here] = touched;
        self.runs
    }

    /// Notes that what is enqueued in `direction` from now on comes after the runs of the other one before
    /// number `end`.
    pub(crate) fn ordered(&mut self, direction: usize, end: u64) {
        self.after[direction] = end.saturating_sub(1).min(self.runs);
    }

    /// The places of a run's blocks in the lists.
    fn places<'a>(&self, run: &'a Run) -> impl Iterator<Item = usize> + use<'a> {
        let (device_blocks, direction) = (self.device_blocks, run.direction);
        run.pairs.iter().flat_map(move |pair| {
            // Ids of the pool are not negative.
            let (source, destination) = (pair.source as usize, pair.destination as usize);
            match direction {
                HostDirection::ToHost => [source, device_blocks + destination],
                HostDirection::ToPages => [device_blocks + source, destination],
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use kv_kernels::BlockPair;

    use super::*;

    fn run(direction: HostDirection, pairs: &[(i32, i32)]) -> Run {
        let pair = |&(source, destination): &(i32, i32)| BlockPair { source, destination };
        Run { direction, pairs: pairs.iter().map(pair).collect() }
    }

    #[test]
    fn copies_that_share_a_block_wait_and_others_do_not() {
        use HostDirection::{ToHost, ToPages};
        let mut order = CopyOrder::new(8, 4);
        assert_eq!(order.touch(&run(ToHost, &[(0, 1), (2, 3)])), 1);
        // The same numbers in the other tier are other blocks.
        assert_eq!(order.conflict(&run(ToPages, &[(0, 1), (2, 3)])), None);
        assert_eq!(order.conflict(&run(ToPages, &[(3, 7)])), Some(1), "it reads what is written");
        assert_eq!(order.conflict(&run(ToPages, &[(0, 2)])), Some(1), "it writes what is read");
        assert_eq!(order.conflict(&run(ToHost, &[(0, 1)])), None, "one stream has an order");
        order.touch(&run(ToHost, &[(5, 0)]));
        assert_eq!(order.conflict(&run(ToPages, &[(1, 0), (0, 6)])), Some(2));
        order.ordered(index_of(ToPages), u64::MAX);
        assert_eq!(order.conflict(&run(ToPages, &[(1, 0), (0, 6)])), None);
        assert_eq!(order.touch(&run(ToPages, &[(1, 0)])), 3);
        assert_eq!(order.conflict(&run(ToHost, &[(0, 2)])), Some(3), "each direction by itself");
        order.touch(&run(ToHost, &[(4, 2)]));
        order.ordered(index_of(ToPages), 4);
        assert_eq!(order.conflict(&run(ToPages, &[(2, 7)])), Some(4), "it was not enqueued yet");
    }
}
