//! The report of a race, as text and as data, with enough detail to fix the program.

use std::fmt::{self, Write as _};
use std::sync::Arc;

use cuda_driver::site::Site;

use crate::NearMiss;

/// How one side of a race used the bytes.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum RaceUse {
    /// Read.
    Read,
    /// Written.
    Write,
    /// Read or written: the call does not say which.
    Use,
    /// Memory was mapped at the addresses, or a device was given access to it.
    Map,
    /// The memory was unmapped, freed, unregistered or unloaded.
    End,
}

impl RaceUse {
    fn verb(self) -> &'static str {
        match self {
            Self::Read => "reads",
            Self::Write => "writes",
            Self::Use => "uses",
            Self::Map => "maps",
            Self::End => "ends",
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Use => "use",
            Self::Map => "map",
            Self::End => "end",
        }
    }
}

/// The actor of one side of a race.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum RaceActor {
    /// The host, in a call or through one of its buffers.
    Host,
    /// An operation of a stream.
    Stream {
        /// Ordinal of the stream's device.
        device: u32,
        /// The stream's handle; 0 is the legacy default stream.
        stream: u64,
    },
}

impl RaceActor {
    /// The stream's handle, if the actor is a stream.
    #[must_use]
    pub fn stream(self) -> Option<u64> {
        match self {
            Self::Host => None,
            Self::Stream { stream, .. } => Some(stream),
        }
    }
}

impl fmt::Display for RaceActor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Stream { device, stream: 0 } => write!(f, "default stream of device {device}"),
            Self::Stream { device, stream } => write!(f, "stream {stream:#x} of device {device}"),
        }
    }
}

/// One side of a race.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct RaceAccess {
    /// The kernel's entry name, the driver call, or `host access`.
    pub operation: String,
    /// How it used the bytes.
    pub used: RaceUse,
    /// The actor.
    pub actor: RaceActor,
    /// Name of the host thread that enqueued the operation, or that made the access.
    pub thread: Arc<str>,
    /// The place in the program where it was enqueued or made, if known.
    pub site: Option<Site>,
    /// Its number among all calls of the machine that enqueue or access memory. The lower number
    /// came first.
    pub sequence: u64,
}

impl RaceAccess {
    /// The operation and its place, as text.
    fn named(&self) -> String {
        match self.site {
            Some(site) => format!("{} at {site}", self.operation),
            None => self.operation.clone(),
        }
    }
}

/// The order that would have prevented a race.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum MissingEdge {
    /// An event recorded on one stream, and waited for by another.
    StreamWait {
        /// Stream on which an event must be recorded, after the first operation.
        record_on: u64,
        /// Stream that must wait for it, before the second operation is enqueued.
        wait_on: u64,
        /// The part of this order that exists already, and why it does not suffice.
        nearest: Option<String>,
    },
    /// The host must wait for the operation, or must have seen an event after it complete.
    HostWait {
        /// Stream whose operation the host must know to be complete.
        stream: u64,
        /// The part of this order that exists already, and why it does not suffice.
        nearest: Option<String>,
    },
    /// The host call must come before the operation is enqueued.
    HostFirst {
        /// Stream of the operation.
        stream: u64,
    },
}

/// Two accesses to the same bytes that nothing orders, at least one of which changes the bytes.
///
/// The report does not depend on the order in which the simulated device ran them: `first` is the
/// access that the program called first.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Race {
    /// The side that the program called first.
    pub first: RaceAccess,
    /// The other side.
    pub second: RaceAccess,
    /// First address that both touched, as the later side addresses it.
    pub address: u64,
    /// Number of contiguous bytes from there that both touched.
    pub bytes: u64,
    /// The allocation, reservation or pinned memory of the bytes.
    pub memory: Option<NearMiss>,
    /// The order that is missing.
    pub missing: MissingEdge,
    /// The hazard of `docs/HAZARDS.md` to which the race belongs, as in `H13`.
    pub hazard: Option<&'static str>,
}

/// Escape sequences of a terminal, or empty strings.
struct Paint {
    bad: &'static str,
    strong: &'static str,
    mend: &'static str,
    end: &'static str,
}

const PLAIN: Paint = Paint { bad: "", strong: "", mend: "", end: "" };
const COLOURED: Paint =
    Paint { bad: "\x1b[1;31m", strong: "\x1b[1m", mend: "\x1b[32m", end: "\x1b[0m" };

impl Race {
    /// The missing order, as an instruction.
    #[must_use]
    pub fn mend(&self) -> String {
        let (first, second) = (self.first.named(), self.second.named());
        match &self.missing {
            MissingEdge::StreamWait { record_on, wait_on, .. } => format!(
                "an event recorded on {} after {first}, and waited for by {} before {second}",
                stream_name(*record_on),
                stream_name(*wait_on),
            ),
            MissingEdge::HostWait { stream, .. } => format!(
                "the host waits for {first} ({}, or an event recorded on it after that call) before \
                 {second}",
                stream_name(*stream),
            ),
            MissingEdge::HostFirst { .. } => format!("{second} must come before {first}"),
        }
    }

    /// The part of the missing order that exists already, and why it does not suffice.
    #[must_use]
    pub fn nearest_edge(&self) -> Option<&str> {
        match &self.missing {
            MissingEdge::StreamWait { nearest, .. } | MissingEdge::HostWait { nearest, .. } => {
                nearest.as_deref()
            }
            MissingEdge::HostFirst { .. } => None,
        }
    }

    /// The report as text, with terminal colours if `colours`.
    #[must_use]
    pub fn render(&self, colours: bool) -> String {
        let paint = if colours { COLOURED } else { PLAIN };
        let Paint { bad, strong, mend, end } = paint;
        let mut text = String::new();
        let hazard = self.hazard.map(|hazard| format!(" ({hazard})")).unwrap_or_default();
        let _ = write!(text, "{bad}race{end}{hazard}: nothing orders ");
        let _ = match self.bytes {
            0 => write!(text, "an operation before the end of what it uses"),
            bytes => write!(text, "two accesses to {bytes} bytes at {:#x}", self.address),
        };
        if let Some(memory) = self.memory {
            let _ = write!(text, ", {memory}");
        }
        let what = if self.bytes == 0 { "it" } else { "them" };
        for (number, side) in [("first", &self.first), ("second", &self.second)] {
            let RaceAccess { operation, used, actor, thread, site, .. } = side;
            let _ = write!(
                text,
                "\n  {number:<7}{strong}{operation}{end} {} {what}, by the {actor}\n         {} thread \
                 {thread}",
                used.verb(),
                if matches!(actor, RaceActor::Host) { "called on" } else { "enqueued by" },
            );
            if let Some(site) = site {
                let _ = write!(text, " at {strong}{site}{end}");
            }
        }
        let _ = write!(text, "\n  {mend}missing{end}: {}", self.mend());
        if let Some(nearest) = self.nearest_edge() {
            let _ = write!(text, "\n  nearest: {nearest}");
        }
        text
    }

    /// The report as one JSON object.
    ///
    /// Addresses and handles are strings of hexadecimal digits, so that no JSON reader rounds them.
    #[must_use]
    pub fn to_json(&self) -> String {
        let memory = self.memory.map_or("null".to_owned(), |memory| {
            format!(
                "{{\"base\":\"{:#x}\",\"bytes\":{},\"text\":{}}}",
                memory.base,
                memory.bytes,
                quoted(&memory.to_string())
            )
        });
        let (kind, streams) = match self.missing {
            MissingEdge::StreamWait { record_on, wait_on, .. } => (
                "stream_wait",
                format!("\"record_on\":\"{record_on:#x}\",\"wait_on\":\"{wait_on:#x}\","),
            ),
            MissingEdge::HostWait { stream, .. } => {
                ("host_wait", format!("\"stream\":\"{stream:#x}\","))
            }
            MissingEdge::HostFirst { stream } => {
                ("host_first", format!("\"stream\":\"{stream:#x}\","))
            }
        };
        format!(
            "{{\"first\":{},\"second\":{},\"address\":\"{:#x}\",\"bytes\":{},\"memory\":{memory},\
             \"missing\":{{\"kind\":\"{kind}\",{streams}\"text\":{},\"nearest\":{}}},\"hazard\":{}}}",
            self.first.to_json(),
            self.second.to_json(),
            self.address,
            self.bytes,
            quoted(&self.mend()),
            self.nearest_edge().map_or("null".to_owned(), quoted),
            self.hazard.map_or("null".to_owned(), quoted),
        )
    }
}

impl RaceAccess {
    fn to_json(&self) -> String {
        let (device, stream) = match self.actor {
            RaceActor::Host => ("null".to_owned(), "null".to_owned()),
            RaceActor::Stream { device, stream } => {
                (device.to_string(), format!("\"{stream:#x}\""))
            }
        };
        let place = |site: Option<&std::panic::Location<'_>>| match site {
            Some(at) => format!("{{\"file\":{},\"line\":{}}}", quoted(at.file()), at.line()),
            None => "null".to_owned(),
        };
        format!(
            "{{\"operation\":{},\"use\":\"{}\",\"device\":{device},\"stream\":{stream},\"thread\":{},\
             \"at\":{},\"through\":{},\"sequence\":{}}}",
            quoted(&self.operation),
            self.used.name(),
            quoted(&self.thread),
            place(self.site.map(|site| site.at)),
            place(self.site.and_then(|site| site.through)),
            self.sequence,
        )
    }
}

impl fmt::Display for Race {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.render(false))
    }
}

fn stream_name(stream: u64) -> String {
    match stream {
        0 => "the default stream".to_owned(),
        stream => format!("stream {stream:#x}"),
    }
}

/// A JSON string.
fn quoted(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for letter in text.chars() {
        match letter {
            '"' | '\\' => {
                quoted.push('\\');
                quoted.push(letter);
            }
            control if control < ' ' => {
                let _ = write!(quoted, "\\u{:04x}", control as u32);
            }
            _ => quoted.push(letter),
        }
    }
    quoted.push('"');
    quoted
}
