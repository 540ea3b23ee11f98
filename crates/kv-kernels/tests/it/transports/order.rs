//! Transfers as operations of their stream.

use kv_kernels::link::Transport;

use super::machine::{Machine, Moving};

const SEEDS: u64 = 24;

#[test]
fn a_transfer_is_one_operation_of_its_stream() {
    for seed in 0..SEEDS {
        for transport in Transport::ALL {
            let machine = Machine::new(seed);
            let mut link = machine.link(transport);
            let moving = Moving::new(&machine, true);
            let (stream, pages) = (&machine.stream, moving.scene.pages.span());
            // Pages are filled behind other work before, and wiped right after.
            let (before, _) = moving.scene.bytes(stream);
            let kept = machine.upload(&before);
            stream.fill(pages, 0xEE).unwrap();
            stream.copy_on_device(pages, kept.span()).unwrap();
            moving.run(&mut link, stream).unwrap();
            stream.fill(pages, 0xDD).unwrap();
            stream.copy_on_device(pages, kept.span()).unwrap();
            assert!(moving.is_right(stream), "{transport}, seed {seed}");
        }
    }
}

#[test]
fn a_transfer_neither_allocates_nor_waits() {
    const NONE_OF: [&str; 5] = ["Synchronize", "Query", "Alloc", "Create", "Free"];
    for transport in Transport::ALL {
        let machine = Machine::new(3);
        let mut link = machine.link(transport);
        let both = [true, false].map(|to_host| Moving::new(&machine, to_host));
        let forbidden = |machine: &Machine| -> Vec<(&'static str, u64)> {
            let calls = machine.counts.calls().into_iter();
            calls.filter(|(name, _)| NONE_OF.iter().any(|part| name.contains(part))).collect()
        };
        let before = forbidden(&machine);
        for moving in &both {
            moving.run(&mut link, &machine.stream).unwrap();
        }
        assert_eq!(forbidden(&machine), before, "{transport}");
        machine.stream.synchronize().unwrap();
    }
}
