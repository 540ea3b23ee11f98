//! What the scheduler's process tells its workers of a step beside the plan, as bytes.
//!
//! Both ends are one program on one machine, so numbers are in its byte order.

use bytemuck::{NoUninit, Pod};
use kv_plane::manager::Row;
use kv_pool::Slot;

use crate::engine::batch::{Batch, Further, Launch, Rejected};

/// Why bytes are no batch, or no checksums.
#[derive(thiserror::Error)]
pub enum BatchBytesError {
    #[error("bytes that end inside a list, with {bytes} left")]
    Body { bytes: usize },
    #[error("a batch with {number} for a slot")]
    Slot { number: i64 },
    #[error("a batch of {tokens} tokens with {slots} slots, and launches that do not fit them")]
    Launches { tokens: usize, slots: usize },
    #[error("a batch for {found} groups, expected {expected}")]
    Groups { found: usize, expected: usize },
}

cuda_driver::messages::one_line_debug!(BatchBytesError);

/// Appends numbers, with how many there are.
pub(super) fn put<T: NoUninit>(into: &mut Vec<u8>, numbers: &[T]) {
    into.extend_from_slice(&(numbers.len() as u64).to_ne_bytes());
    into.extend_from_slice(bytemuck::cast_slice(numbers));
}

/// Takes numbers that [`put`] has appended from the front.
pub(super) fn take<T: Pod>(from: &mut &[u8]) -> Result<Vec<T>, BatchBytesError> {
    let short = BatchBytesError::Body { bytes: from.len() };
    let Some((count, rest)) = from.split_first_chunk::<8>() else { return Err(short) };
    let count = usize::try_from(u64::from_ne_bytes(*count)).unwrap_or(usize::MAX);
    let Some((numbers, rest)) = rest.split_at_checked(count.saturating_mul(size_of::<T>())) else {
        return Err(short);
    };
    *from = rest;
    Ok(bytemuck::pod_collect_to_vec(numbers))
}

/// Takes slots that [`put`] has appended from the front.
fn take_slots(from: &mut &[u8]) -> Result<Vec<Slot>, BatchBytesError> {
    let slot = |number| Slot::new(number).ok_or(BatchBytesError::Slot { number });
    take::<i64>(from)?.into_iter().map(slot).collect()
}

impl Batch {
    pub(super) fn put(&self, into: &mut Vec<u8>) {
        put(into, &self.slots);
        put(into, &self.keys);
        put(into, &self.lengths);
        put(into, &self.accepted);
        let rejected = self.rejected.iter();
        let rejected: Vec<_> =
            rejected.map(|one| [one.index as u32, one.row.index() as u32]).collect();
        put(into, &rejected);
        let launches = self.launches().iter();
        let launches: Vec<_> =
            launches.map(|one| [one.first, one.tokens, one.skip].map(|all| all as u64)).collect();
        put(into, &launches);
        put(into, &[self.further.len() as u64]);
        for further in &self.further {
            put(into, &further.slots);
            put(into, &further.keys);
            put(into, &further.lengths);
        }
    }

    /// Takes a batch from the front. It is that of a plan only if the worker's buffers have room for it.
    pub(super) fn take(from: &mut &[u8]) -> Result<Self, BatchBytesError> {
        let (slots, keys) = (take_slots(from)?, take::<u64>(from)?);
        let (lengths, accepted) = (take::<u32>(from)?, take::<u32>(from)?);
        let rejected = take::<[u32; 2]>(from)?.into_iter();
        let rejected = rejected
            .map(|[index, row]| Rejected { index: index as usize, row: Row::new(row) })
            .collect();
        let launches = take::<[u64; 3]>(from)?.into_iter();
        let launches: Vec<_> = launches
            .map(|one| one.map(|all| usize::try_from(all).unwrap_or(usize::MAX)))
            .map(|[first, tokens, skip]| Launch { first, tokens, skip })
            .collect();
        // What is not there is not allocated, whatever the number says.
        let groups = take::<u64>(from)?.first().copied().unwrap_or(0);
        let mut one =
            || Ok(Further { slots: take_slots(from)?, keys: take(from)?, lengths: take(from)? });
        let further = (0..groups).map(|_| one());
        let further = further.collect::<Result<Vec<_>, BatchBytesError>>()?;
        let ends = |launch: &Launch| launch.first.checked_add(launch.tokens);
        let covered =
            launches.iter().all(|launch| ends(launch).is_some_and(|end| end <= keys.len()));
        if !covered || !(slots.is_empty() || slots.len() == keys.len()) {
            return Err(BatchBytesError::Launches { tokens: keys.len(), slots: slots.len() });
        }
        for further in further.iter().filter(|further| further.lengths.is_empty()) {
            // A state of each sequence has a key, and a token the same one in all groups.
            let expected = match further.keys.len() {
                0 => slots.len(),
                states => states,
            };
            if further.slots.len() != expected {
                return Err(BatchBytesError::Launches {
                    tokens: expected,
                    slots: further.slots.len(),
                });
            }
        }
        let open = keys.len();
        Ok(Self { slots, keys, lengths, accepted, rejected, further, launches, open, written: 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slots<const N: usize>(places: [u32; N]) -> Vec<Slot> {
        places.map(Slot::from).to_vec()
    }

    /// What is written in a group of windows and in one of states, of one sequence.
    fn further(window: Vec<Slot>) -> Vec<Further> {
        let window = Further { slots: window, ..Further::default() };
        let states = Further { slots: slots([3]), keys: vec![30], ..Further::default() };
        let drafts = Further { keys: vec![8, 9], lengths: vec![2], ..Further::default() };
        vec![window, states, drafts]
    }

    #[test]
    fn a_batch_arrives_as_it_was() {
        let batch = Batch {
            slots: slots([5, 6, 7]),
            keys: vec![50, 60, 70],
            lengths: vec![3],
            accepted: vec![1],
            rejected: vec![Rejected { index: 0, row: Row::new(9) }],
            further: further(vec![Slot::from(5), Slot::NONE, Slot::from(7)]),
            launches: vec![Launch { first: 0, tokens: 3, skip: 1 }],
            ..Batch::default()
        };
        let mut bytes = Vec::new();
        batch.put(&mut bytes);
        let arrived = Batch::take(&mut &bytes[..]).unwrap();
        assert_eq!(format!("{:?}", arrived.launches()), format!("{:?}", batch.launches()));
        assert_eq!((arrived.slots, arrived.keys), (batch.slots, batch.keys));
        assert_eq!((arrived.lengths, arrived.accepted), (batch.lengths, batch.accepted));
        assert_eq!(arrived.rejected, batch.rejected);
        assert_eq!(arrived.further, batch.further);
        assert!(Batch::take(&mut &bytes[..bytes.len() - 1]).is_err());
    }

    #[test]
    fn a_batch_whose_launches_go_beyond_its_tokens_is_refused() {
        let launch = Launch { first: 1, tokens: usize::MAX, skip: 0 };
        let batch = Batch { keys: vec![1, 2], launches: vec![launch], ..Batch::default() };
        let mut bytes = Vec::new();
        batch.put(&mut bytes);
        let refused = Batch::take(&mut &bytes[..]).unwrap_err();
        assert!(matches!(refused, BatchBytesError::Launches { tokens: 2, slots: 0 }), "{refused}");
    }

    #[test]
    fn a_batch_with_too_few_slots_of_a_group_is_refused() {
        let (window, states) = (further(slots([5])), further(slots([5, 6])));
        let of_states = |one: Further| if one.keys == [30] { slots([3, 4]) } else { one.slots };
        let states = states
            .into_iter()
            .map(|one| Further { slots: of_states(one.clone()), ..one })
            .collect();
        for (further, tokens, given) in [(window, 2, 1), (states, 1, 2)] {
            let (own, keys) = (slots([5, 6]), vec![1, 2]);
            let batch = Batch { slots: own, keys, further, ..Batch::default() };
            let mut bytes = Vec::new();
            batch.put(&mut bytes);
            let refused = Batch::take(&mut &bytes[..]).unwrap_err();
            let expected = BatchBytesError::Launches { tokens, slots: given };
            assert_eq!(refused.to_string(), expected.to_string());
        }
    }
}
