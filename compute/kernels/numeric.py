"""Device functions the kernels share: number formats, roundings, and the gates' transcendental
functions.

Owns nothing but arithmetic. Every function here runs the same in Triton's interpreter (numpy) and
on a GPU; where an instruction has no interpreter (`PORTABLE`), its plain form does the same
arithmetic.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, libdevice

#: True in Triton's interpreter, which has no inline assembly, no dependent launch, and a wrong bf16
#: `tl.dot`.
PORTABLE = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

#: For a launch whose kernel rounds every product before it adds, as torch does. What is rounded to
#: bf16 next then crosses a boundary no more often than the reference's.
UNFUSED = {} if PORTABLE else {"enable_fp_fusion": False}


@triton.jit
def wait_for_previous():
    """Block until the kernel before this one has finished; a no-op unless launched as its
    dependent.

    Every kernel calls this before it reads what an earlier one wrote and before it writes anything,
    so that a dependent launch changes when a kernel starts and never what it sees. What may come
    before it: address arithmetic and loads of weights, which no kernel writes.
    """
    if not PORTABLE:
        gdc_wait()


@triton.jit
def release_next():
    """Let the kernel after this one be scheduled; it still waits (`wait_for_previous`) for our end.

    Small kernels say so at once. Those that stream weights say so after their last load: programs
    that only wait would take their places and registers (measured: 1.5 times the time of a token).
    """
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
def quantize_e4m3(x):
    """fp32 [G, 32] as e4m3 values (in fp32) and the power-of-two scale fp32 [G] of each row."""
    amax = tl.maximum(tl.max(tl.abs(x), axis=1), 1e-4)
    bits = _scale_above(amax * (1.0 / 448.0))
    inverse = ((254 << 23) - bits).to(tl.float32, bitcast=True)[:, None]
    scaled = tl.minimum(tl.maximum(x * inverse, -448.0), 448.0)
    return round_to_grid(scaled, 3, -6), bits.to(tl.float32, bitcast=True)


@triton.jit
def round_trip_e4m3(x):
    """fp32 [G, 32] quantized to e4m3 with one power-of-two scale a row, and dequantized (fp32)."""
    code, scale = quantize_e4m3(x)
    return code * scale[:, None]


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
def bf16_dot(a, b):
    """fp32 product of bf16 `a` and `b`; through fp32 in the interpreter, whose own is wrong."""
    if PORTABLE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b)


@triton.jit
def exact_exp(x):
    """e^x within an ulp or two, where `tl.exp` is off by some ten of them far from 0: what is
    rounded to bf16 next then crosses a boundary as rarely as torch's."""
    if PORTABLE:
        return tl.exp(x)
    else:
        return libdevice.exp(x)


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


def swiglu_bound(limit: float) -> float:
    """What `swiglu` takes for the model's limit, which means none at 0 and below."""
    return limit if limit > 0 else float("inf")


@triton.jit
def decode_e4m3(codes):
    """fp32 of uint8 e4m3 `codes`: shifted into place, then rescaled. For the interpreter."""
    code = codes.to(tl.int32)
    bits = ((code & 0x7F) << 20) | ((code & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def split_limbs(code):
    """int32 (low, middle, high) signed bytes of fp32 e4m3 values: low + 256 middle + 65536 high =
    512 x.

    512 is what makes every e4m3 value an integer, at most 229,376 in size.
    """
    whole = (code * 512.0).to(tl.int32)
    low = ((whole & 255) ^ 128) - 128
    rest = (whole - low) >> 8
    middle = ((rest & 255) ^ 128) - 128
    return low, middle, (rest - middle) >> 8


@triton.jit
def _signed_byte(word, i: tl.constexpr):
    return (word << (24 - 8 * i)) >> 24


@triton.jit
def _dot_eight_portable(word, x0, x1, limb):
    for i in tl.static_range(8):
        code = (word >> (4 * i)) & 15
        size = code & 7
        twice = tl.where(size < 2, size, (2 + (size & 1)) << tl.maximum((size >> 1) - 1, 0))
        value = 16 + tl.where(code > 7, -twice, twice)
        if i < 4:
            limb += value * _signed_byte(x0, i)
        else:
            limb += value * _signed_byte(x1, i - 4)
    return limb


@triton.jit
def dot_eight(word, x0, x1, y0, y1, z0, z1, low, middle, high, zero):
    """int32 (low, middle, high), each increased by the sum over the eight e2m1 codes of `word` of
    (16 + twice the code's value) times a limb of 512 x, exact.

    x as bytes of three limbs (x, y, z), four columns a word. A byte permute looks four codes up at
    once in a table of eight sizes, and gives 0 for a code whose fourth bit, the sign, is set. So
    one of 16 + size for the codes as they are and one of 16 - size for their complements in sign
    add up to all four. The 16 keeps every entry a positive byte below 128; whoever adds the sums
    takes 16 * 512 * sum(x) off again.

    `zero` is an int32 zero the compiler cannot see through: it keeps the tables in registers, where
    a constant would be moved into one again in front of every permute.
    """
    if PORTABLE:
        low = _dot_eight_portable(word, x0, x1, low)
        middle = _dot_eight_portable(word, y0, y1, middle)
        return low, middle, _dot_eight_portable(word, z0, z1, high)
    else:
        return tl.inline_asm_elementwise(
            asm="""
            {
            .reg .b32 v0, v1, w1, p, n, a, b, d;
            xor.b32 v0, $3, 0x88888888;
            shr.u32 w1, $3, 16;
            shr.u32 v1, v0, 16;
            prmt.b32 p, $13, 0x1C181614, $3;
            prmt.b32 n, $14, 0x04080A0C, v0;
            add.u32 a, p, n;
            prmt.b32 p, $13, 0x1C181614, w1;
            prmt.b32 n, $14, 0x04080A0C, v1;
            add.u32 b, p, n;
            dp4a.u32.s32 d, a, $4, $10;
            dp4a.u32.s32 $0, b, $5, d;
            dp4a.u32.s32 d, a, $6, $11;
            dp4a.u32.s32 $1, b, $7, d;
            dp4a.u32.s32 d, a, $8, $12;
            dp4a.u32.s32 $2, b, $9, d;
            }
            """,
            constraints="=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r",
            args=[
                word,
                x0,
                x1,
                y0,
                y1,
                z0,
                z1,
                low,
                middle,
                high,
                zero + 0x13121110,
                zero + 0x0D0E0F10,
            ],
            dtype=(tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
