"""Kill the same refund agent twice, with SIGKILL, one step before it refunds the customer.

    python run_demo.py                        both scenarios: no keys, no network, a few seconds
    python run_demo.py --crash after-refund   what else can be in flight when a process dies
    python run_demo.py --crash everywhere     every point of one case, in a table; a minute
    python run_demo.py --order 1235 --ask     you are the customer, and the reviewer

First it runs as a plain process, then as a Temporal Workflow. Every number printed is counted at
the stand-ins or read from Event History; a claim that was not observed makes this program fail.
The agent is in refund_agent.py; the processes that die, and the killing, are in harness.py.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit("This needs Python 3.11 or newer.")

import argparse
import asyncio
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

try:
    import anyio

    import crash_everywhere
    import harness
    import refund_agent
    from harness import Call, Child, Crash, Fixture, HarnessError, Server, World, background
except ModuleNotFoundError as missing:
    sys.exit(f"{missing.name} is not installed. Install what is needed with: pip install -e .")
except KeyboardInterrupt:
    sys.exit(130)

from refund_agent import Answer, Question, RefundRequest, money

ORDERS = {
    order.order_id: order
    for order in (
        Fixture("1234", "approved at once", "teapot", 80_00, 200_00, "ada", earlier_refunds=1),
        Fixture("1235", "above the limit: a human approves", "stove", 150_00, 400_00, "ben"),
        Fixture("1236", "bought too long ago: denied", "lamp", 130_00, 300_00, "cleo", days_ago=45),
        Fixture(
            "1237",
            "refunded by hand: a human looks",
            "wine glasses",
            40_00,
            40_00,
            "dan",
            refunded=40_00,
        ),
        Fixture(
            "1238",
            "three earlier refunds: a human approves",
            "picture frame",
            50_00,
            120_00,
            "eva",
            earlier_refunds=3,
        ),
        Fixture("1239", "in yen", "tea set", 9_899, 24_000, "fumi", currency="jpy"),
    )
}
WITH_REFUND = ("1234", "1235", "1238", "1239")  # the others, and unknown ones, end without
SCRIPT = dict(zip(refund_agent.INTAKE, ("Yes, I opened it.", "The lid is cracked."), strict=True))
ELSE = "I opened it, its lid is cracked, and I want all my money back."  # to what a model may ask
CRASHES = {
    "before-refund": "the agent has chosen the refund, Stripe has not been asked",
    "refund-in-flight": "Stripe has been asked and has not acted",
    "after-refund": "Stripe has acted, its answer has not arrived",
    "during-memory-write": "the case is decided, its record is being written",
}
STEP_SECONDS = 60.0  # for anything a child should do; then the demo says what it waited for
TYPING_SECONDS = 3600.0  # the same when a person types the answers

# --- What is printed -----------------------------------------------------------------------------


def say(actor: str, text: str) -> None:
    print(f"{actor:>14}  {harness.printable(text)}", flush=True)


def heading(text: str) -> None:
    print(f"\n=== {text}\n", flush=True)


def read_out(table: Mapping[str, Any]) -> str:
    fields = [column["name"] for column in table["columns"]]
    known = [dict(zip(fields, row, strict=True)) for row in table["rows"]]
    cases = [line for row in known for line in row.get("past_cases", "").splitlines()]
    return f"past cases of this customer: {'; '.join(cases) or 'none'}"


@dataclass
class Narrator:
    """Turns what the stand-ins see into lines of a conversation."""

    kind: str  # agent or worker
    pid: int = 0
    dead: int = 0  # the pid of the one that was killed
    looking: bool = False  # a new process was asked "what happened?" and looks at what is left

    @property
    def actor(self) -> str:
        return f"{self.kind} {self.pid}"

    def on_call(self, call: Call) -> None:
        by, found, path = f"{self.kind} {call.pid}", call.result, call.path
        if isinstance(found, Exception):
            say("Stripe" if "stripe" in path else path.split(".")[0], f"to {by}: {found}")
        elif path == "decider.decide":
            say(by, f"decides: {found.action}" + (f" ({found.text})" if found.text else ""))
        elif path == "shop.order":
            say("shop", f"order: {found.item}" if found else "there is no such order")
        elif path == "shop.customer_history":
            say("shop", f"earlier refunds of this customer: {found.earlier_refunds}")
        elif path == "xmemory.read" and found.reader_result:
            say("xmemory", read_out(found.reader_result))
        elif path == "xmemory.write_async":
            say("xmemory", "the record of this case is queued")
        elif path.endswith("create_async"):
            for_whom = f", for {by}, which is dead" if call.pid == self.dead else ""
            amount = money(found.amount, found.currency)
            say("Stripe", f"refund {found.id} of {amount}: {found.status}{for_whom}")
        elif self.looking and path.endswith("retrieve_async"):
            say("Stripe", f"the whole payment: {money(found.amount, found.currency)}, paid")
        elif self.looking and path.endswith("list_async"):
            refunds = [f"{money(r.amount, r.currency)} {r.status}" for r in found.data]
            say("Stripe", f"refunds: {', '.join(refunds) or 'none'}")
            self.looking = False


# --- One scenario --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    order_id: str
    crash: str
    typed: bool
    ui: bool

    @property
    def request(self) -> RefundRequest:
        customer = ORDERS.get(self.order_id, ORDERS["1234"]).customer_id
        return RefundRequest(self.order_id, customer, f"Please refund order {self.order_id}.")


def scripted(question: Question) -> Answer:
    to_customer = question.to == "customer"
    text = SCRIPT.get(question.text, ELSE) if to_customer else "Approved."
    return Answer(question.id, text, approve=not to_customer)


class Scenario:
    """What both scenarios share: the world, the people in it, the trap and the kill."""

    def __init__(self, options: Options, kind: str, case_id: str) -> None:
        self.options, self.case_id, self.narrator = options, case_id, Narrator(kind)
        self.world = World(list(ORDERS.values()), self.reply, self.narrator.on_call)
        self.seconds = TYPING_SECONDS if options.typed else STEP_SECONDS
        self.crash = Crash(self.world, options.crash)

    async def reply(self, question: Question) -> Answer:
        """The customer and the reviewer: scripted, or the person at the terminal."""
        say(self.narrator.actor, f"asks the {question.to}: {question.text}")
        to_customer = question.to == "customer"
        if not self.options.typed:
            answer = scripted(question)
            say(question.to, answer.text)
            return answer
        prompt = f"{'your answer' if to_customer else 'approve? y/n':>14}> "
        while True:
            try:
                typed = await anyio.to_thread.run_sync(input, prompt, abandon_on_cancel=True)
            except EOFError:
                raise HarnessError("The input ended before the case did.") from None
            text = typed.strip()
            if to_customer and 0 < len(text) <= refund_agent.MAX_TEXT:
                return Answer(question.id, text)
            if not to_customer and text.lower() in ("y", "n"):
                return Answer(question.id, text, approve=text.lower() == "y")
            say("demo", "please type an answer" if to_customer else "please type y or n")

    async def kill(self, child: Child) -> None:
        if await self.crash.kill(child, self.seconds):
            self.narrator.dead = child.pid
            say("demo", f"SIGKILL to process {child.pid}: {CRASHES[self.options.crash]}.")

    def tell(self) -> None:
        assert self.world.result is not None
        say(self.narrator.actor, f"tells the customer: {self.world.result.told}")
        if self.world.result.notice:
            say(self.narrator.actor, f"notes: {self.world.result.notice}")


class Plain(Scenario):
    """The loop in a plain process. After the kill, a new one has to start over."""

    async def until_the_kill(self) -> None:
        say("customer", self.options.request.message)
        async with harness.agent("plain", self.world, self.job(look=False), self.narrator) as first:
            await self.kill(first)

    async def start_over(self) -> None:
        if self.crash.killed_at:
            say("customer", "Hello? What happened to my refund?")
            self.narrator.looking, job = True, self.job(look=True)
            async with harness.agent("plain", self.world, job, self.narrator) as second:
                say("demo", f"starts a new process, {second.pid}")
                await self.crash.finish(second, self.seconds)
        self.tell()

    def job(self, *, look: bool) -> dict[str, object]:
        intent = self.world.payment_intent(self.options.order_id)
        return {"request": asdict(self.options.request), "intent": intent if look else None}


class Durable(Scenario):
    """The loop as a Workflow. After the kill, a new Worker goes on where the dead one stood."""

    async def play(self, server: Server, first: Child, job: Mapping[str, str | None]) -> None:
        client, world = await server.client(), self.world
        say("customer", self.options.request.message)
        async with harness.no_open_run(client, self.case_id, world):
            case = await refund_agent.start_case(
                client,
                self.options.request,
                task_queue=str(job["task_queue"]),
                case_id=self.case_id,
            )
            async with background(partial(world.attend, case)):
                await self.kill(first)
            if self.crash.killed_at:
                left = await harness.what_survived(case, client)
                say(
                    "Temporal",
                    f"no Worker is alive; recorded: {len(left.answers)} answers, "
                    f"{len(left.finished)} Activities, next: {left.next_action}",
                )
                async with harness.agent("worker", world, job, self.narrator) as second:
                    say("demo", f"starts a new Worker, process {second.pid}")
                    async with background(partial(world.attend, case)):
                        await self.crash.finish(second, self.seconds)
            self.survived = await harness.what_survived(case, client)
        self.tell()


# --- What was claimed, and what was counted ------------------------------------------------------

ROWS = {
    "questions": "questions to the customer",
    "reviews": "questions to the reviewer",
    "decisions": "decisions made",
    "lookups": "lookups",
    "stripe_calls": "calls to Stripe",
    "refund_requests": "  of them to refund",
    "refunds": "refunds",
    "remembered": "cases remembered",
    "kill_to_refund": "seconds from kill to refund",
    "kill_to_end": "seconds from kill to the end",
}
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


def claims(plain: Plain, durable: Durable) -> Iterator[tuple[bool, str]]:
    """What this demo claims, each with whether it was observed."""
    p, d = (harness.tally(s.world, s.options.request) for s in (plain, durable))
    finished, result = durable.survived.finished, durable.world.result
    asked = [question.id for question in durable.world.people.asked]
    told_no = plain.options.typed and result is not None and result.outcome == "denied"
    expected = 1 if plain.options.order_id in WITH_REFUND and not told_no else 0
    yield p.questions == 2 * d.questions > 0, "the plain process made the customer start over"
    yield len(set(asked)) == len(asked), "the Workflow asked no question twice"
    yield d.decisions == finished.count("agent_decide_next_step"), "it made no decision twice"
    looked_up = sum(name.startswith("lookup_") for name in finished)
    # Every attempt of issue_refund asks the shop once more, before it asks Stripe.
    attempts = sum(point == "before issue_refund" for _, point in durable.world.gate.reached)
    yield 0 <= d.lookups - looked_up <= attempts, "it repeated no lookup that had finished"
    yield d.refunds == expected, "it moved money once" if expected else "it moved no money"
    once = bool(result and result.remembered) and (d.remembered, d.writes) == (1, 1)
    yield once, "it remembered the case once"
    if plain.options.crash == "during-memory-write":
        yield (p.writes, d.writes) == (2, 1), "it wrote to memory once, the plain process twice"
    if plain.options.crash == "refund-in-flight":
        yield d.refund_requests > 1, "it asked for the refund more than once, and that was safe"
        lost = plain.world.result is not None and plain.world.result.outcome == refund_agent.HUMAN
        yield lost, "the plain process does not know of its refund and asks for a colleague"
    else:
        yield d.refund_requests == expected, "it never had to ask for the refund a second time"
    yield (
        p.refunds == expected,
        "the plain process moved money once as well"
        if expected
        else "the plain process moved none",
    )


def show_counts(plain: Plain, durable: Durable) -> int:
    """Print the table and the claims; the exit code."""
    if not plain.crash.killed_at or not durable.crash.killed_at:
        print("\nThe case ended before the crash point, so there was nothing to kill.")
        return 0 if plain.options.typed else 1
    heading("What was counted")
    print(f"{'':32}{'plain process':>16}{'Temporal Workflow':>20}")
    columns = [
        harness.tally(s.world, s.options.request, s.crash.killed_at) for s in (plain, durable)
    ]
    for name, label in ROWS.items():
        cells = [getattr(column, name) for column in columns]
        if name == "reviews" and not any(cells):
            continue
        shown = ["-" if n is None else f"{n:.1f}" if type(n) is float else str(n) for n in cells]
        print(f"{label:32}{shown[0]:>16}{shown[1]:>20}")
    print(f"\n{WHY[plain.options.crash]}\n\n{LESSON}\n")
    seen = list(claims(plain, durable))
    for observed, text in seen:
        say("observed" if observed else "NOT OBSERVED", text)
    return 0 if all(observed for observed, _ in seen) else 1


# --- The program ---------------------------------------------------------------------------------


async def demo(options: Options) -> int:
    started = time.monotonic()
    print("One refund agent, killed twice. Real: the processes, the kills, the Temporal server.")
    print("Stand-ins: Stripe, xmemory, the shop, and the decider (a fixed policy, no model).")
    print(
        f"The customer {'is you' if options.typed else 'follows a script'}. "
        f"The kill comes when {CRASHES[options.crash]}."
    )
    async with harness.temporal_server(ui=options.ui) as server:
        case_id = case_id_on(server, options)
        plain, durable = Plain(options, "agent", case_id), Durable(options, "worker", case_id)
        await play_both(server, plain, durable)
        code = show_counts(plain, durable)
        await close(server, started)
    return code


async def play_both(server: Server, plain: Plain, durable: Durable) -> None:
    job = {"temporal": server.address, "task_queue": f"demo-{uuid.uuid4()}", "worker": "demo"}
    async with plain.world.open(), durable.world.open():
        heading("1. Without Temporal: the loop in a plain process")
        await plain.until_the_kill()
        # The Worker of the second scenario starts behind the curtain.
        async with harness.agent("worker", durable.world, job, durable.narrator) as first:
            await plain.start_over()
            heading("2. With Temporal: the same loop as a Workflow, run by a Worker process")
            await durable.play(server, first, job)


async def everywhere(options: Options) -> int:
    started = time.monotonic()
    print("One refund agent, killed everywhere. Real: processes, kills, the Temporal server.")
    print("Stand-ins: Stripe, xmemory, shop, people, and the decider (a fixed policy, no model).")
    print(
        f"Order {options.order_id} is first played without a kill. Then it is played once for "
        "each point of that run:\na Worker is killed there, and a new one finishes.",
        flush=True,
    )

    async def reply(question: Question) -> Answer:
        return scripted(question)

    async with (
        harness.temporal_server(ui=options.ui) as server,
        crash_everywhere.workers() as start_worker,
    ):
        setting = crash_everywhere.Setting(
            options.request,
            list(ORDERS.values()),
            reply,
            server,
            case_id_on(server, options),
            start_worker,
        )
        refunds = 1 if options.order_id in WITH_REFUND else 0
        code = await crash_everywhere.kill_everywhere(setting, refunds)
        await close(server, started)
    return code


def case_id_on(server: Server, options: Options) -> str:
    case_id = refund_agent.case_id_for(options.request)
    if server.ours:
        return case_id
    return f"{case_id}-{uuid.uuid4().hex[:8]}"  # other people use that server, too


async def close(server: Server, started: float) -> None:
    print(f"\nTook {time.monotonic() - started:.1f} seconds.", flush=True)
    if server.ui:
        print(f"The Web UI stays up at {server.ui} until you press Ctrl-C.", flush=True)
        with suppress(asyncio.CancelledError):
            await anyio.sleep_forever()


def command_line() -> argparse.ArgumentParser:
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
        help="when to kill it; the first, or the fourth for an order without a "
        f"refund, if not said otherwise\n{points}\neverywhere: at every Activity, "
        "Workflow Task and wait of one case, one row each",
    )
    orders = "\n".join(
        f"{o.order_id}: {o.item}, {money(o.amount, o.currency)}, {o.shows}" for o in ORDERS.values()
    )
    parser.add_argument(
        "--order",
        metavar="ID",
        help="what to refund; the first, or the second "
        f"for everywhere, if not said otherwise\n{orders}",
    )
    parser.add_argument("--ask", action="store_true", help="you are the customer and the reviewer")
    parser.add_argument("--ui", action="store_true", help="keep the server up, with its Web UI")
    return parser


def parse(arguments: list[str] | None = None) -> Options:
    parser = command_line()
    given = parser.parse_args(arguments)
    order = given.order
    if order is None:
        order = "1235" if given.crash == "everywhere" else "1234"
    if not refund_agent.ID.fullmatch(order):
        parser.error("an order id is 1 to 64 letters, digits, - or _")
    if given.crash == "everywhere":
        if given.ask:
            parser.error("--crash everywhere plays one case dozens of times; leave out --ask")
        return Options(order, given.crash, False, given.ui)
    refunds = order in WITH_REFUND
    crash = given.crash or ("before-refund" if refunds else "during-memory-write")
    if not refunds and crash != "during-memory-write":
        parser.error(f"order {order} ends without a refund; use --crash during-memory-write")
    return Options(order, crash, given.ask, given.ui)


if __name__ == "__main__":
    given = parse()
    harness.run(partial(everywhere if given.crash == "everywhere" else demo, given))
