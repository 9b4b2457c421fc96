"""What becomes of a write when its Worker is killed. The Worker knows nothing of the agent."""

import asyncio
import sys
import uuid
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from temporalio import workflow
from temporalio.client import Client
from temporalio.worker import Worker

from harness import World, child
from memory_activities import MemoryActivities, create, memory_for_workflow

SECONDS = 30  # for whatever a Worker is expected to do
BEAT = timedelta(seconds=1)


class Memory(World):
    """Stands where the client of xmemory is. A job is finished once `finished` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.finished, self.polled, self.may_answer = (asyncio.Event() for _ in range(3))
        self.may_answer.set()

    def count(self, method: str) -> int:
        return sum(call.path == method for call in self.calls)

    async def write(self, *_: Any, **__: Any) -> Any:
        await asyncio.sleep(2 * BEAT.total_seconds())  # two heartbeat timeouts
        return SimpleNamespace(write_id="w1")

    async def write_async(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(write_id="w2")

    async def write_status(self, write_id: str, **_: Any) -> Any:
        self.polled.set()
        await self.may_answer.wait()
        status = "completed" if self.finished.is_set() else "applying"
        return SimpleNamespace(write_id=write_id, write_status=status)


@workflow.defn
class Remember:
    @workflow.run
    async def run(self, method: str) -> str:
        memory = memory_for_workflow(heartbeat_timeout=BEAT, first_poll=BEAT, slowest_poll=BEAT)
        person = create("Person", {"name": "Ann"}, {"likes": "tea"})
        return str((await getattr(memory, method)(structured_mutations=[person])).write_id)


async def bare_worker(remote: Any, address: str, task_queue: str) -> None:
    assert "refund_agent" not in sys.modules
    await Worker(
        await Client.connect(address),
        task_queue=task_queue,
        workflows=[Remember],
        activities=MemoryActivities(remote).all(),
        max_cached_workflows=0,  # else a Workflow Task waits for the Worker that was killed
    ).run()


@pytest.mark.parametrize("kill", ["inside a poll", "between polls"])
async def test_a_killed_wait_for_a_write_is_only_later(client: Client, kill: str) -> None:
    memory, queue = Memory(), str(uuid.uuid4())
    address = client.service_client.config.target_host
    job = "the Worker", "test_memory_kills:bare_worker", address, queue
    if kill == "inside a poll":
        memory.may_answer.clear()
    case = await client.start_workflow(Remember.run, "write_durable", id=queue, task_queue=queue)
    async with child(*job, world=memory) as first:
        await first.until(memory.polled, SECONDS, "its first poll")
        await first.kill()
    memory.finished.set()
    memory.may_answer.set()
    async with child(*job, world=memory):
        assert await asyncio.wait_for(case.result(), SECONDS) == "w2"
    assert memory.count("write_async") == 1 < memory.count("write_status")
    assert len((await case.fetch_history()).events) <= 18


async def test_a_write_that_lasts_longer_than_the_heartbeat_timeout_is_sent_once(
    client: Client,
) -> None:
    memory, queue = Memory(), str(uuid.uuid4())
    address = client.service_client.config.target_host
    case = await client.start_workflow(Remember.run, "write", id=queue, task_queue=queue)
    async with child("the Worker", "test_memory_kills:bare_worker", address, queue, world=memory):
        assert await asyncio.wait_for(case.result(), SECONDS) == "w1"
    assert memory.count("write") == 1  # without beats there would have been a second attempt
