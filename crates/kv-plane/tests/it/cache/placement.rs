//! Layers and heads placed on devices by a placement.

use kv_multigpu::place::Strategy;

use crate::prelude::*;

/// Plays every scenario with blocks divided like that.
fn play(devices: u32, shape: kv_kernels::KvShape, place: Place) {
    for (name, scenario) in scenarios::all() {
        let mut machine = Machine::new(3, devices, shape);
        machine.rig.place = place;
        scenario(&machine.rig);
        assert_eq!(machine.sim.findings(), [], "{name} with {place:?}");
        machine.assert_clean();
    }
}

#[test]
fn contents_are_right_with_layers_in_turn_over_two_and_four_devices() {
    play(2, shape(5, 64, 4), Place::Layers(Strategy::RoundRobin));
    play(4, shape(6, 32, 4), Place::Layers(Strategy::RoundRobin));
}

#[test]
fn contents_are_right_with_heads_over_two_and_four_devices() {
    play(2, shape(1, 64, 4), Place::Heads(4));
    play(4, shape(3, 64, 8), Place::Heads(4));
}

/// Layers and bytes of rows of each part.
fn division(devices: u32, place: Place) -> Vec<(i32, Vec<u32>, std::ops::Range<u64>)> {
    let mut machine = Machine::new(1, devices, shape(5, 64, 4));
    machine.rig.place = place;
    let engine = machine.rig.engine(8, 8);
    let part =
        |part: &kv_plane::Part| (part.device().ordinal(), part.layers().to_vec(), part.row());
    let parts = engine.cache.parts().iter().map(part).collect();
    engine.try_close().unwrap();
    machine.assert_clean();
    parts
}

#[test]
fn each_device_has_what_the_placement_says() {
    assert_eq!(division(2, Place::Even), [(0, vec![0, 1, 2], 0..64), (1, vec![3, 4], 0..64)]);
    assert_eq!(
        division(2, Place::Layers(Strategy::RoundRobin)),
        [(0, vec![0, 2, 4], 0..64), (1, vec![1, 3], 0..64)]
    );
    // All layers fit on one device, which is least cost: the other has no part.
    assert_eq!(division(2, Place::Layers(Strategy::LeastCost)), [(0, vec![0, 1, 2, 3, 4], 0..64)]);
    let all = vec![0, 1, 2, 3, 4];
    assert_eq!(
        division(4, Place::Heads(8)),
        [(0, 0..16), (1, 16..32), (2, 32..48), (3, 48..64)].map(|(device, row)| (
            device,
            all.clone(),
            row
        ))
    );
}

#[test]
fn a_placement_of_something_else_is_refused() {
    let machine = Machine::new(1, 2, small());
    let good = options(small(), 8, 8);
    let devices = &machine.rig.devices;
    let build = |options: KvCacheOptions| match KvCache::new(&streams(devices), options) {
        Err(BuildError::Options(refused)) => refused,
        other => panic!("{other:?}"),
    };
    let with = |placed: &KvCacheOptions, place: Place, devices: &[cuda_driver::Device]| {
        KvCacheOptions { placement: place.of(placed, devices), ..good.clone() }
    };
    let in_turn = Place::Layers(Strategy::RoundRobin);
    let layers = with_first(good.clone(), |group| group.shape = shape(5, 32, 4));
    assert_eq!(
        build(with(&layers, in_turn, devices)),
        OptionsError::PlacedLayers { placed: 5, layers: 4 }
    );
    assert_eq!(
        build(with(&good, in_turn, &devices[..1])),
        OptionsError::PlacedDevices { placed: 1, devices: 2 }
    );
    let swapped = [devices[1].clone(), devices[0].clone()];
    assert_eq!(
        build(with(&good, in_turn, &swapped)),
        OptionsError::PlacedElsewhere { position: 0 }
    );
    let blocks = with_first(good.clone(), |group| group.shape = shape(4, 32, 8));
    assert_eq!(
        build(with(&blocks, in_turn, devices)),
        OptionsError::PlacedBlocks { layer: 0, placed_bytes: 512, layer_bytes: 256 }
    );
    // As many heads as bytes of a block divide into, but not those of a row.
    assert_eq!(
        build(with(&good, Place::Heads(64), devices)),
        OptionsError::PlacedHeads { row_bytes: 32, kv_heads: 64 }
    );
    // Its two layers of 256 bytes a block, beside a MiB of weights each, on a device of a TiB.
    let (blocks, fit) = ((1 << 31) - 16, ((1_u64 << 40) - (2 << 20)) / 512);
    let more = with_first(with(&good, in_turn, devices), |group| group.device_blocks = blocks);
    assert_eq!(build(more), OptionsError::PlacedTooMany { blocks: blocks.into(), fit });
    machine.assert_clean();
}
