//! Arithmetic, logic and comparisons.

use super::super::Loaded;
use super::super::alu;
use super::super::op::{Op, special};
use super::super::types::Type;
use super::Lowerer;
use super::modifiers::Modifiers;

impl Lowerer<'_> {
    pub(super) fn arithmetic(&mut self, name: &str, modifiers: &mut Modifiers<'_>) -> Loaded<bool> {
        match name {
            "add" | "sub" | "mul" | "div" | "rem" | "min" | "max" | "copysign" => {
                self.two_operands(name, modifiers)
            }
            "addc" | "subc" => self.carry(name, modifiers),
            "madc" => self.multiply_with_carry(modifiers, true),
            "mad" | "fma" | "sad" => self.three_operands(name, modifiers),
            "neg" | "abs" | "sqrt" | "rcp" => self.one_operand(name, modifiers),
            "not" | "cnot" | "popc" | "clz" | "brev" | "bfind" => self.bits_of_one(name, modifiers),
            "and" | "or" | "xor" => {
                let ty = modifiers.take_type()?;
                let f = alu::logic(name).ok_or_else(|| modifiers.unsupported())?;
                if !matches!(ty, Type::Pred | Type::B16 | Type::B32 | Type::B64) {
                    return Err(modifiers.unsupported());
                }
                modifiers.finish()?;
                self.binary(f, ty, ty, ty)
            }
            "shl" | "shr" => {
                let ty = modifiers.take_type()?;
                let f = alu::bit_binary(name, ty).ok_or_else(|| modifiers.unsupported())?;
                modifiers.finish()?;
                self.binary(f, ty, ty, Type::U32)
            }
            "shf" => {
                let left = modifiers.take("l");
                let right = modifiers.take("r");
                let wrap = modifiers.take("wrap");
                let clamp = modifiers.take("clamp");
                if left == right || wrap == clamp || modifiers.take_type()? != Type::B32 {
                    return Err(modifiers.unsupported());
                }
                modifiers.finish()?;
                self.ternary(alu::funnel_shift(left, wrap), [Type::B32; 4])
            }
            "prmt" => {
                let ty = modifiers.take_type()?;
                let f = alu::bit_ternary(name, ty).ok_or_else(|| modifiers.unsupported())?;
                modifiers.finish()?;
                self.ternary(f, [ty; 4])
            }
            "bfe" => {
                let ty = modifiers.take_type()?;
                let f = alu::bit_ternary(name, ty).ok_or_else(|| modifiers.unsupported())?;
                modifiers.finish()?;
                self.ternary(f, [ty, ty, Type::U32, Type::U32])
            }
            "bfi" => {
                let ty = modifiers.take_type()?;
                let f = alu::insert_bits(ty).ok_or_else(|| modifiers.unsupported())?;
                modifiers.finish()?;
                self.quaternary(f, [ty, ty, ty, Type::U32, Type::U32])
            }
            "lop3" => {
                if modifiers.take_type()? != Type::B32 {
                    return Err(modifiers.unsupported());
                }
                modifiers.finish()?;
                self.quaternary(alu::lop3, [Type::B32; 5])
            }
            "setp" => self.setp(modifiers),
            "set" => self.set(modifiers),
            "selp" => {
                let ty = modifiers.take_type()?;
                let f = alu::bit_ternary(name, ty).ok_or_else(|| modifiers.unsupported())?;
                modifiers.finish()?;
                self.ternary(f, [ty, ty, ty, Type::Pred])
            }
            _ => Ok(false),
        }
    }

    pub(super) fn binary(&mut self, f: alu::Binary, d: Type, a: Type, b: Type) -> Loaded<bool> {
        self.operands(3)?;
        let (a, b) = (self.source(1, a)?, self.source(2, b)?);
        let d = self.target(0, d)?;
        self.emit(Op::Binary { f, d, a, b })
    }

    pub(super) fn ternary(&mut self, f: alu::Ternary, [d, a, b, c]: [Type; 4]) -> Loaded<bool> {
        self.operands(4)?;
        let (a, b, c) = (self.source(1, a)?, self.source(2, b)?, self.source(3, c)?);
        let d = self.target(0, d)?;
        self.emit(Op::Ternary { f, d, a, b, c })
    }

    fn quaternary(&mut self, f: alu::Quaternary, types: [Type; 5]) -> Loaded<bool> {
        self.operands(5)?;
        let mut operands = [special::SINK; 4];
        for (index, register) in operands.iter_mut().enumerate() {
            *register = self.source(index + 1, types[index + 1])?;
        }
        let d = self.target(0, types[0])?;
        self.emit(Op::Quaternary { f, d, operands })
    }

    fn two_operands(&mut self, name: &str, modifiers: &mut Modifiers<'_>) -> Loaded<bool> {
        if matches!(name, "add" | "sub") && modifiers.take("cc") {
            return self.carry_with(modifiers, name == "sub", false, true);
        }
        let half = modifiers.take_any(&["lo", "hi", "wide"]);
        let rounds = modifiers.take("rn");
        if modifiers.take_any(&["f16", "f16x2", "bf16", "bf16x2"]).is_some() {
            return Err(modifiers.unsupported());
        }
        let ty = modifiers.take_type()?;
        // A float quotient needs an explicit rounding mode. `min` and `max` take none.
        let is_right = match name {
            "div" if ty.is_float() => rounds,
            "add" | "sub" | "mul" if ty.is_float() => true,
            _ => !rounds,
        };
        if !is_right {
            return Err(modifiers.unsupported());
        }
        let f = match (name, half) {
            (_, None) if ty.is_float() => alu::float_binary(name, ty),
            ("mul", Some("wide")) => {
                modifiers.finish()?;
                let f = alu::wide_binary(ty).ok_or_else(|| modifiers.unsupported())?;
                return self.binary(f, doubled(ty), ty, ty);
            }
            ("mul", Some("lo")) => alu::integer_binary("mul.lo", ty),
            ("mul", Some("hi")) => alu::integer_binary("mul.hi", ty),
            (_, None) => alu::integer_binary(name, ty),
            _ => None,
        };
        modifiers.finish()?;
        self.binary(f.ok_or_else(|| modifiers.unsupported())?, ty, ty, ty)
    }

    fn carry(&mut self, name: &str, modifiers: &mut Modifiers<'_>) -> Loaded<bool> {
        let sets = modifiers.take("cc");
        self.carry_with(modifiers, name == "subc", true, sets)
    }

    fn carry_with(
        &mut self,
        modifiers: &mut Modifiers<'_>,
        subtract: bool,
        uses: bool,
        sets: bool,
    ) -> Loaded<bool> {
        let ty = modifiers.take_type()?;
        if !matches!(ty, Type::U32 | Type::S32 | Type::U64 | Type::S64) {
            return Err(modifiers.unsupported());
        }
        modifiers.finish()?;
        self.operands(3)?;
        let (a, b, d) = (self.source(1, ty)?, self.source(2, ty)?, self.target(0, ty)?);
        self.emit(Op::Carry { bits: ty.bits() as u8, subtract, uses, sets, d, a, b })
    }

    /// `mad.cc` and `madc`: a product, then a sum with carry.
    fn multiply_with_carry(&mut self, modifiers: &mut Modifiers<'_>, uses: bool) -> Loaded<bool> {
        let half = modifiers.take_any(&["lo", "hi"]);
        let sets = modifiers.take("cc");
        let ty = modifiers.take_type()?;
        modifiers.finish()?;
        let f = match half {
            Some("lo") => alu::integer_binary("mul.lo", ty),
            Some(_) => alu::integer_binary("mul.hi", ty),
            None => None,
        };
        let f = f.filter(|_| ty.bits() >= 32).ok_or_else(|| modifiers.unsupported())?;
        self.operands(4)?;
        let (a, b, c) = (self.source(1, ty)?, self.source(2, ty)?, self.source(3, ty)?);
        let d = self.target(0, ty)?;
        let product = special::SCRATCH;
        self.emit(Op::Binary { f, d: product, a, b })?;
        let bits = ty.bits() as u8;
        self.emit(Op::Carry { bits, subtract: false, uses, sets, d, a: product, b: c })
    }

    fn three_operands(&mut self, name: &str, modifiers: &mut Modifiers<'_>) -> Loaded<bool> {
        if name == "mad" && modifiers.has("cc") {
            return self.multiply_with_carry(modifiers, false);
        }
        let half = modifiers.take_any(&["lo", "hi", "wide"]);
        let rounds = modifiers.take("rn");
        if modifiers.take_any(&["f16", "f16x2", "bf16", "bf16x2"]).is_some() {
            return Err(modifiers.unsupported());
        }
        let ty = modifiers.take_type()?;
        modifiers.finish()?;
        if rounds != ty.is_float() {
            return Err(modifiers.unsupported());
        }
        let mut sum = ty;
        let f = match (name, half) {
            ("fma" | "mad", None) if ty.is_float() => alu::float_ternary("fma", ty),
            ("mad", Some("lo")) => alu::integer_ternary("mad.lo", ty),
            ("mad", Some("hi")) => alu::integer_ternary("mad.hi", ty),
            ("mad", Some("wide")) => {
                sum = doubled(ty);
                alu::wide_ternary(ty)
            }
            ("sad", None) => alu::integer_ternary("sad", ty),
            _ => None,
        };
        self.ternary(f.ok_or_else(|| modifiers.unsupported())?, [sum, ty, ty, sum])
    }

    fn one_operand(&mut self, name: &str, modifiers: &mut Modifiers<'_>) -> Loaded<bool> {
        let rounds = modifiers.take("rn");
        if modifiers.take_any(&["f16", "f16x2", "bf16", "bf16x2"]).is_some() {
            return Err(modifiers.unsupported());
        }
        let ty = modifiers.take_type()?;
        if rounds != matches!(name, "sqrt" | "rcp") {
            return Err(modifiers.unsupported());
        }
        let f =
            if ty.is_float() { alu::float_unary(name, ty) } else { alu::integer_unary(name, ty) };
        modifiers.finish()?;
        self.unary(f.ok_or_else(|| modifiers.unsupported())?, ty, ty)
    }

    pub(super) fn unary(&mut self, f: alu::Unary, d: Type, a: Type) -> Loaded<bool> {
        self.operands(2)?;
        let (d, a) = (self.target(0, d)?, self.source(1, a)?);
        self.emit(Op::Unary { f, d, a })
    }

    fn bits_of_one(&mut self, name: &str, modifiers: &mut Modifiers<'_>) -> Loaded<bool> {
        let name = if modifiers.take("shiftamt") { "bfind.shiftamt" } else { name };
        let ty = modifiers.take_type()?;
        modifiers.finish()?;
        let f = alu::bit_unary(name, ty).ok_or_else(|| modifiers.unsupported())?;
        let counts = matches!(name, "popc" | "clz" | "bfind" | "bfind.shiftamt");
        self.unary(f, if counts { Type::U32 } else { ty }, ty)
    }

    fn setp(&mut self, modifiers: &mut Modifiers<'_>) -> Loaded<bool> {
        let (f, join, ty) = comparison(modifiers)?;
        self.operands(if join.is_some() { 4 } else { 3 })?;
        let (a, b) = (self.source(1, ty)?, self.source(2, ty)?);
        let c = if join.is_some() { self.source(3, Type::Pred)? } else { special::TRUE };
        let (d, other) = self.targets(0, Type::Pred, Type::Pred)?;
        if join.is_none() && other == special::SINK {
            return self.emit(Op::Binary { f, d, a, b });
        }
        let join = join.unwrap_or(|a, _| a);
        self.emit(Op::Compare { f, join, d, other, operands: [a, b, c] })
    }

    fn set(&mut self, modifiers: &mut Modifiers<'_>) -> Loaded<bool> {
        // The destination's type comes first.
        let order = modifiers.take_any(&["u32", "s32", "f32"]);
        let (f, join, ty) = comparison(modifiers)?;
        self.operands(if join.is_some() { 4 } else { 3 })?;
        let (a, b) = (self.source(1, ty)?, self.source(2, ty)?);
        let c = if join.is_some() { self.source(3, Type::Pred)? } else { special::TRUE };
        let d = self.target(0, Type::B32)?;
        let join = join.unwrap_or(|a, _| a);
        let scratch = special::SCRATCH;
        let compare =
            Op::Compare { f, join, d: scratch, other: special::SINK, operands: [a, b, c] };
        self.emit(compare)?;
        let yes = match order {
            Some("f32") => u64::from(1f32.to_bits()),
            Some(_) => 0xFFFF_FFFF,
            None => return Err(modifiers.unsupported()),
        };
        let (yes, no) = (self.constant(yes), self.constant(0));
        let f = |a, b, choice| if choice & 1 == 1 { a } else { b };
        self.emit(Op::Ternary { f, d, a: yes, b: no, c: scratch })
    }
}

/// The comparison, the operator that combines it with a predicate, and the compared type.
fn comparison(modifiers: &mut Modifiers<'_>) -> Loaded<(alu::Binary, Option<alu::Binary>, Type)> {
    let order = modifiers.take_any(&[
        "eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs", "equ", "neu", "ltu", "leu",
        "gtu", "geu", "num", "nan",
    ]);
    let join = modifiers.take_any(&["and", "or", "xor"]).and_then(alu::logic);
    if modifiers.take_any(&["f16", "f16x2", "bf16", "bf16x2"]).is_some() {
        return Err(modifiers.unsupported());
    }
    let ty = modifiers.take_type()?;
    modifiers.finish()?;
    let f = order.and_then(|order| alu::compare(order, ty));
    Ok((f.ok_or_else(|| modifiers.unsupported())?, join, ty))
}

/// The type of double width.
fn doubled(ty: Type) -> Type {
    match ty {
        Type::U16 => Type::U32,
        Type::S16 => Type::S32,
        Type::U32 => Type::U64,
        _ => Type::S64,
    }
}
