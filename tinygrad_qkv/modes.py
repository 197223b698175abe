"""Switches that hold for the running thread or task only: grad mode, who looks on, and the module being called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

grad_mode: ContextVar[bool] = ContextVar("grad_mode", default=True)


class Frame(NamedTuple):
    """One module call: the module's path in its model, its class, the call around it, and the number of the call."""

    path: str
    kind: str
    parent: Frame | None
    number: int


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


# The switches that are on, with the values that they set back, one stack for each thread and task: the same object may
# be entered in several at once.
_entered: ContextVar[tuple[tuple[Mode, Any], ...]] = ContextVar("entered_modes", default=())


class Mode:
    """A switch that is used as `with mode():`, or as `@mode()` or `@mode` on a function, generator or coroutine.

    A subclass names its context variable, and says what that holds inside, given what it held before.
    """

    variable: ContextVar[Any]

    def __new__(cls, function: Any = None) -> Any:
        """The switch; `@mode` without brackets gives the decorated function itself."""
        return object.__new__(cls) if function is None else cls()(function)

    def inside(self, former: Any) -> Any:
        """What the variable holds while the switch is on."""
        raise NotImplementedError

    def again(self) -> Mode:
        """Another switch like this one, for one call of a decorated function."""
        return type(self)()

    def __enter__(self) -> Any:
        former = self.variable.get()
        self.variable.set(self.inside(former))
        _entered.set((*_entered.get(), (self, former)))

    def __exit__(self, *exc: object) -> None:
        """Set the former value again; in a context that never entered, where a generator may be closed, nothing.

        Switches that were entered later and are still on, as when two generators end in turn, go on as if this one
        had never been.
        """
        stack = _entered.get()
        last = next((i for i in reversed(range(len(stack))) if stack[i][0] is self), None)
        if last is None:
            return
        value = stack[last][1]
        later: list[tuple[Mode, Any]] = []
        for mode, former in stack[last + 1 :]:
            if mode.variable is self.variable:
                later.append((mode, value))
                value = mode.inside(value)
            else:
                later.append((mode, former))
        self.variable.set(value)
        _entered.set((*stack[:last], *later))

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
        return functools.wraps(function)(wrap(function, self.again))


def _wrap_function(function: Any, mode: Callable[[], Mode]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        with mode():
            return function(*args, **kwargs)

    return call


def _wrap_coroutine(function: Any, mode: Callable[[], Mode]) -> Any:
    async def call(*args: Any, **kwargs: Any) -> Any:
        with mode():
            return await function(*args, **kwargs)

    return call


def _wrap_generator(function: Any, mode: Callable[[], Mode]) -> Any:
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


def _wrap_async_generator(function: Any, mode: Callable[[], Mode]) -> Any:
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


class no_grad(Mode):  # noqa: N801, named like the function it replaces
    """Nothing is recorded inside: `with no_grad():`, or `@no_grad()` on a function.

    It holds for this thread and this async task only, and ends with an exception too. A decorated generator is
    switched at each resume. NOTE: `with no_grad():` around a `yield` of your own leaks to the caller until the
    generator goes on; decorate the generator instead.
    """

    variable = grad_mode

    def inside(self, former: bool) -> bool:
        return False


class enable_grad(Mode):  # noqa: N801
    """Recording is on inside, also within `no_grad()`."""

    variable = grad_mode

    def inside(self, former: bool) -> bool:
        return True
