"""The memory Activities with the real xmemory client, over HTTP, against the stand-in."""

import json
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from http_face import Answer, serving
from temporalio import workflow
from temporalio.api.failure.v1 import Failure
from temporalio.client import Client, WorkflowHandle
from temporalio.common import RetryPolicy
from temporalio.converter import DataConverter
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment
from temporalio.worker import Worker
from xmemory_http import XmemoryFace

import fake_xmemory
import harness
from fake_xmemory import FakeXmemory, XmemoryAPIError, connection_lost
from harness import Server
from memory_activities import (
    MemoryActivities,
    ReadInput,
    WaitInput,
    WriteInput,
    XmemoryClient,
    XmemoryPlugin,
    connect_client,
    create,
    delete,
    memory_for_workflow,
    scope_to,
    update,
)

xmemory = pytest.importorskip(
    "xmemory", reason="the real client is not installed: pip install -e '.[memory]'")

INSTANCE, KEY = "inst-1", "key-canary"
CANARY = "text-canary"  # stands for whatever the service or the network says
KIM = "Dr. Robert Kim: prefers e-mail"
HOUR = 3_600


def opened(**values: Any) -> Any:
    return create("RefundCase", {"case_id": "c1"}, {"status": "open"} | values)


def changed(**values: Any) -> Any:
    return update("RefundCase", {"case_id": "c1"}, values)


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

    async def run(self, name: str, content: str = "", **options: Any) -> Any:
        """The Activity of that name, given what the client's method takes."""
        input = (ReadInput if name == "read" else WriteInput)(content, json.dumps(options))
        return await getattr(self.memory, name)(input)

    async def write(self, *mutations: Any) -> Any:
        return await self.run("write", structured_mutations=mutations)

    async def queue(self, *mutations: Any) -> str:
        return str((await self.run("write_async", structured_mutations=mutations)).write_id)

    async def status(self, *write_ids: str) -> list[str]:
        return [(await self.memory.write_status(each)).write_status for each in write_ids]

    async def rows(self, query: str = "refund case") -> list[dict[str, Any]]:
        return list((await self.run("read", query, read_mode="raw-tables")).rows())


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[XmemoryClient]:
    client = connect_client(url, KEY)
    try:
        yield client
    finally:
        await client.aclose()


@pytest_asyncio.fixture(scope="module")
async def shared() -> AsyncIterator[Real]:
    """One client for all tests: to make one takes longer than most of them."""
    async with (serving(XmemoryFace(FakeXmemory({}), INSTANCE, KEY)) as face,
                connected(face.url) as client):
        yield Real(face, client.instance(INSTANCE))


@pytest.fixture
def real(shared: Real) -> Real:
    face = shared.face
    face.fake = FakeXmemory({"Customer": ["customer_id"], "RefundCase": ["case_id"]})
    face.requests, face.script = [], []
    return shared


@pytest.fixture
def refusing() -> Iterator[str]:
    """The address of a port that refuses every connection."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def every_call(memory: MemoryActivities) -> list[Callable[[], Awaitable[Any]]]:
    """One call of every Activity."""
    return [
        partial(memory.read, ReadInput("who?")),
        partial(memory.write, WriteInput("hello")),
        partial(memory.write_async, WriteInput("hello")),
        partial(memory.write_status, "w1"),
        partial(memory.wait_for_write, WaitInput("w1", 2 * HOUR)),
    ]


async def failing(call: Awaitable[Any]) -> ApplicationError:
    """How a call failed. Nothing is in there of what the service, the network or the key said."""
    with pytest.raises(ApplicationError) as caught:
        await call
    error, history, temporal = caught.value, Failure(), DataConverter.default
    temporal.failure_converter.to_failure(error, temporal.payload_converter, history)
    for secret in (KEY, CANARY, "127.0.0.1"):
        assert secret not in f"{error} {error!r} {error.details} {history}"
    assert error.__cause__ is None
    return error


FINAL, BY_POLICY = "final", "as the RetryPolicy says"


def verdict(error: ApplicationError) -> tuple[str | None, str | float]:
    """Its type, and when it is tried again."""
    delay = error.next_retry_delay
    if error.non_retryable:
        return error.type, FINAL
    return error.type, BY_POLICY if delay is None else delay.total_seconds()


# --- On the wire ---------------------------------------------------------------------------------

TEXT = {"text": "hello", "extraction_logic": "fast", "use_diff_engine": None}
QUERY = {"query": "who?", "mode": "single-answer", "scope": None, "read_id": None}
ANN = {"customer_id": "ann"}
NESTED = [{"type": "Customer", "key": {"key": ANN}}]
NULLED = changed(status=None, amount=1.5)


async def test_every_call_is_one_request(real: Real) -> None:
    for call in every_call(real.memory)[:4]:
        await call()
    assert [(sent.method, sent.path, sent.body) for sent in real.face.requests] == [
        ("POST", "/instances/inst-1/read", QUERY),
        ("POST", "/instances/inst-1/write", TEXT),
        ("POST", "/instances/inst-1/write_async", TEXT),
        ("POST", "/instances/inst-1/write_status", {"write_id": "w1"}),
    ]


async def test_every_request_names_key_and_client_and_none_is_idempotent(real: Real) -> None:
    for call in every_call(real.memory)[:4]:
        await call()
    for headers in [sent.headers for sent in real.face.requests]:
        assert headers["authorization"] == f"Bearer {KEY}"
        assert headers["x-xmemory-client"].startswith("xmemory-python/")
        assert headers["content-type"] == "application/json"
        assert not [name for name in headers if "idempotency" in name]


@pytest.mark.parametrize("write", ["write", "write_async"])
async def test_every_option_of_a_write_arrives(real: Real, write: str) -> None:
    real.fake.put("Customer", ANN)
    scope = scope_to("Customer", ANN)
    await real.run(write, "hello", extraction_logic="deep", diff_engine=True, scope=scope)
    await real.run(write, structured_mutations=[opened(amount=7), NULLED])
    scoped, structured = [sent.body for sent in real.face.requests]
    deep = {"extraction_logic": "deep", "use_diff_engine": True}
    assert scoped == TEXT | deep | {"scope": {"objects": NESTED}}
    assert structured == TEXT | {"text": "", "structured_mutations": [opened(amount=7), NULLED]}


async def test_a_scope_that_drops_says_what_it_left_out(real: Real) -> None:
    named = {"type": "Person", "key": {"name": "Ann"}}
    dropping = {"objects": [named], "mode": "drop"}
    written = await real.run("write", KIM, scope=dropping)
    assert written.changes["skipped_out_of_scope"] and await real.rows("person") == []
    sent_scope = {"objects": [named | {"key": {"key": named["key"]}}], "mode": "drop"}
    assert real.face.requests[0].body["scope"] == sent_scope


async def test_every_option_of_a_read_arrives(real: Real) -> None:
    real.fake.put("Customer", ANN)
    scope = scope_to("Customer", ANN)
    await real.run("read", "who?", read_mode="xresponse", scope=scope, read_id="r1")
    sent_scope = {"objects": NESTED, "relations_scope": "no_relations"}
    asked = QUERY | {"mode": "xresponse", "scope": sent_scope, "read_id": "r1"}
    assert [sent.body for sent in real.face.requests] == [asked]


@pytest.mark.parametrize(("method", "content", "options", "error"), [
    ("read", "q", {"read_mode": "nope"}, "ValidationError"),
    ("read", "q", {"scope": scope_to("Customer", {})}, "ValidationError"),
    ("write", "", {}, "ValueError"),
    ("write", "x", {"structured_mutations": [opened()]}, "ValueError"),
    ("write", "", {"structured_mutations": []}, "ValueError"),
    ("write", "", {"structured_mutations": [opened()], "scope": scope_to("Customer", ANN)},
     "ValueError"),
    ("write", "x", {"extraction_logic": "regular"}, "ValidationError"),
    ("write_async", "", {}, "ValueError"),
])
async def test_wrong_arguments_are_never_sent_and_final(
        real: Real, method: str, content: str, options: Any, error: str) -> None:
    with pytest.raises(ValueError) as caught:
        await getattr(real.instance, method)(content, **options)
    assert caught.type.__name__ == error and not real.face.requests
    refused = await failing(real.run(method, content, **options))
    assert verdict(refused) == ("XmemoryBadRequest", FINAL)


async def test_two_operations_in_one_mutation_are_refused_by_the_model_or_the_service(
    real: Real,
) -> None:
    both = {"object_type": "RefundCase", "create": {"key": {}}, "delete": {"key": {}}}
    with pytest.raises(ValueError, match="exactly one"):
        xmemory.ObjectMutation(**both)
    refused = await failing(real.write({"object_mutation": both}))  # a dict is sent as it is
    assert verdict(refused) == ("XmemoryBadRequest", FINAL) and await real.rows() == []


# --- Reads and writes ----------------------------------------------------------------------------


@pytest.mark.parametrize(("query", "read_mode", "answer"), [
    ("refund case", "single-answer", ""),
    ("refund case", "raw-tables", {"columns": [], "rows": []}),
    ("refund case", "xresponse", {"objects": [], "relations": []}),
    ("weather", "raw-tables", None),  # the schema cannot hold it
])
async def test_no_match_is_an_empty_answer_and_no_such_concept_is_none(
        real: Real, query: str, read_mode: str, answer: Any) -> None:
    found = await real.run("read", query, read_mode=read_mode)
    assert (found.reader_result, found.notice, found.reader_results) == (answer, None, [])


async def test_what_a_read_says_beside_its_answer_is_kept(real: Real) -> None:
    part = {"sub_query": "a", "reader_result": None, "error": "no", "notice": "why"}
    item = {"notice": "why", "trace_id": "t", "console_url": "c", "reader_results": [part]}
    real.face.script = [Answer(200, json.dumps({"items": [item]}).encode())]
    found = await real.run("read", "who?")
    assert (found.reader_result, found.reader_results) == (None, [part])
    assert (found.notice, found.trace_id, found.console_url) == ("why", "t", "c")


@pytest.mark.parametrize("read_mode", ["single-answer", "raw-tables", "xresponse"])
async def test_a_read_is_bound_to_its_scope(real: Real, read_mode: str) -> None:
    for name in ("ann", "bert"):
        real.fake.put("Customer", {"customer_id": name})
        real.fake.put("RefundCase", {"case_id": f"case of {name}", "customer_id": name})
    scope = scope_to("Customer", ANN)
    found = await real.run("read", "customer", read_mode=read_mode, scope=scope)
    assert "ann" in found.reader_result_json and "bert" not in found.reader_result_json


async def test_what_names_an_absent_record_is_refused(real: Real) -> None:
    scoped = real.run("read", "refund case", scope=scope_to("Customer", ANN))
    gone = delete("RefundCase", {"case_id": "c1"})
    for call in [scoped, real.write(changed(status="paid")), real.write(gone)]:
        error = await failing(call)
        assert verdict(error) == ("XmemoryBadRequest", FINAL)
        assert error.details == ({"code": "VALIDATION_ERROR", "status": 400},)


async def test_a_create_is_listed_in_the_changes(real: Real) -> None:
    made = (await real.write(opened())).changes["created"]["objects"]
    queued = await real.memory.write_status(await real.queue(changed(status="paid")))
    assert [each["name"] for each in made] == ["RefundCase"]
    assert queued.changes["updated"]["objects"] and queued.completed_at


async def test_a_create_of_an_existing_key_is_refused_and_changes_nothing(real: Real) -> None:
    await real.write(opened())
    with pytest.raises(xmemory.XmemoryAPIError) as caught:
        await real.instance.write(structured_mutations=[opened(status="paid")])
    seen = caught.value.status, caught.value.code
    assert seen in [(400, "VALIDATION_ERROR"), (409, "CONFLICT")]
    assert await real.rows() == [{"case_id": "c1", "status": "open"}]


async def test_a_refused_create_is_done_if_the_record_says_the_same(real: Real) -> None:
    mine, other = opened(amount=1.5, paid=True), opened(amount=2)
    await real.write(mine)
    assert (await real.write(mine)).write_id == ""
    assert verdict(await failing(real.write(other))) == ("XmemoryConflict", FINAL)


async def test_the_same_update_twice_is_one_row_and_a_null_clears_its_field(real: Real) -> None:
    await real.write(opened())
    for _ in range(2):
        await real.write(changed(status="paid"))
    assert await real.rows() == [{"case_id": "c1", "status": "paid"}]
    await real.write(changed(status=None))
    assert await real.rows() == [{"case_id": "c1"}]


async def test_one_refused_mutation_refuses_its_whole_batch(real: Real) -> None:
    await failing(real.write(opened(), opened()))
    assert await real.rows() == []


# --- The queue -----------------------------------------------------------------------------------


async def test_a_queued_write_is_known_at_once_and_read_once_it_is_applied(real: Real) -> None:
    real.fake.paused = True
    queued = await real.queue(opened())
    assert await real.status(queued, "nope") == ["extracted", "not_found"]
    assert await real.rows() == []
    real.fake.paused = False
    assert await real.status(queued) == ["completed"] and len(await real.rows()) == 1


async def test_a_job_that_is_ready_waits_for_older_ones(
    real: Real, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = 0
    clock = SimpleNamespace(time=lambda: time.time() + ahead)
    monkeypatch.setattr(fake_xmemory, "time", clock)
    real.fake.job_seconds = 2 * HOUR
    older = await real.queue(opened())
    real.fake.job_seconds = 1
    newer = await real.queue(changed(status="paid"))
    ahead = HOUR
    assert await real.status(older, newer) == ["extracting", "extracted"]
    ahead = 3 * HOUR
    assert await real.status(older, newer) == ["completed", "completed"]
    assert await real.rows() == [{"case_id": "c1", "status": "paid"}]


@pytest.mark.parametrize(("forks", "people"), [(False, 1), (True, 2)])
async def test_a_text_written_twice_may_fork_the_person(
        real: Real, forks: bool, people: int) -> None:
    real.fake.forks = forks
    for _ in range(2):
        await real.run("write", KIM)
    assert len(await real.rows("person")) == people


async def test_a_text_whose_answer_is_lost_and_that_is_sent_again_is_two_jobs(real: Real) -> None:
    real.fake.fail_next(connection_lost(), method="write_async", acted=True)
    lost = await failing(real.run("write_async", KIM))
    assert verdict(lost) == ("XmemoryUnavailable", BY_POLICY)
    assert (await real.run("write_async", KIM)).write_id == "w00002"
    assert await real.status("w00001", "w00002") == ["completed", "completed"]


@pytest.mark.parametrize("write", ["write", "write_async"])
async def test_a_create_whose_answer_is_lost_still_ends_in_one_record(
        real: Real, write: str) -> None:
    real.fake.fail_next(connection_lost(), method=write, acted=True)
    await failing(real.run(write, structured_mutations=[opened()]))
    again = await real.run(write, structured_mutations=[opened()])
    if again.write_id:
        options = json.dumps({"structured_mutations": [opened()]})
        ended = await real.memory.wait_for_write(WaitInput(again.write_id, 2 * HOUR, options))
        assert ended.write_status == "completed"
    assert await real.rows() == [{"case_id": "c1", "status": "open"}]


@pytest.mark.parametrize("status", [each.value for each in xmemory.WriteQueueStatus])
async def test_every_status_that_the_client_knows_arrives_as_its_word(
        real: Real, status: str) -> None:
    real.fake.shown_status = status
    assert await real.status(await real.queue(opened())) == [status]


async def test_a_status_that_the_client_cannot_parse_ends_no_wait(real: Real) -> None:
    queued = await real.queue(opened())
    real.fake.shown_status = "compacting"
    with pytest.raises(ValueError, match="WriteStatusResult"):
        await real.instance.write_status(queued)
    pending = await failing(real.memory.wait_for_write(WaitInput(queued, 2 * HOUR)))
    assert verdict(pending) == ("XmemoryWritePending", 2)
    real.fake.shown_status = ""
    assert (await real.memory.wait_for_write(WaitInput(queued, 2 * HOUR))).changes["created"]


async def test_a_wait_ends_for_good_when_the_write_failed_or_is_not_known(real: Real) -> None:
    queued = await real.queue(opened(), opened())
    failed = await failing(real.memory.wait_for_write(WaitInput(queued, 2 * HOUR)))
    unknown = await failing(real.memory.wait_for_write(WaitInput("nope", 2 * HOUR)))
    assert verdict(failed) == ("XmemoryWriteFailed", FINAL)
    assert verdict(unknown) == ("XmemoryWriteNotFound", FINAL)
    assert await real.status(queued, "nope") == ["failed", "not_found"] and not await real.rows()


# --- Errors --------------------------------------------------------------------------------------


def said(status: int, code: str | None = None, hint: str = "", **details: Any) -> Answer:
    """An error as the service words it; without a code, as something on the way there does."""
    shown = {"code": code, "message": CANARY, "details": details | {"more": CANARY}}
    body = json.dumps({"errors": [shown]}) if code else f"<p>{CANARY} {KEY}</p>"
    return Answer(status, body.encode(), {"Retry-After": hint} if hint else {})


def schema_error(status: int, code: str) -> Answer:
    shown = {"status": "error", "error_type": code, "error_message": CANARY}
    return Answer(status, json.dumps(shown).encode())


DATE = "Wed, 21 Oct 2065 07:28:00 GMT"
DAILY, MONTHLY = {"kind": "daily_quota_exceeded"}, {"kind": "monthly_quota_exceeded"}
SCHEMA_CODES = ["stale_proposal_version", "stale_schema_version", "dependency_closure_failed",
                "destructive_confirmation_required", "non_additive_change_requires_plan",
                "migration_not_found", "instance_not_initialised", "invalid_decision_input"]

ROWS: list[tuple[Answer, str, str | float]] = [
    (said(401, "UNAUTHORIZED"), "XmemoryAuthFailed", FINAL),
    (said(403, "FORBIDDEN"), "XmemoryAuthFailed", FINAL),
    (said(404, "NOT_FOUND"), "XmemoryNotFound", FINAL),
    (said(400, "VALIDATION_ERROR"), "XmemoryBadRequest", FINAL),
    (said(422, "VALIDATION_ERROR"), "XmemoryBadRequest", FINAL),
    (said(422, "INVALID_INPUT"), "XmemoryBadRequest", FINAL),
    (said(409, "ALREADY_EXISTS"), "XmemoryBadRequest", FINAL),
    (said(409, "CONFLICT"), "XmemoryBadRequest", FINAL),
    (said(429, "RATE_LIMITED", "7"), "XmemoryRateLimited", 7),
    (said(429, "RATE_LIMITED", "9000"), "XmemoryRateLimited", HOUR),
    (said(429, "RATE_LIMITED", DATE), "XmemoryRateLimited", 5),
    (said(429, "RATE_LIMITED"), "XmemoryRateLimited", 5),
    (said(402, "QUOTA_EXCEEDED", **DAILY), "XmemoryDailyQuotaExceeded", HOUR),
    (said(402, "QUOTA_EXCEEDED", "60", **DAILY), "XmemoryDailyQuotaExceeded", 60),
    (said(402, "QUOTA_EXCEEDED", **DAILY, retry_after_seconds=90), "XmemoryDailyQuotaExceeded", 90),
    (said(402, "QUOTA_EXCEEDED", **DAILY, retry_after_seconds=9_000),
     "XmemoryDailyQuotaExceeded", HOUR),
    (said(402, "QUOTA_EXCEEDED", "60", **MONTHLY), "XmemoryMonthlyQuotaExceeded", FINAL),
    (said(402, "QUOTA_EXCEEDED"), "XmemoryQuotaExceeded", FINAL),
    (said(500, "INTERNAL_ERROR"), "XmemoryServerError", BY_POLICY),
    (said(503, "SERVICE_UNAVAILABLE", "3"), "XmemoryServerError", 3),
    (said(500, "MAX_RETRIES_EXCEEDED"), "XmemoryWriteFailed", FINAL),
    *[(schema_error(409, code), "XmemorySchemaRejected", FINAL) for code in SCHEMA_CODES],
    (said(418, "SOMETHING_NEW"), "XmemoryUnknown", BY_POLICY),
    (said(200, "RATE_LIMITED", "7"), "XmemoryRateLimited", 7),
    (schema_error(200, "stale_schema_version"), "XmemorySchemaRejected", FINAL),
    (said(302), "XmemoryUnavailable", BY_POLICY),
    (said(400), "XmemoryBadRequest", FINAL),
    (said(401), "XmemoryAuthFailed", FINAL),
    (said(402), "XmemoryBadRequest", FINAL),
    (said(403), "XmemoryAuthFailed", FINAL),
    (said(404), "XmemoryNotFound", FINAL),
    (said(408), "XmemoryServerError", BY_POLICY),
    (said(429), "XmemoryRateLimited", 5),
    (said(500), "XmemoryServerError", BY_POLICY),
    (said(503, hint="3"), "XmemoryServerError", 3),
    (said(200), "XmemoryUnavailable", BY_POLICY),  # not JSON
    (Answer(200, b""), "XmemoryUnavailable", BY_POLICY),
    (Answer(200, b'{"items": []}'), "XmemoryUnavailable", BY_POLICY),
]


@pytest.mark.parametrize(
    ("answer", "type", "again"), ROWS, ids=[f"{row[0].status}-{row[1]}-{row[2]}" for row in ROWS])
async def test_every_error_has_its_row_whatever_was_called(
        real: Real, answer: Answer, type: str, again: str | float) -> None:
    real.face.script = [answer] * 6
    with pytest.raises(xmemory.XmemoryAPIError):
        await real.instance.read("who?")
    for call in every_call(real.memory):
        assert verdict(await failing(call())) == (type, again)
    assert len(real.face.requests) == 6  # the client itself repeats nothing


async def test_the_clients_own_error_would_tell_it_all(real: Real) -> None:
    for answer in (said(400), said(400, "VALIDATION_ERROR"), schema_error(409, "anything")):
        real.face.script = [answer]
        with pytest.raises(xmemory.XmemoryAPIError, match=CANARY):
            await real.instance.read("who?")


@pytest.mark.parametrize(("hint", "seconds"), [("7", 7), ("-7", 0), (DATE, None), ("", None)])
async def test_the_client_reads_a_hint_in_seconds_and_no_date(
        real: Real, hint: str, seconds: int | None) -> None:
    real.face.script = [said(429, "RATE_LIMITED", hint)]
    with pytest.raises(xmemory.XmemoryAPIError) as caught:
        await real.instance.read("who?")
    seen = caught.value.status, caught.value.code, caught.value.retry_after
    assert seen == (429, "RATE_LIMITED", seconds)


async def test_a_wrong_key_and_an_unknown_instance_are_final(real: Real) -> None:
    client = xmemory.AsyncXmemoryClient(real.face.url, api_key=CANARY)
    async with client, connected(real.face.url) as other:
        for instance, type in [(client.instance(INSTANCE), "XmemoryAuthFailed"),
                               (other.instance("inst-2"), "XmemoryNotFound")]:
            for call in every_call(MemoryActivities(instance)):
                assert verdict(await failing(call())) == (type, FINAL)


async def test_a_dropped_connection_is_retryable(real: Real) -> None:
    real.face.script = [None] * 5
    for call in every_call(real.memory):
        assert verdict(await failing(call())) == ("XmemoryUnavailable", BY_POLICY)


async def test_a_refused_connection_is_retryable(refusing: str) -> None:
    async with connected(f"http://{refusing}") as client:
        for call in every_call(MemoryActivities(client.instance(INSTANCE))):
            assert verdict(await failing(call())) == ("XmemoryUnavailable", BY_POLICY)


async def test_a_late_answer_is_retryable_and_the_service_goes_on(real: Real) -> None:
    real.fake.paused, short = True, ActivityEnvironment()
    short.info = replace(short.info, start_to_close_timeout=timedelta(seconds=0.3))
    late = await failing(short.run(real.memory.write, WriteInput(KIM)))
    assert verdict(late) == ("XmemoryUnavailable", BY_POLICY)
    real.fake.paused = False
    assert await real.status("w00001") == ["completed"]


@pytest.mark.parametrize("write", ["write", "write_async"])
async def test_an_answer_without_a_write_id_is_no_success(real: Real, write: str) -> None:
    real.face.script = [Answer(200, json.dumps({"items": [{"other": CANARY}]}).encode())]
    assert verdict(await failing(real.run(write, KIM))) == ("XmemoryBadRequest", FINAL)


# --- The client and the plugin -------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["http", "socks5"])
async def test_no_proxy_stands_before_loopback(
    real: Real, refusing: str, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, f"{scheme}://{refusing}")
        monkeypatch.setenv(name.lower(), f"{scheme}://{refusing}")
    async with connected(real.face.url) as client:
        await client.instance(INSTANCE).write(structured_mutations=[opened()])
    assert len(real.fake.tables["RefundCase"]) == 1


@workflow.defn(sandboxed=False)
class Remembers:
    @workflow.run
    async def run(self, case_id: str) -> list[dict[str, Any]]:
        soon = timedelta(milliseconds=50)
        memory = memory_for_workflow(
            first_poll=soon, read_retry_policy=RetryPolicy(initial_interval=soon))
        key = {"case_id": case_id}
        await memory.write_durable(structured_mutations=[create("RefundCase", key, {"paid": 1.5})])
        scope = scope_to("RefundCase", key)
        return (await memory.read("RefundCase", read_mode="raw-tables", scope=scope)).rows()


def worker(client: Client, queue: str) -> Worker:
    return Worker(client, task_queue=queue, workflows=[Remembers])


async def remembered(client: Client, queue: str) -> WorkflowHandle[Remembers, Any]:
    """A Workflow on that Task Queue that has written and read."""
    handle = await client.start_workflow(
        Remembers.run, queue, id=f"remembers-{uuid.uuid4()}", task_queue=queue,
        execution_timeout=timedelta(seconds=50))
    assert await handle.result() == [{"case_id": queue, "paid": 1.5}]
    return handle


@pytest.fixture
def environment(real: Real, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XMEM_API_KEY", KEY)
    monkeypatch.setenv("XMEM_INSTANCE_ID", INSTANCE)
    monkeypatch.setenv("XMEM_API_URL", real.face.url)


@pytest.mark.usefixtures("environment")
async def test_the_plugin_needs_only_the_environment_and_history_tells_nothing_of_it(
    real: Real, server: Server
) -> None:
    real.fake.job_seconds = 0.1
    real.fake.fail_next(XmemoryAPIError(CANARY, status=503, code="SERVICE_UNAVAILABLE"))
    temporal, queue = await harness.connect(server.address, plugins=[XmemoryPlugin()]), "c-1"
    async with worker(temporal, queue):
        history = (await (await remembered(temporal, queue)).fetch_history()).to_json()
    assert "XmemoryServerError" in history
    assert history.count("EVENT_TYPE_ACTIVITY_TASK_SCHEDULED") == 3  # however often it was polled
    assert not [secret for secret in (KEY, CANARY, real.face.url) if secret in history]


@pytest.mark.usefixtures("environment")
async def test_a_worker_that_stops_closes_its_own_client_and_no_other(server: Server) -> None:
    clients: list[XmemoryClient] = []

    def connect(url: str | None, key: str) -> XmemoryClient:
        clients.append(connect_client(url, key))
        return clients[-1]

    temporal = await harness.connect(server.address, plugins=[XmemoryPlugin(connect=connect)])
    async with worker(temporal, "stays"):
        async with worker(temporal, "stops"):
            await remembered(temporal, "stops")
        with pytest.raises(xmemory.XmemoryAPIError, match="closed"):
            await clients[1].instance(INSTANCE).read("who?")
        await remembered(temporal, "stays")
