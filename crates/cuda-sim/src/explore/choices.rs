//! The decisions where several things could happen next, and the record of these decisions.

use crate::random::Random;

/// Denominator of the host's chances: a random schedule gives the host 0 to 4 of these chances to
/// run ahead of the device.
const HOST_CHANCES: usize = 4;

/// The decisions of one schedule, past and future.
///
/// A decision is a number below the number of options. A point with only one option is not a
/// decision.
#[derive(Debug)]
pub(crate) struct Choices {
    source: Source,
    taken: Vec<Taken>,
    /// Maximum number of decisions that are recorded and varied.
    most: usize,
    misfit: Option<Misfit>,
    /// Whether there were decisions beyond `most`, which were not varied.
    cut: bool,
    /// Handles that a query found unfinished since the last operation ran.
    unready: Vec<u64>,
    /// A line for each thing that happened, if the caller asked for them.
    trace: Option<Vec<String>>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Taken {
    pub(crate) chosen: u32,
    pub(crate) options: u32,
}

/// A decision of the script that the program does not offer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Misfit {
    pub(crate) position: usize,
    pub(crate) chosen: u32,
    pub(crate) options: u32,
}

#[derive(Debug)]
enum Source {
    /// The scripted decisions, then always the first option.
    Script(Vec<u32>),
    Random {
        random: Random,
        /// Chances, of [`HOST_CHANCES`], that the host continues where it may.
        host: usize,
    },
}

impl Choices {
    /// Follows `script`, then always takes the first option: the host continues, or the oldest
    /// stream runs.
    pub(crate) fn scripted(script: Vec<u32>, most: usize) -> Self {
        Self::new(Source::Script(script), most)
    }

    /// Decides at random from `seed`. The seed also chooses how far the host tends to run ahead.
    pub(crate) fn random(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let host = random.below(HOST_CHANCES + 1);
        Self::new(Source::Random { random, host }, usize::MAX)
    }

    fn new(source: Source, most: usize) -> Self {
        Self {
            source,
            taken: Vec::new(),
            most,
            misfit: None,
            cut: false,
            unready: Vec::new(),
            trace: None,
        }
    }

    pub(crate) fn with_trace(mut self) -> Self {
        self.trace = Some(Vec::new());
        self
    }

    pub(crate) fn stream(&mut self, streams: usize) -> usize {
        let wish = match &mut self.source {
            Source::Script(_) => 0,
            Source::Random { random, .. } => random.below(streams),
        };
        self.decide(wish, streams)
    }

    /// Chooses one of `streams` ready streams, or `None` if the host continues.
    pub(crate) fn host_or_stream(&mut self, streams: usize) -> Option<usize> {
        let wish = match &mut self.source {
            Source::Script(_) => 0,
            Source::Random { random, host } => {
                if random.below(HOST_CHANCES) < *host {
                    0
                } else {
                    1 + random.below(streams)
                }
            }
        };
        self.decide(wish, streams + 1).checked_sub(1)
    }

    /// Takes the script's next decision, or `wish` if there is no script or it has ended.
    fn decide(&mut self, wish: usize, options: usize) -> usize {
        if options < 2 {
            return 0;
        }
        let position = self.taken.len();
        if position == self.most {
            self.cut = true;
            return wish;
        }
        let options = options as u32;
        let mut chosen = match &self.source {
            Source::Script(script) => script.get(position).copied().unwrap_or(wish as u32),
            Source::Random { .. } => wish as u32,
        };
        if chosen >= options {
            self.misfit.get_or_insert(Misfit { position, chosen, options });
            chosen = options - 1;
        }
        self.taken.push(Taken { chosen, options });
        chosen as usize
    }

    /// Records that a query of `handle` found it unfinished. Returns true if a query already did
    /// and nothing has run since. A further query without progress would give the same schedule,
    /// only longer, without end.
    pub(crate) fn found_unready(&mut self, handle: u64) -> bool {
        let again = self.unready.contains(&handle);
        if !again {
            self.unready.push(handle);
        }
        again
    }

    pub(crate) fn advanced(&mut self) {
        self.unready.clear();
    }

    pub(crate) fn is_tracing(&self) -> bool {
        self.trace.is_some()
    }

    pub(crate) fn trace(&mut self, line: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            trace.push(line());
        }
    }

    pub(crate) fn into_record(self) -> Record {
        Record {
            taken: self.taken,
            misfit: self.misfit,
            cut: self.cut,
            trace: self.trace.unwrap_or_default(),
        }
    }
}

/// The record of a schedule that has ended.
#[derive(Debug, Default)]
pub(crate) struct Record {
    pub(crate) taken: Vec<Taken>,
    pub(crate) misfit: Option<Misfit>,
    pub(crate) cut: bool,
    pub(crate) trace: Vec<String>,
}

impl Record {
    /// The script of the next schedule in depth-first order; `None` after the last one.
    pub(crate) fn next_script(&self) -> Option<Vec<u32>> {
        let last = self.taken.iter().rposition(|taken| taken.chosen + 1 < taken.options)?;
        let mut script: Vec<u32> = self.taken[..=last].iter().map(|taken| taken.chosen).collect();
        script[last] += 1;
        Some(script)
    }
}
