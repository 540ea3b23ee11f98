//! The values of a profile: times, rates, and times that depend on a size; printed and parsed.

use std::fmt;
use std::time::Duration;

/// A rate in bytes per second.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Rate {
    mb_per_s: u64,
}

impl Rate {
    /// A rate in millions of bytes per second; 0 counts as 1.
    #[must_use]
    pub const fn mb_per_s(mb_per_s: u64) -> Self {
        Self { mb_per_s: if mb_per_s == 0 { 1 } else { mb_per_s } }
    }

    /// The time for `bytes` bytes.
    #[must_use]
    pub fn time(self, bytes: u64) -> Duration {
        Duration::from_nanos(self.nanos(bytes))
    }

    /// Bytes in a second.
    #[must_use]
    pub fn bytes_per_s(self) -> u64 {
        self.mb_per_s.saturating_mul(1_000_000)
    }

    /// The time for `bytes` bytes, in nanoseconds.
    pub(crate) fn nanos(self, bytes: u64) -> u64 {
        // A million bytes per second is one byte per microsecond.
        let nanos = u128::from(bytes) * 1000 / u128::from(self.mb_per_s);
        u64::try_from(nanos).unwrap_or(u64::MAX)
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:03} GB/s", self.mb_per_s / 1000, self.mb_per_s % 1000)
    }
}

/// A time that depends on a size: measured points, and straight lines between neighbours.
///
/// Outside the points, the line through the two nearest continues, but not below zero. With a
/// single point the time is the same for every size. Without points it is zero.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Curve {
    /// Sizes in bytes, ascending, and their times in nanoseconds.
    points: Vec<(u64, u64)>,
}

impl Curve {
    /// A curve through points of bytes and time, in any order. If a size occurs twice, the later
    /// point counts.
    #[must_use]
    pub fn new(points: &[(u64, Duration)]) -> Self {
        let mut sorted: Vec<(u64, u64)> = Vec::with_capacity(points.len());
        for &(bytes, time) in points {
            match sorted.binary_search_by_key(&bytes, |point| point.0) {
                Ok(index) => sorted[index].1 = nanos(time),
                Err(index) => sorted.insert(index, (bytes, nanos(time))),
            }
        }
        Self { points: sorted }
    }

    /// The time for `bytes` bytes.
    #[must_use]
    pub fn at(&self, bytes: u64) -> Duration {
        Duration::from_nanos(self.nanos(bytes))
    }

    pub(crate) fn nanos(&self, bytes: u64) -> u64 {
        let [first, .., last] = self.points.as_slice() else {
            return self.points.first().map_or(0, |point| point.1);
        };
        debug_assert!(first.0 < last.0, "points rise");
        let next = self.points.partition_point(|point| point.0 < bytes);
        let next = next.clamp(1, self.points.len() - 1);
        let [(x0, y0), (x1, y1)] = [self.points[next - 1], self.points[next]].map(signed);
        let rise = (i128::from(bytes) - x0).saturating_mul(y1 - y0) / (x1 - x0);
        let time = y0.saturating_add(rise);
        u64::try_from(time.max(0)).unwrap_or(u64::MAX)
    }
}

fn signed((bytes, nanos): (u64, u64)) -> (i128, i128) {
    (bytes.into(), nanos.into())
}

impl fmt::Display for Curve {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (bytes, nanos)) in self.points.iter().enumerate() {
            let separator = if index == 0 { "" } else { ", " };
            write!(f, "{separator}{bytes} B: {nanos} ns")?;
        }
        Ok(())
    }
}

/// A time in nanoseconds, capped at the largest value that fits.
pub(crate) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The types of values after the equals sign.
pub(super) trait Value {
    const FORM: &'static str;

    /// Parses the value; returns false and changes nothing if the text has another form.
    fn read(&mut self, text: &str) -> bool;

    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result;
}

/// Parses `number unit` in thousandths of `unit`'s factor. Refuses what is not exact.
fn scaled(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let text = text.trim();
    let end = text.find(|c: char| !(c.is_ascii_digit() || "._".contains(c)))?;
    let (number, unit) = text.split_at(end);
    let &(_, factor) = units.iter().find(|(name, _)| *name == unit.trim())?;
    let digits = number.replace('_', "");
    let (whole, fraction) = digits.split_once('.').unwrap_or((&digits, ""));
    if fraction.contains('.') || fraction.len() > 9 {
        return None;
    }
    let whole: u128 = whole.parse().ok()?;
    let parts: u128 = if fraction.is_empty() { 0 } else { fraction.parse().ok()? };
    let one = 10u128.pow(fraction.len() as u32);
    let product = whole.checked_mul(one)?.checked_add(parts)?.checked_mul(factor.into())?;
    product.is_multiple_of(one).then(|| u64::try_from(product / one).ok()).flatten()
}

const TIMES: &[(&str, u64)] = &[("ns", 1), ("us", 1_000), ("ms", 1_000_000), ("s", 1_000_000_000)];
const SIZES: &[(&str, u64)] = &[("B", 1), ("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)];
const RATES: &[(&str, u64)] = &[("MB/s", 1), ("GB/s", 1_000), ("TB/s", 1_000_000)];

impl Value for Duration {
    const FORM: &'static str = "a time such as `1.2 us`";

    fn read(&mut self, text: &str) -> bool {
        scaled(text, TIMES).map(|nanos| *self = Self::from_nanos(nanos)).is_some()
    }

    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ns", nanos(*self))
    }
}

impl Value for Rate {
    const FORM: &'static str = "a rate such as `55.1 GB/s`";

    fn read(&mut self, text: &str) -> bool {
        let rate = scaled(text, RATES).filter(|&rate| rate > 0);
        rate.map(|mb_per_s| *self = Self { mb_per_s }).is_some()
    }

    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl Value for Curve {
    const FORM: &'static str = "sizes and times such as `1 MiB: 650 us, 16 MiB: 5.6 ms`";

    fn read(&mut self, text: &str) -> bool {
        let point = |text: &str| {
            let (bytes, time) = text.split_once(':')?;
            Some((scaled(bytes, SIZES)?, Duration::from_nanos(scaled(time, TIMES)?)))
        };
        let points: Option<Vec<_>> = text.split(',').map(point).collect();
        points.map(|points| *self = Self::new(&points)).is_some()
    }

    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl Value for u32 {
    const FORM: &'static str = "a number from 1 to 1000000";

    fn read(&mut self, text: &str) -> bool {
        let number = text.parse().ok().filter(|number| (1..=1_000_000).contains(number));
        number.map(|number| *self = number).is_some()
    }

    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl Value for String {
    const FORM: &'static str = "a name";

    fn read(&mut self, text: &str) -> bool {
        let name = if text.starts_with('"') { unquoted(text) } else { Some(text.to_owned()) };
        let Some(name) = name.filter(|_| !text.is_empty()) else { return false };
        *self = name;
        true
    }

    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_plain = !self.is_empty() && self.trim() == self && !self.contains(QUOTED);
        if is_plain {
            return f.write_str(self);
        }
        f.write_str("\"")?;
        for c in self.chars() {
            match ESCAPES.iter().find(|(_, escaped)| *escaped == c) {
                Some((letter, _)) => write!(f, "\\{letter}")?,
                None => write!(f, "{c}")?,
            }
        }
        f.write_str("\"")
    }
}

/// Characters of a name that is written between quotation marks: the name, or what is behind it,
/// would be read as something else.
const QUOTED: [char; 4] = ['#', '"', '\n', '\r'];

/// Characters between quotation marks that are written as a backslash and a letter.
const ESCAPES: [(char, char); 4] = [('"', '"'), ('\\', '\\'), ('n', '\n'), ('r', '\r')];

/// What stands between quotation marks.
fn unquoted(text: &str) -> Option<String> {
    let mut chars = text.strip_prefix('"')?.chars();
    let mut name = String::new();
    loop {
        match chars.next()? {
            '"' => return chars.as_str().is_empty().then_some(name),
            '\\' => {
                let letter = chars.next()?;
                name.push(ESCAPES.iter().find(|(escape, _)| *escape == letter)?.1);
            }
            c => name.push(c),
        }
    }
}

/// The line up to its comment, which begins with a `#` outside of quotation marks.
pub(super) fn without_comment(line: &str) -> &str {
    let (mut is_quoted, mut is_escaped) = (false, false);
    let begins = |c: char| {
        let ends = c == '#' && !is_quoted;
        is_quoted ^= c == '"' && !is_escaped;
        is_escaped = is_quoted && c == '\\' && !is_escaped;
        ends
    };
    line.split(begins).next().unwrap_or_default()
}
