"""How Event History grows with the turns of a conversation, in two ways.

    python benchmarks/history_growth.py [--turns 10 80 400]

`sent` sends all that is known with each Activity, as the refund agent does: bytes grow with the
square of the turns. `queried` is `recipes/long_case.py`: the Activity reads the conversation from
its own Workflow with a Query, and every hundred turns a new run begins. A turn is a message of
1 KiB and a short reply. Events and bytes are those of all runs. Temporal ends a run at 50 MB.
"""

import argparse
import json
import sys
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from temporalio import activity, workflow
from temporalio.client import (
    Client,
    WorkflowFailureError,
    WorkflowHistoryEventFilterType,
)
from temporalio.runtime import LoggingConfig, Runtime, TelemetryConfig, TelemetryFilter
from temporalio.service import RPCError
from temporalio.worker import Worker

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import harness
from recipes.long_case import END, REPLY_TIMEOUT, Conversation, LongCase, Replies

MESSAGE = "x" * 1_024
QUIET = TelemetryConfig(
    logging=LoggingConfig(TelemetryFilter(core_level="ERROR", other_level="ERROR"))
)
LAST = WorkflowHistoryEventFilterType.CLOSE_EVENT


async def reply(said: Sequence[str]) -> str:
    """The customer's next message follows at once."""
    info = activity.info()
    turns = int((info.workflow_id or "").rpartition("-")[2])
    case = activity.client().get_workflow_handle(info.workflow_id or "")
    with suppress(RPCError):  # the server has ended it
        await case.signal("say", MESSAGE if len(said) // 2 + 1 < turns else END)
    return "I see."


@activity.defn
async def reply_to_all(said: Sequence[str]) -> str:
    return await reply(said)


@workflow.defn(sandboxed=False)
class Sent(LongCase):
    @workflow.init
    def __init__(self, conversation: Conversation) -> None:
        super().__init__(conversation)

    @workflow.run
    async def run(self, conversation: Conversation) -> int:
        while True:
            await workflow.wait_condition(lambda: bool(self.unread))
            if (message := self.unread.pop(0)) == END:
                return len(self.said) // 2
            self.said.append(message)
            answer = await workflow.execute_activity(
                reply_to_all, self.said, start_to_close_timeout=REPLY_TIMEOUT
            )
            self.said.append(answer)


WAYS: dict[str, Any] = {"sent": Sent, "queried": LongCase}


async def measure(client: Client, way: str, turns: int) -> dict[str, Any]:
    id, first = f"{uuid.uuid4()}-{turns}", Conversation(unread=[MESSAGE])
    activities: list[Any] = [Replies(reply).reply, reply_to_all]
    made = None
    async with Worker(client, task_queue=id, workflows=[WAYS[way]], activities=activities):
        case = await client.start_workflow(WAYS[way].run, first, id=id, task_queue=id)
        with suppress(WorkflowFailureError):  # the server ended it
            made = await case.result()
    runs, events, size, run_id = 0, 0, 0, case.first_execution_run_id
    while run_id:
        run = client.get_workflow_handle(id, run_id=run_id)
        info = (await run.describe()).raw_description.workflow_execution_info
        runs, events, size = runs + 1, events + info.history_length, size + info.history_size_bytes
        async for event in run.fetch_history_events(event_filter_type=LAST):
            run_id = event.workflow_execution_continued_as_new_event_attributes.new_execution_run_id
    row = {"way": way, "turns": turns, "made": made, "runs": runs, "events": events, "bytes": size}
    ends = "" if made == turns else "   ended by the server"
    print(f"{way:10}{turns:6,}{runs:6}{events:10,}{size:14,}{size // turns:14,}{ends}", flush=True)
    return row


async def main(turns: Sequence[int]) -> int:
    print("way        turns  runs    events         bytes  bytes a turn")
    async with harness.dev_server(*harness.FAST_TIMERS) as server:
        client = await server.client(runtime=Runtime(telemetry=QUIET))
        rows = [await measure(client, way, n) for way in WAYS for n in turns]
    print(json.dumps({"history_growth": rows}), flush=True)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, nargs="+", default=(10, 80, 400), metavar="N")
    harness.run(main(parser.parse_args().turns))
