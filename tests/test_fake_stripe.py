"""What the fake keeps of Stripe's rules: one refund per key, and never more than the charge."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from freezegun import freeze_time

from fake_stripe import (
    APIConnectionError,
    APIError,
    AuthenticationError,
    FakeStripe,
    IdempotencyError,
    InvalidRequestError,
    RateLimitError,
    StripeError,
    connection_lost,
    not_permitted,
    rate_limited,
    server_error,
)

Refund = Callable[..., Coroutine[Any, Any, Any]]
INVALID = "invalid_request_error"
FAILURE = {"failure_reason", "failure_balance_transaction"}


@pytest.fixture
def stripe() -> FakeStripe:
    return FakeStripe()


@pytest.fixture
def payment(stripe: FakeStripe) -> str:
    return stripe.add_payment(5000, "usd")


@pytest.fixture
def refund(stripe: FakeStripe, payment: str) -> Refund:
    """Refund the payment: `await refund(amount, key, **more_params)`."""
    async def create(amount: Any = None, key: str | None = None, **more: Any) -> Any:
        params = {"payment_intent": payment} | ({} if amount is None else {"amount": amount}) | more
        return await stripe.v1.refunds.create_async(params, {"idempotency_key": key})
    return create


async def refusal(call: Coroutine[Any, Any, Any]) -> StripeError:
    with pytest.raises(StripeError) as caught:
        await call
    return caught.value


def facts(error: StripeError) -> tuple[int | None, str, str | None, str | None]:
    return error.http_status, error.error.type, error.error.code, error.error.param


# --- One key, one refund -------------------------------------------------------------------------


async def test_a_refund_names_its_charge_and_its_payment(payment: str, refund: Refund) -> None:
    made = await refund(1500, "k1")
    assert made.id.startswith("re_") and made.charge.startswith("ch_")
    assert (made.amount, made.currency, made.status) == (1500, "usd", "succeeded")
    assert (made.payment_intent, made.reason) == (payment, None)
    assert not hasattr(made, "livemode")


async def test_the_same_key_twice_makes_one_refund(stripe: FakeStripe, refund: Refund) -> None:
    first, again = await refund(1500, "k1"), await refund(1500, "k1")
    assert first.id == again.id
    assert len(stripe.refunds) == 1
    assert stripe.counts()["refunds.create"] == 2


async def test_a_replay_says_so_and_names_the_first_request(refund: Refund) -> None:
    first, again = [(await refund(1500, "k1")).last_response.headers for _ in range(2)]
    assert first["Original-Request"] == first["Request-Id"] == again["Original-Request"]
    assert again["Request-Id"] != first["Request-Id"]
    assert again["Idempotency-Key"] == "k1"
    assert ("Idempotent-Replayed" not in first, again["Idempotent-Replayed"]) == (True, "true")


async def test_a_key_with_other_parameters_is_refused(stripe: FakeStripe, refund: Refund) -> None:
    first = await refund(1500, "k1")
    error = await refusal(refund(700, "k1"))
    assert type(error) is IdempotencyError
    assert facts(error) == (400, "idempotency_error", None, None)
    assert (await refund(1500, "k1")).id == first.id and len(stripe.refunds) == 1


async def test_a_key_at_another_endpoint_is_refused(stripe: FakeStripe, refund: Refund) -> None:
    made = await refund(1500, "k1")
    error = await refusal(stripe.v1.refunds.cancel_async(made.id, {}, {"idempotency_key": "k1"}))
    assert facts(error) == (400, "idempotency_error", None, None)


async def test_a_key_that_is_still_in_use_is_refused_and_later_replayed(
        stripe: FakeStripe, refund: Refund) -> None:
    held = stripe.hold_next_create("before")
    running = asyncio.create_task(refund(1500, "k2"))
    await held.wait()
    error = await refusal(refund(1500, "k2"))
    stripe.release()
    first = await running
    assert type(error) is APIError
    assert facts(error) == (409, INVALID, "idempotency_key_in_use", None)
    assert (await refund(1500, "k2")).id == first.id


@pytest.mark.parametrize(("hours", "refunds"), [(23, 1), (25, 2)])
async def test_a_key_is_forgotten_after_a_day(
        stripe: FakeStripe, refund: Refund, hours: int, refunds: int) -> None:
    with freeze_time() as clock:
        await refund(1500, "k1")
        clock.tick(hours * 3600)
        await refund(1500, "k1")
    assert len(stripe.refunds) == refunds


async def test_a_forgotten_key_still_cannot_refund_more_than_the_charge(refund: Refund) -> None:
    with freeze_time() as clock:
        await refund(3000, "k1")
        clock.tick(25 * 3600)
        error = await refusal(refund(3000, "k1"))
    assert facts(error) == (400, INVALID, None, "amount")


async def test_a_key_has_255_characters_at_most(refund: Refund) -> None:
    assert (await refund(100, "k" * 255)).amount == 100
    assert (await refusal(refund(100, "k" * 256))).http_status == 400


# --- What is refused, and what a key remembers of it ---------------------------------------------


@pytest.mark.parametrize(("params", "code", "param"), [
    ({"amount": 0}, "parameter_invalid_integer", "amount"),
    ({"amount": -5}, "parameter_invalid_integer", "amount"),
    ({"amount": "abc"}, "parameter_invalid_integer", "amount"),
    ({"amount": 1.5}, "parameter_invalid_integer", "amount"),
    ({"amount": True}, "parameter_invalid_integer", "amount"),
    ({"reason": "expired_uncaptured_charge"}, None, "reason"),
    ({"colour": "red"}, "parameter_unknown", "colour"),
])
async def test_a_wrong_parameter_is_refused_and_leaves_the_key_free(
        refund: Refund, params: dict[str, Any], code: str | None, param: str) -> None:
    error = await refusal(refund(key="k", **params))
    assert facts(error) == (400, INVALID, code, param)
    assert (await refund(100, "k")).amount == 100


@pytest.mark.parametrize(("payment_facts", "code", "param"), [
    ({}, None, "amount"),
    ({"refunded": 5000}, "charge_already_refunded", None),
    ({"status": "requires_payment_method"}, None, None),
    ({"status": "requires_confirmation"}, None, None),
])
async def test_a_refusal_by_the_charge_is_stored_and_replayed(
        stripe: FakeStripe, refund: Refund, payment_facts: dict[str, Any], code: str | None,
        param: str | None) -> None:
    other = stripe.add_payment(5000, "usd", **payment_facts)
    errors = [await refusal(refund(5001, "k4", payment_intent=other)) for _ in range(2)]
    assert [facts(error) for error in errors] == [(400, INVALID, code, param)] * 2
    assert ["Idempotent-Replayed" in error.headers for error in errors] == [False, True]


async def test_a_refund_without_a_target_is_refused(stripe: FakeStripe) -> None:
    error = await refusal(stripe.v1.refunds.create_async({"amount": 100}))
    assert facts(error) == (400, INVALID, None, None)


async def test_an_unknown_payment_is_a_missing_resource(refund: Refund) -> None:
    error = await refusal(refund(100, payment_intent="pi_unknown"))
    assert type(error) is InvalidRequestError
    assert error.code == error.error.code == "resource_missing"


@pytest.mark.parametrize("amount", [0, 5001])
async def test_a_refusal_carries_the_id_of_its_request(refund: Refund, amount: int) -> None:
    assert (await refusal(refund(amount, "k"))).request_id


@pytest.mark.parametrize("api_key", [None, "sk_live_secret", "rk_live_secret", "pk_test_secret"])
async def test_only_test_keys_are_accepted_and_none_is_repeated(
        stripe: FakeStripe, refund: Refund, api_key: str | None) -> None:
    stripe.api_key = api_key
    error = await refusal(refund(1500))
    assert type(error) is AuthenticationError
    assert facts(error) == (401, INVALID, None, None)
    assert "secret" not in f"{error} {vars(error)}"


# --- Never more than the charge ------------------------------------------------------------------


async def test_without_an_amount_all_that_is_left_goes_back(refund: Refund) -> None:
    await refund(1500)
    assert (await refund()).amount == 3500


async def test_many_callers_without_a_key_cannot_exceed_the_charge(
        stripe: FakeStripe, refund: Refund) -> None:
    await asyncio.gather(*[refund(2000) for _ in range(4)], return_exceptions=True)
    assert [made["amount"] for made in stripe.refunds.values()] == [2000, 2000]


@pytest.mark.parametrize(("status", "left", "extra_keys"), [
    ("succeeded", 2000, set()),
    ("pending", 2000, {"pending_reason"}),
    ("requires_action", 2000, set()),
    ("failed", 5000, FAILURE),
    ("canceled", 5000, FAILURE),
])
async def test_only_failed_and_canceled_refunds_leave_their_amount(
        stripe: FakeStripe, refund: Refund, status: str, left: int, extra_keys: set[str]) -> None:
    stripe.next_statuses = [status]
    made = await refund(3000)
    assert made.status == status
    assert vars(made).keys() & (FAILURE | {"pending_reason"}) == extra_keys
    assert (await refund()).amount == left


async def test_a_pending_refund_settles_but_its_replay_does_not_show_it(
        stripe: FakeStripe, refund: Refund) -> None:
    stripe.next_statuses = ["pending"]
    made = await refund(1500, "k1")
    stripe.settle(made.id, "succeeded")
    now = await stripe.v1.refunds.retrieve_async(made.id)
    assert now.status == "succeeded" and not hasattr(now, "pending_reason")
    assert (await refund(1500, "k1")).status == "pending"


async def test_a_succeeded_refund_that_fails_later_can_be_made_again(
        stripe: FakeStripe, refund: Refund) -> None:
    made = await refund()
    stripe.settle(made.id, "failed", "lost_or_stolen_card")
    assert stripe.refunds[made.id]["failure_reason"] == "lost_or_stolen_card"
    assert (await refund()).amount == 5000


async def test_only_a_refund_that_was_not_sent_yet_can_be_canceled(
        stripe: FakeStripe, refund: Refund) -> None:
    stripe.next_statuses = ["pending"]
    pending, sent = await refund(100), await refund(100)
    assert (await stripe.v1.refunds.cancel_async(pending.id)).status == "canceled"
    assert facts(await refusal(stripe.v1.refunds.cancel_async(sent.id))) == (400, INVALID) + (None,) * 2


async def test_a_refunded_payment_stays_succeeded_and_its_charge_counts(
        stripe: FakeStripe, payment: str, refund: Refund) -> None:
    await refund(1500)
    found = await stripe.v1.payment_intents.retrieve_async(payment, {"expand": ["latest_charge"]})
    assert (found.status, found.amount_received, found.livemode) == ("succeeded", 5000, False)
    assert (found.latest_charge.amount_refunded, found.latest_charge.refunded) == (1500, False)


# --- Looking instead of asking again -------------------------------------------------------------


async def test_metadata_finds_a_refund_whose_answer_was_a_500(
        stripe: FakeStripe, payment: str, refund: Refund) -> None:
    await refund(100, payment_intent=stripe.add_payment(100, "usd"))
    stripe.fail_next(server_error(), acted=True)
    await refusal(refund(1500, metadata={"case_id": "c1"}, reason="duplicate"))
    [found] = (await stripe.v1.refunds.list_async({"payment_intent": payment})).data
    assert (found.metadata.case_id, found.amount, found.reason) == ("c1", 1500, "duplicate")


async def test_a_list_is_paged_newest_first(stripe: FakeStripe, refund: Refund) -> None:
    made = [(await refund(100)).id for _ in range(3)]
    first = await stripe.v1.refunds.list_async({"limit": 2})
    rest = await stripe.v1.refunds.list_async({"limit": 2, "starting_after": first.data[-1].id})
    assert [found.id for found in first.data + rest.data] == made[::-1]
    assert (first.has_more, rest.has_more) == (True, False)


# --- Faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "refunds"), [("k3", 1), (None, 2)])
async def test_after_a_lost_answer_only_a_key_prevents_a_second_refund(
        stripe: FakeStripe, refund: Refund, key: str | None, refunds: int) -> None:
    stripe.fail_next(connection_lost(), acted=True)
    error = await refusal(refund(1500, key))
    assert type(error) is APIConnectionError
    assert (error.http_status, error.should_retry) == (None, True)
    assert (await refund(1500, key)).status == "succeeded"
    assert len(stripe.refunds) == refunds


@pytest.mark.parametrize("fault", [rate_limited(), not_permitted(), connection_lost()])
async def test_what_never_reached_stripe_leaves_the_key_free(
        stripe: FakeStripe, refund: Refund, fault: StripeError) -> None:
    stripe.fail_next(fault)
    error = await refusal(refund(1500, "k5"))
    assert (type(error), facts(error)) == (type(fault), facts(fault))
    assert len(stripe.refunds) == 0
    assert "Idempotent-Replayed" not in (await refund(1500, "k5")).last_response.headers


async def test_a_rate_limit_shows_its_code_on_the_inner_error_only(
        stripe: FakeStripe, refund: Refund) -> None:
    stripe.fail_next(rate_limited())
    error = await refusal(refund(1500, "k5"))
    assert type(error) is RateLimitError
    assert (error.http_status, error.error.code, error.code) == (429, "rate_limit", None)


@pytest.mark.parametrize("acted", [False, True])
async def test_a_500_is_stored_and_replayed_whether_or_not_money_moved(
        stripe: FakeStripe, refund: Refund, acted: bool) -> None:
    stripe.fail_next(server_error(), acted=acted)
    errors = [await refusal(refund(1500, "k6")) for _ in range(2)]
    assert [facts(error) for error in errors] == [(500, "api_error", None, None)] * 2
    assert errors[1].headers["Idempotent-Replayed"] == "true"
    assert len(stripe.refunds) == acted


@pytest.mark.parametrize("acted", [False, True])
async def test_a_fault_lasts_as_many_calls_as_asked(
        stripe: FakeStripe, refund: Refund, acted: bool) -> None:
    stripe.fail_next(connection_lost(), times=2, acted=acted)
    for _ in range(2):
        assert type(await refusal(refund(1500, "k"))) is APIConnectionError
    assert (await refund(1500, "k")).amount == 1500
    assert len(stripe.refunds) == 1


async def test_a_fault_hits_only_its_endpoint(stripe: FakeStripe, refund: Refund) -> None:
    stripe.fail_next(server_error(), endpoint="refunds.list")
    assert (await refund(1500)).amount == 1500
    assert (await refusal(stripe.v1.refunds.list_async())).http_status == 500


@pytest.mark.parametrize(("where", "refunds"), [("before", 0), ("after", 1)])
async def test_a_create_can_be_held_before_or_after_it_acts(
        stripe: FakeStripe, refund: Refund, where: str, refunds: int) -> None:
    held = stripe.hold_next_create(where)
    running = asyncio.create_task(refund(1500))
    await held.wait()
    assert (len(stripe.refunds), running.done()) == (refunds, False)
    stripe.release()
    assert (await running).amount == 1500


async def test_an_answer_that_comes_too_late_is_a_refund_all_the_same(
        stripe: FakeStripe, refund: Refund) -> None:
    stripe.answer_delay_seconds = 0.05
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(refund(1500, "k"), timeout=0.01)
    assert len(stripe.refunds) == 1
