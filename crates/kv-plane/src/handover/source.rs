//! The threads that take prompts from the nodes that compute them, one for each node.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use cuda_driver::guard;
use kv_remote::handover::{HandoverError as OfferError, Part, Pull, Sheet};
use kv_remote::{Key, Member, Peer, SocketTransfer, Transfer};

use super::HandoverId;
use super::form::Form;

/// How long a call of a node may take.
const CALL_MAX: Duration = Duration::from_secs(2);
/// Time between two looks for an offer that is not there.
const PAUSE: Duration = Duration::from_millis(1);
/// Time between two looks whether parts are still wanted, while none comes.
const WANTED_EVERY: Duration = Duration::from_millis(20);

/// A prompt that is wanted, until this is dropped.
#[derive(Debug, Default)]
pub(super) struct Wanted(Arc<AtomicBool>);

impl Drop for Wanted {
    fn drop(&mut self) {
        guard!("handover.who-computes-hears-of-a-cancel", self.0.store(true, Ordering::Relaxed));
    }
}

/// The same for the thread that takes it.
#[derive(Debug)]
pub(super) struct Watch(Arc<AtomicBool>);

impl Wanted {
    pub(super) fn watch(&self) -> Watch {
        Watch(Arc::clone(&self.0))
    }
}

impl Watch {
    fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
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
    /// It is offered: its prompt is being computed.
    Offered,
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

/// The thread of one node that computes prompts. It ends with its orders.
#[derive(Debug)]
pub(super) struct Source {
    member: Member,
    key: Key,
    taking: Taking,
    form: Form,
    lasts: Duration,
    peer: Option<Peer>,
}

impl Source {
    pub(super) fn new(
        (member, key): (Member, Key),
        (taking, form): (Taking, Form),
        lasts: Duration,
    ) -> Self {
        Self { member, key, taking, form, lasts, peer: None }
    }

    pub(super) fn run(mut self, orders: &Receiver<Order>, say: &Sender<Said>) {
        while let Ok(order) = orders.recv() {
            let (id, number) = (order.id, order.number);
            let tell = |word| say.send(Said { id, number, word });
            // What waits behind another one has its time, too.
            let until = Instant::now().checked_add(self.lasts);
            let pulled = self.pull(&order, until.unwrap_or_else(call), |word| {
                // If nobody hears it, it is seen below.
                let _ = tell(word);
            });
            let ended = match pulled {
                Ok(()) => Word::Whole(order.since.elapsed()),
                Err(error) => Word::Failed(error),
            };
            if tell(ended).is_err() {
                return;
            }
        }
    }

    fn pull(
        &mut self,
        order: &Order,
        until: Instant,
        say: impl FnMut(Word),
    ) -> Result<(), OfferError> {
        // Its node may have ended it: because nothing was asked for long, or to begin anew.
        let kept = self.peer.take().and_then(|mut peer| {
            let asked = peer.find_and_pin(&[], CALL_MAX, call());
            let lives = asked.err().is_none_or(|error| error.is_refusal());
            guard!("handover.dead-connection-made-anew", lives, else true).then_some(peer)
        });
        let mut peer = match kept {
            Some(peer) => peer,
            None => Peer::connect(&self.member, &self.key, call())?,
        };
        let pulled = pull(&mut peer, &mut self.taking, (self.form, order, until), say);
        // After an error of the connection, another one is made for the next.
        if !matches!(pulled, Err(OfferError::Peer(_))) {
            self.peer = Some(peer);
        }
        pulled
    }
}

fn pull(
    peer: &mut Peer,
    taking: &mut Taking,
    (form, order, until): (Form, &Order, Instant),
    mut say: impl FnMut(Word),
) -> Result<(), OfferError> {
    let mut pull = loop {
        let is_over = order.watch.is_cancelled() || Instant::now() >= until;
        // A sheet is small, and read by the host: it comes over the connection.
        if let Some(pull) = Pull::open(peer, &mut SocketTransfer, (order.id, 0), CALL_MAX, call())?
        {
            break pull;
        }
        if is_over {
            // So that it is not kept for nobody when it is offered.
            Pull::decline(peer, (order.id, 0), call())?;
            return Err(OfferError::Late { left: 0 });
        }
        std::thread::park_timeout(PAUSE);
    };
    if *pull.sheet() != order.sheet {
        // Of another model or another prompt.
        pull.cancel(peer, call())?;
        return Err(OfferError::Withdrawn);
    }
    taking.begin(form.blocks(order.sheet.tokens), form)?;
    say(Word::Offered);
    loop {
        if order.watch.is_cancelled() {
            let left = pull.left();
            pull.cancel(peer, call())?;
            return Err(OfferError::Late { left });
        }
        let next = until.min(Instant::now() + WANTED_EVERY);
        match taking.wait((peer, &mut pull), form, next, |piece| say(Word::Part(piece))) {
            Ok(()) => return pull.take(peer, call()),
            Err(OfferError::Late { .. }) if Instant::now() < until => {}
            Err(late @ OfferError::Late { .. }) => {
                pull.cancel(peer, call())?;
                return Err(late);
            }
            Err(error) => return Err(error),
        }
    }
}
