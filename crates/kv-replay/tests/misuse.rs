//! Every subcommand misused in ten ways: the exit status that is documented, a message that names what is wrong and what to do, no
//! panic, and no file left behind.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Arguments, divided by spaces, and a piece of the message. `{}` are files of the folder in which it runs.
type Misuse = (&'static str, &'static str);

const RUN: [Misuse; 10] = [
    ("--trace absent.jsonl --json out.json", "cannot open trace absent.jsonl"),
    ("--trace text.txt --json out.json", "text.txt:1: "),
    ("--live --json out.json", "--live needs a terminal as standard output; use --series"),
    ("--device gpu --json out.json", "'gpu' for '--device <DEVICES>'"),
    ("--device sim:0 --json out.json", "'sim:0' for '--device <DEVICES>'"),
    ("--json no/out.json", "cannot write no/out.json"),
    ("--json folder", "cannot write folder: it is a folder"),
    ("--profile h900 --json out.json", "neither h100 nor h200, nor a file"),
    ("--disk files --json out.json", "--disk-bytes <SIZE>"),
    ("--nodes 2 --workers 2 --json out.json", "cannot be used with"),
];

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

const GENERATE: [Misuse; 10] = [
    ("--requests 0 --output out.jsonl", "0 requests"),
    ("--requests -1 --output out.jsonl", "expected a whole number from 0"),
    ("--requests 4000001 --output out.jsonl", "4000001 requests asked for, more than the largest"),
    ("--requests ten --output out.jsonl", "'ten' for '--requests <N>'"),
    ("--seed 1.5 --output out.jsonl", "'1.5' for '--seed <S>'"),
    ("--seed 18446744073709551616 --output out.jsonl", "from 0 to 18446744073709551615"),
    ("--output no/out.jsonl", "cannot write no/out.jsonl"),
    ("--output folder", "cannot write folder: it is a folder"),
    ("--requests 3 --output out.jsonl --json no/out.json", "cannot write no/out.json"),
    ("--trace good.jsonl --output out.jsonl", "unexpected argument '--trace'"),
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

const REPORT: [Misuse; 10] = [
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

const COMPLETIONS: [Misuse; 10] = [
    ("", "<SHELL>"),
    ("cmd", "[possible values: bash, elvish, fish, powershell, zsh]"),
    ("Bash", "invalid value 'Bash'"),
    ("bash zsh", "unexpected argument 'zsh'"),
    ("--shell bash", "unexpected argument '--shell'"),
    ("bash --json out.json", "unexpected argument '--json'"),
    ("bash --output out", "unexpected argument '--output'"),
    ("--config absent.toml bash", "cannot read the configuration absent.toml"),
    ("--config text.txt bash", "text.txt is not TOML"),
    ("--config folder bash", "cannot read the configuration folder"),
];

const MAN: [Misuse; 10] = [
    ("nothing", "no subcommand \"nothing\"; kv-replay --help lists them"),
    ("worker", "no subcommand \"worker\""),
    ("run report", "unexpected argument 'report'"),
    ("--json out.json", "unexpected argument '--json'"),
    ("--output out.1", "unexpected argument '--output'"),
    ("RUN", "no subcommand \"RUN\""),
    ("--section 1", "unexpected argument '--section'"),
    ("--config section.toml", "runs is no subcommand; write options below one, such as [run]"),
    (
        "--config option.toml",
        "run has no option device_blocks; options are named as on the command line",
    ),
    ("--config", "a value is required for '--config <FILE>'"),
];

const ALL: [(&str, &[Misuse]); 9] = [
    ("run", &RUN),
    ("policies", &POLICIES),
    ("generate", &GENERATE),
    ("convert", &CONVERT),
    ("report", &REPORT),
    ("plan", &PLAN),
    ("doctor", &DOCTOR),
    ("completions", &COMPLETIONS),
    ("man", &MAN),
];

const GOOD: &str =
    r#"{"timestamp": 5, "input_length": 700, "output_length": 52, "hash_ids": [0, 1]}"#;

fn entries(folder: &Path) -> BTreeSet<std::ffi::OsString> {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect()
}

fn kv_replay(folder: &Path, command: &str, args: &str) -> std::process::Output {
    let mut program = Command::new(env!("CARGO_BIN_EXE_kv-replay"));
    program.current_dir(folder).arg(command).args(args.split_whitespace());
    // The program then finds no GPU, even on a machine with GPUs.
    program.env("CUDA_VISIBLE_DEVICES", "-1").output().unwrap()
}

#[test]
fn every_subcommand_says_what_is_wrong_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    fs::create_dir(at.join("folder")).unwrap();
    let report = kv_replay(at, "run", "--requests 2 --verify none --json good.json");
    assert!(report.status.success(), "{}", String::from_utf8_lossy(&report.stderr));
    for (name, text) in [
        ("text.txt", "hello"),
        ("good.jsonl", GOOD),
        ("bad.jsonl", &format!("{GOOD}\n{}", GOOD.replace("52", "-3"))),
        ("empty.jsonl", ""),
        ("section.toml", "[runs]\nseed = 1\n"),
        ("option.toml", "[run]\ndevice_blocks = 1\n"),
    ] {
        fs::write(at.join(name), text).unwrap();
    }
    let before = entries(at);
    let mut failures = Vec::new();
    for (command, misuses) in ALL {
        for (args, expected) in misuses {
            let output = kv_replay(at, command, args);
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
    let help = kv_replay(folder.path(), "--help", "");
    let help = String::from_utf8(help.stdout).unwrap();
    let commands = help.split("Commands:\n").nth(1).unwrap().split("\n\n").next().unwrap();
    let commands = commands.lines().filter_map(|line| line.split_whitespace().next());
    let listed: BTreeSet<_> = commands.filter(|name| *name != "help").collect();
    assert_eq!(listed, ALL.iter().map(|(name, _)| *name).collect());
    for command in listed {
        let help = kv_replay(folder.path(), command, "--help");
        let text = String::from_utf8(help.stdout).unwrap();
        let examples = text.split("Examples:\n").nth(1).unwrap_or_default();
        assert!(examples.contains(&format!("  kv-replay {command}")), "{command}: {text}");
    }
}
