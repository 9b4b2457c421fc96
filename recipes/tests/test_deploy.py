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
REPLACED = 2  # Workers


async def slow_reply(question: Question) -> Answer:
    await asyncio.sleep(1)  # so that cases are open while Workers come and go
    return await reply(question)


async def test_a_rolling_replacement_loses_and_repeats_nothing(
    server: DevServer, tmp_path: Path
) -> None:
    desk = Desk(await server.client())
    desk.world = world = Quiet("1234")
    desk.queue, world.replies = world.name, slow_reply
    playing = list[asyncio.Task[RefundResult]]()

    async def play(number: int) -> RefundResult:
        request = RefundRequest(f"{number}", f"c{number}", "Please refund this.")
        world.add(ShopOrder(f"{number}", "approved", "cup", 80_00, 200_00, f"c{number}"))
        case_id = f"{desk.queue}-{number}"
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
            playing.append(asyncio.create_task(play(len(playing))))
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
