//! Every transport gives the same bytes, for every kind of transfer.

use kv_kernels::{
    Direction, KvFormat, PagedLayout, Slot,
    layout::FormatOptions,
    link::{HostLinkOptions, LayerEvents, Transport, TransportError},
};

use super::machine::{BLOCKS, BOTH, Case, Machine, Scene};

fn cases(direction: Direction) -> Vec<Case> {
    let slots: Vec<i64> = (4..40).rev().collect();
    let holes: Vec<i64> = (0..30).map(|t| if t % 7 == 3 { -1 } else { t }).collect();
    let mut cases = vec![
        Case::plain(direction),
        Case::new((3, 2, 64, 4), &slots, 0, direction),
        Case::new((3, 2, 64, 4), &slots, 5, direction),
        Case::new((2, 2, 16, 4), &holes, 0, direction),
        Case::new((2, 2, 16, 4), &holes, 4, direction),
        // Rows of odd lengths, one tensor a layer, one token, one layer.
        Case::new((4, 1, 132, 16), &slots, 1, direction),
        Case::new((2, 2, 7, 5), &slots, 0, direction),
        Case::new((5, 2, 32, 8), &[9], 0, direction),
        Case::new((1, 1, 1024, 4), &slots, 3, direction),
        // Nothing that moves: all skipped, all without a slot, no token.
        Case::new((3, 2, 64, 4), &slots, 36, direction),
        Case::new((3, 2, 64, 4), &[-1, -1, -1], 0, direction),
        // A row longer than a slot of the ring.
        Case::new((2, 1, 2048, 2), &[3, 9, 1], 0, direction),
    ];
    let mut whole_blocks = Case::plain(direction);
    whole_blocks.layout = PagedLayout::block_major(&whole_blocks.shape);
    cases.push(whole_blocks);
    cases
}

#[test]
fn every_transport_gives_what_the_kernel_gives() {
    let machine = Machine::new(1);
    for transport in Transport::ALL {
        let mut link = machine.link(transport);
        for direction in BOTH {
            for case in cases(direction) {
                let scene = Scene::new(&machine, &case);
                scene.run(&mut link, &machine.stream).unwrap();
                assert!(scene.is_done(&machine.stream), "{transport} of {case:?}");
            }
        }
    }
    machine.assert_clean();
}

#[test]
fn every_transport_gives_the_same_layer_by_layer_and_in_short_launches() {
    let machine = Machine::new(2);
    for transport in Transport::ALL {
        for launch_bytes in [0, 300] {
            let options = HostLinkOptions {
                ring_buffers: 3,
                ring_buffer_bytes: 2048,
                launch_bytes,
                ..HostLinkOptions::default()
            };
            let mut link = machine.link_with(transport, options);
            for case in BOTH.into_iter().flat_map(cases) {
                let scene = Scene::new(&machine, &case);
                let events = LayerEvents::new(&machine.device, case.shape.layers()).unwrap();
                link.transfer_chunk(&machine.stream, scene.transfer(Some(&events))).unwrap();
                assert!(scene.is_done(&machine.stream), "{transport} of {case:?}");
                for layer in 0..events.layers() {
                    assert!(events.event(layer).unwrap().is_complete().unwrap());
                }
            }
        }
    }
    machine.assert_clean();
}

#[test]
fn every_transport_moves_rows_in_pieces() {
    // Heads before tokens in a block, so that a row is in several pieces in the pages.
    let machine = Machine::new(3);
    for direction in BOTH {
        let mut case = Case::plain(direction);
        case.layout = heads_first(&case);
        for transport in Transport::ALL {
            let scene = Scene::new(&machine, &case);
            assert_eq!(scene.run(&mut machine.link(transport), &machine.stream), Ok(transport));
            assert!(scene.is_done(&machine.stream), "{transport} {direction:?}");
        }
    }
    machine.assert_clean();
}

fn heads_first(case: &Case) -> PagedLayout {
    let options = FormatOptions {
        layers: case.shape.layers(),
        heads: 4,
        head_bytes: case.shape.row_bytes() / 4,
        element_bytes: 1,
        block_tokens: case.shape.block_tokens(),
        blocks: BLOCKS,
        block_padding_bytes: 0,
    };
    assert_eq!(KvFormat::CrossLayerHnd.shape(&options).unwrap(), case.shape);
    KvFormat::CrossLayerHnd.layout(&options).unwrap()
}

#[test]
fn a_transport_that_cannot_carry_a_transfer_leaves_it_to_the_kernel() {
    let machine = Machine::new(4);
    let no_ring = HostLinkOptions { ring_buffers: 0, ..HostLinkOptions::default() };
    let mut without = machine.link_with(Transport::TwoHop, no_ring);
    let plain = Scene::new(&machine, &Case::plain(Direction::PagedToChunk));
    assert_eq!(plain.run(&mut without, &machine.stream), Ok(Transport::DirectKernel));
    let long = Case::new((2, 1, 2048, 2), &[3, 9, 1], 0, Direction::ChunkToPaged);
    let long = Scene::new(&machine, &long);
    let mut link = machine.link(Transport::TwoHop);
    assert_eq!(long.run(&mut link, &machine.stream), Ok(Transport::DirectKernel));
    assert!(plain.is_done(&machine.stream) && long.is_done(&machine.stream));
}

#[test]
fn what_does_not_fit_is_refused_and_nothing_is_enqueued() {
    let machine = Machine::new(5);
    let mut link = machine.link(Transport::TwoHop);
    let scene = Scene::new(&machine, &Case::plain(Direction::ChunkToPaged));
    let good = scene.transfer(None);
    let events = LayerEvents::new(&machine.device, 2).unwrap();
    let mut far = scene.case.slots.clone();
    far[7] = Slot::from(48);
    let mut twice = scene.case.slots.clone();
    twice[9] = twice[3];
    let launches = machine.sim.calls().get("cuLaunchKernel").copied();
    let mut refused = |transfer| {
        let answer: Result<_, TransportError> = link.transfer_chunk(&machine.stream, transfer);
        answer.unwrap_err().to_string()
    };
    let mut texts = vec![
        refused(kv_kernels::link::HostTransfer { host_offset: 81, ..good }),
        refused(kv_kernels::link::HostTransfer { host_offset: u64::MAX, ..good }),
        refused(kv_kernels::link::HostTransfer { skip_prefix_n_tokens: 21, ..good }),
        refused(kv_kernels::link::HostTransfer { tokens: 19, ..good }),
        refused(kv_kernels::link::HostTransfer { tokens: u64::MAX, ..good }),
        refused(kv_kernels::link::HostTransfer { num_blocks: 13, ..good }),
        refused(kv_kernels::link::HostTransfer { num_blocks: 10, ..good }),
        refused(kv_kernels::link::HostTransfer { host_slots: &far, ..good }),
        refused(kv_kernels::link::HostTransfer { host_slots: &twice, ..good }),
    ];
    texts.push(refused(kv_kernels::link::HostTransfer { layer_events: Some(&events), ..good }));
    let expected = [
        "the chunk of a transfer does not lie in its pinned memory",
        "the chunk of a transfer does not lie in its pinned memory",
        "a transfer skips 21 tokens of a chunk of 20",
        "a slot mapping has 20 slots for 19 tokens",
        "the chunk of a transfer does not lie in its pinned memory",
        "13 blocks are named ready",
        "slot 40 of token 14 is out of range: 40 slots are ready",
        "slot 48 of token 7 is out of range: 48 slots are ready",
        "token 9 of chunk 0 are both stored to slot",
        "a transfer of 3 layers has 2 layer events",
    ];
    for (text, expected) in texts.iter().zip(expected) {
        assert!(text.contains(expected), "{text:?}, where {expected:?} was expected");
    }
    assert_eq!(machine.sim.calls().get("cuLaunchKernel").copied(), launches);
}
