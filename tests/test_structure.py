"""The order of the project: who may import whom, what stands where, and what no file may contain."""

import ast
import operator
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import tinygrad_qkv
from tinygrad_qkv import ops

ROOT = Path(__file__).parent.parent
TOP_LEVEL = {
    *("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", ".gitignore", ".ci", ".github"),
    *("tinygrad_qkv", "nn", "tests", "examples"),
}

# Each part, and the parts that it may import besides itself: kernels <- ops <- tensor <- nn <- examples.
ALLOWED: dict[str, set[str]] = {
    "hints": set(),
    "locks": set(),
    "memory": {"locks", "tensor"},
    "kernels": {"locks"},
    "modes": set(),
    "random": {"locks", "modes"},
    "formulas": {"kernels"},
    "tensor": {"memory", "modes", "methods", "conversions", "observers"},
    "conversions": set(),
    "methods": {"hints", "tensor"},
    "observers": {"modes", "tensor", "autograd"},
    "autograd": {"memory", "modes", "observers", "hooks", "records", "tensor"},
    "hooks": {"locks", "tensor", "autograd"},
    "nested": {"tensor"},
    "records": {"observers", "hooks", "tensor", "autograd"},
    "missing_gradient": {"tensor"},
    "seeds": {"observers", "tensor", "autograd"},
    "rule_faults": {"tensor", "autograd"},
    "backward": {
        *("kernels", "locks", "memory", "modes", "observers", "hooks", "tensor", "autograd", "seeds", "rule_faults")
    },
    "checkpointing": {
        *("memory", "modes", "nested", "observers", "random", "tensor", "autograd", "backward", "hooks"),
    },
    "profiler": {"hooks", "modes", "observers", "tensor", "autograd"},
    "ops": {"kernels", "memory", "modes", "random", "tensor", "autograd"},
    "derivatives": {"modes", "nested", "tensor", "autograd", "backward", "seeds", "ops"},
    "checks": {"modes", "nested", "observers", "tensor", "autograd", "backward", "derivatives", "rule_faults"},
    "path_names": {"modes", "autograd"},
    "gradient_paths": {"tensor", "autograd", "backward", "path_names", "seeds"},
    "ledger": {"kernels", "observers", "formulas", "tensor", "autograd", "checks"},
    "anomaly": {"hooks", "modes", "observers", "records", "tensor", "autograd"},
    "diagnosis": {"kernels", "observers", "random", "records", "tensor", "autograd", "backward"},
    "viz": {"modes", "tensor", "autograd", "ledger"},
    "public names": {
        "hints",
        "kernels",
        "modes",
        "profiler",
        "random",
        "records",
        "tensor",
        "backward",
        "ops",
        "checkpointing",
        "autograd",
        "derivatives",
        "checks",
        "gradient_paths",
        "ledger",
        "anomaly",
        "diagnosis",
    },
    "nn": {
        *("public names", "hints", "hooks", "memory", "modes", "nested", "observers", "random", "tensor", "autograd"),
        "ops",
    },
    "examples": {"public names", "nn", "viz"},
}

# Single files that may do more, each for a reason.
EXCEPTIONS = {
    ("tinygrad_qkv/methods.py", "ops"): "the one cycle: a tensor's operators call ops, and ops make tensors",
    ("tinygrad_qkv/tensor.py", "ops"): "in the same cycle: `np.exp(t)`",
    ("tinygrad_qkv/tensor.py", "autograd"): "in the same cycle: a tensor knows its node",
    ("tinygrad_qkv/tensor.py", "backward"): "in the same cycle: `t.backward()`",
    ("tinygrad_qkv/tensor.py", "hooks"): "in the same cycle: `t.register_hook(f)`",
    ("tinygrad_qkv/tensor.py", "missing_gradient"): "in the same cycle: `t.gradient()`",
    ("tinygrad_qkv/tensor.py", "ledger"): "in the same cycle: `t.backward(trace=True)`",
    ("nn/optim.py", "kernels"): "an optimiser's step is one pass over memory and has no derivative",
    ("tinygrad_qkv/__init__.py", "nn"): "lazily, so that `from tinygrad_qkv import nn` works",
    ("tinygrad_qkv/__init__.py", "viz"): "lazily, so that `from tinygrad_qkv import draw_graph` works",
}


class Import(NamedTuple):
    """One imported module, with the names taken from it, and where that is written."""

    file: str
    line: int
    module: str
    names: tuple[str, ...] = ()
    level: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}{': ' + ', '.join(self.names) if self.names else ''}"


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> Iterator[Import]:
    """Every import of a file, those inside functions and by `import_module("...")` too."""
    yield from imports_of_text(path.read_text(encoding="utf-8"), name_of(path))


def imports_of_text(text: str, file: str) -> Iterator[Import]:
    for node in ast.walk(ast.parse(text, filename=file)):
        match node:
            case ast.Import(names=names):
                yield from (Import(file, node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                yield Import(file, node.lineno, module or "", tuple(alias.name for alias in names), level)
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(module)), *_]):
                yield Import(file, node.lineno, module)


def part_of_module(module: str) -> str | None:
    """The part of the project that a dotted name lies in; None for what is not ours."""
    first, *rest = module.split(".")
    if first in ("nn", "examples"):
        return first
    if first != "tinygrad_qkv":
        return None
    return rest[0] if rest and rest[0] in ALLOWED else "public names"


def part_of_file(file: str) -> str | None:
    return part_of_module(file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))


def parts_imported(item: Import) -> set[str]:
    """`from tinygrad_qkv import kernels, Tensor` takes one part by its name, and one public name."""
    submodules = {f"{item.module}.{name}" if name in ALLOWED else item.module for name in item.names}
    return {part for module in submodules or {item.module} if (part := part_of_module(module)) is not None}


def wrong_directions(found: Iterator[Import] | list[Import]) -> tuple[list[str], set[tuple[str, str]]]:
    """The imports that the table forbids, as text, and the exceptions that were made use of."""
    wrong, used = [], set()
    for item in found:
        here = part_of_file(item.file)
        for part in parts_imported(item) - {here} - ALLOWED[here]:
            if (item.file, part) in EXCEPTIONS:
                used.add((item.file, part))
            else:
                wrong.append(f"{item}; {here} may import only {sorted(ALLOWED[here]) or 'itself'}")
    return wrong, used


def report(wrong: list[str]) -> None:
    assert not wrong, "\n" + "\n".join(wrong)


def test_imports_point_in_one_direction():
    wrong, used = wrong_directions([i for path in sources("tinygrad_qkv", "nn", "examples") for i in imports(path)])
    report(wrong)
    assert used == set(EXCEPTIONS), "an exception that nobody needs"


@pytest.mark.parametrize(
    ("file", "text", "part"),
    [
        ("tinygrad_qkv/kernels/a.py", "from tinygrad_qkv.tensor import Tensor", "kernels may import only ['locks']"),
        ("tinygrad_qkv/ops/a.py", "def f():\n    from tinygrad_qkv import nn", "a.py:2 imports tinygrad_qkv: nn"),
        ("tinygrad_qkv/ops/a.py", "from tinygrad_qkv import Tensor", "a.py:1 imports tinygrad_qkv: Tensor"),
        ("tinygrad_qkv/viz/a.py", "import nn.linear", "a.py:1 imports nn.linear"),
        ("tinygrad_qkv/viz/a.py", "import importlib\nimportlib.import_module('tinygrad_qkv.nn')", "a.py:2 imports"),
        ("nn/a.py", "from tinygrad_qkv.kernels.matmul import matmul", "a.py:1 imports tinygrad_qkv.kernels.matmul"),
        ("nn/a.py", "from tinygrad_qkv.viz import graph", "nn may import only"),
        ("examples/a.py", "from tinygrad_qkv import kernels", "examples may import only"),
    ],
)
def test_a_wrong_direction_is_named_with_its_file_and_line(file, text, part):
    wrong, _ = wrong_directions(imports_of_text(text, file))
    assert len(wrong) == 1 and part in wrong[0]


def test_every_file_of_the_engine_belongs_to_a_part():
    unknown = [
        name_of(path)
        for path in sources("tinygrad_qkv")
        if part_of_file(name_of(path)) == "public names" and path != ROOT / "tinygrad_qkv" / "__init__.py"
    ]
    assert not unknown, "files with no row in ALLOWED"


def test_layers_import_by_the_canonical_name():
    found = [item for path in sources("nn") for item in imports(path)]
    report([f"{i}; write tinygrad_qkv.nn..." for i in found if i.level or i.module.split(".")[0] == "nn"])


def test_layers_define_no_kernel_and_no_derivative_rule():
    found = [item for path in sources("nn") for item in imports(path)]
    report([str(i) for i in found if i.module.split(".")[0] in ("numba", "llvmlite") or "record" in i.names])


def test_only_kernels_know_numba():
    found = [item for path in sources("tinygrad_qkv", "examples") for item in imports(path)]
    compiled = [i for i in found if i.module.split(".")[0] in ("numba", "llvmlite")]
    report([str(i) for i in compiled if part_of_file(i.file) != "kernels"])


def test_no_star_imports():
    found = [item for path in sources("tinygrad_qkv", "nn", "examples", "tests") for item in imports(path)]
    report([str(item) for item in found if "*" in item.names])


def test_file_names_say_what_is_in_them():
    vague = {"utils", "util", "helpers", "helper", "base", "common", "misc"}
    files = sources("tinygrad_qkv", "nn", "examples", "tests")
    report([name_of(p) for p in files if vague & {p.stem, p.stem.removeprefix("test_"), p.parent.name}])


def test_no_op_bears_the_name_of_a_file():
    """`tinygrad_qkv.ops.name` would be the file or the function, whichever was imported last."""
    files = [path for path in sources("tinygrad_qkv/ops") if path.name != "__init__.py"]
    report([name_of(path) for path in files if callable(getattr(ops, path.stem, None))])


def test_public_names_exist_and_hide_no_module():
    names = tinygrad_qkv.__all__
    assert len(set(names)) == len(names)
    missing = [name for name in names if not hasattr(tinygrad_qkv, name)]
    assert not missing
    modules = {path.stem for path in (ROOT / "tinygrad_qkv").iterdir()} & set(names)
    assert not modules, "public names that are names of modules as well"


def test_names_of_pytorch_lead_to_names_that_exist():
    for module, name, here in (
        (tinygrad_qkv, "randn", "normal"),
        (tinygrad_qkv, "rand", "uniform"),
        (tinygrad_qkv, "randint", "integers"),
        (tinygrad_qkv, "clamp", "clip"),
        (tinygrad_qkv, "concat", "cat"),
        (tinygrad_qkv, "gather", "take_along_axis"),
        (tinygrad_qkv, "optim", "nn.optim"),
        (tinygrad_qkv, "save", "nn.save"),
        (tinygrad_qkv.nn, "MultiheadAttention", "MultiHeadAttention"),
        (tinygrad_qkv.nn, "TransformerEncoderLayer", "TransformerBlock"),
        (tinygrad_qkv.nn, "utils", "optim.clip_grad_norm"),
    ):
        with pytest.raises(AttributeError, match=rf"has no attribute '{name}'; \D* {here}\b"):
            getattr(module, name)
        assert operator.attrgetter(here)(module)
        with pytest.raises(AttributeError, match=r"has no attribute 'nothing'$"):
            _ = module.nothing


def test_importing_the_engine_imports_nothing_above_it():
    above = ("tinygrad_qkv.nn", "tinygrad_qkv.viz", "graphviz", "rich", "torch")
    code = f"import sys, tinygrad_qkv; print([name for name in {above} if name in sys.modules])"
    command = [sys.executable, "-W", "error", "-c", code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.stdout.strip(), result.stderr) == ("[]", "")


BUILDING_BLOCKS = {
    f"tinygrad_qkv/kernels/{name}.py"
    for name in (
        *("addresses", "attention_backward", "attention_forward", "attention_masks", "attention_short"),
        *("attention_tiles", "dots", "panels", "passes", "random_bits", "rows", "scalars", "simd"),
        *("softmax_columns", "softmax_rows", "tile_product", "transposes", "vectors"),
    )
}


def undescribed(tree: ast.Module, file: str) -> Iterator[str]:
    """Public functions and classes without a docstring, and functions with an argument or a result without a type.

    Methods need types only: most of a Tensor's are one line that calls an op, and a layer's `forward` is described by
    its class. The building blocks of kernels need no types: they are compiled for those that they are called with.
    """
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith("_"):
            continue
        if node in tree.body and not ast.get_docstring(node):
            yield f"{file}:{node.lineno}: {node.name} has no docstring"
        if isinstance(node, ast.FunctionDef) and file not in BUILDING_BLOCKS:
            a = node.args
            arguments = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
            bare = [x.arg for x in arguments if x.annotation is None and x.arg not in ("self", "cls")]
            if bare or (node.returns is None and node.name != "__init__"):
                yield f"{file}:{node.lineno}: {node.name} has no type for {', '.join(bare) or 'its result'}"


def test_public_functions_have_docstrings_and_types():
    files = sources("tinygrad_qkv", "nn", "examples")
    report([wrong for path in files for wrong in undescribed(ast.parse(path.read_text("utf-8")), name_of(path))])


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("def f() -> int: ...", "a.py:1: f has no docstring"),
        ("class A: ...", "a.py:1: A has no docstring"),
        ("def f(x, *, y: int) -> int:\n    'Y.'", "a.py:1: f has no type for x"),
        ("class A:\n    'An A.'\n    def f(self): ...", "a.py:3: f has no type for its result"),
    ],
)
def test_a_function_without_a_description_is_named(text, wrong):
    assert list(undescribed(ast.parse(text), "a.py")) == [wrong]


@pytest.fixture(scope="module")
def tracked() -> list[Path]:
    """The files under version control."""
    try:
        result = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("git is not installed on this machine")
    if result.returncode:
        pytest.skip(f"not a git checkout: {result.stderr.strip()}")
    return [ROOT / name for name in result.stdout.split("\0") if name]


def test_top_level_holds_only_what_belongs_there(tracked):
    assert {path.relative_to(ROOT).parts[0] for path in tracked} <= TOP_LEVEL


def test_tests_are_flat(tracked):
    inside = [path.relative_to(ROOT / "tests") for path in tracked if path.is_relative_to(ROOT / "tests")]
    assert {path.parts[0] for path in inside if len(path.parts) > 1} <= {"benchmarks"}


def test_no_file_names_a_place_on_somebodys_machine(tracked):
    place = re.compile(r"(?<![\w.:/-])/(?:home|Users|root|opt|work|mnt|srv|tmp)/\w|\b[A-Z]:\\+Users\b")
    wrong = []
    for path in tracked:
        if path.exists() and path.suffix in {".py", ".md", ".toml", ".yml", ".svg", ".html", ".txt", ".json", ""}:
            lines = path.read_text(encoding="utf-8").splitlines()
            wrong += [f"{name_of(path)}:{n}: {line.strip()}" for n, line in enumerate(lines, 1) if place.search(line)]
    report(wrong)
