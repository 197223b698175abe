"""Derivatives as functions: against closed forms and differences, nested, recorded or not, and refused."""

import gc
import weakref

import numpy as np
import pytest

from tinygrad_qkv import (
    Tensor,
    check_grad,
    cross_entropy,
    enable_grad,
    grad,
    hessian,
    hvp,
    jacobian,
    jvp,
    nn,
    no_grad,
    per_sample_grad,
    record,
    vjp,
)
from tinygrad_qkv.autograd import between


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def leaf(values, dtype=np.float64):
    return Tensor(np.asarray(values, dtype), requires_grad=True)


def close(a, b, tolerance=1e-12):
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


A, X, V = numbers(3, 5, seed=1), numbers(5, seed=2), numbers(5, seed=3)


def wave(x):
    """A vector of three, whose Jacobian is cos(A x) A."""
    return (Tensor(A) @ x).sin()


def bowl(x):
    """A scalar with a Hessian that changes from place to place."""
    return wave(x).square().sum() + (x**3).sum()


WAVE_JACOBIAN = np.cos(A @ X)[:, None] * A
BOWL_HESSIAN = A.T @ (2 * np.cos(2 * A @ X)[:, None] * A) + np.diag(6 * X)


# ---- values


def test_vjp_pulls_back_as_often_as_one_likes():
    value, pullback = vjp(wave, X)
    close(value, np.sin(A @ X))
    for g in (numbers(3, seed=4), numbers(3, seed=5)):
        close(pullback(g), g @ WAVE_JACOBIAN)
    value, pullback = vjp(lambda a, b: (a * b).sum(), 2.0, X)
    assert isinstance(pullback(), tuple) and pullback()[0].dtype == np.float32
    close(pullback()[0], X.sum(), 1e-6)
    close(pullback(3.0)[1], np.full(5, 6.0))


def test_vjp_of_several_outputs_takes_what_f_returns():
    value, pullback = vjp(lambda x: (x * 2.0, x.sum()), X)
    assert isinstance(value, tuple) and value[1].shape == ()
    close(pullback([V, 10.0]), 2 * V + 10)
    close(pullback((V, 0.0)), 2 * V)
    single, pullback = vjp(lambda x: [x * 2.0], X)
    assert isinstance(single, tuple)
    close(pullback([V]), 2 * V)


def test_jvp_is_the_jacobian_times_the_tangent():
    for given in ((X, V), ([X], [V])):
        value, tangent = jvp(wave, *given)
        close(value, np.sin(A @ X))
        close(tangent, WAVE_JACOBIAN @ V)
    _, (product, total) = jvp(lambda a, b: [a * b, a.sum()], (X, V), (V, X))
    close(product, V * V + X * X)
    close(total, V.sum())


def test_one_tensor_as_two_arguments_has_two_derivatives():
    x = leaf(X)
    _, pullback = vjp(lambda a, b: (a * b * b).sum(), x, x)
    close(pullback()[0], X * X)
    close(pullback()[1], 2 * X * X)
    (first, second), (third, _) = hessian(lambda a, b: (a * b * b).sum(), x, x)
    assert not first.numpy().any()
    close(second, np.diag(2 * X))
    close(third, second)


def test_a_jacobian_has_the_shape_of_the_value_and_then_of_the_primal():
    close(jacobian(wave, X), WAVE_JACOBIAN)
    a, b = numbers(2, 3, seed=6), numbers(3, 5, seed=7)
    left, right = jacobian(lambda a, b: a @ b, a, b)
    assert left.shape == (2, 5, 2, 3) and right.shape == (2, 5, 3, 5)
    close(left, np.einsum("ik,lj->ijkl", np.eye(2), b))
    close(right, np.einsum("il,jm->ijlm", a, np.eye(5)))
    several = jacobian(lambda x: (x.sum(), x * x), X)
    close(several[0], np.ones(5))
    close(several[1], np.diag(2 * X))
    assert jacobian(lambda x: x[:0], X).shape == (0, 5)
    assert jacobian(lambda x: x * 3.0, 2.0).item() == 3


def test_hessians():
    close(hessian(bowl, X), BOWL_HESSIAN)
    (aa, ab), (ba, bb) = hessian(lambda a, b: (a.sum() ** 2 * b).sum(), numbers(2, 3), np.ones(5))
    assert (aa.shape, ab.shape, ba.shape, bb.shape) == ((2, 3, 2, 3), (2, 3, 5), (5, 2, 3), (5, 5))
    close(aa, np.full((2, 3, 2, 3), 10.0))
    close(ab, np.moveaxis(ba.numpy(), 0, -1))
    assert hessian(lambda x: x**3, 2.0).item() == 12
    assert hessian(lambda x: (x**3).unsqueeze(0), 2.0).shape == ()


def test_hvp_is_the_hessian_times_v_without_the_hessian():
    close(hvp(bowl, X, V), BOWL_HESSIAN @ V)
    first, second = hvp(lambda a, b: (a * a * b).sum(), (X, V), (V, X))
    close(first, 2 * V * V + 2 * X * X)
    close(second, 2 * X * V)


def test_what_does_not_matter_gives_zeros():
    constant = Tensor(np.ones(3))
    close(vjp(lambda x, y: x * 2.0, X, V)[1](np.ones(5))[1], np.zeros(5))
    close(vjp(lambda x: constant, X)[1](np.ones(3)), np.zeros(5))
    value, tangents = jvp(lambda x: (x * 2.0, constant, x.argmax()), X, V)
    close(value[1], np.ones(3))
    close(tangents[0], 2 * V)
    assert not tangents[1].numpy().any() and tangents[2].item() == 0
    close(jacobian(lambda x: constant, X), np.zeros((3, 5)))
    close(hessian(lambda x: x.sum(), X), np.zeros((5, 5)))
    close(hvp(lambda x: x.sum(), X, V), np.zeros(5))


def test_the_identity_and_a_result_that_comes_twice():
    value, tangent = jvp(lambda x: (x, x), X, V)
    close(value[0], X)
    close(tangent[0], V)
    close(tangent[1], V)
    close(jacobian(lambda x: x, X), np.eye(5))


# ---- nesting, and what is recorded


def test_functions_nest_to_any_depth():
    def slope(f):
        return lambda x: jvp(f, x, np.ones(()))[1]

    close(slope(slope(slope(slope(lambda x: x.sin()))))(np.array(0.7)), np.sin(0.7))
    close(jacobian(lambda x: vjp(bowl, x)[1](), X), BOWL_HESSIAN)
    close(jacobian(lambda x: jacobian(bowl, x), X), BOWL_HESSIAN)
    close(jacobian(lambda v: hvp(bowl, X, v), V), BOWL_HESSIAN)
    check_grad(lambda x: hessian(bowl, x), X)
    check_grad(lambda x, v: hvp(bowl, x, v), X, V)
    check_grad(lambda x, v: jvp(wave, x, v)[1], X, V)
    check_grad(lambda x, g: vjp(wave, x)[1](g), X, numbers(3))


def test_what_f_reads_from_outside_is_a_constant_inside_and_no_constant_outside():
    """The mixed derivative d/dy d/dx of x^2 y^3, where the inner function closes over y."""
    close(jacobian(lambda y: vjp(lambda x: (x * x * y**3).sum(), X)[1](), V), np.diag(6 * X * V * V))
    w = leaf(V)
    penalty = (jacobian(lambda x: (x * w).sum(), X) ** 2).sum()
    penalty.backward()
    close(w.grad, 2 * V)


def test_results_are_recorded_where_something_outside_requires_grad_and_detached_elsewhere():
    plain, tracked = Tensor(X), leaf(X)
    calls = {
        "value": lambda x: vjp(bowl, x)[0],
        "pullback": lambda x: vjp(bowl, x)[1](),
        "tangent": lambda x: jvp(bowl, x, V)[1],
        "jacobian": lambda x: jacobian(wave, x),
        "hessian": lambda x: hessian(bowl, x),
        "hvp": lambda x: hvp(bowl, x, V),
    }
    for name, call in calls.items():
        assert not call(plain).requires_grad, name
        assert call(tracked).requires_grad, name
        with no_grad():
            assert not call(tracked).requires_grad, name
            close(call(tracked), call(plain))
    assert jvp(bowl, plain, tracked)[1].requires_grad
    g = leaf(np.ones(3))
    assert vjp(wave, X)[1](g).requires_grad
    assert tracked.grad is None and g.grad is None


def test_a_gradient_that_is_born_after_the_call_is_followed_too():
    _, pullback = vjp(wave, X)
    g = leaf(np.ones(3))
    pullback(g).sum().backward()
    close(g.grad, WAVE_JACOBIAN.sum(1))


def test_derivatives_work_under_no_grad_and_leave_it_on():
    with no_grad():
        close(hessian(bowl, X), BOWL_HESSIAN)
        close(jvp(wave, X, V)[1], WAVE_JACOBIAN @ V)
        assert not (leaf(X) * 2.0).requires_grad
        with enable_grad():
            assert hvp(bowl, leaf(X), V).requires_grad


def test_nothing_is_recorded_in_vain():
    """A pullback runs on arrays, in kernels, where nobody asks for a higher order."""
    seen = []

    def spy(x):
        return record(x.data * 2, "spy", (x,), (), (lambda g: seen.append(type(g)) or 2 * g,))

    for x, recorded in ((Tensor(X), False), (leaf(X), True)):
        vjp(spy, x)[1](V)
        assert seen.pop() is (Tensor if recorded else np.ndarray)
        with no_grad():
            vjp(lambda x: spy(x) * leaf(V), x)[1](V)
        assert seen.pop() is np.ndarray


def test_no_gradient_and_no_primal_changes():
    x, w = leaf(X), leaf(A)
    x.grad = np.ones(5)

    def f(t):
        t = t * 1.0
        t *= 2.0  # its own tensor
        return (w @ t).square().sum()

    for call in (lambda: vjp(f, x)[1](), lambda: jvp(f, x, V), lambda: hessian(f, x), lambda: hvp(f, x, V)):
        call()
    close(x.grad, np.ones(5))
    assert w.grad is None
    np.testing.assert_array_equal(x, X)
    value, _ = vjp(lambda t: t, x.detach())
    assert not np.shares_memory(value.data, x.data)


def test_nothing_outlives_the_results():
    x = leaf(X)
    gc.collect()
    gc.disable()
    try:
        seen = []

        def f(t):
            h = t.exp()
            seen.append(weakref.ref(h))
            return h.sum()

        hessian(f, x), jvp(f, x, V), hvp(f, x, V), vjp(f, x)[1]()
        assert len(seen) == 4 and all(h() is None for h in seen)
    finally:
        gc.enable()


def test_a_derivative_of_the_last_step_does_not_look_at_the_steps_before():
    """Each step holds a derivative of its own; walking the whole run in each would take quadratic time."""
    y = x = leaf(X)
    for _ in range(3):
        y = y + 0.01 * hvp(lambda z: (z**3).sum(), y, np.ones(5))
    last = y * 1.0
    earlier = y._node.parents[0]

    class Unread(tuple):
        def __iter__(self):
            raise AssertionError("an earlier step was looked at")

    kept, earlier.parents = earlier.parents, Unread(earlier.parents)
    assert [node.op for node in between([last._node], {y._node})] == ["mul", "add"]
    earlier.parents = kept
    y.sum().backward()
    close(x.grad, np.full(5, 1.06**3))


# ---- per sample


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_per_sample_under_a_mean_and_a_sum(reduction):
    model = nn.Linear(5, 3).astype("float64")
    x, y = numbers(7, 5), np.arange(7) % 3

    def f(x, y):
        return cross_entropy(model(x), y, reduction=reduction)

    found = per_sample_grad(f, model.parameters(), x, y)
    whole = grad(f(x, y), list(model.parameters()))
    for rows, p, g in zip(found, model.parameters(), whole, strict=True):
        assert rows.shape == (7, *p.shape) and not rows.requires_grad and p.grad is None
        close(rows.numpy().mean(0) if reduction == "mean" else rows.numpy().sum(0), g)
    one = grad(f(x[2:3], y[2:3]), model.weight)[0]
    close(per_sample_grad(f, model.weight, x, y)[2], one)


def test_gradients_per_sample_at_the_edges():
    w, unused = leaf(X), leaf(V)
    rows, zeros = per_sample_grad(lambda x: (x @ w).sum(), [w, unused], numbers(2, 5))
    close(rows, numbers(2, 5))
    assert zeros.shape == (2, 5) and not zeros.numpy().any()
    assert per_sample_grad(lambda x: (x @ w).sum(), w, numbers(0, 5)).shape == (0, 5)
    with no_grad():
        close(per_sample_grad(lambda x: (x @ w).sum(), w, numbers(2, 5)), numbers(2, 5))
    for arrays, message in (
        ([numbers(2, 5), np.ones(3)], r"as many in each; got \(2, 5\), \(3,\)"),
        ([np.ones(())], r"along axis 0.*got \(\)"),
        ([], "1 parameters and 0 arrays"),
    ):
        with pytest.raises(ValueError, match=message):
            per_sample_grad(lambda *a: w.sum(), w, *arrays)
    with pytest.raises(ValueError, match=r"scalar loss of its one sample, got shape \(5,\)"):
        per_sample_grad(lambda x: w * 2.0, w, numbers(2, 5))
    with pytest.raises(ValueError, match="scalar loss of its one sample, got float"):
        per_sample_grad(lambda x: 1.0, w, numbers(2, 5))
    with pytest.raises(RuntimeError, match="input 0 does not require grad"):
        per_sample_grad(lambda x: w.sum(), Tensor(X), numbers(2, 5))


# ---- refused, and nothing has changed


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: jvp(wave, X, V[:4]), ValueError, r"jvp\(\), argument 0: tangent of shape \(4,\) .* shape \(5,\)"),
        (lambda: jvp(wave, X, np.ones(5, int)), TypeError, r"tangent is made of floats, got int64 of shape \(5,\)"),
        (lambda: jvp(wave, X, np.ones(5, bool)), TypeError, "tangent is made of floats, got bool"),
        (lambda: jvp(wave, X, V + 1j), TypeError, "tangent is made of floats, got complex128"),
        (lambda: jvp(wave, X, None), ValueError, r"without a tangent needs a scalar, got shape \(5,\)"),
        (lambda: jvp(wave, (X,), (V, V)), ValueError, "1 primals and 2 tangents"),
        (lambda: hvp(bowl, X, (V, V)), ValueError, "1 primals and 2 tangents"),
        (lambda: hvp(bowl, X, V[:, None]), ValueError, r"tangent of shape \(5, 1\)"),
        (lambda: vjp(wave, X)[1](V), ValueError, r"gradient of shape \(5,\) .* shape \(3,\) \(op 'sin'\)"),
        (lambda: vjp(wave, X)[1](), ValueError, r"vjp\(\) without a gradient needs a scalar, got shape \(3,\)"),
        (lambda: vjp(wave, X)[1](np.ones(3, int)), TypeError, "gradient is made of floats, got int64"),
        (lambda: vjp(lambda x: (x, x), X)[1](V), ValueError, "returned 2 tensors, and the pullback got 1"),
        (lambda: vjp(wave), ValueError, "at least one primal"),
        (lambda: jvp(wave, (), ()), ValueError, "at least one primal"),
        (lambda: jacobian(wave, np.arange(5)), TypeError, r"primal 0 of shape \(5,\) holds int64"),
        (lambda: hessian(lambda x: x, 3), TypeError, r"holds int64; .* write 2.0 for 2"),
        (lambda: vjp(wave, X.astype(np.float16)), TypeError, "holds float16"),
        (lambda: hessian(wave, X), ValueError, r"hessian\(\) needs an f that returns one scalar, got shape \(3,\)"),
        (lambda: hvp(wave, X, V), ValueError, r"hvp\(\) needs an f that returns one scalar"),
        (lambda: hessian(lambda x: (x.sum(), x.sum()), X), ValueError, r"got shape \(\), \(\)"),
        (lambda: jacobian(lambda x: 1.0, X), TypeError, "f returns a Tensor, or a list or tuple of them, got float"),
        (lambda: vjp(lambda x: None, X), TypeError, "got NoneType"),
        (lambda: jvp(lambda x: (x, 1), X, V), TypeError, "got int"),
        (lambda: jvp(lambda x: [], X, V), TypeError, "got list"),
    ],
)
def test_bad_input_is_refused_with_shapes(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_numbers_are_weak_as_tangents_and_gradients():
    close(jvp(lambda x: x * 3.0, 2.0, 1)[1], 3)
    close(vjp(lambda x: x.sum(), X)[1](2), np.full(5, 2.0))
    assert jvp(lambda x: x * 3.0, np.float32([1, 2]), np.ones(2))[1].dtype == np.float32
