"""What the fake keeps of Stripe's rules: one refund per key, and never more than the charge."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest
from freezegun import freeze_time

import fake_stripe
from fake_stripe import FakeStripe, StripeError

INVALID = "invalid_request_error"
FAILURE = {"failure_reason", "failure_balance_transaction"}


@pytest.fixture
def stripe() -> FakeStripe:
    """An account with one payment of 50.00."""
    account = FakeStripe()
    account.add_payment(5000, "usd")
    return account


async def refund(stripe: FakeStripe, amount: Any = None, key: str | None = None,
                 **more: Any) -> Any:
    params = {"payment_intent": next(iter(stripe.payments)), "amount": amount} | more
    return await stripe.v1.refunds.create_async(params, {"idempotency_key": key})


async def refusal(call: Awaitable[Any]) -> StripeError:
    with pytest.raises(StripeError) as caught:
        await call
    return caught.value


def facts(error: StripeError) -> tuple[int | None, str, str | None, str | None]:
    return error.http_status, error.error.type, error.error.code, error.error.param


# --- One key, one refund -------------------------------------------------------------------------


async def test_a_refund_names_its_charge_and_its_payment(stripe: FakeStripe) -> None:
    made = await refund(stripe, 1500, "k1")
    assert (made.id[:3], made.amount, made.status) == ("re_", 1500, "succeeded")
    assert [made.payment_intent, made.charge] == [*stripe.payments, *stripe.charges]
    assert made.reason is None and not hasattr(made, "livemode")


async def test_the_same_key_twice_makes_one_refund(stripe: FakeStripe) -> None:
    first, again = [await refund(stripe, 1500, "k1") for _ in range(2)]
    assert first.id == again.id
    assert len(stripe.refunds) == 1
    assert stripe.counts()["refunds.create"] == 2


async def test_a_replay_names_the_first_request(stripe: FakeStripe) -> None:
    answers = [await refund(stripe, 1500, "k1") for _ in range(2)]
    first, again = [answer.last_response.headers for answer in answers]
    assert again["Original-Request"] == first["Request-Id"] != again["Request-Id"]
    assert "Idempotent-Replayed" not in first and again["Idempotent-Replayed"] == "true"


async def test_a_key_is_bound_to_its_parameters_and_endpoint(stripe: FakeStripe) -> None:
    first = await refund(stripe, 1500, "k1")
    same = {"payment_intent": first.payment_intent, "amount": 1500}
    elsewhere = stripe.v1.refunds.cancel_async(first.id, same, {"idempotency_key": "k1"})
    for error in [await refusal(refund(stripe, 700, "k1")), await refusal(elsewhere)]:
        assert type(error) is fake_stripe.IdempotencyError
        assert facts(error) == (400, "idempotency_error", None, None)
    assert (await refund(stripe, 1500, "k1")).id == first.id
    assert len(stripe.refunds) == 1


async def test_a_key_in_use_is_refused_and_replayed_afterwards(stripe: FakeStripe) -> None:
    held = stripe.hold_next_create("before")
    running = asyncio.create_task(refund(stripe, 1500, "k2"))
    await held.wait()
    error = await refusal(refund(stripe, 1500, "k2"))
    stripe.release()
    first = await running
    assert type(error) is fake_stripe.APIError and error.code is None
    assert facts(error) == (409, INVALID, "idempotency_key_in_use", None)
    assert (await refund(stripe, 1500, "k2")).id == first.id


async def test_a_forgotten_key_runs_as_new_within_the_charge(stripe: FakeStripe) -> None:
    with freeze_time() as clock:
        first = await refund(stripe, 2000, "k1")
        clock.tick(23 * 3600)
        assert (await refund(stripe, 2000, "k1")).id == first.id
        clock.tick(2 * 3600)
        assert (await refund(stripe, 2000, "k1")).id != first.id
        clock.tick(25 * 3600)
        assert facts(await refusal(refund(stripe, 2000, "k1"))) == (400, INVALID, None, "amount")
    assert len(stripe.refunds) == 2


async def test_a_key_has_255_characters_at_most(stripe: FakeStripe) -> None:
    assert (await refund(stripe, 100, "k" * 255)).amount == 100
    assert (await refusal(refund(stripe, 100, "k" * 256))).http_status == 400


# --- What is refused, and never more than the charge ---------------------------------------------


@pytest.mark.parametrize(("params", "code", "param"), [
    ({"amount": 0}, "parameter_invalid_integer", "amount"),
    ({"amount": -5}, "parameter_invalid_integer", "amount"),
    ({"amount": "abc"}, "parameter_invalid_integer", "amount"),
    ({"amount": 1.5}, "parameter_invalid_integer", "amount"),
    ({"amount": True}, "parameter_invalid_integer", "amount"),
    ({"reason": "expired_uncaptured_charge"}, None, "reason"),
    ({"colour": "red"}, "parameter_unknown", "colour"),
    ({"payment_intent": None}, None, None),
])
async def test_a_wrong_parameter_is_refused_and_leaves_the_key_free(
        stripe: FakeStripe, params: Any, code: str | None, param: str | None) -> None:
    error = await refusal(refund(stripe, key="k", **params))
    assert facts(error) == (400, INVALID, code, param)
    assert (await refund(stripe, 100, "k")).amount == 100


@pytest.mark.parametrize(("payment", "code", "param"), [
    ({}, None, "amount"),  # more than is left
    ({"refunded": 5000}, "charge_already_refunded", None),
    ({"status": "requires_payment_method"}, None, None),
])
async def test_a_refusal_by_the_charge_is_stored_and_replayed(
        stripe: FakeStripe, payment: Any, code: str | None, param: str | None) -> None:
    intent = stripe.add_payment(5000, "usd", **payment)
    errors = [await refusal(refund(stripe, 5001, "k4", payment_intent=intent)) for _ in range(2)]
    assert [facts(error) for error in errors] == [(400, INVALID, code, param)] * 2
    assert ["Idempotent-Replayed" in error.headers for error in errors] == [False, True]


async def test_an_unknown_payment_is_a_missing_resource(stripe: FakeStripe) -> None:
    error = await refusal(refund(stripe, 100, payment_intent="pi_unknown"))
    assert type(error) is fake_stripe.InvalidRequestError
    assert error.code == error.error.code == "resource_missing"


async def test_a_refusal_carries_the_id_of_its_request(stripe: FakeStripe) -> None:
    errors = [await refusal(refund(stripe, amount)) for amount in (5001, 0)]
    assert all(error.request_id for error in errors)


@pytest.mark.parametrize("api_key", [None, "sk_live_secret", "rk_live_secret", "pk_test_secret"])
async def test_only_test_keys_are_accepted_and_none_is_repeated(
        stripe: FakeStripe, api_key: str | None) -> None:
    stripe.api_key = api_key
    error = await refusal(refund(stripe, 1500))
    assert type(error) is fake_stripe.AuthenticationError
    assert facts(error) == (401, INVALID, None, None)
    assert "secret" not in f"{error} {vars(error)}"


@pytest.mark.parametrize(("status", "left", "more_fields"), [
    ("succeeded", 2000, set()),
    ("pending", 2000, {"pending_reason"}),
    ("requires_action", 2000, set()),
    ("failed", 5000, FAILURE),
    ("canceled", 5000, FAILURE),
])
async def test_without_an_amount_all_goes_back_that_no_living_refund_took(
        stripe: FakeStripe, status: str, left: int, more_fields: set[str]) -> None:
    stripe.next_statuses = [status]
    made = await refund(stripe, 3000)
    assert made.status == status
    assert vars(made).keys() & (FAILURE | {"pending_reason"}) == more_fields
    assert (await refund(stripe)).amount == left


async def test_a_refund_moves_on_but_its_replay_does_not(stripe: FakeStripe) -> None:
    stripe.next_statuses = ["pending"]
    made = await refund(stripe, 5000, "k1")
    stripe.settle(made.id, "succeeded")
    now = await stripe.v1.refunds.retrieve_async(made.id)
    assert now.status == "succeeded" and not hasattr(now, "pending_reason")
    stripe.settle(made.id, "failed", "declined")
    assert stripe.refunds[made.id]["failure_reason"] == "declined"
    assert (await refund(stripe)).amount == 5000
    assert (await refund(stripe, 5000, "k1")).status == "pending"


async def test_a_refunded_payment_stays_succeeded(stripe: FakeStripe) -> None:
    intent = (await refund(stripe, 1500)).payment_intent
    found = await stripe.v1.payment_intents.retrieve_async(intent, {"expand": ["latest_charge"]})
    assert (found.status, found.amount_received) == ("succeeded", 5000)
    assert (found.latest_charge.amount_refunded, found.latest_charge.refunded) == (1500, False)


async def test_a_list_is_paged_newest_first(stripe: FakeStripe) -> None:
    made = [(await refund(stripe, 100)).id for _ in range(3)]
    first = await stripe.v1.refunds.list_async({"limit": 2})
    rest = await stripe.v1.refunds.list_async({"limit": 2, "starting_after": first.data[-1].id})
    assert [found.id for found in first.data + rest.data] == made[::-1]
    assert (first.has_more, rest.has_more) == (True, False)


# --- Faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lost", "key", "refunds"), [(1, "k3", 1), (2, "k3", 1), (1, None, 2)])
async def test_after_a_lost_answer_only_a_key_prevents_a_second_refund(
        stripe: FakeStripe, lost: int, key: str | None, refunds: int) -> None:
    stripe.fail_next(fake_stripe.connection_lost(), times=lost, acted=True)
    for error in [await refusal(refund(stripe, 1500, key)) for _ in range(lost)]:
        assert type(error) is fake_stripe.APIConnectionError
        assert (error.http_status, error.should_retry) == (None, True)
    assert (await refund(stripe, 1500, key)).status == "succeeded"
    assert len(stripe.refunds) == refunds


@pytest.mark.parametrize(("fault", "status", "code"), [
    (fake_stripe.rate_limited(), 429, "rate_limit"),
    (fake_stripe.not_permitted(), 403, None),
    (fake_stripe.connection_lost(), None, None),
])
async def test_what_stops_in_front_of_the_key_store_is_not_stored(
        stripe: FakeStripe, fault: StripeError, status: int | None, code: str | None) -> None:
    stripe.fail_next(fault, times=2)
    for error in [await refusal(refund(stripe, 1500, "k5")) for _ in range(2)]:
        assert (type(error), error.http_status) == (type(fault), status)
        assert (error.error.code, error.code) == (code, None)
    assert len(stripe.refunds) == 0
    assert "Idempotent-Replayed" not in (await refund(stripe, 1500, "k5")).last_response.headers


@pytest.mark.parametrize("acted", [False, True])
async def test_a_500_is_stored_whether_or_not_money_moved(stripe: FakeStripe, acted: bool) -> None:
    stripe.fail_next(fake_stripe.server_error(), acted=acted)
    errors = [await refusal(refund(stripe, 1500, "k6")) for _ in range(2)]
    assert [facts(error) for error in errors] == [(500, "api_error", None, None)] * 2
    assert errors[1].headers["Idempotent-Replayed"] == "true"
    assert len(stripe.refunds) == acted


async def test_metadata_finds_a_refund_whose_answer_was_a_500(stripe: FakeStripe) -> None:
    await refund(stripe, 100, payment_intent=stripe.add_payment(100, "usd"))
    stripe.fail_next(fake_stripe.server_error(), acted=True)
    await refusal(refund(stripe, 1500, reason="duplicate", metadata={"case_id": "c1"}))
    mine = {"payment_intent": next(iter(stripe.payments))}
    [found] = (await stripe.v1.refunds.list_async(mine)).data
    assert (found.amount, found.reason, found.metadata.case_id) == (1500, "duplicate", "c1")


async def test_a_list_takes_no_unknown_filter(stripe: FakeStripe) -> None:
    unknown = await refusal(stripe.v1.refunds.list_async({"colour": "red"}))
    assert (unknown.code, unknown.param) == ("parameter_unknown", "colour")


@pytest.mark.parametrize(("where", "refunds"), [("before", 0), ("after", 1)])
async def test_a_create_can_be_held_before_or_after_it_acts(
        stripe: FakeStripe, where: str, refunds: int) -> None:
    held = stripe.hold_next_create(where)
    running = asyncio.create_task(refund(stripe, 1500))
    await held.wait()
    assert (len(stripe.refunds), running.done()) == (refunds, False)
    stripe.release()
    assert (await running).amount == 1500


async def test_an_answer_that_comes_too_late_is_a_refund(stripe: FakeStripe) -> None:
    stripe.answer_delay_seconds = 0.05
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(refund(stripe, 1500), timeout=0.01)
    assert len(stripe.refunds) == 1
