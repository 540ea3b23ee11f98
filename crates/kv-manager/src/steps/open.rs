//! The step that is being put together, and who has it in hand.

use std::sync::Arc;

use parking_lot::Mutex;

/// A step that is being put together, from [`Manager::begin_step`](crate::Manager::begin_step) to
/// [`Manager::finish_step`](crate::Manager::finish_step).
///
/// Dropping it, as an early return does, counts as finishing it: what it staged may have been carried
/// out. No call takes a step back, because such a claim could not be checked.
#[derive(Debug)]
#[must_use = "finish the step when its work is enqueued"]
pub struct OpenStep {
    number: u64,
    latest: Arc<Mutex<State>>,
}

impl OpenStep {
    /// The step's number; the first is 1.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }
}

impl Drop for OpenStep {
    fn drop(&mut self) {
        let mut latest = self.latest.lock();
        if let State::Open { staged } = *latest {
            *latest = State::Left { staged };
        }
    }
}

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
enum State {
    /// There was none yet, or it is over and has been taken in.
    #[default]
    Over,
    Open {
        staged: bool,
    },
    /// Its holder has finished or dropped it.
    Left {
        staged: bool,
    },
}

/// The latest step that was begun, whose state is shared with its holder.
#[derive(Debug, Default)]
pub(super) struct Latest {
    number: u64,
    state: Arc<Mutex<State>>,
}

impl Latest {
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    pub(super) fn begin_next(&mut self) -> OpenStep {
        self.number += 1;
        *self.state.lock() = State::Open { staged: false };
        OpenStep { number: self.number, latest: Arc::clone(&self.state) }
    }

    pub(super) fn is_of(&self, step: &OpenStep) -> bool {
        Arc::ptr_eq(&step.latest, &self.state)
    }

    /// If it is open: whether it is staged.
    pub(super) fn open(&self) -> Option<bool> {
        match *self.state.lock() {
            State::Open { staged } => Some(staged),
            _ => None,
        }
    }

    pub(super) fn stage(&mut self) {
        *self.state.lock() = State::Open { staged: true };
    }

    /// If its holder has left it since the last call: whether it is staged.
    pub(super) fn take_left(&mut self) -> Option<bool> {
        let mut state = self.state.lock();
        let State::Left { staged } = *state else { return None };
        *state = State::Over;
        Some(staged)
    }
}
