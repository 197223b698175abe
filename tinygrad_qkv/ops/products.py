"""Products that sum over an axis: matmul on the kernel, and einsum, tensordot, dot and outer made of it."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple

from tinygrad_qkv import kernels
from tinygrad_qkv.autograd import record
from tinygrad_qkv.ops.arithmetic import add, astype, mul
from tinygrad_qkv.ops.indexing import getitem
from tinygrad_qkv.ops.operands import Operand, promoted, tensor
from tinygrad_qkv.ops.reductions import sum
from tinygrad_qkv.ops.shapes import broadcast_to, permute, reshape, squeeze, unsqueeze
from tinygrad_qkv.tensor import Tensor


def matmul(a: Operand, b: Operand) -> Tensor:
    """a @ b: (..., M, K) @ (..., K, N) -> (..., M, N), the leading axes broadcast.

    A vector on the left is a row, on the right a column, and that axis is gone from the result, as in NumPy.
    """
    a, b = tensor(a), tensor(b)
    _refuse_mismatch(a.shape, b.shape)
    row, column = a.ndim == 1, b.ndim == 1
    a = unsqueeze(a, 0) if row else a
    b = unsqueeze(b, 1) if column else b
    y = _matmul(a, b)
    return squeeze(y, (-2,) * row + (-1,) * column) if row or column else y


def _refuse_mismatch(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    """Explain why two shapes have no matrix product."""
    if not a or not b:
        raise ValueError(f"matmul needs at least one axis on both sides, got {a} @ {b}; use * for scalars")
    inner, which = (b[-2], "second last") if len(b) > 1 else (b[0], "only")
    if a[-1] != inner:
        hint = "; transpose the right one (.mT)?" if len(b) > 1 and a[-1] == b[-1] else ""
        raise ValueError(
            f"matmul {a} @ {b}: the last axis of the left operand ({a[-1]}) and the {which} axis of the right one "
            f"({inner}) must agree{hint}"
        )
    if any(1 != m != n != 1 for m, n in zip(a[-3::-1], b[-3::-1], strict=False)):
        raise ValueError(
            f"matmul {a} @ {b}: the leading axes {a[:-2]} and {b[:-2]} do not broadcast; each pair of sizes must be "
            "equal, or one of them 1"
        )


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    a, b, x, y = promoted(a, b)
    if a.dtype != b.dtype:  # the rules multiply what is saved here, and a kernel takes one dtype
        dtype = np.result_type(x, y)
        a, b = (t if t.dtype == dtype else astype(t, dtype) for t in (a, b))
    return record(_product(a._data, b._data), "matmul", (a, b), (a, b), MATMUL_RULES, ("da = g @ b.T", "db = a.T @ g"))


def _matmul_left(g: Any, a: Any, b: Any) -> Any:
    return _product(g, np.swapaxes(b, -1, -2))


def _matmul_right(g: Any, a: Any, b: Any) -> Any:
    if b.ndim == 2 and a.ndim > 2:  # one matrix for the whole batch: sum over it inside the product
        a, g = np.reshape(a, (-1, a.shape[-1])), np.reshape(g, (-1, g.shape[-1]))
    if isinstance(b, np.ndarray) and b.strides[-2] < b.strides[-1]:  # x.mT: in that order the gradient suits x
        return np.swapaxes(_product(np.swapaxes(g, -1, -2), a), -1, -2)
    return _product(np.swapaxes(a, -1, -2), g)


def _product(a: Any, b: Any) -> Any:
    """a @ b of two arrays by the kernel, or of Tensors by the op, recorded."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return _matmul(tensor(a), tensor(b))
    if b.ndim == 2 and a.ndim > 2 and a.flags.c_contiguous:
        return kernels.matmul(a.reshape(-1, a.shape[-1]), b).reshape(*a.shape[:-1], b.shape[-1])
    return kernels.matmul(a, b)


MATMUL_RULES = (_matmul_left, _matmul_right)


def affine(a: Operand, b: Operand, c: Operand) -> Tensor:
    """a @ b + c as one op, c added where the product lies: (..., M, K) @ (K, N) + (N,) -> (..., M, N).

    Operands of several dtypes, or with other axes, go the ordinary way.
    """
    a, b, c = tensor(a), tensor(b), tensor(c)
    alike = a.dtype == b.dtype == c.dtype and a.dtype.char in "fd"
    if not alike or a.ndim < 2 or b.ndim != 2 or c.shape != b.shape[1:]:
        return add(matmul(a, b), c)
    _refuse_mismatch(a.shape, b.shape)
    y = _product(a._data, b._data)
    y += c._data
    return record(y, "affine", (a, b, c), (a, b), AFFINE_RULES, ("da = g @ b.T", "db = a.T @ g", "dc = g"))


AFFINE_RULES = (_matmul_left, _matmul_right, lambda g, a, b: g)


def dot(a: Operand, b: Operand) -> Tensor:
    """NumPy's dot: the sum of products over the last axis of a and the second last (or only) axis of b."""
    a, b = tensor(a), tensor(b)
    if a.ndim == 0 or b.ndim == 0:
        return mul(a, b)
    return matmul(a, b) if a.ndim <= 2 and b.ndim <= 2 else tensordot(a, b, (a.ndim - 1, max(b.ndim - 2, 0)))


def outer(a: Operand, b: Operand) -> Tensor:
    """Every product of an element of a with one of b, both flattened: (M,) and (N,) -> (M, N)."""
    a, b = tensor(a), tensor(b)
    return mul(reshape(a, -1, 1), reshape(b, 1, -1))


def tensordot(a: Operand, b: Operand, axes: Any = 2) -> Tensor:
    """The sum of products over pairs of axes: a number (the last of a, the first of b), or two lists of axes."""
    a, b = tensor(a), tensor(b)
    if isinstance(axes, (int, np.integer)):
        axes = (tuple(range(a.ndim - axes, a.ndim)), tuple(range(axes)))
    left, right = (normalize_axis_tuple(ax, t.ndim, "axes") for ax, t in zip(axes, (a, b), strict=True))
    sizes = [a.shape[i] for i in left], [b.shape[i] for i in right]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"tensordot of {a.shape} and {b.shape}: axes {left} and {right} have sizes {sizes[0]}, {sizes[1]}"
        )
    rows, columns = ([i for i in range(t.ndim) if i not in ax] for t, ax in ((a, left), (b, right)))
    inner = math.prod(sizes[0])
    x = reshape(permute(a, *rows, *left), math.prod(a.shape[i] for i in rows), inner)
    y = reshape(permute(b, *right, *columns), inner, math.prod(b.shape[i] for i in columns))
    return reshape(_matmul(x, y), *(a.shape[i] for i in rows), *(b.shape[i] for i in columns))


def einsum(subscripts: str, *operands: Operand) -> Tensor:
    """The Einstein sum of any number of operands, e.g. einsum("bqd,bkd->bqk", q, k); `...` stands for leading axes.

    Operands are joined two at a time from the left: what one of them alone sums over is summed first, the rest is one
    batched matmul.
    """
    if not isinstance(subscripts, str):
        raise TypeError(f"einsum's first argument is a text such as 'ij,jk->ik', got {type(subscripts).__name__}")
    terms, result, tensors = _parse(subscripts, [tensor(t) for t in operands])
    pairs = [_diagonal(label, t) for label, t in zip(terms, tensors, strict=True)]
    labels, total = pairs[0]
    for i in range(1, len(pairs)):
        later = set(result).union(*(label for label, _ in pairs[i + 1 :]))
        labels, total = _contract(labels, total, *pairs[i], later)
    labels, total = _sum_out(labels, total, set(result))
    return permute(total, *(labels.index(c) for c in result))


def _parse(subscripts: str, tensors: list[Tensor]) -> tuple[list[str], str, list[Tensor]]:
    """One label string per operand and the result's, every `...` written out with labels of its own."""
    text = subscripts.replace(" ", "")
    if not re.fullmatch(r"(?:[A-Za-z]|,|\.{3})*(?:->(?:[A-Za-z]|\.{3})*)?", text):
        raise ValueError(f"einsum {subscripts!r} is not of the form 'ij,jk->ik', of letters and '...'")
    left, arrow, result = text.partition("->")
    terms = left.split(",")
    if len(terms) != len(tensors):
        raise ValueError(f"einsum {subscripts!r} names {len(terms)} operands, got {len(tensors)}")
    hidden = [t.ndim - len(s.replace("...", "")) for s, t in zip(terms, tensors, strict=True)]
    if any(n < 0 or (n > 0 and "..." not in s) for n, s in zip(hidden, terms, strict=True)):
        raise ValueError(f"einsum {subscripts!r} does not fit the shapes {[t.shape for t in tensors]}")
    widest = max([n for n, s in zip(hidden, terms, strict=True) if "..." in s], default=0)
    spare = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz" if c not in text][:widest]
    terms = [s.replace("...", "".join(spare[widest - n :] if n else "")) for n, s in zip(hidden, terms, strict=True)]
    if arrow:
        result = result.replace("...", "".join(spare))
    else:
        once = sorted(c for c in set("".join(terms)) if "".join(terms).count(c) == 1 and c not in spare)
        result = "".join(spare) + "".join(once)
    if len(set(result)) != len(result) or not set(result) <= set("".join(terms)):
        raise ValueError(f"einsum {subscripts!r}: the result names an axis twice, or one that no operand has")
    return terms, result, tensors


def _diagonal(labels: str, t: Tensor) -> tuple[str, Tensor]:
    """A label that one operand repeats means its diagonal."""
    for c in sorted(set(labels)):
        while labels.count(c) > 1:
            i = labels.index(c)
            j = labels.index(c, i + 1)
            if t.shape[i] != t.shape[j]:
                raise ValueError(f"einsum: label {c!r} stands for sizes {t.shape[i]} and {t.shape[j]} of one operand")
            order = [k for k in range(t.ndim) if k not in (i, j)]
            steps = np.arange(t.shape[i])
            t = getitem(permute(t, i, j, *order), (steps, steps))
            labels = c + "".join(labels[k] for k in order)
    return labels, t


def _sum_out(labels: str, t: Tensor, keep: set[str]) -> tuple[str, Tensor]:
    """Sum over the labels that nobody else needs."""
    axes = tuple(i for i, c in enumerate(labels) if c not in keep)
    return "".join(c for c in labels if c in keep), sum(t, axes) if axes else t


def _contract(la: str, a: Tensor, lb: str, b: Tensor, later: set[str]) -> tuple[str, Tensor]:
    """Two operands as one batched matmul: shared labels that are still needed are batch axes, the others inner ones."""
    la, a = _sum_out(la, a, later | set(lb))
    lb, b = _sum_out(lb, b, later | set(la))
    batch = [c for c in la if c in lb and c in later]
    inner = [c for c in la if c in lb and c not in later]
    rows, columns = [c for c in la if c not in lb], [c for c in lb if c not in la]
    size = {c: n for labels, t in ((la, a), (lb, b)) for c, n in zip(labels, t.shape, strict=True)}
    for labels, t in ((la, a), (lb, b)):
        for c, n in zip(labels, t.shape, strict=True):
            size[c] = n if size[c] == 1 else size[c]
            if n not in (1, size[c]):
                raise ValueError(f"einsum: label {c!r} stands for sizes {size[c]} and {n}")
    x = _arranged(la, a, batch, rows, inner, size)
    y = _arranged(lb, b, batch, inner, columns, size)
    shape = [size[c] for c in (*batch, *rows, *columns)]
    return "".join((*batch, *rows, *columns)), reshape(_matmul(x, y), *shape)


def _arranged(labels: str, t: Tensor, batch: list, rows: list, columns: list, size: dict[str, int]) -> Tensor:
    """The operand as (batch..., rows, columns), axes of size 1 stretched to the label's size."""
    order = [*batch, *rows, *columns]
    t = permute(t, *(labels.index(c) for c in order))
    full = tuple(size[c] for c in order)
    if t.shape != full:
        t = broadcast_to(t, full)
    return reshape(t, *full[: len(batch)], math.prod(size[c] for c in rows), math.prod(size[c] for c in columns))
