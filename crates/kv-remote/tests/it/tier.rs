//! Peers as a tier: what one host stores another one loads, and members that die, stall, forget and come back.

use crate::common::random;
use crate::common::worker::RECORD_BYTES;
use crate::prelude::*;
use kv_remote::Transfer;

/// A node and, as long as it is there, its server.
struct Host {
    node: Arc<Node>,
    server: Option<Server>,
    member: Member,
}

impl Host {
    fn new(name: &str, address: Address) -> Self {
        let options = NodeOptions::new(name, RECORD_BYTES);
        let memory = Arc::new(HostMemory::new(1 << 16).unwrap());
        let node = Arc::new(Node::new(&options, memory, Arc::new(SystemClock::new())).unwrap());
        let member = Member { name: name.to_owned(), address };
        let mut host = Self { node, server: None, member };
        host.start();
        host
    }

    fn start(&mut self) {
        let options = ServerOptions::new(self.member.address.clone(), key());
        let server = Server::start(Arc::clone(&self.node), options).unwrap();
        self.member.address = server.address().clone();
        self.server = Some(server);
    }

    fn stop(&mut self) {
        self.server = None;
    }
}

fn hosts(names: &[&str]) -> Vec<Host> {
    names.iter().map(|name| Host::new(name, "tcp:127.0.0.1:0".parse().unwrap())).collect()
}

fn members(hosts: &[Host]) -> Vec<Member> {
    hosts.iter().map(|host| host.member.clone()).collect()
}

fn options(members: Vec<Member>) -> RemoteOptions {
    let mut options = RemoteOptions::new(members, key());
    options.retry_after = Duration::from_millis(2);
    options.wait_max = Duration::from_secs(20);
    options.follow_every = Duration::from_millis(1);
    options
}

fn worker(options: RemoteOptions) -> (Worker, RemoteWatch) {
    worker_of(FORMAT, options)
}

/// A worker whose records are of a format.
fn worker_of(format: u64, options: RemoteOptions) -> (Worker, RemoteWatch) {
    let tier = RemoteTier::new(options).unwrap();
    let watch = tier.watch();
    (Worker::new(tier, format), watch)
}

fn no_lease_is_open(hosts: &[Host]) {
    for host in hosts {
        until("no lease is open", || host.node.pool().loans() == 0);
    }
}

#[test]
fn what_one_host_stores_another_one_gains_and_loads() {
    let hosts = hosts(&["a", "b", "c"]);
    let (mut one, watch) = worker(options(members(&hosts)));
    one.keep(0..30);
    assert_eq!(one.stored.len(), 30);
    let stats = watch.stats();
    assert_eq!((stats.stored, stats.put, stats.unstored), (30, 60, 0));
    let kept: u64 = hosts.iter().map(|host| host.node.stats().used_slots).sum();
    assert_eq!(kept, 60, "each block is kept twice");
    // The list of another host has another order.
    let (mut two, watch) = worker(options(members(&hosts).into_iter().rev().collect()));
    until("all are gained", || {
        two.poll();
        // One may be gained again, if the second member that has it says so when the first has given it up.
        two.gained.iter().collect::<BTreeSet<_>>().len() == 30
    });
    assert_eq!(two.loads(0..32), (0..30).collect::<Vec<_>>());
    two.missed.sort_unstable_by_key(|(number, _)| *number);
    assert_eq!(two.missed, [(30, BlockFault::Missing), (31, BlockFault::Missing)]);
    let stats = watch.stats();
    assert_eq!(stats.loaded.values().sum::<u64>(), 30);
    // Those are asked first who have said that they have a block, which not all have yet.
    assert!(stats.loaded.values().filter(|count| **count > 0).count() > 1, "{stats:?}");
    assert_eq!(stats.missed_as(Miss::Absent), 4, "both members of two blocks");
    // What the last member gives up is dropped.
    hosts.iter().for_each(|host| host.node.clear());
    until("all are dropped", || {
        two.poll();
        two.dropped.iter().collect::<BTreeSet<_>>().len() == 30
    });
    no_lease_is_open(&hosts);
}

#[test]
fn workers_of_two_formats_neither_replace_nor_find_each_others_records() {
    let hosts = hosts(&["a", "b"]);
    // Two ranks of one engine: each has its own heads of the same blocks.
    let (mut one, _) = worker_of(FORMAT, options(members(&hosts)));
    let (mut two, watch) = worker_of(FORMAT + 1, options(members(&hosts)));
    one.store(0..30);
    one.settle();
    two.store(20..40);
    two.settle();
    assert_eq!(one.loads(0..40), (0..30).collect::<Vec<_>>());
    assert_eq!(two.loads(0..40), (20..40).collect::<Vec<_>>());
    assert_eq!(watch.stats().missed_as(Miss::Foreign), 0, "what is another's is not even found");
    // Another host's worker of a rank gains what its own rank has stored, and nothing else.
    let (mut other, _) = worker_of(FORMAT + 1, options(members(&hosts)));
    until("all of its rank are gained", || {
        other.poll();
        other.gained == (20..40).collect()
    });
    // What one forgets, the other still has.
    one.forget(20..25);
    until("they are forgotten", || one.loads(20..30) == (25..30).collect::<Vec<_>>());
    assert_eq!(two.loads(20..40).len(), 20);
    one.clear();
    until("everything is forgotten", || one.loads(0..30).is_empty());
    assert_eq!(two.loads(20..40).len(), 20);
    assert!(one.gained.iter().all(|of| *of < 30) && two.gained.iter().all(|of| *of >= 20));
}

#[test]
fn a_member_that_dies_costs_no_block_and_two_cost_misses() {
    let mut hosts = hosts(&["a", "b", "c"]);
    let all = members(&hosts);
    let (mut one, watch) = worker(options(all.clone()));
    one.keep(0..30);
    hosts[0].stop();
    assert_eq!(one.loads(0..30), (0..30).collect::<Vec<_>>());
    assert!(watch.stats().downs > 0);
    // What is stored now has one member at least.
    one.keep(30..40);
    assert_eq!(one.stored.len(), 40);
    hosts[1].stop();
    let left = one.loads(0..40);
    let on_c = |number: &u64| replicas(&all, common::pair(*number), 2).contains(&2);
    let expected: Vec<u64> = (0..40).filter(on_c).collect();
    assert_eq!(left, expected);
    assert!(watch.stats().missed_as(Miss::Down) > 0);
    no_lease_is_open(&hosts);
}

#[test]
fn a_member_that_is_down_is_left_alone_for_a_while() {
    let folder = tempfile::tempdir().unwrap();
    let mut hosts = vec![Host::new("a", Address::Unix(folder.path().join("a")))];
    let mut patient = options(members(&hosts));
    patient.retry_after = Duration::from_secs(600);
    let (mut one, watch) = worker(patient);
    one.keep(0..2);
    hosts[0].stop();
    for _ in 0..3 {
        assert_eq!(one.loads(0..2), [0_u64; 0]);
    }
    hosts[0].start();
    assert_eq!(one.loads(0..2), [0_u64; 0]);
    assert_eq!(watch.stats().downs, 1);
}

/// A member that takes connections and says nothing.
fn deaf(name: &str) -> (TcpListener, Member) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = Address::Tcp(listener.local_addr().unwrap());
    (listener, Member { name: name.to_owned(), address })
}

#[test]
fn a_load_from_a_member_that_stalls_is_hedged() {
    let host = Host::new("b", "tcp:127.0.0.1:0".parse().unwrap());
    let (listener, silent) = deaf("a");
    let all = vec![silent, host.member.clone()];
    let mut only_b = options(vec![host.member.clone()]);
    only_b.replicas = 1;
    let (mut one, _) = worker(only_b);
    one.keep(0..10);
    let clock = ManualClock::new();
    let mut slow = options(all.clone());
    slow.clock = Arc::new(clock.clone());
    slow.answer_max = Duration::from_secs(600);
    slow.hedge_after = Duration::from_millis(20);
    let (mut two, watch) = worker(slow);
    // Dropped before the tier, whose thread waits for it.
    let listener = listener;
    let waits = (0..10).filter(|number| replicas(&all, common::pair(*number), 1) == [0]).count();
    assert!(waits > 0, "the silent member is asked first for some");
    two.load(0..10);
    until("the blocks that the other member is asked for first", || {
        two.poll();
        watch.stats().loaded["b"] == 10 - waits as u64
    });
    assert_eq!(watch.stats().hedged, 0);
    clock.advance(Duration::from_millis(20));
    two.settle();
    let stats = watch.stats();
    assert_eq!((stats.hedged, stats.loaded["b"]), (waits as u64, 10));
    assert_eq!(two.loaded.len(), 10);
    drop(listener);
}

#[test]
fn a_load_and_a_store_that_no_member_answers_end_by_their_deadline() {
    let (listeners, all): (Vec<_>, Vec<_>) = ["a", "b"].map(deaf).into_iter().unzip();
    let clock = ManualClock::new();
    let mut slow = options(all);
    slow.clock = Arc::new(clock.clone());
    slow.answer_max = Duration::from_secs(600);
    let (mut one, watch) = worker(slow);
    // Dropped before the tier, whose threads wait for them.
    let listeners = listeners;
    one.load(0..4);
    one.store(4..6);
    assert!(one.poll() > 0);
    clock.advance(Duration::from_secs(19));
    assert!(one.poll() > 0);
    clock.advance(Duration::from_secs(1));
    one.settle();
    let mut missed = std::mem::take(&mut one.missed);
    missed.sort_unstable_by_key(|(number, _)| *number);
    assert_eq!(missed, [0, 1, 2, 3].map(|number| (number, BlockFault::Failed)));
    assert!(one.stored.is_empty());
    let stats = watch.stats();
    assert_eq!((stats.missed_as(Miss::Late), stats.unstored), (4, 2));
    drop(listeners);
}

#[test]
fn what_a_member_was_not_told_to_forget_it_forgets_before_it_gives_anything() {
    let folder = tempfile::tempdir().unwrap();
    let mut hosts = vec![Host::new("a", Address::Unix(folder.path().join("a")))];
    let (mut one, _) = worker(options(members(&hosts)));
    one.keep(0..6);
    hosts[0].stop();
    assert_eq!(one.loads([0]), [0_u64; 0]);
    one.forget([1, 2]);
    hosts[0].start();
    until("the member is called again", || one.loads([0]) == [0]);
    assert_eq!(one.loads(0..6), [0, 3, 4, 5]);
    assert_eq!(hosts[0].node.stats().used_slots, 4);
    hosts[0].stop();
    assert_eq!(one.loads([0]), [0_u64; 0]);
    one.clear();
    hosts[0].start();
    until("the member is called again", || {
        assert_eq!(one.loads(0..6), [0_u64; 0]);
        hosts[0].node.stats().used_slots == 0
    });
    one.keep(0..6);
    assert_eq!(one.loads(0..6).len(), 6);
}

/// Reads after the node has taken the slots for others: a reader whose process was stopped for long.
#[derive(Debug)]
struct Late {
    node: Arc<Node>,
    turns: Arc<AtomicU64>,
}

impl Transfer for Late {
    fn read(
        &mut self,
        peer: &mut Peer,
        lease: LeaseId,
        spans: &[Span],
        deadline: Instant,
        each: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), PeerError> {
        if self.turns.fetch_add(1, Ordering::Relaxed).is_multiple_of(2) {
            until("the lease has ended", || {
                self.node.end_overdue();
                self.node.pool().loans() == 0
            });
            self.node.clear();
            (100..300).for_each(|number| self.node.put(common::block(number), &[9; 90]).unwrap());
            for (place, span) in spans.iter().enumerate() {
                let mut bytes = vec![0; span.bytes as usize];
                assert!(self.node.memory().read(span.address, &mut bytes));
                each(place, &bytes);
            }
            return Ok(());
        }
        SocketTransfer.read(peer, lease, spans, deadline, each)
    }
}

#[test]
fn a_reader_that_sleeps_past_its_lease_misses_and_goes_on_with_another_member() {
    let hosts = hosts(&["a", "b"]);
    let mut late = options(members(&hosts));
    late.lease = Duration::from_millis(5);
    let turns = Arc::new(AtomicU64::new(0));
    let node = Arc::clone(&hosts[0].node);
    late.set_transfer(move |member| match member.name.as_str() {
        "a" => Box::new(Late { node: Arc::clone(&node), turns: Arc::clone(&turns) }),
        _ => Box::new(SocketTransfer),
    });
    let (mut one, watch) = worker(late);
    one.keep(0..20);
    // Leases of the other member are as short, and its reads may be late, too.
    until("all have come at some time", || one.loads(0..20).len() == 20);
    assert!(watch.stats().missed_as(Miss::Stale) > 0, "{:?}", watch.stats());
    no_lease_is_open(&hosts);
}

/// Panics when it reads first.
#[derive(Debug)]
struct Panics(Arc<AtomicU64>);

impl Transfer for Panics {
    fn read(
        &mut self,
        peer: &mut Peer,
        lease: LeaseId,
        spans: &[Span],
        deadline: Instant,
        each: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), PeerError> {
        assert!(self.0.fetch_add(1, Ordering::Relaxed) > 2, "the caller's transfer fails");
        SocketTransfer.read(peer, lease, spans, deadline, each)
    }
}

/// Host memory of large blocks of zeros.
#[derive(Debug)]
struct Large;

impl Large {
    const BYTES: usize = 6 << 20;
}

impl HostBlocks for Large {
    fn block_bytes(&self) -> usize {
        Self::BYTES
    }

    fn read(&self, _: BlockId, _: usize, into: &mut [u8]) -> bool {
        into.fill(0);
        true
    }

    fn write(&self, _: BlockId, _: usize, _: &[u8]) -> bool {
        true
    }
}

/// A member that sends all the time is not down, however much it has to send.
#[test]
fn a_member_has_the_time_of_an_answer_for_a_few_blocks() {
    let record_bytes = Large::BYTES as u64 + 72;
    let memory = Arc::new(HostMemory::new(5 * (record_bytes + 256)).unwrap());
    let options_of_node = NodeOptions::new("a", record_bytes);
    let clock = Arc::new(SystemClock::new());
    let node = Arc::new(Node::new(&options_of_node, memory, clock).unwrap());
    let (_server, member) = common::serve_node(&node);
    let mut noted = options(vec![member]);
    noted.answer_max = Duration::from_secs(20);
    let transfer = Noted::default();
    let each = transfer.clone();
    noted.set_transfer(move |_| Box::new(each.clone()));
    let tier: Box<dyn LowerTier> = Box::new(RemoteTier::new(noted).unwrap());
    let mut transfers = TierTransfers::new(vec![tier], 7);
    let blocks: Vec<_> =
        (0..5).map(|at| (BlockHash::from_u128(at), BlockId::new(at as u32).unwrap())).collect();
    for (ticket, direction) in [(1, Direction::Store), (2, Direction::Load)] {
        let (ticket, group) = (TicketId(ticket), GroupId(0));
        let (tier, blocks, host) = (Tier::Third, blocks.clone(), Arc::new(Large));
        let transfer = kv_tier::Transfer { ticket, tier, group, direction, blocks };
        transfers.begin(&transfer, &(host as Arc<dyn HostBlocks>)).unwrap();
        let mut settled = Vec::new();
        until("it has ended", || {
            transfers.poll(WorkerId(0), &mut settled, &mut Vec::new());
            !settled.is_empty()
        });
        assert_eq!(settled[0].wrong, []);
    }
    let deadlines = transfer.deadlines();
    assert!(
        deadlines.len() == 3 && deadlines.is_sorted_by(|one, next| one < next),
        "{deadlines:?}"
    );
}

#[test]
fn a_transfer_that_panics_costs_a_load_and_no_debt() {
    let hosts = hosts(&["a"]);
    let mut panics = options(members(&hosts));
    panics.retry_after = Duration::ZERO;
    let turns = Arc::<AtomicU64>::default();
    panics.set_transfer(move |_| {
        assert!(turns.fetch_add(1, Ordering::Relaxed) > 0, "none is made");
        Box::new(Panics(Arc::clone(&turns)))
    });
    let (mut one, watch) = worker(panics);
    one.keep(0..10);
    // The first group's load has no transfer, and the second one's fails.
    assert_eq!(one.loads(0..4), [0_u64; 0]);
    assert_eq!(watch.stats().missed_as(Miss::Down), 4);
    // The member is told all the same what is forgotten, and goes on.
    one.forget(0..5);
    assert_eq!(one.loads(0..10), (5..10).collect::<Vec<_>>());
    assert_eq!(hosts[0].node.stats().used_slots, 5);
    no_lease_is_open(&hosts);
}

#[test]
fn a_record_of_another_format_is_a_miss() {
    let hosts = hosts(&["a"]);
    let (mut one, _) = worker(options(members(&hosts)));
    one.store(0..2);
    one.settle();
    // A node that mixes them up.
    let mut peer = common::connect(&hosts[0].member);
    let keys = common::blocks(0..1);
    let found = peer.find_and_pin(&keys, Duration::from_secs(1), common::far()).unwrap();
    let read = peer.read(&mut SocketTransfer, &found, &keys, common::far()).unwrap();
    let (key, record) = (RecordKey { format: FORMAT + 1, ..keys[0] }, read[0].clone().unwrap());
    peer.put(key, record, common::far()).unwrap();
    let (mut other, watch) = worker_of(FORMAT + 1, options(members(&hosts)));
    assert_eq!(other.loads(0..2), [0_u64; 0]);
    assert_eq!(watch.stats().missed_as(Miss::Foreign), 1);
    assert_eq!(watch.stats().missed_as(Miss::Absent), 1);
}

#[test]
fn tiers_of_any_numbers_are_made_or_refused_and_end() {
    let (_listener, member) = deaf("a");
    assert!(RemoteTier::new(options(vec![member; 65])).is_err());
    for count in [0, 1, usize::MAX] {
        for time in [Duration::ZERO, Duration::from_millis(1), Duration::MAX] {
            let nobody =
                Member { name: "b".to_owned(), address: "tcp:127.0.0.1:1".parse().unwrap() };
            for members in [Vec::new(), vec![nobody]] {
                let mut of = options(members);
                of.replicas = count;
                let times = [
                    &mut of.lease,
                    &mut of.hedge_after,
                    &mut of.wait_max,
                    &mut of.answer_max,
                    &mut of.retry_after,
                    &mut of.follow_every,
                ];
                times.into_iter().for_each(|of| *of = time);
                drop(RemoteTier::new(of).unwrap());
            }
            let mut of = options(Vec::new());
            (of.replicas, of.wait_max, of.hedge_after) = (count, time, time);
            let (mut one, _) = worker(of);
            one.store(0..2);
            one.load(2..4);
            one.settle();
            assert!(one.stored.is_empty() && one.missed.len() == 2);
        }
    }
}

#[test]
fn members_join_and_leave_and_blocks_are_found_where_they_are() {
    let hosts = hosts(&["a", "b", "c", "d"]);
    let all = members(&hosts);
    let (mut one, watch) = worker(options(all[..2].to_vec()));
    one.keep(0..30);
    assert_eq!(one.stored.len(), 30);
    // Two of four keep a block now, often others than those that have it.
    watch.set_members(&all).unwrap();
    assert_eq!(watch.members().len(), 4);
    one.load(0..30);
    one.settle();
    assert_eq!(one.loaded.len(), 30, "what is known of members is asked first");
    one.loaded.clear();
    one.keep(30..36);
    assert!(hosts[2].node.stats().used_slots > 0 && hosts[3].node.stats().used_slots > 0);
    // A member leaves: its blocks are gone, but for those that another one has.
    let others = [all[1].clone(), all[2].clone(), all[3].clone()];
    watch.set_members(&others).unwrap();
    one.load(0..30);
    one.settle();
    assert_eq!(one.loaded.len(), 30, "b has them all");
    one.loaded.clear();
    // What is forgotten meanwhile, it does not give when it is back.
    one.forget(0..10);
    one.settle();
    until("its place is free", || watch.set_members(&all).is_ok());
    until("a has forgotten", || hosts[0].node.stats().used_slots == 0);
    one.load(0..30);
    one.settle();
    let loaded: Vec<u64> = one.loaded.iter().copied().filter(|number| *number < 10).collect();
    assert_eq!(loaded, [0; 0], "forgotten");
    one.loaded.clear();
    // Nobody is left.
    watch.set_members(&[]).unwrap();
    one.load(10..40);
    one.keep(36..38);
    assert!(one.loaded.is_empty());
    // The list says a member twice, or too many.
    until("places are free", || watch.set_members(&[all[0].clone(), all[0].clone()]).is_ok());
    assert_eq!(watch.members(), all[..1]);
    let many: Vec<Member> = (0..65)
        .map(|number| Member { name: format!("{number}"), address: all[0].address.clone() })
        .collect();
    let refused = watch.set_members(&many).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::InvalidInput);
    assert_eq!(watch.members(), all[..1], "nothing has changed");
    drop(one);
    watch.set_members(&all).unwrap();
    assert!(watch.members().is_empty(), "the tier is gone");
    no_lease_is_open(&hosts);
}

#[test]
fn the_blocks_of_a_member_that_leaves_are_gone_and_its_place_is_another_ones() {
    let hosts = hosts(&["a", "b", "c"]);
    let all = members(&hosts);
    let mut few = options(all[..2].to_vec());
    few.replicas = 1;
    // What is stored is known before members are asked for the first time what they have.
    few.follow_every = Duration::from_millis(30);
    let (mut one, watch) = worker(few);
    one.store(0..30);
    one.settle();
    let on_a = |number: &u64| replicas(&all[..2], common::pair(*number), 1) == [0];
    let expected: BTreeSet<u64> = (0..30).filter(on_a).collect();
    watch.set_members(&[all[1].clone(), all[2].clone()]).unwrap();
    until("they are gone", || {
        one.poll();
        one.dropped.iter().copied().collect::<BTreeSet<_>>() == expected
    });
    // Whoever stays is asked for the first time what it has, and none of it is dropped.
    hosts[1].node.put(common::block(50), &[9; 90]).unwrap();
    until("the member that stays was asked", || {
        one.poll();
        one.gained.contains(&50)
    });
    assert_eq!(one.dropped.iter().copied().collect::<BTreeSet<_>>(), expected);
    // Those of the others are there, and what is stored now as well, whoever has the place.
    one.keep(30..40);
    assert_eq!(one.loads(30..40), (30..40).collect::<Vec<_>>());
    assert_eq!(one.loads((0..30).filter(|of| !expected.contains(of))).len(), 30 - expected.len());
    no_lease_is_open(&hosts);
}

#[test]
fn a_member_that_left_with_debts_is_told_when_it_is_back() {
    let mut hosts = hosts(&["a", "b"]);
    let all = members(&hosts);
    let mut few = options(all.clone());
    few.replicas = 1;
    let (mut one, watch) = worker(few);
    one.keep(0..20);
    let kept = hosts[0].node.stats().used_slots;
    assert!(kept > 0);
    // It is down when blocks are forgotten, and leaves so.
    hosts[0].stop();
    one.forget(0..20);
    one.settle();
    watch.set_members(&all[1..]).unwrap();
    hosts[0].start();
    // The address may be another one.
    let back = members(&hosts);
    until("it is back", || watch.set_members(&back).is_ok());
    until("it has forgotten", || hosts[0].node.stats().used_slots == 0);
    one.load(0..20);
    one.settle();
    assert!(one.loaded.is_empty());
}

/// Two hosts store, load and forget while members die and come back.
fn run_chaos(seed: u64) -> u64 {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| Address::Unix(folder.path().join(name));
    let mut hosts: Vec<Host> =
        ["a", "b", "c"].iter().map(|name| Host::new(name, path(name))).collect();
    let (mut one, list) = worker(options(members(&hosts)));
    let (mut two, _) = worker(options(members(&hosts)));
    let all = members(&hosts);
    let mut state = seed;
    let mut loaded = 0;
    for _ in 0..40 {
        let first = random(&mut state) % 28;
        let worker = if random(&mut state).is_multiple_of(2) { &mut one } else { &mut two };
        match random(&mut state) % 9 {
            8 => {
                // One of the hosts has another list for a while; a place may not be free yet.
                let left = (random(&mut state) % 4) as usize;
                let some = all.iter().enumerate().filter(|(at, _)| *at != left);
                drop(list.set_members(&some.map(|(_, of)| of.clone()).collect::<Vec<_>>()));
            }
            0..=2 => worker.store(first..first + 4),
            3..=5 => worker.load(first..first + 8),
            6 => worker.forget([first]),
            _ => {
                let host = &mut hosts[(first % 3) as usize];
                match host.server {
                    Some(_) => host.stop(),
                    None => host.start(),
                }
            }
        }
        // A worker neither loads nor stores what it is storing.
        if random(&mut state).is_multiple_of(4) {
            let worker = if random(&mut state).is_multiple_of(2) { &mut one } else { &mut two };
            worker.poll();
        } else {
            one.settle();
            two.settle();
        }
        loaded += one.loaded.len() + two.loaded.len();
        one.loaded.clear();
        two.loaded.clear();
        one.settle();
        two.settle();
    }
    no_lease_is_open(&hosts);
    for host in &hosts {
        host.node.pool().check_integrity().unwrap();
        let stats = host.node.stats();
        assert_eq!(host.node.pool().claimable() as u64, stats.slots, "seed {seed}: a slot is lost");
    }
    loaded as u64
}

#[test]
fn hosts_go_on_while_members_die_and_come_back() {
    let (seeds, first) = (number_of("KV_REMOTE_CHAOS", 3), number_of("KV_REMOTE_SEED", 1));
    let mut loaded = 0;
    for seed in first..first + seeds {
        let ran = std::panic::catch_unwind(|| run_chaos(seed));
        assert!(ran.is_ok(), "seed {seed}");
        loaded += ran.unwrap_or(0);
    }
    println!("{loaded} blocks loaded");
    assert!(loaded > 0);
}
