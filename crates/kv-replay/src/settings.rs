//! Options from a file and from the environment: what the command line does not say, the environment says, then the file,
//! then the default.
//!
//! They are put into the command line before it is read for good, so that they are checked as options are.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, CommandFactory as _};
use kv_replay::json_file::{WriteError, check_files};

use crate::cli::Cli;

/// Names of environment variables begin with this; the rest is that of the option, such as `KV_REPLAY_DEVICE_BLOCKS`.
const PREFIX: &str = "KV_REPLAY_";

/// Options that name a file which is written.
const WRITES: [&str; 4] = ["json", "out", "output", "trace_events"];

/// Subcommands that other processes of a run are: their command line is complete.
const INNER: [&str; 1] = ["worker"];

/// The reason why a file or the environment cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SettingsError {
    #[error("cannot read the configuration {}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{} is not TOML", path.display())]
    NoToml { path: PathBuf, source: toml::de::Error },
    #[error(
        "{}: {command} has no option {option}; options are named as on the command line, below [{command}]",
        path.display()
    )]
    UnknownOption { path: PathBuf, command: String, option: String },
    #[error("{}: {name} is no subcommand; write options below one, such as [run]", path.display())]
    UnknownCommand { path: PathBuf, name: String },
    #[error("{from}: {option} is {found}, expected {expected}")]
    Value { from: String, option: String, found: String, expected: &'static str },
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// The command line with what the environment and the file say.
pub(crate) fn complete(
    args: Vec<OsString>,
    variable: impl Fn(&str) -> Option<OsString>,
) -> Result<Vec<OsString>, SettingsError> {
    let program = Cli::command();
    let given = program.clone().ignore_errors(true).try_get_matches_from(&args);
    let Ok(given) = given else { return Ok(args) };
    let file = given.get_one::<PathBuf>("config").cloned();
    let Some((name, matches)) = given.subcommand() else { return Ok(args) };
    let Some(command) = program.find_subcommand(name).filter(|_| !INNER.contains(&name)) else {
        return Ok(args);
    };
    // A process that a run with --nodes has started has what that run was told.
    if command.get_arguments().any(|arg| arg.get_id() == "node") && is_given(matches, "node") {
        return Ok(args);
    }
    let file = matches.try_get_one::<PathBuf>("config").ok().flatten().cloned().or(file);
    let file = file.or_else(|| variable("KV_REPLAY_CONFIG").map(PathBuf::from));
    let table = match file {
        Some(path) => Some((read(&program, &path)?, path)),
        None => None,
    };
    let mut more = Vec::new();
    let mut set: Vec<&str> = Vec::new();
    let options = || command.get_arguments().filter(|arg| is_option(arg));
    for arg in options() {
        let Some(value) =
            variable(&variable_of(arg)).filter(|_| is_free(command, matches, arg, &set))
        else {
            continue;
        };
        set.push(arg.get_id().as_str());
        push(&mut more, arg, text_of(arg, &value)?);
    }
    if let Some((table, path)) = &table {
        let from_environment = set.clone();
        for (option, value) in table.get(name).and_then(toml::Value::as_table).into_iter().flatten()
        {
            let known = options().find(|arg| arg.get_long() == Some(option.as_str()));
            let Some(arg) = known else { continue };
            if is_free(command, matches, arg, &from_environment) {
                push(&mut more, arg, texts_of(path, option, arg, value)?);
            }
        }
    }
    // Behind everything else, but before what is no option any more.
    let end = args.iter().position(|arg| arg == "--").unwrap_or(args.len());
    let (before, behind) = args.split_at(end);
    let all = before.iter().cloned().chain(more).chain(behind.iter().cloned()).collect();
    if let Some((_, path)) = &table {
        check_results(&program, &all, path)?;
    }
    Ok(all)
}

/// Checks that no result takes the place of the file.
fn check_results(program: &Command, all: &Vec<OsString>, path: &Path) -> Result<(), WriteError> {
    let said = program.clone().ignore_errors(true).try_get_matches_from(all);
    let Some((_, matches)) = said.as_ref().ok().and_then(ArgMatches::subcommand) else {
        return Ok(());
    };
    let is_there = |id: &&str| matches.ids().any(|of| of.as_str() == *id);
    let writes = WRITES.into_iter().filter(is_there);
    let writes = writes.filter_map(|id| matches.get_raw(id)).flatten().map(Path::new);
    check_files([path], writes)
}

fn is_option(arg: &Arg) -> bool {
    arg.get_long().is_some()
        && !matches!(arg.get_id().as_str(), "config" | "help" | "version")
        && !arg.is_hide_set()
}

fn is_given(matches: &ArgMatches, id: &str) -> bool {
    matches.value_source(id) == Some(ValueSource::CommandLine)
}

/// Whether the command line says neither this option nor one that cannot be beside it, and the environment none of them.
fn is_free(command: &Command, matches: &ArgMatches, arg: &Arg, set: &[&str]) -> bool {
    let said = |id: &str| is_given(matches, id) || set.contains(&id);
    let excludes = |one: &Arg, other: &Arg| {
        command.get_arg_conflicts_with(one).iter().any(|arg| arg.get_id() == other.get_id())
    };
    !said(arg.get_id().as_str())
        && !command.get_arguments().any(|other| {
            said(other.get_id().as_str()) && (excludes(arg, other) || excludes(other, arg))
        })
}

fn variable_of(arg: &Arg) -> String {
    let name = arg.get_long().unwrap_or_default().replace('-', "_").to_uppercase();
    format!("{PREFIX}{name}")
}

fn is_flag(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::SetTrue)
}

/// What a variable says: a value, or whether a flag is set.
fn text_of(arg: &Arg, value: &OsStr) -> Result<Vec<OsString>, SettingsError> {
    if !is_flag(arg) {
        return Ok(vec![value.to_owned()]);
    }
    match value.to_str() {
        Some("1" | "true") => Ok(vec![OsString::new()]),
        Some("0" | "false" | "") => Ok(Vec::new()),
        _ => Err(SettingsError::Value {
            from: "the environment".to_owned(),
            option: variable_of(arg),
            found: value.to_string_lossy().into_owned(),
            expected: "1 or 0",
        }),
    }
}

/// What a file says: a value, several, or whether a flag is set.
fn texts_of(
    path: &Path,
    option: &str,
    arg: &Arg,
    value: &toml::Value,
) -> Result<Vec<OsString>, SettingsError> {
    let wrong = |expected| SettingsError::Value {
        from: path.display().to_string(),
        option: option.to_owned(),
        found: shown(value),
        expected,
    };
    let text = |value: &toml::Value| match value {
        toml::Value::String(text) => Some(OsString::from(text)),
        toml::Value::Integer(number) => Some(number.to_string().into()),
        toml::Value::Float(number) => Some(number.to_string().into()),
        _ => None,
    };
    match value {
        toml::Value::Boolean(set) if is_flag(arg) => Ok(vec![OsString::new(); usize::from(*set)]),
        _ if is_flag(arg) => Err(wrong("true or false")),
        toml::Value::Array(values) => {
            let texts: Option<Vec<_>> = values.iter().map(text).collect();
            texts.ok_or_else(|| wrong("a list of texts and numbers"))
        }
        _ => Ok(vec![text(value).ok_or_else(|| wrong("a text or a number"))?]),
    }
}

fn shown(value: &toml::Value) -> String {
    match value {
        toml::Value::String(text) => text.clone(),
        toml::Value::Integer(number) => number.to_string(),
        toml::Value::Float(number) => number.to_string(),
        toml::Value::Boolean(set) => set.to_string(),
        other => format!("of type {}", other.type_str()),
    }
}

fn push(more: &mut Vec<OsString>, arg: &Arg, values: Vec<OsString>) {
    let name = arg.get_long().unwrap_or_default();
    if is_flag(arg) {
        more.extend(values.iter().map(|_| OsString::from(format!("--{name}"))));
        return;
    }
    let one = |value: OsString| {
        let mut text = OsString::from(format!("--{name}="));
        text.push(value);
        text
    };
    match arg.get_value_delimiter() {
        Some(_) => more.push(one(values.join(OsStr::new(",")))),
        None => more.extend(values.into_iter().map(one)),
    }
}

/// The file, of which every section is a subcommand and every key one of its options.
fn read(program: &Command, path: &Path) -> Result<toml::Table, SettingsError> {
    let at = || path.to_owned();
    let text = std::fs::read_to_string(path)
        .map_err(|source| SettingsError::Read { path: at(), source })?;
    let table: toml::Table =
        toml::from_str(&text).map_err(|source| SettingsError::NoToml { path: at(), source })?;
    for (name, section) in &table {
        let command = program.find_subcommand(name).filter(|_| !INNER.contains(&name.as_str()));
        let (Some(command), Some(section)) = (command, section.as_table()) else {
            return Err(SettingsError::UnknownCommand { path: at(), name: name.clone() });
        };
        for option in section.keys() {
            let known = |arg: &Arg| is_option(arg) && arg.get_long() == Some(option.as_str());
            if !command.get_arguments().any(known) {
                let (command, option) = (name.clone(), option.clone());
                return Err(SettingsError::UnknownOption { path: at(), command, option });
            }
        }
    }
    Ok(table)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    fn completed(
        args: &[&str],
        file: &str,
        variables: &[(&str, &str)],
    ) -> Result<Vec<String>, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.toml");
        std::fs::write(&path, file).unwrap();
        let args = ["kv-replay"].iter().chain(args).map(OsString::from).collect();
        let variable = |name: &str| match name {
            "KV_REPLAY_CONFIG" => Some(path.clone().into_os_string()),
            _ => variables.iter().find(|one| one.0 == name).map(|one| one.1.into()),
        };
        let all = complete(args, variable).map_err(|error| error.to_string())?;
        Ok(all[1..].iter().map(|arg| arg.to_str().unwrap().to_owned()).collect())
    }

    #[test]
    fn the_command_line_comes_before_the_environment_and_that_before_the_file() {
        let file = "[run]\ndevice-blocks = 7\nseries = true\nhints = false\n[plan]\ngpus = [1, 2]\nhost-memory = [\"1GiB\"]\n";
        let of =
            |args: &[&str], variables: &[(&str, &str)]| completed(args, file, variables).unwrap();
        assert_eq!(of(&["run"], &[]), ["run", "--device-blocks=7", "--series"]);
        let environment = [("KV_REPLAY_DEVICE_BLOCKS", "8"), ("KV_REPLAY_HINTS", "1")];
        assert_eq!(of(&["run"], &environment), ["run", "--device-blocks=8", "--hints", "--series"]);
        let given = of(&["run", "--device-blocks", "9"], &environment);
        assert_eq!(given, ["run", "--device-blocks", "9", "--hints", "--series"]);
        assert_eq!(of(&["plan"], &[]), ["plan", "--gpus=1,2", "--host-memory=1GiB"]);
        // What cannot be beside an option of the command line is left out.
        let other = of(&["plan", "--host-blocks", "3"], &[]);
        assert_eq!(other, ["plan", "--host-blocks", "3", "--gpus=1,2"]);
        let memory = of(&["run", "--device-memory=1"], &environment);
        assert_eq!(memory, ["run", "--device-memory=1", "--hints", "--series"]);
    }

    #[test]
    fn processes_of_a_run_and_the_demonstration_are_left_alone() {
        let file = "[run]\nseed = 7\n";
        for args in
            [&["worker"][..], &["run", "--node=1", "--node-count=2", "--node-folder=x"], &[]]
        {
            assert_eq!(completed(args, file, &[("KV_REPLAY_SEED", "8")]).unwrap(), args);
        }
    }

    #[test]
    fn what_is_wrong_in_a_file_is_named() {
        let says = |file: &str| completed(&["run"], file, &[]).unwrap_err();
        assert!(says("[run]\ndevice_blocks = 7").contains("run has no option device_blocks"));
        assert!(says("[runs]").contains("runs is no subcommand"));
        assert!(says("seed = 7").contains("seed is no subcommand"));
        assert!(says("[worker]").contains("worker is no subcommand"));
        assert!(says("[run").contains("is not TOML"));
        assert!(says("[run]\nseries = 1").contains("series is 1, expected true or false"));
        assert!(says("[run]\nseed = true").contains("seed is true, expected a text or a number"));
        let environment = completed(&["run"], "", &[("KV_REPLAY_SERIES", "perhaps")]).unwrap_err();
        assert!(
            environment.contains("KV_REPLAY_SERIES is perhaps, expected 1 or 0"),
            "{environment}"
        );
    }
}
