//! What a cached prefix saves: the time to the first token, with and without it.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};

use crate::engine::{Engine, Event, Reuse};
use crate::job::Job;
use crate::model::Model;
use crate::sampling::Sampling;
use crate::text::{Role, Text};

/// Filler of which a long document is made.
const SENTENCE: &str =
    "The river was wide and slow, and on its banks the people of the town had built their houses. ";

/// Asks two questions about a document of about `tokens` tokens, several times, and prints the time to the first token of
/// the first question, whose prompt is computed, and of the second, whose prefix is cached.
///
/// # Errors
/// Whatever fails, and a prefix that was not found.
pub fn prefix(
    engine: &mut Engine,
    model: &Arc<Model>,
    text: &Text,
    (tokens, repeats): (usize, usize),
) -> anyhow::Result<()> {
    println!("  {}: the time to the first token, with a shared prefix", model.config().name);
    let (mut cold, mut warm) = (Vec::new(), Vec::new());
    for repeat in 0..repeats {
        let mut document = format!("Document {repeat}. ");
        // Somewhat longer, because whole blocks are cached.
        while text.ids(&document)?.len() < tokens + 16 {
            document.push_str(SENTENCE);
        }
        let mut ask = |question: &str| {
            let messages = [(Role::System, document.clone()), (Role::User, question.to_owned())];
            first_token(engine, text, &messages)
        };
        let (prompt, _, time) = ask("Where are the houses?")?;
        cold.push(time);
        let (_, reuse, time) = ask("What was the river like?")?;
        ensure!(reuse.tokens() as usize >= tokens, "only {} tokens were reused", reuse.tokens());
        warm.push(time);
        println!(
            "  {prompt} tokens computed: {:>8.1} ms   {} of them reused: {:>8.1} ms",
            cold[repeat].as_secs_f64() * 1e3,
            reuse.tokens(),
            time.as_secs_f64() * 1e3
        );
    }
    let (cold, warm) = (median(&mut cold)?, median(&mut warm)?);
    let ratio = cold.as_secs_f64() / warm.as_secs_f64();
    println!("  medians: {cold:.1?} and {warm:.1?}, {ratio:.1} times shorter");
    Ok(())
}

/// Tokens of the prompt, what was reused of it, and the time to the first token.
fn first_token(
    engine: &mut Engine,
    text: &Text,
    messages: &[(Role, String)],
) -> anyhow::Result<(usize, Reuse, Duration)> {
    let prompt = text.conversation(messages)?;
    let count = prompt.len();
    engine.submit(Job {
        prompt,
        answers: 1,
        tokens_max: 1,
        ends: Vec::new(),
        sampling: Sampling::GREEDY,
        drafts: 0,
    });
    let events = engine.run()?;
    let done = events.into_iter().find_map(|event| match event {
        Event::Done { reuse, first_token, .. } => Some((count, reuse, first_token)),
        Event::Tokens { .. } => None,
    });
    done.context("a question without an answer")
}

fn median(times: &mut [Duration]) -> anyhow::Result<Duration> {
    times.sort_unstable();
    times.get(times.len() / 2).copied().context("nothing was measured")
}
