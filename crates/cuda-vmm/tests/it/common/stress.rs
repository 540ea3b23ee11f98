//! Many sequences grow, shrink and finish at once on one space, while a kernel reads every byte of
//! each.
//!
//! Each thread decodes its own sequences on its own stream. When a sequence finishes, the kernel
//! that last read it may still run, and its memory goes to the next sequence that needs it. Memory
//! that is unmapped too early faults; memory reused too early shows wrong bytes.

use cuda_driver::{Device, Fence, Stream};
use cuda_vmm::Worker;
use cuda_vmm::pages::{PagePool, PagePoolOptions};
use cuda_vmm::sequences::{RoomError, Sequence, SequenceSpace, SpaceOptions, SpaceStats};

use super::ranges::{Range, Ranges};

/// The size of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) threads: u64,
    /// Number of sequences of each thread.
    pub(crate) sequences: u64,
    /// Number of tokens that each thread decodes for each of its sequences.
    pub(crate) steps: u64,
    pub(crate) planes: u64,
    /// A multiple of 8.
    pub(crate) token_bytes: u64,
    pub(crate) tokens_max: u64,
    pub(crate) look_ahead_tokens: u64,
    /// Number of pages of the pool, in percent of what all sequences at full length would need.
    pub(crate) pages_percent: u64,
    /// Number of steps between two reads of all bytes. Each sequence is also read at its end.
    pub(crate) check_every: u64,
    /// Number of thread blocks that read one range.
    pub(crate) parts: u32,
    pub(crate) seed: u64,
}

/// The counts of a run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) finished: u64,
    /// Number of sequences that ended early for lack of pages.
    pub(crate) preempted: u64,
    pub(crate) checked_bytes: u64,
    /// Descriptions of wrong bytes. The test fails with this text unless it is empty.
    pub(crate) wrong: Vec<String>,
    pub(crate) stats: SpaceStats,
}

/// Runs the plan, and closes the space. Between the steps it calls `turn` with a number from the
/// seed, which drives a worker without a thread.
pub(crate) fn run(
    device: &Device,
    worker: &Worker,
    plan: &Plan,
    turn: &(dyn Fn(u64) + Sync),
) -> Outcome {
    let unlimited = PagePoolOptions { page_bytes: None, capacity_pages: u64::MAX };
    let page_bytes = PagePool::new(device, unlimited).unwrap().page_bytes();
    let live = plan.threads * plan.sequences;
    let rows = (plan.tokens_max * plan.token_bytes).div_ceil(page_bytes);
    let capacity_pages = live * rows * plan.planes * plan.pages_percent / 100;
    let pages =
        PagePool::new(device, PagePoolOptions { page_bytes: None, capacity_pages }).unwrap();
    let options = SpaceOptions {
        // Some may be parked while all others are live.
        sequences: live + live / 4 + 1,
        planes: plan.planes,
        token_bytes: plan.token_bytes,
        tokens_max: plan.tokens_max,
        look_ahead_tokens: plan.look_ahead_tokens,
        ..SpaceOptions::default()
    };
    let space = SequenceSpace::new(&pages, worker, options).unwrap();
    let mut outcome = Outcome::default();
    std::thread::scope(|scope| {
        let decoders: Vec<_> = (0..plan.threads)
            .map(|thread| {
                let space = &space;
                scope.spawn(move || Decoder::new(device, space, plan, thread).decode(turn))
            })
            .collect();
        for decoder in decoders {
            let part = decoder.join().unwrap();
            outcome.finished += part.finished;
            outcome.preempted += part.preempted;
            outcome.checked_bytes += part.checked_bytes;
            outcome.wrong.extend(part.wrong);
        }
    });
    outcome.stats = space.stats();
    let report = space.close(&[]).unwrap().wait().unwrap();
    assert!(report.is_clean(), "{report:?}");
    assert_eq!(pages.stats().in_use, 0, "pages are still in use");
    outcome
}

struct Decoder<'a> {
    space: &'a SequenceSpace,
    plan: &'a Plan,
    stream: Stream,
    ranges: Ranges,
    random: Random,
    live: Vec<Live>,
    incarnation: u64,
    outcome: Outcome,
}

struct Live {
    sequence: Sequence,
    key: u64,
    tokens: u64,
    /// Number of written tokens among them.
    written: u64,
    /// Whether it gives up a part of its memory after this step, which reads all of it.
    gives_up: bool,
}

impl<'a> Decoder<'a> {
    fn new(device: &Device, space: &'a SequenceSpace, plan: &'a Plan, thread: u64) -> Self {
        Self {
            space,
            plan,
            stream: Stream::new(device).unwrap(),
            ranges: Ranges::new(device, plan.sequences * plan.planes),
            random: Random(plan.seed.wrapping_add(thread).wrapping_mul(2) | 1),
            live: Vec::new(),
            incarnation: thread << 32,
            outcome: Outcome::default(),
        }
    }

    fn decode(mut self, turn: &(dyn Fn(u64) + Sync)) -> Outcome {
        for step in 0..self.plan.steps {
            self.admit();
            turn(self.random.next());
            self.extend();
            // The result of the last step. Its kernel may have been running until here.
            self.collect(step);
            self.submit(step % self.plan.check_every == 0);
            self.give_some_up();
            turn(self.random.next());
            self.leave_some();
            if self.random.below(97) == 0 {
                let report = self.space.trim(self.random.below(1 << 26)).unwrap();
                assert!(report.failed.is_empty() && report.errors.is_empty(), "{report:?}");
            }
        }
        self.collect(self.plan.steps);
        self.submit(true);
        self.collect(self.plan.steps);
        for live in self.live.drain(..) {
            live.sequence.finish(&[]);
        }
        self.outcome
    }

    fn admit(&mut self) {
        while (self.live.len() as u64) < self.plan.sequences {
            let tokens = 1 + self.random.below(self.plan.tokens_max / 4);
            let sequence = match self.space.admit(tokens) {
                Ok(sequence) => sequence,
                Err(RoomError::NoSeat { .. }) => return,
                Err(error) => panic!("{error}"),
            };
            self.incarnation += 1;
            let key = self.incarnation.wrapping_mul(0xD6E8_FEB8_6659_FD93);
            // The first extension adds one token.
            self.live.push(Live { sequence, key, tokens: tokens - 1, written: 0, gives_up: false });
        }
    }

    /// Adds one token to each sequence. Makes driver calls on this thread only if necessary.
    fn extend(&mut self) {
        let mut index = 0;
        while index < self.live.len() {
            let live = &mut self.live[index];
            let tokens = match self.random.below(61) {
                // Rejected speculative tokens.
                0 => live.tokens - self.random.below(live.tokens / 4 + 1),
                _ => live.tokens + 1,
            };
            let extended = match live.sequence.extend_to(tokens) {
                Err(RoomError::NotReady { .. }) => live.sequence.extend_blocking(tokens),
                other => other,
            };
            match extended {
                Ok(()) => {
                    live.tokens = tokens;
                    live.written = live.written.min(tokens);
                    live.gives_up = self.random.below(31) == 0;
                    index += 1;
                }
                Err(RoomError::NotReady { .. }) => {
                    self.outcome.preempted += 1;
                    self.live.swap_remove(index).sequence.finish(&[]);
                }
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn collect(&mut self, step: u64) {
        for (range, count) in self.ranges.wrong(&self.stream).into_iter().enumerate() {
            if count != 0 && self.outcome.wrong.len() < 10 {
                let text = format!("before step {step}, range {range}: {count} words are wrong");
                self.outcome.wrong.push(text);
            }
        }
    }

    fn submit(&mut self, check: bool) {
        let lease = self.space.gate().lease();
        let (mut stamps, mut checks) = (Vec::new(), Vec::new());
        let word = self.plan.token_bytes / 8;
        for live in &mut self.live {
            for plane in 0..self.plan.planes {
                let span = live.sequence.plane(plane).unwrap();
                let (address, key) = (span.address(), live.key + plane);
                let first = live.written * word;
                let words = live.tokens * word;
                let new = Range { address: address + 8 * first, words: words - first, first, key };
                stamps.extend((new.words > 0).then_some(new));
                let ends = live.tokens == self.plan.tokens_max;
                checks.extend((check || ends || live.gives_up).then_some(Range {
                    address,
                    words,
                    first: 0,
                    key,
                }));
            }
            live.written = live.tokens;
        }
        self.outcome.checked_bytes += checks.iter().map(|range| 8 * range.words).sum::<u64>();
        self.ranges.enqueue(&self.stream, &stamps, &checks, self.plan.parts);
        lease.submitted(&[Fence::record(&self.stream).unwrap()]).unwrap();
    }

    /// Gives up memory while the submitted work still reads it. The lease of that work covers it.
    fn give_some_up(&mut self) {
        for live in self.live.iter_mut().filter(|live| live.gives_up) {
            live.tokens -= self.random.below(live.tokens + 1);
            live.written = live.written.min(live.tokens);
            live.sequence.shrink_to(live.tokens, &[]).unwrap();
        }
    }

    fn leave_some(&mut self) {
        let mut index = 0;
        while index < self.live.len() {
            let ends = self.live[index].tokens == self.plan.tokens_max;
            if ends || self.random.below(199) == 0 {
                self.outcome.finished += 1;
                self.live.swap_remove(index).sequence.finish(&[]);
            } else {
                index += 1;
            }
        }
    }
}

/// Marsaglia's xorshift generator.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 11
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }
}
