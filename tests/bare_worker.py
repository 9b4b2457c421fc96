"""A Worker with memory and nothing about refunds. It runs in a folder of its own, which holds a
copy of memory_activities.py and of this file, and nothing else."""

import asyncio
import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from temporalio import workflow
from temporalio.client import Client
from temporalio.worker import Worker

from memory_activities import MemoryActivities, create, memory_for_workflow

HEARTBEAT_TIMEOUT = timedelta(seconds=3)


class SlowMemory:
    """Each call takes three heartbeat timeouts; the write id says how many calls there were."""

    calls = 0

    async def write(self, text: str, **_: Any) -> Any:
        self.calls += 1
        await asyncio.sleep(3 * HEARTBEAT_TIMEOUT.total_seconds())
        return SimpleNamespace(write_id=f"call {self.calls}", trace_id=None, changes=None)

    read = write_async = write_status = write


@workflow.defn
class Remember:
    @workflow.run
    async def run(self) -> str:
        memory = memory_for_workflow(heartbeat_timeout=HEARTBEAT_TIMEOUT)
        person = create("Person", {"name": "Ann"}, {"likes": "tea"})
        return (await memory.write(structured_mutations=[person])).write_id


async def main(address: str, task_queue: str) -> None:
    client = await Client.connect(address)
    activities = MemoryActivities(SlowMemory()).all()
    async with Worker(
        client, task_queue=task_queue, workflows=[Remember], activities=activities
    ):
        await asyncio.to_thread(sys.stdin.read)  # until whoever started this process ends


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
