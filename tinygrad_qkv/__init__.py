"""An autodiff engine from scratch, with attention on top: `from tinygrad_qkv import Tensor, nn`."""

import importlib
from pathlib import Path

__version__ = "0.1.0"

# In a checkout the folder of `tinygrad_qkv.nn` lies beside this package, not in it: let the import system look there.
# The test of the name keeps `tinygrad_qkv.tinygrad_qkv`, which becomes visible by this, from nesting without end.
_here = Path(__file__).parent
if __name__ == "tinygrad_qkv" and not (_here / "nn").is_dir():
    __path__.append(str(_here.parent))

# What stands above the engine is imported when it is first asked for: the engine needs neither layers nor drawings.
_LAZY = {"nn": "tinygrad_qkv.nn", "draw_graph": "tinygrad_qkv.viz.graph"}

__all__ = ["draw_graph", "nn"]


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'tinygrad_qkv' has no attribute {name!r}")
    module = importlib.import_module(_LAZY[name])
    value = module if module.__name__ == f"tinygrad_qkv.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
