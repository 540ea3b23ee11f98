//! What a machine offers to a KV cache, and what to do where something is missing.
//!
//! [`examine`] looks at the driver and its devices, measures their links and a disk, and reads limits of the operating
//! system. It needs no GPU: without one, that is what it finds. It leaves nothing behind.

mod devices;
mod disk;
mod host;
mod libraries;

use std::fmt;
use std::fmt::Write as _;
use std::path::Path;

use serde::Serialize;

use kv_replay::device::DeviceSpec;

/// How a finding is to be taken.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Nothing is to be done.
    Fine,
    /// Something is slower than it could be, or missing where it may not be needed.
    Note,
    /// A run on these devices, or with files in this folder, cannot work.
    Problem,
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Fine => "fine",
            Self::Note => "note",
            Self::Problem => "PROBLEM",
        })
    }
}

/// One thing that was looked at.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct Finding {
    /// What it is about, such as `driver` or `disk`.
    pub area: &'static str,
    /// How it is to be taken.
    pub status: Status,
    /// What was found, with numbers and units.
    pub found: String,
    /// What to do about it; `None` if nothing is to be done.
    pub to_do: Option<String>,
}

impl Finding {
    fn fine(area: &'static str, found: impl Into<String>) -> Self {
        Self { area, status: Status::Fine, found: found.into(), to_do: None }
    }

    fn note(area: &'static str, found: impl Into<String>, to_do: impl Into<String>) -> Self {
        Self { area, status: Status::Note, found: found.into(), to_do: Some(to_do.into()) }
    }

    fn problem(area: &'static str, found: impl Into<String>, to_do: impl Into<String>) -> Self {
        Self { area, status: Status::Problem, found: found.into(), to_do: Some(to_do.into()) }
    }
}

/// What to look at.
#[derive(Clone, Copy, Debug)]
pub struct DoctorOptions<'a> {
    /// The devices that a run would use. Simulated ones need no GPU.
    pub device: &'a DeviceSpec,
    /// The folder that files below host memory would lie in.
    pub folder: &'a Path,
    /// Bytes that are written there, and read back, to measure its rate; 0 to measure none.
    pub disk_bytes: u64,
}

/// Everything that was found.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct DoctorReport {
    /// Number of problems.
    pub problems: usize,
    /// Number of notes.
    pub notes: usize,
    /// The findings, by area.
    pub findings: Vec<Finding>,
}

/// What is looked at, one after the other.
pub const AREAS: usize = 4;

/// Looks at this machine. `tell` hears how many of the [areas](AREAS) were looked at.
#[must_use]
pub fn examine(options: &DoctorOptions<'_>, mut tell: impl FnMut(usize)) -> DoctorReport {
    let root = Path::new("/");
    let areas: [&dyn Fn() -> Vec<Finding>; AREAS] = [
        &|| devices::findings(options.device, root),
        &|| host::findings(root),
        &|| disk::findings(options.folder, options.disk_bytes),
        &|| libraries::findings(root, &libraries::folders()),
    ];
    let mut findings = Vec::new();
    for (area, done) in areas.into_iter().zip(1..) {
        findings.extend(area());
        tell(done);
    }
    DoctorReport::new(findings)
}

impl DoctorReport {
    fn new(findings: Vec<Finding>) -> Self {
        let count = |status| findings.iter().filter(|finding| finding.status == status).count();
        Self { problems: count(Status::Problem), notes: count(Status::Note), findings }
    }

    /// The findings as text, each with what to do about it.
    #[must_use]
    pub fn text(&self) -> String {
        let plural = |count: usize, what: &str| match count {
            1 => format!("1 {what}"),
            _ => format!("{count} {what}s"),
        };
        let mut text =
            format!("{}, {}\n", plural(self.problems, "problem"), plural(self.notes, "note"));
        let mut area = "";
        for finding in &self.findings {
            // Writing to a string cannot fail.
            if finding.area != area {
                area = finding.area;
                let _ = writeln!(text, "\n{area}");
            }
            let _ = writeln!(text, "  {:<9}{}", finding.status, finding.found);
            if let Some(to_do) = &finding.to_do {
                let _ = writeln!(text, "           -> {to_do}");
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_groups_by_area_and_says_what_to_do() {
        let report = DoctorReport::new(vec![
            Finding::fine("driver", "CUDA 12.8"),
            Finding::problem("disk", "no space", "free some"),
            Finding::note("disk", "slow", "use another disk"),
        ]);
        assert_eq!((report.problems, report.notes), (1, 1));
        let expected = "1 problem, 1 note\n\ndriver\n  fine     CUDA 12.8\n\ndisk\n  PROBLEM  no space\n           -> free some\n  \
                        note     slow\n           -> use another disk\n";
        assert_eq!(report.text(), expected);
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["findings"][1]["status"], "problem");
    }
}
