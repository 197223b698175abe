"""The project behind the neutral interface of outside test cases: `from case_adapter import Api`.

`run(Api())` of such a collection tries every case whose needs are in `Api.caps`.
"""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import tinygrad_qkv as tq
from tinygrad_qkv import Tensor, nn, ops
from tinygrad_qkv.nn import functional, load, optim, save

# What a fresh process needs to find this file and the package, from any working directory.
BOOTSTRAP = """
import sys
sys.path += {folders!r}
import numpy as np
from case_adapter import Api, N
api = Api()
"""


def N(t: Any) -> np.ndarray:  # noqa: N802, the name that the cases use
    """The values of a tensor, or of anything that NumPy takes, as an array."""
    return t.detach().numpy() if isinstance(t, Tensor) else np.asarray(t)


def multi_head_attention(embed_dim: int, num_heads: int) -> nn.MultiHeadAttention:
    """Attention whose biases are not 0, so that a forgotten one shows."""
    attention = nn.MultiHeadAttention(embed_dim, num_heads)
    biases = {"b_Q": 0.1, "b_K": 0.2, "b_V": 0.3, "b_O": 0.2}
    for name, size in biases.items():
        bias = getattr(attention, name)
        bias.data = np.linspace(-size, size, bias.size, dtype=bias.dtype)
    return attention


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, is_causal: bool = False) -> Tensor:
    """A boolean mask says where to attend, one of floats is added to the scores."""
    word = {} if mask is None else {"attend" if N(mask).dtype == bool else "bias": mask}
    return functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, **word)


class Api:
    """The vocabulary of the cases, in this project's words."""

    name = "tinygrad_qkv"
    pins = {"causal": "bottom-right", "gelu": "erf"}  # noqa: RUF012
    caps = {  # noqa: RUF012
        *("nn", "optim", "optim_state", "sdpa", "gqa", "mha", "dropout", "save", "draw_graph", "setitem", "process"),
        *("threads", "decorator_no_grad", "module"),
    }
    bootstrap = BOOTSTRAP.format(folders=[str(Path(__file__).parent), str(Path(tq.__file__).parent.parent)])

    nn = SimpleNamespace(
        Linear=nn.Linear,
        LayerNorm=nn.LayerNorm,
        Embedding=nn.Embedding,
        Dropout=nn.Dropout,
        Module=nn.Module,
        MultiHeadAttention=multi_head_attention,
    )
    F = SimpleNamespace(cross_entropy=functional.cross_entropy, scaled_dot_product_attention=attention)
    optim, no_grad = optim, tq.no_grad
    manual_seed = staticmethod(tq.manual_seed)
    save, load = staticmethod(save), staticmethod(load)

    def Tensor(self, data: Any, requires_grad: bool = False, dtype: str | None = None) -> Tensor:  # noqa: N802
        return Tensor(data, dtype=dtype, requires_grad=requires_grad)

    def where(self, condition: Any, a: Any, b: Any) -> Tensor:
        return ops.where(condition, a, b)

    def cat(self, tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
        return ops.cat(tensors, axis)

    def stack(self, tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
        return ops.stack(tensors, axis)

    def var(self, t: Tensor, axis: Any = None, ddof: int = 0, keepdims: bool = False) -> Tensor:
        return t.var(axis, ddof, keepdims)

    def param(self, array: np.ndarray) -> Tensor:
        return nn.Parameter(array)

    def set_param(self, p: Tensor, array: Any) -> None:
        p.data = np.array(array, dtype=p.dtype)

    def set_grad(self, p: Tensor, array: Any) -> None:
        p.grad = None if array is None else Tensor(array, dtype=p.dtype)

    def mha_weights(self, m: nn.MultiHeadAttention) -> dict[str, np.ndarray]:
        """The four matrices as (out, in), and the four biases."""
        matrices = {f"W{letter.lower()}": N(getattr(m, f"W_{letter}")).T for letter in "QKVO"}
        return matrices | {f"b{letter.lower()}": N(getattr(m, f"b_{letter}")) for letter in "QKVO"}

    def mha_call(self, m: nn.MultiHeadAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return m(q, k, v)

    def gqa(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v)

    def draw_graph(self, t: Tensor, names: dict[str, Tensor] | None = None) -> Any:
        return tq.draw_graph(t, names=names)
