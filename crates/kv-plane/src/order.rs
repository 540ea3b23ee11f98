//! Which copies wait for which: those of another lane that touch one of their blocks, and no others.

use cuda_driver::guard;
use kv_kernels::link::HostDirection;

use crate::runs::{Kind, LANES, Run};

/// What runs have touched, in the order in which they were decided.
///
/// Runs of one lane are enqueued in one stream, in order. Those of two lanes run at the same time, unless
/// a block of the device or of the host is in both: then the later one waits.
#[derive(Debug)]
pub(crate) struct CopyOrder {
    /// For each lane: the number of the last run that touched each device block, and then each host block;
    /// 0 for none.
    touched: [Vec<u64>; LANES],
    device_blocks: usize,
    /// For each lane, the last run of each other one that its stream comes after.
    after: [[u64; LANES]; LANES],
    runs: u64,
}

impl CopyOrder {
    pub(crate) fn new(device_blocks: usize, host_blocks: usize) -> Self {
        // Without a host tier all runs are of one lane.
        let blocks = if host_blocks == 0 { 0 } else { device_blocks + host_blocks };
        let touched = std::array::from_fn(|_| vec![0; blocks]);
        Self { touched, device_blocks, after: [[0; LANES]; LANES], runs: 0 }
    }

    /// The last run of lane `there` that this one must come after and does not yet.
    pub(crate) fn conflict(&self, run: &Run, there: usize) -> Option<u64> {
        let (touched, after) = (&self.touched[there], self.after[run.kind.lane()][there]);
        let touched = self.places(run).filter_map(|place| touched.get(place).copied());
        touched.filter(|&number| number > after).max()
    }

    /// Notes a run, and returns its number.
    pub(crate) fn touch(&mut self, run: &Run) -> u64 {
        self.runs += 1;
        let here = run.kind.lane();
        let mut touched = std::mem::take(&mut self.touched[here]);
        for place in self.places(run) {
            if let Some(last) = touched.get_mut(place) {
                *last = self.runs;
            }
        }
        self.touched[here] = touched;
        self.runs
    }

    /// Notes that what is enqueued in lane `here` from now on comes after the runs of lane `there` before
    /// number `end`.
    pub(crate) fn ordered(&mut self, here: usize, there: usize, end: u64) {
        let last = end.saturating_sub(1).min(self.runs);
        self.after[here][there] = guard!("cache.waits-are-for-what-is-sent", last, else self.runs);
    }

    /// The places of a run's blocks in the lists.
    fn places<'a>(&self, run: &'a Run) -> impl Iterator<Item = usize> + use<'a> {
        let (device_blocks, kind) = (self.device_blocks, run.kind);
        run.pairs.iter().flat_map(move |pair| {
            let (source, destination) = (pair.source.index(), pair.destination.index());
            match kind {
                Kind::Carry(HostDirection::ToHost) => [source, device_blocks + destination],
                Kind::Carry(HostDirection::ToPages) => [device_blocks + source, destination],
                Kind::Within | Kind::Scrub => [source, destination],
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use kv_kernels::BlockPair;

    use super::*;

    fn run(kind: Kind, pairs: &[(u16, u16)]) -> Run {
        let pair = |&(source, destination): &(u16, u16)| BlockPair {
            source: source.into(),
            destination: destination.into(),
        };
        Run { kind, behind_work: false, pairs: pairs.iter().map(pair).collect() }
    }

    /// The last run of the other direction that must come before this one.
    fn conflict(order: &CopyOrder, run: &Run) -> Option<u64> {
        order.conflict(run, 1 - run.kind.lane())
    }

    #[test]
    fn copies_that_share_a_block_wait_and_others_do_not() {
        let [to_host, to_pages] = [HostDirection::ToHost, HostDirection::ToPages].map(Kind::Carry);
        let [out, back] = [to_host, to_pages].map(Kind::lane);
        let mut order = CopyOrder::new(8, 4);
        assert_eq!(order.touch(&run(to_host, &[(0, 1), (2, 3)])), 1);
        // The same numbers in the other tier are other blocks.
        assert_eq!(conflict(&order, &run(to_pages, &[(0, 1), (2, 3)])), None);
        assert_eq!(
            conflict(&order, &run(to_pages, &[(3, 7)])),
            Some(1),
            "it reads what is written"
        );
        assert_eq!(conflict(&order, &run(to_pages, &[(0, 2)])), Some(1), "it writes what is read");
        assert_eq!(conflict(&order, &run(to_host, &[(0, 1)])), None, "one stream has an order");
        order.touch(&run(to_host, &[(5, 0)]));
        assert_eq!(conflict(&order, &run(to_pages, &[(1, 0), (0, 6)])), Some(2));
        order.ordered(back, out, u64::MAX);
        assert_eq!(conflict(&order, &run(to_pages, &[(1, 0), (0, 6)])), None);
        assert_eq!(order.touch(&run(to_pages, &[(1, 0)])), 3);
        assert_eq!(conflict(&order, &run(to_host, &[(0, 2)])), Some(3), "each direction by itself");
        order.touch(&run(to_host, &[(4, 2)]));
        order.ordered(back, out, 4);
        assert_eq!(conflict(&order, &run(to_pages, &[(2, 7)])), Some(4), "it was not enqueued yet");
    }
}
