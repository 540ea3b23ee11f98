//! The subcommands, and their exit statuses.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cuda_sim::Profile;
use kv_plane::processes::WorkerFault;
use kv_pool::store::StoreKind;
use kv_replay::command_line::{self, Bar, complain};
use kv_replay::config::{ConfigError, RunConfig, Verify};
use kv_replay::device::{
    self, DeviceOpenError, DeviceSpec, OpenDevices, ProfileReadError, SimSizes,
};
use kv_replay::engine::workers::{self, WorkerCommand, WorkersConfig};
use kv_replay::engine::{self, RunError};
use kv_replay::generate::{self, GenerateError, GenerateOptions};
use kv_replay::json_file::{WriteError, check_files, write_json};
use kv_replay::nodes::{NODES_MAX, NodeStartError, NodeTransfer};
use kv_replay::report::RunReport;
use kv_replay::shape::KvModelShape;
use kv_replay::trace::{Trace, TraceError};

use crate::cli::Command;
use crate::fleet::{self, Fleet, FleetError, Interrupts, NodeFolder};
use crate::run_args::RunArgs;

/// Number of requests of the demonstration: a simulated device replays them in about six seconds on
/// two cores.
const DEMO_REQUESTS: u64 = 250;

const DEMO_SEED: u64 = 7;

/// The configuration of the demonstration: pools so small that blocks are evicted, offloaded and
/// onboarded.
fn demo_config() -> RunConfig {
    RunConfig {
        shape: KvModelShape { layers: 2, ..RunConfig::default().shape },
        block_tokens: 64,
        device_blocks: 8192,
        host_blocks: 16_384,
        // So that much is moved and compared.
        store: StoreKind::All,
        verify: Verify::Full,
        seed: DEMO_SEED,
        ..RunConfig::default()
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Outcome {
    /// There was no mistake.
    Clean,
    /// Some blocks held bytes that do not belong to their request.
    Corrupt,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("--requests is 0, expected at least 1")]
    NoRequests,
    #[error(transparent)]
    Profile(#[from] ProfileReadError),
    #[error("--profile is for simulated devices; {spec} keeps real time")]
    ProfileOfGpu { spec: DeviceSpec },
    #[error(transparent)]
    Trace(#[from] TraceError),
    #[error(transparent)]
    Generate(#[from] GenerateError),
    #[error("{0}")]
    Drill(&'static str),
    #[error("cannot use device {spec}")]
    Device { spec: DeviceSpec, source: DeviceOpenError },
    #[error(transparent)]
    Write(#[from] WriteError),
    #[error("cannot write to standard output")]
    Stdout(#[source] io::Error),
    #[error("the replay failed")]
    Run(#[source] Box<RunError>),
    #[error("--device cuda is every GPU, for --workers; name the GPUs, such as cuda:0,cuda:1")]
    EveryGpu,
    #[error("--workers gives each process one device; expected --device sim, not {spec}")]
    SimDevices { spec: DeviceSpec },
    #[error(transparent)]
    Fleet(#[from] FleetError),
    #[error(transparent)]
    Node(#[from] NodeStartError),
    #[error("--node is for processes that a run with --nodes starts")]
    NoNode,
    #[error("{} is no file, and each of the nodes reads the trace; write it to one", trace.display())]
    TraceOfNodes { trace: PathBuf },
    #[error("cannot read the key of the nodes")]
    Stdin(#[source] io::Error),
    #[error("cannot make a folder for the nodes' sockets")]
    Folder(#[source] io::Error),
    #[error("cannot have signals end the nodes in order")]
    Signals(#[source] io::Error),
    #[error("the process is to end with its run")]
    Family(#[source] io::Error),
    #[error(
        "--disk {}: there is no folder {}; make it, or mount what it is on",
        folder.display(), parent.display()
    )]
    DiskFolder { folder: PathBuf, parent: PathBuf },
    #[error("cannot find the program to start worker processes")]
    Program(#[source] io::Error),
    #[error("the worker failed")]
    Serve(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("only {finished} of {requests} requests finished")]
    Unfinished { finished: u64, requests: u64 },
}

impl From<RunError> for Failure {
    fn from(error: RunError) -> Self {
        Self::Run(Box::new(error))
    }
}

impl Failure {
    /// 2 for bad input or a machine that lacks something, 1 for failures on the way.
    pub(crate) fn exit_status(&self) -> u8 {
        match self {
            // Nothing has run yet: the machine's memory, driver or device is too small for the
            // options.
            Self::Run(error) => match **error {
                RunError::Config(_)
                | RunError::Request { .. }
                | RunError::WorkerWithoutLayers { .. }
                | RunError::DrillWorker { .. }
                | RunError::Build(_)
                | RunError::Place(_)
                | RunError::Buffers { .. }
                | RunError::Iteration { .. }
                | RunError::LateArrival { .. }
                | RunError::Disk(_)
                | RunError::Node(_)
                | RunError::ChunkOverflow { .. } => 2,
                RunError::Worker { ref source, .. } => match **source {
                    WorkerFault::Unusable { .. } => 2,
                    _ => 1,
                },
                _ => 1,
            },
            Self::Fleet(FleetError::Drill { .. }) => 2,
            // The node has said the same.
            Self::Fleet(FleetError::Ended { status, .. }) if status.code() == Some(2) => 2,
            // As a shell says it of a program that a signal has ended.
            Self::Fleet(FleetError::Interrupted { signal }) => 128 + signal,
            Self::Unfinished { .. } | Self::Serve(_) | Self::Fleet(_) => 1,
            _ => 2,
        }
    }
}

/// Runs the command; without a command, the demonstration.
pub(crate) fn execute(command: Option<&Command>, all: &[OsString]) -> Result<Outcome, Failure> {
    match command {
        None => demo(),
        Some(Command::Run(args)) => run(args, all),
        Some(Command::Generate(args)) => {
            let files = (args.output.as_deref(), args.json.as_deref());
            say(&generate::run(args.requests, args.seed, files)?)?;
            Ok(Outcome::Clean)
        }
        Some(Command::Worker) => {
            workers::serve().map_err(Failure::Serve)?;
            Ok(Outcome::Clean)
        }
    }
}

fn demo() -> Result<Outcome, Failure> {
    let trace = generate::generate(&GenerateOptions { requests: DEMO_REQUESTS, seed: DEMO_SEED })?;
    let opened = say(&format!(
        "Replaying {DEMO_REQUESTS} generated requests on a simulated GPU, verifying every byte.\n\n"
    ));
    let config = demo_config();
    config.check_trace(&trace)?;
    let devices = open_devices(&config, &DeviceSpec::default(), Profile::default())?;
    let outcome = replay(&trace, None, |bar| engine::run(&config, &trace, &devices, bar))?;
    let closed = say("\nTry your own: kv-replay run --help\n");
    match outcome {
        Outcome::Clean => opened.and(closed).map(|()| outcome),
        Outcome::Corrupt => Ok(outcome),
    }
}

fn run(args: &RunArgs, all: &[OsString]) -> Result<Outcome, Failure> {
    if args.workload.requests == Some(0) {
        return Err(Failure::NoRequests);
    }
    let (workers, nodes) = (args.process.workers, args.fleet());
    let is_divided = workers.is_some() || nodes.is_some() || args.process.node.is_some();
    if args.device.device == DeviceSpec::EveryCuda && !is_divided {
        return Err(Failure::EveryGpu);
    }
    let has_etcd = !args.process.etcd.is_empty();
    if let Some(problem) = args.drills.problem(workers.is_some(), nodes.is_some(), has_etcd) {
        return Err(Failure::Drill(problem));
    }
    let mut config = args.config();
    // Checks everything before anything that takes long.
    config.check()?;
    config.check_devices(args.parts())?;
    check_disk_folder(args)?;
    if let Some(nodes) = args.fleet() {
        return fleet(args, all, nodes);
    }
    if args.process.node.is_some() {
        let role = fleet::read_role().map_err(Failure::Stdin)?;
        let node = role.and_then(|role| args.node_config(&role));
        config.node = Some(node.ok_or(Failure::NoNode)?);
        config.check()?;
    }
    let profile = profile_of(args)?;
    let workers = args.process.workers.map(|number| start_workers(args, number)).transpose()?;
    check_run_files(args)?;
    let trace = trace_of(args, &config)?;
    config.check_trace(&trace)?;
    let json = args.result.json.as_deref();
    if let Some(workers) = workers {
        return replay(&trace, json, |bar| workers::run(&config, &workers, &trace, bar));
    }
    let devices = open_devices(&config, &args.device.device, profile)?;
    let outcome = replay(&trace, json, |bar| {
        engine::run_with(&config, &trace, &devices, bar, |_cache| {
            #[cfg(all(feature = "sabotage", debug_assertions))]
            if args.drills.sabotage() {
                let pool = _cache.manager().pool(kv_plane::GroupId(0));
                pool.into_iter().for_each(|pool| pool.sabotage_peek_then_claim());
                let kernels = _cache.parts().iter().map(kv_plane::Part::kernels);
                kernels.for_each(|kernels| kernels.sabotage_allow_stored_twice(true));
            }
        })
    })?;
    if let Some(node) = &config.node {
        fleet::stay(node)?;
    }
    Ok(outcome)
}

/// Checks that the folder of the files is there, or the one that it is made in: a disk that is not mounted would otherwise
/// be replaced by a folder of another.
fn check_disk_folder(args: &RunArgs) -> Result<(), Failure> {
    let Some(folder) = &args.disk.disk else { return Ok(()) };
    let parent = folder.parent().filter(|parent| *parent != Path::new(""));
    let parent = parent.unwrap_or(Path::new("."));
    match folder.exists() || parent.is_dir() {
        true => Ok(()),
        false => Err(Failure::DiskFolder { folder: folder.clone(), parent: parent.to_owned() }),
    }
}

/// Checks that the report of a run can be written, and is none of the files that the run reads.
fn check_run_files(args: &RunArgs) -> Result<(), WriteError> {
    let profile = args.device.profile.as_deref().map(Path::new);
    check_files(
        args.workload.trace.as_deref().into_iter().chain(profile),
        args.result.json.as_deref(),
    )
}

/// The trace of a run; of one node, its part.
fn trace_of(args: &RunArgs, config: &RunConfig) -> Result<Trace, Failure> {
    let mut trace = match &args.workload.trace {
        Some(path) => {
            let requests = args.workload.requests.unwrap_or(u64::MAX);
            Trace::read_with(path, &args.workload.reading.options())?
                .limit(usize::try_from(requests).unwrap_or(usize::MAX))
        }
        None => {
            let requests = args.workload.requests.unwrap_or(GenerateOptions::default().requests);
            generate::generate(&GenerateOptions { requests, seed: config.seed })?
        }
    };
    if config.open_loop {
        trace = trace.from_first_arrival();
        if let Some(rate) = args.workload.rate {
            let times = rate / trace.rate();
            trace = trace.faster(times);
        }
    }
    if let Some(node) = &config.node {
        // Each node has every so-manieth request.
        let mut turn = 0..;
        let (index, nodes) = node.turn();
        trace.requests.retain(|_| turn.next().is_some_and(|turn: usize| turn % nodes == index));
    }
    Ok(trace)
}

fn fleet(
    args: &RunArgs,
    all: &[OsString],
    (nodes, prefill): (u16, u16),
) -> Result<Outcome, Failure> {
    for (option, count) in [
        ("--prefill-nodes", args.process.prefill_nodes),
        ("--decode-nodes", args.process.decode_nodes),
    ] {
        if count == Some(0) {
            return Err(ConfigError::Zero { option }.into());
        }
    }
    let config = args.config();
    if prefill > 0 {
        config.check_split()?;
    }
    if config.host_blocks == 0 && prefill == 0 {
        return Err(ConfigError::NodesWithoutHost.into());
    }
    let option = "--nodes";
    if nodes == 0 {
        return Err(ConfigError::Zero { option }.into());
    }
    if nodes > NODES_MAX {
        let (value, limit) = (nodes.into(), NODES_MAX.into());
        return Err(ConfigError::TooLarge { option, value, limit }.into());
    }
    check_run_files(args)?;
    if let Some(trace) =
        args.workload.trace.as_ref().filter(|trace| trace.exists() && !trace.is_file())
    {
        return Err(Failure::TraceOfNodes { trace: trace.clone() });
    }
    let is_simulated = matches!(args.device.device, DeviceSpec::Sim { .. });
    if args.process.node_transfer == NodeTransfer::NixlDevice && (prefill == 0 || is_simulated) {
        return Err(NodeStartError::NoDevice.into());
    }
    args.process.node_transfer.check()?;
    if !args.process.etcd.is_empty() && !cfg!(feature = "etcd") {
        return Err(NodeStartError::WithoutEtcd.into());
    }
    let interrupts = Interrupts::catch().map_err(Failure::Signals)?;
    let folder = NodeFolder::new().map_err(Failure::Folder)?;
    let fleet = Fleet {
        nodes,
        prefill,
        handover_ms: args.process.handover_ms,
        transfer: args.process.node_transfer,
        etcd: args.process.etcd.clone(),
        args: fleet::args_of_nodes(all.iter().skip(1).cloned()),
        drills: args.drills.of_nodes(),
        timeout_s: args.process.node_timeout.into(),
    };
    let report = fleet.run(&folder.0, &interrupts)?;
    // The nodes are gone; who takes the report may let it wait.
    drop(folder);
    interrupts.release()?;
    let written = args.result.json.as_deref().map_or(Ok(()), |path| write_json(path, &report));
    say(&report.summary())?;
    written?;
    if report.sum("corrupt_blocks") > 0 {
        return Ok(Outcome::Corrupt);
    }
    if let Some((finished, requests)) = report.unfinished() {
        return Err(Failure::Unfinished { finished, requests });
    }
    report.check_leases()?;
    Ok(Outcome::Clean)
}

fn profile_of(args: &RunArgs) -> Result<Profile, Failure> {
    match (&args.device.profile, &args.device.device) {
        (Some(name), DeviceSpec::Sim { .. }) => Ok(device::read_profile(name)?),
        (Some(_), spec) => Err(Failure::ProfileOfGpu { spec: spec.clone() }),
        (None, _) => Ok(Profile::default()),
    }
}

fn open_devices(
    config: &RunConfig,
    spec: &DeviceSpec,
    profile: Profile,
) -> Result<OpenDevices, Failure> {
    let unusable = |source| Failure::Device { spec: spec.clone(), source };
    let sizes = SimSizes { profile, ..SimSizes::for_config(config) };
    let devices = match &config.node {
        // Each node has one of the devices.
        Some(node) => device::open_one(spec, node.index.into(), sizes),
        None => device::open(spec, sizes),
    };
    let devices = devices.map_err(unusable)?;
    devices.check_fits(config).map_err(unusable)?;
    Ok(devices)
}

/// Lets `play` replay `trace`, prints the summary, and writes the report to the file `json` if one is named.
fn replay(
    trace: &Trace,
    json: Option<&Path>,
    play: impl FnOnce(&mut Bar) -> Result<RunReport, RunError>,
) -> Result<Outcome, Failure> {
    let mut bar = Bar::new(trace.requests.len() as u64);
    let report = play(&mut bar);
    bar.clear();
    let (report, ended) = match report {
        Ok(report) => (report, Ok(())),
        Err(RunError::Corrupted { report, source }) => (*report, Err(Failure::Run(source))),
        Err(error) => return Err(error.into()),
    };
    // Writes the file before printing, because standard output may be closed.
    let written = json.map_or(Ok(()), |path| write_json(path, &report)).map_err(Failure::from);
    let told = say(&report.summary());
    let outcome = judge(&report)?;
    let rest = [ended, written, told];
    if outcome == Outcome::Corrupt {
        // Corrupt bytes decide the exit status. Other failures are printed.
        rest.into_iter().filter_map(Result::err).for_each(|failure| complain(&failure));
        return Ok(outcome);
    }
    rest.into_iter().collect::<Result<(), _>>()?;
    Ok(outcome)
}

fn start_workers(args: &RunArgs, number: u16) -> Result<WorkersConfig, Failure> {
    if let spec @ DeviceSpec::Sim { devices: 2.. } = &args.device.device {
        return Err(Failure::SimDevices { spec: spec.clone() });
    }
    let command = WorkerCommand {
        program: std::env::current_exe().map_err(Failure::Program)?,
        args: vec!["worker".to_owned()],
    };
    Ok(WorkersConfig {
        workers: number,
        command,
        device: args.device.device.clone(),
        profile: args.device.profile.clone(),
        timeout: Duration::from_secs(args.process.worker_timeout.into()),
        drills: args.drills.of_workers(),
    })
}

fn judge(report: &RunReport) -> Result<Outcome, Failure> {
    let &RunReport { corrupt_blocks, finished, requests, .. } = report;
    if corrupt_blocks > 0 {
        return Ok(Outcome::Corrupt);
    }
    if finished + report.cancelled != requests {
        return Err(Failure::Unfinished { finished, requests });
    }
    Ok(Outcome::Clean)
}

fn say(text: &str) -> Result<(), Failure> {
    command_line::say(text).map_err(Failure::Stdout)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(finished: u64, corrupt_blocks: u64) -> RunReport {
        let report = RunReport::new(&RunConfig::default(), "sim").unwrap();
        RunReport { requests: 2, finished, corrupt_blocks, ..report }
    }

    #[test]
    fn a_run_that_left_requests_behind_has_failed() {
        assert_eq!(judge(&report(1, 1)).unwrap(), Outcome::Corrupt);
        let failure = judge(&report(1, 0)).unwrap_err();
        assert_eq!(failure.to_string(), "only 1 of 2 requests finished");
        assert_eq!(failure.exit_status(), 1);
        assert_eq!(Failure::NoRequests.exit_status(), 2);
        let closing = RunError::Findings { count: 1, first: "a finding".to_owned() };
        assert_eq!(Failure::from(closing).exit_status(), 1);
        let options = kv_plane::OptionsError::Zero { field: "sequences_max" };
        assert_eq!(Failure::from(RunError::Build(options.into())).exit_status(), 2);
    }
}
