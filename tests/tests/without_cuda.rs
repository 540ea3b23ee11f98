//! Without the feature `cuda` none of our crates has cudarc in its dependency tree. With only that
//! feature, the application chooses cudarc's version, bindings and linking.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

use std::process::Command;

const CRATES: [&str; 7] =
    ["cuda-driver", "cuda-vmm", "kv-stage", "kv-kernels", "kv-multigpu", "kv-plane", "kv-replay"];

/// The dependencies of `name`, each with its features.
fn tree(name: &str, options: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO"));
    command.args(["tree", "--offline", "-p", name, "--edges", "no-dev"]);
    command.args(["--prefix", "none", "--format", "{p} {f}"]);
    let output = command.args(options).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The features of cudarc that `name` requests.
fn cudarc(name: &str, options: &[&str]) -> String {
    let tree = tree(name, options);
    let line = tree.lines().find(|line| line.starts_with("cudarc ")).expect(name);
    line.split_whitespace().nth(2).unwrap_or_default().to_owned()
}

#[test]
fn no_crate_needs_cudarc_unless_asked() {
    for name in CRATES {
        let tree = tree(name, &["--no-default-features"]);
        assert!(tree.contains(name), "{tree}");
        assert!(!tree.contains("cudarc"), "{name} without features:\n{tree}");
    }
}

#[test]
fn one_line_works_alone_and_the_choice_is_left_to_others() {
    for name in CRATES {
        assert_eq!(cudarc(name, &[]), "cuda-12080,driver,dynamic-loading,std");
        assert_eq!(cudarc(name, &["--no-default-features", "--features", "cuda"]), "driver,std");
    }
}
