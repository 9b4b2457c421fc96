"""Money moves once: each guard of `issue_refund` alone, and what every answer of Stripe means."""

import time
from dataclasses import replace
from typing import Any

import pytest
from freezegun import freeze_time
from temporalio.exceptions import ApplicationError

import fake_stripe
from fake_stripe import FakeStripe
from refund_agent import Money, RefundActivities, RefundOrder

LATER = 2**40  # a time to give up that never comes


@pytest.fixture
def stripe() -> FakeStripe:
    return FakeStripe()


def steps(stripe: Any) -> RefundActivities:
    return RefundActivities(stripe=stripe, shop=None, decider=None)  # type: ignore[arg-type]


@pytest.fixture
def order(stripe: FakeStripe) -> RefundOrder:
    intent = stripe.add_payment(200_00, "usd")
    return RefundOrder("case-1", "refund:run-1", intent, Money(80_00, "usd"), LATER)


async def fails(stripe: FakeStripe, order: RefundOrder) -> ApplicationError:
    with pytest.raises(ApplicationError) as caught:
        await steps(stripe).issue_refund(order)
    return caught.value


async def test_a_refund_carries_the_key_and_the_case(
    stripe: FakeStripe, order: RefundOrder
) -> None:
    refund = await steps(stripe).issue_refund(order)
    assert (refund.status, refund.money) == ("succeeded", Money(80_00, "usd"))
    assert stripe.calls[-1].idempotency_key == order.idempotency_key
    assert stripe.refunds[refund.id]["metadata"] == {"case_id": "case-1"}


async def test_a_second_call_finds_the_refund_and_sends_no_request(
    stripe: FakeStripe, order: RefundOrder
) -> None:
    first = await steps(stripe).issue_refund(order)
    assert await steps(stripe).issue_refund(order) == first
    assert stripe.counts()["refunds.create"] == 1


class Blind:
    """Stripe whose list of refunds is always empty: the look-up is off."""

    def __init__(self, stripe: FakeStripe) -> None:
        self.v1, self.retrieve, self.refunds = self, None, self
        self.create_async = stripe.v1.refunds.create_async

    async def list_async(self, query: Any) -> Any:
        return fake_stripe.stripe_object({"data": [], "has_more": False})


async def test_the_key_alone_makes_it_one_refund(stripe: FakeStripe, order: RefundOrder) -> None:
    for _ in range(2):
        await steps(Blind(stripe)).issue_refund(order)
    assert (stripe.counts()["refunds.create"], len(stripe.refunds)) == (2, 1)


async def test_the_look_up_alone_makes_it_one_refund(
    stripe: FakeStripe, order: RefundOrder
) -> None:
    for key in ("refund:run-1", "refund:run-2"):
        await steps(stripe).issue_refund(replace(order, idempotency_key=key))
    assert len(stripe.refunds) == 1


async def test_with_both_guards_off_the_customer_is_paid_twice(
    stripe: FakeStripe, order: RefundOrder
) -> None:
    for key in ("refund:run-1", "refund:run-2"):
        await steps(Blind(stripe)).issue_refund(replace(order, idempotency_key=key))
    assert len(stripe.refunds) == 2


async def test_a_worker_back_after_the_weekend_finds_what_the_key_no_longer_protects(
    stripe: FakeStripe, order: RefundOrder
) -> None:
    stripe.fail_next(fake_stripe.connection_lost(), acted=True)
    with freeze_time("2026-03-06", real_asyncio=True) as clock:
        assert (await fails(stripe, order)).type == "StripeUnreachable"
        clock.tick(60 * 60 * 60)
        await steps(stripe).issue_refund(order)
    assert len(stripe.refunds) == 1


async def test_the_look_up_reads_every_page(stripe: FakeStripe, order: RefundOrder) -> None:
    mine = await steps(stripe).issue_refund(order)
    for _ in range(105):
        await stripe.v1.refunds.create_async({"payment_intent": order.payment_intent, "amount": 1})
    assert await steps(stripe).issue_refund(replace(order, idempotency_key="other")) == mine


@pytest.mark.parametrize("status", ["pending", "requires_action", "failed", "canceled"])
async def test_a_refund_is_reported_as_what_it_is_and_never_added_to(
    stripe: FakeStripe, order: RefundOrder, status: str
) -> None:
    stripe.next_statuses = [status]
    reports = [await steps(stripe).issue_refund(order) for _ in range(2)]
    assert [refund.status for refund in reports] == [status, status]
    assert len(stripe.refunds) == 1


async def test_the_request_is_a_function_of_the_case_alone(
    stripe: FakeStripe, order: RefundOrder
) -> None:
    for give_up_at in (LATER, LATER + 1):
        await steps(Blind(stripe)).issue_refund(replace(order, give_up_at=give_up_at))
    assert len(stripe.refunds) == 1


def error(status: int, code: str | None = None) -> fake_stripe.StripeError:
    return fake_stripe.StripeError("secret text", status, "invalid_request_error", code)


FAILURES = [
    (fake_stripe.connection_lost(), "StripeUnreachable", True),
    (fake_stripe.rate_limited(), "StripeRateLimited", True),
    (error(429, "lock_timeout"), "StripeRateLimited", True),
    (error(409, "idempotency_key_in_use"), "StripeKeyInUse", True),
    (error(409), "StripeConflict", True),
    (fake_stripe.server_error(), "StripeServerError", True),
    (error(503), "StripeServerError", True),
    (error(400), "StripeRefused", False),
    (error(402, "card_declined"), "StripeRefused", False),
    (error(200), "StripeUnreadable", True),
    (error(408), "StripeUnreachable", True),
    (fake_stripe.AuthenticationError("no key"), "StripeNotAsked", False),
    (error(401), "StripeAuthFailed", False),
    (fake_stripe.not_permitted(), "StripeNotPermitted", False),
    (error(404, "resource_missing"), "StripeNotFound", False),
    (error(400, "charge_already_refunded"), "StripeAlreadyRefunded", False),
    (error(400, "charge_disputed"), "StripeChargeDisputed", False),
    (fake_stripe.IdempotencyError("x", 400, "idempotency_error"), "StripeKeyReused", False),
]


@pytest.mark.parametrize(("answer", "type", "retried"), FAILURES)
async def test_every_failure_has_its_row(
    stripe: FakeStripe, order: RefundOrder, answer: fake_stripe.StripeError, type: str,
    retried: bool,
) -> None:
    stripe.fail_next(answer)
    failure = await fails(stripe, order)
    assert (failure.type, failure.non_retryable) == (type, not retried)
    assert str(answer) not in str(failure) and failure.__cause__ is None


async def test_after_its_time_a_retried_failure_is_final(
    stripe: FakeStripe, order: RefundOrder
) -> None:
    stripe.fail_next(fake_stripe.rate_limited())
    failure = await fails(stripe, replace(order, give_up_at=time.time()))
    assert failure.non_retryable


async def test_a_worker_that_is_late_still_makes_its_one_try(
    stripe: FakeStripe, order: RefundOrder
) -> None:
    await steps(stripe).issue_refund(replace(order, give_up_at=0))
    assert len(stripe.refunds) == 1


async def test_an_answer_lost_behind_a_stored_500_still_ends_in_one_refund(
    stripe: FakeStripe, order: RefundOrder
) -> None:
    stripe.fail_next(fake_stripe.server_error(), acted=True)
    assert not (await fails(stripe, order)).non_retryable
    assert (await steps(stripe).issue_refund(order)).status == "succeeded"
    assert len(stripe.refunds) == 1
