//! Workers that do wrong on purpose, for tests that must see that it is noticed.

use std::fmt;
use std::io::{self, Stdout, Write};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kv_plane::Part;
use kv_plane::manager::WorkerId;
use kv_plane::processes::Connection;

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
    /// It does not say that the step is complete, but that the one after is.
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

/// The step that the last answer of a worker that does wrong was about; 0 for none.
#[derive(Clone, Debug, Default)]
pub struct Answered(Arc<AtomicU64>);

impl ServeOptions {
    /// The worker's end of its connection, which says in a step what is wrong.
    pub(super) fn connection(&self) -> Connection {
        let output = Spoilt {
            wrong: self.misbehave.map(|of| (of.step, of.wrong)),
            answered: self.answered.clone(),
            before: Vec::new(),
            is_silent: false,
            output: io::stdout(),
        };
        Connection::new(io::stdin(), output)
    }

    /// The same for the worker with this number.
    pub(super) fn of(self, worker: WorkerId) -> Self {
        Self { misbehave: self.misbehave.filter(|of| of.worker == worker.0), ..self }
    }

    pub(super) fn does(&self, step: u64) -> Option<Wrong> {
        self.misbehave.filter(|of| of.step == step).map(|of| of.wrong)
    }

    /// The next answer is about this step.
    pub(super) fn answer(&self, step: u64) {
        if self.misbehave.is_some() {
            self.answered.0.store(step, Ordering::Relaxed);
        }
    }
}

/// The output of a worker that does wrong, which gets one answer by each call.
struct Spoilt {
    wrong: Option<(u64, Wrong)>,
    answered: Answered,
    /// The answer before.
    before: Vec<u8>,
    is_silent: bool,
    output: Stdout,
}

impl Write for Spoilt {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let step = self.answered.0.load(Ordering::Relaxed);
        let mut said = bytes.to_vec();
        match self.wrong.filter(|(of, _)| *of == step).map(|(_, wrong)| wrong) {
            Some(Wrong::Silent) => self.is_silent = true,
            Some(Wrong::Ahead) => said.clear(),
            Some(Wrong::Garbage) => said.fill(0xa5),
            Some(Wrong::Torn) => said.truncate(said.len() / 2),
            Some(Wrong::Old) => drop(said.splice(0..0, self.before.drain(..))),
            Some(Wrong::Deaf | Wrong::Byte) => {}
            None => self.before = if step > 0 { bytes.to_vec() } else { Vec::new() },
        }
        if !self.is_silent {
            self.output.write_all(&said)?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.output.flush()
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
