//! The current context of a thread, and whether this crate keeps it current.

use std::cell::Cell;

use crate::guard;

use crate::{Driver, DriverResult};

/// A context, with the driver object that it was made current through.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Kept {
    /// Address of the driver object, which is alive: the [`Keeping`] that keeps the context current
    /// holds its device.
    driver: usize,
    context: u64,
}

impl Kept {
    fn of(driver: &dyn Driver, context: u64) -> Self {
        Self { driver: std::ptr::from_ref(driver).cast::<()>().addr(), context }
    }
}

thread_local! {
    /// # Invariants
    /// The context that the innermost [`Keeping`] of this thread has made current, if this crate
    /// has made no other context current since.
    static KEPT: Cell<Option<Kept>> = const { Cell::new(None) };
}

/// A context bound on this thread; a drop restores the context that was current before.
pub(crate) struct Bound<'a> {
    driver: &'a dyn Driver,
    /// The context to restore, and the kept one, unless this context was current already.
    restore: Option<(u64, Option<Kept>)>,
}

impl<'a> Bound<'a> {
    /// Asks the driver for the current context, unless this thread keeps one current.
    ///
    /// # Safety
    /// - `context` is a live context of `driver`.
    pub(crate) unsafe fn enter(driver: &'a dyn Driver, context: u64) -> DriverResult<Self> {
        let (wanted, kept) = (Kept::of(driver, context), KEPT.get());
        let current = match kept {
            Some(kept) if guard!("driver.kept-own", kept.driver == wanted.driver, else true) => {
                kept.context
            }
            _ => driver.ctx_get_current()?,
        };
        if guard!("driver.own-context-bound", current == context, else true) {
            return Ok(Self { driver, restore: None });
        }
        // SAFETY: the caller passes a live context.
        unsafe { driver.ctx_set_current(context) }?;
        // The kept context may not be assumed current until it is restored.
        guard!("driver.bound-is-not-kept", KEPT.set(None));
        Ok(Self { driver, restore: Some((current, kept)) })
    }
}

impl Drop for Bound<'_> {
    fn drop(&mut self) {
        if let Some((previous, kept)) = self.restore {
            // SAFETY: it was current on this thread when `enter` ran, so it was live then; should
            // its owner have destroyed it since, the driver answers with an error.
            match unsafe { self.driver.ctx_set_current(previous) } {
                Ok(()) => KEPT.set(kept),
                Err(error) => {
                    tracing::warn!(%error, "the previous context could not be restored");
                }
            }
        }
    }
}

/// A bound context that this thread keeps current, so that operations need not ask for it.
pub(crate) struct Keeping<'a> {
    bound: Bound<'a>,
    own: Kept,
    before: Option<Kept>,
}

impl<'a> Keeping<'a> {
    /// # Safety
    /// - `context` is a live context of `driver`.
    pub(crate) unsafe fn enter(driver: &'a dyn Driver, context: u64) -> DriverResult<Self> {
        // SAFETY: the caller passes a live context.
        let bound = unsafe { Bound::enter(driver, context) }?;
        let own = Kept::of(driver, context);
        Ok(Self { bound, own, before: KEPT.replace(Some(own)) })
    }
}

impl Drop for Keeping<'_> {
    fn drop(&mut self) {
        KEPT.set(self.before);
        if self.before == Some(self.own) {
            // An outer `Keeping` makes the check.
            return;
        }
        match self.bound.driver.ctx_get_current() {
            Ok(current) if current != self.own.context => {
                tracing::error!(
                    current,
                    kept = self.own.context,
                    "the context of a thread was changed while it was to be kept"
                );
            }
            _ => {}
        }
        // Then `bound` restores what was current before.
    }
}
