//! Loads, stores, atomics, fences and hints.

use super::super::Loaded;
use super::super::alu;
use super::super::op::{Access, AccessOrder, AtomicRule, Op, Register, Scope, Space, special};
use super::super::syntax::Operand;
use super::super::types::Type;
use super::Lowerer;
use super::modifiers::Modifiers;
use super::names::Meaning;

const SPACES: &[&str] = &[
    "global",
    "shared",
    "shared::cta",
    "shared::cluster",
    "local",
    "param",
    "param::entry",
    "const",
];

impl Lowerer<'_> {
    pub(super) fn memory(&mut self, name: &str, modifiers: &mut Modifiers<'_>) -> Loaded<bool> {
        match name {
            "ld" | "ldu" | "st" => self.load_or_store(name == "st", modifiers),
            "atom" | "red" => self.atomic(name == "atom", modifiers),
            "membar" => {
                modifiers.skip(&["cta", "gl", "sys", "proxy", "alias"]);
                modifiers.finish()?;
                self.emit(Op::Nop)
            }
            "fence" => {
                modifiers.skip(&["sc", "acq_rel", "acquire", "release", "cta", "cluster", "gpu"]);
                modifiers.skip(&["sys", "proxy", "alias"]);
                modifiers.finish()?;
                self.emit(Op::Nop)
            }
            "prefetch" | "prefetchu" | "applypriority" | "discard" => {
                modifiers.skip(&["global", "local", "L1", "L2"]);
                modifiers.skip_prefixed("L2::");
                modifiers.finish()?;
                self.emit(Op::Nop)
            }
            "createpolicy" => {
                modifiers.skip(&["fractional", "range", "global", "cvt", "b64", "L2"]);
                modifiers.skip_prefixed("L2::");
                modifiers.finish()?;
                let (d, a) = (self.target(0, Type::B64)?, self.constant(0));
                self.emit(Op::Move { d, a })
            }
            _ => Ok(false),
        }
    }

    /// Reads the modifiers for the state space and the memory order. Returns the space, and the scope
    /// if one is said; and whether the access synchronises. A volatile access does, because it counts
    /// as relaxed, with the whole system.
    fn place(&mut self, modifiers: &mut Modifiers<'_>) -> (Space, Option<Scope>, bool) {
        let with_system = modifiers.take_any(&["mmio", "volatile"]).is_some();
        let strong = ["relaxed", "acquire", "release", "acq_rel"];
        let is_strong = modifiers.take_any(&strong).is_some() || with_system;
        modifiers.skip(&["weak"]);
        let scope = match modifiers.take_any(&["cta", "cluster", "gpu", "sys"]) {
            _ if with_system => Some(Scope::System),
            Some("cta" | "cluster") => Some(Scope::Block),
            Some("gpu") => Some(Scope::Device),
            Some(_) => Some(Scope::System),
            None => None,
        };
        modifiers.skip_prefixed("L1::");
        let space = match modifiers.take_any(SPACES) {
            None => Space::Generic,
            Some("global") => Space::Global,
            Some("local") => Space::Local,
            Some("const") => Space::Const,
            Some("param" | "param::entry") => Space::Param,
            Some(_) => Space::Shared,
        };
        (space, scope, is_strong)
    }

    /// The base register and the offset of address operand `index`.
    pub(super) fn address(&mut self, index: usize) -> Loaded<(Register, i64)> {
        let Operand::Address(base, offset) = self.operand(index)? else {
            return Err(self.error("expected an address"));
        };
        match &**base {
            Operand::Name(name, _) => match self.lowering.names.resolve(self.line, name)? {
                Meaning::Register(register, 32 | 64) => Ok((register, *offset)),
                Meaning::Address(address) => {
                    Ok((self.constant(address.wrapping_add_signed(*offset)), 0))
                }
                _ => Err(self.error(format!("'{name}' is not an address"))),
            },
            Operand::Integer(address) => Ok((self.constant(*address), *offset)),
            _ => Err(self.error("unsupported address")),
        }
    }

    fn load_or_store(&mut self, stores: bool, modifiers: &mut Modifiers<'_>) -> Loaded<bool> {
        let (space, scope, is_strong) = self.place(modifiers);
        modifiers.skip(&["ca", "cg", "cs", "lu", "cv", "wb", "wt"]);
        let order = match (is_strong, !stores && modifiers.take("nc")) {
            (true, _) => AccessOrder::Strong(scope.unwrap_or(Scope::System)),
            (false, true) => AccessOrder::NonCoherent,
            (false, false) => AccessOrder::Plain,
        };
        let hinted = modifiers.take("L2::cache_hint");
        modifiers.skip_prefixed("L2::");
        let count = match modifiers.take_any(&["v2", "v4"]) {
            Some("v2") => 2,
            Some(_) => 4,
            None => 1,
        };
        let ty = modifiers.take_type()?;
        modifiers.finish()?;
        if ty == Type::Pred || count * ty.bytes() > 16 {
            return Err(modifiers.unsupported());
        }
        if stores && matches!(space, Space::Param | Space::Const) {
            return Err(modifiers.unsupported());
        }
        self.operands(2 + usize::from(hinted))?;
        let (value, address) = if stores { (1, 0) } else { (0, 1) };
        let (base, offset) = self.address(address)?;
        let operand = self.operand(value)?;
        let parts = match operand {
            Operand::Vector(parts) => &parts[..],
            single => std::slice::from_ref(single),
        };
        if parts.len() != count as usize {
            return Err(self.error("the vector and the access have different lengths"));
        }
        let mut registers = [special::SINK; 4];
        let mut register_bits = ty.bits();
        for (register, part) in registers.iter_mut().zip(parts) {
            let names = &mut self.lowering.names;
            if stores {
                *register = names.wide_source(self.line, part, ty)?;
            } else {
                (*register, register_bits) = names.wide_target(self.line, part, ty)?;
            }
        }
        let access = Access {
            space,
            bytes: ty.bytes() as u8,
            count: count as u8,
            signed: ty.is_signed(),
            register_bits: register_bits as u8,
            order,
            base,
            offset,
        };
        self.emit(if stores {
            Op::Store { access, a: registers }
        } else {
            Op::Load { access, d: registers }
        })
    }

    fn atomic(&mut self, returns: bool, modifiers: &mut Modifiers<'_>) -> Loaded<bool> {
        let rule = modifiers
            .take_any(&["add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"]);
        let (space, scope, _) = self.place(modifiers);
        modifiers.skip(&["noftz"]);
        if modifiers.take_any(&["f16", "f16x2", "bf16", "bf16x2"]).is_some() {
            return Err(modifiers.unsupported());
        }
        let ty = modifiers.take_type()?;
        modifiers.finish()?;
        let rule = rule.and_then(|rule| atomic_rule(rule, ty));
        let rule = rule.filter(|_| ty.bits() >= 32 || ty.bits() == 16);
        let rule = rule.ok_or_else(|| modifiers.unsupported())?;
        if matches!(space, Space::Param | Space::Const | Space::Local) {
            return Err(modifiers.unsupported());
        }
        let first = usize::from(returns);
        let swaps = matches!(rule, AtomicRule::CompareAndSwap);
        self.operands(first + 2 + usize::from(swaps))?;
        let d = if returns { self.target(0, ty)? } else { special::SINK };
        let (base, offset) = self.address(first)?;
        let b = self.source(first + 1, ty)?;
        let c = if swaps { self.source(first + 2, ty)? } else { special::SINK };
        let access = Access {
            space,
            bytes: ty.bytes() as u8,
            count: 1,
            signed: false,
            register_bits: ty.bits() as u8,
            order: AccessOrder::Atomic(scope.unwrap_or(Scope::Device)),
            base,
            offset,
        };
        self.emit(Op::Atomic { access, rule, d, b, c })
    }
}

fn atomic_rule(name: &str, ty: Type) -> Option<AtomicRule> {
    let rule = match name {
        "add" | "min" | "max" => alu::integer_binary(name, ty)?,
        "and" | "or" | "xor" => alu::logic(name)?,
        "exch" => |_, b| b,
        "cas" => return Some(AtomicRule::CompareAndSwap),
        "inc" if ty == Type::U32 => |a, b| if a >= b { 0 } else { a + 1 },
        "dec" if ty == Type::U32 => |a, b| if a == 0 || a > b { b } else { a - 1 },
        _ => return None,
    };
    Some(AtomicRule::Binary(rule))
}
