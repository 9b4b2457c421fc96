"""The recipe that remembers what Activities return, and is never in their way."""

import asyncio
import gc
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from temporalio import activity
from temporalio.client import ActivityHandle, Client
from temporalio.common import RetryPolicy
from temporalio.testing import ActivityEnvironment
from temporalio.worker import Worker

from fake_xmemory import FakeXmemory, WriteResult, XmemoryAPIError
from memory_activities import MemoryActivities, WriteInput
from recipes import auto_capture
from recipes.auto_capture import CAPTURE_TIMEOUT, MARGIN, AutoCapture

LONG = timedelta(seconds=30)
BRIEFLY = timedelta(seconds=0.2)
BEAT = timedelta(seconds=0.8)
FACT = "Robert Kim: likes tea"


class Work:
    """Activities, and how often they ran."""

    def __init__(self) -> None:
        self.runs = 0

    @activity.defn
    async def answer(self) -> str:
        self.runs += 1
        return FACT

    @activity.defn
    def answer_in_a_thread(self) -> str:
        self.runs += 1
        return FACT

    @activity.defn(name="xmemory_of_my_own")
    async def own(self) -> str:
        return FACT


class Slow(FakeXmemory):
    """Does something else before it queues a text."""

    def __init__(self, first: Callable[[], Awaitable[object]]) -> None:
        super().__init__({})
        self.first = first

    async def write_async(self, text: str = "", **options: Any) -> WriteResult:
        assert options["timeout"] > 0
        await self.first()
        return await super().write_async(text, **options)


class Desk:
    """A Worker that captures, and Activities for it."""

    def __init__(self, client: Client) -> None:
        self.client, self.queue, self.work = client, str(uuid.uuid4()), Work()
        self.memory = FakeXmemory({"Customer": ["id"]})  # of the memory Activities

    @asynccontextmanager
    async def open(self, capture: AutoCapture) -> AsyncIterator[None]:
        work, memory = self.work, MemoryActivities(self.memory).all()
        with ThreadPoolExecutor(1) as threads:
            async with Worker(
                self.client,
                task_queue=self.queue,
                interceptors=[capture],
                activities=[work.answer, work.answer_in_a_thread, work.own, *memory],
                activity_executor=threads,
                max_heartbeat_throttle_interval=BRIEFLY,
            ):
                yield

    async def start(
        self,
        name: str,
        *given: object,
        start_to_close: timedelta = LONG,
        heartbeat: timedelta | None = None,
    ) -> ActivityHandle[Any]:
        return await self.client.start_activity(
            name,
            args=given,
            id=str(uuid.uuid4()),
            task_queue=self.queue,
            start_to_close_timeout=start_to_close,
            heartbeat_timeout=heartbeat,
            retry_policy=RetryPolicy(maximum_attempts=2),
        )

    async def run(self, capture: AutoCapture, name: str, **timeouts: timedelta) -> Any:
        async with self.open(capture):
            return await (await self.start(name, **timeouts)).result()


@pytest.fixture
def xmemory() -> FakeXmemory:
    return FakeXmemory({})


@pytest.fixture
def desk(client: Client) -> Desk:
    return Desk(client)


def as_text(activity_type: str, result: object) -> str:
    return str(result)


def broken(activity_type: str, result: object) -> str:
    raise ValueError(f"secret {result}")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    gc.collect()  # asyncio logs an error that nobody asked for when its task is gone
    assert "secret" not in caplog.text
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


async def test_what_an_activity_returns_is_written_once(desk: Desk, xmemory: FakeXmemory) -> None:
    seen = []

    def project(activity_type: str, result: str) -> str | None:
        seen.append((activity_type, result))
        return result if activity_type == "answer" else None

    async with desk.open(AutoCapture(xmemory, project)):
        for name in ("answer", "answer_in_a_thread"):
            assert await (await desk.start(name)).result() == FACT
    assert seen == [("answer", FACT), ("answer_in_a_thread", FACT)]
    assert xmemory.calls == ["write_async"]
    assert list(xmemory.tables["Person"].values()) == [{"name": "Robert Kim", "fact": "likes tea"}]


async def test_memorys_own_activities_and_their_namesakes_are_left_out(
    desk: Desk, xmemory: FakeXmemory
) -> None:
    async with desk.open(AutoCapture(xmemory, as_text)):
        await (await desk.start("xmemory_write", WriteInput(FACT, {}))).result()
        await (await desk.start("xmemory_of_my_own")).result()
    assert not xmemory.calls


@pytest.mark.parametrize("fails", [broken, as_text])
async def test_what_fails_costs_only_the_capture_and_is_not_repeated(
    desk: Desk, xmemory: FakeXmemory, caplog: pytest.LogCaptureFixture, fails: Any
) -> None:
    xmemory.fail_next(XmemoryAPIError("secret"), method="write_async")
    assert await desk.run(AutoCapture(xmemory, fails), "answer") == FACT
    (warning,) = warnings(caplog)
    assert ("ValueError" if fails is broken else "XmemoryAPIError") in warning
    assert (len(xmemory.calls), desk.work.runs) == (fails is as_text, 1)


@pytest.mark.parametrize(
    ("start_to_close", "capture_timeout"), [(LONG, BRIEFLY), (MARGIN + BEAT, CAPTURE_TIMEOUT)]
)
async def test_a_capture_that_does_not_end_is_left_behind_in_time(
    desk: Desk,
    caplog: pytest.LogCaptureFixture,
    start_to_close: timedelta,
    capture_timeout: timedelta,
) -> None:
    release = asyncio.Event()
    asyncio.get_running_loop().call_later(8, release.set)  # so that a failure is no hang

    async def stubborn() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        raise XmemoryAPIError("secret")

    capture = AutoCapture(Slow(stubborn), as_text, capture_timeout=capture_timeout)
    assert await desk.run(capture, "answer", start_to_close=start_to_close) == FACT
    assert not release.is_set() and desk.work.runs == 1
    release.set()
    await asyncio.sleep(0.01)
    (warning,) = warnings(caplog)
    assert "TimeoutError" in warning


async def test_nothing_is_captured_when_no_time_is_left(
    desk: Desk, xmemory: FakeXmemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_capture, "MARGIN", LONG)
    assert await desk.run(AutoCapture(xmemory, as_text), "answer") == FACT
    assert not xmemory.calls


async def test_an_activity_heartbeats_during_a_slow_capture_and_runs_once(desk: Desk) -> None:
    xmemory = Slow(lambda: asyncio.sleep(1.5 * BEAT.total_seconds()))
    async with desk.open(AutoCapture(xmemory, as_text)):
        started = [
            await desk.start(name, heartbeat=BEAT) for name in ("answer", "answer_in_a_thread")
        ]
        assert [await each.result() for each in started] == [FACT] * 2
    assert (desk.work.runs, xmemory.calls) == (2, ["write_async"] * 2)


async def test_a_cancellation_during_a_capture_does_not_lose_the_result(desk: Desk) -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        started.set()
        try:
            await asyncio.sleep(LONG.total_seconds())
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with desk.open(AutoCapture(Slow(wait), as_text, capture_timeout=LONG)):
        handle = await desk.start("answer", heartbeat=BEAT)
        await started.wait()
        await handle.cancel()
        assert await handle.result() == FACT
    assert cancelled.is_set() and desk.work.runs == 1


def test_a_sample_is_the_same_for_every_attempt_in_every_process(xmemory: FakeXmemory) -> None:
    half, info = AutoCapture(xmemory, as_text, sample_rate=0.5), ActivityEnvironment.default_info()
    for attempt in (1, 2):
        picked = [
            number
            for number in range(16)
            if half.samples(replace(info, workflow_run_id=f"run-{number}", attempt=attempt))
        ]
        assert picked == [0, 2, 8, 9, 10, 12, 13, 15]
