//! One page in two processes: this program starts itself, and passes the page as the child's
//! standard input. Parent and child exchange lines over a socket, which is the child's standard
//! output.

use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use cuda_driver::{Device, Stream};
use cuda_vmm::pages::share::import_page;
use cuda_vmm::pages::{PagePool, PagePoolOptions, Reservation, ReservationOptions, SharedPage};

use super::pattern;
use super::scenarios::Scenario;

/// Every scenario, by name.
pub(crate) const ALL: &[(&str, Scenario)] = &[
    ("two_processes_share_a_page", two_processes_share_a_page),
    ("an_importer_outlives_a_killed_exporter", an_importer_outlives_a_killed_exporter),
];

/// Tells that a trial started this process, and which role it has.
const ROLE: &str = "KV_SHARE_ROLE";
/// Bytes of the page.
const BYTES: &str = "KV_SHARE_BYTES";
const IMPORT: &str = "import";
const EXPORT: &str = "export";

/// More than a driver keeps for itself, so that a leaked page is visible.
const PAGE_BYTES: u64 = 64 << 20;

/// Maximum time to wait for a message of the other process. Far longer than any step takes.
const SILENCE_MAX: Duration = Duration::from_secs(120);

/// Plays the child's role if this process is a child; returns whether it is.
pub(crate) fn ran_as_child(open: impl FnOnce() -> Result<Device, String>) -> bool {
    let Some(role) = std::env::var_os(ROLE) else { return false };
    let device = open().unwrap();
    if role == IMPORT {
        import(&device)
    } else {
        export_until_killed(&device)
    }
    true
}

/// The parent exports. The child imports and writes. The parent sees the data and releases first.
fn two_processes_share_a_page(device: &Device) {
    let (free_before, _) = device.memory_info().unwrap();
    let (pool, space, page) = written_page(device);
    let exported = page.export().unwrap();
    let mut partner = Partner::start(IMPORT, exported.into_fd().into());
    partner.hears("written");
    assert!(holds(&space, 2), "the parent does not see what the child wrote");
    drop(space.close(&[]).wait().unwrap());
    pool.give_back(page).unwrap();
    assert_eq!((pool.stats().live, pool.stats().released), (0, 1), "an exported page is not kept");
    partner.says("gone");
    partner.hears("alive");
    assert!(partner.child.wait().unwrap().success());
    let (free_after, _) = device.memory_info().unwrap();
    assert!(free_after + PAGE_BYTES > free_before, "{} bytes are kept", free_before - free_after);
}

/// The exporter is a process that is killed while another process has its page mapped.
fn an_importer_outlives_a_killed_exporter(_: &Device) {
    let mut exporter = Partner::start(EXPORT, Stdio::null());
    // The exporter's child sends this, on the same socket.
    exporter.hears("written");
    exporter.child.kill().unwrap();
    assert!(!exporter.child.wait().unwrap().success());
    exporter.says("gone");
    exporter.hears("alive");
    exporter.hears("");
}

/// A process started by this one, and the socket between the two.
struct Partner {
    child: Child,
    talk: BufReader<UnixStream>,
}

impl Partner {
    fn start(role: &str, input: Stdio) -> Self {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(SILENCE_MAX)).unwrap();
        let child = command(role, input).stdout(OwnedFd::from(theirs)).spawn().unwrap();
        Self { child, talk: BufReader::new(ours) }
    }

    fn says(&mut self, word: &str) {
        writeln!(self.talk.get_mut(), "{word}").unwrap();
    }

    /// Waits for a line. An empty word means the end of the stream.
    #[track_caller]
    fn hears(&mut self, word: &str) {
        assert_eq!(line(&mut self.talk), word);
    }
}

impl Drop for Partner {
    fn drop(&mut self) {
        // Only a failed trial leaves a running process. If it cannot be killed, it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// This program, in a role.
fn command(role: &str, input: Stdio) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env(ROLE, role).env(BYTES, PAGE_BYTES.to_string()).stdin(input);
    command
}

fn line(talk: &mut impl BufRead) -> String {
    let mut line = String::new();
    talk.read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}

/// A page that can be exported, mapped and written.
fn written_page(device: &Device) -> (PagePool, Reservation, SharedPage) {
    let options = PagePoolOptions { page_bytes: Some(PAGE_BYTES), capacity_pages: 1 };
    let pool = PagePool::new(device, options).unwrap();
    let page = pool.take_exportable().unwrap().share();
    let space = mapped(device, page.clone());
    write(&space, 1);
    (pool, space, page)
}

fn mapped(device: &Device, page: SharedPage) -> Reservation {
    let bytes = page.bytes();
    let options = ReservationOptions { bytes, page_bytes: Some(bytes), peers: Vec::new() };
    let space = Reservation::new(device, options).unwrap();
    space.map(0, page).unwrap();
    space
}

fn write(space: &Reservation, tag: u64) {
    let span = space.mapped_span(0..1).unwrap();
    let stream = Stream::new(space.device()).unwrap();
    stream.upload(span, &pattern(tag, span.bytes())).unwrap();
    // The other process cannot see the stream.
    stream.synchronize().unwrap();
}

fn holds(space: &Reservation, tag: u64) -> bool {
    let span = space.mapped_span(0..1).unwrap();
    let mut seen = vec![0; span.bytes() as usize];
    Stream::new(space.device()).unwrap().download(&mut seen, span).unwrap();
    seen == pattern(tag, span.bytes())
}

/// The importer: checks, writes, waits until the exporter has released the page, and checks again.
fn import(device: &Device) {
    let bytes = std::env::var(BYTES).unwrap().parse().unwrap();
    let page = {
        // SAFETY: the descriptor is open, the parent gave it to this process alone, and nothing
        // here reads the standard input.
        let fd = unsafe { OwnedFd::from_raw_fd(0) };
        import_page(device, &fd, bytes).unwrap()
    };
    let socket = UnixStream::from(io::stdout().as_fd().try_clone_to_owned().unwrap());
    let mut talk = BufReader::new(socket);
    let space = mapped(device, page);
    assert!(holds(&space, 1), "the child does not see what the exporter wrote");
    write(&space, 2);
    writeln!(talk.get_mut(), "written").unwrap();
    assert_eq!(line(&mut talk), "gone");
    assert!(holds(&space, 2), "bytes were lost with the exporter");
    let report = space.close(&[]).wait().unwrap();
    assert!(report.is_clean(), "{:?}", report.errors);
    drop(report);
    writeln!(talk.get_mut(), "alive").unwrap();
}

/// An exporter with a child of its own, which has the page.
fn export_until_killed(device: &Device) {
    let (_pool, _space, page) = written_page(device);
    let fd = page.export().unwrap().into_fd();
    // The child speaks on this process's socket. The call returns only if the child fails.
    let ended = command(IMPORT, fd.into()).status().unwrap();
    panic!("the importer ended before the exporter was killed: {ended}");
}
