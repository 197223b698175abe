"""Passes over rows: a formula in NumPy's words, compiled so that whole registers of a row go through it.

    @row_pass(into=1, folds=(np.add,))
    def row_exp_into(x, shift):
        e = np.exp(x - shift)
        return e, e  # the first value is stored, the other summed up

    total = row_exp_into(x[i], top, y[i])

A loop that LLVM has to vectorise by itself loses its lanes at the end of every row, and all of them where arrays might
overlap: a short row then costs more in its remainder than in its registers. Here the loop is laid out by hand and the
formula is recorded into it. Under NUMBA_DISABLE_JIT the same formula runs on the arrays themselves.

The rows of a pass are contiguous and of one length, which is not checked. Numbers beside them are taken in the rows'
precision.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from numba.core import cgutils, types
from numba.core.typing import signature
from numba.extending import intrinsic

from tinygrad_qkv.kernels.compile import JIT, kernel
from tinygrad_qkv.kernels.simd import VECTOR_BYTES, below, constant, index, load, register_of, spread, store
from tinygrad_qkv.kernels.vectors import FUNCTIONS, IDENTITY, Vector, across, in_tree

UNROLL = 4  # registers in flight in a pass, each with sums of its own: enough to hide the latency of an addition
BLOCK = 8  # registers of a block of short rows
SHORT = 2 * VECTOR_BYTES  # bytes of the longest row that `short_rows` takes: longer ones gain nothing by it


def row_pass(
    into: int = 0, folds: tuple[np.ufunc, ...] = (), vector_bytes: int = VECTOR_BYTES, streams: bool = False
) -> Callable[..., Any]:
    """Decorate a formula over rows and numbers, the first a row, that is applied to every element.

    The formula returns `into` values to store, in rows that the pass takes as further arguments at the end (an input
    may be among them), and one value for each fold, np.add or np.maximum, which the pass returns folded over the row.
    Folds run in lanes and end in a tree, so their order depends on the length alone. np.maximum passes over NaN, and
    of no elements it is -inf.

    With `streams` the pass takes one more argument, the last: where `buffers.streamed(array)` of the whole result is
    true, the first row to store goes past the caches. Whoever runs such passes calls `end_of_stream` after the last.
    """

    def make(formula):
        if not JIT:
            run = _in_numpy(formula, into, folds)
            return (lambda *arguments: run(*arguments[:-1])) if streams else run
        emit = _long_or_streamed if streams else _long
        last = {"stream": types.boolean} if streams else {}
        return _intrinsic(formula, into, len(folds), vector_bytes, lambda given: emit(given, formula, folds), **last)

    return make


def short_rows(into: int = 1, vector_bytes: int = VECTOR_BYTES) -> Callable[..., Any]:
    """Decorate a formula over rows of at most two registers, which may fold them: np.add.reduce(x, -1, keepdims=True).

    It becomes f(x, ..., out, ..., block) over arrays (rows, n) with n >= 1, which does the rows of one of the blocks
    that `short_blocks(x)` counts. A row stays in its registers from its one load to its one store, and the rows of a
    block go side by side: their folds share shuffles, and none waits for another's end.
    """

    def make(formula):
        if not JIT:
            run = _in_numpy(formula, into, ())
            return lambda *arguments: run(*arguments[:-1])
        return _intrinsic(formula, into, 0, vector_bytes, lambda given: _short(given, formula), block=types.intp)

    return make


@kernel(plain=lambda x: 1)
def short_blocks(x):
    """How many blocks of short rows x (rows, n) makes."""
    rows = BLOCK if x.shape[1] * x.itemsize <= VECTOR_BYTES else BLOCK // 2
    return (x.shape[0] + rows - 1) // rows


@intrinsic
def _end_of_stream(typingctx, stream):
    def codegen(context, builder, sig, args):
        with builder.if_then(args[0]):
            builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.none(types.boolean), codegen


# Makes what this thread has streamed visible to others, where its argument is true. After every row of 4 KB it would
# take a sixth of layer norm's time, so it comes after many.
end_of_stream: Any = _end_of_stream if JIT else lambda stream: None


def _values(formula: Callable[..., Any], arguments: Any) -> tuple:
    values = formula(*arguments)
    return values if isinstance(values, tuple) else (values,)


def _in_numpy(formula: Callable[..., Any], into: int, folds: tuple[np.ufunc, ...]) -> Callable[..., Any]:
    """The pass on NumPy's arrays."""

    def run(*arguments):
        inputs = len(arguments) - into
        values = _values(formula, arguments[:inputs])
        for out, value in zip(arguments[inputs:], values[:into], strict=True):
            out[:] = value
        folded = tuple(fold.reduce(value) for fold, value in zip(folds, values[into:], strict=True))
        return folded[0] if len(folded) == 1 else folded

    return run


def _intrinsic(
    formula: Callable[..., Any], into: int, folds: int, vector_bytes: int, emit: Callable[..., Any], **last: types.Type
) -> Any:
    """A function for kernels to call: of the formula's arguments, the outputs and `last`, it gives `folds` numbers."""

    def define(typingctx, *arguments):
        scalar = arguments[0].dtype
        result = scalar if folds == 1 else types.UniTuple(scalar, folds)
        takes = [x if isinstance(x, types.Array) else scalar for x in arguments]
        takes[len(takes) - len(last) :] = last.values()

        def codegen(context, builder, sig, args):
            pairs = list(zip(sig.args, args, strict=True))
            totals = emit(_Arguments(context, builder, pairs, into, vector_bytes))
            return totals[0] if folds == 1 else context.make_tuple(builder, result, totals)

        return signature(result, *takes), codegen

    names = ["typingctx", *inspect.signature(formula).parameters, *(f"out{i}" for i in range(into)), *last]
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    define.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    define.__name__, define.__doc__ = formula.__name__, formula.__doc__
    return intrinsic(define)


class _Arguments:
    """The arguments of a pass: pointers to rows, and numbers in every lane; the last `into` are rows to write."""

    def __init__(self, context, builder, arguments: list, into: int, vector_bytes: int):
        self.builder, self.into = builder, into
        kind, value = arguments[0]
        self.register = register_of(context.get_data_type(kind.dtype), vector_bytes)
        self.shape = cgutils.unpack_tuple(builder, context.make_array(kind)(context, builder, value).shape)
        self.arguments = [self._prepared(context, kind, value) for kind, value in arguments]

    def _prepared(self, context, kind: types.Type, value):
        if isinstance(kind, types.Array):
            return context.make_array(kind)(context, self.builder, value).data
        if kind in (types.intp, types.boolean):
            return value
        return Vector(self.builder, [spread(self.builder, value, self.register)])

    def apply(
        self, formula: Callable[..., Any], starts: list, masks: list | None = None, rows: int = 1, stream: bool = False
    ) -> tuple:
        """Run the formula on the registers that start at these elements; store what is stored, return the others."""
        inputs = len(self.arguments) - self.into
        mask = masks or [None] * len(starts)

        def loaded(pointer):
            places = [self.builder.gep(pointer, [start]) for start in starts]
            registers = [load(self.builder, x, self.register, m) for x, m in zip(places, mask, strict=True)]
            return Vector(self.builder, registers, masks, rows)

        given = [x if isinstance(x, Vector) else loaded(x) for x in self.arguments[:inputs]]
        values = _values(formula, given)
        for number, (pointer, value) in enumerate(zip(self.arguments[inputs:], values[: self.into], strict=True)):
            for start, register, m in zip(starts, value.registers, mask, strict=True):
                store(self.builder, register, self.builder.gep(pointer, [start]), m, stream and number == 0)
        return values[self.into :]


def _long_or_streamed(given: _Arguments, formula: Callable[..., Any], folds: tuple[np.ufunc, ...]) -> list:
    """The loops twice, of which the last argument chooses; passes that stream have no folds."""
    assert not folds
    with given.builder.if_else(given.arguments.pop()) as (streamed, ordinary):
        with streamed:
            _long(given, formula, folds, stream=True)
        with ordinary:
            _long(given, formula, folds)
    return []


def _long(given: _Arguments, formula: Callable[..., Any], folds: tuple[np.ufunc, ...], stream: bool = False) -> list:
    """The loops: UNROLL registers at a time, then one at a time, then the last lanes behind a mask. Gives the folds."""
    builder, lanes, (length,) = given.builder, given.register.count, given.shape
    sums = [[_variable(given, fold) for _ in range(UNROLL)] for fold in folds]

    def apply(starts: list, masks: list | None = None) -> None:
        values = given.apply(formula, starts, masks, stream=stream)
        for fold, total, value in zip(folds, sums, values, strict=True):
            for x, place in zip(value.folded(fold), total, strict=False):
                builder.store(FUNCTIONS[fold](builder, x, builder.load(place)), place)

    start = index(0)
    for registers in (UNROLL, 1):
        stop = builder.and_(length, index(-registers * lanes))
        with cgutils.for_range_slice(builder, start, stop, index(registers * lanes)) as (at, _):
            apply([builder.add(at, index(u * lanes)) for u in range(registers)])
        start = stop
        if registers == UNROLL:
            for fold, total in zip(folds, sums, strict=True):
                builder.store(in_tree(builder, fold, [builder.load(x) for x in total]), total[0])
    rest = builder.sub(length, start)
    with builder.if_then(builder.icmp_signed("!=", rest, index(0))):
        apply([start], [below(builder, rest, given.register)])
    totals = [across(builder, fold, [builder.load(total[0])]) for fold, total in zip(folds, sums, strict=True)]
    return [builder.extract_element(x, index(0)) for x in totals]


def _variable(given: _Arguments, fold: np.ufunc):
    """A register that changes, at first with nothing folded into it."""
    place = cgutils.alloca_once(given.builder, given.register)
    given.builder.store(constant(given.register, IDENTITY[fold]), place)
    return place


def _short(given: _Arguments, formula: Callable[..., Any]) -> list:
    """A block of BLOCK registers: as many rows of one, or half as many of two.

    A block that reaches beyond the last row does that one again, in place of masks of its own for each row.
    """
    builder, lanes, block, (rows, length) = given.builder, given.register.count, given.arguments.pop(), given.shape
    last = builder.sub(rows, index(1))

    def apply(each: int) -> None:
        masks = [below(builder, builder.sub(length, index(u * lanes)), given.register) for u in range(each)]
        starts: list = []
        for r in range(BLOCK // each):
            row = builder.add(builder.mul(block, index(BLOCK // each)), index(r))
            start = builder.mul(builder.select(builder.icmp_signed("<", row, last), row, last), length)
            starts.extend(builder.add(start, index(u * lanes)) for u in range(each))
        given.apply(formula, starts, masks * (BLOCK // each), BLOCK // each)

    with builder.if_else(builder.icmp_signed("<=", length, index(lanes))) as (one, two):
        with one:
            apply(1)
        with two:
            apply(2)
    return []
