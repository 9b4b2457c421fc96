"""The Workflow on a real server, every Workflow Task a full replay: messages, identity, cancel."""

import asyncio
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from conftest import Desk, Unsandboxed, reply, request_for
from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError
from temporalio.exceptions import CancelledError

import fake_stripe
import harness
import refund_agent
from harness import HarnessPlugin, Server, background, open_question, what_survived
from refund_agent import (
    MAX_TEXT,
    Answer,
    Case,
    Question,
    RefundAgent,
    RefundRequest,
    Refused,
    Step,
    case_id_for,
    send_answer,
    start_case,
)


async def question_of(case: Case) -> Question:
    """The question that is open; waits until one is."""
    while (question := await open_question(case)) is None:
        await asyncio.sleep(harness.POLL_SECONDS)
    return question


async def ignored(case: Case) -> str:
    return (await case.query(RefundAgent.progress)).ignored


async def test_a_case_is_asked_decided_refunded_and_remembered_once(desk: Desk) -> None:
    async with desk.open() as case:
        assert (await case.result()).outcome == "refund succeeded"
    tally = harness.tally(desk.world, case.id)
    assert (tally.questions, tally.decisions, tally.lookups) == (2, 5, 2)
    assert (tally.refund_requests, tally.refunds, tally.remembered) == (1, 1, 1)
    assert (await what_survived(case, desk.client)).next_action == "wait"


async def test_the_answer_counts_that_was_there_first(desk: Desk) -> None:
    async with desk.worker():
        case = await desk.start()
        first = await question_of(case)
        for text in ("yes", "no"):
            await case.signal("answer", Answer(first.id, text))
        second = await question_of(case)
        assert second.id != first.id and "second answer" in await ignored(case)
        with pytest.raises(Refused):
            await send_answer(case, Answer(first.id, "no"))


@pytest.mark.parametrize(("id", "text", "why"), [
    ("", "  ", "empty"), ("", "x" * (MAX_TEXT + 1), "longer than 2,000"),
    ("nonsense", "yes", "unknown question"), ("customer-0-00000000", "yes", "not open"),
    ("reviewer-0-00000000", "yes", "unknown question"),
])
async def test_a_message_that_cannot_be_used_harms_nothing(
    desk: Desk, id: str, text: str, why: str
) -> None:
    async with desk.worker():
        case = await desk.start()
        question = await question_of(case)
        answer = Answer(id or question.id, text)
        await case.signal("answer", answer)
        assert why in await ignored(case)
        with pytest.raises(Refused):
            await send_answer(case, answer)
        assert await question_of(case) == question


class SlowReviewer:
    """Says when it was asked, and answers when it may."""

    def __init__(self, desk: Desk) -> None:
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()
        desk.world.people = harness.People(self.reply)

    async def reply(self, question: Question) -> Answer:
        if question.to == "reviewer":
            self.asked.set()
            await self.may_answer.wait()
        return await reply(question)


async def test_the_customer_cannot_approve_a_review(desk: Desk) -> None:
    reviewer = SlowReviewer(desk)
    async with desk.open("1235") as case:
        await reviewer.asked.wait()
        review = desk.world.people.asked[-1]
        await case.signal("answer", Answer(review.id, "yes", approve=True))
        assert "unknown question" in await ignored(case)
        assert await open_question(case) == review


async def test_a_reviewer_who_says_no_moves_no_money(desk: Desk) -> None:
    async def refuse(question: Question) -> Answer:
        return replace(await reply(question), approve=False)

    desk.world.people = harness.People(refuse)
    result = await desk.run("1235")
    assert (result.outcome, result.notice) == ("denied", "Approved.")
    assert not desk.world.stripe.counts()["refunds.create"]


async def test_an_answer_is_accepted_while_no_worker_is_alive(desk: Desk) -> None:
    async with desk.worker():
        case = await desk.start()
        question = await question_of(case)
    await send_answer(case, await reply(question))
    assert len((await what_survived(case, desk.client)).answers) == 1
    async with desk.worker(), background(partial(desk.world.people.converse, case)):
        await case.result()
    assert question.id not in [asked.id for asked in desk.world.people.asked]


async def test_an_answer_that_comes_with_the_start_is_used(desk: Desk) -> None:
    question = Question.at(0, "customer", refund_agent.INTAKE[0])
    case = await desk.start()
    await case.signal("answer", await reply(question))
    async with desk.worker(), background(partial(desk.world.people.converse, case)):
        await case.result()
    assert [asked.text for asked in desk.world.people.asked] == [refund_agent.INTAKE[1]]


class Denies:
    async def decide(self, request: Any, known: Any) -> object:
        return Step("deny", "no")


async def test_a_closed_case_tells_the_sender(desk: Desk) -> None:
    async with desk.open(decider=Denies()) as case:
        await case.result()
        with pytest.raises(Refused, match="closed"):
            await send_answer(case, Answer("customer-0-00000000", "hello"))


async def test_a_case_started_again_is_the_same_case(desk: Desk) -> None:
    case = await desk.start(case_id=f"case-{desk.queue}")
    assert (await desk.start(case_id=case.id)).first_execution_run_id == case.first_execution_run_id
    async with desk.worker(), background(partial(desk.world.people.converse, case)):
        result = await case.result()
        again = await desk.start(case_id=case.id)
        assert await again.result() == result
    assert harness.tally(desk.world, case.id).refunds == 1


async def test_another_customer_is_refused_the_case(desk: Desk) -> None:
    case = await desk.start(case_id=f"case-{desk.queue}")
    stranger = replace(request_for("1234"), customer_id="eve")
    with pytest.raises(Refused, match="another customer"):
        await start_case(desk.client, stranger, task_queue=desk.queue, case_id=case.id)


@pytest.mark.parametrize("request_", [
    RefundRequest("", "ada", "hello"), RefundRequest("a b", "ada", "hello"),
    RefundRequest("1234", "x" * 65, "hello"), RefundRequest("1234", "ada", "x" * 2_001),
    RefundRequest("1234", "ada", "hello", line=-1)])
async def test_a_malformed_request_is_refused(desk: Desk, request_: RefundRequest) -> None:
    with pytest.raises(Refused):
        await start_case(desk.client, request_, task_queue=desk.queue)


def test_the_case_id_follows_from_the_order_line() -> None:
    assert case_id_for(replace(request_for("1234"), line=2)) == "refund-1234-2"


async def test_cancel_before_the_refund_moves_no_money(desk: Desk) -> None:
    async with desk.worker():
        case = await desk.start()
        await question_of(case)
        await case.cancel()
        with pytest.raises(WorkflowFailureError) as failure:
            await case.result()
    assert isinstance(failure.value.cause, CancelledError)
    assert (await case.describe()).status == WorkflowExecutionStatus.CANCELED
    assert not desk.world.stripe.calls


async def test_cancel_while_the_refund_is_in_flight_waits_for_its_outcome(desk: Desk) -> None:
    held = desk.world.stripe.hold_next_create("before")
    async with desk.open() as case:
        await held.wait()
        await case.cancel()
        await asyncio.sleep(0.3)
        desk.world.stripe.release()
        result = await case.result()
    assert (result.outcome, result.remembered) == ("refund succeeded", True)
    assert harness.tally(desk.world, case.id).refunds == 1


@pytest.mark.everywhere
async def test_a_cancel_before_the_approval_wins(desk: Desk) -> None:
    reviewer = SlowReviewer(desk)
    async with desk.open("1235") as case:
        await reviewer.asked.wait()
    await case.cancel()
    await case.signal("review", await reply(desk.world.people.asked[-1]))
    async with desk.worker():
        with pytest.raises(WorkflowFailureError):
            await case.result()
    assert not desk.world.stripe.counts()["refunds.create"]


@pytest.mark.everywhere
async def test_a_payment_that_changed_during_the_review_needs_a_human(desk: Desk) -> None:
    async def refunded_elsewhere(question: Question) -> Answer:
        if question.to == "reviewer":
            await desk.world.stripe.v1.refunds.create_async(
                {"payment_intent": desk.world.payment_intent("1235"), "amount": 150_00})
        return await reply(question)

    desk.world.people = harness.People(refunded_elsewhere)
    result = await desk.run("1235")
    assert result.notice == "the payment changed while the case waited"
    assert len(desk.world.stripe.refunds) == 2  # that one, and another order's from the start


@pytest.mark.everywhere
async def test_a_failing_stripe_is_retried_until_it_answers(desk: Desk) -> None:
    desk.world.stripe.fail_next(fake_stripe.rate_limited())
    desk.world.stripe.fail_next(fake_stripe.connection_lost(), acted=True)
    assert (await desk.run()).outcome == "refund succeeded"
    keys = {c.idempotency_key for c in desk.world.stripe.calls if c.endpoint == "refunds.create"}
    assert len(keys) == 1 and desk.world.stripe.counts()["refunds.create"] == 2


@pytest.mark.everywhere
@pytest.mark.parametrize(("order_id", "who"), [("1234", "customer"), ("1235", "reviewer")])
async def test_a_case_that_nobody_answers_is_abandoned(
    server: Server, monkeypatch: pytest.MonkeyPatch, order_id: str, who: str
) -> None:
    monkeypatch.setitem(refund_agent.PATIENCE, who, timedelta(seconds=0.5))
    desk = Desk(await harness.connect(server.address, plugins=[Unsandboxed("demo")]))

    async def silent(question: Question) -> Answer:
        if question.to == who:
            await asyncio.sleep(60)
        return await reply(question)

    desk.world.people = harness.People(silent)
    result = await desk.run(order_id)
    assert (result.outcome, result.remembered) == ("abandoned", True)
    assert not desk.world.stripe.counts()["refunds.create"]


SUGGEST_EARLY = "limit.historyCount.suggestContinueAsNew=30"


@pytest.mark.everywhere
async def test_a_flood_of_messages_continues_as_new_and_loses_nothing() -> None:
    async with harness.dev_server(config=[harness.FAST_TIMERS, SUGGEST_EARLY]) as server:
        desk = Desk(await harness.connect(server.address, plugins=[HarnessPlugin("demo")]))
        async with desk.worker():
            case = await desk.start()
            await send_answer(case, await reply(await question_of(case)))
            second = await question_of(case)
            for _ in range(30):
                await case.signal("answer", Answer("nonsense", "x"))
            while (await case.describe()).run_id == case.first_execution_run_id:
                await asyncio.sleep(harness.POLL_SECONDS)
            assert await question_of(case) == second
            latest: Case = desk.client.get_workflow_handle_for(RefundAgent.run, case.id)
            async with background(partial(desk.world.people.converse, latest)):
                result = await latest.result()
        assert result.outcome == "refund succeeded" and len(desk.world.decider.decisions) == 5
        key = desk.world.stripe.calls[-1].idempotency_key or ""
        assert key.startswith(f"refund:{case.first_execution_run_id}:")


@pytest.mark.everywhere
async def test_a_cancel_is_not_lost_when_the_case_continues_as_new() -> None:
    async with harness.dev_server(config=[harness.FAST_TIMERS, SUGGEST_EARLY]) as server:
        desk = Desk(await harness.connect(server.address, plugins=[HarnessPlugin("demo")]))
        async with desk.worker():
            case = await desk.start()
            await question_of(case)
        for _ in range(30):
            await case.signal("answer", Answer("nonsense", "x"))
        await case.cancel()
        async with desk.worker():
            with pytest.raises(WorkflowFailureError) as failure:
                await asyncio.wait_for(case.result(), 30)
        assert isinstance(failure.value.cause, CancelledError)


async def reset(server: Server, desk: Desk, case: Case) -> Case:
    binary = harness.temporal_binary()
    assert binary and server.address
    process = await asyncio.create_subprocess_exec(
        binary, "workflow", "reset", "--address", server.address, "-w", case.id, "-t",
        "FirstWorkflowTask", "--reason", "test", stdout=asyncio.subprocess.DEVNULL)
    assert await process.wait() == 0
    return desk.client.get_workflow_handle_for(RefundAgent.run, case.id)


@pytest.mark.everywhere
async def test_a_reset_asks_nothing_again_and_refunds_once(server: Server, desk: Desk) -> None:
    async with desk.open() as case:
        result = await case.result()
        assert await (await reset(server, desk, case)).result() == result
    tally = harness.tally(desk.world, case.id)
    assert (tally.questions, tally.refunds, tally.remembered) == (2, 1, 1)


async def test_no_key_no_error_text_and_no_other_customer_is_in_history(desk: Desk) -> None:
    desk.world.stripe.fail_next(fake_stripe.StripeError("CANARY", 429), times=2)
    desk.world.stripe.api_key = "sk_test_CANARY"

    class Model:
        decisions: list[Step] = []

        async def decide(self, request: Any, known: Any) -> object:
            if not self.decisions:
                self.decisions.append(Step("deny"))
                raise RuntimeError("CANARY")
            return await desk.world.decider.decide(request, known)

    async with desk.open(decider=Model()) as case:
        await case.result()
    history = (await case.fetch_history()).to_json()
    assert "CANARY" not in history and "eva" not in history


