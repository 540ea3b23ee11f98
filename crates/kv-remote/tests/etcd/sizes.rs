//! Public functions with 0, 1 and the largest numbers: taken or refused, without a panic.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kv_remote::Member;
use kv_remote::etcd::{EtcdOptions, Membership};

pub(crate) fn options_of_any_numbers() {
    // Threads of memberships do not panic either.
    static PANICS: AtomicU64 = AtomicU64::new(0);
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        PANICS.fetch_add(1, Ordering::SeqCst);
        hook(panic);
    }));
    let own = Member { name: "a".to_owned(), address: "unix:/nowhere".parse().unwrap() };
    let times = [Duration::ZERO, Duration::from_nanos(1), Duration::from_secs(2), Duration::MAX];
    for lease in times {
        for every in times {
            for call_max in [Duration::ZERO, Duration::from_secs(1), Duration::MAX] {
                let mut options = EtcdOptions::new(vec!["http://127.0.0.1:1".to_owned()], "/");
                (options.lease, options.every, options.call_max) = (lease, every, call_max);
                let joined = Membership::join(options.clone(), own.clone(), |_| true);
                assert_eq!(joined.is_ok(), lease >= Duration::from_secs(2));
                let followed = Membership::follow(options, |_| false);
                assert_eq!(followed.is_ok(), joined.is_ok());
                for membership in [joined, followed].into_iter().flatten() {
                    assert!(membership.members().is_empty());
                    assert!(!membership.stats().is_listed);
                    membership.leave();
                }
            }
        }
    }
    for number in [0, 1, usize::from(u16::MAX)] {
        let endpoint = format!("http://127.0.0.1:{number}");
        let options = EtcdOptions::new(vec![endpoint; number.min(100)], &"p".repeat(number));
        assert_eq!(Membership::follow(options, |_| true).is_ok(), number > 0);
    }
    assert_eq!(PANICS.load(Ordering::SeqCst), 0);
}
