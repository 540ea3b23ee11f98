//! What the plain cache gives, and what differs from it.

use std::collections::BTreeMap;

use anyhow::{Context as _, ensure};

use crate::engine::Event;
use crate::job::Job;
use crate::model::Model;
use crate::plain::{PlainAnswer, answer};

/// The answers of the plain cache to all jobs, each computed alone.
#[derive(Debug)]
pub struct Oracle {
    answers: BTreeMap<(usize, u32), PlainAnswer>,
}

/// The first token of a run that is not the plain one's.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Difference {
    /// The job.
    pub job: usize,
    /// Which answer to it.
    pub answer: u32,
    /// The place in the answer.
    pub place: usize,
    /// What the plain cache gives there.
    pub expected: u32,
    /// What was found.
    pub found: Option<u32>,
}

impl Oracle {
    /// Answers every job, one sequence at a time.
    ///
    /// # Errors
    /// What the model says.
    pub fn new(model: &Model, jobs: &[Job]) -> anyhow::Result<Self> {
        let mut answers = BTreeMap::new();
        for (job, asked) in jobs.iter().enumerate() {
            for number in 0..asked.answers {
                answers.insert((job, number), answer(model, asked, number)?);
            }
        }
        Ok(Self { answers })
    }

    /// The answers.
    pub fn answers(&self) -> impl Iterator<Item = (&(usize, u32), &PlainAnswer)> {
        self.answers.iter()
    }

    /// Compares the logits of an event, bit by bit, and the text of a finished answer. `job` is the job's place among
    /// those of the oracle. How many logits of the vocabulary, as one, were compared.
    ///
    /// # Errors
    /// The first that differs.
    pub fn compare(&self, event: &Event, job: impl Fn(usize) -> usize) -> anyhow::Result<u64> {
        match event {
            Event::Tokens { job: of, answer, position, logits, .. } => {
                let plain = self.of(job(*of), *answer)?;
                let first = *position as usize - plain.prompt_tokens;
                for (place, logits) in (first..).zip(logits) {
                    let expected = plain.logits.get(place).context("more tokens than expected")?;
                    let differing =
                        expected.iter().zip(logits).filter(|(a, b)| a.to_bits() != b.to_bits());
                    let differing = differing.count();
                    ensure!(
                        differing == 0 && expected.len() == logits.len(),
                        "{differing} of {} logits differ at token {place} of answer {answer} to job {}",
                        logits.len(),
                        job(*of)
                    );
                }
                Ok(logits.len() as u64)
            }
            Event::Done { job: of, answer, ids, .. } => {
                let plain = self.of(job(*of), *answer)?;
                ensure!(plain.ids == *ids, "the text of job {} differs", job(*of));
                Ok(0)
            }
        }
    }

    /// The first token in which a finished answer differs, for a run in which it should.
    ///
    /// # Errors
    /// An answer that the oracle does not have.
    pub fn difference(&self, event: &Event, job: usize) -> anyhow::Result<Option<Difference>> {
        let Event::Done { answer, ids, .. } = event else { return Ok(None) };
        let plain = self.of(job, *answer)?;
        let pairs = plain.ids.iter().enumerate().skip(plain.prompt_tokens);
        let differing = pairs.map(|(at, &id)| (at, id, ids.get(at).copied()));
        let first = differing.into_iter().find(|(_, expected, found)| Some(*expected) != *found);
        Ok(first.map(|(at, expected, found)| Difference {
            job,
            answer: *answer,
            place: at - plain.prompt_tokens,
            expected,
            found,
        }))
    }

    fn of(&self, job: usize, answer: u32) -> anyhow::Result<&PlainAnswer> {
        self.answers.get(&(job, answer)).with_context(|| format!("no answer {answer} to job {job}"))
    }
}
