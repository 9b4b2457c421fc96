"""`python run_demo.py` as a stranger uses it: a subprocess, its output and its exit code."""

import asyncio
import os
import re
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import run_demo
from harness import DevServer
from refund_agent import RefundResult

DEMO = Path(run_demo.__file__)
README = DEMO.with_name("README.md")
MARK = "REFUND_DEMO_TEST"  # in the environment of a demo, and of all that it starts


@pytest.fixture
def mark() -> Iterator[str]:
    """Fails the test if anything that carries the mark is still alive afterwards."""
    value = str(uuid.uuid4())
    yield value
    deadline = time.monotonic() + 5
    while (left := alive(value)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def alive(mark: str) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_text(errors="replace"):
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


@asynccontextmanager
async def demo(
    mark: str, *arguments: str, python: Sequence[str] = (), env: Mapping[str, str] = {}
) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *python,
        str(DEMO),
        *arguments,
        cwd="/",
        env={**os.environ, MARK: mark, **env},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_the_demo_observes_what_it_claims(mark: str) -> None:
    async with demo(mark, env={"PYTHONIOENCODING": "ascii"}) as process:
        out, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
    assert b"NOT OBSERVED" not in out and out.count(b"  observed  ") == 8
    assert b"\x1b" not in out and out.isascii()
    (printed,) = re.findall("```text\n(.*?)```", README.read_text(), re.DOTALL)
    assert masked(printed) in masked(out.decode())


def masked(printed: str) -> str:
    """Without what differs from run to run: process ids, seconds, and how wide they are."""
    return re.sub(r"[\d.]+", "#", re.sub(" +", " ", printed))


async def test_a_reader_who_leaves_is_no_error(mark: str) -> None:
    async with demo(mark) as process:
        assert process.stdout and process.stderr
        assert await process.stdout.readline()
        process._transport.get_pipe_transport(1).close()  # type: ignore[attr-defined]
        assert await process.stderr.read() == b""
        assert await process.wait() == 141


@pytest.mark.parametrize(
    ("signum", "code", "moment"),
    [
        pytest.param(signal.SIGTERM, 143, "2. With", marks=pytest.mark.everywhere),
        pytest.param(signal.SIGINT, 130, "SIGKILL", marks=pytest.mark.everywhere),
        (signal.SIGHUP, 129, "no Worker is alive"),
    ],
)
async def test_an_interrupt_cleans_up(
    mark: str, server: DevServer, signum: signal.Signals, code: int, moment: str
) -> None:
    async with demo(mark, env={"TEMPORAL_ADDRESS": await server.address()}) as process:
        assert process.stdout and process.stderr
        while moment not in (await process.stdout.readline()).decode():
            pass
        process.send_signal(signum)
        started = time.monotonic()
        err = (await process.communicate())[1].decode()
        assert process.returncode == code and time.monotonic() - started < 5
        assert len(err.strip().splitlines()) <= 1 and "Traceback" not in err
    client = await server.client()
    ours = "WorkflowId STARTS_WITH 'demo-' AND ExecutionStatus = 'Running'"
    while (await client.count_workflows(ours)).count:  # visibility is a little behind
        assert time.monotonic() - started < 10
        await asyncio.sleep(0.1)


async def test_an_unreachable_server_is_one_line(mark: str) -> None:
    started = time.monotonic()
    async with demo(mark, env={"TEMPORAL_ADDRESS": "127.0.0.1:1"}) as process:
        _, err = await process.communicate()
    assert process.returncode == 1 and err.count(b"\n") == 1
    assert err.startswith(b"The Temporal server at 127.0.0.1:1 does not answer")
    assert time.monotonic() - started < 10


async def test_a_full_disk_is_one_line(mark: str) -> None:
    with open("/dev/full", "w") as full:
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(DEMO), env={**os.environ, MARK: mark}, stdout=full, stderr=-1
        )
        err = (await process.communicate())[1]
    assert process.returncode == 1 and err == b"[Errno 28] No space left on device\n"


@pytest.mark.parametrize(
    "seconds", [4, pytest.param(70, marks=pytest.mark.everywhere)]
)  # longer than a heartbeat timeout; longer than an attempt may take
async def test_a_person_kills_it_by_hand(mark: str, seconds: int) -> None:
    parent, terminal = os.openpty()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(DEMO),
        "--by-hand",
        env={**os.environ, MARK: mark},
        stdin=terminal,
        stdout=-1,
        stderr=-1,
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


async def test_missing_packages_are_one_line(mark: str) -> None:
    async with demo(mark, python=("-I", "-S")) as process:
        out, err = await process.communicate()
    assert process.returncode == 1 and out == b""
    assert err.decode().count("\n") == 1 and "pip install -e ." in err.decode()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--crash", "nowhere"],
        ["--order", "a b"],
        ["--order", "1236", "--crash", "before-refund"],
        ["--by-hand"],  # no terminal here
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        run_demo.parse(arguments)
    assert left.value.code == 2 and "error:" in capsys.readouterr().err


@pytest.mark.everywhere
async def test_a_person_answers_and_then_leaves(mark: str, server: DevServer) -> None:
    env = {"TEMPORAL_ADDRESS": await server.address(), "PYTHONIOENCODING": "ascii"}
    async with demo(mark, "--ask", env=env) as process:
        out, err = await process.communicate("\nZoë\n".encode())
    assert b"please type an answer" in out and b"What was damaged?" in out
    assert process.returncode == 1 and err.strip() == b"The input ended before the case did."


def test_a_text_cannot_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    run_demo.Plain("1234").say("customer", "a\x1b[2Jb\rc\nd\u202ee")
    assert capsys.readouterr().out.strip() == "customer  a?[2Jb?c?d?e"


def test_a_claim_that_was_not_observed_fails_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    plain, durable = run_demo.Plain("1234", "before-refund"), run_demo.Durable("1234")
    durable.recorded = run_demo.Recorded(0, [], "none")
    plain.killed_at = durable.killed_at = 1.0
    plain.result = durable.result = RefundResult("denied", "No.")
    assert run_demo.show_counts(plain, durable) == 1
    assert "NOT OBSERVED  the plain process made the customer start over" in capsys.readouterr().out


def test_a_case_in_the_record_of_another_customer_is_not_remembered() -> None:
    world = run_demo.Plain("1234")
    line = {"past_cases": "order 1234 line 1: refund succeeded"}
    world.xmemory.put("Customer", {"customer_id": "ben", **line})
    assert world.count()["cases remembered"] == 0
    world.xmemory.put("Customer", {"customer_id": "ada", **line})
    assert world.count()["cases remembered"] == 1
