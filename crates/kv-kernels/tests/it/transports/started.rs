//! Transfers whose host's end has an order of its own, and sequences of them.

use cuda_driver::{DeviceBuffer, PinnedBuffer, Stream};
use cuda_sim::Pace;
use kv_kernels::{
    Direction, KernelError, Slot,
    link::{
        HostArrival, HostLink, HostLinkOptions, HostReady, HostTransfer, LayerEvents, Transport,
        TransportError,
    },
};

use super::machine::{BLOCKS, BOTH, Case, Machine, OFFSET, Scene};

const SEEDS: u64 = 16;

/// Several chunks over the same pages, each of its own slots, in one pinned buffer.
struct Sequence {
    scene: Scene,
    chunks: Vec<(Vec<Slot>, DeviceBuffer, u64)>,
}

impl Sequence {
    /// The first chunks are short, so that several fit in a slot of the ring.
    fn new(machine: &Machine, direction: Direction) -> Self {
        let lengths = [2, 1, 0, 3, 9, 1, 4];
        let case = Case::plain(direction);
        let scene = Scene::new(machine, &case);
        let mut left = &case.slots[..];
        let mut chunks = Vec::new();
        let mut token = 0;
        for length in lengths {
            let (slots, rest) = left.split_at(length);
            left = rest;
            let padded = [slots, &[Slot::NONE]].concat();
            let place = OFFSET + token * case.shape.token_bytes();
            chunks.push((slots.to_vec(), machine.upload(&padded), place));
            token += length as u64;
        }
        assert!(left.is_empty());
        Self { scene, chunks }
    }

    fn transfers(&self) -> Vec<HostTransfer<'_>> {
        let whole = self.scene.transfer(None);
        let one = |(slots, mapping, place): &'_ (Vec<Slot>, DeviceBuffer, u64)| {
            (slots.len() as u64, mapping.span(), *place)
        };
        self.chunks
            .iter()
            .map(|chunk| {
                let (tokens, slot_mapping, host_offset) = one(chunk);
                HostTransfer { slot_mapping, host_slots: &chunk.0, tokens, host_offset, ..whole }
            })
            .collect()
    }

    /// The pages, and the pinned memory, that chunk after chunk must give.
    fn expected(&self, machine: &Machine) -> (Vec<u8>, Vec<u8>) {
        let twin = Scene::new(machine, &self.scene.case);
        let mut host = vec![0; twin.host_after.len()];
        twin.host.read_at(0, &mut host).unwrap();
        for transfer in self.transfers() {
            let bytes = transfer.tokens * twin.case.shape.token_bytes();
            let at = transfer.host_offset as usize..(transfer.host_offset + bytes) as usize;
            let chunk = machine.upload(&[&host[at.clone()], &[0_u8]].concat());
            let chunk = chunk.span().slice(0, bytes).unwrap();
            let one = kv_kernels::Transfer {
                chunk,
                slot_mapping: transfer.slot_mapping,
                host_slots: transfer.host_slots,
                tokens: transfer.tokens,
                skip_prefix_n_tokens: 0,
                direction: transfer.direction,
                num_blocks: BLOCKS,
            };
            machine.kernels.multi_layer_transfer(&machine.stream, &twin.paged, one).unwrap();
            machine.stream.download(&mut host[at], chunk).unwrap();
        }
        let mut pages = vec![0; twin.pages_after.len()];
        machine.stream.download(&mut pages, twin.pages.span()).unwrap();
        (pages, host)
    }

    fn found(&self, machine: &Machine) -> (Vec<u8>, Vec<u8>) {
        let mut pages = vec![0; self.scene.pages_after.len()];
        machine.stream.download(&mut pages, self.scene.pages.span()).unwrap();
        let mut host = vec![0; self.scene.host_after.len()];
        self.scene.host.read_at(0, &mut host).unwrap();
        (pages, host)
    }
}

#[test]
fn a_sequence_gives_what_its_chunks_give() {
    for seed in 0..SEEDS {
        for transport in Transport::ALL {
            for direction in BOTH {
                for is_started in [false, true] {
                    let machine = Machine::new(seed);
                    let mut link = machine.link(transport);
                    let sequence = Sequence::new(&machine, direction);
                    let expected = sequence.expected(&machine);
                    let transfers = sequence.transfers();
                    let stream = &machine.stream;
                    if is_started {
                        let now = HostReady::Now;
                        let arrival = link.start_chunks(stream, now, &transfers).unwrap();
                        assert_eq!(arrival.transport(), transport);
                        assert_eq!(arrival.bytes(), 20 * 64 * 6);
                        arrival.fence().wait().unwrap();
                        assert_eq!(arrival.fence().is_complete(), Ok(true));
                    } else {
                        assert_eq!(link.transfer_chunks(stream, &transfers), Ok(transport));
                    }
                    let is_same = sequence.found(&machine) == expected;
                    assert!(is_same, "{transport} {direction:?} {is_started}, seed {seed}");
                    machine.assert_clean();
                }
            }
        }
    }
}

#[test]
fn short_chunks_share_a_piece() {
    let machine = Machine::new(1);
    let sequence = Sequence::new(&machine, Direction::PagedToChunk);
    let options = HostLinkOptions {
        ring_buffers: 2,
        ring_buffer_bytes: 8 << 10,
        ..HostLinkOptions::default()
    };
    let mut link = machine.link_with(Transport::TwoHop, options);
    let launches = || machine.sim.calls()["cuLaunchKernel"];
    let before = launches();
    let transfers = sequence.transfers();
    let _ = link.start_chunks(&machine.stream, HostReady::Now, &transfers).unwrap();
    // 7,680 bytes of six chunks that are not empty: a piece with half of a slot ends with a chunk.
    assert_eq!(launches() - before, 2);
    machine.stream.synchronize().unwrap();
}

#[test]
fn nothing_to_move_is_an_arrival_too() {
    let machine = Machine::new(1);
    for transport in Transport::ALL {
        let mut link = machine.link(transport);
        let empty = link.start_chunks(&machine.stream, HostReady::Now, &[]).unwrap();
        empty.fence().wait().unwrap();
        assert_eq!(empty.bytes(), 0);
        for direction in BOTH {
            let mut case = Case::plain(direction);
            case.skip = 20;
            let scene = Scene::new(&machine, &case);
            let events = LayerEvents::new(&machine.device, 3).unwrap();
            let transfers = [scene.transfer(Some(&events)), scene.transfer(None)];
            let arrival = link.start_chunks(&machine.stream, HostReady::InStream, &transfers[..1]);
            arrival.unwrap().fence().wait().unwrap();
            assert!(events.event(2).unwrap().is_complete().unwrap());
            assert!(scene.is_done(&machine.stream));
        }
    }
}

#[test]
fn the_stream_goes_on_while_bytes_travel_to_the_host() {
    let mut early = 0;
    for seed in 0..SEEDS {
        let machine = Machine::new(seed);
        machine.sim.set_pace(Pace::Random);
        let options = HostLinkOptions {
            ring_buffers: 4,
            ring_buffer_bytes: 8 << 10,
            ..HostLinkOptions::default()
        };
        let mut link = machine.link_with(Transport::TwoHop, options);
        let scene = Scene::new(&machine, &Case::plain(Direction::PagedToChunk));
        let transfers = [scene.transfer(None)];
        let arrival = link.start_chunks(&machine.stream, HostReady::Now, &transfers).unwrap();
        // Pages may be overwritten in the order of the stream, although not all has arrived.
        machine.stream.fill(scene.pages.span(), 0xDD).unwrap();
        machine.stream.synchronize().unwrap();
        early += usize::from(!arrival.fence().is_complete().unwrap());
        arrival.fence().wait().unwrap();
        let mut host = vec![0; scene.host_after.len()];
        scene.host.read_at(0, &mut host).unwrap();
        assert!(host == scene.host_after, "seed {seed}");
        machine.assert_clean();
    }
    assert!(early > 2, "the stream went on early in {early} of {SEEDS} seeds");
}

#[test]
fn bytes_are_fetched_while_the_stream_still_works() {
    let fetched = |ready: HostReady<'_>| {
        let machine = Machine::new(5);
        // The late write is ordered by nothing, on purpose.
        machine.sim.set_race_check(cuda_sim::RaceCheck::Off);
        let options = HostLinkOptions {
            ring_buffers: 4,
            ring_buffer_bytes: 8 << 10,
            ..HostLinkOptions::default()
        };
        let mut link = machine.link_with(Transport::TwoHop, options);
        let mut scene = Scene::new(&machine, &Case::plain(Direction::ChunkToPaged));
        machine.sim.hold(machine.stream.raw());
        let arrival = {
            let transfers = [scene.transfer(None)];
            link.start_chunks(&machine.stream, ready, &transfers).unwrap()
        };
        machine.sim.run_all();
        // What is written now is too late for a transfer that has fetched its bytes.
        scene.host.write_at(0, &vec![0xEE; scene.host_after.len()]).unwrap();
        machine.sim.release_hold(machine.stream.raw());
        arrival.fence().wait().unwrap();
        let mut pages = vec![0; scene.pages_after.len()];
        machine.stream.download(&mut pages, scene.pages.span()).unwrap();
        pages == scene.pages_after
    };
    assert!(fetched(HostReady::Now));
    assert!(!fetched(HostReady::InStream), "the test would not notice");
}

/// One after the other, down and up over the same chunk, each told of the last.
#[test]
fn transfers_that_are_started_one_behind_the_other_keep_their_order() {
    for seed in 0..SEEDS {
        for transport in Transport::ALL {
            let machine = Machine::new(seed);
            let mut link = machine.link(transport);
            let scene = Scene::new(&machine, &Case::plain(Direction::PagedToChunk));
            let streams = [machine.stream.clone(), Stream::new(&machine.device).unwrap()];
            let mut pages = vec![0; scene.pages_after.len()];
            machine.stream.download(&mut pages, scene.pages.span()).unwrap();
            let mut last: Option<HostArrival> = None;
            for round in 0..6 {
                let direction = BOTH[round % 2];
                let transfer = HostTransfer { direction, ..scene.transfer(None) };
                let stream = &streams[round / 2 % 2];
                let ready = match &last {
                    Some(arrival) => {
                        // The pages' order is the streams'.
                        arrival.fence().hold_back(stream).unwrap();
                        HostReady::After(arrival.fence())
                    }
                    None => HostReady::Now,
                };
                last = Some(link.start_chunks(stream, ready, &[transfer]).unwrap());
            }
            last.unwrap().fence().wait().unwrap();
            let (mut seen, mut host) = (vec![0; pages.len()], vec![0; scene.host_after.len()]);
            machine.stream.download(&mut seen, scene.pages.span()).unwrap();
            scene.host.read_at(0, &mut host).unwrap();
            assert!(seen == pages && host == scene.host_after, "{transport}, seed {seed}");
            machine.assert_clean();
        }
    }
}

#[test]
fn an_arrival_is_its_own_transfers_however_many_are_held() {
    let machine = Machine::new(2);
    let mut link = machine.link(Transport::TwoHop);
    let scene = Scene::new(&machine, &Case::plain(Direction::PagedToChunk));
    let start = |link: &mut HostLink| {
        link.start_chunks(&machine.stream, HostReady::Now, &[scene.transfer(None)]).unwrap()
    };
    let held: Vec<HostArrival> = (0..70).map(|_| start(&mut link)).collect();
    held.last().unwrap().fence().wait().unwrap();
    let is_over = |arrival: &HostArrival| arrival.fence().is_complete().unwrap();
    machine.sim.hold(machine.stream.raw());
    let later = start(&mut link);
    assert!(held.iter().all(is_over) && !is_over(&later), "nobody's event is anybody else's");
    machine.sim.release_hold(machine.stream.raw());
    drop((held, later));
    let made = machine.counts.calls().into_iter().find(|call| call.0 == "cuEventCreate");
    for _ in 0..70 {
        drop(start(&mut link));
    }
    let later = machine.counts.calls().into_iter().find(|call| call.0 == "cuEventCreate");
    assert_eq!(made, later, "events are used again");
    machine.stream.synchronize().unwrap();
}

#[test]
fn what_does_not_belong_in_a_sequence_is_refused_and_nothing_is_enqueued() {
    let machine = Machine::new(3);
    let mut link = machine.link(Transport::TwoHop);
    let scene = Scene::new(&machine, &Case::plain(Direction::PagedToChunk));
    let good = scene.transfer(None);
    let apart: PinnedBuffer = machine.pinned(&vec![0; scene.host_after.len()]);
    let other = HostTransfer { host: &apart, ..good };
    let launches = machine.sim.calls().get("cuLaunchKernel").copied();
    let mut refused = |transfers: &[HostTransfer<'_>]| {
        let strict = link.transfer_chunks(&machine.stream, transfers).unwrap_err();
        let started = link.start_chunks(&machine.stream, HostReady::Now, transfers).unwrap_err();
        assert_eq!(strict, started);
        strict
    };
    let up = HostTransfer { direction: Direction::ChunkToPaged, ..other };
    assert_eq!(refused(&[good, other, up]), TransportError::Directions { index: 2 });
    let near = HostTransfer { host_offset: OFFSET + 16, ..good };
    assert_eq!(
        refused(&[near, other, good]),
        TransportError::ChunksOverlap { first: 0, second: 2 }
    );
    let short = HostTransfer { tokens: 19, ..other };
    let TransportError::InSequence { index: 1, error } = refused(&[good, short]) else {
        panic!("another error");
    };
    assert_eq!(error.to_string(), "a slot mapping has 20 slots for 19 tokens");
    assert_eq!(machine.sim.calls().get("cuLaunchKernel").copied(), launches);
    let up = HostTransfer { direction: Direction::ChunkToPaged, ..good };
    let TransportError::Kernel(KernelError::StoredTwice { chunk: 1, first_chunk: 0, .. }) =
        refused(&[up, up])
    else {
        panic!("another error");
    };
    assert_eq!(machine.sim.calls().get("cuLaunchKernel").copied(), launches);
    // To the pages, chunks are only read: they may be the same, where their tokens go to other slots.
    let [early, late] =
        [|token| token < 11, |token| token >= 11].map(|moves: fn(usize) -> bool| {
            let slots = scene.case.slots.iter().enumerate();
            slots
                .map(|(token, &slot)| if moves(token) { slot } else { Slot::NONE })
                .collect::<Vec<_>>()
        });
    let on_device = [machine.upload(&early), machine.upload(&late)];
    let half = |host_slots, slots: &DeviceBuffer| HostTransfer {
        host_slots,
        slot_mapping: slots.span(),
        ..up
    };
    let halves = [half(&early, &on_device[0]), half(&late, &on_device[1])];
    assert!(link.transfer_chunks(&machine.stream, &halves).is_ok());
    machine.stream.synchronize().unwrap();
}

#[test]
fn starting_a_transfer_neither_allocates_nor_waits() {
    for transport in Transport::ALL {
        let machine = Machine::new(3);
        let mut link = machine.link(transport);
        let scenes = BOTH.map(|direction| Scene::new(&machine, &Case::plain(direction)));
        let forbidden = |machine: &Machine| -> Vec<(&'static str, u64)> {
            // It may ask whether the last one has arrived, which is no wait.
            let names = ["Synchronize", "StreamQuery", "Alloc", "Create", "Free"];
            let calls = machine.counts.calls().into_iter();
            calls.filter(|(call, _)| names.iter().any(|name| call.contains(name))).collect()
        };
        let before = forbidden(&machine);
        for scene in &scenes {
            let transfers = [scene.transfer(None)];
            let _ = link.start_chunks(&machine.stream, HostReady::InStream, &transfers).unwrap();
        }
        assert_eq!(forbidden(&machine), before, "{transport}");
        machine.stream.synchronize().unwrap();
    }
}
