"""Deploys: a rolling replacement of the Workers loses no case and repeats no step."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from conftest import Desk, reply
from test_worker_recipe import profile, started

import harness
from harness import Child, Fixture, People, Server, World, background
from refund_agent import Answer, Question, RefundRequest, RefundResult, start_case

pytestmark = pytest.mark.everywhere
SECONDS = 60
MOST = 200  # cases
REPLACED = 2  # Workers


async def slow_reply(question: Question) -> Answer:
    await asyncio.sleep(1)  # so that cases are open while Workers come and go
    return await reply(question)


async def test_a_rolling_replacement_loses_and_repeats_nothing(
    server: Server, tmp_path: Path
) -> None:
    desk = Desk(await server.client())
    orders = [Fixture(f"{n}", "approved", "cup", 80_00, 200_00, f"c{n}") for n in range(MOST)]
    at_work: set[int] = set()
    world = World(orders, slow_reply, lambda call: at_work.add(call.pid))
    playing = list[asyncio.Task[RefundResult]]()

    async def play(order: Fixture) -> RefundResult:
        request = RefundRequest(order.order_id, order.customer_id, "Please refund this.")
        case_id = f"{desk.queue}-{order.order_id}"
        case = await start_case(desk.client, request, task_queue=desk.queue, case_id=case_id)
        async with background(partial(People(slow_reply).converse, case)):
            return await case.result()

    @asynccontextmanager
    async def at_the_ready() -> AsyncIterator[Child]:
        """A Worker that has some of the work; cases start until it has."""
        assert world.address is not None
        place = {"WORLD_PORT": str(world.address.port), "WORLD_TOKEN": world.address.token}
        environment = profile(tmp_path, server.address) | place
        build = "--task-queue", desk.queue, "--build", "worker_wiring:worker"
        async with started(environment, *build) as worker:
            await worker.until(partial(work_for, worker), SECONDS, "work")
            yield worker

    async def work_for(worker: Child) -> None:
        while worker.pid not in at_work:
            playing.append(asyncio.create_task(play(orders[len(playing)])))
            await asyncio.sleep(0.5)

    async with world.open(), AsyncExitStack() as workers:
        worker = await workers.enter_async_context(at_the_ready())
        for _ in range(REPLACED):
            following = await workers.enter_async_context(at_the_ready())
            os.kill(worker.pid, signal.SIGTERM)  # as docker stop, systemd and Kubernetes do
            assert await worker.process.wait() == 0
            worker = following
        results = await asyncio.wait_for(asyncio.gather(*playing), SECONDS)
    cases, counted = len(playing), harness.tally(world, RefundRequest("0", "c0", "any"))
    assert [result.outcome for result in results] == ["refund succeeded"] * cases
    assert (counted.decisions, counted.lookups) == (5 * cases, 3 * cases)
    assert (counted.refund_requests, counted.stripe_calls) == (cases, 4 * cases)
    assert all(result.remembered for result in results) and counted.writes == cases
