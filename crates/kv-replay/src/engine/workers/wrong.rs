//! Workers that do wrong on purpose, for tests that must see that it is noticed.

use std::fmt;
use std::str::FromStr;

use kv_plane::Part;
use kv_plane::manager::Completion;

use super::frame::{self, Kind};
use super::serve::ServeOptions;
use crate::command_line::{name_of, named};
use crate::engine::RunError;
use crate::engine::batch::Batch;

/// A worker that does wrong in a step, for tests that must see that it is noticed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Misbehave {
    pub worker: u16,
    pub step: u64,
    pub wrong: Wrong,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Wrong {
    /// It says what is no frame.
    Garbage,
    /// It says half a frame, and ends.
    Torn,
    /// It says again that the step before is complete, and only then the truth.
    Old,
    /// It says that the step after is complete.
    Ahead,
    /// It says nothing any more.
    Silent,
    /// It does not carry out the plan of the step, and gets the next one.
    Deaf,
    /// It writes a byte that belongs to nobody into a block that is read.
    Byte,
}

impl Wrong {
    const ALL: [(Self, &str); 7] = [
        (Self::Garbage, "garbage"),
        (Self::Torn, "torn"),
        (Self::Old, "old"),
        (Self::Ahead, "ahead"),
        (Self::Silent, "silent"),
        (Self::Deaf, "deaf"),
        (Self::Byte, "byte"),
    ];
}

impl FromStr for Misbehave {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let read = || {
            let (place, wrong) = text.split_once(':')?;
            let (worker, step) = place.split_once('@')?;
            let wrong = named("wrong", &Wrong::ALL, wrong).ok()?;
            Some(Self { worker: worker.parse().ok()?, step: step.parse().ok()?, wrong })
        };
        read().ok_or_else(|| format!("{text:?} is not WORKER@STEP:WHAT, such as 1@20:garbage"))
    }
}

impl fmt::Display for Misbehave {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}:{}", self.worker, self.step, name_of(&Wrong::ALL, self.wrong))
    }
}

impl ServeOptions {
    pub(super) fn does(&self, worker: u16, step: u64) -> Option<Wrong> {
        let misbehave = self.misbehave?;
        (misbehave.worker == worker && misbehave.step == step).then_some(misbehave.wrong)
    }
}

impl Wrong {
    /// Spoils the answer that says that a step is complete.
    pub(super) fn spoil(self, completion: Completion, answer: &mut Vec<u8>) {
        let say = |step| {
            let mut said = Vec::new();
            let completion = Completion { step, ..completion };
            frame::append(&mut said, Kind::Message, |body| completion.to_bytes(body));
            said
        };
        match self {
            Self::Byte | Self::Silent | Self::Deaf => {}
            Self::Garbage => answer.fill(0xa5),
            Self::Torn => answer.truncate(answer.len() / 2),
            Self::Old => drop(answer.splice(0..0, say(completion.step.saturating_sub(1)))),
            Self::Ahead => *answer = say(completion.step + 1),
        }
    }
}

/// Writes a byte that belongs to nobody to the start of a block of the batch, behind the batch's work.
pub(super) fn spoil(parts: &[Part], batch: &Batch) -> Result<(), RunError> {
    let Some((part, &slot)) = parts.first().zip(batch.slots.first()) else { return Ok(()) };
    let Some(place) = slot.place() else { return Ok(()) };
    let block = place / u64::from(part.shape().block_tokens());
    let Ok(Some(block)) = part.paged().block_span(block) else { return Ok(()) };
    part.compute().fill(block.slice(0, 1).map_err(cuda_driver::CopyError::from)?, 0xa5)?;
    Ok(())
}
