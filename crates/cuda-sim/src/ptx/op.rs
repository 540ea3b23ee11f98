//! Executable instructions: registers are indices, types are resolved, names are gone.

use super::alu::{Binary, Conversion, Quaternary, Ternary, Unary};

/// Index of a value in a thread's registers. These hold special registers, the kernel's own
/// registers, and constants.
pub(super) type Register = u32;

/// The registers that precede a kernel's own.
pub(super) mod special {
    use super::Register;

    /// Receives results that are not used.
    pub(in crate::ptx) const SINK: Register = 0;
    /// Always 1: the guard of instructions without one.
    pub(in crate::ptx) const TRUE: Register = 1;
    pub(in crate::ptx) const CARRY: Register = 2;
    /// `%tid`, in three registers.
    pub(in crate::ptx) const TID: Register = 3;
    /// `%ntid`, in three registers.
    pub(in crate::ptx) const NTID: Register = 6;
    /// `%ctaid`, in three registers.
    pub(in crate::ptx) const CTAID: Register = 9;
    /// `%nctaid`, in three registers.
    pub(in crate::ptx) const NCTAID: Register = 12;
    pub(in crate::ptx) const LANEID: Register = 15;
    pub(in crate::ptx) const WARPID: Register = 16;
    pub(in crate::ptx) const NWARPID: Register = 17;
    pub(in crate::ptx) const SMID: Register = 18;
    pub(in crate::ptx) const NSMID: Register = 19;
    /// `%lanemask_eq`, `_le`, `_lt`, `_ge` and `_gt`.
    pub(in crate::ptx) const LANEMASK: Register = 20;
    pub(in crate::ptx) const GRIDID: Register = 25;
    pub(in crate::ptx) const DYNAMIC_SHARED: Register = 26;
    pub(in crate::ptx) const TOTAL_SHARED: Register = 27;
    pub(in crate::ptx) const WARP_SIZE: Register = 28;
    /// An inverted predicate, for the next step.
    pub(in crate::ptx) const SCRATCH: Register = 29;
    /// Number of these registers.
    pub(in crate::ptx) const COUNT: Register = 30;
}

/// A state space of an access.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Space {
    Generic,
    Global,
    Shared,
    Local,
    Param,
    Const,
}

/// The threads with which an access synchronises.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Scope {
    /// Those of the block. A cluster is one block here.
    Block,
    Device,
    System,
}

/// How the conflict check treats an access.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum AccessOrder {
    /// Conflicts with any unordered access, if either writes.
    Plain,
    /// A plain load by the cache that is not kept up to date (`ld.global.nc`): the kernel may not
    /// write what it reads so.
    NonCoherent,
    /// Takes part in synchronisation, and does not conflict with such accesses of the same size,
    /// each in the other's scope.
    Strong(Scope),
    /// Likewise: an atomic operation.
    Atomic(Scope),
    /// The first half of an atomic operation. The check looks at the second half.
    AtomicLoad(Scope),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Access {
    pub(super) space: Space,
    /// Bytes of an element.
    pub(super) bytes: u8,
    /// Elements of the vector, at most 4.
    pub(super) count: u8,
    /// Whether a loaded element is sign-extended.
    pub(super) signed: bool,
    /// Width of the destination registers, in bits.
    pub(super) register_bits: u8,
    pub(super) order: AccessOrder,
    pub(super) base: Register,
    pub(super) offset: i64,
}

/// The value that an atomic operation computes from the old value and its operands.
#[derive(Clone, Copy, Debug)]
pub(super) enum AtomicRule {
    Binary(Binary),
    CompareAndSwap,
}

/// The exchanges between threads of a warp.
#[derive(Clone, Copy, Debug)]
pub(super) enum Exchange {
    /// `shfl.sync` in its four modes.
    Up,
    Down,
    Xor,
    Index,
    /// `vote.sync`
    All,
    Any,
    Uniform,
    Ballot,
    /// `match.any.sync`
    MatchAny,
    /// `redux.sync`
    Reduce(Binary),
    /// `bar.warp.sync`
    Barrier,
}

/// A warp-wide instruction, with the registers of its operands.
#[derive(Clone, Copy, Debug)]
pub(super) struct WarpOp {
    pub(super) exchange: Exchange,
    /// Number of its opcode with all qualifiers. Lanes synchronise only at instructions of the same
    /// kind.
    pub(super) kind: u32,
    pub(super) d: Register,
    pub(super) valid: Register,
    pub(super) a: Register,
    pub(super) b: Register,
    pub(super) c: Register,
    pub(super) mask: Register,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct BarrierOp {
    pub(super) id: Register,
    /// Number of threads that take part; `None` means the whole block.
    pub(super) threads: Option<Register>,
    /// Whether all threads of a warp must be at the same instruction.
    pub(super) aligned: bool,
    /// Whether the thread continues without waiting.
    pub(super) arrive: bool,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Op {
    Nop,
    Move {
        d: Register,
        a: Register,
    },
    Unary {
        f: Unary,
        d: Register,
        a: Register,
    },
    Binary {
        f: Binary,
        d: Register,
        a: Register,
        b: Register,
    },
    Ternary {
        f: Ternary,
        d: Register,
        a: Register,
        b: Register,
        c: Register,
    },
    Quaternary {
        f: Quaternary,
        d: Register,
        operands: [Register; 4],
    },
    /// `setp` with a second destination or a third operand.
    Compare {
        f: Binary,
        join: Binary,
        d: Register,
        other: Register,
        operands: [Register; 3],
    },
    Carry {
        bits: u8,
        subtract: bool,
        uses: bool,
        sets: bool,
        d: Register,
        a: Register,
        b: Register,
    },
    /// Sign- or zero-extends the low `from` bits, and then the result.
    Resize {
        from: (u8, bool),
        to: (u8, bool),
        register_bits: u8,
        d: Register,
        a: Register,
    },
    /// Index into the program's conversions.
    Convert {
        index: u32,
        d: Register,
        a: Register,
    },
    Unpack {
        count: u8,
        bits: u8,
        d: [Register; 4],
        a: Register,
    },
    Pack {
        count: u8,
        bits: u8,
        d: Register,
        a: [Register; 4],
    },
    Load {
        access: Access,
        d: [Register; 4],
    },
    Store {
        access: Access,
        a: [Register; 4],
    },
    Atomic {
        access: Access,
        rule: AtomicRule,
        d: Register,
        b: Register,
        c: Register,
    },
    /// Whether an address lies in a state space.
    IsSpace {
        space: Space,
        d: Register,
        a: Register,
    },
    Branch {
        target: u32,
    },
    Exit,
    Trap,
    Clock {
        d: Register,
        bits: u8,
    },
    ActiveMask {
        d: Register,
    },
    Barrier(BarrierOp),
    /// Index into the program's warp-wide instructions.
    Warp {
        index: u32,
    },
}

#[derive(Clone, Copy, Debug)]
pub(super) struct PtxStep {
    pub(super) guard: Register,
    /// XORed with the guard: 1 inverts it.
    pub(super) inverted: u32,
    pub(super) op: Op,
}

/// A kernel ready to run.
#[derive(Debug)]
pub(crate) struct Program {
    pub(super) name: String,
    pub(super) steps: Vec<PtxStep>,
    pub(super) lines: Vec<u32>,
    /// Registers of a thread, constants included.
    pub(super) registers: u32,
    /// The constants. They occupy the last registers.
    pub(super) constants: Vec<u64>,
    /// Offset and size of each parameter.
    pub(super) parameters: Vec<(u32, u32)>,
    pub(super) parameter_bytes: u32,
    /// Statically declared shared memory, in bytes; dynamic memory follows it.
    pub(super) shared_bytes: u32,
    /// Local memory of a thread, in bytes.
    pub(super) local_bytes: u32,
    pub(super) threads_max: Option<u64>,
    pub(super) threads_required: Option<[u32; 3]>,
    pub(super) conversions: Vec<Conversion>,
    pub(super) warp_ops: Vec<WarpOp>,
}
