//! The side that goes on: takes prompts from the nodes that compute them, each in a thread for a node, and computes itself what
//! does not come.

use std::collections::{HashMap, HashSet};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use cuda_driver::Device;
use kv_cache::Sequence;
use kv_cache::kv_manager::{Adoption, GroupId};
use kv_pool::BlockId;
use kv_remote::handover::{HandoverError, Pull, Sheet};
use kv_remote::{Key, Member, Peer, SocketTransfer, Transfer};

use super::{Form, id_of, whole_number};
use crate::engine::RunError;
use crate::engine::cache::Cache;
use crate::nodes::{HandoverReport, NodeConfig, NodeStartError, NodeTransfer};

/// How long one call may take.
const CALL_MAX: Duration = Duration::from_secs(2);
/// Time between two looks for an offer that is not there.
const PAUSE: Duration = Duration::from_millis(1);

/// A request whose prompt is to come.
#[derive(Debug)]
struct Order {
    request: usize,
    number: u64,
    sheet: Sheet,
    since: Instant,
}

/// A prompt that has come.
#[derive(Debug)]
enum Prompt {
    /// To the host, block by block.
    Host(Vec<u8>),
    #[cfg(feature = "nixl")]
    Device(super::on_device::Prompt),
}

impl Prompt {
    fn blocks(&self, form: Form) -> usize {
        match self {
            Self::Host(bytes) => bytes.len() / form.block_bytes(),
            #[cfg(feature = "nixl")]
            Self::Device(prompt) => prompt.blocks(),
        }
    }

    /// Fills blocks, each with its place in the prompt; how many of the first ones are right.
    fn fill(
        self,
        cache: &impl Cache,
        form: Form,
        blocks: &[(usize, BlockId)],
    ) -> Result<usize, RunError> {
        match self {
            Self::Host(all) => {
                let bytes = form.block_bytes();
                for (right, &(place, id)) in blocks.iter().enumerate() {
                    let Some(block) = all.get(place * bytes..(place + 1) * bytes) else {
                        return Ok(right);
                    };
                    cache.write_block(id, block)?;
                }
                Ok(blocks.len())
            }
            #[cfg(feature = "nixl")]
            Self::Device(prompt) => prompt.fill(cache, form, blocks),
        }
    }
}

/// What has come of an order; no prompt if it has not.
#[derive(Debug)]
struct Came {
    request: usize,
    prompt: Option<Prompt>,
    time: Duration,
}

/// A sequence that is being filled: its blocks may be written when a step is complete.
#[derive(Debug)]
struct Adopting {
    request: usize,
    sequence: Sequence,
    adoption: Adoption,
    prompt: Option<Prompt>,
    step: u64,
}

#[derive(Debug)]
pub(in crate::engine) struct Decode {
    config: NodeConfig,
    form: Form,
    orders: Vec<Sender<Order>>,
    came: Receiver<Came>,
    /// Requests whose prompts are on their way.
    wanted: HashSet<usize>,
    /// Prompts that have come.
    ready: HashMap<usize, Prompt>,
    adopting: Vec<Adopting>,
    pub(super) report: HandoverReport,
    /// How long each prompt was waited for, from when it was known of.
    pub(super) times: Vec<Duration>,
}

impl Decode {
    pub(super) fn new(
        node: &NodeConfig,
        form: Form,
        device: &Device,
    ) -> Result<Self, NodeStartError> {
        let (say, came) = mpsc::channel();
        let orders = (0..node.prefill).map(|of| {
            let (orders, received) = mpsc::channel();
            let puller = Puller {
                member: node.member(of),
                key: node.key.clone(),
                taking: Taking::new(node.transfer, device)?,
                form,
                lasts: node.handover,
                peer: None,
            };
            let say = say.clone();
            let thread = std::thread::Builder::new().name(format!("pull-{of}"));
            thread.spawn(move || puller.run(&received, &say))?;
            Ok(orders)
        });
        let orders = orders.collect::<Result<_, NodeStartError>>()?;
        Ok(Self {
            config: node.clone(),
            form,
            orders,
            came,
            wanted: HashSet::new(),
            ready: HashMap::new(),
            adopting: Vec::new(),
            report: HandoverReport::default(),
            times: Vec::new(),
        })
    }

    /// Asks for the prompt of a request.
    pub(in crate::engine) fn want(&mut self, request: usize, prompt_tokens: u64) {
        let number = whole_number(&self.config, request);
        let of = (number % self.orders.len().max(1) as u64) as usize;
        let (sheet, since) = (self.form.sheet(prompt_tokens), Instant::now());
        let order = Order { request, number, sheet, since };
        // Without its thread, the prompt is computed here.
        if self.orders.get(of).is_some_and(|orders| orders.send(order).is_ok()) {
            self.wanted.insert(request);
        }
    }

    /// Takes in what has come.
    pub(in crate::engine) fn hear(&mut self) {
        for Came { request, prompt, time } in self.came.try_iter() {
            if !self.wanted.remove(&request) {
                continue;
            }
            match prompt {
                Some(prompt) => {
                    let blocks = prompt.blocks(self.form);
                    self.report.handed_over += 1;
                    self.report.handover_blocks += blocks as u64;
                    self.report.handover_bytes += (blocks * self.form.block_bytes()) as u64;
                    self.times.push(time);
                    self.ready.insert(request, prompt);
                }
                None => self.report.handover_recomputed += 1,
            }
        }
    }

    /// Whether a request's prompt is still on its way.
    pub(in crate::engine) fn is_wanted(&self, request: usize) -> bool {
        self.wanted.contains(&request)
    }

    /// Whether a request's prompt has come.
    pub(in crate::engine) fn is_ready(&self, request: usize) -> bool {
        self.ready.contains_key(&request)
    }

    pub(super) fn waits(&self) -> bool {
        !self.wanted.is_empty() || !self.adopting.is_empty()
    }

    /// A request was admitted whose blocks a transfer fills behind step `step`. What is cached here, is not filled.
    pub(in crate::engine) fn adopt(
        &mut self,
        request: usize,
        sequence: Sequence,
        adoption: Adoption,
        step: u64,
    ) {
        let prompt = self.ready.remove(&request);
        self.adopting.push(Adopting { request, sequence, adoption, prompt, step });
    }

    /// All of a request's blocks are cached here.
    pub(in crate::engine) fn needs_nothing(&mut self, request: usize) {
        self.ready.remove(&request);
    }

    /// Fills the blocks of sequences whose step is complete: these may go on.
    pub(in crate::engine) fn fill(
        &mut self,
        cache: &mut impl Cache,
        completed: u64,
    ) -> Result<Vec<(usize, Sequence)>, RunError> {
        let mut filled = Vec::new();
        for of in self.adopting.extract_if(.., |of| of.step <= completed) {
            let Adopting { request, mut sequence, adoption, prompt, .. } = of;
            let blocks: Vec<_> = adoption.blocks(GroupId(0)).collect();
            let fill = prompt.map_or(Ok(0), |prompt| prompt.fill(cache, self.form, &blocks));
            let right = fill?;
            self.report.handover_blocks_wrong += (blocks.len() - right) as u64;
            cache.adopted(&mut sequence, adoption, right)?;
            filled.push((request, sequence));
        }
        Ok(filled)
    }
}

/// The thread of one node that computes prompts.
struct Puller {
    member: Member,
    key: Key,
    taking: Taking,
    form: Form,
    lasts: Duration,
    peer: Option<Peer>,
}

/// How parts come.
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

    /// Takes all parts of a prompt.
    fn wait(
        &mut self,
        (peer, pull): (&mut Peer, &mut Pull),
        form: Form,
        until: Instant,
    ) -> Result<Prompt, HandoverError> {
        match self {
            Self::Host(transfer) => {
                let (parts, part_bytes) = (pull.left(), form.part_bytes as usize);
                let mut all = vec![0; parts * part_bytes];
                pull.wait(peer, transfer.as_mut(), until, |part, bytes| {
                    let at =
                        part.place as usize * form.block_bytes() + part.layer as usize * part_bytes;
                    if let Some(to) = all.get_mut(at..at + bytes.len()) {
                        to.copy_from_slice(bytes);
                    }
                })?;
                Ok(Prompt::Host(all))
            }
            #[cfg(feature = "nixl")]
            Self::Device(taking) => {
                Ok(Prompt::Device(taking.wait((peer, pull), form, (call, until))?))
            }
        }
    }
}

/// When a call that begins now is to be over.
fn call() -> Instant {
    Instant::now() + CALL_MAX
}

impl Puller {
    fn run(mut self, orders: &Receiver<Order>, say: &Sender<Came>) {
        while let Ok(order) = orders.recv() {
            // What waits behind another one has its time, too.
            let prompt = self.pull(&order, Instant::now() + self.lasts).ok();
            let came = Came { request: order.request, prompt, time: order.since.elapsed() };
            if say.send(came).is_err() {
                return;
            }
        }
    }

    fn pull(&mut self, order: &Order, until: Instant) -> Result<Prompt, HandoverError> {
        let mut peer = match self.peer.take() {
            Some(peer) => peer,
            None => Peer::connect(&self.member, &self.key, call())?,
        };
        let pulled = pull(&mut peer, &mut self.taking, self.form, order, until);
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
    form: Form,
    order: &Order,
    until: Instant,
) -> Result<Prompt, HandoverError> {
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
    match taking.wait((peer, &mut pull), form, until) {
        Ok(prompt) => {
            pull.take(peer, call())?;
            Ok(prompt)
        }
        Err(late @ HandoverError::Late { .. }) => {
            pull.cancel(peer, call())?;
            Err(late)
        }
        Err(error) => Err(error),
    }
}
