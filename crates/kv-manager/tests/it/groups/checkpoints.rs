//! Checkpoints of recurrent states where there is little room, and where prompts say that others share their beginning.

use super::*;

#[test]
fn a_sequence_goes_on_without_a_checkpoint_where_there_is_no_block_for_one() {
    for states in 1..4 {
        let mut manager = manager([group(STATE, states)]);
        let mut running: Vec<_> =
            (0..states as u32).map(|at| admit(&mut manager, at * 1000..at * 1000 + 30)).collect();
        for _ in 0..5 {
            let mut batch: Vec<_> = running.iter_mut().filter(|one| one.next() > 0).collect();
            step(&mut manager, &mut batch);
            for sequence in running.iter_mut().filter(|sequence| sequence.to_compute() > 0) {
                let left = sequence.to_compute() as u32;
                manager.reserve(sequence, left).unwrap().given().unwrap();
            }
        }
        let left: Vec<_> = running.iter().map(Sequence::to_compute).collect();
        assert!(left.iter().all(|&left| left == 0), "{states} states: {left:?}");
        drop(running);
        settle(&mut manager);
        // Its own last checkpoint is in the only block, and no sequence runs that could give one back.
        let mut again = Request::new((0..30).collect());
        again.waits = false;
        let answer = ask(&mut manager, again);
        assert!(matches!(answer, Answer::Admitted(_)), "{states} states: {answer:?}");
        manager.pool(GroupId(1)).unwrap().check_integrity().unwrap();
    }
}

#[test]
fn a_checkpoint_that_another_holds_is_not_written() {
    let mut manager = manager([group(STATE, 2)]);
    let mut sequence = admit(&mut manager, 0..30);
    step(&mut manager, &mut [&mut sequence]);
    // A twin begins with the same state, and the other block is in use.
    let twin = manager.fork(&mut sequence).unwrap();
    let _other = admit(&mut manager, 500..503);
    let missing = common::lacking(manager.reserve(&mut sequence, 8));
    assert_eq!(missing.group, GroupId(1));
    drop(twin);
    manager.reserve(&mut sequence, 8).unwrap().given().unwrap();
}

#[test]
fn a_checkpoint_stays_where_there_is_no_room_without_it_either() {
    let mut manager = manager([group(STATE, 1)]);
    let mut sequence = admit(&mut manager, 0..9);
    step(&mut manager, &mut [&mut sequence]);
    manager.extend(&mut sequence, &(9..30).collect::<Vec<u32>>()).unwrap();
    let named = |manager: &Manager| {
        let states = manager.pool(GroupId(1)).unwrap().snapshot();
        states.blocks.iter().filter(|block| block.hash.is_some()).count()
    };
    assert_eq!((sequence.resolved(), named(&manager)), (8, 1));
    let held = sequence.block_count(GroupId(0)) as u64;
    manager.set_budget(GroupId(0), Tier::Primary, held).unwrap();
    let missing = common::lacking(manager.reserve(&mut sequence, 8));
    assert_eq!((missing.group, named(&manager)), (GroupId(0), 1));
    manager.set_budget(GroupId(0), Tier::Primary, held + 1).unwrap();
    manager.reserve(&mut sequence, 8).unwrap().given().unwrap();
    assert_eq!(named(&manager), 0, "it goes on in the only block");
}

#[test]
fn the_end_of_a_declared_shared_prefix_is_a_checkpoint() {
    // Checkpoints lie every 64 tokens; the shared prefix ends within its twelfth block.
    let far = GroupKind::State { checkpoint_tokens: 64, drafts: 0 };
    let mut manager = manager([group(far, 32)]);
    let mut hits = Vec::new();
    for user in 1..5 {
        let mut request = Request::new((0..49).chain(1000 * user..1000 * user + 11).collect());
        request.content.shared_tokens = 49;
        let mut sequence = admitted(ask(&mut manager, request));
        hits.push(sequence.cached_tokens());
        while sequence.to_compute() > 0 {
            let left = sequence.to_compute() as u32;
            go_on(&mut manager, &mut sequence, left);
        }
        drop(sequence);
        settle(&mut manager);
    }
    assert_eq!(hits, [0, 48, 48, 48]);
}

#[test]
fn a_sequence_comes_back_although_its_checkpoint_lies_in_the_only_block() {
    let mut manager = manager([group(STATE, 1)]);
    let mut sequence =
        admitted(manager.ask_all(&mut [Request::new((0..30).collect())], 8).pop().unwrap());
    step(&mut manager, &mut [&mut sequence]);
    settle(&mut manager);
    manager.suspend(&mut sequence).unwrap();
    settle(&mut manager);
    // The copy of the checkpoint would take a second block, which nobody will ever give back.
    assert_eq!(manager.resume(&mut sequence), Ok(Room::Given(0)));
    go_on(&mut manager, &mut sequence, 8);
    assert_eq!(sequence.resolved(), 8);
}
