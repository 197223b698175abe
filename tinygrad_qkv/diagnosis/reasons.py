"""Why a parameter gets no gradient: a list of small checks over one record, each looks for one reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tinygrad_qkv.autograd import Node
from tinygrad_qkv.diagnosis.evidence import Evidence, most
from tinygrad_qkv.diagnosis.zero_makers import SHAPES, Maker, softmax_reason, why_zero_gradient

SMALL = 1e-6  # of the largest gradient on the way: below it a softmax is asked whether it lets anything through
VANISHED = 1e-10
TOWARDS_SCORES = SHAPES | {"matmul", "mul", "div", "add", "where", "tanh", "cat", "masked_scores"}  # after W_Q's own
DEAD = 0.9  # of a layer's units: from there it is a fault


class Finding(NamedTuple):
    """One thing that there is to say about one parameter.

    `reason` is a short key, such as "detached"; `severity` is "fault" or "harmless"; `numbers` what was measured.
    """

    parameter: str
    reason: str
    severity: str
    words: str
    numbers: dict[str, float]
    advice: str


def _fault(name: str, reason: str, words: str, advice: str = "", **numbers: float) -> list[Finding]:
    return [Finding(name, reason, "fault", words, numbers, advice)]


def frozen(e: Evidence, name: str) -> list[Finding]:
    """requires_grad is False."""
    if e.parameters[name].requires_grad:
        return []
    return _fault(
        name,
        "requires_grad False",
        "This parameter does not require grad, so no op on it is recorded.",
        "Set p.requires_grad = True before the forward pass, unless it is meant to stay as it is.",
    )


def cut_off(e: Evidence, name: str) -> list[Finding]:
    """The loss depends on it through detach() or no_grad() alone."""
    if name in e.gradients:
        return []
    cut = e.cut_before(_node(e, name))
    if cut is None:
        return []
    at = f" at {cut.line}" if cut.line else ""
    if cut.op == "detach":
        words = f"The loss depends on it through detach(){at} alone, and no gradient passes that."
        return _fault(name, "detached", words, "Take detach() away, or let another way lead to the loss.")
    words = f"The loss depends on it through op '{cut.op}'{at} alone, which ran under no_grad()."
    return _fault(name, "no_grad", words, "Run the forward pass of training outside of no_grad().")


def unused(e: Evidence, name: str) -> list[Finding]:
    """The loss does not depend on it."""
    if name in e.gradients:
        return []
    node = _node(e, name)
    user = next((n for n in e.tape if node in n.parents), None)
    if user is None and not any(node in made.parents for made in e.made.values()):
        words = "No op that the loss depends on uses this parameter."
        return _fault(name, "unused", words, "Is its layer called in forward, and its result returned?")
    where = f"{e.where(user)} uses it" if user is not None else "It is used"
    words = (
        f"{where}, but the loss does not depend on the result: that is dropped, or left the graph as plain values "
        "(.numpy(), .data, argmax, a comparison)."
    )
    return _fault(name, "unused", words, "Follow the result from there to the loss.")


def not_finite(e: Evidence, name: str) -> list[Finding]:
    """Its gradient is NaN or inf."""
    g = e.gradients.get(name)
    if g is None or np.isfinite(g).all():
        return []
    bad = int(np.sum(~np.isfinite(g)))
    words = f"{bad} of {g.size} numbers of its gradient are NaN or inf."
    advice = "Run the same step inside `with detect_anomaly():`, which names the op that made the first one."
    return _fault(name, "not finite", words, advice, elements=bad)


def key_bias(e: Evidence, name: str) -> list[Finding]:
    """A sum that cancels: a bias of keys moves all scores of a row alike, and softmax does not see that."""
    g, node = e.gradients.get(name), _node(e, name)
    if g is None or g.ndim != 1:
        return []
    for child, _ in e.uses.get(node, ()):
        arrived = e.g.get(child)
        if arrived is None or child.op not in ("affine", "add") or arrived.ndim < 2 or not np.any(arrived):
            return []
        total = float(np.max(np.sum(np.abs(arrived), axis=tuple(range(arrived.ndim - 1))), initial=0.0))
        if most(g) > 64 * np.finfo(g.dtype).eps * total or not _leads_to_keys(e, child):
            return []
        numbers = {"gradient": most(g), "summed over": total}
        words = (
            f"This is a bias of keys: it moves all scores of a row alike, and softmax does not see that, so its "
            f"gradient is 0 for every input (here {most(g):.1e} is left of a sum of {total:.1e}, by rounding)."
        )
        return [Finding(name, "key bias", "harmless", words, numbers, "Nothing to do; bias=False saves it.")]
    return []


def _leads_to_keys(e: Evidence, node: Node) -> bool:
    for child, i in e.after(node):
        if child.op == "attention":
            return i == 1
        if child.op in ("matmul", "masked_scores") and i == 1:
            return any(later.op == "softmax" for later, _ in e.after(child))
        if child.op in ("softmax", "affine"):
            return False
    return False


def zero(e: Evidence, name: str) -> list[Finding]:
    """Its gradient is exactly 0: some op has let nothing through."""
    g = e.gradients.get(name)
    if g is None or np.any(g) or not g.size:
        return []
    makers = [maker for child, i in e.killers(_node(e, name)) for maker in why_zero_gradient(e, child, i)]
    return _told(e, name, makers) or _fault(
        name, "zero", "Its gradient is exactly 0: the contributions cancel, or a hook has taken them away.", ""
    )


def _told(e: Evidence, name: str, makers: list[Maker]) -> list[Finding]:
    """The gravest of the reasons why a gradient is 0, or nearly."""
    if not makers:
        return []
    maker = min(makers, key=lambda m: m.harmless)
    return [
        Finding(name, maker.reason, "harmless" if maker.harmless else "fault", maker.words, maker.numbers, maker.advice)
    ]


def saturated(e: Evidence, name: str) -> list[Finding]:
    """It makes the scores of a softmax that is saturated; what still arrives comes from the few rows that are not."""
    if name not in e.gradients:
        return []
    for child, i in e.after(_node(e, name), through=TOWARDS_SCORES):
        if child.op == "softmax" or (child.op == "attention" and i < 2):
            makers = [maker for maker in softmax_reason(e, child) if maker.reason == "saturated softmax"]
            if makers:
                return _told(e, name, makers)
    return []


def hardly_any(e: Evidence, name: str) -> list[Finding]:
    """Its gradient is nearly 0 beside the others: a softmax on the way, or many steps that shrink it."""
    g = e.gradients.get(name)
    if g is None or not np.any(g) or most(g) > SMALL * e.steepest:
        return []
    for child, i in e.after(_node(e, name)):
        if child.op in ("softmax", "attention") and (child.op == "softmax" or i < 2):
            makers = softmax_reason(e, child)
            if makers and (most(g) <= SMALL * e.largest or makers[0].reason == "constant branch"):
                return _told(e, name, makers)
    if most(g) > VANISHED * e.largest:
        return []
    words = (
        f"The largest number of its gradient is {most(g):.1e}, that of the model {e.largest:.1e}: it has vanished on "
        "its way."
    )
    advice = "Look for many saturated activations in a row, tiny factors, or weights that start too small."
    return _fault(name, "vanished", words, advice, largest=most(g))


def dead_units(e: Evidence, name: str) -> list[Finding]:
    """Units of a ReLU that this parameter feeds and that are never positive."""
    findings = []
    for child, _ in e.uses.get(_node(e, name), ()):
        through = e.uses.get(child, ()) if child.op == "swapaxes" else ()
        for n in (child, *(c for c, _ in through)):
            for relu, _ in e.uses.get(n, ()) if n.op in ("affine", "add", "matmul") else ():
                y = e.value(relu) if relu.op == "relu" else None
                if y is None or not y.ndim:
                    continue
                dead = float(np.mean(~(y > 0).any(axis=tuple(range(y.ndim - 1)))))
                if 0 < dead < 1:
                    words = f"{dead:.0%} of the units of {e.where(relu)} are 0 for every input of this batch."
                    severity = "fault" if dead >= DEAD else "harmless"
                    advice = "Lower the learning rate, start biases at 0, or use gelu." if dead >= DEAD else ""
                    findings.append(Finding(name, "dead relu", severity, words, {"fraction": dead}, advice))
    return findings


def unused_rows(e: Evidence, name: str) -> list[Finding]:
    """Rows of an embedding that this batch does not name."""
    g = e.gradients.get(name)
    users = {child.op for child, _ in e.uses.get(_node(e, name), ())}
    if g is None or users != {"embedding"} or not np.any(g):
        return []
    idle = int(np.sum(~g.any(axis=1)))
    words = f"{idle} of {len(g)} rows get no gradient, because no id of this batch names them."
    return [Finding(name, "unused rows", "harmless", words, {"rows": idle}, "")] if idle else []


def _node(e: Evidence, name: str) -> Node:
    node = e.parameters[name]._node
    assert node is not None, "every parameter has a node by now"
    return node


Check = Callable[[Evidence, str], list[Finding]]
# Of the reasons a parameter is told the first that holds, of the facts all.
REASONS: list[Check] = [frozen, cut_off, unused, not_finite, key_bias, zero, saturated, hardly_any]
FACTS: list[Check] = [dead_units, unused_rows]
