"""An OpenAI-compatible HTTP server as a client sees it: a judge (`Server.chat`), or under a replica (http_engine.py).

A request is sent again only where the server has not begun it: there was no connection, or it said that it is too busy
(429, 503). What cannot be reached at all is lost (`ReplicaLost`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from pydantic import Field

from cadenza.config import Config
from cadenza.inference.replica import ReplicaError, ReplicaLost, RequestRefused, Sampling

try:
    import httpx2
except ModuleNotFoundError:  # configs can be read without it
    httpx2 = None  # type: ignore[assignment]

BUSY = (429, 503)
"""What a server says that has not begun a request and does not want it now."""


class ServerConfig(Config):
    """Where a server is, and how patient we are with it."""

    url: str = Field(pattern="^https?://")
    """Without the path, as http://localhost:8000."""
    model: str | None = None
    """Its name there; None is the only one that it serves."""
    key_variable: str | None = None
    """The environment variable that holds the API key. The key itself is in no config: those are written to disk."""
    connect_seconds: float = Field(default=10.0, gt=0)
    """To make a connection."""
    stall_seconds: float = Field(default=300.0, gt=0)
    """Without a word from the server, after which a request is given up."""
    tries: int = Field(default=4, gt=0)
    """Times that a request is sent which the server has not begun. The waits between them double."""
    retry_seconds: float = Field(default=0.5, ge=0)
    """The first of these waits."""


class ConnectionBroke(ReplicaError):
    """A request was sent, and its connection broke."""


class ServerBusy(ReplicaError):
    """The server would not begin a request, as often as it was asked."""


class Server:
    """An OpenAI-compatible server. It may be used by one event loop; `close` it there."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self._model = config.model
        if httpx2 is None:
            raise ModuleNotFoundError("servers are spoken to with httpx2: pip install 'cadenza[http]'")
        headers = {}
        if config.key_variable is not None:
            if config.key_variable not in os.environ:
                raise ValueError(f"key_variable: there is no environment variable {config.key_variable}")
            headers["Authorization"] = f"Bearer {os.environ[config.key_variable]}"
        self._client = httpx2.AsyncClient(
            base_url=config.url.rstrip("/"),
            headers=headers,
            timeout=httpx2.Timeout(config.stall_seconds, connect=config.connect_seconds, pool=None),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=2.0),
            trust_env=False,  # a proxy between a trainer and its engine is never meant
        )

    async def model(self) -> str:
        """The name of the model."""
        if self._model is None:
            names = [entry["id"] for entry in (await self.request_json("GET", "/v1/models"))["data"]]
            if len(names) != 1:
                raise ReplicaError(f"{self.config.url} serves {', '.join(names) or 'no model'}: name one in 'model'")
            self._model = names[0]
        return self._model

    async def chat(self, messages: Sequence[Mapping[str, str]], sampling: Sampling | None = None) -> str:
        """An answer as text: for a judge. It is never trained."""
        sampling = sampling or Sampling(temperature=0.0)
        body: dict[str, Any] = {
            "model": await self.model(),
            "messages": list(messages),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        if sampling.top_k:
            body["top_k"] = sampling.top_k
        answer = await self.request_json("POST", "/v1/chat/completions", body)
        return str(answer["choices"][0]["message"]["content"])

    async def request_json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """One answer in JSON."""
        async with self.stream(method, path, body) as response:
            await response.aread()
            return response.json() if response.content else None

    @asynccontextmanager
    async def stream(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> AsyncIterator[Any]:
        """An answer that began well. Leaving the context closes the connection unless it was read to its end."""
        where = f"{method} {self.config.url}{path}"
        async with self._open_response(where, method, path, body) as response:
            if not response.is_success:
                await response.aread()
                text = f"{where}: {response.status_code} {' '.join(response.text.split())[:500]}"
                raise (RequestRefused if response.status_code in (400, 413, 422) else ReplicaError)(text)
            try:
                yield response
            except httpx2.TimeoutException as error:
                raise ReplicaError(f"{where}: nothing came for {self.config.stall_seconds:g} s") from error
            except httpx2.TransportError as error:
                raise ConnectionBroke(f"{where}: the connection broke: {_describe(error)}") from error

    @asynccontextmanager
    async def _open_response(
        self, where: str, method: str, path: str, body: Mapping[str, Any] | None
    ) -> AsyncIterator[httpx2.Response]:
        """Send, again where that is harmless."""
        for attempt in range(self.config.tries):
            if attempt:
                await asyncio.sleep(self.config.retry_seconds * 2 ** (attempt - 1))
            request = self._client.build_request(method, path, json=body)
            try:
                response = await self._client.send(request, stream=True)
            except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
                trouble: ReplicaError = ReplicaLost(f"{where}: no connection: {_describe(error)}")
                continue
            except httpx2.TimeoutException as error:
                raise ReplicaError(f"{where}: nothing came for {self.config.stall_seconds:g} s") from error
            except httpx2.TransportError as error:
                raise ConnectionBroke(f"{where}: the connection broke: {_describe(error)}") from error
            try:
                if response.status_code not in BUSY:
                    yield response
                    return
                trouble = ServerBusy(f"{where}: {response.status_code}, {attempt + 1} times")
            finally:
                await response.aclose()
        raise trouble

    async def close(self) -> None:
        await self._client.aclose()


def _describe(error: Exception) -> str:
    return str(error) or type(error).__name__
