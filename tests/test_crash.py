"""Real processes, real SIGKILLs: every crash point of the demo, and what a stock set-up does."""

import asyncio

import pytest
import pytest_asyncio
from conftest import Desk, reply
from crash_scenarios import SAMPLE, Ended, play_durable

import harness
from harness import Server
from refund_agent import Question
from run_demo import CRASHES, Durable


@pytest_asyncio.fixture(scope="module")
async def ended(crash_scenarios: asyncio.Task[Ended]) -> Ended:
    return await crash_scenarios


@pytest.mark.parametrize("crash", SAMPLE)
async def test_a_workflow_that_is_killed_loses_nothing(ended: Ended, crash: str) -> None:
    loses_nothing(ended.durable[crash])


@pytest.mark.everywhere
@pytest.mark.parametrize("crash", [crash for crash in CRASHES if crash not in SAMPLE])
async def test_killed_elsewhere_it_loses_nothing_either(server: Server, crash: str) -> None:
    loses_nothing(await play_durable(server, crash))


def loses_nothing(durable: Durable) -> None:
    tally = harness.tally(durable.world, durable.case_id)
    assert durable.crash.killed_at
    assert (tally.questions, tally.decisions, tally.lookups) == (2, 5, 2)
    assert (tally.refunds, tally.remembered) == (1, 1)
    in_flight = durable.options.crash == "refund-in-flight"
    assert tally.refund_requests > 1 if in_flight else tally.refund_requests == 1


@pytest.mark.parametrize("crash", SAMPLE)
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
