"""N agents side by side: what they cost, and what becomes of them while Workers are killed.

    python benchmarks/fleet.py [--agents 200] [--in-flight 50] [--workers 1] [--kill-every [1.0]]

Each agent has an order and a customer of its own. A Worker is a process with what `build_worker`
gives, the SDK's default cache and sandbox included. The dev server has short timers
(`harness.FAST_TIMERS`). With `--kill-every`, a Worker is SIGKILLed so many seconds
after it said that it polls, and replaced, until all agents have ended.

Counted at the stand-ins: refunds, remembered cases, questions, and the calls beyond those of agents
that nobody kills. A question counts when the decider chooses to ask what the customer is not yet
looking at; he thinks for a moment and signals his answer. (A real client sends a Query first, for
which a new Worker would have to replay the case.) Customers and stand-ins live in this process; the
decider is the fixed policy.

CPU is what the server and the Workers used, killed ones too, from when the first Worker was ready
until all agents had ended. It depends on the machine: compare two runs of one hour. Recovery is the
time from the kill of the Worker that an agent's last decision was made for, to its next decision:
the death is noticed, the dead Worker's own queue is given up (after the SDK's 10 seconds), a new
Worker has started, and it is this agent's turn.

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
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
from temporalio.client import Client, WorkflowFailureError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import harness
import refund_agent
import run_demo
from harness import Call, DevServer
from refund_agent import (
    Answer,
    Case,
    Question,
    RefundActivities,
    RefundAgent,
    RefundRequest,
    question_about,
)

# Of one agent: recall, 5 decisions, order and history at the shop, payment and refunds at Stripe;
# order, refunds and create as it refunds; a write and its status.
CALLS = 15
START_SECONDS = 60.0  # for a Worker, on a busy machine
STARTS_AT_ONCE = 20  # a thousand would not be answered in time
THINKING_SECONDS = 0.5  # of a customer
Ended = tuple[bool, int, int]  # as it should; events and bytes in its history


def cpu_seconds(pid: int) -> float:
    """User and system time of a process; not a number where there is no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return math.nan
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def server_pid(server: DevServer) -> int:
    """The server is the child of its keeper, started by any thread of it."""
    with suppress(OSError):  # where there is no /proc
        for children in Path(f"/proc/{server.child.pid}/task").glob("*/children"):
            for pid in children.read_text().split():
                return int(pid)
    return 0


async def work(remote: Any, temporal: str, queue: str) -> None:
    """A Worker process, with nothing of the harness in it but the way to the stand-ins."""
    client = await run_demo.connect(temporal)
    steps = RefundActivities(remote.stripe, remote.shop, remote.decide)
    async with refund_agent.build_worker(client, queue, steps, remote.xmemory):
        await remote.polls(os.getpid())
        await asyncio.Event().wait()


async def reply(question: Question) -> Answer:
    return Answer(question.id, "Yes; the lid is cracked.")


class Fleet(run_demo.Durable):
    """The agents, their customers, and the Workers that come and go."""

    def __init__(self, options: argparse.Namespace, client: Client) -> None:
        super().__init__("1234")
        self.client, self.queue = client, self.name
        self.starts = anyio.Semaphore(STARTS_AT_ONCE)
        self.places, self.kill_every = anyio.Semaphore(options.in_flight), options.kill_every
        self.shown = {f"n{number}": list[str]() for number in range(options.agents)}
        self.requests = [
            RefundRequest(id, f"customer-{id}", "Please refund my order.") for id in self.shown
        ]
        for r in self.requests:
            self.add(run_demo.ShopOrder(r.order_id, "", "teapot", 80_00, 200_00, r.customer_id))
        self.cases: dict[str, Case] = {}
        self.worker_cpu = 0.0
        self.served_by: dict[str, int] = {}  # the Worker of each agent's last decision
        self.kills = self.gone = 0
        self.deaths: dict[int, float] = {}  # by process id, which a later Worker may have again
        self.recoveries: list[float] = []
        self.polling: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self.ready = asyncio.Event()

    async def live(self, request: RefundRequest) -> Ended:
        """One agent, from its start to its end."""
        well, case_id = False, refund_agent.case_id_for(request)
        self.cases[request.order_id] = self.client.get_workflow_handle_for(RefundAgent.run, case_id)
        async with self.places:
            async with self.starts:
                case = await refund_agent.start_case(self.client, request, task_queue=self.queue)
            with suppress(WorkflowFailureError):
                result = await case.result()
                well = result.outcome == "refund succeeded" and result.remembered
        info = (await case.describe()).raw_description.workflow_execution_info
        self.gone += 1
        return well, info.history_length, info.history_size_bytes

    def answered(self, call: Call) -> None:
        if call.path == "decide":
            known = call.args[0]
            id: str = known.request.order_id
            if killed_at := self.deaths.get(self.served_by.get(id, 0)):
                self.recoveries.append(time.monotonic() - killed_at)
            self.served_by[id] = call.pid
            if call.answer.action == "ask":
                turn = len(known.answers)  # the policy asks before it does anything else
                question = question_about(known, turn, "customer", call.answer.text)
                if question.id not in self.shown[id][-1:]:
                    self.shown[id].append(question.id)
                    self.begin(self.answer(id, question))

    async def answer(self, id: str, question: Question) -> None:
        await anyio.sleep(THINKING_SECONDS)
        await self.cases[id].signal("answer", await reply(question))

    def remembered(self, request: RefundRequest) -> int:
        self.request = request
        lines: int = self.count()["cases remembered"]
        return lines

    async def polls(self, pid: int) -> None:
        """A Worker says so."""
        self.polling[pid].set()
        self.ready.set()

    async def keep_worker(self, temporal: str) -> None:
        job = ("a Worker", "fleet:work", temporal, self.queue)
        while not self.ended.is_set():
            async with harness.child(*job, world=self) as worker:
                await worker.until(self.polling[worker.pid], START_SECONDS, "its Task Queue")
                before = cpu_seconds(worker.pid) if not self.kills else 0.0
                with anyio.move_on_after(self.kill_every):
                    await worker.until(self.ended, math.inf, "the end")
                self.worker_cpu += cpu_seconds(worker.pid) - before
                if not self.ended.is_set():
                    await worker.kill()
                    self.kills += 1
                    self.deaths[worker.pid] = time.monotonic()
                    del self.polling[worker.pid]


async def run(options: argparse.Namespace) -> int:
    with suppress(OSError):  # the sandbox imports it again and again; from source, slowly
        py_compile.compile(refund_agent.__file__)
    async with harness.dev_server(*harness.FAST_TIMERS) as server:
        fleet, pid = Fleet(options, await server.client()), server_pid(server)
        async with asyncio.TaskGroup() as workers:
            for _ in range(options.workers):
                work = fleet.keep_worker(await server.address())
                workers.create_task(work)
            await fleet.ready.wait()
            before = time.monotonic(), cpu_seconds(pid)
            ended = await asyncio.gather(*map(fleet.live, fleet.requests))
            after = time.monotonic(), cpu_seconds(pid)
            fleet.ended.set()
    return report(fleet, ended, after[0] - before[0], after[1] - before[1])


def report(fleet: Fleet, ended: Sequence[Ended], seconds: float, server_cpu: float) -> int:
    well, lengths, sizes = zip(*ended, strict=True)
    n, kills = len(ended), fleet.kills
    made = [refund["metadata"].get("order_line") for refund in fleet.stripe.refunds.values()]
    refunds = [line for line in made if line]
    cases = [fleet.remembered(request) for request in fleet.requests]
    questions = [len(shown) for shown in fleet.shown.values()]
    extra_calls = sum(call.path != "polls" for call in fleet.calls) - CALLS * n
    events, size = statistics.median(lengths), statistics.median(sizes)
    print(
        f"{n} agents in {seconds:.1f} s, {kills} kills; median of an agent: {events:.0f} "
        f"events, {size:,.0f} bytes"
    )
    for who, spent in (("server", server_cpu), ("Workers", fleet.worker_cpu)):
        print(f"CPU per event, {who:7} {spent / sum(lengths) * 1000:.2f} ms")
    if len(fleet.recoveries) > 1:
        parts = statistics.quantiles(fleet.recoveries, n=20)
        print(f"recovery, n={len(fleet.recoveries)}: p50 {parts[9]:.1f} s, p95 {parts[18]:.1f} s")
    claims = {
        "each agent refunded once": len(refunds) == len(set(refunds)) == n,
        "each case was remembered": cases == [1] * n,
        "each customer was asked two questions": questions == [2] * n,
        "each agent says that it ended so": all(well),
        "no call came again without a kill": kills > 0 or extra_calls == 0,
    }
    for claim in (claim for claim, observed in claims.items() if not observed):
        print(f"NOT OBSERVED: {claim}")
    counts = {
        "agents": n,
        "refunds": len(refunds),
        "cases": sum(cases),
        "questions": sum(questions),
        "extra_calls": extra_calls,
        "kills": kills,
        "agents_per_s": round(n / seconds, 2),
    }
    print(json.dumps(counts), flush=True)
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
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--agents",
        type=at_least_one,
        default=200,
        help="how many; fewer than 100 say little about CPU",
    )
    parser.add_argument("--in-flight", type=at_least_one, default=50, help="how many at a time")
    parser.add_argument("--workers", type=at_least_one, default=1, help="processes at a time")
    parser.add_argument(
        "--kill-every",
        type=positive,
        nargs="?",
        const=1.0,
        metavar="SECONDS",
        help="how long after it is ready a Worker is SIGKILLed and replaced; "
        "1.0 without a number, and never without this option",
    )
    return parser.parse_args()


if __name__ == "__main__":
    harness.run(run(parsed()))
