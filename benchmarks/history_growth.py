"""How Event History grows with the turns of the loop: all that is known sent to the decider each
time, as the agent does, against a decider that asks the Workflow for it with a Query.

    python benchmarks/history_growth.py [--turns 10 20 40 80]

Every turn is a question with an answer of 1 KiB, the last one a denial. `sent` is the agent as it
is, with MAX_TURNS lifted: a Situation holds everything, so bytes grow with the square of the turns.
`queried` sends the number of the turn, and the Activity reads the rest from its own Workflow: the
loop is unchanged, each answer is in history once, and bytes grow in line with the turns. Its price:
the Activity needs a Temporal client, and a Worker that does not have the case cached replays it for
every Query. In both ways the decider checks that it sees every answer. Events are the same.
"""

import argparse
import json
import sys
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.worker import Worker

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import harness
import refund_agent
from memory_activities import MemoryActivities
from refund_agent import (
    Answer,
    CaseInput,
    Known,
    Question,
    RefundActivities,
    RefundAgent,
    RefundRequest,
    RefundResult,
    Situation,
    Step,
)

TURNS = (10, 20, 40, 80)
OBSERVATION = "x" * 1_024
FIXTURE = harness.Fixture("1", "a teapot", "teapot", 80_00, 200_00, "ann")
In = TypeVar("In")
Out = TypeVar("Out")


@workflow.defn(sandboxed=False)
class Sent(RefundAgent):
    """The agent as it is, outside the sandbox, so that MAX_TURNS can be lifted."""

    @workflow.init
    def __init__(self, given: CaseInput) -> None:
        super().__init__(given)
        self._shown = Known()

    @workflow.run
    async def run(self, given: CaseInput) -> RefundResult:
        return await super().run(given)

    @workflow.query
    def shown(self) -> Known:
        """What the decider is to see now."""
        return self._shown


@workflow.defn(sandboxed=False)
class Queried(Sent):
    @workflow.init
    def __init__(self, given: CaseInput) -> None:
        super().__init__(given)

    @workflow.run
    async def run(self, given: CaseInput) -> RefundResult:
        return await super().run(given)

    async def act(self, step: Callable[[Any, In], Awaitable[Out]], argument: In) -> Out:
        given: Any = argument
        if isinstance(given, Situation):
            self._shown = given.known
            given = Situation(given.request, Known(turn=given.known.turn))
        return await super().act(step, given)


class Inquisitive:
    """A decider that asks as many questions as it is to, and checks that it sees every answer."""

    def __init__(self, turns: int) -> None:
        self.turns = turns

    async def decide(self, request: RefundRequest, known: Known) -> Step:
        if activity.info().workflow_type == "Queried":
            case = activity.client().get_workflow_handle(activity.info().workflow_id or "")
            known = await case.query("shown", result_type=Known)
        if [len(asked.answer) for asked in known.answers] != [len(OBSERVATION)] * known.turn:
            raise RuntimeError("an answer is missing")
        if known.turn < self.turns - 1:
            return Step("ask", f"Question {known.turn}?")
        return Step("deny", "enough")


async def reply(question: Question) -> Answer:
    return Answer(question.id, OBSERVATION)


async def measure(client: Client, agent: type[Sent], turns: int) -> dict[str, Any]:
    world, queue = harness.World([FIXTURE], reply, lambda call: None), str(uuid.uuid4())
    steps = RefundActivities(stripe=world.stripe, shop=world.shop, decider=Inquisitive(turns))
    activities = [steps.agent_decide_next_step, *MemoryActivities(world.xmemory).all()]
    async with Worker(client, task_queue=queue, workflows=[agent], activities=activities):
        request = RefundRequest("1", "ann", "Please refund order 1.", 1)
        case: Any = await client.start_workflow(
            agent.run, CaseInput(request), id=queue, task_queue=queue)
        async with harness.background(lambda: world.people.converse(case)):
            result = await case.result()
    if (result.outcome, len(world.people.asked)) != ("denied", turns - 1):
        raise harness.HarnessError(f"{agent.__name__} did not make its {turns} turns")
    info = (await case.describe()).raw_description.workflow_execution_info
    return {"way": agent.__name__.lower(), "turns": turns, "events": info.history_length,
            "bytes": info.history_size_bytes, "bytes_per_turn": info.history_size_bytes // turns}


async def main() -> int:
    parser = argparse.ArgumentParser(description="How Event History grows with the turns.")
    parser.add_argument("--turns", type=int, nargs="+", default=TURNS, metavar="N")
    wanted = parser.parse_args().turns
    refund_agent.MAX_TURNS = max(wanted) + 1
    async with harness.dev_server() as server:
        client = await server.client()
        rows = [await measure(client, agent, n) for agent in (Sent, Queried) for n in wanted]
    print("way        turns    events       bytes    bytes a turn")
    for row in rows:
        print(f"{row['way']:8}{row['turns']:8,}{row['events']:10,}{row['bytes']:12,}"
              f"{row['bytes_per_turn']:16,}")
    print(json.dumps({"history_growth": rows}), flush=True)
    return 0


if __name__ == "__main__":
    harness.run(main)
