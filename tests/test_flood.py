"""Floods of messages: accepted ones are accounted for, refused ones say so, the case goes on."""

import asyncio
import faulthandler
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import pytest
from conftest import Desk, reply, request_for
from temporalio.service import RPCError

import harness
import refund_agent
from harness import Server, background
from refund_agent import Answer, Case, Question, RefundAgent, Refused, send_answer, start_case

NONSENSE = Answer("nonsense", "x")
SENDERS = 100
CATCH_UP_SECONDS = 300  # a busy machine may not read a flood within the SDK's two seconds at first
TOO_LARGE = 2_100_000  # the server takes 2 MiB
LIMIT = "exceeded workflow execution limit for signal events"  # the server's: 10,000 a run


async def send_all(send: Callable[[], Awaitable[None]], count: int) -> Counter[str]:
    """Send from many clients at once; what became of each message."""
    became: Counter[str] = Counter()
    numbers = iter(range(count))

    async def sender() -> None:
        for _ in numbers:
            try:
                await send()
                became["accepted"] += 1
            except (RPCError, Refused) as error:
                became[str(error)] += 1

    await asyncio.gather(*(sender() for _ in range(SENDERS)))
    return became


async def runs_of(desk: Desk, case: Case) -> AsyncIterator[list[str]]:
    """The kinds of events of every run of a case, the last one first."""
    run_id: str | None = None
    while True:
        handle = desk.client.get_workflow_handle(case.id, run_id=run_id)
        events = (await handle.fetch_history()).events
        yield [event.WhichOneof("attributes") or "" for event in events]
        started = events[0].workflow_execution_started_event_attributes
        if not (run_id := started.continued_execution_run_id):
            return


async def question_of(case: Case) -> Question:
    while (question := await harness.open_question(case)) is None:
        await asyncio.sleep(harness.POLL_SECONDS)
    return question


async def signals_and_longest(desk: Desk, case: Case) -> tuple[int, int]:
    runs = [run async for run in runs_of(desk, case)]
    signals = sum(run.count("workflow_execution_signaled_event_attributes") for run in runs)
    return signals, max(len(run) for run in runs)


@pytest.mark.everywhere
async def test_what_a_worker_could_not_catch_up_with_is_not_sent(desk: Desk) -> None:
    """While it is dead, nobody reads: the client stops before there is too much for one task."""
    case = await desk.start()
    signal = partial(case.signal, "answer", NONSENSE)
    assert await send_all(signal, 400) == {"accepted": 400}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refund_agent, "MAX_EVENTS", 200)  # to wait for 2,000 messages takes long
        with pytest.raises(Refused, match=refund_agent.TOO_MANY):
            await send_answer(case, NONSENSE)
    async with desk.worker(), background(partial(desk.world.people.converse, case)):
        assert (await case.result()).outcome == "refund succeeded"
    assert (await signals_and_longest(desk, case))[0] == 400 + 2


async def test_a_message_that_is_too_large_is_one_line_to_its_sender(desk: Desk) -> None:
    huge, case = Answer("customer-0-00000000", "x" * TOO_LARGE), await desk.start()
    with pytest.raises(Refused, match="^this message is longer than 2,000 characters; .*$"):
        await send_answer(case, huge)
    with pytest.raises(RPCError, match="^Blob data size exceeds limit.$"):
        await case.signal("answer", huge)
    async with desk.worker():
        assert (await question_of(case)).to == "customer"


@pytest.mark.everywhere
@pytest.mark.parametrize(("many", "pace"), [(20_000, None), (2_000, 50)])  # messages a second
async def test_every_accepted_message_is_accounted_for(
    server: Server, many: int, pace: int | None
) -> None:
    faulthandler.cancel_dump_traceback_later()  # it may take longer than a test of the suite
    desk = Desk(await harness.connect(server.address))
    job = {"temporal": server.address, "task_queue": desk.queue, "worker": "stock"}
    case = await start_case(
        desk.client, request_for("1234"), task_queue=desk.queue, case_id=str(uuid.uuid4()))
    latest: Case = desk.client.get_workflow_handle_for(RefundAgent.run, case.id)

    async def send() -> None:
        await latest.signal("answer", NONSENSE)
        await asyncio.sleep(SENDERS / pace if pace else 0)

    async with desk.world.open(), harness.agent("worker", desk.world, job, desk) as worker:
        question = await worker.until(partial(question_of, latest), 60, "the first question")
        became = await send_all(send, many)
        answering = asyncio.create_task(answer_in_the_end(latest, question))
        async with background(partial(desk.world.people.converse, latest)):
            result = await worker.until(latest.result, CATCH_UP_SECONDS, "the result")
        answering.cancel()
    signals, longest = await signals_and_longest(desk, case)
    assert result.outcome == "refund succeeded" and set(became) <= {"accepted", LIMIT}
    assert became.total() == many and signals >= became["accepted"]
    assert longest <= 51_200


async def answer_in_the_end(case: Case, question: Question) -> None:
    """A customer who is told to try again later does so."""
    while True:
        try:
            return await send_answer(case, await reply(question))
        except Refused as refused:
            if str(refused) != refund_agent.TOO_MANY:
                return
        await asyncio.sleep(1)
