"""Kill the same refund agent twice, with SIGKILL, one step before it refunds the customer.

    python run_demo.py                        both scenarios: no keys, no network, a few seconds
    python run_demo.py --by-hand              you send the SIGKILL
    python run_demo.py --crash after-refund   what else can be in flight when a process dies
    python run_demo.py --crash everywhere     every point of one case, in a table; a minute
    python run_demo.py --order 1235 --ask     you are the customer, and the reviewer

First it runs as a plain process, then as a Temporal Workflow. Every number printed is counted at
the stand-ins or read from Event History. A claim that was not observed makes this program fail.
The agent is in refund_agent.py. How a process is killed is in harness.py. This file has the world
outside the agent (the shop, the people, the stand-ins), the two processes, and the story.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit("This needs Python 3.11 or newer.")

import argparse
import asyncio
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

try:
    import anyio
    from temporalio.client import Client
    from temporalio.envconfig import ClientConfig, ClientConfigProfile
    from temporalio.exceptions import ApplicationError
    from temporalio.plugin import SimplePlugin
    from temporalio.service import RPCError
    from temporalio.worker import WorkerConfig, WorkerDeploymentConfig, WorkerDeploymentVersion

    import harness
    import refund_agent
    from fake_stripe import FakeStripe
    from fake_xmemory import FakeXmemory
    from harness import AnnounceActivities, Call, Child, HarnessError, announced
    from memory_activities import MemoryActivities, ReadOutput, WorkflowMemory
except ModuleNotFoundError as missing:
    sys.exit(f"{missing.name} is not installed. Install what is needed with: pip install -e .")
except KeyboardInterrupt:
    sys.exit(130)

from refund_agent import (
    Answer,
    Case,
    Known,
    Question,
    RefundActivities,
    RefundAgent,
    RefundRequest,
    RefundResult,
    money,
)

T = TypeVar("T")
Server = Callable[[], Awaitable[str | None]]  # its address, as soon as it is up

STEP_SECONDS = 60.0  # for anything that a process should do
TYPING_SECONDS = 24 * 3600.0  # the same when a person types, or takes his time to kill
CONNECT_SECONDS = 8.0  # to reach a Temporal server; a person waits no longer for a clear line
POLL_SECONDS = 0.03  # how often something is looked at that cannot announce itself
DAY_SECONDS = 24 * 3600
QUERY_TIMEOUT = timedelta(seconds=5)  # a Worker that is busy replaying answers a Query late

# --- The world outside the agent -----------------------------------------------------------------


@dataclass
class ShopOrder:
    """An order line as the shop has it, and what is known of its customer. Amounts are in minor
    units: `paid` is the whole payment, `refunded` what a colleague refunded of it by hand."""

    order_id: str
    shows: str  # what this order is for
    item: str
    price: int
    paid: int
    customer_id: str
    currency: str = "usd"
    days_ago: int = 10
    earlier_refunds: int = 0
    refunded: int = 0
    payment_intent: str = ""
    purchased_at: float = 0.0


ORDERS = (
    ShopOrder("1234", "approved at once", "teapot", 80_00, 200_00, "ada", earlier_refunds=1),
    ShopOrder("1235", "above the limit: a human approves", "stove", 150_00, 400_00, "ben"),
    ShopOrder("1236", "bought too long ago: denied", "lamp", 130_00, 300_00, "cleo", days_ago=45),
    ShopOrder(
        "1237", "refunded by hand: a human looks", "cup", 40_00, 40_00, "dan", refunded=40_00
    ),
    ShopOrder(
        "1238", "refunded often: a human approves", "vase", 50_00, 120_00, "eva", earlier_refunds=3
    ),
    ShopOrder("1239", "in yen", "tea set", 9_899, 24_000, "fumi", currency="jpy"),
)
WITH_REFUND = ("1234", "1235", "1238", "1239")  # the others, and unknown ones, end without
SCRIPT = dict(zip(refund_agent.INTAKE, ("Yes, I opened it.", "The lid is cracked."), strict=True))
ELSE = "I opened it, its lid is cracked, and I want all my money back."  # to what a model may ask
CRASHES = {
    "before-refund": "the agent has chosen the refund, Stripe has not been asked for it",
    "refund-in-flight": "Stripe has been asked and has not acted",
    "after-refund": "Stripe has acted, its answer has not arrived",
    "during-memory-write": "the case is decided, its record is being written",
}
AT_STRIPE = {"refund-in-flight": "before", "after-refund": "after"}  # where Stripe holds the call
AT_AGENT = {
    "before-refund": "before issue_refund",
    "during-memory-write": "before xmemory_wait_for_write",
}


def request_for(order_id: str) -> RefundRequest:
    customer = next((order.customer_id for order in ORDERS if order.order_id == order_id), "ada")
    return RefundRequest(order_id, customer, f"Please refund order {order_id}.")


def scripted(question: Question) -> Answer:
    to_customer = question.to == "customer"
    text = SCRIPT.get(question.text, ELSE) if to_customer else "Approved."
    return Answer(question.id, text, approve=not to_customer)


class Shop:
    """The owner of orders."""

    def __init__(self) -> None:
        self.orders: dict[tuple[str, int], ShopOrder] = {}

    async def order(self, order_id: str, line: int) -> ShopOrder | None:
        return self.orders.get((order_id, line))

    async def customer_history(self, customer_id: str) -> ShopOrder:
        return next(order for order in self.orders.values() if order.customer_id == customer_id)


class Scenario(harness.World):
    """The world of one case: the stand-ins, the people, and a trap for the process that is killed.
    `crash` is one of CRASHES, or any point. Children call `decide`, `ask` and `end`."""

    kind = ""  # of the process

    def __init__(
        self, order_id: str, crash: str = "", *, typed: bool = False, by_hand: bool = False
    ) -> None:
        super().__init__()
        self.request, self.crash = request_for(order_id), crash
        self.typed, self.by_hand = typed, by_hand
        self.seconds = TYPING_SECONDS if typed or by_hand else STEP_SECONDS
        self.stripe, self.shop = FakeStripe(), Shop()
        self.xmemory = FakeXmemory({"Customer": ["customer_id"]})
        for order in ORDERS:
            self.add(order)
        self.asked: list[Question] = []
        self.result: RefundResult | None = None
        self.name = f"demo-{uuid.uuid4()}"  # of the case, and of the Task Queue
        self.killed_at = self.ended_at = 0.0  # by time.monotonic()
        self.dead, self.ended = 0, asyncio.Event()
        self.xmemory.paused = crash == "during-memory-write"  # the write is queued, not applied
        if where := AT_STRIPE.get(crash):
            self.trapped = self.stripe.hold_next_create(where)
        else:
            self.trapped = self.arm(AT_AGENT.get(crash, crash))

    def add(self, order: ShopOrder) -> None:
        intent = self.stripe.add_payment(order.paid, order.currency, refunded=order.refunded)
        at = time.time() - order.days_ago * DAY_SECONDS
        self.shop.orders[order.order_id, 1] = replace(order, payment_intent=intent, purchased_at=at)
        cases = [f"order 000{n + 1} line 1: refund succeeded" for n in range(order.earlier_refunds)]
        record = {"customer_id": order.customer_id, "past_cases": "\n".join(cases)}
        self.xmemory.put("Customer", record)

    async def decide(self, known: Known) -> object:
        """The agent's own policy, served as a model would be."""
        return refund_agent.decide(known)

    async def ask(self, question: Question) -> Answer:
        """Put a question to the customer or to the reviewer."""
        self.asked.append(question)
        self.say(self.actor, f"asks the {question.to}: {question.text}")
        return await self.reply(question)

    async def reply(self, question: Question) -> Answer:
        """By the script, or by the person at the terminal."""
        if not self.typed:
            answer = scripted(question)
            self.say(question.to, answer.text)
            return answer
        to_customer = question.to == "customer"
        while True:
            print(f"{'your answer' if to_customer else 'approve? y/n':>14}> ", end="", flush=True)
            line = await anyio.to_thread.run_sync(sys.stdin.buffer.readline, abandon_on_cancel=True)
            if not line:
                raise HarnessError("The input ended before the case did.")
            text = line.decode(errors="replace").strip()
            if not to_customer and text.lower() in ("y", "n"):
                return Answer(question.id, text, approve=text.lower() == "y")
            if to_customer and refund_agent.fits("customer", question.id, text):
                return Answer(question.id, text)
            self.say("demo", "please type an answer" if to_customer else "please type y or n")

    async def end(self, result: RefundResult) -> None:
        """The case has a result."""
        self.result, self.ended_at = result, time.monotonic()
        self.ended.set()
        self.trapped.set()

    async def kill(self, process: Child) -> None:
        """SIGKILL at the crash point. If the case ends before it, there is nothing to kill."""
        await process.until(self.trapped, self.seconds, "the crash point")
        if self.result:
            return
        self.free.clear()  # Stripe holds one call; this holds every later call of that process
        if self.by_hand:
            self.say("demo", f"Now kill it, in another terminal: kill -9 {process.pid}")
            await process.process.wait()
        await process.kill()
        self.killed_at, self.dead = time.monotonic(), process.pid
        how = "you killed" if self.by_hand else "SIGKILL to"
        self.say("demo", f"{how} process {self.dead}: {CRASHES.get(self.crash)}.")
        self.xmemory.paused = False
        if self.crash != "refund-in-flight":
            self.stripe.release()

    async def finish(self, process: Child) -> None:
        """Let a new process bring the case to its end."""
        await process.until(self.ended, self.seconds, "the result")
        self.stripe.release()
        await asyncio.sleep(POLL_SECONDS)  # what Stripe still held is carried out now

    def count(self) -> dict[str, Any]:
        """What this scenario came to, counted at the stand-ins. A time is in seconds, or None."""
        calls, asked = Counter(call.path for call in self.calls), Counter(q.to for q in self.asked)
        refunded = [
            c.at for c in self.calls if c.path == "reach" and c.args == ("after issue_refund",)
        ]
        self.xmemory.apply_due()
        customer, line = self.request.customer_id, self.request.line
        record = self.xmemory.tables["Customer"].get((("customer_id", customer),), {})
        cases = record.get("past_cases", "").splitlines()
        return {
            "questions to the customer": asked["customer"],
            "questions to the reviewer": asked["reviewer"],
            "decisions made": calls["decide"],
            "lookups": calls["shop.order"] + calls["shop.customer_history"],
            "calls to Stripe": sum(calls[path] for path in calls if path.startswith("stripe")),
            "  of them to refund": calls["stripe.v1.refunds.create_async"],
            "refunds": sum(
                refund["metadata"].get("order_line") == self.request.name
                for refund in self.stripe.refunds.values()
            ),
            "calls to xmemory": sum(calls[path] for path in calls if path.startswith("xmemory")),
            "  of them to write": calls["xmemory.write_async"],
            "cases remembered": sum(
                case.startswith(f"order {self.request.order_id} line {line}:") for case in cases
            ),
            "seconds from kill to refund": next(
                (at - self.killed_at for at in refunded if at > self.killed_at), None
            ),
            "seconds from kill to the end": self.ended_at - self.killed_at,
        }

    # What is printed

    @property
    def actor(self) -> str:
        return f"{self.kind} {self.calls[-1].pid if self.calls else 0}"

    def say(self, actor: str, text: str) -> None:
        print(f"{actor:>14}  {harness.printable(text)}", flush=True)

    def answered(self, call: Call) -> None:
        """Turn what the stand-ins see into lines of a conversation."""
        by, found, path = f"{self.kind} {call.pid}", call.answer, call.path
        if isinstance(found, Exception):
            self.say("Stripe" if "stripe" in path else path.split(".")[0], f"to {by}: {found}")
            if path.endswith("create_async"):
                self.stripe.release()  # a second request has come: Stripe acts on the first
        elif path == "decide" and found:
            self.say(by, f"decides: {found.action}" + (f" ({found.text})" if found.text else ""))
        elif path == "shop.order":
            self.say("shop", f"order: {found.item}" if found else "there is no such order")
        elif path == "shop.customer_history":
            self.say("shop", f"earlier refunds of this customer: {found.earlier_refunds}")
        elif path == "xmemory.read" and found.reader_result:
            record = ReadOutput(reader_result=found.reader_result).rows()[0]
            cases = record.get("past_cases", "").splitlines()
            self.say("xmemory", f"past cases of this customer: {'; '.join(cases) or 'none'}")
        elif path == "xmemory.write_async":
            self.say("xmemory", "the record of this case is queued")
        elif path.endswith("create_async"):
            dead = f", for {by}, which is dead" if call.pid == self.dead else ""
            amount = money(found.amount, found.currency)
            self.say("Stripe", f"refund {found.id} of {amount}: {found.status}{dead}")

    def tell(self) -> None:
        assert self.result
        self.say(self.actor, f"tells the customer: {self.result.told}")
        if self.result.notice:
            self.say(self.actor, f"notes: {self.result.notice}")


# --- The loop in a plain process -----------------------------------------------------------------


class Plain(Scenario):
    """After the kill, a new process has to start over."""

    kind = "agent"

    def process(self) -> AbstractAsyncContextManager[Child]:
        return harness.child("The plain process", "run_demo:plain", self.request, world=self)

    async def play(self) -> None:
        self.say("customer", self.request.message)
        async with self.process() as first:
            await self.kill(first)
        if self.killed_at:
            self.say("customer", "Hello? What happened to my refund?")
            async with self.process() as second:
                self.say("demo", f"starts a new process, {second.pid}")
                await self.finish(second)
        self.tell()


async def plain(remote: Any, request: RefundRequest) -> None:
    """What a plain process does."""
    await remote.end(await refund_agent.run_agent(request, PlainRuntime(remote)))


class PlainRuntime:
    """The loop's runtime in a plain process: await the Activities. There is no retry and no
    record."""

    def __init__(self, remote: Any) -> None:
        self.started_at, self.remote = time.time(), remote
        self.memory: WorkflowMemory = PlainMemory(remote=remote)
        self.activities = RefundActivities(remote.stripe, remote.shop, remote.decide)

    async def act(self, method: Callable[[Any, Any], Awaitable[T]], argument: Any) -> T:
        async with announced(self.remote, method.__name__):
            return await method(self.activities, argument)

    async def ask(self, question: Question) -> Answer | None:
        answer: Answer = await self.remote.ask(question)
        return answer

    def tell(self, result: RefundResult) -> None:
        """Nobody listens before the end."""

    async def next_day(self) -> bool:
        return False


@dataclass(kw_only=True)
class PlainMemory(WorkflowMemory):
    """The memory handle in a plain process."""

    remote: Any

    async def run_activity(self, step: Any, input: Any, **_: Any) -> Any:
        activities = MemoryActivities(self.remote.xmemory)
        while True:
            try:
                async with announced(self.remote, f"xmemory_{step.__name__}"):
                    return await step(activities, input)
            except ApplicationError as failed:
                if failed.type != "XmemoryWritePending":
                    raise
            await asyncio.sleep(POLL_SECONDS)


# --- The loop as a Workflow ----------------------------------------------------------------------


class Durable(Scenario):
    """After the kill, a new Worker goes on where the dead one stood."""

    kind, job = "worker", "run_demo:worker"
    server: Server  # the Worker also asks for its address

    def process(self) -> AbstractAsyncContextManager[Child]:
        return harness.child("The Worker", self.job, self.name, world=self)

    async def play(self, first: Child) -> None:
        client = await connect(await self.server())
        self.say("customer", self.request.message)
        try:
            case = await refund_agent.start_case(
                client, self.request, task_queue=self.name, case_id=self.name
            )
            self.begin(self.attend(case))
            await self.kill(first)
            if self.killed_at:
                recorded = await recorded_of(case)
                self.say(
                    "Temporal",
                    f"no Worker is alive; recorded: {recorded.signals} answers, "
                    f"{len(recorded.finished)} Activities, next: {recorded.last}",
                )
                async with self.process() as second:
                    self.say("demo", f"starts a new Worker, process {second.pid}")
                    await self.finish(second)
            self.recorded = await recorded_of(case)
        finally:
            if not self.result:  # a demo that ends early ends its case
                with anyio.CancelScope(shield=True), suppress(RPCError):
                    case = client.get_workflow_handle_for(RefundAgent.run, self.name)
                    await case.terminate("the demo ended first", rpc_timeout=QUERY_TIMEOUT)
        self.tell()

    async def attend(self, case: Case) -> None:
        """Be the people of a Workflow: answer each question until it has a result.
        Watching Event History for that costs the Worker nothing, unlike polling."""
        async for event in case.fetch_history_events(wait_new_event=True):
            if waits_for_a_person(event) and (question := await open_question(case)):
                answer = await self.ask(question)
                with suppress(refund_agent.Refused):  # the case went on without it
                    reviewer = question.to == "reviewer"
                    await refund_agent.send_answer(case, answer, reviewer=reviewer)
        await self.end(await case.result())


def waits_for_a_person(event: Any) -> bool:
    """The loop starts a timer of a day or more for nothing else."""
    return bool(event.timer_started_event_attributes.start_to_fire_timeout.ToSeconds() > 1)


async def open_question(case: Case) -> Question | None:
    """Asks a Worker; waits for one if none is alive."""
    while True:
        with suppress(RPCError):
            return (await case.query(RefundAgent.progress, rpc_timeout=QUERY_TIMEOUT)).question
        await asyncio.sleep(POLL_SECONDS)


@dataclass
class Recorded:
    """What Event History has of a case. No Worker is asked."""

    signals: int
    finished: list[str]  # Activities that have ended, in order
    last: str  # the Activity that was scheduled last


async def recorded_of(case: Case) -> Recorded:
    signals, finished, scheduled = 0, list[str](), {0: "none"}
    async for event in case.fetch_history_events():
        signals += event.HasField("workflow_execution_signaled_event_attributes")
        if name := event.activity_task_scheduled_event_attributes.activity_type.name:
            scheduled[event.event_id] = name
        for ended in (
            event.activity_task_completed_event_attributes,
            event.activity_task_failed_event_attributes,
        ):
            if ended.scheduled_event_id:
                finished.append(scheduled[ended.scheduled_event_id])
    return Recorded(signals, finished, [*scheduled.values()][-1])


async def connect(address: str | None, **options: Any) -> Client:
    """`address` is that of our own server. None: the server that the environment names."""
    where = {"target_host": address} if address else ClientConfig.load_client_connect_config()
    return await Client.connect(**where, **options)


@asynccontextmanager
async def temporal_server() -> AsyncIterator[Server]:
    """One of our own, which may still be coming up; or, checked, the one that the environment or a
    profile names."""
    try:
        address = ClientConfigProfile.load().address
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]  # the others quote the file, keys and all
        raise HarnessError(f"The Temporal configuration cannot be read. {first_line}") from None
    if not address:
        async with harness.dev_server(*harness.FAST_TIMERS) as server:
            yield server.address
        return
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            await (await connect(None)).count_workflows()
    except (TimeoutError, RuntimeError, ValueError, RPCError):
        raise HarnessError(
            f"The Temporal server at {address} does not answer, or refuses. "
            "Check the address, the namespace and the API key."
        ) from None

    async def named() -> None:
        return None

    yield named


async def worker(remote: Any, queue: str, runner: Any = None) -> None:
    """What a Worker process does."""
    plugin = DemoWorker("demo", interceptors=[AnnounceActivities(remote)], workflow_runner=runner)
    client = await connect(await remote.server(), plugins=[plugin])
    activities = RefundActivities(remote.stripe, remote.shop, remote.decide)
    await refund_agent.build_worker(client, queue, activities, remote.xmemory).run()


class DemoWorker(SimplePlugin):
    """What the demo wants of a Worker; `build_worker` leaves it at its defaults. After a kill, a
    Workflow Task first waits for the dead Worker, ten seconds by default. And a Worker that is
    given no version makes one of all code that was ever imported: 0.2 seconds of its start."""

    def configure_worker(self, config: WorkerConfig) -> WorkerConfig:
        config = super().configure_worker(config)
        config["sticky_queue_schedule_to_start_timeout"] = timedelta(seconds=0.2)
        config["deployment_config"] = WorkerDeploymentConfig(
            version=WorkerDeploymentVersion("refund-agent", "demo"), use_worker_versioning=False
        )
        return config


# --- What was claimed, and what was counted ------------------------------------------------------

WHY = {
    "before-refund": """\
No request had left. The new Worker made the first and only one. --crash refund-in-flight shows what
happens a moment later.""",
    "refund-in-flight": """\
Stripe was slow: it acted on the first request when a second one had come. One request, two calls or
more, one refund: the key is made of the order line, so every process has the same one. It also
saved the money of the plain process. But that process does not know it, and tells the customer that
a colleague will look. A colleague who does not look at Stripe first makes the second refund.""",
    "after-refund": """\
Stripe had refunded and nobody here knew. Before it sends a request, the agent asks Stripe for a
refund of this order line. It found one, in both scenarios.""",
    "during-memory-write": """\
The write went on at xmemory while no process was alive. The new Worker only asked how it stood. The
plain process wrote the record again, with the same values.""",
}
LESSON = """\
Context (what the agent sees) died with each process: replay rebuilt it, the plain one asked again.
Long-term memory was there for both; it knows past cases, not where this one stood. Execution state
was in Event History, so the new Worker could go on. Effect state was at Stripe, the one place that
knows whether money moved. (Server timers and the Worker's sticky queue are set short here: a stock
set-up refunds a second or so later, and then may wait ten more, the default of that queue.)"""


def heading(text: str) -> None:
    print(f"\n=== {text}\n", flush=True)


def claims(plain: Plain, durable: Durable) -> Iterator[tuple[bool, str]]:
    """What this demo claims, each with whether it was observed."""
    p, d, crash = plain.count(), durable.count(), plain.crash
    finished, result = durable.recorded.finished, durable.result
    assert plain.result and result
    told_no = plain.typed and result.outcome == "denied"
    expected = 1 if plain.request.order_id in WITH_REFUND and not told_no else 0
    asked = "questions to the customer"
    yield p[asked] == 2 * d[asked] > 0, "the plain process made the customer start over"
    ids = {question.id for question in durable.asked}
    yield len(ids) == len(durable.asked), "the Workflow asked no question twice"
    decisions = finished.count("agent_decide_next_step")
    yield d["decisions made"] == decisions, "it made no decision twice"
    looked_up = sum(name.startswith("lookup_") for name in finished)
    # Every attempt of issue_refund asks the shop once more, before it asks Stripe.
    attempts = sum(call.args == ("before issue_refund",) for call in durable.calls)
    yield 0 <= d["lookups"] - looked_up <= attempts, "it repeated no lookup that had finished"
    yield d["refunds"] == expected, "it moved money once" if expected else "it moved no money"
    writes = "  of them to write"
    once = result.remembered and d["cases remembered"] == d[writes] == 1
    yield once, "it remembered the case once"
    if crash == "during-memory-write":
        yield p[writes] == 2, "it wrote to memory once, the plain process twice"
    requests = d["  of them to refund"]
    if crash == "refund-in-flight":
        yield requests > 1, "it asked for the refund more than once, and that was safe"
        lost = plain.result.outcome == refund_agent.HUMAN
        yield lost, "the plain process does not know of its refund and asks for a colleague"
    else:
        yield requests == expected, "it never had to ask for the refund a second time"
    moved = (
        "the plain process moved money once as well"
        if expected
        else "the plain process moved none either"
    )
    yield p["refunds"] == expected, moved


def show_counts(plain: Plain, durable: Durable) -> int:
    """Print the table and the claims. Return the exit code."""
    if not plain.killed_at or not durable.killed_at:
        print("\nThe case ended before the crash point, so there was nothing to kill.")
        return 0 if plain.typed else 1
    heading("What was counted")
    print(f"{'':32}{'plain process':>16}{'Temporal Workflow':>20}")
    other = durable.count()
    for name, number in plain.count().items():
        if number or other[name]:
            shown = [
                f"{n:.1f}" if isinstance(n, float) else n or "-" for n in (number, other[name])
            ]
            print(f"{name:32}{shown[0]:>16}{shown[1]:>20}")
    print(f"\n{WHY[plain.crash]}\n\n{LESSON}\n")
    seen = list(claims(plain, durable))
    for observed, text in seen:
        plain.say("observed" if observed else "NOT OBSERVED", text)
    return 0 if all(observed for observed, _ in seen) else 1


# --- The program ---------------------------------------------------------------------------------


async def demo(given: argparse.Namespace) -> int:
    started = time.monotonic()
    print("One refund agent, killed twice. Real: the processes, the kills, the Temporal server.")
    print("Stand-ins: Stripe, xmemory, the shop, and the decider (a fixed policy, no model).")
    print(f"The customer {'is you' if given.ask else 'follows a script'}.")
    print(f"The kill comes when {CRASHES[given.crash]}.")
    options = {"typed": given.ask, "by_hand": given.by_hand}
    plain = Plain(given.order, given.crash, **options)
    durable = Durable(given.order, given.crash, **options)
    await play_both(plain, durable)
    code = show_counts(plain, durable)
    print(f"\nTook {time.monotonic() - started:.1f} seconds.")
    return code


async def play_both(plain: Plain, durable: Durable) -> None:
    """The first Worker starts at once, behind the curtain."""
    async with temporal_server() as durable.server, durable.process() as first:
        heading("1. Without Temporal: the loop in a plain process")
        await plain.play()
        heading("2. With Temporal: the same loop as a Workflow, run by a Worker process")
        await durable.play(first)


async def everywhere(given: argparse.Namespace) -> int:
    import crash_everywhere

    started = time.monotonic()
    print("One refund agent, killed everywhere. Real: processes, kills, the Temporal server.")
    print("Stand-ins: Stripe, xmemory, shop, people, and the decider (a fixed policy, no model).")
    print(f"Order {given.order} is first played without a kill. Then it is played once for each")
    print("point of that run: a Worker is killed there, and a new one finishes.", flush=True)
    async with temporal_server() as server:
        code = await crash_everywhere.kill_everywhere(server, given.order)
    print(f"\nTook {time.monotonic() - started:.1f} seconds.")
    return code


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Kill the same refund agent twice, as a plain process and as a Temporal\n"
        "Workflow, and count what each one loses. Exits with 0 if all that it claims was observed.",
        formatter_class=argparse.RawTextHelpFormatter,
    )
    points = "\n".join(f"{name}: {text}" for name, text in CRASHES.items())
    parser.add_argument(
        "--crash",
        choices=[*CRASHES, "everywhere"],
        metavar="POINT",
        help="when to kill it; the first, or the fourth for an order without a refund, if\n"
        f"not said otherwise\n{points}\neverywhere: at every point of one case, a row each",
    )
    orders = [f"{o.order_id}: {o.item}, {money(o.price, o.currency)}, {o.shows}" for o in ORDERS]
    parser.add_argument(
        "--order",
        metavar="ID",
        help="what to refund; the first, or the second for everywhere, if not said otherwise\n"
        + "\n".join(orders),
    )
    parser.add_argument("--ask", action="store_true", help="you are the customer and the reviewer")
    parser.add_argument("--by-hand", action="store_true", help="you kill it, from another terminal")
    given = parser.parse_args(arguments)
    everywhere = given.crash == "everywhere"
    given.order = given.order or ("1235" if everywhere else "1234")
    refunds = given.order in WITH_REFUND
    given.crash = given.crash or ("before-refund" if refunds else "during-memory-write")
    if not refund_agent.ID.fullmatch(given.order):
        parser.error("an order id is 1 to 64 letters, digits, - or _")
    if everywhere and (given.ask or given.by_hand):
        parser.error("--crash everywhere kills one case dozens of times; leave out the rest")
    if not refunds and given.crash in ("before-refund", "refund-in-flight", "after-refund"):
        parser.error(f"order {given.order} ends without a refund; use --crash during-memory-write")
    if given.by_hand and not sys.stdin.isatty():
        parser.error("--by-hand needs a terminal, because it waits for you")
    return given


def main() -> None:
    given = parse()
    harness.run(everywhere(given) if given.crash == "everywhere" else demo(given))


if __name__ == "__main__":
    import run_demo  # as a module, so that its classes have one name in every process

    run_demo.main()
