"""The register block: every height and width, strides, depths and neighbours, on every vector that this host can run.

Each kind of host is a process of its own, since the vectors are chosen when the kernels are imported.
"""

import os
import platform
import re
import subprocess
import sys

import pytest

from tinygrad_qkv.kernels.compile import JIT, array_in, array_out, host_features
from tinygrad_qkv.kernels.simd import BLOCK_ROWS, BLOCK_VECTORS, HAS_FMA
from tinygrad_qkv.kernels.tile_product import EDGE_ROWS, ROW_VECTORS, tile_product

ON_X86 = platform.machine() in ("x86_64", "AMD64")
AVX2, SSE2 = "+avx,+avx2,+fma", "+sse2"
CASES = """
import itertools
import numba, numpy as np
from numba.core import types
from tinygrad_qkv.kernels.compile import JIT, array_in, array_out
from tinygrad_qkv.kernels.simd import BLOCK_ROWS, HAS_FMA, VECTOR_BYTES, block_columns
from tinygrad_qkv.kernels.tile_product import tile_product

rng = np.random.default_rng(0)

def compiled(dtype):
    "tile_product for arrays of any layout."
    if not JIT:
        return tile_product
    scalar = numba.from_dtype(np.dtype(dtype))
    strided = array_in(scalar, 2, "A")
    signature = types.void(strided, strided, array_out(scalar, 2, "A"), types.boolean)
    return numba.njit(signature, nogil=True)(lambda a, b, c, add: tile_product(a, b, c, add))

def amid(fill, *shape, dtype):
    "Small whole numbers in the middle of a larger array of `fill`, and that array."
    whole = np.full([n + 6 for n in shape], fill, dtype)
    inner = whole[3:-3, 3:-3]
    inner[...] = rng.integers(-9, 10, shape)
    return inner, whole

def left(layout, depth, rows, dtype):
    if layout == "rows of a":
        return amid(np.nan, rows, depth, dtype=dtype)[0].T
    if layout == "backward":
        return amid(np.nan, depth, rows, dtype=dtype)[0][::-1, ::-1]
    if layout == "every second":
        return amid(np.nan, 2 * depth, 3 * rows, dtype=dtype)[0][::2, ::3]
    if layout == "one row":
        return np.broadcast_to(amid(np.nan, depth, 1, dtype=dtype)[0], (depth, rows))
    return amid(np.nan, depth, rows, dtype=dtype)[0]

def check(run, layout, rows, columns, depth, add, dtype):
    a, (b, _), (c, around) = left(layout, depth, rows, dtype), amid(np.nan, depth, columns, dtype=dtype), \\
        amid(77, rows, columns, dtype=dtype)
    expected = around.copy()
    expected[3:-3, 3:-3] = a.T @ b + (c if add else 0)
    run(a, b, c, add)
    assert (around == expected).all(), (layout, rows, columns, depth, add, dtype)

for dtype in (np.float32, np.float64):
    run, width = compiled(dtype), block_columns(np.dtype(dtype).itemsize)
    for rows, columns in itertools.product(range(BLOCK_ROWS + 2), range(width + 2)):
        check(run, "", rows, columns, 2, bool(rows % 2), dtype)
    for columns in range(1, 5 * width + 2):  # a single row has blocks of its own
        check(run, "", 1, columns, 3, bool(columns % 2), dtype)
    heights, widths = (1, BLOCK_ROWS - 1, BLOCK_ROWS, 2 * BLOCK_ROWS + 1), (1, width - 1, width, 2 * width + 3)
    layouts = "", "rows of a", "backward", "every second", "one row"
    for case in itertools.product(layouts, heights, widths, (0, 1, 7), (True, False)):
        check(run, *case, dtype)
    a, b = np.zeros((5, BLOCK_ROWS + 1), dtype), np.zeros((5, width + 1), dtype)
    a[2, 1], b[3, 2], b[2, width] = np.inf, np.nan, 1
    c = np.zeros((BLOCK_ROWS + 1, width + 1), dtype)
    run(a, b, c, False)
    wrong = np.zeros_like(c)
    wrong[1], wrong[:, 2], wrong[1, width] = np.nan, np.nan, np.inf
    np.testing.assert_array_equal(c, wrong)
print(VECTOR_BYTES if JIT else "plain", HAS_FMA)
"""


def run_cases(**env: str) -> str:
    """Run the cases in a process with these settings of numba's, and no other ones."""
    kept = {k: v for k, v in os.environ.items() if k != "NUMBA_DISABLE_JIT"}
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", CASES], env=kept | env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_every_edge_on_this_host():
    assert run_cases().endswith(str(HAS_FMA))


def test_every_edge_of_the_plain_body():
    assert run_cases(NUMBA_DISABLE_JIT="1").startswith("plain")


@pytest.mark.skipif(not ON_X86, reason="names CPU features of x86-64")
@pytest.mark.parametrize(("features", "block"), [(SSE2, "16 False"), (AVX2, "32 True")])
def test_every_edge_on_lesser_hosts(features, block):
    if not {word[1:] for word in features.split(",")} <= host_features():
        pytest.skip(f"this host cannot run {features}")
    assert run_cases(NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES=features) == block


def innermost_loops(assembly: str) -> list[list[str]]:
    """The instructions of each loop without a jump inside, up to the jump back."""
    lines = [line.strip() for line in assembly.splitlines()]
    labels = {line[:-1]: i for i, line in enumerate(lines) if line.startswith(".L") and line.endswith(":")}
    loops = []
    for i, line in enumerate(lines):
        jump = re.fullmatch(r"j\w+\s+(\.L\w+)", line)
        if jump and labels.get(jump[1], i) < i:
            body = [x for x in lines[labels[jump[1]] + 1 : i] if x and not x.startswith(("#", ".cfi", ".p2align"))]
            if not any(x.endswith(":") or x.startswith("j") for x in body):
                loops.append(body)
    return loops


# Multiply-adds of whole vectors, loads and broadcasts of what they multiply, and counting in whole numbers.
WORK = re.compile(r"vfmadd\d+p[sd]\b|vbroadcasts[sd]\s+\S*\(|vmov[ua]p[sd]\s+\S*\(|vmovddup\s+\S*\(")
COUNTING = re.compile(r"(add|sub|inc|dec|lea|cmp|mov|test)q?\s+[^,]*%r|(add|sub|cmp)q?\s+\$")


@pytest.mark.skipif(not (JIT and ON_X86 and HAS_FMA), reason="reads assembly of x86-64")
@pytest.mark.parametrize("name", ["float32", "float64"])
def test_the_loop_over_k_holds_multiply_adds_and_loads_alone(name):
    import numba
    from numba.core import types

    scalar = getattr(types, name)
    strided = array_in(scalar, 2, "A")
    signature = types.void(strided, strided, array_out(scalar, 2, "A"), types.boolean)
    function = numba.njit(signature, nogil=True)(lambda a, b, c, add: tile_product(a, b, c, add))
    loops = [x for x in innermost_loops(function.inspect_asm(function.signatures[0])) if any("vfmadd" in i for i in x)]
    counts = {sum(i.startswith("vfmadd") for i in loop) for loop in loops}  # LLVM may repeat a loop for a flag of it
    edges = {rows * v for rows in EDGE_ROWS for v in range(1, BLOCK_VECTORS + 1)}
    assert counts == {BLOCK_ROWS * BLOCK_VECTORS, ROW_VECTORS, *edges}
    for loop in loops:
        other = [i for i in loop if not WORK.match(i) and not COUNTING.match(i)]
        assert not other, other
        spilled = [i for i in loop if i.startswith("v") and "(%rsp" in i]
        assert not spilled, spilled


def test_the_test_of_the_loop_can_fail():
    (loop,) = innermost_loops(
        ".L1:\n\tvmovups\t(%rax), %zmm1\n\tvmulss\t%xmm0, %xmm1, %xmm2\n\tdecq\t%rax\n\tjne\t.L1\n"
    )
    assert [i for i in loop if not WORK.match(i) and not COUNTING.match(i)] == ["vmulss\t%xmm0, %xmm1, %xmm2"]
