//! How much a file may be read and written: bytes a second, and bytes a day.

use std::time::Duration;

/// A day.
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// How long a rate may be saved up.
const BURST: f64 = 0.1;

/// Bytes a second, at most.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rate {
    bytes_per_second: Option<u64>,
    /// Bytes that may go now. Below zero after one that was larger than what was left.
    level: f64,
    at: Duration,
}

impl Rate {
    pub(crate) fn new(bytes_per_second: Option<u64>) -> Self {
        let level = bytes_per_second.unwrap_or(0) as f64 * BURST;
        Self { bytes_per_second, level, at: Duration::ZERO }
    }

    /// Whether bytes may go now, however many.
    pub(crate) fn allows(&mut self, now: Duration) -> bool {
        let Some(rate) = self.bytes_per_second else { return true };
        let passed = now.saturating_sub(self.at).as_secs_f64();
        self.at = self.at.max(now);
        self.level = (self.level + passed * rate as f64).min((rate as f64 * BURST).max(1.0));
        self.level > 0.0
    }

    /// Notes that bytes go.
    pub(crate) fn take(&mut self, bytes: u64) {
        if self.bytes_per_second.is_some() {
            self.level -= bytes as f64;
        }
    }
}

/// Bytes a day, at most, for the sake of disks that wear.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Daily {
    bytes: Option<u64>,
    used: u64,
    /// When the day began.
    from: Duration,
}

impl Daily {
    pub(crate) fn new(bytes: Option<u64>) -> Self {
        Self { bytes, used: 0, from: Duration::ZERO }
    }

    /// Whether the day has so many bytes left.
    pub(crate) fn allows(&mut self, now: Duration, bytes: u64) -> bool {
        let Some(limit) = self.bytes else { return true };
        if now.saturating_sub(self.from) >= DAY {
            (self.from, self.used) = (now, 0);
        }
        self.used.saturating_add(bytes) <= limit
    }

    /// Notes that so many are written.
    pub(crate) fn take(&mut self, bytes: u64) {
        self.used = self.used.saturating_add(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_lets_through_what_it_says_over_time() {
        let mut rate = Rate::new(Some(1_000_000));
        let (mut sent, mut now) = (0, Duration::ZERO);
        for _ in 0..10_000 {
            if rate.allows(now) {
                rate.take(65_536);
                sent += 65_536_u64;
            }
            now += Duration::from_millis(1);
        }
        assert!((9_900_000..10_300_000).contains(&sent), "{sent} in 10 s");
        assert!(Rate::new(None).allows(Duration::ZERO));
    }

    #[test]
    fn a_day_has_so_many_bytes_and_the_next_one_has_them_again() {
        let mut day = Daily::new(Some(100));
        let mut take = |now, bytes| {
            let allowed = day.allows(now, bytes);
            if allowed {
                day.take(bytes);
            }
            allowed
        };
        assert!(take(Duration::ZERO, 60) && !take(Duration::ZERO, 41));
        assert!(take(DAY - Duration::from_secs(1), 40) && !take(Duration::ZERO, 1));
        assert!(take(DAY, 100) && !take(DAY + Duration::from_secs(1), 1));
    }
}
