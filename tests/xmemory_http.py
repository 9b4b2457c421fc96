"""An HTTP face of FakeXmemory, for the real client. Loopback only, one key, one instance; another
one takes its place when it is made."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from typing import Any, NamedTuple

from fake_xmemory import FakeXmemory, XmemoryAPIError, refused

METHODS = ("read", "write", "write_async", "write_status")
CLIENT_NAMES = {"mode": "read_mode", "use_diff_engine": "diff_engine"}


class Request(NamedTuple):
    method: str
    path: str
    headers: Mapping[str, str]  # names in lower case
    body: Any


class Answer(NamedTuple):
    status: int
    body: bytes
    headers: Mapping[str, str] = {}


class HttpFace:
    """What is in `script` answers the next requests, whatever they ask; None drops one."""

    def __init__(self, fake: FakeXmemory, instance_id: str, api_key: str) -> None:
        self.fake, self.api_key, self.url = fake, api_key, ""
        self.paths = {f"/instances/{instance_id}/{method}": method for method in METHODS}
        self.clusters = [{"id": "cluster-1", "org_id": "org-1", "name": "only"}]
        self.instances: list[dict[str, Any]] = []  # as the client lists them, with their schemas
        self.requests: list[Request] = []
        self.script: list[Answer | None] = []
        self._connections: set[asyncio.Task[None]] = set()

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
                    scripted = bool(self.script)
                    answer = self.script.pop(0) if scripted else await self._answer(request)
                    if answer is None:
                        return
                    writer.write(_encoded(answer))
                    await writer.drain()
        finally:
            writer.close()

    async def _answer(self, request: Request) -> Answer | None:
        try:
            made = request.method == "POST" and request.path.endswith("/instances")
            return _envelope(201 if made else 200, items=await self._call(request))
        except XmemoryAPIError as error:
            failed = error
        except ValueError as error:  # what the fake refuses as the client would, and it did not
            failed = refused(str(error))
        if failed.status is None and failed.code is None:
            return None
        shown = {"code": failed.code, "message": str(failed), "details": failed.details}
        hint = {} if failed.retry_after is None else {"Retry-After": str(failed.retry_after)}
        return _envelope(failed.status or 500, hint, errors=[shown])

    async def _call(self, request: Request) -> list[Any]:
        if request.headers.get("authorization") != f"Bearer {self.api_key}":
            raise XmemoryAPIError("wrong key", status=401, code="UNAUTHORIZED")
        match request.method, *request.path.partition("?")[0].split("/")[1:]:
            case "GET", "clusters":
                return self.clusters
            case "GET", "instances":
                return self.instances
            case "POST", "clusters", cluster_id, "instances":
                return [self._create(cluster_id, request.body)]
            case "GET", "instances", instance_id, "schema":
                found = [each for each in self.instances if each["id"] == instance_id]
                if not found:
                    raise XmemoryAPIError("no such instance", status=404, code="NOT_FOUND")
                return found
        if request.method != "POST" or request.path not in self.paths:
            raise XmemoryAPIError("no such instance", status=404, code="NOT_FOUND")
        options = {CLIENT_NAMES.get(name, name): value for name, value in request.body.items()}
        if scope := options.get("scope"):  # on the wire its keys are nested once more
            flat = [named | {"key": named["key"]["key"]} for named in scope["objects"]]
            options["scope"] = scope | {"objects": flat}
        return [vars(await getattr(self.fake, self.paths[request.path])(**options))]

    def _create(self, cluster_id: str, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """An empty instance, whose records have the keys that its schema says."""
        if cluster_id not in [each["id"] for each in self.clusters]:
            raise XmemoryAPIError("no such cluster", status=404, code="NOT_FOUND")
        schema = json.loads(wanted["instance_schema"]["json_schema"]["value"])
        made = {"id": f"made-{len(self.instances) + 1}", "cluster_id": cluster_id,
                "name": wanted["name"], "data_schema": schema}
        self.instances.append(made)
        keys = {name: each["primary_key"] for name, each in schema["objects"].items()}
        self.fake = FakeXmemory(keys)
        self.paths = {f"/instances/{made['id']}/{method}": method for method in METHODS}
        return made


@asynccontextmanager
async def http_face(fake: FakeXmemory, instance_id: str, api_key: str) -> AsyncIterator[HttpFace]:
    face = HttpFace(fake, instance_id, api_key)
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
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Request(method, path, headers, json.loads(body or b"null"))


def _encoded(answer: Answer) -> bytes:
    headers = {**answer.headers, "Content-Length": len(answer.body)}
    lines = [f"HTTP/1.1 {answer.status} -", *(f"{name}: {headers[name]}" for name in headers)]
    return "\r\n".join([*lines, "", ""]).encode() + answer.body


def _envelope(status: int, headers: Mapping[str, str] = {}, **filled: Any) -> Answer:
    body = {"ids": [], "items": [], "errors": []} | filled
    return Answer(status, json.dumps(body, default=datetime.isoformat).encode(), headers)
