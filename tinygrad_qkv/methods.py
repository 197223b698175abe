"""What a Tensor does: every operator and method is one line that calls an op."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# The one import cycle: a tensor's operators call ops, and ops make tensors. The package imports ops first.
from tinygrad_qkv import ops
from tinygrad_qkv.hints import NamesOfPyTorch

if TYPE_CHECKING:
    from tinygrad_qkv.tensor import Tensor


class Methods(NamesOfPyTorch):
    """The operators and methods of Tensor."""

    __slots__ = ()

    # ---- operators

    def __add__(self, other: Any) -> Tensor:
        return ops.add(self, other)

    def __radd__(self, other: Any) -> Tensor:
        return ops.add(other, self)

    def __sub__(self, other: Any) -> Tensor:
        return ops.sub(self, other)

    def __rsub__(self, other: Any) -> Tensor:
        return ops.sub(other, self)

    def __mul__(self, other: Any) -> Tensor:
        return ops.mul(self, other)

    def __rmul__(self, other: Any) -> Tensor:
        return ops.mul(other, self)

    def __truediv__(self, other: Any) -> Tensor:
        return ops.div(self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return ops.div(other, self)

    def __floordiv__(self, other: Any) -> Tensor:
        return ops.floordiv(self, other)

    def __rfloordiv__(self, other: Any) -> Tensor:
        return ops.floordiv(other, self)

    def __mod__(self, other: Any) -> Tensor:
        return ops.mod(self, other)

    def __rmod__(self, other: Any) -> Tensor:
        return ops.mod(other, self)

    def __pow__(self, other: Any) -> Tensor:
        return ops.pow(self, other)

    def __rpow__(self, other: Any) -> Tensor:
        return ops.pow(other, self)

    def __matmul__(self, other: Any) -> Tensor:
        return ops.matmul(self, other)

    def __rmatmul__(self, other: Any) -> Tensor:
        return ops.matmul(other, self)

    def __neg__(self) -> Tensor:
        return ops.neg(self)

    def __pos__(self) -> Tensor:
        return ops.tensor(self)

    def __abs__(self) -> Tensor:
        return ops.abs(self)

    def __invert__(self) -> Tensor:
        return ops.logical_not(self)

    def __and__(self, other: Any) -> Tensor:
        return ops.logical_and(self, other)

    def __or__(self, other: Any) -> Tensor:
        return ops.logical_or(self, other)

    def __xor__(self, other: Any) -> Tensor:
        return ops.logical_xor(self, other)

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def __eq__(self, other: Any) -> Any:
        return ops.equal(self, other) if ops.is_numeric(other) else NotImplemented

    def __ne__(self, other: Any) -> Any:
        return ops.not_equal(self, other) if ops.is_numeric(other) else NotImplemented

    def __lt__(self, other: Any) -> Tensor:
        return ops.less(self, other)

    def __le__(self, other: Any) -> Tensor:
        return ops.less_equal(self, other)

    def __gt__(self, other: Any) -> Tensor:
        return ops.greater(self, other)

    def __ge__(self, other: Any) -> Tensor:
        return ops.greater_equal(self, other)

    def __getitem__(self, index: Any) -> Tensor:
        return ops.getitem(self, index)

    # ---- writing in place

    def __setitem__(self, index: Any, value: Any) -> None:
        ops.write(self, ops.setitem, index, value)

    def __iadd__(self, other: Any) -> Tensor:
        return ops.write(self, ops.add, other)

    def __isub__(self, other: Any) -> Tensor:
        return ops.write(self, ops.sub, other)

    def __imul__(self, other: Any) -> Tensor:
        return ops.write(self, ops.mul, other)

    def __itruediv__(self, other: Any) -> Tensor:
        return ops.write(self, ops.div, other)

    # ---- methods: elementwise

    def abs(self) -> Tensor:
        return ops.abs(self)

    def sign(self) -> Tensor:
        return ops.sign(self)

    def reciprocal(self) -> Tensor:
        return ops.reciprocal(self)

    def pow(self, exponent: Any) -> Tensor:
        return ops.pow(self, exponent)

    def exp(self) -> Tensor:
        return ops.exp(self)

    def expm1(self) -> Tensor:
        return ops.expm1(self)

    def log(self) -> Tensor:
        return ops.log(self)

    def log1p(self) -> Tensor:
        return ops.log1p(self)

    def log2(self) -> Tensor:
        return ops.log2(self)

    def log10(self) -> Tensor:
        return ops.log10(self)

    def sqrt(self) -> Tensor:
        return ops.sqrt(self)

    def rsqrt(self) -> Tensor:
        return ops.rsqrt(self)

    def square(self) -> Tensor:
        return ops.square(self)

    def sin(self) -> Tensor:
        return ops.sin(self)

    def cos(self) -> Tensor:
        return ops.cos(self)

    def tan(self) -> Tensor:
        return ops.tan(self)

    def sinh(self) -> Tensor:
        return ops.sinh(self)

    def cosh(self) -> Tensor:
        return ops.cosh(self)

    def tanh(self) -> Tensor:
        return ops.tanh(self)

    def arcsin(self) -> Tensor:
        return ops.arcsin(self)

    def arccos(self) -> Tensor:
        return ops.arccos(self)

    def arctan(self) -> Tensor:
        return ops.arctan(self)

    def erf(self) -> Tensor:
        return ops.erf(self)

    def maximum(self, other: Any) -> Tensor:
        return ops.maximum(self, other)

    def minimum(self, other: Any) -> Tensor:
        return ops.minimum(self, other)

    def clip(self, low: Any = None, high: Any = None) -> Tensor:
        return ops.clip(self, low, high)

    def masked_fill(self, mask: Any, value: Any) -> Tensor:
        return ops.masked_fill(self, mask, value)

    def isnan(self) -> Tensor:
        return ops.isnan(self)

    def isinf(self) -> Tensor:
        return ops.isinf(self)

    def isfinite(self) -> Tensor:
        return ops.isfinite(self)

    def relu(self) -> Tensor:
        return ops.relu(self)

    def leaky_relu(self, slope: float = 0.01) -> Tensor:
        return ops.leaky_relu(self, slope)

    def elu(self, alpha: float = 1.0) -> Tensor:
        return ops.elu(self, alpha)

    def gelu(self, approximate: str = "none") -> Tensor:
        return ops.gelu(self, approximate)

    def silu(self) -> Tensor:
        return ops.silu(self)

    def softplus(self) -> Tensor:
        return ops.softplus(self)

    def sigmoid(self) -> Tensor:
        return ops.sigmoid(self)

    def softmax(self, axis: int = -1, **unknown: Any) -> Tensor:
        return ops.softmax(self, axis, **unknown)

    def log_softmax(self, axis: int = -1, **unknown: Any) -> Tensor:
        return ops.log_softmax(self, axis, **unknown)

    # ---- methods: reductions

    def sum(self, axis: Any = None, keepdims: bool = False, **unknown: Any) -> Tensor:
        return ops.sum(self, axis, keepdims, **unknown)

    def mean(self, axis: Any = None, keepdims: bool = False, **unknown: Any) -> Tensor:
        return ops.mean(self, axis, keepdims, **unknown)

    def max(self, axis: Any = None, keepdims: bool = False, **unknown: Any) -> Tensor:
        return ops.max(self, axis, keepdims, **unknown)

    def min(self, axis: Any = None, keepdims: bool = False, **unknown: Any) -> Tensor:
        return ops.min(self, axis, keepdims, **unknown)

    def prod(self, axis: Any = None, keepdims: bool = False, **unknown: Any) -> Tensor:
        return ops.prod(self, axis, keepdims, **unknown)

    def var(self, axis: Any = None, ddof: int = 0, keepdims: bool = False, **unknown: Any) -> Tensor:
        return ops.var(self, axis, ddof, keepdims, **unknown)

    def std(self, axis: Any = None, ddof: int = 0, keepdims: bool = False, **unknown: Any) -> Tensor:
        return ops.std(self, axis, ddof, keepdims, **unknown)

    def logsumexp(self, axis: Any = None, keepdims: bool = False, **unknown: Any) -> Tensor:
        return ops.logsumexp(self, axis, keepdims, **unknown)

    def norm(self, ord: float = 2, axis: Any = None, keepdims: bool = False, **unknown: Any) -> Tensor:
        return ops.norm(self, ord, axis, keepdims, **unknown)

    def argmax(self, axis: int | None = None, keepdims: bool = False, **unknown: Any) -> Tensor:
        return ops.argmax(self, axis, keepdims, **unknown)

    def argmin(self, axis: int | None = None, keepdims: bool = False, **unknown: Any) -> Tensor:
        return ops.argmin(self, axis, keepdims, **unknown)

    def any(self, axis: Any = None, keepdims: bool = False, **unknown: Any) -> Tensor:
        return ops.any(self, axis, keepdims, **unknown)

    def all(self, axis: Any = None, keepdims: bool = False, **unknown: Any) -> Tensor:
        return ops.all(self, axis, keepdims, **unknown)

    def cumsum(self, axis: int | None = None, **unknown: Any) -> Tensor:
        return ops.cumsum(self, axis, **unknown)

    # ---- methods: shape

    @property
    def T(self) -> Tensor:  # noqa: N802, NumPy's name
        """The axes in reverse order."""
        return ops.permute(self, *range(ops.tensor(self).ndim)[::-1])

    @property
    def mT(self) -> Tensor:  # noqa: N802
        """The last two axes swapped."""
        return ops.swapaxes(self, -2, -1)

    def reshape(self, *shape: Any) -> Tensor:
        return ops.reshape(self, *shape)

    def view(self, *shape: Any) -> Tensor:
        return ops.view(self, *shape)

    def flatten(self, start: int = 0, end: int = -1) -> Tensor:
        return ops.flatten(self, start, end)

    def transpose(self, i: int, j: int) -> Tensor:
        """Swap two axes, as in PyTorch; `np.transpose(t)` keeps NumPy's meaning."""
        return ops.swapaxes(self, i, j)

    def swapaxes(self, i: int, j: int) -> Tensor:
        return ops.swapaxes(self, i, j)

    def permute(self, *axes: Any) -> Tensor:
        return ops.permute(self, *axes)

    def squeeze(self, axis: Any = None) -> Tensor:
        return ops.squeeze(self, axis)

    def unsqueeze(self, axis: int) -> Tensor:
        return ops.unsqueeze(self, axis)

    def expand(self, *sizes: Any) -> Tensor:
        return ops.expand(self, *sizes)

    def broadcast_to(self, shape: Any) -> Tensor:
        return ops.broadcast_to(self, shape)

    def flip(self, axis: Any = None) -> Tensor:
        return ops.flip(self, axis)

    def roll(self, shift: Any, axis: Any = None) -> Tensor:
        return ops.roll(self, shift, axis)

    def tile(self, *counts: Any) -> Tensor:
        return ops.tile(self, *counts)

    def repeat(self, *counts: Any) -> Tensor:
        """Tile, as in PyTorch; `repeat_interleave` repeats each element."""
        return ops.tile(self, *counts)

    def repeat_interleave(self, repeats: Any, axis: int | None = None) -> Tensor:
        return ops.repeat_interleave(self, repeats, axis)

    def split(self, sizes: Any, axis: int = 0) -> list[Tensor]:
        return ops.split(self, sizes, axis)

    def chunk(self, chunks: int, axis: int = 0) -> list[Tensor]:
        return ops.chunk(self, chunks, axis)

    def unbind(self, axis: int = 0) -> list[Tensor]:
        return ops.unbind(self, axis)

    def tril(self, k: int = 0) -> Tensor:
        return ops.tril(self, k)

    def triu(self, k: int = 0) -> Tensor:
        return ops.triu(self, k)

    def take_along_axis(self, indices: Any, axis: int) -> Tensor:
        return ops.take_along_axis(self, indices, axis)

    def dot(self, other: Any) -> Tensor:
        return ops.dot(self, other)
