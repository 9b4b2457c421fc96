"""A loopback HTTP server for real clients: scripted answers, then what a subclass makes of them."""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install -e '.[recipes]'")

from aiohttp import web  # noqa: E402

GRACE_SECONDS = 0.1  # for requests that are still open at the end


class Request(NamedTuple):
    method: str
    path: str  # as it was sent, with its query
    headers: Mapping[str, str]  # names in lower case
    data: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.data or b"null")


class Answer(NamedTuple):
    status: int
    body: bytes
    headers: Mapping[str, str] = {}


class HttpFace(ABC):
    """What is in `script` comes first: an Answer is given whatever was asked, None drops the
    request, and an event holds it back until it is set; then it is answered."""

    headers: Mapping[str, str] = {}  # of every answer

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[Request] = []
        self.script: list[Answer | asyncio.Event | None] = []
        self.held: list[asyncio.Event] = []

    @abstractmethod
    async def answer(self, request: Request) -> Answer | None: ...

    async def handle(self, sent: web.BaseRequest) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in sent.headers.items()}
        request = Request(sent.method, sent.raw_path, headers, await sent.read())
        self.requests.append(request)
        scripted = self.script.pop(0) if self.script else await self.answer(request)
        if isinstance(scripted, asyncio.Event):
            self.held.append(scripted)
            await scripted.wait()
            scripted = await self.answer(request)
        if scripted is None and sent.transport:
            sent.transport.abort()
        status, body, more = scripted or Answer(500, b"")
        return web.Response(status=status, body=body, headers={**more, **self.headers})


Face = TypeVar("Face", bound=HttpFace)


@asynccontextmanager
async def serving(face: Face) -> AsyncIterator[Face]:
    runner = web.ServerRunner(web.Server(face.handle), shutdown_timeout=GRACE_SECONDS)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    face.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield face
    finally:
        for event in face.held:  # a handler goes on although its client has left
            event.set()
        await runner.cleanup()
