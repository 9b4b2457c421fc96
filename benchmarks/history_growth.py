"""How Event History grows with the turns of the loop: all that is known sent to the decider each
time, as the agent does, against a decider that asks the Workflow for it with a Query.

    python benchmarks/history_growth.py [--turns 10 20 40 80]

Every turn is a question with an answer of 1 KiB, the last one a denial. `sent` is the agent as it
is, with its bounds lifted: Known holds everything, so bytes grow with the square of the turns.
`queried` sends a Known without answers, and the decider reads the rest from its own Workflow: the
loop is unchanged, each answer is in history once, and bytes grow in line with the turns. Its price:
the decider needs a Temporal client, and a Worker that does not have the case cached replays it for
every Query. Events are the same.
"""

import argparse
import json
import sys
import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import harness
import refund_agent
import run_demo
from memory_activities import MemoryActivities
from refund_agent import (
    Answer,
    Known,
    Question,
    RefundActivities,
    RefundAgent,
    RefundRequest,
    RefundResult,
    Step,
)

OBSERVATION = "x" * 1_024
REQUEST = RefundRequest("1", "ann", "Please refund order 1.")


@workflow.defn
class Queried(RefundAgent):
    @workflow.init
    def __init__(self, request: RefundRequest) -> None:
        super().__init__(request)

    @workflow.run
    async def run(self, request: RefundRequest) -> RefundResult:
        return await super().run(request)

    async def act(self, step: Any, argument: Any) -> Any:
        if isinstance(argument, Known):
            self._known = argument
            argument = replace(argument, answers={})
        return await super().act(step, argument)

    @workflow.query
    def known(self) -> Known:
        return self._known


WAYS = {"sent": RefundAgent, "queried": Queried}


async def decide(turns: int, known: Known) -> Step:
    """Ask a question in every turn but the last."""
    if activity.info().workflow_type == "Queried":
        case = activity.client().get_workflow_handle(activity.info().workflow_id or "")
        known = await case.query("known", result_type=Known)
    asked = len(known.answers)
    return Step("ask", f"Question {asked}?") if asked < turns - 1 else Step("deny", "enough")


class World(run_demo.Durable):
    async def ask(self, question: Question) -> Answer:
        self.asked.append(question)
        return Answer(question.id, OBSERVATION)


async def measure(client: Client, way: str, turns: int) -> dict[str, Any]:
    agent: Any = WAYS[way]
    world, queue = World("1"), str(uuid.uuid4())
    steps = RefundActivities(stripe=None, shop=None, decide=partial(decide, turns))
    activities = [steps.agent_decide_next_step, *MemoryActivities(world.xmemory).all()]
    async with Worker(
        client,
        task_queue=queue,
        workflows=[agent],
        activities=activities,
        workflow_runner=UnsandboxedWorkflowRunner(),  # else the bounds would not be lifted in it
    ):
        case = await client.start_workflow(agent.run, REQUEST, id=queue, task_queue=queue)
        await world.attend(case)
    result = world.result
    if (result and result.outcome, len(world.asked)) != ("denied", turns - 1):
        raise harness.HarnessError(f"{way} did not make its {turns} turns")
    info = (await case.describe()).raw_description.workflow_execution_info
    events, size = info.history_length, info.history_size_bytes
    print(f"{way:10}{turns:6,}{events:10,}{size:12,}{size // turns:16,}", flush=True)
    return {"way": way, "turns": turns, "events": events, "bytes": size}


async def main(turns: Sequence[int]) -> int:
    refund_agent.MAX_TURNS = refund_agent.MAX_QUESTIONS = max(turns)
    print("way        turns    events       bytes    bytes a turn")
    async with harness.dev_server(*harness.FAST_TIMERS) as server:
        client = await server.client()
        rows = [await measure(client, way, n) for way in WAYS for n in turns]
    print(json.dumps({"history_growth": rows}), flush=True)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, nargs="+", default=(10, 20, 40, 80), metavar="N")
    harness.run(main(parser.parse_args().turns))
