//! A manager and its worker in processes of their own, which exchange plans and completions over pipes.
//!
//! `cargo run -p kv-manager --example processes`

#![allow(clippy::print_stdout, reason = "a program that reports")]

use std::error::Error;
use std::io::{self, Write};
use std::process::{Command, Stdio};

use kv_manager::{
    Answer, Completion, Manager, ManagerOptions, Message, Outcome, Replica, Request, WorkerId,
};
use kv_pool::PoolConfig;

fn main() -> Result<(), Box<dyn Error>> {
    if std::env::args().nth(1).is_some() {
        return work();
    }
    let pool = PoolConfig::primary_only(64);
    let mut manager = Manager::new(ManagerOptions { pool, ..ManagerOptions::default() })?;
    let mut worker = Command::new(std::env::current_exe()?)
        .arg("worker")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let (Some(mut plans), Some(mut answers)) = (worker.stdin.take(), worker.stdout.take()) else {
        return Err("the worker has no pipes".into());
    };
    let (mut bytes, mut running) = (Vec::new(), Vec::new());
    let mut requests = [Request::new((0..50).collect())];
    for _ in 0..20 {
        let step = manager.begin_step()?;
        for sequence in &mut running {
            manager.reserve(sequence, 1)?;
        }
        for answer in manager.admit(&mut requests, 1024) {
            if let Answer::Admitted(sequence) = answer {
                running.push(sequence);
            }
        }
        let mut batch: Vec<_> = running.iter_mut().collect();
        bytes.clear();
        manager.stage(&step, &mut batch)?.to_bytes(&mut bytes);
        manager.finish_step(step)?;
        plans.write_all(&bytes)?;
        // A worker that ends is an answer, not a hang.
        match Message::read_from(&mut answers, &mut bytes)? {
            Some(Message::Completion(completion)) => manager.complete(completion)?,
            other => return Err(format!("the worker said {other:?}").into()),
        }
        for sequence in &mut running {
            if let Some(step) = sequence.awaits() {
                manager.commit(sequence, step, &[step as u32])?;
            }
        }
    }
    drop(plans);
    worker.wait()?;
    println!("{} tokens after {} steps", running[0].known(), manager.completed_step());
    Ok(())
}

/// Carries out plans until there are no more.
fn work() -> Result<(), Box<dyn Error>> {
    let (mut plans, mut answers) = (io::stdin().lock(), io::stdout().lock());
    let options = ManagerOptions::default();
    let mut table = Replica::new(options.sequences_max, options.blocks_per_sequence_max)?;
    let mut bytes = Vec::new();
    while let Some(message) = Message::read_from(&mut plans, &mut bytes)? {
        let Message::Plan(plan) = message else { return Err("that is no plan".into()) };
        table.apply(&plan)?;
        table.check_batch(&plan, options.block_tokens)?;
        // Here the copies, the scrubs and the model's work are enqueued on the device.
        bytes.clear();
        let (worker, outcome) = (WorkerId(0), Outcome::Done);
        Completion { worker, step: plan.step, outcome }.to_bytes(&mut bytes);
        answers.write_all(&bytes)?;
        answers.flush()?;
    }
    Ok(())
}
