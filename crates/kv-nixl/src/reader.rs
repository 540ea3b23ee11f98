//! One agent that reads one peer's memory, a few pieces at a time.

use std::collections::VecDeque;
use std::ffi::CString;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cuda_driver::guard;
use kv_remote::message::Span;

use crate::agent::{Agent, BEGINNING, Kind, Look, Request, Role};
use crate::beside;
use crate::descriptor::Descriptor;
use crate::landing::{Came, Home, Landing};
use crate::piece::{Arrived, Here, Taker};
use crate::{Library, NixlError};

/// Looks at a read before other threads are let in between, and before it is looked at only now and then.
const SPINS: u64 = 200;
const YIELDS: u64 = 2_000;
/// Time between looks then.
const PAUSE: Duration = Duration::from_micros(20);

/// Pieces that are on their way at a time: one is checked while others come.
const PIECES: usize = 3;

/// Bytes of a read that is worth a second thread, which takes some 100 µs to begin and to end, and copies more slowly. Of 32 MiB, what is
/// read and checked comes half as fast again by it; of 4 and 8 MiB, no faster (16 cores of a Xeon).
const BESIDE_MIN: u64 = 16 << 20;

/// Why a read has brought nothing, or not all.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Its time was over. It may still write to its memory.
    Late,
    /// Its time was over before what had come earlier was used. Nothing is on its way.
    Unused,
    /// The first read of this reader was not begun: there may be no way that reads by itself.
    NotBegun(NixlError),
    Failed(NixlError),
}

impl From<NixlError> for Failure {
    fn from(error: NixlError) -> Self {
        Self::Failed(error)
    }
}

/// The reader of one peer.
#[derive(Debug)]
pub(crate) struct Reader {
    /// Destroyed first: it keeps the memory, and ends what is open.
    agent: Agent,
    /// As the peer has said it.
    said: Arc<[u8]>,
    there: Descriptor,
    name: CString,
    home: Home,
    /// Memory that nothing is read into.
    free: Vec<Arc<Landing>>,
    /// Pieces on their way, the first one first.
    open: VecDeque<Piece>,
    has_begun: bool,
}

/// Spans that are read at a time.
#[derive(Debug)]
struct Piece {
    request: Request,
    landing: Arc<Landing>,
    /// Places in the list of spans.
    spans: Range<usize>,
}

impl Reader {
    /// A reader of memory of so many bytes, of which the peer has said this.
    pub(crate) fn new(
        library: &Library,
        said: Arc<[u8]>,
        bytes: u64,
        (home, emulated): (Home, bool),
    ) -> Result<Self, NixlError> {
        let there = Descriptor::parse(&said)?;
        if there.end() > guard!("nixl.described-within-memory", bytes, else u64::MAX) {
            return Err(NixlError::Descriptor { field: "bytes" });
        }
        let mut agent = Agent::new(library, Role::Reader { emulated })?;
        let name = agent.meet(&there.metadata)?;
        Ok(Self {
            agent,
            said,
            there,
            name,
            home,
            free: Vec::new(),
            open: VecDeque::new(),
            has_begun: false,
        })
    }

    /// Whether the peer still says the same of its memory.
    pub(crate) fn is_of(&self, said: &[u8]) -> bool {
        *self.said == *said
    }

    /// Whether all of these spans are in memory that can be read so.
    pub(crate) fn reaches(&self, spans: &[Span]) -> bool {
        spans.iter().all(|span| self.there.pieces(*span).is_some())
    }

    /// Whether nothing is open. What is over is found to be so by this call.
    pub(crate) fn has_ended(&mut self) -> bool {
        for piece in std::mem::take(&mut self.open) {
            match self.agent.look(&piece.request) {
                Look::Open => self.open.push_back(piece),
                Look::Done | Look::Failed(_) => self.agent.release(piece.request),
            }
        }
        self.open.is_empty()
    }

    /// Whether something is on its way, as it was last seen.
    pub(crate) fn is_open(&self) -> bool {
        !self.open.is_empty()
    }

    /// Whether nothing is open, and nothing that has come is still used: it can be dropped, and its memory freed without a wait.
    pub(crate) fn is_idle(&mut self) -> bool {
        self.has_ended() && self.free.iter().all(|landing| landing.is_unused())
    }

    /// Reads spans of the peer's memory, and says each once it has come, in order.
    pub(crate) fn read(
        &mut self,
        spans: &[Span],
        deadline: Instant,
        each: &mut dyn FnMut(usize, Came<'_>),
    ) -> Result<(), Failure> {
        if !self.has_ended() {
            return Err(Failure::Late);
        }
        let bytes: u64 = spans.iter().map(|span| u64::from(span.bytes)).sum();
        // A thread of its own has no device's context, which work with a device's memory needs.
        let is_host = self.home.is_host() && self.there.kind == Kind::Host;
        if is_host && bytes >= BESIDE_MIN && self.piece(spans, 0).0 < spans.len() {
            return beside::read(self, spans, deadline, each);
        }
        self.bring(spans, deadline, &mut Here { spans, each })
    }

    /// Brings spans piece by piece, each of which is handed over before another one is begun if it has come by then.
    pub(crate) fn bring(
        &mut self,
        spans: &[Span],
        deadline: Instant,
        taker: &mut impl Taker,
    ) -> Result<(), Failure> {
        let mut next = 0;
        loop {
            taker.give_back(&mut self.free);
            let begun = self.open.len() < PIECES.min(taker.room())
                && next < spans.len()
                && self.begin_at(spans, &mut next, deadline)?;
            let until = if begun { Instant::now() } else { deadline };
            let Some(piece) = self.open.pop_front() else {
                if next >= spans.len() {
                    return Ok(());
                }
                // All landings are looked at.
                if !taker.wait(deadline, &mut self.free)? {
                    return Ok(());
                }
                continue;
            };
            match self.wait(&piece.request, until) {
                Look::Open => {
                    self.open.push_front(piece);
                    if !begun {
                        return Err(Failure::Late);
                    }
                    continue;
                }
                Look::Done => self.agent.release(piece.request),
                Look::Failed(status) => {
                    self.agent.release(piece.request);
                    return Err(NixlError::Call { operation: "a read", status }.into());
                }
            }
            // SAFETY: the piece is over, and its landing is among the free ones again only when the taker has given it back.
            let arrived = unsafe { Arrived::new(piece.landing, piece.spans) };
            if !taker.take(arrived, &mut self.free)? {
                return Ok(());
            }
        }
    }

    /// Takes landings that nothing uses any more.
    pub(crate) fn give_back(&mut self, landings: impl Iterator<Item = Arc<Landing>>) {
        self.free.extend(landings);
    }

    /// Begins the piece that begins at a span, and goes on to the next one; false if pieces that are on their way come first.
    fn begin_at(
        &mut self,
        spans: &[Span],
        next: &mut usize,
        deadline: Instant,
    ) -> Result<bool, Failure> {
        let (end, bytes) = self.piece(spans, *next);
        let Some(landing) = self.landing(bytes, deadline)? else { return Ok(false) };
        match self.begin((spans, *next..end), landing) {
            Err(error @ NixlError::Call { operation: BEGINNING, .. }) if !self.has_begun => {
                return Err(Failure::NotBegun(error));
            }
            begun => begun?,
        }
        self.has_begun = true;
        *next = end;
        Ok(true)
    }

    /// Where the piece ends that begins at a span, and its bytes.
    fn piece(&self, spans: &[Span], first: usize) -> (usize, usize) {
        let (mut end, mut bytes) = (first, 0);
        while let Some(span) = spans.get(end) {
            let with = bytes + span.bytes as usize;
            if end > first && with > self.home.piece_bytes() {
                break;
            }
            (end, bytes) = (end + 1, with);
        }
        (end, bytes)
    }

    /// Begins to read a piece.
    fn begin(
        &mut self,
        (spans, piece): (&[Span], Range<usize>),
        landing: Arc<Landing>,
    ) -> Result<(), NixlError> {
        let there = (self.name.as_c_str(), &self.there);
        let of = spans.get(piece.clone()).unwrap_or_default();
        // SAFETY: the landing is registered and large enough. It is not among the free ones, and looked at only when the piece
        // is over; if it is never over, it is kept with the piece and by the agent. If it was not begun, whether some of it is on
        // its way, nobody knows: the landing is not used again.
        let request = unsafe { self.agent.read(there, of, landing.place()) }?;
        self.open.push_back(Piece { request, landing, spans: piece });
        Ok(())
    }

    /// Memory for so many bytes that nothing uses. None if pieces that are on their way come first.
    fn landing(
        &mut self,
        bytes: usize,
        deadline: Instant,
    ) -> Result<Option<Arc<Landing>>, Failure> {
        // Few sizes, so that few landings serve for all.
        let class = bytes.next_power_of_two().max(self.home.piece_bytes());
        if !self.free.iter().any(|landing| landing.bytes() >= bytes) {
            return Ok(Some(registered(&mut self.agent, &self.home, class)?));
        }
        let is_awaited = self.open.is_empty();
        let unused = |landing: &Landing| landing.bytes() >= bytes && landing.is_unused();
        let free = &self.free;
        let look = || free.iter().position(|landing| unused(landing));
        match until(if is_awaited { deadline } else { Instant::now() }, look) {
            Some(at) => Ok(Some(guard!(
                "nixl.landing-is-one-pieces",
                self.free.swap_remove(at),
                else Arc::clone(&self.free[at])
            ))),
            None if is_awaited => Err(Failure::Unused),
            None => Ok(None),
        }
    }

    fn wait(&mut self, request: &Request, deadline: Instant) -> Look {
        let over = || Some(self.agent.look(request)).filter(|look| *look != Look::Open);
        until(deadline, over).unwrap_or(Look::Open)
    }
}

/// Looks until there is something, or the time is over; at least once.
pub(crate) fn until<T>(deadline: Instant, mut look: impl FnMut() -> Option<T>) -> Option<T> {
    for looks in 0_u64.. {
        if let Some(seen) = look() {
            return Some(seen);
        }
        if Instant::now() >= deadline {
            break;
        }
        match looks {
            0..SPINS => std::hint::spin_loop(),
            SPINS..YIELDS => std::thread::yield_now(),
            _ => std::thread::park_timeout(PAUSE),
        }
    }
    None
}

impl Drop for Reader {
    fn drop(&mut self) {
        // What is open ends with the agent, and its handle is left to it: the library takes back none that is in progress.
        self.has_ended();
    }
}

fn registered(agent: &mut Agent, home: &Home, bytes: usize) -> Result<Arc<Landing>, NixlError> {
    let landing = Arc::new(Landing::new(home, bytes)?);
    let ((kind, device, address), kept) = (landing.place(), Box::new(Arc::clone(&landing)));
    // SAFETY: `kept` keeps the landing, which does not move.
    unsafe { agent.register((kind, device), address, bytes, kept)? };
    Ok(landing)
}
