"""Memory, at the edges: writes that never end, what is too large, what nobody asked for."""

import asyncio
import uuid
from collections.abc import Awaitable
from typing import Any

import pytest
from temporalio.client import Client

import refund_agent
from desk import Desk
from fake_xmemory import FakeXmemory
from memory_activities import WorkflowMemory
from refund_agent import RefundRequest, run_agent
from run_demo import PlainRuntime
from test_03_loop import denying, run_plain
from test_07_memory import PERSON, SECOND, TEXT, Use, failed, fails, start, worker


def impatiently(memory: WorkflowMemory) -> Awaitable[Any]:
    return memory.write_durable(TEXT, max_wait=SECOND)


async def test_what_event_history_cannot_hold_is_refused_on_both_ways(client: Client) -> None:
    xmemory, novel = FakeXmemory({}), "é" * 300_000
    xmemory.put("Person", PERSON | {"fact": novel})
    assert await fails(client, xmemory, lambda it: it.write_durable(novel)) == "XmemoryTooLarge"
    assert await fails(client, xmemory, lambda it: it.read("Person")) == "XmemoryTooLarge"
    assert xmemory.calls == ["read"]


@pytest.mark.parametrize("alive", [True, False])
async def test_a_write_that_never_ends_is_a_timeout_with_the_id_to_ask_again(
    client: Client, alive: bool
) -> None:
    xmemory, queue = FakeXmemory({}), str(uuid.uuid4())
    xmemory.paused = True
    async with worker(client, queue, xmemory):
        handle = await start(client, queue, impatiently)
        while not xmemory.counts()["write_status"]:
            await asyncio.sleep(0.02)
        if alive:
            failure = await failed(handle.result())
    if not alive:
        await asyncio.sleep(1.2)  # no Worker is there at the deadline
        async with worker(client, queue, xmemory):
            failure = await failed(handle.result())
    assert (failure.type, failure.details[0]) == ("XmemoryWriteTimeout", {"write_id": "w00001"})


async def test_a_text_whose_attempt_ran_out_of_time_is_not_sent_again(client: Client) -> None:
    xmemory = FakeXmemory({})
    xmemory.paused = True
    use: Use = lambda _: WorkflowMemory(write_timeout=SECOND).write(TEXT)  # noqa: E731
    assert await fails(client, xmemory, use) == "XmemoryWriteUncertain"
    assert xmemory.counts() == {"write": 1}


async def test_the_latest_cases_of_this_customer_are_recalled_each_once(desk: Desk) -> None:
    past = "\n".join(f"order {number} line 1: denied" for number in range(20))
    desk.world.xmemory.put("Customer", {"customer_id": "ada", "past_cases": past})
    decider = denying()
    for _ in range(3):
        await run_plain(desk.world, decider=decider)
    first, _, last = [known.recalled or () for known in decider.shown]
    assert first == tuple(past.splitlines()[-refund_agent.MAX_RECALLED :])
    assert last == (*first[1:], "order 1234 line 1: denied")


async def test_two_lines_of_one_order_are_two_lines_in_memory(desk: Desk) -> None:
    orders = desk.world.shop.orders
    orders["1234", 2] = orders["1234", 1]
    decider = denying()
    for line in (1, 2, 1):  # the first one twice
        request = RefundRequest("1234", "ada", "Please refund it.", line)
        await run_agent(request, PlainRuntime(desk.world.remote()))
    await run_plain(desk.world, decider=decider)
    assert len(decider.shown[0].recalled or ()) == 3  # with the one from the start
