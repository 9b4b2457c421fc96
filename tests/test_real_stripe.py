"""The official Stripe SDK, over HTTP, against the stand-in; and the recipe that uses it."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import test_demo
from conftest import Desk
from http_face import Answer, serving
from stripe_http import StripeFace, form
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.exceptions import ApplicationError
from test_issue_refund import Blind

import fake_stripe
import harness
import refund_agent
from fake_stripe import FakeStripe
from harness import Server
from refund_agent import Money, RefundActivities, RefundOrder

stripe = pytest.importorskip(
    "stripe", reason="the Stripe SDK is not installed: pip install -e '.[stripe]'")
pytest.importorskip("httpx", reason="httpx is not installed: pip install -e '.[stripe]'")

from recipes import real_stripe  # noqa: E402

# The SDK hands httpx its form in a way that httpx 0.28 still takes, and warns of.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
KEY = "sk_test_canary"
LATER = 2**40  # a time to give up that never comes
mark = test_demo.mark


@dataclass
class Real:
    """The account, and the real SDK's client of it. One payment, pi_A: 50.00."""

    face: StripeFace
    client: Any
    intent: str

    @property
    def fake(self) -> FakeStripe:
        return self.face.fake

    @property
    def charge(self) -> dict[str, Any]:
        return self.fake.charges[self.fake.payments[self.intent]["latest_charge"]]

    async def refund(self, amount: Any = None, key: str | None = None, **more: Any) -> Any:
        params = {"payment_intent": self.intent, "amount": amount} | more
        return await self.client.v1.refunds.create_async(params, {"idempotency_key": key})


@pytest_asyncio.fixture(scope="module")
async def face() -> AsyncIterator[StripeFace]:
    async with serving(StripeFace(FakeStripe())) as face:
        yield face


@pytest.fixture
def real(face: StripeFace) -> Real:
    face.fake, face.requests, face.script = FakeStripe(), [], []
    return Real(face, connected(face), face.fake.add_payment(5000, "usd"))


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
    return (type(error).__name__, error.http_status,
            said.get("type"), said.get("code"), said.get("param"))


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
        real: Real, key: str | None, refunds: int) -> None:
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
        real: Real, amount: Any) -> None:
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
    await real.refund(1500, metadata={"case_id": "c1"})
    other = real.fake.add_payment(100, "usd", refunded=100)
    v1, query = real.client.v1, {"expand": ["latest_charge"]}
    payment = await v1.payment_intents.retrieve_async(real.intent, query)
    charge = payment.latest_charge
    assert (payment.status, charge.amount_refunded, charge.refunded) == ("succeeded", 1500, False)
    (found,) = (await v1.refunds.list_async({"payment_intent": real.intent})).data
    assert (found.metadata.case_id, other != real.intent) == ("c1", True)
    assert "livemode" not in found.to_dict()


# --- On the wire ---------------------------------------------------------------------------------


async def test_a_request_is_a_form_with_the_key_of_the_case(real: Real) -> None:
    await steps(real).issue_refund(order(real))
    look, refund = real.face.requests
    assert (look.method, form(look)) == ("GET", f"payment_intent={real.intent}&limit=100")
    sent = f"payment_intent={real.intent}&amount=1500&metadata[case_id]=case-1"
    assert (refund.method, refund.path, form(refund)) == ("POST", "/v1/refunds", sent)
    assert refund.headers["idempotency-key"] == "refund:run-1"
    assert refund.headers["authorization"] == f"Bearer {KEY}"


async def test_a_refusal_carries_the_id_of_its_request(real: Real) -> None:
    for amount in (5001, 0):
        error = await refusal(real.refund(amount, "k"))
        assert error.request_id and error.headers["Idempotency-Key"] == "k"


async def test_the_sdk_does_not_retry(real: Real) -> None:
    real.fake.fail_next(fake_stripe.connection_lost())
    await refusal(real.refund(100))
    assert len(real.face.requests) == 1


def test_two_requests_that_hang_end_within_one_attempt() -> None:
    one = real_stripe.REQUEST_TIMEOUT
    assert one.connect and one.read
    assert 2 * (one.connect + one.read) < refund_agent.STEP_TIMEOUT.total_seconds()


# --- The failure table ---------------------------------------------------------------------------


def steps(real: Real) -> RefundActivities:
    return RefundActivities(stripe=real.client, shop=None, decider=None)  # type: ignore[arg-type]


def order(real: Real, **changes: Any) -> RefundOrder:
    first = RefundOrder("case-1", "refund:run-1", real.intent, Money(1500, "usd"), LATER)
    return replace(first, **changes)


def says(status: int, body: bytes = b"<html>secret</html>", **headers: str) -> Answer:
    return Answer(status, body, headers)


def error(status: int, code: str | None = None) -> fake_stripe.StripeError:
    return fake_stripe.StripeError("secret text", status, "invalid_request_error", code)


def told_to_retry(status: int, error: bytes) -> Answer:
    return says(status, b'{"error": %s}' % error, **{"Stripe-Should-Retry": "true"})


SAID = [  # by Stripe, or by what is in between
    (fake_stripe.connection_lost(), "StripeUnreachable", True),
    (fake_stripe.rate_limited(), "StripeRateLimited", True),
    (error(429), "StripeRateLimited", True),
    (told_to_retry(429, b'{"code": "lock_timeout"}'), "StripeRateLimited", True),
    (error(409), "StripeConflict", True),
    (error(408), "StripeUnreachable", True),
    (fake_stripe.server_error(), "StripeServerError", True),
    (says(503), "StripeServerError", True),
    (says(200), "StripeUnreadable", True),
    (error(400), "StripeRefused", False),
    (error(402, "card_declined"), "StripeRefused", False),
    (told_to_retry(400, b'{"type": "invalid_request_error"}'), "StripeRefused", True),
    (says(404), "StripeRefused", False),
    (error(401), "StripeAuthFailed", False),
    (fake_stripe.not_permitted(), "StripeNotPermitted", False),
]


async def failing(real: Real, wanted: RefundOrder | None = None) -> tuple[str | None, bool]:
    """The type of the failure, and whether it is retried. It repeats nothing that was said."""
    with pytest.raises(ApplicationError) as caught:
        await steps(real).issue_refund(wanted or order(real))
    assert "secret" not in str(caught.value) and KEY not in str(caught.value)
    assert caught.value.__cause__ is None
    return caught.value.type, not caught.value.non_retryable


@pytest.mark.parametrize(("said", "type", "retried"), SAID)
@pytest.mark.parametrize("endpoint", ["refunds.list", "refunds.create"])
async def test_what_is_said_has_the_same_row_by_way_of_the_sdk(
    real: Real, said: fake_stripe.StripeError | Answer, type: str, retried: bool, endpoint: str
) -> None:
    if isinstance(said, Answer):
        real.face.script = [said] if endpoint == "refunds.list" else [passed(), said]
    else:
        real.fake.fail_next(said, endpoint=endpoint)
    assert await failing(real) == (type, retried)
    assert not real.fake.refunds


def refunded(real: Real) -> None:
    real.intent = real.fake.add_payment(5000, "usd", refunded=5000)


def disputed(real: Real) -> None:
    real.charge["disputed"] = True


def unreadable(real: Real) -> None:
    body = b'{"id": "re_1", "object": "refund", "amount": 15.5, "status": "succeeded"}'
    real.face.script = [passed(), says(200, body)]


def never_answered(real: Real) -> None:
    real.face.script = [passed(), asyncio.Event()]


STATES = [  # of the payment, the request or the network
    (refunded, {}, "StripeAlreadyRefunded", False),
    (disputed, {}, "StripeChargeDisputed", False),
    (unreadable, {}, "StripeUnreadable", True),
    (never_answered, {}, "StripeUnreachable", True),
    (None, {"payment_intent": "pi_unknown"}, "StripeNotFound", False),
    (None, {"money": Money(5001, "usd")}, "StripeRefused", False),
    (None, {"case_id": "\ud800"}, "StripeNotAsked", False),  # no request can hold this
]


@pytest.mark.parametrize(("state", "changes", "type", "retried"), STATES)
async def test_every_state_has_its_row_by_way_of_the_sdk(
    real: Real, state: Callable[[Real], None] | None, changes: dict[str, Any], type: str,
    retried: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(real_stripe, "REQUEST_TIMEOUT", 0.2)
    real.client = connected(real.face)
    if state is not None:
        state(real)
    async with asyncio.timeout(refund_agent.STEP_TIMEOUT.total_seconds()):
        assert await failing(real, order(real, **changes)) == (type, retried)


async def test_two_workers_at_once_make_one_refund(real: Real) -> None:
    held = real.fake.hold_next_create("before")
    first = asyncio.ensure_future(steps(real).issue_refund(order(real)))
    await held.wait()
    assert await failing(real) == ("StripeKeyInUse", True)
    real.fake.release()
    assert await steps(real).issue_refund(order(real)) == await first
    assert len(real.fake.refunds) == 1


async def test_a_key_that_named_another_refund_is_final(real: Real) -> None:
    await real.refund(700, order(real).idempotency_key)
    assert await failing(real) == ("StripeKeyReused", False)


def test_no_row_is_left_out() -> None:
    tested = {row[-2] for row in [*SAID, *STATES]} | {"StripeKeyInUse", "StripeKeyReused"}
    assert {row.type for row in refund_agent.STRIPE_FAILURES.values()} == tested


# --- One refund ----------------------------------------------------------------------------------


def keys(real: Real) -> list[str]:
    """Of all requests for a refund."""
    return [sent.headers["idempotency-key"] for sent in real.face.requests
            if (sent.method, sent.path) == ("POST", "/v1/refunds")]


@pytest.mark.parametrize(("acted", "requests"), [(False, 2), (True, 1)])
async def test_after_a_lost_answer_the_next_try_looks_and_then_asks_with_the_same_key(
        real: Real, acted: bool, requests: int) -> None:
    real.fake.fail_next(fake_stripe.connection_lost(), acted=acted)
    assert await failing(real) == ("StripeUnreachable", True)
    assert (await steps(real).issue_refund(order(real))).status == "succeeded"
    assert keys(real) == [order(real).idempotency_key] * requests
    assert len(real.fake.refunds) == 1


async def test_the_key_alone_makes_it_one_refund(real: Real) -> None:
    real.fake.fail_next(fake_stripe.connection_lost(), acted=True)
    blind = RefundActivities(stripe=Blind(real.client), shop=None, decider=None)  # type: ignore[arg-type]
    with pytest.raises(ApplicationError):
        await blind.issue_refund(order(real))
    await blind.issue_refund(order(real))
    assert (len(keys(real)), len(set(keys(real))), len(real.fake.refunds)) == (2, 1, 1)


async def test_an_answer_that_comes_too_late_is_found_by_the_next_try(
    real: Real, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real_stripe, "REQUEST_TIMEOUT", 0.2)
    real.client = connected(real.face)
    real.fake.hold_next_create("after")
    assert await failing(real) == ("StripeUnreachable", True)
    assert (await steps(real).issue_refund(order(real))).status == "succeeded"
    real.fake.release()
    assert (len(keys(real)), len(real.fake.refunds)) == (1, 1)


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


@pytest.mark.parametrize("key", [
    "", "sk_live_secret", "rk_live_secret", "pk_test_secret", "sk_test_", "sk_test_secret ",
    "sk_test_secret\n", "sk_test_sec ret", " sk_test_secret", "secret"])
def test_whatever_is_no_test_key_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(refund_agent.Refused) as caught:
        real_stripe.stripe_client({"STRIPE_API_KEY": key})
    assert "secret" not in str(caught.value) and "sk_test_..." in str(caught.value)


def test_a_restricted_test_key_is_taken() -> None:
    assert real_stripe.stripe_client({"STRIPE_API_KEY": "rk_test_1"})


async def cleaned(real: Real) -> list[tuple[Any, int]]:
    return [(refund.payment_intent, refund.amount)
            async for refund in real_stripe.clean_up(real.client)]


async def test_cleaning_up_refunds_what_is_left_of_our_payments_and_nothing_else(
    real: Real, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refund_agent, "STRIPE_PAGE", 2)
    whole, part, done = [await real_stripe.pay(real.client, f"case-{n}") for n in range(3)]
    await real.refund(8000, payment_intent=part)
    await real.refund(payment_intent=done)
    other = real.fake.payments[real.fake.add_payment(5000, "usd")]
    other["metadata"] = {"made_by": "somebody else"}
    declined = real.fake.add_payment(5000, "usd", status="requires_payment_method")
    real.fake.payments[declined]["metadata"] = {"made_by": real_stripe.MADE_BY}
    assert await cleaned(real) == [(part, 12000), (whole, 20000)]
    assert await cleaned(real) == []


async def test_a_payment_that_is_asked_for_twice_is_made_once(real: Real) -> None:
    first, again = [await real_stripe.pay(real.client, "case-1") for _ in range(2)]
    assert first == again and real.fake.payments[first]["amount"] == 200_00


@pytest_asyncio.fixture
async def temporal(server: Server) -> Client:
    """A server that is up: the recipe does not wait for one that the environment names."""
    return await server.client()


@asynccontextmanager
async def recipe(
    mark: str, face: StripeFace, *arguments: str, key: str = KEY, python: Sequence[str] = (),
    **environment: str,
) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, *python, real_stripe.__file__, *arguments, cwd="/",
        env={**os.environ, test_demo.MARK: mark, "STRIPE_API_KEY": key, "STRIPE_API_BASE": face.url,
             **environment},
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def finished(process: asyncio.subprocess.Process) -> tuple[int | None, str, str]:
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


@pytest.mark.everywhere
async def test_the_recipe_kills_its_worker_before_the_refund_and_refunds_once(
    mark: str, real: Real, server: Server, temporal: Client, tmp_path: Path
) -> None:
    files = {"XDG_CONFIG_HOME": str(tmp_path), "TEMPORAL_ADDRESS": str(server.address)}
    async with recipe(mark, real.face, **files) as process:
        code, out, err = await finished(process)
    assert (code, err) == (0, "") and KEY not in out and "NOT OBSERVED" not in out
    (refund,) = real.fake.refunds.values()
    payment = real.fake.payments[refund["payment_intent"]]
    assert (refund["amount"], payment["amount"], len(keys(real))) == (80_00, 200_00, 1)
    assert refund["id"] in out and not list(tmp_path.iterdir())
    case = temporal.get_workflow_handle(payment["metadata"]["case_id"])
    history = [event.activity_task_started_event_attributes
               async for event in case.fetch_history_events()]
    tries = [each for each in history if each.attempt]
    retried = [each for each in tries if each.attempt > 1]
    assert len(retried) == 1  # the refund, which a Worker that is dead had begun
    assert retried[0].last_failure.HasField("timeout_failure_info")
    assert f"SIGKILL to process {tries[0].identity.split('@')[0]}:" in out
    assert retried[0].identity != tries[0].identity


async def test_a_live_key_is_one_line_and_no_request(mark: str, real: Real) -> None:
    async with recipe(mark, real.face, key="sk_live_secret") as process:
        code, out, err = await finished(process)
    assert (code, out, err.count("\n"), real.face.requests) == (1, "", 1, [])
    assert "STRIPE_API_KEY is not a test-mode key" in err and "secret" not in err


async def test_missing_packages_are_one_line(mark: str, real: Real) -> None:
    async with recipe(mark, real.face, python=("-I", "-S")) as process:
        code, out, err = await finished(process)
    assert (code, out, err.count("\n")) == (1, "", 1) and "pip install -e '.[stripe]'" in err


@pytest.fixture
def environment(real: Real, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRIPE_API_KEY", KEY)
    monkeypatch.setenv("STRIPE_API_BASE", real.face.url)


async def test_a_missing_key_is_refused_before_anything_is_started(
    real: Real, environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STRIPE_API_KEY")
    for clean in (False, True):
        with pytest.raises(refund_agent.Refused, match="is not set"):
            await real_stripe.main(clean)
    assert real.face.requests == []


async def test_what_was_cleaned_up_is_told_and_then_what_stripe_refused(
    real: Real, environment: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for case_id in ("case-1", "case-2"):
        await real_stripe.pay(real.client, case_id)
    refused = says(401, b'{"error": {"message": "secret"}}')
    real.face.script = [passed(), passed(), refused]
    with pytest.raises(harness.HarnessError, match="Stripe refused the API key") as caught:
        await real_stripe.main(clean=True)
    assert "secret" not in str(caught.value)
    (refund,) = real.fake.refunds
    assert f"refund {refund} of 200.00 USD: succeeded" in capsys.readouterr().out
    assert await real_stripe.main(clean=True) == 0 and len(real.fake.refunds) == 2


async def paid_and_looked_at(real: Real, run: Awaitable[object]) -> None:
    """The moment to cut a run short: it waits for the answer to its look-up."""
    ended = asyncio.ensure_future(run)
    while len(real.face.requests) < 2:
        assert not ended.done(), await ended
        await asyncio.sleep(0.02)


async def left_behind(real: Real) -> str:
    """The payment of a run that was cut short, all of it, which is hereby refunded."""
    *_, paid = real.fake.payments
    assert not real.fake.refunds and await cleaned(real) == [(paid, 200_00)]
    return paid


@pytest.mark.everywhere
async def test_a_run_that_is_cut_short_leaves_a_payment_and_no_process(
    mark: str, real: Real, environment: None, server: Server, temporal: Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(test_demo.MARK, mark)
    monkeypatch.setenv("TEMPORAL_ADDRESS", str(server.address))
    real.face.script = [passed(), asyncio.Event()]
    run = asyncio.create_task(real_stripe.main(clean=False))
    await paid_and_looked_at(real, run)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    case_id = real.fake.payments[await left_behind(real)]["metadata"]["case_id"]
    case = await temporal.get_workflow_handle(case_id).describe()
    assert case.status == WorkflowExecutionStatus.TERMINATED


@pytest.mark.everywhere
@pytest.mark.parametrize(("signum", "code"), [
    (signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)])
async def test_whatever_cuts_it_short_it_leaves_a_payment_and_no_process(
    mark: str, real: Real, server: Server, temporal: Client, signum: signal.Signals, code: int
) -> None:
    real.face.script = [passed(), asyncio.Event()]
    async with recipe(mark, real.face, TEMPORAL_ADDRESS=str(server.address)) as process:
        run = asyncio.create_task(finished(process))
        await paid_and_looked_at(real, run)
        process.send_signal(signum)
        ended, out, err = await run
    assert ended == code and "Traceback" not in err
    assert await left_behind(real) in out


@pytest.mark.everywhere
async def test_the_recipe_cleans_up(mark: str, real: Real) -> None:
    paid = await real_stripe.pay(real.client, "case-1")
    async with recipe(mark, real.face, "--clean-up") as process:
        code, out, err = await finished(process)
    (refund,) = real.fake.refunds.values()
    assert (code, err, refund["payment_intent"]) == (0, "", paid) and refund["id"] in out
