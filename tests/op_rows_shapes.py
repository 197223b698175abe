"""Rows of the table of ops: shapes, joining, indexing and products."""

from typing import Any

import numpy as np
from op_table import ids, normal, row

from tinygrad_qkv import ops
from tinygrad_qkv.ops.heads import merge_heads, split_heads
from tinygrad_qkv.ops.masked_products import masked_mix, masked_scores
from tinygrad_qkv.ops.products import affine

SHAPES = [
    row("reshape", (normal(2, 3, 5),), np.reshape, (5, 6)),
    row("reshape", (normal(2, 3, 5),), np.reshape, (3, -1)),
    row("reshape", (normal(1, 1),), np.reshape, ()),
    row("reshape", (normal(0, 3),), np.reshape, (3, 0, 2)),
    row("view", (normal(2, 3, 5),), np.reshape, (6, 5)),
    row("flatten", (normal(2, 3, 5),), np.ravel),
    row("flatten", (normal(),), np.ravel, note="0-d"),
    row("flatten", (normal(2, 3, 5),), lambda x, start: x.reshape(2, 15), 1),
    row("flatten", (normal(2, 3, 5),), lambda x, start, end: x.reshape(6, 5), 0, -2),
    row("permute", (normal(2, 3, 5, 7),), np.transpose, (2, 0, 3, 1)),
    row("permute", (normal(2, 3, 5),), np.transpose, (-1, 0, -2)),
    row("permute", (normal(),), np.transpose, ()),
    row("swapaxes", (normal(2, 3, 5),), np.swapaxes, 0, -1),
    row(
        "split_heads",
        (normal(2, 5, 21),),
        lambda x, heads: np.stack(np.split(x, heads, -1), -3),
        3,
        call=split_heads,
    ),
    row(
        "merge_heads",
        (normal(2, 3, 5, 7),),
        lambda x: np.concatenate([x[:, h] for h in range(3)], -1),
        call=merge_heads,
    ),
    row("squeeze", (normal(1, 3, 1),), np.squeeze),
    row("squeeze", (normal(1, 3, 1),), np.squeeze, -1),
    row("squeeze", (normal(1, 3, 1),), np.squeeze, (0, 2)),
    row("unsqueeze", (normal(3, 5),), np.expand_dims, 1),
    row("unsqueeze", (normal(3, 5),), np.expand_dims, (0, -1)),
    row("expand", (normal(3, 1),), lambda x, *sizes: np.broadcast_to(x, (2, 3, 5)), 2, -1, 5),
    row("expand", (normal(),), lambda x, *sizes: np.broadcast_to(x, sizes), 2, 3),
    row("broadcast_to", (normal(3, 1, 5),), np.broadcast_to, (2, 3, 7, 5)),
    row("flip", (normal(3, 5),), np.flip),
    row("flip", (normal(2, 3, 5),), np.flip, -2),
    row("flip", (normal(2, 3, 5),), np.flip, (0, 2)),
    row("roll", (normal(3, 5),), np.roll, 2),
    row("roll", (normal(3, 5),), np.roll, -7, 1),
    row("roll", (normal(3, 5),), np.roll, (1, 2), (0, 1)),
    row("tile", (normal(3, 5),), np.tile, (2, 3)),
    row("tile", (normal(3, 5),), np.tile, (2, 1, 3)),
    row("tile", (normal(2, 3, 5),), np.tile, 2),
    row("tile", (normal(3, 5),), np.tile, (0, 2)),
    row("repeat_interleave", (normal(3, 5),), np.repeat, 2),
    row("repeat_interleave", (normal(3, 5),), np.repeat, 2, 1),
    row("repeat_interleave", (normal(3, 5),), np.repeat, [2, 0, 3], 0),
    row("pad", (normal(3, 5),), np.pad, 2),
    row("pad", (normal(3, 5),), np.pad, ((1, 0), (0, 2))),
    row("pad", (normal(3, 5),), lambda x, w, v: np.pad(x, w, constant_values=v), (1, 2), 7.0),
    row("tril", (normal(2, 5, 3),), np.tril),
    row("tril", (normal(3, 5),), np.tril, 1),
    row("triu", (normal(2, 5, 3),), np.triu),
    row("triu", (normal(3, 5),), np.triu, -1),
    row("split", (normal(7, 3),), lambda x, size: [x[:3], x[3:6], x[6:]], 3),
    row("split", (normal(3, 7),), lambda x, sizes, axis: [x[:, :2], x[:, 2:2], x[:, 2:]], [2, 0, 5], 1),
    row("chunk", (normal(7, 3),), lambda x, n: [x[:3], x[3:6], x[6:]], 3),
    row("chunk", (normal(3, 5),), lambda x, n, axis: [x[:, :3], x[:, 3:]], 2, -1),
    row("unbind", (normal(3, 5),), list),
    row("unbind", (normal(3, 5),), lambda x, axis: list(x.T), -1),
    *(
        row("stack", [normal(3, 5) for _ in range(3)], lambda *xs: np.stack(xs[:-1], xs[-1]), axis, call=stacked)
        for axis, stacked in ((a, lambda *xs: ops.stack(xs[:-1], xs[-1])) for a in (0, 1, -1))
    ),
    row(
        "cat", (normal(3, 5), normal(2, 5), normal(0, 5)), lambda *xs: np.concatenate(xs), call=lambda *xs: ops.cat(xs)
    ),
    row(
        "cat",
        (normal(3, 5), normal(3, 2)),
        lambda x, y, axis: np.concatenate([x, y], axis),
        -1,
        call=lambda x, y, axis: ops.cat([x, y], axis),
    ),
    row("meshgrid", (normal(3), normal(5), normal(2)), np.meshgrid, indexing="ij"),
    row("meshgrid", (normal(3), normal(5)), np.meshgrid, indexing="xy"),
]

MASK = normal(3, 5) > 0
INDICES: dict[str, tuple[tuple[int, ...], Any]] = {
    "number": ((3, 5), 1),
    "negative numbers": ((3, 5), (-1, -2)),
    "slice beyond the end": ((7, 5), slice(1, 100)),
    "reversed": ((7, 5), (slice(None, None, -2), slice(3, 0, -1))),
    "empty slice": ((7, 5), slice(9, None)),
    "ellipsis": ((2, 3, 5), (..., 2)),
    "new axes": ((3, 5), (None, slice(None), None, 2)),
    "0-d": ((), ()),
    "0-d, new axis": ((), None),
    "rows, repeated": ((3, 5), [0, 0, 2]),
    "rows by a matrix": ((3, 5), np.array([[0, 2], [2, 2]])),
    "pairs, repeated": ((3, 5), ([0, 0, 2, 0], [1, 1, 3, 4])),
    "outer": ((3, 5), (np.array([[0], [2]]), np.array([1, 1, 4]))),
    "array and slice": ((2, 3, 5), (slice(None), [0, 2, 0], slice(1, 3))),
    "arrays apart": ((2, 3, 5), ([0, 1, 1], slice(None), [4, 4, 0])),
    "array and number": ((2, 3, 5), (1, [0, 0])),
    "mask": ((3, 5), MASK),
    "mask of rows": ((3, 5), np.array([True, False, True])),
    "mask and array": ((3, 5), (np.array([True, False, True]), [1, 1])),
    "mask and number": ((3, 5), (np.array([True, False, True]), 1)),
    "two masks": ((3, 5), (np.array([True, False, True]), np.array([False, True, False, True, False]))),
    "empty mask": ((3, 5), np.zeros((3, 5), bool)),
    "no rows": ((3, 5), []),
    "True": ((3,), True),
    "False": ((3,), False),
}


def replaced(x: np.ndarray, index: Any, value: np.ndarray) -> np.ndarray:
    y = x.copy()
    y[index] = value
    return y


SETS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Any]] = {
    "number": ((3, 5), (5,), 1),
    "slice": ((7, 5), (3, 1), slice(1, 4)),
    "0-d value": ((7, 5), (), (slice(None), 2)),
    "rows": ((7, 5), (2, 5), [4, 0]),
    "pairs": ((7, 5), (3,), ([4, 0, 6], [1, 1, 2])),
    "mask": ((3, 5), (int(MASK.sum()),), MASK),
    "mask, 0-d value": ((3, 5), (), MASK),
    "all": ((3, 5), (5,), ...),
    "0-d": ((), (), ()),
    "leading axes of 1": ((3, 5), (1, 1, 5), 1),
}


def scattered(g: np.ndarray, index: Any, shape: tuple[int, ...]) -> np.ndarray:
    out = np.zeros(shape)
    np.add.at(out, index, g)
    return out


ALONG, LOOKUP = ids(5, 3, 2), ids(5, 2, 7)
INDEXING = [
    *(row("getitem", (normal(*shape),), lambda x, i: x[i], i, note=note) for note, (shape, i) in INDICES.items()),
    *(
        row(
            "setitem",
            (normal(*shape), normal(*value)),
            lambda x, v, i: replaced(x, i, v),
            i,
            call=lambda x, v, i: ops.setitem(x, i, v),
            note=note,
        )
        for note, (shape, value, i) in SETS.items()
    ),
    row("take_along_axis", (normal(3, 5), ALONG), np.take_along_axis, 1),
    row("take_along_axis", (normal(3, 5, 7), ALONG.T[:1, :, None]), np.take_along_axis, -2),
    row("embedding", (normal(5, 3), LOOKUP), lambda w, i: w[i]),
    row("embedding", (normal(5, 3),), lambda w, i: w[i], 4),
    row("embedding", (normal(5, 3), ids(5, 0, 2)), lambda w, i: w[i], note="no ids"),
    row("embedding", (normal(5, 0), ids(5, 2, 3)), lambda w, i: w[i], note="no width"),
    row("add_rows", (normal(2, 7, 3),), lambda g, i, rows: scattered(g, i, (rows, 3)), LOOKUP, 5, note=""),
    row("add_at", (normal(3, 5),), scattered, np.array([1, 1, 0]), (2, 5)),
]

MATMULS = {
    "2 @ 2": ((3, 5), (5, 7)),
    "1 @ 1": ((5,), (5,)),
    "1 @ 2": ((3,), (3, 5)),
    "2 @ 1": ((3, 5), (5,)),
    "3 @ 2": ((2, 3, 5), (5, 7)),
    "2 @ 3": ((3, 5), (2, 5, 7)),
    "3 @ 3": ((2, 3, 5), (2, 5, 7)),
    "1 @ 3": ((5,), (2, 5, 7)),
    "3 @ 1": ((2, 3, 5), (5,)),
    "4 @ 4 broadcast": ((2, 1, 3, 5), (1, 7, 5, 2)),
    "4 @ 3": ((2, 3, 7, 5), (3, 5, 2)),
    "4 @ 2": ((2, 3, 7, 5), (5, 11)),
    "1 @ 4": ((5,), (2, 3, 5, 7)),
    "4 @ 1": ((2, 3, 7, 5), (5,)),
    "one row": ((1, 5), (5, 1)),
    "one column": ((3, 1), (1, 5)),
    "batch of 1": ((1, 3, 5), (2, 5, 7)),
    "inner axis empty": ((2, 0), (0, 3)),
    "rows empty": ((0, 3), (3, 2)),
    "batch empty": ((0, 2, 3), (3, 5)),
}
DOTS = {
    "0 . 2": ((), (3, 5)),
    "1 . 1": ((5,), (5,)),
    "2 . 2": ((3, 5), (5, 2)),
    "2 . 1": ((3, 5), (5,)),
    "3 . 1": ((2, 3, 5), (5,)),
    "3 . 2": ((2, 3, 5), (5, 7)),
    "3 . 3": ((2, 3, 5), (7, 5, 2)),
    "1 . 3": ((5,), (7, 5, 2)),
}
TENSORDOTS = [
    ((2, 3, 5), (3, 5, 7), 2),
    ((2, 3), (3, 5), 1),
    ((2, 3), (5,), 0),
    ((2, 3, 5), (5, 7), (2, 0)),
    ((2, 3, 5), (5, 2, 7), ([0, 2], [1, 0])),
    ((2, 3), (2, 3), 2),
]
EINSUMS: list[tuple[str, tuple[tuple[int, ...], ...]]] = [
    ("ij,jk->ik", ((2, 3), (3, 5))),
    ("ij,jk", ((2, 3), (3, 5))),
    ("ba,cb", ((2, 3), (5, 2))),
    ("bqd,bkd->bqk", ((2, 3, 5), (2, 7, 5))),
    ("bhqk,bhkd->bqhd", ((2, 3, 5, 7), (2, 3, 7, 11))),
    ("i,j->ij", ((2,), (3,))),
    ("i,i->", ((5,), (5,))),
    ("i,i->i", ((5,), (5,))),
    ("ij->ji", ((2, 3),)),
    ("ij->", ((2, 3),)),
    ("ij->j", ((2, 3),)),
    ("ii->i", ((3, 3),)),
    ("ii", ((3, 3),)),
    ("iij->j", ((3, 3, 5),)),
    ("iiij->ji", ((2, 2, 2, 3),)),
    ("ii,ij->j", ((3, 3), (3, 5))),
    ("ij,k->i", ((2, 3), (5,))),
    ("ij,ik->i", ((2, 3), (2, 5))),
    ("ij,kl->", ((2, 3), (5, 7))),
    ("ij,jk,kl->il", ((2, 3), (3, 5), (5, 7))),
    ("i,j,k->kij", ((2,), (3,), (5,))),
    ("i,i,i->i", ((3,), (3,), (3,))),
    ("abc,ab,c->b", ((2, 3, 5), (2, 3), (5,))),
    ("...i,...i->...", ((2, 3, 5), (3, 5))),
    ("...ij,jk->...ik", ((2, 7, 3, 5), (5, 2))),
    ("...,...->...", ((2, 3), (3,))),
    ("i...->...", ((2, 3, 5),)),
    ("...ij", ((2, 3, 5),)),
    ("b...,b->...b", ((2, 3, 5), (2,))),
    ("...i,...j->...ij", ((2, 1, 3), (5, 7))),
    ("ij,ij->ij", ((1, 3), (2, 3))),
    ("ij,ij->", ((1, 3), (2, 1))),
    ("ij,jk->ik", ((0, 3), (3, 2))),
    ("ij,jk->ik", ((2, 0), (0, 3))),
    (",ij->ij", ((), (2, 3))),
    ("i,,j->ji", ((2,), (), (3,))),
]


def einsum_row(text: str, shapes: tuple[tuple[int, ...], ...]) -> Any:
    return row(
        "einsum",
        [normal(*shape) for shape in shapes],
        lambda *xs: np.einsum(text, *xs),
        call=lambda *xs: ops.einsum(text, *xs),
        note=f"{text} {shapes[0]}",
    )


BATCHES = {"": (2,), "no batch": (), "shared right side": (2,)}
MASKED = [
    *(
        row(
            "masked_scores",
            (normal(*b, 3, 5), normal(*b[: "shared" not in note], 7, 5)),
            lambda q, k, keep: np.where(keep, q @ k.mT, 0),
            normal(*b, 3, 7) > 0,
            call=masked_scores,
            note=note,
        )
        for note, b in BATCHES.items()
    ),
    *(
        row(
            "masked_mix",
            (normal(*b, 3, 7), normal(*b[: "shared" not in note], 7, 5)),
            lambda w, x, keep: np.where(keep, w, 0) @ x,
            normal(*b, 3, 7) > 0,
            call=masked_mix,
            note=note,
        )
        for note, b in BATCHES.items()
    ),
]

PRODUCTS = [
    *MASKED,
    *(row("matmul", (normal(*a), normal(*b)), np.matmul, note=note) for note, (a, b) in MATMULS.items()),
    *(
        row(
            "affine",
            (normal(*lead, 3), weight, normal(5)),
            lambda x, w, b: x @ w + b,
            call=affine,
            note=f"{note} {lead}",
        )
        for lead in ((7,), (2, 7), (), (0,))
        for note, weight in (("weight", normal(3, 5)), ("transposed weight", normal(5, 3).T))
    ),
    row("affine", (normal(7, 3), normal(2, 3, 5), normal(5)), lambda x, w, b: x @ w + b, call=affine, note="batch"),
    row("affine", (normal(7, 3), normal(3, 5), normal(7, 1)), lambda x, w, b: x @ w + b, call=affine, note="column"),
    *(row("dot", (normal(*a), normal(*b)), np.dot, note=note) for note, (a, b) in DOTS.items()),
    row("outer", (normal(3), normal(5)), np.outer),
    row("outer", (normal(3, 2), normal()), np.outer, note="flattened"),
    *(row("tensordot", (normal(*a), normal(*b)), np.tensordot, axes, note=f"{a} {axes}") for a, b, axes in TENSORDOTS),
    *(einsum_row(text, shapes) for text, shapes in EINSUMS),
]

ROWS = [*SHAPES, *INDEXING, *PRODUCTS]
