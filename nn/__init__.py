"""Layers, attention, losses and optimisers; the import name of this folder is `tinygrad_qkv.nn`."""

import importlib
import pkgutil
import sys

__all__: list[str] = []

# `import nn` works in a checkout. The names that it finds are the canonical modules themselves, so that a class is one
# class however it was imported, and pickles by its canonical name.
if __name__ == "nn":
    sys.modules["nn"] = importlib.import_module("tinygrad_qkv.nn")
    for _module in pkgutil.iter_modules(__path__):
        sys.modules[f"nn.{_module.name}"] = importlib.import_module(f"tinygrad_qkv.nn.{_module.name}")
