"""A person at the demo: who kills, who answers, who interrupts it, and what it is piped into."""

import asyncio
import os
import re
import signal
import sys
import time

import pytest

from desk import ROOT, ended, program
from harness import DevServer

DEMO = ROOT / "run_demo.py"
pytestmark = pytest.mark.usefixtures("mark")


@pytest.mark.parametrize("seconds", [4, 70])  # longer than a heartbeat timeout; than an attempt
async def test_a_person_kills_it_by_hand(seconds: int) -> None:
    parent, terminal = os.openpty()
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(DEMO), "--by-hand", stdin=terminal, stdout=-1, stderr=-1
    )
    assert process.stdout and process.stderr
    kills = 0
    while line := (await process.stdout.readline()).decode():
        if found := re.search(r"kill -9 (\d+)", line):
            await asyncio.sleep(seconds if kills else 0)  # the first process has no retry
            kills += 1
            os.kill(int(found[1]), signal.SIGKILL)
    os.close(parent)
    os.close(terminal)
    assert (await process.stderr.read(), await process.wait()) == (b"", 0)
    assert kills == 2


async def test_a_person_answers_and_then_leaves(server: DevServer) -> None:
    env = {"TEMPORAL_ADDRESS": await server.address(), "PYTHONIOENCODING": "ascii"}
    code, out, err = await ended(DEMO, "--ask", env=env, typed="\nZoë\n")
    assert "please type an answer" in out and "What was damaged?" in out
    assert (code, err.strip()) == (1, "The input ended before the case did.")


@pytest.mark.parametrize(
    ("number", "code", "moment"),
    [(signal.SIGTERM, 143, b"2. With"), (signal.SIGINT, 130, b"SIGKILL")],
)
async def test_an_interrupt_at_any_moment_cleans_up(
    number: signal.Signals, code: int, moment: bytes
) -> None:
    async with program(DEMO) as process:
        assert process.stdout
        while moment not in await process.stdout.readline():
            pass
        process.send_signal(number)
        started = time.monotonic()
        err = (await process.communicate())[1].strip()
    assert process.returncode == code and time.monotonic() - started < 5
    assert err.count(b"\n") == 0 and b"Traceback" not in err


async def test_a_lost_terminal_leaves_no_open_case(server: DevServer) -> None:
    async with program(DEMO, env={"TEMPORAL_ADDRESS": await server.address()}) as process:
        assert process.stdout
        while b"no Worker is alive" not in await process.stdout.readline():
            pass
        process.send_signal(signal.SIGHUP)  # its terminal is gone
        err = (await process.communicate())[1].strip()
    assert process.returncode == 129 and err.count(b"\n") == 0 and b"Traceback" not in err
    client, started = await server.client(), time.monotonic()
    ours = "WorkflowId STARTS_WITH 'demo-' AND ExecutionStatus = 'Running'"
    while (await client.count_workflows(ours)).count:  # visibility is a little behind
        assert time.monotonic() - started < 10
        await asyncio.sleep(0.1)


async def test_a_reader_who_leaves_is_no_error() -> None:
    async with program(DEMO) as process:
        assert process.stdout and process.stderr
        assert await process.stdout.readline()
        process._transport.get_pipe_transport(1).close()  # type: ignore[attr-defined]
        assert await process.stderr.read() == b""
        assert await process.wait() == 141


async def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(DEMO), stdout=full, stderr=-1
        )
        err = (await process.communicate())[1]
    assert process.returncode == 1 and err == b"[Errno 28] No space left on device\n"


async def test_an_unreachable_server_is_one_line() -> None:
    code, _, err = await ended(DEMO, env={"TEMPORAL_ADDRESS": "127.0.0.1:1"})
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("The Temporal server at 127.0.0.1:1 does not answer")


@pytest.mark.parametrize("order_id", ["1237", "9999"])  # their lookup fails for good
async def test_an_order_that_cannot_be_refunded_is_played_as_well(order_id: str) -> None:
    code, out, _ = await ended(DEMO, "--order", order_id)
    assert code == 0 and "NOT OBSERVED" not in out
