//! A tensor-parallel engine: a scheduler, and two worker processes that have half of the heads each. One is killed and replaced.
//!
//! `cargo run -p kv-plane --features processes --example processes`

use std::collections::VecDeque;
use std::error::Error;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use cuda_sim::{SimConfig, SimDriver};
use kv_plane::KvWorker;
use kv_plane::manager::{CommitError, Outcome, SequenceError, WorkerId};
use kv_plane::prelude::*;
use kv_plane::processes::{Connection, Order, Orders, Processes, serve};

type Failed = Box<dyn Error + Send + Sync>;

const WORKERS: u16 = 2;

/// The cache of a model whose K and V have 4 heads of 64 bytes a layer, or of one worker's share of them.
fn options(heads: u16) -> Result<KvCacheOptions, Failed> {
    let row_bytes = 64 * u64::from(heads);
    let shape = KvShapeOptions { layers: 8, kv_count: 2, row_bytes, block_tokens: 16 };
    Ok(KvCacheOptions::new(KvShape::new(shape)?, 64))
}

fn main() -> Result<(), Failed> {
    match std::env::args().nth(1) {
        // A worker is this program with an argument.
        Some(_) => serve(Connection::inherited(), work),
        None => schedule(),
    }
}

fn schedule() -> Result<(), Failed> {
    let program = std::env::current_exe()?;
    let connect = move |_| Connection::spawn(Command::new(&program).arg("worker"));
    let workers = Processes::start(options(4)?, WORKERS, Duration::from_secs(60), connect)?;
    let mut kv = KvCache::start(workers)?;
    // A prompt, and the answer so far.
    let mut text: Vec<u32> = (0..50).collect();
    let mut waiting = VecDeque::from([Request::new(text.clone())]);
    let mut running: Vec<Sequence> = Vec::new();
    let mut killed = false;
    while text.len() < 70 {
        let step = kv.begin_step()?;
        let admitted = kv.admit(&mut waiting, 1024)?.admitted;
        running.extend(admitted.into_iter().map(|(_, sequence)| sequence));
        let mut batch: Vec<_> = running.iter_mut().collect();
        // What the workers are told beside the plan: here, how hot the sampler is.
        kv.stage_with(&step, &mut batch, &0.7_f32.to_le_bytes())?;
        let number = step.number();
        kv.finish_step(step)?;
        if text.len() == 60 && !killed {
            let pid = kv.workers().pid(WorkerId(1)).ok_or("the worker has no process")?;
            killed = Command::new("kill").args(["-9", &pid.to_string()]).status()?.success();
        }
        // An engine that overlaps steps begins the next one instead. A worker that has failed is replaced here.
        kv.drain()?;
        let said = kv.workers().result(WorkerId(0), number).and_then(|said| said.try_into().ok());
        let id = said.map_or(0, u32::from_le_bytes);
        for mut sequence in std::mem::take(&mut running) {
            match kv.commit(&mut sequence, number, &[id]) {
                // Its share in the new process is empty: what it said so far is computed again.
                Err(CommitError::Sequence(SequenceError::Lost { .. })) => {
                    waiting.push_back(Request::new(text.clone()));
                }
                committed => {
                    committed?;
                    text.push(id);
                    kv.reserve(&mut sequence, 1)?.given()?;
                    running.push(sequence);
                }
            }
        }
    }
    // Number 1, and the reason is the signal that has killed it.
    let [replaced] = kv.workers().replaced() else { return Err("none was replaced".into()) };
    assert!(replaced.worker == WorkerId(1) && replaced.reason.contains("SIGKILL"), "{replaced:?}");
    drop(running);
    let steps = kv.close()?;
    assert!(steps[0] > steps[1], "the new process has computed fewer steps: {steps:?}");
    Ok(())
}

fn work(orders: &mut Orders) -> Result<Vec<u8>, Failed> {
    let sim = SimDriver::new(SimConfig::default())?;
    sim.register_kernels(&kv_plane::references());
    // On a GPU: number `orders.worker()`, of `CudaDriver::probe()`.
    let device = Device::open(Arc::new(sim), 0)?;
    let (stream, rank) = (Stream::new(&device)?, (orders.worker(), orders.workers()));
    let mut kv = KvWorker::new(&[stream], options(4 / rank.1)?, rank)?;
    orders.wait_on_host(); // simulated devices only
    orders.begin(&mut kv)?;
    let mut steps = 0_u8;
    while let Some(order) = orders.next(&mut kv)? {
        match order {
            Order::Step { plan, work: _ } => {
                kv.carry_out(plan, |_, _| Ok(()))?;
                // Enqueue the forward pass on `kv.parts()[0].compute()`: it reads `kv.parts()[0].batch()`.
                kv.finish(Outcome::Done)?;
            }
            Order::Completed { result, .. } => {
                steps += 1;
                // The ids that the sampler has left in pinned memory.
                result.extend_from_slice(&7_u32.to_le_bytes());
            }
        }
    }
    kv.close()?;
    Ok(vec![steps])
}
