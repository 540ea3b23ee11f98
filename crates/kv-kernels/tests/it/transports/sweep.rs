//! Every driver call that a transfer makes, failed once, with the device as far behind as is legal and
//! the host none, one and two transfers ahead.

use std::collections::BTreeMap;

use cuda_driver::{CountingDriver, Device, Driver, ErrorCode, Stream};
use cuda_sim::{Pace, SimConfig, SimDriver};
use kv_kernels::{
    BlockPair, KvKernels, PagedLayout,
    link::{
        HostArrival, HostLink, HostLinkOptions, HostReady, LayerEvents, MeasureOptions, Transport,
        TransportError, TransportProfile,
    },
    references,
};

use super::blocks::{Scene as BlockScene, copy_of, pairs};
use super::machine::{BOTH, Case, Machine, Scene};

type Calls = BTreeMap<&'static str, u64>;

/// The calls since `before`, by name.
fn since(machine: &Machine, before: &Calls) -> Calls {
    let calls = machine.sim.calls().into_iter();
    calls
        .map(|(call, count)| (call, count - before.get(call).copied().unwrap_or(0)))
        .filter(|(_, count)| *count > 0)
        .collect()
}

/// One transfer that can be asked for, and what it must give.
trait Moving {
    /// Enqueues it; the arrival of one that is only started.
    fn start(
        &self,
        machine: &Machine,
        link: &mut HostLink,
    ) -> Result<Option<HostArrival>, TransportError>;

    /// Whether all bytes are right, after the stream's work.
    fn is_right(&self, machine: &Machine) -> bool;

    /// All bytes that may be written.
    fn bytes(&self, machine: &Machine) -> (Vec<u8>, Vec<u8>);
}

struct MovingChunk {
    scene: Scene,
    events: LayerEvents,
    is_started: bool,
}

impl Moving for MovingChunk {
    fn start(
        &self,
        machine: &Machine,
        link: &mut HostLink,
    ) -> Result<Option<HostArrival>, TransportError> {
        let transfer = self.scene.transfer(Some(&self.events));
        if self.is_started {
            return link.start_chunks(&machine.stream, HostReady::InStream, &[transfer]).map(Some);
        }
        link.transfer_chunk(&machine.stream, transfer).map(|_| None)
    }

    fn is_right(&self, machine: &Machine) -> bool {
        self.scene.is_done(&machine.stream)
    }

    fn bytes(&self, machine: &Machine) -> (Vec<u8>, Vec<u8>) {
        let mut pages = vec![0; self.scene.pages_after.len()];
        machine.stream.download(&mut pages, self.scene.pages.span()).unwrap();
        let mut host = vec![0; self.scene.host_after.len()];
        self.scene.host.read_at(0, &mut host).unwrap();
        (pages, host)
    }
}

struct MovingBlocks {
    scene: BlockScene,
    table: cuda_driver::DeviceBuffer,
    list: Vec<BlockPair>,
    to_host: bool,
    is_started: bool,
    right: (Vec<u8>, Vec<u8>),
}

impl MovingBlocks {
    fn new(machine: &Machine, to_host: bool, is_started: bool) -> Self {
        let list: Vec<_> = (0..9).map(|i| (i * 5 % 24, i + 12)).collect();
        let turned: Vec<_> = list.iter().map(|&(a, b)| (b, a)).collect();
        let list = pairs(if to_host { &list } else { &turned });
        let table = machine.upload(&list);
        let expected = BlockScene::new(machine, PagedLayout::block_major);
        let copy = copy_of(&expected, to_host, &table, &list);
        machine.kernels.copy_blocks(&machine.stream, copy).unwrap();
        machine.stream.synchronize().unwrap();
        let right = expected.bytes(machine);
        let scene = BlockScene::new(machine, PagedLayout::block_major);
        Self { scene, table, list, to_host, is_started, right }
    }
}

impl Moving for MovingBlocks {
    fn start(
        &self,
        machine: &Machine,
        link: &mut HostLink,
    ) -> Result<Option<HostArrival>, TransportError> {
        let copy = copy_of(&self.scene, self.to_host, &self.table, &self.list);
        if self.is_started {
            return link.start_blocks(&machine.stream, HostReady::InStream, copy).map(Some);
        }
        link.copy_blocks(&machine.stream, copy).map(|_| None)
    }

    fn is_right(&self, machine: &Machine) -> bool {
        self.scene.bytes(machine) == self.right
    }

    fn bytes(&self, machine: &Machine) -> (Vec<u8>, Vec<u8>) {
        self.scene.bytes(machine)
    }
}

/// What moves in a run.
#[derive(Clone, Copy, Debug)]
struct What {
    transport: Transport,
    to_host: bool,
    is_started: bool,
    blocks: bool,
}

impl What {
    fn make(self, machine: &Machine, to_host: bool) -> Box<dyn Moving> {
        if self.blocks {
            return Box::new(MovingBlocks::new(machine, to_host, self.is_started));
        }
        let direction = BOTH[usize::from(!to_host)];
        let scene = Scene::new(machine, &Case::plain(direction));
        let events = LayerEvents::new(&machine.device, 3).unwrap();
        Box::new(MovingChunk { scene, events, is_started: self.is_started })
    }

    fn all() -> impl Iterator<Item = Self> {
        let transports = Transport::ALL.into_iter();
        let both =
            transports.flat_map(|transport| [true, false].map(|to_host| (transport, to_host)));
        both.flat_map(|(transport, to_host)| {
            [(false, false), (false, true), (true, false), (true, true)]
                .map(|(is_started, blocks)| Self { transport, to_host, is_started, blocks })
        })
    }
}

/// Waits as often as orders to fail that are still open make it fail.
fn patiently(mut wait: impl FnMut() -> bool) {
    assert!((0..12).any(|_| wait()), "never over");
}

/// One transfer behind `ahead` others that nothing has waited for, with faults in it: the calls it made,
/// and its answer.
fn run(
    what: What,
    ahead: usize,
    faults: &[(&'static str, u64)],
) -> (Calls, Result<(), TransportError>) {
    let context = format!("{what:?}, {ahead} ahead, {faults:?}");
    let machine = Machine::new(1);
    let options =
        HostLinkOptions { ring_buffers: 2, ring_buffer_bytes: 2048, ..HostLinkOptions::default() };
    let mut link = machine.link_with(what.transport, options);
    let earlier: Vec<_> =
        (0..ahead).map(|n| what.make(&machine, what.to_host == (n % 2 == 1))).collect();
    let (moving, again) = (what.make(&machine, what.to_host), what.make(&machine, what.to_host));
    machine.stream.synchronize().unwrap();
    machine.sim.set_pace(Pace::Slowest);
    let arrivals: Vec<_> =
        earlier.iter().map(|moving| moving.start(&machine, &mut link).unwrap()).collect();
    let before = machine.sim.calls();
    for &(call, nth) in faults {
        machine.sim.fail_nth(call, nth, ErrorCode::OUT_OF_MEMORY);
    }
    let answer = moving.start(&machine, &mut link);
    let made = since(&machine, &before);
    match &answer {
        Ok(arrival) => {
            patiently(|| machine.stream.synchronize().is_ok());
            if let Some(arrival) = arrival {
                patiently(|| arrival.fence().wait().is_ok());
            }
            assert!(moving.is_right(&machine), "{context}: wrong bytes");
        }
        Err(error) => {
            // Where the stream is over, or the device if the stream does not wait, all of it is.
            let unordered = matches!(error, TransportError::Unordered { .. });
            patiently(|| match unordered {
                true => machine.device.synchronize().is_ok(),
                false => machine.stream.synchronize().is_ok(),
            });
            // Orders to fail waits that are still open are used up on a stream without work.
            let idle = Stream::new(&machine.device).unwrap();
            faults.iter().for_each(|_| {
                let _ = idle.synchronize();
            });
            let seen = moving.bytes(&machine);
            machine.sim.run_all();
            assert!(moving.bytes(&machine) == seen, "{context}: work was left behind");
            let mut arrival = None;
            patiently(|| match again.start(&machine, &mut link) {
                Ok(started) => {
                    arrival = started;
                    true
                }
                Err(_) => false,
            });
            patiently(|| machine.stream.synchronize().is_ok());
            if let Some(arrival) = arrival {
                patiently(|| arrival.fence().wait().is_ok());
            }
            assert!(again.is_right(&machine), "{context}: the next transfer is wrong");
        }
    }
    for (earlier, arrival) in earlier.iter().zip(&arrivals) {
        if let Some(arrival) = arrival {
            arrival.fence().wait().unwrap();
        }
        assert!(earlier.is_right(&machine), "{context}: an earlier transfer is wrong");
    }
    assert_eq!(machine.device.poison(), None, "{context}");
    machine.assert_clean();
    drop((link, earlier, moving, again, arrivals));
    let answer = answer.map(drop);
    let sim = machine.sim.clone();
    drop(machine);
    let leaks = sim.check_leaks();
    assert!(leaks.is_clean(), "{context}: {leaks}");
    (made, answer)
}

#[test]
fn every_call_may_fail_once_with_the_device_behind() {
    let mut failed = 0;
    for what in What::all() {
        for ahead in 0..=2 {
            let (calls, answer) = run(what, ahead, &[]);
            assert_eq!(answer, Ok(()), "{what:?}");
            for (call, count) in calls {
                for nth in 1..=count {
                    failed += usize::from(run(what, ahead, &[(call, nth)]).1.is_err());
                }
            }
        }
    }
    assert!(failed > 2000, "only {failed} transfers failed");
}

/// What follows a refusal is refused too: the host waits, however often it must ask; and where no wait is
/// granted, the error says so and the next transfer waits.
#[test]
fn a_refusal_after_which_nothing_can_be_ordered_says_so() {
    for what in What::all().filter(|what| what.transport == Transport::TwoHop) {
        for ahead in 0..=2 {
            let nth = run(what, ahead, &[]).0["cuStreamWaitEvent"];
            // The last wait of the transfer, then the record that would join the streams.
            let records = run(what, ahead, &[("cuStreamWaitEvent", nth)]).0["cuEventRecord"];
            for refused in [0, 1, 3, 4, 8, 12] {
                let mut faults = vec![("cuStreamWaitEvent", nth)];
                faults.extend((0..3).map(|n| ("cuEventRecord", records.saturating_sub(2) + n)));
                faults.extend((0..3).map(|n| ("cuStreamWaitEvent", nth + 1 + n)));
                faults.extend((1..=refused).map(|nth| ("cuStreamSynchronize", nth)));
                let answer = run(what, ahead, &faults).1.unwrap_err();
                let unordered = matches!(answer, TransportError::Unordered { .. });
                assert_eq!(
                    unordered,
                    refused >= 4,
                    "{what:?}, {refused} waits refused: {answer:?}"
                );
            }
        }
    }
}

/// After such an error the next transfer of the link, of chunks or of blocks and by any way, begins with a
/// wait for the device: what the refused one has enqueued is then over, and writes neither into the ring
/// nor into the host's memory any more.
#[test]
fn a_link_waits_for_what_nothing_orders_before_it_goes_on() {
    let cases = [false, true].map(|blocks| Transport::ALL.map(|then| (blocks, then)));
    for (blocks, then) in cases.into_iter().flatten() {
        let context = format!("blocks {blocks}, then {then:?}");
        let machine = Machine::new(1);
        let mut link = machine.link(Transport::TwoHop);
        let what = What { transport: Transport::TwoHop, to_host: true, is_started: false, blocks };
        let [refused, next] = [0, 1].map(|_| what.make(&machine, true));
        machine.stream.synchronize().unwrap();
        machine.sim.set_pace(Pace::Slowest);
        // The third record is refused, then those that would order what went before it, and all waits.
        for nth in 3..6 {
            machine.sim.fail_nth("cuEventRecord", nth, ErrorCode::OUT_OF_MEMORY);
        }
        for nth in 1..=8 {
            machine.sim.fail_nth("cuStreamSynchronize", nth, ErrorCode::OUT_OF_MEMORY);
        }
        let error = refused.start(&machine, &mut link).unwrap_err();
        assert!(matches!(error, TransportError::Unordered { .. }), "{error:?}");
        let idle = Stream::new(&machine.device).unwrap();
        (0..8).for_each(|_| {
            let _ = idle.synchronize();
        });
        let event = cuda_driver::Event::new(&machine.device).unwrap();
        (0..3).for_each(|_| {
            let _ = event.record(&idle);
        });
        let waits = || machine.sim.calls().get("cuCtxSynchronize").copied().unwrap_or(0);
        let before = waits();
        let profile = link.profile().clone().forced(then);
        let mut link = link.with_profile(profile);
        next.start(&machine, &mut link).unwrap();
        assert_eq!(waits(), before + 1, "{context}");
        machine.stream.synchronize().unwrap();
        assert!(next.is_right(&machine), "{context}");
        // Once is enough.
        next.start(&machine, &mut link).unwrap();
        assert_eq!(waits(), before + 1, "{context}");
        machine.stream.synchronize().unwrap();
        machine.assert_clean();
    }
}

/// What is made of a device gives everything back, whichever call of its making fails.
#[test]
fn nothing_leaks_where_a_constructor_fails() {
    type Make = fn(&Device, &SimDriver) -> bool;
    let makes: [Make; 4] = [
        |device, _| KvKernels::load(device).is_ok(),
        |device, _| LayerEvents::new(device, 3).is_ok(),
        |device, _| {
            let Ok(kernels) = KvKernels::load(device) else { return false };
            HostLink::new(kernels.into(), HostLinkOptions::default()).is_ok()
        },
        |device, _| {
            let Ok(kernels) = KvKernels::load(device) else { return false };
            let options = MeasureOptions { bytes: 1 << 20, rounds: 1, ..MeasureOptions::default() };
            TransportProfile::measure(&kernels.into(), &options).is_ok()
        },
    ];
    for (which, make) in makes.into_iter().enumerate() {
        let run = |fault: Option<(&'static str, u64)>| {
            let sim = SimDriver::new(SimConfig::default()).unwrap();
            sim.register_kernels(references());
            sim.set_pace(Pace::Slowest);
            let counts: std::sync::Arc<dyn Driver> =
                std::sync::Arc::new(CountingDriver::new(std::sync::Arc::new(sim.clone())));
            let device = Device::open(counts, 0).unwrap();
            let before = sim.calls();
            if let Some((call, nth)) = fault {
                sim.fail_nth(call, nth, ErrorCode::OUT_OF_MEMORY);
            }
            let is_made = make(&device, &sim);
            let calls = sim.calls();
            let made: Calls = calls
                .into_iter()
                .map(|(call, count)| (call, count - before.get(call).copied().unwrap_or(0)))
                .filter(|(_, count)| *count > 0)
                .collect();
            assert_eq!(device.poison(), None, "{which}, {fault:?}");
            drop(device);
            assert!(sim.findings().is_empty(), "{which}, {fault:?}: {:?}", sim.findings());
            let leaks = sim.check_leaks();
            assert!(leaks.is_clean(), "{which}, {fault:?}: {leaks}");
            (made, is_made)
        };
        let (calls, is_made) = run(None);
        assert!(is_made, "{which}");
        let mut failed = 0;
        // What gives back, and the binding of a context around it, is the driver crate's to get right.
        let gives_back = |call: &str| {
            ["Ctx", "Destroy", "Free", "Unload"].iter().any(|part| call.contains(part))
        };
        for (call, count) in calls.into_iter().filter(|(call, _)| !gives_back(call)) {
            // Of those made very often, some of each.
            for nth in (1..=count).step_by((count as usize / 8).max(1)) {
                failed += usize::from(!run(Some((call, nth))).1);
            }
        }
        assert!(failed > 2, "{which}: {failed}");
    }
}

/// A host one transfer ahead of a device that does nothing until it is waited for: a step makes as many
/// calls after 100,000 as after 100, and no event, stream or memory is added.
#[test]
fn a_long_run_asks_for_no_more_than_a_short_one() {
    for transport in [Transport::CopyEngine, Transport::TwoHop] {
        let machine = Machine::new(3);
        let mut link = machine.link(transport);
        let scenes = BOTH.map(|direction| {
            Scene::new(&machine, &Case::new((1, 1, 16, 4), &[5, 9], 0, direction))
        });
        machine.sim.set_pace(Pace::Slowest);
        let mut last: Option<HostArrival> = None;
        let mut steps = |count: usize| {
            let before = machine.sim.calls();
            for n in 0..count {
                let transfers = [scenes[n % 2].transfer(None)];
                let ready = match &last {
                    Some(arrival) => HostReady::After(arrival.fence()),
                    None => HostReady::InStream,
                };
                let next = link.start_chunks(&machine.stream, ready, &transfers).unwrap();
                if let Some(last) = last.replace(next) {
                    last.fence().wait().unwrap();
                }
            }
            since(&machine, &before)
        };
        steps(100);
        let early = steps(100);
        steps(100_000 - 300);
        let late = steps(100);
        assert_eq!(early, late, "{transport}");
        for call in ["cuEventCreate", "cuStreamCreate", "cuMemAlloc", "cuMemHostAlloc"] {
            assert_eq!(late.get(call), None, "{transport}");
        }
        last.unwrap().fence().wait().unwrap();
        machine.assert_clean();
    }
}
