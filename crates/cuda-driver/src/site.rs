//! The line of the program behind a driver call, for drivers that report it.
//!
//! Calls of the seam go through a trait object, which hides the caller's line. So a public function
//! notes its caller on the thread: it begins with [`enter`], and has `#[track_caller]`. Functions
//! nest. The outermost line is the program's own, the innermost names the call of our crates.

use crate::guard;

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::panic::Location;

/// The origin of a call.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Site {
    /// The program's line: the caller of the outermost function with [`enter`].
    pub at: &'static Location<'static>,
    /// The line inside these crates that called the innermost such function, if it is another one.
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
    /// The two fields of [`current`]'s result, stored apart: a nested function reads one and writes
    /// the other.
    static AT: Cell<Place> = const { Cell::new(None) };
    static THROUGH: Cell<Place> = const { Cell::new(None) };
}

/// A drop restores the lines that were noted before [`enter`] or [`leave`].
#[derive(Debug)]
#[must_use = "the place holds until this is dropped"]
pub struct Entered {
    at: Place,
    through: Place,
    /// Of one thread.
    thread: PhantomData<*const ()>,
}

/// Notes the caller's line for the driver calls of this thread, until the result is dropped.
///
/// Call it first in a function with `#[track_caller]`, so that the line is that of the function's
/// caller.
#[inline]
#[track_caller]
pub fn enter() -> Entered {
    let here = Location::caller();
    let at = guard!("driver.site-outermost", AT.get(), else None);
    let Some(outer) = at else {
        // The outermost function has no line inside these crates.
        AT.set(Some(here));
        return Entered { at, through: None, thread: PhantomData };
    };
    let through = THROUGH.replace(Some(here).filter(|here| !is_same(here, outer)));
    Entered { at, through, thread: PhantomData }
}

/// Whether both are one line; fast if they are one object, or have different line numbers.
fn is_same(one: &Location<'_>, other: &Location<'_>) -> bool {
    std::ptr::eq(one, other) || (one.line() == other.line() && one == other)
}

/// Forgets the noted line for the driver calls of this thread, until the result is dropped.
///
/// For code of the program that one of our functions calls back: its calls have lines of their own.
#[inline]
pub fn leave() -> Entered {
    let at = guard!("driver.site-of-callback", AT.take(), else AT.get());
    Entered { at, through: THROUGH.take(), thread: PhantomData }
}

/// The line noted on this thread.
#[inline]
#[must_use]
pub fn current() -> Option<Site> {
    AT.get().map(|at| Site { at, through: THROUGH.get() })
}

impl Drop for Entered {
    #[inline]
    fn drop(&mut self) {
        guard!("driver.site-ends", AT.set(self.at));
        THROUGH.set(self.through);
    }
}
