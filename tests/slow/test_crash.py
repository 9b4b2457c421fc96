"""Real processes, real SIGKILLs: every crash point of the demo, and what a stock set-up does."""

from typing import Any

import pytest
from temporalio.plugin import SimplePlugin

import harness
import refund_agent
import run_demo
from desk import Quiet
from harness import AnnounceActivities, DevServer
from refund_agent import RefundActivities
from run_demo import CRASHES

SECONDS = 60


@pytest.mark.parametrize("crash", CRASHES)
async def test_a_workflow_that_is_killed_loses_nothing(server: DevServer, crash: str) -> None:
    world = Quiet("1234", crash)
    world.server = server.address
    async with world.process() as first:
        await world.play(first)
    assert world.killed_at
    count = world.count()
    assert (count["questions to the customer"], count["decisions made"]) == (2, 5)
    assert (count["refunds"], count["cases remembered"]) == (1, 1)
    assert (count["  of them to refund"] > 1) == (crash == "refund-in-flight")
    # Each attempt of the refund looks the order up.
    repeated = crash in ("refund-in-flight", "after-refund")
    assert count["lookups"] > 3 if repeated else count["lookups"] == 3


async def stock_worker(remote: Any, address: str, queue: str) -> None:
    """What people who copy will run."""
    announcing = SimplePlugin("announcing", interceptors=[AnnounceActivities(remote)])
    client = await run_demo.connect(address, plugins=[announcing])
    activities = RefundActivities(remote.stripe, remote.shop, remote.decide)
    await refund_agent.build_worker(client, queue, activities, remote.xmemory).run()


async def test_a_stock_server_and_the_default_cache_only_take_longer() -> None:
    """Killed before the refund, with the reviewer's approval in."""
    async with harness.dev_server() as server:
        world = Quiet("1235")
        trapped = world.arm("before issue_refund")
        job = ("the Worker", "test_crash:stock_worker", await server.address(), world.name)
        case = await refund_agent.start_case(
            await server.client(), world.request, task_queue=world.name
        )
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
