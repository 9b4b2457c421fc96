"""A customer-support refund agent that survives being killed. Read it from top to bottom.

The agent is one coroutine, `run_agent`. A runtime tells it how to act and how to ask. A plain
process is one runtime: it awaits each call directly. The Workflow below is the other: it schedules
each call as an Activity. The loop does not know which one it runs in.

    case        one request for a refund, from the first message to the result
    order line  what is refunded: one line of an order, as the shop names it
    known       what the case has learned so far, and all that the decider sees
    step        what the decider wants next: ask, look something up, or decide
    decider     a fixed one, `decide`, or a live model. Code bounds what it may do
    terms       item, price, currency and payment: what a decision rests on
    handover    a case that a colleague takes over
    reset       an operator makes Temporal run a case again from an earlier point of its history

Every fact has an owner, and the owner's record wins. Stripe owns whether money moved, the shop
owns the order, and Event History owns where the work stands. Memory informs and never decides.
"""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeVar

from temporalio import activity, workflow
from temporalio.client import Client, WorkflowHandle, WorkflowQueryFailedError
from temporalio.common import RetryPolicy, WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import ApplicationError, WorkflowAlreadyStartedError
from temporalio.service import RPCError
from temporalio.worker import Worker

with workflow.unsafe.imports_passed_through():  # or the sandbox imports it for each case
    import memory_activities

T = TypeVar("T")

# --- What the agent knows ------------------------------------------------------------------------
# These types are written into Event History, where open cases hold old ones: only ever add fields,
# with a default. Amounts are in minor units: cents for usd, whole yen for jpy. Times are seconds
# since the epoch.


@dataclass(frozen=True)
class RefundRequest:
    """What the customer wants. `order_id` is spelled as the shop spells it."""

    order_id: str
    customer_id: str
    message: str
    line: int = 1

    @property
    def name(self) -> str:
        """The order line's name at Stripe, in the idempotency key and in the refund's metadata."""
        return f"{self.order_id}:{self.line}"


@dataclass(frozen=True)
class Refund:
    """A refund at Stripe. `status` is Stripe's word."""

    id: str
    status: str
    amount: int
    currency: str


@dataclass(frozen=True)
class Order:
    """An order line as the shop has it, and its payment as Stripe has it."""

    item: str
    price: int
    currency: str
    payment_intent: str
    purchased_at: float
    captured: int = 0  # how much of the payment Stripe received
    refund: Refund | None = None  # of this very line, if Stripe has one already

    @property
    def terms(self) -> tuple[object, ...]:
        return self.item, self.price, self.currency, self.payment_intent


@dataclass(frozen=True)
class Known:
    """Everything that the case has learned."""

    request: RefundRequest
    started_at: float
    recalled: tuple[str, ...] | None = None  # past cases; None: no record, or it was not read
    answers: dict[str, str] = field(default_factory=dict)  # by question
    order: Order | None = None
    earlier_refunds: int | None = None
    policy: str | None = None  # why the shop's rules forbid a refund; empty if they do not
    rejected: tuple[str, ...] = ()  # the steps that the guard rails refused, and why


MAX_TEXT = 2_000  # characters of one text from outside; a few fit into a model and a history


@dataclass(frozen=True)
class Step:
    """What the decider wants next. `text` is the question, or the reason for a decision."""

    action: str
    text: str = ""
    amount: int = 0


@dataclass(frozen=True)
class Question:
    id: str
    to: str  # customer or reviewer
    text: str


@dataclass(frozen=True)
class Answer:
    """Only a reviewer approves. A reviewer's text is a note; the result of a denial keeps it."""

    question_id: str
    text: str = ""
    approve: bool = False


@dataclass(frozen=True)
class AgreedRefund:
    """What was decided, with its terms. With a `refund_id`, it is a daily look at that refund."""

    request: RefundRequest
    order: Order | None = None
    amount: int = 0
    refund_id: str = ""


@dataclass(frozen=True)
class RefundResult:
    """How a case stands. The customer hears `told`; colleagues read `notice`."""

    outcome: str  # a key of `TOLD`, below
    told: str
    refund: Refund | None = None
    remembered: bool = False  # whether memory has the case
    notice: str = ""


# --- Decider and guard rails ---------------------------------------------------------------------

# Both tables have the same currencies. Every other currency is for a human.
DECIMALS = {"usd": 2, "eur": 2, "gbp": 2, "jpy": 0}
AUTO_APPROVE_LIMIT = {"usd": 100_00, "eur": 100_00, "gbp": 100_00, "jpy": 15_000}  # of one case


def money(amount: int, currency: str) -> str:
    decimals = DECIMALS.get(currency, 0)
    return f"{amount / 10**decimals:,.{decimals}f} {currency.upper()}"


INTAKE = ("Was the package opened?", "What was damaged?")


def decide(known: Known) -> Step:
    """The fixed decider, a pure function: ask two questions, look up two records, then decide. A
    small refund for a customer with a clean history is approved however old the order is."""
    if len(known.answers) < len(INTAKE):
        return Step("ask", INTAKE[len(known.answers)])
    if known.order is None:
        return Step("lookup_order")
    if known.earlier_refunds is None:
        return Step("lookup_customer_history")
    price = known.order.price
    # One earlier refund is an accident. Two need a second look.
    if known.earlier_refunds <= 1 and price <= AUTO_APPROVE_LIMIT[known.order.currency]:
        return Step("approve", "within the limit, clean history", price)
    if known.policy is None:
        return Step("check_refund_policy")
    if known.policy:
        return Step("deny", known.policy)
    return Step("escalate", f"earlier refunds of this customer: {known.earlier_refunds}", price)


LOOKUPS = {  # each with the field of Known that it fills
    "lookup_order": "order",
    "lookup_customer_history": "earlier_refunds",
    "check_refund_policy": "policy",
}
ACTIONS = ("ask", *LOOKUPS, "approve", "escalate", "deny")
MAX_QUESTIONS = 4  # `decide` asks two; a customer answers a few questions, not a dozen


def refusal(step: Step, known: Known) -> str:
    """The guard rails: why a step is not carried out, or "". They hold for every decider,
    no matter what a customer or a memory told it. The decider chooses what to learn first."""
    if step.action not in ACTIONS:
        return f"there is no such step; choose one of {', '.join(ACTIONS)}"
    if step.action in ("ask", "deny") and not letters(step.text):
        return "the text is empty"
    if step.action == "ask":
        if letters(step.text) in map(letters, known.answers):
            return "this question was already answered"
        if len(known.answers) >= MAX_QUESTIONS:
            return f"the customer has answered {MAX_QUESTIONS} questions; that is enough"
    if step.action in LOOKUPS and getattr(known, LOOKUPS[step.action]) is not None:
        return "this is already known"
    if step.action in ("check_refund_policy", "approve", "escalate"):
        if known.order is None:
            return "look up the order first"
        if step.action != "check_refund_policy" and not 0 < step.amount <= known.order.price:
            return f"the amount must be above 0, and at most {known.order.price} minor units"
    return ""


def letters(text: str) -> str:
    """A question without case, spaces and punctuation, which do not make it another question."""
    return "".join(filter(str.isalnum, text.casefold()))


# --- The loop ------------------------------------------------------------------------------------
# The happy path: recall, ask twice, look up twice, refund, tell, remember. Three things can go
# wrong, and each has one answer.
#
# * A process dies. Replay runs this code again from the top and hands each finished Activity its
#   recorded result, so a new Worker arrives where the dead one stood. One call may be in flight at
#   that moment, and it is made again. `issue_refund` is safe to call again.
# * An Activity fails for good. It raises ApplicationError, and the case becomes a handover.
# * The world changes while nothing runs. `issue_refund` asks the owners again before it sends.


class Runtime(Protocol):
    """How to act and how to ask. `act` carries out a method of RefundActivities, below, and raises
    ApplicationError if it fails for good. `ask` returns None if there was no answer in time. `tell`
    shows how the case stands. `next_day` waits for a day; a plain process returns False instead."""

    started_at: float  # when the case started; a replay and a reset do not change it
    memory: memory_activities.WorkflowMemory

    async def act(self, method: Callable[[Any, Any], Awaitable[T]], argument: Any) -> T: ...
    async def ask(self, question: Question) -> Answer | None: ...
    def tell(self, result: RefundResult) -> None: ...
    async def next_day(self) -> bool: ...


async def run_agent(request: RefundRequest, runtime: Runtime) -> RefundResult:
    """Work on one case until it has a result. Raises only if it is canceled before its refund is
    requested."""
    # Memory comes first, because the decider should see it. If it fails, the case goes on.
    known = Known(request, runtime.started_at, await recall(request, runtime))
    try:
        result = await work(known, runtime)
    except ApplicationError as failure:
        outcome = failure.type or HUMAN  # an outcome, if `final_failure` made it
        result = (
            make_result(outcome) if outcome in ASK_AGAIN else hand_over(request, failure.message)
        )
    # The customer hears the result as soon as it is known. Memory is best effort, so it comes
    # after. A cancel that arrives from here on changes nothing, because the money may have moved.
    runtime.tell(result)
    result = await to_its_end(remember(result, known, runtime))
    if result.refund and result.outcome in OPEN and not is_canceled():
        final = await watch(result.refund, request, runtime)
        if final.outcome == result.outcome:  # canceled, or a plain process
            return result
        # Memory has the old outcome, and weeks may have passed. So read the record again first.
        known = replace(known, recalled=await to_its_end(recall(request, runtime)))
        result = await to_its_end(remember(final, known, runtime))
    return result


MAX_TURNS = 12  # `decide` needs six; it also ends a case whose terms keep changing


async def work(known: Known, runtime: Runtime) -> RefundResult:
    """Decide, act, learn, until a step ends the case."""
    for turn in range(MAX_TURNS):
        # The decider sees everything that is known, and chooses one step. If the process dies
        # meanwhile, it chooses again. A recorded choice is never made again.
        step = await runtime.act(RefundActivities.agent_decide_next_step, known)
        if why := refusal(step, known):
            # Nothing was carried out. The decider sees why and may choose better.
            known = replace(known, rejected=(*known.rejected, f"{step.action}: {why}"))
        elif step.action == "ask":
            # Nobody may answer for days. The wait costs nothing and survives every Worker.
            answer = await runtime.ask(question_about(known, turn, "customer", step.text))
            if not answer:
                return make_result("no answer")
            known = replace(known, answers=known.answers | {step.text: answer.text})
        elif step.action in LOOKUPS:
            # Ask the owner of the fact. To ask again is harmless.
            found = await runtime.act(getattr(RefundActivities, step.action), known)
            known = replace(known, **{LOOKUPS[step.action]: found})
            if known.order and known.order.refund:
                # An earlier run or a colleague made this refund. Go on as if it were ours.
                return report(known.order.refund, known.request)
        elif step.action == "deny":
            return make_result("denied", reason=step.text)
        else:
            result = await review_and_refund(step, known, turn, runtime)
            if result:
                return result
            # The terms changed before anything was sent. Forget what depends on the order, keep the
            # rest, and decide again.
            known = replace(known, order=None, policy=None)
    return hand_over(known.request, "the decider found no decision within its bounds")


async def review_and_refund(
    step: Step, known: Known, turn: int, runtime: Runtime
) -> RefundResult | None:
    """Ask a reviewer if one is needed, then refund. None if the terms changed and nothing was
    sent."""
    order, request = known.order, known.request
    assert order  # the guard rails refuse this step without an order
    if step.action == "escalate" or step.amount > AUTO_APPROVE_LIMIT[order.currency]:
        # No decider can approve this amount alone.
        refund_of = f"Refund {money(step.amount, order.currency)} for {order.item}"
        text = f"{refund_of}, order {request.name}? ({step.text})"
        answer = await runtime.ask(question_about(known, turn, "reviewer", text))
        if not answer:
            return hand_over(request, "no reviewer answered in time")
        if not answer.approve:
            return make_result("denied", reason="a colleague decided so", notice=answer.text)
    # From here on money may move. What was agreed travels with the effect. A cancel waits for the
    # outcome, because a request that has left cannot be taken back. If nothing was sent, the cancel
    # ends the case.
    agreed = AgreedRefund(request, order, step.amount)
    refund = await to_its_end(runtime.act(RefundActivities.issue_refund, agreed))
    if refund:
        return report(refund, request)
    if is_canceled():
        raise asyncio.CancelledError
    return None


def question_about(known: Known, turn: int, to: str, text: str) -> Question:
    """The id decides which answers count, because a reset applies old answers again. It holds the
    turn, as a question asked twice needs two answers; the text and the terms, as an approval of
    others approves nothing; and the start, as a new run takes no answer meant for an old one."""
    about = (text, known.order and known.order.terms, known.started_at)
    digest = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
    return Question(f"{to}-{turn}-{digest}", to, text)


async def watch(refund: Refund, request: RefundRequest, runtime: Runtime) -> RefundResult:
    """Look at an open refund once a day, and tell what Stripe says on that day."""
    result = report(refund, request)
    look = AgreedRefund(request, refund_id=refund.id)
    with suppress(asyncio.CancelledError):  # between two looks: end with what Stripe said last
        for _ in range(30):  # days; a bank that needs longer than a month needs a person
            if result.outcome not in OPEN or not await runtime.next_day():
                return result
            with suppress(ApplicationError):  # a look that fails is over; tomorrow is another
                if found := await runtime.act(RefundActivities.issue_refund, look):
                    result = report(found, request)
                    runtime.tell(result)
        if result.outcome in OPEN:
            result = hand_over(request, f"{refund.id} is still open after a month", refund)
            runtime.tell(result)
    return result


async def to_its_end(running: Awaitable[T]) -> T:
    """Wait for this, even if the case is canceled meanwhile."""
    task = asyncio.ensure_future(running)
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.shield(task)
    return task.result()


def is_canceled() -> bool:
    """Whether a cancel was requested, even if `to_its_end` has caught it."""
    task = asyncio.current_task()
    return bool(task and task.cancelling())


# --- How a case ends -----------------------------------------------------------------------------

METADATA_KEY = "order_line"  # in the metadata of a refund; the value is the order line's name
HUMAN = "needs a human"
TOLD = {  # what the customer hears
    "refund succeeded": "Your refund of {money} is sent.",
    "refund pending": "Your refund of {money} is on its way; it is not confirmed yet.",
    "refund requires_action": "Your refund of {money} waits for your bank details.",
    "refund failed": "Your refund of {money} came back. A colleague will write to you.",
    "refund canceled": "Your refund of {money} was canceled. A colleague will write to you.",
    "denied": "We cannot refund this order: {reason}.",
    "order not found": "We found no such order of yours.",
    "not paid": "This order is not paid, so there is nothing to refund.",
    "no answer": "We did not hear back in time, so this case is closed. You can ask again.",
    HUMAN: "A colleague will look at this and write to you.",
}
# Stripe will change these. A refund that succeeded can still fail for a month; that is not watched.
OPEN = ("refund pending", "refund requires_action")
# Nothing was decided, so the customer may ask again. Every other result is final here: a colleague
# goes on, if one was told to.
ASK_AGAIN = ("order not found", "not paid", "no answer")


def make_result(
    outcome: str, refund: Refund | None = None, *, reason: str = "", notice: str = ""
) -> RefundResult:
    amount = money(refund.amount, refund.currency) if refund else ""
    told = TOLD[outcome].format(money=amount, reason=reason)
    return RefundResult(outcome, told, refund, notice=notice)


def report(refund: Refund, request: RefundRequest) -> RefundResult:
    """Say what Stripe says. A colleague helps a customer who did not get the money."""
    outcome = f"refund {refund.status}"
    if outcome in ("refund succeeded", *OPEN):
        return make_result(outcome, refund)
    return hand_over(request, f"{refund.id} is {refund.status}", refund, outcome)


def hand_over(
    request: RefundRequest, why: str, refund: Refund | None = None, outcome: str = HUMAN
) -> RefundResult:
    """A colleague goes on by hand, and must not pay what this case has paid or may still pay."""
    notice = (
        f"{why}. A refund may exist or still arrive. In Stripe, look at all refunds of the payment"
        f" of order {request.order_id} for the metadata {METADATA_KEY} = {request.name}. One that"
        " failed or was canceled does not count. One without metadata may be the refund of this"
        " line: decide that first. If none counts, wait an hour and look again. If there is still"
        " none and a refund is due, make one by hand, and give it that metadata:"
        f" key {METADATA_KEY}, value {request.name}."
    )
    return make_result(outcome if outcome in TOLD else HUMAN, refund, notice=notice)


# --- Long-term memory ----------------------------------------------------------------------------

MAX_RECALLED = 10  # past cases of one customer, the latest ones; older ones say little


async def recall(request: RefundRequest, runtime: Runtime) -> tuple[str, ...] | None:
    """The past cases in the record of this customer. The scope keeps other customers out. None if
    no record was read: then there may be one or not."""
    key = {"customer_id": request.customer_id}
    try:
        found = await runtime.memory.read(
            "Customer", read_mode="raw-tables", scope=memory_activities.scope_to("Customer", key)
        )
        rows = found.rows()
    except ApplicationError:
        return None
    if found.notice or not rows:
        return None
    cases = str(rows[0].get("past_cases") or "").splitlines()
    return tuple(case[:MAX_TEXT] for case in cases[-MAX_RECALLED:])


async def remember(result: RefundResult, known: Known, runtime: Runtime) -> RefundResult:
    """Add the case to the record of its customer, one line for each order line. A record that was
    not read is never overwritten: `create` fails if there is one."""
    recalled, request = known.recalled, known.request
    line = f"order {request.order_id} line {request.line}: "
    others = [case for case in recalled or () if not case.startswith(line)]
    cases = "\n".join([*others, line + result.outcome][-MAX_RECALLED:])
    change = memory_activities.create if recalled is None else memory_activities.update
    key = {"customer_id": request.customer_id}
    try:
        await runtime.memory.write_durable(
            structured_mutations=[change("Customer", key, {"past_cases": cases})]
        )
    except ApplicationError as failure:
        notice = f"{result.notice} Memory may not have this case: {failure.message}."
        return replace(result, notice=notice.strip())
    return replace(result, remembered=True)


# --- The five Activities -------------------------------------------------------------------------


@asynccontextmanager
async def calling(service: str) -> AsyncIterator[None]:
    """Turn every error of a call into one type with a fixed text. `from None` keeps its own text,
    which may quote a key or a customer, out of Event History. A client that hangs is cut off before
    Temporal cuts off the attempt. Only Stripe's errors have an `http_status`, so only they are
    final."""
    try:
        async with asyncio.timeout(memory_activities.client_timeout()):
            yield
    except ApplicationError:
        raise
    except Exception as error:
        status = getattr(error, "http_status", None) or 0
        code = getattr(getattr(error, "error", None), "code", None) or status or "no usable answer"
        # An operator mends a refused key. A conflict or a rate limit passes. Another 4xx is final.
        final = 400 <= status < 500 and status not in (401, 403, 408, 409, 429)
        raise ApplicationError(
            f"{service}: {code}", type="CallFailed", non_retryable=final
        ) from None


def final_failure(why: str, type: str = HUMAN) -> ApplicationError:
    """A fact that no retry changes. The type is the outcome of the case."""
    return ApplicationError(why, type=type, non_retryable=True)


def checked(record: T) -> T:
    """A fact from outside. With a field of another type, no Workflow could decode it, and the case
    would stand still; an int field would cut a price of 80.5 to 80."""
    for name, wanted in type(record).__annotations__.items():
        if not isinstance(getattr(record, name), wanted):
            raise final_failure(f"{name} is no {wanted}")
    return record


@dataclass(frozen=True)
class RefundActivities:
    """Every call to the outside.

    `stripe` has the shape of `stripe.StripeClient`. Its own retries are off, because Temporal owns
    every retry. `shop` owns the orders, and never changes or reuses an id. `order(order_id, line)`
    returns None, or an object with order_id, customer_id, item, price, currency (lower case, as at
    Stripe), payment_intent and purchased_at. `customer_history(customer_id)` returns an object with
    earlier_refunds. `decide` is a coroutine function. It returns an object with the attributes of a
    Step; the customer reads the text of a denial.
    """

    stripe: Any
    shop: Any
    decide: Callable[[Known], Awaitable[object]]

    @activity.defn
    @memory_activities.heartbeating
    async def agent_decide_next_step(self, known: Known) -> Step:
        async with calling("the decider"):
            match await self.decide(known):  # by its attributes, and their types
                case object(action=str(action), text=str(text), amount=int(amount)):
                    return Step(action[:MAX_TEXT], text[:MAX_TEXT], amount)
        # A model may return anything. The guard rails refuse this step, and it may choose again.
        return Step("malformed")

    @activity.defn
    @memory_activities.heartbeating
    async def lookup_order(self, known: Known) -> Order:
        """The order line and its payment. An order that cannot be refunded is refused here, so
        that nobody reviews it."""
        async with calling("Stripe"):  # around both services: an attempt has one deadline
            order = await self._order_at_shop(known.request)
            if not order:
                raise final_failure("the shop has no such order of the customer", "order not found")
            payment = await self.stripe.v1.payment_intents.retrieve_async(
                order.payment_intent, {"expand": ["latest_charge"]}
            )
            charge = payment.latest_charge
            # A card that was only authorized has a charge that succeeded and was not captured.
            if not charge or charge.status != "succeeded" or not charge.captured:
                raise final_failure("no charge succeeded and was captured", "not paid")
            if charge.amount_captured != charge.amount:
                raise final_failure(f"{order.payment_intent} was captured in part")
            if payment.currency != order.currency or order.currency not in DECIMALS:
                raise final_failure(
                    f"order in {order.currency}, {order.payment_intent} in {payment.currency}"
                )
            order = replace(order, captured=charge.amount_captured)
            return replace(
                order, refund=await self._refund_on_record(known.request, order, order.price)
            )

    @activity.defn
    @memory_activities.heartbeating
    async def lookup_customer_history(self, known: Known) -> int:
        """How many refunds the customer had before."""
        async with calling("the shop"):
            found = await self.shop.customer_history(known.request.customer_id)
            return int(found.earlier_refunds)

    @activity.defn
    @memory_activities.heartbeating
    async def check_refund_policy(self, known: Known) -> str:
        """Why the shop's rules forbid a refund, or "". What counts is when the customer asked, not
        how long the case then takes."""
        window = timedelta(days=30)
        assert known.order
        late = known.started_at - known.order.purchased_at > window.total_seconds()
        return f"bought more than {window.days} days ago" if late else ""

    @activity.defn
    @memory_activities.heartbeating
    async def issue_refund(self, agreed: AgreedRefund) -> Refund | None:
        """Refund an order line once, however often this runs. The customer makes one request; there
        are possibly two calls, and one refund. None if the terms changed and nothing was sent.

        Hours may lie between the decision and this attempt. So every attempt asks the owners first:
        the shop for the terms, Stripe for a refund of this line. The idempotency key covers a call
        that is still on its way, which nobody can see. It is made of the order line alone, so a
        reset, a second case and a second process have the same key. Stripe forgets a key after a
        day. A refund on record stays.
        """
        refunds = self.stripe.v1.refunds
        if agreed.refund_id:  # the daily look, which cannot create
            async with calling("Stripe"):
                return seen(await refunds.retrieve_async(agreed.refund_id))
        request, order = agreed.request, agreed.order
        assert order
        async with calling(f"Stripe, {order.payment_intent}"):
            now = await self._order_at_shop(request)
            if done := await self._refund_on_record(request, order, agreed.amount):
                return done
            if not now or now.terms != order.terms:
                if activity.in_activity() and activity.info().attempt > 1:
                    raise final_failure("the terms changed after a refund may have been requested")
                return None
            params = {
                "payment_intent": order.payment_intent,
                "amount": agreed.amount,
                "metadata": {METADATA_KEY: request.name},
            }
            return seen(
                await refunds.create_async(params, {"idempotency_key": f"refund:{request.name}"})
            )

    async def _order_at_shop(self, request: RefundRequest) -> Order | None:
        """None if the shop has no order of this very name, or has it for another customer."""
        async with calling("the shop"):
            found = await self.shop.order(request.order_id, request.line)
            names = (request.order_id, request.customer_id)
            if not found or (found.order_id, found.customer_id) != names:
                return None
            return checked(
                Order(
                    found.item,
                    found.price,
                    found.currency,
                    found.payment_intent,
                    float(found.purchased_at),
                )
            )

    async def _refund_on_record(
        self, request: RefundRequest, order: Order, amount: int
    ) -> Refund | None:
        """The refund of this line, in any status. Of several, a live one wins, and then the
        newest. None if there is none and `amount` can be refunded. Raises if a human must look: at
        a refund that nobody can explain, or at a payment that has too little left."""
        query: dict[str, Any] = {"payment_intent": order.payment_intent, "limit": 100}
        recorded: list[Any] = []
        while True:
            page = await self.stripe.v1.refunds.list_async(query)
            recorded += page.data  # newest first
            if not page.has_more:
                break
            query["starting_after"] = recorded[-1].id
        # The money of a refund that failed or was canceled came back.
        live = [refund for refund in recorded if refund.status not in ("failed", "canceled")]
        for refund in live + recorded:
            if getattr(refund.metadata, METADATA_KEY, "") == request.name:
                return seen(refund)
        of_this_order = rf"{re.escape(request.order_id)}:[1-9][0-9]*"
        for refund in live:
            if not re.fullmatch(of_this_order, getattr(refund.metadata, METADATA_KEY, "")):
                raise final_failure(
                    f"{refund.id} of {order.payment_intent} names no line of this order"
                )
        if amount > order.captured - sum(refund.amount for refund in live):
            raise final_failure(f"{order.payment_intent} has less left than {amount}")
        return None


def seen(refund: Any) -> Refund:
    return checked(Refund(refund.id, refund.status, refund.amount, refund.currency))


# --- The Workflow --------------------------------------------------------------------------------

HEARTBEAT_TIMEOUT = timedelta(seconds=2)  # how long the death of a Worker goes unnoticed
ATTEMPT_TIMEOUT = timedelta(seconds=60)  # of an Activity; a model may think for most of that
ACTIVITY_RETRY = RetryPolicy(  # about seven hours of failing calls: an outage of a night
    initial_interval=timedelta(milliseconds=200),
    maximum_interval=timedelta(minutes=5),
    maximum_attempts=100,
)
PATIENCE = {"customer": timedelta(days=7), "reviewer": timedelta(days=30)}  # for one answer
A_DAY = timedelta(days=1)


@dataclass
class Progress:
    """How far a case is, for your clients. Show the customer questions to the customer, and what
    the result has `told`; the rest is for colleagues. `activity` is the last one of the agent, and
    `since` is when it was scheduled."""

    activity: str = "none"
    since: float = 0.0
    question: Question | None = None  # the one that is open
    result: RefundResult | None = None  # how the case stands, as soon as the customer may hear it


@workflow.defn
class RefundAgent:
    """The loop's other runtime."""

    @workflow.init
    def __init__(self, request: RefundRequest) -> None:
        # A Signal may be handled before `run` is called, so all state is set up here.
        self.started_at = workflow.info().workflow_start_time.timestamp()
        # Memory is useful and not needed, so nobody waits long for it: a minute or two before the
        # first decision, and minutes after the money has moved.
        self.memory = memory_activities.memory_for_workflow(
            read_timeout=timedelta(seconds=20),
            read_retry_policy=RetryPolicy(maximum_attempts=3),
            heartbeat_timeout=HEARTBEAT_TIMEOUT,
        )
        self._answers: dict[str, Answer] = {}
        self._progress = Progress()

    @workflow.run
    async def run(self, request: RefundRequest) -> RefundResult:
        return await run_agent(request, self)

    # A Signal is kept even while no Worker is alive. It may hold anything, and an exception here
    # would stop the case for ever. So take all arguments as plain JSON, and match their structure.
    # The first answer to a question counts. An answer may come before its question: a reset
    # applies old answers first.

    @workflow.signal
    def answer(self, *messages: Any) -> None:
        match messages:
            case [{"question_id": str(id), "text": str(text)}] if fits("customer", id, text):
                self._answers.setdefault(id, Answer(id, text))

    @workflow.signal
    def review(self, *messages: Any) -> None:
        match messages:
            case [{"question_id": str(id), "approve": bool(approve), **more}]:
                note = more.get("text", "")
                if isinstance(note, str) and fits("reviewer", id, note):
                    self._answers.setdefault(id, Answer(id, note, approve))

    @workflow.query
    def progress(self) -> Progress:
        return self._progress

    async def act(self, method: Callable[[Any, Any], Awaitable[T]], argument: Any) -> T:
        self._progress.activity = method.__name__
        self._progress.since = workflow.time()
        with memory_activities.application_errors():
            return await workflow.execute_activity_method(
                method,
                argument,
                start_to_close_timeout=ATTEMPT_TIMEOUT,
                heartbeat_timeout=HEARTBEAT_TIMEOUT,
                retry_policy=ACTIVITY_RETRY,
            )

    async def ask(self, question: Question) -> Answer | None:
        self._progress.question = question
        with suppress(TimeoutError):
            await workflow.wait_condition(
                lambda: question.id in self._answers, timeout=PATIENCE[question.to]
            )
        self._progress.question = None
        if question.to == "reviewer":
            # Signals are handled first, even if a cancel came earlier. The loop goes on to refund
            # without listening to a cancel, so a short timer lets that cancel in before.
            await workflow.sleep(timedelta(milliseconds=1))
        return self._answers.get(question.id)

    def tell(self, result: RefundResult) -> None:
        self._progress.result = result

    async def next_day(self) -> bool:
        await workflow.sleep(A_DAY)
        return True


def fits(sender: str, question_id: str, text: str) -> bool:
    """Whether a message can be an answer of this sender. A reviewer need not add a note."""
    wordless = sender != "reviewer" and not text.strip()
    return question_id.startswith(sender) and len(text) <= MAX_TEXT and not wordless


# --- Clients and Workers -------------------------------------------------------------------------

Case = WorkflowHandle["RefundAgent", RefundResult]
ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Refused(Exception):
    """What a client asked for cannot be done. The text tells a person why and what to do."""


def case_id_for(request: RefundRequest) -> str:
    """The Workflow ID. It holds a digest of the customer, so that nobody can take the id of a
    case of somebody else."""
    digest = hashlib.sha256(request.customer_id.encode()).hexdigest()[:8]
    return f"refund-{request.order_id}-{request.line}-{digest}"


async def start_case(
    client: Client, request: RefundRequest, *, task_queue: str, case_id: str | None = None
) -> Case:
    """Start a case, or find it. A case is started again if it failed, was canceled or terminated,
    or if its result is one of ASK_AGAIN. Every other result stands. The caller has checked who the
    customer is. A case that is found keeps its first message. Give a `case_id` of your own if
    others have cases of the same orders on that server, such as another run of the demo.

    Raises Refused for a malformed request and for a case of another customer.
    """
    ids = ID.fullmatch(request.order_id) and ID.fullmatch(request.customer_id)
    if not ids or type(request.line) is not int or request.line < 1:
        raise Refused("an id is 1 to 64 letters, digits, - or _, and a line is 1 or more")
    if not fits("customer", "customer", request.message):  # it is as long as an answer may be
        raise Refused(f"a message has 1 to {MAX_TEXT:,} characters")
    start = partial(
        client.start_workflow,
        RefundAgent.run,
        request,
        id=case_id or case_id_for(request),
        task_queue=task_queue,
        memo={"customer_id": request.customer_id},
        id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
    )
    try:
        case: Case = await start(id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE_FAILED_ONLY)
    except WorkflowAlreadyStartedError as ended:
        case = client.get_workflow_handle_for(
            RefundAgent.run, ended.workflow_id, run_id=ended.run_id
        )
        if (await case.result()).outcome in ASK_AGAIN:
            case = await start(id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE)
    if await (await case.describe()).memo_value("customer_id", None) != request.customer_id:
        raise Refused("this order belongs to the case of another customer")
    return case


async def send_answer(case: Case, answer: Answer, *, reviewer: bool = False) -> None:
    """Send an answer of the customer, or of the reviewer. Raises Refused if it would not be used,
    or if too many messages wait. With no Worker alive, a message is accepted unseen and read later.
    Of two answers to one question, the first counts."""
    sender = "reviewer" if reviewer else "customer"
    if not fits(sender, answer.question_id, answer.text):
        raise Refused(
            f"this is no question to you, or not an answer of 1 to {MAX_TEXT:,} characters"
        )
    soon = timedelta(seconds=1)  # a Worker that is alive answers a Query faster
    many = 1_000  # events; a Worker that comes back can read several times as many messages
    try:
        try:
            progress = await case.query(RefundAgent.progress, rpc_timeout=soon)
            if progress.question is None or progress.question.id != answer.question_id:
                raise Refused("this question is not open, so your message was not used")
        except (RPCError, WorkflowQueryFailedError):  # no Worker answers, or a broken one
            if (await case.describe()).history_length > many:
                raise Refused("too many messages wait; please try again later") from None
        await case.signal("review" if reviewer else "answer", answer)
    except RPCError as error:
        if error.status.name != "NOT_FOUND":
            raise
        raise Refused("this case is closed, or was never started") from None


def build_worker(
    client: Client,
    task_queue: str,
    agent: RefundActivities,
    memory: memory_activities.XmemoryInstance,
) -> Worker:
    """The one registration, for every Worker."""
    return Worker(
        client,
        task_queue=task_queue,
        workflows=[RefundAgent],
        activities=[
            agent.agent_decide_next_step,
            agent.lookup_order,
            agent.lookup_customer_history,
            agent.check_refund_policy,
            agent.issue_refund,
            *memory_activities.MemoryActivities(memory).all(),
        ],
        # By default the SDK holds heartbeats back for 80% of their timeout, so that a single late
        # beat is too late.
        max_heartbeat_throttle_interval=HEARTBEAT_TIMEOUT / memory_activities.BEATS_PER_TIMEOUT,
        # For the work in flight when a Worker is told to stop. Another Worker repeats the rest.
        graceful_shutdown_timeout=timedelta(seconds=10),
    )
