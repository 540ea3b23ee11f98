//! Cargo's messages about what it built.

use std::path::PathBuf;

use anyhow::{Context, Result};
use serde::Deserialize;

/// An executable that Cargo built.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Artifact {
    pub(super) package: String,
    pub(super) kinds: Vec<String>,
    pub(super) target: String,
    pub(super) executable: PathBuf,
}

impl Artifact {
    pub(super) fn is(&self, package: &str, kind: &str, target: &str) -> bool {
        self.package == package
            && self.target == target
            && self.kinds.iter().any(|other| other == kind)
    }
}

#[derive(Deserialize)]
struct Message {
    reason: String,
    package_id: Option<String>,
    target: Option<crate::cargo::Target>,
    executable: Option<PathBuf>,
}

/// The executables among the messages of `--message-format=json`.
pub(super) fn executables(messages: &str) -> Result<Vec<Artifact>> {
    let mut artifacts = Vec::new();
    for line in messages.lines().filter(|line| line.starts_with('{')) {
        let message: Message = serde_json::from_str(line).context("cannot read Cargo's message")?;
        if message.reason != "compiler-artifact" {
            continue;
        }
        let (Some(id), Some(target), Some(executable)) =
            (message.package_id, message.target, message.executable)
        else {
            continue;
        };
        artifacts.push(Artifact {
            package: package_name(&id).to_owned(),
            kinds: target.kind,
            target: target.name,
            executable,
        });
    }
    Ok(artifacts)
}

/// The name in `path+file:///…/crates/kv-pool#0.1.0` or `…#kv-pool@0.1.0`.
fn package_name(id: &str) -> &str {
    let (path, fragment) = id.rsplit_once('#').unwrap_or((id, ""));
    match fragment.split_once('@') {
        Some((name, _)) => name,
        None => path.rsplit('/').next().unwrap_or(path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_executables_are_kept() {
        let messages = concat!(
            r#"{"reason":"compiler-artifact","package_id":"path+file:///x/crates/kv-a#0.1.0","#,
            r#""target":{"kind":["test"],"name":"gpu"},"executable":"/t/gpu-1"}"#,
            "\n",
            r#"{"reason":"compiler-artifact","package_id":"registry+https://r#bytes@1.0.0","#,
            r#""target":{"kind":["lib"],"name":"bytes"},"executable":null}"#,
            "\n",
            r#"{"reason":"build-finished","success":true}"#,
            "\nrunning\n",
        );
        let artifacts = executables(messages).unwrap();
        assert_eq!(artifacts.len(), 1);
        assert!(artifacts[0].is("kv-a", "test", "gpu"));
        assert!(!artifacts[0].is("kv-a", "bench", "gpu"));
        assert_eq!(artifacts[0].executable, PathBuf::from("/t/gpu-1"));
    }

    #[test]
    fn both_forms_of_a_package_id_are_read() {
        assert_eq!(package_name("path+file:///x/crates/kv-a#0.1.0"), "kv-a");
        assert_eq!(package_name("path+file:///x/tests#kv-tests@0.1.0"), "kv-tests");
    }
}
