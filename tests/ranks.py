"""Processes that compute together, for tests: started once, then given one function after the other.

with Ranks(2) as ranks:
    losses = ranks.run(train, batch)        # train(peers, batch) in every rank; the answers, by rank
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

SECONDS = 110.0


class Ranks:
    """So many processes in one group, on this machine."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in range(size)]
        self._pipes = [mine for mine, _ in pairs]
        self._processes = [
            context.Process(target=_serve, args=(theirs, rank, size), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]

    def __enter__(self) -> Self:
        for process in self._processes:
            process.start()
        address = self._answer(0)
        for pipe in self._pipes[1:]:
            pipe.send(address)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.join(10)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What `function(peers, *args)` gives in each rank; the exception of the first that raises."""
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = [self._answer(rank) for rank in range(len(self._pipes))]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def errors(self, function: Callable[..., Any], *args: Any) -> list[Exception]:
        """The exceptions of all ranks."""
        for pipe in self._pipes:
            pipe.send((function, args))
        found = [self._answer(rank) for rank in range(len(self._pipes))]
        assert all(isinstance(error, Exception) for error in found), found
        return found

    def first(self, function: Callable[..., Any], *args: Any) -> Any:
        """What the first rank gives or raises, whatever becomes of the others."""
        for pipe in self._pipes:
            pipe.send((function, args))
        answer = self._answer(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _answer(self, rank: int) -> Any:
        assert self._pipes[rank].poll(SECONDS), f"rank {rank} says nothing"
        return self._pipes[rank].recv()


def _serve(pipe: Connection, rank: int, size: int) -> None:
    import torch

    from cadenza.training.peers import Group, Meeting

    torch.set_num_threads(1)
    where: Any = None
    if rank == 0:
        where = Meeting("127.0.0.1")
        pipe.send(where.address)
    else:
        where = pipe.recv()
    peers = Group(where, rank, [f"rank {i}" for i in range(size)])
    while True:
        function, args = pipe.recv()
        try:
            pipe.send(function(peers, *args))
        except Exception as error:  # noqa: BLE001 - the test raises it
            pipe.send(error)
