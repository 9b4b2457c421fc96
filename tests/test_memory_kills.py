"""What becomes of a durable write when its Worker is killed; all played at the same time."""

import asyncio
import shutil
import sys
import tempfile
import uuid
from collections import Counter
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import memory_worker
import pytest
import pytest_asyncio
from temporalio.client import Client, WorkflowHandle

import harness
import memory_activities
from fake_xmemory import FakeXmemory
from harness import Address, Child, Server

pytestmark = pytest.mark.everywhere
HERE = Path(__file__).parent
SECONDS = 60
A_WHILE = 2 * memory_worker.POLL.total_seconds()  # without any Worker


class AskedMemory(FakeXmemory):
    """Holds the first question about a write until `go`, or answers it."""

    def __init__(self, holds: bool) -> None:
        super().__init__({"Person": ["name"]})
        self.paused, self.asked, self.go = True, asyncio.Event(), asyncio.Event()
        if not holds:
            self.go.set()

    async def write_status(self, write_id: str, *, timeout: float | None = None) -> Any:
        if not self.go.is_set():
            self.asked.set()
            await self.go.wait()
        found = await super().write_status(write_id, timeout=timeout)
        self.asked.set()
        return found


@dataclass
class Remembered:
    status: str
    calls: Counter[str]
    people: int
    events: int


@dataclass
class MemoryKills:
    undisturbed: Remembered
    inside_a_poll: Remembered
    between_polls: Remembered
    copied_alone: str


@pytest_asyncio.fixture(scope="module")
async def ended(server: Server) -> MemoryKills:
    client = await server.client()
    played = await asyncio.gather(
        durable_write(server, client), durable_write(server, client, "inside"),
        durable_write(server, client, "between"), copied_alone(server, client))
    return MemoryKills(*played)


async def durable_write(server: Server, client: Client, kill: str = "") -> Remembered:
    memory, queue = AskedMemory(holds=kill == "inside"), str(uuid.uuid4())
    handle: WorkflowHandle[Any, str] = await client.start_workflow(
        memory_worker.RememberDurably.run, id=queue, task_queue=queue,
        task_timeout=harness.TASK_TIMEOUT)
    async with harness.serving({"xmemory": memory}, lambda call: None) as address:
        async with worker(server, queue, address) as first:
            await first.until(memory.asked.wait, SECONDS, "its first poll")
            if kill:
                await first.kill()
                await asyncio.sleep(A_WHILE)
            memory.paused = False
            memory.go.set()
            if not kill:
                return await remembered(first, handle, memory)
        async with worker(server, queue, address) as second:
            return await remembered(second, handle, memory)


def worker(server: Server, queue: str, address: Address) -> AbstractAsyncContextManager[Child]:
    script = [sys.executable, str(HERE / "memory_worker.py")]
    arguments = [str(server.address), queue, str(address.port), address.token]
    folder = str(HERE.parent)
    return harness.child("a Worker", script + arguments, {"PYTHONPATH": folder})


async def remembered(
    child: Child, handle: WorkflowHandle[Any, str], memory: FakeXmemory
) -> Remembered:
    status = await child.until(handle.result, SECONDS, "the end of the write")
    events = len((await handle.fetch_history()).events)
    return Remembered(status, memory.counts(), len(memory.tables["Person"]), events)


async def copied_alone(server: Server, client: Client) -> str:
    queue = str(uuid.uuid4())
    with tempfile.TemporaryDirectory() as folder:
        for file in (memory_activities.__file__, HERE / "bare_worker.py"):
            shutil.copy(file, folder)
        command = [sys.executable, str(Path(folder, "bare_worker.py")), str(server.address), queue]
        handle: WorkflowHandle[Any, str] = await client.start_workflow(
            "Remember", id=queue, task_queue=queue, result_type=str)
        async with harness.child("the bare Worker", command, {"PYTHONPATH": ""}) as child:
            return await child.until(handle.result, SECONDS, "the end of the write")


@pytest.mark.parametrize("kill", ["inside_a_poll", "between_polls"])
async def test_a_killed_wait_for_a_write_is_only_later(ended: MemoryKills, kill: str) -> None:
    killed, undisturbed = getattr(ended, kill), ended.undisturbed
    assert (killed.status, killed.people) == ("completed", 1) == ("completed", undisturbed.people)
    assert killed.calls["write_async"] == 1 and killed.events == undisturbed.events <= 18


async def test_memory_copied_alone_heartbeats_on_a_bare_worker(ended: MemoryKills) -> None:
    assert ended.copied_alone == "call 1"
