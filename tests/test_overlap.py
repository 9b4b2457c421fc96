"""More than one death: the new Worker's, a Worker that only slept, the Temporal server's own."""

import asyncio
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    suppress,
)
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import pytest_asyncio
from conftest import Desk, reply, request_for, until
from temporalio.api.enums.v1 import PendingActivityState, TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import (
    DescribeTaskQueueRequest,
    ListTaskQueuePartitionsRequest,
)
from temporalio.client import Client
from temporalio.service import RPCError

import harness
from harness import Call, Child, Server, background
from refund_agent import Answer, Case, Question

pytestmark = pytest.mark.everywhere
SECONDS = 40.0  # for anything that a child should do
UNDISTURBED = {
    "questions": 2,
    "reviews": 0,
    "decisions": 5,
    "writes": 1,
    "refund_requests": 1,
    "refunds": 1,
    "remembered": 1,
}
REVIEWED = UNDISTURBED | {"reviews": 1, "decisions": 6}

T = TypeVar("T")
Point = Callable[[], Coroutine[Any, Any, object]]


async def patiently(call: Callable[[], Coroutine[Any, Any, T]]) -> T:
    while True:
        with suppress(RPCError):
            return await call()
        await asyncio.sleep(harness.POLL_SECONDS)


class Stage(Desk):
    """One case in a world of its own; its Workers are processes."""

    def __init__(self, address: str | None, client: Client) -> None:
        super().__init__(client)
        self.address = address
        self.refunding = 0  # the process that asked Stripe last for a refund of the case
        self.world.on_call = self.on_call
        self.world.people = harness.People(self.reply)
        self.may_review = asyncio.Event()

    def on_call(self, call: Call) -> None:
        if call.path.endswith("refunds.list_async"):
            self.refunding = call.pid

    async def reply(self, question: Question) -> Answer:
        if question.to == "reviewer":
            await self.may_review.wait()
        return await reply(question)

    @asynccontextmanager
    async def case(self, order_id: str = "1234") -> AsyncIterator[Case]:
        self.request = request_for(order_id)
        case = await self.start(order_id, case_id=self.queue)
        async with background(partial(self.attend, case)):
            yield case

    async def attend(self, case: Case) -> None:
        """Like `World.attend`, but a call that a dying server drops is made again."""
        async with background(partial(patiently, partial(self.world.people.converse, case))):
            await self.world.end(await patiently(case.result))

    def process(self) -> AbstractAsyncContextManager[Child]:
        job = {"temporal": self.address, "task_queue": self.queue, "worker": "demo"}
        return harness.agent("worker", self.world, job, self)

    async def killed(self, *points: Point) -> None:
        """One Worker after the other comes to its point and is killed there."""
        for point in points:
            async with self.process() as worker:
                await worker.until(point, SECONDS, "its point")
                await worker.kill()

    async def ended(self, worker: Child) -> None:
        await worker.until(self.world.ended.wait, SECONDS, "the result")

    async def finish(self) -> None:
        async with self.process() as worker:
            await self.ended(worker)

    def at(self, point: str) -> Point:
        async def reached() -> None:
            await self.world.gate.arm(point).wait()

        return reached

    def requested(self, times: int) -> Point:
        return partial(until, lambda: self.world.stripe.counts()["refunds.create"] >= times)

    async def reviewing(self) -> None:
        await until(lambda: self.world.people.counted("reviewer") > 0)

    async def polling(self, *workers: Child) -> None:
        """Wait until each of these can be given an Activity, whichever part of the queue has it."""
        service, space = self.client.workflow_service, self.client.namespace
        parts = await service.list_task_queue_partitions(
            ListTaskQueuePartitionsRequest(namespace=space, task_queue=TaskQueue(name=self.queue))
        )
        missing = {str(worker.pid) for worker in workers}
        while missing:
            for part in parts.activity_task_queue_partitions:
                found = await service.describe_task_queue(
                    DescribeTaskQueueRequest(
                        namespace=space,
                        task_queue=TaskQueue(name=part.key),
                        task_queue_type=TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY,
                    )
                )
                missing -= {poller.identity.partition("@")[0] for poller in found.pollers}
            await asyncio.sleep(harness.POLL_SECONDS)

    def counts(self) -> dict[str, int]:
        tally = harness.tally(self.world, self.request)
        return {name: getattr(tally, name) for name in UNDISTURBED}

    def keys(self) -> set[str | None]:
        calls = self.world.stripe.calls
        return {c.idempotency_key for c in calls if c.endpoint == "refunds.create"}


# --- The scenarios -------------------------------------------------------------------------------


async def killed_twice_at_a_decision(stage: Stage) -> None:
    async with stage.case():
        decided = stage.at("after agent_decide_next_step")
        await stage.killed(decided, decided)
        await stage.finish()


async def killed_twice_with_a_request_at_stripe(stage: Stage) -> None:
    stripe = stage.world.stripe
    held = stripe.hold_next_create("before")
    async with stage.case():
        await stage.killed(held.wait, stage.requested(2))
        stripe.release()
        await stage.finish()


async def killed_at_one_point_and_at_the_next(stage: Stage) -> None:
    async with stage.case():
        await stage.killed(stage.at("after issue_refund"), stage.at("after xmemory_write_async"))
        await stage.finish()


async def one_of_two_killed(stage: Stage) -> None:
    held = stage.world.stripe.hold_next_create("after")
    async with stage.process() as one, stage.process() as other:
        await one.until(partial(stage.polling, one, other), SECONDS, "its first poll")
        async with stage.case():
            await one.until(held.wait, SECONDS, "the refund")
            victim, survivor = (one, other) if one.pid == stage.refunding else (other, one)
            await victim.kill()
            await stage.ended(survivor)


async def asleep_with_a_request_at_stripe(stage: Stage) -> None:
    """The server gives the refund up and out again, to the same Worker, which then wakes."""
    stripe = stage.world.stripe
    held = stripe.hold_next_create("before")
    async with stage.case() as case, stage.process() as worker:
        await worker.until(held.wait, SECONDS, "its request")
        os.kill(worker.pid, signal.SIGSTOP)
        await worker.until(partial(next_attempt, case), SECONDS, "the next attempt")
        os.kill(worker.pid, signal.SIGCONT)
        await worker.until(stage.requested(2), SECONDS, "both requests")
        stripe.release()
        await stage.ended(worker)


async def next_attempt(case: Case) -> None:
    while True:
        for pending in (await case.describe()).raw_description.pending_activities:
            started = PendingActivityState.PENDING_ACTIVITY_STATE_STARTED
            if pending.attempt > 1 and pending.state == started:
                return
        await asyncio.sleep(harness.POLL_SECONDS)


def server_on(file: Path, port: int) -> AbstractAsyncContextManager[Child]:
    """At the end of the block, or of this process, its keeper sends it a SIGKILL."""
    binary = harness.temporal_binary()
    assert binary
    command = [
        sys.executable,
        "-S",
        "-c",
        harness.KEEPER,
        binary,
        "server",
        "start-dev",
        "--headless",
        "--ip",
        "127.0.0.1",
        "--port",
        str(port),
        "--log-level",
        "error",
        "--db-filename",
        str(file),
    ]
    command += [part for value in harness.FAST_TIMERS for part in ("--dynamic-config-value", value)]
    return harness.child("the Temporal server", command)


async def server_killed() -> tuple[Stage, Stage]:
    """One case waits for its reviewer meanwhile, the other for Stripe."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}"
    connect = partial(harness.connect, address)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "temporal.db")
        async with AsyncExitStack() as running:
            server = await running.enter_async_context(server_on(file, port))
            client = await server.until(connect, SECONDS, "its start")
            review, refund = Stage(address, client), Stage(address, client)
            held = refund.world.stripe.hold_next_create("before")
            async with (
                review.world.open(),
                refund.world.open(),
                review.process() as reviewing,
                refund.process() as refunding,
                review.case("1235"),
            ):
                await reviewing.until(review.reviewing, SECONDS, "the review")
                async with refund.case():
                    await refunding.until(held.wait, SECONDS, "the refund")
                    await running.aclose()
                    refund.world.stripe.release()
                    server = await running.enter_async_context(server_on(file, port))
                    await server.until(connect, SECONDS, "its start")
                    review.may_review.set()
                    await review.ended(reviewing)
                    await refund.ended(refunding)
    return review, refund


# --- The claims ----------------------------------------------------------------------------------

Play = Callable[[Stage], Awaitable[None]]
PLAYS: list[Play] = [
    killed_twice_at_a_decision,
    killed_twice_with_a_request_at_stripe,
    killed_at_one_point_and_at_the_next,
    one_of_two_killed,
    asleep_with_a_request_at_stripe,
]


async def played(play: Play, server: Server) -> Stage:
    stage = Stage(server.address, await server.client())
    async with stage.world.open():
        await play(stage)
    return stage


class Plays:
    """All scenarios at the same time: most of it is waiting."""

    def __init__(self, server: Server) -> None:
        self.restart = asyncio.create_task(server_killed())
        self.others = {play: asyncio.create_task(played(play, server)) for play in PLAYS}

    async def ended(self, play: Play) -> Stage:
        return well(await self.others[play])


def well(stage: Stage) -> Stage:
    result = stage.world.result
    assert result and (result.outcome, result.remembered) == ("refund succeeded", True)
    assert len(stage.keys()) == 1
    # The order and the history, and the order again in each attempt of the refund.
    attempts = sum(point == "before issue_refund" for _, point in stage.world.gate.reached)
    assert len(stage.world.shop.lookups) == 2 + attempts
    return stage


@pytest_asyncio.fixture(scope="module")
async def plays(server: Server) -> AsyncIterator[Plays]:
    plays = Plays(server)
    yield plays
    tasks = [plays.restart, *plays.others.values()]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_each_kill_at_a_decision_costs_one_decision_more(plays: Plays) -> None:
    stage = await plays.ended(killed_twice_at_a_decision)
    assert stage.counts() == UNDISTURBED | {"decisions": 7}


async def test_two_workers_killed_with_their_requests_at_stripe_make_one_refund(
    plays: Plays,
) -> None:
    counts = (await plays.ended(killed_twice_with_a_request_at_stripe)).counts()
    requests = counts["refund_requests"]
    assert requests > 1 and counts == UNDISTURBED | {"refund_requests": requests}


async def test_a_new_worker_killed_at_the_next_point_repeats_only_what_was_in_flight(
    plays: Plays,
) -> None:
    stage = await plays.ended(killed_at_one_point_and_at_the_next)
    assert stage.counts() == UNDISTURBED | {"writes": 2}


async def test_when_one_of_two_workers_is_killed_the_other_finds_its_refund(plays: Plays) -> None:
    assert (await plays.ended(one_of_two_killed)).counts() == UNDISTURBED


async def test_a_worker_that_slept_and_the_next_attempt_overlap_in_one_refund(plays: Plays) -> None:
    counts = (await plays.ended(asleep_with_a_request_at_stripe)).counts()
    requests = counts["refund_requests"]
    assert requests > 1 and counts == UNDISTURBED | {"refund_requests": requests}


async def test_a_wait_for_the_reviewer_outlives_the_temporal_server(plays: Plays) -> None:
    review, _ = await plays.restart
    assert well(review).counts() == REVIEWED


async def test_a_refund_in_flight_outlives_the_temporal_server(plays: Plays) -> None:
    _, refund = await plays.restart
    assert well(refund).counts() == UNDISTURBED
