"""The memory Activities and `write_durable`, with nothing about refunds in them."""

import asyncio
import json
import uuid
from datetime import timedelta
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
from temporalio import workflow
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import ActivityError, ApplicationError
from temporalio.worker import Worker

import fake_xmemory
import memory_activities
from fake_xmemory import FakeXmemory, XmemoryAPIError
from memory_activities import (
    MemoryActivities,
    ReadInput,
    WaitInput,
    WorkflowMemory,
    WriteInput,
    create,
    memory_for_workflow,
    scope_to,
    verdict_for,
)

MUTATION = create("RefundCase", {"case_id": "c-1"}, {"outcome": "denied", "amount": 5})
QUICK = timedelta(seconds=1)
BEAT = timedelta(seconds=0.5)


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_activities, "FIRST_POLL", 0.3)


@pytest.fixture
def xmemory() -> FakeXmemory:
    return FakeXmemory({"Customer": ["customer_id"], "RefundCase": ["case_id"]})


@workflow.defn(sandboxed=False)
class Remembers:
    """Does one thing with memory; what it is comes as the name of a function below."""

    @workflow.run
    async def run(self, what: str) -> str:
        return str(await globals()[what](memory_for_workflow()))


async def durable(memory: WorkflowMemory) -> str:
    return (await memory.write_durable(structured_mutations=[MUTATION])).write_status


async def durable_text(memory: WorkflowMemory) -> str:
    return (await memory.write_durable("Robert Kim: likes tea")).write_status


async def quick(memory: WorkflowMemory) -> str:
    return (await memory.write_durable("Robert Kim: likes tea", max_wait=QUICK)).write_status


async def each_once(memory: WorkflowMemory) -> str:
    await memory.write(structured_mutations=[MUTATION])
    queued = await memory.write_async("Robert Kim: likes tea")
    status = await memory.write_status(queued.write_id)
    found = await memory.read("RefundCase", read_mode="raw-tables")
    return f"{status.write_status} {found.rows()}"


async def slowly(_: WorkflowMemory) -> Any:
    return await memory_for_workflow(heartbeat_timeout=BEAT).read("RefundCase")


async def nothing_to_write(memory: WorkflowMemory) -> Any:
    return await memory.write_durable()


async def both(memory: WorkflowMemory) -> Any:
    return await memory.write_async("text", structured_mutations=[MUTATION])


async def no_query(memory: WorkflowMemory) -> Any:
    return await memory.read(" ")


async def start(client: Client, queue: str, what: str) -> WorkflowHandle[Remembers, str]:
    return await client.start_workflow(
        Remembers.run, what, id=str(uuid.uuid4()), task_queue=queue,
        task_timeout=timedelta(seconds=2))


def worker(client: Client, queue: str, xmemory: FakeXmemory) -> Worker:
    activities = MemoryActivities(xmemory).all()
    return Worker(client, task_queue=queue, workflows=[Remembers], activities=activities)


async def run(client: Client, xmemory: FakeXmemory, what: str) -> str:
    queue = str(uuid.uuid4())
    async with worker(client, queue, xmemory):
        return await (await start(client, queue, what)).result()


async def fails(client: Client, xmemory: FakeXmemory, what: str) -> ApplicationError:
    with pytest.raises(WorkflowFailureError) as caught:
        await run(client, xmemory, what)
    cause = caught.value.cause
    inner = cause.cause if isinstance(cause, ActivityError) else cause
    assert isinstance(inner, ApplicationError)
    return inner


async def test_the_handle_mirrors_the_client(client: Client, xmemory: FakeXmemory) -> None:
    expected = [{"case_id": "c-1", "amount": 5, "outcome": "denied"}]
    assert await run(client, xmemory, "each_once") == f"completed {expected}"


async def test_waiting_costs_the_same_few_events_however_long_it_takes(
    client: Client, xmemory: FakeXmemory
) -> None:
    counts, polls = [], []
    for seconds in (0.0, 0.5):
        xmemory.job_seconds, before = seconds, xmemory.counts()["write_status"]
        queue = str(uuid.uuid4())
        async with worker(client, queue, xmemory):
            handle = await start(client, queue, "durable_text")
            assert await handle.result() == "completed"
        counts.append(len((await handle.fetch_history()).events))
        polls.append(xmemory.counts()["write_status"] - before)
    assert polls[1] > polls[0] and counts[0] == counts[1] <= 18


async def test_a_write_that_fails_says_so(client: Client, xmemory: FakeXmemory) -> None:
    xmemory.put("RefundCase", {"case_id": "c-1", "outcome": "other"})
    assert (await fails(client, xmemory, "durable")).type == "XmemoryConflict"


async def test_a_write_that_xmemory_does_not_know_is_final(
    client: Client, xmemory: FakeXmemory
) -> None:
    xmemory.shown_status = "not_found"
    assert (await fails(client, xmemory, "durable")).type == "XmemoryWriteNotFound"


async def test_a_write_that_never_ends_is_a_timeout_with_the_id_to_ask_again(
    client: Client, xmemory: FakeXmemory
) -> None:
    xmemory.paused = True
    failure = await fails(client, xmemory, "quick")
    assert failure.type == "XmemoryWriteTimeout"
    assert failure.details[0]["write_id"] == "w00001"


async def test_a_write_that_ends_at_the_deadline_is_not_lost(
    client: Client, xmemory: FakeXmemory
) -> None:
    xmemory.job_seconds = QUICK.total_seconds() - 0.05  # the next regular poll would be too late
    assert await run(client, xmemory, "quick") == "completed"


async def test_a_status_that_is_new_to_us_means_not_finished(
    client: Client, xmemory: FakeXmemory
) -> None:
    xmemory.shown_status = "compacting"
    queue = str(uuid.uuid4())
    async with worker(client, queue, xmemory):
        handle = await start(client, queue, "durable")
        while not xmemory.counts()["write_status"]:
            await asyncio.sleep(0.02)
        xmemory.shown_status = ""
        assert await handle.result() == "completed"


async def test_a_status_may_be_an_enum_as_in_the_client() -> None:
    class Status(Enum):
        completed = "completed"

    class Client(FakeXmemory):
        async def write_status(self, write_id: str, **_: Any) -> Any:
            return SimpleNamespace(
                write_status=Status.completed, error_detail=None, completed_at=None, changes=None)

    found = await MemoryActivities(Client({})).wait_for_write(WaitInput("w", 1))
    assert found.write_status == "completed"


@pytest.mark.parametrize("method", ["write", "write_async"])
async def test_a_lost_answer_to_a_create_still_ends_in_one_record(
    xmemory: FakeXmemory, method: str
) -> None:
    xmemory.fail_next(fake_xmemory.connection_lost(), method=method, acted=True)
    memory, input = MemoryActivities(xmemory), WriteInput(options_json=json.dumps({"structured_mutations": [MUTATION]}))
    with pytest.raises(ApplicationError) as lost:
        await getattr(memory, method)(input)
    assert not lost.value.non_retryable
    again = await getattr(memory, method)(input)
    if again.write_id:
        await memory.wait_for_write(WaitInput(again.write_id, 1, input.options_json))
    assert len(xmemory.tables["RefundCase"]) == 1


async def test_free_text_is_written_at_most_once(client: Client, xmemory: FakeXmemory) -> None:
    xmemory.fail_next(fake_xmemory.connection_lost(), method="write_async", acted=True)
    assert (await fails(client, xmemory, "durable_text")).type == "XmemoryWriteUncertain"
    assert xmemory.counts()["write_async"] == 1


async def test_a_read_is_bound_to_its_scope(xmemory: FakeXmemory) -> None:
    for customer in ("ann", "anna"):
        xmemory.put("Customer", {"customer_id": customer})
        xmemory.put("RefundCase", {"case_id": customer, "customer_id": customer})
    options = {"read_mode": "raw-tables", "scope": scope_to("Customer", {"customer_id": "ann"})}
    found = await MemoryActivities(xmemory).read(ReadInput("RefundCase", json.dumps(options)))
    assert [row["case_id"] for row in found.rows()] == ["ann"]


@pytest.mark.parametrize("what", ["nothing_to_write", "both", "no_query"])
async def test_wrong_arguments_fail_the_workflow_and_schedule_nothing(
    client: Client, xmemory: FakeXmemory, what: str
) -> None:
    assert (await fails(client, xmemory, what)).type == "XmemoryBadRequest"
    assert not xmemory.calls


def api_error(code: str | None = None, status: int | None = None, **details: Any) -> Exception:
    return XmemoryAPIError("secret", status=status, code=code, details=details)


@pytest.mark.parametrize(("error", "type", "retryable"), [
    (api_error(), "XmemoryUnavailable", True),
    (OSError("secret"), "XmemoryUnavailable", True),
    (ValueError("secret"), "XmemoryBadRequest", False),
    (api_error("UNAUTHORIZED", 401), "XmemoryAuthFailed", False),
    (api_error("VALIDATION_ERROR", 400), "XmemoryBadRequest", False),
    (api_error("RATE_LIMITED", 429), "XmemoryRateLimited", True),
    (api_error("SERVICE_UNAVAILABLE", 503), "XmemoryServerError", True),
    (api_error("QUOTA_EXCEEDED", 402, kind="daily_quota_exceeded"),
     "XmemoryDailyQuotaExceeded", True),
    (api_error("QUOTA_EXCEEDED", 402, kind="monthly_quota_exceeded"),
     "XmemoryMonthlyQuotaExceeded", False),
    (api_error("QUOTA_EXCEEDED", 402), "XmemoryQuotaExceeded", False),
    (api_error("MAX_RETRIES_EXCEEDED", 500), "XmemoryWriteFailed", False),
    (api_error("stale_schema_version", 409), "XmemorySchemaRejected", False),
    (api_error("SOMETHING_NEW", 418), "XmemoryUnknown", True),
    (api_error(status=404), "XmemoryNotFound", False),
    (api_error(status=408), "XmemoryServerError", True),
    (api_error(status=502), "XmemoryServerError", True),
    (api_error(status=402), "XmemoryBadRequest", False),
])
def test_every_error_has_its_row(error: Exception, type: str, retryable: bool) -> None:
    assert verdict_for(error)[:2] == (type, retryable)


async def test_a_servers_hint_becomes_the_retry_delay_and_its_text_stays_out(
    xmemory: FakeXmemory,
) -> None:
    for seconds, delay in ((7, 7), (9_000, 3_600)):
        xmemory.fail_next(XmemoryAPIError("secret", code="RATE_LIMITED", retry_after=seconds))
        with pytest.raises(ApplicationError) as caught:
            await MemoryActivities(xmemory).read(ReadInput("RefundCase"))
        assert caught.value.next_retry_delay == timedelta(seconds=delay)
        assert "secret" not in repr(caught.value) and caught.value.__suppress_context__


async def test_a_slow_call_heartbeats_and_takes_one_attempt(
    client: Client, xmemory: FakeXmemory
) -> None:
    real_read = xmemory.read

    async def slow_read(*args: Any, **options: Any) -> Any:
        await asyncio.sleep(3 * BEAT.total_seconds())
        return await real_read(*args, **options)

    xmemory.read = slow_read  # type: ignore[method-assign]
    await run(client, xmemory, "slowly")
    assert xmemory.counts()["read"] == 1
