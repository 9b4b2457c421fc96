"""What the other side can do to a case: how it ends, what is told, how often Stripe was asked."""

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

import fake_stripe
import fake_xmemory
import refund_agent
from desk import Desk, Quiet, Unsandboxed, request_for
from fake_xmemory import XmemoryAPIError
from harness import DevServer
from refund_agent import HUMAN, RefundResult

ADA = request_for("1234")
SUCCEEDED = "refund succeeded"
FOR_EVER = 1_000
ATTEMPTS = 3  # before a step is given up, in the rows that a human ends
GIVEN_UP = timedelta(seconds=1)  # how long an attempt may take
UNSEEN = "Memory may not have this case: "
LOST, LIMITED = fake_stripe.connection_lost(), fake_stripe.rate_limited()
NO_MEMORY = fake_xmemory.connection_lost()
QUOTA = XmemoryAPIError("enough", status=402, code="QUOTA_EXCEEDED")
BUSY = XmemoryAPIError("slow down", status=429, code="RATE_LIMITED", retry_after=1)

Fault = Callable[[Quiet], object]


def stripe(*errors: fake_stripe.StripeError, times: int = 1, acted: bool = False) -> Fault:
    """Answer requests for a refund with these. With `acted`, the last of them was carried out."""

    def fail(world: Quiet) -> None:
        for error in errors:
            last = error is errors[-1]
            world.stripe.fail_next(error, times=times, acted=acted and last)

    return fail


def memory(
    error: XmemoryAPIError, method: str, times: int = FOR_EVER, acted: bool = False
) -> Fault:
    return lambda world: world.xmemory.fail_next(error, method=method, times=times, acted=acted)


def hanging(where: str) -> Fault:
    """Stripe holds the request until its attempt was given up, and does not notice that."""

    def hold(world: Quiet) -> asyncio.Event:
        create = world.stripe.v1.refunds.create_async
        world.stripe.v1.refunds.create_async = lambda *given: asyncio.shield(create(*given))
        return world.stripe.hold_next_create(where)

    return hold


async def let_go(world: Quiet, held: object) -> None:
    if isinstance(held, asyncio.Event):
        await held.wait()
        await asyncio.sleep(1.5 * GIVEN_UP.total_seconds())
        world.stripe.release()


def hanging_for_ever(world: Quiet) -> None:
    async def nothing(query: object) -> object:
        return await asyncio.Event().wait()

    world.stripe.v1.refunds.list_async = nothing


def slow_memory(world: Quiet) -> None:
    world.xmemory.job_seconds = 1


class Row(NamedTuple):
    fault: Fault
    outcome: str
    creates: int | None  # requests for a refund; None: as many as there was time for
    refunds: int
    notice: str = ""
    remembered: bool = True


ROWS = {
    "429, twice": Row(stripe(LIMITED, times=2), SUCCEEDED, 3, 1),
    "500 after it acted": Row(stripe(fake_stripe.server_error(), acted=True), SUCCEEDED, 1, 1),
    "it hangs before it acts": Row(hanging("before"), SUCCEEDED, None, 1),
    "it hangs after it acted": Row(hanging("after"), SUCCEEDED, 1, 1),
    "a request is lost": Row(stripe(LOST), SUCCEEDED, 2, 1),
    "an answer is lost": Row(stripe(LOST, acted=True), SUCCEEDED, 1, 1),
    "429, for ever": Row(
        stripe(LIMITED, times=FOR_EVER), HUMAN, ATTEMPTS, 0, "Stripe, pi_000001: rate_limit. "
    ),
    "500 before it acted": Row(
        stripe(fake_stripe.server_error()), HUMAN, ATTEMPTS, 0, "Stripe, pi_000001: 500. "
    ),
    "it hangs for ever": Row(hanging_for_ever, HUMAN, 0, 0, "Stripe: no usable answer. "),
    "the last answer is lost": Row(
        stripe(*[LIMITED] * (ATTEMPTS - 1), LOST, acted=True),
        HUMAN,
        ATTEMPTS,
        1,
        "Stripe, pi_000001: no usable answer. A refund may exist or still arrive. ",
    ),
    "memory is down at recall": Row(
        memory(NO_MEMORY, "read"), SUCCEEDED, 1, 1, f"{UNSEEN}xmemory did not answer.", False
    ),
    "memory is busy at recall": Row(
        memory(BUSY, "read"),
        SUCCEEDED,
        1,
        1,
        f"{UNSEEN}xmemory asked to slow down.",
        False,
    ),
    "memory is over quota at remember": Row(
        memory(QUOTA, "write_async"),
        SUCCEEDED,
        1,
        1,
        f"{UNSEEN}an xmemory quota is used up.",
        False,
    ),
    "memory's answer is lost": Row(memory(NO_MEMORY, "write_async", 1, True), SUCCEEDED, 1, 1),
    "memory is slow": Row(slow_memory, SUCCEEDED, 1, 1),
}


class Ended(NamedTuple):
    world: Quiet
    result: RefundResult


async def play(client: Any, row: Row) -> Ended:
    desk = Desk(client)
    held = row.fault(desk.world)
    async with asyncio.TaskGroup() as tasks:
        letting_go = tasks.create_task(let_go(desk.world, held))
        result = await asyncio.wait_for(desk.run(), 60)
        letting_go.cancel()
    return Ended(desk.world, result)


@pytest_asyncio.fixture(scope="module")
async def ended(server: DevServer) -> AsyncIterator[dict[str, Ended]]:
    """All rows at the same time, because most of it is waiting. Only the rows that a human ends
    have few attempts: on a busy machine the others may need more."""
    client = await server.client(plugins=[Unsandboxed("demo")])

    async def play_all(by_human: bool) -> dict[str, Ended]:
        rows = {name: row for name, row in ROWS.items() if (row.outcome == HUMAN) == by_human}
        played = await asyncio.gather(*(play(client, row) for row in rows.values()))
        return dict(zip(rows, played, strict=True))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refund_agent, "ATTEMPT_TIMEOUT", GIVEN_UP)
        resolved = await play_all(by_human=False)
        patch.setattr(refund_agent.ACTIVITY_RETRY, "maximum_attempts", ATTEMPTS)
        yield resolved | await play_all(by_human=True)


@pytest.mark.parametrize("name", ROWS)
async def test_the_case_ends_as_it_should(ended: dict[str, Ended], name: str) -> None:
    row, (world, result) = ROWS[name], ended[name]
    asked = world.stripe.counts()["refunds.create"]
    assert result.outcome == row.outcome
    assert result.notice.startswith(row.notice) and bool(result.notice) == bool(row.notice)
    assert result.told == refund_agent.TOLD[row.outcome].format(money="80.00 USD")
    assert row.creates in (None, asked) and asked <= 20
    assert world.count()["refunds"] == row.refunds
    assert result.remembered == row.remembered == bool(world.count()["cases remembered"])
