//! Bulk copies, and the barriers in shared memory that count their bytes.

use super::super::error::Loaded;
use super::super::op::{Access, AsyncOp, MemoryBarrierOp, Op, Order, Register, Space, special};
use super::super::syntax::Operand;
use super::super::types::Type;
use super::Site;
use super::modifiers::Modifiers;

impl Site<'_> {
    /// `mbarrier`
    pub(super) fn memory_barrier(&mut self, modifiers: &mut Modifiers<'_>) -> Loaded<bool> {
        let kind = modifiers.take_any(&[
            "init",
            "inval",
            "arrive",
            "expect_tx",
            "complete_tx",
            "test_wait",
            "try_wait",
        ]);
        let expects = modifiers.take("expect_tx");
        let parity = modifiers.take("parity");
        modifiers.skip(&["release", "acquire", "relaxed", "cta", "cluster"]);
        let shared = modifiers.take_any(&["shared", "shared::cta"]).is_some();
        modifiers.skip(&["b64"]);
        modifiers.finish()?;
        // A barrier's address in another space is generic, and still of shared memory.
        let space = if shared { Space::Shared } else { Space::Generic };
        let op = match kind {
            Some("init") => {
                self.operands(2)?;
                MemoryBarrierOp::Init { at: self.barrier_at(0, space)?, count: self.word(1)? }
            }
            Some("inval") => {
                self.operands(1)?;
                MemoryBarrierOp::Invalidate { at: self.barrier_at(0, space)? }
            }
            Some("arrive") => return self.arrive(space, expects),
            Some("expect_tx") => {
                self.operands(2)?;
                MemoryBarrierOp::Expect { at: self.barrier_at(0, space)?, bytes: self.word(1)? }
            }
            Some("complete_tx") => {
                self.operands(2)?;
                MemoryBarrierOp::Complete { at: self.barrier_at(0, space)?, bytes: self.word(1)? }
            }
            Some(_) => {
                // The third operand of `try_wait` is how long it may sleep.
                if self.instruction.operands.len() != 4 {
                    self.operands(3)?;
                }
                let d = self.target(0, Type::Pred)?;
                let at = self.barrier_at(1, space)?;
                let ty = if parity { Type::B32 } else { Type::B64 };
                MemoryBarrierOp::Test { at, d, phase: self.source(2, ty)?, parity }
            }
            None => return Err(modifiers.unsupported()),
        };
        self.async_op(AsyncOp::Barrier(op))
    }

    /// `arrive`, whose first operand is the state unless it is left out.
    fn arrive(&mut self, space: Space, expects: bool) -> Loaded<bool> {
        let returns = !matches!(self.operand(0)?, Operand::Address(..));
        let first = usize::from(returns);
        let d = if returns { self.target(0, Type::B64)? } else { special::SINK };
        let at = self.barrier_at(first, space)?;
        let number = match self.instruction.operands.len() - first {
            1 if !expects => self.constant(1),
            2 => self.word(first + 1)?,
            _ => return Err(self.error("unsupported number of operands")),
        };
        let one = self.constant(1);
        let none = self.constant(0);
        let (count, bytes) = if expects { (one, number) } else { (number, none) };
        self.async_op(AsyncOp::Barrier(MemoryBarrierOp::Arrive { at, d, count, bytes }))
    }

    fn word(&mut self, index: usize) -> Loaded<Register> {
        self.source(index, Type::U32)
    }

    fn barrier_at(&mut self, index: usize, space: Space) -> Loaded<Access> {
        let place = self.address(index)?;
        Ok(unrecorded_access(space, 8, place))
    }

    /// `cp.async.bulk`
    pub(super) fn bulk(&mut self, modifiers: &mut Modifiers<'_>) -> Loaded<bool> {
        if modifiers.take("commit_group") {
            modifiers.finish()?;
            self.operands(0)?;
            return self.async_op(AsyncOp::BulkCommit);
        }
        if modifiers.take("wait_group") {
            modifiers.skip(&["read"]);
            modifiers.finish()?;
            self.operands(1)?;
            let pending = self.word(0)?;
            return self.async_op(AsyncOp::BulkWait { pending });
        }
        if modifiers.take("prefetch") {
            modifiers.skip(&["L2", "global", "L2::cache_hint"]);
            modifiers.finish()?;
            return self.emit(Op::Nop);
        }
        let spaces = ["global", "shared::cta", "shared::cluster"];
        let (to, from) = (modifiers.take_any(&spaces), modifiers.take_any(&spaces));
        let grouped = modifiers.take("bulk_group");
        let counted = modifiers.take("mbarrier::complete_tx::bytes");
        let hinted = modifiers.take("L2::cache_hint");
        modifiers.finish()?;
        self.operands(3 + usize::from(counted) + usize::from(hinted))?;
        let (to_space, from_space) = match (to, from) {
            (Some("global"), Some("shared::cta")) if grouped && !counted => {
                (Space::Global, Space::Shared)
            }
            (Some("shared::cta" | "shared::cluster"), Some("global")) if counted && !grouped => {
                (Space::Shared, Space::Global)
            }
            _ => return Err(modifiers.unsupported()),
        };
        let to = unrecorded_access(to_space, 16, self.address(0)?);
        let from = unrecorded_access(from_space, 16, self.address(1)?);
        let bytes = self.word(2)?;
        let barrier = if counted { Some(self.barrier_at(3, Space::Shared)?) } else { None };
        self.async_op(AsyncOp::Bulk { to, from, bytes, barrier })
    }
}

/// An access that is ordered by a barrier in memory rather than by one of the block.
fn unrecorded_access(space: Space, bytes: u8, (base, offset): (Register, i64)) -> Access {
    let (register_bits, order) = (64, Order::Unrecorded);
    Access { space, bytes, count: 1, signed: false, register_bits, order, base, offset }
}
