"""The adapter for outside test cases: complete, and at hand in a fresh process anywhere."""

import subprocess
import sys

import numpy as np
from case_adapter import Api, N, multi_head_attention

from tinygrad_qkv import Tensor


def test_a_fresh_process_in_another_folder_has_the_interface(tmp_path):
    body = "x = api.Tensor([2.0], requires_grad=True); (x * x).backward(); print(N(x.grad), api.name, np.pi)"
    command = [sys.executable, "-c", f"{Api.bootstrap}\n{body}"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.stdout.split() == ["[4.]", "tinygrad_qkv", str(np.pi)], result.stderr


def test_a_boolean_mask_attends_and_one_of_floats_is_added():
    q, k, v = (Tensor(np.arange(6.0).reshape(1, 3, 2) * scale) for scale in (0.1, 0.2, 1.0))
    attend = np.array([[True, False, True]])
    bias = np.where(attend, 0.0, -np.inf)
    by_bool, by_bias = (N(Api.F.scaled_dot_product_attention(q, k, v, mask=Tensor(m))) for m in (attend, bias))
    np.testing.assert_array_equal(by_bool, by_bias)
    assert not np.allclose(by_bool, N(Api.F.scaled_dot_product_attention(q, k, v)))


def test_the_matrices_of_attention_are_named_and_turned():
    attention = multi_head_attention(4, 2)
    weights = Api().mha_weights(attention)
    assert set(weights) == {"Wq", "Wk", "Wv", "Wo", "bq", "bk", "bv", "bo"}
    x = np.random.default_rng(0).normal(size=(1, 3, 4)).astype(np.float32)
    q, _, _ = attention.project(Tensor(x), Tensor(x), Tensor(x))
    np.testing.assert_allclose(N(q), x @ weights["Wq"].T + weights["bq"], rtol=1e-5, atol=1e-6)
