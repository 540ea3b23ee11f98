//! `kv-pool` beside `kvbm-logical`, on the same operations, interleaved in one process.
//!
//! `cargo xtask peers` builds and runs it. The program needs nothing but itself, so it can be
//! copied to another machine of the same kind and run there.

mod clock;
mod contender;
mod heap;
mod kvbm;
mod measure;
mod memory;
mod operation;
mod ours;
mod report;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Parser;
use serde::Serialize;

use contender::Contender;
use kvbm::Kvbm;
use measure::{Effort, Entry};
use operation::Operation;
use ours::Ours;
use report::{Row, Unit};

#[global_allocator]
static HEAP: heap::CountingHeap = heap::CountingHeap;

type KvbmLru = Kvbm<kvbm::Lru>;
type KvbmDefault = Kvbm<kvbm::Default>;

/// Runs kv-pool beside kvbm-logical and prints a table: median (best) of the rounds, and how many
/// times better kv-pool is, as the median of the ratios within a round.
#[derive(Parser)]
#[command(name = "peers", version)]
struct Cli {
    /// Numbers of threads for the operations that run on several; powers of two up to the
    /// processors of this machine unless given.
    #[arg(long, value_delimiter = ',')]
    threads: Vec<usize>,
    /// Rounds of each contender and operation.
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u64).range(1..))]
    rounds: u64,
    /// About how long one round takes, in milliseconds.
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u64).range(1..))]
    round_ms: u64,
    /// Only operations whose line in the table contains this.
    #[arg(long, default_value = "")]
    only: String,
    /// No operations whose line contains one of these.
    #[arg(long, value_delimiter = ',')]
    without: Vec<String>,
    /// Only kv-pool, for a profile of it alone.
    #[arg(long)]
    alone: bool,
    /// Also writes everything, round by round, to this file.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Looks at the memory of one contender and prints it: how this program starts itself.
    #[arg(long, hide = true)]
    look_at: Option<String>,
}

fn main() -> anyhow::Result<()> {
    let cli = Cli::parse();
    if let Some(name) = &cli.look_at {
        let seen = match name.as_str() {
            Ours::NAME => memory::look::<Ours>(),
            KvbmLru::NAME => memory::look::<KvbmLru>(),
            KvbmDefault::NAME => memory::look::<KvbmDefault>(),
            other => bail!("nobody is called {other}"),
        }?;
        println!("{}", serde_json::to_string(&seen)?);
        return Ok(());
    }
    let machine = Machine::here();
    println!("{}, {} processors\n", machine.model, machine.processors);
    let bench = Bench::new(&cli);
    println!("{}", report::head(&bench.names));
    let mut rows = bench.timings(&thread_counts(&cli.threads, machine.processors))?;
    rows.extend(bench.heap_calls());
    rows.extend(bench.memory()?);
    if let Some(path) = &cli.json {
        let rounds = (cli.rounds, cli.round_ms);
        let text = serde_json::to_string_pretty(&Report { machine, rounds, rows })?;
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// Everything that a run has found.
#[derive(Serialize)]
struct Report {
    machine: Machine,
    /// How many, and how many milliseconds each.
    rounds: (u64, u64),
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Machine {
    model: String,
    processors: usize,
}

impl Machine {
    fn here() -> Self {
        let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
        Self {
            model: model.map_or("unknown processor", |(_, model)| model).to_owned(),
            processors: std::thread::available_parallelism().map_or(1, usize::from),
        }
    }
}

fn thread_counts(asked: &[usize], processors: usize) -> Vec<usize> {
    if asked.is_empty() {
        return (0..5).map(|power| 1 << power).filter(|&count| count <= processors).collect();
    }
    asked.iter().copied().filter(|&count| count > 0).collect()
}

struct Bench {
    entries: Vec<Entry>,
    names: Vec<&'static str>,
    effort: Effort,
    only: String,
    without: Vec<String>,
}

impl Bench {
    fn is_asked_for(&self, label: &str) -> bool {
        label.contains(&self.only) && !self.without.iter().any(|part| label.contains(part))
    }

    fn new(cli: &Cli) -> Self {
        let mut entries = vec![Entry::of::<Ours>()];
        if !cli.alone {
            entries.extend([Entry::of::<KvbmLru>(), Entry::of::<KvbmDefault>()]);
        }
        let names = entries.iter().map(|entry| entry.name).collect();
        let round = Duration::from_millis(cli.round_ms);
        let effort = Effort { rounds: cli.rounds as usize, round };
        let (only, without) = (cli.only.clone(), cli.without.clone());
        Self { entries, names, effort, only, without }
    }

    fn timings(&self, threads: &[usize]) -> anyhow::Result<Vec<Row>> {
        let mut rows = Vec::new();
        for (label, operation) in operations(threads) {
            if !self.is_asked_for(&label) {
                continue;
            }
            let samples = measure::interleaved(&self.entries, operation, self.effort);
            let row = if operation.is_throughput() {
                Row::of_rates(&label, &self.names, samples)
            } else {
                Row::of_costs(&label, Unit::Nanoseconds, &self.names, samples)
            };
            rows.push(shown(row));
        }
        Ok(rows)
    }

    /// Calls of the heap, which are the same in every round.
    fn heap_calls(&self) -> Vec<Row> {
        let operations = [
            ("allocate, register, release", Operation::StoreOne),
            ("the same in batches of 64, a block", Operation::StoreBatch),
            ("prefix hit of 64 cached blocks, a block", Operation::HitCached),
            ("prefix hit of 64 held blocks, a block", Operation::HitHeld),
            ("pin and unpin", Operation::Pin { threads: 1 }),
        ];
        let mut rows = Vec::new();
        for (label, operation) in operations {
            let label = format!("heap calls: {label}");
            if !self.is_asked_for(&label) {
                continue;
            }
            let samples = self.entries.iter().map(|entry| {
                let mut runner = (entry.runner)(operation);
                runner(100);
                let (count, timed) = heap::count(|| runner(10_000));
                vec![count.calls as f64 / timed.operations as f64]
            });
            let samples = samples.collect();
            rows.push(shown(Row::of_costs(&label, Unit::Calls, &self.names, samples)));
        }
        rows
    }

    fn memory(&self) -> anyhow::Result<Vec<Row>> {
        let lines = [
            ("memory: creation of 1,048,576 blocks", Unit::Milliseconds),
            ("memory: resident after creation, a block", Unit::Bytes),
            ("memory: heap after creation, a block", Unit::Bytes),
            ("memory: first store of a block, in batches of 64", Unit::Nanoseconds),
            ("memory: peak resident, every block cached, a block", Unit::Bytes),
            ("memory: heap, every block cached, a block", Unit::Bytes),
            ("memory: drop of the full pool", Unit::Milliseconds),
        ];
        if !lines.iter().any(|(label, _)| self.is_asked_for(label)) {
            return Ok(Vec::new());
        }
        let mut seen = vec![Vec::new(); self.names.len()];
        for round in 0..self.effort.rounds.min(5) {
            for turn in 0..self.names.len() {
                let index = (round + turn) % self.names.len();
                seen[index].push(memory::look_in_fresh_process(self.names[index])?);
            }
        }
        let figures: [fn(&memory::Seen) -> f64; 7] = [
            |seen| seen.create_ms,
            |seen| seen.created_resident,
            |seen| seen.created_heap,
            |seen| seen.fill_ns,
            |seen| seen.cached_resident,
            |seen| seen.cached_heap,
            |seen| seen.drop_ms,
        ];
        let rows = lines.iter().zip(figures).map(|(&(label, unit), figure)| {
            let samples = seen.iter().map(|seen| seen.iter().map(figure).collect()).collect();
            shown(Row::of_costs(label, unit, &self.names, samples))
        });
        Ok(rows.collect())
    }
}

/// Prints a row as soon as it is known.
fn shown(row: Row) -> Row {
    println!("{}", row.markdown());
    row
}

fn operations(threads: &[usize]) -> Vec<(String, Operation)> {
    let plural = |count: usize| if count == 1 { "thread" } else { "threads" };
    let mut operations: Vec<(String, Operation)> = [
        ("a name of 128 bits, made up; counted with the rest", Operation::Name),
        ("an atomic addition and subtraction, for scale", Operation::Count),
        ("allocate, register, release; every allocation evicts", Operation::StoreOne),
        ("the same by as few calls as there are for it", Operation::StoreOneShortly),
        ("the same in batches of 64, a block", Operation::StoreBatch),
        ("prefix hit of 64 cached blocks, a block", Operation::HitCached),
        ("prefix hit of 64 held blocks, a block", Operation::HitHeld),
        ("miss, a call", Operation::Miss),
    ]
    .map(|(label, operation)| (label.to_owned(), operation))
    .into();
    for &threads in threads {
        let label = format!("pin and unpin a held block, {threads} {}", plural(threads));
        operations.push((label, Operation::Pin { threads }));
        let label = format!("the cheapest pin and unpin, {threads} {}", plural(threads));
        operations.push((label, Operation::PinCheaply { threads }));
    }
    for &threads in threads {
        let label = format!("mixed load, {threads} {}", plural(threads));
        operations.push((label, Operation::Mixed { threads }));
    }
    for children in [1, 1_000, 16_000, 100_000] {
        let label = format!("eviction, one root with {children} children");
        operations.push((label, Operation::Evict { children }));
    }
    operations
}
