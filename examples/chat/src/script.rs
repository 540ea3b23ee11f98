//! Conversations from a file, all at once.
//!
//! ```text
//! # A comment. A line of dashes begins another conversation.
//! system: You answer briefly.
//! user: What is the capital of France?
//! user: And of Italy?
//! ---
//! answers: 3
//! user: Name a color.
//! ```

use std::fmt::Write as _;

use anyhow::bail;

use crate::chat::Settings;
use crate::engine::{Engine, Event};
use crate::report::Cost;
use crate::text::{Role, Text};

/// A conversation of a script.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Conversation {
    /// What the model is told first.
    pub system: Option<String>,
    /// What the person says, turn by turn.
    pub turns: Vec<String>,
    /// Answers to the last turn.
    pub answers: u32,
}

/// Reads a script.
///
/// # Errors
/// The line that is not understood.
pub fn parse(script: &str) -> anyhow::Result<Vec<Conversation>> {
    let mut all = vec![Conversation { answers: 1, ..Conversation::default() }];
    for (number, line) in (1..).zip(script.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if line.chars().all(|c| c == '-') {
            all.push(Conversation { answers: 1, ..Conversation::default() });
            continue;
        }
        let (Some(last), Some((word, rest))) = (all.last_mut(), line.split_once(':')) else {
            bail!("line {number} of the script is not understood: {line:?}");
        };
        let rest = rest.trim();
        match word {
            "system" => last.system = Some(rest.to_owned()),
            "user" => last.turns.push(rest.to_owned()),
            "answers" => last.answers = rest.parse()?,
            _ => bail!("line {number} of the script begins with {word:?}"),
        }
    }
    all.retain(|conversation| !conversation.turns.is_empty());
    Ok(all)
}

/// A conversation that is going on.
struct Going {
    messages: Vec<(Role, String)>,
    next: usize,
    shown: String,
    /// Answers of the current turn that are to come.
    open: u32,
}

/// Runs all conversations at once, and prints each when it is complete.
///
/// # Errors
/// Whatever fails.
pub fn run(
    engine: &mut Engine,
    text: &Text,
    conversations: &[Conversation],
    settings: &Settings,
) -> anyhow::Result<()> {
    let mut going: Vec<Going> = Vec::new();
    let mut of_jobs: Vec<usize> = Vec::new();
    for (index, conversation) in conversations.iter().enumerate() {
        let system = conversation.system.iter().map(|system| (Role::System, system.clone()));
        going.push(Going { messages: system.collect(), next: 0, shown: String::new(), open: 0 });
        submit(engine, text, (conversation, &mut going[index]), settings)?;
        of_jobs.push(index);
    }
    while !engine.is_idle() {
        for event in engine.step()? {
            let Event::Done { job, ids, reuse, first_token, rest, .. } = event else { continue };
            let index = of_jobs[job];
            let (conversation, state) = (&conversations[index], &mut going[index]);
            let prompt_tokens = text.conversation(&state.messages)?.len();
            let answer = text.of(&ids[prompt_tokens..])?.trim().to_owned();
            let answer_tokens = ids.len() - prompt_tokens;
            let cost = Cost { prompt_tokens, answer_tokens, reuse, first_token, rest };
            writeln!(state.shown, "< {answer}\n  {cost}")?;
            state.open -= 1;
            if state.open > 0 {
                continue;
            }
            if state.next == conversation.turns.len() {
                println!("conversation {}\n{}", index + 1, state.shown);
                continue;
            }
            state.messages.push((Role::Assistant, answer));
            submit(engine, text, (conversation, state), settings)?;
            of_jobs.push(index);
        }
    }
    Ok(())
}

/// The next turn of a conversation.
fn submit(
    engine: &mut Engine,
    text: &Text,
    (conversation, state): (&Conversation, &mut Going),
    settings: &Settings,
) -> anyhow::Result<()> {
    let turn = &conversation.turns[state.next];
    state.next += 1;
    writeln!(state.shown, "> {turn}")?;
    state.messages.push((Role::User, turn.clone()));
    let answers = if state.next == conversation.turns.len() { conversation.answers } else { 1 };
    state.open = answers;
    engine.submit(settings.job(text, &state.messages, answers)?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_has_conversations_with_turns() {
        let read = parse("# c\nsystem: s\nuser: a: b\n\nuser: c\n---\nanswers: 3\nuser: d\n---\n")
            .unwrap();
        let first = Conversation {
            system: Some("s".to_owned()),
            turns: vec!["a: b".to_owned(), "c".to_owned()],
            answers: 1,
        };
        let second = Conversation { system: None, turns: vec!["d".to_owned()], answers: 3 };
        assert_eq!(read, [first, second]);
        assert!(parse("what").is_err() && parse("who: me").is_err());
    }
}
