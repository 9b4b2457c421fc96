"""Deploys: a rolling replacement of the Workers loses no case and repeats no step."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from test_worker_recipe import profile, started

from desk import Desk, Quiet, reply
from harness import Child, DevServer
from refund_agent import Answer, Question, RefundRequest, RefundResult, start_case
from run_demo import ShopOrder

SECONDS = 60
MOST = 200  # cases
REPLACED = 2  # Workers


async def slow_reply(question: Question) -> Answer:
    await asyncio.sleep(1)  # so that cases are open while Workers come and go
    return await reply(question)


async def test_a_rolling_replacement_loses_and_repeats_nothing(
    server: DevServer, tmp_path: Path
) -> None:
    desk = Desk(await server.client())
    orders = [ShopOrder(f"{n}", "approved", "cup", 80_00, 200_00, f"c{n}") for n in range(MOST)]
    desk.world = world = Quiet("1234")
    desk.queue, world.replies = world.name, slow_reply
    for order in orders:
        world.add(order)
    playing = list[asyncio.Task[RefundResult]]()

    async def play(order: ShopOrder) -> RefundResult:
        request = RefundRequest(order.order_id, order.customer_id, "Please refund this.")
        case_id = f"{desk.queue}-{order.order_id}"
        case = await start_case(desk.client, request, task_queue=desk.queue, case_id=case_id)
        async with world.attending(case):
            return await case.result()

    @asynccontextmanager
    async def at_the_ready() -> AsyncIterator[Child]:
        """A Worker that has some of the work; cases start until it has."""
        async with started(world, profile(tmp_path, await server.address())) as worker:
            await asyncio.wait_for(work_for(worker), SECONDS)
            yield worker

    async def work_for(worker: Child) -> None:
        while worker.pid not in {call.pid for call in world.calls}:
            playing.append(asyncio.create_task(play(orders[len(playing)])))
            await asyncio.sleep(0.5)

    async with AsyncExitStack() as workers:
        worker = await workers.enter_async_context(at_the_ready())
        for _ in range(REPLACED):
            following = await workers.enter_async_context(at_the_ready())
            os.kill(worker.pid, signal.SIGTERM)  # as docker stop, systemd and Kubernetes do
            assert await worker.process.wait() == 0
            worker = following
        results = await asyncio.wait_for(asyncio.gather(*playing), SECONDS)
    cases, counted = len(playing), world.count()
    assert [result.outcome for result in results] == ["refund succeeded"] * cases
    assert (counted["decisions made"], counted["lookups"]) == (5 * cases, 3 * cases)
    assert (counted["  of them to refund"], counted["calls to Stripe"]) == (cases, 4 * cases)
    assert all(result.remembered for result in results) and counted["  of them to write"] == cases
