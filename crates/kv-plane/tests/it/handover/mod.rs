//! Sequences that one cache computes and another one goes on with: both engines in one thread, each
//! iterated as far as a test wants, so that which of them is late is no chance.

mod life;
mod refusals;
mod trouble;

use kv_plane::handover::SourceId;
use kv_plane::remote::{Key, Member, Server, ServerOptions};

use crate::prelude::*;

/// Layers of the shape that machines of tests have.
const LAYERS: u64 = 4;
const LONG: Duration = Duration::from_secs(120);
/// After so long, what a test waits for does not come.
const HANG: Duration = Duration::from_secs(25);
const ID: HandoverId = HandoverId(77);

fn key() -> Key {
    Key::new(b"a key of more than 16 bytes").unwrap()
}

/// Calls it until it answers yes.
#[track_caller]
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let since = Instant::now();
    while !is_so() {
        assert!(since.elapsed() < HANG, "{what}");
        std::thread::yield_now();
    }
}

/// A node with so many bytes of memory that is served, and how others find it.
fn served(bytes: u64, idle_max: Option<Duration>) -> (Arc<Node>, Server, Member) {
    let mut options = NodeOptions::new("prefill", 4096);
    options.lease_max = LONG;
    let memory = Arc::new(HostMemory::new(bytes).unwrap());
    let node = Arc::new(Node::new(&options, memory, Arc::new(SystemClock::new())).unwrap());
    let mut options = ServerOptions::new("tcp:127.0.0.1:0".parse().unwrap(), key());
    options.idle_max = idle_max.unwrap_or(options.idle_max);
    let server = Server::start(Arc::clone(&node), options).unwrap();
    let member = Member { name: "prefill".to_owned(), address: server.address().clone() };
    (node, server, member)
}

/// An engine that computes prompts, in chunks of 4 blocks of 4 tokens.
struct Computes {
    machine: Machine,
    engine: Engine,
    side: Prefill,
    server: Server,
    member: Member,
}

impl Computes {
    fn new(node_bytes: u64) -> Self {
        let (machine, mut engine) = Machine::one(64, 0);
        engine.chunk = 16;
        let (node, server, member) = served(node_bytes, None);
        let side = Prefill::new(&engine.cache, node, LONG).unwrap();
        Self { machine, engine, side, server, member }
    }

    fn begin(&mut self, id: HandoverId, prompt: &Prompt) -> Live {
        let live = self.engine.admit(prompt).unwrap();
        self.side.offer(id, &live.sequence);
        live
    }

    /// Computes a chunk to its end.
    fn compute(&mut self, live: &mut Live) {
        self.engine.run(&mut [live]).unwrap();
        self.engine.drain().unwrap();
    }

    fn give(&mut self, id: HandoverId, live: &mut Live) {
        self.side.give(&self.engine.cache, id, &mut live.sequence).unwrap();
    }

    /// Computes what is left of a prompt, and hands it over.
    fn finish(&mut self, id: HandoverId, mut live: Live) {
        while live.sequence.to_compute() > 0 {
            self.compute(&mut live);
            self.give(id, &mut live);
        }
        self.engine.extend(&mut live, 0xF1, 1).unwrap();
        self.side.finish(&mut self.engine.cache, id, live.sequence).unwrap();
    }

    /// Computes a prompt that others find all of.
    fn compute_all(&mut self, id: HandoverId, prompt: &Prompt) {
        let live = self.begin(id, prompt);
        self.finish(id, live);
    }

    /// How the only one has ended.
    fn ended(&mut self) -> Ended {
        let mut ended = Vec::new();
        until("it has not ended", || {
            ended.extend(self.side.poll(&self.engine.cache));
            !ended.is_empty()
        });
        assert_eq!(ended.len(), 1);
        ended.remove(0).1
    }

    fn close(self) {
        let Self { machine, engine, side, server, .. } = self;
        drop((side, server));
        machine.close(engine);
    }
}

/// An engine that goes on with them.
struct GoesOn {
    machine: Machine,
    engine: Engine,
    side: Decode,
    source: SourceId,
    came: Vec<(HandoverId, Came)>,
}

impl GoesOn {
    fn new(member: &Member, device_blocks: u32, host_blocks: u32) -> Self {
        let (machine, engine) = Machine::one(device_blocks, host_blocks);
        let mut side = Decode::new(&engine.cache, key(), LONG).unwrap();
        let transfer = Box::new(SocketTransfer);
        let source = side.add(member.clone(), transfer).unwrap();
        Self { machine, engine, side, source, came: Vec::new() }
    }

    fn want(&mut self, id: HandoverId, prompt: &Prompt) {
        self.side.want(id, self.source, prompt.len()).unwrap();
    }

    fn poll(&mut self) {
        self.came.extend(self.side.poll(&mut self.engine.cache).unwrap());
    }

    fn until(&mut self, what: &str, is_so: impl Fn(&Self) -> bool) {
        until(what, || {
            self.poll();
            is_so(self)
        });
    }

    fn until_coming(&mut self, id: HandoverId, coming: Coming) {
        self.until("it does not come so far", |of| of.side.coming(id) == Some(coming));
    }

    fn adopt(&mut self, id: HandoverId, prompt: &Prompt) -> Adopted {
        let mut request = self.engine.request(prompt);
        self.side.adopt(&mut self.engine.cache, id, &mut request).unwrap()
    }

    /// Adopts an offered prompt, and stages the step behind which its blocks are filled.
    fn fill(&mut self, id: HandoverId, prompt: &Prompt) {
        assert!(matches!(self.adopt(id, prompt), Adopted::Filling));
        self.engine.idle().unwrap();
    }

    fn early_blocks(&self) -> u64 {
        self.side.stats().early_parts / LAYERS
    }

    /// The sequence that goes on, and where its KV ends.
    fn ready(&mut self, prompt: &Prompt) -> (Live, u64) {
        let is_ready = |(_, came): &(_, Came)| matches!(came, Came::Ready { .. });
        self.until("it does not go on", |of| of.came.iter().any(is_ready));
        let at = self.came.iter().position(is_ready).unwrap();
        let Came::Ready { sequence, end } = self.came.remove(at).1 else { unreachable!() };
        (Live::new(sequence, prompt), end.unwrap())
    }

    /// The error of the only one that has failed.
    fn failed(&mut self) -> kv_plane::handover::OfferError {
        let is_failed = |(_, came): &(_, Came)| matches!(came, Came::Failed(_));
        self.until("it does not fail", |of| of.came.iter().any(is_failed));
        let at = self.came.iter().position(is_failed).unwrap();
        let Came::Failed(error) = self.came.remove(at).1 else { unreachable!() };
        error
    }

    /// Goes on with a sequence for some steps, each of which reads all of its KV.
    fn go_on(&mut self, mut live: Live) {
        for _ in 0..6 {
            self.engine.run(&mut [&mut live]).unwrap();
        }
    }

    /// Goes on with the sequence that is ready, whose KV ends there.
    #[track_caller]
    fn goes_on(&mut self, prompt: &Prompt, expected: u64) {
        let (live, end) = self.ready(prompt);
        assert_eq!(end, expected);
        self.go_on(live);
    }

    fn close(self) {
        let Self { machine, engine, side, .. } = self;
        drop(side);
        machine.close(engine);
    }
}

/// Both engines, of which the second has so many device blocks.
fn pair(device_blocks: u32) -> (Computes, GoesOn) {
    let there = Computes::new(1 << 20);
    let here = GoesOn::new(&there.member, device_blocks, 0);
    (there, here)
}

/// Both engines, of which the second one wants a prompt of 8 blocks and a half.
fn wanted() -> (Computes, GoesOn, Prompt) {
    let (there, mut here) = pair(64);
    let prompt = Prompt::new(1, 34);
    here.want(ID, &prompt);
    (there, here, prompt)
}

fn close(there: Computes, here: GoesOn) {
    here.close();
    there.close();
}

/// Both engines, of which the first has computed 4 blocks of a prompt of 8 blocks and a half, and the
/// second one has them.
fn half_a_prompt() -> (Computes, Live, GoesOn, Prompt) {
    let (mut there, mut here, prompt) = wanted();
    let mut live = there.begin(ID, &prompt);
    there.compute(&mut live);
    there.give(ID, &mut live);
    assert_eq!(there.side.stats().blocks, 4);
    here.until_coming(ID, Coming::Offered);
    here.fill(ID, &prompt);
    here.until("blocks are not filled", |of| of.early_blocks() == 4);
    (there, live, here, prompt)
}
