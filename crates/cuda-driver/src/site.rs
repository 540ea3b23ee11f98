//! Where in a program a driver call comes from, for drivers that report it.
//!
//! The seam is called through a trait object, which hides the caller's place. What a public function
//! was called from is therefore noted on the thread: [`enter`] at its beginning, in a function with
//! `#[track_caller]`. Functions nest; the outermost place is the program's own, the innermost says
//! which of our calls it was.

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::panic::Location;

/// Where a call was made.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Site {
    /// The place from which the first function that called [`enter`] was called: the program's own.
    pub at: &'static Location<'static>,
    /// The place inside these crates that made the last such call, where it is another.
    pub through: Option<&'static Location<'static>>,
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.at.file(), self.at.line())?;
        match self.through {
            Some(through) => write!(f, " (through {}:{})", through.file(), through.line()),
            None => Ok(()),
        }
    }
}

type Place = Option<&'static Location<'static>>;

thread_local! {
    /// The fields of what [`current`] answers, apart: a function that is entered inside another reads one
    /// and writes one.
    static AT: Cell<Place> = const { Cell::new(None) };
    static THROUGH: Cell<Place> = const { Cell::new(None) };
}

/// Brings back, when it is dropped, the place that was noted before [`enter`] or [`leave`].
#[derive(Debug)]
#[must_use = "the place holds until this is dropped"]
pub struct Entered {
    at: Place,
    through: Place,
    /// Of one thread.
    thread: PhantomData<*const ()>,
}

/// Notes the caller's place for the driver calls that this thread makes until the answer is dropped.
///
/// Call it first in a function with `#[track_caller]`, so that the place is that of its caller.
#[inline]
#[track_caller]
pub fn enter() -> Entered {
    let here = Location::caller();
    let at = AT.get();
    let Some(outer) = at else {
        // Nothing was called through anything.
        AT.set(Some(here));
        return Entered { at, through: None, thread: PhantomData };
    };
    let through = THROUGH.replace(Some(here).filter(|here| !is_same(here, outer)));
    Entered { at, through, thread: PhantomData }
}

/// Whether both are one place; quick where they are one object, or of different lines.
fn is_same(one: &Location<'_>, other: &Location<'_>) -> bool {
    std::ptr::eq(one, other) || (one.line() == other.line() && one == other)
}

/// Forgets the place for the driver calls that this thread makes until the answer is dropped.
///
/// For code of the program that one of our functions calls back: its calls have places of their own.
#[inline]
pub fn leave() -> Entered {
    Entered { at: AT.take(), through: THROUGH.take(), thread: PhantomData }
}

/// The place that is noted on this thread.
#[inline]
#[must_use]
pub fn current() -> Option<Site> {
    AT.get().map(|at| Site { at, through: THROUGH.get() })
}

impl Drop for Entered {
    #[inline]
    fn drop(&mut self) {
        AT.set(self.at);
        THROUGH.set(self.through);
    }
}
