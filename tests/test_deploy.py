"""Deploys: a Worker that is told to stop drains, and a rolling replacement repeats nothing."""

import asyncio
import os
import signal
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import pytest
from conftest import Desk, reply

import harness
from harness import Child, Fixture, People, Server, World, background
from refund_agent import Answer, Question, RefundRequest, RefundResult, start_case

pytestmark = pytest.mark.everywhere
SECONDS = 60
MOST = 200  # cases
REPLACED = 2  # Workers


def job_for(desk: Desk, server: Server) -> Mapping[str, Any]:
    return {"temporal": server.address, "task_queue": desk.queue, "worker": "stock"}


async def stop(worker: Child) -> object:
    """What `docker stop`, systemd and Kubernetes do; the exit code."""
    os.kill(worker.pid, signal.SIGTERM)
    return await worker.process.wait()


async def test_a_worker_that_is_told_to_stop_finishes_what_is_in_flight(server: Server) -> None:
    desk = Desk(await server.client())
    job, stripe = job_for(desk, server), desk.world.stripe
    held = stripe.hold_next_create("before")
    case = await desk.start()
    async with desk.world.open(), background(partial(desk.world.people.converse, case)):
        async with harness.agent("worker", desk.world, job, desk) as first:
            await first.until(held.wait, SECONDS, "the refund")
            stopping = asyncio.create_task(stop(first))
            await asyncio.sleep(0.3)
            assert not stopping.done() and stripe.counts()["refunds.create"] == 1
            stripe.release()
            assert await stopping == 0
        async with harness.agent("worker", desk.world, job, desk) as second:
            result = await second.until(case.result, SECONDS, "the result")
    assert result.outcome == "refund succeeded" and result.remembered
    assert stripe.counts()["refunds.create"] == 1


async def slow_reply(question: Question) -> Answer:
    await asyncio.sleep(1)  # so that cases are open while Workers come and go
    return await reply(question)


async def test_a_rolling_replacement_loses_and_repeats_nothing(server: Server) -> None:
    desk = Desk(await server.client())
    orders = [Fixture(f"{n}", "approved", "cup", 80_00, 200_00, f"c{n}") for n in range(MOST)]
    at_work: set[int] = set()
    desk.world = world = World(orders, slow_reply, lambda call: at_work.add(call.pid))
    job, playing = job_for(desk, server), list[asyncio.Task[RefundResult]]()

    async def play(order: Fixture) -> RefundResult:
        request = RefundRequest(order.order_id, order.customer_id, "Please refund this.")
        case = await start_case(
            desk.client, request, task_queue=desk.queue, case_id=f"{desk.queue}-{order.order_id}")
        async with background(partial(People(slow_reply).converse, case)):
            return await case.result()

    async def work_for(worker: Child) -> None:
        """Start cases until this Worker has some of the work: then it is ready."""
        while worker.pid not in at_work:
            playing.append(asyncio.create_task(play(orders[len(playing)])))
            await asyncio.sleep(0.3)

    async with world.open(), AsyncExitStack() as workers:
        worker = await workers.enter_async_context(harness.agent("worker", world, job, desk))
        for _ in range(REPLACED):
            await worker.until(partial(work_for, worker), SECONDS, "work")
            following = await workers.enter_async_context(
                harness.agent("worker", world, job, desk))
            await following.until(partial(work_for, following), SECONDS, "work")
            assert await stop(worker) == 0
            worker = following
        results = await asyncio.wait_for(asyncio.gather(*playing), SECONDS)
    cases, counted = len(playing), harness.tally(world, "")
    assert [result.outcome for result in results] == ["refund succeeded"] * cases
    assert (counted.decisions, counted.lookups) == (5 * cases, 2 * cases)
    assert (counted.refund_requests, counted.stripe_calls) == (cases, 3 * cases)
    assert all(result.remembered for result in results) and counted.writes == cases
