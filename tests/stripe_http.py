"""An HTTP face of FakeStripe, for the real SDK. Loopback only, one request a connection.

All behaviour is the fake's. What is here is the wire, and the two calls on payment intents that
only the recipe makes: to pay with a test card, and to list.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from fake_stripe import FakeStripe, InvalidRequestError, StripeError, stripe_object

WHOLE = {"amount", "limit"}  # on the wire all is text; what is no whole number stays text
NESTED = re.compile(r"(\w+)\[(\w+)\]")


class Request(NamedTuple):
    method: str
    path: str
    headers: Mapping[str, str]  # names in lower case
    params: dict[str, Any]
    raw: str  # the parameters as they were sent


class Answer(NamedTuple):
    status: int
    body: bytes
    headers: Mapping[str, str] = {}


class StripeFace:
    """What is in `script` comes first: an Answer is given whatever was asked, None drops the
    request, and an event holds it back until it is set; then the fake is asked."""

    def __init__(self, fake: FakeStripe) -> None:
        self.fake, self.url = fake, ""
        self.requests: list[Request] = []
        self.script: list[Answer | asyncio.Event | None] = []
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
                request = await _receive(reader)
                self.requests.append(request)
                if answer := await self._scripted(request):
                    writer.write(_encoded(answer))
                    await writer.drain()
        finally:
            writer.close()

    async def _scripted(self, request: Request) -> Answer | None:
        if not self.script:
            return await self._answer(request)
        first = self.script.pop(0)
        if not isinstance(first, asyncio.Event):
            return first
        await first.wait()
        return await self._answer(request)

    async def _answer(self, request: Request) -> Answer | None:
        echo = {"Stripe-Version": request.headers["stripe-version"]}
        if request.method == "POST" and "idempotency-key" in request.headers:
            echo["Idempotency-Key"] = request.headers["idempotency-key"]
        self.fake.api_key = request.headers.get("authorization", "").removeprefix("Bearer ")
        try:
            found = await self._call(request)
            return _json(200, echo | found.last_response.headers, vars(found))
        except StripeError as error:
            failed = error
        if failed.http_status is None:
            return None
        shown = {name: value for name, value in vars(failed.error).items() if value is not None}
        return _json(failed.http_status, echo | failed.headers, {"error": shown})

    async def _call(self, request: Request) -> Any:
        v1, params = self.fake.v1, request.params
        options = {"idempotency_key": request.headers.get("idempotency-key")}
        match request.method, *request.path.split("/")[2:]:
            case "POST", "refunds":
                return await v1.refunds.create_async(params, options)
            case "GET", "refunds":
                return await v1.refunds.list_async(params, options)
            case "GET", "refunds", refund:
                return await v1.refunds.retrieve_async(refund, params, options)
            case "POST", "refunds", refund, "cancel":
                return await v1.refunds.cancel_async(refund, params, options)
            case "GET", "payment_intents", intent:
                return await v1.payment_intents.retrieve_async(intent, params, options)
            case "GET", "payment_intents":
                return self._payments(params)
            case "POST", "payment_intents":
                return await self._pay(params, options)
        raise InvalidRequestError("Unrecognized request URL.", 404)

    async def _pay(self, params: dict[str, Any], options: dict[str, Any]) -> Any:
        def check() -> Any:
            if params["payment_method"] != "pm_card_visa" or params["confirm"] != "true":
                raise InvalidRequestError("This stand-in knows one card, paid with at once.")
            return pay

        def pay() -> dict[str, Any]:
            intent = self.fake.add_payment(params["amount"], params["currency"])
            self.fake.payments[intent]["metadata"] = params["metadata"]
            return self.fake.payments[intent]

        return await self.fake.post(
            "payment_intents.create", "/v1/payment_intents", params, options, check)

    def _payments(self, params: dict[str, Any]) -> Any:
        with self.fake.received("payment_intents.list") as request_id:
            found = [dict(each) for each in reversed(self.fake.payments.values())]
            if after := params.get("starting_after"):
                found = found[[each["id"] for each in found].index(after) + 1:]
            if params.get("expand") == ["data.latest_charge"]:
                for each in found:
                    each["latest_charge"] = self.fake.charges.get(each["latest_charge"])
            limit = params.get("limit", 10)
            page = {"object": "list", "url": "/v1/payment_intents", "data": found[:limit],
                    "has_more": len(found) > limit}
            return stripe_object(page, {"Request-Id": request_id})


@asynccontextmanager
async def stripe_face(fake: FakeStripe) -> AsyncIterator[StripeFace]:
    face = StripeFace(fake)
    async with await asyncio.start_server(face.accept, "127.0.0.1", 0) as server:
        face.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield face
        finally:
            await face.close()


async def _receive(reader: asyncio.StreamReader) -> Request:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
    method, target, _ = first.split(" ")
    fields = (line.partition(": ") for line in lines)
    headers = {name.lower(): value for name, _, value in fields}
    body = (await reader.readexactly(int(headers.get("content-length", 0)))).decode()
    raw = body or urlsplit(target).query
    return Request(method, urlsplit(target).path, headers, _parameters(raw), raw)


def _parameters(form: str) -> dict[str, Any]:
    """`a=1&metadata[case_id]=c1&expand[0]=charge`, as the fake takes it."""
    params: dict[str, Any] = {}
    for name, value in parse_qsl(form, keep_blank_values=True):
        if nested := NESTED.fullmatch(name):
            outer, inner = nested.groups()
            if inner.isdigit():
                params.setdefault(outer, []).append(value)
            else:
                params.setdefault(outer, {})[inner] = value
        else:
            whole = name in WHOLE and re.fullmatch(r"-?\d+", value)
            params[name] = int(value) if whole else value
    return params


def _json(status: int, headers: Mapping[str, str], shown: Mapping[str, Any]) -> Answer:
    def plain(value: SimpleNamespace) -> dict[str, Any]:
        return vars(value)

    body = {name: value for name, value in shown.items() if name != "last_response"}
    return Answer(status, json.dumps(body, default=plain).encode(), headers)


def _encoded(answer: Answer) -> bytes:
    headers = {**answer.headers, "Content-Length": len(answer.body), "Connection": "close"}
    lines = [f"HTTP/1.1 {answer.status} -", *(f"{name}: {headers[name]}" for name in headers)]
    return "\r\n".join([*lines, "", ""]).encode() + answer.body
