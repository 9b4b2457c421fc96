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


async def refund(
    stripe: FakeStripe, amount: Any = 1500, key: str | None = None, **more: Any
) -> Any:
    params = {"payment_intent": next(iter(stripe.payments)), "amount": amount} | more
    return await stripe.v1.refunds.create_async(params, {"idempotency_key": key})


async def refusal(call: Awaitable[Any]) -> StripeError:
    with pytest.raises(StripeError) as caught:
        await call
    return caught.value


def facts(error: StripeError) -> tuple[int | None, str, str | None, str | None]:
    return error.http_status, error.error.type, error.error.code, error.error.param


# --- One key, one refund -------------------------------------------------------------------------


async def test_the_same_key_twice_makes_one_refund(stripe: FakeStripe) -> None:
    first, again = [await refund(stripe, 1500, "k") for _ in range(2)]
    assert first == again
    assert (first.amount, first.currency, first.status) == (1500, "usd", "succeeded")
    assert [first.payment_intent, first.charge] == [*stripe.payments, *stripe.charges]
    assert len(stripe.refunds) == 1
    assert stripe.counts() == {"refunds.create": 2}


async def test_a_key_is_bound_to_its_parameters(stripe: FakeStripe) -> None:
    first = await refund(stripe, 1500, "k")
    error = await refusal(refund(stripe, 700, "k"))
    assert type(error) is fake_stripe.IdempotencyError
    assert facts(error) == (400, "idempotency_error", None, None)
    assert await refund(stripe, 1500, "k") == first


async def test_a_key_in_use_is_refused_and_replayed_afterwards(stripe: FakeStripe) -> None:
    held = stripe.hold_next_create("before")
    running = asyncio.create_task(refund(stripe, key="k"))
    await held.wait()
    error = await refusal(refund(stripe, key="k"))
    assert type(error) is fake_stripe.APIError and error.code is None
    assert facts(error) == (409, INVALID, "idempotency_key_in_use", None)
    stripe.release()
    assert await running == await refund(stripe, key="k")


async def test_a_key_is_forgotten_after_a_day(stripe: FakeStripe) -> None:
    with freeze_time() as clock:
        first = await refund(stripe, 3000, "k")
        clock.tick(24 * 3600 - 1)
        assert await refund(stripe, 3000, "k") == first
        clock.tick(1)
        assert facts(await refusal(refund(stripe, 3000, "k"))) == (400, INVALID, None, "amount")


async def test_a_key_has_255_characters_at_most(stripe: FakeStripe) -> None:
    await refund(stripe, key="k" * 255)
    assert (await refusal(refund(stripe, key="k" * 256))).http_status == 400


# --- What is refused, and never more than was captured -------------------------------------------


@pytest.mark.parametrize(
    ("params", "status", "code", "param"),
    [
        *[
            ({"amount": amount}, 400, "parameter_invalid_integer", "amount")
            for amount in (0, -5, "abc", 1.5, True)
        ],
        ({"colour": "red"}, 400, "parameter_unknown", "colour"),
        ({"payment_intent": "pi_unknown"}, 404, "resource_missing", "payment_intent"),
    ],
)
async def test_a_wrong_parameter_leaves_the_key_unused(
    stripe: FakeStripe, params: Any, status: int, code: str, param: str
) -> None:
    error = await refusal(refund(stripe, key="k", **params))
    assert facts(error) == (status, INVALID, code, param)
    assert error.code == code
    assert (await refund(stripe, 100, "k")).amount == 100


NOT_PAID = ["requires_capture", "processing", "requires_payment_method"]


@pytest.mark.parametrize(
    ("payment", "code", "param"),
    [
        ({}, None, "amount"),
        ({"captured": 1499}, None, "amount"),
        ({"refunded": 3501}, None, "amount"),
        ({"refunded": 5000}, "charge_already_refunded", None),
        *[({"status": status}, None, None) for status in NOT_PAID],
    ],
)
async def test_a_refusal_by_the_charge_is_stored(
    stripe: FakeStripe, payment: Any, code: str | None, param: str | None
) -> None:
    intent = stripe.add_payment(5000, "usd", **payment)
    amount = 1500 if payment else 5001
    errors = [await refusal(refund(stripe, amount, "k", payment_intent=intent)) for _ in range(2)]
    assert errors[0] is errors[1]
    assert facts(errors[0]) == (400, INVALID, code, param)


async def test_a_disputed_charge_is_not_refunded(stripe: FakeStripe) -> None:
    next(iter(stripe.charges.values()))["disputed"] = True
    assert (await refusal(refund(stripe))).code == "charge_disputed"


@pytest.mark.parametrize("api_key", [None, "sk_live_secret", "rk_live_secret", "pk_test_secret"])
async def test_only_test_keys_are_accepted_and_none_is_repeated(
    stripe: FakeStripe, api_key: str | None
) -> None:
    stripe.api_key = api_key
    error = await refusal(refund(stripe, key="k"))
    assert type(error) is fake_stripe.AuthenticationError
    assert facts(error) == (401, INVALID, None, None)
    assert "secret" not in f"{error} {vars(error)}"
    stripe.api_key = "rk_test_mended"
    assert (await refund(stripe, key="k")).status == "succeeded"


# --- Payments and refunds as Stripe shows them ---------------------------------------------------


@pytest.mark.parametrize(
    ("payment", "payment_amounts", "charge"),
    [
        ({}, (5000, 0), ("succeeded", True, True, 5000)),
        ({"captured": 2000}, (2000, 0), ("succeeded", True, True, 2000)),
        ({"status": "requires_capture"}, (0, 5000), ("succeeded", True, False, 0)),
        ({"status": "processing"}, (0, 0), ("pending", False, True, 5000)),
        ({"status": "requires_payment_method"}, (0, 0), ("failed", False, False, 0)),
    ],
)
async def test_a_payment_shows_whether_it_is_paid(
    stripe: FakeStripe, payment: Any, payment_amounts: Any, charge: Any
) -> None:
    intent = stripe.add_payment(5000, "usd", **payment)
    found = await stripe.v1.payment_intents.retrieve_async(intent, {"expand": ["latest_charge"]})
    last = found.latest_charge
    assert (found.amount_received, found.amount_capturable) == payment_amounts
    assert (last.status, last.paid, last.captured, last.amount_captured) == charge


async def test_a_refunded_payment_stays_succeeded(stripe: FakeStripe) -> None:
    intent = (await refund(stripe, 1500)).payment_intent
    found = await stripe.v1.payment_intents.retrieve_async(intent, {"expand": ["latest_charge"]})
    assert (found.status, found.amount_received) == ("succeeded", 5000)
    assert (found.latest_charge.amount_refunded, found.latest_charge.refunded) == (1500, False)


@pytest.mark.parametrize(
    ("status", "remaining"),
    [
        ("succeeded", 2000),
        ("pending", 2000),
        ("unheard_of", 2000),
        ("failed", 5000),
        ("canceled", 5000),
    ],
)
async def test_only_a_live_refund_counts_against_the_charge(
    stripe: FakeStripe, status: str, remaining: int
) -> None:
    stripe.next_statuses = [status]
    assert (await refund(stripe, 3000)).status == status
    assert (await refund(stripe, None)).amount == remaining


async def test_a_refund_moves_on_but_its_replay_does_not(stripe: FakeStripe) -> None:
    stripe.next_statuses = ["pending"]
    made = await refund(stripe, 5000, "k")
    for status in ("succeeded", "failed"):
        stripe.settle(made.id, status)
        assert (await stripe.v1.refunds.retrieve_async(made.id)).status == status
    assert (await refund(stripe, 5000, "k")).status == "pending"
    with pytest.raises(ValueError):
        stripe.settle(made.id, "succeeded")


async def test_a_list_is_paged_newest_first(stripe: FakeStripe) -> None:
    made = [(await refund(stripe, 100)).id for _ in range(3)]
    stripe.add_payment(5000, "usd", refunded=100)
    query = {"payment_intent": next(iter(stripe.payments)), "limit": 2}
    first = await stripe.v1.refunds.list_async(query)
    rest = await stripe.v1.refunds.list_async(query | {"starting_after": first.data[-1].id})
    assert [found.id for found in first.data + rest.data] == made[::-1]
    assert (first.has_more, rest.has_more) == (True, False)
    unknown = await refusal(stripe.v1.refunds.list_async({"metadata": {}}))
    assert (unknown.code, unknown.error.param) == ("parameter_unknown", "metadata")


# --- Faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "refunds"), [("k", 1), (None, 2)])
async def test_after_a_lost_answer_only_a_key_prevents_a_second_refund(
    stripe: FakeStripe, key: str | None, refunds: int
) -> None:
    stripe.fail_next(fake_stripe.connection_lost(), acted=True)
    assert (await refusal(refund(stripe, key=key))).should_retry
    await refund(stripe, key=key)
    assert len(stripe.refunds) == refunds


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        (fake_stripe.rate_limited(), 429, "rate_limit"),
        (fake_stripe.not_permitted(), 403, None),
        (fake_stripe.connection_lost(), None, None),
    ],
)
async def test_an_error_in_front_of_the_key_store_is_not_stored(
    stripe: FakeStripe, fault: StripeError, status: int | None, code: str | None
) -> None:
    stripe.fail_next(fault)
    error = await refusal(refund(stripe, key="k"))
    assert (error.http_status, error.error.code, error.code) == (status, code, None)
    assert not stripe.refunds
    assert (await refund(stripe, key="k")).status == "succeeded"


@pytest.mark.parametrize("acted", [False, True])
async def test_a_500_is_stored_and_metadata_finds_the_refund(
    stripe: FakeStripe, acted: bool
) -> None:
    stripe.fail_next(fake_stripe.server_error(), acted=acted)
    for _ in range(2):
        error = await refusal(refund(stripe, key="k", metadata={"order_line": "1:1"}))
        assert facts(error) == (500, "api_error", None, None)
    found = (await stripe.v1.refunds.list_async({})).data
    assert [refund.metadata.order_line for refund in found] == ["1:1"] * acted


async def test_a_read_can_fail(stripe: FakeStripe) -> None:
    stripe.fail_next(fake_stripe.server_error(), endpoint="refunds.list")
    assert (await refusal(stripe.v1.refunds.list_async({}))).http_status == 500
    assert (await stripe.v1.refunds.list_async({})).data == []


@pytest.mark.parametrize(("where", "refunds"), [("before", 0), ("after", 1)])
async def test_a_canceled_request_made_its_refund_or_left_no_trace(
    stripe: FakeStripe, where: str, refunds: int
) -> None:
    held = stripe.hold_next_create(where)
    running = asyncio.create_task(refund(stripe, key="k"))
    await held.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(stripe.refunds) == refunds
    assert (await refund(stripe, key="k")).amount == 1500
    assert len(stripe.refunds) == 1


async def test_a_held_request_is_answered_after_its_release(stripe: FakeStripe) -> None:
    held = stripe.hold_next_create("after")
    running = asyncio.create_task(refund(stripe))
    await held.wait()
    assert not running.done()
    stripe.release()
    assert (await running).amount == 1500


async def test_an_answer_that_comes_too_late_is_a_refund(stripe: FakeStripe) -> None:
    stripe.answer_delay_seconds = 0.05
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(refund(stripe), timeout=0.01)
    assert len(stripe.refunds) == 1
