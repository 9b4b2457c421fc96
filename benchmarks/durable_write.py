"""What one durable write leaves in Event History, however long the wait: events and bytes.

    python benchmarks/durable_write.py [--polls 3 36 486]

Each row is one Workflow that does nothing but `write_durable`, against a real Temporal dev server.
At the default intervals 3, 36 and 486 polls are a wait of 3 seconds, 15 minutes and 4 hours; here
a poll comes as soon as the server retries, about every 0.2 seconds. Beside it: the same wait as a
poll loop in Workflow code, computed from what the xmemory_temporal plugin 1.1.0 was measured to
cost on Temporal Server 1.32: 17 events and 11 for every poll after the first, about 1.1 kB and
1.27 kB for every poll. Exits with 1 if a row has more than 18 events or 5 kB.
"""

import argparse
import asyncio
import json
import sys
import uuid
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

from temporalio import workflow
from temporalio.client import Client, WorkflowHandle
from temporalio.worker import Worker

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import harness
from fake_xmemory import FakeXmemory
from memory_activities import MemoryActivities, memory_for_workflow

POLLS = (3, 36, 486)
INTERVAL = timedelta(seconds=0.1)
LONGEST = timedelta(minutes=30)  # far more than the longest row takes
TEXT = "Ann: " + "x" * 100  # as long as in the measured baseline
LOOP_EVENTS, LOOP_BYTES = (17, 11), (1_100, 1_270)  # of the loop: at first, and for every poll
MOST_EVENTS, MOST_BYTES = 18, 5_000


class SlowMemory(FakeXmemory):
    """Completes each write at its n-th poll; n is the first word of the text."""

    def __init__(self) -> None:
        super().__init__({})
        self.polls: Counter[str] = Counter()
        self.wanted: dict[str, int] = {}

    async def write_async(self, text: str = "", **options: Any) -> Any:
        polls, _, text = text.partition(" ")
        queued = await super().write_async(text, **options)
        self.wanted[queued.write_id] = int(polls)
        return queued

    async def write_status(self, write_id: str, *, timeout: float | None = None) -> Any:
        self.polls[write_id] += 1
        found = await super().write_status(write_id)
        if self.polls[write_id] < self.wanted[write_id]:
            found.write_status = "processing"
        return found


@workflow.defn(sandboxed=False)  # the lines about `sys.path` would not load in the sandbox
class Remember:
    @workflow.run
    async def run(self, text: str) -> str:
        memory = memory_for_workflow(first_poll=INTERVAL, slowest_poll=INTERVAL)
        return (await memory.write_durable(text, max_wait=LONGEST)).write_id


async def measure(client: Client, queue: str, memory: SlowMemory, polls: int) -> dict[str, int]:
    handle: WorkflowHandle[Remember, str] = await client.start_workflow(
        Remember.run, f"{polls} {TEXT}", id=str(uuid.uuid4()), task_queue=queue
    )
    write_id = await handle.result()
    described = (await handle.describe()).raw_description.workflow_execution_info
    return {
        "polls": memory.polls[write_id],
        "events": described.history_length,
        "bytes": described.history_size_bytes,
    }


async def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--polls", type=int, nargs="+", default=POLLS, metavar="N")
    wanted = parser.parse_args().polls
    memory, queue = SlowMemory(), str(uuid.uuid4())
    async with harness.dev_server(*harness.FAST_TIMERS) as server:
        client = await server.client()
        async with Worker(
            client,
            task_queue=queue,
            workflows=[Remember],
            activities=MemoryActivities(memory).all(),
        ):
            rows = await asyncio.gather(*(measure(client, queue, memory, n) for n in wanted))
    print("  polls    events     bytes    a loop: events     bytes")
    for row in rows:
        events = LOOP_EVENTS[0] + LOOP_EVENTS[1] * (row["polls"] - 1)
        size = LOOP_BYTES[0] + LOOP_BYTES[1] * row["polls"]
        print(f"{row['polls']:7,}{row['events']:10,}{row['bytes']:10,}{events:18,}{size:10,}")
    print(json.dumps({"durable_write": rows}), flush=True)
    held = [row["polls"] for row in rows] == list(wanted) and all(
        row["events"] <= MOST_EVENTS and row["bytes"] <= MOST_BYTES for row in rows
    )
    return 0 if held else 1


if __name__ == "__main__":
    harness.run(main())
