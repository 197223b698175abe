"""Every way of installing the project, and every place to stand in, gives one `tinygrad_qkv` with its own `nn`."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import tinygrad_qkv

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

# Prints where the engine and the layers came from, once all ways of naming a class have met in the same one.
PROBE = """
import pickle
import tinygrad_qkv
import tinygrad_qkv.nn as by_path
from tinygrad_qkv import Tensor, draw_graph, nn
from tinygrad_qkv.nn import functional as F, optim
from tinygrad_qkv.nn.attention import MultiHeadAttention

assert nn is by_path is tinygrad_qkv.nn and nn.functional is F and nn.optim is optim
assert nn.MultiHeadAttention is MultiHeadAttention and MultiHeadAttention.__module__ == "tinygrad_qkv.nn.attention"
written = pickle.dumps(MultiHeadAttention(6, 2))
assert b"tinygrad_qkv.nn.attention" in written and type(pickle.loads(written)) is MultiHeadAttention
assert {"nn", "draw_graph", "Tensor"} <= set(dir(tinygrad_qkv))
print(tinygrad_qkv.__file__)
print(nn.__file__)
"""

# `import nn` and everything below it, which a checkout offers: the very same objects, by the bare and the full name.
BARE_PROBE = """
import sys, pickle
import nn, nn.attention, tinygrad_qkv
from nn import functional
from nn.attention import MultiHeadAttention
from nn.linear import Linear
assert nn is tinygrad_qkv.nn and nn.attention is tinygrad_qkv.nn.attention
assert functional is tinygrad_qkv.nn.functional and Linear is tinygrad_qkv.nn.Linear
assert MultiHeadAttention is tinygrad_qkv.nn.attention.MultiHeadAttention is nn.MultiHeadAttention
assert type(pickle.loads(pickle.dumps(MultiHeadAttention(6, 2)))) is tinygrad_qkv.nn.MultiHeadAttention
bare = [name for name in sys.modules if name.startswith("nn.")]
assert len(bare) > 5 and all(sys.modules[name] is sys.modules["tinygrad_qkv." + name] for name in bare)
"""


class Environment:
    """A fresh virtual environment that sees the dependencies of the running one, but not the project."""

    def __init__(self, folder: Path):
        venv.create(folder, symlinks=os.name != "nt")
        self.python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        self.site = Path(self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)[0])
        # A folder that a .pth file adds is not searched for .pth files: an editable install stays out of sight.
        found = {
            str(importlib.metadata.distribution(name).locate_file("")) for name in ("numpy", "numba", "setuptools")
        }
        (self.site / "dependencies.pth").write_text("\n".join(sorted(found)) + "\n", encoding="utf-8")

    def run(self, *arguments: str, cwd: Path, path: Path | None = None) -> list[str]:
        """Run Python in folder `cwd`, with `path` put on the import path, and return the lines it printed."""
        hidden = ("PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH")
        variables = {name: value for name, value in os.environ.items() if name not in hidden}
        if path is not None:
            variables["PYTHONPATH"] = str(path)
        command = [str(self.python), *arguments]
        result = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()

    def install(self, *what: str) -> None:
        """Install as pip does it for a user, but with the build tools at hand, so that no network is needed."""
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet", "--no-index"]
        options = ["--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
        result = subprocess.run([*pip, *options, *what], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a checkout holds: builds write into the source folder, and the real one stays clean."""
    folder = tmp_path_factory.mktemp("checkout") / "copy"
    folder.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("tinygrad_qkv", "nn"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The project is not installed."""
    return Environment(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def editable(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """After `pip install -e .` in the checkout."""
    environment = Environment(tmp_path_factory.mktemp("editable"))
    environment.install("--editable", str(checkout))
    return environment


@pytest.fixture(scope="module")
def regular(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """After `pip install .` in the checkout."""
    environment = Environment(tmp_path_factory.mktemp("regular"))
    environment.install(str(checkout))
    return environment


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A user's own folder, with an `nn.py` of their own in it."""
    (tmp_path / "nn.py").write_text("MINE = True\n", encoding="utf-8")
    return tmp_path


def assert_source(lines: list[str], engine: Path, layers: Path) -> None:
    assert [Path(line).parent.resolve() for line in lines] == [engine.resolve(), layers.resolve()]


def test_uninstalled_checkout_as_working_directory(plain, checkout):
    assert_source(plain.run("-c", PROBE, cwd=checkout), checkout / "tinygrad_qkv", checkout / "nn")


def test_uninstalled_checkout_on_the_import_path(plain, checkout, tmp_path):
    lines = plain.run("-c", PROBE, cwd=tmp_path, path=checkout)
    assert_source(lines, checkout / "tinygrad_qkv", checkout / "nn")


def test_a_walk_over_the_modules_of_a_checkout_ends(plain, checkout):
    walk = (
        "import pkgutil, tinygrad_qkv; print(len(list(pkgutil.walk_packages(tinygrad_qkv.__path__, 'tinygrad_qkv.'))))"
    )
    assert int(plain.run("-c", walk, cwd=checkout)[0]) < 500


def test_editable_install_inside_the_checkout(editable, checkout):
    assert_source(editable.run("-c", PROBE, cwd=checkout), checkout / "tinygrad_qkv", checkout / "nn")


def test_editable_install_outside_the_checkout(editable, checkout, tmp_path):
    assert_source(editable.run("-c", PROBE, cwd=tmp_path), checkout / "tinygrad_qkv", checkout / "nn")


def test_regular_install_outside_the_checkout(regular, tmp_path):
    installed = regular.site / "tinygrad_qkv"
    version = "import importlib.metadata as m; assert m.version('tinygrad_qkv') == tinygrad_qkv.__version__\n"
    path = "assert len(tinygrad_qkv.__path__) == 1  # its neighbours in site-packages are no submodules of it"
    assert_source(regular.run("-c", PROBE + version + path, cwd=tmp_path), installed, installed / "nn")


def test_regular_install_inside_the_checkout_never_mixes_the_two(regular, checkout):
    assert_source(regular.run("-c", PROBE, cwd=checkout), checkout / "tinygrad_qkv", checkout / "nn")


@pytest.mark.parametrize("way", ["plain", "editable", "regular"])
def test_a_users_own_nn_stays_theirs_and_ours_stays_ours(way, request, checkout, elsewhere):
    environment = request.getfixturevalue(way)
    theirs = f"import nn\nassert nn.MINE and nn.__file__ == {str(elsewhere / 'nn.py')!r}\n"
    (elsewhere / "script.py").write_text(theirs + PROBE + theirs, encoding="utf-8")
    lines = environment.run("script.py", cwd=elsewhere, path=checkout if way == "plain" else None)
    installed = environment.site / "tinygrad_qkv"
    engine, layers = (installed, installed / "nn") if way == "regular" else (checkout / "tinygrad_qkv", checkout / "nn")
    assert_source(lines, engine, layers)


@pytest.mark.parametrize(
    "first",
    [
        "import nn",
        "from nn.attention import MultiHeadAttention",
        "import nn.attention",
        "from nn.linear import Linear",
        "from tinygrad_qkv.nn import Linear; import nn",
    ],
)
def test_bare_nn_in_a_checkout_is_the_same_package(first, plain, checkout):
    plain.run("-c", first + "\n" + BARE_PROBE + PROBE, cwd=checkout)


def test_wheel_holds_the_package_and_nothing_beside_it(regular):
    mine = {path.name for path in regular.site.iterdir()} - {"dependencies.pth", "__pycache__"}
    assert mine == {"tinygrad_qkv", f"tinygrad_qkv-{tinygrad_qkv.__version__}.dist-info"}
    shipped = {
        p.relative_to(regular.site / "tinygrad_qkv").as_posix() for p in regular.site.rglob("tinygrad_qkv/**/*.*")
    }
    sources = {p.relative_to(ROOT / "tinygrad_qkv").as_posix() for p in (ROOT / "tinygrad_qkv").rglob("*.py")}
    layers = {"nn/" + p.relative_to(ROOT / "nn").as_posix() for p in (ROOT / "nn").rglob("*.py")}
    assert {name for name in shipped if not name.endswith(".pyc")} == sources | layers | {"py.typed"}


def test_packages_in_pyproject_are_the_folders_of_the_project():
    engine = {".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT / "tinygrad_qkv").rglob("__init__.py")}
    layers = {".".join(("tinygrad_qkv", *p.parent.relative_to(ROOT).parts)) for p in (ROOT / "nn").rglob("__init__.py")}
    assert sorted(engine | layers) == PROJECT["tool"]["setuptools"]["packages"]


@pytest.mark.parametrize(
    ("platform", "machine", "expected"),
    [
        ("linux", "x86_64", {"graphviz-pure", "tbb"}),
        ("linux", "aarch64", {"graphviz-pure"}),
        ("linux", "ppc64le", set()),
        ("darwin", "x86_64", {"graphviz-pure"}),
        ("darwin", "arm64", {"graphviz-pure"}),
        ("win32", "AMD64", {"graphviz-pure", "tbb"}),
        ("win32", "ARM64", {"graphviz-pure"}),
    ],
)
def test_binary_dependencies_are_asked_for_only_where_wheels_exist(platform, machine, expected):
    requirements = [Requirement(text) for text in PROJECT["project"]["dependencies"]]
    here = {"sys_platform": platform, "platform_machine": machine}
    asked = {r.name for r in requirements if r.marker is None or r.marker.evaluate(here)}
    assert asked == {"numpy", "numba", "graphviz"} | expected
