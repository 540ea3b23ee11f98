//! The ways to assign layers to GPUs.

use std::cmp::Ordering;

use crate::problem::Problem;
use crate::{PlacementError, least_cost};

/// How layers are assigned to GPUs.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Strategy {
    /// Layer `i` goes to GPU `i % gpus`: every layer hands over. What engines do that fill GPUs in
    /// turn; the worst for time, and a test of the moves.
    RoundRobin,
    /// The GPUs in the order given, each with the same number of neighbouring layers, the first
    /// ones with one more where they do not divide.
    Contiguous,
    /// The GPUs in the order given, each with neighbouring layers, so many that the fullest GPU is as
    /// little full as can be, as a share of its free memory. Exact.
    FreeMemory,
    /// At most one run of neighbouring layers a GPU, in any order of GPUs, with some GPUs left out
    /// where that is quicker: of all such assignments that fit, the one with the least predicted
    /// time of a step, and among those with the same time the one that leaves the most memory on
    /// the GPU that has the least left. Exact; for at most
    /// [`SEARCH_GPUS_MAX`](crate::SEARCH_GPUS_MAX) GPUs.
    LeastCost,
}

impl Strategy {
    /// Every strategy.
    pub const ALL: [Self; 4] =
        [Self::RoundRobin, Self::Contiguous, Self::FreeMemory, Self::LeastCost];

    /// Its name in texts.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::RoundRobin => "round-robin",
            Self::Contiguous => "contiguous",
            Self::FreeMemory => "free-memory",
            Self::LeastCost => "least-cost",
        }
    }
}

/// The GPU of each layer, whether or not it fits.
pub(crate) fn assign(
    problem: &Problem<'_>,
    strategy: Strategy,
) -> Result<Vec<usize>, PlacementError> {
    let (layers, gpus) = (problem.layers(), problem.gpus.len());
    Ok(match strategy {
        Strategy::RoundRobin => (0..layers).map(|layer| layer % gpus).collect(),
        Strategy::Contiguous => {
            let (each, more) = (layers / gpus, layers % gpus);
            (0..gpus)
                .flat_map(|gpu| std::iter::repeat_n(gpu, each + usize::from(gpu < more)))
                .collect()
        }
        Strategy::FreeMemory => by_free_memory(problem),
        Strategy::LeastCost => least_cost::assign(problem)?,
    })
}

/// How full a GPU is: bytes needed over bytes free, compared without rounding.
#[derive(Clone, Copy, Debug)]
struct Fullness {
    needed: u64,
    free: u64,
}

impl Fullness {
    const EMPTY: Self = Self { needed: 0, free: 1 };

    fn cmp(self, other: Self) -> Ordering {
        // A GPU without free memory is fuller than any other as soon as it holds a byte.
        let left = u128::from(self.needed) * u128::from(other.free);
        let right = u128::from(other.needed) * u128::from(self.free);
        match (self.free, other.free) {
            (0, 0) => self.needed.cmp(&other.needed),
            _ => left.cmp(&right),
        }
    }

    fn max(self, other: Self) -> Self {
        if self.cmp(other) == Ordering::Less { other } else { self }
    }
}

/// Splits the layers in the order of the GPUs so that the fullest is as little full as can be:
/// `best[l]` is the least fullness with the first `l` layers on the GPUs seen so far.
fn by_free_memory(problem: &Problem<'_>) -> Vec<usize> {
    let layers = problem.layers();
    let mut best: Vec<Option<Fullness>> = vec![None; layers + 1];
    best[0] = Some(Fullness::EMPTY);
    // For each GPU, where its run begins when it ends before layer `l`.
    let mut begins = Vec::with_capacity(problem.gpus.len());
    for capacity in problem.gpus {
        let mut next = vec![None; layers + 1];
        let mut begin = vec![0; layers + 1];
        for to in 0..=layers {
            for (from, before) in best.iter().enumerate().take(to + 1) {
                let Some(before) = *before else { continue };
                let needed = problem.run_bytes(from, to);
                let here = Fullness { needed, free: capacity.free_bytes };
                let all = if from == to { before } else { before.max(here) };
                if next[to].is_none_or(|least: Fullness| all.cmp(least) == Ordering::Less) {
                    next[to] = Some(all);
                    begin[to] = from;
                }
            }
        }
        best = next;
        begins.push(begin);
    }
    let mut gpu_of_layer = vec![0; layers];
    let mut to = layers;
    for (gpu, begin) in begins.iter().enumerate().rev() {
        gpu_of_layer[begin[to]..to].fill(gpu);
        to = begin[to];
    }
    gpu_of_layer
}
