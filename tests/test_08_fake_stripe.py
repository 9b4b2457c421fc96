"""What the stand-in keeps of Stripe's rules: one refund per key, never more than was captured."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest
from freezegun import freeze_time

import fake_stripe
from fake_stripe import FakeStripe, StripeError

INVALID = "invalid_request_error"


@pytest.fixture
def stripe() -> FakeStripe:
    """An account with one payment of 50.00."""
    account = FakeStripe()
    account.add_payment(5000, "usd")
    return account


async def refund(stripe: FakeStripe, amount: Any = 1500, key: str | None = "k", **more: Any) -> Any:
    """Refund the latest payment."""
    params = {"payment_intent": list(stripe.payments)[-1], "amount": amount} | more
    return await stripe.v1.refunds.create_async(params, {"idempotency_key": key})


async def refusal(call: Awaitable[Any]) -> tuple[str, int | None, str, str | None, str | None]:
    with pytest.raises(StripeError) as caught:
        await call
    error = caught.value
    facts = error.error
    return type(error).__name__, error.http_status, facts.type, facts.code, facts.param


def invalid(code: str | None = None, param: str | None = None, status: int = 400) -> Any:
    return "InvalidRequestError", status, INVALID, code, param


# --- One key, one refund -------------------------------------------------------------------------


async def test_the_same_key_twice_makes_one_refund(stripe: FakeStripe) -> None:
    assert await refund(stripe) == await refund(stripe)
    assert len(stripe.refunds) == 1
    assert stripe.counts() == {"refunds.create": 2}


async def test_a_key_is_bound_to_its_parameters(stripe: FakeStripe) -> None:
    first = await refund(stripe)
    mismatch = "IdempotencyError", 400, "idempotency_error", None, None
    assert await refusal(refund(stripe, 700)) == mismatch
    assert await refund(stripe) == first


async def test_a_key_in_use_is_refused_and_replayed_afterwards(stripe: FakeStripe) -> None:
    held = stripe.hold_next_create("before")
    running = asyncio.create_task(refund(stripe))
    await held.wait()
    in_use = "APIError", 409, INVALID, "idempotency_key_in_use", None
    assert await refusal(refund(stripe)) == in_use
    stripe.release()
    assert await running == await refund(stripe)


async def test_a_key_is_forgotten_after_a_day(stripe: FakeStripe) -> None:
    with freeze_time() as clock:
        first = await refund(stripe)
        clock.tick(24 * 3600 - 1)
        assert await refund(stripe) == first
        clock.tick(1)
        assert await refund(stripe) != first


# --- What is refused, and never more than was captured -------------------------------------------


@pytest.mark.parametrize(
    ("params", "refused"),
    [
        ({"amount": 0}, invalid("parameter_invalid_integer", "amount")),
        ({"amount": True}, invalid("parameter_invalid_integer", "amount")),
        ({"colour": "red"}, invalid("parameter_unknown", "colour")),
        ({"payment_intent": "pi_x"}, invalid("resource_missing", "payment_intent", 404)),
        ({"key": "k" * 256}, invalid()),
    ],
)
async def test_a_wrong_parameter_leaves_the_key_unused(
    stripe: FakeStripe, params: Any, refused: Any
) -> None:
    assert await refusal(refund(stripe, **params)) == refused
    assert await refund(stripe)


async def test_a_refusal_by_the_charge_is_stored(stripe: FakeStripe) -> None:
    made = await refund(stripe, 5000, "other key")
    already_refunded = invalid("charge_already_refunded")
    assert await refusal(refund(stripe)) == already_refunded
    stripe.settle(made.id, "failed")
    assert await refusal(refund(stripe)) == already_refunded
    assert await refund(stripe, key="new key")


async def test_a_disputed_charge_is_not_refunded(stripe: FakeStripe) -> None:
    next(iter(stripe.charges.values()))["disputed"] = True
    assert await refusal(refund(stripe)) == invalid("charge_disputed")


async def test_only_a_test_key_is_accepted(stripe: FakeStripe) -> None:
    stripe.api_key = "sk_live_secret"
    assert await refusal(refund(stripe)) == ("AuthenticationError", 401, INVALID, None, None)
    stripe.api_key = "rk_test_mended"
    assert await refund(stripe)


# --- Payments and refunds as Stripe shows them ---------------------------------------------------


@pytest.mark.parametrize(
    ("payment", "amounts", "charge", "refused"),
    [
        ({}, (5000, 0), ("succeeded", True, True, 5000), invalid(param="amount")),
        ({"captured": 2000}, (2000, 0), ("succeeded", True, True, 2000), invalid(param="amount")),
        ({"status": "requires_capture"}, (0, 5000), ("succeeded", True, False, 0), invalid()),
        ({"status": "processing"}, (0, 0), ("pending", False, True, 5000), invalid()),
        ({"status": "requires_payment_method"}, (0, 0), ("failed", False, False, 0), invalid()),
    ],
)
async def test_a_refund_needs_a_captured_charge_and_never_exceeds_it(
    stripe: FakeStripe, payment: Any, amounts: Any, charge: Any, refused: Any
) -> None:
    intent = stripe.add_payment(5000, "usd", **payment)
    found = await stripe.v1.payment_intents.retrieve_async(intent, {"expand": ["latest_charge"]})
    last = found.latest_charge
    assert (found.amount_received, found.amount_capturable) == amounts
    assert (last.status, last.paid, last.captured, last.amount_captured) == charge
    assert await refusal(refund(stripe, last.amount_captured + 1)) == refused


async def test_a_refund_moves_on_but_its_replay_does_not(stripe: FakeStripe) -> None:
    stripe.next_statuses = ["unheard_of"]
    made = await refund(stripe)
    assert (await refund(stripe, None, "other key")).amount == 3500
    stripe.settle(made.id, "canceled")
    assert (await stripe.v1.refunds.retrieve_async(made.id)).status == "canceled"
    assert (await refund(stripe)).status == "unheard_of"
    assert (await refund(stripe, None, "new key")).amount == 1500


async def test_a_list_is_paged_newest_first(stripe: FakeStripe) -> None:
    stripe.add_payment(5000, "usd", refunded=100)
    intent = stripe.add_payment(6000, "usd")
    made = [(await refund(stripe, key=None)).id for _ in range(4)]
    query = {"payment_intent": intent, "limit": 2}
    first = await stripe.v1.refunds.list_async(query)
    rest = await stripe.v1.refunds.list_async(query | {"starting_after": first.data[-1].id})
    assert [found.id for found in first.data + rest.data] == made[::-1]
    assert (first.has_more, rest.has_more) == (True, False)


# --- Faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "refunds"), [("k", 1), (None, 2)])
async def test_after_a_lost_answer_only_a_key_prevents_a_second_refund(
    stripe: FakeStripe, key: str | None, refunds: int
) -> None:
    stripe.fail_next(fake_stripe.connection_lost(), acted=True)
    lost = "APIConnectionError", None, "api_error", None, None
    assert await refusal(refund(stripe, key=key)) == lost
    await refund(stripe, key=key)
    assert len(stripe.refunds) == refunds


async def test_an_error_in_front_of_the_key_store_is_not_stored(stripe: FakeStripe) -> None:
    for fault in (fake_stripe.rate_limited(), fake_stripe.not_permitted()):
        stripe.fail_next(fault)
        assert (await refusal(refund(stripe)))[1] == fault.http_status
    assert not stripe.refunds
    assert await refund(stripe)


@pytest.mark.parametrize("acted", [False, True])
async def test_a_500_is_stored_and_metadata_finds_the_refund(
    stripe: FakeStripe, acted: bool
) -> None:
    stripe.fail_next(fake_stripe.server_error(), acted=acted)
    for _ in range(2):
        error = await refusal(refund(stripe, metadata={"order_line": "1:1"}))
        assert error == ("APIError", 500, "api_error", None, None)
    found = (await stripe.v1.refunds.list_async({})).data
    assert [refund.metadata.order_line for refund in found] == ["1:1"] * acted


@pytest.mark.parametrize(("where", "refunds"), [("before", 0), ("after", 1)])
async def test_a_request_that_has_arrived_is_carried_out_though_its_caller_hangs_up(
    stripe: FakeStripe, where: str, refunds: int
) -> None:
    held = stripe.hold_next_create(where)
    running = asyncio.create_task(refund(stripe))
    await held.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(stripe.refunds) == refunds
    stripe.release()
    await asyncio.sleep(0.01)
    assert len(stripe.refunds) == 1
