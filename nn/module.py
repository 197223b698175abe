"""Parameter and Module: a model is an object whose attributes are found by walking, without registration."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Self

import numpy as np

from tinygrad_qkv.hints import NamesOfPyTorchModules
from tinygrad_qkv.hooks import HookHandle
from tinygrad_qkv.memory import tick
from tinygrad_qkv.modes import Frame, module_frame
from tinygrad_qkv.nn.module_hooks import ModuleHooks
from tinygrad_qkv.observers import observers
from tinygrad_qkv.tensor import Tensor

# The module whose `forward` is running in this thread or task; `module_frame` holds its path, for the graph to keep.
_calling: ContextVar[Module | None] = ContextVar("calling_module", default=None)


class Parameter(Tensor):
    """A leaf tensor that a model learns: the data is copied, and `requires_grad` defaults to True."""

    __slots__ = ()

    def __init__(self, data: Any, dtype: Any = None, requires_grad: bool = True):
        super().__init__(data, dtype, requires_grad)

    def write(self, values: np.ndarray) -> None:
        """Copy `values` (same shape, broadcast or not) into this parameter's memory, as a write that backward sees."""
        array = self.data if self.data.flags.writeable else self.data.copy()
        np.copyto(array, values)
        self.data = array


class Module(NamesOfPyTorchModules):
    """Something that holds parameters and other modules, and computes with them in `forward`.

    Every attribute that is a Parameter or a Module belongs to it, and so do those inside lists, tuples and dicts;
    they are looked up when they are asked for, so assigning, replacing and deleting attributes just works. A name is
    the way to a parameter: `blocks.3.attn.W_Q`. A parameter that stands in two places (tied weights) is listed once,
    under the first name. Constants, such as a table of positions, are plain arrays or Tensors and no state.

    A subclass sets attributes in `__init__` and defines `forward`; `super().__init__()` is not needed.
    """

    training: bool = True
    _hooks: ModuleHooks | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What a call computes; every subclass defines it."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward(); a call of a module runs its forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run `forward`, with every op in it recorded under this module's path.

        The outermost call has the path "" and names all parameters by their paths.
        """
        caller, frame = _calling.get(), module_frame.get()
        if caller is None:
            path = ""
            for name, parameter in self.named_parameters():
                parameter.name = name
        else:
            path = _path_below(caller, self, frame.path if frame is not None else "")
        _calling.set(self)
        inside = Frame(path, type(self).__name__, frame, tick())
        module_frame.set(inside)
        watching = observers.get()
        try:
            for observer in watching:
                observer.module_entered(inside)
            return self.forward(*args, **kwargs) if self._hooks is None else self._hooks.call(self, args, kwargs)
        finally:
            _calling.set(caller)
            module_frame.set(frame)
            for observer in watching:
                observer.module_left(inside)

    # ---- hooks

    def register_forward_pre_hook(self, hook: Callable[[Module, tuple], Any]) -> HookHandle:
        """Call `hook(module, args)` before each forward.

        It returns None, or the positional arguments that go in instead: a tuple, or the only one. The handle takes the
        hook away: `handle.remove()`, or as a `with` block. Hooks are no state: copies and files of a module have none.
        """
        return HookHandle(self._own_hooks().before, hook)

    def register_forward_hook(self, hook: Callable[[Module, tuple, Any], Any]) -> HookHandle:
        """Call `hook(module, args, output)` after each forward; it returns None, or the output that goes on instead.

        A replaced Tensor keeps its shape, a tuple its length.
        """
        return HookHandle(self._own_hooks().after, hook)

    def register_backward_hook(self, hook: Callable[[Module, tuple, tuple], Any]) -> HookHandle:
        """Call `hook(module, grad_inputs, grad_outputs)` when backward has passed a call of this module.

        `grad_inputs` has an entry for each argument, keywords last, and holds what came through this call alone;
        `grad_outputs` has one for each Tensor of the output. None stands where no gradient arrives. The hook returns
        None, or new grad_inputs: a tuple, or the only one. It must be there before the forward call that it is to see.
        """
        return HookHandle(self._own_hooks().backward, hook)

    def _own_hooks(self) -> ModuleHooks:
        return vars(self).setdefault("_hooks", ModuleHooks())

    def __getstate__(self) -> dict[str, Any]:
        """What `copy.deepcopy` and `pickle` take along: everything but the hooks."""
        return {name: value for name, value in vars(self).items() if name != "_hooks"}

    # ---- the tree

    def named_members(self) -> Iterator[tuple[str, Parameter | Module]]:
        """The parameters and modules directly below this one, with the names of their places: `blocks.3`."""
        for name, value in vars(self).items():
            if isinstance(value, (Parameter, Module)):
                yield name, value
            elif isinstance(value, (list, tuple, dict)):
                yield from _members_inside(name, value)

    def named_modules(self) -> Iterator[tuple[str, Module]]:
        """Every module with its path, each once, this one first under the path ""."""
        seen: set[int] = set()
        stack: list[tuple[str, Module]] = [("", self)]
        while stack:
            path, module = stack.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            yield path, module
            below = [(_join(path, name), m) for name, m in module.named_members() if isinstance(m, Module)]
            stack.extend(reversed(below))

    def modules(self) -> Iterator[Module]:
        """Every module of the tree, each once, this one first."""
        return (module for _, module in self.named_modules())

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Every parameter with its path, each once: a tied one under its first name."""
        seen: set[int] = set()
        for name, parameter in self._named_places():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter

    def parameters(self) -> Iterator[Parameter]:
        """Every parameter, each once."""
        return (parameter for _, parameter in self.named_parameters())

    def tied_names(self) -> dict[str, str]:
        """The further names of tied parameters, each with the first name that stands for it."""
        first: dict[int, str] = {}
        for name, parameter in self._named_places():
            first.setdefault(id(parameter), name)
        return {name: first[id(p)] for name, p in self._named_places() if first[id(p)] != name}

    def _named_places(self) -> list[tuple[str, Parameter]]:
        """Every place of a parameter with its path; a tied one comes several times, a module in two places too."""
        places: list[tuple[str, Parameter]] = []
        above = {id(self)}  # a child that refers to its parent must not go round for ever
        stack: list[tuple[str, Module, Iterator]] = [("", self, self.named_members())]
        while stack:
            prefix, module, members = stack[-1]
            for name, member in members:
                if isinstance(member, Parameter):
                    places.append((prefix + name, member))
                elif id(member) not in above:
                    above.add(id(member))
                    stack.append((f"{prefix}{name}.", member, member.named_members()))
                    break
            else:
                above.discard(id(module))
                stack.pop()
        return places

    # ---- modes

    def train(self, mode: bool = True) -> Self:
        """Training mode for the whole tree: dropout is on. Returns the module."""
        for module in self.modules():
            module.training = bool(mode)
        return self

    def eval(self) -> Self:
        """Evaluation mode for the whole tree: dropout is off. Returns the module."""
        return self.train(False)

    def zero_grad(self) -> None:
        """Forget all gradients: every parameter's `.grad` is None."""
        for parameter in self.parameters():
            parameter.zero_grad()

    def astype(self, dtype: Any) -> Self:
        """Convert every parameter to another float dtype, in place: they stay the same objects, their gradients go."""
        if np.dtype(dtype).char not in "fd":
            raise TypeError(f"parameters are float32 or float64, got {np.dtype(dtype)}")
        for parameter in self.parameters():
            requires_grad = parameter.requires_grad
            Parameter.__init__(parameter, parameter.data, dtype, requires_grad)
        return self

    # ---- state

    def state_dict(self) -> dict[str, Tensor]:
        """All parameters by name, as copies: later training does not change them."""
        state: dict[str, Tensor] = {}
        for name, parameter in self.named_parameters():
            if name in state:
                raise ValueError(f"two parameters have the name {name!r}; rename an attribute or a dict key")
            state[name] = Tensor(parameter)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy the values of `state` (name -> Tensor or array) into the parameters, all of them or none.

        The names must be exactly those of `state_dict()`; a tied parameter may come under any or all of its names.
        Shapes must agree exactly. A dtype may only widen without loss (float16 to float32 to float64). Otherwise
        one ValueError lists everything that is missing, unexpected or does not fit, and nothing has changed.
        The parameters stay the same objects, so an optimiser made before goes on with the new values.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"load_state_dict takes a dict of names and tensors, got {type(state).__name__}")
        tied, parameters = self.tied_names(), dict(self.named_parameters())
        values: dict[str, np.ndarray] = {}
        unexpected, misfits = [], []
        for key, given in state.items():
            name = tied.get(key, key)
            if name not in parameters:
                unexpected.append(str(key))
                continue
            array = np.array(given if isinstance(given, (Tensor, np.ndarray, np.generic)) else Tensor(given))
            misfit = _misfit(parameters[name], array)
            if misfit:
                misfits.append(f"{key}: {misfit}")
            elif name in values and not np.array_equal(values[name], array, equal_nan=True):
                misfits.append(f"{key}: is tied to another name of {name}, but the two values differ")
            values[name] = array
        missing = [name for name in parameters if name not in values]
        _report_mismatch(type(self).__name__, missing, unexpected, misfits)
        for name, parameter in parameters.items():
            parameter.write(values[name])

    # ---- display

    def describe(self) -> str:
        """The settings that `repr` shows in brackets, e.g. "p=0.1"; empty by default."""
        return ""

    def __repr__(self) -> str:
        """The tree, one line a module: its place, class and settings, its own parameters with shapes, and the count."""
        lines = []
        for path, module in self.named_modules():
            own = [f"{name} {m.shape}" for name, m in module.named_members() if isinstance(m, Parameter)]
            place, depth = (path.rpartition(".")[2] + ": ", path.count(".") + 1) if path else ("", 0)
            about = f"({module.describe()})" if module.describe() else ""
            count = sum(p.size for p in module.parameters())
            parts = [f"{place}{type(module).__name__}{about}", *([", ".join(own)] if own else [])]
            lines.append("  " * depth + "  ".join([*parts, f"[{count:,}]"]))
        return "\n".join(lines)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _members_inside(name: str, value: list | tuple | dict) -> Iterator[tuple[str, Parameter | Module]]:
    """The parameters and modules in a container, and in containers inside it, by index or key."""
    kinds = set(map(type, value.values() if isinstance(value, dict) else value))
    if not any(issubclass(kind, (Parameter, Module, list, tuple, dict)) for kind in kinds):
        return  # quick, because a long list of numbers or words may hang on a model that is called often
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(item, (Parameter, Module)):
            yield f"{name}.{key}", item
        elif isinstance(item, (list, tuple, dict)):
            yield from _members_inside(f"{name}.{key}", item)


def _path_below(caller: Module, module: Module, path: str) -> str:
    """The path of `module`, found breadth first below the module that calls it; its class where it hangs nowhere."""
    if module is caller:
        return path
    for name, value in vars(caller).items():  # nearly always a plain attribute
        if value is module:
            return _join(path, name)
        if isinstance(value, (list, tuple, dict)):
            break
    seen = {id(caller)}
    level = [(path, caller)]
    while level:
        below = []
        for above, parent in level:
            for name, member in parent.named_members():
                if member is module:
                    return _join(above, name)
                if isinstance(member, Module) and id(member) not in seen:
                    seen.add(id(member))
                    below.append((_join(above, name), member))
        level = below
    return _join(path, type(module).__name__)


def _misfit(parameter: Parameter, array: np.ndarray) -> str:
    """Why an array cannot be loaded into a parameter; empty if it can."""
    if array.shape != parameter.shape:
        return f"shape {array.shape}, expected {parameter.shape}"
    if array.dtype.kind != "f" or not np.can_cast(array.dtype, parameter.dtype):
        return f"dtype {array.dtype}, expected {parameter.dtype}; convert it with astype"
    return ""


def _report_mismatch(kind: str, missing: list[str], unexpected: list[str], misfits: list[str]) -> None:
    lines = [
        *([f"  missing: {', '.join(missing)}"] if missing else []),
        *([f"  unexpected: {', '.join(unexpected)}"] if unexpected else []),
        *([f"  does not fit: {misfit}" for misfit in misfits]),
    ]
    if lines:
        text = "\n".join(itertools.chain([f"this state does not fit {kind}; nothing was changed"], lines))
        raise ValueError(text)
