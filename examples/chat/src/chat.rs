//! A chat in the terminal.

use std::io::{BufRead, Write};

use crate::engine::{Engine, Event};
use crate::job::Job;
use crate::report::Cost;
use crate::sampling::Sampling;
use crate::text::{Role, Streamed, Text};

/// How questions become jobs.
#[derive(Clone, Debug)]
pub struct Settings {
    /// What the model is told first, if a script does not say so.
    pub system: String,
    /// Most tokens of an answer.
    pub tokens_max: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Drafts of a step.
    pub drafts: u32,
}

impl Settings {
    /// The job of answering the last message of a conversation.
    ///
    /// # Errors
    /// What the tokenizer says.
    pub fn job(
        &self,
        text: &Text,
        messages: &[(Role, String)],
        answers: u32,
    ) -> anyhow::Result<Job> {
        // Answers that are to differ are drawn.
        let temperature = match answers {
            0 | 1 => self.sampling.temperature,
            _ => self.sampling.temperature.max(0.8),
        };
        Ok(Job {
            prompt: text.conversation(messages)?,
            answers,
            tokens_max: self.tokens_max,
            ends: text.ends().to_vec(),
            sampling: Sampling { temperature, ..self.sampling },
            drafts: self.drafts,
        })
    }
}

/// Reads questions, and streams the answers. `/new` begins another conversation, and an empty line or the end of the
/// input ends the chat.
///
/// # Errors
/// Whatever fails.
pub fn run(
    engine: &mut Engine,
    text: &Text,
    settings: &Settings,
    (input, mut output): (impl BufRead, impl Write),
) -> anyhow::Result<()> {
    let begin = || vec![(Role::System, settings.system.clone())];
    let mut messages = begin();
    write!(output, "> ")?;
    output.flush()?;
    for line in input.lines() {
        let line = line?;
        match line.trim() {
            "" => break,
            "/new" => messages = begin(),
            question => {
                messages.push((Role::User, question.to_owned()));
                let job = settings.job(text, &messages, 1)?;
                let answer = stream(engine, text, job, &mut output)?;
                messages.push((Role::Assistant, answer));
            }
        }
        write!(output, "> ")?;
        output.flush()?;
    }
    writeln!(output)?;
    Ok(())
}

/// Answers one job, and shows the answer as it comes.
fn stream(
    engine: &mut Engine,
    text: &Text,
    job: Job,
    output: &mut impl Write,
) -> anyhow::Result<String> {
    let (prompt_tokens, mut answer, mut streamed) =
        (job.prompt.len(), String::new(), Streamed::default());
    engine.submit(job);
    while !engine.is_idle() {
        for event in engine.step()? {
            match event {
                Event::Tokens { ids, .. } => {
                    let new = streamed.push(text, &ids)?;
                    write!(output, "{new}")?;
                    output.flush()?;
                    answer.push_str(&new);
                }
                Event::Done { ids, reuse, first_token, rest, .. } => {
                    let answer_tokens = ids.len() - prompt_tokens;
                    let cost = Cost { prompt_tokens, answer_tokens, reuse, first_token, rest };
                    writeln!(output, "\n{cost}")?;
                }
            }
        }
    }
    Ok(answer.trim().to_owned())
}
