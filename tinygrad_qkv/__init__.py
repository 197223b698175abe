"""An autodiff engine from scratch, with attention on top: `from tinygrad_qkv import Tensor, nn`."""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `__getattr__` below brings these when the program runs
    from tinygrad_qkv import nn
    from tinygrad_qkv.viz.graph import draw_graph

__version__ = "0.1.0"

# In a checkout the folder of `tinygrad_qkv.nn` lies beside this package, not in it: let the import system look there.
# The test of the name keeps `tinygrad_qkv.tinygrad_qkv`, which becomes visible by this, from nesting without end.
_here = Path(__file__).parent
if __name__ == "tinygrad_qkv" and not (_here / "nn").is_dir():
    __path__.append(str(_here.parent))

__all__ = ["draw_graph", "nn"]


def __getattr__(name: str) -> object:
    """Import what stands above the engine when it is first asked for: the engine itself needs none of it."""
    if name == "nn":
        return importlib.import_module("tinygrad_qkv.nn")
    if name == "draw_graph":
        return importlib.import_module("tinygrad_qkv.viz.graph").draw_graph
    raise AttributeError(f"module 'tinygrad_qkv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
