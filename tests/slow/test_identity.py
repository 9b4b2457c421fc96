"""One order line, one refund: whoever starts, stops or resets a case, and however often."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from temporalio.client import WorkflowFailureError
from temporalio.exceptions import ApplicationError

import harness
import refund_agent
from desk import Desk, question_of, reply, until
from refund_agent import (
    Answer,
    Case,
    Known,
    Question,
    RefundAgent,
    RefundRequest,
    RefundResult,
    Refused,
    Step,
    case_id_for,
    start_case,
)
from run_demo import request_for

ADA, BEN = request_for("1234"), request_for("1235")


def counts(desk: Desk, request: RefundRequest = ADA) -> tuple[int, int, int, int]:
    """Questions to the customer and the reviewer, refunds, and lines in memory."""
    desk.world.request = request
    count = desk.world.count()
    people = desk.world.asked_of("customer"), desk.world.asked_of("reviewer")
    return *people, count["refunds"], count["cases remembered"]


async def reset(desk: Desk, case: Case, to: str = "FirstWorkflowTask", run_id: str = "") -> Case:
    """What an operator types. `to` is the first Workflow Task, the last one, or the one that
    scheduled this Activity. The handle is of the new run."""
    binary, address = harness.temporal_binary(), desk.client.service_client.config.target_host
    where = ["--type", to]
    async for event in case.fetch_history_events():
        facts = event.activity_task_scheduled_event_attributes
        if facts.activity_type.name == to:
            where = ["--event-id", str(facts.workflow_task_completed_event_id)]
    where += ["--run-id", run_id] if run_id else []
    command = f"workflow reset --address {address} --workflow-id {case.id} --reason test".split()
    process = await asyncio.create_subprocess_exec(
        str(binary), *command, *where, stdout=asyncio.subprocess.DEVNULL
    )
    assert await process.wait() == 0
    return desk.client.get_workflow_handle_for(RefundAgent.run, case.id)


# --- A request is at Stripe, and another run takes over ------------------------------------------


async def start_anew(desk: Desk, case: Case, older_run: str) -> Case:
    await case.terminate()
    return await desk.start(case_id=case.id)


async def reset_it(desk: Desk, case: Case, older_run: str) -> Case:
    return await reset(desk, case)


async def reset_the_older_run(desk: Desk, case: Case, older_run: str) -> Case:
    return await reset(desk, case, run_id=older_run)


async def start_another_case(desk: Desk, case: Case, older_run: str) -> Case:
    return await desk.start()


@pytest.mark.parametrize(
    "take_over", [start_anew, reset_it, reset_the_older_run, start_another_case]
)
async def test_two_runs_that_overlap_at_stripe_make_one_refund(
    desk: Desk, take_over: Callable[[Desk, Case, str], Awaitable[Case]]
) -> None:
    stripe = desk.world.stripe
    held = stripe.hold_next_create("before")
    async with desk.worker():
        older = await desk.start()
        await question_of(older)
        await older.cancel()
        with pytest.raises(WorkflowFailureError):
            await older.result()
        case = await desk.start(case_id=older.id)
        assert case.first_execution_run_id != older.first_execution_run_id
        async with desk.world.attending(case):
            await held.wait()
        latest = await take_over(desk, case, str(older.first_execution_run_id))
        async with desk.world.attending(latest):
            await until(lambda: stripe.counts()["refunds.create"] > 1)
            stripe.release()
            assert (await latest.result()).outcome == "refund succeeded"
    keys = {call.idempotency_key for call in stripe.calls if call.endpoint == "refunds.create"}
    assert len(keys) == 1 and counts(desk)[2:] == (1, 1)


# --- Reset ---------------------------------------------------------------------------------------


async def test_a_finished_case_that_is_reset_anywhere_ends_as_it_did(desk: Desk) -> None:
    async with desk.open("1235") as case:
        result = await case.result()
        for to in ("LastWorkflowTask", "issue_refund", "lookup_order", "FirstWorkflowTask"):
            assert await desk.result_of(await reset(desk, case, to)) == result
    assert counts(desk, BEN) == (2, 1, 1, 1)
    assert desk.world.stripe.counts()["refunds.create"] == 1


async def test_a_case_reset_while_it_waits_for_the_reviewer_goes_on_waiting(desk: Desk) -> None:
    may_answer = asyncio.Event()

    async def slowly(question: Question) -> Answer:
        if question.to == "reviewer":
            await may_answer.wait()
        return await reply(question)

    desk.world.replies = slowly
    async with desk.open("1235") as case:
        await until(lambda: desk.world.asked_of("reviewer") == 1)
        review = await question_of(case)
        for to in ("LastWorkflowTask", "lookup_customer_history", "FirstWorkflowTask"):
            latest = await reset(desk, case, to)
            assert await question_of(latest) == review
        may_answer.set()
        assert (await latest.result()).outcome == "refund succeeded"
    assert counts(desk, BEN) == (2, 1, 1, 1)


class Rephrasing:
    """A model that words its questions and sets its amounts another way after a reset."""

    def __init__(self) -> None:
        self.again, self.cut, self.decisions = "", 0, list[Known]()

    async def decide(self, known: Known) -> Step:
        self.decisions.append(known)
        step = refund_agent.decide(known)
        text = step.text + self.again if step.action == "ask" else step.text
        return replace(step, text=text, amount=step.amount - self.cut)


async def test_answers_that_a_reset_applies_again_answer_no_other_question(desk: Desk) -> None:
    async def quoting(question: Question) -> Answer:
        return Answer(question.id, f"to {question.text}")

    desk.world.replies, model = quoting, Rephrasing()
    async with desk.open(decider=model) as case:
        await until(lambda: desk.world.asked_of("customer") == 2)
        model.again = " Please say it again."
        await desk.result_of(await reset(desk, case))
    answers = model.decisions[-1].answers
    assert [text.removesuffix(model.again) for text in answers] == list(refund_agent.INTAKE)
    assert all(answer == f"to {text}" for text, answer in answers.items())


@pytest.mark.parametrize("what", ["amount", "payment"])
async def test_an_approval_that_a_reset_applies_again_approves_no_other_terms(
    desk: Desk, what: str
) -> None:
    stripe, model = desk.world.stripe, Rephrasing()

    async def once(question: Question) -> Answer:
        if question.to == "reviewer":
            stripe.api_key = "refused"  # the refund is agreed and does not come to pass
        return replace(await reply(question), approve=desk.world.asked_of("reviewer") == 1)

    desk.world.replies = once
    async with desk.open("1235", decider=model) as case:
        before = stripe.counts()["refunds.list"]
        await until(lambda: stripe.counts()["refunds.list"] > before + 1)
        latest = await reset(desk, case)
        if what == "amount":
            model.cut = 10_00
        else:
            other = stripe.add_payment(400_00, "usd")
            desk.world.shop.orders["1235", 1].payment_intent = other
        stripe.api_key = "sk_test_mended"
        assert (await desk.result_of(latest)).outcome == "denied"
    assert counts(desk, BEN)[:3] == (2, 2, 0)


# --- Started a second time -----------------------------------------------------------------------


async def test_those_who_start_a_case_at_the_same_time_have_the_same_case(desk: Desk) -> None:
    async with desk.worker():
        starts = [desk.start(case_id=f"case-{desk.queue}") for _ in range(5)]
        case, *others = await asyncio.gather(*starts)
        assert {other.first_execution_run_id for other in others} == {case.first_execution_run_id}
        await desk.result_of(case)
    assert counts(desk) == (2, 0, 1, 1)


async def test_an_approval_for_an_abandoned_run_approves_nothing(desk: Desk) -> None:
    async def reply_to_the_customer(question: Question) -> Answer:
        await asyncio.sleep(3600 if question.to == "reviewer" else 0)
        return await reply(question)

    reviews = list[Question]()
    async with desk.worker():
        for _ in range(2):
            desk.world.replies = reply_to_the_customer
            desk.world.asked.clear()
            case = await desk.start("1235", case_id=f"case-{desk.queue}")
            async with desk.world.attending(case):
                await until(lambda: desk.world.asked_of("reviewer") == 1)
            reviews.append(await question_of(case))
            if len(reviews) == 1:
                await case.terminate()
        await case.signal("review", await reply(reviews[0]))
        assert reviews[0].text == reviews[1].text
        assert await question_of(case) == reviews[1]
    assert not desk.world.stripe.counts()["refunds.create"]


def unpaid(desk: Desk, patch: pytest.MonkeyPatch) -> str:
    order = desk.world.shop.orders["1234", 1]
    order.payment_intent = desk.world.stripe.add_payment(200_00, "usd", status="processing")
    return "1234"


def silent(desk: Desk, patch: pytest.MonkeyPatch) -> str:
    patch.setitem(refund_agent.PATIENCE, "customer", timedelta(seconds=0.3))
    desk.world.replies = lambda _: asyncio.sleep(3600, Answer(""))
    return "1234"


@pytest.mark.parametrize(
    ("outcome", "cause", "again"),
    [
        ("no answer", silent, True),
        ("not paid", unpaid, True),
        ("order not found", lambda *_: "9999", True),
        ("denied", lambda *_: "1236", False),
        ("refund succeeded", lambda *_: "1234", False),
    ],
)
async def test_only_a_case_in_which_nothing_was_decided_is_started_again(
    open_desk: Desk,
    monkeypatch: pytest.MonkeyPatch,
    outcome: str,
    cause: Callable[[Desk, pytest.MonkeyPatch], str],
    again: bool,
) -> None:
    order_id = cause(open_desk, monkeypatch)
    async with open_desk.open(order_id) as case:
        result = await case.result()
        assert result.outcome == outcome
        second = await open_desk.start(order_id, case_id=case.id)
        anew = (await second.describe()).run_id != case.first_execution_run_id
        assert anew == again and (anew or await second.result() == result)


async def test_who_was_told_that_a_colleague_looks_is_told_so_again(
    open_desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refund_agent.ACTIVITY_RETRY, "maximum_attempts", 2)
    world = open_desk.world

    class Down:
        async def decide(self, known: Known) -> object:
            raise OSError

    async with open_desk.open(decider=Down()) as case:
        result = await case.result()
    assert result.outcome == refund_agent.HUMAN and result.notice.startswith("the decider: ")
    payment = {"payment_intent": world.payment_intent("1234"), "amount": 80_00}
    await world.stripe.v1.refunds.create_async(payment)
    async with open_desk.worker():
        again = await open_desk.start(case_id=case.id)
        assert await again.result() == result
    assert len([r for r in world.stripe.refunds.values() if r["amount"] == 80_00]) == 1


async def test_a_case_that_failed_is_started_anew_and_finds_its_refund(
    open_desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any) -> RefundResult:
        raise ApplicationError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(refund_agent, "remember", broken)
        async with open_desk.open() as case:
            with pytest.raises(WorkflowFailureError):
                await case.result()
    async with open_desk.worker():
        again = await open_desk.start(case_id=case.id)
        result = await open_desk.result_of(again)
    assert (result.outcome, result.remembered) == ("refund succeeded", True)
    assert counts(open_desk)[2:] == (1, 1)
    assert open_desk.world.stripe.counts()["refunds.create"] == 1


# --- Whose case ----------------------------------------------------------------------------------


async def test_a_stranger_who_starts_a_case_for_an_order_takes_nobodys_place(desk: Desk) -> None:
    order_id = uuid.uuid4().hex
    order = replace(desk.world.shop.orders["1234", 1], order_id=order_id)
    desk.world.shop.orders[order_id, 1] = order
    outcomes = []
    async with desk.worker():
        for customer in ("eve", "ada"):
            request = RefundRequest(order_id, customer, "Please refund.")
            case = await start_case(desk.client, request, task_queue=desk.queue)
            outcomes.append((await desk.result_of(case)).outcome)
    assert outcomes == ["order not found", "refund succeeded"]


async def test_a_case_shows_itself_only_to_its_customer(desk: Desk) -> None:
    case = await desk.start()
    with pytest.raises(Refused, match="another customer"):
        await start_case(
            desk.client,
            replace(ADA, customer_id="eve"),
            task_queue=desk.queue,
            case_id=case.id,
        )


def test_the_case_id_names_the_order_line_and_hides_the_customer() -> None:
    ids = {case_id_for(request) for request in (ADA, replace(ADA, customer_id="eve"))}
    assert len(ids) == 2 and all(id.startswith("refund-1234-1-") for id in ids)
    assert not any("ada" in id or "eve" in id for id in ids)


@pytest.mark.parametrize(
    "request_",
    [
        replace(ADA, order_id=""),
        replace(ADA, order_id="a b"),
        replace(ADA, customer_id="x" * 65),
        replace(ADA, message=" "),
        replace(ADA, message="x" * 2_001),
        replace(ADA, line=0),
        replace(ADA, line=True),
    ],
)
async def test_a_malformed_request_is_refused(desk: Desk, request_: RefundRequest) -> None:
    with pytest.raises(Refused, match="characters|a line is 1 or more"):
        await start_case(desk.client, request_, task_queue=desk.queue)
