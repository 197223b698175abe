"""Scalar functions in LLVM IR that a loop around them turns into vector instructions, as a call into libm does not."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from tinygrad_qkv.kernels.compile import JIT

# exp(x) = 2^n * exp(r) with n = round(x / ln 2) and |r| <= ln(2) / 2. ln 2 is split in two, so that n times the first
# part is exact. exp(r) is a polynomial through the Chebyshev points of that interval, lowest power first; its relative
# error is below 1e-7 in float32 and 2e-16 in float64. Outside (lowest, highest) the result is 0 or inf.
_EXP: dict[types.Type, dict[str, Any]] = {
    types.float32: {
        "mantissa": 23,
        "bits": 32,
        "ln2": (0.693359375, -2.12194440e-4),
        "range": (-87.33, 88.722),
        "polynomial": (
            *(1.0, 1.0, 0.5, 0.1666657702559799, 0.041666554662050534, 0.008363173074513711, 0.001392617611993558),
        ),
    },
    types.float64: {
        "mantissa": 52,
        "bits": 64,
        "ln2": (6.93147180369123816490e-01, 1.90821492927058770002e-10),
        "range": (-708.39, 709.78),
        "polynomial": (
            *(1.0, 1.0, 0.5000000000000001, 0.16666666666666669, 0.041666666666624164, 0.008333333333330065),
            *(0.0013888888917196719, 0.00019841269863040545, 2.4801521322368692e-05, 2.7557268480310024e-06),
            *(2.7620075879983367e-07, 2.5100375832561234e-08),
        ),
    },
}


@intrinsic
def _exp(typingctx, x):
    def codegen(context, builder, sig, args):
        (value,) = args
        real, numbers = value.type, _EXP[sig.args[0]]
        integer, mantissa = ir.IntType(numbers["bits"]), numbers["mantissa"]
        lowest, highest = (ir.Constant(real, bound) for bound in numbers["range"])

        def multiply_add(a, b, c):
            # "contract" lets the host's fused multiply-add do both; nothing may be reordered here.
            return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))

        # Adding 1.5 * 2^mantissa rounds to an integer, which then stands in the lowest bits of the sum.
        magic = ir.Constant(real, 1.5 * 2.0**mantissa)
        shifted = multiply_add(value, ir.Constant(real, 1.4426950408889634), magic)
        n = builder.fsub(shifted, magic)
        r = value
        for part in numbers["ln2"]:
            r = multiply_add(n, ir.Constant(real, -part), r)
        p = ir.Constant(real, numbers["polynomial"][-1])
        for coefficient in numbers["polynomial"][-2::-1]:
            p = multiply_add(p, r, ir.Constant(real, coefficient))
        exponent = builder.shl(builder.bitcast(shifted, integer), integer(mantissa))
        result = builder.bitcast(builder.add(builder.bitcast(p, integer), exponent), real)

        zero, infinity = ir.Constant(real, 0.0), ir.Constant(real, np.inf)
        result = builder.select(builder.fcmp_ordered("<", value, lowest), zero, result)
        result = builder.select(builder.fcmp_ordered(">", value, highest), infinity, result)
        return builder.select(builder.fcmp_unordered("uno", value, value), value, result)

    return x(x), codegen


# exp(x) of a float32 or float64. Results below the smallest normal number are 0; exp(nan) is nan.
exp: Any = _exp if JIT else np.exp


@intrinsic
def rank(typingctx, x):
    """An integer that orders as the float does. A maximum of integers is vectorised, one of floats is not."""
    integer = types.Integer.from_bitwidth(x.bitwidth)

    def codegen(context, builder, sig, args):
        kind = ir.IntType(x.bitwidth)
        bits = builder.bitcast(args[0], kind)
        # The bits of negative floats order backwards: flip all but the sign.
        return builder.xor(bits, builder.lshr(builder.ashr(bits, kind(x.bitwidth - 1)), kind(1)))

    return integer(x), codegen


@intrinsic
def of_rank(typingctx, number):
    """The float whose `rank` is `number`."""
    real = types.float32 if number.bitwidth == 32 else types.float64

    def codegen(context, builder, sig, args):
        kind = ir.IntType(number.bitwidth)
        flip = builder.lshr(builder.ashr(args[0], kind(number.bitwidth - 1)), kind(1))
        return builder.bitcast(builder.xor(args[0], flip), context.get_value_type(real))

    return real(number), codegen
