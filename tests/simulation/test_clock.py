"""The contract of the virtual event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from cadenza.simulation.virtual_cluster.clock import Deadlock, VirtualTimeout, run

YEAR = 365 * 24 * 3600.0


def now() -> float:
    return asyncio.get_running_loop().time()


def order_of(count: int, shuffle: int | None) -> list[int]:
    """The order in which tasks that are ready together run."""
    ran: list[int] = []

    async def note(number: int) -> None:
        ran.append(number)

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(count):
                tasks.create_task(note(number))

    run(main, shuffle=shuffle)
    return ran


def test_a_year_passes_in_no_time() -> None:
    async def main() -> float:
        await asyncio.sleep(YEAR)
        return now()

    assert run(main) == YEAR


def test_time_stands_still_while_anything_can_run() -> None:
    async def main() -> float:
        for _ in range(1000):
            await asyncio.sleep(0)
        return now()

    assert run(main) == 0.0


def test_timers_fire_in_the_order_of_their_times() -> None:
    async def main() -> list[tuple[float, float]]:
        loop = asyncio.get_running_loop()
        fired: list[tuple[float, float]] = []
        for seconds in (3.0, 1.0, 2.0, 1.5):
            loop.call_later(seconds, lambda seconds=seconds: fired.append((seconds, loop.time())))
        await asyncio.sleep(5.0)
        return fired

    assert run(main) == [(1.0, 1.0), (1.5, 1.5), (2.0, 2.0), (3.0, 3.0)]


def test_a_cancelled_timer_does_not_move_the_clock() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        loop.call_later(100.0, lambda: None).cancel()
        await asyncio.sleep(1.0)
        return now()

    assert run(main) == 1.0


def test_a_timer_is_due_however_late_it_is() -> None:
    async def main() -> float:
        await asyncio.sleep(1e15)
        await asyncio.sleep(0.3)
        return now()

    assert run(main) >= 1e15


def test_a_timeout_expires_at_its_time_and_not_before() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.0):
                await asyncio.Event().wait()
        return now()

    assert run(main) == 2.0


def test_a_deadlock_is_an_error_that_says_who_waits_for_what() -> None:
    async def philosopher(fork: asyncio.Event) -> None:
        await fork.wait()

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            for name in ("plato", "kant"):
                tasks.create_task(philosopher(asyncio.Event()), name=name)

    with pytest.raises(Deadlock) as caught:
        run(main)
    for word in ("plato", "kant", "philosopher", "Event.wait"):
        assert word in str(caught.value)


def test_a_run_that_would_take_too_long_is_an_error_that_says_who_waits() -> None:
    async def dawdle() -> None:
        await asyncio.sleep(50.0)

    with pytest.raises(VirtualTimeout, match="dawdle"):
        run(dawdle, max_time=10.0)


def test_what_ends_at_the_limit_is_in_time() -> None:
    async def main() -> float:
        await asyncio.sleep(10.0)
        return now()

    assert run(main, max_time=10.0) == 10.0


def test_without_a_seed_ready_tasks_run_first_come_first_served() -> None:
    assert order_of(20, None) == list(range(20))


def test_the_same_seed_gives_the_same_order() -> None:
    assert order_of(20, 3) == order_of(20, 3)


def test_another_seed_gives_another_order_of_the_same_tasks() -> None:
    orders = [order_of(20, seed) for seed in range(5)]
    assert len({tuple(order) for order in orders}) == 5
    assert all(sorted(order) == list(range(20)) for order in orders)


def test_shuffling_never_turns_time_around() -> None:
    async def main() -> list[float]:
        seen: list[float] = []

        async def wait(seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append(now())

        async with asyncio.TaskGroup() as tasks:
            for number in range(50):
                tasks.create_task(wait(number % 7 * 0.5))
        return seen

    for seed in range(5):
        seen = run(main, shuffle=seed)
        assert seen == sorted(seen)


@pytest.mark.parametrize("cost", [0.0, 2.5])
def test_work_off_the_loop_runs_inline_and_is_known_after_its_cost(cost: float) -> None:
    async def main() -> tuple[int, float]:
        return await asyncio.get_running_loop().run_in_executor(None, lambda a, b: a + b, 2, 3), now()

    assert run(main, executor_cost=cost) == (5, cost)


def test_the_cost_of_work_off_the_loop_may_depend_on_the_work() -> None:
    async def main() -> float:
        await asyncio.gather(asyncio.to_thread(sum, ()), asyncio.get_running_loop().run_in_executor(None, max, (1, 2)))
        return now()

    assert run(main, executor_cost=lambda function: 4.0 if function is max else 1.0) == 4.0


def test_an_error_off_the_loop_belongs_to_whoever_awaits_it() -> None:
    async def main() -> float:
        with pytest.raises(ZeroDivisionError):
            await asyncio.get_running_loop().run_in_executor(None, lambda: 1 / 0)
        return now()

    assert run(main, executor_cost=1.0) == 1.0


def test_files_are_refused() -> None:
    async def main() -> None:
        asyncio.get_running_loop().add_reader(0, lambda: None)

    with pytest.raises(NotImplementedError):
        run(main)


def test_tasks_that_are_left_over_are_cancelled_and_may_clean_up() -> None:
    cleaned: list[float] = []

    async def lingering() -> None:
        try:
            await asyncio.sleep(100.0)
        finally:
            await asyncio.sleep(1.0)
            cleaned.append(now())

    async def main() -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(lingering())
        await asyncio.sleep(5.0)
        return task

    run(main)
    assert cleaned == [6.0]


@pytest.mark.parametrize("shuffle", [None, 1])
def test_two_runs_of_one_program_are_the_same(shuffle: int | None) -> None:
    def trace() -> list[tuple[float, int]]:
        lines: list[tuple[float, int]] = []

        async def worker(number: int, queue: asyncio.Queue[int]) -> None:
            while True:
                item = await queue.get()
                await asyncio.sleep(item % 3 * 0.5)
                lines.append((now(), number * 1000 + item))
                queue.task_done()

        async def main() -> None:
            queue: asyncio.Queue[int] = asyncio.Queue()
            workers = [asyncio.get_running_loop().create_task(worker(number, queue)) for number in range(4)]
            for item in range(40):
                queue.put_nowait(item)
            await queue.join()
            for task in workers:
                task.cancel()

        program: Callable[[], Coroutine[Any, Any, None]] = main
        run(program, shuffle=shuffle)
        return lines

    assert trace() == trace()
