"""Money moves once, although the world changes meanwhile. The loop runs in a plain process here. It
asks the owners the same in the Workflow."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

import fake_stripe
import refund_agent
from desk import Quiet, reply, request_for
from refund_agent import (
    HUMAN,
    AgreedRefund,
    Answer,
    Known,
    Question,
    Refund,
    RefundActivities,
    RefundRequest,
    RefundResult,
    run_agent,
)
from run_demo import PlainRuntime

ADA, BEN = request_for("1234"), request_for("1235")  # 80.00 at once; 150.00 after a review
DAY = 24 * 60 * 60


async def run(world: Quiet, request: RefundRequest = ADA) -> RefundResult:
    return await run_agent(request, PlainRuntime(world.remote()))


def steps(world: Quiet) -> RefundActivities:
    return RefundActivities(stripe=world.stripe, shop=world.shop, decide=world.decide)


async def agreed(world: Quiet, request: RefundRequest = ADA) -> AgreedRefund:
    order = await steps(world).lookup_order(Known(request, 0.0))
    return AgreedRefund(request, order, order.price)


async def by_hand(
    world: Quiet, amount: int = 80_00, order_id: str = "1234", **metadata: str
) -> Any:
    payment = {"payment_intent": world.payment_intent(order_id), "amount": amount}
    return await world.stripe.v1.refunds.create_async(payment | {"metadata": metadata})


def creates(world: Quiet) -> int:
    return world.stripe.counts()["refunds.create"]


def refunded(world: Quiet, order_id: str = "1234") -> list[int]:
    payment = world.payment_intent(order_id)
    refunds = world.stripe.refunds.values()
    return [r["amount"] for r in refunds if r["payment_intent"] == payment]


def meanwhile(world: Quiet, change: Callable[[], object], at: str = "reviewer") -> None:
    """Let this happen once, while that person thinks."""
    changes = [change]

    async def thoughtful(question: Question) -> Answer:
        if question.to == at and changes:
            happened = changes.pop()()
            if isinstance(happened, Awaitable):
                await happened
        return await reply(question)

    world.replies = thoughtful


async def attempt(number: int, step: Callable[[Any], Awaitable[Any]], argument: object) -> Any:
    """One attempt of an Activity, as Temporal numbers it."""
    environment = ActivityEnvironment()
    environment.info = replace(environment.info, attempt=number)
    return await environment.run(step, argument)


# --- One order line, one key, one refund ---------------------------------------------------------


async def test_the_request_names_the_order_line_and_nothing_else(world: Quiet) -> None:
    result = await run(world)
    assert result.refund and result.outcome == "refund succeeded"
    assert world.stripe.refunds[result.refund.id]["metadata"] == {"order_line": "1234:1"}
    assert world.stripe.calls[-1].idempotency_key == "refund:1234:1"


async def test_a_second_case_of_the_same_line_reports_the_first_refund(world: Quiet) -> None:
    first, second = await run(world), await run(world)
    assert second.refund == first.refund and creates(world) == 1


@pytest.mark.parametrize("forgotten", ["the key", "the record"])
async def test_the_key_and_the_record_each_make_it_one_refund(
    world: Quiet, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    request = await agreed(world)
    first = await steps(world).issue_refund(request)
    if forgotten == "the key":
        monkeypatch.setattr(fake_stripe, "KEY_RETENTION_SECONDS", 0)
    else:
        blind = fake_stripe.stripe_object({"data": [], "has_more": False})
        monkeypatch.setattr(
            world.stripe.v1.refunds, "list_async", lambda _: asyncio.sleep(0, blind)
        )
    assert await steps(world).issue_refund(request) == first
    assert refunded(world) == [80_00]


@pytest.mark.parametrize("status", ["pending", "requires_action", "failed", "canceled"])
async def test_a_refund_on_record_is_reported_and_never_added_to(world: Quiet, status: str) -> None:
    world.stripe.next_statuses = [status]
    outcomes = [(await run(world)).outcome for _ in range(2)]
    assert outcomes == [f"refund {status}"] * 2 and creates(world) == 1


async def test_of_two_refunds_of_a_line_the_live_one_counts(world: Quiet) -> None:
    for status in ("succeeded", "canceled"):
        world.stripe.next_statuses = [status]
        await by_hand(world, 30_00, order_line="1234:1")
    result = await run(world)
    assert (result.outcome, result.told) == (
        "refund succeeded",
        "Your refund of 30.00 USD is sent.",
    )


# --- What a colleague did by hand ----------------------------------------------------------------


@pytest.mark.parametrize("request_", [ADA, BEN], ids=["ada", "ben"])
async def test_a_refund_that_names_no_line_is_for_a_human_and_nobody_reviews_it(
    world: Quiet, request_: RefundRequest
) -> None:
    await by_hand(world, 10_00, request_.order_id)
    result = await run(world, request_)
    assert result.outcome == HUMAN and refunded(world, request_.order_id) == [10_00]
    assert not world.asked_of("reviewer")


async def test_a_refund_by_hand_during_the_review_is_for_a_human(world: Quiet) -> None:
    meanwhile(world, lambda: by_hand(world, 150_00, "1235"))
    result = await run(world, BEN)
    assert (result.outcome, refunded(world, "1235")) == (HUMAN, [150_00])


async def test_the_metadata_of_the_handover_makes_a_refund_by_hand_ours(world: Quiet) -> None:
    world.stripe.fail_next(fake_stripe.InvalidRequestError("no", code="charge_disputed"))
    notice = (await run(world)).notice
    found = re.search(r"key (\w+), value (\S+)\.$", notice)
    assert found
    made = await by_hand(world, 80_00, **{found[1]: found[2]})
    result = await run(world)
    assert result.refund and result.refund.id == made.id
    assert refunded(world) == [80_00]


# --- The terms -----------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[Quiet], dict[str, object]]] = {
    "price": lambda world: {"price": 50_00},
    "item": lambda world: {"item": "spare part"},
    "payment": lambda world: {"payment_intent": world.stripe.add_payment(400_00, "usd")},
}


def change(world: Quiet, what: str, order_id: str = "1235") -> None:
    vars(world.shop.orders[order_id, 1]).update(CHANGES[what](world))


@pytest.mark.parametrize("what", CHANGES)
async def test_terms_that_changed_during_the_review_are_decided_and_reviewed_again(
    world: Quiet, what: str
) -> None:
    meanwhile(world, lambda: change(world, what))
    world.shop.orders["1235", 1].earlier_refunds = 5  # also the new terms need a review
    old = world.payment_intent("1235")
    result = await run(world, BEN)
    assert result.outcome == "refund succeeded" and result.refund
    assert [question.to for question in world.asked] == ["customer"] * 2 + ["reviewer"] * 2
    assert len({question.id for question in world.asked}) == 4
    assert creates(world) == 1
    now: Any = world.shop.orders["1235", 1]
    assert refunded(world, "1235") == [now.price]
    assert (now.payment_intent == old) == (what != "payment")


@pytest.mark.parametrize("what", CHANGES)
async def test_terms_that_changed_send_nothing_and_a_later_attempt_needs_a_human(
    world: Quiet, what: str
) -> None:
    request = await agreed(world, BEN)
    change(world, what)
    assert await attempt(1, steps(world).issue_refund, request) is None
    with pytest.raises(ApplicationError, match="may have been requested") as refused:
        await attempt(2, steps(world).issue_refund, request)
    assert refused.value.non_retryable and creates(world) == 0


async def test_a_refund_on_the_old_terms_that_is_on_record_is_reported(world: Quiet) -> None:
    request = await agreed(world, BEN)
    made = await steps(world).issue_refund(request)
    change(world, "price")
    for number in (1, 2):
        assert await attempt(number, steps(world).issue_refund, request) == made


async def test_an_order_that_is_gone_is_a_changed_one(world: Quiet) -> None:
    request = await agreed(world)
    world.shop.orders.clear()
    assert await attempt(1, steps(world).issue_refund, request) is None
    with pytest.raises(ApplicationError, match="may have been requested"):
        await attempt(2, steps(world).issue_refund, request)


@pytest.mark.parametrize(("shop", "stripe"), [("eur", "jpy"), ("usd", "eur"), ("ugx", "ugx")])
async def test_two_currencies_or_an_unknown_one_are_for_a_human_before_any_review(
    world: Quiet, shop: str, stripe: str
) -> None:
    order = world.shop.orders["1235", 1]
    order.currency, order.payment_intent = shop, world.stripe.add_payment(500_000, stripe)
    result = await run(world, BEN)
    assert result.outcome == HUMAN and shop in result.notice and stripe in result.notice
    assert not world.asked_of("reviewer") and creates(world) == 0


# --- The payment ---------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["requires_capture", "requires_payment_method", "processing"])
async def test_what_is_not_paid_is_not_refunded(world: Quiet, status: str) -> None:
    order = world.shop.orders["1235", 1]
    order.payment_intent = world.stripe.add_payment(400_00, "usd", status=status)
    result = await run(world, BEN)
    assert (result.outcome, world.asked_of("reviewer")) == ("not paid", 0)


async def test_a_payment_that_was_captured_in_part_is_for_a_human(world: Quiet) -> None:
    order = world.shop.orders["1235", 1]
    order.payment_intent = world.stripe.add_payment(400_00, "usd", captured=390_00)
    result = await run(world, BEN)
    assert (result.outcome, world.asked_of("reviewer")) == (HUMAN, 0)


def second_line(world: Quiet, price: int, paid: int) -> RefundRequest:
    """Order 1234 gets a second line, and one payment for both."""
    payment = world.stripe.add_payment(paid, "usd")
    first = world.shop.orders["1234", 1]
    first.payment_intent = payment
    second = type(first)(**{**vars(first), "item": "cup", "price": price})
    world.shop.orders["1234", 2] = second
    return replace(ADA, line=2)


async def test_lines_of_one_order_are_refunded_one_after_the_other(world: Quiet) -> None:
    other = second_line(world, 20_00, 100_00)
    assert [(await run(world, line)).outcome for line in (ADA, other)] == ["refund succeeded"] * 2
    assert refunded(world) == [80_00, 20_00]


async def test_lines_of_one_order_are_refunded_at_once(world: Quiet) -> None:
    other = second_line(world, 20_00, 100_00)
    await asyncio.gather(run(world, ADA), run(world, other))
    assert sorted(refunded(world)) == [20_00, 80_00]


@pytest.mark.parametrize("together", [True, False])
async def test_when_less_is_left_than_a_line_costs_a_human_looks(
    world: Quiet, together: bool
) -> None:
    other = second_line(world, 50_00, 100_00)
    if together:
        results = list(await asyncio.gather(run(world, ADA), run(world, other)))
    else:
        results = [await run(world, line) for line in (ADA, other)]
    assert sorted(result.outcome for result in results) == [HUMAN, "refund succeeded"]
    assert len(refunded(world)) == 1


# --- Stripe's failures ---------------------------------------------------------------------------


def error(status: int, code: str | None = None) -> fake_stripe.StripeError:
    return fake_stripe.StripeError("secret text", status, "invalid_request_error", code)


@pytest.mark.parametrize(
    "answer",
    [
        fake_stripe.connection_lost(),
        fake_stripe.server_error(),
        fake_stripe.rate_limited(),
        fake_stripe.not_permitted(),
        error(401),
        error(408),
        error(409, "idempotency_key_in_use"),
        error(503),
        fake_stripe.AuthenticationError("no key"),
    ],
)
async def test_what_may_pass_is_tried_again(world: Quiet, answer: fake_stripe.StripeError) -> None:
    request = await agreed(world)
    world.stripe.fail_next(answer)
    with pytest.raises(ApplicationError) as failed:
        await steps(world).issue_refund(request)
    assert not failed.value.non_retryable and failed.value.__cause__ is None
    assert str(answer) not in str(failed.value)
    if (answer.http_status or 0) < 500:  # Stripe repeats a 500 for a day
        assert await steps(world).issue_refund(request)


@pytest.mark.parametrize(
    ("status", "code", "shown"),
    [
        (400, None, "400"),
        (402, "card_declined", "card_declined"),
        (404, "resource_missing", "resource_missing"),
        (400, "charge_disputed", "charge_disputed"),
        (400, "charge_already_refunded", "charge_already_refunded"),
    ],
)
async def test_every_other_refusal_is_a_handover_with_stripes_code(
    world: Quiet, status: int, code: str | None, shown: str
) -> None:
    world.stripe.fail_next(error(status, code))
    result = await run(world)
    payment = world.payment_intent("1234")
    assert (result.outcome, result.told) == (HUMAN, refund_agent.TOLD[HUMAN])
    assert result.notice == (
        f"Stripe, {payment}: {shown}. A refund may exist or still arrive. In Stripe, look at all"
        " refunds of the payment of order 1234 for the metadata order_line = 1234:1. One that"
        " failed or was canceled does not count. One without metadata may be the refund of this"
        " line: decide that first. If none counts, wait an hour and look again. If there is still"
        " none and a refund is due, make one by hand, and give it that metadata: key order_line,"
        " value 1234:1."
    )


async def test_a_lost_answer_is_found_on_record_also_behind_a_stored_500(world: Quiet) -> None:
    for answer in (fake_stripe.connection_lost(), fake_stripe.server_error()):
        world.stripe.fail_next(answer, acted=True)
    request = await agreed(world)
    with pytest.raises(ApplicationError):
        await steps(world).issue_refund(request)
    assert (await steps(world).issue_refund(request)) is not None
    assert refunded(world) == [80_00]


async def test_a_status_that_is_none_of_stripes_is_for_a_human_with_the_refunds_id(
    world: Quiet,
) -> None:
    world.stripe.next_statuses = ["reversed"]
    result = await run(world)
    assert result.outcome == HUMAN and result.refund
    assert result.refund.id in result.notice and result.refund.status == "reversed"


# --- Open refunds --------------------------------------------------------------------------------


class Patient(PlainRuntime):
    """A plain process that lives for months. Something may happen on each of its days."""

    def __init__(self, world: Quiet, *days: Callable[[Refund], object]) -> None:
        super().__init__(world.remote())
        self.days, self.seen, self.heard = list(days), 0, list[str]()
        self.world = world

    async def next_day(self) -> bool:
        self.seen += 1
        if self.days:
            self.days.pop(0)(self.refund)
        return True

    def tell(self, result: RefundResult) -> None:
        assert result.refund
        self.refund = result.refund
        self.heard.append(result.outcome)


async def run_open(world: Quiet, *days: Callable[[Refund], object]) -> tuple[Patient, RefundResult]:
    world.stripe.next_statuses = ["pending"]
    runtime = Patient(world, *days)
    return runtime, await run_agent(ADA, runtime)


@pytest.mark.parametrize("status", ["succeeded", "failed", "canceled"])
async def test_an_open_refund_is_looked_at_until_stripe_has_settled_it(
    world: Quiet, status: str
) -> None:
    runtime, result = await run_open(
        world, lambda refund: None, lambda refund: world.stripe.settle(refund.id, status)
    )
    assert runtime.heard == ["refund pending", "refund pending", f"refund {status}"]
    assert (result.outcome, result.remembered, creates(world)) == (f"refund {status}", True, 1)
    assert world.count()["cases remembered"] == 1
    assert ("A refund may exist" in result.notice) == (status != "succeeded")


async def test_a_refund_that_stays_open_is_for_a_human_after_thirty_looks(world: Quiet) -> None:
    runtime, result = await run_open(world)
    assert (runtime.seen, result.outcome, creates(world)) == (30, HUMAN, 1)
    assert result.refund and result.refund.id in result.notice
    assert runtime.heard[-1] == HUMAN


async def test_a_plain_process_reports_an_open_refund_and_ends(world: Quiet) -> None:
    world.stripe.next_statuses = ["pending"]
    assert (await run(world)).outcome == "refund pending"


# --- Time ----------------------------------------------------------------------------------------


async def test_the_window_ends_when_the_case_starts(world: Quiet) -> None:
    world.shop.orders["1235", 1].purchased_at = (started_at := 1_000_000_000.0) - 30 * DAY
    known = Known(BEN, started_at)
    known = replace(known, order=await steps(world).lookup_order(known))
    assert await steps(world).check_refund_policy(known) == ""
    late = replace(known, started_at=started_at + 1)
    assert "30 days" in await steps(world).check_refund_policy(late)


async def test_the_customer_is_told_before_memory_is_written(world: Quiet) -> None:
    class Told(PlainRuntime):
        def tell(self, result: RefundResult) -> None:
            assert (creates(world), world.xmemory.counts()["write_async"]) == (1, 0)
            told.append(result)

    told = list[RefundResult]()
    assert (await run_agent(ADA, Told(world.remote()))).remembered and told
