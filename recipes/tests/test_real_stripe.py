"""The official Stripe SDK, over HTTP, against the stand-in; and the recipe that uses it."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from http_face import Answer, serving
from stripe_http import StripeFace, form
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.exceptions import ApplicationError

import fake_stripe
import harness
import memory_activities
from desk import ROOT, Desk, Quiet, ended, program
from fake_stripe import FakeStripe
from harness import DevServer
from refund_agent import AgreedRefund, Order, RefundActivities, RefundRequest
from run_demo import ShopOrder

stripe = pytest.importorskip(
    "stripe", reason="the Stripe SDK is not installed: pip install -e '.[stripe]'"
)
pytest.importorskip("httpx", reason="httpx is not installed: pip install -e '.[stripe]'")

from recipes import real_stripe  # noqa: E402

# The SDK hands httpx its form in a way that httpx 0.28 still takes, and warns of.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
KEY = "sk_test_canary"
SOLD = ShopOrder("1", "", "cup", 15_00, 50_00, "ada")
REQUEST, ORDER_KEY = RefundRequest("1", "ada", "Please refund it."), "refund:1:1"
RECIPE = ROOT / "recipes" / "real_stripe.py"


@dataclass
class Real:
    """The account, and the real SDK's client of it. One payment of 50.00, for an order of 15.00."""

    face: StripeFace
    world: Quiet
    client: Any

    @property
    def fake(self) -> FakeStripe:
        return self.face.fake

    @property
    def intent(self) -> str:
        return self.world.shop.orders["1", 1].payment_intent

    @property
    def charge(self) -> dict[str, Any]:
        return self.fake.charges[self.fake.payments[self.intent]["latest_charge"]]

    @property
    def steps(self) -> RefundActivities:
        return RefundActivities(self.client, self.world.shop, self.world.decide)

    @property
    def agreed(self) -> AgreedRefund:
        sold = self.world.shop.orders["1", 1]
        terms = (sold.item, sold.price, sold.currency, sold.payment_intent)
        return AgreedRefund(REQUEST, Order(*terms, sold.purchased_at, captured=50_00), 15_00)

    async def refund(self, amount: Any = None, key: str | None = None, **more: Any) -> Any:
        params = {"payment_intent": self.intent, "amount": amount} | more
        return await self.client.v1.refunds.create_async(params, {"idempotency_key": key})


@pytest_asyncio.fixture(scope="module")
async def face() -> AsyncIterator[StripeFace]:
    async with serving(StripeFace(FakeStripe())) as face:
        yield face


@pytest.fixture
def real(face: StripeFace) -> Real:
    world = Quiet("1")
    world.stripe = FakeStripe()  # without the demo's payments and refunds
    world.add(SOLD)
    face.fake, face.requests, face.script = world.stripe, [], []
    return Real(face, world, connected(face))


def connected(face: StripeFace) -> Any:
    return real_stripe.stripe_client({"STRIPE_API_KEY": KEY, "STRIPE_API_BASE": face.url})


def passed() -> asyncio.Event:
    """In a script: let the fake answer."""
    event = asyncio.Event()
    event.set()
    return event


async def refusal(call: Awaitable[Any]) -> Any:
    with pytest.raises(stripe.StripeError) as caught:
        await call
    return caught.value


Facts = tuple[str, int | None, str | None, str | None, str | None]


def facts(error: Any) -> Facts:
    """The SDK's class, and what the answer said."""
    said = error.error.to_dict() if error.error else {}
    return (
        type(error).__name__,
        error.http_status,
        said.get("type"),
        said.get("code"),
        said.get("param"),
    )


def invalid(code: str | None = None, param: str | None = None) -> Facts:
    return "InvalidRequestError", 400, "invalid_request_error", code, param


MISMATCH = ("IdempotencyError", 400, "idempotency_error", None, None)
IN_USE = ("APIError", 409, "invalid_request_error", "idempotency_key_in_use", None)
LOST = ("APIConnectionError", None, None, None, None)

# --- The conformance pairs, in their order -------------------------------------------------------


async def test_01_a_refund_names_its_charge_and_its_payment(real: Real) -> None:
    made = await real.refund(1500, "k1")
    assert (made.id[:3], made.status, made.amount) == ("re_", "succeeded", 1500)
    assert (made.charge, made.payment_intent) == (real.charge["id"], real.intent)


async def test_02_the_same_key_is_answered_with_the_same_refund(real: Real) -> None:
    first, again = [await real.refund(1500, "k1") for _ in range(2)]
    assert (again.id, len(real.fake.refunds)) == (first.id, 1)


async def test_03_05_a_key_is_bound_to_its_parameters(real: Real) -> None:
    first = await real.refund(1500, "k1")
    error = await refusal(real.refund(700, "k1"))
    assert facts(error) == MISMATCH and error.code is None
    again = await real.refund(1500, "k1")
    assert (again.id, len(real.fake.refunds)) == (first.id, 1)


async def test_06_07_a_key_in_use_is_refused_and_replayed_afterwards(real: Real) -> None:
    held = real.fake.hold_next_create("before")
    running = asyncio.create_task(real.refund(1500, "k2"))
    await held.wait()
    error = await refusal(real.refund(1500, "k2"))
    real.fake.release()
    first = await running
    assert facts(error) == IN_USE and error.code is None
    assert (await real.refund(1500, "k2")).id == first.id


@pytest.mark.parametrize(("key", "refunds"), [("k3", 1), (None, 2)])
async def test_08_09_after_a_lost_answer_only_a_key_prevents_a_second_refund(
    real: Real, key: str | None, refunds: int
) -> None:
    real.fake.fail_next(fake_stripe.connection_lost(), acted=True)
    error = await refusal(real.refund(1500, key))
    assert facts(error) == LOST and error.should_retry
    await real.refund(1500, key)
    assert len(real.fake.refunds) == refunds


async def test_10_without_an_amount_all_that_is_left_is_refunded(real: Real) -> None:
    await real.refund(1500)
    assert (await real.refund()).amount == 3500


async def test_11_more_than_is_left_is_refused(real: Real) -> None:
    assert facts(await refusal(real.refund(5001, "k4"))) == invalid(param="amount")


async def test_13_a_charge_that_is_fully_refunded_says_so(real: Real) -> None:
    await real.refund()
    for amount in (None, 1, 9999):
        error = await refusal(real.refund(amount))
        assert facts(error) == invalid("charge_already_refunded")
        assert error.code == "charge_already_refunded"


async def test_14_an_unknown_payment_is_a_missing_resource(real: Real) -> None:
    read = real.client.v1.payment_intents.retrieve_async("pi_unknown")
    for call in (real.refund(100, payment_intent="pi_unknown"), read):
        error = await refusal(call)
        assert (type(error), error.code) == (stripe.InvalidRequestError, "resource_missing")


@pytest.mark.parametrize("amount", [0, -5, "abc", 1.5, True])
async def test_15_16_17_18_an_amount_that_is_none_is_refused_and_leaves_the_key_free(
    real: Real, amount: Any
) -> None:
    error = await refusal(real.refund(amount, "k"))
    assert facts(error) == invalid("parameter_invalid_integer", "amount")
    assert (await real.refund(100, "k")).amount == 100


async def test_19_a_payment_that_is_not_paid_has_nothing_to_refund(real: Real) -> None:
    unpaid = real.fake.add_payment(5000, "usd", status="requires_payment_method")
    assert facts(await refusal(real.refund(100, payment_intent=unpaid))) == invalid()


async def test_21_no_key_is_never_sent_and_a_live_one_is_refused(real: Real) -> None:
    with pytest.raises(stripe.AuthenticationError):
        stripe.StripeClient(None)
    options = {"http_client": stripe.HTTPXClient(), "base_addresses": {"api": real.face.url}}
    real.client = stripe.StripeClient("sk_live_secret", **options)
    error = await refusal(real.refund(100))
    assert facts(error) == ("AuthenticationError", 401, "invalid_request_error", None, None)
    assert "secret" not in f"{error} {error.json_body}" and len(real.face.requests) == 1


async def test_22_a_rate_limit_is_not_stored(real: Real) -> None:
    real.fake.fail_next(fake_stripe.rate_limited())
    error = await refusal(real.refund(1500, "k5"))
    assert facts(error) == ("RateLimitError", 429, "invalid_request_error", "rate_limit", None)
    assert error.code is None
    assert (await real.refund(1500, "k5")).status == "succeeded"


@pytest.mark.parametrize("acted", [False, True])
async def test_23_a_500_is_stored_whether_or_not_money_moved(real: Real, acted: bool) -> None:
    real.fake.fail_next(fake_stripe.server_error(), acted=acted)
    errors = [await refusal(real.refund(1500, "k6")) for _ in range(2)]
    assert [facts(error) for error in errors] == [("APIError", 500, "api_error", None, None)] * 2
    assert len(real.fake.refunds) == acted


async def test_24_a_key_has_255_characters_at_most(real: Real) -> None:
    assert (await real.refund(100, "k" * 255)).amount == 100
    assert (await refusal(real.refund(100, "k" * 256))).http_status == 400


async def test_25_a_refunded_payment_stays_succeeded_and_lists_its_refund(real: Real) -> None:
    await real.refund(1500, metadata={"order_line": "1:1"})
    other = real.fake.add_payment(100, "usd", refunded=100)
    v1, query = real.client.v1, {"expand": ["latest_charge"]}
    payment = await v1.payment_intents.retrieve_async(real.intent, query)
    charge = payment.latest_charge
    assert (payment.status, charge.amount_refunded, charge.refunded) == ("succeeded", 1500, False)
    (found,) = (await v1.refunds.list_async({"payment_intent": real.intent})).data
    assert (found.metadata.order_line, other != real.intent) == ("1:1", True)
    assert "livemode" not in found.to_dict()


# --- On the wire ---------------------------------------------------------------------------------


async def test_a_request_is_a_form_with_the_key_of_the_order_line(real: Real) -> None:
    await real.steps.issue_refund(real.agreed)
    look, refund = real.face.requests
    assert (look.method, form(look)) == ("GET", f"payment_intent={real.intent}&limit=100")
    sent = f"payment_intent={real.intent}&amount=1500&metadata[order_line]=1%3A1"
    assert (refund.method, refund.path, form(refund)) == ("POST", "/v1/refunds", sent)
    assert refund.headers["idempotency-key"] == ORDER_KEY
    assert refund.headers["authorization"] == f"Bearer {KEY}"


async def test_a_refusal_carries_the_id_of_its_request(real: Real) -> None:
    for amount in (5001, 0):
        error = await refusal(real.refund(amount, "k"))
        assert error.request_id and error.headers["Idempotency-Key"] == "k"


# --- Failures ------------------------------------------------------------------------------------


def says(status: int, body: bytes = b"<html>secret</html>") -> Answer:
    return Answer(status, body)


def error(status: int, code: str | None = None) -> fake_stripe.StripeError:
    return fake_stripe.StripeError("secret text", status, "invalid_request_error", code)


SAID = [  # by Stripe, or by a proxy; the code that colleagues read, and whether it is final
    (fake_stripe.connection_lost(), "no usable answer", False),
    (fake_stripe.rate_limited(), "rate_limit", False),
    (error(409), "409", False),
    (error(408), "408", False),
    (fake_stripe.server_error(), "500", False),
    (says(503), "503", False),
    (says(200), "200", False),
    (error(401), "401", False),
    (fake_stripe.not_permitted(), "403", False),
    (error(400), "400", True),
    (error(402, "card_declined"), "card_declined", True),
    (says(404), "404", True),
]


async def failing(real: Real) -> tuple[str, bool]:
    """The code in the failure, and whether it is final. It repeats nothing that was said."""
    with pytest.raises(ApplicationError) as caught:
        await real.steps.issue_refund(real.agreed)
    assert "secret" not in str(caught.value) and KEY not in str(caught.value)
    assert caught.value.__cause__ is None
    start = f"Stripe, {real.intent}: "
    assert caught.value.message.startswith(start)
    return caught.value.message.removeprefix(start), caught.value.non_retryable


@pytest.mark.parametrize(("said", "code", "final"), SAID)
async def test_an_answer_means_the_same_by_way_of_the_sdk(
    real: Real, said: fake_stripe.StripeError | Answer, code: str, final: bool
) -> None:
    if isinstance(said, Answer):
        real.face.script = [passed(), said]
    else:
        real.fake.fail_next(said)
    assert await failing(real) == (code, final)
    assert not real.fake.refunds


async def test_a_disputed_charge_is_final(real: Real) -> None:
    real.charge["disputed"] = True
    assert await failing(real) == ("charge_disputed", True)


async def test_two_workers_at_once_make_one_refund(real: Real) -> None:
    held = real.fake.hold_next_create("before")
    first = asyncio.ensure_future(real.steps.issue_refund(real.agreed))
    await held.wait()
    assert await failing(real) == ("idempotency_key_in_use", False)
    real.fake.release()
    assert await real.steps.issue_refund(real.agreed) == await first
    assert len(real.fake.refunds) == 1


async def test_a_key_that_named_a_refund_of_another_payment_is_final(real: Real) -> None:
    await real.refund(700, ORDER_KEY, payment_intent=real.fake.add_payment(5000, "usd"))
    assert await failing(real) == ("400", True)


# --- One refund ----------------------------------------------------------------------------------


def keys(real: Real) -> list[str]:
    """Of all requests for a refund."""
    return [
        sent.headers["idempotency-key"]
        for sent in real.face.requests
        if (sent.method, sent.path) == ("POST", "/v1/refunds")
    ]


@pytest.mark.parametrize(("acted", "requests"), [(False, 2), (True, 1)])
async def test_after_a_lost_answer_the_next_attempt_looks_and_then_asks_with_the_same_key(
    real: Real, acted: bool, requests: int
) -> None:
    real.fake.fail_next(fake_stripe.connection_lost(), acted=acted)
    assert await failing(real) == ("no usable answer", False)
    refund = await real.steps.issue_refund(real.agreed)
    assert refund and refund.status == "succeeded"
    assert keys(real) == [ORDER_KEY] * requests
    assert len(real.fake.refunds) == 1


async def test_an_answer_that_comes_too_late_is_found_by_the_next_attempt(
    real: Real, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_activities, "client_timeout", lambda: 0.2)
    real.fake.hold_next_create("after")
    assert await failing(real) == ("no usable answer", False)
    assert await real.steps.issue_refund(real.agreed)
    real.fake.release()
    assert (len(keys(real)), len(real.fake.refunds)) == (1, 1)


async def test_an_open_refund_is_looked_at_by_its_id(real: Real) -> None:
    real.fake.next_statuses = ["pending"]
    made = await real.steps.issue_refund(real.agreed)
    assert made and made.status == "pending"
    real.fake.settle(made.id, "succeeded")
    seen = await real.steps.issue_refund(AgreedRefund(REQUEST, refund_id=made.id))
    assert seen and (seen.id, seen.status, len(keys(real))) == (made.id, "succeeded", 1)


async def test_a_case_loses_a_request_and_then_an_answer_and_refunds_once(
    desk: Desk, real: Real
) -> None:
    real.face.fake, desk.world.stripe = desk.world.stripe, real.client
    for acted in (False, True):
        real.fake.fail_next(fake_stripe.connection_lost(), acted=acted)
    result = await desk.run()
    assert result.outcome == "refund succeeded" and result.refund is not None
    made = real.fake.refunds[result.refund.id]
    assert (made["amount"], made["id"]) == (80_00, list(real.fake.refunds)[-1])
    assert len(keys(real)) == 2 and len(set(keys(real))) == 1


# --- The recipe ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        "",
        "sk_live_secret",
        "rk_live_secret",
        "pk_test_secret",
        "sk_test_",
        "sk_test_secret ",
        "sk_test_secret\n",
        "sk_test_sec ret",
        " sk_test_secret",
        "secret",
    ],
)
def test_whatever_is_no_test_key_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(harness.HarnessError) as caught:
        real_stripe.stripe_client({"STRIPE_API_KEY": key})
    assert "secret" not in str(caught.value) and "sk_test_..." in str(caught.value)


def test_a_restricted_test_key_is_taken() -> None:
    assert real_stripe.stripe_client({"STRIPE_API_KEY": "rk_test_1"})


async def cleaned(real: Real) -> list[tuple[Any, int]]:
    return [
        (refund.payment_intent, refund.amount) async for refund in real_stripe.clean_up(real.client)
    ]


async def test_cleaning_up_refunds_what_is_left_of_our_payments_and_nothing_else(
    real: Real,
) -> None:
    whole, part, done = [await real_stripe.pay(real.client, f"order-{n}") for n in range(3)]
    for _ in range(100):  # so that ours are on the second page
        real.fake.add_payment(5000, "usd")
    await real.refund(8000, payment_intent=part)
    await real.refund(payment_intent=done)
    other = real.fake.payments[real.fake.add_payment(5000, "usd")]
    other["metadata"] = {"made_by": "somebody else"}
    declined = real.fake.add_payment(5000, "usd", status="requires_payment_method")
    real.fake.payments[declined]["metadata"] = {"made_by": real_stripe.MADE_BY}
    assert await cleaned(real) == [(part, 12000), (whole, 20000)]
    assert await cleaned(real) == []


async def test_a_payment_that_is_asked_for_twice_is_made_once(real: Real) -> None:
    first, again = [await real_stripe.pay(real.client, "order-1") for _ in range(2)]
    assert first == again and real.fake.payments[first]["amount"] == 200_00


@pytest_asyncio.fixture
async def temporal(server: DevServer) -> Client:
    """A server that is up: the recipe does not wait for one that the environment names."""
    return await server.client()


@pytest.fixture
def environment(real: Real, mark: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRIPE_API_KEY", KEY)
    monkeypatch.setenv("STRIPE_API_BASE", real.face.url)


async def test_the_recipe_kills_its_worker_before_the_refund_and_refunds_once(
    environment: None, real: Real, server: DevServer, temporal: Client, tmp_path: Path
) -> None:
    files = {"XDG_CONFIG_HOME": str(tmp_path), "TEMPORAL_ADDRESS": await server.address()}
    code, out, err = await ended(RECIPE, env=files)
    assert (code, err) == (0, "") and KEY not in out and "NOT OBSERVED" not in out
    (refund,) = real.fake.refunds.values()
    payment = real.fake.payments[refund["payment_intent"]]
    assert (refund["amount"], payment["amount"], len(keys(real))) == (80_00, 200_00, 1)
    assert refund["id"] in out and not list(tmp_path.iterdir())
    case = temporal.get_workflow_handle(payment["metadata"]["order_id"])
    history = [
        event.activity_task_started_event_attributes async for event in case.fetch_history_events()
    ]
    tries = [each for each in history if each.attempt]
    retried = [each for each in tries if each.attempt > 1]
    assert len(retried) == 1  # the refund, which a Worker that is dead had begun
    assert retried[0].last_failure.HasField("timeout_failure_info")
    assert f"SIGKILL to process {tries[0].identity.split('@')[0]}:" in out
    assert retried[0].identity != tries[0].identity


async def test_a_live_key_is_one_line_and_no_request(environment: None, real: Real) -> None:
    code, out, err = await ended(RECIPE, env={"STRIPE_API_KEY": "sk_live_secret"})
    assert (code, out, err.count("\n"), real.face.requests) == (1, "", 1, [])
    assert "STRIPE_API_KEY is not a test-mode key" in err and "secret" not in err


async def test_missing_packages_are_one_line(environment: None) -> None:
    code, out, err = await ended("-I", "-S", RECIPE)
    assert (code, out, err.count("\n")) == (1, "", 1) and "pip install -e '.[stripe]'" in err


async def test_what_was_cleaned_up_is_told_and_then_what_stripe_refused(
    real: Real, environment: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for order_id in ("order-1", "order-2"):
        await real_stripe.pay(real.client, order_id)
    refused = says(401, b'{"error": {"message": "secret"}}')
    real.face.script = [passed(), passed(), refused]
    with pytest.raises(harness.HarnessError, match="Stripe: 401") as caught:
        await real_stripe.main(clean=True)
    assert "secret" not in str(caught.value)
    (refund,) = real.fake.refunds
    assert f"refund {refund} of 200.00 USD: succeeded" in capsys.readouterr().out
    assert await real_stripe.main(clean=True) == 0 and len(real.fake.refunds) == 2


@pytest.mark.parametrize(
    ("signum", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)],
)
async def test_whatever_cuts_it_short_it_leaves_a_payment_and_no_process(
    environment: None,
    real: Real,
    server: DevServer,
    temporal: Client,
    signum: signal.Signals,
    code: int,
) -> None:
    real.face.script = [passed(), asyncio.Event()]
    async with program(RECIPE, env={"TEMPORAL_ADDRESS": await server.address()}) as process:
        run = asyncio.create_task(process.communicate())
        while len(real.face.requests) < 2:  # then it waits for the answer to its lookup
            assert not run.done(), await run
            await asyncio.sleep(0.02)
        process.send_signal(signum)
        out, err = [printed.decode() for printed in await run]
    assert process.returncode == code and "Traceback" not in err
    *_, paid = real.fake.payments
    order_id = real.fake.payments[paid]["metadata"]["order_id"]
    assert paid in out and not real.fake.refunds and await cleaned(real) == [(paid, 200_00)]
    case = await temporal.get_workflow_handle(order_id).describe()
    killed = signum == signal.SIGKILL
    assert (case.status == WorkflowExecutionStatus.TERMINATED) != killed


async def test_the_recipe_cleans_up(environment: None, real: Real) -> None:
    paid = await real_stripe.pay(real.client, "order-1")
    code, out, err = await ended(RECIPE, "--clean-up")
    (refund,) = real.fake.refunds.values()
    assert (code, err, refund["payment_intent"]) == (0, "", paid) and refund["id"] in out
