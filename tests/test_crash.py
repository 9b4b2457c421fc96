"""Real processes, real SIGKILLs: every crash point of the demo, and what a stock set-up does."""

import asyncio
import uuid
from dataclasses import dataclass
from functools import partial

import pytest
import pytest_asyncio
from conftest import Desk, reply, request_for

import harness
from harness import Server, background
from refund_agent import Question, RefundResult, start_case
from run_demo import CRASHES, Durable, Options, Plain


@dataclass
class Ended:
    """All scenarios of this file, played at the same time, since most of it is waiting."""

    durable: dict[str, Durable]
    plain: dict[str, Plain]
    approved: tuple[Desk, str, RefundResult]
    stock: tuple[Desk, str, RefundResult]


def options(crash: str) -> Options:
    return Options("1234", crash, typed=False, ui=False)


async def play_durable(server: Server, crash: str) -> Durable:
    durable = Durable(options(crash), "worker", f"case-{crash}")
    job: dict[str, object] = {"temporal": server.address, "task_queue": str(uuid.uuid4())}
    async with durable.world.open():
        async with harness.agent("worker", durable.world, job, durable.narrator) as first:
            await durable.play(server, first, job)
    return durable


async def play_plain(crash: str) -> Plain:
    plain = Plain(options(crash), "agent", f"case-{crash}")
    async with plain.world.open():
        await plain.until_the_kill()
        await plain.start_over()
    return plain


async def kill_and_finish(
    desk: Desk, server: Server, order_id: str, *, cache: bool
) -> tuple[Desk, str, RefundResult]:
    """Kill a Worker before the refund and let another one finish the case."""
    job = {"temporal": server.address, "task_queue": desk.queue, "cache": cache}
    world, trapped = desk.world, desk.world.gate.arm("before issue_refund")
    case = await start_case(
        desk.client, request_for(order_id), task_queue=desk.queue, case_id=str(uuid.uuid4()))
    async with world.open(), background(partial(world.people.converse, case)):
        async with harness.agent("worker", world, job, desk) as first:
            await first.until(trapped.wait, 30, "the refund")
            await first.kill()
        async with harness.agent("worker", world, job, desk) as second:
            return desk, case.id, await second.until(case.result, 60, "the result")


async def on_a_stock_server() -> tuple[Desk, str, RefundResult]:
    async with harness.dev_server(config=[]) as server:
        return await kill_and_finish(Desk(await server.client()), server, "1234", cache=True)


@pytest_asyncio.fixture(scope="module")
async def ended(server: Server) -> Ended:
    stock = asyncio.create_task(on_a_stock_server())
    approving = Desk(await server.client())
    approved = asyncio.create_task(kill_and_finish(approving, server, "1235", cache=False))
    durable = await asyncio.gather(*(play_durable(server, crash) for crash in CRASHES))
    plain = await asyncio.gather(*(play_plain(crash) for crash in CRASHES))
    return Ended(dict(zip(CRASHES, durable, strict=True)), dict(zip(CRASHES, plain, strict=True)),
                 await approved, await stock)


@pytest.mark.parametrize("crash", CRASHES)
async def test_a_workflow_that_is_killed_loses_nothing(ended: Ended, crash: str) -> None:
    durable = ended.durable[crash]
    tally = harness.tally(durable.world, durable.case_id)
    assert durable.killed_at and (tally.questions, tally.decisions, tally.lookups) == (2, 5, 2)
    assert (tally.refunds, tally.remembered) == (1, 1)
    assert tally.refund_requests > 1 if crash == "refund-in-flight" else tally.refund_requests == 1


@pytest.mark.parametrize("crash", CRASHES)
async def test_a_plain_process_that_is_killed_starts_over(ended: Ended, crash: str) -> None:
    plain = ended.plain[crash]
    tally = harness.tally(plain.world, plain.case_id)
    assert plain.killed_at and (tally.questions, tally.decisions, tally.lookups) == (4, 10, 4)
    assert (tally.refunds, tally.remembered) == (2 if crash == "refund-in-flight" else 1, 1)


async def test_an_approval_survives_the_crash(ended: Ended) -> None:
    desk, case_id, result = ended.approved
    assert result.outcome == "refund succeeded" and desk.world.people.counted("reviewer") == 1
    assert harness.tally(desk.world, case_id).refunds == 1


async def test_a_stock_server_and_the_default_cache_only_take_longer(ended: Ended) -> None:
    desk, case_id, result = ended.stock
    tally = harness.tally(desk.world, case_id)
    assert result.outcome == "refund succeeded" and result.remembered
    assert (tally.questions, tally.decisions, tally.refunds, tally.remembered) == (2, 5, 1, 1)


async def test_a_child_that_dies_by_itself_says_why(desk: Desk) -> None:
    async with desk.world.open():
        async with harness.agent("nonsense", desk.world, {}, desk) as child:
            with pytest.raises(harness.HarnessError, match="KeyError: 'nonsense'"):
                await child.until(desk.world.ended.wait, 30, "anything")


async def test_a_question_counts_only_when_it_is_new_to_the_person() -> None:
    people, question = harness.People(reply), Question("customer", 0, "Why?")
    seen = [people.look_at(shown) for shown in (question, question, None, question)]
    assert seen == [True, False, False, True] and people.counted("customer") == 2
