"""Real processes, real SIGKILLs: every crash point of the demo, and what a stock set-up does."""

import uuid
from functools import partial

import pytest
from conftest import Desk, reply, request_for

import harness
from harness import Server, background
from refund_agent import HUMAN, Question
from run_demo import CRASHES, Durable, Options, Plain

SECONDS = 60
ADA = request_for("1234")


def options(crash: str) -> Options:
    return Options("1234", crash, typed=False, ui=False)


@pytest.mark.everywhere
@pytest.mark.parametrize("crash", CRASHES)
async def test_a_workflow_that_is_killed_loses_nothing(server: Server, crash: str) -> None:
    durable = Durable(options(crash), "worker", f"case-{uuid.uuid4()}")
    job = {"temporal": server.address, "task_queue": durable.case_id, "worker": "demo"}
    async with durable.world.open():
        async with harness.agent("worker", durable.world, job, durable.narrator) as first:
            await durable.play(server, first, job)
    assert durable.crash.killed_at
    tally = harness.tally(durable.world, ADA)
    assert (tally.questions, tally.decisions) == (2, 5)
    assert (tally.refunds, tally.remembered) == (1, 1)
    assert (tally.refund_requests > 1) == (crash == "refund-in-flight")
    # Each attempt of the refund looks the order up.
    repeated = crash in ("refund-in-flight", "after-refund")
    assert tally.lookups > 3 if repeated else tally.lookups == 3


@pytest.mark.everywhere
async def test_a_plain_process_that_is_killed_starts_over_and_does_not_know_its_refund() -> None:
    plain = Plain(options("refund-in-flight"), "agent", "case")
    async with plain.world.open():
        await plain.until_the_kill()
        await plain.start_over()
    assert plain.crash.killed_at
    tally = harness.tally(plain.world, ADA)
    assert (tally.questions, tally.decisions, tally.lookups) == (4, 10, 6)
    assert (tally.refunds, tally.remembered) == (1, 1)
    assert plain.world.result and plain.world.result.outcome == HUMAN


@pytest.mark.everywhere
async def test_a_stock_server_and_the_default_cache_only_take_longer() -> None:
    """What people who copy will run: killed before the refund, with the reviewer's approval in."""
    async with harness.dev_server(config=[]) as server:
        desk = Desk(await server.client())
        job = {"temporal": server.address, "task_queue": desk.queue, "worker": "stock"}
        world, trapped = desk.world, desk.world.gate.arm("before issue_refund")
        case = await desk.start("1235")
        async with world.open(), background(partial(world.people.converse, case)):
            async with harness.agent("worker", world, job, desk) as first:
                await first.until(trapped.wait, SECONDS, "the refund")
                await first.kill()
            async with harness.agent("worker", world, job, desk) as second:
                result = await second.until(case.result, SECONDS, "the result")
    tally = harness.tally(world, request_for("1235"))
    assert result.outcome == "refund succeeded" and result.remembered
    assert (tally.questions, tally.reviews, tally.refunds, tally.remembered) == (2, 1, 1, 1)


async def test_a_child_that_dies_by_itself_says_why(desk: Desk) -> None:
    async with desk.world.open():
        async with harness.agent("nonsense", desk.world, {}, desk) as child:
            with pytest.raises(harness.HarnessError, match="KeyError: 'nonsense'"):
                await child.until(desk.world.ended.wait, SECONDS, "anything")


async def test_a_question_counts_only_when_it_is_new_to_the_person() -> None:
    people, question = harness.People(reply), Question("customer-0-0", "customer", "Why?")
    seen = [people.look_at(shown) for shown in (question, question, None, question)]
    assert seen == [True, False, False, True] and people.counted("customer") == 2
