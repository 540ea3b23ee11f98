//! Records which bytes of device memory were ever written. A load of any other byte is a bug: it
//! reads whatever was in memory before.

/// The written bytes of one allocation or physical handle, page by page.
///
/// Most pages are soon fully written, and a store then costs one comparison.
#[derive(Debug)]
pub(super) struct Initialised {
    /// One entry for each page; empty if writes are not tracked.
    pages: Box<[WrittenBytes]>,
}

#[derive(Clone, Debug)]
enum WrittenBytes {
    Nothing,
    Some(Bits),
    All,
}

#[derive(Clone, Debug)]
struct Bits {
    words: Box<[u64]>,
    /// Number of bytes of the page that are not written.
    missing: u64,
}

impl Initialised {
    /// Creates the record of `pages` unwritten pages. With `track` off, every byte counts as
    /// written.
    pub(super) fn new(pages: usize, track: bool) -> Self {
        Self {
            pages: vec![WrittenBytes::Nothing; if track { pages } else { 0 }].into_boxed_slice(),
        }
    }

    /// Marks `start..end` of a page of `len` bytes as written.
    #[inline]
    pub(super) fn written(&mut self, page: usize, (start, end): (u64, u64), len: u64) {
        match self.pages.get_mut(page) {
            None | Some(WrittenBytes::All) => {}
            Some(written) => written.add(start, end, len),
        }
    }

    /// Marks `start..end` of a page of `len` bytes as never written.
    #[cold]
    pub(super) fn forgotten(&mut self, page: usize, (start, end): (u64, u64), len: u64) {
        if let Some(written) = self.pages.get_mut(page) {
            written.remove(start, end, len);
        }
    }

    /// The first run of never-written bytes in `start..end` of a page.
    #[inline]
    pub(super) fn gap(&self, page: usize, start: u64, end: u64) -> Option<(u64, u64)> {
        match self.pages.get(page) {
            None | Some(WrittenBytes::All) => None,
            Some(WrittenBytes::Nothing) => (start < end).then_some((start, end)),
            Some(WrittenBytes::Some(bits)) => {
                let from = bits.find(start, end, false);
                (from < end).then(|| (from, bits.find(from, end, true)))
            }
        }
    }
}

impl WrittenBytes {
    fn add(&mut self, start: u64, end: u64, len: u64) {
        if end - start == len {
            *self = Self::All;
            return;
        }
        if let Self::Nothing = self {
            let words = vec![0; len.div_ceil(64) as usize].into_boxed_slice();
            *self = Self::Some(Bits { words, missing: len });
        }
        if let Self::Some(bits) = self {
            bits.set(start, end);
            if bits.missing == 0 {
                *self = Self::All;
            }
        }
    }

    fn remove(&mut self, start: u64, end: u64, len: u64) {
        if let Self::All = self {
            let words = vec![u64::MAX; len.div_ceil(64) as usize].into_boxed_slice();
            *self = Self::Some(Bits { words, missing: 0 });
        }
        if let Self::Some(bits) = self {
            bits.clear(start, end);
            if bits.missing == len {
                *self = Self::Nothing;
            }
        }
    }
}

impl Bits {
    fn set(&mut self, start: u64, end: u64) {
        for (index, mask) in masks(start, end) {
            let word = &mut self.words[index];
            self.missing -= u64::from((!*word & mask).count_ones());
            *word |= mask;
        }
    }

    fn clear(&mut self, start: u64, end: u64) {
        for (index, mask) in masks(start, end) {
            let word = &mut self.words[index];
            self.missing += u64::from((*word & mask).count_ones());
            *word &= !mask;
        }
    }

    /// The first bit of `start..end` with the value `value`, or `end`.
    fn find(&self, start: u64, end: u64, value: bool) -> u64 {
        for (index, mask) in masks(start, end) {
            let word = if value { self.words[index] } else { !self.words[index] };
            if word & mask != 0 {
                return index as u64 * 64 + u64::from((word & mask).trailing_zeros());
            }
        }
        end
    }
}

/// The words that overlap `start..end`, each with a mask of the overlapping bits.
fn masks(start: u64, end: u64) -> impl Iterator<Item = (usize, u64)> {
    (start / 64..end.div_ceil(64)).map(move |index| {
        let low = start.saturating_sub(index * 64);
        let high = (end - index * 64).min(64);
        (index as usize, u64::MAX << low & u64::MAX >> (64 - high))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: u64 = 1000;

    /// For each byte, whether it is outside all gaps.
    fn bytes(initialised: &Initialised) -> Vec<bool> {
        (0..LEN).map(|at| initialised.gap(0, at, at + 1).is_none()).collect()
    }

    #[test]
    fn bits_are_what_a_list_of_bytes_is() {
        let mut random = kv_testkit::Random::new(1);
        let mut below = |end| random.below(end);
        let mut tracked = Initialised::new(1, true);
        let mut naive = vec![false; LEN as usize];
        for step in 0..3000 {
            let start = below(LEN);
            let most = [8, 70, LEN][below(3) as usize];
            let end = start + 1 + below((LEN - start).min(most));
            let write = below(8) > 0;
            if write {
                tracked.written(0, (start, end), LEN);
            } else {
                tracked.forgotten(0, (start, end), LEN);
            }
            naive[start as usize..end as usize].fill(write);
            assert_eq!(bytes(&tracked), naive, "step {step}");
            let start = below(LEN) as usize;
            let first = naive[start..].iter().position(|&written| !written);
            let gap = first.map(|skip| {
                let from = start + skip;
                let run = naive[from..].iter().take_while(|&&written| !written).count();
                (from as u64, (from + run) as u64)
            });
            assert_eq!(tracked.gap(0, start as u64, LEN), gap, "step {step}");
        }
        tracked.written(0, (0, 999), LEN);
        tracked.written(0, (999, LEN), LEN);
        assert!(
            matches!(tracked.pages[0], WrittenBytes::All),
            "a fully written page keeps no bits"
        );
    }
}
