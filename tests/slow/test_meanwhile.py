"""What the world does while no Worker is alive: real SIGKILLs, and one refund at most."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from desk import Quiet
from harness import Child, DevServer
from refund_agent import HUMAN, RefundResult

DECIDED = "after agent_decide_next_step 5"  # the refund of order 1234 is decided, not yet ordered


class Meanwhile(Quiet):
    """A case whose Worker is killed. Something happens before there is another one."""

    async def kill(self, process: Child) -> None:
        await super().kill(process)
        assert self.killed_at
        await self.happens(self)

    async def result_on(
        self, server: DevServer, happens: Callable[["Meanwhile"], Awaitable[None]]
    ) -> RefundResult:
        self.server, self.happens = server.address, happens
        async with self.process() as first:
            await self.play(first)
        assert self.result
        return self.result

    async def refund_by_hand(self) -> None:
        params = {"payment_intent": self.payment_intent("1234"), "amount": 80_00}
        await self.stripe.v1.refunds.create_async(params)

    async def change(self, order_id: str = "1234", **terms: Any) -> None:
        order = self.shop.orders[order_id, 1]
        self.shop.orders[order_id, 1] = replace(order, **terms)

    async def pay_again(self) -> None:
        await self.change(payment_intent=self.stripe.add_payment(200_00, "usd"))

    def refunded(self) -> list[tuple[str, int]]:
        """Every refund that was made meanwhile or after: of which order's payment, and how much."""
        orders = {order.payment_intent: order.order_id for order in self.shop.orders.values()}
        made = [
            (orders.get(refund["payment_intent"], "an old payment"), refund["amount"])
            for refund in self.stripe.refunds.values()
        ]
        made.remove(("1237", 40_00))  # it was there from the start
        return made


async def test_a_refund_by_hand_while_no_worker_is_alive_is_the_only_one(server: DevServer) -> None:
    world = Meanwhile("1234", "before issue_refund")
    result = await world.result_on(server, Meanwhile.refund_by_hand)
    assert result.outcome == HUMAN and "names no line" in result.notice
    assert world.refunded() == [("1234", 80_00)]


async def test_another_payment_before_the_first_attempt_is_decided_again(server: DevServer) -> None:
    world = Meanwhile("1234", DECIDED)
    assert (await world.result_on(server, Meanwhile.pay_again)).outcome == "refund succeeded"
    assert world.refunded() == [("1234", 80_00)]
    assert world.count()["questions to the customer"] == 2


async def test_a_reviewer_who_approved_the_old_price_is_asked_about_the_new_one(
    server: DevServer,
) -> None:
    world = Meanwhile("1235", "after agent_decide_next_step 6")  # it escalates
    result = await world.result_on(server, partial(Meanwhile.change, order_id="1235", price=120_00))
    reviews = [question.text for question in world.asked if question.to == "reviewer"]
    assert [text[:20] for text in reviews] == ["Refund 150.00 USD fo", "Refund 120.00 USD fo"]
    assert result.outcome == "refund succeeded" and world.refunded() == [("1235", 120_00)]


async def test_terms_that_changed_while_stripe_has_the_request_are_for_a_human(
    server: DevServer,
) -> None:
    world = Meanwhile("1234", "refund-in-flight")  # it is carried out after the case has ended
    result = await world.result_on(server, partial(Meanwhile.change, price=50_00))
    assert result.outcome == HUMAN and "may have been requested" in result.notice
    assert world.refunded() == [("1234", 80_00)]
