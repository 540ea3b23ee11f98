//! Prefill here, decode there: one engine computes a prompt in chunks, and another one fills its blocks
//! meanwhile and goes on. A second prompt is cancelled on the way.
//!
//! `cargo run -p kv-plane --features remote --example handover`

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use cuda_sim::{SimConfig, SimDriver};
use kv_plane::driver::DeviceSpan;
use kv_plane::handover::{Adopted, Came, Coming, Decode, Ended, HandoverId, Prefill};
use kv_plane::pool::clock::SystemClock;
use kv_plane::prelude::*;
use kv_plane::remote::{
    HostMemory, Key, Member, Node, NodeOptions, Server, ServerOptions, SocketTransfer,
};

/// How long a prompt is offered, and waited for.
const LASTS: Duration = Duration::from_secs(10);

/// The engine that computes prompts.
struct Computes {
    kv: KvCache,
    handover: Prefill,
    running: Vec<(HandoverId, Sequence)>,
}

impl Computes {
    fn begin(&mut self, id: HandoverId, tokens: Vec<u32>) -> Result<(), Box<dyn Error>> {
        let mut admission = self.kv.admit(&mut [Request::new(tokens)].into(), 32)?;
        let (_, sequence) = admission.admitted.pop().ok_or("not admitted")?;
        self.handover.offer(id, &sequence);
        self.running.push((id, sequence));
        Ok(())
    }

    fn iterate(&mut self) -> Result<Vec<(HandoverId, Ended)>, Box<dyn Error>> {
        let step = self.kv.begin_step()?;
        for (id, mut sequence) in std::mem::take(&mut self.running) {
            // What steps have completed leaves while the next one runs.
            self.handover.give(&self.kv, id, &mut sequence)?;
            match sequence.awaits() {
                Some(last) if last <= self.kv.manager().completed_step() => {
                    self.kv.commit(&mut sequence, last, &[7])?;
                    self.handover.finish(&mut self.kv, id, sequence)?;
                }
                _ => self.running.push((id, sequence)),
            }
        }
        let (mut batch, mut starts) = (Vec::new(), Vec::new());
        for (_, sequence) in &mut self.running {
            self.kv.reserve(sequence, sequence.to_compute().min(32) as u32)?.given()?;
            if sequence.next() > 0 {
                starts.push(sequence.resolved());
                batch.push(sequence);
            }
        }
        self.kv.stage(&step, &mut batch)?;
        for (sequence, start) in batch.into_iter().zip(starts) {
            // The model writes the KV of these tokens: here, bytes that say where a block belongs.
            for place in (start / 16) as usize..sequence.resolved().div_ceil(16) as usize {
                self.kv.parts()[0]
                    .compute()
                    .fill(block(&self.kv, sequence, place)?, byte(place))?;
            }
        }
        self.kv.finish_step(step)?;
        Ok(self.handover.poll(&self.kv))
    }
}

/// The engine that goes on with them.
struct GoesOn {
    kv: KvCache,
    handover: Decode,
    waiting: Vec<(HandoverId, Request)>,
    running: Vec<Sequence>,
}

impl GoesOn {
    fn iterate(&mut self) -> Result<(), Box<dyn Error>> {
        let step = self.kv.begin_step()?;
        for (_, came) in self.handover.poll(&mut self.kv)? {
            match came {
                Came::Ready { sequence, .. } => self.running.push(sequence),
                // It is admitted as any other: here, nothing fails.
                Came::Failed(error) => return Err(error.into()),
                _ => {}
            }
        }
        // The rest waits: for an offer, for room, or for being admitted as any other.
        let mut rest = Vec::new();
        for (id, mut request) in std::mem::take(&mut self.waiting) {
            match self.handover.adopt(&mut self.kv, id, &mut request)? {
                Adopted::Filling => {}
                Adopted::Cached(sequence) => self.running.push(sequence),
                _ => rest.push((id, request)),
            }
        }
        self.waiting = rest;
        Ok(self.kv.finish_step(step)?)
    }
}

/// The memory of a block of a sequence.
fn block(kv: &KvCache, of: &Sequence, place: usize) -> Result<DeviceSpan, Box<dyn Error>> {
    let id = of.block(GroupId(0), place).ok_or("no block")?;
    Ok(kv.parts()[0].paged().block_span(id.index() as u64)?.ok_or("no block of one piece")?)
}

fn byte(place: usize) -> u8 {
    0xA0 + place as u8
}

fn main() -> Result<(), Box<dyn Error>> {
    let config = SimConfig { devices: 2, ..SimConfig::default() };
    let driver: Arc<dyn Driver> = Arc::new(SimDriver::new(config)?);
    let cache = |ordinal| -> Result<KvCache, Box<dyn Error>> {
        let compute = Stream::new(&Device::open(Arc::clone(&driver), ordinal)?)?;
        let shape = KvShapeOptions { layers: 8, kv_count: 2, row_bytes: 128, block_tokens: 16 };
        Ok(KvCache::new(&[compute], KvCacheOptions::new(KvShape::new(shape)?, 64))?)
    };
    // A node has a record for each layer of a block.
    let key = Key::new(b"32 random bytes that all nodes have")?;
    let mut options = NodeOptions::new("prefill", 4096);
    options.lease_max = LASTS;
    let memory = Arc::new(HostMemory::new(4 << 20)?);
    let node = Arc::new(Node::new(&options, memory, Arc::new(SystemClock::new()))?);
    let options = ServerOptions::new("tcp:127.0.0.1:0".parse()?, key.clone());
    let server = Server::start(Arc::clone(&node), options)?;
    let kv = cache(0)?;
    let handover = Prefill::new(&kv, node, LASTS)?;
    let mut computes = Computes { kv, handover, running: Vec::new() };
    let kv = cache(1)?;
    let mut handover = Decode::new(&kv, key, LASTS)?;
    let member = Member { name: "prefill".to_owned(), address: server.address().clone() };
    let source = handover.add(member, Box::new(SocketTransfer))?;
    let mut goes_on = GoesOn { kv, handover, waiting: Vec::new(), running: Vec::new() };

    // A router chooses numbers at random, and tells both engines of each request.
    let (first, second) = (HandoverId(0x5EED), HandoverId(0xDEED));
    let [wanted, cancelled] = [0..100, 1000..1100].map(|ids| ids.collect::<Vec<u32>>());
    goes_on.handover.want(first, source, 100)?;
    goes_on.waiting.push((first, Request::new(wanted.clone())));
    computes.begin(first, wanted)?;
    while goes_on.running.is_empty() {
        computes.iterate()?;
        goes_on.iterate()?;
    }
    let mut sequence = goes_on.running.remove(0);
    assert_eq!(sequence.resolved(), 99, "the last token is computed here: its output is wanted");
    for place in 0..7 {
        let mut bytes = vec![0; goes_on.kv.options().groups[0].shape.block_bytes() as usize];
        let span = block(&goes_on.kv, &sequence, place)?;
        goes_on.kv.parts()[0].compute().download(&mut bytes, span)?;
        assert!(bytes.iter().all(|of| *of == byte(place)), "block {place}");
    }
    let step = goes_on.kv.begin_step()?;
    goes_on.kv.reserve(&mut sequence, 1)?.given()?;
    goes_on.kv.stage(&step, &mut [&mut sequence])?;
    goes_on.kv.finish_step(step)?;

    // The user of the second one goes while its prompt is computed.
    goes_on.handover.want(second, source, 100)?;
    computes.begin(second, cancelled)?;
    while goes_on.handover.coming(second) != Some(Coming::Offered) {
        goes_on.iterate()?;
    }
    goes_on.handover.cancel(second);
    let mut ended = Vec::new();
    while computes.handover.open() > 0 {
        ended.extend(computes.iterate()?);
    }
    assert!(ended.iter().any(|of| matches!(of, (id, Ended::Cancelled) if *id == second)));
    drop((sequence, goes_on.handover));
    for kv in [computes.kv, goes_on.kv] {
        kv.close()?;
    }
    Ok(())
}
