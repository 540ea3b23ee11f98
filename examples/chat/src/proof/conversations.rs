//! The jobs of the proof: conversations that share a system prompt.

use crate::job::Job;
use crate::sampling::Sampling;
use crate::text::{Role, Text};

/// What all conversations begin with.
const SYSTEM: &str =
    "You are a careful assistant. You answer every question in one short and simple sentence.";

/// The questions. The third invites drafts: its answer repeats what is there.
const QUESTIONS: [&str; 4] = [
    "What is the capital of France?",
    "Why is the sky blue?",
    "Continue: tick tock, tick tock, tick tock, tick tock, tick",
    "Name three colors.",
];

/// Further questions, for a longer proof.
const FURTHER: [&str; 4] = [
    "Write the first two lines of a poem about the sea.",
    "How many days does a week have, and what are they called?",
    "Repeat exactly: the cat sat on the mat, the dog sat on the mat, the cow sat on the mat.",
    "Explain in your own words what a cache is, and why programs use one.",
];

/// How much is computed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Size {
    /// About a minute on one core.
    Short,
    /// Twice the questions, and longer answers.
    Long,
}

/// The jobs.
///
/// # Errors
/// What the tokenizer says.
pub fn jobs(text: &Text, size: Size) -> anyhow::Result<Vec<Job>> {
    let (further, tokens_max) = match size {
        Size::Short => (&FURTHER[..0], 12),
        Size::Long => (&FURTHER[..], 48),
    };
    let mut jobs = Vec::new();
    for (index, question) in QUESTIONS.iter().chain(further).enumerate() {
        let messages = [(Role::System, SYSTEM.to_owned()), (Role::User, (*question).to_owned())];
        // One of them is answered three times, by draws.
        let drawn = index == 3;
        jobs.push(Job {
            prompt: text.conversation(&messages)?,
            answers: if drawn { 3 } else { 1 },
            tokens_max,
            ends: text.ends().to_vec(),
            sampling: if drawn {
                Sampling { temperature: 0.8, seed: 11 }
            } else {
                Sampling::GREEDY
            },
            drafts: 3,
        });
    }
    Ok(jobs)
}
