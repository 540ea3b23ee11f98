//! Prefixes that stay on the device.

use crate::prelude::*;

/// 8 device blocks, of which pins may hold `max`.
fn manager(max: u64) -> Manager {
    made(ManagerOptions { pinned_blocks_max: max, ..options(8, 0) })
}

/// Caches `blocks` blocks of the ids from 0 on; their names.
fn cached(manager: &mut Manager, blocks: u32) -> Vec<BlockHash> {
    cache_prompt(manager, 0..blocks * 4 + 1);
    names(0..blocks * 4)
}

/// Lets another sequence take every block that can be had.
fn press(manager: &mut Manager) {
    let blocks = manager.first_pool().claimable() as u32;
    cache_prompt(manager, 1000..1000 + blocks * 4);
}

fn found(manager: &mut Manager) -> u64 {
    let cached = admit(manager, 0..17).cached_tokens();
    step(manager, &mut []);
    cached
}

#[test]
fn what_is_pinned_stays_until_the_pin_ends() {
    let mut manager = manager(4);
    let names = cached(&mut manager, 4);
    let pin = manager.pin(&names[..3]).unwrap();
    assert_eq!((pin.len(), pin.is_empty(), manager.pinned_blocks()), (3, false, 3));
    press(&mut manager);
    assert_eq!(found(&mut manager), 12);
    drop(pin);
    assert_eq!(manager.pinned_blocks(), 0);
    press(&mut manager);
    assert_eq!(found(&mut manager), 0);
    check_empty(&mut manager);
}

#[test]
fn pins_hold_no_more_than_they_may() {
    let mut manager = manager(4);
    let names = cached(&mut manager, 4);
    let pin = manager.pin(&names[..3]).unwrap();
    let refused = manager.pin(&names[..2]).unwrap_err();
    assert_eq!(refused, BudgetError::Pins { more: 2, pinned: 3, max: 4 });
    let text = "2 blocks were not pinned: 3 are, and no more than 4 may be";
    assert_eq!((refused.to_string(), manager.pinned_blocks()), (text.to_owned(), 3));
    let one: PinnedPrefix = manager.pin(&names[..1]).unwrap();
    drop(pin);
    assert_eq!(manager.pinned_blocks(), 1);
    drop(one);
    assert!(manager.pin(&[]).unwrap().is_empty());
    assert!(manager.pin(&names[1..2]).unwrap().len() == 1, "names say all that is before them");
    check_empty(&mut manager);
    let mut none = self::manager(0);
    let names = cached(&mut none, 1);
    assert_eq!(none.pin(&names).unwrap_err(), BudgetError::Pins { more: 1, pinned: 0, max: 0 });
}

#[test]
fn a_pin_takes_nothing_of_what_is_promised_to_a_tenant() {
    let mut manager = manager(8);
    let names = cached(&mut manager, 4);
    let tenant = manager.add_tenant().unwrap();
    let quota = TenantQuota { reserved: 6, ..TenantQuota::default() };
    manager.set_quota(GroupId(0), tenant, Tier::Primary, quota).unwrap();
    let pin = manager.pin(&names).unwrap();
    assert_eq!(pin.len(), 2);
    let request = of(tenant, 5000..5024);
    let mut sequence = admitted(manager.ask_all(&mut [request], 100).pop().unwrap());
    assert_eq!(sequence.block_count(GroupId(0)), 6);
    step(&mut manager, &mut [&mut sequence]);
    drop((sequence, pin));
    check_empty(&mut manager);
}

#[test]
fn what_a_failed_step_has_spoilt_is_found_by_nobody_though_it_is_pinned() {
    let mut manager = manager(8);
    let mut sequence = admit(&mut manager, 0..17);
    staged(&mut manager, &mut [&mut sequence]);
    let names = cached_names(&manager);
    assert_eq!(names.len(), 4);
    let pins: Vec<_> = names.iter().map(|&name| manager.pin(&[name]).unwrap()).collect();
    assert_eq!(manager.pinned_blocks(), 4);
    complete(&mut manager, 1, Outcome::Failed);
    drop(sequence);
    assert!(manager.pin(&names).unwrap().is_empty());
    drop(pins);
    check_empty(&mut manager);
}

#[test]
fn what_is_in_host_memory_is_not_pinned() {
    let host = ManagerOptions { pinned_blocks_max: 8, ..options(8, 8) };
    let mut manager = Manager::new(host).unwrap();
    let names = cached(&mut manager, 4);
    press(&mut manager);
    assert!(manager.pin(&names).unwrap().is_empty());
    assert_eq!(manager.prefetch(&names), 0, "the device is full of content");
    let others: Vec<_> =
        manager.first_pool().snapshot().blocks.iter().filter_map(|b| b.hash).collect();
    let others: Vec<_> = others.into_iter().filter(|name| !names.contains(name)).collect();
    manager.forget(&others);
    assert_eq!(manager.prefetch(&names), 4);
    step(&mut manager, &mut []);
    assert_eq!(manager.pin(&names).unwrap().len(), 4);
    check_empty(&mut manager);
}

#[test]
fn a_pin_holds_what_each_group_needs_behind_the_prefix() {
    let window = group(GroupKind::Window { tokens: 6, sinks: 0 }, 8);
    let state = group(GroupKind::State { checkpoint_tokens: 16, drafts: 0 }, 8);
    let options =
        ManagerOptions { pinned_blocks_max: 7, ..with_groups(options(8, 0), [window, state]) };
    let mut manager = made(options);
    let names = cached(&mut manager, 4);
    // There is no state behind fewer tokens than 16, whose window begins with token 11.
    assert!(manager.pin(&names[..3]).unwrap().is_empty());
    let pin = manager.pin(&names).unwrap();
    assert_eq!((pin.len(), manager.pinned_blocks()), (4 + 2 + 1, 7));
    let refused = manager.pin(&names).unwrap_err();
    assert_eq!(refused, BudgetError::Pins { more: 7, pinned: 7, max: 7 });
    step(&mut manager, &mut []);
    // All that can be had leaves, of every group.
    for group in [GroupId(0), GroupId(1), GroupId(2)] {
        manager.set_budget(group, Tier::Primary, 0).unwrap();
        manager.set_budget(group, Tier::Primary, 8).unwrap();
    }
    step(&mut manager, &mut []);
    assert_eq!(found(&mut manager), 16);
    drop(pin);
    assert_eq!(manager.pinned_blocks(), 0);
}
