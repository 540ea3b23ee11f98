//! Nodes that join, leave and die, with an etcd that goes and comes back, forgets, or says nonsense.
//!
//! The server is the program that `KV_ETCD` names. Without it, the trials that need it are listed as ignored; with
//! `KV_REQUIRE_ETCD=1` they fail. This program is also the node that is killed or stopped: see `node`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]
#![allow(clippy::print_stdout, reason = "a node says that it is there")]

mod sizes;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base64::Engine as _;
use kv_remote::Member;
use kv_remote::NodeError;
use kv_remote::etcd::{EtcdError, EtcdOptions, EtcdStats, Membership};
use kv_testkit::etcd::{Etcd, until};
use libtest_mimic::{Arguments, Trial};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

const NODE: &str = "KV_ETCD_NODE";
const PREFIX: &str = "/kv/test/";

/// A trial with etcd's program.
type With = (&'static str, fn(&Path));

/// With etcd, and without.
const WITH: &[With] = &[
    ("nodes_join_and_leave", nodes_join_and_leave),
    ("a_node_that_dies_vanishes_and_one_that_slept_comes_back", dies_and_sleeps),
    ("the_list_stays_while_etcd_is_away_and_follows_it_again", etcd_is_away),
    ("an_etcd_that_has_forgotten_is_told_again", etcd_forgets),
    ("keys_that_are_no_members_are_passed_over", keys_that_are_no_members),
    ("a_list_that_was_not_taken_is_told_again", a_list_that_was_not_taken),
];
const WITHOUT: &[(&str, fn())] = &[
    ("options_with_which_nothing_works_are_refused", options_are_refused),
    ("answers_that_are_none_are_counted_and_change_nothing", answers_that_are_none),
    ("answers_that_are_too_long_are_given_up", answers_that_are_too_long),
    ("a_membership_ends_while_nobody_answers", ends_while_nobody_answers),
    ("etcd_is_asked_what_it_was_asked", what_is_asked),
    ("a_name_that_another_node_takes_is_left_to_it_and_costs_one_lease", name_is_taken),
    ("nodes_of_a_prefix_that_begins_in_the_same_way_are_no_members", another_prefix),
    ("an_endpoint_does_not_send_a_node_elsewhere", sent_elsewhere),
    ("options_of_any_numbers_are_taken_or_refused", sizes::options_of_any_numbers),
];

fn main() {
    if let Ok(said) = std::env::var(NODE) {
        node(&said);
        return;
    }
    let program = std::env::var_os("KV_ETCD");
    let required = std::env::var_os("KV_REQUIRE_ETCD").is_some_and(|value| value == "1");
    let with = WITH.iter().map(|&(name, run)| {
        let path = program.clone();
        let trial = Trial::test(name, move || {
            run(Path::new(&path.ok_or("KV_ETCD names no program")?));
            Ok(())
        });
        trial.with_ignored_flag(program.is_none() && !required)
    });
    let without = WITHOUT.iter().map(|&(name, run)| {
        Trial::test(name, move || {
            run();
            Ok(())
        })
    });
    libtest_mimic::run(&Arguments::from_args(), with.chain(without).collect()).exit();
}

fn member(name: &str) -> Member {
    Member { name: name.to_owned(), address: format!("unix:/nowhere/{name}").parse().unwrap() }
}

fn options(endpoint: &str) -> EtcdOptions {
    let mut options = EtcdOptions::new(vec![endpoint.to_owned()], PREFIX);
    options.lease = Duration::from_secs(2);
    options.every = Duration::from_millis(20);
    options
}

fn join(endpoint: &str, name: &str) -> Membership {
    Membership::join(options(endpoint), member(name), |_| true).unwrap()
}

fn names(membership: &Membership) -> Vec<String> {
    membership.members().into_iter().map(|member| member.name).collect()
}

fn until_members(membership: &Membership, expected: &[&str]) {
    until(&format!("the members are {expected:?}"), || names(membership) == expected);
}

fn nodes_join_and_leave(program: &Path) {
    let etcd = Etcd::start(program);
    let one = join(etcd.endpoint(), "a");
    until_members(&one, &["a"]);
    assert_eq!(one.members(), [member("a")], "its address as well");
    let two = join(etcd.endpoint(), "b");
    until_members(&one, &["a", "b"]);
    until_members(&two, &["a", "b"]);
    // One that only looks is none.
    let looks = Membership::follow(options(etcd.endpoint()), |_| true).unwrap();
    until_members(&looks, &["a", "b"]);
    // Other prefixes are other caches, in both directions, also one that begins in the same way.
    let mut other = options(etcd.endpoint());
    other.prefix = "/kv/".to_owned();
    let outside = Membership::join(other, member("x"), |_| true).unwrap();
    until_members(&outside, &["x"]);
    assert!(outside.stats().foreign > 0, "those of the longer prefix");
    two.leave();
    let lists = one.stats().lists;
    until("a list is read", || one.stats().lists > lists + 1);
    assert_eq!(names(&one), ["a"], "its key has not waited for the end of its lease");
    // A key that is renewed outlives its lease.
    let renewed = one.stats().renewed;
    until("it is renewed twice", || one.stats().renewed >= renewed + 2);
    assert_eq!(names(&one), ["a"]);
    assert_eq!(one.stats().written, 1);
    drop(one);
    until_members(&looks, &[]);
}

/// A node in another process, which says when it is listed.
fn node(said: &str) {
    let (endpoint, name) = said.split_once(' ').unwrap();
    let membership = join(endpoint, name);
    until("it is listed", || membership.stats().is_listed);
    println!("listed");
    drop(std::io::stdin().read_to_end(&mut Vec::new()));
}

struct Node(Child);

impl Node {
    fn start(endpoint: &str, name: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .env(NODE, format!("{endpoint} {name}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line.trim(), "listed");
        Self(child)
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.0.id()).unwrap()).unwrap();
        kill_process(pid, signal).unwrap();
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

fn dies_and_sleeps(program: &Path) {
    let etcd = Etcd::start(program);
    let looks = Membership::follow(options(etcd.endpoint()), |_| true).unwrap();
    let dies = Node::start(etcd.endpoint(), "dies");
    let sleeps = Node::start(etcd.endpoint(), "sleeps");
    until_members(&looks, &["dies", "sleeps"]);
    drop(dies);
    sleeps.signal(Signal::STOP);
    until_members(&looks, &[]);
    sleeps.signal(Signal::CONT);
    until_members(&looks, &["sleeps"]);
}

fn etcd_is_away(program: &Path) {
    let mut etcd = Etcd::start(program);
    let one = join(etcd.endpoint(), "a");
    let two = join(etcd.endpoint(), "b");
    until_members(&one, &["a", "b"]);
    let before = one.stats();
    etcd.stop();
    until("calls fail", || one.stats().failed > before.failed + 3);
    assert!(matches!(one.stats().last_error, Some(EtcdError::Unreached { .. })), "{one:?}");
    assert_eq!(names(&one), ["a", "b"], "nobody has said that they are gone");
    etcd.start_again();
    let lists = one.stats().lists;
    until("lists are read again", || one.stats().lists > lists);
    until_members(&one, &["a", "b"]);
    // And a node that leaves is noticed again.
    two.leave();
    until_members(&one, &["a"]);
}

fn etcd_forgets(program: &Path) {
    let mut etcd = Etcd::start(program);
    let one = join(etcd.endpoint(), "a");
    let two = join(etcd.endpoint(), "b");
    until_members(&one, &["a", "b"]);
    etcd.stop();
    etcd.forget();
    etcd.start_again();
    until("both are written again", || one.stats().written == 2 && two.stats().written == 2);
    until_members(&one, &["a", "b"]);
    until_members(&two, &["a", "b"]);
}

/// Writes a key, as another program would.
fn put(etcd: &Etcd, key: &str, value: &str) {
    let encode = |text: &str| base64::engine::general_purpose::STANDARD.encode(text);
    let body = serde_json::json!({ "key": encode(key), "value": encode(value) });
    let answer = ureq::post(format!("{}/v3/kv/put", etcd.endpoint())).send(body.to_string());
    assert_eq!(answer.unwrap().status(), 200);
}

fn keys_that_are_no_members(program: &Path) {
    let etcd = Etcd::start(program);
    let one = join(etcd.endpoint(), "a");
    until_members(&one, &["a"]);
    assert_eq!(one.stats().foreign, 0);
    let long = "n".repeat(65);
    for (key, value) in [("", "unix:/x"), ("b", "nonsense"), ("c", ""), (&long, "unix:/x")] {
        put(&etcd, &format!("{PREFIX}{key}"), value);
    }
    put(&etcd, &format!("{PREFIX}d"), "tcp:127.0.0.1:1");
    until_members(&one, &["a", "d"]);
    until("they are counted", || one.stats().foreign >= 4);
    // More than a tier takes: the first ones of all names.
    for number in 0..70 {
        put(&etcd, &format!("{PREFIX}m{number:02}"), "tcp:127.0.0.1:1");
    }
    until("64 are taken", || one.members().len() == 64);
    // A node whose name is behind them is listed all the same, and writes its key once.
    let last = join(etcd.endpoint(), "z");
    until("several lists were read", || last.stats().lists > 5);
    assert_eq!((last.stats().written, last.stats().is_listed), (1, true));
    assert_eq!(names(&one)[..3], ["a", "d", "m00"]);
}

fn a_list_that_was_not_taken(program: &Path) {
    let etcd = Etcd::start(program);
    let (told, busy) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(true)));
    let (tells, is_busy) = (Arc::clone(&told), Arc::clone(&busy));
    let one = Membership::join(options(etcd.endpoint()), member("a"), move |members| {
        tells.fetch_add(u64::from(members.len() == 1), Ordering::SeqCst);
        !is_busy.load(Ordering::SeqCst)
    });
    let one = one.unwrap();
    until("it is told again", || told.load(Ordering::SeqCst) > 3);
    busy.store(false, Ordering::SeqCst);
    let lists = one.stats().lists;
    until("two more lists", || one.stats().lists > lists + 2);
    let before = told.load(Ordering::SeqCst);
    let lists = one.stats().lists;
    until("three more lists", || one.stats().lists > lists + 3);
    assert_eq!(told.load(Ordering::SeqCst), before, "what was taken is not told again");
}

fn options_are_refused() {
    let whole = EtcdOptions::new(vec!["http://127.0.0.1:1".to_owned()], PREFIX);
    let refused = |change: fn(&mut EtcdOptions)| {
        let mut options = whole.clone();
        change(&mut options);
        Membership::follow(options, |_| true).map(drop).unwrap_err()
    };
    assert_eq!(refused(|of| of.endpoints.clear()), NodeError::NoEndpoint);
    assert_eq!(refused(|of| of.prefix.clear()), NodeError::NoPrefix);
    for name in ["", "a/b", &"n".repeat(65)] {
        let joined = Membership::join(whole.clone(), member(name), |_| true).map(drop);
        assert_eq!(joined, Err(NodeError::MemberName { name: name.to_owned(), max: 64 }));
    }
    let lease = refused(|of| of.lease = Duration::from_millis(1999));
    assert_eq!(lease, NodeError::EtcdLease { ttl_ms: 1999, min_ms: 2000 });
    for endpoint in ["", "127.0.0.1:2379", "https://a", "http://", "http://a/b", "http://u@a"] {
        let mut options = whole.clone();
        options.endpoints.push(endpoint.to_owned());
        let refused = Membership::follow(options, |_| true).map(drop).unwrap_err();
        assert_eq!(refused, NodeError::Endpoint { endpoint: endpoint.to_owned() });
    }
}

/// A server that answers every request with these bytes.
fn answers(answer: &'static [u8]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            // The head and the body of a request are short.
            drop(stream.read(&mut [0; 4096]));
            drop(stream.write_all(answer));
        }
    });
    endpoint
}

fn failed(endpoint: &str) -> EtcdStats {
    let one = join(endpoint, "a");
    until("calls have failed", || one.stats().failed > 4);
    assert!(one.members().is_empty());
    let stats = one.stats();
    one.leave();
    stats
}

fn answers_that_are_none() {
    let no_http = failed(&answers(b"\x00\x01\x02 nonsense"));
    assert!(matches!(no_http.last_error, Some(EtcdError::Unreached { .. })), "{no_http:?}");
    let error = failed(&answers(b"HTTP/1.1 503 x\r\nContent-Length: 4\r\n\r\nbusy"));
    let Some(EtcdError::Status { status: 503, text, .. }) = error.last_error else {
        panic!("{error:?}")
    };
    assert_eq!(text, "busy");
    let json = failed(&answers(b"HTTP/1.1 200 x\r\nContent-Length: 3\r\n\r\n{,}"));
    assert!(matches!(json.last_error, Some(EtcdError::Answer { field: "JSON", .. })), "{json:?}");
    let empty = failed(&answers(b"HTTP/1.1 200 x\r\nContent-Length: 2\r\n\r\n{}"));
    assert!(matches!(empty.last_error, Some(EtcdError::Answer { .. })), "{empty:?}");
    let wrong = b"HTTP/1.1 200 x\r\nContent-Length: 24\r\n\r\n{\"kvs\":[{\"key\":\"\\u0000\"}]}";
    assert!(failed(&answers(wrong)).failed > 4);
    assert!(!no_http.is_listed && !empty.is_listed);
}

/// A list of members, with more behind it than is read.
fn answers_that_are_too_long() {
    let mut list = br#"{"header":{},"ID":"1","result":{"TTL":"9"},"kvs":[],"more":""#.to_vec();
    list.resize(5 << 20, b'x');
    list.extend_from_slice(b"\"}");
    let head = format!("HTTP/1.1 200 x\r\nContent-Length: {}\r\n\r\n", list.len());
    let whole: &'static [u8] = [head.as_bytes(), &list].concat().leak();
    let stats = failed(&answers(whole));
    assert_eq!(stats.lists, 0);
}

fn ends_while_nobody_answers() {
    // Accepts by the system's queue, and says nothing.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", silent.local_addr().unwrap());
    let mut options = options(&endpoint);
    options.call_max = Duration::from_millis(100);
    let one = Membership::join(options, member("a"), |_| true).unwrap();
    until("a call is late", || one.stats().failed > 0);
    one.leave();
    drop(join("http://127.0.0.1:1", "b"));
}

/// A gateway that answers each path by a function, with status 200 or as it says; and what it was asked.
fn gateway(answer: impl Fn(&str) -> String + Send + Sync + 'static) -> (String, Asked) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let (answer, asked) = (Arc::new(answer), Asked::default());
    let told = asked.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(stream) = stream else { return };
            let (answer, told) = (Arc::clone(&answer), told.clone());
            std::thread::spawn(move || serve(stream, &*answer, &told));
        }
    });
    (endpoint, asked)
}

#[derive(Clone, Default)]
struct Asked(Arc<Mutex<Vec<(String, Value)>>>);

impl Asked {
    fn count(&self, path: &str) -> usize {
        self.0.lock().unwrap().iter().filter(|(of, _)| of == path).count()
    }
}

fn serve(stream: TcpStream, answer: &dyn Fn(&str) -> String, asked: &Asked) {
    let mut reader = BufReader::new(stream);
    loop {
        let (mut path, mut length) = (String::new(), 0);
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line).unwrap_or(0) == 0 {
                return;
            }
            if path.is_empty() {
                line.split(' ').nth(1).unwrap_or_default().clone_into(&mut path);
            }
            if let Some(of) = line.to_lowercase().strip_prefix("content-length:") {
                length = of.trim().parse().unwrap();
            }
            if line.trim().is_empty() {
                break;
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).unwrap();
        asked.0.lock().unwrap().push((path.clone(), serde_json::from_slice(&body).unwrap()));
        let mut text = answer(&path);
        if !text.starts_with("HTTP") {
            text = format!("HTTP/1.1 200 x\r\nContent-Length: {}\r\n\r\n{text}", text.len());
        }
        if reader.get_mut().write_all(text.as_bytes()).is_err() {
            return;
        }
    }
}

/// The answer to a list of one key.
fn one_key(key: &str, member: &Member) -> String {
    let encode = |text: &str| base64::engine::general_purpose::STANDARD.encode(text);
    let (key, value) = (encode(key), encode(&member.address.to_string()));
    format!("{{\"header\":{{}},\"kvs\":[{{\"key\":\"{key}\",\"value\":\"{value}\"}}]}}")
}

const GRANT: &str = "/v3/lease/grant";
const REVOKE: &str = "/v3/lease/revoke";

fn name_is_taken() {
    let leases = AtomicU64::new(0);
    let (has_gone, seen) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let (gone, listed) = (Arc::clone(&has_gone), Arc::clone(&seen));
    let (endpoint, asked) = gateway(move |path| match path {
        GRANT => format!("{{\"ID\":\"{}\"}}", leases.fetch_add(1, Ordering::SeqCst) + 1),
        "/v3/kv/range" if listed.load(Ordering::SeqCst) => one_key("/kv/test/a", &member("a")),
        "/v3/kv/range" if gone.load(Ordering::SeqCst) => {
            listed.store(true, Ordering::SeqCst);
            "{\"header\":{}}".to_owned()
        }
        "/v3/kv/range" => one_key("/kv/test/a", &member("another")),
        _ => "{\"header\":{},\"result\":{\"TTL\":\"9\"}}".to_owned(),
    });
    let mut options = options(&endpoint);
    (options.lease, options.every) = (Duration::from_secs(3600), Duration::from_millis(1));
    let one = Membership::join(options, member("a"), |_| true).unwrap();
    until("the list is read again and again", || one.stats().lists > 50);
    assert_eq!((asked.count(GRANT), asked.count(REVOKE)), (1, 1));
    let stats = one.stats();
    let taken = matches!(&stats.last_error, Some(EtcdError::Taken { name, .. }) if name == "a");
    assert!(taken && !stats.is_listed, "{stats:?}");
    // The other one has gone.
    has_gone.store(true, Ordering::SeqCst);
    until("it is listed again", || one.stats().is_listed);
    let lists = one.stats().lists;
    until("the list is read again and again", || one.stats().lists > lists + 50);
    assert_eq!((asked.count(GRANT), asked.count(REVOKE)), (2, 1));
    one.leave();
    assert_eq!(asked.count(REVOKE), 2);
}

/// What a membership says to etcd, whose calls are those of etcd's gateway: in base64 `/kv/test/a`, and what is behind it.
fn what_is_asked() {
    let (endpoint, asked) = gateway(|path| match path {
        GRANT => "{\"ID\":\"7587869\"}".to_owned(),
        "/v3/kv/range" => one_key("/kv/test/a", &member("a")),
        _ => "{\"header\":{},\"result\":{\"TTL\":\"9\"}}".to_owned(),
    });
    let mut options = options(&endpoint);
    (options.lease, options.every) = (Duration::from_secs(2), Duration::from_millis(1));
    let one = Membership::join(options, member("a"), |_| true).unwrap();
    until("its lease is renewed", || one.stats().renewed > 0 && one.stats().lists > 0);
    one.leave();
    let mut asked = std::mem::take(&mut *asked.0.lock().unwrap());
    asked.sort_by(|(one, _), (other, _)| one.cmp(other));
    asked.dedup();
    let expected = [
        (
            "/v3/kv/put",
            json!({ "key": "L2t2L3Rlc3QvYQ==", "value": "dW5peDovbm93aGVyZS9h", "lease": "7587869" }),
        ),
        ("/v3/kv/range", json!({ "key": "L2t2L3Rlc3Qv", "range_end": "L2t2L3Rlc3Qw" })),
        (GRANT, json!({ "TTL": "2" })),
        ("/v3/lease/keepalive", json!({ "ID": "7587869" })),
        (REVOKE, json!({ "ID": "7587869" })),
    ];
    assert_eq!(asked, expected.map(|(path, body)| (path.to_owned(), body)));
}

fn another_prefix() {
    for (key, expected) in [("/kv/prod-euhost", 0), ("/kv/prodhost", 0), ("/kv/prod/host", 1)] {
        let (endpoint, _) = gateway(move |_| one_key(key, &member("host")));
        for prefix in ["/kv/prod", "/kv/prod/"] {
            let mut options = options(&endpoint);
            options.prefix = prefix.to_owned();
            let looks = Membership::follow(options, |_| true).unwrap();
            until("a list is read, and told", || looks.stats().lists > 1);
            assert_eq!(looks.members().len(), expected, "{key} below {prefix}");
        }
    }
}

fn sent_elsewhere() {
    for status in [301, 302, 303, 307, 308] {
        let (evil, asked) = gateway(move |_| one_key("/kv/test/evil", &member("evil")));
        let (endpoint, _) = gateway(move |path| {
            format!("HTTP/1.1 {status} x\r\nLocation: {evil}{path}\r\nContent-Length: 0\r\n\r\n")
        });
        let stats = failed(&endpoint);
        assert_eq!((stats.lists, asked.0.lock().unwrap().len()), (0, 0), "{status}: {stats:?}");
    }
}
