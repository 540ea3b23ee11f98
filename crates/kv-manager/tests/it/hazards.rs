//! What has gone wrong in other systems, one test or more a hazard (docs/HAZARDS.md).

use crate::common::sampled;
use crate::prelude::*;

fn cached(manager: &mut Manager, ids: &[u32]) -> u64 {
    let mut request = Request::new([ids, &[u32::MAX]].concat());
    request.waits = false;
    admitted(ask(manager, request)).cached_tokens()
}

#[test]
fn h24_rejected_drafts_are_never_shared() {
    // A prompt of 6 tokens and a sampled one; three drafts would fill the second block.
    let ids: Vec<u32> = (0..6).chain([60, 61, 62, 63]).collect();
    for accepted in 0..=3 {
        let mut manager = manager(16, 0);
        let mut sequence = sampled(&mut manager, 0..6, 60);
        go_on(&mut manager, &mut sequence, 4);
        assert_eq!(cached(&mut manager, &ids), 4, "nothing is judged yet");
        let out: Vec<u32> = ids[7..7 + accepted].iter().copied().chain([99]).collect();
        manager.commit(&mut sequence, 2, &out).unwrap();
        // The second block has tokens 4 to 7: the sampled one and the first draft are in it.
        let expected = if accepted >= 1 { 8 } else { 4 };
        assert_eq!(cached(&mut manager, &ids), expected, "{accepted} drafts accepted");
        assert_eq!(sequence.resolved(), 7 + accepted as u64);
    }
}

#[test]
fn h24_the_sampled_token_has_an_id_before_it_has_kv() {
    for short_way in [true, false] {
        let mut manager = manager(16, 0);
        let mut sequence = computed(&mut manager, 0..7);
        if !short_way {
            // Whatever concerns all sequences has each looked at anew.
            manager.set_placeholder_ids(Vec::new());
        }
        manager.commit(&mut sequence, 1, &[7]).unwrap();
        assert_eq!(cached(&mut manager, &[0, 1, 2, 3, 4, 5, 6, 7]), 4);
        go_on(&mut manager, &mut sequence, 1);
        assert_eq!(cached(&mut manager, &[0, 1, 2, 3, 4, 5, 6, 7]), 8);
    }
}

/// The copies of a plan that stay on the device.
fn on_device(plan: &StepPlan) -> Vec<(u32, u32, u32)> {
    let device = |at: Location| (at.tier == Tier::Primary).then_some(at.id.index() as u32);
    let all = plan.copies.iter();
    all.filter_map(|copy| Some((device(copy.from)?, device(copy.to)?, copy.tokens))).collect()
}

fn block(sequence: &Sequence, index: usize) -> u32 {
    sequence.block(GroupId(0), index).unwrap().index() as u32
}

#[test]
fn h25_the_first_write_to_a_block_of_two_forks_copies_it() {
    let mut manager = manager(16, 0);
    let mut first = computed(&mut manager, 0..6);
    assert_eq!(manager.fork(&mut first).unwrap_err(), ChangeError::Later);
    manager.commit(&mut first, 1, &[6]).unwrap();
    let mut second = manager.fork(&mut first).unwrap();
    let shared = block(&first, 1);
    assert_eq!((block(&second, 0), block(&second, 1)), (block(&first, 0), shared));

    assert!(manager.reserve(&mut first, 1).unwrap().given().unwrap().copied);
    assert!(
        !manager.reserve(&mut second, 1).unwrap().given().unwrap().copied,
        "it is the last holder"
    );
    assert_ne!(block(&first, 1), shared);
    assert_eq!(block(&second, 1), shared);
    let plan = step(&mut manager, &mut [&mut first, &mut second]);
    assert_eq!(on_device(&plan), [(shared, block(&first, 1), 2)]);
    let edit = plan.edits.iter().rfind(|edit| Some(edit.row) == first.row()).unwrap();
    assert_eq!((edit.first, edit.count), (1, 1), "the table changes in the same step");
    drop((first, second));
    check_empty(&mut manager);
}

#[test]
fn h25_a_cut_inside_a_cached_block_leaves_it_to_the_others() {
    let mut manager = manager(16, 0);
    let mut first = computed(&mut manager, 0..9);
    let mut second = admit(&mut manager, 0..9);
    assert_eq!(second.cached_tokens(), 8);
    let shared = block(&first, 1);
    manager.truncate(&mut first, 6).unwrap();
    assert_eq!(block(&first, 1), shared, "nobody has written yet");
    manager.extend(&mut first, &[70, 71]).unwrap();
    assert!(manager.reserve(&mut first, 2).unwrap().given().unwrap().copied);
    let plan = step(&mut manager, &mut [&mut first, &mut second]);
    assert_eq!(on_device(&plan), [(shared, block(&first, 1), 2)]);
    assert_eq!(block(&second, 1), shared);
    assert_eq!(cached(&mut manager, &[0, 1, 2, 3, 4, 5, 6, 7]), 8, "no name is revoked");
    assert_eq!(cached(&mut manager, &[0, 1, 2, 3, 4, 5, 70, 71]), 8);
}

fn with(ids: Range<u32>, content: Content) -> Request {
    let mut request = Request::new(ids.collect());
    request.content = content;
    request.waits = false;
    request
}

#[test]
fn h28_a_request_that_is_asked_elsewhere_or_changed_is_named_anew() {
    let of = |block_tokens: u32| {
        let options = ManagerOptions::new(block_tokens, PoolConfig::primary_only(8));
        made(options)
    };
    let full = |manager: &mut Manager| {
        let tokens = manager.options().groups[0].block_tokens * 8;
        admit(manager, 500_000..500_000 + tokens)
    };
    let ask = |manager: &mut Manager, request: &mut Request| {
        manager.ask_all(std::slice::from_mut(request), u64::MAX).pop().unwrap()
    };
    let hit =
        |manager: &mut Manager, ids| admitted(ask(manager, &mut Request::new(ids))).cached_tokens();
    for (first, second) in [(16, 4), (4, 16), (4, 4)] {
        let (mut one, mut other) = (of(first), of(second));
        let held = full(&mut one);
        let ids: Vec<u32> = (0..second + 1).collect();
        let mut request = Request::new(ids.clone());
        assert!(matches!(ask(&mut one, &mut request), Answer::NoRoom(_)));
        drop(held);
        let mut sequence = admitted(ask(&mut other, &mut request));
        step(&mut other, &mut [&mut sequence]);
        drop(sequence);
        step(&mut other, &mut []);
        assert_eq!(hit(&mut other, ids), u64::from(second), "from {first}");
    }
    let mut manager = of(4);
    let tenant = manager.add_tenant().unwrap();
    for change in [
        (|request: &mut Request, _| request.content.adapter = vec![1]) as fn(&mut Request, _),
        |request, tenant| request.tenant = tenant,
    ] {
        let held = full(&mut manager);
        let mut request = Request::new((0..5).collect());
        assert!(matches!(ask(&mut manager, &mut request), Answer::NoRoom(_)));
        drop(held);
        step(&mut manager, &mut []);
        change(&mut request, tenant);
        let sequence = admitted(ask(&mut manager, &mut request));
        finish(&mut manager, sequence);
        assert_eq!(hit(&mut manager, (0..5).collect()), 0, "of somebody else");
        step(&mut manager, &mut []);
    }
    // An engine's own names are of the size that it was asked for.
    let (mut one, mut other) = (of(16), of(4));
    let _held = full(&mut one);
    let mut request = Request::named(20, vec![BlockHash::from_u128(7)]);
    assert!(matches!(ask(&mut one, &mut request), Answer::NoRoom(_)));
    let Answer::Refused(error) = ask(&mut other, &mut request) else { panic!() };
    assert_eq!(error, AdmitError::Tokens(TokensError::Names { names: 1, blocks: 5 }));
}

#[test]
fn h28_equal_ids_with_other_content_are_other_blocks() {
    let inputs = |at, input: &[u8]| vec![(at, input.to_vec())];
    let all = [
        Content::default(),
        Content { adapter: b"lora 1".to_vec(), ..Content::default() },
        Content { adapter: b"lora 2".to_vec(), ..Content::default() },
        Content { salt: b"lora 1".to_vec(), ..Content::default() },
        Content { inputs: inputs(1, b"cat"), ..Content::default() },
        Content { inputs: inputs(1, b"dog"), ..Content::default() },
        Content { inputs: inputs(2, b"cat"), ..Content::default() },
        Content { salt: b"a".to_vec(), ..Content::default() },
        Content { salt: b"b".to_vec(), ..Content::default() },
    ];
    let mut manager = manager(64, 0);
    for (at, content) in all.iter().enumerate() {
        for (before, other) in all.iter().enumerate() {
            let hit = admitted(ask(&mut manager, with(0..9, other.clone())));
            let expected = if before < at { 8 } else { 0 };
            assert_eq!(hit.cached_tokens(), expected, "{content:?} and {other:?}");
        }
        let sequence = admitted(ask(&mut manager, with(0..9, content.clone())));
        finish(&mut manager, sequence);
    }
    // What enters at a later block leaves those before it alone.
    let late = admitted(ask(
        &mut manager,
        with(0..9, Content { inputs: inputs(5, b"cat"), ..Content::default() }),
    ));
    assert_eq!(late.cached_tokens(), 4);
}

#[test]
fn h28_tenants_share_what_both_declare_shared_and_no_more() {
    let mut manager = manager(64, 0);
    let tenants = [manager.add_tenant().unwrap(), manager.add_tenant().unwrap()];
    let mut hit = |tenant: usize, shared_tokens| {
        let content = Content { shared_tokens, ..Content::default() };
        let mut request = with(0..17, content);
        request.tenant = tenants[tenant];
        let mut sequence = admitted(ask(&mut manager, request));
        step(&mut manager, &mut [&mut sequence]);
        let cached = sequence.cached_tokens();
        drop(sequence);
        step(&mut manager, &mut []);
        cached
    };
    assert_eq!(hit(0, 0), 0);
    assert_eq!(hit(1, 0), 0, "another tenant's salt");
    assert_eq!(hit(0, 0), 16);
    assert_eq!(hit(0, 11), 0, "declared shared, it has names of its own");
    assert_eq!(hit(1, 11), 8, "the third block is not wholly inside");
    assert_eq!(hit(1, 8), 16, "the same two blocks are inside");
    assert_eq!(hit(1, 7), 4);
}

/// The names of a prompt that a tenant, or nobody, has computed, and is forgotten then.
fn names_of(manager: &mut Manager, tenant: TenantId, content: Content) -> Vec<BlockHash> {
    let mut request = with(0..9, content);
    request.tenant = tenant;
    drop(request_computed(manager, request));
    let blocks = manager.first_pool().snapshot().blocks;
    let names: Vec<_> = blocks.iter().filter_map(|view| view.hash).collect();
    assert_eq!((names.len(), manager.forget(&names)), (2, 2));
    names
}

fn request_computed(manager: &mut Manager, request: Request) -> Sequence {
    let mut sequence = admitted(ask(manager, request));
    step(manager, &mut [&mut sequence]);
    sequence
}

#[test]
fn h28_no_salt_that_a_request_can_give_is_a_tenants_own() {
    let mut manager = manager(64, 0);
    let tenants = [manager.add_tenant().unwrap(), manager.add_tenant_with_key(b"key").unwrap()];
    for tenant in tenants {
        let mut own = with(0..9, Content::default());
        own.tenant = tenant;
        drop(request_computed(&mut manager, own));
    }
    // The last one is what a key is made into.
    let numbers = tenants.map(|tenant| tenant.number().to_le_bytes().to_vec());
    let others = [vec![1], Vec::new(), b"key".to_vec(), b"\x01key".to_vec()];
    for salt in numbers.into_iter().chain(others) {
        let request = with(0..9, Content { salt, ..Content::default() });
        let other = admitted(ask(&mut manager, request));
        assert_eq!(other.cached_tokens(), 0, "another's content was found");
    }
}

/// What is on disk, and on other hosts, has names of tenants that were added there in another order.
#[test]
fn h28_the_order_of_tenants_decides_no_name() {
    let mut all = Vec::new();
    for _ in 0..2 {
        let mut manager = manager(64, 0);
        for _ in 0..2 {
            let tenant = manager.add_tenant().unwrap();
            all.extend(names_of(&mut manager, tenant, Content::default()));
        }
    }
    assert_eq!(all.iter().collect::<HashSet<_>>().len(), 4 * 2);
}

#[test]
fn h28_a_tenants_key_names_it_in_every_manager() {
    let names = |keys: &[&[u8]], asked: &[u8]| {
        let mut manager = manager(64, 0);
        let add = |key: &&[u8]| manager.add_tenant_with_key(key).unwrap();
        let tenants: Vec<_> = keys.iter().map(add).collect();
        let at = keys.iter().position(|key| *key == asked).unwrap();
        names_of(&mut manager, tenants[at], Content::default())
    };
    let one = names(&[b"one", b"other"], b"one");
    assert_eq!(one, names(&[b"other", b"third", b"one"], b"one"), "whatever its number");
    assert_ne!(one, names(&[b"one", b"other"], b"other"));
    let mut manager = manager(64, 0);
    let salt = Content { salt: b"one".to_vec(), ..Content::default() };
    assert_ne!(one, names_of(&mut manager, TenantId::NOBODY, salt.clone()));
    let tenant = manager.add_tenant_with_key(b"other").unwrap();
    let given = names_of(&mut manager, tenant, salt.clone());
    assert_eq!(
        given,
        names_of(&mut manager, TenantId::NOBODY, salt),
        "a salt that is given counts"
    );
}

#[test]
fn h28_names_that_an_engine_gives_are_apart_for_tenants_as_well() {
    let given: Vec<_> = [1, 2].map(BlockHash::from_u128).to_vec();
    let mut manager = manager(64, 0);
    let tenants = [
        TenantId::NOBODY,
        manager.add_tenant().unwrap(),
        manager.add_tenant().unwrap(),
        manager.add_tenant_with_key(b"key").unwrap(),
    ];
    let salts: [&[u8]; 4] = [b"", b"\x01\0", b"key", b"\x01key"];
    for (at, tenant) in tenants.into_iter().chain([TenantId::NOBODY; 3]).enumerate() {
        let mut request = Request::named(9, given.clone());
        request.waits = false;
        request.tenant = tenant;
        request.content.salt = salts[at.saturating_sub(3)].to_vec();
        let sequence = request_computed(&mut manager, request);
        assert_eq!(sequence.cached_tokens(), 0, "{at}");
        drop(sequence);
    }
}

/// A conversation of ten tokens, computed, and its next turn.
fn next_turn(manager: &mut Manager, turn: Tokens<'_>) -> Result<Sequence, ChangeError> {
    let mut sequence = admit(manager, 0..9);
    let at = step(manager, &mut [&mut sequence]).step;
    manager.commit(&mut sequence, at, &[9]).unwrap();
    manager.extend(&mut sequence, turn)?;
    let left = sequence.to_compute() as u32;
    manager.reserve(&mut sequence, left).unwrap().given().unwrap();
    step(manager, &mut [&mut sequence]);
    Ok(sequence)
}

fn hit(manager: &mut Manager, ids: &[u32], inputs: &[(u64, Vec<u8>)]) -> u64 {
    let mut request = Request::new([ids, &[u32::MAX]].concat());
    request.content.inputs = inputs.to_vec();
    request.waits = false;
    admitted(ask(manager, request)).cached_tokens()
}

#[test]
fn h33_a_picture_of_a_later_turn_is_part_of_the_name() {
    let mut manager = manager(64, 0);
    let turn: Vec<u32> = [10, 11].into_iter().chain([777; 8]).collect();
    let inputs = [(2, b"cat".to_vec())];
    let mut sequence =
        next_turn(&mut manager, Tokens::With { ids: &turn, inputs: &inputs }).unwrap();
    let all: Vec<u32> = (0..10).chain(turn).collect();
    let at = |at: u64, input: &[u8]| vec![(at, input.to_vec())];
    assert_eq!(sequence.inputs(), at(12, b"cat"));
    assert_eq!(hit(&mut manager, &all, &[]), 12, "equal ids without the picture");
    assert_eq!(hit(&mut manager, &all, &at(12, b"dog")), 12, "another picture");
    assert_eq!(hit(&mut manager, &all, &at(12, b"cat")), 20, "a prompt that has it all");
    // What a model gives out can stand for something else, too.
    let last = sequence.awaits().unwrap();
    let inputs = at(0, b"sound");
    let sampled = Tokens::With { ids: &[888], inputs: &inputs };
    manager.commit(&mut sequence, last, sampled).unwrap();
    manager.extend(&mut sequence, &[1, 2, 3]).unwrap();
    go_on(&mut manager, &mut sequence, 4);
    let all = [&all[..], &[888, 1, 2, 3]].concat();
    let both = [at(12, b"cat"), at(20, b"sound")].concat();
    assert_eq!(sequence.inputs(), both);
    assert_eq!(hit(&mut manager, &all, &at(12, b"cat")), 20);
    assert_eq!(hit(&mut manager, &all, &both), 24);
}

#[test]
fn h33_what_stands_behind_ids_is_cut_with_them() {
    let mut manager = manager(64, 0);
    let inputs = [(2, b"cat".to_vec())];
    let turn: Vec<u32> = (10..20).collect();
    let mut sequence =
        next_turn(&mut manager, Tokens::With { ids: &turn, inputs: &inputs }).unwrap();
    manager.truncate(&mut sequence, 13).unwrap();
    assert_eq!(sequence.inputs().len(), 1, "the first of its ids is there");
    manager.truncate(&mut sequence, 12).unwrap();
    assert_eq!(sequence.inputs(), []);
    // The same ids come as what they are.
    manager.extend(&mut sequence, &turn[2..]).unwrap();
    go_on(&mut manager, &mut sequence, 8);
    let all: Vec<u32> = (0..20).collect();
    assert_eq!(hit(&mut manager, &all, &[]), 20);
}

#[test]
fn h33_a_placeholder_is_not_given_without_what_it_stands_for() {
    let placeholder_ids = vec![700..=799, 900..=900];
    let mut later = manager(64, 0);
    later.set_placeholder_ids(vec![1..=1]);
    let answer = later.ask_all(&mut [Request::new(vec![0, 1])], u64::MAX).pop().unwrap();
    assert!(matches!(answer, Answer::Refused(AdmitError::Tokens(_))), "{answer:?}");
    let mut manager = made(ManagerOptions { placeholder_ids, ..options(64, 0) });
    let at = |at: u64| vec![(at, b"cat".to_vec())];
    let refused = |id, at| TokensError::Placeholder { id, at };
    // A request.
    for (inputs, expected) in [(vec![], Some(1)), (at(2), Some(1)), (at(1), None)] {
        let content = Content { inputs, ..Content::default() };
        let mut request = Request::new(vec![1, 700, 799, 2]);
        request.content = content;
        match (ask(&mut manager, request), expected) {
            (Answer::Refused(AdmitError::Tokens(error)), Some(at)) => {
                assert_eq!(error, refused(700, at));
            }
            (answer, expected) => assert!(expected.is_none(), "{answer:?}"),
        }
    }
    // A turn: each run of placeholders begins with an input, and so does one that goes on with what was there.
    let turns: [(&[u32], Vec<_>, Option<TokensError>); 6] = [
        (&[1, 900, 2], vec![], Some(refused(900, 11))),
        (&[1, 900, 2, 701], at(1), Some(refused(701, 13))),
        (&[1, 900, 2, 701], [at(1), at(3)].concat(), None),
        (&[701, 702], at(0), None),
        (&[699, 800, 899, 901], vec![], None),
        (&[1, 2], at(2), Some(TokensError::InputOutside { at: 2, tokens: 2 })),
    ];
    for (ids, inputs, expected) in turns {
        let turn = next_turn(&mut manager, Tokens::With { ids, inputs: &inputs });
        match (turn, expected) {
            (Err(ChangeError::Tokens(error)), Some(expected)) => assert_eq!(error, expected),
            (turn, expected) => assert!(turn.is_ok() && expected.is_none(), "{ids:?}: {turn:?}"),
        }
    }
    let inputs = [at(1), at(0)].concat();
    let turn = next_turn(&mut manager, Tokens::With { ids: &[1, 2], inputs: &inputs });
    assert_eq!(turn.unwrap_err(), ChangeError::Tokens(TokensError::InputsUnordered));
    // What is left of a picture that was cut says nothing of the ids that follow, nor does one that was cut off.
    let inputs = at(0);
    let turn = Tokens::With { ids: &[701, 702, 703], inputs: &inputs };
    let mut sequence = next_turn(&mut manager, turn).unwrap();
    let last = sequence.awaits().unwrap();
    let error = manager.commit(&mut sequence, last, &[704]).unwrap_err();
    assert_eq!(error, CommitError::Tokens(refused(704, 13)));
    for end in [12, 10] {
        manager.truncate(&mut sequence, end).unwrap();
        let error = manager.extend(&mut sequence, &[702]).unwrap_err();
        assert_eq!(error, ChangeError::Tokens(refused(702, end)));
        assert_eq!((sequence.known(), sequence.resolved()), (end, end));
    }
}

#[test]
fn h28_names_are_the_same_in_every_manager() {
    let names = || {
        let mut manager = manager(16, 0);
        let content = Content {
            adapter: b"a".to_vec(),
            inputs: vec![(5, b"cat".to_vec())],
            salt: b"s".to_vec(),
            shared_tokens: 4,
        };
        let mut sequence = admitted(ask(&mut manager, with(0..13, content)));
        step(&mut manager, &mut [&mut sequence]);
        let blocks = manager.first_pool().snapshot().blocks;
        let mut names: Vec<_> = blocks.iter().filter_map(|block| block.hash).collect();
        names.sort_unstable();
        names
    };
    assert_eq!(names(), names());
    // What is stored in files and told to routers must not change with a version.
    let expected: Vec<u128> = FIXED.to_vec();
    assert_eq!(names().iter().map(|name| name.to_u128()).collect::<Vec<_>>(), expected);
}

/// The names of the test above, as version 0.1 makes them.
const FIXED: [u128; 3] = [
    3396983507794407730064800453350061692,
    139894806408043851719068490260825886441,
    259819620345297508444038247707445273259,
];

/// What the device and the host hold, by block, as the plans say; each token's cell is its id.
#[derive(Default)]
struct Memory {
    cells: HashMap<(Tier, u32), Vec<u32>>,
}

impl Memory {
    fn carry_out(&mut self, plan: &StepPlan, batch: &[&Sequence]) {
        for copy in &plan.copies {
            let key = |at: Location| (at.tier, at.id.index() as u32);
            let source = self.cells.get(&key(copy.from)).cloned().unwrap_or_default();
            let target = self.cells.entry(key(copy.to)).or_default();
            target.resize(BLOCK as usize, u32::MAX);
            let tokens = copy.tokens as usize;
            target[..tokens].copy_from_slice(&source[..tokens]);
        }
        for (row, sequence) in plan.batch.iter().zip(batch) {
            let Start::At(start) = row.start else { panic!("{row:?}") };
            for at in start..start + u64::from(row.tokens) {
                let id = block(sequence, (at / u64::from(BLOCK)) as usize);
                let cells = self.cells.entry((Tier::Primary, id)).or_default();
                cells.resize(BLOCK as usize, u32::MAX);
                cells[(at % u64::from(BLOCK)) as usize] = sequence.ids().unwrap()[at as usize];
            }
        }
    }

    fn check(&self, sequence: &Sequence) {
        for (at, id) in sequence.ids().unwrap()[..sequence.resolved() as usize].iter().enumerate() {
            let block = block(sequence, at / BLOCK as usize);
            let cell = self.cells[&(Tier::Primary, block)][at % BLOCK as usize];
            assert_eq!(cell, *id, "token {at} in block {block}");
        }
    }
}

#[test]
fn h29_a_suspended_sequence_comes_back_as_it_was() {
    for tokens in 1..14 {
        for steps_between in 0..3 {
            for others in [0, 8] {
                let mut manager = manager(8, 8);
                let mut memory = Memory::default();
                let mut sequence = admit(&mut manager, 0..tokens);
                let plan = step(&mut manager, &mut [&mut sequence]);
                memory.carry_out(&plan, &[&sequence]);
                manager.suspend(&mut sequence).unwrap();
                assert!(sequence.is_suspended() && sequence.row().is_some(), "an id is to come");
                assert!(manager.reserve(&mut sequence, 1).is_err());
                manager.commit(&mut sequence, 1, &[99]).unwrap();
                assert!(sequence.is_suspended() && sequence.row().is_none());
                assert!(manager.reserve(&mut sequence, 1).is_err());
                for _ in 0..steps_between {
                    memory.carry_out(&step(&mut manager, &mut []), &[]);
                }
                if others > 0 && steps_between > 0 {
                    // Everything on the device is another's, and the named blocks go to the host or are lost.
                    let mut other = admit(&mut manager, 1000..1000 + others * BLOCK);
                    let plan = step(&mut manager, &mut [&mut other]);
                    memory.carry_out(&plan, &[&other]);
                    drop(other);
                    memory.carry_out(&step(&mut manager, &mut []), &[]);
                }
                let end = manager.resume(&mut sequence).unwrap().given().unwrap();
                assert_eq!(end, u64::from(tokens), "the host has room for all");
                let left = sequence.to_compute();
                let plan = go_on(&mut manager, &mut sequence, left as u32);
                memory.carry_out(&plan, &[&sequence]);
                memory.check(&sequence);
                drop(sequence);
                check_empty(&mut manager);
            }
        }
    }
}

#[test]
fn h29_what_has_left_the_cache_meanwhile_is_computed_again() {
    let mut manager = Manager::new(options(4, 1)).unwrap();
    let mut memory = Memory::default();
    let mut sequence = admit(&mut manager, 0..10);
    memory.carry_out(&step(&mut manager, &mut [&mut sequence]), &[&sequence]);
    manager.commit(&mut sequence, 1, &[99]).unwrap();
    manager.suspend(&mut sequence).unwrap();
    memory.carry_out(&step(&mut manager, &mut []), &[]);
    let mut other = admit(&mut manager, 1000..1016);
    memory.carry_out(&step(&mut manager, &mut [&mut other]), &[&other]);
    // The other has all blocks.
    common::lacking(manager.resume(&mut sequence));
    assert!(sequence.is_suspended());
    drop(other);
    memory.carry_out(&step(&mut manager, &mut []), &[]);
    assert_eq!(manager.resume(&mut sequence).unwrap().given().unwrap(), 0);
    assert_eq!(sequence.to_compute(), 11);
    manager.reserve(&mut sequence, 11).unwrap().given().unwrap();
    memory.carry_out(&step(&mut manager, &mut [&mut sequence]), &[&sequence]);
    memory.check(&sequence);
    assert_eq!(sequence.resolved(), 11);
    drop(sequence);
    check_empty(&mut manager);
}

#[test]
fn h29_a_suspension_without_room_changes_nothing() {
    let mut manager = Manager::new(options(4, 0)).unwrap();
    let mut sequence = sampled(&mut manager, 0..10, 99);
    let blocks: Vec<_> = (0..3).map(|at| sequence.block(GroupId(0), at)).collect();
    assert!(matches!(manager.suspend(&mut sequence), Err(SuspendError::NoRoom(_))));
    assert!(!sequence.is_suspended());
    assert_eq!((0..3).map(|at| sequence.block(GroupId(0), at)).collect::<Vec<_>>(), blocks);
    go_on(&mut manager, &mut sequence, 1);
}
