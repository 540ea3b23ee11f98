//! Several instances of this cache behind NVIDIA Dynamo's router, which hears of their content in vLLM's format over
//! ZeroMQ. The README is the tour.

#![allow(clippy::print_stdout, reason = "it shows what it does")]

mod bound;
mod drill;
mod instance;
mod prompt;
mod router;
mod table;
mod wire;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use kv_replay::generate::{GenerateOptions, generate};
use kv_replay::trace::Trace;

use drill::Way;
use instance::Sizes;

const USAGE: &str = "\
usage: router-example [--requests N] [--seed N] [--instances N] [--trace FILE]

  --requests N    requests of the trace, from its beginning (default 10000)
  --seed N        of the generated trace, of ties and of losses (default 7)
  --instances N   instances of the cache, 1 to 64 (default 4)
  --trace FILE    a trace in Mooncake's format, instead of a generated one";

/// What is to be run.
pub struct Options {
    requests: u64,
    seed: u64,
    instances: usize,
    trace: Option<PathBuf>,
}

impl Options {
    fn read(mut args: impl Iterator<Item = String>) -> anyhow::Result<Self> {
        let mut options = Self { requests: 10_000, seed: 7, instances: 4, trace: None };
        while let Some(name) = args.next() {
            let mut value = || args.next().with_context(|| format!("{name} lacks its value"));
            let number = |text: String| {
                text.parse::<u64>().with_context(|| format!("{name} is {text:?}, not a number"))
            };
            match name.as_str() {
                "--requests" => options.requests = number(value()?)?,
                "--seed" => options.seed = number(value()?)?,
                "--instances" => options.instances = number(value()?)? as usize,
                "--trace" => options.trace = Some(value()?.into()),
                _ => bail!("{name} is not an option\n{USAGE}"),
            }
        }
        if !(1..=64).contains(&options.instances) {
            bail!("--instances is {}, not from 1 to 64", options.instances);
        }
        Ok(options)
    }

    fn trace(&self) -> anyhow::Result<Trace> {
        let mut trace = match &self.trace {
            Some(path) => Trace::read(path)?,
            None => generate(&GenerateOptions { requests: self.requests, seed: self.seed })?,
        };
        trace.requests.truncate(self.requests as usize);
        Ok(trace)
    }
}

/// Blocks of each instance. A trace of documents and chats, of some 10,000 tokens each, meets the end of every tier.
const SIZES: Sizes = Sizes { device: 4096, host: 4096, below: 16_384, events: 600 };

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<ExitCode> {
    if std::env::args().any(|arg| arg == "--help") {
        println!("{USAGE}");
        return Ok(ExitCode::SUCCESS);
    }
    let options = Options::read(std::env::args().skip(1))?;
    let trace = options.trace()?;
    let best = bound::of(&trace);
    let routed = drill::run(&trace, Way::Router, SIZES, &options).await?;
    let in_turn = drill::run(&trace, Way::RoundRobin, SIZES, &options).await?;
    print!("{}", table::of(&options, &trace, SIZES, &routed, &in_turn, best));
    Ok(match routed.disagreements.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}
