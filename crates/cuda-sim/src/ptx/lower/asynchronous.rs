//! Asynchronous copies into shared memory.

use super::super::Loaded;
use super::super::op::{Access, AccessOrder, AsyncOp, Op, Space};
use super::super::syntax::Operand;
use super::super::types::Type;
use super::Lowerer;
use super::modifiers::Modifiers;

impl Lowerer<'_> {
    pub(super) fn asynchronous(
        &mut self,
        name: &str,
        modifiers: &mut Modifiers<'_>,
    ) -> Loaded<bool> {
        if name != "cp" || !modifiers.take("async") {
            return Ok(false);
        }
        if modifiers.take("commit_group") {
            modifiers.finish()?;
            self.operands(0)?;
            return self.async_op(AsyncOp::Commit);
        }
        if modifiers.take("wait_all") {
            modifiers.finish()?;
            self.operands(0)?;
            return self.async_op(AsyncOp::WaitAll);
        }
        if modifiers.take("wait_group") {
            modifiers.finish()?;
            self.operands(1)?;
            let pending = self.source(0, Type::U32)?;
            return self.async_op(AsyncOp::Wait { pending });
        }
        self.copy(modifiers)
    }

    fn copy(&mut self, modifiers: &mut Modifiers<'_>) -> Loaded<bool> {
        let whole = modifiers.take("cg");
        let any = modifiers.take("ca");
        let to_shared = modifiers.take_any(&["shared", "shared::cta"]).is_some();
        let from_global = modifiers.take("global");
        let hinted = modifiers.take("L2::cache_hint");
        modifiers.skip_prefixed("L2::");
        modifiers.finish()?;
        if whole == any || !to_shared || !from_global {
            return Err(modifiers.unsupported());
        }
        let Operand::Integer(bytes) = *self.operand(2)? else {
            return Err(self.error("the size of a copy is not a constant"));
        };
        if !matches!(bytes, 4 | 8 | 16) || (whole && bytes != 16) {
            return Err(self.error(format!("a copy of {bytes} bytes")));
        }
        let count = self.instruction.operands.len() - usize::from(hinted);
        let source = match count {
            3 => None,
            4 => Some(self.source(3, Type::U32)?),
            _ => return Err(self.error("unsupported number of operands")),
        };
        let (to, from) = (self.address(0)?, self.address(1)?);
        let access = |space, (base, offset)| Access {
            space,
            bytes: bytes as u8,
            count: 1,
            signed: false,
            register_bits: 64,
            order: AccessOrder::Plain,
            base,
            offset,
        };
        let (to, from) = (access(Space::Shared, to), access(Space::Global, from));
        self.async_op(AsyncOp::Copy { to, from, bytes: bytes as u32, source })
    }

    pub(super) fn async_op(&mut self, op: AsyncOp) -> Loaded<bool> {
        let async_ops = &mut self.lowering.program.async_ops;
        async_ops.push(op);
        let index = (async_ops.len() - 1) as u32;
        self.emit(Op::Async { index })
    }
}
