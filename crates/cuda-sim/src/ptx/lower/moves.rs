//! `mov`, `cvt`, `cvta` and `isspacep`.

use super::super::Loaded;
use super::super::alu::{self, Conversion, Rounding};
use super::super::op::{Op, Space, special};
use super::super::run::{LOCAL_WINDOW, SHARED_WINDOW};
use super::super::syntax::Operand;
use super::super::types::Type;
use super::Lowerer;
use super::modifiers::Modifiers;

/// Float formats without a register type.
const SMALL_FLOATS: &[&str] = &["f16", "bf16", "f16x2", "bf16x2"];

impl Lowerer<'_> {
    pub(super) fn moves(&mut self, name: &str, modifiers: &mut Modifiers<'_>) -> Loaded<bool> {
        match name {
            "mov" => {
                let ty = modifiers.take_type()?;
                modifiers.finish()?;
                self.operands(2)?;
                self.mov(ty)
            }
            "cvt" => self.cvt(modifiers),
            "cvta" => self.cvta(modifiers),
            "isspacep" => {
                let space = self.window_space(modifiers)?;
                modifiers.finish()?;
                self.operands(2)?;
                let (d, a) = (self.target(0, Type::Pred)?, self.source(1, Type::U64)?);
                self.emit(Op::IsSpace { space, d, a })
            }
            _ => Ok(false),
        }
    }

    fn mov(&mut self, ty: Type) -> Loaded<bool> {
        if let (Operand::Vector(_), from) = (self.operand(0)?, self.operand(1)?) {
            let Operand::Vector(parts) = self.operand(0)? else { return Ok(false) };
            let part = self.part(ty, parts.len())?;
            let mut d = [special::SINK; 4];
            for (d, part_operand) in d.iter_mut().zip(parts) {
                *d = self.lowering.names.target(self.line, part_operand, part)?;
            }
            let a = self.lowering.names.source(self.line, from, ty)?;
            let (count, bits) = (parts.len() as u8, part.bits() as u8);
            return self.emit(Op::Unpack { count, bits, d, a });
        }
        if let Operand::Vector(parts) = self.operand(1)? {
            let part = self.part(ty, parts.len())?;
            let mut a = [special::SINK; 4];
            for (a, operand) in a.iter_mut().zip(parts) {
                *a = self.lowering.names.source(self.line, operand, part)?;
            }
            let d = self.target(0, ty)?;
            let (count, bits) = (parts.len() as u8, part.bits() as u8);
            return self.emit(Op::Pack { count, bits, d, a });
        }
        let d = self.target(0, ty)?;
        if let Operand::Name(name, 0) = self.operand(1)?
            && matches!(
                name.as_str(),
                "%clock" | "%clock64" | "%clock_hi" | "%globaltimer" | "%globaltimer_lo"
            )
        {
            return self.emit(Op::Clock { d, bits: ty.bits() as u8 });
        }
        let a = self.source(1, ty)?;
        self.emit(Op::Move { d, a })
    }

    /// The type of each of the `count` equal parts of a `ty`.
    fn part(&self, ty: Type, count: usize) -> Loaded<Type> {
        match (ty.bits(), count) {
            (64, 2) => Ok(Type::B32),
            (64, 4) | (32, 2) => Ok(Type::B16),
            (32, 4) | (16, 2) => Ok(Type::B8),
            _ => Err(self.error("a vector that does not fill the type")),
        }
    }

    fn cvt(&mut self, modifiers: &mut Modifiers<'_>) -> Loaded<bool> {
        let rounding = modifiers.take_any(&["rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi"]);
        let saturate = modifiers.take("sat");
        if SMALL_FLOATS.iter().any(|name| modifiers.has(name)) {
            let nearest = rounding == Some("rn");
            return if saturate || (rounding.is_some() && !nearest) {
                Err(modifiers.unsupported())
            } else {
                self.cvt_small(modifiers, nearest)
            };
        }
        if modifiers.take_any(&["ftz", "relu"]).is_some() {
            return Err(modifiers.unsupported());
        }
        let (to, from) = (modifiers.take_type()?, modifiers.take_type()?);
        modifiers.finish()?;
        self.operands(2)?;
        let names = &mut self.lowering.names;
        let (d, register_bits) = names.wide_target(self.line, &self.instruction.operands[0], to)?;
        let a = names.wide_source(self.line, &self.instruction.operands[1], from)?;
        if !to.is_float() && !from.is_float() && !saturate && rounding.is_none() {
            return self.emit(Op::Resize {
                from: (from.bits() as u8, from.is_signed()),
                to: (to.bits() as u8, to.is_signed()),
                register_bits: register_bits as u8,
                d,
                a,
            });
        }
        let to_integral = match rounding {
            Some("rni") => Some(Rounding::Nearest),
            Some("rzi") => Some(Rounding::Zero),
            Some("rmi") => Some(Rounding::Down),
            Some("rpi") => Some(Rounding::Up),
            None | Some("rn") => None,
            // A float conversion with a rounding mode other than to nearest.
            Some(_) => return Err(modifiers.unsupported()),
        };
        // A float converted to an integer is rounded to an integer. A float converted to its own
        // type may be. A conversion to lower precision is rounded to nearest.
        let loses = to.is_float() && (!from.is_float() || to.bits() < from.bits());
        let is_right = match (from.is_float(), to_integral) {
            (true, None) => to.is_float() && (rounding.is_some() == loses),
            (true, Some(_)) => !to.is_float() || to == from,
            (false, None) => rounding.is_some() == loses,
            (false, Some(_)) => false,
        };
        if !is_right {
            return Err(modifiers.unsupported());
        }
        let conversion = Conversion { from, to, to_integral, saturate, register_bits };
        let conversions = &mut self.lowering.program.conversions;
        conversions.push(conversion);
        let index = (conversions.len() - 1) as u32;
        self.emit(Op::Convert { index, d, a })
    }

    /// `cvt` to or from floats of 16 bits.
    fn cvt_small(&mut self, modifiers: &mut Modifiers<'_>, nearest: bool) -> Loaded<bool> {
        let names = [SMALL_FLOATS, &["f32"]].concat();
        let (to, from) = (modifiers.take_any(&names), modifiers.take_any(&names));
        modifiers.finish()?;
        let (Some(to), Some(from)) = (to, from) else { return Err(modifiers.unsupported()) };
        // A conversion to lower precision is rounded.
        let rounds = to != "f32";
        if nearest != rounds {
            return Err(modifiers.unsupported());
        }
        let register = |name: &str| match name {
            "f32" => Type::F32,
            "f16x2" | "bf16x2" => Type::B32,
            _ => Type::B16,
        };
        if from == "f32"
            && let Some(f) = alu::small_pair(to)
        {
            return self.binary(f, register(to), Type::F32, Type::F32);
        }
        let f = alu::small_unary(to, from).ok_or_else(|| modifiers.unsupported())?;
        self.unary(f, register(to), register(from))
    }

    fn window_space(&mut self, modifiers: &mut Modifiers<'_>) -> Loaded<Space> {
        match modifiers.take_any(&["global", "shared", "shared::cta", "local", "const"]) {
            Some("global") => Ok(Space::Global),
            Some("const") => Ok(Space::Const),
            Some("local") => Ok(Space::Local),
            Some(_) => Ok(Space::Shared),
            None => Err(modifiers.unsupported()),
        }
    }

    fn cvta(&mut self, modifiers: &mut Modifiers<'_>) -> Loaded<bool> {
        let to = modifiers.take("to");
        let space = self.window_space(modifiers)?;
        let ty = modifiers.take_type()?;
        modifiers.finish()?;
        self.operands(2)?;
        if ty != Type::U64 {
            return Err(modifiers.unsupported());
        }
        let (d, a) = (self.target(0, ty)?, self.source(1, ty)?);
        let window = match space {
            Space::Shared => SHARED_WINDOW,
            Space::Local => LOCAL_WINDOW,
            _ => return self.emit(Op::Move { d, a }),
        };
        let b = self.constant(if to { window.wrapping_neg() } else { window });
        self.emit(Op::Binary { f: |a, b| a.wrapping_add(b), d, a, b })
    }
}
