//! Arithmetic: a function for each opcode and type.
//!
//! Registers and results hold values zero-extended to 64 bits.

mod bits;
mod convert;
mod float;
mod integer;
mod small;

pub(super) use bits::{bit_binary, bit_ternary, bit_unary, funnel_shift, insert_bits, lop3};
pub(super) use convert::{Conversion, Rounding};
pub(super) use float::{float_binary, float_ternary, float_unary};
pub(super) use integer::{
    add_carry, compare, integer_binary, integer_ternary, integer_unary, logic, wide_binary,
    wide_ternary,
};
pub(super) use small::{small_pair, small_unary};

pub(super) type Unary = fn(u64) -> u64;
pub(super) type Binary = fn(u64, u64) -> u64;
pub(super) type Ternary = fn(u64, u64, u64) -> u64;
pub(super) type Quaternary = fn(u64, u64, u64, u64) -> u64;

/// A value of a PTX type in a register.
trait Word: Copy {
    /// Reads the value from a register. The register's upper bits are ignored.
    fn of(register: u64) -> Self;
    /// The register contents for the value.
    fn register(self) -> u64;
}

macro_rules! integer_words {
    ($($signed:ident $unsigned:ident),*) => {$(
        impl Word for $unsigned {
            fn of(register: u64) -> Self {
                register as Self
            }
            fn register(self) -> u64 {
                self.into()
            }
        }
        impl Word for $signed {
            fn of(register: u64) -> Self {
                register as Self
            }
            fn register(self) -> u64 {
                self as $unsigned as u64
            }
        }
    )*};
}
integer_words!(i8 u8, i16 u16, i32 u32);

impl Word for u64 {
    fn of(register: u64) -> Self {
        register
    }
    fn register(self) -> u64 {
        self
    }
}

impl Word for i64 {
    fn of(register: u64) -> Self {
        register as Self
    }
    fn register(self) -> u64 {
        self as u64
    }
}

impl Word for f32 {
    fn of(register: u64) -> Self {
        Self::from_bits(register as u32)
    }
    fn register(self) -> u64 {
        self.to_bits().into()
    }
}

impl Word for f64 {
    fn of(register: u64) -> Self {
        Self::from_bits(register)
    }
    fn register(self) -> u64 {
        self.to_bits()
    }
}

/// Selects the function for a type: `of!(of; U32 u32, ...; |a, b| a + b)`.
macro_rules! of {
    ($of:expr; $($variant:ident $word:ident),*; |$a:ident| $result:expr) => {
        match $of {
            $(Type::$variant => {
                Some((|a| { let $a = $word::of(a); Word::register($result) }) as $crate::ptx::alu::Unary)
            })*
            _ => None,
        }
    };
    ($of:expr; $($variant:ident $word:ident),*; |$a:ident, $b:ident| $result:expr) => {
        match $of {
            $(Type::$variant => {
                Some((|a, b| {
                    let ($a, $b) = ($word::of(a), $word::of(b));
                    Word::register($result)
                }) as $crate::ptx::alu::Binary)
            })*
            _ => None,
        }
    };
    ($of:expr; $($variant:ident $word:ident),*; |$a:ident, $b:ident, $c:ident| $result:expr) => {
        match $of {
            $(Type::$variant => {
                Some((|a, b, c| {
                    let ($a, $b, $c) = ($word::of(a), $word::of(b), $word::of(c));
                    Word::register($result)
                }) as $crate::ptx::alu::Ternary)
            })*
            _ => None,
        }
    };
}
use of;
