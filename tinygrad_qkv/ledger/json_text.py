"""The gradient ledger as JSON: exact numbers, each array once, and no NaN or Infinity outside quotes.

    {"format": "gradient ledger 1", "whole": true, "arrays": [{"dtype": "float64", "shape": [2, 3], "values": [...]}],
     "entries": [{"op": "matmul", "into": "W_Q", "formula": "db = a.T @ g", "latex": ..., "value": 7,
                  "factors": {"g": {"value": {"array": 3}, "tensor": "Q"}, ...}, ...}]}

An entry's "value" is the place of an array in "arrays", and so is {"array": 3}; other factors that JSON has no word for
stand under one: {"tuple": [...]}, {"slice": [...]}, {"float": "NaN"}, {"rules": {...}} for the masks of attention.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from tinygrad_qkv.kernels.attention_rules import AttentionRules
from tinygrad_qkv.ledger.entry import Entry, Factor

FORMAT = "gradient ledger 1"
DTYPES = {np.dtype(c).name for c in "?bBhHiIlLqQefd"}
PLAIN = ("number", "op", "result", "operand", "into", "effect", "formula", "path", "line")


def entries_to_json(entries: Iterable[Entry], whole: bool) -> str:
    """The entries as text; `whole` says that none of the pass is missing."""
    arrays = _Arrays()
    lines = []
    for entry in entries:
        line = {name: getattr(entry, name) for name in PLAIN}
        line["latex"], line["value"] = entry.latex, arrays.number(entry.value)
        line["factors"] = {
            name: {"value": _encoded(factor.value, arrays), "tensor": factor.tensor}
            for name, factor in entry.factors.items()
        }
        lines.append(line)
    content = {"format": FORMAT, "whole": whole, "entries": lines, "arrays": arrays.encoded}
    return json.dumps(content, allow_nan=False)


def entries_from_json(text: str) -> tuple[list[Entry], bool]:
    """The entries, and whether they are all of their pass; ValueError for text that is not such a ledger."""
    try:
        content = json.loads(text)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"it has no 'format': {FORMAT!r}")
        arrays = [_array(encoded) for encoded in content["arrays"]]
        return [_entry(line, arrays) for line in content["entries"]], bool(content["whole"])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ValueError(f"this text is not a gradient ledger as to_json() writes it: {error}") from error


def _entry(line: dict[str, Any], arrays: list[np.ndarray]) -> Entry:
    factors = {name: Factor(_decoded(f["value"], arrays), f["tensor"]) for name, f in line["factors"].items()}
    return Entry(**{name: line[name] for name in PLAIN}, factors=factors, value=arrays[line["value"]])


class _Arrays:
    """The arrays of a ledger, each written once."""

    def __init__(self) -> None:
        self.encoded: list[dict[str, Any]] = []
        self._numbers: dict[int, int] = {}  # by id: the ledger holds them all

    def number(self, array: np.ndarray) -> int:
        """The place of `array` in the list."""
        if id(array) not in self._numbers:
            self._numbers[id(array)] = len(self.encoded)
            values = array.ravel().tolist()
            if array.dtype.kind == "f":
                values = [x if math.isfinite(x) else _word(x) for x in values]
            self.encoded.append({"dtype": array.dtype.name, "shape": array.shape, "values": values})
        return self._numbers[id(array)]


def _word(x: float) -> str:
    return ("-" if math.copysign(1, x) < 0 else "") + ("NaN" if math.isnan(x) else "Infinity")


def _array(encoded: dict[str, Any]) -> np.ndarray:
    dtype, values = encoded["dtype"], encoded["values"]
    if dtype not in DTYPES:
        raise ValueError(f"an array of dtype {dtype!r}")
    if np.dtype(dtype).kind == "f":
        values = [float(x) for x in values]  # "NaN" and "Infinity" too
    array = np.array(values, dtype).reshape(encoded["shape"])
    array.flags.writeable = False
    return array


def _encoded(x: Any, arrays: _Arrays) -> Any:
    """A factor: None, bools, integers, finite floats and text stand for themselves, the rest under a word."""
    if isinstance(x, np.ndarray):
        return {"array": arrays.number(x)}
    if isinstance(x, np.generic):
        return {"number": _scalar(x)}
    if isinstance(x, AttentionRules):
        return {"rules": {name: _encoded(value, arrays) for name, value in x._asdict().items()}}
    if isinstance(x, (tuple, list)):
        return {type(x).__name__: [_encoded(part, arrays) for part in x]}
    if isinstance(x, slice):
        return {"slice": [_encoded(part, arrays) for part in (x.start, x.stop, x.step)]}
    if x is Ellipsis:
        return {"ellipsis": True}
    if isinstance(x, float) and not math.isfinite(x):
        return {"float": _word(x)}
    return x


def _scalar(x: np.generic) -> dict[str, Any]:
    one = _Arrays()
    one.number(np.asarray(x))
    return one.encoded[0]


def _decoded(x: Any, arrays: list[np.ndarray]) -> Any:
    if not isinstance(x, dict):
        return x
    ((word, content),) = x.items()
    match word:
        case "array":
            return arrays[content]
        case "number":
            return _array(content)[()]
        case "rules":
            return AttentionRules(**{name: _decoded(value, arrays) for name, value in content.items()})
        case "tuple" | "list":
            return (tuple if word == "tuple" else list)(_decoded(part, arrays) for part in content)
        case "slice":
            return slice(*(_decoded(part, arrays) for part in content))
        case "ellipsis":
            return Ellipsis
        case "float":
            return float(content)
    raise ValueError(f"a value of the unknown kind {word!r}")
