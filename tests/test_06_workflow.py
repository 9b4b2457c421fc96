"""The Workflow on a real server: answers, cancels, open refunds, and what a client can see."""

import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest
from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError
from temporalio.exceptions import CancelledError

import fake_stripe
import fake_xmemory
import refund_agent
from desk import Desk, question_of, reply, until
from refund_agent import Answer, Case, Known, Progress, Question, RefundAgent, Refused, send_answer
from run_demo import POLL_SECONDS, recorded_of, request_for


async def progress_of(case: Case) -> Progress:
    return await case.query(RefundAgent.progress)


async def told(case: Case) -> refund_agent.RefundResult:
    """What the customer is told before the case ends."""
    while (result := (await progress_of(case)).result) is None:
        await asyncio.sleep(POLL_SECONDS)
    return result


async def days_of(case: Case) -> int:
    """How many timers of a day were started."""
    days = 0
    async for event in case.fetch_history_events():
        timer = event.timer_started_event_attributes.start_to_fire_timeout
        days += timer.ToTimedelta() == refund_agent.A_DAY
    return days


async def assert_canceled(case: Case) -> None:
    with pytest.raises(WorkflowFailureError) as failure:
        await case.result()
    assert isinstance(failure.value.cause, CancelledError)


async def test_a_case_is_asked_decided_refunded_and_remembered_once(desk: Desk) -> None:
    async with desk.open() as case:
        assert (await case.result()).outcome == "refund succeeded"
    count = desk.world.count()
    assert (count["questions to the customer"], count["decisions made"]) == (2, 5)
    assert (count["lookups"], count["  of them to refund"]) == (3, 1)
    assert (count["refunds"], count["cases remembered"]) == (1, 1)


# --- Answers -------------------------------------------------------------------------------------


async def test_an_answer_is_accepted_while_no_worker_is_alive(desk: Desk) -> None:
    async with desk.worker():
        case = await desk.start()
        question = await question_of(case)
    await send_answer(case, await reply(question))
    assert (await recorded_of(case)).signals == 1
    async with desk.worker():
        assert (await desk.result_of(case)).outcome == "refund succeeded"
    assert question.id not in [asked.id for asked in desk.world.asked]


async def test_an_answer_that_comes_before_its_question_is_used(desk: Desk) -> None:
    case = await desk.start()
    started = (await case.describe()).start_time.timestamp()
    known = Known(request_for("1234"), started)
    first = refund_agent.question_about(known, 0, "customer", refund_agent.INTAKE[0])
    await case.signal("answer", await reply(first))
    async with desk.worker():
        await desk.result_of(case)
    assert [asked.text for asked in desk.world.asked] == [refund_agent.INTAKE[1]]


async def test_an_answer_that_would_not_be_used_is_refused(desk: Desk) -> None:
    async with desk.worker():
        case = await desk.start()
        await send_answer(case, await reply(first := await question_of(case)))
        second = await question_of(case)
        for unused in (Answer(first.id, "late"), Answer("customer-9-0", "early")):
            with pytest.raises(Refused, match="not open"):
                await send_answer(case, unused)
        for text in (" ", "x" * 2_001):
            with pytest.raises(Refused, match="1 to 2,000 characters"):
                await send_answer(case, Answer(second.id, text))
        await desk.result_of(case)
    with pytest.raises(Refused, match="closed"):
        await send_answer(case, Answer(second.id, "hello"))


async def test_a_reviewer_who_says_no_moves_no_money(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(question: Question) -> Answer:
        return replace(await reply(question), approve=False)

    monkeypatch.setattr(desk.world, "reply", refuse)
    result = await desk.run("1235")
    assert (result.outcome, result.notice) == ("denied", "Approved.")
    assert not desk.world.stripe.counts()["refunds.create"]


@pytest.mark.parametrize(
    ("order_id", "who", "outcome"),
    [("1234", "customer", "no answer"), ("1235", "reviewer", refund_agent.HUMAN)],
)
async def test_a_case_that_nobody_answers_ends(
    open_desk: Desk, monkeypatch: pytest.MonkeyPatch, order_id: str, who: str, outcome: str
) -> None:
    async def silent(question: Question) -> Answer:
        await asyncio.sleep(60 if question.to == who else 0)
        return await reply(question)

    monkeypatch.setitem(refund_agent.PATIENCE, who, timedelta(seconds=0.5))
    monkeypatch.setattr(open_desk.world, "reply", silent)
    result = await open_desk.run(order_id)
    assert (result.outcome, result.remembered) == (outcome, True)
    assert not open_desk.world.stripe.counts()["refunds.create"]


# --- Cancel --------------------------------------------------------------------------------------


async def test_a_cancel_before_the_refund_moves_no_money(desk: Desk) -> None:
    async with desk.worker():
        case = await desk.start()
        await question_of(case)
        await case.cancel()
        await assert_canceled(case)
    assert not desk.world.stripe.calls


async def test_a_cancel_that_came_before_the_approval_wins(desk: Desk) -> None:
    async with desk.worker():
        case = await desk.start("1235")
        while (question := await question_of(case)).to == "customer":
            await send_answer(case, await reply(question))
    await case.cancel()
    await case.signal("review", await reply(question))
    async with desk.worker():
        await assert_canceled(case)
    assert not desk.world.stripe.counts()["refunds.create"]


async def test_a_cancel_while_the_refund_is_on_its_way_waits_and_reports(desk: Desk) -> None:
    desk.world.stripe.next_statuses = ["pending"]
    held = desk.world.stripe.hold_next_create("before")
    async with desk.open() as case:
        await held.wait()
        await case.cancel()
        await asyncio.sleep(0.3)
        assert (await case.describe()).status == WorkflowExecutionStatus.RUNNING
        desk.world.stripe.release()
        result = await asyncio.wait_for(case.result(), 10)
    assert (result.outcome, result.remembered) == ("refund pending", True)
    assert desk.world.count()["refunds"] == 1


async def test_a_cancel_between_two_looks_ends_with_what_stripe_said_last(desk: Desk) -> None:
    desk.world.stripe.next_statuses = ["pending"]
    async with desk.open() as case:
        assert (await told(case)).outcome == "refund pending"
        while not await days_of(case):
            await asyncio.sleep(POLL_SECONDS)
        await case.cancel()
        result = await asyncio.wait_for(case.result(), 10)
    assert (result.outcome, result.remembered) == ("refund pending", True)


# --- Open refunds --------------------------------------------------------------------------------


async def test_an_open_refund_is_looked_at_every_day_until_it_is_settled(
    open_desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refund_agent, "A_DAY", timedelta(seconds=0.3))
    stripe = open_desk.world.stripe
    stripe.next_statuses = ["pending"]
    async with open_desk.open() as case:
        refund = (await told(case)).refund
        assert refund and refund.status == "pending"
        await until(lambda: stripe.counts()["refunds.retrieve"] == 2)
        assert (await told(case)).outcome == "refund pending"
        stripe.settle(refund.id, "succeeded")
        result = await case.result()
    assert (result.outcome, result.remembered) == ("refund succeeded", True)
    assert stripe.counts()["refunds.create"] == 1
    customer = open_desk.world.xmemory.tables["Customer"][("customer_id", "ada"),]
    assert customer["past_cases"].splitlines()[1:] == ["order 1234 line 1: refund succeeded"]
    assert await days_of(case) == stripe.counts()["refunds.retrieve"]


# --- What a client can see -----------------------------------------------------------------------


async def test_the_customer_hears_of_the_refund_while_memory_does_not_answer(desk: Desk) -> None:
    desk.world.xmemory.paused = True
    async with desk.open() as case:
        result = await told(case)
        assert (result.outcome, result.remembered) == ("refund succeeded", False)
        assert (await case.describe()).status == WorkflowExecutionStatus.RUNNING


async def test_no_secret_no_error_text_and_no_other_customer_is_in_history(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, broken = desk.world, [RuntimeError("CANARY")]

    async def model(known: Known) -> object:
        if broken:
            raise broken.pop()
        return refund_agent.decide(known)

    monkeypatch.setattr(world, "decide", model)
    world.stripe.fail_next(fake_stripe.StripeError("CANARY", 429))
    world.stripe.api_key = "sk_test_CANARY"
    refused = fake_xmemory.XmemoryAPIError("CANARY", status=400, code="INVALID_INPUT")
    world.xmemory.fail_next(refused, method="write_async")
    async with desk.open() as case:
        assert not (await case.result()).remembered
    history = str((await case.fetch_history()).events)
    assert "order 0001" in history and "ada" in history and "xmemory or its client" in history
    assert not [secret for secret in ("CANARY", "order 0002", "eva") if secret in history]
