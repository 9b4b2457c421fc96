"""The official `stripe` SDK in place of the stand-in: one refund in Stripe's test mode.

    pip install -e '.[stripe]' && export STRIPE_API_KEY=sk_test_...
    python recipes/real_stripe.py     pays 200.00 with a test card, and refunds 80.00 of it

Test mode costs nothing and moves no money. Any other key is refused before anything is sent. A
restricted key (rk_test_) must write payment intents and refunds, and read charges. STRIPE_API_BASE
names the server that is asked in place of Stripe: a recording proxy, or one that speaks its API.
Shop, decider, customer and memory stay the demo's stand-ins. The Worker is killed one step before
the refund, and a new one goes on. Every run sells an order of its own, because the agent makes one
refund for an order line, and Stripe keeps the idempotency key for a day. Payments and refunds stay
in the test-mode account.

In a project of your own, copy `stripe_client` and hand its client to `RefundActivities`. For live
money its TEST_KEY is the line to change, and the last one.
"""

import os
import re
import sys
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

try:
    import stripe

    import harness
    import run_demo
    from harness import HarnessError
    from refund_agent import money
except ModuleNotFoundError as missing:
    sys.exit(f"{missing.name} is not installed. Install what is needed: pip install -e '.[stripe]'")

TEST_KEY = re.compile(r"[sr]k_test_[A-Za-z0-9_]+")
SOLD = run_demo.ORDERS[0]  # its payment is larger, so Stripe's limit is not what saves us


def stripe_client(settings: Mapping[str, str]) -> stripe.StripeClient:
    """A client that never retries, because Temporal does. The Activities cut off a request that
    hangs. Raises HarnessError if there is no test key."""
    key, base = settings.get("STRIPE_API_KEY", ""), settings.get("STRIPE_API_BASE")
    if not TEST_KEY.fullmatch(key):
        wrong = "is not a test-mode key" if key else "is not set"
        raise HarnessError(f"STRIPE_API_KEY {wrong}, so nothing was sent. Use sk_test_...")
    stripe.enable_telemetry = False  # it would keep an id in the home directory, and send it
    return stripe.StripeClient(
        key,
        max_network_retries=0,
        http_client=stripe.HTTPXClient(),
        base_addresses={"api": base or stripe.DEFAULT_API_BASE},
    )


async def pay(client: stripe.StripeClient, order_id: str) -> str:
    """Pay with a test card; the id of the payment intent."""
    payment = await client.v1.payment_intents.create_async(
        {
            "amount": SOLD.paid,
            "currency": SOLD.currency,
            "payment_method": "pm_card_visa",
            "automatic_payment_methods": {"enabled": True, "allow_redirects": "never"},
            "confirm": True,
            "metadata": {"order_id": order_id},
        },
        {"idempotency_key": f"payment:{order_id}"},
    )
    return payment.id


class Story(run_demo.Durable):
    """The demo's second half, with the Worker of this file and an order that is paid at Stripe."""

    job = "real_stripe:worker"

    def __init__(self, order_id: str) -> None:
        super().__init__(order_id, "before-refund")
        self.name = order_id

    def sell(self, payment_intent: str) -> None:
        order_id, sold = self.request.order_id, self.shop.orders[SOLD.order_id, 1]
        order = replace(sold, order_id=order_id, payment_intent=payment_intent)
        self.shop.orders[order_id, 1] = order


async def worker(remote: Any, queue: str) -> None:
    """A Worker as in the demo, but for `stripe`."""
    remote.stripe = stripe_client(os.environ)
    await run_demo.worker(remote, queue)


async def main() -> int:
    client, order_id = stripe_client(os.environ), f"real-stripe-{uuid.uuid4()}"
    story = Story(order_id)
    try:
        async with run_demo.temporal_server() as story.server:
            intent = await pay(client, order_id)
            story.say("Stripe", f"payment {intent}")
            story.sell(intent)
            async with story.process() as first:
                await story.play(first)
        refunds = (await client.v1.refunds.list_async({"payment_intent": intent})).data
    except stripe.StripeError as error:  # its own text may quote the key
        code = getattr(error.error, "code", None) or error.http_status or "no answer"
        id = error.request_id or "not answered"
        raise HarnessError(f"Stripe: {code} (request: {id})") from None
    for refund in refunds:
        amount = money(refund.amount, refund.currency)
        story.say("Stripe", f"refund {refund.id} of {amount}: {refund.status}")
    once = bool(story.killed_at) and [refund.amount for refund in refunds] == [SOLD.price]
    story.say("observed" if once else "NOT OBSERVED", "a Worker killed, money moved once")
    return 0 if once else 1


if __name__ == "__main__":
    harness.run(main())
