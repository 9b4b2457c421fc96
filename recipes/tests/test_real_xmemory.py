"""The memory Activities with the real xmemory client, over HTTP, against the stand-in."""

import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
from http_face import Answer, serving
from temporalio import workflow
from temporalio.api.failure.v1 import Failure
from temporalio.client import Client
from temporalio.converter import DataConverter
from temporalio.exceptions import ApplicationError
from temporalio.worker import Worker
from xmemory_http import XmemoryFace

from fake_xmemory import FakeXmemory, XmemoryAPIError, connection_lost
from memory_activities import (
    MemoryActivities,
    ReadInput,
    WaitInput,
    WriteInput,
    XmemoryPlugin,
    create,
    memory_for_workflow,
    scope_to,
)

xmemory = pytest.importorskip(
    "xmemory", reason="the real client is not installed: pip install -e '.[memory]'"
)

INSTANCE, KEY = "inst-1", "key-canary"
CANARY = "text-canary"  # stands for whatever the service or the network says


@dataclass
class Real:
    """The service, the real client's instance, and the Activities that use it."""

    face: XmemoryFace
    instance: Any

    @property
    def fake(self) -> FakeXmemory:
        return self.face.fake

    @property
    def memory(self) -> MemoryActivities:
        return MemoryActivities(self.instance)


@asynccontextmanager
async def connected(url: str, key: str = KEY) -> AsyncIterator[Any]:
    client = xmemory.AsyncXmemoryClient(url, api_key=key)
    try:
        yield client
    finally:
        await client.aclose()


@pytest_asyncio.fixture(scope="module")
async def shared() -> AsyncIterator[Real]:
    """One client for all tests: to make one takes longer than most of them."""
    face = XmemoryFace(FakeXmemory({}), INSTANCE, KEY)
    async with serving(face), connected(face.url) as client:
        yield Real(face, client.instance(INSTANCE))


@pytest.fixture
def real(shared: Real) -> Real:
    face = shared.face
    face.fake = FakeXmemory({"Customer": ["customer_id"]})
    face.requests, face.script = [], []
    return shared


def every_call(memory: MemoryActivities) -> list[Callable[[], Awaitable[Any]]]:
    """One call of every Activity."""
    return [
        partial(memory.read, ReadInput("who?", {})),
        partial(memory.write, WriteInput("hello", {})),
        partial(memory.write_async, WriteInput("hello", {})),
        partial(memory.write_status, WaitInput("w1")),
        partial(memory.wait_for_write, WaitInput("w1")),
    ]


FINAL, BY_POLICY = "final", "as the RetryPolicy says"


async def failing(call: Awaitable[Any]) -> tuple[str | None, str | float]:
    """The type of a failure, and when it is tried again. Nothing is in the failure of what the
    service, the network or the key said."""
    with pytest.raises(ApplicationError) as caught:
        await call
    error, history, temporal = caught.value, Failure(), DataConverter.default
    temporal.failure_converter.to_failure(error, temporal.payload_converter, history)
    for secret in (KEY, CANARY, "127.0.0.1"):
        assert secret not in f"{error} {error!r} {error.details} {history}"
    assert error.__cause__ is None
    if error.non_retryable:
        return error.type, FINAL
    delay = error.next_retry_delay
    return error.type, BY_POLICY if delay is None else delay.total_seconds()


# --- On the wire ---------------------------------------------------------------------------------

TEXT = {"text": "hello", "extraction_logic": "fast", "use_diff_engine": None}
QUERY = {"query": "who?", "mode": "single-answer", "scope": None, "read_id": None}


async def test_every_call_is_one_request_and_none_is_idempotent(real: Real) -> None:
    for call in every_call(real.memory)[:4]:
        await call()
    assert [(sent.method, sent.path, sent.body) for sent in real.face.requests] == [
        ("POST", "/instances/inst-1/read", QUERY),
        ("POST", "/instances/inst-1/write", TEXT),
        ("POST", "/instances/inst-1/write_async", TEXT),
        ("POST", "/instances/inst-1/write_status", {"write_id": "w1"}),
    ]
    for headers in [sent.headers for sent in real.face.requests]:
        assert headers["authorization"] == f"Bearer {KEY}"
        assert not [name for name in headers if "idempotency" in name]


# --- Reads, writes and the queue -----------------------------------------------------------------


def says(word: str) -> Answer:
    item = {"write_id": "w1", "write_status": word}
    return Answer(200, json.dumps({"items": [item]}).encode())


async def test_a_status_that_the_client_cannot_parse_ends_no_wait(real: Real) -> None:
    real.face.script = [says("compacting")] * 2
    with pytest.raises(ValueError, match="WriteStatusResult"):
        await real.instance.write_status("w1")
    pending = await failing(real.memory.wait_for_write(WaitInput("w1")))
    assert pending == ("XmemoryWritePending", BY_POLICY)


# --- Errors --------------------------------------------------------------------------------------


def said(status: int, code: str | None = None, hint: str = "") -> Answer:
    """An error as the service words it; without a code, as something on the way there does."""
    shown = {"code": code, "message": CANARY, "details": {"more": CANARY}}
    body = json.dumps({"errors": [shown]}) if code else f"<p>{CANARY} {KEY}</p>"
    return Answer(status, body.encode(), {"Retry-After": hint} if hint else {})


DATE = "Wed, 21 Oct 2065 07:28:00 GMT"
ROWS: list[tuple[Answer, str, str | float]] = [
    (said(401, "UNAUTHORIZED"), "XmemoryAuthFailed", FINAL),
    (said(429, "RATE_LIMITED", "7"), "XmemoryRateLimited", 7),
    (said(429, hint=DATE), "XmemoryRateLimited", BY_POLICY),
    (said(200, "QUOTA_EXCEEDED"), "XmemoryQuotaExceeded", FINAL),
    (said(200), "XmemoryUnavailable", BY_POLICY),  # not JSON
    (Answer(200, b'{"items": []}'), "XmemoryUnavailable", BY_POLICY),
]


@pytest.mark.parametrize(
    ("answer", "type", "again"), ROWS, ids=[f"{row[0].status}-{row[1]}-{row[2]}" for row in ROWS]
)
async def test_every_error_has_its_row_whatever_was_called(
    real: Real, answer: Answer, type: str, again: str | float
) -> None:
    real.face.script = [answer] * 6
    with pytest.raises(xmemory.XmemoryAPIError):
        await real.instance.read("who?")
    for call in every_call(real.memory):
        assert await failing(call()) == (type, again)
    assert len(real.face.requests) == 6  # the client itself repeats nothing


async def test_a_connection_that_is_dropped_is_retryable(real: Real) -> None:
    real.face.script = [None] * 5
    for call in every_call(real.memory):
        assert await failing(call()) == ("XmemoryUnavailable", BY_POLICY)


# --- The handle and the plugin -------------------------------------------------------------------


@workflow.defn(sandboxed=False)
class Remembers:
    @workflow.run
    async def run(self, id: str) -> list[dict[str, Any]]:
        memory, key = memory_for_workflow(), {"customer_id": id}
        await memory.write_durable(structured_mutations=[create("Customer", key, {"paid": 1.5})])
        scope = scope_to("Customer", key)
        return (await memory.read("Customer", read_mode="raw-tables", scope=scope)).rows()


async def test_the_plugin_needs_only_the_environment_and_history_tells_nothing_of_it(
    real: Real, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XMEM_API_KEY", KEY)
    monkeypatch.setenv("XMEM_INSTANCE_ID", INSTANCE)
    monkeypatch.setenv("XMEM_API_URL", real.face.url)
    real.fake.job_seconds, queue = 0.1, str(uuid.uuid4())
    real.fake.fail_next(connection_lost(), method="write_async", acted=True)
    real.fake.fail_next(XmemoryAPIError(CANARY, status=503, code="SERVICE_UNAVAILABLE"))
    config = client.config()
    config["plugins"] = [XmemoryPlugin()]
    temporal = Client(**config)
    async with Worker(temporal, task_queue=queue, workflows=[Remembers]):
        handle = await temporal.start_workflow(Remembers.run, queue, id=queue, task_queue=queue)
        assert await handle.result() == [{"customer_id": queue, "paid": 1.5}]
    assert real.fake.counts()["write_async"] == 2  # the second found what the first had made
    history = (await handle.fetch_history()).to_json()
    assert "XmemoryServerError" in history
    assert not [secret for secret in (KEY, CANARY, real.face.url) if secret in history]
