//! The side that goes on: takes prompts from the nodes that compute them, each in a thread for a node, and computes itself what
//! does not come.

use std::collections::{HashMap, HashSet};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use kv_cache::Sequence;
use kv_cache::kv_manager::{Adoption, GroupId};
use kv_remote::handover::{HandoverError, Pull, Sheet};
use kv_remote::{Key, Member, Peer, Transfer};

use super::{Form, id_of, whole_number};
use crate::engine::RunError;
use crate::engine::cache::Cache;
use crate::nodes::{HandoverReport, NodeConfig, NodeStartError};

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

/// A prompt that has come, block by block; none if it has not.
#[derive(Debug)]
struct Came {
    request: usize,
    blocks: Option<Vec<u8>>,
    time: Duration,
}

/// A sequence that is being filled: its blocks may be written when a step is complete.
#[derive(Debug)]
struct Adopting {
    request: usize,
    sequence: Sequence,
    adoption: Adoption,
    blocks: Vec<u8>,
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
    ready: HashMap<usize, Vec<u8>>,
    adopting: Vec<Adopting>,
    pub(super) report: HandoverReport,
    /// How long each prompt was waited for, from when it was known of.
    pub(super) times: Vec<Duration>,
}

impl Decode {
    pub(super) fn new(node: &NodeConfig, form: Form) -> Result<Self, NodeStartError> {
        let (say, came) = mpsc::channel();
        let orders = (0..node.prefill).map(|of| {
            let (orders, received) = mpsc::channel();
            let puller = Puller {
                member: node.member(of),
                key: node.key.clone(),
                transfer: node.transfer.open()?,
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
        for Came { request, blocks, time } in self.came.try_iter() {
            if !self.wanted.remove(&request) {
                continue;
            }
            match blocks {
                Some(blocks) => {
                    self.report.handed_over += 1;
                    self.report.handover_blocks += (blocks.len() / self.form.block_bytes()) as u64;
                    self.report.handover_bytes += blocks.len() as u64;
                    self.times.push(time);
                    self.ready.insert(request, blocks);
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
        let blocks = self.ready.remove(&request).unwrap_or_default();
        self.adopting.push(Adopting { request, sequence, adoption, blocks, step });
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
            let Adopting { request, mut sequence, adoption, blocks, .. } = of;
            let bytes = self.form.block_bytes();
            let mut right = 0;
            for (place, id) in adoption.blocks(GroupId(0)) {
                let Some(block) = blocks.get(place * bytes..(place + 1) * bytes) else { break };
                cache.write_block(id, block)?;
                right += 1;
            }
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
    transfer: Box<dyn Transfer>,
    form: Form,
    lasts: Duration,
    peer: Option<Peer>,
}

impl Puller {
    fn run(mut self, orders: &Receiver<Order>, say: &Sender<Came>) {
        while let Ok(order) = orders.recv() {
            // What waits behind another one has its time, too.
            let blocks = self.pull(&order, Instant::now() + self.lasts).ok();
            let came = Came { request: order.request, blocks, time: order.since.elapsed() };
            if say.send(came).is_err() {
                return;
            }
        }
    }

    fn pull(&mut self, order: &Order, until: Instant) -> Result<Vec<u8>, HandoverError> {
        let mut peer = match self.peer.take() {
            Some(peer) => peer,
            None => Peer::connect(&self.member, &self.key, Instant::now() + CALL_MAX)?,
        };
        let transfer = self.transfer.as_mut();
        let pulled = pull(&mut peer, transfer, self.form, order, until);
        // After an error of the connection, another one is made for the next.
        if !matches!(pulled, Err(HandoverError::Peer(_))) {
            self.peer = Some(peer);
        }
        pulled
    }
}

fn pull(
    peer: &mut Peer,
    transfer: &mut dyn Transfer,
    form: Form,
    order: &Order,
    until: Instant,
) -> Result<Vec<u8>, HandoverError> {
    let call = || Instant::now() + CALL_MAX;
    let id = id_of(order.number);
    let mut pull = loop {
        if let Some(pull) = Pull::open(peer, transfer, (id, 0), CALL_MAX, call())? {
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
    let (blocks, part_bytes) = (form.blocks(order.sheet.tokens), form.part_bytes as usize);
    let mut all = vec![0; blocks as usize * form.block_bytes()];
    let waited = pull.wait(peer, transfer, until, |part, bytes| {
        let at = part.place as usize * form.block_bytes() + part.layer as usize * part_bytes;
        if let Some(to) = all.get_mut(at..at + bytes.len()) {
            to.copy_from_slice(bytes);
        }
    });
    match waited {
        Ok(()) => pull.take(peer, call())?,
        Err(late @ HandoverError::Late { .. }) => {
            pull.cancel(peer, call())?;
            return Err(late);
        }
        Err(error) => return Err(error),
    }
    Ok(all)
}
