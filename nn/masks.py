"""The mask words of attention: a mask's name is its polarity, and all masks of a call hold together.

B is the batch, H the heads, T the query positions, S the key positions; scores have shape (..., T, S).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TypedDict

import numpy as np

from tinygrad_qkv import ops
from tinygrad_qkv.ops.attention import FAR
from tinygrad_qkv.ops.operands import refuse_float16
from tinygrad_qkv.tensor import Tensor


class MaskWords(TypedDict, total=False):
    """What every attention call takes by keyword; each is None or False by default.

    attend        boolean, True where the query may look at the key; broadcasts to the scores (..., T, S)
    ignore        boolean, True where it may not
    bias          floats that are added to the scores; -inf is a mask like any other, and gradients flow
    lengths       (B,) integers: the keys from that number on are padding, for every query of the sequence
    is_causal     a query sees the keys at its own position and before
    window        a query sees the keys at most so many positions away, on both sides unless is_causal: 0 is its own
    q_positions   (T,) or (B, T) integers, k_positions (S,) or (B, S), for is_causal and window. By default keys stand
                  at 0..S-1, and the last query at the position of the last key, the others just before it: right for
                  a KV cache, and with T > S the first queries see nothing
    """

    attend: Any
    ignore: Any
    bias: Any
    lengths: Any
    is_causal: bool
    window: int | None
    q_positions: Any
    k_positions: Any


class Mask(NamedTuple):
    """The masks of one call, checked, each as small as it was given; None for what is absent.

    Leading axes line up with those of the scores (..., T, S), sizes of 1 included.
    """

    attend: np.ndarray | None = None  # boolean, broadcasts to (..., T, S)
    bias: Tensor | None = None  # broadcasts to (..., T, S)
    lengths: np.ndarray | None = None  # (...)
    reach: tuple[int, int] | None = None  # a key is seen where reach[0] <= q_position - k_position <= reach[1]
    positions: tuple[np.ndarray, np.ndarray] | None = None  # (..., T) and (..., S), if they are not the usual ones

    @property
    def hides(self) -> bool:
        """Whether there is any mask, a bias included."""
        return not self.attend is self.bias is self.lengths is self.reach is None

    def keep(self, queries: int, keys: int) -> np.ndarray | None:
        """All masks but the bias as one boolean array that broadcasts to (..., T, S); None where nothing is hidden."""
        masks = [] if self.attend is None else [self.attend]
        if self.lengths is not None:
            masks.append(np.arange(keys) < self.lengths[..., None, None])
        if self.reach is not None:
            here = self.positions or (np.arange(keys - queries, keys), np.arange(keys))
            distance = here[0][..., :, None] - here[1][..., None, :]
            masks.append((self.reach[0] <= distance) & (distance <= self.reach[1]))
        return functools.reduce(np.logical_and, masks) if masks else None


def read(
    shape: tuple[int, ...],
    *,
    attend: Any = None,
    ignore: Any = None,
    bias: Any = None,
    lengths: Any = None,
    is_causal: bool = False,
    window: int | None = None,
    q_positions: Any = None,
    k_positions: Any = None,
) -> Mask:
    """The masks of one call for scores of `shape` (..., T, S): a key counts where every one of them lets it."""
    allowed = None if attend is None else _boolean(attend, "attend", shape)
    if ignore is not None:
        others = ~_boolean(ignore, "ignore", shape)
        allowed = others if allowed is None else allowed & others
    reach = _reach(is_causal, window)
    positions = None
    if q_positions is not None or k_positions is not None:
        if reach is None:
            raise ValueError(
                "q_positions and k_positions say where a causal mask or a window lies; pass is_causal=True or window="
            )
        positions = _all_positions(q_positions, k_positions, shape)
    return Mask(
        allowed,
        None if bias is None else _bias(bias, shape),
        None if lengths is None else _lengths(lengths, shape),
        reach,
        positions,
    )


def keep_and_bias(mask: Mask, queries: int, keys: int) -> tuple[np.ndarray | None, Tensor | None]:
    """Which scores count (None for all), and what is added to them: finite, since -inf in it has become a mask."""
    keep, bias = mask.keep(queries, keys), mask.bias
    if bias is not None:
        barred = np.isneginf(bias.data)
        if barred.any():
            keep = ~barred if keep is None else keep & ~barred
            bias = ops.where(barred, 0, bias)  # so that the common way through attention stays open
    return None if keep is None or keep.all() else keep, bias


def seen_keys(shape: tuple[int, ...], masks: MaskWords) -> Any:
    """(..., S): the keys that a query of any head may look at, for scores (..., H, T, S); None if nothing is masked."""
    keep, _ = keep_and_bias(read(shape, **masks), *shape[-2:])
    return None if keep is None else np.broadcast_to(keep, shape).any((-3, -2))


def refuse_unknown(unknown: dict[str, Any], *others: str) -> None:
    """Explain a keyword that attention does not take, above all the one whose polarity differs between libraries.

    `others` are the keywords that the caller takes besides the mask words.
    """
    if not unknown:
        return
    name = next(iter(unknown))
    hints = {
        "attn_mask": "write attend=mask where True means 'may look', or ignore=mask where True means 'may not' "
        "(elsewhere attn_mask is used with both meanings); a float mask is bias=",
        "key_padding_mask": "write lengths=, or ignore=mask[:, None, None, :] where True marks padding",
        "causal": "write is_causal=True",
        "need_weights": 'write need=("weights",)',
    }
    hints["mask"] = hints["attn_mask"]
    known = ", ".join((*MaskWords.__annotations__, *others))
    raise TypeError(f"attention takes no {name}=: {hints.get(name, f'its keywords are {known}')}")


def named_shape(shape: tuple[int, ...]) -> str:
    """`scores (B, H, T, S) = (2, 3, 5, 7)`, for messages."""
    names = {2: "(T, S)", 3: "(B, T, S)", 4: "(B, H, T, S)"}.get(len(shape), "(..., T, S)")
    return f"scores {names} = {shape}"


def _fits(array: np.ndarray, word: str, shape: tuple[int, ...]) -> None:
    """Refuse a mask that does not broadcast to the scores, or that would stretch them."""
    try:
        fits = np.broadcast_shapes(array.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        padding = array.shape == (shape[0], shape[-1]) and len(shape) > 2
        hint = f"; for padding write {word}[:, None, None, :], or lengths=" if padding else ""
        per_batch = array.ndim == 3 and len(shape) == 4 and array.shape[0] == shape[0]
        hint = f"; for one mask a batch entry write {word}[:, None]" if per_batch else hint
        raise ValueError(f"{word} {array.shape} does not broadcast to {named_shape(shape)}{hint}")


def _boolean(mask: Any, word: str, shape: tuple[int, ...]) -> np.ndarray:
    array = np.array(mask)
    if array.dtype != np.bool_:
        hint = (
            "numbers that are added to the scores are bias=" if array.dtype.kind == "f" else f"write {word}=mask != 0"
        )
        raise TypeError(f"{word} is boolean, got {array.dtype}; {hint}")
    _fits(array, word, shape)
    return array


def _bias(bias: Any, shape: tuple[int, ...]) -> Tensor:
    bias = ops.tensor(bias)
    if bias.dtype == np.bool_:
        raise TypeError("bias is added to the scores, got booleans; write attend= (True may look) or ignore=")
    _fits(refuse_float16(bias.data), "bias", shape)
    return bias


def _integers(values: Any, word: str) -> np.ndarray:
    array = np.array(values)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{word} are integers, got {array.dtype}")
    return array.astype(np.int64)


def _along_batch(array: np.ndarray, word: str, shape: tuple[int, ...], own: int) -> np.ndarray:
    """Axes between the batch axes and the last `own` ones, so that (B, ...) lines up with scores (B, H, T, S)."""
    batch, lead = array.shape[: array.ndim - own], shape[:-2]
    if len(batch) > len(lead) or any(n not in (1, m) for n, m in zip(batch, lead, strict=False)):
        raise ValueError(f"{word} {array.shape} does not fit {named_shape(shape)}: its first axes are the batch")
    return array.reshape(batch + (1,) * (len(lead) - len(batch)) + array.shape[array.ndim - own :]) if batch else array


def _lengths(lengths: Any, shape: tuple[int, ...]) -> np.ndarray:
    """(B, 1): how many keys of each sequence are no padding."""
    counts = _integers(lengths, "lengths")
    if counts.size and (counts.min() < 0 or counts.max() > shape[-1]):
        raise ValueError(f"lengths lie between 0 and S = {shape[-1]} keys, got {counts.min()} to {counts.max()}")
    return _along_batch(counts, "lengths", shape, own=0)


def _reach(is_causal: Any, window: Any) -> tuple[int, int] | None:
    """The least and the most that a query may lie behind a key that it sees; None where positions do not matter."""
    if not isinstance(is_causal, (bool, np.bool_)):
        raise TypeError(
            f"is_causal is True or False, got {type(is_causal).__name__}; a mask goes into attend= (True may look) or "
            "ignore= (True may not)"
        )
    if window is None:
        return (0, FAR) if is_causal else None
    if isinstance(window, bool) or not isinstance(window, (int, np.integer)) or window < 0:
        raise ValueError(f"window is a number of positions, an integer from 0, got {window!r}")
    window = min(int(window), FAR)
    return (0 if is_causal else -window), window


def _all_positions(q_positions: Any, k_positions: Any, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(..., T) and (..., S): where queries and keys stand."""
    T, S = shape[-2:]
    keys = _positions(np.arange(S) if k_positions is None else k_positions, "k_positions", "S", S, shape)
    if q_positions is not None:
        return _positions(q_positions, "q_positions", "T", T, shape), keys
    last = keys[..., -1:] if S else np.full(1, -1)
    return last + np.arange(1 - T, 1), keys


def _positions(values: Any, word: str, axis: str, n: int, shape: tuple[int, ...]) -> np.ndarray:
    positions = _integers(values, word)
    if positions.ndim == 0 or positions.shape[-1] != n:
        raise ValueError(
            f"{word} have shape ({axis},) or (B, {axis}) with {axis} = {n}, got {positions.shape} "
            f"for {named_shape(shape)}"
        )
    return _along_batch(positions, word, shape, own=1)
