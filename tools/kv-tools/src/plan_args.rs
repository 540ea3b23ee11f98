//! `kv-tools plan`: from options to rules and choices, with what is assumed on the way.

use std::path::PathBuf;

use clap::Args;

use kv_pool::store::StoreKind;
use kv_replay::command_line::{ReadArgs, positive, whole};
use kv_replay::config::{ModelCost, RunConfig};
use kv_replay::disk::ByteSize;
use kv_replay::generate::{GenerateOptions, REQUESTS_MAX, generate};

use kv_replay::device::read_profile;
use kv_replay::shape::{Dtype, KvModelShape};
use kv_replay::trace::{Trace, left_out};
use kv_tools::convert;
use kv_tools::plan::{Choice, Model, Router, Rules};
use kv_tools::policies::evict::Eviction;

use crate::commands::Failure;

/// Share of what a GPU can compute that prompts reach.
const PREFILL_SHARE: f64 = 0.5;

/// Share of what its memory can deliver that decoding reaches.
const DECODE_SHARE: f64 = 0.7;

/// Microseconds of an iteration that are no reading of weights.
const STEP_US: f64 = 500.0;

/// Share of a GPU's memory that an engine uses.
const MEMORY_SHARE: f64 = 0.9;

const PLAN_HELP: &str = "\
Lists give a table with a line for each combination. Times are virtual; nothing runs on a GPU.

Examples:
  kv-tools plan --model llama-3.1-8b --trace chat.jsonl --gpus 1,2,4 --host-memory 0,64GiB --out plan.html
  kv-tools plan --model models/mine/config.json --gpu h200 --trace agents.jsonl --rate 2 --policy lru,hit_density
  kv-tools plan --model llama-3.1-8b --gpus 1000 --rate 20 --hours 24
  kv-replay run --trace chat.jsonl --device cuda:0 --open-loop --rate 2 --prefill-rate 20000 --decode-step-us 9000 --json run.json
  kv-tools plan --trace chat.jsonl --rate 2 --prefill-rate 20000 --decode-step-us 9000 --device-blocks 32768 --host-blocks 32768 --against run.json";

#[derive(Args, Debug)]
#[command(allow_negative_numbers = true, after_help = PLAN_HELP)]
pub(crate) struct PlanArgs {
    /// The model: a name such as llama-3.1-8b, or its config.json. Without one, give its layers, heads and rates.
    #[arg(long, value_name = "MODEL")]
    model: Option<String>,
    /// Number of layers [default: the model's].
    #[arg(long, value_name = "L", value_parser = whole::<u32>)]
    layers: Option<u32>,
    /// Heads of K, and of V, in a layer [default: the model's].
    #[arg(long, value_name = "H", value_parser = whole::<u32>)]
    kv_heads: Option<u32>,
    /// Elements of a head [default: the model's].
    #[arg(long, value_name = "D", value_parser = whole::<u32>)]
    head_size: Option<u32>,
    /// Element type of keys and values: f32, f16, bf16 or fp8 [default: bf16, or fp8 without a model].
    #[arg(long, value_name = "T")]
    dtype: Option<Dtype>,
    /// The trace, in any format that `convert` reads. Without a trace, a workload is generated.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    #[command(flatten)]
    reading: ReadArgs,
    /// Uses only the first N requests of the trace, or generates N [default: all, or 1000, or those of --hours].
    #[arg(long, value_name = "N", value_parser = whole::<u64>)]
    requests: Option<u64>,
    /// Requests a second, on average: arrivals come closer or further apart than in the trace.
    #[arg(long, value_name = "R", value_parser = positive)]
    rate: Option<f64>,
    /// Generates requests for so many hours at the --rate.
    #[arg(long, value_name = "H", value_parser = positive, requires = "rate", conflicts_with_all = ["trace", "requests"])]
    hours: Option<f64>,
    /// Seed of a generated workload.
    #[arg(long, value_name = "S", default_value_t = 0, value_parser = whole::<u64>)]
    seed: u64,
    /// The GPU: h100 or h200, or the file of a timing profile. It decides the link, and with a model memory and rates.
    #[arg(long, value_name = "GPU", default_value = "h100")]
    gpu: String,
    /// GPUs that hold a model together; each of --gpus stands for so many.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<u32>)]
    tensor_parallel: u32,
    /// Numbers of GPUs, each with the whole model, or groups of them with --tensor-parallel.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1", value_parser = whole::<u32>)]
    gpus: Vec<u32>,
    /// Which GPU gets a request: prefix, least or turns.
    #[arg(long, value_name = "HOW", default_value_t)]
    router: Router,
    /// Numbers of blocks in the memory of a GPU [default: what the model leaves, or 32768].
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = whole::<u64>)]
    device_blocks: Vec<u64>,
    /// Numbers of blocks in host memory for each GPU [default: 0].
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = whole::<u64>, conflicts_with = "host_memory")]
    host_blocks: Vec<u64>,
    /// The same in bytes, such as 0,64GiB.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    host_memory: Vec<ByteSize>,
    /// Bytes in files for each GPU, such as 0,1TiB, below its host memory [default: 0].
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    disk: Vec<ByteSize>,
    /// Bytes a second that these files are read and written with, each way.
    #[arg(long, value_name = "SIZE", default_value = "4GiB")]
    disk_rate: ByteSize,
    /// Eviction policies: lru, slru, s3fifo, arc or hit_density.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values_t = [Eviction::default()])]
    policy: Vec<Eviction>,
    /// What of the evicted blocks is stored in host memory: evidence or all.
    #[arg(long, value_name = "RULE", default_value_t = RunConfig::default().store)]
    store: StoreKind,
    /// Tokens of a block [default: those of a hash id of the trace].
    #[arg(long, value_name = "B", value_parser = whole::<u32>)]
    block_tokens: Option<u32>,
    /// Maximum number of requests of a GPU at once.
    #[arg(long, value_name = "N", default_value_t = RunConfig::default().max_batch, value_parser = whole::<u32>)]
    max_batch: u32,
    /// Maximum number of tokens of one iteration.
    #[arg(long, value_name = "N", default_value_t = RunConfig::default().step_tokens, value_parser = whole::<u32>)]
    step_tokens: u32,
    /// Prompt tokens that a GPU computes in a second [default: from the model and the GPU].
    #[arg(long, value_name = "N", value_parser = whole::<u64>)]
    prefill_rate: Option<u64>,
    /// Microseconds of an iteration that generates tokens [default: from the model and the GPU].
    #[arg(long, value_name = "US", value_parser = whole::<u64>)]
    decode_step_us: Option<u64>,
    /// Says which choice is the smallest in which 99 in 100 requests have their first token within MS milliseconds.
    #[arg(long, value_name = "MS", value_parser = whole::<u64>)]
    pub(crate) target_ttft_ms: Option<u64>,
    /// Compares with the JSON report of `kv-replay run --open-loop`: hit rate, tokens a second and time to the first token.
    #[arg(long, value_name = "RUN.json")]
    pub(crate) against: Option<PathBuf>,
    /// Writes the plan as an HTML page to this file, completely or not at all.
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// Writes the plan to this file as JSON, completely or not at all.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

/// What the options ask for.
pub(crate) struct Asked {
    pub(crate) trace: Trace,
    pub(crate) rules: Rules,
    pub(crate) choices: Vec<Choice>,
    pub(crate) assumed: Vec<String>,
}

/// What a GPU has: bytes of memory, bytes a second of it, and 16-bit operations a second of its tensor cores, by its data sheet.
fn gpu_of(name: &str) -> Option<(f64, f64, f64)> {
    match name {
        "h100" => Some((80e9, 3.35e12, 989e12)),
        "h200" => Some((141e9, 4.8e12, 989e12)),
        _ => None,
    }
}

impl PlanArgs {
    pub(crate) fn asked(&self) -> Result<Asked, Failure> {
        if self.requests == Some(0) {
            return Err(Failure::NoRequests);
        }
        for (option, value) in [
            ("--max-batch", u64::from(self.max_batch)),
            ("--step-tokens", self.step_tokens.into()),
            ("--disk-rate", self.disk_rate.0),
            ("--tensor-parallel", self.tensor_parallel.into()),
            ("--block-tokens", self.block_tokens.unwrap_or(1).into()),
        ] {
            if value == 0 {
                return Err(Failure::PlanZero { option });
            }
        }
        let model = self.model.as_deref().map(Model::read).transpose()?;
        let profile = read_profile(&self.gpu)?;
        let (mut assumed, trace) = (Vec::new(), self.trace()?);
        let span_s = trace.requests.last().map_or(0, |last| last.timestamp_ms) as f64 / 1e3;
        let mean = trace.rate();
        let rules = Rules::default();
        let block_tokens = match self.block_tokens {
            Some(tokens) => tokens,
            None => u32::try_from(trace.block_tokens).unwrap_or(u32::MAX),
        };
        let shape = self.shape(model.as_ref());
        let rules = {
            let mut made = rules;
            (made.block_tokens, made.block_bytes) =
                (block_tokens, shape.block_bytes(block_tokens).map_err(Failure::Shape)?);
            (made.max_batch, made.step_tokens) = (self.max_batch, self.step_tokens);
            (made.profile, made.links) = (profile, self.tensor_parallel);
            (made.store, made.router) = (self.store, self.router);
            made.disk_bytes_per_s = self.disk_rate.0;
            made.speed = self.rate.map_or(1.0, |rate| rate / mean);
            made.model = self.cost(model.as_ref(), &mut assumed)?;
            made
        };
        assumed.insert(0, format!(
            "The trace has {} requests in {span_s:.0} s; they arrive {} as fast, {:.2} a second on average.",
            trace.requests.len(),
            if rules.speed == 1.0 { "just".to_owned() } else { format!("{:.2} times", rules.speed) },
            mean * rules.speed,
        ));
        assumed.insert(
            1,
            format!(
                "A block has {block_tokens} tokens and {} bytes of {}.",
                rules.block_bytes, shape.dtype
            ),
        );
        if trace.skipped > 0 {
            assumed.insert(1, format!("In the trace's file, {}.", left_out(trace.skipped)));
        }
        let choices = self.choices(model.as_ref(), &rules, &mut assumed)?;
        assumed.extend([
            format!("The router is {}: it knows what it has sent where, and not what was evicted since.", self.router),
            format!(
                "Copies take the {} link, both ways at once: {:.1} GB/s to a GPU, {:.1} GB/s from it. An iteration waits for its own; they go on beside the one before.",
                self.gpu,
                rules.profile.htod.bytes_per_s() as f64 / 1e9,
                rules.profile.dtoh.bytes_per_s() as f64 / 1e9
            ),
            "Calls of the cache, tables and kernels take no time; an iteration that generates takes equally long whatever the number and length of its requests.".to_owned(),
            "A hit rate is the share of full blocks that were found, of those that a prompt has before its last token, as in the report of a run; `policies` counts all hash ids of a trace.".to_owned(),
            "The best possible hit rate is Belady's optimum, with the memory and files of all GPUs and their hosts as one cache.".to_owned(),
        ]);
        Ok(Asked { trace, rules, choices, assumed })
    }

    fn trace(&self) -> Result<Trace, Failure> {
        let Some(path) = &self.trace else {
            let wanted =
                self.hours.zip(self.rate).map(|(hours, rate)| (hours * 3600.0 * rate).ceil());
            let requests = wanted.map(|wanted| wanted as u64).or(self.requests).unwrap_or(1000);
            if requests > REQUESTS_MAX && self.hours.is_some() {
                return Err(Failure::PlanHours { requests });
            }
            let options = GenerateOptions { requests, seed: self.seed };
            return Ok(generate(&options)?.from_first_arrival());
        };
        let mut trace = convert::read(path, &self.reading.options().into())?;
        let most = self.requests.and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX);
        trace.requests.truncate(most);
        Ok(trace.from_first_arrival())
    }

    /// The files that were read.
    pub(crate) fn reads(&self) -> Vec<PathBuf> {
        // The name of a model or GPU is that of no file, or of one that may as well stay.
        let named = self.model.iter().chain([&self.gpu]).map(PathBuf::from);
        self.trace.iter().cloned().chain(named).collect()
    }

    fn shape(&self, model: Option<&Model>) -> KvModelShape {
        let of = model.map_or(RunConfig::default().shape, |model| model.shape(Dtype::Bf16));
        KvModelShape {
            layers: self.layers.unwrap_or(of.layers),
            kv_heads: self.kv_heads.unwrap_or(of.kv_heads),
            head_size: self.head_size.unwrap_or(of.head_size),
            dtype: self.dtype.unwrap_or(of.dtype),
        }
    }

    /// The cost of the model, by the options or else by its parameters and the GPU.
    fn cost(&self, model: Option<&Model>, assumed: &mut Vec<String>) -> Result<ModelCost, Failure> {
        let parallel = f64::from(self.tensor_parallel);
        let derived = model.zip(gpu_of(&self.gpu)).map(|(model, (_, bandwidth, operations))| {
            let prefill = PREFILL_SHARE * operations * parallel / (2e9 * model.active_b);
            let decode =
                2e9 * model.active_b / (DECODE_SHARE * bandwidth * parallel) * 1e6 + STEP_US;
            (prefill as u64, decode as u64)
        });
        let (prefill, decode) = match (self.prefill_rate, self.decode_step_us, derived) {
            (Some(prefill), Some(decode), _) => (prefill, decode),
            (prefill, decode, Some(derived)) => {
                (prefill.unwrap_or(derived.0), decode.unwrap_or(derived.1))
            }
            _ => return Err(Failure::NoRates),
        };
        if prefill == 0 || decode == 0 {
            return Err(Failure::NoRates);
        }
        assumed.push(format!("A GPU computes {prefill} prompt tokens a second, and an iteration that generates takes {decode} µs."));
        if let Some(model) =
            model.filter(|_| self.prefill_rate.is_none() || self.decode_step_us.is_none())
        {
            assumed.push(format!(
                "These rates follow from {:.2} billion parameters of 16 bits that a token uses: prompts reach {:.0} % of what the GPU can compute, decoding {:.0} % of what its memory can deliver, and {STEP_US:.0} µs more; {} GPUs divide both.",
                model.active_b, 100.0 * PREFILL_SHARE, 100.0 * DECODE_SHARE, self.tensor_parallel
            ));
        }
        Ok(ModelCost { prefill_tokens_per_s: prefill, decode_step_us: decode })
    }

    fn choices(
        &self,
        model: Option<&Model>,
        rules: &Rules,
        assumed: &mut Vec<String>,
    ) -> Result<Vec<Choice>, Failure> {
        let block = rules.block_bytes.max(1);
        let mut device_blocks = self.device_blocks.clone();
        if device_blocks.is_empty() {
            device_blocks.push(match model.zip(gpu_of(&self.gpu)) {
                Some((model, (memory, ..))) => {
                    let left = MEMORY_SHARE * memory * f64::from(self.tensor_parallel) - 2e9 * model.parameters_b;
                    if left < block as f64 {
                        return Err(Failure::NoMemory { model: model.name.clone(), gpu: self.gpu.clone(), needed: model.parameters_b * 2.0 });
                    }
                    let blocks = (left / block as f64) as u64;
                    assumed.push(format!(
                        "An engine uses {:.0} % of a GPU's memory; 16-bit weights leave room for {blocks} blocks.",
                        100.0 * MEMORY_SHARE
                    ));
                    blocks
                }
                None => RunConfig::default().device_blocks,
            });
        }
        let mut host_blocks = self.host_blocks.clone();
        host_blocks.extend(self.host_memory.iter().map(|bytes| bytes.0 / block));
        if host_blocks.is_empty() {
            host_blocks.push(0);
        }
        let mut disk_blocks: Vec<_> = self.disk.iter().map(|bytes| bytes.0 / block).collect();
        if disk_blocks.is_empty() {
            disk_blocks.push(0);
        }
        if disk_blocks.iter().any(|&blocks| blocks > 0) {
            assumed.push(format!(
                "Files are read at {0:.2} GB/s for each GPU, and written at as much. A prompt waits for what it loads from them, up to a second.",
                self.disk_rate.0 as f64 / 1e9
            ));
        }
        let mut choices = Vec::new();
        for &gpus in &self.gpus {
            for &device_blocks in &device_blocks {
                for &host_blocks in &host_blocks {
                    for &disk_blocks in &disk_blocks {
                        let all = self.policy.iter().map(|&policy| Choice {
                            gpus,
                            device_blocks,
                            host_blocks,
                            disk_blocks,
                            policy,
                        });
                        choices.extend(all);
                    }
                }
            }
        }
        Ok(choices)
    }
}
