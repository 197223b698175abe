"""`diagnose(model, loss)`: does every parameter learn, and if not, why not."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinygrad_qkv.diagnosis.evidence import Evidence, gather
from tinygrad_qkv.diagnosis.reasons import FACTS, REASONS, Finding
from tinygrad_qkv.random import unchanged_randomness
from tinygrad_qkv.tensor import Tensor

WHOLE_WORDS: Any = {"break_long_words": False, "break_on_hyphens": False}  # a path stays on one line


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """What `diagnose` found; `print(it)` is a table and the findings in words.

    gradients  name -> the length of the parameter's gradient, None where none arrives
    findings   what there is to say, faults first; `faults` are those that keep a parameter from learning
    """

    gradients: dict[str, float | None]
    shapes: dict[str, tuple[int, ...]]
    findings: list[Finding]
    loss: float

    @property
    def faults(self) -> list[Finding]:
        """The findings that keep a parameter from learning."""
        return [finding for finding in self.findings if finding.severity == "fault"]

    def for_(self, parameter: str) -> list[Finding]:
        """What was found about one parameter."""
        if parameter not in self.gradients:
            raise KeyError(f"no parameter {parameter!r}; there are {', '.join(self.gradients)}")
        return [finding for finding in self.findings if finding.parameter == parameter]

    def __str__(self) -> str:
        width = max(map(len, ("parameter", *self.gradients)))
        shape = max(map(len, ("shape", *map(str, self.shapes.values()))))
        lines = [f"{'parameter':<{width}}  {'shape':<{shape}}  {'|gradient|':>10}  finding"]
        for name, length in self.gradients.items():
            said = ", ".join(f.reason + ("" if f.severity == "fault" else " (harmless)") for f in self.for_(name))
            number = "none" if length is None else f"{length:.3g}"
            lines.append(f"{name:<{width}}  {self.shapes[name]!s:<{shape}}  {number:>10}  {said or 'learns'}")
        learning = len(self.gradients) - len({f.parameter for f in self.faults})
        lines.append(f"{learning} of {len(self.gradients)} parameters learn; the loss is {self.loss:.4g}")
        for words, names in self._by_words().items():
            text = f"{', '.join(names)}: {words}"
            lines += ["", *textwrap.wrap(text, 78, subsequent_indent="    ", **WHOLE_WORDS)]
        return "\n".join(lines)

    __repr__ = __str__

    def _by_words(self) -> dict[str, list[str]]:
        """Each text once, with all parameters that it holds for."""
        told: dict[str, list[str]] = {}
        for f in self.findings:
            advice = f" {f.advice}" if f.advice else ""
            told.setdefault(f"{f.reason} ({f.severity}). {f.words}{advice}", []).append(f.parameter)
        return told


def diagnose(model: Any, loss: Tensor | Callable[[], Tensor], *, optimizer: Any = None) -> Diagnosis:
    """Say of every parameter of `model` whether it learns from `loss`, and if not, why not.

    `model` is a Module, or a dict of names and leaf tensors. `loss` is a function without arguments that computes the
    loss (it runs once), or a loss whose forward pass ran inside `with recording():`. With `optimizer` the findings
    tell too what it does not move. Nothing changes: no parameter, no `.grad`, no random stream of the library or of
    NumPy; what the function itself does besides, such as counting its calls, is done.

        print(diagnose(model, lambda: F.cross_entropy(model(x), y), optimizer=opt))
    """
    parameters = _parameters(model)
    if not isinstance(loss, Tensor) and not callable(loss):
        raise TypeError(f"diagnose() takes a function that computes the loss, or a Tensor, got {type(loss).__name__}")
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"diagnose() takes an optimiser of nn.optim, which has param_groups, got {type(optimizer).__name__}"
        )
    before = {name: (p.grad, None if p._node is None else p._node.value) for name, p in parameters.items()}
    try:
        with unchanged_randomness():
            evidence = gather(loss, parameters)
    finally:
        for name, (g, value) in before.items():
            parameters[name].grad = g
            if (node := parameters[name]._node) is not None:
                node.value = value
    findings = _findings(evidence, optimizer)
    lengths = {name: evidence.gradients.get(name) for name in parameters}
    return Diagnosis(
        {name: None if g is None else float(np.linalg.norm(g)) for name, g in lengths.items()},
        {name: p.shape for name, p in parameters.items()},
        sorted(findings, key=lambda finding: finding.severity != "fault"),
        float(np.sum(evidence.loss._data)),
    )


def _parameters(model: Any) -> dict[str, Tensor]:
    if isinstance(model, Mapping) and all(isinstance(p, Tensor) for p in model.values()):
        return dict(model)
    if not callable(getattr(model, "named_parameters", None)):
        raise TypeError(f"diagnose() takes a Module, or a dict of names and tensors, got {type(model).__name__}")
    return dict(model.named_parameters())


def _findings(evidence: Evidence, optimizer: Any) -> list[Finding]:
    """Of the reasons for a missing gradient the first that holds; of the facts all."""
    findings: list[Finding] = []
    for name in evidence.parameters:
        findings += next(filter(None, (reason(evidence, name) for reason in REASONS)), [])
        for fact in FACTS:
            findings += fact(evidence, name)
    return findings + (_unmoved(evidence, optimizer) if optimizer is not None else [])


def _unmoved(evidence: Evidence, optimizer: Any) -> list[Finding]:
    """Parameters that the optimiser does not hold, or holds with a learning rate of 0."""
    findings = []
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for name, p in evidence.parameters.items():
        group = groups.get(id(p))
        if group is None and p.requires_grad:
            words = "The optimiser does not hold this parameter, so no step moves it."
            advice = "Make the optimiser after all layers are there, from model.parameters()."
            findings.append(Finding(name, "not in the optimiser", "fault", words, {}, advice))
        elif group is not None and group["lr"] == 0:
            words = "The learning rate of its group is 0, so a step leaves it where it is."
            findings.append(Finding(name, "learning rate 0", "fault", words, {"lr": 0.0}, "Look at the schedule."))
    return findings
