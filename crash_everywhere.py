"""Kill the agent everywhere: `python run_demo.py --crash everywhere`.

One case is played without a kill, and its Event History says where a kill can fall: before and
after the body of every Activity, in every Workflow Task, in every wait for a person. For each of
these points the case is played again in a world of its own: a Worker is killed exactly there, and
a new one finishes.

The rule here: what is right was recorded, not written down. A row is right if all that was counted
at the stand-ins is what the uninterrupted run came to, but for the one call in flight at its kill.
"""

import asyncio
import gc
import json
import os
import signal
import sys
import uuid
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import anyio
import anyio.abc
from anyio.streams.buffered import BufferedByteReceiveStream
from temporalio.client import WorkflowFailureError

import harness
import refund_agent
from harness import Child, Crash, Fixture, HarnessError, Reply, Server, Tally, World, background
from refund_agent import Answer, Question, RefundRequest, RefundResult

SIDE_BY_SIDE = 6  # rows at a time, for two cores: half of a row is waiting until a death is noticed
ROW_SECONDS = 60.0  # for a Worker to come to its point, and for the new one to finish

# What may happen once more if a Worker dies when an Activity has run and its result has not been
# reported. Before its body, in a Workflow Task and in a wait, no call is in flight.
IN_FLIGHT = {
    "agent_decide_next_step": {"decisions": 1},
    "lookup_order": {"lookups": 1, "stripe_calls": 2},  # the payment and its refunds
    "lookup_customer_history": {"lookups": 1},
    "check_refund_policy": {},  # it calls nobody
    # It asks the shop and Stripe first, finds the refund and orders no other.
    "issue_refund": {"lookups": 1, "stripe_calls": 1},
    "xmemory_read": {"memory_calls": 1},
    "xmemory_write_async": {"writes": 1, "memory_calls": 1},  # queued twice, with the same values
    "xmemory_wait_for_write": {"memory_calls": 1},
}
COUNTED = (
    "questions",
    "reviews",
    "decisions",
    "lookups",
    "writes",
    "memory_calls",
    "stripe_calls",
    "refund_requests",
    "refunds",
    "remembered",
)
CALLS = ("decisions", "lookups", "memory_calls", "stripe_calls")  # the others are among these

# --- A hundred Workers ---------------------------------------------------------------------------
# Most of the start of a Worker is importing the SDK. So one process imports it, and each Worker is
# a fork of that one: a process of its own, with a connection of its own, killed like any other.

StartWorker = Callable[[World, Mapping[str, Any]], AbstractAsyncContextManager[Child]]


@dataclass(frozen=True)
class Forked:
    """A Worker whose parent is the template: we kill it, the template reaps it and tells us."""

    pid: int
    reaped: asyncio.Event

    def kill(self) -> None:
        if not self.reaped.is_set():
            os.kill(self.pid, signal.SIGKILL)

    async def wait(self) -> None:
        await self.reaped.wait()


class Template:
    """Our end of the process that forks the Workers."""

    def __init__(self, process: anyio.abc.Process, output: Any) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._jobs, self._output, self._asking = process.stdin, output, anyio.Lock()
        self._news = BufferedByteReceiveStream(process.stdout)
        self._forked = asyncio.Queue[int]()
        self._reaped: dict[int, asyncio.Event] = defaultdict(asyncio.Event)

    @asynccontextmanager
    async def worker(self, world: World, job: Mapping[str, Any]) -> AsyncIterator[Child]:
        """Like `harness.agent`, for Workers."""
        async with self._asking:
            await self._jobs.send(json.dumps(harness.placed(job, world)).encode() + b"\n")
            pid = await self._forked.get()
        started = Child("the worker process", Forked(pid, self._reaped[pid]), self._output)
        try:
            yield started
        finally:
            with anyio.CancelScope(shield=True):
                await started.kill()

    async def listen(self) -> None:
        """Hear who was forked and who was reaped."""
        try:
            while line := await self._news.receive_until(b"\n", harness.MAX_LINE):
                word, pid = line.split()
                if word == b"forked":
                    self._forked.put_nowait(int(pid))
                else:
                    self._reaped[int(pid)].set()
        except (anyio.EndOfStream, anyio.IncompleteRead):
            for reaped in self._reaped.values():
                reaped.set()  # the Workers end with the template
            raise HarnessError("The process that forks the Workers ended unexpectedly.") from None


@asynccontextmanager
async def workers() -> AsyncIterator[StartWorker]:
    """How to start them. A fork after these imports is safe on Linux; elsewhere each Worker imports
    for itself, which takes longer."""
    if sys.platform != "linux":
        yield lambda world, job: harness.agent("worker", world, job, SimpleNamespace())
        return
    command = [sys.executable, str(Path(__file__).resolve())]
    async with harness.child("the template", command, heard=True) as started:
        assert isinstance(started.process, anyio.abc.Process)
        template = Template(started.process, started.output)
        async with background(template.listen):
            yield template.worker


def fork_workers() -> NoReturn:
    """The template: fork a Worker for every job, one a line, that comes in; say its pid, and say it
    again when it is dead and reaped. No thread runs here, so a fork loses none."""
    alive, held = os.pipe()  # closes when this process ends, and the Workers end with it

    def reap(*_: object) -> None:
        with suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                os.write(1, b"reaped %d\n" % pid)

    signal.signal(signal.SIGCHLD, reap)
    asyncio.run(anyio.sleep(0))  # now anyio has imported all it needs
    gc.freeze()  # what is here now is shared by all: no Worker's collector should touch it
    for line in sys.stdin:
        if pid := os.fork():
            os.write(1, b"forked %d\n" % pid)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(held)
        os.dup2(2, 1)
        harness.serve("worker", json.loads(line), alive)
    harness.leave(0)


# --- Playing -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """What all runs of the case have in common."""

    request: RefundRequest
    fixtures: Sequence[Fixture]
    reply: Reply
    server: Server
    case_id: str
    start_worker: StartWorker


@dataclass(frozen=True)
class Ran:
    """What one run came to; `point` is where its Worker was killed, empty if it was not."""

    point: str
    tally: Tally
    result: RefundResult | None
    problem: str = ""  # why it did not come to its end, or not to its point
    asked: tuple[Question, ...] = ()


async def play(setting: Setting, point: str) -> Ran:
    """The case, once, in a world of its own."""

    async def reply(question: Question) -> Answer:
        await world.gate.reach(f"waiting for the {question.to}")
        return await setting.reply(question)

    world = World(setting.fixtures, reply, lambda call: None)
    crash, problem = Crash(world, point), ""
    case_id = f"{setting.case_id} {point}".strip()
    try:
        await kill_and_finish(setting, crash, case_id)
    except* (HarnessError, WorkflowFailureError) as failed:
        problem = str(next(harness.leaves(failed)))
    if point and not crash.killed_at:
        problem = problem or "this point was never reached"
    tally = harness.tally(world, setting.request, crash.killed_at)
    return Ran(point, tally, world.result, problem, tuple(world.people.asked))


async def kill_and_finish(setting: Setting, crash: Crash, case_id: str) -> None:
    client, world = await setting.server.client(), crash.world
    queue = str(uuid.uuid4())
    job = {"temporal": setting.server.address, "task_queue": queue, "worker": "demo"}
    async with (
        world.open(),
        setting.start_worker(world, job) as first,
        harness.no_open_run(client, case_id, world),
    ):
        case = await refund_agent.start_case(
            client, setting.request, task_queue=queue, case_id=case_id
        )
        async with background(partial(world.attend, case)):
            if await crash.kill(first, ROW_SECONDS):
                async with setting.start_worker(world, job) as second:
                    await crash.finish(second, ROW_SECONDS)


async def points_of(setting: Setting, recorded: Ran) -> list[str]:
    """Every point of an uninterrupted run where a kill can fall, in order, as the gate names it."""
    points: list[str] = []
    seen: Counter[str] = Counter()
    asked = iter(recorded.asked)

    def add(*names: str) -> None:
        seen.update(names)
        points.extend(f"{name} {seen[name]}" for name in names)

    client = await setting.server.client()
    async for event in client.get_workflow_handle(setting.case_id).fetch_history_events():
        if event.HasField("workflow_task_completed_event_attributes"):
            add("in Workflow Task")
        elif event.HasField("activity_task_scheduled_event_attributes"):
            name = event.activity_task_scheduled_event_attributes.activity_type.name
            add(f"before {name}", f"after {name}")
        elif harness.waits_for_a_person(event):
            add(f"waiting for the {next(asked).to}")
    return points


async def play_all(
    setting: Setting, points: Sequence[str], finished: Callable[[Ran], None]
) -> None:
    places = anyio.Semaphore(SIDE_BY_SIDE)

    async def row(point: str) -> None:
        try:
            finished(await play(setting, point))
        finally:
            places.release()

    async with anyio.create_task_group() as tasks:
        for point in points:
            await places.acquire()
            tasks.start_soon(row, point)


# --- The verdict ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    again: Mapping[str, int]  # what was in flight and happened once more
    wrong: Sequence[str]

    def __str__(self) -> str:
        if self.wrong:
            return f"FAILED: {'; '.join(self.wrong)}"
        return f"ok, again: {', '.join(map(words, self.again))}" if self.again else "ok"


def verdict(recorded: Ran, ran: Ran) -> Verdict:
    """Whether a run equals the uninterrupted one, but for the call in flight at its kill."""
    if ran.problem:
        return Verdict({}, [ran.problem])
    kind, name = ran.point.split()[:2]
    allowed: Mapping[str, int] = IN_FLIGHT.get(name, {}) if kind == "after" else {}
    again, wrong = {}, []
    for what in COUNTED:
        seen, expected = getattr(ran.tally, what), getattr(recorded.tally, what)
        if not 0 <= seen - expected <= allowed.get(what, 0):
            wrong.append(f"{words(what)} {seen}, not {expected}")
        elif seen > expected:
            again[what] = seen - expected
    if not wrong and words_of(ran) != words_of(recorded):
        wrong.append("it asked something else")
    if ending(ran) != ending(recorded):
        wrong.append("it ended otherwise")
    return Verdict(again, wrong)


def words_of(ran: Ran) -> list[tuple[str, str]]:
    """What was asked, without the ids, which differ from case to case."""
    return [(question.to, question.text) for question in ran.asked]


def ending(ran: Ran) -> RefundResult | None:
    """The result, but for the ids that a stand-in happened to give."""
    return ran.result and replace(ran.result, refund=None)


def words(name: str) -> str:
    return name.replace("_", " ")


# --- The table -----------------------------------------------------------------------------------

HEAD = """\
                              seconds to  ques-  deci-  Stripe  re-    remem-
killed                          progress  tions  sions   calls  funds   bered  outcome"""


def show(ran: Ran, remark: object) -> None:
    counts, took = ran.tally, ran.tally.kill_to_progress
    outcome = ran.result.outcome if ran.result else "none"
    numbers = f"{took:7.1f}" if took is not None and ran.point else f"{'-':>7}"
    numbers += f"{counts.questions + counts.reviews:7}{counts.decisions:7}{counts.stripe_calls:8}"
    numbers += f"{counts.refunds:7}{counts.remembered:8}"
    first, *more = str(remark).splitlines()
    print(f"{ran.point or 'not killed':33}{numbers}  {outcome:18}{first}", flush=True)
    for line in more:
        print(f"    {harness.printable(line)}", flush=True)


class Table:
    """Prints every row as it comes, and keeps the score."""

    def __init__(self, recorded: Ran) -> None:
        self.recorded = recorded
        self.rows = self.extra = self.failed = 0
        print(f"\n{HEAD}", flush=True)
        show(recorded, "the uninterrupted run")

    def add(self, ran: Ran) -> None:
        judged = verdict(self.recorded, ran)
        self.rows += 1
        self.failed += bool(judged.wrong)
        self.extra += sum(count for what, count in judged.again.items() if what in CALLS)
        show(ran, judged)

    def end(self) -> int:
        """The last line, and the exit code."""
        score = f"{self.rows} crash points, {self.extra} extra calls, {self.failed} failures."
        print(f"\n{score}", flush=True)
        return 1 if self.failed or not self.rows else 0


async def kill_everywhere(setting: Setting, refunds: int) -> int:
    """The whole table; `refunds` is what an uninterrupted run must come to."""
    recorded = await play(setting, "")
    if recorded.problem or (recorded.tally.refunds, recorded.tally.remembered) != (refunds, 1):
        raise HarnessError(f"The uninterrupted run went wrong. {recorded.problem}".strip())
    points = await points_of(setting, recorded)
    kinds = Counter(point.split()[0] for point in points)
    print(
        f"It made {kinds['before']} Activities in {kinds['in']} Workflow Tasks and waited "
        f"{kinds['waiting']} times for a person: {len(points)} crash points, {SIDE_BY_SIDE} "
        "at a time.",
        flush=True,
    )
    table = Table(recorded)
    await play_all(setting, points, table.add)
    return table.end()


if __name__ == "__main__":
    fork_workers()
