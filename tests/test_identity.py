"""Who a case is over its whole life: reset, retried, continued as new, started anew; one refund."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from conftest import Desk, Unsandboxed, reply, request_for
from temporalio import workflow
from temporalio.client import WorkflowFailureError
from temporalio.common import RetryPolicy
from temporalio.exceptions import ApplicationError

import fake_stripe
import harness
import refund_agent
import run_demo
from harness import HarnessPlugin, Remote, Server, background, open_question
from refund_agent import (
    Answer,
    Case,
    CaseInput,
    Known,
    Question,
    RefundAgent,
    RefundRequest,
    RefundResult,
    Step,
    build_worker,
)

pytestmark = pytest.mark.everywhere
FIRST, LAST = "FirstWorkflowTask", "LastWorkflowTask"
SOON = timedelta(milliseconds=1)


async def reset(server: Server, desk: Desk, case: Case, to: str) -> Case:
    """What an operator types; `to` is the first Workflow Task, the last, or the one that scheduled
    this Activity. The handle is of the new run."""
    where = ["--type", to] if to in (FIRST, LAST) else ["--event-id", str(await task_of(case, to))]
    binary = harness.temporal_binary()
    assert binary and server.address
    process = await asyncio.create_subprocess_exec(
        binary, "workflow", "reset", "--address", server.address, "--workflow-id", case.id, *where,
        "--reason", "test", stdout=asyncio.subprocess.DEVNULL)
    assert await process.wait() == 0
    return desk.client.get_workflow_handle_for(RefundAgent.run, case.id)


async def task_of(case: Case, name: str) -> int:
    async for event in case.fetch_history_events():
        facts = event.activity_task_scheduled_event_attributes
        if facts.activity_type.name == name:
            return facts.workflow_task_completed_event_id
    raise LookupError(name)


async def result_of(desk: Desk, case: Case) -> RefundResult:
    """The result of a case whose people go on answering what is asked."""
    async with background(partial(desk.world.people.converse, case)):
        return await case.result()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(harness.POLL_SECONDS)


async def wait_for_a_question(case: Case) -> Question:
    while (question := await open_question(case)) is None:
        await asyncio.sleep(harness.POLL_SECONDS)
    return question


def counts(desk: Desk, case: Case) -> tuple[int, int, int, int]:
    """Questions to the customer and the reviewer, refunds, and records of the case."""
    tally = harness.tally(desk.world, case.id)
    return tally.questions, tally.reviews, tally.refunds, tally.remembered


def requests(desk: Desk) -> tuple[int, int]:
    """How many requests for a refund came to Stripe, and with how many keys."""
    keys = [c.idempotency_key for c in desk.world.stripe.calls if c.endpoint == "refunds.create"]
    return len(keys), len(set(keys))


def forget_keys(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fake_stripe, "KEY_RETENTION_SECONDS", 0)


def hide_refunds(desk: Desk, patch: pytest.MonkeyPatch) -> None:
    """The look-up finds nothing, so that only the key is left."""

    async def nothing(query: Any) -> Any:
        return fake_stripe.stripe_object({"data": [], "has_more": False})

    patch.setattr(desk.world.stripe.v1.refunds, "list_async", nothing)


async def unsandboxed(server: Server) -> Desk:
    return Desk(await harness.connect(server.address, plugins=[Unsandboxed("demo")]))


# --- Reset ---------------------------------------------------------------------------------------


async def test_a_finished_case_reset_to_later_tasks_ends_as_it_did(
    server: Server, desk: Desk
) -> None:
    async with desk.open() as case:
        result = await case.result()
        assert result.outcome == "refund succeeded"
        for to in (LAST, "xmemory_write_async", "issue_refund", "lookup_order"):
            assert await result_of(desk, await reset(server, desk, case, to)) == result
    assert counts(desk, case) == (2, 0, 1, 1) and requests(desk) == (1, 1)


async def test_a_case_does_not_take_its_own_refund_for_somebody_elses(
    server: Server, desk: Desk
) -> None:
    whole = harness.Fixture("all", "the whole payment", "cup", 80_00, 80_00, "ada")
    desk.world = harness.World([whole, run_demo.ORDERS["1235"]], reply, lambda call: None)
    for order_id, to in (("all", FIRST), ("1235", "lookup_customer_history")):
        request = RefundRequest(order_id, "ada" if order_id == "all" else "ben", "Please refund.")
        async with desk.worker():
            case = await refund_agent.start_case(
                desk.client, request, task_queue=desk.queue, case_id=f"{desk.queue}-{order_id}")
            result = await result_of(desk, case)
            assert (result.outcome, result.remembered) == ("refund succeeded", True)
            assert await result_of(desk, await reset(server, desk, case, to)) == result
    assert len(desk.world.stripe.refunds) == 2


async def test_a_case_reset_while_it_waits_for_the_reviewer_goes_on_waiting(
    server: Server, desk: Desk
) -> None:
    may_answer = asyncio.Event()

    async def slowly(question: Question) -> Answer:
        if question.to == "reviewer":
            await may_answer.wait()
        return await reply(question)

    desk.world.people = harness.People(slowly)
    async with desk.open("1235") as case:
        await until(lambda: desk.world.people.counted("reviewer") == 1)
        review = await wait_for_a_question(case)
        for to in (LAST, "lookup_customer_history", FIRST):
            latest = await reset(server, desk, case, to)
            assert await wait_for_a_question(latest) == review
        may_answer.set()
        assert (await latest.result()).outcome == "refund succeeded"
    assert counts(desk, case) == (2, 1, 1, 1) and requests(desk) == (1, 1)


async def test_a_reset_finds_the_refund_of_a_case_whose_key_stripe_forgot(
    server: Server, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with desk.open() as case:
        result = await case.result()
        forget_keys(monkeypatch)
        assert await result_of(desk, await reset(server, desk, case, FIRST)) == result
    assert counts(desk, case) == (2, 0, 1, 1)


async def test_a_reset_keeps_the_key_of_a_refund_that_cannot_be_found(
    server: Server, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_refunds(desk, monkeypatch)
    async with desk.open() as case:
        result = await case.result()
        assert await result_of(desk, await reset(server, desk, case, FIRST)) == result
    assert counts(desk, case) == (2, 0, 1, 1) and requests(desk) == (2, 1)


async def test_a_reset_while_stripe_has_the_request_asks_for_the_same_refund(
    server: Server, desk: Desk
) -> None:
    world = desk.world
    held = world.stripe.hold_next_create("before")
    async with world.open():
        assert world.address
        remote = Remote(world.address)  # a request that is on its way goes on without its caller
        async with build_worker(
            desk.client, desk.queue, stripe=remote.stripe, shop=world.shop, decider=world.decider,
            memory=world.xmemory,
        ):
            case = await desk.start()
            async with background(partial(world.people.converse, case)):
                await held.wait()
            latest = await reset(server, desk, case, FIRST)
            async with background(partial(world.people.converse, latest)):
                await until(lambda: world.stripe.counts()["refunds.create"] > 1)
                world.stripe.release()
                assert (await latest.result()).outcome == "refund succeeded"
    assert counts(desk, case) == (2, 0, 1, 1) and requests(desk)[1] == 1


class Rephrasing:
    """A model that words its questions and sets its amounts another way after a reset."""

    def __init__(self) -> None:
        self.again, self.known, self.cut = "", Known(), 0

    async def decide(self, request: RefundRequest, known: Known) -> Step:
        self.known, step = known, refund_agent.decide(request, known)
        text = step.text + self.again if step.action == "ask" else step.text
        return replace(step, text=text, amount=step.amount - self.cut)


async def test_answers_that_a_reset_applies_again_answer_no_other_question(
    server: Server, desk: Desk
) -> None:
    async def quoting(question: Question) -> Answer:
        return Answer(question.id, f"to {question.text}")

    desk.world.people, model = harness.People(quoting), Rephrasing()
    async with desk.open(decider=model) as case:
        await case.result()
        model.again = " Please say it again."
        await result_of(desk, await reset(server, desk, case, FIRST))
    assert [a.answer for a in model.known.answers] == [
        f"to {text}{model.again}" for text in refund_agent.INTAKE]
    assert counts(desk, case) == (4, 0, 1, 1)


async def test_an_approval_that_a_reset_applies_again_approves_no_other_amount(
    server: Server, desk: Desk
) -> None:
    async def strictly(question: Question) -> Answer:
        approve = question.to == "reviewer" and "150.00" in question.text
        return replace(await reply(question), approve=approve)

    desk.world.people, model = harness.People(strictly), Rephrasing()
    async with desk.open("1235", decider=model) as case:
        await case.result()
        model.cut = 10_00
        result = await result_of(desk, await reset(server, desk, case, FIRST))
    assert result.outcome == "denied"
    assert counts(desk, case) == (2, 2, 1, 1)


# --- Continued as new, retried -------------------------------------------------------------------


async def test_a_case_that_continued_as_new_and_is_then_reset_keeps_its_key(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    config = [harness.FAST_TIMERS, "limit.historyCount.suggestContinueAsNew=30"]
    async with harness.dev_server(config=config) as server:
        desk = Desk(await harness.connect(server.address, plugins=[HarnessPlugin("demo")]))
        hide_refunds(desk, monkeypatch)
        async with desk.worker():
            case = await desk.start()
            await wait_for_a_question(case)
        for _ in range(30):
            await case.signal("answer", Answer("nonsense", "x"))
        async with desk.worker():
            result = await result_of(desk, await next_run(desk, case))
            assert await result_of(desk, await reset(server, desk, case, FIRST)) == result
    assert counts(desk, case) == (2, 0, 1, 1) and requests(desk) == (2, 1)


async def next_run(desk: Desk, case: Case) -> Case:
    while (await case.describe()).run_id == case.first_execution_run_id:
        await asyncio.sleep(harness.POLL_SECONDS)
    return desk.client.get_workflow_handle_for(RefundAgent.run, case.id)


def break_after_the_refund(patch: pytest.MonkeyPatch, when: Callable[[], bool]) -> None:
    whole = refund_agent.refund

    async def broken(*given: Any) -> RefundResult:
        result = await whole(*given)
        if when():
            raise ApplicationError("a bug")
        return result

    patch.setattr(refund_agent, "refund", broken)


async def test_a_case_that_temporal_retries_keeps_its_key(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = await unsandboxed(server)
    hide_refunds(desk, monkeypatch)
    break_after_the_refund(monkeypatch, lambda: workflow.info().attempt == 1)
    async with desk.worker():
        case = await desk.client.start_workflow(  # `start_case` asks for no retry
            RefundAgent.run, CaseInput(request_for("1234")), id=desk.queue, task_queue=desk.queue,
            retry_policy=RetryPolicy(initial_interval=SOON, maximum_attempts=2))
        async with background(partial(desk.world.people.converse, case)):
            latest = await next_run(desk, case)
        assert (await result_of(desk, latest)).outcome == "refund succeeded"
    assert requests(desk) == (2, 1)
    assert harness.tally(desk.world, case.id).refunds == 1


# --- Started a second time -----------------------------------------------------------------------


async def test_those_who_start_a_case_at_the_same_time_have_the_same_case(desk: Desk) -> None:
    async with desk.worker():
        starts = [desk.start(case_id=f"case-{desk.queue}") for _ in range(5)]
        case, *others = await asyncio.gather(*starts)
        assert {other.first_execution_run_id for other in others} == {case.first_execution_run_id}
        await result_of(desk, case)
    assert counts(desk, case) == (2, 0, 1, 1) and requests(desk) == (1, 1)


async def started_anew(desk: Desk, case: Case) -> RefundResult:
    with pytest.raises(WorkflowFailureError):
        await case.result()
    again = await desk.start(case_id=case.id)
    assert again.first_execution_run_id != case.first_execution_run_id
    return await result_of(desk, again)


async def test_a_case_that_failed_is_started_anew_and_finds_its_refund(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = await unsandboxed(server)
    with monkeypatch.context() as patch:
        break_after_the_refund(patch, lambda: True)
        async with desk.open() as case:
            with pytest.raises(WorkflowFailureError):
                await case.result()
    async with desk.worker():
        result = await started_anew(desk, case)
    assert (result.outcome, result.remembered) == ("refund succeeded", True)
    assert counts(desk, case)[2:] == (1, 1) and requests(desk) == (1, 1)


STOPS: list[Callable[[Case], Awaitable[None]]] = [Case.terminate, Case.cancel]


@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: stop.__name__)
async def test_a_case_that_was_stopped_before_its_refund_is_started_anew(
    desk: Desk, stop: Callable[[Case], Awaitable[None]]
) -> None:
    async with desk.worker():
        case = await desk.start()
        await wait_for_a_question(case)
        await stop(case)
        result = await started_anew(desk, case)
    assert (result.outcome, result.remembered) == ("refund succeeded", True)
    assert counts(desk, case) == (2, 0, 1, 1) and requests(desk) == (1, 1)


async def test_a_case_that_was_terminated_after_its_refund_is_started_anew_and_finds_it(
    desk: Desk,
) -> None:
    memory = desk.world.xmemory
    memory.paused = True
    async with desk.open() as case:
        await until(lambda: memory.counts()["write_async"] == 1)
        await case.terminate()
        memory.paused = False
        result = await started_anew(desk, case)
    assert (result.outcome, result.remembered) == ("refund succeeded", True)
    assert counts(desk, case)[2:] == (1, 1) and requests(desk) == (1, 1)
