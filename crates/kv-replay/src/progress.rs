//! The progress bar: on standard error, and only if that is a terminal.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use kv_replay::config::{Progress, ProgressState};

use crate::live::Live;

/// Minimum time between two updates of the bar.
const UPDATE_GAP: Duration = Duration::from_millis(100);

const TEMPLATE: &str = "{elapsed:>4} [{bar:32}] {pos}/{len} requests, {per_sec}, {eta} left; {msg}";

/// A bar of finished requests.
pub(crate) struct Bar {
    bar: ProgressBar,
    updated: Option<Instant>,
    /// The figures that are shown instead.
    live: Option<Live>,
}

impl Bar {
    /// A bar, or with `live` all figures.
    pub(crate) fn new(requests: u64, live: bool) -> Self {
        let live = live.then(Live::default);
        let bar = if live.is_some() { ProgressBar::hidden() } else { ProgressBar::new(requests) };
        if let Ok(style) = ProgressStyle::with_template(TEMPLATE) {
            bar.set_style(style.progress_chars("=> "));
        }
        Self { bar, updated: None, live }
    }

    /// A bar of other things.
    pub(crate) fn of(all: u64, what: &str) -> Self {
        let bar = ProgressBar::new(all);
        let template = format!(
            "{{elapsed:>4}} [{{bar:32}}] {{pos}}/{{len}} {what}, {{per_sec}}, {{eta}} left"
        );
        if let Ok(style) = ProgressStyle::with_template(&template) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.tick();
        Self { bar, updated: None, live: None }
    }

    /// So many are done.
    pub(crate) fn reach(&self, done: usize) {
        self.bar.set_position(done as u64);
    }

    /// So many of so many are done.
    pub(crate) fn reach_of(&self, done: usize, all: usize) {
        self.bar.set_length(all as u64);
        self.reach(done);
    }

    /// Removes the bar, so that later output starts in its place.
    pub(crate) fn clear(&self) {
        self.bar.finish_and_clear();
    }
}

impl Progress for Bar {
    fn update(&mut self, state: &ProgressState) {
        let is_last = state.finished == state.requests;
        if let Some(live) = &mut self.live {
            if is_last || self.updated.is_none_or(|then| then.elapsed() >= UPDATE_GAP) {
                self.updated = Some(Instant::now());
                live.draw(state, self.bar.elapsed());
            }
            return;
        }
        if self.bar.is_hidden() || self.updated.is_some_and(|then| then.elapsed() < UPDATE_GAP) {
            return;
        }
        self.updated = Some(Instant::now());
        self.bar.set_position(state.finished);
        self.bar.set_message(message(state));
    }
}

fn message(state: &ProgressState) -> String {
    format!(
        "{} running in {} blocks, {:.1} % hit; {} blocks verified, {} corrupt",
        state.running,
        state.device_blocks_in_use,
        100.0 * state.hit_rate,
        state.verified_blocks,
        state.corrupt_blocks,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_says_what_matters() {
        let state = ProgressState {
            running: 3,
            device_blocks_in_use: 40,
            hit_rate: 0.25,
            verified_blocks: 7,
            corrupt_blocks: 1,
            ..ProgressState::default()
        };
        assert_eq!(
            message(&state),
            "3 running in 40 blocks, 25.0 % hit; 7 blocks verified, 1 corrupt"
        );
    }
}
