"""The kills that test_crash.py looks at, all played at the same time: most of it is waiting."""

import asyncio
import uuid
from dataclasses import dataclass
from functools import partial

from conftest import Desk, request_for

import harness
from harness import Server, background
from refund_agent import RefundResult, start_case
from run_demo import Durable, Options, Plain

SAMPLE = ("refund-in-flight",)  # the demo itself is a test, and so is a row for every crash point


@dataclass
class Ended:
    """All scenarios of this file, played at the same time, since most of it is waiting."""

    durable: dict[str, Durable]
    plain: dict[str, Plain]
    stock: tuple[Desk, str, RefundResult]


def options(crash: str) -> Options:
    return Options("1234", crash, typed=False, ui=False)


async def play_durable(server: Server, crash: str) -> Durable:
    durable = Durable(options(crash), "worker", f"case-{crash}")
    job = {"temporal": server.address, "task_queue": str(uuid.uuid4()), "worker": "demo"}
    async with durable.world.open():
        async with harness.agent("worker", durable.world, job, durable.narrator) as first:
            await durable.play(server, first, job)
    return durable


async def play_plain(crash: str) -> Plain:
    plain = Plain(options(crash), "agent", f"case-{crash}")
    async with plain.world.open():
        await plain.until_the_kill()
        await plain.start_over()
    return plain


async def on_a_stock_server() -> tuple[Desk, str, RefundResult]:
    """What people who copy will run: killed before the refund, with the reviewer's approval in."""
    async with harness.dev_server(config=[]) as server:
        desk = Desk(await server.client())
        job = {"temporal": server.address, "task_queue": desk.queue, "worker": "stock"}
        world, trapped = desk.world, desk.world.gate.arm("before issue_refund")
        case = await start_case(
            desk.client, request_for("1235"), task_queue=desk.queue, case_id=desk.queue)
        async with world.open(), background(partial(world.people.converse, case)):
            async with harness.agent("worker", world, job, desk) as first:
                await first.until(trapped.wait, 30, "the refund")
                await first.kill()
            async with harness.agent("worker", world, job, desk) as second:
                return desk, case.id, await second.until(case.result, 60, "the result")


async def play_all(server: Server) -> Ended:
    stock = asyncio.create_task(on_a_stock_server())
    durable = [await play_durable(server, crash) for crash in SAMPLE]
    plain = [await play_plain(crash) for crash in SAMPLE]
    return Ended(dict(zip(SAMPLE, durable, strict=True)), dict(zip(SAMPLE, plain, strict=True)),
                 await stock)
