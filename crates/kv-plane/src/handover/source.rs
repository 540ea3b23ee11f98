//! The threads that take prompts from the nodes that compute them, one for each node.

use std::collections::VecDeque;
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use cuda_driver::guard;
use kv_pool::{Classed, ErrorClass};
use kv_remote::handover::{HandoverError as OfferError, Part, Pull, Sheet};
use kv_remote::{Key, Member, Peer, PeerError, SocketTransfer, Transfer};

use super::HandoverId;
use super::form::Form;

/// A year: no wait is longer, and no clock counts all that may be asked for.
const LASTS_MAX: Duration = Duration::from_secs(365 * 86_400);
/// How long a call of a node may take.
const CALL_MAX: Duration = Duration::from_secs(2);
/// Time between two looks for an offer that is not there.
const PAUSE: Duration = Duration::from_millis(1);
/// Time before what was refused is asked again.
const AGAIN: Duration = Duration::from_millis(10);
/// Time between two looks whether parts are still wanted, while none comes.
const WANTED_EVERY: Duration = Duration::from_millis(20);

/// A prompt that is wanted, until this is dropped.
#[derive(Debug, Default)]
pub(super) struct Wanted(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    is_cancelled: AtomicBool,
    /// Until neither side has it any more.
    held: OnceLock<Held>,
}

impl Drop for Wanted {
    fn drop(&mut self) {
        guard!(
            "handover.who-computes-hears-of-a-cancel",
            self.0.is_cancelled.store(true, Ordering::Relaxed)
        );
    }
}

/// The same for the thread that takes it.
#[derive(Debug)]
pub(super) struct Watch(Arc<Shared>);

impl Wanted {
    pub(super) fn watch(&self) -> Watch {
        Watch(Arc::clone(&self.0))
    }
}

impl Watch {
    fn is_cancelled(&self) -> bool {
        self.0.is_cancelled.load(Ordering::Relaxed)
    }
}

/// Room for what has come and has not gone on. A prompt that is begun comes to its end; what is full is
/// the next one's.
#[derive(Clone, Debug)]
pub(super) struct Room {
    held: Arc<AtomicU64>,
    max: u64,
}

impl Room {
    pub(super) fn new(max: u64) -> Self {
        Self { held: Arc::default(), max }
    }

    fn is_full(&self) -> bool {
        let is_full = self.held.load(Ordering::Relaxed) >= self.max;
        guard!("handover.begins-no-more-than-there-is-room-for", is_full, else false)
    }

    fn hold(&self, bytes: u64) -> Held {
        self.held.fetch_add(bytes, Ordering::Relaxed);
        Held { of: Arc::clone(&self.held), bytes }
    }
}

/// What a prompt takes of it.
#[derive(Debug)]
struct Held {
    of: Arc<AtomicU64>,
    bytes: u64,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.of.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// A prompt to be taken.
#[derive(Debug)]
pub(super) struct Order {
    pub(super) id: HandoverId,
    /// Counts the orders: no two have the same, though two have one id.
    pub(super) number: u64,
    pub(super) sheet: Sheet,
    pub(super) since: Instant,
    pub(super) watch: Watch,
}

#[derive(Debug)]
pub(super) enum Word {
    /// It is offered: a prompt of this content is being computed.
    Offered(u128),
    Part(Piece),
    /// All of it has come, so long after it was ordered.
    Whole(Duration),
    Failed(OfferError),
}

/// What a thread says of an order.
#[derive(Debug)]
pub(super) struct Said {
    pub(super) id: HandoverId,
    pub(super) number: u64,
    pub(super) word: Word,
}

/// Some of a prompt that has come.
#[derive(Debug)]
pub(super) enum Piece {
    /// To the host: bytes of one block.
    Host(Bytes),
    #[cfg(feature = "nixl")]
    Device(super::on_device::Blocks),
}

/// Consecutive layers of one block.
#[derive(Debug)]
pub(super) struct Bytes {
    pub(super) place: usize,
    pub(super) from: usize,
    pub(super) bytes: Vec<u8>,
}

impl Bytes {
    fn begins(part: Part, bytes: &[u8], form: Form) -> Self {
        let from = part.layer as usize * form.part_bytes as usize;
        Self { place: part.place as usize, from, bytes: bytes.to_vec() }
    }

    fn end(&self) -> usize {
        self.from + self.bytes.len()
    }

    /// Adds a part that lies behind them in their block; false for any other part.
    fn add(&mut self, part: Part, bytes: &[u8], form: Form) -> bool {
        let follows = part.place as usize == self.place
            && part.layer as usize * form.part_bytes as usize == self.end();
        if follows {
            self.bytes.extend_from_slice(bytes);
        }
        follows
    }
}

/// What bytes come by.
#[derive(Debug)]
pub(super) enum Taking {
    Host(Box<dyn Transfer>),
    #[cfg(feature = "nixl")]
    Device(Box<super::on_device::Taking>),
}

impl Taking {
    /// Makes room for a prompt of so many blocks.
    #[cfg_attr(not(feature = "nixl"), expect(unused_variables, reason = "the host's needs none"))]
    fn begin(&mut self, blocks: u64, form: Form) -> Result<(), OfferError> {
        match self {
            Self::Host(_) => Ok(()),
            #[cfg(feature = "nixl")]
            Self::Device(taking) => Ok(taking.begin(blocks * form.block_bytes() as u64)?),
        }
    }

    /// Takes parts of a prompt until all have come, and says each when it has come.
    fn wait(
        &mut self,
        (peer, pull): (&mut Peer, &mut Pull),
        form: Form,
        until: Instant,
        mut say: impl FnMut(Piece),
    ) -> Result<(), OfferError> {
        match self {
            Self::Host(transfer) => {
                // The layers of a block that come together are written together.
                let mut open: Option<Bytes> = None;
                let waited = pull.wait(peer, transfer.as_mut(), until, |part, bytes| {
                    if !open.as_mut().is_some_and(|open| open.add(part, bytes, form)) {
                        let before = open.replace(Bytes::begins(part, bytes, form));
                        before.into_iter().for_each(|bytes| say(Piece::Host(bytes)));
                    }
                    let whole = open.take_if(|open| open.end() >= form.block_bytes());
                    whole.into_iter().for_each(|bytes| say(Piece::Host(bytes)));
                });
                open.into_iter().for_each(|bytes| say(Piece::Host(bytes)));
                waited
            }
            #[cfg(feature = "nixl")]
            Self::Device(taking) => taking.wait((peer, pull), form, (call, until), &mut say),
        }
    }
}

/// When a call that begins now is to be over.
fn call() -> Instant {
    Instant::now() + CALL_MAX
}

/// Whether it may be otherwise in a moment: the node lacks a slot, a lease or a connection now.
fn passes(error: &OfferError) -> bool {
    let passes = error.class() == ErrorClass::Retry;
    guard!("handover.refusals-that-pass-are-waited-for", passes, else false)
}

/// A connection to a node, which is made when something is asked, and anew after an error of it.
#[derive(Debug)]
struct Link {
    member: Member,
    key: Key,
    peer: Option<Peer>,
}

impl Link {
    fn ask<T>(
        &mut self,
        ask: impl FnOnce(&mut Peer) -> Result<T, OfferError>,
    ) -> Result<T, OfferError> {
        let mut peer = match self.peer.take() {
            Some(peer) => peer,
            None => Peer::connect(&self.member, &self.key, call())?,
        };
        let answer = ask(&mut peer);
        // Behind a panic, too, it is gone.
        if !matches!(&answer, Err(OfferError::Peer(error)) if !error.is_refusal()) {
            self.peer = Some(peer);
        }
        answer
    }

    /// Lets a connection go that the node has ended: because nothing was asked for long, or to begin anew.
    fn look(&mut self) {
        if self.peer.is_some() {
            let look = |peer: &mut Peer| Ok(peer.find_and_pin(&[], CALL_MAX, call())?);
            guard!("handover.dead-connection-made-anew", drop(self.ask(look)));
        }
    }

    fn decline(&mut self, id: HandoverId) -> Result<(), OfferError> {
        self.ask(|peer| Pull::decline(peer, (id, 0), call()))
    }
}

/// The orders of a node, the next one first.
struct Orders<'a> {
    received: &'a Receiver<Order>,
    waiting: VecDeque<Order>,
}

impl Orders<'_> {
    fn next(&mut self) -> Option<Order> {
        self.waiting.pop_front().or_else(|| self.received.recv().ok())
    }

    /// Declines those that are not wanted any more, though it is not their turn: they would be computed for
    /// nobody.
    fn decline_cancelled(&mut self, link: &mut Link) {
        self.waiting.extend(self.received.try_iter());
        // Of a node that does not hear one, no more is waited for. It is said again, at the latest when it is
        // its turn.
        let mut hears = guard!("handover.cancels-overtake-what-is-taken", true, else false);
        self.waiting.retain(|order| {
            let is_cancelled = hears && order.watch.is_cancelled();
            hears = hears && (!is_cancelled || link.decline(order.id).is_ok());
            !(is_cancelled && hears)
        });
    }
}

/// The thread of one node that computes prompts. It ends with its orders.
#[derive(Debug)]
pub(super) struct Source {
    link: Link,
    taking: Taking,
    form: Form,
    lasts: Duration,
    room: Room,
}

impl Source {
    pub(super) fn new(
        (member, key): (Member, Key),
        (taking, form): (Taking, Form),
        (lasts, room): (Duration, Room),
    ) -> Self {
        let lasts = lasts.min(LASTS_MAX);
        Self { link: Link { member, key, peer: None }, taking, form, lasts, room }
    }

    pub(super) fn run(mut self, received: &Receiver<Order>, say: &Sender<Said>) {
        let mut orders = Orders { received, waiting: VecDeque::new() };
        while let Some(order) = orders.next() {
            let (id, number) = (order.id, order.number);
            let tell = |word| say.send(Said { id, number, word }).is_ok();
            // What waits behind another one has its time, too.
            let until = Instant::now() + self.lasts;
            let take = || {
                // If nobody hears it, it is cancelled, too.
                self.take((&order, until), &mut orders, |word| _ = tell(word))
            };
            // A transfer is the caller's code.
            let took = panic::catch_unwind(AssertUnwindSafe(take)).unwrap_or_else(|of| {
                guard!("handover.transfers-may-panic", drop(of), else panic::resume_unwind(of));
                Err(OfferError::Peer(PeerError::Closed))
            });
            // Nobody waits here until the node has heard it.
            let (pull, word) = match took {
                Ok(pull) => (Some(pull), Word::Whole(order.since.elapsed())),
                Err(error) => (None, Word::Failed(error)),
            };
            let is_heard = tell(word);
            self.tell_node(id, pull.as_ref());
            // Orders behind the last one that anybody hears are cancelled, and the node is told of each.
            let is_over = self.link.peer.is_none();
            if !is_heard && guard!("handover.all-that-is-left-is-declined", is_over, else true) {
                return;
            }
        }
    }

    /// Tells the node what has become of an order. It has some time for that if it has no room now.
    fn tell_node(&mut self, id: HandoverId, pull: Option<&Pull>) {
        let until = call();
        loop {
            let told = match pull {
                Some(pull) => self.link.ask(|peer| pull.take(peer, call())),
                // So that it is not kept for nobody, nor when it is offered later.
                None => guard!(
                    "handover.what-fails-is-declined",
                    self.link.decline(id),
                    else Ok(())
                ),
            };
            if !told.is_err_and(|error| passes(&error) && Instant::now() < until) {
                return;
            }
            std::thread::park_timeout(AGAIN);
        }
    }

    /// Takes all of a prompt.
    fn take(
        &mut self,
        (order, until): (&Order, Instant),
        orders: &mut Orders<'_>,
        mut say: impl FnMut(Word),
    ) -> Result<Pull, OfferError> {
        self.link.look();
        let is_over = || order.watch.is_cancelled() || Instant::now() >= until;
        let mut pull = loop {
            let is_over = is_over();
            orders.decline_cancelled(&mut self.link);
            match self.open(order.id) {
                Ok(Some(pull)) => break pull,
                Ok(None) if is_over => return Err(OfferError::Late { left: 0 }),
                Err(error) if is_over || !passes(&error) => return Err(error),
                Ok(None) => std::thread::park_timeout(PAUSE),
                Err(_) => std::thread::park_timeout(AGAIN),
            }
        };
        let content = pull.sheet().content;
        if *pull.sheet() != (Sheet { content, ..order.sheet.clone() }) {
            // Of another model or another length. What its content is, the request says.
            return Err(OfferError::Withdrawn);
        }
        let (blocks, form) = (self.form.blocks(order.sheet.tokens), self.form);
        order.watch.0.held.get_or_init(|| self.room.hold(blocks * form.block_bytes() as u64));
        self.taking.begin(blocks, form)?;
        say(Word::Offered(content));
        loop {
            if order.watch.is_cancelled() {
                return Err(OfferError::Late { left: pull.left() });
            }
            orders.decline_cancelled(&mut self.link);
            let next = until.min(Instant::now() + WANTED_EVERY);
            let taking = &mut self.taking;
            let mut piece = |piece| say(Word::Part(piece));
            let took = self.link.ask(|peer| taking.wait((peer, &mut pull), form, next, &mut piece));
            match took {
                Ok(()) => return Ok(pull),
                Err(OfferError::Late { .. }) if Instant::now() < until => {}
                Err(error) if passes(&error) && Instant::now() < until => {
                    std::thread::park_timeout(AGAIN);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Looks for a prompt, if there is room for it here.
    fn open(&mut self, id: HandoverId) -> Result<Option<Pull>, OfferError> {
        if self.room.is_full() {
            return Ok(None);
        }
        // A sheet is small, and read by the host: it comes over the connection.
        let open =
            |peer: &mut Peer| Pull::open(peer, &mut SocketTransfer, (id, 0), CALL_MAX, call());
        self.link.ask(open)
    }
}
