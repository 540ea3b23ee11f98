//! Findings: what went wrong on the device, with the facts that lead to the cause.

use std::fmt;

use crate::Race;

/// Maximum number of findings kept. The first ones are usually the causes, so later ones are
/// dropped and counted.
const FINDINGS_MAX: usize = 256;

/// The kind of mistake.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum FindingKind {
    /// A kernel or copy accessed memory that it may not access. The device is lost.
    IllegalAccess,
    /// A copy was refused when it was enqueued: its range is not inside one live allocation or
    /// mapping.
    InvalidRange,
    /// Host memory was used after `cuMemFreeHost`.
    FreedHostMemory,
    /// A kernel accessed an address that is not a multiple of the access width. The device is lost.
    Misaligned,
    /// A kernel read bytes that were never written.
    Uninitialised,
    /// Two threads of a launch accessed the same bytes, at least one wrote, and no barrier ordered
    /// them; or a kernel writes what it loads by `ld.global.nc`; or a copy writes what it reads, or
    /// what another copy of its batch accesses.
    Conflict,
    /// Two operations, or an operation and the host, accessed the same bytes. At least one access
    /// was a write, and nothing ordered them: see [`Finding::race`].
    Race,
    /// A kernel's barrier or exchange can never complete, or is misused. The device is lost.
    Barrier,
    /// A kernel ran for so long that it probably never ends. The device is lost.
    Endless,
    /// A launch was refused: its geometry or arguments do not match the kernel.
    InvalidLaunch,
    /// A kernel failed for a reason other than an access. The device is lost.
    KernelFailed,
    /// The host waits for work that can never run.
    CannotComplete,
    /// A context ended while objects in it were alive.
    LostObjects,
    /// A leak check found live objects.
    Leak,
}

/// The kind of memory of a range.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum RangeKind {
    /// Memory of `cuMemAlloc`.
    Allocation,
    /// Addresses of `cuMemAddressReserve`.
    Reservation,
    /// Memory of `cuMemHostAlloc`.
    PinnedHost,
}

/// The memory range closest to a bad access.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct NearMiss {
    /// The kind of memory.
    pub kind: RangeKind,
    /// Whether the range was freed before the access.
    pub freed: bool,
    /// First address of the range.
    pub base: u64,
    /// Length of the range, in bytes.
    pub bytes: u64,
    /// How far the access lay outside the range, in bytes; 0 if it lay inside.
    pub missed_by: u64,
    /// Whether the access lay before the start of the range, not past its end.
    pub before: bool,
}

impl fmt::Display for NearMiss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            RangeKind::Allocation => "allocation",
            RangeKind::Reservation => "reservation",
            RangeKind::PinnedHost => "pinned host memory",
        };
        match (self.missed_by, self.before) {
            (0, _) => write!(f, "inside")?,
            (n, true) => write!(f, "{n} bytes before the start of")?,
            (n, false) => write!(f, "{n} bytes past the end of")?,
        }
        let freed = if self.freed { "freed " } else { "" };
        write!(f, " {freed}{kind} {:#x} of {} bytes", self.base, self.bytes)
    }
}

/// The thread and the instruction of a kernel's access.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct KernelSite {
    /// Line of the module's PTX, counted from 1.
    pub line: u32,
    /// Index of the thread in its block, in x, y and z.
    pub thread: [u32; 3],
    /// Index of the block in its grid, in x, y and z.
    pub block: [u32; 3],
}

impl fmt::Display for KernelSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ([x, y, z], [i, j, k]) = (self.thread, self.block);
        write!(f, "PTX line {}, thread ({x}, {y}, {z}) of block ({i}, {j}, {k})", self.line)
    }
}

/// One mistake that the device found.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Finding {
    /// The kind of mistake.
    pub kind: FindingKind,
    /// The kernel's entry name, or the driver call.
    pub operation: String,
    /// Device on which the operation ran or should have run.
    pub device: Option<u32>,
    /// Stream of the operation; 0 is the legacy default stream.
    pub stream: Option<u64>,
    /// First address of the access.
    pub address: Option<u64>,
    /// Length of the access, in bytes.
    pub bytes: u64,
    /// The range closest to the access.
    pub nearest: Option<NearMiss>,
    /// The instruction and the thread, if the kernel ran from its PTX.
    pub site: Option<KernelSite>,
    /// A description of what happened.
    pub detail: String,
    /// The race, if the finding is one.
    pub race: Option<Box<Race>>,
}

impl Finding {
    pub(crate) fn new(kind: FindingKind, operation: &str, detail: String) -> Self {
        Self {
            kind,
            operation: operation.to_owned(),
            device: None,
            stream: None,
            address: None,
            bytes: 0,
            nearest: None,
            site: None,
            detail,
            race: None,
        }
    }

    pub(crate) fn with_race(self, race: Race) -> Self {
        Self { race: Some(Box::new(race)), ..self }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.kind, self.operation)?;
        if let Some(device) = self.device {
            write!(f, " on device {device}")?;
        }
        if let Some(stream) = self.stream {
            write!(f, " in stream {stream:#x}")?;
        }
        if let Some(site) = self.site {
            write!(f, " at {site}")?;
        }
        if let Some(address) = self.address {
            write!(f, ", {} bytes at {address:#x}", self.bytes)?;
        }
        write!(f, ": {}", self.detail)
    }
}

/// The first findings, and the number of dropped ones.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    kept: Vec<Finding>,
    dropped: u64,
}

impl Findings {
    pub(crate) fn add(&mut self, finding: Finding) {
        tracing::debug!(%finding, "finding");
        if self.kept.len() < FINDINGS_MAX {
            self.kept.push(finding);
        } else {
            self.dropped += 1;
        }
    }

    pub(crate) fn kept(&self) -> &[Finding] {
        &self.kept
    }

    pub(crate) fn dropped(&self) -> u64 {
        self.dropped
    }
}
