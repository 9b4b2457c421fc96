"""Temporal, as in this repository. The loop is a Workflow, and a step is an Activity.

Strength: the server notices a dead Worker and gives its work to any other one. Here that takes 2 s
without a heartbeat, and 0.2 s for the dead Worker's own queue (the default is 10 s).
"""

from datetime import timedelta
from typing import Any

from temporalio import activity, client, common, worker, workflow

from compare import inbox
from memory_activities import heartbeating

world: Any = None  # set before the Worker starts
TIMEOUTS: dict[str, Any] = {
    "start_to_close_timeout": timedelta(seconds=60),
    "heartbeat_timeout": timedelta(seconds=2),
    "retry_policy": common.RetryPolicy(initial_interval=timedelta(milliseconds=200)),
}
ONCE: Any = {"id_conflict_policy": common.WorkflowIDConflictPolicy.USE_EXISTING}
STICKY: Any = {"sticky_queue_schedule_to_start_timeout": timedelta(seconds=0.2)}


@activity.defn
@heartbeating
async def step(name: str, about: Any) -> Any:
    return await getattr(world, name)(about)


@workflow.defn(sandboxed=False)
class Agent:
    @workflow.run
    async def run(self, id: str) -> None:
        self.answers, known = dict[str, str](), list[Any]()
        while True:
            chosen = await workflow.execute_activity(step, args=["model", known], **TIMEOUTS)
            kind, _, about = chosen.partition(" ")
            if kind == "refund":
                return await workflow.execute_activity(step, args=["refund", id], **TIMEOUTS)
            found = await workflow.execute_activity(step, args=[kind, about], **TIMEOUTS)
            if kind == "ask":
                await workflow.wait_condition(lambda: len(self.answers) > len(known))
                found = self.answers[about]
            known.append(found)

    @workflow.signal
    def answer(self, question: str, text: str) -> None:
        self.answers[question] = text


async def run(outside: Any, store: str, id: str) -> None:
    global world
    world, temporal = outside, await client.Client.connect(store)
    async with worker.Worker(
        temporal, task_queue="q", workflows=[Agent], activities=[step], **STICKY
    ):
        case = await temporal.start_workflow(Agent.run, id, id=id, task_queue="q", **ONCE)
        async with inbox(world, lambda *given: case.signal(Agent.answer, args=given)):
            await case.result()
