//! Random programs that are ordered by construction. If a step would conflict with an earlier
//! unordered one, steps that order the two come first, by one of CUDA's means.

use super::machine::LINES_MAX;
use super::oracle::Oracle;
use super::program::{
    GraphOf, Kind, Line, Place, Program, Span, Step, StreamOf, UNITS, What, Work,
};

/// A xorshift generator.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        // Mixing separates neighbouring seeds (SplitMix64). The state must not be zero.
        let mut mixed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        Self((mixed ^ (mixed >> 31)) | 1)
    }

    /// A random number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 32) % end as u64) as usize
    }

    pub fn percent(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }
}

/// Maximum number of attempts to order a step after everything that conflicts with it.
const EDGES_MAX: usize = 12;

/// Lines reserved for the last step and its edges.
const LINES_LEFT: usize = 24;

pub fn generate(seed: u64) -> Program {
    let mut random = Random::new(seed);
    let mut program = objects(&mut random, seed);
    let count = 4 + random.below(20);
    let mut generator = Generator { random, edges: 0 };
    generator.maps(&mut program);
    for _ in 0..count {
        if program.lines.len() + LINES_LEFT < LINES_MAX {
            generator.add(&mut program);
        }
    }
    generator.close(&mut program);
    program
}

fn objects(random: &mut Random, seed: u64) -> Program {
    let devices = random.of(&[1, 1, 1, 2, 2, 3]);
    let mut streams: Vec<StreamOf> = (0..devices)
        .map(|device| StreamOf { device, kind: Kind::Legacy, is_first: true })
        .collect();
    let blocking = random.of(&[0, 30, 60, 100]);
    for _ in 0..1 + random.below(8) {
        let kind = if random.percent(blocking) { Kind::Blocking } else { Kind::NonBlocking };
        streams.push(StreamOf { device: random.below(devices), kind, is_first: true });
    }
    let pages = random.of(&[0, 0, 2, 3, 4]);
    let mut handles = Vec::new();
    for _ in 0..if pages > 0 { 2 + random.below(3) } else { 0 } {
        handles.push((random.below(devices), if random.percent(15) { 2 } else { 1 }));
    }
    let alloc_count = 1 + random.below(3);
    let pinned_count = 1 + random.below(2);
    let allocs = (0..alloc_count).map(|_| random.below(devices)).collect();
    let pinned = (0..pinned_count).map(|_| (random.below(devices), random.percent(50))).collect();
    Program {
        seed,
        devices,
        implicit_waits: random.percent(50),
        sweeps: random.percent(50),
        unit: random.of(&[1, 4]),
        streams,
        events: (0..devices).chain((0..devices).filter(|_| random.percent(50))).collect(),
        allocs,
        pinned,
        pages,
        handles,
        graphs: Vec::new(),
        lines: Vec::new(),
    }
}

struct Generator {
    random: Random,
    edges: usize,
}

fn oracle(program: &Program) -> Oracle<'_> {
    let oracle = Oracle::of(program, program.lines.len(), &[]);
    oracle.unwrap_or_else(|_| panic!("the program calls what is not there:\n{program}"))
}

fn push(program: &mut Program, step: Step, edge: Option<usize>) {
    let id = program.lines.len();
    program.lines.push(Line { id, step, edge });
}

impl Generator {
    /// Maps everything that can be mapped.
    fn maps(&mut self, program: &mut Program) {
        let mut page = 0;
        while page < program.pages {
            let fitting: Vec<usize> = (0..program.handles.len())
                .filter(|&handle| page + program.handles[handle].1 <= program.pages)
                .collect();
            if fitting.is_empty() || self.random.percent(10) {
                page += 1;
                continue;
            }
            let handle = self.random.of(&fitting);
            let pages = program.handles[handle].1;
            push(program, Step::Map { page, handle }, None);
            push(program, Step::SetAccess { page, pages }, None);
            page += pages;
        }
    }

    /// Adds a step, preceded by the edges that order it.
    fn add(&mut self, program: &mut Program) {
        let Some(step) = self.step(program) else { return };
        if self.order(program, &step) {
            push(program, step, None);
        }
    }

    /// Adds edges until the step conflicts with nothing. Returns whether that succeeded.
    fn order(&mut self, program: &mut Program, step: &Step) -> bool {
        for _ in 0..EDGES_MAX {
            if program.lines.len() + 8 > LINES_MAX {
                return false;
            }
            let clashes = {
                let mut oracle = oracle(program);
                let from = oracle.accesses.len();
                if oracle.step(program.lines.len(), step, false).is_err() {
                    return false;
                }
                oracle.clashes(from)
            };
            let Some(&clash) = clashes.get(self.random.below(clashes.len().max(1))) else {
                return true;
            };
            let (Some(stream), line) = (clash.stream, clash.line) else { return false };
            let later = match step {
                Step::Enqueue { stream, .. } => Some(*stream),
                _ => None,
            };
            self.edge(program, (stream, line), later);
        }
        false
    }

    /// Adds an edge that orders a stream's work, of which one line is given, before new work of
    /// another stream or before the host.
    fn edge(&mut self, program: &mut Program, (from, line): (usize, usize), to: Option<usize>) {
        let edge = Some(self.edges);
        self.edges += 1;
        let device = program.streams[from].device;
        let oracle = oracle(program);
        if !oracle.is_alive(from) {
            return push(program, Step::SynchronizeDevice(device), edge);
        }
        let is_alive = |stream: usize| oracle.is_alive(stream);
        let third = self.random.below(program.streams.len());
        let third = Some(third).filter(|&third| is_alive(third));
        drop(oracle);
        let kind = |stream: usize| (program.streams[stream].device, program.streams[stream].kind);
        let legacy_helps =
            to.is_some_and(|to| kind(from) == (device, Kind::Blocking) && kind(to).0 == device);
        let to_is_blocking = to.is_some_and(|to| kind(to).1 == Kind::Blocking);
        let (Some(to), roll) = (to, self.random.below(100)) else {
            return self.host_edge(program, from, edge);
        };
        let record = |stream, event| Step::Enqueue { stream, work: Work::Record(event) };
        let wait = |stream, event| Step::Enqueue { stream, work: Work::Wait(event) };
        match roll {
            0..40 => {
                let event = self.event(program, device);
                if self.random.percent(50) && program.events.len() < 24 {
                    // Directly behind the work, or somewhat later, with an event of its own.
                    let event = program.events.len();
                    program.events.push(device);
                    let rest = program.lines.len() - line;
                    let at = line + 1 + self.random.below(rest).min(self.random.below(4));
                    self.insert(program, at.min(program.lines.len()), record(from, event), edge);
                    push(program, wait(to, event), edge);
                } else {
                    push(program, record(from, event), edge);
                    push(program, wait(to, event), edge);
                }
            }
            40..60 if legacy_helps => {
                let event = self.event(program, device);
                push(program, record(device, event), edge);
                if !to_is_blocking {
                    push(program, wait(to, event), edge);
                }
            }
            60..70 if third.is_some_and(|third| third != from && third != to) => {
                let third = third.unwrap_or(to);
                let event = self.event(program, device);
                push(program, record(from, event), edge);
                push(program, wait(third, event), edge);
                let event = self.event(program, program.streams[third].device);
                push(program, record(third, event), edge);
                push(program, wait(to, event), edge);
            }
            _ => self.host_edge(program, from, edge),
        }
    }

    /// Adds an edge by which the host knows that the work of a stream is complete.
    fn host_edge(&mut self, program: &mut Program, from: usize, edge: Option<usize>) {
        let device = program.streams[from].device;
        let event = self.event(program, device);
        let record = Step::Enqueue { stream: from, work: Work::Record(event) };
        match self.random.below(7) {
            0 => push(program, Step::Synchronize(What::Stream(from)), edge),
            1 => push(program, Step::SynchronizeDevice(device), edge),
            2 => push(program, Step::Poll(What::Stream(from)), edge),
            3 => {
                push(program, record, edge);
                push(program, Step::Poll(What::Event(event)), edge);
            }
            4 if program.implicit_waits => {
                // The implicit wait in a free of other memory.
                let of = program.allocs.len();
                if let Some(host) = self.spare(program, device) {
                    push(program, Step::FreeHost(host), edge);
                } else if of < 8 {
                    program.allocs.push(device);
                    push(program, Step::Free(of), edge);
                } else {
                    push(program, Step::SynchronizeDevice(device), edge);
                }
            }
            5 => {
                // A copy to pageable memory, which the host waits for. No operation writes the
                // memory.
                let of = program.allocs.len();
                program.allocs.push(device);
                let at = Span { place: Place::Alloc(of), start: 0, units: 4 };
                push(program, Step::Enqueue { stream: from, work: Work::Fetch(at) }, edge);
            }
            _ => {
                push(program, record, edge);
                push(program, Step::Synchronize(What::Event(event)), edge);
            }
        }
    }

    /// Pinned memory of a device that exists only to be freed.
    fn spare(&mut self, program: &mut Program, device: usize) -> Option<usize> {
        (self.random.percent(50) && program.pinned.len() < 6).then(|| {
            program.pinned.push((device, self.random.percent(50)));
            program.pinned.len() - 1
        })
    }

    /// Inserts a line between others.
    fn insert(&mut self, program: &mut Program, at: usize, step: Step, edge: Option<usize>) {
        let id = program.lines.len();
        program.lines.insert(at, Line { id, step, edge });
        // The stream may have been destroyed by then.
        let count = program.lines.len();
        if Oracle::of(program, count, &[]).is_err() {
            let line = program.lines.remove(at);
            program.lines.push(line);
        }
    }

    fn event(&mut self, program: &Program, device: usize) -> usize {
        let of: Vec<usize> =
            (0..program.events.len()).filter(|&event| program.events[event] == device).collect();
        self.random.of(&of)
    }

    /// A range of `units` units, or of a random number of units, that can be used now.
    fn span(
        &mut self,
        program: &Program,
        oracle: &Oracle<'_>,
        units: Option<u8>,
        pinned_only: bool,
    ) -> Option<Span> {
        let (allocs, pinned) = (program.allocs.len().min(3), program.pinned.len().min(2));
        let joins = program.pages.saturating_sub(1);
        for _ in 0..8 {
            let roll = self.random.below(if pinned_only { 1 } else { 3 });
            let place = match roll {
                0 => Place::Pinned(self.random.below(pinned)),
                1 if joins > 0 => Place::Join(self.random.below(joins)),
                _ => Place::Alloc(self.random.below(allocs)),
            };
            let (start, length) = match (units, self.random.percent(50)) {
                (None, true) => (16 * self.random.below(4) as u8, 16),
                (None, false) => {
                    let start = self.random.below(UNITS as usize) as u8;
                    (start, (1 + self.random.below(24) as u8).min(UNITS - start))
                }
                (Some(units), aligned) if aligned && units == 16 => {
                    (16 * self.random.below(4) as u8, 16)
                }
                (Some(units), _) => (self.random.below((UNITS - units) as usize + 1) as u8, units),
            };
            let span = Span { place, start, units: length };
            if oracle.is_there(span) {
                return Some(span);
            }
        }
        None
    }

    fn two(&mut self, program: &Program, oracle: &Oracle<'_>) -> Option<(Span, Span)> {
        let to = self.span(program, oracle, None, false)?;
        let from = self.span(program, oracle, Some(to.units), false)?;
        Some((to, from))
    }

    fn stream(&mut self, program: &Program, oracle: &Oracle<'_>) -> usize {
        let streams: Vec<usize> =
            (0..program.streams.len()).filter(|&stream| oracle.is_alive(stream)).collect();
        // Default streams are chosen less often.
        let users: Vec<usize> =
            streams.iter().copied().filter(|&stream| stream >= program.devices).collect();
        if users.is_empty() || self.random.percent(15) {
            self.random.of(&streams)
        } else {
            self.random.of(&users)
        }
    }

    fn step(&mut self, program: &mut Program) -> Option<Step> {
        let ahead = program.clone();
        let oracle = oracle(&ahead);
        let stream = self.stream(program, &oracle);
        let enqueue = |work| Some(Step::Enqueue { stream, work });
        let device = program.streams[stream].device;
        match self.random.below(100) {
            0..10 => enqueue(Work::Fill(self.span(program, &oracle, None, false)?)),
            10..28 => {
                let (to, from) = self.two(program, &oracle)?;
                enqueue(Work::Copy { to, from })
            }
            28..32 => {
                let (to, from) = self.two(program, &oracle)?;
                enqueue(Work::Peer { to, from })
            }
            32..36 => enqueue(Work::Stage(self.span(program, &oracle, None, false)?)),
            36..38 => enqueue(Work::Fetch(self.span(program, &oracle, None, false)?)),
            38..43 if program.streams[stream].kind != Kind::Legacy => {
                let count = 1 + self.random.below(3);
                let copies: Option<Vec<_>> =
                    (0..count).map(|_| self.two(program, &oracle)).collect();
                enqueue(Work::Batch(copies?))
            }
            43..58 if oracle.is_loaded(device) => {
                let (to, from) = self.two(program, &oracle)?;
                enqueue(Work::Kernel { to, from })
            }
            58..66 if program.unit == 4 => {
                let at = self.span(program, &oracle, Some(1), false)?;
                // Few distinct words, so that accesses meet.
                enqueue(Work::Atomic(Span { start: at.start / 8 * 8, ..at }))
                    .filter(|_| oracle.is_there(Span { start: at.start / 8 * 8, ..at }))
            }
            66..70 => {
                let graph = self.graph(program, &oracle, device)?;
                enqueue(Work::Graph(graph))
            }
            70..83 => {
                let at = self.span(program, &oracle, None, true)?;
                Some(Step::Host { at, writes: self.random.percent(50) })
            }
            83..92 => self.noise(program, &oracle, stream),
            _ => self.change(program, &oracle, stream),
        }
    }

    /// A graph of a device whose nodes do not conflict: a new or an existing one.
    fn graph(
        &mut self,
        program: &mut Program,
        oracle: &Oracle<'_>,
        device: usize,
    ) -> Option<usize> {
        let known: Vec<usize> = (0..program.graphs.len())
            .filter(|&graph| program.graphs[graph].device == device)
            .collect();
        if !known.is_empty() && self.random.percent(60) {
            return Some(self.random.of(&known));
        }
        let mut nodes: Vec<(Span, Span)> = Vec::new();
        for _ in 0..1 + self.random.below(3) {
            let (to, from) = self.two(program, oracle)?;
            // Two page joins count as meeting, because they may be aliases of the same bytes.
            let meets = |a: Span, b: Span| {
                let is_join = |span: Span| matches!(span.place, Place::Join(_));
                is_join(a) && is_join(b) || a.place == b.place && a.mask() & b.mask() != 0
            };
            let is_apart =
                nodes.iter().all(|&(a, b)| !meets(to, a) && !meets(to, b) && !meets(from, a));
            if is_apart {
                nodes.push((to, from));
            }
        }
        program.graphs.push(GraphOf { device, nodes });
        Some(program.graphs.len() - 1)
    }

    /// Adds edges that are not needed.
    fn noise(&mut self, program: &Program, oracle: &Oracle<'_>, stream: usize) -> Option<Step> {
        let event = self.random.below(program.events.len());
        let of = program.events[event];
        let recorder = self.stream(program, oracle);
        let what = if self.random.percent(50) { What::Stream(stream) } else { What::Event(event) };
        match self.random.below(10) {
            0..4 if program.streams[recorder].device == of => {
                Some(Step::Enqueue { stream: recorder, work: Work::Record(event) })
            }
            0..6 => Some(Step::Enqueue { stream, work: Work::Wait(event) }),
            6..8 => Some(Step::Query(what)),
            8 => Some(Step::Poll(what)),
            _ => Some(Step::Synchronize(what)),
        }
    }

    /// Creates and ends streams and memory.
    fn change(
        &mut self,
        program: &mut Program,
        oracle: &Oracle<'_>,
        stream: usize,
    ) -> Option<Step> {
        let is_users = stream >= program.devices;
        match self.random.below(10) {
            0..3 => {
                let kind = if self.random.percent(50) { Kind::Blocking } else { Kind::NonBlocking };
                let device = self.random.below(program.devices);
                program.streams.push(StreamOf { device, kind, is_first: false });
                Some(Step::Create(program.streams.len() - 1))
            }
            3..6 if is_users => {
                if self.random.percent(50) {
                    push(program, Step::Synchronize(What::Stream(stream)), None);
                }
                Some(Step::Destroy(stream))
            }
            6..9 if program.pages > 0 => self.remap(program, oracle),
            _ => {
                let alloc = self.random.below(program.allocs.len());
                let host = self.random.below(program.pinned.len());
                let is_kept = alloc == 0 || oracle.is_free(Place::Alloc(alloc));
                match self.random.percent(50) {
                    true if !is_kept => Some(Step::Free(alloc)),
                    _ if host > 0 && !oracle.is_free(Place::Pinned(host)) => {
                        Some(Step::FreeHost(host))
                    }
                    _ => None,
                }
            }
        }
    }

    /// Unmaps a page, or maps one.
    fn remap(&mut self, program: &mut Program, oracle: &Oracle<'_>) -> Option<Step> {
        let page = self.random.below(program.pages);
        if oracle.mapping_at(page) > 0 {
            return Some(Step::Unmap { page, pages: oracle.mapping_at(page) });
        }
        let handle = self.random.below(program.handles.len());
        let pages = program.handles[handle].1;
        let end = page + pages;
        if end > program.pages || (page..end).any(|page| oracle.is_mapped(page)) {
            return None;
        }
        push(program, Step::Map { page, handle }, None);
        Some(Step::SetAccess { page, pages })
    }

    /// Ends modules and contexts, in some programs. The other devices may go on.
    fn close(&mut self, program: &mut Program) {
        for device in 0..program.devices {
            let uses_module = program.lines.iter().any(|line| match line.step {
                Step::Enqueue { stream, work: Work::Kernel { .. } | Work::Atomic(_) } => {
                    program.streams[stream].device == device
                }
                _ => false,
            });
            for (step, percent) in [
                (Step::Unload(device), if uses_module { 20 } else { 0 }),
                (Step::EndContext(device), 10),
            ] {
                if self.random.percent(percent) && self.order(program, &step) {
                    push(program, step, None);
                }
            }
            let goes_on = (0..program.devices).any(|device| !oracle(program).is_ended(device));
            for _ in 0..if goes_on { self.random.below(4) } else { 0 } {
                if program.lines.len() + LINES_LEFT < LINES_MAX {
                    self.add(program);
                }
            }
        }
    }
}
