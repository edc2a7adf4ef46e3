"""JSON over HTTP for rewards that live elsewhere: which trouble is the network's, and which is ours.

No connection, a time-out, 408, 425, 429 and 5xx are infrastructure faults: they may pass. Every other status that is no
success is an error of the config or of the body, and asking again does not help. An API key stands in no message.
"""

from __future__ import annotations

import json
import os
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from pydantic import Field

from cadenza.errors import InfrastructureError, RewardError
from cadenza.rewards.base import ConfiguredReward

MAY_PASS = (408, 425, 429)


class EndpointDown(InfrastructureError):
    """A server cannot be reached, is too busy, or broke while it answered."""


class EndpointReward(ConfiguredReward):
    """The settings of rewards that ask a server."""

    api_key_env: str | None = None
    """The environment variable that holds the API key, sent as a bearer token. The key itself is in no config: those
    are written to disk."""
    connections: int = Field(default=32, gt=0)
    """Requests at once."""
    connect_seconds: float = Field(default=10.0, gt=0)
    """To make a connection."""
    answer_seconds: float = Field(default=120.0, gt=0)
    """Without a byte from the server, after which a request is given up."""

    @property
    def concurrency(self) -> int | None:
        return self.connections

    def endpoint(self, url: str) -> Endpoint:
        """A connection to this address, to be closed by the caller."""
        return Endpoint(url, self)


class Endpoint:
    """Posts JSON to one address. It belongs to one event loop."""

    def __init__(self, url: str, settings: EndpointReward) -> None:
        try:
            import httpx2
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("servers are spoken to with httpx2: pip install 'cadenza[http]'") from error
        self._errors = httpx2.TransportError
        self._url = url
        self._key = _key(settings.api_key_env)
        self.place = f"POST {_without_secrets(url)}"
        self._client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=httpx2.Timeout(settings.answer_seconds, connect=settings.connect_seconds, pool=None),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=2.0),
            trust_env=False,  # as for engines: a proxy in between is never meant
        )

    async def post(self, body: Any) -> Any:
        """The answer as JSON; raises EndpointDown for what may pass, and RewardError for what does not."""
        content = json.dumps(body, default=_plain).encode()
        try:
            response = await self._client.post(self._url, content=content, headers={"Content-Type": "application/json"})
        except self._errors as error:
            raise EndpointDown(self._scrubbed(f"{self.place}: {str(error) or type(error).__name__}")) from error
        if response.is_success:
            try:
                return response.json()
            except ValueError as error:
                raise RewardError(self._scrubbed(f"{self.place}: no JSON but {response.text[:200]!r}")) from error
        text = f"{self.place}: {response.status_code} {' '.join(response.text.split())[:300]}"
        kind = EndpointDown if response.status_code in MAY_PASS or response.status_code >= 500 else RewardError
        raise kind(self._scrubbed(text))

    async def close(self) -> None:
        await self._client.aclose()

    def _scrubbed(self, text: str) -> str:
        """A server may repeat the key in what it says."""
        return text.replace(self._key, "***") if self._key else text


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise RewardError(f"api_key_env: there is no environment variable {variable}; set it to the key")
    return os.environ[variable]


def _without_secrets(url: str) -> str:
    """The address without a password and without its query, which may hold a key."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _plain(value: Any) -> Any:
    """What JSON has no form for: numpy's values as lists and numbers, everything else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
