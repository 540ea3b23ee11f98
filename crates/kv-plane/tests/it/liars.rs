//! Worker processes that say what no worker says, and what the manager's process makes of it.
//!
//! Each is a thread that speaks the frames itself, without a device.

use std::io::{self, Read, Write};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use kv_plane::manager::{Completion, Settled};
use xxhash_rust::xxh3::xxh3_64;

use crate::prelude::*;

/// Longer than anything takes here.
const LONG: Duration = Duration::from_secs(60);

/// How long a worker may talk, or be silent.
const SHORT: Duration = Duration::from_secs(2);

/// More frames than a worker can say within [`SHORT`], and a machine bears.
const TALK: usize = 1 << 20;

const BEGIN: u32 = 4;
const READY: u32 = 5;
const MESSAGE: u32 = 6;
const WORK: u32 = 7;
const RESULT: u32 = 8;
const MEMORY: u32 = 9;
const MAPPED: u32 = 10;
const CLOSE: u32 = 11;
const CLOSED: u32 = 12;
const REFUSED: u32 = 13;

fn frame(kind: u32, body: &[u8]) -> Vec<u8> {
    let length = (body.len() as u64).to_le_bytes();
    let mut bytes = [&b"KVRW"[..], &kind.to_le_bytes(), &length, body].concat();
    bytes.extend(xxh3_64(&bytes).to_le_bytes());
    bytes
}

fn completion(step: u64) -> Vec<u8> {
    let mut body = Vec::new();
    Completion { worker: WorkerId(0), step, outcome: Outcome::Done }.to_bytes(&mut body);
    frame(MESSAGE, &body)
}

fn result(step: u64) -> Vec<u8> {
    frame(RESULT, &step.to_le_bytes())
}

/// So many device blocks have memory, and 24 in host memory.
fn memory(device_blocks: u64) -> Vec<u8> {
    [device_blocks, 24].map(u64::to_le_bytes).concat()
}

/// Memory of one group, and no tier below the host.
fn ready(device_blocks: u64) -> Vec<u8> {
    let body = [&1_u32.to_le_bytes()[..], &memory(device_blocks), &0_u32.to_le_bytes()].concat();
    frame(READY, &body)
}

/// The worker's end of a connection.
struct Peer {
    stream: UnixStream,
    /// The step of the last plan.
    step: u64,
}

impl Peer {
    /// The kind and the body of the next frame.
    fn next(&mut self) -> io::Result<(u32, Vec<u8>)> {
        let mut head = [0; 16];
        self.stream.read_exact(&mut head)?;
        let (kind, length) = (&head[4..8], &head[8..]);
        let mut body = vec![0; u64::from_le_bytes(length.try_into().unwrap()) as usize + 8];
        self.stream.read_exact(&mut body)?;
        body.truncate(body.len() - 8);
        Ok((u32::from_le_bytes(kind.try_into().unwrap()), body))
    }

    fn say(&mut self, frames: &[Vec<u8>]) -> io::Result<()> {
        self.stream.write_all(&frames.concat())
    }

    /// Says the same until nobody listens.
    fn talk(&mut self, frame: &[u8]) -> io::Result<()> {
        (0..TALK).try_for_each(|_| self.stream.write_all(frame))
    }

    /// Waits until nobody is at the other end.
    fn is_silent(&mut self) -> io::Result<()> {
        while self.next().is_ok() {}
        Err(io::ErrorKind::BrokenPipe.into())
    }

    /// A worker's life: what it `says` to an order, or else what it is to say.
    fn work(&mut self, says: Says) -> io::Result<()> {
        loop {
            let (kind, body) = self.next()?;
            if kind == MESSAGE {
                // A plan or a snapshot, both of which say first which step it is; after 12 bytes.
                self.step = u64::from_le_bytes(body[12..20].try_into().unwrap());
            }
            if says(self, kind, &body)? {
                continue;
            }
            match kind {
                BEGIN => self.say(&[ready(24)])?,
                WORK => self.say(&[result(self.step), completion(self.step)])?,
                MEMORY if body[8] == 1 => {
                    self.say(&[frame(MAPPED, &memory(u64::from(body[0])))])?;
                }
                CLOSE => return self.say(&[frame(CLOSED, b"")]),
                _ => {}
            }
        }
    }
}

/// Whether a worker has said something to an order of this kind, in place of what it is to say.
type Says = fn(&mut Peer, kind: u32, body: &[u8]) -> io::Result<bool>;

fn of_cache() -> KvCacheOptions {
    options(shape(2, 8, 4), 24, 24)
}

/// A worker that says this, and then those that take its place one after the other. Which of them have ended, in their order.
fn start(
    timeout: Duration,
    all: &'static [Says],
) -> Result<(Processes, Receiver<usize>), BuildError> {
    let (ended, ends) = mpsc::channel();
    let (mut next, before) = (0, Arc::new(AtomicUsize::new(0)));
    let connect = move |_| {
        assert_eq!(before.load(Ordering::SeqCst), next, "those before have not ended yet");
        let (here, stream) = UnixStream::pair()?;
        let (peer, says) = (stream.try_clone()?, all.get(next).copied());
        let worker = thread::Builder::new().spawn(move || {
            let mut peer = Peer { stream, step: 0 };
            let worked = peer.work(says.unwrap_or(|_, _, _| Ok(false)));
            peer.stream.shutdown(Shutdown::Both).and(worked)
        })?;
        let (number, ended, before) = (next, ended.clone(), Arc::clone(&before));
        next += 1;
        Ok(Connection::socket(here)?.ended_by(move || {
            peer.shutdown(Shutdown::Both)?;
            let _ = worker.join();
            // It takes a while.
            (0..1000).for_each(|_| thread::yield_now());
            before.fetch_add(1, Ordering::SeqCst);
            let _ = ended.send(number);
            Ok(())
        }))
    };
    Ok((Processes::start(of_cache(), 1, timeout, connect)?, ends))
}

/// A cache whose worker says this, and what comes of three steps. Reasons why workers were replaced.
fn reasons(timeout: Duration, all: &'static [Says]) -> Vec<String> {
    let mut kv = KvCache::start(start(timeout, all).unwrap().0).unwrap();
    for _ in 0..3 {
        step(&mut kv).unwrap();
    }
    let reasons = kv.workers().replaced().iter().map(|of| of.reason.clone()).collect();
    kv.close().unwrap();
    reasons
}

/// A step of nobody, until all have completed it.
fn step(kv: &mut KvCache<Processes>) -> Result<(), StepError> {
    let step = kv.begin_step()?;
    kv.stage_with(&step, &mut [], b"work")?;
    kv.finish_step(step)?;
    kv.drain()
}

/// A few steps with less memory, and a few with all of it again.
fn shrink_and_grow(kv: &mut KvCache<Processes>) {
    for blocks in [8, 24] {
        kv.set_budget(GroupId(0), Tier::Primary, blocks).unwrap();
        (0..3).for_each(|_| step(kv).unwrap());
    }
}

const TALKS: &str = "the process has talked for 2 s without getting anywhere";

#[test]
fn a_worker_that_talks_without_progress_is_given_up() {
    let says: [Says; 2] = [
        |peer, kind, _| Ok(kind == WORK && peer.step == 2 && peer.talk(&completion(1)).is_ok()),
        |peer, kind, _| Ok(kind == WORK && peer.step == 2 && peer.talk(&result(1)).is_ok()),
    ];
    for says in says {
        let reasons = reasons(SHORT, Box::leak(Box::new([says])));
        assert_eq!(reasons, [TALKS]);
    }
}

#[test]
fn a_worker_that_talks_in_place_of_an_answer_is_given_up() {
    static ALL: [Says; 1] = [|peer, kind, body| {
        Ok(kind == MEMORY && body[8] == 1 && peer.talk(&completion(1)).is_ok())
    }];
    let mut kv = KvCache::start(start(SHORT, &ALL).unwrap().0).unwrap();
    shrink_and_grow(&mut kv);
    assert_eq!(kv.workers().replaced()[0].reason, TALKS);
    assert_eq!(kv.workers().mapped_blocks(), 24);
    kv.close().unwrap();
}

#[test]
fn a_worker_that_talks_in_place_of_its_account_is_given_up() {
    static ALL: [Says; 1] =
        [|peer, kind, _| Ok(kind == CLOSE && peer.talk(&completion(1)).is_ok())];
    let mut kv = KvCache::start(start(SHORT, &ALL).unwrap().0).unwrap();
    step(&mut kv).unwrap();
    let [CloseError::Worker(failed)] = &kv.close().unwrap_err()[..] else { panic!() };
    assert!(matches!(failed.fault, WorkerFault::Talks { seconds: 2 }), "{failed:?}");
}

#[test]
fn what_no_worker_says_is_no_progress() {
    let says: [(Says, &str); 7] = [
        (
            |peer, kind, _| {
                let again = [result(peer.step), result(peer.step), completion(peer.step)];
                Ok(kind == WORK && peer.say(&again).is_ok())
            },
            "the process said what cannot be read: a frame about Result, where the completion of the same step",
        ),
        (
            |peer, kind, _| Ok(kind == WORK && peer.say(&[result(peer.step + 1)]).is_ok()),
            "the process completed step 2 of worker 0, where step 1 was next",
        ),
        (
            |peer, kind, _| {
                let last = [result(1), completion(1), result(u64::MAX)];
                Ok(kind == WORK && peer.say(&last).is_ok())
            },
            "the process completed step 18446744073709551615 of worker 0, where step",
        ),
        (
            |peer, kind, _| Ok(kind == WORK && peer.say(&[completion(peer.step + 1)]).is_ok()),
            "the process completed step 2 of worker 0, where step 1 was next",
        ),
        (
            |peer, kind, _| Ok(kind == WORK && peer.say(&[completion(peer.step)]).is_ok()),
            "the process completed step 1 and has not computed it",
        ),
        (
            |peer, kind, _| {
                let (worker, ticket) = (WorkerId(7), TicketId(1));
                let mut body = Vec::new();
                Settled { worker, ticket, wrong: Vec::new() }.to_bytes(&mut body);
                Ok(kind == WORK && peer.say(&[frame(MESSAGE, &body)]).is_ok())
            },
            "the process spoke for worker 7",
        ),
        (
            |peer, kind, _| Ok(kind == WORK && peer.say(&[frame(MAPPED, &memory(24))]).is_ok()),
            "the process said what cannot be read: a frame about Mapped, where what came of a step",
        ),
    ];
    for (says, reason) in says {
        let reasons = reasons(LONG, Box::leak(Box::new([says])));
        assert_eq!(reasons.len(), 1, "{reason}: {reasons:?}");
        assert!(reasons[0].starts_with(reason), "{reason}: {reasons:?}");
    }
}

#[test]
fn what_a_worker_says_is_shortened_before_it_is_kept() {
    let says: [(Says, &str); 2] = [
        (
            |peer, kind, _| {
                let reason = vec![b'x'; 1 << 20];
                Ok(kind == WORK && peer.say(&[frame(REFUSED, &reason)]).is_ok())
            },
            "the process cannot go on: xxxx",
        ),
        (
            |peer, kind, _| {
                let mut body = Vec::new();
                let edit_ids = vec![Default::default(); 1 << 18];
                StepPlan { edit_ids, ..StepPlan::default() }.to_bytes(&mut body);
                Ok(kind == WORK && peer.say(&[frame(MESSAGE, &body)]).is_ok())
            },
            "the process said what cannot be read: a frame about a plan, where what came of a plan",
        ),
    ];
    for (says, reason) in says {
        let reasons = reasons(LONG, Box::leak(Box::new([says])));
        assert!(reasons[0].starts_with(reason), "{:.200}", reasons[0]);
        assert!(reasons[0].len() < 4200, "{} bytes are kept", reasons[0].len());
    }
}

/// The manager looks at nothing meanwhile: what is not taken from a worker stays with the worker.
#[test]
fn a_worker_says_no_more_than_is_kept_for_the_manager() {
    let (told, said) = mpsc::channel();
    let connect = move |_| {
        let (here, mut stream) = UnixStream::pair()?;
        let told = told.clone();
        thread::Builder::new().spawn(move || {
            stream.set_write_timeout(Some(Duration::from_secs(1)))?;
            let large = frame(RESULT, &vec![0; 1 << 20]);
            let count = (0..128).take_while(|_| stream.write_all(&large).is_ok()).count();
            told.send(count).map_err(io::Error::other)
        })?;
        Connection::socket(here)
    };
    let workers = Processes::start(of_cache(), 1, LONG, connect).unwrap();
    let count = said.recv().unwrap();
    assert!(count < 70, "{count} MiB were taken from it");
    drop(workers);
}

#[test]
fn a_process_that_dies_while_it_is_asked_for_memory_is_replaced() {
    static ALL: [Says; 1] = [|_, kind, _| match kind {
        MEMORY => Err(io::ErrorKind::BrokenPipe.into()),
        _ => Ok(false),
    }];
    let mut kv = KvCache::start(start(LONG, &ALL).unwrap().0).unwrap();
    shrink_and_grow(&mut kv);
    assert_eq!(kv.workers().replaced().len(), 1);
    assert_eq!(kv.workers().mapped_blocks(), 24);
    kv.close().unwrap();
}

#[test]
fn a_successor_that_does_not_begin_is_ended_before_the_next_one_starts() {
    static ALL: [Says; 3] = [
        |_, kind, _| match kind {
            WORK => Err(io::ErrorKind::BrokenPipe.into()),
            _ => Ok(false),
        },
        |peer, kind, _| Ok(kind == BEGIN && peer.is_silent().is_ok()),
        |peer, kind, _| Ok(kind == BEGIN && peer.say(&[ready(23)]).is_ok()),
    ];
    let (workers, ends) = start(Duration::from_secs(2), &ALL).unwrap();
    let mut kv = KvCache::start(workers).unwrap();
    step(&mut kv).unwrap();
    assert_eq!(kv.workers().replaced().len(), 1);
    assert_eq!(ends.try_iter().collect::<Vec<_>>(), [0, 1, 2]);
    kv.close().unwrap();
    assert_eq!(ends.recv(), Err(mpsc::RecvError), "the last one has ended by itself");
}

#[test]
fn who_does_not_begin_is_ended() {
    static ALL: [Says; 1] = [|peer, kind, _| Ok(kind == BEGIN && peer.is_silent().is_ok())];
    let (workers, ends) = start(SHORT, &ALL).unwrap();
    let BuildError::Worker(failed) = KvCache::start(workers).unwrap_err() else { panic!() };
    assert!(matches!(failed.fault, WorkerFault::Silent { .. }), "{failed:?}");
    assert_eq!(ends.recv(), Ok(0));
}

/// Nobody knows how to end it, and the thread that writes to it waits for it to read.
#[test]
fn a_process_that_does_not_read_learns_that_nobody_is_there() {
    let (told, said) = mpsc::channel();
    let (is_dropped, dropped) = mpsc::channel();
    let mut dropped = Some(dropped);
    let connect = move |_| {
        let (here, stream) = UnixStream::pair()?;
        let (told, dropped) = (told.clone(), dropped.take());
        thread::Builder::new().spawn(move || {
            stream.set_write_timeout(Some(Duration::from_secs(10)))?;
            let mut peer = Peer { stream, step: 0 };
            while peer.next()?.0 != BEGIN {}
            peer.say(&[ready(24)])?;
            dropped.map(|dropped| dropped.recv());
            // More than lies in a socket.
            let wrote = (0..TALK).try_for_each(|_| peer.stream.write_all(&[0; 4096]));
            told.send(wrote.map_err(|error| error.kind())).map_err(io::Error::other)
        })?;
        Connection::socket(here)
    };
    let mut kv = KvCache::start(Processes::start(of_cache(), 1, LONG, connect).unwrap()).unwrap();
    let open = kv.begin_step().unwrap();
    kv.stage_with(&open, &mut [], &vec![0; 8 << 20]).unwrap();
    drop(kv);
    is_dropped.send(()).unwrap();
    assert!(matches!(
        said.recv(),
        Ok(Err(io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset))
    ));
}

/// Its program goes on behind what it says last: here, it writes a file.
#[test]
fn a_process_that_has_said_all_ends_by_itself() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(std::process::id().to_string());
    std::fs::create_dir_all(&folder).unwrap();
    let (said, end) = (folder.join("said"), folder.join("end"));
    std::fs::write(&said, [ready(24), frame(CLOSED, b"account")].concat()).unwrap();
    let (from, to) = (said.clone(), end.clone());
    let connect = move |_| {
        let program = "cat \"$0\" && cat > \"$1.read\" && mv \"$1.read\" \"$1\"";
        Connection::spawn(Command::new("sh").args(["-c", program]).arg(&from).arg(&to))
    };
    let kv = KvCache::start(Processes::start(of_cache(), 1, LONG, connect).unwrap()).unwrap();
    assert_eq!(kv.close().unwrap(), [b"account"]);
    assert!(end.exists(), "it was ended before it had read all and gone on");
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn workers_with_too_little_memory_are_asked_for_more_from_time_to_time() {
    static ASKED: AtomicUsize = AtomicUsize::new(0);
    static ALL: [Says; 1] = [|peer, kind, _| {
        if kind != MEMORY || peer.step < 2 {
            return Ok(false);
        }
        ASKED.fetch_add(1, Ordering::Relaxed);
        peer.say(&[frame(MAPPED, &memory(10))])?;
        Ok(true)
    }];
    let mut kv = KvCache::start(start(LONG, &ALL).unwrap().0).unwrap();
    kv.set_budget(GroupId(0), Tier::Primary, 8).unwrap();
    (0..2).for_each(|_| step(&mut kv).unwrap());
    for round in 1..=2 {
        kv.set_budget(GroupId(0), Tier::Primary, 24).unwrap();
        (0..100).for_each(|_| step(&mut kv).unwrap());
        assert_eq!(kv.manager().pool(GroupId(0)).unwrap().stats().primary.blocks, 10);
        // After 1, 2, 4, .. steps.
        let asked = ASKED.swap(0, Ordering::Relaxed);
        assert!((6..10).contains(&asked), "round {round}: asked {asked} times");
    }
    kv.close().unwrap();
}

#[test]
fn tables_that_no_successor_could_be_told_are_refused() {
    let large = with_first(of_cache(), |group| group.blocks_per_sequence_max = 65_537);
    let large = KvCacheOptions { sequences_max: 4096, ..large };
    let connect = |_| -> io::Result<Connection> { panic!("no process is started") };
    let refused = Processes::start(large, 1, LONG, connect).unwrap_err();
    let BuildError::Options(OptionsError::Snapshot { bytes, max }) = refused else {
        panic!("{refused:?}")
    };
    assert!(bytes > 4 * 4096 * 65_537 && bytes > max, "{bytes} and {max}");
}

#[test]
fn nobody_works_for_a_manager_that_never_spoke() {
    let (here, there) = UnixStream::pair().unwrap();
    drop(here);
    let served = Arc::new(AtomicUsize::new(0));
    let ran = Arc::clone(&served);
    let run = move |_: &mut _| {
        ran.fetch_add(1, Ordering::Relaxed);
        Ok(Vec::new())
    };
    serve(Connection::socket(there).unwrap(), run).unwrap();
    assert_eq!(served.load(Ordering::Relaxed), 0);
}
