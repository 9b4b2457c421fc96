"""What the world does while no Worker is alive: real SIGKILLs, and one refund at most."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
from conftest import Desk
from test_money import by_hand, change, refunded

import harness
from harness import Server, World, background
from refund_agent import HUMAN, RefundResult

pytestmark = pytest.mark.everywhere
SECONDS = 60.0
HELD = "Stripe has the request"
DECIDED = "after agent_decide_next_step 5"  # the refund of order 1234 is decided, not yet ordered


async def killed(
    server: Server,
    desk: Desk,
    point: str,
    meanwhile: Callable[[World], object],
    order_id: str = "1234",
) -> RefundResult:
    """A Worker is killed at this point, something happens, and a new Worker finishes. A request
    that Stripe holds is carried out after that."""
    world = desk.world
    job = {"temporal": server.address, "task_queue": desk.queue, "worker": "demo"}
    held = point == HELD
    reached = world.stripe.hold_next_create("before") if held else world.gate.arm(point)
    async with world.open(), harness.agent("worker", world, job, desk) as first:
        case = await desk.start(order_id)
        async with background(partial(world.people.converse, case)):
            await first.until(reached.wait, SECONDS, point)
            await first.kill()
            happened = meanwhile(world)
            if isinstance(happened, Awaitable):
                await happened
            world.gate.release()
            async with harness.agent("worker", world, job, desk) as second:
                result: RefundResult = await second.until(case.result, SECONDS, "the result")
        while held and not refunded(world):
            world.stripe.release()
            await asyncio.sleep(harness.POLL_SECONDS)
    return result


@pytest.mark.parametrize("point", [DECIDED, "after lookup_order", "before issue_refund"])
async def test_a_refund_by_hand_while_no_worker_is_alive_is_the_only_one(
    server: Server, desk: Desk, point: str
) -> None:
    result = await killed(server, desk, point, by_hand)
    assert result.outcome == HUMAN and "names no line" in result.notice
    assert refunded(desk.world) == [80_00]


async def test_a_refund_by_hand_that_names_the_line_is_reported(server: Server, desk: Desk) -> None:
    named = partial(by_hand, order_line="1234:1")
    result = await killed(server, desk, DECIDED, named)
    assert result.outcome == "refund succeeded" and refunded(desk.world) == [80_00]


@pytest.mark.parametrize("what", ["price", "item", "payment"])
async def test_terms_that_changed_before_the_first_attempt_are_decided_again(
    server: Server, desk: Desk, what: str
) -> None:
    result = await killed(server, desk, DECIDED, partial(change, what=what, order_id="1234"))
    assert result.outcome == "refund succeeded"
    assert refunded(desk.world) == [50_00 if what == "price" else 80_00]
    assert desk.world.people.counted("customer") == 2


async def test_a_reviewer_who_approved_the_old_price_is_asked_about_the_new_one(
    server: Server, desk: Desk
) -> None:
    def dearer(world: World) -> None:
        vars(world.shop.orders["1235", 1]).update(price=120_00)

    point = "after agent_decide_next_step 6"  # it escalates
    result = await killed(server, desk, point, dearer, "1235")
    reviews = [q.text for q in desk.world.people.asked if q.to == "reviewer"]
    assert [text[:20] for text in reviews] == ["Refund 150.00 USD fo", "Refund 120.00 USD fo"]
    assert result.outcome == "refund succeeded" and refunded(desk.world, "1235") == [120_00]


async def test_terms_that_changed_while_stripe_has_the_request_are_for_a_human(
    server: Server, desk: Desk
) -> None:
    result = await killed(server, desk, HELD, partial(change, what="price", order_id="1234"))
    assert result.outcome == HUMAN and "may have been requested" in result.notice
    assert refunded(desk.world) == [80_00]
