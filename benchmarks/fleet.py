"""N agents side by side: what they cost, and what becomes of them while Workers are killed.

    python benchmarks/fleet.py [--agents 200] [--in-flight 50] [--workers 1] [--kill-every [1.0]]
                               [--default-sandbox]

Each agent has an order and a customer of its own. A Worker is a process with what `build_worker`
gives, the SDK's default cache included, and as in `recipes/worker.py` imports the Workflow's file
once; `--default-sandbox`: once for every case that it takes up. The dev server has short timers
(`harness.FAST_TIMERS`). With `--kill-every`, a Worker is SIGKILLed so many seconds after it said
that it polls, and replaced, until all agents have ended.

Counted at the stand-ins: refunds, remembered cases, questions, and the calls beyond those of agents
that nobody kills. A question counts when the decider chooses to ask what the customer is not yet
looking at; he thinks for a moment and signals his answer. (A real client sends a Query first, for
which a new Worker would have to replay the case.) Customers and stand-ins live in this process; the
decider is the fixed policy.

CPU is what the server and the Workers used, killed ones too, from when the first Worker was ready
until all agents had ended. It says little without the speed of the machine, so without kills as
many of `prototype.py` run on the same server, half of them before the agents and half of them after
them, in the default sandbox. Recovery is the time from the kill of the Worker that an agent's last
decision was made for, to its next decision: the death is noticed, the dead Worker's own queue is
given up (after the SDK's 10 seconds), a new Worker has started, and it is this agent's turn.

Exits with 1 if a count is wrong, or if a call came again without a kill: a Worker with too much in
flight is too busy to heartbeat in time.
"""

import argparse
import asyncio
import json
import math
import os
import py_compile
import statistics
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
from temporalio.client import Client, WorkflowFailureError
from temporalio.worker import Worker

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import harness
import prototype
import refund_agent
from harness import Address, Call, Fixture, People, World
from recipes.worker import ImportedOnce
from refund_agent import Answer, Case, Question, RefundAgent, RefundRequest

CALLS = 13  # of one agent: recall, 5 decisions, 2 lookups, 3 at Stripe, a write and its status
START_SECONDS = 60.0  # for a Worker, on a busy machine
STARTS_AT_ONCE = 20  # a thousand would not be answered in time
THINKING_SECONDS = 0.5  # of a customer
PROGRESS_SECONDS = 10.0
Ended = tuple[bool, int, int]  # as it should; events and bytes in its history
Used = tuple[int, float, float]  # by how many events; CPU seconds of the server and of the Workers


def cpu_seconds(pid: int) -> float:
    """User and system time of a process; not a number where there is no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return math.nan
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def server_pid(server: harness.Server) -> int:
    """The server is the child of its keeper."""
    keeper = server.process.pid if server.process else 0
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()[0])
    return 0


async def work(temporal: str, queue: str, port: str, imported: str) -> None:
    """A Worker process, with nothing of the harness in it but the way to the stand-ins."""
    fleet: Any = harness.Remote(Address(int(port), os.environ["FLEET_TOKEN"]), idle=[]).fleet
    client = await harness.connect(temporal, plugins=[ImportedOnce()] if imported == "once" else [])
    world = fleet.world
    async with refund_agent.build_worker(
            client, queue, stripe=world.stripe, shop=world.shop, decider=world.decider,
            memory=world.xmemory):
        await fleet.polls(os.getpid())
        await asyncio.to_thread(sys.stdin.read)  # until whoever started this process ends


async def work_prototype(temporal: str, queue: str) -> None:
    client = await harness.connect(temporal)
    async with Worker(client, task_queue=queue, workflows=[prototype.Prototype], activities=[
            prototype.choose, prototype.find_order, prototype.find_customer, prototype.refund]):
        await asyncio.to_thread(sys.stdin.read)


async def run_prototypes(server: harness.Server, count: int, in_flight: int) -> Used:
    client, pid, queue = await server.client(), server_pid(server), str(uuid.uuid4())
    places = anyio.Semaphore(in_flight)

    async def run(order_id: str) -> int:
        async with places:
            request = prototype.Request(order_id, "customer", "Please refund my order.")
            case = await client.start_workflow(
                prototype.Prototype.run, request, id=f"{queue}-{order_id}", task_queue=queue,
                start_signal="answer", start_signal_args=["Yes."])
            await case.signal(prototype.Prototype.answer, "The lid is cracked.")
            await case.result()
            return (await case.describe()).history_length

    command = [sys.executable, __file__, "prototype", str(server.address), queue]
    async with harness.child("a prototype's Worker", command) as worker:
        await worker.until(partial(run, "warm-up"), START_SECONDS, "its first Workflow")
        before = cpu_seconds(pid), cpu_seconds(worker.pid)
        events = await asyncio.gather(*(run(f"{number}") for number in range(count)))
        after = cpu_seconds(pid), cpu_seconds(worker.pid)
    return sum(events), after[0] - before[0], after[1] - before[1]


async def reply(question: Question) -> Answer:
    return Answer(question.id, "Yes; the lid is cracked.")


class Fleet:
    """The agents, their customers, and the Workers that come and go."""

    def __init__(self, options: argparse.Namespace, client: Client, tasks: Any) -> None:
        self.client, self.queue, self.tasks = client, str(uuid.uuid4()), tasks
        self.starts = anyio.Semaphore(STARTS_AT_ONCE)
        self.places, self.kill_every = anyio.Semaphore(options.in_flight), options.kill_every
        self.people = {f"{number}": People(reply) for number in range(options.agents)}
        self.world = World(
            [Fixture(id, "approved at once", "teapot", 80_00, 200_00, f"customer-{id}")
             for id in self.people], reply, self.on_call)
        self.cases: dict[str, Case] = {}
        self.calls, self.worker_cpu = 0, 0.0
        self.served_by: dict[str, int] = {}  # the Worker of each agent's last decision
        self.kills = self.gone = 0
        self.killed_at: dict[int, float] = {}  # by process id, which a later Worker may have again
        self.recoveries: list[float] = []
        self.polling: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self.ready, self.ended = asyncio.Event(), asyncio.Event()

    async def live(self, id: str) -> Ended:
        """One agent, from its start to its end."""
        request, well = RefundRequest(id, f"customer-{id}", "Please refund my order."), False
        case_id = refund_agent.case_id_for(request)
        self.cases[id] = self.client.get_workflow_handle_for(RefundAgent.run, case_id)
        async with self.places:
            async with self.starts:
                case = await refund_agent.start_case(self.client, request, task_queue=self.queue)
            with suppress(WorkflowFailureError):
                result = await case.result()
                well = result.outcome == "refund succeeded" and result.remembered
        info = (await case.describe()).raw_description.workflow_execution_info
        self.gone += 1
        return well, info.history_length, info.history_size_bytes

    def on_call(self, call: Call) -> None:
        self.calls += call.path != "fleet.polls"
        if call.path.endswith("decider.decide"):
            id: str = call.arguments[0].order_id
            if killed_at := self.killed_at.get(self.served_by.get(id, 0)):
                self.recoveries.append(time.monotonic() - killed_at)
            self.served_by[id] = call.pid
            if call.result.action == "ask":
                question = Question.at(call.arguments[1].turn, "customer", call.result.text)
                if self.people[id].look_at(question):
                    self.tasks.start_soon(self.answer, id, question)

    async def answer(self, id: str, question: Question) -> None:
        await anyio.sleep(THINKING_SECONDS)
        await self.cases[id].signal("answer", await reply(question))

    async def say_how_far(self) -> None:
        while True:
            await anyio.sleep(PROGRESS_SECONDS)
            print(f"{self.gone} of {len(self.people)} agents have ended, {self.kills} kills",
                  file=sys.stderr, flush=True)

    async def polls(self, pid: int) -> None:
        """A Worker says so."""
        self.polling[pid].set()
        self.ready.set()

    async def keep_worker(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        while not self.ended.is_set():
            async with harness.child("a Worker", command, env) as worker:
                await worker.until(self.polling[worker.pid].wait, START_SECONDS, "its Task Queue")
                before = cpu_seconds(worker.pid) if not self.kills else 0.0
                with anyio.move_on_after(self.kill_every):
                    await worker.until(self.ended.wait, math.inf, "the end")
                self.worker_cpu += cpu_seconds(worker.pid) - before
                if not self.ended.is_set():
                    await worker.kill()
                    self.kills += 1
                    self.killed_at[worker.pid] = time.monotonic()
                    del self.polling[worker.pid]


async def run(options: argparse.Namespace) -> int:
    for file in (refund_agent.__file__, prototype.__file__):
        with suppress(OSError):  # the sandbox imports them again and again; from source, slowly
            py_compile.compile(file)
    half = partial(run_prototypes, count=-(-options.agents // 2), in_flight=options.in_flight)
    prototypes = list[Used]()
    async with harness.dev_server() as server, anyio.create_task_group() as tasks:
        if options.kill_every is None:
            prototypes.append(await half(server))
        fleet, pid = Fleet(options, await server.client(), tasks), server_pid(server)
        async with harness.serving({"fleet": fleet}, fleet.on_call) as at:
            command = [sys.executable, __file__, "work", str(server.address), fleet.queue,
                       str(at.port), "for each case" if options.default_sandbox else "once"]
            async with anyio.create_task_group() as workers, harness.background(fleet.say_how_far):
                for _ in range(options.workers):
                    workers.start_soon(fleet.keep_worker, command, {"FLEET_TOKEN": at.token})
                await fleet.ready.wait()
                before = time.monotonic(), cpu_seconds(pid), time.process_time()
                ended = await asyncio.gather(*map(fleet.live, fleet.people))
                after = time.monotonic(), cpu_seconds(pid), time.process_time()
                fleet.ended.set()
        if prototypes:
            prototypes.append(await half(server))
        tasks.cancel_scope.cancel()  # a customer may still look at a case that has ended
    seconds, server_cpu, parent_cpu = (b - a for a, b in zip(before, after, strict=True))
    used = sum(events for _, events, _ in ended), server_cpu, fleet.worker_cpu
    print_cpu(used, prototypes)
    print(f"CPU per event, this process {parent_cpu / used[0] * 1000:.2f} ms")
    return report(fleet, ended, seconds)


def print_cpu(used: Used, prototypes: Sequence[Used]) -> None:
    """Where there is no /proc, a number is n/a."""
    for place, who in enumerate(("server", "Workers"), start=1):
        line = f"CPU per event, {who:8}{used[place] / used[0] * 1000:5.2f} ms"
        if prototypes:
            events = sum(run[0] for run in prototypes)
            yard = sum(run[place] for run in prototypes) / events
            each = " and ".join(f"{run[place] / run[0] * 1000:.2f}" for run in prototypes)
            line += f"; of the prototype {each} ms, ratio {used[place] / used[0] / yard:.2f}"
        elif who == "Workers":
            line += ", the starts of new ones included"
        print(line.replace("nan", "n/a"))


def report(fleet: Fleet, ended: Sequence[Ended], seconds: float) -> int:
    well, lengths, sizes = zip(*ended, strict=True)
    n, kills, events, world = len(ended), fleet.kills, sum(lengths), fleet.world
    refunds = [refund["metadata"]["case_id"] for refund in world.stripe.refunds.values()]
    cases = len(world.xmemory.tables["RefundCase"])  # by their key, the case id
    questions = [people.counted("customer") for people in fleet.people.values()]
    extra_calls = fleet.calls - CALLS * n
    print(f"{n} agents in {seconds:.1f} s, {kills} kills; median of an agent: "
          f"{statistics.median(lengths):.0f} events, {statistics.median(sizes):,.0f} bytes")
    if len(fleet.recoveries) > 1:
        parts = statistics.quantiles(fleet.recoveries, n=20)
        print(f"recovery, n={len(fleet.recoveries)}: p50 {parts[9]:.1f} s, p95 {parts[18]:.1f} s")
    claims = {
        "each agent refunded once": len(refunds) == len(set(refunds)) == n,
        "each case was remembered": cases == n,
        "each customer was asked two questions": questions == [2] * n,
        "each agent says that it ended so": all(well),
        "no call came again without a kill": kills > 0 or extra_calls == 0}
    for claim in (claim for claim, observed in claims.items() if not observed):
        print(f"NOT OBSERVED: {claim}")
    print(json.dumps({
        "agents": n, "refunds": len(refunds), "cases": cases, "questions": sum(questions),
        "extra_calls": extra_calls, "kills": kills, "agents_per_s": round(n / seconds, 2),
        "events_per_s": round(events / seconds, 1)}), flush=True)
    return 0 if all(claims.values()) else 1


def at_least_one(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def positive(text: str) -> float:
    if not 0 < (number := float(text)) < math.inf:
        raise ValueError
    return number


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--agents", type=at_least_one, default=200, help="how many; fewer than 100 "
                        "say little about CPU")
    parser.add_argument("--in-flight", type=at_least_one, default=50, help="how many at a time")
    parser.add_argument("--workers", type=at_least_one, default=1, help="processes at a time")
    parser.add_argument("--kill-every", type=positive, nargs="?", const=1.0, metavar="SECONDS",
                        help="how long after it is ready a Worker is SIGKILLed and replaced; "
                        "1.0 without a number, and never without this option")
    parser.add_argument("--default-sandbox", action="store_true",
                        help="import the Workflow's file for every case, not once")
    return parser.parse_args()


if __name__ == "__main__":
    if sys.argv[1:2] in (["work"], ["prototype"]):
        asyncio.run((work if sys.argv[1] == "work" else work_prototype)(*sys.argv[2:]))
        sys.exit()
    harness.run(partial(run, parsed()))
