//! The threads that take prompts from the nodes that compute them, one for each node.

use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use cuda_driver::Device;
use cuda_driver::guard;
use kv_remote::handover::{HandoverError, Part, Pull, Sheet};
use kv_remote::{Key, Member, Peer, SocketTransfer, Transfer};

use super::{Form, id_of};
use crate::nodes::{NodeStartError, NodeTransfer};

const CALL_MAX: Duration = Duration::from_secs(2);
/// Time between two looks for an offer that is not there.
const PAUSE: Duration = Duration::from_millis(1);

#[derive(Debug)]
pub(super) struct Order {
    pub(super) request: usize,
    pub(super) number: u64,
    pub(super) sheet: Sheet,
    pub(super) since: Instant,
}

#[derive(Debug)]
pub(super) enum Word {
    /// It is offered: its prompt is being computed.
    Offered,
    Came(Piece),
    /// All of it has come, so long after it was ordered.
    Whole(Duration),
    Failed,
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

/// The thread of one node that computes prompts.
pub(super) struct Puller {
    member: Member,
    key: Key,
    taking: Taking,
    form: Form,
    lasts: Duration,
    peer: Option<Peer>,
}

#[derive(Debug)]
enum Taking {
    Host(Box<dyn Transfer>),
    #[cfg(feature = "nixl")]
    Device(Box<super::on_device::Taking>),
}

impl Taking {
    #[cfg_attr(not(feature = "nixl"), expect(unused_variables))]
    fn new(transfer: NodeTransfer, device: &Device) -> Result<Self, NodeStartError> {
        match transfer {
            #[cfg(feature = "nixl")]
            NodeTransfer::NixlDevice => {
                Ok(Self::Device(Box::new(super::on_device::Taking::new(device)?)))
            }
            _ => Ok(Self::Host(transfer.open()?)),
        }
    }

    /// Takes all parts of a prompt, and says each when it has come.
    fn wait(
        &mut self,
        (peer, pull): (&mut Peer, &mut Pull),
        form: Form,
        until: Instant,
        mut say: impl FnMut(Piece),
    ) -> Result<(), HandoverError> {
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
            Self::Device(taking) => {
                taking.wait((peer, pull), form, (call, until), |blocks| say(Piece::Device(blocks)))
            }
        }
    }
}

/// When a call that begins now is to be over.
fn call() -> Instant {
    Instant::now() + CALL_MAX
}

impl Puller {
    pub(super) fn new(
        (member, key): (Member, Key),
        (transfer, device): (NodeTransfer, &Device),
        form: Form,
        lasts: Duration,
    ) -> Result<Self, NodeStartError> {
        let taking = Taking::new(transfer, device)?;
        Ok(Self { member, key, taking, form, lasts, peer: None })
    }

    pub(super) fn run(mut self, orders: &Receiver<Order>, say: &Sender<(usize, Word)>) {
        while let Ok(order) = orders.recv() {
            let tell = |word| say.send((order.request, word));
            // What waits behind another one has its time, too.
            let pulled = self.pull(&order, Instant::now() + self.lasts, |word| {
                // If nobody hears it, it is seen below.
                let _ = tell(word);
            });
            let ended = match pulled {
                Ok(()) => Word::Whole(order.since.elapsed()),
                Err(_) => Word::Failed,
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
    ) -> Result<(), HandoverError> {
        // Its node may have ended it: because nothing was asked for long, or to begin anew.
        let kept = self.peer.take().and_then(|mut peer| {
            let asked = peer.find_and_pin(&[], CALL_MAX, call());
            let lives = asked.err().is_none_or(|error| error.is_refusal());
            guard!("replay.dead-connection-made-anew", lives, else true).then_some(peer)
        });
        let mut peer = match kept {
            Some(peer) => peer,
            None => Peer::connect(&self.member, &self.key, call())?,
        };
        let pulled = pull(&mut peer, &mut self.taking, (self.form, order, until), say);
        // After an error of the connection, another one is made for the next.
        if !matches!(pulled, Err(HandoverError::Peer(_))) {
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
) -> Result<(), HandoverError> {
    let id = id_of(order.number);
    let mut pull = loop {
        // A sheet is small, and read by the host: it comes over the connection.
        if let Some(pull) = Pull::open(peer, &mut SocketTransfer, (id, 0), CALL_MAX, call())? {
            break pull;
        }
        if Instant::now() >= until {
            // So that it is not kept for nobody when it is offered.
            Pull::decline(peer, (id, 0), call())?;
            return Err(HandoverError::Late { left: 0 });
        }
        std::thread::park_timeout(PAUSE);
    };
    if *pull.sheet() != order.sheet {
        // Of another model or another prompt.
        pull.cancel(peer, call())?;
        return Err(HandoverError::Withdrawn);
    }
    say(Word::Offered);
    match taking.wait((peer, &mut pull), form, until, |piece| say(Word::Came(piece))) {
        Ok(()) => pull.take(peer, call()),
        Err(late @ HandoverError::Late { .. }) => {
            pull.cancel(peer, call())?;
            Err(late)
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::sync::Arc;

    use kv_pool::clock::SystemClock;
    use kv_remote::{HostMemory, Node, NodeOptions, Server, ServerOptions};

    use super::*;
    use crate::device::{SimSizes, open};
    use crate::engine::build_cache;
    use crate::nodes::NodeConfig;
    use crate::trace::Trace;

    #[test]
    fn a_connection_that_its_node_has_ended_is_made_anew_for_the_next_prompt() {
        let config = super::super::tests::config(64, 1);
        let trace = Trace::new(vec![super::super::tests::request((1, 0), 1, 0)]);
        let devices = open(&"sim".parse().unwrap(), SimSizes::for_config(&config)).unwrap();
        let cache = build_cache(&config, &trace, &devices).unwrap();
        let format = cache.manager().formats()[0];
        let key = Key::new(&[7; 32]).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let node = NodeConfig::new(1, 2, folder.path(), key.clone(), 1 << 20);
        let form = Form::new(&config, &node, format).unwrap();
        let memory = Arc::new(HostMemory::new(1 << 20).unwrap());
        let served = Node::new(&NodeOptions::new("a", 4096), memory, Arc::new(SystemClock::new()));
        let mut options = ServerOptions::new("tcp:127.0.0.1:0".parse().unwrap(), key.clone());
        options.idle_max = Duration::ZERO;
        let server = Server::start(Arc::new(served.unwrap()), options).unwrap();
        let member = Member { name: "a".to_owned(), address: server.address().clone() };
        let device = (NodeTransfer::Sockets, &devices.devices[0]);
        let mut puller = Puller::new((member, key), device, form, Duration::ZERO).unwrap();
        for number in 0..3 {
            let (sheet, since) = (form.sheet(64), Instant::now());
            let order = Order { request: 0, number, sheet, since };
            // Nobody offers it, which is heard over a connection.
            let pulled = puller.pull(&order, since, |_| ());
            assert!(matches!(pulled, Err(HandoverError::Late { left: 0 })), "{number}: {pulled:?}");
            while server.stats().idle <= number {
                assert!(since.elapsed() < Duration::from_secs(60), "{:?}", server.stats());
                std::thread::yield_now();
            }
        }
    }
}
