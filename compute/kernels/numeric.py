"""Device functions the kernels share: number formats, roundings, and the gates' transcendental functions.

Owns nothing but arithmetic. Every function here runs the same in Triton's interpreter (numpy) and on
a GPU, except the two marked as hardware-only, which the interpreter never reaches: `PORTABLE` is
true there and the kernels then take the plain form of the same arithmetic.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

#: True in Triton's interpreter, which has no inline assembly, no dependent launch, and a wrong bf16 `tl.dot`.
PORTABLE = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def wait_for_previous():
    """Block until the kernel before this one has finished; a no-op unless launched as its dependent.

    Every kernel calls this before it reads what an earlier one wrote and before it writes anything,
    so that a dependent launch changes when a kernel starts and never what it sees. What may come
    before it: address arithmetic and loads of weights, which no kernel writes.
    """
    if not PORTABLE:
        gdc_wait()


@triton.jit
def release_next():
    """Let the kernel after this one be scheduled; it still waits (`wait_for_previous`) for our end."""
    if not PORTABLE:
        gdc_launch_dependents()


@triton.jit
def power_of_two(byte):
    """fp32 2^(byte - 127) of a ue8m0 byte; byte 0 is the subnormal 2^-127."""
    bits = byte.to(tl.int32) << 23
    return tl.where(bits == 0, 1 << 22, bits).to(tl.float32, bitcast=True)


@triton.jit
def round_to_grid(x, MANTISSA: tl.constexpr, LEAST_EXPONENT: tl.constexpr):
    """fp32 `x` rounded to MANTISSA bits after the leading one, ties to even.

    Below 2^LEAST_EXPONENT the step stays what it is there (subnormals). Adding and subtracting
    1.5 * 2^(23 + step exponent) makes the adder itself do the rounding. |x| < 2^(127 - 23).
    """
    exponent = (x.to(tl.int32, bitcast=True) >> 23) & 0xFF
    exponent = tl.maximum(exponent, 127 + LEAST_EXPONENT) + (23 - MANTISSA)
    shift = ((exponent << 23) | 0x400000).to(tl.float32, bitcast=True)
    return (x + shift) - shift


@triton.jit
def _scale_above(x):
    """2^ceil(log2 x) of normal positive fp32 `x`: a carry out of the mantissa bits."""
    return (x.to(tl.int32, bitcast=True) + 0x007FFFFF) & 0x7F800000


@triton.jit
def round_trip_e4m3(x):
    """fp32 [G, 32] quantized to e4m3 with one power-of-two scale a row, and dequantized (fp32)."""
    amax = tl.maximum(tl.max(tl.abs(x), axis=1), 1e-4)
    bits = _scale_above(amax * (1.0 / 448.0))[:, None]
    scale = bits.to(tl.float32, bitcast=True)
    inverse = ((254 << 23) - bits).to(tl.float32, bitcast=True)
    scaled = tl.minimum(tl.maximum(x * inverse, -448.0), 448.0)
    return round_to_grid(scaled, 3, -6) * scale


@triton.jit
def round_trip_e2m1_index(x):
    """fp32 [G, 32] on the fp4 grid with one power-of-two scale a row (index queries and keys)."""
    amax = tl.maximum(tl.max(tl.abs(x), axis=1), 6.0 * 1.1754943508222875e-38)
    bits = _scale_above(amax * (1.0 / 6.0))[:, None]
    scale = bits.to(tl.float32, bitcast=True)
    scaled = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    scaled = tl.minimum(tl.maximum(scaled, -6.0), 6.0)
    return round_to_grid(scaled, 1, 0) * scale


@triton.jit
def round_trip_e2m1_kv(x):
    """fp32 [G, 16] on the fp4 grid with one e4m3 scale a row (compressed KV)."""
    amax = tl.maximum(tl.max(tl.abs(x), axis=1), 6.0 / 512.0)
    scale = tl.minimum(tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32)), 448.0)
    scale = tl.broadcast_to(round_to_grid(scale, 3, -6)[:, None], x.shape)
    scaled = tl.minimum(tl.maximum(tl.div_rn(x, scale), -6.0), 6.0)
    return round_to_grid(scaled, 1, 0) * scale


@triton.jit
def to_bf16(x):
    """fp32 `x` rounded to bf16, to nearest even, and back: a rounding point of the model."""
    if PORTABLE:  # the interpreter's own cast truncates
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return bits.to(tl.float32, bitcast=True)
    else:
        return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def as_bf16(x):
    """bf16 of fp32 `x`, to nearest even."""
    return to_bf16(x).to(tl.bfloat16)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """log(1 + e^x) = max(x, 0) + log1p(e^-|x|), log1p as 2 artanh(y / (2 + y)).

    The hardware's log2 has an absolute error, useless for the small values that dominate here; the
    series has a relative one below 2^-22 (y / (2 + y) is at most 1/3).
    """
    y = tl.exp(-tl.abs(x))
    z = y / (2.0 + y)
    square = z * z
    series = 1.0 / 17.0
    series = series * square + 1.0 / 15.0
    series = series * square + 1.0 / 13.0
    series = series * square + 1.0 / 11.0
    series = series * square + 1.0 / 9.0
    series = series * square + 1.0 / 7.0
    series = series * square + 1.0 / 5.0
    series = series * square + 1.0 / 3.0
    series = series * square + 1.0
    return tl.maximum(x, 0.0) + 2.0 * z * series


@triton.jit
def swiglu(gate, up, limit):
    """silu(min(gate, limit)) * clamp(up, +-limit) of bf16-rounded products, in fp32."""
    gate = tl.minimum(to_bf16(gate), limit)
    up = tl.minimum(tl.maximum(to_bf16(up), -limit), limit)
    return gate * sigmoid(gate) * up


@triton.jit
def decode_e2m1(code):
    """fp32 value of an e2m1 code in the low four bits of an int32: shift into place, then rescale.

    The three magnitude bits at bit 22 of an fp32 are the value times 2^-126, subnormal included.
    """
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    # In two steps, because 2^126 times 2^-126 must not pass through a flushed subnormal.
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def decode_e2m1_pairs(packed, scale):
    """bf16 (even columns, odd columns) of uint8 `packed`, times bf16 `scale`, hardware only.

    Eight codes a 32-bit register: two shifts and two masks give a pair of bf16 numbers, 2^-126 times
    their codes' values, which `scale` (holding the 2^126) multiplies exactly. Within each group of
    four bytes the results lie in the order 0, 2, 1, 3, because bytes 0 and 2 of a register are the
    halves of a bf16 pair already; whoever multiplies them takes the other factor in that order.
    """
    return tl.inline_asm_elementwise(
        asm="""
        {
        .reg .b32 m0, m1, m2, m3, s0, s1, s2, s3;
        shl.b32 m0, $4, 6;
        shr.u32 m1, $4, 2;
        shl.b32 m2, $4, 2;
        shr.u32 m3, $4, 6;
        shl.b32 s0, $4, 12;
        shl.b32 s1, $4, 4;
        shl.b32 s2, $4, 8;
        and.b32 s0, s0, 0x80008000;
        and.b32 s1, s1, 0x80008000;
        and.b32 s2, s2, 0x80008000;
        and.b32 s3, $4, 0x80008000;
        lop3.b32 m0, m0, 0x01C001C0, s0, 0xEA;
        lop3.b32 m1, m1, 0x01C001C0, s1, 0xEA;
        lop3.b32 m2, m2, 0x01C001C0, s2, 0xEA;
        lop3.b32 m3, m3, 0x01C001C0, s3, 0xEA;
        mul.rn.bf16x2 $0, m0, $5;
        mul.rn.bf16x2 $1, m1, $6;
        mul.rn.bf16x2 $2, m2, $5;
        mul.rn.bf16x2 $3, m3, $6;
        }
        """,
        constraints="=r,=r,=r,=r,r,r,r",
        args=[packed, scale],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def decode_e4m3_pairs(codes):
    """bf16 of uint8 e4m3 `codes` times 2^-120, hardware only; in each group of four, order 0, 2, 1, 3.

    The seven magnitude bits at bit 4 of a bf16 are the value times 2^-120, subnormal included.
    """
    return tl.inline_asm_elementwise(
        asm="""
        {
        .reg .b32 m0, m1, s0, s1;
        shl.b32 m0, $2, 4;
        shr.u32 m1, $2, 4;
        shl.b32 s0, $2, 8;
        and.b32 s0, s0, 0x80008000;
        and.b32 s1, $2, 0x80008000;
        lop3.b32 $0, m0, 0x07F007F0, s0, 0xEA;
        lop3.b32 $1, m1, 0x07F007F0, s1, 0xEA;
        }
        """,
        constraints="=r,=r,r",
        args=[codes],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def pair_order(k):
    """Where the factor for position `k` of a pair decoder's result lies: middle two of four swapped."""
    return (k & -4) | ((k & 1) << 1) | ((k >> 1) & 1)


@triton.jit
def decode_e4m3(codes):
    """fp32 of uint8 e4m3 `codes`, in the order they lie, for the interpreter."""
    code = codes.to(tl.int32)
    bits = ((code & 0x7F) << 20) | ((code & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def prefetch_rows(base, rows, row_bytes, inside, start, end, LINES: tl.constexpr):
    """Ask for the first LINES cache lines of each row from byte `start` on; L2 only, nothing waits.

    Called before `wait_for_previous`, so that weights stream in while the kernel before still runs.
    """
    if not PORTABLE and LINES > 0:
        at = start + tl.arange(0, LINES) * 128
        # Past the end: the row's first byte again, which is on its way already.
        at = tl.where(at < end, at, start)
        row = tl.where(inside, rows, 0).to(tl.int64)
        pointers = base + row[:, None] * row_bytes + at[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [pointers.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
