//! Who decides at each point where more than one thing could happen next, and the record of it.

use crate::random::Random;

/// Of four chances, how many a random schedule gives the host at most, to run ahead of the device.
const HOST_CHANCES: usize = 4;

/// The decisions of one schedule, taken so far and to be taken.
///
/// A decision is a number below the number of options there were; points with one option are none.
#[derive(Debug)]
pub(crate) struct Choices {
    source: Source,
    taken: Vec<Taken>,
    /// Most decisions that are recorded and varied.
    most: usize,
    misfit: Option<Misfit>,
    /// Decisions beyond `most`, which were not varied.
    cut: bool,
    /// Handles that a query found unfinished since the last operation ran.
    unready: Vec<u64>,
    /// What happened, one line each, when that was asked for.
    trace: Option<Vec<String>>,
}

/// One decision.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Taken {
    pub(crate) chosen: u32,
    pub(crate) options: u32,
}

/// A scripted decision that the program does not offer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Misfit {
    pub(crate) position: usize,
    pub(crate) chosen: u32,
    pub(crate) options: u32,
}

#[derive(Debug)]
enum Source {
    /// These decisions, then always the first option.
    Script(Vec<u32>),
    Random {
        random: Random,
        /// Chances in [`HOST_CHANCES`] that the host goes on where it may.
        host: usize,
    },
}

impl Choices {
    /// Takes `script`, then always the first option: the host goes on, or the oldest stream.
    pub(crate) fn scripted(script: Vec<u32>, most: usize) -> Self {
        Self::new(Source::Script(script), most)
    }

    /// Takes chances from `seed`: how far the host tends to run ahead is one of them.
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

    /// One of `streams` ready streams.
    pub(crate) fn stream(&mut self, streams: usize) -> usize {
        let wish = match &mut self.source {
            Source::Script(_) => 0,
            Source::Random { random, .. } => random.below(streams),
        };
        self.decide(wish, streams)
    }

    /// One of `streams` ready streams, or `None` for the host to go on.
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

    /// Takes the script's next decision, or `wish` when there is no script or it has ended.
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

    /// Notes that a query of `handle` found it unfinished; true if one did so before and nothing has run
    /// since. To ask once more without letting anything run would be the same schedule, longer, for ever.
    pub(crate) fn found_unready(&mut self, handle: u64) -> bool {
        let again = self.unready.contains(&handle);
        if !again {
            self.unready.push(handle);
        }
        again
    }

    /// An operation has run.
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

/// What is left of a schedule that has ended.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Every pair of a decision of 2 and, if it was 1, one of 3.
    fn walk() -> Vec<Vec<u32>> {
        let mut seen = Vec::new();
        let mut script = Some(Vec::new());
        while let Some(next) = script {
            let mut choices = Choices::scripted(next, usize::MAX);
            if choices.host_or_stream(1).is_some() {
                choices.stream(3);
            }
            choices.stream(1);
            let record = choices.into_record();
            seen.push(record.taken.iter().map(|taken| taken.chosen).collect());
            script = record.next_script();
        }
        seen
    }

    #[test]
    fn depth_first_takes_every_branch_once() {
        assert_eq!(walk(), [vec![0], vec![1, 0], vec![1, 1], vec![1, 2]]);
    }

    #[test]
    fn a_decision_beyond_the_limit_is_not_varied() {
        let mut choices = Choices::scripted(vec![1, 1], 1);
        assert_eq!((choices.stream(2), choices.stream(2)), (1, 0));
        let record = choices.into_record();
        assert!(record.cut);
        assert_eq!(record.next_script(), None);
    }

    #[test]
    fn a_script_for_another_program_is_noticed() {
        let mut choices = Choices::scripted(vec![5], usize::MAX);
        assert_eq!(choices.stream(2), 1);
        let misfit = Misfit { position: 0, chosen: 5, options: 2 };
        assert_eq!(choices.into_record().misfit, Some(misfit));
    }

    #[test]
    fn random_schedules_reach_both_extremes() {
        let goes_on = |seed| {
            let mut choices = Choices::random(seed);
            (0..20).filter(|_| choices.host_or_stream(1).is_none()).count()
        };
        let counts: Vec<usize> = (0..50).map(goes_on).collect();
        assert!(counts.contains(&0) && counts.contains(&20), "{counts:?}");
    }
}
