"""Ops that move elements: views, layouts, joining, and what they refuse."""

import numpy as np
import pytest
from op_gradients import gradient

from tinygrad_qkv import Tensor, ops

X = np.arange(24.0).reshape(2, 3, 4)


# ---- moving


def test_expand_sums_over_the_copies_and_keeps_axes_marked_by_minus_one():
    w = np.arange(24.0).reshape(3, 2, 4)
    np.testing.assert_array_equal(gradient(lambda x: x.expand(3, -1, 4), [[1.0], [2.0]], w), w.sum((0, 2))[:, None])


def test_permute_by_negative_axes_returns_by_the_inverse():
    w = np.arange(24.0).reshape(4, 2, 3)
    np.testing.assert_array_equal(gradient(lambda x: x.permute(-1, 0, -2), X, w), w.transpose(1, 2, 0))


def test_methods_mean_what_pytorch_means_and_functions_what_numpy_means():
    x = Tensor(X)
    assert x.transpose(0, 2).shape == (4, 3, 2) and np.transpose(x, (1, 0, 2)).shape == (3, 2, 4)
    np.testing.assert_array_equal(np.asarray(Tensor([1, 2]).repeat(2)), [1, 2, 1, 2])
    np.testing.assert_array_equal(np.asarray(np.repeat(Tensor([1, 2]), 2)), [1, 1, 2, 2])
    assert [t.shape[2] for t in x.split(3, 2)] == [3, 1] and [t.shape[2] for t in np.split(x, [3], 2)] == [3, 1]
    assert x.T.shape == (4, 3, 2) and x.mT.shape == (2, 4, 3)


def test_most_results_are_views_and_reshape_copies_only_where_it_must():
    x = Tensor(X)
    for view in (x.reshape(6, 4), x.permute(2, 0, 1), x[1:], x.flip(0), x.expand(5, -1, -1, -1), x.squeeze(), x.T):
        assert np.shares_memory(view.data, x.data)
    assert not np.shares_memory(x.T.reshape(24).data, x.data)


def test_view_refuses_a_copy():
    assert Tensor(X).view(6, -1).shape == (6, 4)
    with pytest.raises(ValueError, match="use reshape"):
        Tensor(X).T.view(24)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: x.reshape(5, 5), ValueError, r"\(2, 3, 4\) \(24 elements\) to \(5, 5\): that is 25"),
        (lambda x: x.reshape(-1, -1), ValueError, "only one size may be -1"),
        (lambda x: x.reshape(5, -1), ValueError, "24 / 5"),
        (lambda x: x.reshape(2.5, 12), TypeError, r"integers, got \(2.5, 12\)"),
        (lambda x: x.permute(0, 1), ValueError, "each of them once"),
        (lambda x: x.permute(0, 0, 1), ValueError, r"each of them once, got \(0, 0, 1\)"),
        (lambda x: x.permute(0, 1, -3), ValueError, "each of them once"),
        (lambda x: x.permute(0, 1, 3), ValueError, "out of bounds"),
        (lambda x: x.transpose(0, 3), ValueError, "out of bounds"),
        (lambda x: x.squeeze(0), ValueError, r"axis 0 of shape \(2, 3, 4\) has size 2"),
        (lambda x: x.unsqueeze(5), ValueError, "out of bounds"),
        (lambda x: x.expand(3, 4), ValueError, "fewer axes"),
        (lambda x: x.expand(5, 3, 4), ValueError, r"shape \(2, 3, 4\) does not broadcast to \(5, 3, 4\)"),
        (lambda x: x.tile(-1), ValueError, r"not negative, got \(-1,\)"),
        (lambda x: x.flatten(2, 1), ValueError, "start 2 lies after its end 1"),
        (lambda x: x.flip(3), ValueError, "out of bounds"),
        (lambda x: x.split([1, 2]), ValueError, "add up to 3, axis 0 of shape"),
        (lambda x: x.split(0), ValueError, "positive"),
        (lambda x: x.split(1.5), TypeError, "got 1.5"),
        (lambda x: x.chunk(0), ValueError, "positive"),
        (lambda x: x.chunk(2, 3), ValueError, "out of bounds"),
        (lambda x: Tensor(1.0).unbind(), ValueError, "out of bounds"),
        (lambda x: x.repeat_interleave(-1), ValueError, "non-negative integers"),
        (lambda x: x.repeat_interleave(1.5), ValueError, "non-negative integers"),
        (lambda x: x.repeat_interleave([1, 2], 1), ValueError, r"each of the 3 elements along axis 1; got \[1, 2\]"),
        (lambda x: ops.pad(x, -1), ValueError, "non-negative"),
        (lambda x: ops.pad(x, ((1, 1), (2, 2))), ValueError, r"each of the 3 axes of shape \(2, 3, 4\)"),
        (lambda x: ops.cat([]), ValueError, "at least one"),
        (lambda x: ops.cat(x), ValueError, "list"),
        (lambda x: ops.cat([x, Tensor(np.ones((2, 2, 2)))]), ValueError, r"shapes \[\(2, 3, 4\), \(2, 2, 2\)\]"),
        (lambda x: ops.cat([Tensor(1.0), Tensor(2.0)]), ValueError, "zero-dimensional"),
        (lambda x: ops.stack([x, x[0]]), ValueError, "one shape"),
        (lambda x: ops.stack([x, x], 5), ValueError, "out of bounds"),
        (lambda x: ops.meshgrid(x), ValueError, "1-d"),
        (lambda x: ops.meshgrid(x[0, 0], indexing="ab"), ValueError, "'ij' or 'xy'"),
    ],
)
def test_what_cannot_be_moved_says_why(call, error, message):
    with pytest.raises(error, match=message):
        call(Tensor(X))


def test_padding_of_integers_by_a_float_is_not_truncated():
    assert ops.pad([1, 2], 1).dtype == np.int64
    padded = ops.pad([1, 2], 1, 0.5)
    assert padded.dtype == np.float32
    assert padded.tolist() == [0.5, 1, 2, 0.5]


# ---- joining


def test_joining_takes_mixed_dtypes_and_constants():
    x = Tensor([1.0, 2.0], requires_grad=True)
    y = ops.cat([x, Tensor([3]), [4.0]])
    assert y.dtype == np.float32 and y.tolist() == [1, 2, 3, 4]
    assert ops.stack([Tensor([1]), Tensor(np.ones(1))]).dtype == np.float64
    y[1:].sum().backward()
    assert x.grad.tolist() == [0, 1]


def test_one_tensor_joined_with_itself_gets_both_gradients():
    np.testing.assert_array_equal(gradient(lambda x: ops.cat([x, x]), [1.0, 2.0], [1.0, 2.0, 10.0, 20.0]), [11, 22])
    w = [[1.0, 10.0], [2.0, 20.0]]
    np.testing.assert_array_equal(gradient(lambda x: ops.stack([x, x], 1), [1.0, 2.0], w), [11, 22])


def test_pieces_go_back_to_their_places():
    def pieces(x: Tensor) -> Tensor:
        a, b, c = x.split(2)
        d, e = x.chunk(2)
        return ops.stack([a[0], b[0] * 10, c[0] * 100, d[0] * 1000, e[0] * 10000])

    np.testing.assert_array_equal(gradient(pieces, np.ones(5)), [1001, 0, 10, 10000, 100])


@pytest.mark.parametrize(("n", "chunks", "sizes"), [(7, 3, [3, 3, 1]), (4, 7, [1, 1, 1, 1]), (5, 1, [5]), (0, 2, [0])])
def test_chunks_are_of_one_size_but_the_last(n, chunks, sizes):
    assert [len(piece) for piece in Tensor(np.zeros(n)).chunk(chunks)] == sizes


# ---- memory layouts

BASE = np.random.default_rng(0).normal(size=(2, 3, 4))


def reversed_copy(x: np.ndarray) -> np.ndarray:
    back = tuple([slice(None, None, -1)] * x.ndim)
    return x[back].copy()[back]


def read_only(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x.flags.writeable = False
    return x


LAYOUTS = {
    "fortran": np.asfortranarray,
    "transposed": lambda x: x.transpose(2, 1, 0).copy().transpose(2, 1, 0),
    "reversed": reversed_copy,
    "every second": lambda x: np.repeat(x, 2, axis=2)[:, :, ::2],
    "broadcast": lambda x: np.broadcast_to(x[:, :1], x.shape),
    "read-only": read_only,
    "one row of many": lambda x: np.concatenate([x, x], axis=1)[:, 1:4],
}
TARGETS = np.array([[0, 1, 2], [3, 2, 1]])
LAYOUT_OPS = {
    "exp": ops.exp,
    "gelu": ops.gelu,
    "softmax of the last axis": ops.softmax,
    "softmax of the first axis": lambda x: ops.softmax(x, 0),
    "log_softmax": lambda x: ops.log_softmax(x, 1),
    "matmul on the left": lambda x: x @ Tensor(BASE.mT),
    "matmul on the right": lambda x: Tensor(BASE[0, :2, :3]) @ x,
    "matmul with a matrix": lambda x: x @ Tensor(BASE[0].T),
    "matmul with itself, turned": lambda x: x @ x.mT,
    "einsum": lambda x: ops.einsum("abc,dbc->ad", x, BASE),
    "sum": lambda x: x.sum((0, 2)),
    "max": lambda x: x.max(1),
    "var": lambda x: x.var(1),
    "logsumexp": lambda x: x.logsumexp(0),
    "prod": lambda x: x.prod(1),
    "cumsum": lambda x: x.cumsum(1),
    "layer_norm": lambda x: ops.layer_norm(x, np.ones(4), np.zeros(4)),
    "rms_norm": lambda x: ops.rms_norm(x, np.ones(4)),
    "cross_entropy": lambda x: ops.cross_entropy(x, TARGETS, reduction="none"),
    "embedding": lambda x: ops.embedding(x[0], [0, 2, 2]),
    "getitem": lambda x: x[:, [0, 0, 2]],
    "reshape": lambda x: x.reshape(4, 6),
    "flip": lambda x: x.flip(1),
}


@pytest.mark.parametrize("op", LAYOUT_OPS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_changes_nothing(layout, op):
    """Neither in the value nor in the gradient, whose own layout is odd as well."""
    array, results = LAYOUTS[layout](BASE), []
    for x in (Tensor.from_numpy(array), Tensor(np.ascontiguousarray(array))):
        x.requires_grad = True
        y = LAYOUT_OPS[op](x)
        g = np.cos(np.arange(y.size)).reshape(y.shape)
        y.backward(np.asfortranarray(g) if not results else g)
        results.append((np.asarray(y), np.asarray(x.grad)))
    for odd, plain in zip(*results, strict=True):
        np.testing.assert_allclose(odd, plain, rtol=1e-13, atol=1e-13)


def test_one_row_and_one_column_cut_from_a_bigger_matrix():
    big = np.random.default_rng(1).normal(size=(5, 5))
    row, column = Tensor.from_numpy(big[2:3]), Tensor.from_numpy(big[:, 3:4])
    np.testing.assert_allclose(np.asarray(row @ column), big[2:3] @ big[:, 3:4])
    np.testing.assert_allclose(np.asarray(column @ row), big[:, 3:4] @ big[2:3])
    np.testing.assert_allclose(np.asarray(row.T.softmax(0)), np.exp(big[2:3].T) / np.exp(big[2]).sum())


def test_empty_tensors_move_too():
    x = Tensor(np.zeros((0, 3)), requires_grad=True)
    for y in (
        x.reshape(3, 0),
        x.T,
        x.flip(),
        x.roll(1),
        x.tile(2),
        x.tril(),
        ops.cat([x, x]),
        ops.pad(x, 1)[1:1],
        x[:, 0],
    ):
        y.sum().backward()
    assert x.grad.shape == (0, 3) and x.unbind() == [] and ops.stack([x, x]).shape == (2, 0, 3)
