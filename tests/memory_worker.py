"""A Worker to be killed while it waits for a write; memory lives in the test's process."""

import asyncio
import sys
from datetime import timedelta

from temporalio import workflow
from temporalio.client import Client
from temporalio.worker import Worker

with workflow.unsafe.imports_passed_through():
    from harness import Address, Remote
    from memory_activities import MemoryActivities, create, memory_for_workflow

POLL = timedelta(seconds=1)


@workflow.defn
class RememberDurably:
    @workflow.run
    async def run(self) -> str:
        memory = memory_for_workflow(
            heartbeat_timeout=POLL, first_poll=POLL, slowest_poll=POLL)
        person = create("Person", {"name": "Ann"}, {"likes": "tea"})
        return (await memory.write_durable(structured_mutations=[person])).write_status


async def main(address: str, task_queue: str, port: str, token: str) -> None:
    client = await Client.connect(address)
    activities = MemoryActivities(Remote(Address(int(port), token)).xmemory).all()
    async with Worker(
        client, task_queue=task_queue, workflows=[RememberDurably], activities=activities,
        max_cached_workflows=0
    ):
        await asyncio.to_thread(sys.stdin.read)  # until whoever started this process ends


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
