"""Scalar functions in LLVM IR that a loop around them turns into vector instructions, as a call into libm does not."""

import math
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from tinygrad_qkv.kernels.compile import JIT
from tinygrad_qkv.kernels.simd import constant, multiply_add


class _Numbers(NamedTuple):
    """Constants of a float type; polynomials, lowest power first, go through the Chebyshev points of their interval."""

    mantissa: int
    bias: int
    ln2: tuple[float, float]  # split in two, so that an exponent times the first part is exact
    exp_range: tuple[float, float]  # outside, exp is 0 or inf
    exp: tuple[float, ...]  # exp(r), |r| <= ln(2) / 2
    root_half: int  # the bits of sqrt(1/2)
    log: tuple[float, ...]  # 2 atanh(s) / s^3 - 2 / s^2 in powers of s^2, |s| <= (sqrt(2) - 1) / (sqrt(2) + 1)
    erf_switch: float
    erf_top: float  # from here on erf is 1
    erf_small: tuple[float, ...]  # erf(x) / x in powers of x^2, for 0 <= x <= erf_switch
    erf_large: tuple[float, ...]  # log(1 - erf(x)) in powers of x - 2, for erf_switch <= x <= erf_top
    tanh_top: float  # from here on tanh is 1
    log1p: tuple[float, ...]  # log((1 + s) / (1 - s)) / s in powers of s^2, for 0 <= s <= 1 / 3
    normal_top: float  # exp(-x^2 / 2) is below the smallest normal number, or 0: an exponent's bits are 0 here
    mills_fold: float
    mills: tuple[float, ...]  # Mills' ratio times (fold + x), in powers of (fold - x) / (fold + x)


_SINGLE = _Numbers(
    mantissa=23,
    bias=127,
    ln2=(0.693359375, -2.12194440e-4),
    exp_range=(-87.34, 89.0),
    exp=(1.0, 1.0, 0.5, 0.1666657702559799, 0.041666554662050534, 0.008363173074513711, 0.001392617611993558),
    root_half=0x3F3504F3,
    log=(0.6666666655445165, 0.40000121876972, 0.28550816599711726, 0.23330581938237357),
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
    tanh_top=10.0,
    log1p=(2.000000007681759, 0.6666632164137777, 0.40024595230703747, 0.27965157745197267, 0.2815777836310908),
    normal_top=13.2,
    mills_fold=3.5,
    mills=(
        *(1.86597439215023, 1.417653167689172, 0.7906524155347583, 0.29089938143286714),
        *(0.04364294811164131, -0.016264696839098813, -0.008009799335037543, 0.0012402082196836387),
        *(0.0011299126242048636, -0.0003184479554291413),
    ),
)
_DOUBLE = _Numbers(
    mantissa=52,
    bias=1023,
    ln2=(6.93147180369123816490e-01, 1.90821492927058770002e-10),
    exp_range=(-708.4, 709.9),
    exp=(
        *(1.0, 1.0, 0.5000000000000001, 0.16666666666666669, 0.041666666666624164, 0.008333333333330065),
        *(0.0013888888917196719, 0.00019841269863040545, 2.4801521322368692e-05, 2.7557268480310024e-06),
        *(2.7620075879983367e-07, 2.5100375832561234e-08),
    ),
    root_half=0x3FE6A09E667F3BCD,
    log=(
        *(0.666666666666667, 0.3999999999989945, 0.2857142862600094, 0.22222211130531444, 0.1818288944370824),
        *(0.15331710818462158, 0.1461658470297718),
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
    tanh_top=20.0,
    log1p=(
        *(2.0, 0.6666666666666666, 0.4000000000000027, 0.2857142857137565, 0.22222222227641733),
        *(0.18181817852181228, 0.15384628221264643, 0.13332999520385172, 0.11770618555248309),
        *(0.10454947515530863, 0.10098185468634059, 0.0578540899766765, 0.1607256613467827),
    ),
    normal_top=37.635,
    mills_fold=4.0,
    mills=(
        *(1.8932190633084856, 1.5237709108199804, 0.9704095548675623, 0.4675409629986626),
        *(0.15139176231359544, 0.018900450851342575, -0.008722295292972913, -0.004087855530674872),
        *(0.00033424475585657707, 0.0005792680957484086, -4.783725672838041e-06, -8.808986673652561e-05),
        *(1.796429797569392e-06, 1.4825389648370814e-05, -1.5738823916745985e-06, -2.534264054809422e-06),
        *(6.659037468539348e-07, 3.598113863624798e-07, -1.8966481538432626e-07, -1.8166032716972215e-08),
        *(2.9679611549098402e-08, -5.570071596136047e-09),
    ),
)


def _numbers(kind: ir.Type) -> _Numbers:
    return _SINGLE if getattr(kind, "element", kind) == ir.FloatType() else _DOUBLE


def _integer(kind: ir.Type) -> ir.Type:
    """The integer type of a float type's width, for its bits; in as many lanes."""
    bits = ir.IntType(32 if _numbers(kind) is _SINGLE else 64)
    return ir.VectorType(bits, kind.count) if isinstance(kind, ir.VectorType) else bits


def absolute_of(builder, x):
    """|x|, of a scalar or a vector."""
    integer = _integer(x.type)
    width = getattr(integer, "element", integer).width
    return builder.bitcast(builder.and_(builder.bitcast(x, integer), constant(integer, (1 << (width - 1)) - 1)), x.type)


def _limited(builder, x, top):
    """(|x| or `top` where that is smaller, the bit of x's sign); of NaN `top`."""
    integer, top = _integer(x.type), constant(x.type, top)
    size, bits = absolute_of(builder, x), builder.bitcast(x, integer)
    sign = builder.xor(bits, builder.bitcast(size, integer))
    return builder.select(builder.fcmp_ordered("<", size, top), size, top), sign


def _with_sign(builder, size, sign):
    return builder.bitcast(builder.or_(builder.bitcast(size, sign.type), sign), size.type)


def _polynomial(builder, x, coefficients):
    value = constant(x.type, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = multiply_add(builder, value, x, constant(x.type, coefficient))
    return value


def _reduced(builder, x, bias: int = 0):
    """(r, n + bias) with x = n * ln 2 + r and |r| <= ln(2) / 2; n + bias stands in an integer's exponent bits."""
    real, integer, numbers = x.type, _integer(x.type), _numbers(x.type)
    # Adding 1.5 * 2^mantissa rounds to an integer, which then stands in the lowest bits of the sum.
    magic = constant(real, 1.5 * 2.0**numbers.mantissa + bias)
    shifted = multiply_add(builder, x, constant(real, 1.4426950408889634), magic)
    n, r = builder.fsub(shifted, magic), x
    for part in numbers.ln2:
        r = multiply_add(builder, n, constant(real, -part), r)
    return r, builder.shl(builder.bitcast(shifted, integer), constant(integer, numbers.mantissa))


def exp_of(builder, x):
    """exp(x) = 2 exp(r) * 2^(n - 1), with n = round(x / ln 2), of a scalar or a vector.

    So split, n = -126 (-1022) gives 0, n = 128 (1024) what is finite and inf beyond, and NaN stays NaN on its way.
    """
    real, numbers = x.type, _numbers(x.type)
    lowest, highest = (constant(real, bound) for bound in numbers.exp_range)
    x = builder.select(builder.fcmp_ordered("<", x, lowest), lowest, x)
    x = builder.select(builder.fcmp_ordered(">", x, highest), highest, x)
    r, power = _reduced(builder, x, numbers.bias - 1)
    return builder.fmul(_polynomial(builder, r, [2 * c for c in numbers.exp]), builder.bitcast(power, real))


def log_of(builder, x):
    """log(x) = e ln 2 + log(m) for x = 2^e m with m between sqrt(1/2) and sqrt(2), of a scalar or a vector.

    With f = m - 1 and s = f / (2 + f), log(m) = 2 atanh(s) is f less what is small beside it.
    """
    real, integer, numbers = x.type, _integer(x.type), _numbers(x.type)
    zero, width = constant(real, 0.0), constant(integer, numbers.mantissa)
    # A number below the smallest normal one is first made 2^(mantissa + 2) times as large.
    low = builder.fcmp_ordered("<", x, constant(real, 2.0 ** (1 - numbers.bias)))
    shift = builder.select(low, constant(real, -numbers.mantissa - 2.0), zero)
    bits = builder.select(low, builder.fmul(x, constant(real, 2.0 ** (numbers.mantissa + 2))), x)
    bits = builder.bitcast(bits, integer)
    exponent = builder.ashr(builder.sub(bits, constant(integer, numbers.root_half)), width)
    m = builder.bitcast(builder.sub(bits, builder.shl(exponent, width)), real)
    e, f = builder.fadd(builder.sitofp(exponent, real), shift), builder.fsub(m, constant(real, 1.0))
    s = builder.fdiv(f, builder.fadd(f, constant(real, 2.0)))
    square, half = builder.fmul(s, s), builder.fmul(builder.fmul(f, f), constant(real, 0.5))
    # log(m) = f - (half - s * (half + s^2 * polynomial))
    rest = builder.fadd(half, builder.fmul(square, _polynomial(builder, square, numbers.log)))
    rest = multiply_add(builder, s, rest, builder.fmul(e, constant(real, numbers.ln2[1])))
    y = multiply_add(builder, e, constant(real, numbers.ln2[0]), builder.fsub(f, builder.fsub(half, rest)))
    for bound, value in ((np.inf, np.inf), (0.0, -np.inf)):
        y = builder.select(builder.fcmp_ordered("==", x, constant(real, bound)), constant(real, value), y)
    return builder.select(builder.fcmp_unordered("<", x, zero), constant(real, np.nan), y)  # negative, or NaN


@intrinsic
def _exp(typingctx, x):
    return x(x), lambda context, builder, sig, args: exp_of(builder, args[0])


# exp(x) of a float32 or float64, within one unit in the last place; below about 2^-125.5 (2^-1021.5) it is 0.
exp: Any = _exp if JIT else np.exp


@intrinsic
def _log(typingctx, x):
    return x(x), lambda context, builder, sig, args: log_of(builder, args[0])


# log(x) of a float32 or float64, within one unit in the last place.
log: Any = _log if JIT else np.log


def erf_of(builder, x):
    """erf(x) of a scalar or a vector, within three units in the last place."""
    real, numbers = x.type, _numbers(x.type)
    size, sign = _limited(builder, x, numbers.erf_top)
    small = builder.fmul(x, _polynomial(builder, builder.fmul(size, size), numbers.erf_small))
    tail = _polynomial(builder, builder.fsub(size, constant(real, 2.0)), numbers.erf_large)
    large = _with_sign(builder, builder.fsub(constant(real, 1.0), exp_of(builder, tail)), sign)
    result = builder.select(builder.fcmp_ordered("<", size, constant(real, numbers.erf_switch)), small, large)
    return builder.select(builder.fcmp_unordered("uno", x, x), x, result)


def tanh_of(builder, x):
    """tanh(x) = t / (t + 2) with t = exp(2x) - 1 = 2^n * (exp(r) - 1) + (2^n - 1), which is exact near 0 too.

    Of a scalar or a vector, within three units in the last place.
    """
    real, numbers = x.type, _numbers(x.type)
    one, two = constant(real, 1.0), constant(real, 2.0)
    size, sign = _limited(builder, x, numbers.tanh_top)
    r, power = _reduced(builder, builder.fadd(size, size), numbers.bias)
    rise = builder.fmul(r, _polynomial(builder, r, numbers.exp[1:]))
    scale = builder.bitcast(power, real)
    t = multiply_add(builder, scale, rise, builder.fsub(scale, one))
    result = _with_sign(builder, builder.fdiv(t, builder.fadd(t, two)), sign)
    return builder.select(builder.fcmp_unordered("uno", x, x), x, result)


def log1p_of(builder, x):
    """log(1 + x) of a scalar or a vector from 0 to 1, within three units in the last place."""
    s = builder.fdiv(x, builder.fadd(x, constant(x.type, 2.0)))
    return builder.fmul(s, _polynomial(builder, builder.fmul(s, s), _numbers(x.type).log1p))


def _size_below(builder, x, top: float):
    """|x| or `top` where that is smaller; NaN stays."""
    size, most = absolute_of(builder, x), constant(x.type, top)
    return builder.select(builder.fcmp_ordered(">", size, most), most, size)


def density_of(builder, x):
    """exp(-x^2 / 2) / sqrt(2 pi), the normal distribution's density, of a scalar or a vector.

    As exp_of, with n = round(-x^2 / (2 ln 2)), and the polynomial in t = x^2 + 2 n ln 2 = -2r. Relative error below
    2 + 0.5 * x^2 units in the last place; 0 from where it is below the smallest normal number.
    """
    real, integer, numbers = x.type, _integer(x.type), _numbers(x.type)
    size = _size_below(builder, x, numbers.normal_top)
    square = builder.fmul(size, size)
    magic = constant(real, 1.5 * 2.0**numbers.mantissa + numbers.bias - 1)
    shifted = multiply_add(builder, square, constant(real, -0.5 / math.log(2)), magic)
    t = multiply_add(builder, builder.fsub(shifted, magic), constant(real, 2 * math.log(2)), square)
    power = builder.shl(builder.bitcast(shifted, integer), constant(integer, numbers.mantissa))
    top = 2 / math.sqrt(2 * math.pi)
    polynomial = _polynomial(builder, t, [top * c * (-0.5) ** k for k, c in enumerate(numbers.exp)])
    return builder.fmul(polynomial, builder.bitcast(power, real))


def mills_of(builder, x):
    """Mills' ratio of |x|: the normal distribution's tail beyond |x| divided by its density there.

    Of a scalar or a vector, within six units in the last place; from where the density is 0, the ratio stays.
    """
    numbers = _numbers(x.type)
    size = _size_below(builder, x, numbers.normal_top)
    fold = constant(size.type, numbers.mills_fold)
    share = builder.fdiv(constant(size.type, 1.0), builder.fadd(fold, size))
    folded = builder.fmul(builder.fsub(fold, size), share)
    return builder.fmul(share, _polynomial(builder, folded, numbers.mills))


@intrinsic
def tanh(typingctx, x):
    """tanh(x) of a float32 or float64."""
    return x(x), lambda context, builder, sig, args: tanh_of(builder, args[0])


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
