"""The memory Activities and their handle, with nothing about refunds in them."""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
from temporalio import workflow
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError
from temporalio.testing import ActivityEnvironment
from temporalio.worker import Worker

import fake_xmemory
import memory_activities
from fake_xmemory import FakeXmemory, XmemoryAPIError
from memory_activities import (
    VERDICTS,
    MemoryActivities,
    ReadInput,
    WaitInput,
    WorkflowMemory,
    create,
    delete,
    heartbeating,
    mapped_errors,
    scope_to,
    to_json,
    update,
)

PERSON = {"name": "Dr. Robert Kim"}
MADE = create("Person", PERSON, {"fact": "likes tea"})
TEXT = "Dr. Robert Kim: likes tea"
POLL, SECOND = timedelta(seconds=0.2), timedelta(seconds=1)
EAGER = WorkflowMemory(write_retry_policy=RetryPolicy(initial_interval=POLL), first_poll=POLL)


@pytest.fixture
def xmemory() -> FakeXmemory:
    return FakeXmemory({})


Uses = Callable[[WorkflowMemory], Awaitable[Any]]


@workflow.defn(sandboxed=False)
class Remembers:
    """Does one thing with memory; what it is comes as the number of a function."""

    uses: list[Uses] = []

    @workflow.run
    async def run(self, number: int) -> str:
        memory = WorkflowMemory(first_poll=POLL, queue_timeout=SECOND)
        return str(await self.uses[number](memory))


async def start(client: Client, queue: str, use: Uses) -> WorkflowHandle[Remembers, str]:
    Remembers.uses.append(use)
    return await client.start_workflow(
        Remembers.run, len(Remembers.uses) - 1, id=str(uuid.uuid4()), task_queue=queue)


def worker(client: Client, queue: str, xmemory: FakeXmemory) -> Worker:
    activities = MemoryActivities(xmemory).all()
    return Worker(client, task_queue=queue, workflows=[Remembers], activities=activities)


async def run(client: Client, xmemory: FakeXmemory, use: Uses) -> str:
    queue = str(uuid.uuid4())
    async with worker(client, queue, xmemory):
        return await (await start(client, queue, use)).result()


async def failed(result: Awaitable[str]) -> ApplicationError:
    with pytest.raises(WorkflowFailureError) as caught:
        await result
    cause = caught.value.cause
    inner = cause.cause if isinstance(cause, ActivityError) else cause
    assert isinstance(inner, ApplicationError)
    return inner


async def fails(client: Client, xmemory: FakeXmemory, use: Uses) -> ApplicationError:
    return await failed(run(client, xmemory, use))


def mutations(*changes: Any) -> Uses:
    return lambda memory: memory.write_durable(structured_mutations=changes)


def text(memory: WorkflowMemory) -> Awaitable[Any]:
    return memory.write_durable(TEXT)


def impatient(memory: WorkflowMemory) -> Awaitable[Any]:
    return memory.write_durable(TEXT, max_wait=SECOND)


# --- The handle ----------------------------------------------------------------------------------


async def test_the_handle_mirrors_the_client(client: Client, xmemory: FakeXmemory) -> None:
    async def everything(memory: WorkflowMemory) -> Any:
        written = await memory.write(structured_mutations=[MADE])
        queued = await memory.write_async("Ann: likes jam", extraction_logic="deep")
        status = await memory.write_status(queued.write_id)
        scope = scope_to("Person", PERSON)
        found = await memory.read("Person", read_mode="raw-tables", scope=scope)
        made = written.changes["created"]["objects"][0]["name"]
        return made, status.write_status, status.completed_at is not None, found.rows()

    row = {**PERSON, "fact": "likes tea"}
    assert await run(client, xmemory, everything) == str(("Person", "completed", True, [row]))


async def test_absent_not_answered_and_not_in_the_schema_are_three_answers() -> None:
    class Vague(FakeXmemory):
        async def read(self, query: str, **options: Any) -> Any:
            found = await super().read(query, **options)
            found.notice = "ambiguous" if query.endswith("?") else None
            return found

    memory, mode = MemoryActivities(Vague({})), to_json({"read_mode": "raw-tables"})
    absent, vague, foreign = [
        await memory.read(ReadInput(query, mode)) for query in ("person", "person?", "weather")]
    assert (absent.rows(), absent.notice) == ([], None) and absent.reader_result is not None
    assert (vague.rows(), vague.notice) == ([], "ambiguous")
    assert (foreign.reader_result, foreign.notice) == (None, None)


async def test_a_read_is_bound_to_its_scope(xmemory: FakeXmemory) -> None:
    for name in ("ann", "anna"):
        xmemory.put("Person", {"name": name})
    options = {"read_mode": "raw-tables", "scope": scope_to("Person", {"name": "ann"})}
    found = await MemoryActivities(xmemory).read(ReadInput("Person", to_json(options)))
    assert [row["name"] for row in found.rows()] == ["ann"]


async def test_a_texts_scope_reaches_xmemory(client: Client, xmemory: FakeXmemory) -> None:
    xmemory.put("Person", {"name": "ann"})
    xmemory.put("Person", PERSON)
    scope = scope_to("Person", {"name": "ann"})
    failure = await fails(client, xmemory, lambda memory: memory.write_durable(TEXT, scope=scope))
    assert failure.type == "XmemoryWriteFailed"


async def test_summaries_show_content_only_on_request(
    client: Client, xmemory: FakeXmemory
) -> None:
    async def both(memory: WorkflowMemory) -> None:
        await memory.read("What does Ann like?")
        await WorkflowMemory(include_content=True).read("What does Ann like?")

    queue = str(uuid.uuid4())
    async with worker(client, queue, xmemory):
        handle = await start(client, queue, both)
        await handle.result()
    events = (await handle.fetch_history()).events
    payloads = [event.user_metadata.summary for event in events if event.user_metadata.summary.data]
    summaries = [client.data_converter.payload_converter.from_payload(p, str) for p in payloads]
    assert summaries == ["xmemory read: 19 chars", "xmemory read: 'What does Ann like?'"]


class Circle:
    """Not JSON, and not one of the client's models."""

    __slots__ = ()


WRONG: dict[str, Callable[[WorkflowMemory], Awaitable[Any]]] = {
    "a read without a query": lambda memory: memory.read(" "),
    "a query that is no text": lambda memory: memory.read(None),  # type: ignore[arg-type]
    "an unknown read mode": lambda memory: memory.read("q", read_mode="poem"),
    "an unknown option": lambda memory: memory.read("q", mode="x"),  # type: ignore[call-arg]
    "a scope without a key": lambda memory: memory.read("q", scope=scope_to("Person", {})),
    "a scope of no records": lambda memory: memory.read("q", scope={"objects": []}),
    "a write of nothing": lambda memory: memory.write_durable(),
    "two writes in one": lambda memory: memory.write("text", structured_mutations=[MADE]),
    "no mutations": lambda memory: memory.write_async(structured_mutations=[]),
    "a mutation of nothing": lambda memory: memory.write(structured_mutations=[{"a": {}}]),
    "mutations with a scope": lambda memory: memory.write(
        structured_mutations=[MADE], scope=scope_to("Person", PERSON)),
    "an unknown logic": lambda memory: memory.write("text", extraction_logic="regular"),
    "a date": lambda memory: memory.write(
        structured_mutations=[update("Person", PERSON, {"met": datetime(2026, 1, 1, tzinfo=UTC)})]),
    "not a number": lambda memory: memory.write(
        structured_mutations=[update("Person", PERSON, {"height": float("nan")})]),
    "something else": lambda memory: memory.write(
        structured_mutations=[update("Person", PERSON, {"shape": Circle()})]),
    "half a character": lambda memory: memory.write_durable("\ud800"),
    "no time to wait": lambda memory: memory.write_durable("text", max_wait=timedelta(0)),
    "no time to read": lambda memory: WorkflowMemory(read_timeout=timedelta(0)).read("q"),
    "no write id": lambda memory: memory.write_status(""),
}


async def test_wrong_arguments_fail_the_workflow_and_schedule_nothing(
    client: Client, xmemory: FakeXmemory
) -> None:
    queue = str(uuid.uuid4())
    async with worker(client, queue, xmemory):
        handles = {what: await start(client, queue, use) for what, use in WRONG.items()}
        failures = {what: await failed(handle.result()) for what, handle in handles.items()}
    assert {what: failure.type for what, failure in failures.items()} == dict.fromkeys(
        WRONG, "XmemoryBadRequest")
    assert not xmemory.calls


async def test_what_event_history_cannot_hold_is_refused_on_both_ways(
    client: Client, xmemory: FakeXmemory
) -> None:
    novel = "é" * 100_000
    failure = await fails(client, xmemory, lambda memory: memory.write_durable(novel))
    assert failure.type == "XmemoryTooLarge" and not xmemory.calls
    xmemory.put("Person", PERSON | {"fact": novel})
    failure = await fails(client, xmemory, lambda memory: memory.read("Person"))
    assert failure.type == "XmemoryTooLarge" and xmemory.counts()["read"] == 1


# --- The durable write ---------------------------------------------------------------------------


async def test_waiting_costs_the_same_few_events_however_long_it_takes(
    client: Client, xmemory: FakeXmemory
) -> None:
    counts, polls = [], []
    for seconds in (0.0, 0.5):
        xmemory.job_seconds, before = seconds, xmemory.counts()["write_status"]
        queue = str(uuid.uuid4())
        async with worker(client, queue, xmemory):
            handle = await start(client, queue, text)
            await handle.result()
        counts.append(len((await handle.fetch_history()).events))
        polls.append(xmemory.counts()["write_status"] - before)
    assert polls[1] > polls[0] and counts[0] == counts[1] <= 18


async def test_a_write_that_fails_says_so(client: Client, xmemory: FakeXmemory) -> None:
    failure = await fails(client, xmemory, mutations(update("Person", PERSON, {"fact": "none"})))
    assert failure.type == "XmemoryWriteFailed"
    assert failure.details[0]["error_detail"] == "no Person with this key"


async def test_a_write_that_xmemory_does_not_know_is_final(
    client: Client, xmemory: FakeXmemory
) -> None:
    xmemory.shown_status = "not_found"
    assert (await fails(client, xmemory, text)).type == "XmemoryWriteNotFound"
    assert xmemory.counts()["write_status"] == 1


@pytest.mark.everywhere
async def test_a_write_that_never_ends_is_a_timeout_with_the_id_to_ask_again(
    client: Client, xmemory: FakeXmemory
) -> None:
    xmemory.paused = True
    failure = await fails(client, xmemory, impatient)
    assert (failure.type, failure.details[0]) == ("XmemoryWriteTimeout", {"write_id": "w00001"})
    assert failure.cause is None


@pytest.mark.everywhere
async def test_it_is_the_same_timeout_if_no_worker_is_alive_at_the_deadline(
    client: Client, xmemory: FakeXmemory
) -> None:
    xmemory.paused, queue = True, str(uuid.uuid4())
    async with worker(client, queue, xmemory):
        handle = await start(client, queue, impatient)
        while not xmemory.counts()["write_status"]:
            await asyncio.sleep(0.02)
    await asyncio.sleep(2.2)  # the wait, and the second that Temporal adds to it
    async with worker(client, queue, xmemory):
        failure = await failed(handle.result())
    assert (failure.type, failure.details[0]) == ("XmemoryWriteTimeout", {"write_id": "w00001"})


@pytest.mark.everywhere
async def test_a_write_that_ends_at_the_deadline_is_not_lost(
    client: Client, xmemory: FakeXmemory
) -> None:
    xmemory.job_seconds = SECOND.total_seconds() - 0.05  # the next regular poll would be too late
    assert "completed" in await run(client, xmemory, impatient)


async def test_a_status_that_is_new_to_us_means_not_finished(
    client: Client, xmemory: FakeXmemory
) -> None:
    xmemory.shown_status, queue = "compacting", str(uuid.uuid4())
    async with worker(client, queue, xmemory):
        handle = await start(client, queue, text)
        while not xmemory.counts()["write_status"]:
            await asyncio.sleep(0.02)
        xmemory.shown_status = ""
        assert "completed" in await handle.result()


async def test_a_status_may_be_an_enum_as_in_the_client() -> None:
    class Status(Enum):
        completed = "completed"

    class Client(FakeXmemory):
        async def write_status(self, write_id: str, **_: Any) -> Any:
            return SimpleNamespace(
                write_status=Status.completed, error_detail=None, completed_at=None, changes=None)

    found = await MemoryActivities(Client({})).wait_for_write(WaitInput("w", 1))
    assert found.write_status == "completed"


async def test_a_report_that_is_too_large_is_left_out(client: Client) -> None:
    class Verbose(FakeXmemory):
        async def write_status(self, write_id: str, *, timeout: float | None = None) -> Any:
            found = await super().write_status(write_id)
            found.changes = "x" * memory_activities.MAX_BYTES
            return found

    assert "completed" in await run(client, Verbose({}), text)


# --- Lost answers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", ["write", pytest.param("write_async", marks=pytest.mark.everywhere)])
@pytest.mark.parametrize(("before", "change", "after"), [
    ([], MADE, [{"fact": "likes tea", **PERSON}]),
    ([{"fact": "-", **PERSON}], update("Person", PERSON, {"fact": "likes tea"}),
     [{"fact": "likes tea", **PERSON}]),
    ([PERSON], delete("Person", PERSON), []),
])
async def test_a_mutation_whose_answer_was_lost_is_made_once(
    client: Client, xmemory: FakeXmemory, method: str, before: Any, change: Any, after: Any
) -> None:
    xmemory.put("Person", {"name": "somebody else"})
    for row in before:
        xmemory.put("Person", dict(row))
    xmemory.fail_next(fake_xmemory.connection_lost(), method=method, acted=True)
    if method == "write":
        await run(client, xmemory, lambda memory: EAGER.write(structured_mutations=[change]))
    else:
        assert "completed" in await run(client, xmemory, mutations(change))
    rows = list(xmemory.tables["Person"].values())
    assert rows == [{"name": "somebody else"}, *after] and xmemory.counts()[method] == 2


async def test_a_create_of_a_record_with_other_values_is_final(
    client: Client, xmemory: FakeXmemory
) -> None:
    xmemory.put("Person", {"fact": "hates tea", **PERSON})
    assert (await fails(client, xmemory, mutations(MADE))).type == "XmemoryConflict"
    assert xmemory.tables["Person"][(("name", PERSON["name"]),)]["fact"] == "hates tea"


async def test_a_delete_of_what_was_never_there_is_refused(
    client: Client, xmemory: FakeXmemory
) -> None:
    failure = await fails(client, xmemory, mutations(delete("Person", PERSON)))
    assert failure.type == "XmemoryWriteFailed"


@pytest.mark.parametrize("method", ["write", "write_durable"])
async def test_a_text_whose_answer_was_lost_is_not_sent_again(
    client: Client, xmemory: FakeXmemory, method: str
) -> None:
    called = "write" if method == "write" else "write_async"
    xmemory.fail_next(fake_xmemory.connection_lost(), method=called, acted=True)
    failure = await fails(client, xmemory, lambda memory: getattr(memory, method)(TEXT))
    assert failure.type == "XmemoryWriteUncertain" and "may be queued" in failure.message
    assert xmemory.counts() == {called: 1}


async def test_sending_it_again_would_have_forked_the_person(client: Client) -> None:
    forking = FakeXmemory({}, forks=True)
    forking.fail_next(fake_xmemory.connection_lost(), method="write_async", acted=True)
    await run(client, forking, lambda _: EAGER.write_durable(TEXT))
    assert [row["name"] for row in forking.tables["Person"].values()] == [
        "Dr. Robert Kim", "Robert Kim"]


# --- Errors --------------------------------------------------------------------------------------

CANARY = "xmem_CANARY_key at canary.host.example"
FINAL, ASAP, A_WHILE, AN_HOUR = None, timedelta(0), timedelta(seconds=5), timedelta(hours=1)
ROWS: list[tuple[str | int | None, str, timedelta | None]] = [  # None: final; 0: as the policy says
    ("UNAUTHORIZED", "XmemoryAuthFailed", FINAL),
    ("FORBIDDEN", "XmemoryAuthFailed", FINAL),
    ("NOT_FOUND", "XmemoryNotFound", FINAL),
    ("VALIDATION_ERROR", "XmemoryBadRequest", FINAL),
    ("INVALID_INPUT", "XmemoryBadRequest", FINAL),
    ("ALREADY_EXISTS", "XmemoryBadRequest", FINAL),
    ("CONFLICT", "XmemoryBadRequest", FINAL),
    ("RATE_LIMITED", "XmemoryRateLimited", A_WHILE),
    ("daily_quota_exceeded", "XmemoryDailyQuotaExceeded", AN_HOUR),
    ("monthly_quota_exceeded", "XmemoryMonthlyQuotaExceeded", FINAL),
    ("QUOTA_EXCEEDED", "XmemoryQuotaExceeded", FINAL),
    ("INTERNAL_ERROR", "XmemoryServerError", ASAP),
    ("SERVICE_UNAVAILABLE", "XmemoryServerError", ASAP),
    ("MAX_RETRIES_EXCEEDED", "XmemoryWriteFailed", FINAL),
    ("stale_proposal_version", "XmemorySchemaRejected", FINAL),
    ("stale_schema_version", "XmemorySchemaRejected", FINAL),
    ("dependency_closure_failed", "XmemorySchemaRejected", FINAL),
    ("destructive_confirmation_required", "XmemorySchemaRejected", FINAL),
    ("non_additive_change_requires_plan", "XmemorySchemaRejected", FINAL),
    ("migration_not_found", "XmemorySchemaRejected", FINAL),
    ("instance_not_initialised", "XmemorySchemaRejected", FINAL),
    ("invalid_decision_input", "XmemorySchemaRejected", FINAL),
    ("SOMETHING_NEW", "XmemoryUnknown", ASAP),
    (400, "XmemoryBadRequest", FINAL),
    (401, "XmemoryAuthFailed", FINAL),
    (402, "XmemoryBadRequest", FINAL),
    (403, "XmemoryAuthFailed", FINAL),
    (404, "XmemoryNotFound", FINAL),
    (408, "XmemoryServerError", ASAP),
    (429, "XmemoryRateLimited", A_WHILE),
    (500, "XmemoryServerError", ASAP),
    (502, "XmemoryServerError", ASAP),
    (None, "XmemoryUnavailable", ASAP),
]


def scripted(row: str | int | None) -> XmemoryAPIError:
    if isinstance(row, str) and row.endswith("quota_exceeded"):
        return XmemoryAPIError(CANARY, status=402, code="QUOTA_EXCEEDED", details={"kind": row})
    if isinstance(row, str):
        return XmemoryAPIError(CANARY, status=418, code=row, details={"text": CANARY})
    return XmemoryAPIError(CANARY, status=row)


def mapped(error: Exception) -> ApplicationError:
    with pytest.raises(ApplicationError) as caught, mapped_errors():
        raise error
    return caught.value


@pytest.mark.parametrize(("row", "type", "delay"), ROWS)
def test_every_row_of_the_table(row: str | int | None, type: str, delay: timedelta | None) -> None:
    failure = mapped(scripted(row))
    assert (failure.type, failure.non_retryable) == (type, delay is FINAL)
    assert (failure.next_retry_delay or ASAP) == (delay or ASAP)
    assert failure.__cause__ is None and failure.__suppress_context__
    assert "CANARY" not in f"{failure!r} {failure.details}"


def test_no_row_is_without_a_test() -> None:
    assert VERDICTS.keys() <= {row for row, *_ in ROWS}


@pytest.mark.parametrize(("error", "type"), [
    (OSError(CANARY), "XmemoryUnavailable"),
    (TimeoutError(CANARY), "XmemoryUnavailable"),
    (ValueError(CANARY), "XmemoryBadRequest"),
    (TypeError(CANARY), "XmemoryBadRequest"),
])
def test_errors_that_are_not_the_clients(error: Exception, type: str) -> None:
    assert mapped(error).type == type


@pytest.mark.parametrize(("hint", "delay"), [(7, 7), (9_000, 3_600), (0, 5), (None, 5)])
def test_a_servers_hint_is_heeded_and_capped(hint: int | None, delay: int) -> None:
    limited = XmemoryAPIError("slow down", code="RATE_LIMITED", retry_after=hint)
    quota = XmemoryAPIError("enough", code="QUOTA_EXCEEDED", details={
        "kind": "daily_quota_exceeded", "retry_after_seconds": 9_000})
    assert mapped(limited).next_retry_delay == timedelta(seconds=delay)
    assert mapped(quota).next_retry_delay == AN_HOUR


@pytest.mark.parametrize(("given", "client"), [(120, 115), (30, 25), (5, 4), (4, 3.2), (1, 0.8)])
async def test_the_client_gives_up_before_temporal_does(given: float, client: float) -> None:
    environment = ActivityEnvironment()
    environment.info = environment.default_info()
    environment.info = SimpleNamespace(  # type: ignore[assignment]
        start_to_close_timeout=timedelta(seconds=given))
    assert environment.run(memory_activities.client_timeout) == client


async def test_only_an_attempt_that_lasts_heartbeats() -> None:
    environment, beaten = ActivityEnvironment(), asyncio.Event()
    environment.info = replace(
        environment.default_info(), heartbeat_timeout=timedelta(seconds=0.4))
    environment.on_heartbeat = lambda *details: beaten.set()
    await environment.run(heartbeating(asyncio.sleep), 0)
    assert not beaten.is_set()
    assert await environment.run(heartbeating(beaten.wait))


async def test_no_key_and_no_host_is_in_history_failure_or_log(
    client: Client, xmemory: FakeXmemory, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    retried, final = scripted("INTERNAL_ERROR"), scripted("UNAUTHORIZED")
    xmemory.fail_next(retried)
    xmemory.fail_next(final)
    xmemory.fail_next(OSError(CANARY), method="write_async")  # type: ignore[arg-type]
    queue = str(uuid.uuid4())
    seen = []
    async with worker(client, queue, xmemory):
        for use in (lambda memory: memory.read("Person"), text):
            handle = await start(client, queue, use)
            with pytest.raises(WorkflowFailureError) as caught:
                await handle.result()
            seen += [repr(caught.value.cause), repr(caught.value.cause.__cause__)]
            seen += [str(event) for event in (await handle.fetch_history()).events]
    assert "XmemoryAuthFailed" in str(seen) and "XmemoryWriteUncertain" in str(seen)
    assert caplog.text and "CANARY" not in caplog.text + str(seen)
    assert "canary.host" not in caplog.text + str(seen)
