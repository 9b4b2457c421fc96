"""Money, at the edges: facts of another type, services that hang, and a refund that is renamed."""

import asyncio
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

import fake_stripe
import refund_agent
from desk import Desk, Quiet, reply, until
from refund_agent import HUMAN, Answer, Known, Question, Refund, Step
from test_04_money import ADA, agreed, by_hand, creates, refunded, run, run_open, steps
from test_06_workflow import assert_canceled, progress_of


async def test_an_order_that_is_spelled_otherwise_is_not_found(world: Quiet) -> None:
    async def forgiving(order_id: str, line: int) -> Any:
        return world.shop.orders.get((order_id.lower(), line))

    world.shop.orders["ab1", 1] = world.shop.orders["1234", 1]
    world.shop.orders["ab1", 1].order_id = "ab1"
    world.shop.order = forgiving  # type: ignore[method-assign]
    assert (await run(world, replace(ADA, order_id="AB1"))).outcome == "order not found"
    assert (await run(world, replace(ADA, order_id="ab1"))).outcome == "refund succeeded"


async def test_the_record_is_read_to_its_last_page(world: Quiet) -> None:
    first = await run(world)
    for _ in range(105):
        await by_hand(world, 1)
    assert (await run(world)).refund == first.refund


async def test_a_price_that_changes_at_every_look_ends_within_the_bound(world: Quiet) -> None:
    order: Any = world.shop.order

    async def restless(order_id: str, line: int) -> Any:
        found = await order(order_id, line)
        found.price -= 1
        return found

    world.shop.order = restless  # type: ignore[method-assign]
    assert (await run(world)).outcome == HUMAN
    assert creates(world) == 0 and len(world.decisions) <= refund_agent.MAX_TURNS


async def test_a_shop_price_that_is_no_whole_number_is_not_cut(world: Quiet) -> None:
    vars(world.shop.orders["1234", 1])["price"] = 80.5
    with pytest.raises(ApplicationError, match="price is no") as failed:
        await steps(world).lookup_order(Known(ADA, 0.0))
    assert failed.value.non_retryable


@pytest.mark.parametrize(
    ("name", "value"), [("item", None), ("currency", 7), ("payment_intent", None)]
)
async def test_a_fact_of_another_type_is_for_a_human_and_stops_no_case(
    world: Quiet, name: str, value: object
) -> None:
    setattr(world.shop.orders["1234", 1], name, value)
    result = await run(world)
    assert result.outcome == HUMAN and creates(world) == 0


async def test_a_refund_without_a_status_is_for_a_human(world: Quiet) -> None:
    world.stripe.next_statuses = [None]  # type: ignore[list-item]
    result = await run(world)
    assert result.outcome == HUMAN and "A refund may exist" in result.notice


async def test_an_attempt_has_one_deadline_for_both_services(world: Quiet) -> None:
    request, order = await agreed(world), world.shop.order

    async def slow(order_id: str, line: int) -> Any:
        await asyncio.sleep(1)
        return await order(order_id, line)

    world.shop.order = slow  # type: ignore[method-assign]
    world.stripe.v1.refunds.list_async = lambda _: asyncio.Event().wait()
    environment = ActivityEnvironment()
    allowed = timedelta(seconds=2)
    environment.info = replace(environment.info, start_to_close_timeout=allowed)
    async with asyncio.timeout(allowed.total_seconds()):
        with pytest.raises(ApplicationError, match="no usable answer"):
            await environment.run(steps(world).issue_refund, request)


async def test_a_case_that_is_canceled_twice_still_reports_its_refund(world: Quiet) -> None:
    held = world.stripe.hold_next_create("before")
    case = asyncio.create_task(run(world))
    await held.wait()
    for _ in range(2):
        case.cancel()
        await asyncio.sleep(0)
    world.stripe.release()
    assert (await case).outcome == "refund succeeded"


async def test_a_look_that_fails_is_a_look_and_creates_nothing(world: Quiet) -> None:
    def lose(refund: Refund) -> None:
        gone = fake_stripe.InvalidRequestError("gone", 404, code="resource_missing")
        world.stripe.fail_next(gone, endpoint="refunds.retrieve")

    runtime, result = await run_open(
        world, lose, lambda refund: world.stripe.settle(refund.id, "succeeded")
    )
    assert (result.outcome, runtime.seen, creates(world)) == ("refund succeeded", 2, 1)


async def test_an_open_refund_whose_metadata_changed_is_still_the_one(world: Quiet) -> None:
    def rename(refund: Refund) -> None:
        world.stripe.refunds[refund.id]["metadata"] = {}
        world.stripe.settle(refund.id, "succeeded")

    _, result = await run_open(world, rename)
    assert result.outcome == "refund succeeded" and refunded(world) == [80_00]


async def test_another_amount_than_the_price_can_be_decided(world: Quiet) -> None:
    async def half(known: Known) -> Step:
        step = refund_agent.decide(known)
        return replace(step, amount=step.amount // 2)

    world.decide = half  # type: ignore[method-assign]
    await run(world)
    assert refunded(world) == [40_00]


async def test_a_cancel_while_the_terms_change_ends_as_canceled(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, asked, may_answer = desk.world, asyncio.Event(), asyncio.Event()
    order = world.shop.order

    async def slow(order_id: str, line: int) -> Any:
        if sum(call.path == "shop.order" for call in world.calls) > 1:  # right before the refund
            asked.set()
            await may_answer.wait()
        return await order(order_id, line)

    monkeypatch.setattr(world.shop, "order", slow)
    async with desk.open() as case:
        await asked.wait()
        await case.cancel()
        await asyncio.sleep(0.3)
        orders = world.shop.orders
        orders["1234", 1] = replace(orders["1234", 1], price=50_00)
        may_answer.set()
        await assert_canceled(case)
    assert not world.stripe.counts()["refunds.create"]


async def test_a_case_goes_on_when_a_refused_key_is_mended(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    stripe = desk.world.stripe

    async def revoking(question: Question) -> Answer:
        if question.to == "reviewer":
            stripe.api_key = "refused"
        return await reply(question)

    monkeypatch.setattr(desk.world, "reply", revoking)
    async with desk.open("1235") as case:
        before = stripe.counts()["refunds.list"]
        await until(lambda: stripe.counts()["refunds.list"] > before + 2)
        progress = await progress_of(case)
        assert progress.activity == "issue_refund" and 0 < time.time() - progress.since < 30
        assert (progress.question, progress.result) == (None, None)
        stripe.api_key = "sk_test_mended"
        assert (await case.result()).outcome == "refund succeeded"
