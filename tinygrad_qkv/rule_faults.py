"""Why the rules of an op cannot run, in words: their number, their arguments, what they return."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Sequence
from typing import Any

from tinygrad_qkv.autograd import OUTPUT, Node
from tinygrad_qkv.tensor import Tensor


def wrong_count(node: Node, parts: Any = None) -> str:
    """What is wrong with what was recorded, or with the gradients of its one function (`parts`); "" if nothing."""
    rules, n = node.pullbacks, len(node.parents)
    for i, parent in enumerate(node.parents):
        if not isinstance(parent, (Node, numbers.Number)):
            return (
                f"op '{node.op}' has a {type(parent).__name__} for its operand {i}; record() takes Tensors and numbers "
                "as parents: make it a Tensor, or list it in saved only"
            )
    if any(s is OUTPUT for s in node.saved[1:]):
        return f"op '{node.op}' does not save OUTPUT first: record(..., saved=(OUTPUT, ...))"
    wanted = "record() takes a tuple with one rule for each parent, or one function that returns a gradient for each"
    if isinstance(rules, tuple):
        return "" if len(rules) == n else f"op '{node.op}' has {n} operands and {len(rules)} rules; {wanted}"
    if not callable(rules):
        return f"op '{node.op}' has a {type(rules).__name__} for its rules; {wanted}"
    if parts is None or (isinstance(parts, (tuple, list)) and len(parts) == n):
        return ""
    got = len(parts) if isinstance(parts, (tuple, list)) else f"a {type(parts).__name__}"
    return f"op '{node.op}' has {n} operands, and its one function of rules returned {got}; {wanted}"


def explain(error: Exception, node: Node, inputs: Sequence[Any], parts: Any = None) -> None:
    """Say more about an error that came up while the rules of `node` ran as rule(*inputs): a clearer one, or a note."""
    fault = wrong_count(node, parts)
    if fault:
        raise ValueError(fault) from error
    rules: Any = node.pullbacks
    for rule in rules if isinstance(rules, tuple) else (rules,):
        if not _takes(rule, len(inputs)):
            raise TypeError(
                f"a rule of op '{node.op}' is called as rule(g, *saved), here with g and {len(inputs) - 1} saved "
                f"values, and takes {inspect.signature(rule)}"
            ) from error
    if isinstance(error, (TypeError, AttributeError)) and inputs and isinstance(inputs[0], Tensor):
        raise TypeError(
            f"a rule of op '{node.op}' does not run on Tensors, as it has to under create_graph, in jvp and in hessian "
            f"({error}); make it of NumPy functions, or give it a second form for them: see tinygrad_qkv.record"
        ) from error
    if f"op '{node.op}'" not in str(error):
        error.add_note(f"This came from a rule of op '{node.op}', whose result has shape {node.shape}.")


def misfit(part: Any, node: Node, operand: int) -> Exception:
    """The error for a gradient that does not fit its operand, for what it is made of or for its shape."""
    parent: Any = node.parents[operand]
    who = f"the rule of op '{node.op}' for its operand {operand}"
    if part.dtype.kind != "f":
        got = "None" if part.dtype.kind == "O" and part.shape == () else part.dtype
        return TypeError(f"{who} returned {got}; a gradient is made of floats, here {parent.dtype} of {parent.shape}")
    return ValueError(f"{who} returned shape {part.shape}; the operand has shape {parent.shape}")


def refuse_cut(node: Node, operand: int, inputs: Sequence[Any]) -> None:
    """Refuse an array from a rule that was given Tensors with history: higher derivatives would silently be wrong."""
    if any(isinstance(t, Tensor) and t.requires_grad for t in inputs):
        raise TypeError(
            f"the rule of op '{node.op}' for its operand {operand} returned an array for Tensors that require grad, so "
            "it cannot be differentiated again: make it of NumPy functions on its own arguments, without np.asarray, "
            ".data or compiled code"
        )


def _takes(rule: Any, n: int) -> bool:
    """Whether a rule can be called with n arguments; True for a builtin that does not tell."""
    try:
        inspect.signature(rule).bind(*range(n))
    except TypeError:
        return not callable(rule)
    except ValueError:
        pass
    return True
