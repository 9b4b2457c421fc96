"""A customer-support refund agent that survives being killed. Read it top to bottom.

One plain coroutine, `run_agent`, is the agent. It is told how to act and how to ask by the runtime
it is handed: a plain process awaits the steps directly, the Workflow at the end of this file
schedules them as Activities. Nothing in the loop knows which. The words, each with one meaning:

    request   what the customer wants refunded
    known     what this case has learned so far; the decider sees all of it on every turn (context)
    step      what the decider wants next: ask, look something up, or decide
    turn      one step, carried out or rejected
    case      one request from first message to result; its id is the Workflow ID
    decider   what chooses the steps: the policy below, or a live model. Code bounds it: which steps
              there are, the amount, and when a human must approve; the rest is the decider's

The one rule: every fact has an owner, and the owner's record wins. Stripe owns whether money moved,
the shop owns the order, Event History owns where the work stands. Memory informs, never decides.
"""

import asyncio
import hashlib
import re
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, TypeVar

from temporalio import activity, workflow
from temporalio.client import Client, WorkflowHandle
from temporalio.common import (
    RawValue,
    RetryPolicy,
    WorkflowIDConflictPolicy,
    WorkflowIDReusePolicy,
)
from temporalio.exceptions import ActivityError, ApplicationError, WorkflowAlreadyStartedError
from temporalio.exceptions import is_cancelled_exception as is_cancelled
from temporalio.service import RPCError, RPCStatusCode
from temporalio.worker import Worker

with workflow.unsafe.imports_passed_through():
    import memory_activities as xmemory

# --- Constants, each with its reason -------------------------------------------------------------

AUTO_APPROVE_LIMIT = {"usd": 100_00, "eur": 100_00, "jpy": 15_000}  # minor units; others: a human
MAX_EARLIER_REFUNDS = 1  # a customer with more than this goes to a human
REFUND_WINDOW = timedelta(days=30)  # the shop's promise, counted from the purchase
MAX_TURNS = 12  # the policy needs six; a decider that needs twice that is lost
MAX_REJECTED = 3  # a decider that ignores three refusals will ignore the fourth
MAX_TEXT = 2_000  # characters of one message; a longer one never enters what is known
MAX_RECALLED = 10  # past cases of a customer, the latest ones
MAX_EARLY = 20  # answers kept for questions not asked yet: a reset hands old ones over first

PATIENCE = {"customer": timedelta(days=7), "reviewer": timedelta(days=30)}  # then: abandoned
REFUND_PATIENCE = timedelta(hours=12)  # half of what Stripe keeps an idempotency key for
LULL, FLOOD = timedelta(seconds=1), 50  # messages within that; a run cannot close while they come
MAX_EVENTS = 1_000  # of a run that waits. A Worker that comes back reads what it missed at once,
# and the SDK gives it two seconds for that
STRIPE_PAGE = 100  # refunds in one answer; the most Stripe gives
DRAIN_TIMEOUT = timedelta(seconds=10)  # for what is in flight when a Worker is told to stop
QUERY_TIMEOUT = timedelta(seconds=1)  # no Worker answers: send the message anyway, it will keep

HEARTBEAT_TIMEOUT = timedelta(seconds=2)  # how long the death of a Worker goes unnoticed
STEP_TIMEOUT = timedelta(seconds=60)  # one attempt of anything: a model or Stripe that hangs is cut
FIRST_RETRY = timedelta(milliseconds=200)  # most faults are gone at once
STEP_RETRY = RetryPolicy(  # about seven minutes if every try fails at once, then a human looks
    initial_interval=FIRST_RETRY, maximum_interval=timedelta(seconds=30), maximum_attempts=20
)
REFUND_RETRY = RetryPolicy(  # no maximum: the failure table ends it, a lost Worker costs no try
    initial_interval=FIRST_RETRY, maximum_interval=timedelta(minutes=1)
)
RECALL_TIMEOUT = timedelta(seconds=20)
# Memory is useful, not needed. Whoever asks to wait for long is not waited for.
BUSY = [xmemory.DAILY_QUOTA.type, xmemory.RATE_LIMITED.type]
RECALL_RETRY = RetryPolicy(maximum_attempts=3, non_retryable_error_types=BUSY)  # a few seconds
REMEMBER_RETRY = RetryPolicy(  # two minutes if every try fails at once; the money has moved by then
    maximum_interval=timedelta(seconds=30), maximum_attempts=8, non_retryable_error_types=BUSY[:1]
)

ZERO_DECIMAL = set("bif clp djf gnf jpy kmf krw mga pyg rwf ugx vnd vuv xaf xof xpf".split())
THREE_DECIMAL = set("bhd jod kwd omr tnd".split())  # both lists are Stripe's

# --- What crosses the Activity boundary ----------------------------------------------------------
# These types are written into Event History, where old runs still hold them: they only gain fields.
# Times are seconds since the epoch: the Workflow sandbox wraps `datetime`, and the SDK's converter
# does not know the wrapped class again.


def is_whole(amount: object) -> bool:
    """Whether this is an int that JSON carries unharmed: no float, no bool, nothing absurd."""
    return type(amount) is int and abs(amount) < 2**53


@dataclass(frozen=True)
class Money:
    """`amount` is in the currency's minor unit: cents for usd, whole yen for jpy."""

    amount: int
    currency: str

    def __str__(self) -> str:
        places = 0 if self.currency in ZERO_DECIMAL else 3 if self.currency in THREE_DECIMAL else 2
        whole, rest = divmod(self.amount, 10**places)
        return f"{whole:,}{f'.{rest:0{places}}' if places else ''} {self.currency.upper()}"


@dataclass(frozen=True)
class RefundRequest:
    order_id: str
    customer_id: str
    message: str
    line: int = 1  # which line of the order


@dataclass(frozen=True)
class Order:
    """The shop's order line, with what Stripe says is `left` of the payment (minor units), not
    counting a refund of this very case."""

    item: str
    price: Money
    left: int
    payment_intent: str
    purchased_at: float

    @property
    def refundable(self) -> int:
        return min(self.price.amount, self.left)


@dataclass(frozen=True)
class CustomerHistory:
    earlier_refunds: int


@dataclass(frozen=True)
class PolicyCheck:
    eligible: bool
    reason: str


@dataclass(frozen=True)
class Question:
    """`to` is customer or reviewer. The id holds the turn and a digest of the text, so that an
    answer which a reset applies again answers this very question or none."""

    id: str
    to: str
    text: str

    @classmethod
    def at(cls, turn: int, to: str, text: str) -> "Question":
        digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:8]
        return cls(f"{to}-{turn}-{digest}", to, text)


@dataclass(frozen=True)
class Answer:
    """`approve` counts only in the reviewer's answer; the text then is a note."""

    question_id: str
    text: str
    approve: bool = False


@dataclass(frozen=True)
class Step:
    """`action` is one of `ACTIONS` once `refusal` has looked at it; until then, anything. `text` is
    the question, or the reason for the decision; `amount` is in minor units."""

    action: str
    text: str = ""
    amount: int = 0

    @classmethod
    def of(cls, raw: object) -> "Step":
        """A model may return anything; what is not shaped like a step has no known action."""
        action, text = getattr(raw, "action", None), getattr(raw, "text", "")
        amount = getattr(raw, "amount", 0)
        if type(action) is not str or type(text) is not str or not is_whole(amount):
            return cls("malformed", f"a {type(raw).__name__} is not a step")
        return cls(action[:MAX_TEXT], text[:MAX_TEXT], amount)


@dataclass(frozen=True)
class Asked:
    question: str
    answer: str


@dataclass(frozen=True)
class Known:
    """All that a case has learned, in the order it is learned."""

    recalled: tuple[str, ...] | None = None  # past cases; hearsay. None: memory was not asked yet
    new_customer: bool = False  # memory has no record of this customer yet
    memory_notice: str = ""  # why memory could not help
    turn: int = 0
    step: Step | None = None  # in hand; set between deciding and learning
    answers: tuple[Asked, ...] = ()
    order: Order | None = None
    order_missing: bool = False  # the shop has no such order of this customer
    history: CustomerHistory | None = None
    policy: PolicyCheck | None = None
    rejected: tuple[str, ...] = ()  # steps that the guard rails refused, and why


@dataclass(frozen=True)
class Situation:
    request: RefundRequest
    known: Known


@dataclass(frozen=True)
class OrderLine:
    """What is looked up, and for which case."""

    request: RefundRequest
    case_id: str


@dataclass(frozen=True)
class RefundOrder:
    """What Stripe is asked for, a function of the case alone; only `give_up_at` is not sent."""

    case_id: str
    idempotency_key: str
    payment_intent: str
    money: Money
    give_up_at: float


@dataclass(frozen=True)
class Refund:
    id: str
    status: str  # Stripe's word: succeeded, pending, requires_action, failed or canceled
    money: Money


@dataclass(frozen=True)
class RefundResult:
    """`outcome` is a key of `TOLD`; `told` is what the customer hears; `notice` is for colleagues:
    why a human is needed, a reviewer's note, or why long-term memory does not have the case."""

    outcome: str
    told: str
    refund: Refund | None = None
    remembered: bool = False
    notice: str = ""


TOLD = {
    "refund succeeded": "Your refund of {money} is complete.",
    "refund pending": "Your refund of {money} is on its way; it is not confirmed yet.",
    "refund requires_action": "Your refund of {money} waits for your bank details.",
    "refund failed": "Your refund of {money} was sent, but came back.",
    "refund canceled": "Your refund of {money} was canceled before it was sent.",
    "denied": "We cannot refund this order: {reason}.",
    "order not found": "We found no such order of yours.",
    "already refunded": "This payment was already refunded in full.",
    "charge disputed": "Your bank is handling a dispute of this payment; we cannot refund it.",
    "abandoned": "We did not hear back in time, so this case is closed. No money was moved.",
    "needs a human": "A colleague will look at this and write to you.",
}
CHANGED = "the payment changed while the case waited"

# --- How the agent decides -----------------------------------------------------------------------

INTAKE = ("Was the package opened?", "What was damaged?")
LOOKUPS = {  # and the field of Known that each one fills
    "lookup_order": "order", "lookup_customer_history": "history", "check_refund_policy": "policy"}
ACTIONS = ("ask", *LOOKUPS, "approve", "escalate", "deny")


def decide(request: RefundRequest, known: Known) -> Step:
    """The policy, a pure function: two questions, two lookups, then a decision."""
    if len(known.answers) < len(INTAKE):
        return Step("ask", INTAKE[len(known.answers)])
    if known.order is None:
        return Step("lookup_order")
    if known.history is None:
        return Step("lookup_customer_history")
    refund = Money(known.order.refundable, known.order.price.currency)
    clean = known.history.earlier_refunds <= MAX_EARLIER_REFUNDS
    if clean and not above_limit(refund):
        return Step("approve", "within the limit, clean history", refund.amount)
    if known.policy is None:
        return Step("check_refund_policy")
    if not known.policy.eligible:
        return Step("deny", known.policy.reason)
    reason = f"{known.history.earlier_refunds} earlier refunds" if not clean else "above the limit"
    return Step("escalate", reason, refund.amount)


def unfit_text(text: str, sender: str) -> str:
    """Why a message cannot be used, or "". A reviewer need not add a note."""
    if sender == "customer" and not text.strip():
        return "empty"
    return f"longer than {MAX_TEXT:,} characters" if len(text) > MAX_TEXT else ""


def above_limit(refund: Money) -> bool:
    """Whether a human must approve. A currency without a limit of its own always needs one."""
    return refund.amount > AUTO_APPROVE_LIMIT.get(refund.currency, 0)


def refusal(step: Step, known: Known) -> str:
    """The guard rails: why this step is not carried out, or "". They hold whatever model sits there
    and whatever a customer or a memory told it."""
    if step.action not in ACTIONS:
        return f"there is no such step; choose one of {', '.join(ACTIONS)}"
    if step.action == "ask":
        if not step.text.strip():
            return "the question is empty"
        if any(step.text == asked.question for asked in known.answers):
            return "this question was already answered"
    if step.action in LOOKUPS and getattr(known, LOOKUPS[step.action]) is not None:
        return "this is already known"
    if step.action in ("approve", "escalate", "check_refund_policy") and known.order is None:
        return "look up the order first"
    if step.action in ("approve", "escalate") and known.order is not None:
        if not 0 < step.amount <= known.order.refundable:
            most = Money(known.order.refundable, known.order.price.currency)
            return f"the amount must be above 0, and at most {most}"
    return ""


# --- The loop ------------------------------------------------------------------------------------
# Decide, act, learn, until a step ends the case; then carry the decision out and remember it. The
# bounds are part of the design: a decider that turns in circles ends as "needs a human".

T = TypeVar("T")
In = TypeVar("In")
Out = TypeVar("Out")


class StepFailed(Exception):
    """A step that will not succeed, the same in every runtime; `type` is a stable string."""

    def __init__(self, type: str, message: str, details: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.type, self.message, self.details = type, message, tuple(details)


class Runtime(Protocol):
    """How to act and how to ask. Steps that fail raise StepFailed; cancellation passes through."""

    def now(self) -> float:
        """Seconds since the epoch; in a Workflow, the same on every replay."""

    async def act(self, step: Callable[[Any, In], Awaitable[Out]], argument: In) -> Out:
        """Carry out one of the Activities below."""

    async def ask(self, question: Question, known: Known) -> Answer | None:
        """Ask a person; None if there was no answer in time."""

    async def recall(self, query: str, scope: xmemory.Scope) -> xmemory.ReadOutput: ...

    async def remember(self, mutations: Sequence[xmemory.Mutation]) -> None: ...


class CaseKey(NamedTuple):
    """Who this case is to the outside world, from its first attempt to its last.

    `case_id` (the Workflow ID) follows from the order line, so a second start finds the first.
    `first_run_id` is the one id that also survives a retry, a reset and Continue-As-New; the Run ID
    and `workflow.uuid4()` do not.
    """

    case_id: str
    first_run_id: str


async def run_agent(
    request: RefundRequest, key: CaseKey, runtime: Runtime, known: Known = Known()
) -> RefundResult:
    """Work on one case until it has a result. Raises only on cancellation."""
    if known.recalled is None:
        known = await recall(request, runtime, known)
    try:
        decision = await decide_case(request, key, runtime, known)
    except StepFailed as failure:
        decision = ended("needs a human", notice=failure.message)
    return await to_its_end(carry_out(decision, request, key, runtime, known))


async def recall(request: RefundRequest, runtime: Runtime, known: Known) -> Known:
    """What memory holds about this customer, and about no other: the read is bound to the one
    record, and sees nothing else."""
    mine = xmemory.scope_to("Customer", {"customer_id": request.customer_id})
    try:
        found = await runtime.recall("Customer", mine)
        rows = [row for row in found.rows() if row.get("customer_id") == request.customer_id]
    except (StepFailed, ApplicationError) as failure:
        if isinstance(failure, StepFailed) and failure.type == xmemory.BAD_REQUEST.type:
            return replace(known, recalled=(), new_customer=True)  # a scope to no record
        return replace(known, recalled=(), memory_notice=failure.message)
    cases = [case for row in rows for case in str(row.get("past_cases") or "").splitlines()]
    recalled = tuple(case[:MAX_TEXT] for case in cases[-MAX_RECALLED:])
    return replace(known, recalled=recalled, memory_notice=found.notice or "")


async def decide_case(
    request: RefundRequest, key: CaseKey, runtime: Runtime, known: Known
) -> RefundResult | RefundOrder:
    while known.turn < MAX_TURNS and len(known.rejected) < MAX_REJECTED:
        step = known.step
        if step is None:
            situation = Situation(request, known)
            step = await runtime.act(RefundActivities.agent_decide_next_step, situation)
            known = replace(known, step=step)
        if refused := refusal(step, known):
            known = learned(known, rejected=(*known.rejected, f"{step.action}: {refused}"))
        elif step.action == "ask":
            question = Question.at(known.turn, "customer", step.text)
            answer = await runtime.ask(question, known)
            if answer is None:
                return ended("abandoned")
            if known.order and await has_changed(known.order, request, key, runtime):
                return ended("needs a human", notice=CHANGED)
            known = learned(known, answers=(*known.answers, Asked(step.text, answer.text)))
        elif step.action in LOOKUPS:
            known = await look_up(step.action, request, key, known, runtime)
            if known.order_missing or (known.order and known.order.left == 0):
                return ended("order not found" if known.order_missing else "already refunded")
        elif step.action == "deny":
            return ended("denied", reason=step.text)
        else:
            assert known.order is not None  # else the guard rails had refused the step
            return await order_refund(step, known.order, request, key, runtime, known)
    return ended("needs a human", notice="the decider ran out of turns or ignored its refusals")


async def look_up(
    action: str, request: RefundRequest, key: CaseKey, known: Known, runtime: Runtime
) -> Known:
    if action == "lookup_order":
        line = OrderLine(request, key.case_id)
        order = await runtime.act(RefundActivities.lookup_order, line)
        return learned(known, order=order, order_missing=order is None)
    if action == "lookup_customer_history":
        found = await runtime.act(RefundActivities.lookup_customer_history, request.customer_id)
        return learned(known, history=found)
    assert known.order is not None  # `refusal` saw to it
    check = await runtime.act(RefundActivities.check_refund_policy, known.order)
    return learned(known, policy=check)


async def has_changed(
    order: Order, request: RefundRequest, key: CaseKey, runtime: Runtime
) -> bool:
    """Whether the order is another now that a person was waited for: a month may have passed."""
    now = await runtime.act(RefundActivities.lookup_order, OrderLine(request, key.case_id))
    return now is None or now.left != order.left


async def order_refund(
    step: Step, order: Order, request: RefundRequest, key: CaseKey, runtime: Runtime, known: Known
) -> RefundResult | RefundOrder:
    """Above the limit, or if the decider says so, only a human can approve."""
    refund = Money(step.amount, order.price.currency)
    if step.action == "escalate" or above_limit(refund):
        question = Question.at(known.turn, "reviewer", f"Refund {refund}? ({step.text})")
        answer = await runtime.ask(question, known)
        if answer is None:
            return ended("abandoned")
        if not answer.approve:
            return ended("denied", reason="a colleague decided so", notice=answer.text)
        # A cancel that came before the approval is delivered here, too, at the next await that
        # leaves the Workflow: Signals are handled first.
        if await has_changed(order, request, key, runtime):
            return ended("needs a human", notice=CHANGED)
    # The key is never made of the amount or the attempt: these may change, the refund must not.
    idempotency_key = f"refund:{key.first_run_id}:{order.payment_intent}:{request.line}"
    give_up_at = runtime.now() + REFUND_PATIENCE.total_seconds()
    return RefundOrder(key.case_id, idempotency_key, order.payment_intent, refund, give_up_at)


async def carry_out(
    decision: RefundResult | RefundOrder, request: RefundRequest, key: CaseKey, runtime: Runtime,
    known: Known,
) -> RefundResult:
    """Move the money, if that was decided, and remember the case: under a key of its own, and as a
    line in the record of its customer, which is all that the next recall sees. Of two cases of one
    customer that are open at the same time, the one that ends last overwrites the other's line."""
    result = decision if isinstance(decision, RefundResult) else await refund(decision, runtime)
    values = {"customer_id": request.customer_id, "order_id": request.order_id}
    values |= {"outcome": result.outcome}
    if result.refund is not None:
        values |= {"refund_id": result.refund.id, "refunded": str(result.refund.money)}
    customer = {"customer_id": request.customer_id}
    if known.new_customer:
        with suppress(StepFailed):  # it is there, or the next write fails as well
            await runtime.remember([xmemory.create("Customer", customer, {})])
    changes = [xmemory.create("RefundCase", {"case_id": key.case_id}, values)]
    if not known.memory_notice:  # else what was not recalled would be overwritten
        this = f"order {request.order_id}: {result.outcome}"
        cases = dict.fromkeys([*(known.recalled or ()), this])
        past_cases = "\n".join([*cases][-MAX_RECALLED:])
        changes.append(xmemory.update("Customer", customer, {"past_cases": past_cases}))
    try:
        await runtime.remember(changes)
    except StepFailed as failure:
        doubt = f"memory may not have this case: {failure.message}"
        return replace(result, notice=f"{result.notice} {doubt}".strip())
    missing = known.memory_notice
    unseen = f"the next case will not recall this one: {missing}" if missing else ""
    return replace(result, remembered=True, notice=f"{result.notice} {unseen}".strip())


async def refund(order: RefundOrder, runtime: Runtime) -> RefundResult:
    try:
        done = await runtime.act(RefundActivities.issue_refund, order)
    except StepFailed as failure:
        outcome = {ALREADY_REFUNDED: "already refunded", DISPUTED: "charge disputed"}
        return ended(outcome.get(failure.type, "needs a human"), notice=failure.message)
    return ended(f"refund {done.status}", done)


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Cancel must not lose what money in flight does: wait for it, then report it."""
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        return await running


def learned(known: Known, **facts: Any) -> Known:
    """What is known after a turn."""
    return replace(known, turn=known.turn + 1, step=None, **facts)


def ended(
    outcome: str, refund: Refund | None = None, *, reason: str = "", notice: str = ""
) -> RefundResult:
    told = TOLD.get(outcome, TOLD["needs a human"])
    money = refund.money if refund else ""
    return RefundResult(outcome, told.format(money=money, reason=reason), refund, notice=notice)


# --- What Stripe's failures mean -----------------------------------------------------------------
# One table. Errors are known by their attributes, so the SDK's and a stand-in's are treated alike.
# Every try asks the owner first, so trying again is always safe; the question is only how long. A
# 500 is answered again to the same key for a day: those tries only look whether a refund turned up.

ALREADY_REFUNDED, DISPUTED = "StripeAlreadyRefunded", "StripeChargeDisputed"


class StripeFailure(NamedTuple):
    type: str
    retried: bool  # until the refund's `give_up_at`; otherwise, and after that, it is final
    message: str


STRIPE_FAILURES = {  # by `error.code`, else by `error.type`, else by HTTP status
    "charge_already_refunded": StripeFailure(ALREADY_REFUNDED, False, "already refunded in full"),
    "charge_disputed": StripeFailure(DISPUTED, False, "the payment is disputed"),
    "resource_missing": StripeFailure("StripeNotFound", False, "Stripe has no such payment"),
    "idempotency_key_in_use": StripeFailure("StripeKeyInUse", True, "this refund is under way"),
    "idempotency_error": StripeFailure("StripeKeyReused", False, "the key names another refund"),
    401: StripeFailure("StripeAuthFailed", False, "Stripe refused the API key"),
    403: StripeFailure("StripeNotPermitted", False, "the API key may not make refunds"),
    408: StripeFailure("StripeUnreachable", True, "Stripe did not answer"),
    409: StripeFailure("StripeConflict", True, "Stripe is working on the same object"),
    429: StripeFailure("StripeRateLimited", True, "Stripe asked to slow down"),
    400: StripeFailure("StripeRefused", False, "Stripe refused the request"),  # any other 4xx
    500: StripeFailure("StripeServerError", True, "Stripe had a server error"),  # any other 5xx
    200: StripeFailure("StripeUnreadable", True, "Stripe's answer could not be read"),
    None: StripeFailure("StripeNotAsked", False, "the request to Stripe could not be made"),
}


def stripe_failure(error: Exception) -> StripeFailure:
    status: int | None = getattr(error, "http_status", None)
    if status is None and (getattr(error, "should_retry", False) or isinstance(error, OSError)):
        status = 408  # the answer was lost, or the request
    if isinstance(error, Unreadable):
        status = 200  # Stripe acted, perhaps; the next try looks
    facts, headers = getattr(error, "error", None), getattr(error, "headers", None) or {}
    asked_to = {name.lower(): value for name, value in headers.items()}.get("stripe-should-retry")
    names = (getattr(facts, "code", None), getattr(facts, "type", None), status)
    rest = status and (500 if status >= 500 else 400 if status >= 400 else 200)
    row = STRIPE_FAILURES[next((n for n in names if n and n in STRIPE_FAILURES), rest)]
    return row._replace(retried=row.retried or asked_to == "true")


@contextmanager
def stripe_errors(give_up_at: float | None = None) -> Iterator[None]:
    """Turn an error of the client into its row; `from None` keeps its text, which may quote a key
    or a customer, out of Event History. The time to give up is looked at only after an answer, so a
    Worker that comes back late still makes its one try. A client that hangs is cut off before
    Temporal cuts off the attempt, which would be no answer, and be retried for ever."""
    try:
        yield
    except Exception as error:
        row = stripe_failure(error)
        final = not row.retried or time.time() >= (give_up_at or float("inf"))
        raise ApplicationError(row.message, type=row.type, non_retryable=final) from None


@contextmanager
def failing_as(type: str, message: str) -> Iterator[None]:
    """The same for the shop and the decider: a stable type and a fixed text, retried."""
    try:
        yield
    except Unreadable:
        raise ApplicationError(message, type=type, non_retryable=True) from None
    except Exception:
        raise ApplicationError(message, type=type) from None


class Unreadable(Exception): ...


def whole(amount: Any) -> int:
    """An amount or a count from outside. A float would be cut, a null freeze the Workflow."""
    if not is_whole(amount):
        raise Unreadable
    return int(amount)


# --- The five Activities -------------------------------------------------------------------------


class Shop(Protocol):
    """The owner of orders; what it returns has the attributes that are read below."""

    async def order(self, order_id: str, line: int) -> Any: ...
    async def customer_history(self, customer_id: str) -> Any: ...


class Decider(Protocol):
    """Returns anything with the attributes of a Step; what is not, is rejected and shown to it. The
    text of a denial goes to the customer word for word."""

    async def decide(self, request: RefundRequest, known: Known) -> object: ...


class RefundActivities:
    """Every call to the outside. Each gets all it needs as arguments, so each also runs bare.

    `stripe` has the shape of `stripe.StripeClient`, its own retries off: Temporal owns every retry.
    """

    def __init__(self, *, stripe: Any, shop: Shop, decider: Decider) -> None:
        self._stripe, self._shop, self._decider = stripe, shop, decider

    @activity.defn
    @xmemory.heartbeating
    async def agent_decide_next_step(self, situation: Situation) -> Step:
        with failing_as("DeciderFailed", "the decider did not answer"):
            return Step.of(await self._decider.decide(situation.request, situation.known))

    @activity.defn
    @xmemory.heartbeating
    async def lookup_order(self, line: OrderLine) -> Order | None:
        """None if the shop has no such order, or has it for another customer."""
        request = line.request
        with failing_as("ShopFailed", "the shop gave no readable answer"):
            found = await self._shop.order(request.order_id, request.line)
            if found is None or found.customer_id != request.customer_id:
                return None
            item, amount, bought = str(found.item), whole(found.amount), float(found.purchased_at)
        with stripe_errors():
            payment = await self._stripe.v1.payment_intents.retrieve_async(
                found.payment_intent, {"expand": ["latest_charge"]})
            charge = payment.latest_charge
            left = whole(charge.amount) - whole(charge.amount_refunded) if charge else 0
            if charge and charge.amount_refunded:  # to others, or by this case before a reset
                mine = await self._refund_of_case(found.payment_intent, line.case_id)
                left += whole(mine.amount) if mine and mine.status == "succeeded" else 0
        if not charge:
            raise ApplicationError("this payment is not paid", type="NotPaid", non_retryable=True)
        price = Money(amount, payment.currency)
        return Order(item[:MAX_TEXT], price, left, found.payment_intent, bought)

    @activity.defn
    @xmemory.heartbeating
    async def lookup_customer_history(self, customer_id: str) -> CustomerHistory:
        with failing_as("ShopFailed", "the shop gave no readable answer"):
            found = await self._shop.customer_history(customer_id)
            return CustomerHistory(whole(found.earlier_refunds))

    @activity.defn
    @xmemory.heartbeating
    async def check_refund_policy(self, order: Order) -> PolicyCheck:
        inside = time.time() - order.purchased_at <= REFUND_WINDOW.total_seconds()
        when = f"bought {'within' if inside else 'more than'} {REFUND_WINDOW.days} days ago"
        return PolicyCheck(inside, when)

    @activity.defn
    @xmemory.heartbeating
    async def issue_refund(self, order: RefundOrder) -> Refund:
        """Refund once, however often this runs.

        Two guards, each enough alone while it holds. The idempotency key is the same on every
        attempt, but Stripe forgets keys after a day. The case id in the metadata stays for good,
        but cannot see a request that is still on its way. A refund that is there is reported, never
        added to, whatever its key, amount or status. What neither covers: a case that is terminated
        (not canceled) with its request on its way, and started anew within the same minute.
        """
        with stripe_errors(order.give_up_at):
            async with asyncio.timeout(xmemory.client_timeout()):
                done = await self._refund_of_case(order.payment_intent, order.case_id)
                done = done or await self._stripe.v1.refunds.create_async(
                    {"payment_intent": order.payment_intent, "amount": order.money.amount,
                     "metadata": {"case_id": order.case_id}},
                    {"idempotency_key": order.idempotency_key})
            money = Money(whole(done.amount), done.currency)
            return Refund(str(done.id), str(done.status), money)

    async def _refund_of_case(self, payment_intent: str, case_id: str) -> Any:
        """What the owner has on record, every page of it."""
        query: dict[str, Any] = {"payment_intent": payment_intent, "limit": STRIPE_PAGE}
        while True:
            page = await self._stripe.v1.refunds.list_async(query)
            for refund in page.data:
                if getattr(refund.metadata, "case_id", None) == case_id:
                    return refund
            if not page.has_more:
                return None
            query["starting_after"] = page.data[-1].id


# --- The Workflow --------------------------------------------------------------------------------
# Replay runs the loop again from the top and hands every finished step its recorded result, so a
# new Worker arrives where the dead one stood. The Workflow is the runtime that the loop is handed.


@dataclass(frozen=True)
class Progress:
    """What a client may show. `ignored` says which message was not used last, and why."""

    phase: str
    next_action: str
    question: Question | None
    ignored: str


@dataclass(frozen=True)
class CaseInput:
    """What a run starts from: the request, and what the run before it handed over. `answers` maps
    question ids to the answers given so far, used or not."""

    request: RefundRequest
    known: Known = Known()
    waiting_since: float | None = None
    answers: dict[str, Answer] = field(default_factory=dict)


QUESTION_ID = re.compile(rb'"((customer|reviewer)-(\d{1,4})-[0-9a-f]{8})"')


@workflow.defn
class RefundAgent:
    @workflow.init
    def __init__(self, given: CaseInput) -> None:
        # All state is set up here: a Signal may be handled before `run` is first called.
        self._request, self._known = given.request, given.known
        self._waiting_since, self._answers = given.waiting_since, dict(given.answers)
        self._question: Question | None = None
        self._phase, self._next_action, self._ignored, self._received = "starting", "", "", 0
        self._memory = xmemory.memory_for_workflow(
            read_timeout=RECALL_TIMEOUT, read_retry_policy=RECALL_RETRY,
            write_retry_policy=REMEMBER_RETRY, heartbeat_timeout=HEARTBEAT_TIMEOUT)

    @workflow.run
    async def run(self, given: CaseInput) -> RefundResult:
        info = workflow.info()
        key = CaseKey(info.workflow_id, info.first_execution_run_id)
        result = await run_agent(given.request, key, self, given.known)
        self._phase, self._next_action = "closed", ""
        return result

    # A Signal is durably accepted even while no Worker is alive.

    @workflow.signal
    def answer(self, message: RawValue) -> None:  # an Answer, decoded only if it can count
        self._receive("customer", message)

    @workflow.signal
    def review(self, message: RawValue) -> None:
        self._receive("reviewer", message)

    @workflow.query
    def progress(self) -> Progress:
        return Progress(self._phase, self._next_action, self._question, self._ignored)

    def _receive(self, sender: str, message: RawValue) -> None:
        """Keep an answer, the first one for its question; or remember why it is ignored.

        The question's id is looked for in the raw message (decrypted already, if there is a codec),
        because to decode one takes the sandbox half a millisecond: a flood of thousands must be
        read within one Workflow Task.
        """
        self._received += 1
        named = QUESTION_ID.search(message.payload.data)
        id = named[1].decode() if named else ""
        is_open = self._question is not None and self._question.id == id
        next_turn = self._known.turn + (self._question is not None)
        if named is None or named[2].decode() != sender or int(named[3]) >= MAX_TURNS:
            self._ignored = f"a message of the {sender} for an unknown question"
        elif id in self._answers:
            self._ignored = "a second answer to the same question"
        elif not is_open and int(named[3]) < next_turn:
            self._ignored = "an answer to a question that is not open"
        elif not is_open and len(self._answers) >= MAX_EARLY:
            self._ignored = "too many answers to questions that were not asked yet"
        else:
            self._keep(id, sender, message)

    def _keep(self, id: str, sender: str, message: RawValue) -> None:
        try:
            answer = workflow.payload_converter().from_payload(message.payload, Answer)
        except Exception:
            self._ignored = "a message that could not be read"
            return
        if unfit := unfit_text(answer.text, sender):
            self._ignored = f"a message that is {unfit}"
        else:
            self._answers[id] = answer

    # The runtime.

    def now(self) -> float:
        return workflow.time()

    async def act(self, step: Callable[[Any, In], Awaitable[Out]], argument: In) -> Out:
        self._phase, self._next_action = "working", step.__name__
        with one_error():
            return await workflow.execute_activity_method(
                step, argument, start_to_close_timeout=STEP_TIMEOUT,
                heartbeat_timeout=HEARTBEAT_TIMEOUT,
                retry_policy=REFUND_RETRY if step is RefundActivities.issue_refund else STEP_RETRY)

    async def recall(self, query: str, scope: xmemory.Scope) -> xmemory.ReadOutput:
        self._phase, self._next_action = "working", "recall"
        with one_error():
            return await self._memory.read(query, read_mode="raw-tables", scope=scope)

    async def remember(self, mutations: Sequence[xmemory.Mutation]) -> None:
        self._phase, self._next_action = "working", "remember"
        with one_error():
            await self._memory.write_durable(structured_mutations=mutations)

    async def ask(self, question: Question, known: Known) -> Answer | None:
        """Wait for a person. The only place where the run continues as new: nothing is in flight,
        and a flood of messages must not fill the history of a case that is open for weeks."""
        self._phase, self._next_action = f"waiting for the {question.to}", f"ask the {question.to}"
        self._question, self._known = question, known
        since = self._waiting_since or workflow.time()
        until = since + PATIENCE[question.to].total_seconds()
        with suppress(TimeoutError):  # an answer that came in the same moment still counts
            while question.id not in self._answers:
                await workflow.wait_condition(
                    lambda: question.id in self._answers or self._is_long(),
                    timeout=max(until - workflow.time(), 0.0))
                received = self._received
                if question.id not in self._answers:
                    await workflow.sleep(LULL)  # also lets in a cancel that came with a message
                calm = self._received - received < FLOOD
                if question.id not in self._answers and calm:
                    workflow.continue_as_new(CaseInput(self._request, known, since, self._answers))
        self._question = self._waiting_since = None
        return self._answers.get(question.id)

    def _is_long(self) -> bool:
        info = workflow.info()
        return info.is_continue_as_new_suggested() or info.get_current_history_length() > MAX_EVENTS


@contextmanager
def one_error() -> Iterator[None]:
    """A failed Activity, or the memory handle's own verdict, as the loop's one error type."""
    try:
        yield
    except (ActivityError, ApplicationError) as error:
        if is_cancelled(error):
            raise
        cause = error.cause if isinstance(error, ActivityError) else error
        if not isinstance(cause, ApplicationError):
            raise StepFailed("TimedOut", "the step did not finish in time") from error
        raise StepFailed(cause.type or "Failed", cause.message, cause.details) from error


# --- Clients and Workers -------------------------------------------------------------------------

Case = WorkflowHandle["RefundAgent", RefundResult]
TOO_MANY = "too many messages wait to be read; please try again later"
ID_PART = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Refused(Exception):
    """What a client asked for cannot be done; the text tells a person why and what to do."""


def case_id_for(request: RefundRequest) -> str:
    """The Workflow ID: one case for one order line."""
    return f"refund-{request.order_id}-{request.line}"


async def start_case(
    client: Client, request: RefundRequest, *, task_queue: str, case_id: str | None = None,
    task_timeout: timedelta | None = None,
) -> Case:
    """Start a case, or find it: while it runs, and after it completed with whatever outcome, there
    is only this one. One that failed, was canceled or was terminated is started anew. Whose order
    it is, the caller has checked: a case of the wrong customer completes as "order not found".

    `task_timeout` bounds how long a Workflow Task stays with a Worker that died (None: 10 seconds).
    Raises Refused for a malformed request, and for a case of another customer.
    """
    if not (ID_PART.fullmatch(request.order_id) and ID_PART.fullmatch(request.customer_id)):
        raise Refused("an order or customer id is 1 to 64 letters, digits, - or _")
    if not is_whole(request.line) or request.line < 1:
        raise Refused("the line of an order is 1 or more")
    if unfit := unfit_text(request.message, "customer"):
        raise Refused(f"this message is {unfit}; please write another")
    id = case_id or case_id_for(request)
    try:
        case: Case = await client.start_workflow(
            RefundAgent.run, CaseInput(request), id=id, task_queue=task_queue,
            task_timeout=task_timeout, memo={"customer_id": request.customer_id},
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE_FAILED_ONLY)
    except WorkflowAlreadyStartedError:
        case = client.get_workflow_handle_for(RefundAgent.run, id)
    if await (await case.describe()).memo_value("customer_id", None) != request.customer_id:
        raise Refused("this order belongs to the case of another customer")
    return case


async def send_answer(case: Case, answer: Answer, *, reviewer: bool = False) -> None:
    """Send the answer of the customer, or of the reviewer. Raises Refused, with words for a person,
    if it would be ignored, or if too many messages wait. While no Worker is alive it is accepted
    unseen, and used later."""
    sender = "reviewer" if reviewer else "customer"
    if unfit := unfit_text(answer.text, sender):
        raise Refused(f"this message is {unfit}; please write another")
    if (await case.describe()).history_length > 2 * MAX_EVENTS:
        raise Refused(TOO_MANY)
    with suppress(RPCError):  # with no Worker alive, nobody can tell
        now = await case.query(RefundAgent.progress, rpc_timeout=QUERY_TIMEOUT)
        open_to = (now.question.id, now.question.to) if now.question else None
        if now.phase != "closed" and open_to != (answer.question_id, sender):
            raise Refused("this question is not open, so your message was not used; please go on")
    try:
        await case.signal("review" if reviewer else "answer", answer)
    except RPCError as error:
        refusals = {RPCStatusCode.NOT_FOUND: "this case is closed, and its result stands",
                    RPCStatusCode.INVALID_ARGUMENT: TOO_MANY}  # the server's own limit: 10,000
        if error.status not in refusals:
            raise
        raise Refused(refusals[error.status]) from None


def build_worker(
    client: Client, task_queue: str, *, stripe: Any, shop: Shop, decider: Decider,
    memory: xmemory.XmemoryInstance,
) -> Worker:
    """The one registration, for every Worker; start it with `await run_until_stopped(worker)`."""
    steps = RefundActivities(stripe=stripe, shop=shop, decider=decider)
    return Worker(
        client, task_queue=task_queue, workflows=[RefundAgent], activities=[
            steps.agent_decide_next_step, steps.lookup_order, steps.lookup_customer_history,
            steps.check_refund_policy, steps.issue_refund, *xmemory.MemoryActivities(memory).all()],
        # The SDK holds heartbeats back for 80% of their timeout; then one late beat is too late.
        max_heartbeat_throttle_interval=HEARTBEAT_TIMEOUT / xmemory.BEATS_PER_TIMEOUT,
        graceful_shutdown_timeout=DRAIN_TIMEOUT)


async def run_until_stopped(worker: Worker) -> None:
    """Run a Worker until SIGTERM or Ctrl-C. From then on it takes no new work; what is in flight
    has DRAIN_TIMEOUT to finish, and is then handed back, to be tried by another Worker."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(NotImplementedError):  # on Windows
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with worker:
        await stopped.wait()
