//! The timed kernels, with their CPU references for the simulated machine.

use cuda_driver::reference::{KernelReference, ReferenceError};

use super::program::MIB;

/// `nothing()`; `read_words(from, groups, to)`, which reads `groups` times 16 bytes and writes only if
/// their exclusive or is a number that it never is; and `copy_words`, which takes the same and writes
/// them all. `groups` is a multiple of four times the number of threads.
pub(crate) const PTX: &str = "
.version 7.0
.target sm_80
.address_size 64

.visible .entry nothing()
{
    ret;
}

.visible .entry read_words(
    .param .u64 from,
    .param .u64 groups,
    .param .u64 to
)
{
    .reg .pred %p<3>;
    .reg .b32 %r<6>;
    .reg .b64 %rd<32>;

    ld.param.u64 %rd1, [from];
    ld.param.u64 %rd2, [groups];
    ld.param.u64 %rd3, [to];
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mov.u32 %r4, %nctaid.x;
    mad.lo.u32 %r5, %r1, %r2, %r3;
    cvt.u64.u32 %rd4, %r5;
    mul.wide.u32 %rd5, %r4, %r2;
    shl.b64 %rd6, %rd5, 4;
    mov.u64 %rd7, 0;
    cvta.to.global.u64 %rd8, %rd1;
    shl.b64 %rd9, %rd4, 4;
    add.u64 %rd10, %rd8, %rd9;
LOOP:
    setp.ge.u64 %p1, %rd4, %rd2;
    @%p1 bra END;
    add.u64 %rd11, %rd10, %rd6;
    add.u64 %rd12, %rd11, %rd6;
    add.u64 %rd13, %rd12, %rd6;
    ld.global.v2.u64 {%rd14, %rd15}, [%rd10];
    ld.global.v2.u64 {%rd16, %rd17}, [%rd11];
    ld.global.v2.u64 {%rd18, %rd19}, [%rd12];
    ld.global.v2.u64 {%rd20, %rd21}, [%rd13];
    xor.b64 %rd22, %rd14, %rd15;
    xor.b64 %rd23, %rd16, %rd17;
    xor.b64 %rd24, %rd18, %rd19;
    xor.b64 %rd25, %rd20, %rd21;
    xor.b64 %rd26, %rd22, %rd23;
    xor.b64 %rd27, %rd24, %rd25;
    xor.b64 %rd28, %rd26, %rd27;
    xor.b64 %rd7, %rd7, %rd28;
    add.u64 %rd10, %rd13, %rd6;
    shl.b64 %rd29, %rd5, 2;
    add.u64 %rd4, %rd4, %rd29;
    bra LOOP;
END:
    setp.ne.u64 %p2, %rd7, 81985529216486895;
    @%p2 bra DONE;
    cvta.to.global.u64 %rd30, %rd3;
    st.global.u64 [%rd30], %rd7;
DONE:
    ret;
}

.visible .entry copy_words(
    .param .u64 from,
    .param .u64 groups,
    .param .u64 to
)
{
    .reg .pred %p<2>;
    .reg .b32 %r<6>;
    .reg .b64 %rd<32>;

    ld.param.u64 %rd1, [from];
    ld.param.u64 %rd2, [groups];
    ld.param.u64 %rd3, [to];
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mov.u32 %r4, %nctaid.x;
    mad.lo.u32 %r5, %r1, %r2, %r3;
    cvt.u64.u32 %rd4, %r5;
    mul.wide.u32 %rd5, %r4, %r2;
    shl.b64 %rd6, %rd5, 4;
    cvta.to.global.u64 %rd7, %rd1;
    cvta.to.global.u64 %rd8, %rd3;
    shl.b64 %rd9, %rd4, 4;
    add.u64 %rd10, %rd7, %rd9;
    add.u64 %rd11, %rd8, %rd9;
LOOP:
    setp.ge.u64 %p1, %rd4, %rd2;
    @%p1 bra END;
    add.u64 %rd12, %rd10, %rd6;
    add.u64 %rd13, %rd12, %rd6;
    add.u64 %rd14, %rd13, %rd6;
    ld.global.v2.u64 {%rd15, %rd16}, [%rd10];
    ld.global.v2.u64 {%rd17, %rd18}, [%rd12];
    ld.global.v2.u64 {%rd19, %rd20}, [%rd13];
    ld.global.v2.u64 {%rd21, %rd22}, [%rd14];
    add.u64 %rd23, %rd11, %rd6;
    add.u64 %rd24, %rd23, %rd6;
    add.u64 %rd25, %rd24, %rd6;
    st.global.v2.u64 [%rd11], {%rd15, %rd16};
    st.global.v2.u64 [%rd23], {%rd17, %rd18};
    st.global.v2.u64 [%rd24], {%rd19, %rd20};
    st.global.v2.u64 [%rd25], {%rd21, %rd22};
    add.u64 %rd10, %rd14, %rd6;
    add.u64 %rd11, %rd25, %rd6;
    shl.b64 %rd26, %rd5, 2;
    add.u64 %rd4, %rd4, %rd26;
    bra LOOP;
END:
    ret;
}
";

/// What `read_words` means to the simulated machine, which would take minutes thread by thread.
const READ_WORDS: KernelReference = KernelReference {
    name: "read_words",
    run: |memory, _, args| {
        let word = |index| args.get::<u64>(index).ok_or(ReferenceError::Argument { index });
        let (from, bytes) = (word(0)?, word(1)? * 16);
        (0..bytes).step_by(MIB as usize).try_for_each(|offset| {
            memory.load(from + offset, MIB.min(bytes - offset)).map(drop).map_err(Into::into)
        })
    },
};

/// What `copy_words` means, likewise.
const COPY_WORDS: KernelReference = KernelReference {
    name: "copy_words",
    run: |memory, _, args| {
        let word = |index| args.get::<u64>(index).ok_or(ReferenceError::Argument { index });
        let (from, bytes, to) = (word(0)?, word(1)? * 16, word(2)?);
        (0..bytes).step_by(MIB as usize).try_for_each(|offset| {
            let data = memory.load(from + offset, MIB.min(bytes - offset))?.into_owned();
            memory.store(to + offset, &data).map_err(Into::into)
        })
    },
};

const NOTHING: KernelReference = KernelReference { name: "nothing", run: |_, _, _| Ok(()) };

/// All of them.
pub(crate) const REFERENCES: &[KernelReference] = &[NOTHING, READ_WORDS, COPY_WORDS];
