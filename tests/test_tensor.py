"""The Tensor as a Python object: construction and dtypes, conversion, operators, copying, and clear refusals."""

import copy
import pickle
import re

import numpy as np
import pytest

import tinygrad_qkv as tq
from tinygrad_qkv import Tensor

# ---- construction


@pytest.mark.parametrize(
    ("data", "dtype"),
    [
        (1.5, "float32"),
        (2, "int64"),
        (True, "bool"),
        ([1.0, 2], "float32"),
        ([[1, 2], [3, 4]], "int64"),
        ([True, False], "bool"),
        ([], "float32"),
        (np.float64(1.5), "float64"),
        ([np.float64(1.5)], "float64"),
        ([np.float32(1.5), 2.5], "float32"),
        ([2.5, np.float64(1.5)], "float64"),
        ([Tensor(1.5), 2.5], "float32"),
        ([Tensor(1.5), Tensor(2)], "float32"),
        ([np.arange(2), [0.5, 1]], "float32"),
        ([np.int32(1), 2.5], "float32"),
        ([np.int8(1), 300], "int64"),
        (np.ones(2, np.float64), "float64"),
        (np.ones(2, np.float16), "float16"),
        (np.ones(2, np.int32), "int32"),
        (np.ones(2, ">f4"), "float32"),
    ],
)
def test_dtype_of_what_is_given(data, dtype):
    t = Tensor(data)
    assert t.dtype == np.dtype(dtype) and t.dtype.isnative
    assert Tensor(data, dtype="float64").dtype == np.float64


def test_tensors_in_lists():
    assert Tensor([Tensor(1.0), 2.0]).tolist() == [1, 2]
    assert Tensor(Tensor([1, 2])).dtype == np.int64


@pytest.mark.parametrize("data", [["a"], np.ones(2, complex), [object()], [[1.0], [1.0, 2.0]], None])
def test_what_is_no_number_is_refused(data):
    with pytest.raises((TypeError, ValueError)):
        Tensor(data)


def test_lists_of_unequal_length_are_refused_in_plain_words():
    with pytest.raises(ValueError, match="nested lists of one length each"):
        Tensor([[1.0], [1.0, 2.0]])


@pytest.mark.parametrize("data", [[1, 2], [True], np.ones(2, np.float16)])
def test_only_float32_and_float64_require_grad(data):
    with pytest.raises(TypeError, match="only float32 and float64"):
        Tensor(data, requires_grad=True)


def test_requires_grad_belongs_to_leaves():
    x = Tensor([1.0], requires_grad=True)
    assert x.is_leaf and not (x * 2.0).is_leaf
    with pytest.raises(RuntimeError, match="set on leaves"):
        (x * 2.0).requires_grad = False
    x.requires_grad = False
    assert not (x * 2.0).requires_grad


def test_copying_and_sharing():
    source = np.zeros(3, np.float32)
    copied, shared = Tensor(source), Tensor.from_numpy(source)
    source[0] = 5
    assert copied.tolist() == [0, 0, 0] and shared.tolist() == [5, 0, 0]
    with pytest.raises(TypeError, match="needs a NumPy array"):
        Tensor.from_numpy([1.0])
    with pytest.raises(TypeError, match="cannot share"):
        Tensor.from_numpy(np.ones(2, complex))


def test_detach_shares_values_and_cuts_history():
    x = Tensor([3.0, 4.0], requires_grad=True)
    (x.detach() * x).sum().backward()
    assert x.grad.tolist() == [3, 4]
    assert np.shares_memory(x.detach().data, x.data)


# ---- to NumPy and Python


def test_arrays_that_come_out_are_read_only():
    t = Tensor([1.0, 2.0])
    for array in (t.numpy(), np.asarray(t)):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 5
    np.array(t)[0] = 5
    assert np.asarray(t, dtype=np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="needs a copy"):
        np.asarray(t, dtype=np.float64, copy=False)


def test_python_conversions():
    assert int(Tensor(3)) == 3 and float(Tensor([2.5])) == 2.5 and bool(Tensor(0.0)) is False
    assert f"{Tensor(2.5):.2f}" == "2.50"
    assert [10, 20, 30][Tensor(1)] == 20
    assert Tensor([[1, 2]]).tolist() == [[1, 2]]
    assert 2.0 in Tensor([1.0, 2.0]) and 3.0 not in Tensor([1.0, 2.0])
    with pytest.raises(ValueError, match="one element"):
        Tensor([1.0, 2.0]).item()
    with pytest.raises(ValueError, match="ambiguous"):
        bool(Tensor([1.0, 2.0]))
    with pytest.raises(TypeError, match="index"):
        [10, 20][Tensor(1.0)]


def test_length_and_iteration():
    _, _, last = Tensor([1.0, 2.0, 3.0])
    assert last.item() == 3 and len(Tensor([[1], [2]])) == 2 and len(list(Tensor([1.0, 2.0]))) == 2
    for use in (len, list):
        with pytest.raises(TypeError, match="0-d"):
            use(Tensor(1.0))


def test_repr_shows_values_state_and_op():
    x = Tensor([1.0, 2.0], requires_grad=True)
    assert repr(x) == "Tensor([1., 2.], requires_grad=True)"
    y = (x * x).sum()
    assert repr(y) == "Tensor(5., op=sum)"
    y.backward()
    assert "grad=[2., 4.]" in repr(x)
    assert "dtype=float64" in repr(Tensor(np.ones(1)))
    assert "shape=(0, 3)" in repr(tq.zeros((0, 3)))
    assert len(repr(tq.zeros((100, 100)))) < 400
    x.name = "W_Q"
    assert "name='W_Q'" in repr(x)


def test_hash_is_identity_and_equality_is_elementwise():
    a, b = Tensor([1.0]), Tensor([1.0])
    assert len({a, b, a}) == 2 and {a: 1}[a] == 1
    assert (a == b).tolist() == [True] and (a != b).tolist() == [False]
    assert (a == None) is False and (a == "x") is False and (a != None) is True  # noqa: E711


def test_transposes():
    t = Tensor(np.arange(6.0).reshape(1, 2, 3))
    assert t.T.shape == (3, 2, 1) and t.mT.shape == (1, 3, 2)
    assert t.size == 6 and t.ndim == 3 and t.nbytes == 48


# ---- copies


def test_deepcopy_and_pickle_of_leaves():
    x = Tensor([1.0, 2.0], requires_grad=True)
    x.name = "x"
    (x * x).sum().backward()
    for y in (copy.deepcopy(x), copy.copy(x), pickle.loads(pickle.dumps(x))):
        assert y.tolist() == [1, 2] and y.requires_grad and y.name == "x" and y.grad.tolist() == [2, 4]
        assert not np.shares_memory(y.data, x.data) and y._node is not x._node
    pair = copy.deepcopy([x, x])
    assert pair[0] is pair[1]


def test_an_inner_tensor_refuses_to_be_copied():
    y = Tensor([1.0], requires_grad=True) * 2.0
    for use in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(RuntimeError, match=r"op 'mul' made this tensor.*detach"):
            use(y)


def test_clone_and_astype_pass_gradients_on():
    x = Tensor([1.0, 2.0], requires_grad=True)
    (x.clone() * 2.0 + x.astype("float64")).sum().backward()
    assert x.grad.tolist() == [3, 3] and x.grad.dtype == np.float32
    assert not x.astype("int64").requires_grad


# ---- gradients as attributes


def test_grad_has_the_shape_and_dtype_of_its_tensor():
    x = Tensor([1.0, 2.0], requires_grad=True)
    x.grad = np.array([1.0, 2.0])
    assert x.grad.dtype == np.float32
    with pytest.raises(ValueError, match=r"expected \(2,\) float32"):
        x.grad = [1.0]
    x.grad = None
    assert x.grad is None


# ---- DLPack


def test_dlpack_both_ways():
    source = np.arange(3.0)
    t = tq.from_dlpack(source)
    assert np.shares_memory(t.data, source)
    assert np.shares_memory(np.from_dlpack(t), source)
    with pytest.raises(RuntimeError, match=r"t\.detach\(\)"):
        np.from_dlpack(Tensor([1.0], requires_grad=True))


# ---- names of other libraries


@pytest.mark.parametrize(
    ("name", "instead"), [("numel", "t.size"), ("clamp", "t.clip"), ("to", "t.astype"), ("requires_grad_", "= True")]
)
def test_a_method_of_pytorch_says_what_to_write_here(name, instead):
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; write .*{re.escape(instead)}"):
        getattr(Tensor([1.0]), name)
    assert not hasattr(Tensor([1.0]), "no_such_thing")
