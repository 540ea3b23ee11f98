//! A call that the driver refuses changes nothing: each driver call of each call fails once, and the whole state is as before.
//! Memory that was mapped before the refusal stays for the next call.

use kv_plane::manager::Stalls;

use super::faults::differences;
use crate::prelude::*;

const GROUPS: [GroupId; 2] = [GroupId(0), GroupId(1)];

/// All that a caller can see of a cache and its sequences, but for memory under blocks without content.
fn state(cache: &KvCache, sequences: &[Sequence]) -> String {
    let manager = cache.manager();
    let mut stats = ManagerStats { stalls: Stalls::default(), ..manager.stats() };
    stats.blocks[0].free = 0;
    let pools = GROUPS.iter().filter_map(|&group| manager.pool(group));
    let mut cached: Vec<_> = pools
        .flat_map(|pool| pool.snapshot().blocks)
        .filter_map(|block| Some((block.hash?.to_u128(), block.location, block.usage)))
        .collect();
    cached.sort_by_key(|(name, at, _)| (*name, at.id.index()));
    let rows: Vec<_> = sequences.iter().map(|of| manager.block_ids(GroupId(0), of)).collect();
    let host = (cache.stats().host_blocks, cache.stats().ways, cache.stats().transports);
    format!(
        "{stats:?} {cached:?} {rows:?} {sequences:?} {host:?} {} {} {:?}",
        manager.free_rows(),
        manager.has_decided(),
        cache.manager().last_plan()
    )
}

fn admit(cache: &mut KvCache, ids: std::ops::Range<u32>) -> Result<Sequence, String> {
    let mut queue = VecDeque::from([Request::new(ids.clone().collect())]);
    let admission = cache.admit(&mut queue, u64::MAX);
    if admission.is_err() {
        assert_eq!(queue[0].tokens(), u64::from(ids.end - ids.start), "it can be asked again");
    }
    let mut admission = admission.map_err(|error| error.to_string())?;
    let Some((_, sequence)) = admission.admitted.pop() else { panic!("{admission:?}") };
    Ok(sequence)
}

fn computed(cache: &mut KvCache, ids: std::ops::Range<u32>) -> Sequence {
    let mut sequence = admit(cache, ids.clone()).unwrap();
    let last = one_step(cache, &mut [&mut sequence]);
    cache.commit(&mut sequence, last, &[ids.end]).unwrap();
    sequence
}

/// What was to be given was given, unless the driver has refused something.
fn given<T: Debug, E: ToString>(answer: Result<Room<T>, E>) -> Result<(), String> {
    let room = answer.map_err(|error| error.to_string())?;
    room.given().map(drop).map_err(|error| panic!("{error}"))
}

type Prepare = fn(&mut KvCache) -> Vec<Sequence>;
type Call = fn(&mut KvCache, &mut Vec<Sequence>) -> Result<(), String>;

/// Calls that map memory, each with what comes before it.
const CALLS: [(&str, Prepare, Call); 6] = [
    (
        "admit",
        |cache| vec![computed(cache, 0..9)],
        |cache, sequences| {
            let admitted = admit(cache, 100..120)?;
            sequences.push(admitted);
            Ok(())
        },
    ),
    (
        "reserve",
        |cache| vec![computed(cache, 0..9), computed(cache, 50..52)],
        |cache, sequences| given(cache.reserve(&mut sequences[0], 20)),
    ),
    (
        "resume",
        |cache| {
            let mut asleep = computed(cache, 0..15);
            cache.suspend(&mut asleep).unwrap();
            one_step(cache, &mut []);
            vec![asleep, computed(cache, 50..69)]
        },
        |cache, sequences| given(cache.resume(&mut sequences[0])),
    ),
    (
        "adopt",
        |cache| vec![computed(cache, 0..9)],
        |cache, sequences| {
            let there = cache.manager().formats();
            let mut request = Request::new((100..120).collect());
            let adopted = cache.adopt(&mut request, 16, &there);
            let (answer, adoption) = adopted.map_err(|error| error.to_string())?;
            let Answer::Admitted(mut sequence) = answer else { panic!("{answer:?}") };
            cache.adopted(&mut sequence, adoption.unwrap(), 0).unwrap();
            sequences.push(sequence);
            Ok(())
        },
    ),
    (
        "prefetch",
        |cache| {
            drop(computed(cache, 0..33));
            cache.set_budget(GroupId(0), Tier::Primary, 0).unwrap();
            for _ in 0..3 {
                one_step(cache, &mut []);
            }
            assert_eq!(cache.manager().pool(GroupId(0)).unwrap().stats().secondary.cached, 8);
            cache.set_budget(GroupId(0), Tier::Primary, 16).unwrap();
            Vec::new()
        },
        |cache, _| {
            let ids: Vec<u32> = (0..32).collect();
            let block_tokens = std::num::NonZeroU32::new(4).unwrap();
            let names: Vec<_> =
                BlockHasher::FAST.prefix(BlockHash::ROOT, &ids, block_tokens).collect();
            let count = cache.prefetch(&names).map_err(|error| error.to_string())?;
            assert_eq!(count, 8);
            Ok(())
        },
    ),
    (
        "set_quota",
        |cache| {
            cache.add_tenant().unwrap();
            vec![computed(cache, 0..9)]
        },
        |cache, _| {
            let tenant = cache.add_tenant().unwrap();
            let quota = TenantQuota { reserved: 12, ..TenantQuota::NONE };
            cache
                .set_quota(GroupId(0), tenant, Tier::Primary, quota)
                .map_err(|error| error.to_string())
        },
    ),
];

fn sizes(groups: usize) -> KvCacheOptions {
    let mut options = options(small(), 16, 8);
    if groups > 1 {
        options.groups.push(group(GroupKind::Full, shape(2, 32, 8), 8, 8));
    }
    options
}

#[test]
fn a_call_that_the_driver_refuses_changes_nothing() {
    for groups in [1, 2] {
        for (name, prepare, call) in CALLS {
            let run = |fault: Option<(&'static str, u64)>| {
                let machine = Machine::new(1, 1, small());
                let mut cache = machine.rig.cache(sizes(groups));
                let mut sequences = prepare(&mut cache);
                let (calls, before) = (machine.sim.calls(), state(&cache, &sequences));
                if let Some((call, nth)) = fault {
                    machine.sim.fail_nth(call, nth, refusal(call));
                }
                let mut done = call(&mut cache, &mut sequences);
                let made = differences(&calls, machine.sim.calls());
                let refused = done.is_err();
                if refused {
                    assert_eq!(
                        state(&cache, &sequences),
                        before,
                        "{groups} {name} {fault:?}: {done:?}"
                    );
                    done = call(&mut cache, &mut sequences);
                }
                done.unwrap_or_else(|error| panic!("{groups} {name} {fault:?}: {error}"));
                let after = state(&cache, &sequences);
                drop(sequences);
                cache.drain().unwrap();
                cache.manager().pool(GroupId(0)).unwrap().check_integrity().unwrap();
                cache.close().unwrap();
                machine.assert_clean();
                (made, after, refused)
            };
            let (calls, after, _) = run(None);
            let mut refusals = 0;
            for (call, count) in calls {
                for nth in 1..=count {
                    let (_, then, refused) = run(Some((call, nth)));
                    assert_eq!(then, after, "{groups} {name}: {call} {nth}");
                    refusals += u32::from(refused);
                }
            }
            assert!(refusals > 0, "{groups} {name} was never refused");
        }
    }
}
