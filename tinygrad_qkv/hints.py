"""What to say of a name that PyTorch or NumPy has and this library calls otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING


def missing(owner: str, name: str, elsewhere: Mapping[str, str]) -> AttributeError:
    """The error for an attribute that `owner` lacks, with what to write instead where `elsewhere` knows it."""
    hint = f"; write {elsewhere[name]}" if name in elsewhere else ""
    return AttributeError(f"{owner} has no attribute {name!r}{hint}")


class Elsewhere:
    """A name that a class does not have: asking for it raises AttributeError with what to write instead."""

    def __init__(self, instead: str):
        self.instead = instead

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, kind: type) -> None:
        raise missing(f"{kind.__name__!r} object", self.name, {self.name: self.instead})


class Hinting:
    """What has names that lead elsewhere; `dir()` leaves them out."""

    __slots__ = ()

    def __dir__(self) -> list[str]:
        known = [item for kind in type(self).__mro__ for item in vars(kind).items()]
        elsewhere = {name for name, value in known if isinstance(value, Elsewhere)}
        return [name for name in super().__dir__() if name not in elsewhere]


class NamesOfPyTorch(Hinting):
    """What PyTorch's tensors call by another name.

    One by one: a `__getattr__` for all of them would slow down every `t._data`, and so every small op by 5 %.
    """

    __slots__ = ()

    if not TYPE_CHECKING:  # a type checker would take these for attributes
        clamp = Elsewhere("t.clip(low, high)")
        contiguous = Elsewhere("nothing: every op takes any layout")
        cpu = Elsewhere("nothing: there is only the CPU")
        cuda = Elsewhere("nothing: there is only the CPU")
        device = Elsewhere("nothing: there is only the CPU")
        dim = Elsewhere("t.ndim")
        double = Elsewhere("t.astype('float64')")
        float = Elsewhere("t.astype('float32')")
        gather = Elsewhere("t.take_along_axis(indices, axis)")
        index_select = Elsewhere("t[..., indices]")
        long = Elsewhere("t.astype('int64')")
        matmul = Elsewhere("t @ other")
        mm = Elsewhere("t @ other")
        bmm = Elsewhere("t @ other")
        mul_ = Elsewhere("t *= other")
        add_ = Elsewhere("t += other")
        fill_ = Elsewhere("t[...] = value")
        zero_ = Elsewhere("t[...] = 0, or t.zero_grad() for a gradient")
        numel = Elsewhere("t.size")
        requires_grad_ = Elsewhere("t.requires_grad = True")
        to = Elsewhere("t.astype(dtype)")
        type = Elsewhere("t.astype(dtype)")


class NamesOfPyTorchModules(Hinting):
    """What PyTorch's modules call by another name."""

    if not TYPE_CHECKING:
        add_module = Elsewhere("module.name = other: attributes are found by walking")
        apply = Elsewhere("for m in module.modules(): f(m)")
        buffers = Elsewhere("plain attributes: constants are arrays or Tensors, and no state")
        children = Elsewhere("module.named_members()")
        double = Elsewhere("module.astype('float64')")
        float = Elsewhere("module.astype('float32')")
        register_buffer = Elsewhere("module.name = array: constants are plain attributes, and no state")
        register_full_backward_hook = Elsewhere("module.register_backward_hook(f)")
        register_full_backward_pre_hook = Elsewhere("module(x).register_hook(f), a hook on the output")
        register_module = Elsewhere("module.name = other: attributes are found by walking")
        register_parameter = Elsewhere("module.name = nn.Parameter(...)")
        requires_grad_ = Elsewhere("for p in module.parameters(): p.requires_grad = True")
        to = Elsewhere("module.astype(dtype); there is only the CPU")
