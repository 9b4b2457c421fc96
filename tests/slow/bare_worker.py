"""A Worker with memory and nothing about refunds, to be killed. It runs in a folder of its own,
which holds a copy of memory_activities.py and of this file, and nothing else.

    python bare_worker.py ADDRESS TASK_QUEUE

Memory is that folder: `calls` has a line for every call, and the write is finished once `go` is
there. A call that finds `hold` never ends.
"""

import asyncio
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from temporalio import workflow
from temporalio.client import Client
from temporalio.worker import Worker

from memory_activities import MemoryActivities, create, memory_for_workflow

BEAT = timedelta(seconds=1)


class FolderMemory:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def _call(self, name: str) -> None:
        with open(self.folder / "calls", "a") as calls:
            calls.write(name + "\n")
        while (self.folder / "hold").exists():
            await asyncio.sleep(0.05)

    async def read(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    async def write(self, *_: Any, **__: Any) -> Any:
        """Takes two heartbeat timeouts."""
        await self._call("write")
        await asyncio.sleep(2 * BEAT.total_seconds())
        return SimpleNamespace(write_id="w1")

    async def write_async(self, *_: Any, **__: Any) -> Any:
        await self._call("write_async")
        return SimpleNamespace(write_id="w2")

    async def write_status(self, write_id: str, **_: Any) -> Any:
        await self._call("write_status")
        done = (self.folder / "go").exists()
        return SimpleNamespace(write_id=write_id, write_status="completed" if done else "applying")


@workflow.defn
class Remember:
    @workflow.run
    async def run(self, method: str) -> str:
        memory = memory_for_workflow(heartbeat_timeout=BEAT, first_poll=BEAT, slowest_poll=BEAT)
        person = create("Person", {"name": "Ann"}, {"likes": "tea"})
        return str((await getattr(memory, method)(structured_mutations=[person])).write_id)


async def main(address: str, task_queue: str) -> None:
    activities = MemoryActivities(FolderMemory(Path(__file__).parent)).all()
    client = await Client.connect(address)
    async with Worker(
        client,
        task_queue=task_queue,
        workflows=[Remember],
        activities=activities,
        max_cached_workflows=0,  # else a Workflow Task waits for the Worker that was killed
    ):
        await asyncio.to_thread(sys.stdin.read)  # until whoever started this process ends


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
