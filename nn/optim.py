"""Optimisers: from gradients to the next values of the parameters, which they change in place.

A parameter whose gradient is None is skipped: no step, no decay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from tinygrad_qkv.kernels.adam import AdamSettings, Moving, adam_settings, adam_step
from tinygrad_qkv.memory import memory_of
from tinygrad_qkv.nn.module import Module
from tinygrad_qkv.tensor import Tensor

# What moves one parameter: its array, its gradient's, its state with "step" counted from 1, and its group.
Update = tuple[np.ndarray, np.ndarray, dict[str, Any], dict[str, Any]]


class Optimizer:
    """Parameter groups, the state of each parameter, and the loop of a step.

    `params` is an iterable of parameters, or of dicts with "params" and settings of their own; `param_groups` holds
    them with all settings filled in, to be read and changed (`opt.param_groups[0]["lr"] = 0.01`).
    A subclass checks its settings and says how the parameters move.
    """

    def __init__(self, params: Any, defaults: dict[str, Any]):
        self.defaults = defaults
        self.param_groups = _groups(params, defaults, type(self).__name__)
        for group in self.param_groups:
            self.check(group)
        self._state: list[dict[str, Any]] = [{} for _ in self._parameters()]

    def check(self, group: dict[str, Any]) -> None:
        """Raise ValueError for settings that make no sense."""
        for name in ("lr", "weight_decay"):
            _refuse_all_but_finite(type(self).__name__, name, group[name])

    def move(self, updates: list[Update]) -> None:
        """Move the arrays of parameters in place by their gradients."""
        raise NotImplementedError(f"{type(self).__name__} defines no move(); step() moves the parameters by it")

    def step(self) -> None:
        """Move every parameter that has a gradient."""
        updates, moved, states = [], [], iter(self._state)
        for group in self.param_groups:
            for parameter in group["params"]:
                state, g = next(states), parameter.grad
                if g is None:
                    continue
                if not parameter.data.flags.writeable:
                    parameter.data = parameter.data.copy()
                state["step"] = state.get("step", 0) + 1
                updates.append((parameter.data, g.data, state, group))
                moved.append(parameter)
        self.move(updates)
        for parameter in moved:
            memory_of(parameter).write()  # so that backward can refuse what it saved

    def zero_grad(self) -> None:
        """Forget the gradients of all parameters: `.grad` is None."""
        for parameter in self._parameters():
            parameter.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """A copy of everything that the next steps depend on: the settings, and each parameter's state, in order."""
        groups = []
        for group in self.param_groups:
            settings = {name: value for name, value in group.items() if name != "params"}
            groups.append({**settings, "shapes": [p.shape for p in group["params"]]})
        return {"param_groups": groups, "state": [_copied(state) for state in self._state]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy what `state_dict()` gave, so that the next steps are bit for bit those of the optimiser it came from.

        Another number of groups or parameters, other shapes or settings raise ValueError, and nothing changes.
        """
        if not isinstance(state_dict, dict) or state_dict.keys() != {"param_groups", "state"}:
            raise ValueError("an optimiser's state is the dict of param_groups and state that its state_dict() gave")
        groups, states = state_dict["param_groups"], state_dict["state"]
        theirs = [[tuple(shape) for shape in group["shapes"]] for group in groups]
        ours = [[p.shape for p in group["params"]] for group in self.param_groups]
        if theirs != ours or len(states) != len(self._state):
            raise ValueError(f"this state is for parameters of shapes {theirs}, the optimiser has {ours}")
        loaded = [{k: v for k, v in group.items() if k != "shapes"} for group in groups]
        for group, own in zip(loaded, self.param_groups, strict=True):
            if group.keys() != own.keys() - {"params"}:
                raise ValueError(
                    f"this state has the settings {sorted(group)}, {type(self).__name__} has "
                    f"{sorted(own.keys() - {'params'})}; it comes from another kind of optimiser"
                )
            self.check(group)
        copies = [_copied(state) for state in states]
        for state, p in zip(copies, self._parameters(), strict=True):
            for name, value in state.items():
                if isinstance(value, np.ndarray) and (value.shape, value.dtype) != (p.shape, p.dtype):
                    raise ValueError(
                        f"{name} of shape {value.shape} and {value.dtype} is for another parameter than one of "
                        f"shape {p.shape} and {p.dtype}"
                    )
        for group, own in zip(loaded, self.param_groups, strict=True):
            own.update(group)
        self._state = copies

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def __repr__(self) -> str:
        lines = []
        for group in self.param_groups:
            settings = ", ".join(f"{name}={value}" for name, value in group.items() if name != "params")
            lines.append(f"{type(self).__name__}({len(group['params'])} parameters, {settings})")
        return "\n".join(lines)


class SGD(Optimizer):
    """p -= lr * g, with g + weight_decay * p for g, and with momentum its running sum.

    The sum starts as g, then is momentum * sum + g; `nesterov` looks one step ahead: g + momentum * sum.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, *, momentum: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False
    ):
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": bool(nesterov)}
        )

    def check(self, group: dict[str, Any]) -> None:
        super().check(group)
        _refuse_all_but_finite("SGD", "momentum", group["momentum"])
        if group["nesterov"] and not group["momentum"]:
            raise ValueError("nesterov=True looks along the momentum; give momentum, e.g. 0.9")

    def move(self, updates: list[Update]) -> None:
        for p, g, state, group in updates:
            momentum = group["momentum"]
            if group["weight_decay"]:
                g = g + group["weight_decay"] * p
            if momentum:
                if "momentum" in state:
                    state["momentum"] *= momentum
                    state["momentum"] += g
                else:
                    state["momentum"] = np.array(g, dtype=p.dtype)
                g = g + momentum * state["momentum"] if group["nesterov"] else state["momentum"]
            p -= group["lr"] * g


class Adam(Optimizer):
    """p -= lr * m / (sqrt(v) + eps), m and v the running means of g and g^2, freed of their bias towards 0.

    `weight_decay` adds weight_decay * p to g. Source: Kingma and Ba 2015.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "betas": tuple(betas) if np.iterable(betas) else betas})

    def check(self, group: dict[str, Any]) -> None:
        super().check(group)
        betas = group["betas"]
        if not isinstance(betas, (tuple, list)) or len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"{type(self).__name__}'s betas are two numbers from 0 up to, without, 1; got {group['betas']}"
            )
        _refuse_all_but_finite(type(self).__name__, "eps", group["eps"])

    def move(self, updates: list[Update]) -> None:
        """One pass of a kernel over the arrays of all parameters of a dtype."""
        moving: dict[str, list[Moving]] = {}
        known: dict[tuple[int, int], AdamSettings] = {}  # a group's parameters mostly are at one step
        for p, g, state, group in updates:
            step = state["step"]
            if step == 1:
                state["m"], state["v"] = np.zeros_like(p), np.zeros_like(p)
            settings = known.get((id(group), step))
            if settings is None:
                settings = known[id(group), step] = self.settings(group, step)
            of_dtype = moving.setdefault(p.dtype.char, [])
            of_dtype.append(Moving(p, self.decayed(g, p, group), state["m"], state["v"], settings))
        for parameters in moving.values():
            adam_step(parameters)

    def decayed(self, g: np.ndarray, p: np.ndarray, group: dict[str, Any]) -> np.ndarray:
        """The gradient, with that of the decay where there is one."""
        decay = float(group["weight_decay"])  # a NumPy scalar would make float64 of float32
        return g + decay * p if decay else g

    def settings(self, group: dict[str, Any], step: int) -> AdamSettings:
        """The numbers of a step, for the kernel."""
        return adam_settings(lr=group["lr"], betas=group["betas"], eps=group["eps"], step=step)


class AdamW(Adam):
    """Adam with decoupled decay: p *= 1 - lr * weight_decay first, and the decay stays out of m and v.

    Source: Loshchilov and Hutter 2019.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ):
        super().__init__(params, lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def decayed(self, g: np.ndarray, p: np.ndarray, group: dict[str, Any]) -> np.ndarray:
        return g

    def settings(self, group: dict[str, Any], step: int) -> AdamSettings:
        return super().settings(group, step)._replace(shrink=1 - group["lr"] * group["weight_decay"])


def clip_grad_norm(params: Tensor | Iterable[Tensor], max_norm: float) -> float:
    """Scale all gradients so that their norm, taken together, is at most `max_norm`; returns the norm before.

    A gradient that holds NaN or inf raises ValueError with its parameter's name, and no gradient has changed.
    """
    if isinstance(params, Module):
        raise TypeError(f"clip_grad_norm takes parameters, got a {type(params).__name__}; pass model.parameters()")
    if not max_norm > 0:
        raise ValueError(f"max_norm is positive, got {max_norm}")
    max_norm = float(max_norm)  # a NumPy scalar would make float64 of float32
    parameters = [params] if isinstance(params, Tensor) else list(params)
    grads = [(i, p, p.grad) for i, p in enumerate(parameters) if p.grad is not None and p.grad.size]
    for i, p, g in grads:
        if not np.isfinite(g.data).all():
            what = f"parameter {p.name!r}" if p.name else f"parameter {i}"
            raise ValueError(f"the gradient of {what}, shape {p.shape}, holds NaN or inf; no gradient was changed")
    largest = max((float(np.abs(g.data).max()) for _, _, g in grads), default=0.0)
    if largest == 0:
        return 0.0
    norm = largest * math.sqrt(sum(float(np.sum(np.square(g.data / largest, dtype=np.float64))) for _, _, g in grads))
    if norm > max_norm:
        for _, _, g in grads:
            g.data = g.data * (max_norm / norm)
    return norm


def _refuse_all_but_finite(kind: str, name: str, value: Any) -> None:
    if not isinstance(value, (int, float, np.number)) or not 0 <= value < math.inf:
        raise ValueError(f"{kind}'s {name} is a finite number from 0 up, got {value!r}")


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {name: np.array(v) if isinstance(v, (np.ndarray, Tensor)) else v for name, v in state.items()}


def _groups(params: Any, defaults: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """The parameter groups with all settings, after every parameter was checked."""
    if isinstance(params, (Module, Tensor, dict)):
        right = {Module: "model.parameters()", Tensor: "[tensor]", dict: "[group]"}
        hint = next(text for cls, text in right.items() if isinstance(params, cls))
        raise TypeError(f"{kind} takes an iterable of parameters or groups, got a {type(params).__name__}; pass {hint}")
    items = list(params)
    given = items if items and all(isinstance(item, dict) for item in items) else [{"params": items}]
    groups, seen = [], set()
    for group in given:
        unknown = group.keys() - defaults.keys() - {"params"}
        if "params" not in group or unknown:
            wrong = f"no setting {sorted(unknown)[0]!r}" if unknown else "nothing without 'params'"
            raise ValueError(f"a group of {kind} takes {wrong}; its keys are params, {', '.join(defaults)}")
        inside = group["params"]
        members = [inside] if isinstance(inside, Tensor) else list(inside)
        if not members:
            raise ValueError(
                f"{kind} got an empty list of parameters; is an iterator used up, or a module without any? "
                "Tensors of a module count if they are nn.Parameter"
            )
        for p in members:
            _check_parameter(p, kind)
            if id(p) in seen:
                raise ValueError(f"{kind} got a parameter of shape {p.shape} twice; it would move twice a step")
            seen.add(id(p))
        groups.append({**defaults, **group, "params": members})
    return groups


def _check_parameter(p: Any, kind: str) -> None:
    if not isinstance(p, Tensor):
        hint = "; pass parameters(), not named_parameters()" if isinstance(p, tuple) else ""
        raise TypeError(f"{kind} moves Tensors, got {type(p).__name__}{hint}")
    if not p.is_leaf or not p.requires_grad:
        frozen = "does not require grad; leave it out: [p for p in model.parameters() if p.requires_grad]"
        what = frozen if p.is_leaf else "was made by an op"
        raise ValueError(f"{kind} moves leaves that require grad; a tensor of shape {p.shape} {what}")
