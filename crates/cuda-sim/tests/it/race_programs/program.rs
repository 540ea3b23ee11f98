//! A program as data: its objects and its calls.

use std::fmt;

/// Number of memory units that programs touch in one object: an allocation, or a page of physical
/// memory.
pub const UNITS: u8 = 64;

/// Size of a page of virtual memory, in bytes.
pub const PAGE_BYTES: u64 = 4096;

/// The order of a stream with its device's default stream.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kind {
    Legacy,
    Blocking,
    NonBlocking,
}

#[derive(Clone, Copy, Debug)]
pub struct StreamOf {
    pub device: usize,
    pub kind: Kind,
    /// Whether it exists from the start.
    pub is_first: bool,
}

/// Memory, by its kind of address. The units lie around the edge of a page, so that ranges cross
/// the edge.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Place {
    Alloc(usize),
    Pinned(usize),
    /// The end of this page of the reservation and the beginning of the next.
    Join(usize),
}

/// A range of units.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Span {
    pub place: Place,
    pub start: u8,
    pub units: u8,
}

impl Span {
    /// Its units, as bits.
    pub fn mask(self) -> u64 {
        (u64::MAX >> (UNITS - self.units)) << self.start
    }

    /// The pages of the reservation that it covers, each with its units as bits.
    pub fn pages(self) -> impl Iterator<Item = (usize, u64)> {
        let half = u64::from(UNITS / 2);
        let mask = self.mask();
        let parts = match self.place {
            // The end of a page holds the upper half of the units.
            Place::Join(page) => [(page, mask << half), (page + 1, mask >> half)],
            _ => [(0, 0), (0, 0)],
        };
        parts.into_iter().filter(|(_, mask)| *mask != 0)
    }
}

/// An object that the host queries or waits for.
#[derive(Clone, Copy, Debug)]
pub enum What {
    Stream(usize),
    Event(usize),
}

#[derive(Clone, Debug)]
pub enum Work {
    Fill(Span),
    /// A copy between any memory, by the call for host to device, device to host or device to
    /// device.
    Copy {
        to: Span,
        from: Span,
    },
    Peer {
        to: Span,
        from: Span,
    },
    /// A copy from or to pageable memory.
    Stage(Span),
    Fetch(Span),
    Batch(Vec<(Span, Span)>),
    Kernel {
        to: Span,
        from: Span,
    },
    /// A kernel that adds to a word atomically.
    Atomic(Span),
    Graph(usize),
    Record(usize),
    Wait(usize),
}

#[derive(Clone, Debug)]
pub enum Step {
    Enqueue {
        stream: usize,
        work: Work,
    },
    /// The host reads or writes pinned memory.
    Host {
        at: Span,
        writes: bool,
    },
    Synchronize(What),
    SynchronizeDevice(usize),
    Query(What),
    /// Queries until the answer is yes, or synchronises after several queries.
    Poll(What),
    Create(usize),
    Destroy(usize),
    Map {
        page: usize,
        handle: usize,
    },
    SetAccess {
        page: usize,
        pages: usize,
    },
    Unmap {
        page: usize,
        pages: usize,
    },
    Free(usize),
    FreeHost(usize),
    Unload(usize),
    EndContext(usize),
}

/// A step, and whether it exists only to order others.
#[derive(Clone, Debug)]
pub struct Line {
    /// Unique among the program's lines, even after lines are removed.
    pub id: usize,
    pub step: Step,
    pub edge: Option<usize>,
}

#[derive(Clone, Debug)]
pub struct GraphOf {
    pub device: usize,
    /// Destination and source of each node.
    pub nodes: Vec<(Span, Span)>,
}

#[derive(Clone, Debug)]
pub struct Program {
    pub seed: u64,
    pub devices: usize,
    pub implicit_waits: bool,
    /// Whether the detector sweeps its history after each step.
    pub sweeps: bool,
    /// Number of bytes of a unit.
    pub unit: u64,
    /// The streams; the devices' default streams come first.
    pub streams: Vec<StreamOf>,
    /// Device of each event.
    pub events: Vec<usize>,
    pub allocs: Vec<usize>,
    /// Owner, and whether the memory is portable.
    pub pinned: Vec<(usize, bool)>,
    /// Number of pages of the reservation.
    pub pages: usize,
    /// Device and number of pages of each handle.
    pub handles: Vec<(usize, usize)>,
    pub graphs: Vec<GraphOf>,
    pub lines: Vec<Line>,
}

impl Program {
    /// The lines that exist only to order others.
    pub fn edges(&self) -> Vec<usize> {
        let mut edges: Vec<usize> = self.lines.iter().filter_map(|line| line.edge).collect();
        edges.sort_unstable();
        edges.dedup();
        edges
    }

    /// Whether the answers of queries may differ between runs.
    pub fn has_queries(&self) -> bool {
        self.lines.iter().any(|line| matches!(line.step, Step::Query(_)))
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "seed {}: {} devices, implicit waits {}, sweeps {}, units of {} bytes",
            self.seed, self.devices, self.implicit_waits, self.sweeps, self.unit
        )?;
        for (index, stream) in self.streams.iter().enumerate() {
            writeln!(f, "  stream {index}: {stream:?}")?;
        }
        writeln!(f, "  events {:?}", self.events)?;
        writeln!(f, "  allocs {:?}, pinned {:?}", self.allocs, self.pinned)?;
        writeln!(f, "  {} pages, handles {:?}", self.pages, self.handles)?;
        for (index, graph) in self.graphs.iter().enumerate() {
            writeln!(f, "  graph {index}: {graph:?}")?;
        }
        for line in &self.lines {
            let edge = line.edge.map(|edge| format!(" (edge {edge})")).unwrap_or_default();
            writeln!(f, "  {:3}{edge}: {:?}", line.id, line.step)?;
        }
        Ok(())
    }
}
