"""How many unread Signals a Worker reads at once, when it comes back to a case.

    python benchmarks/unread_signals.py [--signals 1000 2000 4000 8000]

Each row is one case whose Signals arrived while no Worker was alive. A Worker then starts, and the
seconds until it answers a Query are measured. The SDK gives it two seconds for the Workflow Task
that brings them all; a task that takes longer fails and is tried again.
"""

import argparse
import asyncio
import json
import logging
import sys
import time
import uuid
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import anyio
from temporalio.client import Client
from temporalio.service import RPCError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import harness
from fake_xmemory import FakeXmemory
from refund_agent import (
    Answer,
    RefundActivities,
    RefundAgent,
    RefundRequest,
    build_worker,
    start_case,
)

GIVEN_UP_SECONDS = 60.0
AT_ONCE = 50  # Signals on their way to the server


async def nothing_to_decide(known: object) -> object:
    return await asyncio.Event().wait()


async def measure(client: Client, signals: int) -> dict[str, float | int | None]:
    queue = str(uuid.uuid4())
    case = await start_case(
        client, RefundRequest("1", "ann", "hello"), task_queue=queue, case_id=queue
    )
    places = anyio.Semaphore(AT_ONCE)

    async def send(number: int) -> None:
        async with places:
            await case.signal("answer", Answer(f"customer-{number}-unknown", "x"))

    await asyncio.gather(*map(send, range(signals)))
    steps = RefundActivities(stripe=None, shop=None, decide=nothing_to_decide)
    memory = FakeXmemory({"Customer": ["customer_id"]})
    started, seconds = time.monotonic(), None
    async with build_worker(client, queue, steps, memory):
        while seconds is None and time.monotonic() - started < GIVEN_UP_SECONDS:
            with suppress(RPCError):
                await case.query(RefundAgent.progress, rpc_timeout=timedelta(seconds=5))
                seconds = round(time.monotonic() - started, 2)
        failed = 0
        async for event in case.fetch_history_events():
            failed += event.HasField("workflow_task_failed_event_attributes")
            failed += event.HasField("workflow_task_timed_out_event_attributes")
        await case.terminate()
    return {"signals": signals, "seconds": seconds, "failed_tasks": failed}


async def main() -> int:
    parser = argparse.ArgumentParser(description="How many unread Signals a Worker reads at once.")
    parser.add_argument("--signals", type=int, nargs="+", default=(1000, 2000, 4000, 8000))
    async with harness.dev_server() as server:  # a stock one
        client = await server.client()
        rows = [await measure(client, n) for n in parser.parse_args().signals]
    print("signals    seconds    failed Workflow Tasks")
    for row in rows:
        print(f"{row['signals']:7,}{row['seconds'] or 'never':>11}{row['failed_tasks']:>25}")
    print(json.dumps({"unread_signals": rows}), flush=True)
    return 0


if __name__ == "__main__":
    logging.getLogger("temporalio").setLevel(logging.CRITICAL)  # it reports each slow task
    harness.run(main())
