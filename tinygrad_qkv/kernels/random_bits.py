"""Random bits by number: those of element i follow from a seed and from i alone, whoever asks, and in any order.

The generator is Threefry-2x32 with 13 rounds, the fewest that pass all of TestU01's BigCrush. It turns a 64-bit key and
a 64-bit counter into two words of 32 bits, which serve two neighbouring elements. There is no state: a kernel on any
thread makes the bits of its own elements, and a backward pass makes them again.
Source: Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

import numpy as np

from tinygrad_qkv.kernels.compile import kernel


def keep_above(p: float) -> np.uint32:
    """Of an element to be dropped with probability p: the largest of its bits that still drop it.

    p in (0, 1], rounded to a multiple of 2^-32 and at least that much. For p = 1 no bits are above.
    """
    return np.uint32(max(round(p * 2**32), 1) - 1)


def _fill_bits_plain(seed, first, out):
    pairs = np.arange(first >> 1, (first + len(out) + 1) >> 1).astype(np.uint64)
    both = threefry(*np.array([[seed & 0xFFFFFFFF], [seed >> 32]], np.uint32), np.uint32(pairs), np.uint32(pairs >> 32))
    out[:] = np.stack(both, 1).reshape(-1)[first & 1 :][: len(out)]


@kernel(plain=_fill_bits_plain)
def fill_bits(seed, first, out):
    """out[i] = the bits of element first + i; seed uint64, first int64 >= 0, out (n,) uint32.

    0.2 ns an element on one core with AVX-512.
    """
    key0, key1 = np.uint32(seed), np.uint32(seed >> np.uint64(32))
    begin = min(first & 1, out.shape[0])  # 1 if out begins with the second word of a pair
    end = out.shape[0] - ((out.shape[0] - begin) & 1)  # and it may end with the first of one
    if begin:
        out[0] = _words(key0, key1, first >> 1)[1]
    _fill_pairs(key0, key1, (first + begin) >> 1, out[begin:end])
    if end < out.shape[0]:
        out[end] = _words(key0, key1, (first + end) >> 1)[0]


def _keep_scaled_plain(x, bits, limit, scale, y):
    y[:] = np.where(bits > limit, x * x.dtype.type(scale), 0)


@kernel(plain=_keep_scaled_plain)
def keep_scaled(x, bits, limit, scale, y):
    """y = x * scale where bits > limit, else 0; all (n,), y apart from x."""
    for i in range(x.shape[0]):
        y[i] = x[i] * scale if bits[i] > limit else x.dtype.type(0)


def _keep_scaled_in_place_plain(x, bits, limit, scale):
    _keep_scaled_plain(x, bits, limit, scale, x)


@kernel(plain=_keep_scaled_in_place_plain)
def keep_scaled_in_place(x, bits, limit, scale):
    """The same with x for y: two arrays that overlap go element by element, and attention takes half as long again."""
    for i in range(x.shape[0]):
        x[i] = x[i] * scale if bits[i] > limit else x.dtype.type(0)


@kernel
def _fill_pairs(key0, key1, pair, out):
    for i in range(out.shape[0] // 2):
        out[2 * i], out[2 * i + 1] = _words(key0, key1, pair + i)


@kernel
def _words(key0, key1, pair):
    return threefry(key0, key1, np.uint32(pair), np.uint32(pair >> 32))


@kernel
def threefry(key0, key1, x, y):
    """The two words of counter (x, y) under the key; all uint32, numbers or arrays."""
    key2 = np.uint32(key0 ^ key1 ^ np.uint32(0x1BD11BDA))
    x, y = np.uint32(x + key0), np.uint32(y + key1)
    x, y = _four_rounds(x, y, 13, 15, 26, 6)
    x, y = np.uint32(x + key1), np.uint32(y + key2 + np.uint32(1))
    x, y = _four_rounds(x, y, 17, 29, 16, 24)
    x, y = np.uint32(x + key2), np.uint32(y + key0 + np.uint32(2))
    x, y = _four_rounds(x, y, 13, 15, 26, 6)
    x, y = np.uint32(x + key0), np.uint32(y + key1 + np.uint32(3))
    return _round(x, y, 17)


@kernel
def _four_rounds(x, y, a, b, c, d):
    x, y = _round(x, y, a)
    x, y = _round(x, y, b)
    x, y = _round(x, y, c)
    return _round(x, y, d)


@kernel
def _round(x, y, turn):
    # numba makes uint64 of a sum of uint32: the casts cut it back, and LLVM sees 32-bit instructions.
    x = np.uint32(x + y)
    turned = np.uint32(y << np.uint32(turn)) | np.uint32(y >> np.uint32(32 - turn))
    return x, np.uint32(turned ^ x)
