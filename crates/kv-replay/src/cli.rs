//! The command line: subcommands, flags and their defaults.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use kv_cache::TransportChoice;
use kv_pool::policy::PolicyKind;
use kv_pool::store::StoreKind;
use kv_replay::config::{Life, ModelCost, RunConfig, Verify};
use kv_replay::device::DeviceSpec;
use kv_replay::disk::{ByteSize, DiskConfig};
use kv_replay::engine::workers::{KillWorker, StopWorker};
use kv_replay::nodes::{NodeConfig, NodeTransfer};
use kv_replay::place::Division;
use kv_replay::policies::Half;
use kv_replay::shape::{Dtype, KvModelShape};
use kv_replay::trace::ReadOptions;

use crate::fleet::{KillNode, StopNode};
use crate::plan_args::{PlanArgs, positive};

const AFTER_HELP: &str = "\
Without a command, kv-replay generates a workload and replays it on a simulated device, verifying every byte.

Exit status:
  0  all is well
  1  the engine or the driver failed
  2  bad input, or something that the machine lacks
  3  a byte was found that does not belong to its request";

/// Replays LLM request traces through mapped, pooled, staged and transferred KV memory and verifies
/// every byte.
#[derive(Debug, Parser)]
#[command(version, after_help = AFTER_HELP)]
pub(crate) struct Cli {
    /// Reads options from this TOML file, a section for each subcommand [env: KV_REPLAY_CONFIG]. Options of the command
    /// line come first, then the environment (KV_REPLAY_SEED for --seed), then the file.
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Replays a trace, or a generated workload, and reports the results.
    Run(Box<RunArgs>),
    /// Compares eviction policies and Belady's optimum on a trace, one request at a time, exactly.
    Policies(PoliciesArgs),
    /// Generates a workload in the trace format.
    Generate(GenerateArgs),
    /// Converts traces in public formats to the trace format, with the reason if one cannot be.
    Convert(ConvertArgs),
    /// Draws the JSON reports of runs as one HTML page, and says what limited them.
    Report(ReportArgs),
    /// Says what so many GPUs, so much memory and a policy would make of a trace, in virtual time.
    Plan(Box<PlanArgs>),
    /// Looks at this machine: driver, devices, links, memory, limits and a disk, each with what to do about it.
    Doctor(DoctorArgs),
    /// Writes completions for a shell to standard output.
    Completions(CompletionsArgs),
    /// Writes the manual page to standard output.
    Man(ManArgs),
    /// Carries out the plans of a run with --workers, which starts it.
    #[command(hide = true)]
    Worker(WorkerArgs),
}

#[derive(Args, Debug)]
pub(crate) struct WorkerArgs {
    /// Disables a protection of the worker: staging or skip.
    #[cfg(all(feature = "sabotage", debug_assertions))]
    #[arg(long, value_name = "WHAT")]
    pub(crate) sabotage: Option<crate::sabotage::Sabotage>,
    /// Has a worker do wrong in a step: WORKER@STEP:WHAT.
    #[cfg(all(feature = "sabotage", debug_assertions))]
    #[arg(long, value_name = "WRONG")]
    pub(crate) misbehave: Option<kv_replay::engine::workers::Misbehave>,
}

const COMPLETIONS_HELP: &str = "\
Examples:
  kv-replay completions bash > ~/.local/share/bash-completion/completions/kv-replay
  kv-replay completions zsh > ~/.zfunc/_kv-replay
  kv-replay completions fish > ~/.config/fish/completions/kv-replay.fish";

#[derive(Args, Debug)]
#[command(after_help = COMPLETIONS_HELP)]
pub(crate) struct CompletionsArgs {
    /// The shell.
    pub(crate) shell: clap_complete::Shell,
}

const MAN_HELP: &str = "\
Examples:
  kv-replay man > kv-replay.1
  kv-replay man run | man -l -";

#[derive(Args, Debug)]
#[command(after_help = MAN_HELP)]
pub(crate) struct ManArgs {
    /// The page of this subcommand instead of the whole program's.
    pub(crate) subcommand: Option<String>,
}

const RUN_HELP: &str = "\
Examples:
  kv-replay run --trace chat.jsonl --series --json chat.json
  kv-replay run --requests 250 --device sim:2 --place layers --layers 8 --verify full
  kv-replay run --trace chat.jsonl --open-loop --prefill-rate 20000 --decode-step-us 9000
  kv-replay run --trace chat.jsonl --live
  kv-replay run --workers 4 --stop-worker 1@1000:1000
  kv-replay run --trace chat.jsonl --disk /mnt/nvme/kv --disk-bytes 4GiB";

const POLICIES_HELP: &str = "\
Examples:
  kv-replay policies --trace chat.jsonl
  kv-replay policies --trace chat.jsonl --capacities 1000,10000 --host-capacities 30000 --half second
  kv-replay policies --trace chat.jsonl --trace agents.jsonl --hints --json rates.json";

const GENERATE_HELP: &str = "\
Examples:
  kv-replay generate --requests 1000 --seed 7 --output chat.jsonl
  kv-replay generate --requests 10 | head";

/// What a trace's file does not say.
#[derive(Args, Debug)]
pub(crate) struct ReadArgs {
    /// Prompt tokens of a hash id in the trace [default: what the file says, or 512].
    #[arg(long, value_name = "N", value_parser = whole::<u64>)]
    pub(crate) trace_block_tokens: Option<u64>,
    /// Leaves out requests of the trace that cannot be used, such as those without an answer, and counts them; else the
    /// first of them is an error.
    #[arg(long)]
    pub(crate) skip_unusable: bool,
}

impl ReadArgs {
    pub(crate) fn options(&self) -> ReadOptions {
        let (block_tokens, skip_unusable) = (self.trace_block_tokens, self.skip_unusable);
        ReadOptions { block_tokens, skip_unusable, ..ReadOptions::default() }
    }
}

#[derive(Args, Debug)]
#[command(allow_negative_numbers = true, after_help = RUN_HELP)]
pub(crate) struct RunArgs {
    /// The trace, in any format that `convert` reads; gzip and zstd are unpacked. Without a trace, a workload is
    /// generated.
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) reading: ReadArgs,
    /// Uses only the first N requests of the trace, or generates N requests [default: all, or
    /// 1000].
    #[arg(long, value_name = "N", value_parser = whole::<u64>)]
    pub(crate) requests: Option<u64>,
    /// Devices to run on: sim, sim:N for N simulated devices, or GPUs such as cuda:0,cuda:1. With
    /// --workers: sim, GPUs that the workers take in turn, or cuda for every GPU.
    #[arg(long, value_name = "DEVICES", default_value_t)]
    pub(crate) device: DeviceSpec,
    /// Number of layers of the model [default: one for each device or worker, and with --window two].
    #[arg(long, value_name = "L", value_parser = whole::<u32>)]
    layers: Option<u32>,
    /// Gives every second layer a sliding window of N tokens; those have a block table of their own.
    #[arg(long, value_name = "N", value_parser = whole::<u32>)]
    window: Option<u32>,
    /// Keeps full attention in F layers, and gives all others the window [default: every second layer].
    #[arg(long, value_name = "F", default_value_t = 0, value_parser = whole::<u32>, requires = "window")]
    full_layers: u32,
    /// Adds N layers with a recurrent state instead of keys and values.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole::<u32>)]
    state_layers: u32,
    /// Bytes of a layer's state: as many as keys and values of N tokens in a layer have.
    #[arg(long, value_name = "N", default_value_t = RunConfig::default().state_tokens, value_parser = whole::<u32>, requires = "state_layers")]
    state_tokens: u32,
    /// Adds N layers of a draft model, which computes nothing in some iterations and catches up in others: its KV ends
    /// elsewhere than the model's.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole::<u32>)]
    draft_layers: u32,
    /// Number of heads of K, and of V, in one layer.
    #[arg(long, value_name = "H", default_value_t = RunConfig::default().shape.kv_heads, value_parser = whole::<u32>)]
    kv_heads: u32,
    /// Number of elements of one head.
    #[arg(long, value_name = "D", default_value_t = RunConfig::default().shape.head_size, value_parser = whole::<u32>)]
    head_size: u32,
    /// Element type: f32, f16, bf16 or fp8.
    #[arg(long, value_name = "T", default_value_t = RunConfig::default().shape.dtype)]
    dtype: Dtype,
    /// Number of tokens of a block, a divisor or a multiple of the tokens of a hash id in the trace.
    #[arg(long, value_name = "B", default_value_t = RunConfig::default().block_tokens, value_parser = whole::<u32>)]
    block_tokens: u32,
    /// Division of the model over several devices: heads, layers, layers:round-robin,
    /// layers:contiguous, layers:free-memory or layers:least-cost.
    #[arg(long, value_name = "HOW", default_value_t = RunConfig::default().place)]
    place: Division,
    /// Maximum number of blocks in device memory.
    #[arg(long, value_name = "N", default_value_t = RunConfig::default().device_blocks, value_parser = whole::<u64>)]
    device_blocks: u64,
    /// Bytes of each device that all groups of layers share, instead of as many blocks for each; with
    /// --window, --state-layers or --draft-layers.
    #[arg(long, value_name = "BYTES", value_parser = whole::<u64>, conflicts_with = "device_blocks")]
    device_memory: Option<u64>,
    /// Maximum number of blocks in pinned host memory; 0 for no host tier [default: 32768, or 0 with
    /// --contiguous].
    #[arg(long, value_name = "N", value_parser = whole::<u64>)]
    host_blocks: Option<u64>,
    /// Gives each request a contiguous range of addresses for each plane, which grows page by page,
    /// instead of blocks: on one device, without sharing and without host memory. --device-blocks
    /// is then the limit of memory, and --block-tokens the tokens of a checksum.
    #[arg(long)]
    pub(crate) contiguous: bool,
    /// Maximum number of requests at once.
    #[arg(long, value_name = "N", default_value_t = RunConfig::default().max_batch, value_parser = whole::<u32>)]
    max_batch: u32,
    /// Maximum number of tokens, prompt and generated together, that one iteration writes.
    #[arg(long, value_name = "N", default_value_t = RunConfig::default().step_tokens, value_parser = whole::<u32>)]
    step_tokens: u32,
    /// Eviction policy for cached blocks, on the device and in host memory: lru, slru, s3fifo, arc
    /// or hit_density.
    #[arg(long, value_name = "POLICY", default_value_t = RunConfig::default().policy)]
    policy: PolicyKind,
    /// What of the evicted blocks is stored in host memory, and in files: evidence for what is likely to
    /// be asked for again, or all.
    #[arg(long, value_name = "RULE", default_value_t = RunConfig::default().store)]
    store: StoreKind,
    /// Bytes a second that are stored in host memory at most, such as 4GiB: its share of the link.
    #[arg(long, value_name = "SIZE")]
    store_rate: Option<ByteSize>,
    /// Transport of blocks between device and host memory: auto, copy-engine, kernel, two-hop or
    /// each-block (one copy call per block). auto uses the fastest, which it measures first on
    /// GPUs.
    #[arg(long, value_name = "WAY", default_value_t = RunConfig::default().transport)]
    transport: TransportChoice,
    /// Most tokens of a prompt that one iteration computes; 0 for as many as its budget allows.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole::<u32>)]
    chunk: u32,
    /// Draft tokens that are computed behind each sampled one.
    #[arg(long, value_name = "K", default_value_t = 0, value_parser = whole::<u32>)]
    draft: u32,
    /// Chance, in percent, that a draft is accepted if those before it are.
    #[arg(long, value_name = "P", default_value_t = 0, value_parser = whole::<u32>)]
    accept: u32,
    /// Answers to each request: when its prompt is computed, it is forked into N.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole::<u32>)]
    fork: u32,
    /// Chance, in percent, that a running request is suspended in an iteration, for up to 16 of
    /// them.
    #[arg(long, value_name = "P", default_value_t = 0, value_parser = whole::<u32>)]
    suspend: u32,
    /// Chance, in percent, that a request is cancelled before its end.
    #[arg(long, value_name = "P", default_value_t = 0, value_parser = whole::<u32>)]
    cancel: u32,
    /// By how much of the device blocks, in percent, the budget falls and rises again, every 64
    /// iterations.
    #[arg(long, value_name = "P", default_value_t = 0, value_parser = whole::<u32>)]
    budget_swing: u32,
    /// Has each request say, when it ends, what becomes of its session: over, or back in the time until the
    /// request of the trace that continues it.
    #[arg(long)]
    hints: bool,
    /// Puts a tier in memory below the host, which is late, fails, tears, corrupts, swaps and loses blocks,
    /// by this seed.
    #[arg(long, value_name = "SEED", value_parser = whole::<u64>)]
    tier_faults: Option<u64>,
    /// Puts files in this folder below the host. Blocks of an earlier run of the same shape are found again; files of
    /// another shape or size are refused. The folder is made if the one around it is there. Workers have a folder each
    /// in it, and divide the bytes and the rate between them.
    #[arg(long, value_name = "DIR", requires = "disk_bytes", conflicts_with_all = ["contiguous"])]
    pub(crate) disk: Option<PathBuf>,
    /// Bytes of these files, such as 256MiB or 4GiB.
    #[arg(long, value_name = "SIZE", requires = "disk")]
    disk_bytes: Option<ByteSize>,
    /// Bytes a second that these files are read and written with, at most.
    #[arg(long, value_name = "SIZE", requires = "disk")]
    disk_rate: Option<ByteSize>,
    /// Finds no blocks of an earlier run in these files, and begins those of another shape or size anew.
    #[arg(long, requires = "disk")]
    disk_fresh: bool,
    /// Tokens that the engine computes in a second: what a tier below the host would take longer for is computed
    /// instead of loaded [default: measured with --disk; loads all that is there with --tier-faults].
    #[arg(long, value_name = "TOKENS", value_parser = whole::<u64>)]
    compute_rate: Option<u64>,
    /// Drives N worker processes, each with one device, by plans over pipes; this process decides and
    /// opens no device.
    #[arg(long, value_name = "N", value_parser = whole::<u16>)]
    pub(crate) workers: Option<u16>,
    /// Kills and replaces a worker process that makes no progress for S seconds.
    #[arg(long, value_name = "S", default_value_t = 60, value_parser = whole::<u32>, requires = "workers")]
    pub(crate) worker_timeout: u32,
    /// Fault drill: stops worker I before it gets the plan of step STEP, and has it go on when it has been
    /// waited for MS milliseconds. Can be given several times.
    #[arg(long, value_name = "I@STEP:MS", requires = "workers")]
    pub(crate) stop_worker: Vec<StopWorker>,
    /// Fault drill: kills worker I when it has been sent the plan of step STEP; a new process takes its
    /// place. Can be given several times.
    #[arg(long, value_name = "I@STEP", requires = "workers")]
    pub(crate) kill_worker: Vec<KillWorker>,
    /// Has each request wait for its arrival, the first of which is at once, and reports the time to the first token. Time is the
    /// virtual time of simulated devices, and on GPUs that of this machine. Engines that keep up with their requests have free time
    /// between them; without this flag the next request comes as soon as there is room.
    #[arg(long, conflicts_with_all = ["workers", "contiguous"])]
    pub(crate) open_loop: bool,
    /// Requests a second, on average: arrivals come closer or further apart than in the trace.
    #[arg(long, value_name = "R", value_parser = positive, requires = "open_loop")]
    pub(crate) rate: Option<f64>,
    /// Prompt tokens that the model computes in a second; 0 for no time. On a GPU a kernel waits so long.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole::<u64>, conflicts_with_all = ["workers", "contiguous"])]
    prefill_rate: u64,
    /// Microseconds that an iteration takes which generates tokens; 0 for no time.
    #[arg(long, value_name = "US", default_value_t = 0, value_parser = whole::<u64>, conflicts_with_all = ["workers", "contiguous"])]
    decode_step_us: u64,
    /// Starts N processes of this program, each with a device of its own, and spreads the requests over them. They keep
    /// blocks for each other, as a tier below the host memory of each, and read each other's host memory.
    #[arg(long, value_name = "N", value_parser = whole::<u16>, group = "fleet", conflicts_with_all = ["workers", "contiguous", "disk", "tier_faults"])]
    pub(crate) nodes: Option<u16>,
    /// Starts N processes that compute the prompts of all requests, each of a share, and --decode-nodes that go on with them:
    /// they fill blocks of their devices while the prompts are computed, and compute what does not come.
    #[arg(long, value_name = "N", value_parser = whole::<u16>, group = "fleet", requires = "decode_nodes", conflicts_with_all = ["nodes", "workers", "contiguous", "disk", "tier_faults", "etcd"])]
    pub(crate) prefill_nodes: Option<u16>,
    /// How many milliseconds a prompt is offered to the node that goes on with it, and waited for there.
    #[arg(long, value_name = "MS", default_value_t = 10_000, value_parser = whole::<u32>, requires = "prefill_nodes")]
    pub(crate) handover_ms: u32,
    /// Starts N processes that go on with the prompts of --prefill-nodes.
    #[arg(long, value_name = "N", value_parser = whole::<u16>, requires = "prefill_nodes")]
    pub(crate) decode_nodes: Option<u16>,
    /// Bytes that each node keeps for all, such as 256MiB.
    #[arg(long, value_name = "SIZE", default_value = "64MiB")]
    node_bytes: ByteSize,
    /// How blocks of other nodes are read: sockets; nixl, from the other node's memory, if NIXL is installed; or nixl-device, prompts
    /// of --prefill-nodes from GPU to GPU.
    #[arg(long, value_name = "HOW", default_value_t = NodeTransfer::Sockets)]
    pub(crate) node_transfer: NodeTransfer,
    /// Has nodes find each other by the etcd of this URL, such as http://127.0.0.1:2379, so that nodes that die are members no
    /// more. Can be given several times, for one etcd. Needs the feature etcd.
    #[arg(long, value_name = "URL", requires = "fleet")]
    pub(crate) etcd: Vec<String>,
    /// Fault drill: kills node I when all have listened for MS milliseconds. Can be given several times.
    #[arg(long, value_name = "I@MS", requires = "fleet")]
    pub(crate) kill_node: Vec<KillNode>,
    /// Fault drill: stops node I when all have listened for MS milliseconds, and has it go on FOR_MS later. Can be given
    /// several times.
    #[arg(long, value_name = "I@MS:FOR_MS", requires = "fleet")]
    pub(crate) stop_node: Vec<StopNode>,
    /// Fault drill: parts node I from all others when all have listened for MS milliseconds, for FOR_MS. Can be given several
    /// times. What NIXL reads does not go over connections, and goes on.
    #[arg(long, value_name = "I@MS:FOR_MS", requires = "fleet", conflicts_with = "etcd")]
    pub(crate) part_node: Vec<StopNode>,
    /// Gives up a node that is not done after S seconds.
    #[arg(long, value_name = "S", default_value_t = 3600, value_parser = whole::<u32>, requires = "fleet")]
    pub(crate) node_timeout: u32,
    /// Which node this process is; a run with --nodes says so.
    #[arg(long, hide = true, requires_all = ["node_count", "node_folder"])]
    pub(crate) node: Option<u16>,
    #[arg(long, hide = true)]
    pub(crate) node_count: Option<u16>,
    #[arg(long, hide = true)]
    pub(crate) node_folder: Option<PathBuf>,
    #[arg(long, hide = true)]
    pub(crate) node_walled: bool,
    #[arg(long, hide = true, default_value_t = 0)]
    node_prefill: u16,
    #[arg(long, hide = true, default_value_t = 10_000)]
    node_handover_ms: u32,
    #[arg(long, hide = true)]
    node_etcd: Vec<String>,
    /// How many of the read blocks are compared: none, sample or full.
    #[arg(long, value_name = "HOW", default_value_t = RunConfig::default().verify)]
    verify: Verify,
    /// Seed of all random choices.
    #[arg(long, value_name = "S", default_value_t = RunConfig::default().seed, value_parser = whole::<u64>)]
    seed: u64,
    /// Timing profile of simulated devices: h100, h200 or a file of `key = value` lines [default:
    /// h100].
    #[arg(long, value_name = "PROFILE")]
    pub(crate) profile: Option<String>,
    /// Writes the report to this file as JSON, completely or not at all.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Adds to the report what the run did over time, for `kv-replay report`: samples, histograms and a timeline, of
    /// bounded length.
    #[arg(long, conflicts_with_all = ["contiguous", "nodes", "prefill_nodes"])]
    series: bool,
    /// Shows the figures of --series in this terminal while it runs, and adds them to the report.
    #[arg(long, conflicts_with_all = ["contiguous", "nodes", "prefill_nodes"])]
    pub(crate) live: bool,
    /// Disables a protection: staging, claim, claim-unseen or skip; with --contiguous staging or
    /// recycle.
    #[cfg(all(feature = "sabotage", debug_assertions))]
    #[arg(long, value_name = "WHAT")]
    pub(crate) sabotage: Option<crate::sabotage::Sabotage>,
    /// Has a worker process do wrong in a step: WORKER@STEP:garbage, torn, old, ahead, silent,
    /// deaf or byte.
    #[cfg(all(feature = "sabotage", debug_assertions))]
    #[arg(long, value_name = "WRONG", requires = "workers")]
    pub(crate) misbehave: Option<kv_replay::engine::workers::Misbehave>,
}

impl RunArgs {
    /// Number of devices that the model is divided over.
    pub(crate) fn parts(&self) -> usize {
        match self.workers {
            Some(workers) => workers.into(),
            None if self.fleet().is_some() || self.node.is_some() => 1,
            None => self.device.count(),
        }
    }

    /// Blocks of host memory.
    pub(crate) fn host_blocks(&self) -> u64 {
        self.host_blocks.unwrap_or(match self.contiguous {
            true => 0,
            false => RunConfig::default().host_blocks,
        })
    }

    fn disk_config(&self) -> Option<DiskConfig> {
        let bytes = self.disk_bytes?.0;
        let mut disk = DiskConfig::new(self.disk.clone()?, bytes);
        disk.bytes_per_second = self.disk_rate.map(|rate| rate.0);
        disk.fresh = self.disk_fresh;
        Some(disk)
    }

    /// How many processes the run starts, and how many of them compute prompts for the others; none if it is one process.
    pub(crate) fn fleet(&self) -> Option<(u16, u16)> {
        match (self.prefill_nodes, self.decode_nodes) {
            (Some(prefill), Some(decode)) => Some((prefill.saturating_add(decode), prefill)),
            _ => self.nodes.map(|nodes| (nodes, 0)),
        }
    }

    /// Which node this process is; none if it is none, or its key is of no use.
    pub(crate) fn node_config(&self, key: &[u8]) -> Option<NodeConfig> {
        let (index, count) = (self.node?, self.node_count?);
        let key = kv_remote::Key::new(key).ok()?;
        let folder = self.node_folder.as_ref()?;
        let mut node = NodeConfig::new(index, count, folder, key, self.node_bytes.0);
        (node.transfer, node.walled) = (self.node_transfer, self.node_walled);
        node.prefill = self.node_prefill;
        node.handover = Duration::from_millis(self.node_handover_ms.into());
        node.etcd.clone_from(&self.node_etcd);
        Some(node)
    }

    pub(crate) fn config(&self) -> RunConfig {
        RunConfig {
            shape: KvModelShape {
                // Of each kind, one for each device.
                layers: self.layers.unwrap_or(match self.window {
                    None => self.parts() as u32,
                    Some(_) => 2 * self.parts() as u32,
                }),
                kv_heads: self.kv_heads,
                head_size: self.head_size,
                dtype: self.dtype,
            },
            block_tokens: self.block_tokens,
            place: self.place,
            device_blocks: self.device_blocks,
            device_memory: self.device_memory,
            host_blocks: self.host_blocks(),
            max_batch: self.max_batch,
            step_tokens: self.step_tokens,
            policy: self.policy,
            store: self.store,
            store_rate: self.store_rate.map(|rate| rate.0),
            transport: self.transport,
            open_loop: self.open_loop,
            model: ModelCost {
                prefill_tokens_per_s: self.prefill_rate,
                decode_step_us: self.decode_step_us,
            },
            life: Life {
                chunk: self.chunk,
                drafts: self.draft,
                accept: self.accept,
                fork: self.fork,
                suspend: self.suspend,
                cancel: self.cancel,
                budget_swing: self.budget_swing,
                hints: self.hints,
            },
            tier_faults: self.tier_faults,
            disk: self.disk_config(),
            node: None,
            compute_rate: self.compute_rate,
            verify: self.verify,
            seed: self.seed,
            window: self.window,
            full_layers: self.full_layers,
            state_layers: self.state_layers,
            state_tokens: self.state_tokens,
            draft_layers: self.draft_layers,
            series: self.series || self.live,
        }
    }
}

#[derive(Args, Debug)]
#[command(allow_negative_numbers = true, after_help = POLICIES_HELP)]
pub(crate) struct PoliciesArgs {
    /// A trace, in any format that `convert` reads; gzip and zstd are unpacked. May be repeated.
    #[arg(long, value_name = "FILE", required = true)]
    pub(crate) trace: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) reading: ReadArgs,
    /// Cache sizes to compare, in blocks of a hash id.
    #[arg(
        long,
        value_name = "LIST",
        default_value = "1000,3000,10000,30000,50000,100000",
        allow_hyphen_values = true
    )]
    pub(crate) capacities: String,
    /// Also simulates host memory of these sizes, in blocks, below each of the capacities: hits in both, and blocks
    /// stored and brought back.
    #[arg(long, value_name = "LIST", allow_hyphen_values = true)]
    pub(crate) host_capacities: Option<String>,
    /// Requests whose lookups count: first, second or both. The first half is served in any case.
    #[arg(long, value_name = "HALF", default_value_t)]
    pub(crate) half: Half,
    /// Also searches how much smaller HitDensity's cache may be for LRU's hit rate.
    #[arg(long)]
    pub(crate) saved: bool,
    /// Give hints, derived from the trace, about the blocks of requests that are done: that their
    /// session is over, or waits for a tool at most 30 s.
    #[arg(long)]
    pub(crate) hints: bool,
    /// Writes the hit rates to this file as JSON, completely or not at all.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

#[derive(Args, Debug)]
#[command(allow_negative_numbers = true, after_help = GENERATE_HELP)]
pub(crate) struct GenerateArgs {
    /// Number of requests.
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = whole::<u64>)]
    pub(crate) requests: u64,
    /// Seed of the workload.
    #[arg(long, value_name = "S", default_value_t = 0, value_parser = whole::<u64>)]
    pub(crate) seed: u64,
    /// Writes the workload to this file, completely or not at all, instead of to standard output.
    #[arg(long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Writes what it has to this file as JSON, completely or not at all.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

const CONVERT_HELP: &str = "\
Formats, told by their content; gzip and zstd are unpacked:
  trace     one JSON object a line, as the Mooncake traces: timestamp (ms), input_length, output_length, hash_ids
  Bailian   the same with chat_id, and timestamp in seconds; 16 tokens a hash id
  WEKA      a session of a coding agent as one JSON document, or several, with nested sub-agents; says its tokens a hash id
  Azure     CSV with TIMESTAMP, ContextTokens, GeneratedTokens: lengths only, every prompt is unique
  BurstGPT  CSV with Timestamp, Request tokens, Response tokens: lengths only, every prompt is unique

Examples:
  kv-replay convert AzureLLMInferenceTrace_conv.csv --output azure.jsonl
  kv-replay convert sessions/*.json --sessions-within 14400 --output agents.jsonl
  kv-replay run --trace agents.jsonl --trace-block-tokens 64";

#[derive(Args, Debug)]
#[command(allow_negative_numbers = true, after_help = CONVERT_HELP)]
pub(crate) struct ConvertArgs {
    /// Traces in any of the formats below. Several are joined in the order of arrival.
    #[arg(value_name = "FILE", required = true)]
    pub(crate) traces: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) reading: ReadArgs,
    /// Has sessions whose times are their own begin at random moments within S seconds.
    #[arg(long, value_name = "S", default_value_t = 0, value_parser = whole::<u32>)]
    pub(crate) sessions_within: u32,
    /// Seed of these moments.
    #[arg(long, value_name = "S", default_value_t = 0, value_parser = whole::<u64>)]
    pub(crate) seed: u64,
    /// Writes the trace to this file, completely or not at all, instead of to standard output.
    #[arg(long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Writes what it has to this file as JSON, completely or not at all.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

impl ConvertArgs {
    pub(crate) fn options(&self) -> ReadOptions {
        let sessions_within_ms = u64::from(self.sessions_within) * 1000;
        ReadOptions { sessions_within_ms, seed: self.seed, ..self.reading.options() }
    }
}

const DOCTOR_HELP: &str = "\
Exit status: 0 if a run would work, with or without notes; 2 if there is a problem. Nothing is left behind.

Examples:
  kv-replay doctor
  kv-replay doctor --device sim
  kv-replay doctor --folder /mnt/nvme --disk-test 4GiB --json doctor.json";

#[derive(Args, Debug)]
#[command(allow_negative_numbers = true, after_help = DOCTOR_HELP)]
pub(crate) struct DoctorArgs {
    /// Devices that a run would use: cuda for every GPU, GPUs such as cuda:0,cuda:1, or sim for none.
    #[arg(long, value_name = "DEVICES", default_value_t = DeviceSpec::EveryCuda)]
    pub(crate) device: DeviceSpec,
    /// Folder that `run --disk` would use.
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub(crate) folder: PathBuf,
    /// Bytes that are written there and read back, to measure the disk; 0 to measure nothing.
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    pub(crate) disk_test: ByteSize,
    /// Writes the findings to this file as JSON, completely or not at all.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

const REPORT_HELP: &str = "\
The page needs no network and no other file. Reports of runs with --series have charts and a timeline; others have totals.

Examples:
  kv-replay run --trace chat.jsonl --series --json chat.json
  kv-replay report chat.json --out chat.html
  kv-replay report small.json large.json --out both.html --trace-events both.trace.json";

#[derive(Args, Debug)]
#[command(after_help = REPORT_HELP)]
pub(crate) struct ReportArgs {
    /// JSON reports of runs, side by side; at most 8.
    #[arg(value_name = "RUN.json", required = true)]
    pub(crate) runs: Vec<PathBuf>,
    /// Writes the page to this file, completely or not at all.
    #[arg(long, value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// Also writes the timelines to this file, in the format that Perfetto and chrome://tracing open.
    #[arg(long, value_name = "FILE")]
    pub(crate) trace_events: Option<PathBuf>,
    /// Also writes to this file as JSON what limited each run and what would help.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

/// Parses a whole number.
pub(crate) fn whole<T: FromStr + Bounded>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("expected a whole number from 0 to {}", T::MOST))
}

/// The largest number of a type.
pub(crate) trait Bounded {
    const MOST: u64;
}

impl Bounded for u16 {
    const MOST: u64 = u16::MAX as u64;
}

impl Bounded for u32 {
    const MOST: u64 = u32::MAX as u64;
}

impl Bounded for u64 {
    const MOST: u64 = u64::MAX;
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_defaults_are_those_of_the_library() {
        let cli = Cli::try_parse_from(["kv-replay", "run"]).unwrap();
        let Some(Command::Run(args)) = cli.command else { panic!("run, found {cli:?}") };
        assert_eq!(args.config(), RunConfig::default());
        assert_eq!(args.device, DeviceSpec::default());
    }
}
