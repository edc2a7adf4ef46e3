"""A replica behind a server: a real one on the loopback, which answers as it is told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cadenza.inference import server as server_module
from cadenza.inference.http_engine import HttpReplica
from cadenza.inference.replica import (
    Finish,
    NotSupported,
    PauseMode,
    Replica,
    ReplicaError,
    ReplicaLost,
    Request,
    RequestRefused,
    Sampling,
    Span,
    StaleEpoch,
)
from cadenza.inference.server import Server, ServerBusy, ServerConfig

Choice = dict[str, Any]


class Desk:
    """A server with a script. A completion counts upwards from the last token of its prompt, one piece at a time, and
    waits at `gate` before piece number `hold`."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Any]] = []
        self.refusals: list[int] = []
        """Codes with which the next requests are answered."""
        self.closed = 0
        """Completions whose client went away."""
        self.hold: int | None = None
        self.gate = asyncio.Event()
        self.token_ids = self.logprobs = True
        self.breaks_after: int | None = None
        """Pieces after which the connection breaks."""
        self.has_weights = False
        self.port = 0
        self._server: asyncio.Server

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Desk]:
        await self.listen()
        try:
            yield self
        finally:
            self.gate.set()
            self._server.close()

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._client, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        self._server.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def completions(self) -> list[Any]:
        return [body for _, path, body in self.asked if path == "/v1/completions"]

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                method, path, _ = line.decode().split()
                length = 0
                while (header := (await reader.readline()).decode().strip()) != "":
                    name, _, value = header.partition(":")
                    length = int(value) if name.lower() == "content-length" else length
                body = json.loads(await reader.readexactly(length)) if length else None
                self.asked.append((method, path, body))
                await self._answer(path, body, reader, writer)
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, body: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refusals:
            await _plain(writer, self.refusals.pop(0), {"error": "no"})
        elif path == "/v1/models":
            await _plain(writer, 200, {"data": [{"id": "tiny"}]})
        elif path == "/v1/chat/completions":
            await _plain(writer, 200, {"choices": [{"message": {"content": body["messages"][-1]["content"][::-1]}}]})
        elif path == "/v1/completions":
            await self._complete(body, reader, writer)
        else:
            await _plain(writer, 200 if self.has_weights else 404, {})

    async def _complete(self, body: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for number in range(body["max_tokens"]):
            if number == self.breaks_after:
                writer.close()
                return
            if number == self.hold and not await self._held(reader):
                self.closed += 1
                raise ConnectionError
            token = body["prompt"][-1] + 1 + number
            stops = token in body["stop_token_ids"]
            last = stops or number == body["max_tokens"] - 1
            piece: Choice = {
                "index": 0,
                "text": "x",
                "finish_reason": ("stop" if stops else "length") if last else None,
            }
            if self.token_ids:
                piece["token_ids"] = [token]
            if self.logprobs:
                piece["logprobs"] = {"token_logprobs": [-0.5 * token]}
            _chunk(writer, f"data: {json.dumps({'choices': [piece]})}\n\n")
            if last:
                break
        _chunk(writer, "data: [DONE]\n\n")
        _chunk(writer, "")
        await writer.drain()

    async def _held(self, reader: asyncio.StreamReader) -> bool:
        """Until the gate opens; False if the client goes first."""
        gone, opened = asyncio.ensure_future(reader.read(1)), asyncio.ensure_future(self.gate.wait())
        await asyncio.wait((gone, opened), return_when=asyncio.FIRST_COMPLETED)
        went = gone.done()
        gone.cancel()
        opened.cancel()
        return not went


def _chunk(writer: asyncio.StreamWriter, text: str) -> None:
    writer.write(f"{len(text):x}\r\n{text}\r\n".encode())


async def _plain(writer: asyncio.StreamWriter, code: int, body: Any) -> None:
    data = json.dumps(body).encode()
    writer.write(f"HTTP/1.1 {code} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()


def ask(id: int = 1, prompt: tuple[int, ...] = (5, 10), count: int = 4, **fields: Any) -> Request:
    values = {"sampling": Sampling(), "seed": 7, "offset": 0, "session": 0, "group": 0, "epoch": 0}
    chunks = tuple(np.array([token], np.int32) for token in prompt)
    return Request(id=id, chunks=chunks, context=len(prompt), max_tokens=count, **(values | fields))


def run(work: Callable[[Desk, HttpReplica], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with Desk().listening() as desk:
            server = Server(ServerConfig(url=desk.url, retry_seconds=0.001, stall_seconds=30, connect_seconds=5))
            replica = HttpReplica(server, **options)
            try:
                await work(desk, replica)
            finally:
                await replica.close()

    asyncio.run(asyncio.wait_for(main(), 60))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the other side of a socket is heard of in its own time
        await asyncio.sleep(0.001)


def test_tokens_go_in_and_come_out_with_their_logprobs() -> None:
    async def work(desk: Desk, replica: HttpReplica) -> None:
        as_protocol: Replica = replica
        answer = await as_protocol.generate(ask(count=3))
        assert (answer.tokens.tolist(), answer.logprobs.tolist()) == ([11, 12, 13], [-5.5, -6.0, -6.5])
        assert (answer.spans, answer.finish) == ((Span(4, 3),), Finish.LENGTH)
        (body,) = desk.completions
        assert body["prompt"] == [5, 10]
        assert body["model"] == "tiny"
        assert body["repetition_penalty"] == 1.0, "a model's own default would change what is sampled"
        stats = await replica.stats()
        assert (stats.generated, stats.prefilled, stats.running, stats.waiting) == (3, 2, 0, 0)

    run(work, version=4)


def test_end_tokens_and_stop_tokens_end_an_answer() -> None:
    async def work(desk: Desk, replica: HttpReplica) -> None:
        ended = await replica.generate(ask(1, count=9))
        stopped = await replica.generate(ask(2, count=9, sampling=Sampling(stop=(11,))))
        assert (ended.tokens.tolist(), ended.finish) == ([11, 12], Finish.STOP)
        assert (stopped.tokens.tolist(), stopped.finish) == ([11], Finish.STOP)
        assert desk.completions[0]["ignore_eos"], "the server's own end token is not among them"

    run(work, eos_token_ids={12})


def test_the_seed_belongs_to_the_turn_and_to_where_it_was_interrupted() -> None:
    async def work(desk: Desk, replica: HttpReplica) -> None:
        for id, fields in enumerate(({"seed": 1}, {"seed": 1}, {"seed": 2}, {"seed": 1, "offset": 3})):
            await replica.generate(ask(id, **fields))
        one, again, other, later = (body["seed"] for body in desk.completions)
        assert one == again
        assert len({one, other, later}) == 3

    run(work)


def test_an_abort_closes_the_connection_and_gives_the_tokens_so_far() -> None:
    async def work(desk: Desk, replica: HttpReplica) -> None:
        desk.hold = 2
        future = replica.generate(ask(count=9))
        await until(lambda: replica.requests_in_flight()[0].written == 2)
        assert replica.requests_in_flight()[0] == (1, 4, 2, 4, 2)
        replica.abort(1, "moved")
        part = await future
        assert (part.tokens.tolist(), part.finish) == ([11, 12], Finish.ABORT)
        await until(lambda: desk.closed == 1)
        desk.hold = None
        rest = await replica.generate(ask(2, (5, 10, *part.tokens.tolist()), 7, offset=2))
        assert [*part.tokens.tolist(), *rest.tokens.tolist()] == list(range(11, 20))

    run(work)


def test_an_abort_before_anything_was_sent_is_answered_too() -> None:
    async def work(desk: Desk, replica: HttpReplica) -> None:
        future = replica.generate(ask())
        replica.abort(1, "lease")
        assert (await future).finish is Finish.ABORT
        assert not desk.completions

    run(work)


def test_tokens_that_nobody_waits_for_are_booked_under_their_cause() -> None:
    async def work(desk: Desk, replica: HttpReplica) -> None:
        desk.hold = 3
        future = replica.generate(ask(count=9))
        await until(lambda: replica.requests_in_flight()[0].written == 3)
        future.cancel()
        replica.abort(1, "lease")
        await until(lambda: not replica.requests_in_flight())
        assert (await replica.stats()).discarded == {"lease": 3}

    run(work)


def test_a_pause_ends_what_runs_and_keeps_what_comes_until_the_replica_resumes() -> None:
    async def work(desk: Desk, replica: HttpReplica) -> None:
        desk.hold = 1
        running = replica.generate(ask(1))
        await until(lambda: bool(replica.requests_in_flight()[0].written))
        await replica.pause(3, PauseMode.ABORT)
        assert running.done()
        assert running.result().finish is Finish.ABORT
        assert (await replica.stats()).paused
        with pytest.raises(StaleEpoch, match="epoch 2 is behind fence 3"):
            await replica.generate(ask(2, epoch=2))
        desk.hold, before = None, len(desk.completions)
        waiting = replica.generate(ask(3, epoch=3))
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(desk.completions) == before
        await replica.resume()
        assert (await waiting).finish is Finish.LENGTH

    run(work)


def test_a_drain_waits_for_everybody_who_was_there() -> None:
    async def work(desk: Desk, replica: HttpReplica) -> None:
        desk.hold = 1
        running = replica.generate(ask(1))
        pausing = asyncio.ensure_future(replica.pause(1, PauseMode.DRAIN))
        await until(lambda: bool(desk.completions))
        assert not pausing.done()
        desk.gate.set()
        await pausing
        assert (await running).finish is Finish.LENGTH

    run(work)


def test_what_was_not_begun_is_sent_again_and_nothing_else() -> None:
    async def work(desk: Desk, replica: HttpReplica) -> None:
        await replica.generate(ask(1))
        desk.refusals = [503, 429, 503]
        assert (await replica.generate(ask(2))).finish is Finish.LENGTH
        assert len(desk.completions) == 5
        desk.refusals = [503] * 4
        with pytest.raises(ServerBusy, match="503, 4 times"):
            await replica.generate(ask(3))
        desk.refusals = [500]
        with pytest.raises(ReplicaError, match=r"POST .*/v1/completions: 500"):
            await replica.generate(ask(4))
        assert len(desk.completions) == 10

    run(work)


def test_a_request_that_the_server_refuses_or_that_makes_no_sense_is_refused() -> None:
    async def work(desk: Desk, replica: HttpReplica) -> None:
        await replica.generate(ask(1))
        desk.refusals = [400]
        with pytest.raises(RequestRefused, match="400"):
            await replica.generate(ask(2))
        with pytest.raises(RequestRefused, match="1 to 99 tokens"):
            await replica.generate(ask(3, tuple(range(1, 101))))
        with pytest.raises(RequestRefused, match="the chunks of request 4 are not"):
            await replica.generate(replace(ask(4), chunks=()))

    run(work, kv_tokens=100)


def test_a_connection_that_breaks_costs_its_request_where_the_server_lives() -> None:
    async def work(desk: Desk, replica: HttpReplica) -> None:
        desk.breaks_after = 2
        with pytest.raises(ReplicaError, match="connection broke") as caught:
            await replica.generate(ask(1))
        assert not isinstance(caught.value, ReplicaLost)
        assert len(desk.completions) == 1, "it was begun, so it is not sent again"
        assert (await replica.stats()).discarded == {"failed": 2}
        desk.breaks_after = None
        assert (await replica.generate(ask(2))).finish is Finish.LENGTH

    run(work)


def test_a_server_that_is_gone_is_a_replica_that_is_lost() -> None:
    async def work(desk: Desk, replica: HttpReplica) -> None:
        desk.hold = 1
        other = replica.generate(ask(1))
        await until(lambda: bool(replica.requests_in_flight()[0].written))
        desk.close()
        with pytest.raises(ReplicaLost, match="no connection"):
            await replica.generate(ask(2))
        with pytest.raises(ReplicaLost):
            await other
        with pytest.raises(ReplicaLost):
            await replica.pause(1, PauseMode.ABORT)

    run(work)


def test_a_replica_that_is_killed_leaves_nothing_open() -> None:
    async def work(desk: Desk, replica: HttpReplica) -> None:
        desk.hold = 1
        future = replica.generate(ask())
        await until(lambda: bool(replica.requests_in_flight()[0].written))
        replica.kill("hung")
        with pytest.raises(ReplicaLost, match="killed: hung"):
            await future
        await until(lambda: desk.closed == 1)
        assert replica.discarded == {"hung": 1}

    run(work)


@pytest.mark.parametrize("missing", ["token_ids", "logprobs"])
def test_a_server_without_token_ids_serves_judges_and_no_rollouts(missing: str) -> None:
    async def work(desk: Desk, replica: HttpReplica) -> None:
        setattr(desk, missing, False)
        with pytest.raises(NotSupported, match=r"gives no .*never trained"):
            await replica.check()
        with pytest.raises(NotSupported, match=r"gives no .*never trained"):
            await replica.generate(ask())
        server = Server(ServerConfig(url=desk.url, model="tiny"))
        assert await server.chat([{"role": "user", "content": "abc"}]) == "cba"
        await server.close()

    run(work)


def test_raw_logprobs_are_taken_only_where_they_are_those_of_the_draw() -> None:
    async def work(desk: Desk, replica: HttpReplica) -> None:
        with pytest.raises(RequestRefused, match=r"temperature 0\.7.*processed_logprobs"):
            await replica.generate(ask(1, sampling=Sampling(temperature=0.7)))
        with pytest.raises(RequestRefused, match=r"top_k 5"):
            await replica.generate(ask(1, sampling=Sampling(top_k=5)))
        await replica.generate(ask(1, sampling=Sampling(temperature=0.0)))
        processed = HttpReplica(Server(ServerConfig(url=desk.url)), logprobs="processed")
        await processed.generate(ask(1, sampling=Sampling(temperature=0.7, top_k=5)))
        assert desk.completions[-1]["temperature"] == 0.7
        assert desk.completions[-1]["top_k"] == 5
        await processed.close()

    run(work)


def test_what_a_server_cannot_do_is_said() -> None:
    async def work(desk: Desk, replica: HttpReplica) -> None:
        with pytest.raises(NotSupported, match="not ours"):
            await replica.sleep()
        with pytest.raises(NotSupported, match="frozen over HTTP"):
            await replica.pause(1, PauseMode.KEEP)
        with pytest.raises(RuntimeError, match="paused and empty"):
            await replica.load_weights(1, None)
        await replica.pause(1, PauseMode.ABORT)
        with pytest.raises(NotSupported, match=r"no endpoint for weights.*weight-transfer-config"):
            await replica.load_weights(1, None)
        assert replica.version == 0

    run(work)


def test_weights_go_to_a_server_with_endpoints_for_them() -> None:
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")

    async def work(desk: Desk, replica: HttpReplica) -> None:
        desk.has_weights = True
        await replica.pause(1, PauseMode.ABORT)
        found: dict[str, Any] = {}
        answer = desk._answer

        async def look(path: str, body: Any, *others: Any) -> None:
            if path == "/update_weights":
                found.update(safetensors.load_file(body["update_info"]["path"]))
            await answer(path, body, *others)

        desk._answer = look  # type: ignore[method-assign]
        weights = {"one": torch.arange(3.0), "two": torch.ones(2, 2)}
        await replica.load_weights(5, weights)
        assert {name: tensor.tolist() for name, tensor in found.items()} == {
            "one": [0.0, 1.0, 2.0],
            "two": [[1.0, 1.0], [1.0, 1.0]],
        }
        asked = [path for _, path, _ in desk.asked if path.startswith("/") and "v1" not in path]
        assert asked == [
            "/pause?mode=abort&clear_cache=true", "/start_weight_update", "/update_weights", "/finish_weight_update",
            "/update_weight_version", "/resume",
        ]  # fmt: skip
        await replica.resume()
        assert (await replica.generate(ask(epoch=1))).spans == (Span(5, 4),)

    run(work)


def test_a_run_gives_each_server_its_weights_first() -> None:
    torch = pytest.importorskip("torch")
    from cadenza.run.engines import EngineConfig
    from cadenza.run.engines.http import servers

    async def work(desk: Desk, replica: HttpReplica) -> None:
        engine = EngineConfig(kind="http", servers=({"url": desk.url}, {"url": desk.url}), kv_tokens=50)  # type: ignore[arg-type]
        weights = {"one": torch.ones(1)}
        with pytest.raises(NotSupported, match="no endpoint for weights"):
            async with servers(engine, frozenset({12}), weights):
                pass
        desk.has_weights = True
        async with servers(engine, frozenset({12}), weights) as replicas:
            assert [(one.name, one.kv_capacity) for one in replicas] == [("http-0", 50), ("http-1", 50)]
            assert [path for _, path, _ in desk.asked].count("/finish_weight_update") == 2
            assert (await replicas[1].generate(ask(count=9))).tokens.tolist() == [11, 12]

    run(work)


def test_a_key_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ServerConfig(url="http://localhost:1", key_variable="A_KEY")
    monkeypatch.delenv("A_KEY", raising=False)
    with pytest.raises(ValueError, match="no environment variable A_KEY"):
        Server(config)
    monkeypatch.setenv("A_KEY", "secret")
    assert Server(config)._client.headers["Authorization"] == "Bearer secret"
    assert "secret" not in repr(config)


def test_a_missing_library_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "httpx2", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'cadenza\[http\]'"):
        Server(ServerConfig(url="http://localhost:1"))
