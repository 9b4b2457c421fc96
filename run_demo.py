"""Kill the same refund agent twice, with SIGKILL, one step before it refunds the customer.

    python run_demo.py                        both scenarios: no keys, no network, a few seconds
    python run_demo.py --crash after-refund   what else can be in flight when a process dies
    python run_demo.py --order 1235 --ask     you are the customer, and the reviewer

First it runs as a plain process, then as a Temporal Workflow. Every number printed is counted at
the stand-ins or read from Event History; a claim that was not observed makes this program fail.
The agent is in refund_agent.py, the processes that die are started by harness.py.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit("This needs Python 3.11 or newer.")

import argparse
import asyncio
import os
import signal
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial

try:
    import anyio
    import temporalio  # noqa: F401
except ModuleNotFoundError as missing:
    sys.exit(f"{missing.name} is not installed. Install what is needed with: pip install -e .")

import harness
import refund_agent
from harness import Call, Child, Fixture, HarnessError, Server, World, background
from refund_agent import Answer, Money, Question, RefundRequest

ORDERS = {
    fixture.order_id: fixture
    for fixture in (
        Fixture("1234", "teapot", 80_00, 200_00, "ada", earlier_refunds=1),
        Fixture("1235", "espresso machine", 150_00, 400_00, "ben"),
        Fixture("1236", "floor lamp", 130_00, 300_00, "cleo", days_ago=45),
        Fixture("1237", "wine glasses", 40_00, 40_00, "dan", refunded=40_00),
        Fixture("1238", "picture frame", 50_00, 120_00, "eva", earlier_refunds=3),
        Fixture("1239", "tea set", 9_899, 24_000, "fumi", currency="jpy"),
    )
}
WITH_REFUND = ("1234", "1235", "1238", "1239")  # the others end without one
SCRIPT = dict(zip(refund_agent.INTAKE, ("Yes, I opened it.", "The lid is cracked."), strict=True))
CRASHES = {
    "before-refund": "the agent has chosen the refund, Stripe has not been asked",
    "refund-in-flight": "Stripe has been asked and has not acted yet",
    "after-refund": "Stripe has acted, its answer has not arrived",
    "during-memory-write": "the case is decided, its record is still being written",
}
STEP_SECONDS = 60.0  # for anything a child should do; then the demo says what it waited for
TYPING_SECONDS = 3600.0  # the same when a person types the answers

# --- What is printed -----------------------------------------------------------------------------


def say(actor: str, text: str) -> None:
    """One line; a text from a customer or from memory must not move the reader's cursor."""
    shown = "".join(c if c.isprintable() else "?" for c in text.replace("\n", " "))
    print(f"{actor:>13}  {shown}", flush=True)


def heading(text: str) -> None:
    print(f"\n=== {text}\n", flush=True)


class Narrator:
    """Turns what the stand-ins see into lines of a conversation."""

    def __init__(self, kind: str) -> None:
        self.kind, self.pid, self.dead = kind, 0, set[int]()
        self.looking = False  # the process was asked "what happened?" and looks at what is left

    @property
    def actor(self) -> str:
        return f"{self.kind} {self.pid}"

    def on_call(self, call: Call) -> None:
        found, caller = call.result, f"{self.kind} {call.pid}"
        match call.path.split("."):
            case [*_, "create_async"] if isinstance(found, Exception):
                say("Stripe", f"refuses the request of {caller}: {found}")
            case _ if isinstance(found, Exception):
                pass
            case ["decider", _]:
                reason = f" ({found.text})" if found.text and found.action != "ask" else ""
                say(caller, f"decides: {found.action}{reason}")
            case ["shop", "order"]:
                say(caller, f"the order is a {found.item}" if found else "there is no such order")
            case ["shop", _]:
                say(caller, f"this customer has {found.earlier_refunds} earlier refund(s)")
            case ["xmemory", "read"]:
                rows = (found.reader_result or {"rows": []})["rows"]
                say("xmemory", f"{len(rows)} past case(s) of this customer")
            case ["xmemory", "write_async"]:
                say("xmemory", "has queued the record of this case")
            case [*_, "retrieve_async"] if self.looking:
                say("Stripe", f"paid {Money(found.amount, found.currency)}")
            case [*_, "list_async"] if self.looking:
                refunds = [f"{Money(r.amount, r.currency)} {r.status}" for r in found.data]
                say("Stripe", f"refunds: {', '.join(refunds) or 'none'}")
                self.looking = False
            case [*_, "create_async"]:
                whose = " for a process that is dead by now" if call.pid in self.dead else ""
                amount = Money(found.amount, found.currency)
                say("Stripe", f"refund {found.id} of {amount}: {found.status}{whose}")


# --- One scenario --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    order_id: str
    crash: str
    typed: bool
    ui: bool

    @property
    def seconds(self) -> float:
        return TYPING_SECONDS if self.typed else STEP_SECONDS

    @property
    def request(self) -> RefundRequest:
        customer = ORDERS.get(self.order_id, ORDERS["1234"]).customer_id
        return RefundRequest(self.order_id, customer, f"Please refund order {self.order_id}.")


@dataclass(frozen=True)
class Tally:
    """What one scenario came to, counted at the stand-ins. Times are in seconds."""

    questions: int
    reviews: int
    decisions: int
    lookups: int
    stripe_calls: int
    refund_requests: int
    refunds: int
    remembered: int
    kill_to_refund: float | None
    kill_to_end: float


class Scenario:
    def __init__(self, options: Options, kind: str, case_id: str) -> None:
        self.options, self.case_id, self.narrator = options, case_id, Narrator(kind)
        self.world = World(list(ORDERS.values()), self.reply, self.narrator.on_call)
        self.killed_at = self.ended_at = 0.0
        self.survived: harness.Survived | None = None

    async def reply(self, question: Question) -> Answer:
        """The customer and the reviewer: scripted, or the person at the terminal."""
        say(self.narrator.actor, f"asks the {question.to}: {question.text}")
        to_customer = question.to == "customer"
        if not self.options.typed:
            text = SCRIPT.get(question.text, "I see.") if to_customer else "Approved."
            say(question.to, text)
            return Answer(question.id, text, approve=not to_customer)
        prompt = f"{'your answer' if to_customer else 'approve? y/n':>13}> "
        while True:
            text = (await anyio.to_thread.run_sync(input, prompt, abandon_on_cancel=True)).strip()
            if to_customer and 0 < len(text) <= refund_agent.MAX_TEXT:
                return Answer(question.id, text)
            if not to_customer and text.lower() in ("y", "n"):
                return Answer(question.id, text, approve=text.lower() == "y")
            say("demo", "please type an answer" if to_customer else "please type y or n")

    def trap(self) -> asyncio.Event:
        """Hold the process at the crash point; the event says that it is there."""
        if self.options.crash == "before-refund":
            return self.world.gate.arm("before issue_refund")
        if self.options.crash == "during-memory-write":
            return self.world.gate.arm("before xmemory_wait_for_write")
        where = "before" if self.options.crash == "refund-in-flight" else "after"
        return self.world.stripe.hold_next_create(where)

    async def kill(self, child: Child) -> None:
        """SIGKILL at the crash point, or nothing if the case ends before it comes there."""
        trapped = self.trap()

        async def ended() -> None:
            await self.world.ended.wait()
            trapped.set()

        async with background(ended):
            await child.until(trapped.wait, self.options.seconds, "the crash point")
        if not self.world.ended.is_set():
            await child.kill()
            self.killed_at = time.monotonic()
            self.narrator.dead.add(child.pid)
            say("demo", f"SIGKILL to process {child.pid}: {CRASHES[self.options.crash]}.")

    async def end(self, child: Child) -> None:
        """Let a new process bring the case to its end."""
        async with background(self.let_stripe_act):
            await child.until(self.world.ended.wait, self.options.seconds, "the result")

    async def let_stripe_act(self) -> None:
        """A request that has arrived is carried out, dead caller or not. If Stripe had not acted at
        the kill, it is slow today: it acts when another request for this case stands at its door."""
        while self.options.crash == "refund-in-flight":
            if self.world.stripe.counts()["refunds.create"] > 1:
                break
            await anyio.sleep(harness.POLL_SECONDS)
        self.world.stripe.release()

    async def plain(self) -> None:
        """The loop in a plain process. After the kill a new one has to start over."""
        intent = self.world.payment_intent(self.options.order_id)
        request = self.options.request
        job = {"request": asdict(request), "case_id": self.case_id, "intent": intent, "look": False}
        say("customer", request.message)
        async with self.world.open():
            async with harness.agent("plain", self.world, job, self.narrator) as first:
                await self.kill(first)
            if self.killed_at:
                say("customer", "Hello? What happened to my refund?")
                self.narrator.looking = True
                again = job | {"look": True}
                async with harness.agent("plain", self.world, again, self.narrator) as second:
                    await self.end(second)
        self.close()

    @asynccontextmanager
    async def staged(self, server: Server) -> AsyncIterator[None]:
        """Worker and server start behind the curtain, while the first scenario plays."""
        self.job = {"temporal": server.address, "task_queue": f"refunds-{uuid.uuid4().hex}"}
        async with self.world.open():
            async with harness.agent("worker", self.world, self.job, self.narrator) as self.first:
                yield

    async def durable(self, server: Server) -> None:
        """The loop as a Workflow. After the kill a new Worker goes on where the dead one stood."""
        client, world = await server.client(), self.world
        say("customer", self.options.request.message)
        case = await refund_agent.start_case(
            client,
            self.options.request,
            task_queue=self.job["task_queue"],
            case_id=self.case_id,
            task_timeout=harness.TASK_TIMEOUT,
        )
        async with harness.watched(case, world):
            async with background(partial(world.people.converse, case)):
                await self.kill(self.first)
            if self.killed_at:
                left = await harness.what_survived(case, client)
                say("Temporal", f"holds {len(left.answers)} answers, {len(left.finished)} finished "
                                f"steps, and the next action: {left.next_action}")  # fmt: skip
                async with harness.agent("worker", world, self.job, self.narrator) as second:
                    async with background(partial(world.people.converse, case)):
                        await self.end(second)
            self.survived = await harness.what_survived(case, client)
        self.close()

    def close(self) -> None:
        self.ended_at, result = time.monotonic(), self.world.result
        assert result is not None
        say(self.narrator.actor, f"tells the customer: {result.told}")
        if result.notice:
            say(self.narrator.actor, f"notes for colleagues: {result.notice}")

    def tally(self) -> Tally:
        world, calls = self.world, self.world.stripe.counts()
        refunded_at = world.gate.times.get("after issue_refund", 0.0)
        return Tally(
            questions=world.people.counted("customer"),
            reviews=world.people.counted("reviewer"),
            decisions=len(world.decider.decisions),
            lookups=len(world.shop.lookups),
            stripe_calls=sum(calls.values()),
            refund_requests=calls["refunds.create"],
            refunds=world.refunds_of(self.case_id),
            remembered=world.remembered(self.case_id),
            kill_to_refund=refunded_at - self.killed_at if refunded_at > self.killed_at else None,
            kill_to_end=self.ended_at - self.killed_at,
        )


# --- What was claimed, and what was counted ------------------------------------------------------

ROWS = {
    "questions to the customer": "questions",
    "questions to the reviewer": "reviews",
    "decisions made": "decisions",
    "lookups": "lookups",
    "calls to Stripe": "stripe_calls",
    "  of them to refund": "refund_requests",
    "refunds": "refunds",
    "cases remembered": "remembered",
    "seconds from kill to refund": "kill_to_refund",
    "seconds from kill to the end": "kill_to_end",
}


def show_table(plain: Tally, durable: Tally) -> None:
    print(f"{'':32}{'plain process':>16}{'Temporal Workflow':>20}")
    for label, name in ROWS.items():
        left, right = (getattr(tally, name) for tally in (plain, durable))
        shown = [f"{n:.1f}" if isinstance(n, float) else "-" if n is None else n for n in (left, right)]
        print(f"{label:32}{shown[0]:>16}{shown[1]:>20}")


def claims(plain: Scenario, durable: Scenario) -> Iterator[tuple[str, bool]]:
    """Each claim with whether it was observed."""
    p, d, survived, crash = plain.tally(), durable.tally(), durable.survived, plain.options.crash
    result = durable.world.result
    assert survived is not None and result is not None
    expected = 1 if result.refund else 0
    asked = [question.id for question in durable.world.people.asked]
    yield "the plain process made the customer start over", p.questions == 2 * d.questions > 0
    yield "the Workflow asked no question twice", len(set(asked)) == len(asked)
    decided = survived.finished.count("agent_decide_next_step")
    looked_up = sum(name.startswith("lookup_") for name in survived.finished)
    yield "the Workflow made no decision twice", d.decisions == decided
    yield "the Workflow looked nothing up twice", d.lookups == looked_up
    yield "the Workflow moved money once, and only if it said so", d.refunds == expected
    yield "the Workflow remembered the case once", d.remembered == 1 and result.remembered
    if crash == "refund-in-flight":
        yield "the plain process, with nothing left to make the same key of, paid twice", p.refunds == 2
        yield "the Workflow sent one request twice, and its key made it one refund", d.refund_requests > 1
    else:
        yield "the plain process moved money once, too", p.refunds == expected
        yield "no second request for the refund was needed", d.refund_requests == expected


LESSON = """\
Context (answers, lookups, decisions) died with each process; replay rebuilt it for the new Worker,
and the plain process had to ask again. Long-term memory was there for both: it knows past cases, not
where this one stood. Execution state was in Event History, so a new Worker could go on. Effect state
was at Stripe, the one place that knows whether money moved; both agents ask there before they refund."""
FINE_PRINT = {
    "before-refund": "No request had left; the new Worker made the first and only one.",
    "refund-in-flight": "One request, two calls or more, one refund: the key was the same. A plain "
    "process that made its key of the order would have been safe, too; its answers would still be gone.",
    "after-refund": "Stripe had refunded and nobody here knew. The new process asked Stripe for a "
    "refund of this case before it sent another request, and found it.",
    "during-memory-write": "The write went on at xmemory while no process was alive. The new Worker "
    "only asked how it stood; the plain one wrote again and was told that the record is there.",
}

# --- The program ---------------------------------------------------------------------------------


async def demo(options: Options) -> int:
    started = time.monotonic()
    print("A refund agent, killed twice. Real here: the processes, the SIGKILLs, the Temporal server.")
    print("Stand-ins: Stripe, xmemory, the shop, and the decider (a fixed policy, no model).")
    print(f"The customer {'is you' if options.typed else 'follows a script'}. Crash point: "
          f"{CRASHES[options.crash]}.")  # fmt: skip
    address = harness.configured_address()
    case_id = refund_agent.case_id_for(options.request)
    if address is not None:
        case_id = f"{case_id}-{uuid.uuid4().hex[:8]}"  # other people use that server, too
    server = harness.configured_server(address) if address else harness.dev_server(ui=options.ui)
    plain, durable = (Scenario(options, kind, case_id) for kind in ("agent", "worker"))
    async with server as temporal, durable.staged(temporal):
        if temporal.ui:
            print(f"Temporal Web UI: {temporal.ui}")
        heading("1. Without Temporal: the loop in a plain process")
        await plain.plain()
        heading("2. With Temporal: the same loop as a Workflow in a Worker process")
        await durable.durable(temporal)
        code = verdict(plain, durable)
        print(f"\nTook {time.monotonic() - started:.1f} seconds.", flush=True)
        if temporal.ui:
            print(f"The Web UI stays up at {temporal.ui} until you press Ctrl-C.", flush=True)
            await anyio.sleep_forever()
    return code


def verdict(plain: Scenario, durable: Scenario) -> int:
    if not plain.killed_at or not durable.killed_at:
        print("\nThe case ended before the crash point, so there was nothing to kill and no claim.")
        return 0
    heading("What was counted")
    show_table(plain.tally(), durable.tally())
    print(f"\n{FINE_PRINT[plain.options.crash]}\n\n{LESSON}\n")
    seen = list(claims(plain, durable))
    for text, observed in seen:
        print(f"{'observed' if observed else 'NOT OBSERVED':>13}  {text}")
    return 0 if all(observed for _, observed in seen) else 1


def parse(arguments: list[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    points = "; ".join(f"{name}: {text}" for name, text in CRASHES.items())
    parser.add_argument("--crash", choices=CRASHES, help=points)
    orders = ", ".join(f"{o.order_id} ({o.item}, {Money(o.amount, o.currency)})" for o in ORDERS.values())
    parser.add_argument("--order", default="1234", metavar="ID", help=f"one of {orders}")
    parser.add_argument("--ask", action="store_true", help="you are the customer and the reviewer")
    parser.add_argument("--ui", action="store_true", help="keep the server and its Web UI up")
    given = parser.parse_args(arguments)
    if not refund_agent.ID_PART.fullmatch(given.order):
        parser.error("an order id is 1 to 64 letters, digits, - or _")
    default = "before-refund" if given.order in WITH_REFUND else "during-memory-write"
    crash = given.crash or default
    if crash != "during-memory-write" and given.order not in WITH_REFUND:
        parser.error(f"order {given.order} ends without a refund; use --crash during-memory-write")
    return Options(given.order, crash, given.ask, given.ui)


def leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


def explain(error: BaseException) -> int:
    """The exit code for an error, and one line for the person at the terminal."""
    causes = list(leaves(error))
    if any(isinstance(cause, BrokenPipeError) for cause in causes):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone
        return 128 + 13
    if any(isinstance(cause, KeyboardInterrupt) for cause in causes):
        print("\nInterrupted. Nothing was left running.", file=sys.stderr)
        return 130
    if any(isinstance(cause, asyncio.CancelledError) for cause in causes):
        return 143
    for cause in causes:
        if isinstance(cause, HarnessError | refund_agent.Refused | EOFError):
            print(str(cause) or "The input ended before the last answer.", file=sys.stderr)
            return 1
    traceback.print_exception(error)
    return 1


async def with_sigterm(options: Options) -> int:
    task = asyncio.current_task()
    with suppress(NotImplementedError):  # Windows
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: task and task.cancel())
    return await demo(options)


def main() -> None:
    options = parse()
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        code = asyncio.run(with_sigterm(options))
    except BaseException as error:
        code = explain(error)
    harness.leave(code)


if __name__ == "__main__":
    main()
