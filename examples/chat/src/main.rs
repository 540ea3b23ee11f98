//! `cargo xtask chat` runs this program.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use chat::chat::Settings;
use chat::engine::{Engine, EngineOptions};
use chat::model::Model;
use chat::proof::{Proof, Size};
use chat::sampling::Sampling;
use chat::setup::{self, Devices};
use chat::{chat as terminal, measure, script};

const USAGE: &str = "\
options:
  --model FILE       a GGUF file of the Llama family
  --device NAMES     sim, sim:2, cuda:0 or cuda:0,cuda:1 (sim)
  --script FILE      runs the conversations of a file, all at once, instead of a chat
  --prove SIZE       short or long: compares all logits with those of a plain cache
  --measure TOKENS   the time to the first token with and without a cached prefix of so many tokens
  --system TEXT      what the model is told first
  --tokens N         most tokens of an answer (200)
  --drafts N         drafts of a step, by prompt lookup (3)
  --temperature T    0 takes the likeliest token (0)
  --seed N           what draws follow from (1)
  --blocks N         device blocks of 16 tokens (1024)
  --host-blocks N    blocks of host memory (1024)";

/// Tokens of a block.
const BLOCK_TOKENS: u32 = 16;
/// Tokens of prompts in a step.
const CHUNK_TOKENS: u64 = 512;

struct Options {
    model: PathBuf,
    device: String,
    script: Option<PathBuf>,
    prove: Option<Size>,
    measure: Option<usize>,
    settings: Settings,
    blocks: u32,
    host_blocks: u32,
}

impl Options {
    fn parse(mut args: impl Iterator<Item = String>) -> anyhow::Result<Self> {
        let settings = Settings {
            system: "You are a helpful assistant.".to_owned(),
            tokens_max: 200,
            sampling: Sampling { temperature: 0.0, seed: 1 },
            drafts: 3,
        };
        let mut options = Self {
            model: PathBuf::new(),
            device: "sim".to_owned(),
            script: None,
            prove: None,
            measure: None,
            settings,
            blocks: 1024,
            host_blocks: 1024,
        };
        while let Some(name) = args.next() {
            let value = args.next().with_context(|| format!("{name} needs a value\n{USAGE}"))?;
            options.set(&name, value).with_context(|| format!("{name} is not understood"))?;
        }
        if options.model.as_os_str().is_empty() {
            bail!("--model is missing\n{USAGE}");
        }
        Ok(options)
    }

    fn set(&mut self, name: &str, value: String) -> anyhow::Result<()> {
        match name {
            "--model" => self.model = value.into(),
            "--device" => self.device = value,
            "--script" => self.script = Some(value.into()),
            "--prove" => {
                self.prove = Some(match value.as_str() {
                    "short" => Size::Short,
                    "long" => Size::Long,
                    _ => bail!("{value:?} is neither short nor long"),
                });
            }
            "--measure" => self.measure = Some(value.parse()?),
            "--system" => self.settings.system = value,
            "--tokens" => self.settings.tokens_max = value.parse()?,
            "--drafts" => self.settings.drafts = value.parse()?,
            "--temperature" => self.settings.sampling.temperature = value.parse()?,
            "--seed" => self.settings.sampling.seed = value.parse()?,
            "--blocks" => self.blocks = value.parse()?,
            "--host-blocks" => self.host_blocks = value.parse()?,
            _ => bail!("there is no such option\n{USAGE}"),
        }
        Ok(())
    }
}

fn main() -> ExitCode {
    match Options::parse(std::env::args().skip(1)).and_then(|options| run(&options)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> anyhow::Result<()> {
    let (model, text) = Model::open(&options.model)?;
    let model = Arc::new(model);
    let devices = Devices::named(&options.device)?;
    println!("{} on {}", model.config().name, options.device);
    if let Some(size) = options.prove {
        return Proof::new(model, &text, size)?.report(&devices);
    }
    let mut cache_options = setup::options(model.config(), BLOCK_TOKENS, options.blocks)?;
    cache_options.groups[0].host_blocks = options.host_blocks;
    let cache = setup::cache(&devices.devices, cache_options)?;
    let engine_options = EngineOptions { chunk_tokens: CHUNK_TOKENS, sabotage: None };
    let mut engine = Engine::new(cache, Arc::clone(&model), engine_options)?;
    if let Some(tokens) = options.measure {
        measure::prefix(&mut engine, &model, &text, (tokens, 3))?;
    } else if let Some(file) = &options.script {
        let read = std::fs::read_to_string(file);
        let read = read.with_context(|| format!("cannot read {}", file.display()))?;
        script::run(&mut engine, &text, &script::parse(&read)?, &options.settings)?;
        println!("{:#?}", engine.counts());
    } else {
        let ends = (std::io::stdin().lock(), std::io::stdout());
        terminal::run(&mut engine, &text, &options.settings, ends)?;
    }
    engine.close()
}
