//! `run --live`: what a run does, drawn again and again in a terminal.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::time::Duration;

use kv_replay::config::ProgressState;
use kv_replay::series::Sample;

/// Moments that a row of bars has room for.
const MOMENTS: usize = 48;

/// Cells of a bar.
const CELLS: u64 = 30;

/// Heights of a bar in a row.
const HEIGHTS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// The figures in the terminal, and how many lines they take.
#[derive(Debug, Default)]
pub(crate) struct Live {
    lines: usize,
    last: Sample,
    /// Lookups and hits of each moment, in percent; and bytes a second over the link.
    found: Vec<u64>,
    moved: Vec<u64>,
}

impl Live {
    /// Draws the figures in place of the last ones. A terminal that is gone is no failure of the run.
    pub(crate) fn draw(&mut self, state: &ProgressState, elapsed: Duration) {
        let Some(text) = self.text(state, elapsed) else { return };
        let up = if self.lines > 0 { format!("\x1b[{}A", self.lines) } else { String::new() };
        self.lines = text.lines().count();
        let lines: String = text.lines().map(|line| format!("{line}\x1b[K\n")).collect();
        let mut stdout = io::stdout().lock();
        let _ = stdout.write_all(up.as_bytes()).and_then(|()| stdout.write_all(lines.as_bytes()));
        let _ = stdout.flush();
    }

    /// Keeps what has changed since the last moment.
    fn note(&mut self, now: &Sample) {
        let before = std::mem::replace(&mut self.last, *now);
        let found = 100 * hits(now).saturating_sub(hits(&before));
        if let Some(share) = found.checked_div(now.lookups.saturating_sub(before.lookups)) {
            keep(&mut self.found, share);
        }
        let bytes = |of: &Sample| of.bytes_to_device + of.bytes_to_host;
        let passed = now.time_ns.saturating_sub(before.time_ns).max(1);
        let each = u128::from(bytes(now).saturating_sub(bytes(&before))) * 1_000_000_000;
        keep(&mut self.moved, u64::try_from(each / u128::from(passed)).unwrap_or(u64::MAX));
    }

    /// The figures; none before the first sample.
    fn text(&mut self, state: &ProgressState, elapsed: Duration) -> Option<String> {
        let now = state.sample?;
        self.note(&now);
        let share = |part: u64, all: u64| 100.0 * part as f64 / all.max(1) as f64;
        let mut text = String::new();
        let seconds = elapsed.as_secs_f64();
        let left = (state.finished > 0).then(|| {
            seconds * state.requests.saturating_sub(state.finished) as f64 / state.finished as f64
        });
        let left = left.map_or_else(|| "?".to_owned(), |left| format!("{left:.0} s"));
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "requests  {} {} of {}; {:.1}/s, {left} left",
            bar(&[state.finished], state.requests),
            state.finished,
            state.requests,
            state.finished as f64 / seconds.max(1e-3)
        );
        let _ = writeln!(
            text,
            "          {} running, {} waiting, {} suspended; {} preempted",
            now.running, now.waiting, now.suspended, now.preemptions
        );
        let _ = writeln!(
            text,
            "found     {:>5.1} % of {} blocks, {:.1} % in host memory, {:.1} % gone",
            share(hits(&now), now.lookups),
            now.lookups,
            share(now.hits_host, now.lookups),
            share(now.lost, now.lookups)
        );
        let _ = writeln!(text, "          {} lately", row(&self.found, 100));
        for (name, used, cached, free) in [
            ("device", now.device_in_use + now.device_retiring, now.device_cached, now.device_free),
            ("host", now.host_in_use + now.host_retiring, now.host_cached, now.host_free),
        ] {
            let all = used + cached + free;
            let _ = writeln!(
                text,
                "{name:<9} {} {used} in use, {cached} cached, {all} blocks",
                bar(&[used, cached], all)
            );
        }
        let most = self.moved.iter().copied().max().unwrap_or(0);
        let _ = writeln!(
            text,
            "link      {} at most {:.2} GB/s; {:.2} GB to devices, {:.2} GB to hosts",
            row(&self.moved, most),
            most as f64 / 1e9,
            now.bytes_to_device as f64 / 1e9,
            now.bytes_to_host as f64 / 1e9
        );
        let _ = writeln!(
            text,
            "stalls    prefix {}, load {}, room {}, row {}, growth {}",
            now.stalls_prefix, now.stalls_load, now.stalls_room, now.stalls_row, now.stalls_growth
        );
        let _ = writeln!(
            text,
            "blocks    {} evicted, {} of them not stored; {} verified, {} corrupt",
            now.evicted, now.refused, state.verified_blocks, state.corrupt_blocks
        );
        Some(text)
    }
}

fn hits(of: &Sample) -> u64 {
    of.hits_device + of.hits_host
}

fn keep(moments: &mut Vec<u64>, value: u64) {
    if moments.len() >= MOMENTS {
        moments.remove(0);
    }
    moments.push(value);
}

/// A bar for each moment.
fn row(moments: &[u64], most: u64) -> String {
    let height = |&value: &u64| {
        let at = u128::from(value) * HEIGHTS.len() as u128 / u128::from(most.max(1));
        HEIGHTS[usize::try_from(at).unwrap_or(usize::MAX).min(HEIGHTS.len() - 1)]
    };
    moments.iter().map(height).collect()
}

/// A bar with a part for each number.
fn bar(parts: &[u64], all: u64) -> String {
    let (mut text, mut drawn, mut sum) = (String::from("["), 0, 0_u64);
    for (&part, cell) in parts.iter().zip(['█', '▒']) {
        sum = sum.saturating_add(part);
        let until = (u128::from(sum) * u128::from(CELLS) / u128::from(all.max(1))) as u64;
        let until = until.min(CELLS);
        text.extend((drawn..until).map(|_| cell));
        drawn = until;
    }
    text.extend((drawn..CELLS).map(|_| ' '));
    text.push(']');
    text
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn bars_are_as_long_as_what_they_show() {
        assert_eq!(
            bar(&[10, 10], 30),
            format!("[{}{}{}]", "█".repeat(10), "▒".repeat(10), " ".repeat(10))
        );
        assert_eq!(bar(&[7], 0).chars().count(), 32);
        assert_eq!(bar(&[u64::MAX, u64::MAX], 5).chars().count(), 32);
        assert_eq!(row(&[0, 50, 100, 200], 100), "▁▅██");
        assert_eq!(row(&[0, 0], 0), "▁▁");
    }

    #[test]
    fn figures_are_those_of_the_sample_and_rows_keep_the_latest_moments() {
        let mut live = Live::default();
        let without = ProgressState { requests: 8, ..ProgressState::default() };
        assert_eq!(live.text(&without, Duration::ZERO), None);
        let mut sample = Sample::default();
        for at in 1..=100 {
            (sample.time_ns, sample.lookups) = (at * 1_000_000_000, 10 * at);
            (sample.hits_device, sample.hits_host, sample.lost) = (2 * at, 3 * at, at);
            sample.bytes_to_device = 5_000_000_000 * at;
            (sample.device_cached, sample.device_free) = (3, 1);
            let state = ProgressState {
                requests: 8,
                finished: 2,
                sample: Some(sample),
                ..ProgressState::default()
            };
            let text = live.text(&state, Duration::from_secs(4)).unwrap();
            assert!(text.contains("2 of 8; 0.5/s, 12 s left"), "{text}");
            assert!(
                text.contains("50.0 % of")
                    && text.contains("30.0 % in host")
                    && text.contains("10.0 % gone"),
                "{text}"
            );
            assert!(
                text.contains("0 in use, 3 cached, 4 blocks") && text.contains("at most 5.00 GB/s"),
                "{text}"
            );
            assert_eq!(text.lines().count(), 9);
        }
        assert_eq!((live.found.len(), live.moved.len()), (MOMENTS, MOMENTS));
        assert!(live.found.iter().all(|&found| found == 50));
    }
}
