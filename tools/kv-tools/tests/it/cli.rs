//! The program refuses bad input with exit status 2 and a message that names it, before it writes anything, and never writes
//! what it reads.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output};

use kv_replay::config::{RunConfig, Verify};
use kv_replay::device::{SimSizes, open};
use kv_replay::engine;
use kv_replay::generate::{GenerateOptions, generate};

/// Arguments, divided by spaces, and a piece of the message. `{}` are files of the folder in which it runs.
type Misuse = (&'static str, &'static str);

const POLICIES: [Misuse; 10] = [
    ("--json out.json", "--trace <FILE>"),
    ("--trace absent.jsonl --json out.json", "cannot open trace absent.jsonl"),
    (
        "--trace good.jsonl --capacities= --json out.json",
        "no capacities given, expected a list such as 1000,3000",
    ),
    (
        "--trace good.jsonl --capacities 0 --json out.json",
        "capacity \"0\" is not a whole number of blocks from 1",
    ),
    ("--trace good.jsonl --capacities 10,x --json out.json", "capacity \"x\""),
    ("--trace good.jsonl --host-capacities -3 --json out.json", "capacity \"-3\""),
    ("--trace good.jsonl --half third --json out.json", "first, second or both"),
    (
        "--trace good.jsonl --trace-block-tokens 0 --json out.json",
        "--trace-block-tokens is 0, expected 1",
    ),
    ("--trace good.jsonl --json no/out.json", "cannot write no/out.json"),
    ("--trace empty.jsonl --json out.json", "trace empty.jsonl is empty"),
];

const PAGE: [Misuse; 10] = [
    ("--out out.html", "<RUN.json>..."),
    ("good.json", "--out <FILE>"),
    ("absent.json --out out.html", "cannot read absent.json"),
    ("text.txt --out out.html", "write one with `kv-replay run --series --json FILE`"),
    ("good.jsonl --out out.html", "good.jsonl is not the report of a run"),
    (
        "good.json --out good.json",
        "cannot write good.json: it is the same file as good.json; name another",
    ),
    ("good.json --out no/out.html", "cannot write no/out.html"),
    (
        "good.json --out out.html --json out.html",
        "cannot write out.html: it is the same file as out.html",
    ),
    ("good.json --out out.html --trace-events folder", "cannot write folder: it is a folder"),
    (
        "good.json good.json good.json good.json good.json good.json good.json good.json good.json --out out.html",
        "9 runs; a page has room for 1 to 8",
    ),
];

const PLAN: [Misuse; 13] = [
    ("--json out.json", "no rates: give --model and --gpu h100 or h200"),
    ("--model gpt-9 --json out.json", "no model \"gpt-9\": neither a file nor one of llama"),
    ("--model text.txt --json out.json", "text.txt is not a model's config.json"),
    ("--model llama-3.1-70b --json out.json", "give --tensor-parallel, or --device-blocks"),
    ("--model llama-3.1-8b --gpus 0 --json out.json", "0 GPUs, expected 1 to 10000"),
    (
        "--model llama-3.1-8b --device-blocks 3 --out out.html",
        "and a GPU has 3; give it more (--device-blocks)",
    ),
    (
        "--model llama-3.1-8b --block-tokens 48 --json out.json",
        "--block-tokens is 48, expected a divisor or a multiple of 512",
    ),
    ("--model llama-3.1-8b --rate -2 --json out.json", "expected a number above 0"),
    ("--model llama-3.1-8b --hours 24 --json out.json", "--rate <R>"),
    (
        "--model llama-3.1-8b --against good.json --json out.json",
        "give --device-blocks and --host-blocks of the run",
    ),
    ("--model llama-3.1-8b --disk-rate 0 --json out.json", "--disk-rate"),
    (
        "--model llama-3.1-8b --disk 1GiB --json out.json",
        "none in host memory; give it some (--host-blocks, --host-memory)",
    ),
    (
        "--prefill-rate 9 --decode-step-us 9 --device-blocks 32768 --host-blocks 8192 --disk 1GiB --against good.json --json out.json",
        "was run with 0 blocks in files",
    ),
];

const DOCTOR: [Misuse; 10] = [
    ("--device gpu --json out.json", "'gpu' for '--device <DEVICES>'"),
    ("--device sim:x --json out.json", "'sim:x' for '--device <DEVICES>'"),
    (
        "--device sim --disk-test 4GB --json out.json",
        "expected a number, with KiB, MiB, GiB or TiB",
    ),
    ("--device sim --disk-test -1 --json out.json", "\"-1\" is no number of bytes"),
    ("--device sim --json no/out.json", "cannot write no/out.json"),
    ("--device sim --json folder", "cannot write folder: it is a folder"),
    ("--device sim --json", "a value is required for '--json <FILE>'"),
    ("--device", "a value is required for '--device <DEVICES>'"),
    ("sim --json out.json", "unexpected argument 'sim'"),
    ("--disk /mnt --json out.json", "unexpected argument '--disk'"),
];

const CONVERT: [Misuse; 10] = [
    ("--output out.jsonl", "<FILE>..."),
    ("absent.jsonl --output out.jsonl", "cannot open trace absent.jsonl"),
    ("folder --output out.jsonl", "folder: it is a folder"),
    ("empty.jsonl --output out.jsonl", "trace empty.jsonl is empty"),
    ("text.txt --output out.jsonl", "text.txt:1: "),
    (
        "bad.jsonl --output out.jsonl",
        "bad.jsonl:2: output_length is -3, expected a positive integer",
    ),
    ("good.jsonl --output no/out.jsonl", "cannot write no/out.jsonl"),
    (
        "good.jsonl --trace-block-tokens 0 --output out.jsonl",
        "--trace-block-tokens is 0, expected 1",
    ),
    ("good.jsonl --sessions-within soon --output out.jsonl", "'soon' for '--sessions-within <S>'"),
    ("good.jsonl --json folder --output out.jsonl", "cannot write folder: it is a folder"),
];

const ALL: [(&str, &[Misuse]); 5] = [
    ("policies", &POLICIES),
    ("page", &PAGE),
    ("plan", &PLAN),
    ("doctor", &DOCTOR),
    ("convert", &CONVERT),
];

const GOOD: &str =
    r#"{"timestamp": 5, "input_length": 700, "output_length": 52, "hash_ids": [0, 1]}"#;

fn entries(folder: &Path) -> BTreeSet<std::ffi::OsString> {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect()
}

fn kv_tools(folder: &Path, args: &str) -> Output {
    let mut program = Command::new(env!("CARGO_BIN_EXE_kv-tools"));
    program.current_dir(folder).args(args.split_whitespace());
    // The program then finds no GPU, even on a machine with GPUs.
    program.env("CUDA_VISIBLE_DEVICES", "-1").output().unwrap()
}

/// The JSON report of a small run with the default options.
fn write_report(path: &Path) {
    let config = RunConfig { verify: Verify::None, ..RunConfig::default() };
    let trace = generate(&GenerateOptions { requests: 2, seed: config.seed }).unwrap();
    let devices = open(&"sim".parse().unwrap(), SimSizes::for_config(&config)).unwrap();
    let report = engine::run(&config, &trace, &devices, &mut ()).unwrap();
    fs::write(path, serde_json::to_vec(&report).unwrap()).unwrap();
}

#[test]
fn every_subcommand_says_what_is_wrong_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    fs::create_dir(at.join("folder")).unwrap();
    write_report(&at.join("good.json"));
    for (name, text) in [
        ("text.txt", "hello"),
        ("good.jsonl", GOOD),
        ("bad.jsonl", &format!("{GOOD}\n{}", GOOD.replace("52", "-3"))),
        ("empty.jsonl", ""),
    ] {
        fs::write(at.join(name), text).unwrap();
    }
    let before = entries(at);
    let mut failures = Vec::new();
    for (command, misuses) in ALL {
        for (args, expected) in misuses {
            let output = kv_tools(at, &format!("{command} {args}"));
            let message = String::from_utf8_lossy(&output.stderr);
            let fine = output.status.code() == Some(2)
                && message.starts_with("error: ")
                && message.contains(expected)
                && !message.contains("panicked")
                && output.stdout.is_empty()
                && entries(at) == before;
            if !fine {
                let status = output.status;
                let left: Vec<_> = entries(at).difference(&before).cloned().collect();
                failures.push(format!(
                    "{command} {args}: {status}, expected {expected:?}, left {left:?}: {message}"
                ));
                left.iter().for_each(|name| fs::remove_file(at.join(name)).unwrap());
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn every_subcommand_is_misused_here_and_shows_examples() {
    let folder = tempfile::tempdir().unwrap();
    let help = kv_tools(folder.path(), "--help");
    let help = String::from_utf8(help.stdout).unwrap();
    let commands = help.split("Commands:\n").nth(1).unwrap().split("\n\n").next().unwrap();
    let commands = commands.lines().filter_map(|line| line.split_whitespace().next());
    let listed: BTreeSet<_> = commands.filter(|name| *name != "help").collect();
    assert_eq!(listed, ALL.iter().map(|(name, _)| *name).collect());
    for command in listed {
        let help = kv_tools(folder.path(), &format!("{command} --help"));
        let text = String::from_utf8(help.stdout).unwrap();
        let examples = text.split("Examples:\n").nth(1).unwrap_or_default();
        assert!(examples.contains(&format!("  kv-tools {command}")), "{command}: {text}");
    }
}

/// Commands that write `OUT`, and the file that each reads.
const COMMANDS: &[(&str, &str)] = &[
    ("policies --trace in.jsonl --json OUT", "in.jsonl"),
    ("page in.json --out OUT", "in.json"),
    ("page in.json --out new --trace-events OUT", "in.json"),
    ("page in.json --out new --json OUT", "in.json"),
    ("plan --model llama-3.1-8b --trace in.jsonl --out OUT", "in.jsonl"),
    ("plan --model llama-3.1-8b --trace in.jsonl --json OUT", "in.jsonl"),
    (
        "plan --prefill-rate 9 --decode-step-us 9 --trace in.jsonl --against in.json --json OUT",
        "in.json",
    ),
    (
        "plan --prefill-rate 9 --decode-step-us 9 --trace in.jsonl --gpu in.profile --json OUT",
        "in.profile",
    ),
    ("convert in.jsonl --output OUT", "in.jsonl"),
    ("convert in.jsonl --output new --json OUT", "in.jsonl"),
    ("convert in.jsonl --output new --json OUT", "new"),
    ("plan --model llama-3.1-8b --trace in.jsonl --out new --json OUT", "new"),
];

#[test]
fn no_result_takes_the_place_of_an_input_whatever_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("deep")).unwrap();
    let report = "{\"requests\": 1, \"finished\": 1, \"iterations\": 1, \"device\": \"sim\", \"block_lookups\": 2, \"block_hits\": 0}";
    let profile = cuda_sim::Profile::built_in("h100").unwrap();
    let files = [
        ("in.jsonl", format!("{GOOD}\n")),
        ("in.json", report.to_owned()),
        ("in.profile", profile.to_string()),
    ];
    for (name, text) in &files {
        fs::write(at(name), text).unwrap();
        symlink(at(name), at(&format!("deep/link-{name}"))).unwrap();
        fs::hard_link(at(name), at(&format!("hard-{name}"))).unwrap();
    }
    for &(command, file) in COMMANDS {
        let whole = at(file).display().to_string();
        let spellings = match file {
            "new" => vec!["new".to_owned(), "./deep/../new".to_owned(), whole],
            _ => vec![
                file.to_owned(),
                format!("./deep/.././{file}"),
                whole,
                format!("deep/link-{file}"),
                format!("hard-{file}"),
            ],
        };
        for spelling in spellings {
            let output = kv_tools(folder.path(), &command.replace("OUT", &spelling));
            let error = String::from_utf8(output.stderr.clone()).unwrap();
            assert!(error.contains("it is the same file as "), "{command} {spelling}: {error}");
            assert_eq!(output.status.code(), Some(2), "{command} {spelling}: {error}");
            assert!(!at("new").exists(), "{command} {spelling}");
            for (name, text) in &files {
                assert_eq!(fs::read_to_string(at(name)).unwrap(), *text, "{command} {spelling}");
            }
        }
    }
}

#[test]
fn names_and_values_give_a_terminal_no_commands() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("a\u{1b}[2Jb.jsonl"), GOOD.replace("52", "\"\\u009b2J\u{7f}\""))
        .unwrap();
    let name = fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().file_name();
    let output = Command::new(env!("CARGO_BIN_EXE_kv-tools"))
        .args(["policies", "--trace"])
        .arg(folder.path().join(&name))
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(name.as_bytes().contains(&0x1b));
    let error = String::from_utf8(output.stderr.clone()).unwrap();
    assert!(error.contains("a\\u{1b}[2Jb.jsonl:1: output_length is "), "{error}");
    assert!(!error.contains(|c: char| c.is_control() && c != '\n'), "{error:?}");
}

#[test]
fn policies_prints_a_table_and_writes_the_record() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("trace.jsonl"), [GOOD, GOOD].join("\n")).unwrap();
    let run = |args: &str| kv_tools(folder.path(), &format!("policies --trace trace.jsonl {args}"));
    let output = run("--capacities 1,2 --json report.json");
    assert_eq!(output.status.code(), Some(0));
    assert!(String::from_utf8(output.stdout).unwrap().contains("4 block lookups"));
    let json = fs::read(folder.path().join("report.json")).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
    assert_eq!(json["block_lookups"], 4);
    assert_eq!(json["capacities"][1]["hit_rate"]["belady"], 0.5);
    let output = run("--capacities 2 --half second");
    assert_eq!(output.status.code(), Some(0));
    assert!(String::from_utf8(output.stdout).unwrap().contains("2 block lookups"));
}

#[test]
fn a_standard_output_that_takes_nothing_costs_no_result() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("trace.jsonl"), GOOD).unwrap();
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut program = Command::new(env!("CARGO_BIN_EXE_kv-tools"));
    program.current_dir(folder.path()).stdout(full);
    program.args(["policies", "--trace", "trace.jsonl", "--json", "report.json"]);
    let output = program.output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{message}");
    let expected = "error: cannot write to standard output\n  caused by: No space left";
    assert!(message.contains(expected), "{message}");
    assert!(!fs::read(folder.path().join("report.json")).unwrap().is_empty());
}
