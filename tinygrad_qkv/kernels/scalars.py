"""Scalar functions in LLVM IR that a loop around them turns into vector instructions, as a call into libm does not."""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from tinygrad_qkv.kernels.compile import JIT


class _Numbers(NamedTuple):
    """Constants of a float type; polynomials, lowest power first, go through the Chebyshev points of their interval."""

    mantissa: int
    ln2: tuple[float, float]  # split in two, so that an exponent times the first part is exact
    exp_range: tuple[float, float]  # outside, exp is 0 or inf
    exp: tuple[float, ...]  # exp(r), |r| <= ln(2) / 2
    erf_switch: float
    erf_top: float  # from here on erf is 1
    erf_small: tuple[float, ...]  # erf(x) / x in powers of x^2, for 0 <= x <= erf_switch
    erf_large: tuple[float, ...]  # log(1 - erf(x)) in powers of x - 2, for erf_switch <= x <= erf_top


_SINGLE = _Numbers(
    mantissa=23,
    ln2=(0.693359375, -2.12194440e-4),
    exp_range=(-87.33, 88.722),
    exp=(1.0, 1.0, 0.5, 0.1666657702559799, 0.041666554662050534, 0.008363173074513711, 0.001392617611993558),
    erf_switch=0.9375,
    erf_top=4.0,
    erf_small=(
        *(1.1283791665669025, -0.37612633003038975, 0.11283683699319208, -0.026858722694756258),
        *(0.005199318198075916, -0.0008122960887772806, 8.285826548691171e-05),
    ),
    erf_large=(
        *(-5.364941267342029, -4.418160856982592, -0.9237508465288986, -0.01646473041461645),
        *(0.0035708462279286915, -0.0007332925892466577, 0.00013534421768643525, -1.988257981092733e-05),
        1.6432831537954935e-06,
    ),
)
_DOUBLE = _Numbers(
    mantissa=52,
    ln2=(6.93147180369123816490e-01, 1.90821492927058770002e-10),
    exp_range=(-708.39, 709.78),
    exp=(
        *(1.0, 1.0, 0.5000000000000001, 0.16666666666666669, 0.041666666666624164, 0.008333333333330065),
        *(0.0013888888917196719, 0.00019841269863040545, 2.4801521322368692e-05, 2.7557268480310024e-06),
        *(2.7620075879983367e-07, 2.5100375832561234e-08),
    ),
    erf_switch=1.125,
    erf_top=6.0,
    erf_small=(
        *(1.1283791670955126, -0.3761263890318375, 0.11283791670955043, -0.026866170645114432),
        *(0.005223977625264144, -0.0008548327012150531, 0.00012055332516543201, -1.4925637334482367e-05),
        *(1.6461859667480334e-06, -1.6362322758965946e-07, 1.477281093163057e-08, -1.2057563616790305e-09),
        *(8.36781838578592e-11, -3.748144861079048e-12),
    ),
    erf_large=(
        *(-5.364941264616638, -4.418160805994403, -0.9237508418237607, -0.016465118137223945),
        *(0.003570756345456298, -0.0007323993835858941, 0.00013530933819149015, -2.0706435651615028e-05),
        *(1.9521869290815083e-06, 2.0363429876952835e-07, -1.731963076534201e-07, 5.782807783793899e-08),
        *(-1.3966939331625518e-08, 2.505262899160791e-09, -2.503789187277239e-10, -3.303228890520497e-11),
        *(2.4477937163712266e-11, -7.0761825644195495e-12, 1.3557029424111973e-12, -1.8151138356664887e-13),
        *(1.6426115228515427e-14, -9.058234804494896e-16, 2.3016818984240125e-17),
    ),
)


def _numbers(real: ir.Type) -> _Numbers:
    return _SINGLE if real == ir.FloatType() else _DOUBLE


def _multiply_add(builder, a, b, c):
    """a * b + c. "contract" lets the host's fused multiply-add do both; nothing else may be reordered."""
    return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))


def _polynomial(builder, x, coefficients):
    value = ir.Constant(x.type, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = _multiply_add(builder, value, x, ir.Constant(x.type, coefficient))
    return value


def _exp_of(builder, x):
    """exp(x) = 2^n * exp(r), with n = round(x / ln 2)."""
    real, numbers = x.type, _numbers(x.type)
    integer = ir.IntType(32 if numbers is _SINGLE else 64)
    # Adding 1.5 * 2^mantissa rounds to an integer, which then stands in the lowest bits of the sum.
    magic = ir.Constant(real, 1.5 * 2.0**numbers.mantissa)
    shifted = _multiply_add(builder, x, ir.Constant(real, 1.4426950408889634), magic)
    n, r = builder.fsub(shifted, magic), x
    for part in numbers.ln2:
        r = _multiply_add(builder, n, ir.Constant(real, -part), r)
    exponent = builder.shl(builder.bitcast(shifted, integer), integer(numbers.mantissa))
    scaled = builder.add(builder.bitcast(_polynomial(builder, r, numbers.exp), integer), exponent)
    lowest, highest = (ir.Constant(real, bound) for bound in numbers.exp_range)
    result = builder.bitcast(scaled, real)
    result = builder.select(builder.fcmp_ordered("<", x, lowest), ir.Constant(real, 0.0), result)
    result = builder.select(builder.fcmp_ordered(">", x, highest), ir.Constant(real, np.inf), result)
    return builder.select(builder.fcmp_unordered("uno", x, x), x, result)


@intrinsic
def _exp(typingctx, x):
    return x(x), lambda context, builder, sig, args: _exp_of(builder, args[0])


# exp(x) of a float32 or float64, within one unit in the last place. Below the smallest normal number it is 0.
exp: Any = _exp if JIT else np.exp


@intrinsic
def erf(typingctx, x):
    """erf(x) of a float32 or float64, within three units in the last place."""

    def codegen(context, builder, sig, args):
        (x,) = args
        real, numbers = x.type, _numbers(x.type)
        integer = ir.IntType(32 if numbers is _SINGLE else 64)
        sign = integer(1 << (integer.width - 1))
        bits = builder.bitcast(x, integer)
        size = builder.bitcast(builder.and_(bits, builder.not_(sign)), real)
        top = ir.Constant(real, numbers.erf_top)
        size = builder.select(builder.fcmp_ordered("<", size, top), size, top)

        small = builder.fmul(x, _polynomial(builder, builder.fmul(size, size), numbers.erf_small))
        tail = _polynomial(builder, builder.fsub(size, ir.Constant(real, 2.0)), numbers.erf_large)
        large = builder.fsub(ir.Constant(real, 1.0), _exp_of(builder, tail))
        large = builder.bitcast(builder.or_(builder.bitcast(large, integer), builder.and_(bits, sign)), real)
        result = builder.select(builder.fcmp_ordered("<", size, ir.Constant(real, numbers.erf_switch)), small, large)
        return builder.select(builder.fcmp_unordered("uno", x, x), x, result)

    return x(x), codegen


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
