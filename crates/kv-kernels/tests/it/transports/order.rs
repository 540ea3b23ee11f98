//! Orders of streams: transfers as operations of theirs, and layers that arrive one by one.

use cuda_driver::{DeviceBuffer, Stream};
use cuda_sim::Pace;
use kv_kernels::{
    Direction,
    link::{LayerEvents, Transport},
};

use super::machine::{BOTH, Case, Machine, OFFSET, Scene};

const SEEDS: u64 = 24;

#[test]
fn a_transfer_is_one_operation_of_its_stream() {
    for seed in 0..SEEDS {
        for transport in Transport::ALL {
            let machine = Machine::new(seed);
            let mut link = machine.link(transport);
            let scene = Scene::new(&machine, &Case::plain(Direction::PagedToChunk));
            let stream = &machine.stream;
            // Pages are filled behind other work before, and wiped right after.
            let mut right = vec![0; scene.pages_after.len()];
            stream.download(&mut right, scene.pages.span()).unwrap();
            let kept = machine.upload(&right);
            stream.fill(scene.pages.span(), 0xEE).unwrap();
            stream.copy_on_device(scene.pages.span(), kept.span()).unwrap();
            scene.run(&mut link, stream).unwrap();
            stream.fill(scene.pages.span(), 0xDD).unwrap();
            stream.synchronize().unwrap();
            let mut host = vec![0; scene.host_after.len()];
            scene.host.read_at(0, &mut host).unwrap();
            assert!(host == scene.host_after, "{transport}, seed {seed}");
        }
    }
}

#[test]
fn a_chunk_that_the_stream_has_yet_to_write_is_read_after_it() {
    for seed in 0..SEEDS {
        for transport in Transport::ALL {
            let machine = Machine::new(seed);
            let mut link = machine.link(transport);
            let mut scene = Scene::new(&machine, &Case::plain(Direction::ChunkToPaged));
            let kept = machine.upload(&scene.host_after);
            scene.host.write_at(0, &vec![0xEE; scene.host_after.len()]).unwrap();
            machine.stream.copy_to_host(&scene.host, 0, kept.span()).unwrap();
            scene.run(&mut link, &machine.stream).unwrap();
            assert!(scene.is_done(&machine.stream), "{transport}, seed {seed}");
        }
    }
}

#[test]
fn a_layer_that_is_told_of_has_arrived() {
    for seed in 0..SEEDS {
        for transport in Transport::ALL {
            let machine = Machine::new(seed);
            let mut link = machine.link(transport);
            let scene = Scene::new(&machine, &Case::plain(Direction::ChunkToPaged));
            let layers = scene.case.shape.layers();
            let events = LayerEvents::new(&machine.device, layers).unwrap();
            link.transfer_chunk(&machine.stream, scene.transfer(Some(&events))).unwrap();
            // Another stream takes each layer as soon as it is told of it.
            let reader = Stream::new(&machine.device).unwrap();
            let layer_bytes = scene.pages_after.len() / layers as usize;
            for layer in (0..layers).rev() {
                events.wait(&reader, layer).unwrap();
                let taken = DeviceBuffer::alloc(&machine.device, layer_bytes as u64).unwrap();
                let at = layer as usize * layer_bytes;
                let layer_span = scene.pages.span().slice(at as u64, layer_bytes as u64).unwrap();
                reader.copy_on_device(taken.span(), layer_span).unwrap();
                let mut seen = vec![0; layer_bytes];
                reader.download(&mut seen, taken.span()).unwrap();
                assert!(seen == scene.pages_after[at..at + layer_bytes], "{transport} {seed}");
            }
            assert!(scene.is_done(&machine.stream));
        }
    }
}

#[test]
fn the_first_layer_arrives_before_the_last() {
    for transport in Transport::ALL {
        let machine = Machine::new(7);
        machine.sim.set_pace(Pace::Slowest);
        let mut link = machine.link(transport);
        let scene = Scene::new(&machine, &Case::plain(Direction::ChunkToPaged));
        let events = LayerEvents::new(&machine.device, 3).unwrap();
        link.transfer_chunk(&machine.stream, scene.transfer(Some(&events))).unwrap();
        // A host that waits for the first layer lets the device run no further than needed.
        events.event(0).unwrap().synchronize().unwrap();
        machine.sim.hold(machine.stream.raw());
        assert!(!events.event(2).unwrap().is_complete().unwrap(), "{transport}");
        machine.sim.release_hold(machine.stream.raw());
        assert!(scene.is_done(&machine.stream));
    }
}

#[test]
fn a_transfer_neither_allocates_nor_waits() {
    for transport in Transport::ALL {
        let machine = Machine::new(3);
        let mut link = machine.link(transport);
        let scenes = BOTH.map(|direction| Scene::new(&machine, &Case::plain(direction)));
        let forbidden = |machine: &Machine| -> Vec<(&'static str, u64)> {
            let calls = machine.counts.calls().into_iter();
            calls
                .filter(|(name, _)| {
                    name.contains("Synchronize")
                        || name.contains("Query")
                        || name.contains("Alloc")
                        || name.contains("Create")
                        || name.contains("Free")
                })
                .collect()
        };
        let before = forbidden(&machine);
        for scene in &scenes {
            scene.run(&mut link, &machine.stream).unwrap();
        }
        assert_eq!(forbidden(&machine), before, "{transport}");
        machine.stream.synchronize().unwrap();
    }
    assert_eq!(OFFSET % 16, 0, "chunks are aligned as the kernels want them");
}
