//! Random growth, shrinking, leases and failures against a naive model. The message contains the
//! seed.

use std::collections::{BTreeMap, BTreeSet};

use crate::common::{Machine, PAGE, machine_of_races, machine_with, recorded};
use cuda_driver::{ErrorCode, Fence, Stream};
use cuda_vmm::sequences::{RoomError, Sequence, SequenceSpace, SpaceOptions};
use cuda_vmm::{GrowError, Lease, Worker};

/// The expected pool: number of mapped pages, and for each retirement its pages and the youngest
/// lease that it waits for.
#[derive(Default)]
struct Model {
    ready: u64,
    mapped: u64,
    retiring: Vec<(std::ops::Range<u64>, u64)>,
    /// The end of the blocks that a shrink took out of use and left mapped, and the youngest lease
    /// that they wait for.
    parked: Option<(u64, u64)>,
}

const BLOCK: u64 = PAGE / 3 + 5;
const CAPACITY: u64 = 100;

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

impl Model {
    /// Drops retirements whose leases, all those numbered up to theirs, are closed.
    fn poll(&mut self, open: &[(u64, Lease)]) -> u64 {
        let mut unmapped = 0;
        self.retiring.retain(|(pages, last)| {
            let held = open.iter().any(|(number, _)| number <= last);
            unmapped += if held { 0 } else { pages.end - pages.start };
            held
        });
        unmapped
    }

    fn retiring_pages(&self) -> u64 {
        self.retiring.iter().map(|(pages, _)| pages.end - pages.start).sum()
    }

    fn grow(&mut self, blocks: u64, open: &[(u64, Lease)]) -> Result<u64, GrowError> {
        if blocks > CAPACITY {
            return Err(GrowError::OverCapacity {
                asked_blocks: blocks,
                capacity_blocks: CAPACITY,
            });
        }
        if blocks <= self.ready {
            return Ok(self.ready);
        }
        self.adopt(blocks, open);
        if blocks <= self.ready {
            return Ok(self.ready);
        }
        if self.parked.is_some() {
            let index = (self.ready * BLOCK).div_ceil(PAGE);
            return Err(GrowError::Retiring { index, ready_blocks: self.ready });
        }
        let wanted = (blocks * BLOCK).div_ceil(PAGE);
        if wanted > self.mapped {
            self.poll(open);
            let blocked = self.retiring.iter().map(|(pages, _)| pages.start).min();
            if let Some(index) = blocked.filter(|&index| index < wanted) {
                return Err(GrowError::Retiring { index, ready_blocks: self.ready });
            }
            self.mapped = wanted;
        }
        self.ready = (self.mapped * PAGE / BLOCK).min(CAPACITY);
        Ok(self.ready)
    }

    /// Takes back blocks that share a page with ready ones, once their leases are closed.
    fn adopt(&mut self, blocks: u64, open: &[(u64, Lease)]) {
        let at_rest = |last| open.iter().all(|&(number, _)| number > last);
        if let Some((end, _)) = self.parked.filter(|&(_, last)| at_rest(last)) {
            self.ready = self.ready.max(blocks.min(end));
            self.parked = self.parked.filter(|_| self.ready < end);
        }
    }

    fn shrink(&mut self, blocks: u64, last_lease: u64) {
        if blocks >= self.ready {
            return;
        }
        let keep = (blocks * BLOCK).div_ceil(PAGE);
        if keep < self.mapped {
            self.retiring.push((keep..self.mapped, last_lease));
        }
        (self.ready, self.mapped) = (blocks, keep);
        let end = (keep * PAGE / BLOCK).min(CAPACITY);
        self.parked = (end > blocks).then_some((end, last_lease));
    }
}

fn run(seed: u64) {
    let machine = machine_with(1, seed);
    let pool = machine.pool(BLOCK, CAPACITY, 0);
    let (mut model, mut random) = (Model::default(), Random(seed * 2 + 1));
    let mut open: Vec<(u64, Lease)> = Vec::new();
    let mut leases = 0;
    for step in 0..150 {
        let at = format!("seed {seed}, step {step}");
        match random.below(6) {
            0 | 1 => {
                let blocks = random.below(CAPACITY + 3);
                if random.below(4) == 0 {
                    machine.sim.fail_nth("cuMemMap", 1 + random.below(9), ErrorCode::INVALID_VALUE);
                }
                let grown = pool.grow_to(blocks);
                if !matches!(grown, Err(GrowError::Device { .. })) {
                    assert_eq!(grown, model.grow(blocks, &open), "{at}");
                } else {
                    // The model adopts and collects too. Apart from that, nothing may have changed.
                    model.adopt(blocks, &open);
                    model.poll(&open);
                }
            }
            2 => {
                let blocks = random.below(CAPACITY + 1);
                pool.shrink_to(blocks, &[]).unwrap();
                model.shrink(blocks, leases);
            }
            3 => {
                leases += 1;
                open.push((leases, pool.gate().lease()));
            }
            4 if !open.is_empty() => {
                let index = random.below(open.len() as u64) as usize;
                machine.end(open.swap_remove(index).1);
            }
            _ => {
                let report = pool.poll_retired();
                assert_eq!(report.unmapped_pages, model.poll(&open), "{at}");
                assert!(report.failed.is_empty(), "{at}");
            }
        }
        let (stats, pages) = (pool.stats(), pool.pages().stats());
        assert_eq!(stats.ready_blocks, model.ready, "{at}");
        assert_eq!(stats.mapped_bytes, model.mapped * PAGE, "{at}");
        assert_eq!(stats.retiring_bytes, model.retiring_pages() * PAGE, "{at}");
        assert_eq!(pages.in_use, model.mapped + model.retiring_pages(), "{at}");
        assert_eq!(machine.sim.device_used_bytes(0), pages.live * PAGE, "{at}");
    }
    drop(open);
    let report = pool.close(&[]).wait().unwrap();
    assert!(report.is_clean(), "seed {seed}: {:?}", report.errors);
    machine.assert_clean();
}

#[test]
fn the_pool_does_what_the_model_does() {
    (0..150).for_each(run);
}

/// Rows of a seat, each with four tokens.
const ROWS: u64 = 4;
const SEATS: u64 = 3;
const STREAMS: usize = 5;

/// A space, and who uses its rows as the test knows it.
struct Seats {
    machine: Machine,
    worker: Worker,
    space: SequenceSpace,
    streams: Vec<Stream>,
    look_ahead: u64,
    /// Whether leases cover every use, in place of fences that shrinks and ends are told of.
    leased: bool,
    live: Vec<Live>,
    /// The work that has not ended, by its stream.
    running: BTreeMap<usize, Work>,
    told: Vec<Told>,
    /// Seats of dropped sequences whose users nobody has named.
    unknown: BTreeSet<u64>,
    works: u64,
    at: String,
}

struct Live {
    sequence: Sequence,
    rows: u64,
    exposed: bool,
    shrunk: bool,
}

struct Work {
    number: u64,
    seat: u64,
    row: u64,
    fence: Fence,
    told: bool,
}

/// The work that the space was told of at once: it uses rows before `end`.
struct Told {
    seat: u64,
    end: u64,
    works: Vec<u64>,
}

impl Seats {
    fn new(seed: u64) -> Self {
        let (machine, worker, look_ahead) = (machine_of_races(), Worker::manual(), seed % 4);
        let options = SpaceOptions {
            sequences: SEATS,
            planes: 1,
            token_bytes: PAGE / 4,
            tokens_max: 4 * ROWS,
            look_ahead_tokens: look_ahead,
            ..SpaceOptions::default()
        };
        let space = SequenceSpace::new(&machine.pages(64), &worker, options).unwrap();
        let streams = (0..=STREAMS).map(|_| machine.stream()).collect();
        let (live, running, told, unknown) = Default::default();
        let (leased, at) = (seed % 3 == 2, String::new());
        Self {
            machine,
            worker,
            space,
            streams,
            look_ahead,
            leased,
            live,
            running,
            told,
            unknown,
            works: 0,
            at,
        }
    }

    fn rows(&self, tokens: u64) -> u64 {
        (tokens + self.look_ahead).min(4 * ROWS).div_ceil(4)
    }

    /// The end of the rows of a seat that work uses of which the space was told.
    fn told_end(&self, seat: u64) -> u64 {
        let runs = |number: &u64| self.running.values().any(|work| work.number == *number);
        let told = self.told.iter().filter(|told| told.seat == seat && told.works.iter().any(runs));
        told.map(|told| told.end).max().unwrap_or(0)
    }

    /// The end of the rows of a seat that work really uses.
    fn used_end(&self, seat: u64) -> u64 {
        let used = self.running.values().filter(|work| work.seat == seat);
        used.map(|work| work.row + 1).max().unwrap_or(0)
    }

    fn is_live(&self, seat: u64) -> bool {
        self.live.iter().any(|one| one.sequence.seat() == seat)
    }

    /// Tells of the work on a seat that nobody was told of yet; returns its fences.
    fn tell(&mut self, seat: u64, end: u64) -> Vec<Fence> {
        let leased = self.leased;
        let mine = |work: &&mut Work| leased || (work.seat == seat && !work.told);
        let new: Vec<_> = self.running.values_mut().filter(mine).collect();
        let (mut fences, mut works) = (Vec::new(), Vec::new());
        for work in new {
            work.told = true;
            works.push(work.number);
            fences.push(work.fence.clone());
        }
        self.told.push(Told { seat, end, works });
        // Another stream whose work is over, so that the list is never empty.
        let calm = recorded(&self.streams[STREAMS]);
        calm.wait().unwrap();
        fences.push(calm);
        if leased { Vec::new() } else { fences }
    }

    fn admit(&mut self, tokens: u64) {
        match self.space.admit(tokens) {
            Ok(sequence) => {
                let seat = sequence.seat();
                let busy = self.is_live(seat) || self.unknown.contains(&seat);
                assert!(!busy && self.told_end(seat) == 0, "{}: seat {seat} has users", self.at);
                assert_eq!(self.used_end(seat), 0, "{}: seat {seat} is in use", self.at);
                let rows = if tokens == 0 { 0 } else { self.rows(tokens) };
                self.live.push(Live { sequence, rows, exposed: false, shrunk: false });
            }
            Err(RoomError::NoSeat { .. }) => {
                let busy = |&seat: &u64| self.is_live(seat) || self.unknown.contains(&seat);
                let told = |seat| {
                    let mut told = self.told.iter().filter(|told| told.seat == seat);
                    let runs = |number| self.running.values().any(|work| work.number == number);
                    told.any(|told| told.works.iter().copied().any(runs))
                };
                let free = (0..SEATS).find(|seat| !busy(seat) && !told(*seat));
                assert_eq!(free, None, "{}: a seat at rest was refused", self.at);
            }
            Err(error) => panic!("{}: {error}", self.at),
        }
    }

    /// Begins work on one token of a sequence. It ends when the test says so.
    fn use_token(&mut self, index: usize, token: u64, stream: usize) {
        let one = &mut self.live[index];
        let ready = one.sequence.ready_tokens().min(one.sequence.tokens());
        if ready == 0 || self.running.contains_key(&stream) {
            return;
        }
        let lease = self.leased.then(|| self.space.gate().lease());
        let token = token % ready;
        let view = one.sequence.plane(0).unwrap();
        // Each stream has bytes of its own, so that only mappings have to be ordered.
        let span = view.span(token..token + 1).unwrap().slice(64 * stream as u64, 64).unwrap();
        let by = &self.streams[stream];
        self.machine.sim.hold(by.raw());
        by.fill(span, 7).unwrap();
        let fence = recorded(by);
        if let Some(lease) = lease {
            lease.submitted(std::slice::from_ref(&fence)).unwrap();
        }
        one.exposed = true;
        self.works += 1;
        let (number, seat, row) = (self.works, one.sequence.seat(), token / 4);
        self.running.insert(stream, Work { number, seat, row, fence, told: false });
    }

    fn end_work(&mut self, stream: usize) {
        if self.running.remove(&stream).is_some() {
            self.machine.sim.release_hold(self.streams[stream].raw());
            let ended = self.streams[stream].synchronize();
            let (faults, races) = (self.machine.sim.findings(), self.machine.sim.races());
            assert!(ended.is_ok() && faults.is_empty(), "{}: {faults:?}", self.at);
            assert!(races.is_empty(), "{}: {races:?}", self.at);
        }
    }

    fn shrink(&mut self, index: usize, tokens: u64) {
        let (one, rows) = (&self.live[index], self.rows(tokens));
        if tokens >= one.sequence.tokens() && rows >= one.rows {
            return;
        }
        let (seat, end) = (one.sequence.seat(), one.rows);
        let fences = self.tell(seat, end);
        let one = &mut self.live[index];
        one.sequence.shrink_to(tokens, &fences).unwrap();
        (one.rows, one.shrunk) = (one.rows.min(rows), true);
    }

    fn leave(&mut self, index: usize, named: bool) {
        let Live { sequence, rows, exposed, .. } = self.live.swap_remove(index);
        let seat = sequence.seat();
        if named {
            let fences = self.tell(seat, rows);
            sequence.finish(&fences);
        } else {
            match (exposed, self.leased) {
                (true, true) => _ = self.tell(seat, rows),
                (true, false) => _ = self.unknown.insert(seat),
                (false, _) => self.told.retain(|told| told.seat != seat),
            }
            drop(sequence);
        }
    }

    fn recover(&mut self) {
        let (seats, first) = (std::mem::take(&mut self.unknown), self.told.len());
        let fences: Vec<_> = seats.iter().flat_map(|&seat| self.tell(seat, ROWS)).collect();
        // Each of the seats waits for all of them.
        let works: Vec<_> = self.told[first..].iter().flat_map(|told| told.works.clone()).collect();
        self.told[first..].iter_mut().for_each(|told| told.works.clone_from(&works));
        let recovered = self.space.recover(&fences).map_err(|error| error.fences);
        assert_eq!(recovered, Ok(seats.len() as u64), "{}", self.at);
    }

    fn quiesce(&mut self) {
        for _ in 0..200 {
            if !self.worker.poll() {
                break;
            }
        }
        let (mut least, mut most) = (0, 0);
        for one in &self.live {
            let seat = one.sequence.seat();
            least += one.rows.max(self.used_end(seat));
            most += if one.shrunk { one.rows.max(self.told_end(seat)) } else { ROWS };
        }
        let mapped = self.space.stats().mapped_bytes / PAGE;
        assert!((least..=most).contains(&mapped), "{}: {mapped} of {least}..{most}", self.at);
    }

    fn trim(&mut self) {
        self.quiesce();
        assert!(self.space.trim(u64::MAX).unwrap().failed.is_empty(), "{}", self.at);
        let stats = self.space.stats();
        let most: u64 =
            self.live.iter().map(|one| one.rows.max(self.told_end(one.sequence.seat()))).sum();
        assert!(stats.mapped_bytes <= most * PAGE, "{}: {stats:?}, {most} rows", self.at);
        let gone = |seat: &u64| !self.is_live(*seat);
        let (mut least, mut most) = (0, 0);
        for seat in (0..SEATS).filter(gone) {
            least += self.used_end(seat);
            most += if self.unknown.contains(&seat) { ROWS } else { self.told_end(seat) };
        }
        let parked = stats.parked_bytes / PAGE;
        assert!((least..=most).contains(&parked), "{}: {parked} of {least}..{most}", self.at);
    }

    fn act(&mut self, random: &mut Random) {
        let (tokens, stream) = (random.below(4 * ROWS + 1), random.below(STREAMS as u64) as usize);
        let one = random.below(self.live.len().max(1) as u64) as usize;
        match random.below(16) {
            0 | 1 => self.admit(tokens),
            2 => self.quiesce(),
            3 | 4 => _ = self.worker.poll(),
            5 | 6 => self.end_work(stream),
            7 if random.below(3) == 0 => self.recover(),
            8 if random.below(3) == 0 => self.trim(),
            _ if self.live.is_empty() => {}
            9 | 10 => {
                let rows = self.rows(tokens);
                let one = &mut self.live[one];
                let by_worker = random.below(2) == 0;
                // Refused or not, the demand counts.
                let sequence = &mut one.sequence;
                let _ = if by_worker {
                    sequence.extend_to(tokens)
                } else {
                    sequence.extend_blocking(tokens)
                };
                if tokens > 0 {
                    one.rows = one.rows.max(rows);
                }
            }
            11 | 12 => self.use_token(one, tokens, stream),
            13 | 14 => self.shrink(one, tokens),
            _ => self.leave(one, random.below(3) > 0),
        }
    }

    fn close(mut self) {
        (0..STREAMS).for_each(|stream| self.end_work(stream));
        self.quiesce();
        while !self.live.is_empty() {
            self.leave(0, true);
        }
        self.recover();
        self.trim();
        assert_eq!(self.space.stats().parked_bytes, 0, "{}", self.at);
        let Self { machine, worker, space, streams, told, .. } = self;
        assert!(space.close(&[]).unwrap().try_complete().unwrap().is_clean());
        worker.close();
        drop((streams, told));
        machine.assert_clean();
    }
}

#[test]
fn no_seat_is_lost_or_given_away_under_work_whatever_sequences_do_and_however_late_the_device_is() {
    for seed in 0..400 {
        let (mut seats, mut random) = (Seats::new(seed), Random(seed * 2 + 1));
        for step in 0..120 {
            seats.at = format!("seed {seed}, step {step}");
            seats.act(&mut random);
        }
        seats.close();
    }
}
