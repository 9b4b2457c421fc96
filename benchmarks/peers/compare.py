"""The same agent in six engines, killed at the same two points, with and without a key.

    pip install -e '.[peers]'
    python benchmarks/peers/compare.py [--repeats 5] [--only temporal journal]

Each file beside this one is the agent of one engine. It asks its customer two questions, looks two
things up, lets a model choose five times, and refunds. Model, customer and Stripe live in this
process, which counts their calls. A process is killed with SIGKILL while its refund is `on its way`
(Stripe has not accepted it) or `accepted` (its answer has not arrived), and a new one starts at
once. An engine that is not installed is named and left out. The Restate server comes from npm.
Seconds are from the kill to the refund: the median, the least and the greatest. Exits with 1 if a
count is not as the table says.
"""

import argparse
import asyncio
import importlib.util
import itertools
import os
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import harness
from harness import World

HERE = Path(__file__).resolve().parent
STEPS = ("ask opened", "ask damage", "lookup order", "lookup history", "refund")
SECONDS = 60.0  # for anything that an agent should do
POLL_SECONDS = 0.05
POINTS = ("on its way", "accepted")


class Outside(World):
    """The model, the customer and Stripe."""

    def __init__(self, point: str, keyed: bool) -> None:
        super().__init__()
        self.point, self.keyed = point, keyed
        self.trapped, self.killed, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.answers = asyncio.Queue[tuple[str, str]]()
        self.refunds: dict[str, float] = {}  # by idempotency key: when it was last asked for

    async def model(self, known: Sequence[str]) -> str:
        return STEPS[len(known)]

    async def ask(self, question: str) -> None:
        self.answers.put_nowait((question, "yes"))

    async def answer(self, question: str) -> str:
        return "yes"

    async def next_answer(self) -> tuple[str, str]:
        return await self.answers.get()

    async def lookup(self, what: str) -> str:
        return f"{what} found"

    async def refund(self, key: str) -> None:
        first = not self.trapped.is_set()
        if not (first and self.point == "on its way"):
            self.refunds[key if self.keyed else str(uuid.uuid4())] = time.monotonic()
        if first:
            self.trapped.set()
            await self.killed.wait()

    async def done(self) -> None:
        self.ended.set()


async def play(world: Any, module: str, store: str, id: str) -> None:
    """A child's job: start the engine, and see this case to its end."""
    await importlib.import_module(module).run(world, store, id)
    await world.done()


@asynccontextmanager
async def inbox(
    world: Any, deliver: Callable[[str, str], Awaitable[object]]
) -> AsyncIterator[None]:
    """In a child: hand each answer of the customer to the engine."""

    async def listen() -> None:
        while True:
            await deliver(*await world.next_answer())

    listening = asyncio.create_task(listen())
    yield
    listening.cancel()


# --- What an engine needs beside the process -----------------------------------------------------


@asynccontextmanager
async def file() -> AsyncIterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield f"{folder}/state.db"


@asynccontextmanager
async def temporal_server() -> AsyncIterator[str]:
    async with harness.dev_server(*harness.FAST_TIMERS) as server:
        yield await server.address()


def free_address() -> str:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{bound.getsockname()[1]}"


@asynccontextmanager
async def restate_server() -> AsyncIterator[str]:
    ingress, admin, node, here = (free_address() for _ in range(4))
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "RESTATE_INGRESS__BIND_ADDRESS": ingress,
            "RESTATE_ADMIN__BIND_ADDRESS": admin,
            "RESTATE_BIND_ADDRESS": node,
            "RESTATE_ADVERTISED_ADDRESS": f"http://{node}",
            "RESTATE_LISTEN_MODE": "tcp",
            "RESTATE_BASE_DIR": folder,
            "TMPDIR": folder,
            "RESTATE_LOG_FILTER": "error",
            "RESTATE_DISABLE_TELEMETRY": "true",
        }
        server = await asyncio.create_subprocess_exec(
            *("npm", "exec", "--yes", "--package=@restatedev/restate-server", "restate-server"),
            env=os.environ | settings,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            for url in (f"http://{admin}/health", f"http://{ingress}/restate/health"):
                await answers(url)
            yield f"http://{ingress} http://{admin} http://{here}"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            await server.wait()


async def answers(url: str) -> None:
    async with asyncio.timeout(SECONDS):
        while True:
            with suppress(OSError):
                await asyncio.to_thread(urlopen, url)
                return
            await asyncio.sleep(POLL_SECONDS)


class Engine(NamedTuple):
    module: str
    needs: str  # a library or a program
    server: Callable[[], AbstractAsyncContextManager[str]]
    goes_on: str


ENGINES = {
    "plain process": Engine("plain", "", file, "never: the customer starts over"),
    "journal in SQLite": Engine("journal", "", file, "the process is started"),
    "LangGraph": Engine("langgraph_agent", "langgraph", file, "its caller resumes the thread"),
    "DBOS": Engine("dbos_agent", "dbos", file, "the process is started"),
    "Restate": Engine("restate_agent", "restate", restate_server, "the process is started"),
    "Temporal": Engine("temporal_agent", "", temporal_server, "any Worker is there"),
}


# --- The comparison ------------------------------------------------------------------------------


class Run(NamedTuple):
    seconds: float  # from the kill to the refund
    counted: tuple[int, int, int]  # model calls, questions, lookups
    refunds: int


async def kill_once(engine: Engine, point: str, keyed: bool) -> Run:
    world, id = Outside(point, keyed), str(uuid.uuid4())
    async with engine.server() as store:
        job = (engine.module, "compare:play", engine.module, store, id)
        async with harness.child(*job, world=world) as first:
            await first.until(world.trapped, SECONDS, "its refund")
            await first.kill()
        killed_at = time.monotonic()
        world.killed.set()
        async with harness.child(*job, world=world) as second:
            await second.until(world.ended, SECONDS, "its end")
    for _ in range(2):  # the two processes, which no longer wait for an answer
        world.answers.put_nowait(("", ""))
    calls = Counter(call.path for call in world.calls)
    seconds = max(world.refunds.values()) - killed_at
    return Run(seconds, (calls["model"], calls["ask"], calls["lookup"]), len(world.refunds))


def row(name: str, engine: Engine, runs: Mapping[tuple[str, bool], Sequence[Run]]) -> bool:
    """Print a row. Returns whether every count is as expected."""
    seconds = []
    for point in POINTS:
        found = sorted(run.seconds for run in runs[point, True])
        seconds.append(f"{statistics.median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})")
    counted = {run.counted for some in runs.values() for run in some}
    refunds = [sorted({run.refunds for run in runs["accepted", keyed]}) for keyed in (True, False)]
    expected = (10, 4, 4) if engine.module == "plain" else (5, 2, 2)
    lines = len((HERE / f"{engine.module}.py").read_text().splitlines())
    steps = " or ".join(", ".join(map(str, each)) for each in sorted(counted))
    money = " / ".join(" or ".join(map(str, each)) for each in refunds)
    cells = name, *seconds, steps, money, engine.goes_on, str(lines)
    print(f"| {' | '.join(cells)} |", flush=True)
    return counted == {expected} and refunds == [[1], [2]]


def missing(engine: Engine) -> str:
    """What would have to be installed first."""
    if engine.needs and not importlib.util.find_spec(engine.needs):
        return engine.needs
    return "npm" if engine.server is restate_server and not shutil.which("npm") else ""


async def main(repeats: int, only: Sequence[str]) -> int:
    chosen = {}
    for name, engine in ENGINES.items():
        if only and engine.module.removesuffix("_agent") not in only:
            continue
        if lacks := missing(engine):
            print(f"{name} is left out: {lacks} is not installed", file=sys.stderr)
        else:
            chosen[name] = engine, defaultdict[tuple[str, bool], list[Run]](list)
    for _ in range(repeats):  # in turns, so that other work on the machine meets all of them
        for engine, runs in chosen.values():
            for point, keyed in itertools.product(POINTS, (True, False)):
                runs[point, keyed].append(await kill_once(engine, point, keyed))
    heads = ("engine", *(f"s, {point}" for point in POINTS), "calls, questions, lookups")
    heads += ("refunds with / without a key", "goes on when", "lines")
    print(f"| {' | '.join(heads)} |\n{'| --- ' * len(heads)}|")
    return 0 if all([row(name, *found) for name, found in chosen.items()]) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="such as dbos")
    options = parser.parse_args()
    harness.run(main(options.repeats, options.only))
