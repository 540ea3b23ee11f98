//! The strategies that assign layers to GPUs.

use std::cmp::Ordering;

use super::problem::Problem;
use super::{PlacementError, least_cost};

/// A strategy that assigns layers to GPUs.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Strategy {
    /// Layer `i` goes to GPU `i % gpus`, so every layer hands over its output. Engines that fill
    /// GPUs in turn do this. It is the slowest strategy, and a test of transfers.
    RoundRobin,
    /// The GPUs in the given order, each with the same number of consecutive layers. If they do not
    /// divide evenly, the first GPUs get one more.
    Contiguous,
    /// The GPUs in the given order, each with consecutive layers, such that the fullest GPU is as
    /// empty as possible, relative to its free memory. Exact.
    FreeMemory,
    /// At most one run of consecutive layers per GPU, in any order of GPUs; GPUs may be left out.
    /// Among all such assignments that fit, the one with the least predicted time of a step. Among
    /// equal times, the one that leaves the most memory on the GPU with the least memory left.
    /// Exact; for at most 8 GPUs.
    LeastCost,
}

impl Strategy {
    /// Every strategy.
    pub const ALL: [Self; 4] =
        [Self::RoundRobin, Self::Contiguous, Self::FreeMemory, Self::LeastCost];

    /// Its name in the text form.
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

/// The GPU of each layer, whether or not the assignment fits.
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

/// The fullness of a GPU: bytes needed over bytes free, compared without rounding.
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

/// Splits the layers in the order of the GPUs such that the fullest GPU is as empty as possible:
/// `best[l]` is the least fullness with the first `l` layers on the GPUs seen so far.
fn by_free_memory(problem: &Problem<'_>) -> Vec<usize> {
    let layers = problem.layers();
    let mut best: Vec<Option<Fullness>> = vec![None; layers + 1];
    best[0] = Some(Fullness::EMPTY);
    // For each GPU and each `l`: the start of its run if the run ends before layer `l`.
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
