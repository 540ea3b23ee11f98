//! A manager, which decides, and a worker, which has the device and carries plans out, in processes of their own.
//!
//! `cargo run -p kv-plane --example processes`

use std::collections::VecDeque;
use std::error::Error;
use std::io::{self, Write as _};
use std::process::{Command, Stdio};

use cuda_driver::{Device, Stream};
use cuda_sim::{SimConfig, SimDriver};
use kv_kernels::{KvShape, KvShapeOptions};
use kv_plane::manager::{Completion, Manager, ManagerOptions, Message, Outcome, WorkerId};
use kv_plane::{KvCacheOptions, KvWorker, Request};

fn main() -> Result<(), Box<dyn Error>> {
    // The worker is this program with an argument.
    let None = std::env::args().nth(1) else { return work() };
    let mut worker = Command::new(std::env::current_exe()?);
    let mut worker = worker.arg("worker").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let pipes = worker.stdin.as_mut().zip(worker.stdout.as_mut());
    let (plans, answers) = pipes.ok_or("no pipes")?;
    let pool = kv_pool::PoolConfig::primary_only(64);
    let mut manager = Manager::new(ManagerOptions { pool, ..ManagerOptions::default() })?;
    let mut queue = VecDeque::from([Request::new((0..50).collect())]);
    let admitted = manager.admit(&mut queue, 1024).admitted.pop();
    let Some((_, mut sequence)) = admitted else { return Err("not admitted".into()) };
    let (mut step, mut bytes) = (manager.begin_step()?, Vec::new());
    while sequence.known() < 70 {
        bytes.clear();
        manager.stage(&step, &mut [&mut sequence])?.to_bytes(&mut bytes);
        manager.finish_step(step)?;
        plans.write_all(&bytes)?;
        let said = Message::read_from(answers, &mut bytes)?;
        let Some(Message::Completion(done)) = said else { return Err("no completion".into()) };
        manager.complete(done)?;
        manager.commit(&mut sequence, done.step, &[7])?;
        step = manager.begin_step()?;
        manager.reserve(&mut sequence, 1)?;
    }
    if worker.wait()?.success() { Ok(()) } else { Err("the worker has failed".into()) }
}

fn work() -> Result<(), Box<dyn Error>> {
    let device = Device::open(std::sync::Arc::new(SimDriver::new(SimConfig::default())?), 0)?;
    let shape = KvShapeOptions { layers: 8, kv_count: 2, row_bytes: 128, block_tokens: 16 };
    let options = KvCacheOptions::new(KvShape::new(shape)?, 64);
    let mut kv = KvWorker::new(&[Stream::new(&device)?], options)?;
    kv.grow_to(64)?;
    let (mut plans, mut answers, mut bytes) = (io::stdin(), io::stdout(), Vec::new());
    while let Some(Message::Plan(plan)) = Message::read_from(&mut plans, &mut bytes)? {
        kv.carry_out(&plan, |_, _| Ok(()))?;
        // Enqueue the model on `kv.parts()[0].compute()`: it reads `kv.parts()[0].batch()`.
        kv.finish(Outcome::Done)?;
        let (step, outcome) = kv.wait()?.ok_or("the step is not in flight")?;
        bytes.clear();
        Completion { worker: WorkerId(0), step, outcome }.to_bytes(&mut bytes);
        answers.write_all(&bytes).and_then(|()| answers.flush())?;
    }
    kv.close().map_err(|mut errors| errors.remove(0).into())
}
