"""The mask words of attention: a mask's name is its polarity, and all masks of a call hold together.

B is the batch, H the heads, T the query positions, S the key positions; scores have shape (..., T, S).
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypedDict

import numpy as np

from tinygrad_qkv import ops
from tinygrad_qkv.ops.operands import refuse_float16
from tinygrad_qkv.tensor import Tensor


class MaskWords(TypedDict, total=False):
    """What every attention call takes by keyword; each is None or False by default.

    attend        boolean, True where the query may look at the key; broadcasts to the scores (..., T, S)
    ignore        boolean, True where it may not
    bias          floats that are added to the scores; -inf is a mask like any other, and gradients flow
    lengths       (B,) integers: the keys from that number on are padding, for every query of the sequence
    is_causal     a query sees the keys at its own position and before
    q_positions   (T,) or (B, T) integers, k_positions (S,) or (B, S), for is_causal.  By default keys stand at
                  0..S-1, and the last query at the position of the last key, the others just before it: right for a
                  KV cache, and with T > S the first queries see nothing
    """

    attend: Any
    ignore: Any
    bias: Any
    lengths: Any
    is_causal: bool
    q_positions: Any
    k_positions: Any


class Mask(NamedTuple):
    """Which scores count (`keep`, a boolean array, None for all) and what is added to them."""

    keep: Any
    bias: Tensor | None


def combine(
    shape: tuple[int, ...],
    *,
    attend: Any = None,
    ignore: Any = None,
    bias: Any = None,
    lengths: Any = None,
    is_causal: bool = False,
    q_positions: Any = None,
    k_positions: Any = None,
) -> Mask:
    """All masks of one call for scores of `shape` (..., T, S): a key counts where every one of them lets it."""
    masks = []
    if attend is not None:
        masks.append(_boolean(attend, "attend", shape))
    if ignore is not None:
        masks.append(~_boolean(ignore, "ignore", shape))
    if bias is not None:
        bias = _bias(bias, shape)
        barred = np.isneginf(bias.data)
        if barred.any():
            masks.append(~barred)
            bias = ops.where(barred, 0, bias)  # finite, so that the common way through attention stays open
    if lengths is not None:
        masks.append(_within_lengths(lengths, shape))
    if not isinstance(is_causal, (bool, np.bool_)):
        raise TypeError(
            f"is_causal is True or False, got {type(is_causal).__name__}; a mask goes into attend= (True may look) or "
            "ignore= (True may not)"
        )
    if is_causal:
        masks.append(_causal(q_positions, k_positions, shape))
    elif q_positions is not None or k_positions is not None:
        raise ValueError("q_positions and k_positions say where a causal mask lies; pass is_causal=True with them")
    keep = masks[0] if masks else None
    for mask in masks[1:]:
        keep = keep & mask
    return Mask(None if keep is None or keep.all() else keep, bias)


def seen_keys(shape: tuple[int, ...], masks: MaskWords) -> Any:
    """(..., S): the keys that a query of any head may look at, for scores (..., H, T, S); None if nothing is masked."""
    keep = combine(shape, **masks).keep
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


def _within_lengths(lengths: Any, shape: tuple[int, ...]) -> np.ndarray:
    """(B, 1, 1, S): True for the keys before each sequence's length."""
    counts = _integers(lengths, "lengths")
    if counts.size and (counts.min() < 0 or counts.max() > shape[-1]):
        raise ValueError(f"lengths lie between 0 and S = {shape[-1]} keys, got {counts.min()} to {counts.max()}")
    return np.arange(shape[-1]) < _along_batch(counts, "lengths", shape, own=0)[..., None, None]


def _causal(q_positions: Any, k_positions: Any, shape: tuple[int, ...]) -> np.ndarray:
    """(..., T, S): True where the query's position is the key's or a later one."""
    T, S = shape[-2:]
    keys = _positions(np.arange(S) if k_positions is None else k_positions, "k_positions", "S", S, shape)
    if q_positions is None:
        last = keys[..., -1:] if S else np.full(1, -1)
        queries = last + np.arange(1 - T, 1)
    else:
        queries = _positions(q_positions, "q_positions", "T", T, shape)
    return queries[..., :, None] >= keys[..., None, :]


def _positions(values: Any, word: str, axis: str, n: int, shape: tuple[int, ...]) -> np.ndarray:
    positions = _integers(values, word)
    if positions.ndim == 0 or positions.shape[-1] != n:
        raise ValueError(
            f"{word} have shape ({axis},) or (B, {axis}) with {axis} = {n}, got {positions.shape} "
            f"for {named_shape(shape)}"
        )
    return _along_batch(positions, word, shape, own=1)
