"""A loopback HTTP server for real clients: scripted answers, then what a subclass makes of them."""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple, TypeVar


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
        self._connections: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def answer(self, request: Request) -> Answer | None: ...

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def close(self) -> None:
        for connection in (connections := list(self._connections)):
            connection.cancel()
        for ended in await asyncio.gather(*connections, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):  # the client has left
                while True:
                    request = await _receive(reader)
                    self.requests.append(request)
                    if (answer := await self._scripted(request)) is None:
                        return
                    writer.write(_encoded(answer, self.headers))
                    await writer.drain()
        finally:
            writer.close()

    async def _scripted(self, request: Request) -> Answer | None:
        if not self.script:
            return await self.answer(request)
        first = self.script.pop(0)
        if not isinstance(first, asyncio.Event):
            return first
        await first.wait()
        return await self.answer(request)


Face = TypeVar("Face", bound=HttpFace)


@asynccontextmanager
async def serving(face: Face) -> AsyncIterator[Face]:
    async with await asyncio.start_server(face.accept, "127.0.0.1", 0) as server:
        face.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield face
        finally:
            await face.close()


async def _receive(reader: asyncio.StreamReader) -> Request:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
    method, path, _ = first.split(" ")
    fields = (line.partition(": ") for line in lines)
    headers = {name.lower(): value for name, _, value in fields}
    data = await reader.readexactly(int(headers.get("content-length", 0)))
    return Request(method, path, headers, data)


def _encoded(answer: Answer, more: Mapping[str, str]) -> bytes:
    headers = {**answer.headers, **more, "Content-Length": len(answer.body)}
    lines = [f"HTTP/1.1 {answer.status} -", *(f"{name}: {headers[name]}" for name in headers)]
    return "\r\n".join([*lines, "", ""]).encode() + answer.body
