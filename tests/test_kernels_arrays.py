"""What every public kernel makes of arrays that it cannot read as they are: the plain result, or a clear error."""

import inspect
import subprocess
import sys

import numpy as np
import pytest

from tinygrad_qkv import kernels as k
from tinygrad_qkv.kernels.adam import Moving, adam_settings
from tinygrad_qkv.kernels.arrays import integers
from tinygrad_qkv.kernels.attention_rules import AttentionRules

N, D = 3, 5
RANDOM = np.random.default_rng(0)
X, G = RANDOM.normal(size=(2, N, D))
ROW, COLUMN, TWO = RANDOM.normal(size=D), RANDOM.normal(size=N) ** 2, RANDOM.normal(size=(2, N))
IDS, KEEP = np.array([2, 0, 1]), X > 0
Q = RANDOM.normal(size=(1, 2, N, D))
Q_LSE = np.ones((1, 2, N))


def adam(*arrays):
    """One step, which changes p, m and v in place."""
    settings = adam_settings(lr=0.1, betas=(0.9, 0.99), eps=1e-8, step=1)
    k.adam_step([Moving(*arrays, settings)])
    return arrays[0], arrays[2], arrays[3]


# For each kernel its arrays, floats first, and how it is called with them; ids and masks come last.
ROWS = {
    name: ((X,), getattr(k, name))
    for name in ("erf", "gelu", "gelu_tanh", "relu", "sigmoid", "silu", "softplus", "tanh")
}
ROWS |= {
    f"{name}_pullback": ((G, X), getattr(k, f"{name}_pullback"))
    for name in ("gelu", "gelu_tanh", "relu", "sigmoid", "silu", "softplus", "tanh")
}
ROWS |= {
    "adam_step": ((X, G, X * 0, G * G), adam),
    "attention": ((Q, Q, Q), k.attention),
    "attention_pullback": ((Q, Q, Q, Q, Q, Q_LSE), k.attention_pullback),
    "cross_entropy": ((X, IDS), lambda x, ids: k.cross_entropy(x, ids, -100, 0.1)),
    "cross_entropy_pullback": (
        (COLUMN, X, TWO, IDS),
        lambda g, x, lse, ids: k.cross_entropy_pullback(g, x, ids, lse, -100, 0.1),
    ),
    "dropout": ((X,), lambda x: k.dropout(x, 0.5, 3)),
    "gather": ((X, IDS), k.gather),
    "largest": ((X,), lambda x: k.largest(x, (1,))),
    "layer_norm": ((X, ROW, ROW), lambda *arrays: k.layer_norm(*arrays, 1e-5)),
    "layer_norm_pullback": ((G, X, ROW, COLUMN, COLUMN), k.layer_norm_pullback),
    "log_softmax": ((X,), lambda x: k.log_softmax(x, -1)),
    "log_softmax_pullback": ((G, X), lambda g, y: k.log_softmax_pullback(g, y, -1)),
    "matmul": ((X, G.T), k.matmul),
    "rms_norm": ((X, ROW), lambda x, weight: k.rms_norm(x, weight, 1e-5)),
    "rms_norm_pullback": ((G, X, ROW, COLUMN), k.rms_norm_pullback),
    "scatter_add": ((G, IDS), lambda g, ids: k.scatter_add(g, ids, N)),
    "select": ((X, G, KEEP), lambda x, y, keep: k.select(keep, x, y)),
    "smallest": ((X,), lambda x: k.smallest(x, (1,))),
    "softmax": ((X,), lambda x: k.softmax(x, -1)),
    "softmax_pullback": ((G, X), lambda g, y: k.softmax_pullback(g, y, -1)),
    "total": ((X,), lambda x: k.total(x, (1,))),
}
ANY_WIDTH = ("attention", 2), ("cross_entropy_pullback", 1), ("gather", 1)  # positions whose last axis is free
NUMPYS = ("largest", "smallest", "total", "select", "gather")  # what is no work for threads is what NumPy makes of it


def test_every_kernel_has_a_row():
    functions = {name for name in k.__all__ if inspect.isfunction(getattr(k, name))}
    assert set(ROWS) == functions - {"get_num_threads", "set_num_threads"}


def results(made):
    return [x for x in (made if isinstance(made, tuple) else (made,)) if x is not None]


def unaligned(x):
    room = np.empty(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    room[...] = x
    return room


def backwards(x):
    """The same numbers from negative strides."""
    return np.flip(np.flip(x).copy())


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


def in_subclass(x):
    """A matrix, which always has two axes and multiplies by *, where it can be one."""
    return np.asmatrix(x.copy()) if x.ndim == 2 else x.copy().view(type("Odd", (np.ndarray,), {}))


FORMS = {
    "byte-swapped": lambda x: x.astype(x.dtype.newbyteorder()),
    "unaligned": unaligned,
    "negative strides": backwards,
    "strided": lambda x: np.repeat(x, 2, -1)[..., ::2],
    "in Fortran's order": lambda x: x.copy(order="F"),
    "read-only": read_only,
    "subclass": in_subclass,
}


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ROWS)
def test_odd_arrays_give_the_plain_result(name, form):
    arrays, run = ROWS[name]
    if name == "adam_step" and form == "read-only":
        with pytest.raises(ValueError, match="read-only: pass a copy"):
            run(*map(FORMS[form], arrays))
        return
    if name in NUMPYS and form == "subclass":
        return  # NumPy keeps the subclass there, and its shapes
    expected = results(run(*(x.copy() for x in arrays)))
    for got, want in zip(results(run(*map(FORMS[form], arrays))), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ROWS)
def test_what_is_no_array_of_floats_is_refused(name):
    arrays, run = ROWS[name]
    kept = tuple(x for x in arrays if x.dtype.kind != "f")
    floats = len(arrays) - len(kept)
    if name not in NUMPYS:
        for dtype in (np.float16, np.longdouble, np.complex64, np.int64, object, "U3", "M8[s]"):
            odd = [x.astype(np.int64).astype(dtype) for x in arrays[:floats]]
            if not (name == "matmul" and dtype is np.int64):
                with pytest.raises(TypeError, match="float32 and float64, got"):
                    run(*odd, *kept)
        for position in range(floats):
            for wrong, text in ((None, "NoneType"), (arrays[0].tolist(), "list"), (np.ma.array(arrays[0]), "masked")):
                with pytest.raises(TypeError, match=text):
                    run(*arrays[:position], wrong, *arrays[position + 1 : floats], *kept)
    for wrong in (kept[0].tolist(), None, kept[0] * 1.5) if kept else ():
        with pytest.raises(TypeError, match=r"NumPy arrays|integers|boolean"):
            run(*arrays[:floats], wrong)


@pytest.mark.parametrize("name", ROWS)
def test_shapes_and_dtypes_that_do_not_fit_are_refused(name):
    arrays, run = ROWS[name]
    for position in range(1, len(arrays)):
        if name != "gather" and arrays[position].dtype.kind == "f":
            mixed = list(arrays)
            mixed[position] = mixed[position].astype(np.float32)
            if name != "select":  # NumPy widens there
                with pytest.raises(TypeError, match="one dtype"):
                    run(*mixed)
        if (name, position) not in ANY_WIDTH:
            longer = list(arrays)
            longer[position] = np.concatenate([longer[position]] * 2, -2 if name == "matmul" else -1)
            with pytest.raises(ValueError):
                run(*longer)


@pytest.mark.parametrize("name", ["erf", "gelu", "relu", "sigmoid", "silu", "softplus", "tanh", "dropout", "softmax"])
def test_no_axis_and_no_element(name):
    run = ROWS[name][1]
    assert np.shape(run(np.array(0.5) if name != "softmax" else np.ones(1))) in ((), (1,))
    assert run(np.empty((3, 0))).shape == (3, 0)


def test_integers_that_int64_does_not_hold():
    with pytest.raises(ValueError, match="fit in int64"):
        integers(np.array([2**63], np.uint64), "f", "ids")
    assert integers(np.array(3, np.uint64), "f", "ids").shape == ()


@pytest.mark.parametrize(
    ("rules", "error", "text"),
    [
        ({"softcap": -1.0}, ValueError, "softcap=-1.0"),
        ({"softcap": float("nan")}, ValueError, "softcap=nan"),
        ({"dropout_p": 1.5}, ValueError, "dropout_p=1.5"),
        ({"lengths": np.array([1.5])}, TypeError, "lengths must be integers"),
        ({"lengths": [3]}, TypeError, "NumPy arrays, got list"),
        ({"lengths": np.array([N + 1])}, ValueError, "from 0 to S"),
        ({"least": 0, "positions": (np.ones((1, N)), np.ones((1, N)))}, TypeError, "positions must be integers"),
        ({"least": 0, "positions": (np.ones(N, int), np.ones(N, int))}, ValueError, "positions must be"),
        ({"keep": np.ones((N, N))}, TypeError, "keep must be bool"),
        ({"keep": [[True]]}, TypeError, "NumPy arrays, got list"),
        ({"bias": np.ones((N, N), "f4")}, TypeError, "bias must be float64"),
        ({"bias": np.ones((N, N + 1))}, ValueError, "does not broadcast"),
        ({"sink": np.ones(3)}, ValueError, "sink must be"),
        ({"sink": 1.0}, TypeError, "NumPy arrays, got float"),
    ],
)
def test_rules_of_attention_that_are_refused(rules, error, text):
    with pytest.raises(error, match=text):
        k.attention(Q, Q, Q, AttentionRules(**rules))


def test_a_reader_who_stops_early_sees_no_traceback():
    with subprocess.Popen(
        [sys.executable, "-m", "tinygrad_qkv.kernels"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        assert b"Traceback" not in (said := process.stderr.read()) and b"BrokenPipe" not in said


@pytest.mark.parametrize("wrong", [-1, 7, 2**40, -(2**40)])
def test_ids_outside_the_array_are_errors(wrong):
    table, ids = RANDOM.normal(size=(7, 131)), np.array([3, wrong] * 1009)
    rows, g = RANDOM.normal(size=(len(ids), 7)), np.ones(len(ids))
    calls = (
        lambda: k.gather(table, ids),
        lambda: k.scatter_add(rows, ids, 7),
        lambda: k.cross_entropy(rows, ids, -100, 0.0),
        lambda: k.cross_entropy_pullback(g, rows, ids, np.ones((2, len(ids))), -100, 0.0),
    )
    for call in calls:
        with pytest.raises(IndexError, match=str(wrong)):
            call()
