//! Every subcommand misused in ten ways: the exit status that is documented, a message that names what is wrong and what to do, no
//! panic, and no file left behind.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use crate::common::{GOOD, kv_replay};

/// Arguments, divided by spaces, and a piece of the message. `{}` are files of the folder in which it runs.
type Misuse = (&'static str, &'static str);

const RUN: [Misuse; 11] = [
    ("--trace absent.jsonl --json out.json", "cannot open trace absent.jsonl"),
    ("--trace text.txt --json out.json", "text.txt:1: "),
    ("--drill kill-worker=0@1 --json out.json", "is for runs with --workers"),
    ("--device gpu --json out.json", "'gpu' for '--device <DEVICES>'"),
    ("--device sim:0 --json out.json", "'sim:0' for '--device <DEVICES>'"),
    ("--json no/out.json", "cannot write no/out.json"),
    ("--json folder", "cannot write folder: it is a folder"),
    ("--profile h900 --json out.json", "neither h100 nor h200, nor a file"),
    ("--disk files --json out.json", "--disk-bytes <SIZE>"),
    ("--nodes 2 --workers 2 --json out.json", "cannot be used with"),
    ("--workers 2 --kill-worker 1@30 --json out.json", "write '--drill kill-worker=…'"),
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

const ALL: [(&str, &[Misuse]); 2] = [("run", &RUN), ("generate", &GENERATE)];

fn entries(folder: &Path) -> BTreeSet<std::ffi::OsString> {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect()
}

#[test]
fn every_subcommand_says_what_is_wrong_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    fs::create_dir(at.join("folder")).unwrap();
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
            let output = kv_replay(at, &format!("{command} {args}"));
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
    let help = kv_replay(folder.path(), "--help");
    let help = String::from_utf8(help.stdout).unwrap();
    let commands = help.split("Commands:\n").nth(1).unwrap().split("\n\n").next().unwrap();
    let commands = commands.lines().filter_map(|line| line.split_whitespace().next());
    let listed: BTreeSet<_> = commands.filter(|name| *name != "help").collect();
    assert_eq!(listed, ALL.iter().map(|(name, _)| *name).collect());
    for command in listed {
        let help = kv_replay(folder.path(), &format!("{command} --help"));
        let text = String::from_utf8(help.stdout).unwrap();
        let examples = text.split("Examples:\n").nth(1).unwrap_or_default();
        assert!(examples.contains(&format!("  kv-replay {command}")), "{command}: {text}");
    }
}
