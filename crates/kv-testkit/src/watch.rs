//! A driver that notes the program's line of each call and each access of the host.

use std::sync::{Arc, Mutex};

use cuda_driver::{CountingDriver, Driver, HostAccess, site};

type Places = Mutex<Vec<(&'static str, Option<site::Site>)>>;

/// What was noted since it was last taken. Accesses of the host are calls named `host`.
#[derive(Clone, Default)]
pub struct Watch {
    calls: Arc<Places>,
    accesses: Arc<Mutex<Vec<HostAccess>>>,
}

impl Watch {
    /// Passes calls on to `upstream`, and notes them.
    pub fn over(&self, upstream: Arc<dyn Driver>) -> Arc<dyn Driver> {
        let (calls, other, accesses) =
            (Arc::clone(&self.calls), Arc::clone(&self.calls), Arc::clone(&self.accesses));
        let counting = CountingDriver::watched(upstream, move |call| {
            calls.lock().unwrap().push((call, site::current()))
        })
        .watching_accesses(move |access| {
            other.lock().unwrap().push(("host", site::current()));
            accesses.lock().unwrap().push(access);
        });
        Arc::new(counting)
    }

    /// The calls, with their places.
    pub fn take(&self) -> Vec<(&'static str, Option<site::Site>)> {
        std::mem::take(&mut self.calls.lock().unwrap())
    }

    /// The accesses of the host.
    pub fn accesses(&self) -> Vec<HostAccess> {
        std::mem::take(&mut self.accesses.lock().unwrap())
    }

    /// Checks that `call` was made, and that it and all others were made for `line` of `file`; answers
    /// whether one of them came through a line of these crates.
    #[track_caller]
    pub fn check(&self, call: &str, (file, line): (&str, u32)) -> bool {
        let calls = self.take();
        assert!(calls.iter().any(|(name, _)| *name == call), "no {call} in {calls:?}");
        let mut through = false;
        for (name, site) in calls {
            let site = site.unwrap_or_else(|| panic!("{name} has no place"));
            assert_eq!((site.at.file(), site.at.line()), (file, line), "{name} came from {site}");
            through |= site.through.is_some_and(|through| through.file() != file);
        }
        assert_eq!(site::current(), None, "a place is noted after the call");
        through
    }
}

/// Does `$work`, which stands on the macro's line, and checks that every call of the driver was made for
/// that line, and `$call` among them; answers `$work`'s result, and whether a call came through these crates.
#[macro_export]
macro_rules! from_here {
    ($watch:expr, $call:literal, $work:expr) => {{
        let watch = $watch.clone();
        watch.take();
        let outcome = $work;
        (outcome, watch.check($call, (file!(), line!())))
    }};
}
