"""Kill the agent everywhere: `python run_demo.py --crash everywhere`.

One case is played without a kill, and its Event History says where a kill can fall: before and
after the body of every Activity, in every Workflow Task, in every wait for a person. For each of
these points the case is played again in a world of its own: a Worker is killed exactly there, and
a new one finishes.

No expected number is written down here. A row is right if every count at the stand-ins equals that
of the uninterrupted run. Only the one call in flight at the kill may count once more.
"""

import asyncio
import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

from temporalio.client import WorkflowFailureError
from temporalio.worker import WorkflowInstance, WorkflowInstanceDetails, WorkflowRunner
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner

import run_demo
from harness import HarnessError, printable
from refund_agent import Answer, Question

SIDE_BY_SIDE = 6  # rows at a time, for two cores: half of a row is waiting until a death is noticed

CALLS = DECISIONS, LOOKUPS, STRIPE, MEMORY = (
    "decisions made",
    "lookups",
    "calls to Stripe",
    "calls to xmemory",
)
# What may happen once more if a Worker dies when an Activity has run and its result has not been
# reported. Before its body, in a Workflow Task and in a wait, no call is in flight.
IN_FLIGHT = {
    "agent_decide_next_step": {DECISIONS: 1},
    "lookup_order": {LOOKUPS: 1, STRIPE: 2},  # the payment and its refunds
    "lookup_customer_history": {LOOKUPS: 1},
    # It asks the shop and Stripe first, finds the refund and orders no other.
    "issue_refund": {LOOKUPS: 1, STRIPE: 1},
    "xmemory_read": {MEMORY: 1},
    "xmemory_write_async": {
        "  of them to write": 1,
        MEMORY: 1,
    },  # queued twice, with the same values
    "xmemory_wait_for_write": {MEMORY: 1},
}


class Row(run_demo.Durable):
    """One play of the case; `crash` is the point where its Worker is killed, empty if it is not."""

    job = "crash_everywhere:worker"
    problem = ""  # why it did not come to its end

    def say(self, actor: str, text: str) -> None:
        """A row is one line, at its end."""

    async def reply(self, question: Question) -> Answer:
        await self.call(0, "reach", (f"waiting for the {question.to}",), {})
        return run_demo.scripted(question)

    async def play_alone(self) -> None:
        try:
            async with self.process() as first:
                await self.play(first)
            if self.crash and not self.killed_at:
                self.problem = "this point was never reached"
        except (HarnessError, WorkflowFailureError) as error:
            self.problem = str(error)

    def seconds_to_progress(self) -> float:
        """From the kill to the first thing that the new Worker did."""
        return next(
            (call.at - self.killed_at for call in self.calls if call.at > self.killed_at), 0
        )

    def outcome(self) -> Any:
        """What this row must have in common with the uninterrupted run: the result, but for the id
        that Stripe happened to give, and what was asked, but for the ids."""
        asked = [(question.to, question.text) for question in self.asked]
        return asked, self.result and replace(self.result, refund=None)


def verdict(row: Row, right: Row) -> tuple[Counter[str], list[str]]:
    """What was in flight and happened once more, and what is wrong."""
    again, wrong = Counter[str](), [row.problem] if row.problem else []
    kind, name = f"{row.crash} - -".split()[:2]
    allowed: dict[str, int] = IN_FLIGHT.get(name, {}) if kind == "after" else {}
    counted = row.count()
    for what, expected in right.count().items():
        if what.startswith("seconds") or row.problem:
            continue
        again[what] = counted[what] - expected
        if not 0 <= again[what] <= allowed.get(what, 0):
            wrong.append(f"{what.strip()}: {counted[what]}, not {expected}")
    if not wrong and row.outcome() != right.outcome():
        wrong.append("it ended otherwise")
    return +again, wrong


async def points_of(row: Row) -> list[str]:
    """Every point of this run where a kill can fall, in order, as it is announced."""
    client = await run_demo.connect(await row.server())
    points, seen, asked = list[str](), Counter[str](), iter(row.asked)
    async for event in client.get_workflow_handle(row.name).fetch_history_events():
        names: tuple[str, ...] = ()
        if event.HasField("workflow_task_completed_event_attributes"):
            names = ("in Workflow Task",)
        elif event.HasField("activity_task_scheduled_event_attributes"):
            name = event.activity_task_scheduled_event_attributes.activity_type.name
            names = (f"before {name}", f"after {name}")
        elif run_demo.waits_for_a_person(event):
            names = (f"waiting for the {next(asked).to}",)
        seen.update(names)
        points += [f"{name} {seen[name]}" for name in names]
    return points


HEAD = """\n
                              seconds to  ques-  deci-  Stripe  re-    remem-
killed                          progress  tions  sions   calls  funds   bered  outcome"""


def show(row: Row, right: Row) -> tuple[Counter[str], list[str]]:
    """Print a row of the table."""
    again, wrong = verdict(row, right)
    count, took = row.count(), row.seconds_to_progress()
    remark = f"ok, again: {', '.join(what.strip() for what in again)}" if again else "ok"
    if wrong:
        remark = f"FAILED: {'; '.join(wrong)}"
    first, *more = (remark if row.crash else "the uninterrupted run").splitlines()
    print(
        f"{row.crash or 'not killed':33}{took if row.crash else 0:7.1f}{len(row.asked):7}"
        f"{count[DECISIONS]:7}{count[STRIPE]:8}{count['refunds']:7}{count['cases remembered']:8}  "
        f"{row.result.outcome if row.result else 'none':18}{first}",
        *map(printable, more),
        sep="\n    ",
        flush=True,
    )
    return again, wrong


async def kill_everywhere(server: run_demo.Server, order_id: str) -> int:
    """Print the whole table. Return the exit code."""
    places = asyncio.Semaphore(SIDE_BY_SIDE)
    extra, failed = 0, 0

    async def play(point: str) -> Row:
        async with places:
            row = Row(order_id, point)
            row.server = server
            await row.play_alone()
            return row

    right = await play("")
    if right.problem or right.count()["refunds"] != (order_id in run_demo.WITH_REFUND):
        raise HarnessError(f"The uninterrupted run went wrong. {right.problem}".strip())
    points = await points_of(right)
    kinds = Counter(point.split()[0] for point in points)
    print(
        f"It made {kinds['before']} Activities in {kinds['in']} Workflow Tasks and waited "
        f"{kinds['waiting']} times for a person: {len(points)} crash points, {SIDE_BY_SIDE} "
        f"at a time.{HEAD}"
    )
    show(right, right)
    rows = [asyncio.ensure_future(play(point)) for point in points]
    try:
        for row in asyncio.as_completed(rows):
            again, wrong = show(await row, right)
            extra += sum(again[what] for what in CALLS)
            failed += bool(wrong)
    finally:
        for each in rows:
            each.cancel()
        await asyncio.gather(*rows, return_exceptions=True)
    print(f"\n{len(points)} crash points, {extra} extra calls, {failed} failures.")
    return 1 if failed or not points else 0


# --- Workflow Tasks ------------------------------------------------------------------------------


class AnnouncedTasks(WorkflowRunner):
    """Lets every Workflow Task announce itself when the Worker has it in hand and has not handled
    it; an interceptor is told what some tasks bring, not of every task. The number is its place in
    Event History: a replay also activates an instance once for each completed task. The SDK reports
    a task that stands still for two seconds; a Worker that is held dies before."""

    def __init__(self, world: Any) -> None:
        self.world, self.runner = world, SandboxedWorkflowRunner()

    def prepare_workflow(self, defn: Any) -> None:
        self.runner.prepare_workflow(defn)

    def set_worker_level_failure_exception_types(self, types: Any) -> None:
        self.runner.set_worker_level_failure_exception_types(types)

    def create_instance(self, det: WorkflowInstanceDetails) -> WorkflowInstance:
        instance, loop = self.runner.create_instance(det), asyncio.get_running_loop()
        handle, tasks = instance.activate, itertools.count(1)

        def activate(activation: Any) -> Any:  # in a thread, beside the loop
            query = all(job.HasField("query_workflow") for job in activation.jobs)
            number = 0 if query else next(tasks)
            if number and not activation.is_replaying:
                announced = self.world.reach(f"in Workflow Task {number}")
                asyncio.run_coroutine_threadsafe(announced, loop).result()
            return handle(activation)

        instance.activate = activate  # type: ignore[assignment,method-assign]
        return instance


async def worker(remote: Any, queue: str) -> None:
    """What the Worker of a row does."""
    await run_demo.worker(remote, queue, AnnouncedTasks(remote))
