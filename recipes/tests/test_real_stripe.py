"""The official Stripe SDK, over HTTP, against the stand-in; and the recipe that uses it."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from http_face import Answer, serving
from stripe_http import StripeFace, form
from temporalio.exceptions import ApplicationError

import fake_stripe
import harness
from desk import ROOT, Desk, Quiet, ended
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


# --- On the wire ---------------------------------------------------------------------------------


async def test_a_request_is_a_form_with_the_key_of_the_order_line(real: Real) -> None:
    await real.steps.issue_refund(real.agreed)
    look, refund = real.face.requests
    assert (look.method, form(look)) == ("GET", f"payment_intent={real.intent}&limit=100")
    sent = f"payment_intent={real.intent}&amount=1500&metadata[order_line]=1%3A1"
    assert (refund.method, refund.path, form(refund)) == ("POST", "/v1/refunds", sent)
    assert refund.headers["idempotency-key"] == ORDER_KEY
    assert refund.headers["authorization"] == f"Bearer {KEY}"


# --- Failures ------------------------------------------------------------------------------------


def says(status: int, body: bytes = b"<html>secret</html>") -> Answer:
    return Answer(status, body)


def error(status: int, code: str | None = None) -> fake_stripe.StripeError:
    return fake_stripe.StripeError("secret text", status, "invalid_request_error", code)


SAID = [  # by Stripe, or by a proxy; the code that colleagues read, and whether it is final
    (fake_stripe.connection_lost(), "no usable answer", False),
    (fake_stripe.rate_limited(), "rate_limit", False),
    (fake_stripe.server_error(), "500", False),
    (says(200), "200", False),
    (error(401), "401", False),
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


async def test_a_refund_is_found_on_the_second_page(real: Real) -> None:
    made = await real.steps.issue_refund(real.agreed)
    for _ in range(100):
        await real.fake.v1.refunds.create_async({"payment_intent": real.intent, "amount": 1})
    assert await real.steps.issue_refund(real.agreed) == made


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
    ["", "sk_live_secret", "pk_test_secret", "sk_test_", "sk_test_secret\n", " sk_test_secret"],
)
def test_whatever_is_no_test_key_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(harness.HarnessError) as caught:
        real_stripe.stripe_client({"STRIPE_API_KEY": key})
    assert "secret" not in str(caught.value) and "sk_test_..." in str(caught.value)
    assert real_stripe.stripe_client({"STRIPE_API_KEY": "rk_test_1"})


@pytest.fixture
def environment(real: Real, mark: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRIPE_API_KEY", KEY)
    monkeypatch.setenv("STRIPE_API_BASE", real.face.url)


async def test_the_recipe_kills_its_worker_before_the_refund_and_refunds_once(
    environment: None, real: Real, server: DevServer, tmp_path: Path
) -> None:
    await server.client()  # it is up: the recipe does not wait for one that the environment names
    files = {"XDG_CONFIG_HOME": str(tmp_path), "TEMPORAL_ADDRESS": await server.address()}
    code, out, err = await ended(RECIPE, env=files)
    assert (code, err) == (0, "") and KEY not in out and "NOT OBSERVED" not in out
    (refund,) = real.fake.refunds.values()
    payment = real.fake.payments[refund["payment_intent"]]
    assert (refund["amount"], payment["amount"], len(keys(real))) == (80_00, 200_00, 1)
    assert refund["id"] in out and not list(tmp_path.iterdir())
    assert "SIGKILL to process" in out and "observed  a Worker killed, money moved once" in out
