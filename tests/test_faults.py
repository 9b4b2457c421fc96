"""What the other side can do to a case: how it ends, what is told, how often Stripe was asked.

Patience is cut to seconds here, so that what is retried "until needs a human" gets there.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import pytest
import pytest_asyncio
from conftest import Desk, Unsandboxed

import fake_stripe
import fake_xmemory
import harness
import refund_agent
from fake_xmemory import XmemoryAPIError
from harness import Server, World, background
from refund_agent import RefundResult

SUCCEEDED, HUMAN = "refund succeeded", "needs a human"
FOR_EVER = 1_000
UNSEEN = "the next case will not recall this one"
GIVEN_UP = timedelta(seconds=1)  # how long an attempt may take
IN_USE = fake_stripe.StripeError(
    "in use", 409, "invalid_request_error", "idempotency_key_in_use")
QUOTA = XmemoryAPIError("enough", status=402, code="QUOTA_EXCEEDED", details={
    "kind": "daily_quota_exceeded", "retry_after_seconds": 3_600})
LIMITED = XmemoryAPIError("slow down", status=429, code="RATE_LIMITED", retry_after=3_600)


def stripe(error: fake_stripe.StripeError, times: int = 1, acted: bool = False) -> "Fault":
    return lambda world: world.stripe.fail_next(error, times=times, acted=acted)


def memory(error: XmemoryAPIError, method: str, times: int = 1, acted: bool = False) -> "Fault":
    return lambda world: world.xmemory.fail_next(error, method=method, times=times, acted=acted)


def hanging(where: str) -> "Fault":
    return lambda world: world.stripe.hold_next_create(where)


async def let_go(world: World, held: object) -> None:
    """Stripe acts on, or answers, the request that it holds after its attempt was given up."""
    if isinstance(held, asyncio.Event):
        await held.wait()
        await asyncio.sleep(1.5 * GIVEN_UP.total_seconds())
        world.stripe.release()


def hanging_for_ever(world: World) -> None:
    async def nothing(query: object) -> object:
        return await asyncio.Event().wait()

    world.stripe.v1.refunds.list_async = nothing


def slow_memory(world: World) -> None:
    world.xmemory.job_seconds = 1


Fault = Callable[[World], object]


class Row(NamedTuple):
    fault: Fault
    outcome: str
    creates: int | None  # requests for a refund; None: as many as there was time for
    refunds: int
    remembered: bool = True
    notice: str = ""


ROWS = {
    "429, twice": Row(stripe(fake_stripe.rate_limited(), 2), SUCCEEDED, 3, 1),
    "429, for ever": Row(stripe(fake_stripe.rate_limited(), FOR_EVER), HUMAN, None, 0,
                         notice="Stripe asked to slow down"),
    "409, key in use, twice": Row(stripe(IN_USE, 2), SUCCEEDED, 3, 1),
    "500 before it acted": Row(stripe(fake_stripe.server_error()), HUMAN, None, 0,
                               notice="Stripe had a server error"),
    "500 after it acted": Row(stripe(fake_stripe.server_error(), acted=True), SUCCEEDED, 1, 1),
    "it hangs before it acts": Row(hanging("before"), SUCCEEDED, None, 1),
    "it hangs after it acted": Row(hanging("after"), SUCCEEDED, 1, 1),
    "it hangs for ever": Row(hanging_for_ever, HUMAN, 0, 0, notice="Stripe did not answer"),
    "a request is lost": Row(stripe(fake_stripe.connection_lost()), SUCCEEDED, 2, 1),
    "an answer is lost": Row(stripe(fake_stripe.connection_lost(), acted=True), SUCCEEDED, 1, 1),
    "the key loses its right": Row(stripe(fake_stripe.not_permitted(), FOR_EVER), HUMAN, 1, 0,
                                   notice="the API key may not make refunds"),
    "memory is down at recall": Row(
        memory(fake_xmemory.connection_lost(), "read", FOR_EVER), SUCCEEDED, 1, 1,
        notice=f"{UNSEEN}: xmemory did not answer"),
    "memory is over quota at recall": Row(
        memory(QUOTA, "read", FOR_EVER), SUCCEEDED, 1, 1,
        notice=f"{UNSEEN}: the daily xmemory quota is used up"),
    "memory is busy at recall": Row(
        memory(LIMITED, "read", FOR_EVER), SUCCEEDED, 1, 1,
        notice=f"{UNSEEN}: xmemory asked to slow down"),
    "memory is down at remember": Row(
        memory(fake_xmemory.connection_lost(), "write_async", FOR_EVER), SUCCEEDED, 1, 1, False,
        "memory may not have this case: xmemory did not answer"),
    "memory is over quota at remember": Row(
        memory(QUOTA, "write_async", FOR_EVER), SUCCEEDED, 1, 1, False,
        "memory may not have this case: the daily xmemory quota is used up"),
    "memory's answer is lost": Row(
        memory(fake_xmemory.connection_lost(), "write_async", acted=True), SUCCEEDED, 1, 1),
    "memory is slow": Row(slow_memory, SUCCEEDED, 1, 1),
}


class Ended(NamedTuple):
    desk: Desk
    case_id: str
    result: RefundResult


@pytest.fixture(scope="module")
def little_patience() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refund_agent, "STEP_TIMEOUT", GIVEN_UP)
        patch.setattr(refund_agent.REMEMBER_RETRY, "maximum_attempts", 2)
        yield


@pytest_asyncio.fixture(scope="module")
async def ended(server: Server, little_patience: None) -> dict[str, Ended]:
    """All rows at the same time: most of it is waiting. But those that only a human can end are
    given little patience, and on a busy machine the others may need more."""
    client = await harness.connect(server.address, plugins=[Unsandboxed("demo")])

    async def play(row: Row) -> Ended:
        desk = Desk(client)
        held = row.fault(desk.world)
        async with desk.open() as case, background(partial(let_go, desk.world, held)):
            return Ended(desk, case.id, await case.result())

    async def play_all(wanted: Callable[[Row], bool]) -> dict[str, Ended]:
        rows = {name: row for name, row in ROWS.items() if wanted(row)}
        results: list[Awaitable[Ended]] = [play(row) for row in rows.values()]
        return dict(zip(rows, await asyncio.gather(*results), strict=True))

    resolved = await play_all(lambda row: row.outcome != HUMAN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refund_agent, "REFUND_PATIENCE", timedelta(seconds=1))
        return resolved | await play_all(lambda row: row.outcome == HUMAN)


@pytest.mark.parametrize("name", ROWS)
async def test_the_case_ends_as_it_should(ended: dict[str, Ended], name: str) -> None:
    row, (desk, case_id, result) = ROWS[name], ended[name]
    asked = desk.world.stripe.counts()["refunds.create"]
    assert (result.outcome, result.notice) == (row.outcome, row.notice)
    assert result.told == refund_agent.TOLD[row.outcome].format(money="80.00 USD")
    assert row.creates in (None, asked) and asked <= 20
    assert desk.world.refunds_of(case_id) == row.refunds
    assert result.remembered == row.remembered == bool(desk.world.remembered(case_id))


@pytest.mark.parametrize(("name", "notice"), [
    ("memory is down at recall", "xmemory did not answer"),
    ("memory is over quota at recall", "the daily xmemory quota is used up"),
    ("memory is busy at recall", "xmemory asked to slow down"),
])
async def test_the_decider_is_told_that_memory_is_missing(
    ended: dict[str, Ended], name: str, notice: str
) -> None:
    case = ended[name].desk.client.get_workflow_handle(ended[name].case_id)
    assert notice in str((await case.fetch_history()).events)
