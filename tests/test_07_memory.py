"""The memory Activities and their handle, with nothing about refunds in them."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from temporalio import workflow
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.common import RetryPolicy
from temporalio.exceptions import ApplicationError, CancelledError
from temporalio.testing import ActivityEnvironment
from temporalio.worker import Worker

import memory_activities
from fake_xmemory import FakeXmemory, XmemoryAPIError, connection_lost
from memory_activities import (
    MemoryActivities,
    ReadInput,
    WorkflowMemory,
    client_errors,
    client_timeout,
    create,
    delete,
    heartbeating,
    scope_to,
    update,
)

PERSON = {"name": "Dr. Robert Kim"}
MADE = create("Person", PERSON, {"fact": "likes tea"})
ROW = {**PERSON, "fact": "likes tea"}
TEXT = "Dr. Robert Kim: likes tea"
POLL, SECOND = timedelta(seconds=0.2), timedelta(seconds=1)
SOON = replace(memory_activities.RETRIED, initial_interval=POLL)
CANARY = "xmem_CANARY_key at canary.host.example"  # must never be seen in Temporal


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_activities, "RETRIED", SOON)  # a retry would wait for a second


Use = Callable[[WorkflowMemory], Awaitable[Any]]


@workflow.defn(sandboxed=False)
class Remembers:
    """Does one thing with memory; what it is comes as the number of a function."""

    uses: list[Use] = []

    @workflow.run
    async def run(self, number: int) -> str:
        memory = WorkflowMemory(first_poll=POLL, queue_timeout=SECOND)
        return str(await self.uses[number](memory))


async def start(client: Client, queue: str, use: Use) -> WorkflowHandle[Remembers, str]:
    Remembers.uses.append(use)
    number = len(Remembers.uses) - 1
    return await client.start_workflow(Remembers.run, number, id=queue, task_queue=queue)


def worker(client: Client, queue: str, xmemory: FakeXmemory) -> Worker:
    activities = MemoryActivities(xmemory).all()
    return Worker(client, task_queue=queue, workflows=[Remembers], activities=activities)


async def run(client: Client, xmemory: FakeXmemory, use: Use) -> str:
    queue = str(uuid.uuid4())
    async with worker(client, queue, xmemory):
        return await (await start(client, queue, use)).result()


async def failed(result: Awaitable[str]) -> ApplicationError:
    """A failure of the Workflow that is the handle's own ApplicationError, not an ActivityError."""
    with pytest.raises(WorkflowFailureError) as caught:
        await result
    assert isinstance(caught.value.cause, ApplicationError)
    return caught.value.cause


async def fails(client: Client, xmemory: FakeXmemory, use: Use) -> str | None:
    return (await failed(run(client, xmemory, use))).type


def durably(*mutations: Any) -> Use:
    return lambda memory: memory.write_durable(structured_mutations=mutations)


def patiently(memory: WorkflowMemory) -> Awaitable[Any]:
    return memory.write_durable(TEXT)


# --- The handle ----------------------------------------------------------------------------------


class PlainMemory(WorkflowMemory):
    """The handle in a program without Temporal."""

    activities = MemoryActivities(FakeXmemory({}))

    async def run_activity(self, step: Any, input: Any, **_: Any) -> Any:
        return await step(self.activities, input)


async def everything(memory: WorkflowMemory) -> Any:
    written = await memory.write(structured_mutations=[MADE])
    queued = await memory.write_async("Ann: likes jam", extraction_logic="deep")
    status = await memory.write_status(queued.write_id)
    scope = scope_to("Person", PERSON)
    found = await memory.read("Person", read_mode="raw-tables", scope=scope)
    return written.changes["created"]["objects"], status.write_status, found.rows()


async def test_the_handle_mirrors_the_client(client: Client) -> None:
    found = await run(client, FakeXmemory({}), everything)
    assert found == str(([{"name": "Person"}], "completed", [ROW]))


async def test_a_program_without_temporal_overrides_one_method() -> None:
    written = await PlainMemory().write_durable(structured_mutations=[MADE])
    found = await PlainMemory().read("Person", read_mode="raw-tables")
    assert (written.write_status, found.rows()) == ("completed", [ROW])
    with pytest.raises(ApplicationError, match="refused the request"):
        await PlainMemory().read("Person", read_mode="poem")


async def test_nothing_matches_and_not_in_the_schema_are_two_answers() -> None:
    memory, options = MemoryActivities(FakeXmemory({})), {"read_mode": "raw-tables"}
    absent, foreign = [await memory.read(ReadInput(q, options)) for q in ("person", "weather")]
    assert absent.reader_result is not None and foreign.reader_result is None
    assert absent.rows() == foreign.rows() == []


WRONG: dict[str, Use] = {
    "an unknown read mode": lambda memory: memory.read("q", read_mode="poem"),
    "an unknown option": lambda memory: memory.read("q", mode="x"),
    "a scope without a key": lambda memory: memory.read("q", scope=scope_to("Person", {})),
    "a write of nothing": lambda memory: memory.write_durable(),
    "two writes in one": lambda memory: memory.write("text", structured_mutations=[MADE]),
    "no mutations": lambda memory: memory.write_async(structured_mutations=[]),
    "a mutation of nothing": lambda memory: memory.write(structured_mutations=[{"a": {}}]),
    "a mutation that is none": lambda memory: memory.write(structured_mutations=[1]),
    "a date": durably(update("Person", PERSON, {"met": datetime(2026, 1, 1, tzinfo=UTC)})),
    "something else": durably(update("Person", PERSON, {"shape": object()})),
    "no time to wait": lambda memory: memory.write_durable("text", max_wait=timedelta(0)),
}


async def test_wrong_arguments_fail_the_workflow_instead_of_hanging_it(client: Client) -> None:
    xmemory = FakeXmemory({})
    xmemory.put("Person", dict(ROW))  # a refused create would count as done, but not beside a text
    types = await asyncio.gather(*(fails(client, xmemory, use) for use in WRONG.values()))
    assert types == ["XmemoryBadRequest"] * len(WRONG) and set(xmemory.calls) == {"read"}


async def test_a_cancel_of_the_workflow_stays_a_cancel(client: Client) -> None:
    xmemory, queue = FakeXmemory({}), str(uuid.uuid4())
    xmemory.paused = True
    async with worker(client, queue, xmemory):
        handle = await start(client, queue, patiently)
        while not xmemory.counts()["write_status"]:
            await asyncio.sleep(0.02)
        await handle.cancel()
        with pytest.raises(WorkflowFailureError) as caught:
            await handle.result()
    assert isinstance(caught.value.cause, CancelledError)


# --- The durable write ---------------------------------------------------------------------------


async def test_waiting_costs_the_same_few_events_however_long_it_takes(client: Client) -> None:
    events, polls = [], []
    for seconds in (0.0, 0.5):
        xmemory, queue = FakeXmemory({}), str(uuid.uuid4())
        xmemory.job_seconds = seconds
        async with worker(client, queue, xmemory):
            handle = await start(client, queue, patiently)
            await handle.result()
        events.append(len((await handle.fetch_history()).events))
        polls.append(xmemory.counts()["write_status"])
    assert polls[1] > polls[0] and events[0] == events[1] <= 18


async def test_a_write_that_fails_says_why(client: Client) -> None:
    use = durably(update("Person", PERSON, {"fact": "none"}))
    failure = await failed(run(client, FakeXmemory({}), use))
    assert failure.type == "XmemoryWriteFailed"
    assert failure.details[0]["error_detail"] == "no Person with this key"


class Says(FakeXmemory):
    """What write_status says before it tells the truth."""

    def __init__(self, *words: str) -> None:
        super().__init__({})
        self.words = list(words)

    async def write_status(self, write_id: str, *, timeout: float | None = None) -> Any:
        found = await super().write_status(write_id)
        if self.words and (word := self.words.pop(0)) == "unparsable":
            raise ValueError(CANARY)  # as the real client does for a word that it does not know
        elif self.words:
            found.write_status = word
        return found


async def test_a_status_that_is_new_means_not_finished(client: Client) -> None:
    xmemory = Says("compacting", "unparsable", "")
    assert "completed" in await run(client, xmemory, patiently)
    assert xmemory.counts()["write_status"] == 3


async def test_a_write_that_xmemory_does_not_know_is_final(client: Client) -> None:
    xmemory = Says("not_found", "")
    assert await fails(client, xmemory, patiently) == "XmemoryWriteNotFound"
    assert xmemory.counts()["write_status"] == 1


# --- Lost answers --------------------------------------------------------------------------------


LOST: list[tuple[Any, Any, Any]] = [  # the record before, what is sent, the record after
    ([], MADE, [ROW]),
    ([{**PERSON, "fact": "-"}], update("Person", PERSON, {"fact": "likes tea"}), [ROW]),
    ([PERSON], delete("Person", PERSON), []),
]


async def made_once(client: Client, method: str, before: Any, change: Any, after: Any) -> None:
    xmemory, called = FakeXmemory({}), "write" if method == "write" else "write_async"
    for row in [{"name": "somebody else"}, *before]:
        xmemory.put("Person", dict(row))
    xmemory.fail_next(connection_lost(), method=called, acted=True)
    await run(client, xmemory, lambda it: getattr(it, method)(structured_mutations=[change]))
    assert list(xmemory.tables["Person"].values()) == [{"name": "somebody else"}, *after]
    assert xmemory.counts()[called] == 2


async def test_a_mutation_whose_answer_was_lost_is_sent_again_and_made_once(client: Client) -> None:
    methods = ("write", "write_durable")
    await asyncio.gather(*(made_once(client, method, *row) for method in methods for row in LOST))


async def test_a_delete_of_what_is_not_there_is_done(client: Client) -> None:
    assert "completed" in await run(client, FakeXmemory({}), durably(delete("Person", PERSON)))


@pytest.mark.parametrize("method", ["write", "write_durable"])
async def test_a_create_of_a_record_with_other_values_is_final(client: Client, method: str) -> None:
    xmemory = FakeXmemory({})
    xmemory.put("Person", {**PERSON, "fact": "hates tea"})
    use: Use = lambda it: getattr(it, method)(structured_mutations=[MADE])  # noqa: E731
    assert await fails(client, xmemory, use) == "XmemoryConflict"
    assert [row["fact"] for row in xmemory.tables["Person"].values()] == ["hates tea"]


@pytest.mark.parametrize("method", ["write", "write_durable"])
async def test_a_text_whose_answer_was_lost_is_not_sent_again(client: Client, method: str) -> None:
    xmemory, called = FakeXmemory({}), "write" if method == "write" else "write_async"
    xmemory.fail_next(connection_lost(), method=called, acted=True)
    use: Use = lambda it: getattr(it, method)(TEXT)  # noqa: E731
    assert await fails(client, xmemory, use) == "XmemoryWriteUncertain"
    assert xmemory.counts() == {called: 1}


async def test_sending_it_again_would_have_forked_the_person(client: Client) -> None:
    forking = FakeXmemory({}, forks=True)
    forking.fail_next(connection_lost(), method="write_async", acted=True)
    eager = WorkflowMemory(write_retry_policy=RetryPolicy(initial_interval=POLL), first_poll=POLL)
    await run(client, forking, lambda _: eager.write_durable(TEXT))
    names = [row["name"] for row in forking.tables["Person"].values()]
    assert names == ["Dr. Robert Kim", "Robert Kim"]


# --- Errors --------------------------------------------------------------------------------------


def of(status: int | None, code: str | None = None, hint: int | None = None) -> XmemoryAPIError:
    return XmemoryAPIError(CANARY, status=status, code=code, retry_after=hint)


ROWS: dict[str, list[Exception]] = {
    "XmemoryAuthFailed": [of(None, "UNAUTHORIZED"), of(None, "FORBIDDEN"), of(401), of(403)],
    "XmemoryNotFound": [of(None, "NOT_FOUND"), of(404)],
    "XmemoryBadRequest": [
        *(of(500, code) for code in ("VALIDATION_ERROR", "INVALID_INPUT")),
        *(of(500, code) for code in ("ALREADY_EXISTS", "CONFLICT")),
        *(of(400), of(402), of(422), ValueError(CANARY), TypeError(CANARY)),
    ],
    "XmemoryRateLimited": [of(200, "RATE_LIMITED"), of(429)],
    "XmemoryQuotaExceeded": [of(402, "QUOTA_EXCEEDED")],
    "XmemoryServerError": [of(400, "SOMETHING_NEW"), of(408), of(500), of(502)],
    "XmemoryWriteFailed": [of(500, "MAX_RETRIES_EXCEEDED")],
    "XmemoryUnavailable": [of(None), of(302), OSError(CANARY), TimeoutError(CANARY)],
}
RETRYABLE = {"XmemoryUnavailable", "XmemoryServerError", "XmemoryRateLimited"}


def mapped(error: Exception) -> ApplicationError:
    with pytest.raises(ApplicationError) as caught, client_errors():
        raise error
    return caught.value


@pytest.mark.parametrize("type", ROWS)
def test_every_error_has_its_row_and_tells_nothing(type: str) -> None:
    for failure in map(mapped, ROWS[type]):
        assert (failure.type, failure.non_retryable) == (type, type not in RETRYABLE)
        assert failure.__cause__ is None and failure.__suppress_context__
        assert "CANARY" not in f"{failure!r} {failure.details}"


@pytest.mark.parametrize(("hint", "delay"), [(7, 7), (9_000, 60), (0, None), (None, None)])
def test_a_hint_is_heeded_for_a_minute_at_most(hint: int | None, delay: int | None) -> None:
    wanted = None if delay is None else timedelta(seconds=delay)
    assert mapped(of(429, "RATE_LIMITED", hint)).next_retry_delay == wanted


async def test_the_client_gives_up_before_temporal_does() -> None:
    environment = ActivityEnvironment()
    environment.info = replace(environment.info, start_to_close_timeout=timedelta(seconds=30))
    assert environment.run(client_timeout) == 24 and client_timeout() is None


async def test_only_an_attempt_that_lasts_heartbeats() -> None:
    environment, beaten = ActivityEnvironment(), asyncio.Event()
    environment.info = replace(environment.info, heartbeat_timeout=timedelta(seconds=0.4))
    environment.on_heartbeat = lambda *details: beaten.set()
    await environment.run(heartbeating(asyncio.sleep), 0)
    assert not beaten.is_set()
    lasting = environment.run(heartbeating(beaten.wait))
    assert await asyncio.wait_for(lasting, 10)


async def test_no_key_and_no_host_is_in_history_failure_or_log(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    xmemory, queue = FakeXmemory({}), str(uuid.uuid4())
    for error in (of(500), of(401)):
        xmemory.fail_next(error)
    async with worker(client, queue, xmemory):
        handle = await start(client, queue, lambda memory: memory.read("Person"))
        failure = await failed(handle.result())
    seen = f"{failure!r} {caplog.text} {(await handle.fetch_history()).events}"
    assert "XmemoryServerError" in seen and "XmemoryAuthFailed" in seen
    assert "CANARY" not in seen and "canary.host" not in seen
