//! Branches, ends, barriers and exchanges within a warp.

use super::super::Loaded;
use super::super::alu;
use super::super::op::{BarrierOp, Exchange, Op, WarpOp, special};
use super::super::syntax::Operand;
use super::super::types::Type;
use super::Lowerer;
use super::modifiers::Modifiers;
use super::names::Meaning;

impl Lowerer<'_> {
    pub(super) fn control(&mut self, name: &str, modifiers: &mut Modifiers<'_>) -> Loaded<bool> {
        match name {
            "bra" => self.branch(modifiers),
            "exit" | "ret" => {
                modifiers.skip(&["uni"]);
                modifiers.finish()?;
                self.emit(Op::Exit)
            }
            "trap" => {
                modifiers.finish()?;
                self.emit(Op::Trap)
            }
            "nanosleep" | "pmevent" | "griddepcontrol" | "setmaxnreg" => {
                modifiers.skip(&["u32", "wait", "launch_dependents"]);
                modifiers.skip(&["inc", "dec", "sync", "aligned"]);
                modifiers.finish()?;
                self.emit(Op::Nop)
            }
            "bar" if modifiers.take("warp") => {
                let synchronises = modifiers.take("sync");
                modifiers.finish()?;
                if !synchronises {
                    return Err(modifiers.unsupported());
                }
                self.operands(1)?;
                let mask = self.source(0, Type::B32)?;
                self.warp_op(WarpOp { mask, ..NO_OPERANDS })
            }
            "bar" | "barrier" => self.barrier(name == "bar", modifiers),
            "shfl" => self.shuffle(modifiers),
            "vote" => self.vote(modifiers),
            "match" => {
                let any = modifiers.take("any") && modifiers.take("sync");
                let ty = modifiers.take_type()?;
                modifiers.finish()?;
                if !any {
                    return Err(modifiers.unsupported());
                }
                self.operands(3)?;
                let (d, a) = (self.target(0, Type::B32)?, self.source(1, ty)?);
                let mask = self.source(2, Type::B32)?;
                self.warp_op(WarpOp { exchange: Exchange::MatchAny, d, a, mask, ..NO_OPERANDS })
            }
            "redux" => self.reduce(modifiers),
            "activemask" => {
                modifiers.skip(&["b32"]);
                modifiers.finish()?;
                self.operands(1)?;
                let d = self.target(0, Type::B32)?;
                self.emit(Op::ActiveMask { d })
            }
            _ => Ok(false),
        }
    }

    fn branch(&mut self, modifiers: &mut Modifiers<'_>) -> Loaded<bool> {
        modifiers.skip(&["uni"]);
        modifiers.finish()?;
        self.operands(1)?;
        let Operand::Name(name, 0) = self.operand(0)? else {
            return Err(self.error("expected a label"));
        };
        let Meaning::Label(label) = self.lowering.names.resolve(self.line, name)? else {
            return Err(self.error(format!("'{name}' is not a label")));
        };
        let step = self.lowering.program.steps.len();
        self.lowering.branches.push((step, label));
        self.emit(Op::Branch { target: 0 })
    }

    fn barrier(&mut self, always_aligned: bool, modifiers: &mut Modifiers<'_>) -> Loaded<bool> {
        modifiers.skip(&["cta"]);
        let aligned = modifiers.take("aligned") || always_aligned;
        let kind = modifiers.take_any(&["sync", "arrive"]);
        modifiers.finish()?;
        let arrive = match kind {
            Some("sync") => false,
            Some(_) => true,
            None => return Err(modifiers.unsupported()),
        };
        let count = self.instruction.operands.len();
        if !(1..=2).contains(&count) || (arrive && count != 2) {
            return Err(self.error("unsupported number of operands"));
        }
        let id = self.source(0, Type::U32)?;
        let threads = if count == 2 { Some(self.source(1, Type::U32)?) } else { None };
        self.emit(Op::Barrier(BarrierOp { id, threads, aligned, arrive }))
    }

    fn shuffle(&mut self, modifiers: &mut Modifiers<'_>) -> Loaded<bool> {
        let synchronises = modifiers.take("sync");
        let exchange = match modifiers.take_any(&["up", "down", "bfly", "idx"]) {
            Some("up") => Exchange::Up,
            Some("down") => Exchange::Down,
            Some("bfly") => Exchange::Xor,
            Some(_) => Exchange::Index,
            None => return Err(modifiers.unsupported()),
        };
        // The form without a mask has no meaning since sm_70.
        if !synchronises || modifiers.take_type()? != Type::B32 {
            return Err(modifiers.unsupported());
        }
        modifiers.finish()?;
        self.operands(5)?;
        let (d, valid) = self.targets(0, Type::B32, Type::Pred)?;
        let (a, b) = (self.source(1, Type::B32)?, self.source(2, Type::B32)?);
        let (c, mask) = (self.source(3, Type::B32)?, self.source(4, Type::B32)?);
        self.warp_op(WarpOp { exchange, d, valid, a, b, c, mask, ..NO_OPERANDS })
    }

    fn vote(&mut self, modifiers: &mut Modifiers<'_>) -> Loaded<bool> {
        let synchronises = modifiers.take("sync");
        let kind = modifiers.take_any(&["all", "any", "uni", "ballot"]);
        let (exchange, ty) = match kind {
            Some("all") => (Exchange::All, Type::Pred),
            Some("any") => (Exchange::Any, Type::Pred),
            Some("uni") => (Exchange::Uniform, Type::Pred),
            Some(_) => (Exchange::Ballot, Type::B32),
            None => return Err(modifiers.unsupported()),
        };
        if !synchronises || modifiers.take_type()? != ty {
            return Err(modifiers.unsupported());
        }
        modifiers.finish()?;
        self.operands(3)?;
        let (d, a) = (self.target(0, ty)?, self.source(1, Type::Pred)?);
        let mask = self.source(2, Type::B32)?;
        self.warp_op(WarpOp { exchange, d, a, mask, ..NO_OPERANDS })
    }

    fn reduce(&mut self, modifiers: &mut Modifiers<'_>) -> Loaded<bool> {
        let synchronises = modifiers.take("sync");
        let rule = modifiers.take_any(&["add", "min", "max", "and", "or", "xor"]);
        let ty = modifiers.take_type()?;
        modifiers.finish()?;
        let f = match rule {
            Some(rule @ ("and" | "or" | "xor")) => alu::logic(rule),
            Some(rule) => alu::integer_binary(rule, ty),
            None => None,
        };
        let f = f.filter(|_| synchronises && ty.bits() == 32);
        let f = f.ok_or_else(|| modifiers.unsupported())?;
        self.operands(3)?;
        let (d, a, mask) = (self.target(0, ty)?, self.source(1, ty)?, self.source(2, Type::B32)?);
        self.warp_op(WarpOp { exchange: Exchange::Reduce(f), d, a, mask, ..NO_OPERANDS })
    }

    fn warp_op(&mut self, op: WarpOp) -> Loaded<bool> {
        let opcode = &self.instruction.opcode;
        let kinds = &mut self.lowering.exchanges;
        let known = kinds.iter().position(|kind| kind == opcode);
        let kind = known.unwrap_or_else(|| {
            kinds.push(opcode.clone());
            kinds.len() - 1
        });
        let warp_ops = &mut self.lowering.program.warp_ops;
        warp_ops.push(WarpOp { kind: kind as u32, ..op });
        let index = (warp_ops.len() - 1) as u32;
        self.emit(Op::Warp { index })
    }
}

const NO_OPERANDS: WarpOp = WarpOp {
    exchange: Exchange::Barrier,
    kind: 0,
    d: special::SINK,
    valid: special::SINK,
    a: special::SINK,
    b: special::SINK,
    c: special::SINK,
    mask: special::SINK,
};
