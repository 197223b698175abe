"""erf."""

import numpy as np
import pytest
from scipy import special

from tinygrad_qkv.kernels import erf

DTYPES = [np.float32, np.float64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_erf(dtype):
    x = np.concatenate([np.linspace(-7, 7, 20_001), [0.0, -0.0, 1e-30, -1e-8, np.inf, -np.inf, np.nan]]).astype(dtype)
    y, exact = erf(x), special.erf(x.astype(np.float64))
    assert y.dtype == dtype
    np.testing.assert_allclose(y, exact, rtol=4 * np.finfo(dtype).eps)
    assert np.signbit(erf(np.array(-0.0, dtype)))
    shaped = x[:6000].reshape(10, 20, 30)
    np.testing.assert_array_equal(erf(shaped.T), y[:6000].reshape(10, 20, 30).T)
    assert erf(np.ones((0, 3), dtype)).shape == (0, 3)
    assert erf(np.array(0.5, dtype)).shape == ()
    with pytest.raises(TypeError, match="float16"):
        erf(np.ones(2, np.float16))
