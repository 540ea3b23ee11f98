//! The assignment with the least predicted time, by dynamic programming over sets of GPUs.
//!
//! A state consists of the set of used GPUs, the GPU of the last run of layers, and the number of
//! placed layers. From each state every unused GPU may take a run of any length. The best path to a
//! state is kept as three sums, compared in this order:
//!
//! 1. the missing bytes on all GPUs: 0 if everything fits;
//! 2. the predicted time: weights read, and activations handed over;
//! 3. the memory left on the GPU that has the least left; more is better.
//!
//! The first two are sums over runs and the third is a minimum over runs. So the best path to a
//! state is part of the best path through it, and the result is exact. Missing bytes come first, so
//! that a refusal reports the smallest possible shortage. With `g` GPUs and `l` layers there are at
//! most `2^g * g * l` states with `g * l` successors each; symmetry is not used.

use std::cmp::Reverse;

use super::PlacementError;
use super::problem::Problem;

/// Maximum number of GPUs for the search of [`Strategy::LeastCost`](super::Strategy::LeastCost).
const SEARCH_GPUS_MAX: usize = 8;

/// Missing bytes, nanoseconds, and the least memory left, reversed: smaller is better in all three.
type Cost = (u64, u128, Reverse<u64>);

/// The best path to a state.
#[derive(Clone, Copy)]
struct Way {
    cost: Cost,
    /// Start of the last run, and the GPU of the run before it.
    begin: u16,
    before: u8,
}

/// The states of a problem in one list.
struct CostTable {
    gpus: usize,
    layers: usize,
    ways: Vec<Option<Way>>,
}

impl CostTable {
    fn at(&self, used: usize, last: usize, placed: usize) -> usize {
        (used * self.gpus + last) * (self.layers + 1) + placed
    }

    fn improve(&mut self, used: usize, last: usize, placed: usize, way: Way) {
        let at = self.at(used, last, placed);
        if self.ways[at].is_none_or(|known| way.cost < known.cost) {
            self.ways[at] = Some(way);
        }
    }
}

/// The GPU of each layer. If nothing fits, the assignment with the fewest missing bytes.
pub(crate) fn assign(problem: &Problem<'_>) -> Result<Vec<usize>, PlacementError> {
    let (gpus, layers) = (problem.gpus.len(), problem.layers());
    if gpus > SEARCH_GPUS_MAX {
        return Err(PlacementError::SearchGpus { gpus, most: SEARCH_GPUS_MAX });
    }
    let ways = vec![None; (gpus << gpus) * (layers + 1)];
    let mut table = CostTable { gpus, layers, ways };
    for first in 0..gpus {
        let start = (0, 0, Reverse(u64::MAX));
        extend(problem, &mut table, 0, None, (0, start), first);
    }
    // A run adds a GPU, so every successor has a larger set.
    for used in 1..1_usize << gpus {
        for last in (0..gpus).filter(|last| used >> last & 1 == 1) {
            for placed in 1..layers {
                let Some(way) = table.ways[table.at(used, last, placed)] else { continue };
                for next in (0..gpus).filter(|next| used >> next & 1 == 0) {
                    extend(problem, &mut table, used, Some(last), (placed, way.cost), next);
                }
            }
        }
    }
    Ok(read_back(&table))
}

/// Tries every run of GPU `next` that starts after the layers placed so far.
fn extend(
    problem: &Problem<'_>,
    table: &mut CostTable,
    used: usize,
    last: Option<usize>,
    (placed, cost): (usize, Cost),
    next: usize,
) {
    let free = problem.gpus[next].free_bytes;
    let crossing = last.map_or(0, |last| problem.crossing_nanos(last, next, placed - 1));
    for to in placed + 1..=problem.layers() {
        let needed = problem.run_bytes(placed, to);
        let left = Reverse(free.saturating_sub(needed));
        let missing = cost.0 + needed.saturating_sub(free);
        let nanos = cost.1 + crossing + problem.run_nanos(next, placed, to);
        let way = Way {
            // The worse of two remainders is the smaller one.
            cost: (missing, nanos, cost.2.max(left)),
            begin: placed as u16,
            before: last.unwrap_or(next) as u8,
        };
        table.improve(used | 1 << next, next, to, way);
    }
}

fn read_back(table: &CostTable) -> Vec<usize> {
    let ends = (1..1_usize << table.gpus).flat_map(|used| {
        (0..table.gpus).filter_map(move |last| {
            let way = table.ways[table.at(used, last, table.layers)]?;
            Some((way.cost, used, last))
        })
    });
    let mut gpu_of_layer = vec![0; table.layers];
    // A single GPU can always take every layer, possibly with missing bytes, so an end state
    // exists.
    let Some((_, mut used, mut last)) = ends.min() else { return gpu_of_layer };
    let mut to = table.layers;
    while let Some(way) = table.ways[table.at(used, last, to)] {
        let begin = usize::from(way.begin);
        gpu_of_layer[begin..to].fill(last);
        if begin == 0 {
            break;
        }
        used &= !(1 << last);
        (last, to) = (usize::from(way.before), begin);
    }
    gpu_of_layer
}
