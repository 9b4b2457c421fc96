"""Real processes, real SIGKILLs: every crash point of the demo, and what a stock set-up does."""

import asyncio

import pytest
import pytest_asyncio
from conftest import Desk, reply
from crash_scenarios import PLAIN, Ended

import harness
from refund_agent import Question
from run_demo import CRASHES


@pytest_asyncio.fixture(scope="module")
async def ended(crash_scenarios: asyncio.Task[Ended]) -> Ended:
    return await crash_scenarios


@pytest.mark.parametrize("crash", CRASHES)
async def test_a_workflow_that_is_killed_loses_nothing(ended: Ended, crash: str) -> None:
    durable = ended.durable[crash]
    tally = harness.tally(durable.world, durable.case_id)
    assert durable.crash.killed_at
    assert (tally.questions, tally.decisions, tally.lookups) == (2, 5, 2)
    assert (tally.refunds, tally.remembered) == (1, 1)
    assert tally.refund_requests > 1 if crash == "refund-in-flight" else tally.refund_requests == 1


@pytest.mark.parametrize("crash", PLAIN)
async def test_a_plain_process_that_is_killed_starts_over(ended: Ended, crash: str) -> None:
    plain = ended.plain[crash]
    tally = harness.tally(plain.world, plain.case_id)
    assert plain.crash.killed_at
    assert (tally.questions, tally.decisions, tally.lookups) == (4, 10, 4)
    assert (tally.refunds, tally.remembered) == (2 if crash == "refund-in-flight" else 1, 1)


async def test_a_stock_server_and_the_default_cache_only_take_longer(ended: Ended) -> None:
    desk, case_id, result = ended.stock
    tally = harness.tally(desk.world, case_id)
    assert result.outcome == "refund succeeded" and result.remembered
    assert (tally.questions, tally.refunds, tally.remembered) == (2, 1, 1)


async def test_an_approval_survives_the_crash(ended: Ended) -> None:
    assert ended.stock[0].world.people.counted("reviewer") == 1


async def test_a_child_that_dies_by_itself_says_why(desk: Desk) -> None:
    async with desk.world.open():
        async with harness.agent("nonsense", desk.world, {}, desk) as child:
            with pytest.raises(harness.HarnessError, match="KeyError: 'nonsense'"):
                await child.until(desk.world.ended.wait, 30, "anything")


async def test_a_question_counts_only_when_it_is_new_to_the_person() -> None:
    people, question = harness.People(reply), Question.at(0, "customer", "Why?")
    seen = [people.look_at(shown) for shown in (question, question, None, question)]
    assert seen == [True, False, False, True] and people.counted("customer") == 2


@pytest.mark.parametrize("kill", ["inside_a_poll", "between_polls"])
async def test_a_killed_wait_for_a_write_is_only_later(ended: Ended, kill: str) -> None:
    killed, undisturbed = getattr(ended.memory, kill), ended.memory.undisturbed
    assert (killed.status, killed.people) == ("completed", 1) == ("completed", undisturbed.people)
    assert killed.calls["write_async"] == 1 and killed.events == undisturbed.events <= 18


async def test_memory_copied_alone_heartbeats_on_a_bare_worker(ended: Ended) -> None:
    assert ended.memory.copied_alone == "call 1"
