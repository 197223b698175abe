"""Numbers in the lanes of vector registers, which NumPy's operators and functions act upon.

While a pass over a row is compiled, its formula runs once on `Vector`s: each operation leaves an instruction in LLVM's
IR for each register, and gives the `Vector` of the results.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

from tinygrad_qkv.kernels.scalars import (
    absolute_of,
    density_of,
    erf_of,
    exp_of,
    log1p_of,
    log_of,
    mills_of,
    tanh_of,
)
from tinygrad_qkv.kernels.simd import CONTRACT, constant, shuffle


def _maximum(builder, a, b):
    """The larger in each lane; b where one is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _minimum(builder, a, b):
    """The smaller in each lane; b where one is NaN."""
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


def _plain_mills(x: float) -> float:
    size = min(abs(x), 37.0)
    return math.sqrt(math.pi / 2) * math.erfc(size * math.sqrt(0.5)) * math.exp(size * size / 2)


# Functions that NumPy lacks, for formulas; what they do to arrays is for NUMBA_DISABLE_JIT, and gives objects.
erf = np.frompyfunc(math.erf, 1, 1)
density = np.frompyfunc(lambda x: math.exp(-x * x / 2) / math.sqrt(2 * math.pi), 1, 1)  # the normal distribution's
mills = np.frompyfunc(_plain_mills, 1, 1)  # Mills' ratio of |x|

FUNCTIONS: dict[np.ufunc, Callable[..., Any]] = {
    np.add: lambda builder, a, b: builder.fadd(a, b, flags=CONTRACT),
    np.subtract: lambda builder, a, b: builder.fsub(a, b, flags=CONTRACT),
    np.multiply: lambda builder, a, b: builder.fmul(a, b, flags=CONTRACT),
    np.divide: lambda builder, a, b: builder.fdiv(a, b),
    np.maximum: _maximum,
    np.minimum: _minimum,
    np.exp: exp_of,
    np.log: log_of,
    np.log1p: log1p_of,  # from 0 to 1
    np.tanh: tanh_of,
    erf: erf_of,
    density: density_of,
    mills: mills_of,
    np.negative: lambda builder, x: builder.fneg(x),
    np.absolute: absolute_of,
    np.less: lambda builder, a, b: builder.fcmp_ordered("<", a, b),
    np.less_equal: lambda builder, a, b: builder.fcmp_ordered("<=", a, b),
}
IDENTITY: dict[np.ufunc, float] = {np.add: 0.0, np.maximum: -np.inf}


class Vector(np.lib.mixins.NDArrayOperatorsMixin):
    """Registers, equally many for each of `rows` rows; or one register with a number for each row in its lanes.

    `masks` says for each register which lanes belong to the row, None that all do.
    """

    def __init__(
        self, builder: ir.IRBuilder, registers: list, masks: list | None = None, rows: int = 1, numbers: bool = False
    ):
        self.builder = builder
        self.registers = registers
        self.masks = masks
        self.rows = rows
        self.numbers = numbers

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Vector:
        """NumPy's function of vectors, or its `reduce` over each row."""
        if method == "reduce":
            parts, each = self.folded(ufunc), len(self.registers) // self.rows
            trees = [in_tree(self.builder, ufunc, parts[i : i + each]) for i in range(0, len(parts), each)]
            return Vector(self.builder, [across(self.builder, ufunc, trees)], rows=self.rows, numbers=True)
        vectors = [x for x in inputs if isinstance(x, Vector)]
        widest = max(vectors, key=lambda x: (not x.numbers, len(x.registers), x.masks is not None))
        columns = [widest.beside(x) for x in inputs]
        results = [FUNCTIONS[ufunc](self.builder, *registers) for registers in zip(*columns, strict=True)]
        return Vector(self.builder, results, widest.masks, widest.rows, widest.numbers)

    def __array_function__(self, function: Any, kinds: Any, inputs: Any, options: Any) -> Vector:
        """np.where(mask, a, b), of a mask that a comparison of vectors gave; a or b is a vector."""
        if function is not np.where:
            return NotImplemented
        mask, a, b = inputs
        like = max((x for x in (a, b) if isinstance(x, Vector)), key=lambda x: len(x.registers))
        columns = zip(like.beside(mask), like.beside(a), like.beside(b), strict=True)
        return Vector(self.builder, [self.builder.select(*x) for x in columns], like.masks, like.rows, like.numbers)

    def beside(self, x: Any) -> list:
        """The registers of x, one for each of this vector's."""
        kind, registers = self.registers[0].type, self.registers
        if not isinstance(x, Vector):
            return [constant(kind, float(x))] * len(registers)
        others = x.registers
        if x.numbers and not self.numbers:
            others = [shuffle(self.builder, others[0], others[0], [row] * kind.count) for row in range(x.rows)]
        return [other for other in others for _ in range(len(registers) // len(others))]

    def folded(self, fold: np.ufunc) -> list:
        """The registers as a fold takes them: what lies outside the row changes nothing."""
        if self.masks is None:
            return self.registers
        nothing = constant(self.registers[0].type, IDENTITY[fold])
        return [self.builder.select(m, x, nothing) for m, x in zip(self.masks, self.registers, strict=True)]


def in_tree(builder, fold: np.ufunc, registers: list):
    """The registers, a power of two of them, folded into one."""
    while len(registers) > 1:
        pairs = zip(registers[::2], registers[1::2], strict=True)
        registers = [FUNCTIONS[fold](builder, a, b) for a, b in pairs]
    return registers[0]


def across(builder, fold: np.ufunc, registers: list):
    """The lanes of each register folded, in a tree; gives the results, a power of two, side by side in one register.

    Two registers become one as they fold, the halves of the first beside those of the second: for many registers that
    takes half the shuffles that it would take for each alone.
    """
    segment = registers[0].type.count  # lanes that belong together
    while segment > 1:
        segment //= 2
        pairs = [registers] if len(registers) == 1 else zip(registers[::2], registers[1::2], strict=True)
        registers = []
        for first, second in ((pair[0], pair[-1]) for pair in pairs):
            lanes = range(first.type.count * (1 if first is second else 2))
            low = shuffle(builder, first, second, [lane for lane in lanes if lane // segment % 2 == 0])
            high = shuffle(builder, first, second, [lane for lane in lanes if lane // segment % 2 == 1])
            registers.append(FUNCTIONS[fold](builder, high, low))
    while len(registers) > 1:  # more results than lanes: a register as wide as two
        pairs = zip(registers[::2], registers[1::2], strict=True)
        registers = [shuffle(builder, a, b, range(2 * a.type.count)) for a, b in pairs]
    return registers[0]
