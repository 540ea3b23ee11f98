//! `run`: its options, in groups, and the configuration that they stand for.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use kv_replay::command_line::{ReadArgs, positive, whole};
use kv_replay::config::RunConfig;
use kv_replay::device::DeviceSpec;
use kv_replay::disk::{ByteSize, DiskConfig};
use kv_replay::nodes::{NodeConfig, NodeTransfer};
use kv_replay::shape::{Dtype, KvModelShape};

use crate::drills::Drills;
use crate::fleet::NodeRole;

const RUN_HELP: &str = "\
Examples:
  kv-replay run --trace chat.jsonl --series --json chat.json
  kv-replay run --requests 250 --device sim:2 --place layers --layers 8 --verify full
  kv-replay run --trace chat.jsonl --open-loop --prefill-rate 20000 --decode-step-us 9000
  kv-replay run --workers 4 --drill stop-worker=1@1000:1000
  kv-replay run --trace chat.jsonl --disk /mnt/nvme/kv --disk-bytes 4GiB";

#[derive(Args, Debug)]
#[command(allow_negative_numbers = true, after_help = RUN_HELP)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) workload: WorkloadArgs,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
    #[command(flatten)]
    config: RunConfig,
    #[command(flatten)]
    pub(crate) disk: DiskArgs,
    #[command(flatten)]
    pub(crate) process: ProcessArgs,
    #[command(flatten)]
    pub(crate) result: ResultArgs,
    #[command(flatten)]
    pub(crate) drills: Drills,
}

/// The requests.
#[derive(Args, Debug)]
#[command(next_help_heading = "Workload")]
pub(crate) struct WorkloadArgs {
    /// The trace, in the format of the Mooncake traces; `kv-tools convert` makes one of other formats. Without a trace, a
    /// workload is generated.
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) reading: ReadArgs,
    /// Uses only the first N requests of the trace, or generates N requests [default: all, or
    /// 1000].
    #[arg(long, value_name = "N", value_parser = whole::<u64>)]
    pub(crate) requests: Option<u64>,
    /// Requests a second, on average: arrivals come closer or further apart than in the trace.
    #[arg(long, value_name = "R", value_parser = positive, requires = "open_loop")]
    pub(crate) rate: Option<f64>,
}

/// The model, of which a run has the shape of its KV and the time that it would take.
#[derive(Args, Debug)]
#[command(next_help_heading = "Model")]
pub(crate) struct ModelArgs {
    /// Number of layers of the model [default: one for each device or worker, and with --window two].
    #[arg(long, value_name = "L", value_parser = whole::<u32>)]
    pub(crate) layers: Option<u32>,
    /// Number of heads of K, and of V, in one layer.
    #[arg(long, value_name = "H", default_value_t = RunConfig::default().shape.kv_heads, value_parser = whole::<u32>)]
    pub(crate) kv_heads: u32,
    /// Number of elements of one head.
    #[arg(long, value_name = "D", default_value_t = RunConfig::default().shape.head_size, value_parser = whole::<u32>)]
    pub(crate) head_size: u32,
    /// Element type: f32, f16, bf16 or fp8.
    #[arg(long, value_name = "T", default_value_t = RunConfig::default().shape.dtype)]
    pub(crate) dtype: Dtype,
}

/// What the run is on.
#[derive(Args, Debug)]
#[command(next_help_heading = "Devices")]
pub(crate) struct DeviceArgs {
    /// Devices to run on: sim, sim:N for N simulated devices, or GPUs such as cuda:0,cuda:1. With
    /// --workers: sim, GPUs that the workers take in turn, or cuda for every GPU.
    #[arg(long, value_name = "DEVICES", default_value_t)]
    pub(crate) device: DeviceSpec,
    /// Timing profile of simulated devices: h100, h200 or a file of `key = value` lines [default:
    /// h100].
    #[arg(long, value_name = "PROFILE")]
    pub(crate) profile: Option<String>,
}

/// Files below host memory.
#[derive(Args, Debug)]
#[command(next_help_heading = "Memory")]
pub(crate) struct DiskArgs {
    /// Puts files in this folder below the host. Blocks of an earlier run of the same shape are found again; files of
    /// another shape or size are refused. The folder is made if the one around it is there. Workers have a folder each
    /// in it, and divide the bytes and the rate between them.
    #[arg(long, value_name = "DIR", requires = "disk_bytes")]
    pub(crate) disk: Option<PathBuf>,
    /// Bytes of these files, such as 256MiB or 4GiB.
    #[arg(long, value_name = "SIZE", requires = "disk")]
    pub(crate) disk_bytes: Option<ByteSize>,
    /// Bytes a second that these files are read and written with, at most.
    #[arg(long, value_name = "SIZE", requires = "disk")]
    pub(crate) disk_rate: Option<ByteSize>,
    /// Finds no blocks of an earlier run in these files, and begins those of another shape or size anew.
    #[arg(long, requires = "disk")]
    pub(crate) disk_fresh: bool,
}

/// Processes of this program that the run starts.
#[derive(Args, Debug)]
#[command(next_help_heading = "Worker processes and nodes")]
pub(crate) struct ProcessArgs {
    /// Drives N worker processes, each with one device, by plans over pipes; this process decides and
    /// opens no device.
    #[arg(long, value_name = "N", value_parser = whole::<u16>)]
    pub(crate) workers: Option<u16>,
    /// Kills and replaces a worker process that makes no progress for S seconds.
    #[arg(long, value_name = "S", default_value_t = 60, value_parser = whole::<u32>, requires = "workers")]
    pub(crate) worker_timeout: u32,
    /// Starts N processes of this program, each with a device of its own, and spreads the requests over them. They keep
    /// blocks for each other, as a tier below the host memory of each, and read each other's host memory.
    #[arg(long, value_name = "N", value_parser = whole::<u16>, group = "fleet", conflicts_with_all = ["workers", "disk"])]
    pub(crate) nodes: Option<u16>,
    /// Starts N processes that compute the prompts of all requests, each of a share, and --decode-nodes that go on with them:
    /// they fill blocks of their devices while the prompts are computed, and compute what does not come.
    #[arg(long, value_name = "N", value_parser = whole::<u16>, group = "fleet", requires = "decode_nodes", conflicts_with_all = ["nodes", "workers", "disk", "etcd"])]
    pub(crate) prefill_nodes: Option<u16>,
    /// Starts N processes that go on with the prompts of --prefill-nodes.
    #[arg(long, value_name = "N", value_parser = whole::<u16>, requires = "prefill_nodes")]
    pub(crate) decode_nodes: Option<u16>,
    /// How many milliseconds a prompt is offered to the node that goes on with it, and waited for there.
    #[arg(long, value_name = "MS", default_value_t = 10_000, value_parser = whole::<u32>, requires = "prefill_nodes")]
    pub(crate) handover_ms: u32,
    /// Bytes that each node keeps for all, such as 256MiB.
    #[arg(long, value_name = "SIZE", default_value = "64MiB")]
    pub(crate) node_bytes: ByteSize,
    /// How blocks of other nodes are read: sockets; nixl, from the other node's memory, if NIXL is installed; or nixl-device, prompts
    /// of --prefill-nodes from GPU to GPU.
    #[arg(long, value_name = "HOW", default_value_t = NodeTransfer::Sockets)]
    pub(crate) node_transfer: NodeTransfer,
    /// Has nodes find each other by the etcd of this URL, such as http://127.0.0.1:2379, so that nodes that die are members no
    /// more. Can be given several times, for one etcd. Needs the feature etcd.
    #[arg(long, value_name = "URL", requires = "fleet")]
    pub(crate) etcd: Vec<String>,
    /// Gives up a node that is not done after S seconds.
    #[arg(long, value_name = "S", default_value_t = 3600, value_parser = whole::<u32>, requires = "fleet")]
    pub(crate) node_timeout: u32,
    /// That this process is a node of a run, with the folder of all nodes; it is told the rest.
    #[arg(long, hide = true)]
    pub(crate) node: Option<PathBuf>,
}

/// What is checked and told.
#[derive(Args, Debug)]
#[command(next_help_heading = "Verification and results")]
pub(crate) struct ResultArgs {
    /// Writes the report to this file as JSON, completely or not at all.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

impl RunArgs {
    /// Number of devices that the model is divided over.
    pub(crate) fn parts(&self) -> usize {
        match self.process.workers {
            Some(workers) => workers.into(),
            None if self.fleet().is_some() || self.process.node.is_some() => 1,
            None => self.device.device.count(),
        }
    }

    fn disk_config(&self) -> Option<DiskConfig> {
        let DiskArgs { disk, disk_bytes, disk_rate, disk_fresh } = &self.disk;
        let mut config = DiskConfig::new(disk.clone()?, disk_bytes.as_ref()?.0);
        config.bytes_per_second = disk_rate.as_ref().map(|rate| rate.0);
        config.fresh = *disk_fresh;
        Some(config)
    }

    /// How many processes the run starts, and how many of them compute prompts for the others; none if it is one process.
    pub(crate) fn fleet(&self) -> Option<(u16, u16)> {
        match (self.process.prefill_nodes, self.process.decode_nodes) {
            (Some(prefill), Some(decode)) => Some((prefill.saturating_add(decode), prefill)),
            _ => self.process.nodes.map(|nodes| (nodes, 0)),
        }
    }

    /// The node that this process is, by what it was told; none if it is none, or its key is of no use.
    pub(crate) fn node_config(&self, role: &NodeRole) -> Option<NodeConfig> {
        let folder = self.process.node.as_ref()?;
        let key = kv_remote::Key::new(role.key.as_bytes()).ok()?;
        let bytes = self.process.node_bytes.0;
        let mut node = NodeConfig::new(role.index, role.count, folder, key, bytes);
        (node.transfer, node.walled) = (self.process.node_transfer, role.walled);
        node.prefill = role.prefill;
        node.handover = Duration::from_millis(role.handover_ms.into());
        node.etcd.clone_from(&role.etcd);
        Some(node)
    }

    fn shape(&self) -> KvModelShape {
        let ModelArgs { layers, kv_heads, head_size, dtype } = self.model;
        // Of each kind, one for each device.
        let layers = layers.unwrap_or(match self.config.window {
            None => self.parts() as u32,
            Some(_) => 2 * self.parts() as u32,
        });
        KvModelShape { layers, kv_heads, head_size, dtype }
    }

    pub(crate) fn config(&self) -> RunConfig {
        let tier_faults = self.drills.tier_faults().first().copied();
        RunConfig {
            shape: self.shape(),
            tier_faults,
            disk: self.disk_config(),
            ..self.config.clone()
        }
    }
}
