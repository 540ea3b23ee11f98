//! One thread: its registers and the loop that runs its steps.

use super::super::alu::add_carry;
use super::super::op::{Access, Op, Program, PtxStep, Register, special};
use super::super::types::{extend, mask};
use super::observation::{Ran, Trouble};
use super::spaces::{Accessor, Spaces, is_in};
use crate::FindingKind;

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Stop {
    Exit,
    /// The thread is at a barrier or a warp-wide instruction: the step before `next`.
    Special,
    /// The thread has used up its turn.
    Turn,
}

/// One thread's registers while it runs.
pub(super) struct Lane<'a, 'm> {
    pub(super) program: &'a Program,
    pub(super) registers: &'a mut [u64],
    pub(super) spaces: &'a mut Spaces<'m>,
    pub(super) by: Accessor,
    /// Number of instructions that the launch had run before this turn.
    pub(super) clock: u64,
    pub(super) next: usize,
    /// Number of instructions run in this turn.
    pub(super) ran: u64,
}

impl Lane<'_, '_> {
    #[inline]
    fn get(&self, register: Register) -> u64 {
        self.registers[register as usize]
    }

    #[inline]
    fn set(&mut self, register: Register, value: u64) {
        self.registers[register as usize] = value;
    }

    /// Runs until something stops the thread, or an access left a remark.
    pub(super) fn run(&mut self, turn: u64) -> Ran<Stop> {
        let steps: &[PtxStep] = &self.program.steps;
        while self.ran < turn {
            let step = &steps[self.next];
            self.next += 1;
            self.ran += 1;
            if (self.get(step.guard) as u32 ^ step.inverted) & 1 == 0 {
                continue;
            }
            match step.op {
                Op::Move { d, a } => self.set(d, self.get(a)),
                Op::Unary { f, d, a } => self.set(d, f(self.get(a))),
                Op::Binary { f, d, a, b } => self.set(d, f(self.get(a), self.get(b))),
                Op::Ternary { f, d, a, b, c } => {
                    self.set(d, f(self.get(a), self.get(b), self.get(c)));
                }
                Op::Branch { target } => self.next = target as usize,
                Op::Resize { from, to, register_bits, d, a } => {
                    let value = extend(self.get(a), from.0.into(), from.1);
                    let value = extend(value, to.0.into(), to.1);
                    self.set(d, value & mask(register_bits.into()));
                }
                Op::Load { access, d } => {
                    self.load(&access, d)?;
                    if !self.spaces.remarks.is_empty() {
                        return Ok(Stop::Turn);
                    }
                }
                Op::Store { access, a } => {
                    self.store(&access, a)?;
                    if !self.spaces.remarks.is_empty() {
                        return Ok(Stop::Turn);
                    }
                }
                Op::Exit => return Ok(Stop::Exit),
                Op::Barrier(_) | Op::Warp { .. } => return Ok(Stop::Special),
                op => {
                    self.rare(op)?;
                    if !self.spaces.remarks.is_empty() {
                        return Ok(Stop::Turn);
                    }
                }
            }
        }
        Ok(Stop::Turn)
    }

    /// Rare instructions, kept out of the main loop.
    fn rare(&mut self, op: Op) -> Ran<()> {
        match op {
            Op::Quaternary { f, d, operands: [a, b, c, e] } => {
                self.set(d, f(self.get(a), self.get(b), self.get(c), self.get(e)));
            }
            Op::Compare { f, join, d, other, operands: [a, b, c] } => {
                let (compared, with) = (f(self.get(a), self.get(b)), self.get(c) & 1);
                self.set(other, join(compared ^ 1, with));
                self.set(d, join(compared, with));
            }
            Op::Carry { bits, subtract, uses, sets, d, a, b } => {
                let carry = if uses { self.get(special::CARRY) } else { 0 };
                let (a, b) = (self.get(a), self.get(b));
                let (sum, carry) = add_carry(bits.into(), a, b, carry, subtract);
                self.set(d, sum);
                if sets {
                    self.set(special::CARRY, carry);
                }
            }
            Op::Convert { index, d, a } => {
                let conversion = &self.program.conversions[index as usize];
                self.set(d, conversion.apply(self.get(a)));
            }
            Op::Unpack { count, bits, d, a } => {
                let value = self.get(a);
                for (part, &d) in d[..count.into()].iter().enumerate() {
                    self.set(d, value >> (part as u32 * u32::from(bits)) & mask(bits.into()));
                }
            }
            Op::Pack { count, bits, d, a } => {
                let parts = a[..count.into()].iter().enumerate();
                let value = parts.fold(0, |value, (part, &a)| {
                    value | (self.get(a) & mask(bits.into())) << (part as u32 * u32::from(bits))
                });
                self.set(d, value);
            }
            Op::Atomic { access, rule, d, b, c } => {
                let address = self.address(&access);
                let operands = (self.get(b), self.get(c));
                let old = self.spaces.atomic(&access, address, rule, operands, self.by)?;
                self.set(d, old);
            }
            Op::IsSpace { space, d, a } => self.set(d, is_in(space, self.get(a)).into()),
            Op::Clock { d, bits } => self.set(d, (self.clock + self.ran) & mask(bits.into())),
            // Threads run one at a time here, so only this thread is certainly active.
            Op::ActiveMask { d } => self.set(d, self.get(special::LANEMASK)),
            Op::Trap => return Err(Trouble::new(FindingKind::KernelFailed, "the kernel trapped")),
            _ => {}
        }
        Ok(())
    }

    #[inline]
    fn address(&self, access: &Access) -> u64 {
        self.get(access.base).wrapping_add_signed(access.offset)
    }

    #[inline]
    fn load(&mut self, access: &Access, d: [Register; 4]) -> Ran<()> {
        let mut data = [0; 16];
        let bytes = u32::from(access.bytes) * u32::from(access.count);
        self.spaces.load(access, self.address(access), bytes, self.by, &mut data)?;
        let bits = u32::from(access.bytes) * 8;
        let mut data = u128::from_le_bytes(data);
        for &d in &d[..access.count.into()] {
            let value = extend(data as u64, bits, access.signed);
            self.set(d, value & mask(access.register_bits.into()));
            data >>= bits;
        }
        Ok(())
    }

    #[inline]
    fn store(&mut self, access: &Access, a: [Register; 4]) -> Ran<()> {
        let bits = u32::from(access.bytes) * 8;
        let mut data = 0;
        for &a in a[..access.count.into()].iter().rev() {
            data = data << bits | u128::from(self.get(a) & mask(bits));
        }
        let bytes = usize::from(access.bytes) * usize::from(access.count);
        self.spaces.store(access, self.address(access), &data.to_le_bytes()[..bytes], self.by)
    }
}
