"""Files of tensors: exact round trips, ties, atomic saves that survive a kill, and damaged or hostile files."""

import io
import json
import math
import os
import pickle
import signal
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tinygrad_qkv import Tensor, nn

NAMES = ["model.safetensors", "model.npz", "model", "model.bin"]


@pytest.fixture(params=NAMES)
def path(request, tmp_path):
    return tmp_path / request.param


def arrays():
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4) / 7
    special = np.array([math.inf, -math.inf, -0.0, 5e-324, math.nan, 1 + 1e-15])
    special.view(np.int64)[4] |= 12345  # a NaN with a payload
    return {
        "plain": x,
        "transposed": x.T,
        "reversed": x[::-1, :, ::-2],
        "broadcast": np.broadcast_to(x[0, 0], (5, 4)),
        "fortran": np.asfortranarray(x[0]),
        "column": x[:, :1, 1],
        "scalar": np.array(2.5),
        "numpy scalar": np.float32(1.5),
        "empty": np.zeros((0, 3)),
        "empty too": np.zeros((3, 0, 2), np.int8),
        "special": special,
        "half": np.array([1.5, 65504, -0.0], np.float16),
        "swapped": np.array([1.5, 2.5], ">f8"),
        "bool": np.array([[True, False, True]]),
        **{
            dtype: np.array([np.iinfo(dtype).min, 3, np.iinfo(dtype).max], dtype)
            for dtype in ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8")
        },
        'a "name"\\ with\nparts.and.ünïcode/..': np.ones(1, np.float32),
        "ends.npy": np.ones(2),
        "ends": np.ones(3),
    }


def test_every_layout_and_dtype_comes_back_bit_for_bit(path):
    given = arrays()
    nn.save({**given, "tensor": Tensor(given["transposed"]).T, "number": 2.5, "list": [1, 2]}, path)
    back = nn.load(str(path))
    given |= {"tensor": given["plain"], "number": np.float32(2.5), "list": np.array([1, 2])}
    assert list(back) == list(given)
    for name, array in given.items():
        native = np.asarray(array, np.asarray(array).dtype.newbyteorder("="))
        assert isinstance(back[name], Tensor) and not back[name].requires_grad
        assert (back[name].shape, back[name].dtype) == (native.shape, native.dtype), name
        assert back[name].data.tobytes() == native.tobytes(), name
        assert back[name].data.flags.writeable and back[name].data.flags.c_contiguous
    assert not any(a is not b and np.shares_memory(a.data, b.data) for a in back.values() for b in back.values())


def test_the_same_tensors_give_the_same_bytes(path, tmp_path):
    nn.save(arrays(), path)
    again = tmp_path / f"again{path.suffix}"
    nn.save(arrays(), again)
    assert path.read_bytes() == again.read_bytes()
    if path.suffix == ".npz":
        with zipfile.ZipFile(path) as archive:
            assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    else:  # every tensor lies at a multiple of its item's size, so that others may map it into memory
        length = int.from_bytes(path.read_bytes()[:8], "little")
        header = json.loads(path.read_bytes()[8 : 8 + length])
        sizes = {name: np.asarray(array).dtype.itemsize for name, array in arrays().items()}
        assert not any((8 + length + header[name]["data_offsets"][0]) % size for name, size in sizes.items())


def test_a_model_and_its_state(path):
    model, twin = nn.TransformerBlock(6, 3, 5), nn.TransformerBlock(6, 3, 5)
    nn.save(model, path)
    twin.load_state_dict(nn.load(path))
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert a.data.tobytes() == b.data.tobytes(), name
    nn.save(twin.state_dict(), path)
    model.load_state_dict(nn.load(path))


def test_tied_names_are_stored_once(path):
    class Tied(nn.Module):
        def __init__(self):
            self.embed = nn.Embedding(1000, 7)
            self.head = nn.Linear(7, 1000, bias=False)
            self.head.weight = self.embed.weight

    tied, one = Tied(), Tensor(np.ones((1000, 7), np.float32))
    for obj in (tied, {"embed.weight": one, "head.weight": one}):
        nn.save(obj, path)
        assert 28000 < path.stat().st_size < 29000
        back = nn.load(path)
        assert list(back) == ["embed.weight", "head.weight"] and back["head.weight"] is back["embed.weight"]
    nn.save(tied, path)
    back = nn.load(path)
    tied.load_state_dict(back)
    nn.save(back, path)
    assert path.stat().st_size < 29000
    equal = {"a": np.ones((1000, 7), np.float32), "b": np.ones((1000, 7), np.float32)}
    nn.save(equal, path)
    assert path.stat().st_size > 56000


def test_bfloat16_is_widened(tmp_path):
    bits = np.array([0x3F80, 0xC000, 0x7F80, 0x8000, 0x0001], "<u2")
    path = write_safetensors(tmp_path, {"x": entry("BF16", [5], 0, 10)}, bits.tobytes())
    x = nn.load(path)["x"]
    assert x.dtype == np.float32
    np.testing.assert_array_equal(x, [1, -2, math.inf, 0, 2.0**-133])
    assert np.signbit(x.data[3])


def test_what_cannot_be_saved_is_refused_and_the_former_file_stays(path):
    nn.save({"x": np.ones(3)}, path)
    before = path.read_bytes()
    for bad, text in (
        ({"x": {"y": np.ones(1)}}, "one level"),
        ({"state": [{"m": np.ones(1)}]}, "'state' holds a dict"),
        ({1: np.ones(1)}, "strings"),
        ([np.ones(1)], "dict"),
        ({"x": np.ones(1, complex)}, "complex128"),
        ({"x": np.array(["a"])}, "dtype <U1"),
        ({"x": np.array([None])}, "object"),
    ):
        with pytest.raises(TypeError, match=text):
            nn.save(bad, path)
    for name in ("__metadata__", "__aliases__", "a\0b"):
        if (path.suffix == ".npz") != (name == "__metadata__"):
            with pytest.raises(ValueError, match="name"):
                nn.save({name: np.ones(1)}, path)
            break
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


# ---- atomic


def test_a_failing_disk_leaves_the_former_file_alone(path, monkeypatch):
    nn.save({"x": np.ones(3)}, path)
    before = path.read_bytes()

    def fail(*args):
        raise OSError("no space left")

    for call in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with pytest.raises(OSError, match="no space"):
                nn.save({"x": np.zeros(5)}, path)
        assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no permissions for groups")
def test_a_private_file_stays_private(path):
    nn.save({"x": np.zeros(3)}, path)
    path.chmod(0o600)
    nn.save({"x": np.ones(3)}, path)
    assert path.stat().st_mode & 0o777 == 0o600 and nn.load(path)["x"].tolist() == [1, 1, 1]


def test_a_link_is_followed(path, tmp_path):
    (tmp_path / "real").mkdir()
    target = tmp_path / "real" / f"target{path.suffix}"
    target.write_bytes(b"")
    path.symlink_to(target)
    nn.save({"x": np.ones(3)}, path)
    assert path.is_symlink() and nn.load(target)["x"].shape == (3,)


KILLED = """
import sys
import numpy as np
from tinygrad_qkv import nn
path = sys.argv[1]
print("ready", flush=True)
n = 0
while True:
    n += 1
    nn.save({"a": np.full(200_000, n), "b": np.full((300, 500), n, np.float32)}, path)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="the machine has no SIGKILL")
@pytest.mark.parametrize("name", ["model.safetensors", "model.npz"])
def test_killed_while_saving_the_file_is_whole(name, tmp_path):
    path = tmp_path / name
    nn.save({"a": np.full(200_000, 0), "b": np.full((300, 500), 0, np.float32)}, path)
    root = Path(nn.__file__).parent.parent
    for delay in (0.007, 0.031):
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, cwd=root, text=True
        ) as child:
            assert child.stdout.readline() == "ready\n"
            try:
                child.wait(delay)
            except subprocess.TimeoutExpired:
                child.kill()
        state = nn.load(path)
        assert state["a"].shape == (200_000,) and state["b"].shape == (300, 500)
        assert (state["a"].data == state["b"].data[0, 0]).all() and (state["b"].data == state["b"].data[0, 0]).all()


# ---- damaged and hostile files


class Mark:
    """Unpickled, it makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_pickle_is_refused_and_runs_nothing(path, tmp_path):
    mark = tmp_path / "mark"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        path.write_bytes(pickle.dumps({"w": Mark(str(mark))}, protocol))
        with pytest.raises(ValueError, match="was not loaded"):
            nn.load(path)
    object_array = io.BytesIO()
    np.save(object_array, np.array([Mark(str(mark))], dtype=object), allow_pickle=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("w.npy", object_array.getvalue())
    with pytest.raises(ValueError, match="pickle"):
        nn.load(path)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "model.npz"])
def test_a_file_cut_anywhere_is_refused(name, tmp_path):
    path = tmp_path / name
    nn.save({"a": np.arange(5), "b": np.float32([[1, 2]])}, path)
    whole = path.read_bytes()
    for n in range(len(whole)):
        path.write_bytes(whole[:n])
        with pytest.raises(ValueError, match="was not loaded"):
            nn.load(path)


def test_a_missing_file(path):
    with pytest.raises(FileNotFoundError):
        nn.load(path)


def entry(dtype, shape, begin, end, **more):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end], **more}


def write_safetensors(folder, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "made.safetensors"
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


HOSTILE = {
    "no header": (b"", b"", None),
    "no JSON": (b"{broken", b"", None),
    "no text": (b"\xff\xfe{}", b"", None),
    "a list": ([], b"", None),
    "too deep": (b"[" * 100_000, b"", None),
    "huge length": ({}, b"", 2**63),
    "length past the end": ({}, b"", 3),
    "same name twice": (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"1",
        None,
    ),
    "no table": ({"a": 3}, b"", None),
    "missing key": ({"a": {"dtype": "U8", "shape": [0]}}, b"", None),
    "further key": ({"a": entry("U8", [0], 0, 0, code="print()")}, b"", None),
    "unknown dtype": ({"a": entry("F8_E4M3", [1], 0, 1)}, b"1", None),
    "dtype no text": ({"a": entry(["F32"], [1], 0, 4)}, b"1234", None),
    "negative size": ({"a": entry("U8", [-1, -1], 0, 1)}, b"1", None),
    "size no integer": ({"a": entry("U8", [1.0], 0, 1)}, b"1", None),
    "size a bool": ({"a": entry("U8", [True], 0, 1)}, b"1", None),
    "huge size": ({"a": entry("U8", [10**30], 0, 1)}, b"1", None),
    "huge empty shape": ({"a": entry("U8", [0, 2**62, 2**62], 0, 0)}, b"", None),
    "too many axes": ({"a": entry("U8", [1] * 65, 0, 1)}, b"1", None),
    "beyond the data": ({"a": entry("U8", [9], 0, 9)}, b"12345678", None),
    "before the data": ({"a": entry("U8", [1], -1, 0)}, b"1", None),
    "backwards": ({"a": entry("U8", [0], 1, 0)}, b"1", None),
    "three offsets": ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 2]}}, b"1", None),
    "wrong size": ({"a": entry("F32", [2], 0, 4)}, b"1234", None),
    "overlap": ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)}, b"123456", None),
    "the same place": ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 0, 4)}, b"1234", None),
    "gap": ({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 2, 3)}, b"123", None),
    "left over": ({"a": entry("U8", [1], 0, 1)}, b"12", None),
    "metadata no table": ({"__metadata__": [1]}, b"", None),
    "metadata no texts": ({"__metadata__": {"a": 1}}, b"", None),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_header_is_refused(kind, tmp_path):
    path = write_safetensors(tmp_path, *HOSTILE[kind])
    with pytest.raises(ValueError, match="was not loaded: "):
        nn.load(path)


def test_a_harmless_file_of_another_writer(tmp_path):
    header = {"__metadata__": {"format": "pt"}, "b": entry("F32", [], 1, 5), "a": entry("BOOL", [1], 0, 1)}
    back = nn.load(
        write_safetensors(tmp_path, json.dumps(header).encode() + b"    ", b"\x02" + np.float32(1.5).tobytes())
    )
    assert list(back) == ["b", "a"] and back["b"].item() == 1.5 and back["a"].data.view(np.uint8)[0] == 1


def npy_bytes(array=None, header=None, data=b""):
    out = io.BytesIO()
    if header is None:
        np.save(out, array)
        return out.getvalue()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


HOSTILE_NPY = {
    "empty": b"",
    "no magic": b"not an array",
    "text": npy_bytes(np.array(["abc"])),
    "complex": npy_bytes(np.ones(2, complex)),
    "record": npy_bytes(np.zeros(1, [("a", "f4")])),
    "too long": npy_bytes(np.ones(2)) + b"more",
    "huge": npy_bytes(header=b"{'descr':'<f8','fortran_order':False,'shape':(1000000000000,)}", data=b"12345678"),
    "negative": npy_bytes(header=b"{'descr':'<f8','fortran_order':False,'shape':(-1,-1)}", data=b"12345678"),
    "code": npy_bytes(header=b"{'descr':__import__('os').getcwd(),'fortran_order':False,'shape':()}"),
    "deep": npy_bytes(header=b"(" * 9000),
    "object": npy_bytes(header=b"{'descr':'|O','fortran_order':False,'shape':(1,)}", data=b"12345678"),
}


@pytest.mark.parametrize("kind", HOSTILE_NPY)
def test_a_hostile_npz_is_refused(kind, tmp_path):
    path = tmp_path / "made.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.npy", HOSTILE_NPY[kind])
    with pytest.raises(ValueError, match="was not loaded: its entry 'a' is damaged"):
        nn.load(path)


def test_an_npz_of_numpy_and_other_archives(tmp_path):
    path = tmp_path / "made.npz"
    np.savez_compressed(path, a=np.asfortranarray(np.arange(6.0).reshape(2, 3)), b=np.float32(2))
    back = nn.load(path)
    np.testing.assert_array_equal(back["a"], np.arange(6.0).reshape(2, 3))
    assert back["b"].shape == ()
    nn.save(back, path)
    with np.load(path) as archive:
        np.testing.assert_array_equal(archive["a"], back["a"])
    for name, content in (("a.txt", b"1"), ("__aliases__.npy", npy_bytes(np.frombuffer(b'{"x":"y"}', np.uint8)))):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(name, content)
        with pytest.raises(ValueError, match="was not loaded"):
            nn.load(path)


def test_the_safetensors_package_reads_and_writes_the_same(tmp_path):
    library = pytest.importorskip("safetensors.numpy", reason="the safetensors package is not installed")
    path = tmp_path / "model.safetensors"
    given = {name: np.ascontiguousarray(array).reshape(np.shape(array)) for name, array in arrays().items()}
    del given["swapped"]
    nn.save(given, path)
    theirs = library.load_file(path)
    assert theirs.keys() == given.keys()
    for name, array in given.items():
        assert theirs[name].tobytes() == array.tobytes() and theirs[name].shape == array.shape, name
    library.save_file(given, path)
    for name, tensor in nn.load(path).items():
        assert tensor.data.tobytes() == given[name].tobytes() and tensor.shape == given[name].shape, name


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere.*does not exist; make it first"):
        nn.save({"a": Tensor([1.0])}, tmp_path / "nowhere" / "a.npz")
