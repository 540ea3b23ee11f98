//! Caches that hand nothing over, and calls that name another one.

use super::*;

fn refused(engine: Engine) -> HandoverError {
    let (node, ..) = served(1 << 16, None);
    let error = Prefill::new(&engine.cache, node, LONG).unwrap_err();
    let decode = Decode::new(&engine.cache, key(), LONG).unwrap_err();
    assert_eq!(decode.to_string(), error.to_string());
    engine.try_close().unwrap();
    error
}

#[test]
fn a_cache_that_hands_nothing_over_is_refused() {
    let two = Machine::new(1, 2, small());
    let error = refused(two.rig.engine(16, 0));
    assert!(matches!(error, HandoverError::Cache { groups: 1, devices: 2 }), "{error}");
    let one = Machine::new(1, 1, small());
    let window = GroupKind::Window { tokens: 8, sinks: 0 };
    let mut several = options(small(), 16, 0);
    several.groups.push(group(window, small(), 16, 0));
    let cache = one.rig.cache(several);
    let error = refused(Engine::with(cache));
    assert!(matches!(error, HandoverError::Cache { groups: 2, devices: 1 }), "{error}");
    let kind = with_first(options(small(), 16, 0), |group| group.kind = window);
    let cache = one.rig.cache(kind);
    let error = refused(Engine::with(cache));
    assert!(matches!(error, HandoverError::Kind), "{error}");
    let tensors = Tensors::new(KvFormat::FlashInferNhd);
    let mut strided = Machine::new(1, 1, tensors.shape());
    strided.rig.tensors = Some(tensors);
    let error = refused(strided.rig.engine(16, 0));
    assert!(matches!(error, HandoverError::Layout), "{error}");
}

#[test]
fn a_node_of_short_records_is_refused() {
    let (machine, engine) = Machine::one(16, 0);
    let layer_bytes = small().block_bytes() / LAYERS;
    for (record_bytes, fits) in [(layer_bytes - 1, false), (layer_bytes, true)] {
        let memory = Arc::new(HostMemory::new(1 << 16).unwrap());
        let options = NodeOptions::new("prefill", record_bytes);
        let node = Arc::new(Node::new(&options, memory, Arc::new(SystemClock::new())).unwrap());
        let side = Prefill::new(&engine.cache, node, LONG);
        assert_eq!(side.is_ok(), fits, "{side:?}");
        assert!(fits || matches!(side, Err(HandoverError::Records { bytes: 256, .. })));
    }
    engine.try_close().unwrap();
    machine.assert_clean();
}

#[test]
fn a_call_with_another_cache_changes_nothing() {
    let (mut there, mut live, mut here, prompt) = half_a_prompt();
    let (_machine, mut other) = Machine::one(64, 0);
    let mut request = other.request(&prompt);
    let adopted = here.side.adopt(&mut other.cache, HandoverId(1), &mut request);
    assert!(matches!(adopted, Err(HandoverError::OtherCache)), "{adopted:?}");
    there.compute(&mut live);
    // It is of none of this one's sequences.
    there.side.give(&other.cache, ID, &mut live.sequence).unwrap();
    assert_eq!(there.side.stats().blocks, 4);
    there.finish(ID, live);
    here.goes_on(&prompt, 33);
    other.try_close().unwrap();
    close(there, here);
}

/// Engines may make a cache over the tensors of one that is gone.
#[test]
fn a_cache_at_the_place_of_another_one_is_another() {
    let machine = Machine::new(1, 1, small());
    let on = machine.rig.streams();
    let tensor = DeviceBuffer::alloc(on[0].device(), 16 * small().block_bytes()).unwrap();
    let cache = || {
        let layout = PagedLayout::block_major(&small());
        let paged = PagedKv::new(&on[0], small(), layout, tensor.span(), 16).unwrap();
        KvCache::over(&on, vec![paged], options(small(), 16, 0)).unwrap()
    };
    let first = cache();
    let mut side = Decode::new(&first, key(), LONG).unwrap();
    first.close().unwrap();
    let mut second = cache();
    let refused = side.poll(&mut second);
    assert!(matches!(refused, Err(HandoverError::OtherCache)), "{refused:?}");
    second.close().unwrap();
    drop((side, tensor, on));
    machine.assert_clean();
}

#[cfg(feature = "nixl")]
#[test]
fn a_node_over_memory_of_the_host_gives_nothing_from_device_to_device() {
    let (machine, engine) = Machine::one(16, 0);
    let (node, ..) = served(1 << 16, None);
    let refused = Prefill::on_device(&engine.cache, node, LONG);
    assert!(matches!(refused, Err(HandoverError::NodeMemory)), "{refused:?}");
    engine.try_close().unwrap();
    machine.assert_clean();
}

#[test]
fn a_number_and_a_source_are_looked_at() {
    let there = Computes::new(1 << 20);
    let mut here = GoesOn::new(&there.member, 64, 0);
    let prompt = Prompt::new(1, 34);
    here.want(ID, &prompt);
    let again = here.side.want(ID, here.source, 34).unwrap_err();
    assert!(matches!(again, HandoverError::Again { id: ID }), "{again}");
    // A number of another one's sources.
    let mut other = GoesOn::new(&there.member, 64, 0);
    let transfer = Box::new(SocketTransfer);
    let source = other.side.add(there.member.clone(), transfer).unwrap();
    let unknown = here.side.want(HandoverId(1), source, 34).unwrap_err();
    assert!(matches!(unknown, HandoverError::NoSource { .. }), "{unknown}");
    for tokens in [64 * 4 + 1, u64::from(u32::MAX), u64::MAX - 1, u64::MAX] {
        let long = here.side.want(HandoverId(1), here.source, tokens).unwrap_err();
        assert!(matches!(long, HandoverError::TooLong { blocks: 64, .. }), "{long}");
    }
    assert_eq!(here.side.coming(HandoverId(1)), None);
    assert!(matches!(here.adopt(HandoverId(1), &prompt), Adopted::Here));
    for mut one in [here, other] {
        one.engine.serve(&prompt);
        one.close();
    }
    drop(there);
}

#[test]
fn a_sequence_that_cannot_leave_comes_back() {
    let mut there = Computes::new(1 << 20);
    let prompt = Prompt::new(1, 8);
    let mut live = there.begin(ID, &prompt);
    there.engine.run(&mut [&mut live]).unwrap();
    let error = there.side.finish(&mut there.engine.cache, ID, live.sequence).unwrap_err();
    let HandoverError::Export(refused) = error else { panic!("{error}") };
    assert!(matches!(refused.reason, ChangeError::Writing { .. }));
    assert_eq!((refused.sequence.resolved(), there.side.open()), (8, 1));
    drop(refused);
    there.side.cancel(ID);
    there.engine.drain().unwrap();
    there.close();
}
