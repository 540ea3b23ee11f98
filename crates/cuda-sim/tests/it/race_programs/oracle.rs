//! The order that CUDA guarantees, as a graph. It shares no clocks and no code with the detector.
//!
//! A node is a moment of the host or an operation of a stream. An edge leads from work that must be
//! complete to work that starts after it. Edges always lead to the newest node, so all nodes
//! ordered before a node are known when the node is made. Two conflicting accesses that are not
//! ordered form a pair.

use super::program::{Kind, Place, Program, Span, Step, UNITS, What, Work};

/// Maximum number of nodes of a program.
const NODES_MAX: usize = 640;

/// A set of nodes.
#[derive(Clone, Copy, Debug)]
struct Set([u64; NODES_MAX / 64]);

impl Set {
    const NONE: Self = Self([0; NODES_MAX / 64]);

    fn has(&self, node: usize) -> bool {
        self.0[node / 64] >> (node % 64) & 1 == 1
    }

    fn add(&mut self, node: usize) {
        self.0[node / 64] |= 1 << (node % 64);
    }

    fn add_all(&mut self, other: &Self) {
        for (word, more) in self.0.iter_mut().zip(&other.0) {
            *word |= more;
        }
    }
}

/// The use of a resource. The uses of bytes are reads, writes and ends.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Use {
    Read,
    Write,
    /// Uses the object of the resource.
    Hold,
    Map,
    End,
}

/// A resource that two accesses can conflict over.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Resource {
    /// Units of an object: an allocation, pinned memory or physical memory.
    Bytes(usize),
    /// A page of addresses.
    Page(usize),
    Module(usize),
    Context(usize),
}

#[derive(Clone, Copy, Debug)]
pub struct Access {
    pub line: usize,
    /// Number of the operation or call, in the machine's count.
    pub sequence: u64,
    pub used: Use,
    pub resource: Resource,
    pub mask: u64,
    /// The device of an atomic access, whose scope is that device.
    pub atomic_on: Option<usize>,
    /// Whether the access goes through a later mapping than the one at the call. It may have
    /// happened, if the first mapping ended before the operation ran.
    pub is_late: bool,
    /// Stream of an operation.
    pub stream: Option<usize>,
    node: usize,
}

impl Access {
    fn conflicts(&self, later: &Self) -> bool {
        let both_read = self.used == Use::Read && later.used == Use::Read;
        let ends = |access: &Self| matches!(access.used, Use::End | Use::Map);
        self.resource == later.resource
            && self.mask & later.mask != 0
            && !both_read
            && !(self.used == Use::Hold && later.used == Use::Hold)
            && !(self.atomic_on.is_some() && self.atomic_on == later.atomic_on)
            && !(ends(self) && ends(later))
    }

    /// Whether everything that conflicts with an earlier access also conflicts with this one.
    fn covers(&self, earlier: &Self) -> bool {
        self.resource == earlier.resource
            && (self.used == Use::Write || self.used == earlier.used)
            && (self.atomic_on.is_none() || self.atomic_on == earlier.atomic_on)
    }
}

/// A program that uses an object that does not exist. Only a shrunk program can do so.
#[derive(Clone, Copy, Debug)]
pub struct Malformed;

/// An operation's range, kept for mappings made while the operation may not have run.
#[derive(Clone, Copy, Debug)]
struct Reach {
    access: Access,
    span: Span,
}

/// The state after the steps so far.
#[derive(Clone, Debug)]
pub struct Oracle<'p> {
    program: &'p Program,
    before: Vec<Set>,
    /// The host's last moment.
    host: usize,
    /// The last node of each stream, and whether it can be used.
    tails: Vec<Option<usize>>,
    alive: Vec<bool>,
    /// The node of each event's last record.
    recorded: Vec<Option<usize>>,
    /// The last launch of each graph, and its stream.
    launched: Vec<Option<(usize, usize)>>,
    /// The object that each page of addresses is mapped to, and whether it has access. For the
    /// first page of a mapping, the number of its pages.
    mapped: Vec<Option<(usize, bool)>>,
    mappings: Vec<usize>,
    freed: Vec<bool>,
    ended: Vec<bool>,
    unloaded: Vec<bool>,
    reaches: Vec<Reach>,
    sequence: u64,
    pub accesses: Vec<Access>,
}

impl<'p> Oracle<'p> {
    pub fn new(program: &'p Program) -> Self {
        let objects = program.allocs.len()
            + program.pinned.len()
            + program.handles.iter().map(|(_, pages)| pages).sum::<usize>();
        Self {
            program,
            before: vec![Set::NONE],
            host: 0,
            tails: vec![None; program.streams.len()],
            alive: program.streams.iter().map(|stream| stream.is_first).collect(),
            recorded: vec![None; program.events.len()],
            launched: vec![None; program.graphs.len()],
            mapped: vec![None; program.pages],
            mappings: vec![0; program.pages],
            freed: vec![false; objects],
            ended: vec![false; program.devices],
            unloaded: vec![false; program.devices],
            reaches: Vec::new(),
            sequence: 0,
            accesses: Vec::new(),
        }
    }

    /// The oracle of a whole program with these answers to queries.
    pub fn of(program: &'p Program, lines: usize, answers: &[bool]) -> Result<Self, Malformed> {
        let mut oracle = Self::new(program);
        let mut answers = answers.iter();
        for (index, line) in program.lines[..lines].iter().enumerate() {
            let is_query = matches!(line.step, Step::Query(_));
            let answer = is_query && answers.next().copied().unwrap_or(false);
            oracle.step(index, &line.step, answer)?;
        }
        Ok(oracle)
    }

    pub fn is_alive(&self, stream: usize) -> bool {
        self.alive[stream]
    }

    pub fn is_loaded(&self, device: usize) -> bool {
        !self.unloaded[device]
    }

    pub fn is_ended(&self, device: usize) -> bool {
        self.ended[device]
    }

    pub fn is_mapped(&self, page: usize) -> bool {
        self.mapped[page].is_some()
    }

    /// Number of pages of the mapping that begins at this page.
    pub fn mapping_at(&self, page: usize) -> usize {
        self.mappings[page]
    }

    /// Whether an operation may use a range now.
    pub fn is_there(&self, span: Span) -> bool {
        match span.place {
            Place::Join(_) => span.pages().all(|(page, _)| {
                self.mapped.get(page).is_some_and(|page| page.is_some_and(|(_, access)| access))
            }),
            _ => !self.freed[self.object(span.place)],
        }
    }

    pub fn is_free(&self, place: Place) -> bool {
        self.freed[self.object(place)]
    }

    fn object(&self, place: Place) -> usize {
        match place {
            Place::Alloc(index) => index,
            Place::Pinned(index) => self.program.allocs.len() + index,
            Place::Join(_) => usize::MAX,
        }
    }

    fn object_of_handle(&self, handle: usize) -> usize {
        let earlier: usize = self.program.handles[..handle].iter().map(|(_, pages)| pages).sum();
        self.program.allocs.len() + self.program.pinned.len() + earlier
    }

    fn node(&mut self, after: impl IntoIterator<Item = usize>) -> Result<usize, Malformed> {
        let mut before = Set::NONE;
        for node in after {
            before.add_all(&self.before[node]);
            before.add(node);
        }
        if self.before.len() == NODES_MAX {
            return Err(Malformed);
        }
        self.before.push(before);
        Ok(self.before.len() - 1)
    }

    fn is_before(&self, node: usize, later: usize) -> bool {
        self.before[later].has(node)
    }

    /// Whether the two are unordered.
    pub fn is_pair(&self, one: &Access, other: &Access) -> bool {
        let (first, second) =
            if one.sequence <= other.sequence { (one, other) } else { (other, one) };
        first.sequence != second.sequence
            && first.conflicts(second)
            && !self.is_before(first.node, second.node)
    }

    /// The units of a pair for which the detector only kept a later access than the first of the
    /// pair: one that covers it, and that is over although the first of the pair may not be. Only
    /// work of an ended context is (see `end_work`), and the end is a race with that work.
    pub fn hidden(&self, one: &Access, other: &Access) -> u64 {
        let (first, second) =
            if one.sequence <= other.sequence { (one, other) } else { (other, one) };
        let hides = |last: &&Access| {
            last.covers(first)
                && self.is_before(first.node, last.node)
                && self.is_before(last.node, second.node)
        };
        self.accesses.iter().filter(hides).fold(0, |units, last| units | last.mask)
    }

    /// The earlier unordered accesses that conflict with those from `from` on.
    pub fn clashes(&self, from: usize) -> Vec<Access> {
        let (old, new) = self.accesses.split_at(from);
        let clashes = |early: &&Access| new.iter().any(|late| self.is_pair(early, late));
        old.iter().filter(clashes).copied().collect()
    }

    /// All pairs.
    pub fn pairs(&self) -> impl Iterator<Item = (&Access, &Access)> {
        self.accesses.iter().enumerate().flat_map(move |(index, one)| {
            let rest = self.accesses[index + 1..].iter();
            rest.filter(move |other| self.is_pair(one, other)).map(move |other| (one, other))
        })
    }

    /// A new moment of the host, after these nodes.
    fn host_after(&mut self, nodes: impl IntoIterator<Item = usize>) -> Result<(), Malformed> {
        let host = self.host;
        self.host = self.node(std::iter::once(host).chain(nodes))?;
        Ok(())
    }

    fn tails_of(&self, wanted: impl Fn(usize) -> bool) -> Vec<usize> {
        let tails = self.tails.iter().enumerate().filter(|(stream, _)| wanted(*stream));
        tails.filter_map(|(_, tail)| *tail).collect()
    }

    fn tails_of_device(&self, device: Option<usize>) -> Vec<usize> {
        self.tails_of(|stream| device.is_none_or(|of| self.program.streams[stream].device == of))
    }

    /// The nodes ordered before new work of a stream.
    fn before_stream(&self, stream: usize) -> Vec<usize> {
        let this = self.program.streams[stream];
        let mut nodes = self.tails_of(|other| {
            let of = self.program.streams[other];
            let is_ordered = matches!(
                (this.kind, of.kind),
                (Kind::Legacy, Kind::Blocking) | (Kind::Blocking, Kind::Legacy)
            );
            other == stream || (of.device == this.device && is_ordered)
        });
        nodes.push(self.host);
        nodes
    }

    fn note(&mut self, access: Access) {
        self.accesses.push(access);
    }

    /// Records an access in the host's current call.
    fn note_host(&mut self, line: usize, used: Use, resource: Resource, mask: u64) {
        let (node, sequence) = (self.host, self.sequence);
        self.note(Access {
            line,
            sequence,
            used,
            resource,
            mask,
            atomic_on: None,
            is_late: false,
            stream: None,
            node,
        });
    }

    /// Records that an operation touches a range.
    fn touch(&mut self, access: Access, span: Span) -> Result<(), Malformed> {
        if !self.is_there(span) {
            return Err(Malformed);
        }
        if !matches!(span.place, Place::Join(_)) {
            let resource = Resource::Bytes(self.object(span.place));
            self.note(Access { resource, mask: span.mask(), ..access });
            return Ok(());
        }
        for (page, mask) in span.pages() {
            let Some((object, _)) = self.mapped[page] else { return Err(Malformed) };
            self.note(Access { resource: Resource::Bytes(object), mask, ..access });
            let resource = Resource::Page(page);
            self.note(Access { used: Use::Hold, resource, mask: 1, atomic_on: None, ..access });
        }
        self.reaches.push(Reach { access, span });
        Ok(())
    }

    /// Adds an operation of a stream, with the ranges that it reads and writes.
    fn enqueue(
        &mut self,
        line: usize,
        stream: usize,
        after: Vec<usize>,
        ranges: &[(Span, bool)],
        is_atomic: bool,
    ) -> Result<usize, Malformed> {
        let node = self.node(after)?;
        self.sequence += 1;
        let device = self.program.streams[stream].device;
        let access = Access {
            line,
            sequence: self.sequence,
            used: Use::Hold,
            resource: Resource::Context(device),
            mask: 1,
            atomic_on: None,
            is_late: false,
            stream: Some(stream),
            node,
        };
        self.note(access);
        let atomic_on = is_atomic.then_some(device);
        for &(span, writes) in ranges {
            let used = if writes { Use::Write } else { Use::Read };
            self.touch(Access { used, atomic_on, ..access }, span)?;
        }
        self.tails[stream] = Some(node);
        Ok(node)
    }

    fn launch(&mut self, line: usize, stream: usize, node: usize) {
        let device = self.program.streams[stream].device;
        self.note(Access {
            line,
            sequence: self.sequence,
            used: Use::Hold,
            resource: Resource::Module(device),
            mask: 1,
            atomic_on: None,
            is_late: false,
            stream: Some(stream),
            node,
        });
    }

    fn work(&mut self, line: usize, stream: usize, work: &Work) -> Result<(), Malformed> {
        let device = self.program.streams[stream].device;
        let uses_module = matches!(work, Work::Kernel { .. } | Work::Atomic(_) | Work::Graph(_));
        if !self.alive[stream] || self.ended[device] || uses_module && self.unloaded[device] {
            return Err(Malformed);
        }
        let mut after = self.before_stream(stream);
        let ranges: Vec<(Span, bool)> = match work {
            Work::Fill(to) | Work::Stage(to) => vec![(*to, true)],
            Work::Fetch(from) => vec![(*from, false)],
            Work::Copy { to, from } | Work::Peer { to, from } | Work::Kernel { to, from } => {
                vec![(*from, false), (*to, true)]
            }
            Work::Batch(copies) => {
                copies.iter().flat_map(|&(to, from)| [(from, false), (to, true)]).collect()
            }
            Work::Atomic(at) => vec![(*at, false), (*at, true)],
            Work::Record(_) => Vec::new(),
            Work::Wait(event) if self.ended[self.program.events[*event]] => return Err(Malformed),
            Work::Wait(event) => {
                let Some(record) = self.recorded[*event] else { return Ok(()) };
                after.push(record);
                Vec::new()
            }
            Work::Graph(graph) => return self.graph(line, stream, *graph),
        };
        let is_atomic = matches!(work, Work::Atomic(_));
        let node = self.enqueue(line, stream, after, &ranges, is_atomic)?;
        match work {
            Work::Record(event) => self.recorded[*event] = Some(node),
            // The caller has the bytes when the call returns.
            Work::Fetch(_) => self.host_after([node])?,
            _ if uses_module => self.launch(line, stream, node),
            _ => {}
        }
        Ok(())
    }

    /// The nodes of a graph start after everything ordered before the launch, including the last
    /// launch of the same graph. They are not ordered among themselves.
    fn graph(&mut self, line: usize, stream: usize, graph: usize) -> Result<(), Malformed> {
        let mut after = self.before_stream(stream);
        if let Some((last, of)) = self.launched[graph] {
            after.push(last);
            // The machine counts the wait of one stream for another as a call.
            self.sequence += u64::from(of != stream);
        }
        let mut nodes = Vec::new();
        for &(to, from) in &self.program.graphs[graph].nodes {
            let ranges = [(from, false), (to, true)];
            let node = self.enqueue(line, stream, after.clone(), &ranges, false)?;
            self.launch(line, stream, node);
            nodes.push(node);
        }
        let all = self.node(nodes)?;
        self.tails[stream] = Some(all);
        self.launched[graph] = Some((all, stream));
        Ok(())
    }

    fn what(&self, what: What) -> Result<Vec<usize>, Malformed> {
        match what {
            What::Stream(stream) if !self.alive[stream] => Err(Malformed),
            What::Stream(stream) => Ok(self.tails[stream].into_iter().collect()),
            What::Event(event) if self.ended[self.program.events[event]] => Err(Malformed),
            What::Event(event) => Ok(self.recorded[event].into_iter().collect()),
        }
    }

    /// A call ends an object, after a wait for `device` or for all devices, which may count as
    /// order or not.
    fn end(&mut self, line: usize, object: usize, device: Option<usize>) -> Result<(), Malformed> {
        if std::mem::replace(&mut self.freed[object], true) {
            return Err(Malformed);
        }
        self.end_wait(device)?;
        self.sequence += 1;
        self.note_host(line, Use::End, Resource::Bytes(object), u64::MAX);
        Ok(())
    }

    fn end_wait(&mut self, device: Option<usize>) -> Result<(), Malformed> {
        let tails = self.tails_of_device(device);
        self.host_after(
            tails.into_iter().filter(|_| self.program.implicit_waits).collect::<Vec<_>>(),
        )
    }

    /// No operation can use the pages before a device has access to them.
    fn map(&mut self, page: usize, handle: usize) -> Result<(), Malformed> {
        let pages = self.program.handles[handle].1;
        let first = self.object_of_handle(handle);
        for offset in 0..pages {
            let at = self.mapped.get_mut(page + offset).ok_or(Malformed)?;
            if at.replace((first + offset, false)).is_some() {
                return Err(Malformed);
            }
            self.may_run_late(page + offset, first + offset);
        }
        self.mappings[page] = pages;
        Ok(())
    }

    /// Work that was enqueued before a mapping and may run after it may touch the mapped memory.
    fn may_run_late(&mut self, page: usize, object: usize) {
        let reaches = std::mem::take(&mut self.reaches);
        for reach in &reaches {
            let part = reach.span.pages().find(|(at, _)| *at == page);
            if let Some((_, mask)) = part
                && !self.is_before(reach.access.node, self.host)
            {
                let resource = Resource::Bytes(object);
                self.note(Access { resource, mask, is_late: true, ..reach.access });
            }
        }
        self.reaches = reaches;
    }

    fn set_access(&mut self, line: usize, page: usize, pages: usize) -> Result<(), Malformed> {
        self.sequence += 1;
        for page in page..page + pages {
            let at = self.mapped.get_mut(page).and_then(Option::as_mut).ok_or(Malformed)?;
            if !std::mem::replace(&mut at.1, true) {
                self.note_host(line, Use::Map, Resource::Page(page), 1);
            }
        }
        Ok(())
    }

    fn unmap(&mut self, line: usize, page: usize, pages: usize) -> Result<(), Malformed> {
        if self.mappings.get(page) != Some(&pages) || pages == 0 {
            return Err(Malformed);
        }
        self.mappings[page] = 0;
        self.sequence += 1;
        for page in page..page + pages {
            self.mapped[page] = None;
            self.note_host(line, Use::End, Resource::Page(page), 1);
        }
        Ok(())
    }

    fn end_context(&mut self, line: usize, device: usize) -> Result<(), Malformed> {
        if std::mem::replace(&mut self.ended[device], true) {
            return Err(Malformed);
        }
        self.end_wait(Some(device))?;
        self.sequence += 1;
        self.note_host(line, Use::End, Resource::Context(device), 1);
        self.end_work(device)?;
        for (stream, of) in self.program.streams.iter().enumerate() {
            self.alive[stream] &= of.device != device;
        }
        let allocs = self.program.allocs.iter().copied();
        let pinned = self.program.pinned.iter().map(|(owner, _)| *owner);
        let owners: Vec<usize> = allocs.chain(pinned).collect();
        for (object, _) in owners.iter().enumerate().filter(|(_, owner)| **owner == device) {
            if !std::mem::replace(&mut self.freed[object], true) {
                self.note_host(line, Use::End, Resource::Bytes(object), u64::MAX);
            }
        }
        Ok(())
    }

    /// A new moment of the host, after which no work of a device's context runs: the end of the
    /// context waited for the work or abandoned it. Abandoned work did not wait for anything, so
    /// this orders only the work itself, and nothing that comes before it.
    fn end_work(&mut self, device: usize) -> Result<(), Malformed> {
        self.host_after([])?;
        let before = &mut self.before[self.host];
        let resource = Resource::Context(device);
        for access in self.accesses.iter().filter(|access| access.resource == resource) {
            before.add(access.node);
        }
        Ok(())
    }

    /// Applies the next step; `answer` is the answer of a query.
    pub fn step(&mut self, line: usize, step: &Step, answer: bool) -> Result<(), Malformed> {
        self.host_after([])?;
        match *step {
            Step::Enqueue { stream, ref work } => self.work(line, stream, work),
            Step::Host { at, writes } => {
                if !self.is_there(at) {
                    return Err(Malformed);
                }
                self.sequence += 1;
                let used = if writes { Use::Write } else { Use::Read };
                self.note_host(line, used, Resource::Bytes(self.object(at.place)), at.mask());
                Ok(())
            }
            Step::Synchronize(what) | Step::Poll(what) => {
                let nodes = self.what(what)?;
                self.host_after(nodes)
            }
            Step::Query(what) => {
                let nodes = self.what(what)?;
                self.host_after(nodes.into_iter().filter(|_| answer))
            }
            Step::SynchronizeDevice(device) if self.ended[device] => Err(Malformed),
            Step::SynchronizeDevice(device) => {
                let tails = self.tails_of_device(Some(device));
                self.host_after(tails)
            }
            Step::Create(stream) if self.ended[self.program.streams[stream].device] => {
                Err(Malformed)
            }
            Step::Create(stream) => {
                let is_new = !std::mem::replace(&mut self.alive[stream], true);
                is_new.then_some(()).ok_or(Malformed)
            }
            Step::Destroy(stream) => {
                let was_alive = std::mem::replace(&mut self.alive[stream], false);
                was_alive.then_some(()).ok_or(Malformed)
            }
            Step::Map { page, handle } => self.map(page, handle),
            Step::SetAccess { page, pages } => self.set_access(line, page, pages),
            Step::Unmap { page, pages } => self.unmap(line, page, pages),
            Step::Free(index) => self.end(line, self.object(Place::Alloc(index)), None),
            Step::FreeHost(index) => {
                let (owner, is_portable) = self.program.pinned[index];
                let device = Some(owner).filter(|_| !is_portable);
                self.end(line, self.object(Place::Pinned(index)), device)
            }
            Step::Unload(device) => {
                if std::mem::replace(&mut self.unloaded[device], true) {
                    return Err(Malformed);
                }
                self.end_wait(Some(device))?;
                self.sequence += 1;
                self.note_host(line, Use::End, Resource::Module(device), 1);
                Ok(())
            }
            Step::EndContext(device) => self.end_context(line, device),
        }
    }
}

/// Units of an object.
pub const ALL: u64 = u64::MAX >> (64 - UNITS);
