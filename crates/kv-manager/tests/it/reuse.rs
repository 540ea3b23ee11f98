//! What an engine says of the future of a sequence, and what its blocks are worth then.

use crate::prelude::*;
use kv_pool::PoolView;

const OVER: Reuse = Reuse { shared_head: 0, then: Some(ReuseHint::Over) };

fn manager(further: impl IntoIterator<Item = GroupKind>) -> Manager {
    let further = further.into_iter().map(|kind| group(kind, 32));
    made(with_groups(options(32, 0), further))
}

/// A computed sequence of a prompt whose future is said by its request.
fn told(manager: &mut Manager, ids: Range<u32>, reuse: Reuse) -> Sequence {
    let mut request = Request::new(ids.collect());
    request.reuse = reuse;
    let mut sequence = admitted(ask(manager, request));
    let number = step(manager, &mut [&mut sequence]).step;
    manager.commit(&mut sequence, number, &[1_000]).unwrap();
    sequence
}

/// Cached blocks of the lowest priority, and of the default one.
fn worth(pool: PoolView) -> (usize, usize) {
    let blocks = pool.snapshot().blocks;
    let count = |priority| {
        blocks.iter().filter(|block| block.hash.is_some() && block.priority == priority).count()
    };
    (count(Priority::MIN), count(Priority::DEFAULT))
}

#[test]
fn a_session_that_is_over_goes_first() {
    let mut manager = manager([]);
    let mut other = computed(&mut manager, 100..108);
    drop(told(&mut manager, 0..9, OVER));
    assert_eq!(worth(manager.first_pool()), (2, 2));
    other.set_reuse(OVER);
    assert_eq!(other.reuse(), OVER);
    drop(other);
    assert_eq!(worth(manager.first_pool()), (4, 0), "the last word counts");
    // Who comes for it after all makes it as good as any.
    drop(computed(&mut manager, 0..9));
    assert_eq!(worth(manager.first_pool()), (2, 2));
}

#[test]
fn what_the_last_tokens_fill_is_over_too() {
    let mut manager = manager([]);
    let mut sequence = told(&mut manager, 0..7, OVER);
    let number = go_on(&mut manager, &mut sequence, 1).step;
    manager.commit(&mut sequence, number, &[1_001]).unwrap();
    drop(sequence);
    assert_eq!(worth(manager.first_pool()), (2, 0));
}

#[test]
fn a_head_that_others_share_is_not_over() {
    let mut manager = manager([]);
    let reuse = Reuse { shared_head: 5, ..OVER };
    drop(told(&mut manager, 0..12, reuse));
    assert_eq!(worth(manager.first_pool()), (2, 1), "the block that is full of the head");
    let whole = Reuse { shared_head: u64::MAX, ..OVER };
    drop(told(&mut manager, 20..32, whole));
    assert_eq!(worth(manager.first_pool()), (2, 4));
}

#[test]
fn a_fork_keeps_what_it_holds() {
    let mut manager = manager([]);
    let mut sequence = told(&mut manager, 0..8, OVER);
    let fork = manager.fork(&mut sequence).unwrap();
    drop(sequence);
    assert_eq!(worth(manager.first_pool()), (0, 2));
    assert_eq!(fork.reuse(), OVER);
    drop(fork);
    assert_eq!(worth(manager.first_pool()), (2, 0));
}

#[test]
fn groups_whose_blocks_do_not_follow_each_other_go_by_those_where_they_do() {
    let mut manager = manager([GroupKind::Window { tokens: 64, sinks: 0 }]);
    let window = |manager: &Manager| worth(manager.pool(GroupId(1)).unwrap());
    // Two sessions with a head of two blocks that nobody has declared. The head has its names from a step of its own.
    let ids = |own: u32| (0..8).chain(own..own + 8).collect::<Vec<_>>();
    let mut sequences = [100, 200].map(|own| {
        let mut request = Request::new(ids(own));
        request.reuse = OVER;
        let mut sequence = admitted(manager.ask_all(&mut [request], 8).pop().unwrap());
        step(&mut manager, &mut [&mut sequence]);
        let left = sequence.to_compute() as u32;
        if left > 0 {
            go_on(&mut manager, &mut sequence, left);
        }
        Some(sequence)
    });
    drop(sequences[0].take());
    assert_eq!(worth(manager.first_pool()), (2, 4));
    assert_eq!(window(&manager), (2, 4));
    drop(sequences[1].take());
    assert_eq!(worth(manager.first_pool()), (4, 2), "two sessions have begun with it");
    assert_eq!(window(&manager), (4, 2));
}

#[test]
fn what_is_to_come_back_is_worth_what_it_was() {
    let mut manager = manager([]);
    let then = Some(ReuseHint::BackIn(Duration::from_secs(1)));
    drop(told(&mut manager, 0..12, Reuse { shared_head: 4, then }));
    assert_eq!(worth(manager.first_pool()), (0, 3));
}
