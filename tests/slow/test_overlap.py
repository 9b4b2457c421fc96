"""More deaths: the new Worker's too, a stock Worker's, that of a Worker that only slept, the
Temporal server's own."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from temporalio.api.enums.v1 import PendingActivityState
from temporalio.plugin import SimplePlugin
from temporalio.service import RPCError

import harness
from desk import Quiet, until
from fake_stripe import StripeError
from harness import AnnounceActivities, Call, DevServer
from refund_agent import Answer, Case, Question, RefundActivities, build_worker, start_case
from run_demo import POLL_SECONDS, connect

SECONDS = 40.0  # for anything that a child should do
CREATE = "stripe.v1.refunds.create_async"
UNDISTURBED = {
    "questions to the customer": 2,
    "questions to the reviewer": 0,
    "decisions made": 5,
    "  of them to write": 1,
    "  of them to refund": 1,
    "refunds": 1,
    "cases remembered": 1,
}
REVIEWED = UNDISTURBED | {"questions to the reviewer": 1, "decisions made": 6}


class Stage(Quiet):
    """One case in a world of its own; its Workers are processes."""

    def __init__(self, server: DevServer, order_id: str = "1234") -> None:
        super().__init__(order_id)
        self.server, self.temporal = server.address, server
        self.refused = asyncio.Event()  # a second request came while Stripe had the first
        self.reviewing, self.may_review = asyncio.Event(), asyncio.Event()

    def answered(self, call: Call) -> None:
        """Unlike in the demo, Stripe goes on when the test says so."""
        if call.path == CREATE and isinstance(call.answer, StripeError):
            self.refused.set()

    async def reply(self, question: Question) -> Answer:
        if question.to == "reviewer":
            self.reviewing.set()
            await self.may_review.wait()
        return await super().reply(question)

    async def attend(self, case: Case) -> None:
        """A call that a dying server drops is made again."""
        while not self.result:
            with suppress(RPCError):
                await super().attend(case)

    @asynccontextmanager
    async def case(self) -> AsyncIterator[Case]:
        client = await self.temporal.client()
        case = await start_case(client, self.request, task_queue=self.name, case_id=self.name)
        async with self.attending(case):
            yield case

    async def killed(self, *points: asyncio.Event) -> None:
        """One Worker after the other comes to its point and is killed there."""
        for point in points:
            async with self.process() as worker:
                await worker.until(point, SECONDS, "its point")
                await worker.kill()

    async def finished(self) -> None:
        async with self.process() as worker:
            await self.finish(worker)

    def well(self) -> dict[str, Any]:
        """What was counted, of a case that has ended well."""
        result, counted = self.result, self.count()
        assert result and (result.outcome, result.remembered) == ("refund succeeded", True)
        keys = {c.idempotency_key for c in self.stripe.calls if c.endpoint == "refunds.create"}
        assert len(keys) == 1
        # The order and the history, and the order again in each attempt of the refund.
        attempts = sum(call.args == ("before issue_refund",) for call in self.calls)
        assert counted["lookups"] == 2 + attempts
        return {name: counted[name] for name in UNDISTURBED}


async def test_two_workers_killed_with_their_requests_at_stripe_make_one_refund(
    server: DevServer,
) -> None:
    stage = Stage(server)
    held = stage.stripe.hold_next_create("before")
    async with stage.case():
        await stage.killed(held, stage.refused)
        stage.stripe.release()
        await stage.finished()
    counted = stage.well()
    requests = counted["  of them to refund"]
    assert requests > 1 and counted == UNDISTURBED | {"  of them to refund": requests}


async def test_a_new_worker_killed_at_the_next_point_repeats_only_what_was_in_flight(
    server: DevServer,
) -> None:
    stage = Stage(server)
    async with stage.case():
        await stage.killed(stage.arm("after issue_refund"), stage.arm("after xmemory_write_async"))
        await stage.finished()
    assert stage.well() == UNDISTURBED | {"  of them to write": 2}


async def test_when_one_of_two_workers_is_killed_the_other_finds_its_refund(
    server: DevServer,
) -> None:
    stage = Stage(server)
    held = stage.stripe.hold_next_create("after")
    async with stage.process() as one, stage.process() as other:
        both = {one.pid, other.pid}
        calling = until(lambda: {call.pid for call in stage.calls} == both)
        await asyncio.wait_for(calling, SECONDS)
        async with stage.case():
            await one.until(held, SECONDS, "the refund")
            refunding = [call.pid for call in stage.calls if call.path == CREATE]
            victim, survivor = (one, other) if refunding == [one.pid] else (other, one)
            await victim.kill()
            await stage.finish(survivor)
    assert stage.well() == UNDISTURBED


async def test_a_worker_that_slept_and_the_next_attempt_overlap_in_one_refund(
    server: DevServer,
) -> None:
    """The server gives the refund up and out again, to the same Worker, which then wakes."""
    stage = Stage(server)
    held = stage.stripe.hold_next_create("before")
    async with stage.case() as case, stage.process() as worker:
        await worker.until(held, SECONDS, "its request")
        os.kill(worker.pid, signal.SIGSTOP)
        await asyncio.wait_for(next_attempt(case), SECONDS)
        os.kill(worker.pid, signal.SIGCONT)
        await worker.until(stage.refused, SECONDS, "both requests")
        stage.stripe.release()
        await stage.finish(worker)
    counted = stage.well()
    requests = counted["  of them to refund"]
    assert requests > 1 and counted == UNDISTURBED | {"  of them to refund": requests}


async def next_attempt(case: Case) -> None:
    while True:
        for pending in (await case.describe()).raw_description.pending_activities:
            started = PendingActivityState.PENDING_ACTIVITY_STATE_STARTED
            if pending.attempt > 1 and pending.state == started:
                return
        await asyncio.sleep(POLL_SECONDS)


# --- As people run it ---------------------------------------------------------------------------


async def stock_worker(remote: Any, address: str, queue: str) -> None:
    """What people who copy will run."""
    announcing = SimplePlugin("announcing", interceptors=[AnnounceActivities(remote)])
    client = await connect(address, plugins=[announcing])
    activities = RefundActivities(remote.stripe, remote.shop, remote.decide)
    await build_worker(client, queue, activities, remote.xmemory).run()


async def test_a_stock_server_and_the_default_cache_only_take_longer() -> None:
    """Killed before the refund, with the reviewer's approval in."""
    async with harness.dev_server() as server:
        world = Quiet("1235")
        trapped = world.arm("before issue_refund")
        job = ("the Worker", "test_overlap:stock_worker", await server.address(), world.name)
        case = await start_case(await server.client(), world.request, task_queue=world.name)
        async with world.attending(case):
            async with harness.child(*job, world=world) as first:
                await first.until(trapped, SECONDS, "the refund")
                await first.kill()
            async with harness.child(*job, world=world) as second:
                await second.until(world.ended, SECONDS, "the result")
    count = world.count()
    assert world.result and world.result.outcome == "refund succeeded" and world.result.remembered
    assert (count["questions to the customer"], count["questions to the reviewer"]) == (2, 1)
    assert (count["refunds"], count["cases remembered"]) == (1, 1)


# --- The server's own death ----------------------------------------------------------------------
