//! Tiers that get fewer blocks, or more, while steps are in flight: what a worker may unmap, and when.

use crate::common::sampled;
use crate::prelude::*;
use kv_pool::BudgetError as PoolError;

const GROUP: GroupId = GroupId(0);
const DEVICE: Tier = Tier::Primary;
const HOST: Tier = Tier::Secondary;

fn set(manager: &mut Manager, tier: Tier, blocks: u64) -> Budgeted {
    manager.set_budget(GROUP, tier, blocks).unwrap()
}

fn from(manager: &Manager, tier: Tier) -> u64 {
    manager.unmappable_from(GROUP, tier).unwrap()
}

#[test]
fn cached_content_leaves_with_the_next_plan_and_its_memory_when_that_is_complete() {
    let mut manager = manager(8, 8);
    drop(computed(&mut manager, 0..20));
    assert_eq!(set(&mut manager, DEVICE, 0), Budgeted { leaving: 5, in_use: 0 });
    // The next plan reads the blocks, so they are needed, although nobody can have them any more.
    assert_eq!((manager.first_pool().claimable(), from(&manager, DEVICE)), (0, 5));
    let step = manager.begin_step().unwrap();
    let plan = manager.stage(&step, &mut []).unwrap();
    let number = plan.step;
    // The fifth block is not full, and has no name.
    assert_eq!(plan.copies.len(), 5);
    assert!(plan.copies.iter().all(|copy| copy.from.tier == DEVICE && copy.to.tier == HOST));
    manager.finish_step(step).unwrap();
    assert_eq!(from(&manager, DEVICE), 5, "the plan is in flight");
    done(&mut manager, number);
    assert_eq!(from(&manager, DEVICE), 0);
    set(&mut manager, DEVICE, 8);
    let again = admit(&mut manager, 0..21);
    assert_eq!(again.cached_tokens(), 20);
    drop(again);
    check_empty(&mut manager);
}

#[test]
fn blocks_of_a_running_sequence_leave_when_its_last_step_is_complete() {
    let mut manager = manager(8, 0);
    let mut sequence = sampled(&mut manager, 0..18, 7);
    assert_eq!(set(&mut manager, DEVICE, 2), Budgeted { leaving: 0, in_use: 3 });
    assert_eq!(from(&manager, DEVICE), 5);
    // It goes on in the blocks that it has, and gets no more.
    common::lacking(manager.reserve(&mut sequence, 3));
    let open = manager.begin_step().unwrap();
    manager.reserve(&mut sequence, 1).unwrap().given().unwrap();
    let number = manager.stage(&open, &mut [&mut sequence]).unwrap().step;
    drop(sequence);
    manager.finish_step(open).unwrap();
    assert_eq!(from(&manager, DEVICE), 5, "the step is in flight");
    done(&mut manager, number);
    assert_eq!(from(&manager, DEVICE), 2);
    set(&mut manager, DEVICE, 8);
    check_empty(&mut manager);
}

#[test]
fn a_copy_that_is_planned_and_not_staged_needs_its_blocks() {
    let mut manager = manager(8, 4);
    let mut sequence = sampled(&mut manager, 0..18, 7);
    // Its blocks are released at once, for no step is in flight. The copies of those without a name are
    // in the next plan.
    manager.suspend(&mut sequence).unwrap();
    set(&mut manager, DEVICE, 0);
    set(&mut manager, HOST, 0);
    assert_eq!((from(&manager, DEVICE), from(&manager, HOST)), (5, 4));
    let number = staged(&mut manager, &mut []).step;
    assert_eq!((from(&manager, DEVICE), from(&manager, HOST)), (5, 4));
    done(&mut manager, number);
    // The partly filled block waits in host memory.
    assert_eq!((from(&manager, DEVICE), from(&manager, HOST)), (0, 1));
    set(&mut manager, DEVICE, 8);
    assert_eq!(
        manager.resume(&mut sequence),
        Ok(Room::Given(0)),
        "the named blocks had no room in host memory"
    );
    drop(sequence);
    set(&mut manager, HOST, 4);
    check_empty(&mut manager);
}

#[test]
fn a_larger_budget_takes_back_what_has_not_left_and_what_has() {
    let mut manager = manager(8, 0);
    let sequence = computed(&mut manager, 0..20);
    set(&mut manager, DEVICE, 3);
    assert_eq!(set(&mut manager, DEVICE, 8), Budgeted::default());
    drop(sequence);
    assert_eq!(manager.first_pool().claimable(), 8);
    set(&mut manager, DEVICE, 3);
    let number = staged(&mut manager, &mut []).step;
    done(&mut manager, number);
    assert_eq!(from(&manager, DEVICE), 3);
    set(&mut manager, DEVICE, 6);
    assert_eq!((manager.first_pool().claimable(), from(&manager, DEVICE)), (6, 6));
    set(&mut manager, DEVICE, 8);
    check_empty(&mut manager);
}

#[test]
fn host_memory_can_come_while_the_manager_runs() {
    let mut manager = manager(4, 4);
    set(&mut manager, HOST, 0);
    let mut sequence = sampled(&mut manager, 0..6, 7);
    let refused = manager.suspend(&mut sequence).unwrap_err();
    assert!(matches!(refused, SuspendError::NoRoom(_)), "{refused}");
    set(&mut manager, HOST, 2);
    manager.suspend(&mut sequence).unwrap();
    step(&mut manager, &mut []);
    assert_eq!(manager.resume(&mut sequence), Ok(Room::Given(6)));
    drop(sequence);
    check_empty(&mut manager);
}

#[test]
fn budgets_that_cannot_be_are_refused() {
    let mut manager = manager(4, 2);
    let group = GroupId(1);
    let unknown = manager.set_budget(group, DEVICE, 4).unwrap_err();
    assert_eq!(unknown, BudgetError::NoGroup { group });
    assert_eq!(manager.unmappable_from(group, HOST).unwrap_err(), BudgetError::NoGroup { group });
    let over = manager.set_budget(GROUP, HOST, 3).unwrap_err();
    let reason = PoolError::OverCapacity { tier: HOST, requested: 3, capacity: 2 };
    assert_eq!(over, BudgetError::Pool(reason));
    assert_eq!(
        format!("{over:?}"),
        "the budget was not changed: 3 blocks are more than the 2 that the Secondary tier was made for"
    );
    assert_eq!((from(&manager, DEVICE), from(&manager, HOST)), (4, 2));
}
