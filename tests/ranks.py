"""Processes that compute together, for tests: started once, then given one function after the other.

with Ranks(2) as ranks:
    losses = ranks.run(train, batch)        # train(group, batch) in every rank; the answers, by rank
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Self

SECONDS = 250.0
"""For anything on a busy machine."""
GRACE = 30.0
"""For the other ranks, after one that raised."""


class Ranks:
    """So many processes in one group, on this machine. A rank that dies or hangs costs the call that it was in: the
    next call has new processes."""

    def __init__(self, size: int, *, tensor_ranks: int = 1) -> None:
        self._size = size
        self._tensor_ranks = tensor_ranks
        self._pipes: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kill()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in range(self._size)]
        self._pipes = [mine for mine, _ in pairs]
        self._processes = [
            context.Process(target=_serve, args=(theirs, rank, self._size, self._tensor_ranks), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pairs:
            theirs.close()  # so that the end of a rank is the end of its pipe
        address = self._answer(0)
        for pipe in self._pipes[1:]:
            pipe.send(address)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(10)
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._processes = [], []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What `function(group, *args)` gives in each rank; the exception of one that raises."""
        answers = self._ask(function, args)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def errors(self, function: Callable[..., Any], *args: Any) -> list[Exception]:
        """The exceptions of all ranks."""
        found = self._ask(function, args)
        assert all(isinstance(error, Exception) for error in found), found
        return found

    def _ask(self, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        """By rank. After one that raises or dies, the others have a little time; those that are stuck are left out, and
        the answer of a dead one is how it ended."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        found: dict[int, Any] = {}
        rank_of = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        lost = False
        seconds = SECONDS
        while waiting := [pipe for rank, pipe in enumerate(self._pipes) if rank not in found]:
            ready = wait(waiting, seconds)
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    answer = pipe.recv()
                except (EOFError, ConnectionError):
                    answer = self._death(rank_of[pipe])
                    lost = True
                found[rank_of[pipe]] = answer
                if isinstance(answer, Exception):
                    seconds = GRACE
            if not ready:
                break
        if lost or len(found) < self._size:
            self._kill()
        assert found, "no rank says anything"
        return [found[rank] for rank in sorted(found)]

    def _death(self, rank: int) -> ChildProcessError:
        process = self._processes[rank]
        process.join(10)
        return ChildProcessError(f"rank {rank} died, its exit code is {process.exitcode}")

    def _answer(self, rank: int) -> Any:
        assert self._pipes[rank].poll(SECONDS), f"rank {rank} says nothing"
        return self._pipes[rank].recv()


def _serve(pipe: Connection, rank: int, size: int, tensor_ranks: int) -> None:
    import torch

    from cadenza.training.process_group import ProcessGroup, Rendezvous

    torch.set_num_threads(1)
    where: Any = None
    if rank == 0:
        where = Rendezvous("127.0.0.1")
        pipe.send(where.address)
    else:
        where = pipe.recv()
    group = ProcessGroup(where, rank, [f"rank {i}" for i in range(size)], tensor_ranks=tensor_ranks)
    while True:
        function, args = pipe.recv()
        try:
            pipe.send(function(group, *args))
        except Exception as error:  # noqa: BLE001 - the test raises it
            pipe.send(error)
