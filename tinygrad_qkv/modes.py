"""Switches that hold for the running thread or task only: grad mode, recording, and the module being called."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any, NamedTuple

grad_mode: ContextVar[bool] = ContextVar("grad_mode", default=True)
recording_mode: ContextVar[bool] = ContextVar("recording_mode", default=False)


class Frame(NamedTuple):
    """One module call: the module's path in its model, its class, the call around it, and the number of the call."""

    path: str
    kind: str
    parent: Frame | None
    number: int


class Line(NamedTuple):
    """The user's source line that called an op."""

    file: str
    number: int

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


module_frame: ContextVar[Frame | None] = ContextVar("module_frame", default=None)


@contextmanager
def switched(variable: ContextVar, value: Any) -> Iterator[None]:
    """Set a context variable and set the former value again at the end, also after an exception.

    By value and not by token: a token is refused in another context, where a generator may be resumed.
    """
    former = variable.get()
    variable.set(value)
    try:
        yield
    finally:
        variable.set(former)


class _Mode:
    """A switch that is used as `with mode():`, or as `@mode()` or `@mode` on a function, generator or coroutine."""

    variable: ContextVar[bool]
    value: bool

    def __new__(cls, function: Any = None) -> Any:
        """The switch; `@mode` without brackets gives the decorated function itself."""
        return object.__new__(cls) if function is None else cls()(function)

    def __init__(self) -> None:
        self._former: list[bool] = []

    def __enter__(self) -> None:
        self._former.append(self.variable.get())
        self.variable.set(self.value)

    def __exit__(self, *exc: object) -> None:
        self.variable.set(self._former.pop())

    def __call__(self, function: Any) -> Any:
        if not callable(function) or isinstance(function, type):
            what = f"the class {function.__name__}" if isinstance(function, type) else type(function).__name__
            raise TypeError(f"@{type(self).__name__}() decorates a function or a method, got {what}")
        kinds = (
            (inspect.isgeneratorfunction, _wrap_generator),
            (inspect.iscoroutinefunction, _wrap_coroutine),
            (inspect.isasyncgenfunction, _wrap_async_generator),
        )
        wrap = next((wrap for is_kind, wrap in kinds if is_kind(function)), _wrap_function)
        return functools.wraps(function)(wrap(function, type(self)))


def _wrap_function(function: Any, mode: type[_Mode]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        with mode():
            return function(*args, **kwargs)

    return call


def _wrap_coroutine(function: Any, mode: type[_Mode]) -> Any:
    async def call(*args: Any, **kwargs: Any) -> Any:
        with mode():
            return await function(*args, **kwargs)

    return call


def _wrap_generator(function: Any, mode: type[_Mode]) -> Any:
    """Switch at each resume, so that the code between two items runs in the caller's own mode."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with mode():
            generator = function(*args, **kwargs)
            resume, message = generator.send, None
        while True:
            try:
                with mode():
                    item = resume(message)
            except StopIteration as stop:
                return stop.value
            try:
                resume, message = generator.send, (yield item)
            except GeneratorExit:
                with mode():
                    generator.close()
                raise
            except BaseException as error:
                resume, message = generator.throw, error

    return call


def _wrap_async_generator(function: Any, mode: type[_Mode]) -> Any:
    """The same for `async def` with `yield`, which has no return value."""

    async def call(*args: Any, **kwargs: Any) -> Any:
        generator = function(*args, **kwargs)
        resume, message = generator.asend, None
        while True:
            try:
                with mode():
                    item = await resume(message)
            except StopAsyncIteration:
                return
            try:
                resume, message = generator.asend, (yield item)
            except GeneratorExit:
                with mode():
                    await generator.aclose()
                raise
            except BaseException as error:
                resume, message = generator.athrow, error

    return call


class no_grad(_Mode):  # noqa: N801, named like the function it replaces
    """Nothing is recorded inside: `with no_grad():`, or `@no_grad()` on a function.

    It holds for this thread and this async task only, and ends with an exception too. A decorated generator is
    switched at each resume. NOTE: `with no_grad():` around a `yield` of your own leaks to the caller until the
    generator goes on; decorate the generator instead.
    """

    variable, value = grad_mode, False


class enable_grad(_Mode):  # noqa: N801
    """Recording is on inside, also within `no_grad()`."""

    variable, value = grad_mode, True


class recording(_Mode):  # noqa: N801
    """Every node recorded inside also keeps its value, its gradient and the user's source line.

    Drawings of values and gradients read this record. The values are copies, so the memory of a forward pass about
    doubles; off, it costs nothing.
    """

    variable, value = recording_mode, True


def user_line() -> Line | None:
    """The innermost line of the call stack that lies outside this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("tinygrad_qkv."):
        frame = frame.f_back
    return Line(frame.f_code.co_filename, frame.f_lineno) if frame is not None else None
