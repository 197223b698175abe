"""What attention's weights depend on besides q, k and v. B batch, H heads, T query positions, S key positions."""

import math
from typing import Any, NamedTuple

import numpy as np

from tinygrad_qkv.kernels.arrays import integers, native, plain
from tinygrad_qkv.kernels.random_bits import keep_above

FAR = 2**62  # further than any two positions


class AttentionRules(NamedTuple):
    """What decides the weights besides q, k and v; None, or 0, is absent, and all of it combines.

    scale        number, 1 by default: scores = scale * q k^T
    softcap      number c > 0: scores = c * tanh(scores / c), before bias and masks
    bias         (B, H, T, S) floats, added; -inf is a mask
    keep         (B, H, T, S) bool, True where the query sees the key; like bias it may be a broadcast view
    lengths      (B,) integers: keys from that number on are not seen, and not read
    least, most  a key is seen where least <= q_position - k_position <= most
    offset       the position of the first query, while the keys stand from 0 on, and both without gaps ...
    positions    ... unless they are given: (q_positions (B, T), k_positions (B, S)), integers
    sink         (H,) floats: one more score in every row of the head, whose value is zero
    dropout_p    probability, with `seed`: the weights that `kernels.dropout` would drop of an array (B, H, T, S)
    """

    scale: float = 1.0
    softcap: float = 0.0
    bias: np.ndarray | None = None
    keep: np.ndarray | None = None
    lengths: np.ndarray | None = None
    least: int = -FAR
    most: int = FAR
    offset: int = 0
    positions: tuple[np.ndarray, np.ndarray] | None = None
    sink: np.ndarray | None = None
    dropout_p: float = 0.0
    seed: int = 0


def visible(rules: AttentionRules, lse: np.ndarray, k: Any) -> np.ndarray:
    """Which keys each query sees, a boolean (B, H, T, S), from all masks but -inf in a bias; none where lse is -inf."""
    keys = k.shape[2]
    seen = np.repeat(lse[..., None] > -np.inf, keys, -1)
    if rules.keep is not None:
        seen &= rules.keep
    if rules.lengths is not None:
        seen &= np.arange(keys) < rules.lengths[:, None, None, None]
    if rules.least > -FAR or rules.most < FAR:
        here = rules.positions or (np.arange(lse.shape[2])[None] + rules.offset, np.arange(keys)[None])
        distance = here[0][:, None, :, None] - here[1][:, None, None, :]
        seen &= (distance >= rules.least) & (distance <= rules.most)
    return seen


def sink_of(rules: AttentionRules, q: np.ndarray) -> np.ndarray:
    """The sink as the kernel takes it: (H,), or of size 0."""
    if rules.sink is None:
        return np.empty(0, q.dtype)
    sink = native(rules.sink, "attention")
    if sink.shape != q.shape[1:2] or sink.dtype != q.dtype:
        raise ValueError(f"attention: sink must be {q.dtype} {q.shape[1:2]}, got {sink.dtype} {sink.shape}")
    return np.ascontiguousarray(sink)


def prepared(rules: AttentionRules, q: np.ndarray, k: np.ndarray, height: int, width: int) -> tuple[Any, ...]:
    """The kernels' arguments from `ends` to `seed`, for tiles of height x width; an absent mask has size 0."""
    (B, H, T, _), S = q.shape, k.shape[2]
    if not (0 <= rules.softcap < math.inf and 0 <= rules.dropout_p <= 1):
        given = f"softcap={rules.softcap} and dropout_p={rules.dropout_p}"
        raise ValueError(f"attention: softcap is 0 or a positive number and dropout_p a probability, got {given}")
    ends, positions, bounds = np.full(B, S), *_NO_POSITIONS
    if rules.lengths is not None:
        ends = integers(rules.lengths, "attention", "lengths")
        if ends.shape != (B,) or ends.min() < 0 or ends.max() > S:
            raise ValueError(f"attention: lengths must be {B} numbers from 0 to S = {S}, got {rules.lengths}")
    near = rules.least > -FAR or rules.most < FAR
    if near and rules.positions is not None:
        positions, bounds = _near(rules.positions, B, T, S, height, width)
    keep, bias = _NO_KEEP, _NO_BIAS[q.itemsize]
    if rules.keep is not None:
        keep = _on_scores("keep", rules.keep, keep.dtype, (B, H, T, S))
    if rules.bias is not None:
        bias = _on_scores("bias", rules.bias, q.dtype, (B, H, T, S))
    masked = near or not rules.keep is rules.bias is rules.lengths is None
    p = rules.dropout_p
    drop = (keep_above(p), 1 / (1 - p) if p < 1 else 1.0, np.uint64(rules.seed)) if p else (0, 0.0, 0)
    reach = rules.least, rules.most, rules.offset
    return ends, keep, bias, positions, bounds, reach, rules.scale, rules.softcap, masked, *drop


# What stands for an absent mask: of any numbers of batch entries and heads, as a view whose strides are 0.
_MANY = 2**24
_NO_POSITIONS = (
    np.broadcast_to(np.empty(0, np.int64), (_MANY, 0)),
    np.broadcast_to(np.empty((0, 2), np.int64), (_MANY, 0, 2)),
)
_NO_KEEP = np.broadcast_to(np.empty((0, 0), np.bool_), (_MANY, _MANY, 0, 0))
_NO_BIAS = {
    kind().itemsize: np.broadcast_to(np.empty((0, 0), kind), (_MANY, _MANY, 0, 0)) for kind in (np.float32, np.float64)
}


def _on_scores(name: str, mask: np.ndarray, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """A view of the mask in the shape of the scores."""
    mask = plain(mask, "attention")
    if mask.dtype != dtype:
        raise TypeError(f"attention: {name} must be {dtype}, got {mask.dtype}")
    if not mask.dtype.isnative or not mask.flags.aligned:
        mask = mask.astype(dtype)
    try:
        return np.broadcast_to(mask, shape)
    except ValueError:
        raise ValueError(f"attention: {name} {mask.shape} does not broadcast to (B, H, T, S) = {shape}") from None


def _near(
    positions: tuple[np.ndarray, np.ndarray], B: int, T: int, S: int, height: int, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """(B, T + S): the positions of queries and keys; (B, tiles, 2): the smallest and the largest in each tile."""
    places = [(plain(x, "attention"), n, tile) for x, n, tile in zip(positions, (T, S), (height, width), strict=True)]
    for x, n, _ in places:
        if x.ndim != 2 or x.shape[0] not in (1, B) or x.shape[1] != n:
            raise ValueError(f"attention: positions must be (B, T) = {(B, T)} and (B, S) = {(B, S)}, got {x.shape}")
    one = 1 if all(x.shape[0] == 1 or x.strides[0] == 0 for x, *_ in places) else B
    both, bounds = [], []
    for x, n, tile in places:
        x = np.ascontiguousarray(np.broadcast_to(integers(x[:one], "attention", "positions"), (one, n)))
        starts = np.arange(0, n, tile)
        both.append(x)
        bounds.append(np.stack([f.reduceat(x, starts, axis=1) for f in (np.minimum, np.maximum)], 2))
    joined = np.ascontiguousarray(np.concatenate(both, 1)), np.concatenate(bounds, 1)
    return np.broadcast_to(joined[0], (B, T + S)), np.broadcast_to(joined[1], (B, *joined[1].shape[1:]))
