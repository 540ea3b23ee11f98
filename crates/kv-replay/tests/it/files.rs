//! What a command reads is never what it writes, and files keep what they have until something whole takes their place.

use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::symlink;

use crate::common::{GOOD, error_of, kv_replay, program};

/// Commands that write `OUT`, and the file that each reads.
const COMMANDS: &[(&str, &str)] = &[
    ("run --trace in.jsonl --json OUT", "in.jsonl"),
    ("run --trace in.jsonl --nodes 2 --json OUT", "in.jsonl"),
    ("run --trace in.jsonl --workers 2 --json OUT", "in.jsonl"),
    ("run --trace in.jsonl --profile in.profile --json OUT", "in.profile"),
    ("generate --requests 3 --output new --json OUT", "new"),
];

#[test]
fn no_result_takes_the_place_of_an_input_whatever_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("deep")).unwrap();
    let profile = cuda_sim::Profile::built_in("h100").unwrap();
    let files = [("in.jsonl", GOOD.to_owned()), ("in.profile", profile.to_string())];
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
            let output = kv_replay(folder.path(), &command.replace("OUT", &spelling));
            let error = error_of(&output);
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
fn results_have_any_name_that_the_system_takes() {
    let folder = tempfile::tempdir().unwrap();
    let name = "n".repeat(255);
    let output = kv_replay(folder.path(), &format!("generate --requests 3 --output {name}"));
    assert_eq!(output.status.code(), Some(0), "{}", error_of(&output));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn names_and_values_give_a_terminal_no_commands() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("a\u{1b}[2Jb.jsonl"), GOOD.replace("52", "\"\\u009b2J\u{7f}\""))
        .unwrap();
    let name = fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().file_name();
    let output =
        program().args(["run", "--trace"]).arg(folder.path().join(&name)).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(name.as_bytes().contains(&0x1b));
    let error = error_of(&output);
    assert!(error.contains("a\\u{1b}[2Jb.jsonl:1: output_length is "), "{error}");
    assert!(!error.contains(|c: char| c.is_control() && c != '\n'), "{error:?}");
}

#[test]
fn files_of_another_shape_and_folders_that_are_not_mounted_are_left_as_they_are() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("in.jsonl"), GOOD).unwrap();
    let run = |disk: &str, more: &str| {
        let command = format!(
            "run --trace in.jsonl --verify none --device-blocks 64 --host-blocks 64 --disk-bytes 16MiB --disk {disk} {more}"
        );
        let output = kv_replay(folder.path(), &command);
        (output.status.code(), error_of(&output))
    };
    let (status, error) = run("mnt/files", "");
    assert_eq!(status, Some(2), "{error}");
    assert!(
        error.contains("--disk mnt/files: there is no folder mnt; make it, or mount"),
        "{error}"
    );
    assert!(!folder.path().join("mnt").exists());
    assert_eq!(run("files", "").0, Some(0));
    let files = || -> Vec<_> {
        let mut files: Vec<_> = fs::read_dir(folder.path().join("files"))
            .unwrap()
            .map(|file| file.unwrap().path())
            .collect();
        files.sort();
        files.iter().map(|path| (path.clone(), fs::metadata(path).unwrap().len())).collect()
    };
    let before = files();
    let (status, error) = run("files", "--block-tokens 32 --layers 3");
    assert_eq!((status, files()), (Some(2), before), "{error}");
    assert!(
        error.contains("--disk-fresh gives up what files of another shape or size have"),
        "{error}"
    );
    let (status, error) = run("files", "--block-tokens 32 --layers 3 --disk-fresh");
    assert_eq!(status, Some(0), "{error}");
    assert_eq!(run("files", "--block-tokens 32 --layers 3").0, Some(0));
}

#[test]
fn nodes_read_a_trace_of_any_name_and_none_that_is_read_once() {
    let folder = tempfile::tempdir().unwrap();
    let name = std::ffi::OsStr::from_bytes(b"in-\xff.jsonl");
    fs::write(folder.path().join(name), GOOD).unwrap();
    let run = |trace: &std::ffi::OsStr| {
        let mut program = program();
        program.current_dir(folder.path()).args(["run", "--nodes", "2", "--verify", "none"]);
        program.args(["--node-timeout", "60", "--trace"]).arg(trace).output().unwrap()
    };
    let output = run(name);
    assert_eq!(output.status.code(), Some(0), "{}", error_of(&output));
    let output = run("/dev/stdin".as_ref());
    assert_eq!(output.status.code(), Some(2), "{}", error_of(&output));
    assert!(
        error_of(&output).contains("/dev/stdin is no file, and each of the nodes"),
        "{output:?}"
    );
}

#[test]
fn what_a_machine_lacks_has_one_status() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("in.jsonl"), GOOD).unwrap();
    for lacking in ["--device cuda:0", "--device cuda:0 --workers 2", "--device cuda:0 --nodes 2"] {
        let output = kv_replay(folder.path(), &format!("run --trace in.jsonl {lacking}"));
        let error = error_of(&output);
        assert_eq!(output.status.code(), Some(2), "{lacking}: {error}");
        let known = ["no CUDA driver library", "could not be initialised", "reports no device"];
        assert!(known.iter().any(|reason| error.contains(reason)), "{lacking}: {error}");
    }
}

#[test]
fn an_arrival_that_no_clock_reaches_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let late = GOOD.replace(": 5,", ": 9007199254740991,");
    fs::write(folder.path().join("in.jsonl"), format!("{GOOD}\n{late}")).unwrap();
    let open =
        "run --trace in.jsonl --open-loop --prefill-rate 1000 --decode-step-us 10 --verify none";
    let output = kv_replay(folder.path(), open);
    let error = error_of(&output);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("the last request arrives after 9007199254740986 ms"), "{error}");
    // Without arrivals, or close to each other, the same requests run.
    for more in ["--rate 1", "--rate 1000"] {
        assert_eq!(
            kv_replay(folder.path(), &format!("{open} {more}")).status.code(),
            Some(0),
            "{more}"
        );
    }
    let closed = kv_replay(folder.path(), "run --trace in.jsonl --verify none");
    assert_eq!(closed.status.code(), Some(0), "{}", error_of(&closed));
}
