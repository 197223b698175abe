"""NumPy and tensors meet: functions, arrays on the left, writes into arrays, conversion, and DLPack."""

import numpy as np
import pytest
from op_gradients import value_and_gradients

from tinygrad_qkv import Tensor, ops
from tinygrad_qkv.ops import protocol

X = np.array([[0.1, 0.5, 0.3], [0.9, 0.2, 0.7]])


def leaf(x: object = X) -> Tensor:
    return Tensor(x, requires_grad=True)


# ---- NumPy's functions keep their meaning and record

CALLS = {
    np.transpose: lambda f, x: f(x, (1, 0)),
    np.moveaxis: lambda f, x: f(x, 0, -1),
    np.swapaxes: lambda f, x: f(x, 0, 1),
    np.reshape: lambda f, x: f(x, (3, 2)),
    np.expand_dims: lambda f, x: f(x, (0, 2)),
    np.squeeze: lambda f, x: f(x[None]),
    np.broadcast_to: lambda f, x: f(x, (5, 2, 3)),
    np.roll: lambda f, x: f(x, 1, 1),
    np.tile: lambda f, x: f(x, (2, 1)),
    np.repeat: lambda f, x: f(x, 2, axis=1),
    np.pad: lambda f, x: f(x, ((1, 0), (0, 2)), constant_values=5.0),
    np.concatenate: lambda f, x: f([x, X, x], axis=1),
    np.stack: lambda f, x: f([X, x], axis=-1),
    np.split: lambda f, x: f(x, [1, -1], axis=1)[2],
    np.meshgrid: lambda f, x: f(x[0], X[1])[0],
    np.take: lambda f, x: f(x, [[0, 0], [2, 1]], axis=-1),
    np.take_along_axis: lambda f, x: f(x, np.array([[0, 0], [2, 1]]), axis=1),
    np.where: lambda f, x: f(X > 0.4, x, 0),
    np.clip: lambda f, x: f(x, 0.25, 0.6),
    np.dot: lambda f, x: f(X, x.T),
    np.outer: lambda f, x: f(X, x),
    np.tensordot: lambda f, x: f(x, X, axes=([1], [1])),
    np.einsum: lambda f, x: f("ij,kj->ik", x, X, optimize=True),
    np.cumsum: lambda f, x: f(x, axis=1),
    np.linalg.norm: lambda f, x: f(x, axis=1, keepdims=True),
    np.var: lambda f, x: f(x, axis=0, ddof=1),
    np.std: lambda f, x: f(x, axis=0, ddof=1),
    np.full_like: lambda f, x: f(x, 7),
    np.size: lambda f, x: f(x, 1),
    np.allclose: lambda f, x: f(x, X),
    np.power: lambda f, x: f(x, 2),
    np.matmul: lambda f, x: f(X, x.T),
}
ALONE = {np.zeros_like, np.ones_like, np.full_like, np.shape, np.ndim, np.size, np.allclose, np.argmax, np.argmin}
ALONE |= {np.any, np.all, np.floor_divide, np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal}
ALONE |= {np.isnan, np.isinf, np.isfinite, np.logical_and, np.logical_or, np.logical_xor, np.logical_not}
BITS = {np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.invert}


@pytest.mark.parametrize("f", [*protocol.FUNCTIONS, *protocol.UFUNCS], ids=lambda f: f.__name__)
def test_a_numpy_function_of_a_tensor_is_the_function_of_its_values(f):
    """The same numbers; a recorded tensor wherever there is a gradient to record."""
    if f in BITS:
        args = [Tensor(X > 0.4)] * f.nin
        np.testing.assert_array_equal(np.asarray(f(*args)), f(*(np.asarray(a) for a in args)))
        return
    call = CALLS.get(f, lambda f, x: f(x, X + 1) if getattr(f, "nin", 1) == 2 else f(x))
    got, expected = call(f, leaf()), call(f, X)
    np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-13)
    assert np.shape(got) == np.shape(expected)
    assert (isinstance(got, Tensor) and got.requires_grad) == (f not in ALONE)


def test_logic_of_numbers_asks_whether_they_are_zero():
    a, b = np.array([1, 2, 0]), np.array([2, 1, 0])
    for f in (np.logical_and, np.logical_or, np.logical_xor):
        np.testing.assert_array_equal(np.asarray(f(Tensor(a), b)), f(a, b))
    np.testing.assert_array_equal(np.asarray(np.logical_not(Tensor([0.0, 2.0]))), [True, False])


@pytest.mark.parametrize(
    "call",
    [
        lambda t: np.hypot(t, 1.0),
        lambda t: np.cbrt(t),
        lambda t: np.divmod(t, 2),
        lambda t: np.sort(t),
        lambda t: np.linalg.svd(t),
        lambda t: np.fft.fft(t),
        lambda t: np.median(t),
        lambda t: np.copyto(X.copy(), t),
        lambda t: np.nonzero(t),
    ],
)
def test_a_function_without_a_rule_says_what_to_use(call):
    with pytest.raises(TypeError, match=r"np\.\S+ has no rule for Tensors; use t\.numpy\(\)"):
        call(leaf())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: np.add.reduce(t), r"np.add.reduce does not take Tensors; use the op"),
        (lambda t: np.add.outer(t, X), "np.add.outer"),
        (lambda t: np.add.at(X.copy(), 0, t), "np.add.at"),
        (lambda t: np.maximum.accumulate(t), "np.maximum.accumulate"),
        (lambda t: np.add(t, 1, where=X > 0), "takes no where="),
        (lambda t: np.exp(t, dtype="float32"), "takes no dtype="),
        (lambda t: np.sum(t, dtype="float32"), "np.sum of a Tensor.*'dtype'"),
        (lambda t: np.sum(t, initial=1.0), "np.sum of a Tensor.*'initial'"),
        (lambda t: np.mean(t, where=X > 0), "np.mean of a Tensor.*'where'"),
        (lambda t: np.take(t, [0], mode="clip"), "np.take of a Tensor.*'mode'"),
        (lambda t: np.pad(t, 1, mode="edge"), "'constant'"),
        (lambda t: np.linalg.norm(t, 1), "no vector norm"),
    ],
)
def test_arguments_without_a_rule_are_named(call, message):
    with pytest.raises(TypeError, match=message):
        call(leaf())


# ---- writes into arrays


def test_a_tracked_tensor_is_not_written_into_an_array():
    a, t = X.copy(), leaf()
    for write in (
        lambda: np.add(t, 1, out=a),
        lambda: a.__iadd__(t),
        lambda: np.exp(t, out=a),
        lambda: np.add(a, 1, out=t),
    ):
        with pytest.raises(TypeError, match=r"lose the history.*array = array \+ t"):
            write()
    np.testing.assert_array_equal(a, X)


def test_a_constant_one_is():
    a = X.copy()
    a += Tensor(X)
    np.multiply(a, Tensor(2.0), out=a)
    np.testing.assert_array_equal(a, 4 * X)


# ---- arrays on the left


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (lambda a, t: a + t, [[11.0, 22.0], [31.0, 42.0]]),
        (lambda a, t: a - t, [[9.0, 18.0], [29.0, 38.0]]),
        (lambda a, t: a * t, [[10.0, 40.0], [30.0, 80.0]]),
        (lambda a, t: a / t, [[10.0, 10.0], [30.0, 20.0]]),
        (lambda a, t: a**t, [[10.0, 400.0], [30.0, 1600.0]]),
        (lambda a, t: a @ t, [50.0, 110.0]),
    ],
)
def test_an_array_on_the_left_gives_one_tracked_tensor(f, expected):
    a = np.array([[10.0, 20.0], [30.0, 40.0]])
    y, dt = value_and_gradients(lambda t: f(a, t), [1.0, 2.0])
    np.testing.assert_allclose(y, expected, rtol=1e-12)
    assert dt.shape == (2,) and (dt != 0).all()
    assert isinstance(f(a, leaf([1.0, 2.0])), Tensor)


def test_comparisons_with_an_array_on_the_left():
    y = np.array([1.0, 3.0]) < leaf([2.0, 2.0])
    assert isinstance(y, Tensor) and y.tolist() == [True, False]


# ---- to and from arrays


def test_asarray_is_a_read_only_view_and_array_a_copy():
    t = leaf()
    view, copy = np.asarray(t), np.array(t)
    assert np.shares_memory(view, t.data) and not np.shares_memory(copy, t.data)
    assert copy.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    assert np.asarray(t, dtype="float32").dtype == np.float32
    with pytest.raises(ValueError, match="needs a copy"):
        np.asarray(t, dtype="float32", copy=False)


@pytest.mark.parametrize("dtype", ["float64", "float32", "int32", "bool"])
def test_arrays_of_other_libraries_keep_their_dtype(dtype):
    class Foreign:
        def __init__(self, array: np.ndarray):
            self.array, self.dtype = array, array.dtype

        def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
            return np.array(self.array, dtype=dtype, copy=copy)

    assert Tensor(Foreign(np.ones(2, dtype))).dtype == dtype


def test_numpy_indexes_with_tensors_and_lists_join():
    assert X[Tensor([1, 0])].shape == (2, 3) and X[Tensor(X > 0.4)].shape == (3,)
    assert np.array([leaf(), leaf()]).shape == (2, 2, 3)
    assert [10, 20][Tensor(1)] == 20 and list(range(Tensor(2))) == [0, 1]


def test_pythons_own_functions():
    t = leaf([3.0, 1.0, 2.0])
    assert max(t).item() == 3 and sum(t).requires_grad and [float(v) for v in sorted(t)] == [1, 2, 3]


# ---- DLPack


def test_dlpack_shares_memory_both_ways():
    a = np.arange(6.0)
    t = ops.from_dlpack(a[::-2])
    a[5] = 9
    assert t.tolist() == [9, 3, 1]
    back = np.from_dlpack(Tensor.from_numpy(a))
    assert np.shares_memory(back, a)
    assert Tensor([1.0]).__dlpack_device__() == (1, 0)


def test_a_tracked_tensor_is_not_exported():
    with pytest.raises(RuntimeError, match=r"export t\.detach\(\)"):
        np.from_dlpack(leaf())


def test_dlpack_with_torch():
    torch = pytest.importorskip("torch", reason="torch is not installed on this machine")
    source = torch.arange(6.0).reshape(2, 3)
    t = ops.from_dlpack(source.T)
    source[0, 1] = 9
    assert t.shape == (3, 2) and t.dtype == np.float32 and t[1, 0].item() == 9
    there = torch.from_dlpack(Tensor([[True, False]]))
    assert there.dtype == torch.bool and there.tolist() == [[True, False]]
    with pytest.raises(BufferError, match="detach"):
        ops.from_dlpack(torch.ones(2, requires_grad=True))
