//! What the command lines of `kv-replay` and of `tools/` have in common.

use std::borrow::Cow;
use std::error::Error;
use std::io::{self, Write as _};
use std::str::FromStr;
use std::time::{Duration, Instant};

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};

use crate::config::{Progress, ProgressState};
use crate::trace::ReadOptions;

/// What a trace's file does not say.
#[derive(Args, Debug)]
pub struct ReadArgs {
    /// Prompt tokens of a hash id in the trace [default: what the file says, or 512].
    #[arg(long, value_name = "N", value_parser = whole::<u64>)]
    pub trace_block_tokens: Option<u64>,
    /// Leaves out requests of the trace that cannot be used, such as those without an answer, and counts them; else the
    /// first of them is an error.
    #[arg(long)]
    pub skip_unusable: bool,
}

impl ReadArgs {
    pub fn options(&self) -> ReadOptions {
        let (block_tokens, skip_unusable) = (self.trace_block_tokens, self.skip_unusable);
        ReadOptions { block_tokens, skip_unusable }
    }
}

/// Parses a whole number without a sign.
pub fn whole<T: FromStr>(text: &str) -> Result<T, String> {
    let most = u64::MAX >> (64 - 8 * size_of::<T>());
    text.parse().map_err(|_| format!("expected a whole number from 0 to {most}"))
}

/// Has values of a type written and read by their names, all of which are in its `NAMES`.
macro_rules! by_names {
    ($type:ident, $kind:literal) => {
        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let own = Self::NAMES.iter().find(|(value, _)| value == self);
                f.write_str(own.map_or("", |(_, name)| name))
            }
        }

        impl std::str::FromStr for $type {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                let found = Self::NAMES.iter().find(|(_, name)| *name == text);
                found.map(|(value, _)| *value).ok_or_else(|| {
                    let [others @ .., last] = Self::NAMES.map(|(_, name)| name);
                    let others = others.join(", ");
                    format!("unknown {} {text:?}; expected {others} or {last}", $kind)
                })
            }
        }
    };
}
pub(crate) use by_names;

pub fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number > 0.0 && number <= 1e9 => Ok(number),
        _ => Err("expected a number above 0, and at most 1000000000".to_owned()),
    }
}

/// Prints a failure and its causes on standard error, one per line.
pub fn complain(failure: &dyn Error) {
    let mut text = format!("error: {failure}\n");
    let mut cause = failure.source();
    while let Some(error) = cause {
        text.push_str(&format!("  caused by: {error}\n"));
        cause = error.source();
    }
    // If standard error is closed, the message cannot be shown anywhere.
    let _ = io::stderr().lock().write_all(visible(&text).as_bytes());
}

/// Writes `text` to standard output. A reader that closed the pipe early is not a failure.
pub fn say(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(visible(text).as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error),
        _ => Ok(()),
    }
}

/// The text without what a terminal takes for a command: names of files and values of traces may have anything.
fn visible(text: &str) -> Cow<'_, str> {
    let is_command = |c: char| c.is_control() && c != '\n' && c != '\t';
    if !text.contains(is_command) {
        return Cow::Borrowed(text);
    }
    let shown =
        |c: char| if is_command(c) { c.escape_default().to_string() } else { c.to_string() };
    Cow::Owned(text.chars().map(shown).collect())
}

const UPDATE_GAP: Duration = Duration::from_millis(100);

const TEMPLATE: &str = "{elapsed:>4} [{bar:32}] {pos}/{len} requests, {per_sec}, {eta} left; {msg}";

/// A progress bar: on standard error, and only if that is a terminal.
#[derive(Debug)]
pub struct Bar {
    bar: ProgressBar,
    updated: Option<Instant>,
}

impl Bar {
    pub fn new(requests: u64) -> Self {
        let bar = ProgressBar::new(requests);
        if let Ok(style) = ProgressStyle::with_template(TEMPLATE) {
            bar.set_style(style.progress_chars("=> "));
        }
        Self { bar, updated: None }
    }

    /// Removes the bar, so that later output starts in its place.
    pub fn clear(&self) {
        self.bar.finish_and_clear();
    }
}

impl Progress for Bar {
    fn update(&mut self, state: &ProgressState) {
        if self.bar.is_hidden() || self.updated.is_some_and(|then| then.elapsed() < UPDATE_GAP) {
            return;
        }
        self.updated = Some(Instant::now());
        self.bar.set_position(state.finished);
        self.bar.set_message(format!(
            "{} running in {} blocks, {:.1} % hit; {} blocks verified, {} corrupt",
            state.running,
            state.device_blocks_in_use,
            100.0 * state.hit_rate,
            state.verified_blocks,
            state.corrupt_blocks,
        ));
    }
}
