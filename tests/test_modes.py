"""Grad mode and recording: right across exceptions, generators, threads and async tasks."""

import asyncio
import threading

import pytest

from tinygrad_qkv import Tensor, enable_grad, no_grad, recording
from tinygrad_qkv.modes import grad_mode, switched
from tinygrad_qkv.observers import observers


@pytest.fixture
def x():
    return Tensor([1.0], requires_grad=True)


def records(x):
    return (x * 2.0).requires_grad


def test_no_grad_and_enable_grad_nest(x):
    with no_grad():
        assert not records(x)
        with enable_grad():
            assert records(x)
        assert not records(x)
    assert records(x)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_exception_restores_the_mode(x, depth):
    def fall(n):
        with no_grad():
            if n == 1:
                raise KeyError("boom")
            fall(n - 1)

    with pytest.raises(KeyError):
        fall(depth)
    assert records(x)


def test_one_object_may_be_entered_twice(x):
    quiet = no_grad()
    with quiet:
        with quiet:
            assert not records(x)
        assert not records(x)
    assert records(x)


def test_a_decorated_function_also_when_it_recurses_or_raises(x):
    @no_grad()
    def count(n):
        return count(n - 1) if n else records(x)

    @no_grad()
    def fail():
        raise ValueError

    assert count(3) is False and records(x)
    with pytest.raises(ValueError):
        fail()
    assert records(x)
    assert count.__name__ == "count"
    with pytest.raises(TypeError, match="decorates a function"):
        no_grad()(3)


def test_a_decorator_without_brackets_and_one_on_a_class(x):
    @no_grad
    def quiet():
        return records(x)

    assert quiet() is False and quiet.__name__ == "quiet" and records(x)
    with pytest.raises(TypeError, match="got the class Model"):

        @no_grad()
        class Model:
            pass


def test_a_decorated_generator_is_switched_at_each_resume(x):
    log = []

    @no_grad()
    def items():
        try:
            while True:
                got = yield records(x)
                log.append((got, records(x)))
        except ValueError:
            yield "caught", records(x)
        finally:
            log.append(("closed", records(x)))

    generator = items()
    assert next(generator) is False
    assert records(x)  # the caller's own mode, between two items
    assert generator.send("hello") is False
    assert log == [("hello", False)] and records(x)
    assert generator.throw(ValueError) == ("caught", False)
    generator.close()
    assert log[-1] == ("closed", False) and records(x)


def test_a_decorated_generator_passes_its_return_value_on(x):
    @no_grad()
    def inner():
        yield records(x)
        return "done"

    def outer():
        return (yield from inner())

    generator = outer()
    assert next(generator) is False
    with pytest.raises(StopIteration, match="done"):
        next(generator)


def test_a_decorated_coroutine_and_its_neighbours(x):
    @no_grad()
    async def quiet():
        first = records(x)
        await asyncio.sleep(0)
        return first, records(x)

    async def loud():
        await asyncio.sleep(0)
        return records(x)

    async def main():
        return await asyncio.gather(quiet(), loud(), quiet())

    assert asyncio.run(main()) == [(False, False), True, (False, False)]
    assert records(x)


def test_a_decorated_async_generator_is_switched_at_each_resume(x):
    log = []

    @no_grad()
    async def items():
        try:
            while True:
                got = yield records(x)
                await asyncio.sleep(0)
                log.append((got, records(x)))
        except ValueError:
            yield "caught", records(x)
        finally:
            log.append(("closed", records(x)))

    async def main():
        generator = items()
        assert await anext(generator) is False
        assert records(x)  # the caller's own mode, between two items
        assert await generator.asend("hello") is False
        assert log == [("hello", False)] and records(x)
        assert await generator.athrow(ValueError()) == ("caught", False)
        await generator.aclose()
        assert log[-1] == ("closed", False) and records(x)

    @no_grad()
    async def two():
        yield records(x)
        yield records(x)

    async def count():
        return [(inside, records(x)) async for inside in two()]

    asyncio.run(main())
    assert asyncio.run(count()) == [(False, True)] * 2 and records(x)


def test_one_threads_mode_is_not_anothers(x):
    inside, done, seen = threading.Event(), threading.Event(), []

    def quiet():
        with no_grad(), recording():
            inside.set()
            done.wait(20)
            seen.append(records(x))

    thread = threading.Thread(target=quiet)
    thread.start()
    assert inside.wait(20)
    here = records(x), observers.get()
    done.set()
    thread.join(20)
    assert here == (True, ()) and seen == [False]


def test_modes_are_restored_by_value_in_another_context(x):
    """A generator that is closed in another context than it was started in: a token would raise there."""

    def leaky():
        with switched(grad_mode, False):
            yield

    generator = leaky()
    asyncio.run(asyncio.sleep(0))
    threading.Thread(target=lambda: next(generator)).start()
    generator.close()
    assert records(x)


def test_recording_is_off_by_default_and_ends(x):
    assert not observers.get()
    with recording():
        assert observers.get() and (x * 2.0)._node.value is not None
    assert (x * 2.0)._node.value is None


def test_one_object_is_shared_by_threads(x):
    quiet, inside, leave, seen = no_grad(), threading.Barrier(3), threading.Barrier(3), {}

    def work(name, first):
        with quiet:
            inside.wait(20)
            before = records(x)
            if not first:
                leave.wait(20)  # goes on after the other has left
        seen[name] = before, records(x)
        if first:
            leave.wait(20)

    threads = [threading.Thread(target=work, args=(i, i == 0)) for i in range(2)]
    for thread in threads:
        thread.start()
    inside.wait(20)
    assert records(x)
    leave.wait(20)
    for thread in threads:
        thread.join(20)
    assert seen == {0: (False, True), 1: (False, True)} and records(x)


def test_one_object_is_shared_by_interleaved_tasks(x):
    quiet, loud = no_grad(), enable_grad()

    async def work(mode, steps):
        found = []
        for _ in range(steps):
            with mode:
                found.append(records(x))
                await asyncio.sleep(0)
                found.append(records(x))
            found.append(records(x))
            await asyncio.sleep(0)
        return found

    async def main():
        with quiet:  # the tasks inherit it
            return await asyncio.gather(work(quiet, 3), work(loud, 2), work(quiet, 1))

    off, on = [False, False, False], [True, True, False]
    assert asyncio.run(main()) == [off * 3, on * 2, off]
    assert records(x)


def test_switches_that_end_in_another_order_than_they_began(x):
    """Two suspended generators that end in turn: the second must not set the first one's mode again."""

    def leaky(mode):
        with mode:
            yield

    first, second = leaky(no_grad()), leaky(enable_grad())
    next(first)
    next(second)
    assert records(x)
    first.close()
    assert records(x)
    second.close()
    assert records(x)
    first, second = leaky(no_grad()), leaky(no_grad())
    next(first)
    next(second)
    first.close()
    assert not records(x)  # the second is still on
    second.close()
    assert records(x)
    one, other = recording(), no_grad()
    one.__enter__()
    other.__enter__()
    one.__exit__()
    assert not observers.get() and not records(x)
    other.__exit__()
    assert records(x)


def test_a_generator_that_is_closed_in_another_thread_changes_nothing_there(x):
    def leaky():
        with no_grad():
            yield

    generator, seen = leaky(), []

    def close():
        with enable_grad():
            generator.close()
            seen.append(records(x))
        seen.append(records(x))

    for work in (lambda: next(generator), close):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(20)
    assert seen == [True, True] and records(x)


def test_an_exception_thrown_into_a_task_restores_its_mode(x):
    async def wait():
        try:
            with no_grad():
                await asyncio.sleep(20)
        finally:
            seen.append(records(x))

    async def main():
        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    seen = []
    asyncio.run(main())
    assert seen == [True]
