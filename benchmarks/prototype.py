"""What the fleet is measured against: a refund agent that is one loop and nothing else.

It is the early prototype of this project, made again from what was measured of it: in the sandbox,
8 Activities, two Signals that are there before anyone waits for them, 55 events, some 6 kB. It has
no memory, no guard rails, no timers and no heartbeats, and its stand-ins are its own Activities.
The old one took 1.18 ms of the server's CPU and 0.76 ms of its Worker's for an event, on a machine
of its own. In a file of its own, because the sandbox imports it again for every Workflow.
"""

from dataclasses import dataclass, field, replace
from datetime import timedelta

from temporalio import activity, workflow

STEP_TIMEOUT = timedelta(seconds=60)
QUESTIONS = 2


@dataclass
class Request:
    order_id: str
    customer_id: str
    message: str


@dataclass
class Order:
    payment_intent: str
    amount: int  # cents


@dataclass
class Customer:
    earlier_refunds: int


@dataclass
class Known:
    request: Request
    answers: list[str] = field(default_factory=list)
    order: Order | None = None
    customer: Customer | None = None


@dataclass
class Step:
    action: str
    text: str = ""


@dataclass
class Refund:
    id: str
    status: str


@activity.defn
async def choose(known: Known) -> Step:
    if len(known.answers) < QUESTIONS:
        return Step("ask", "What was damaged?")
    if known.order is None:
        return Step("look up the order")
    return Step("refund" if known.customer else "look up the customer")


@activity.defn
async def find_order(order_id: str) -> Order:
    return Order(f"pi_{order_id}", 80_00)


@activity.defn
async def find_customer(customer_id: str) -> Customer:
    return Customer(earlier_refunds=0)


@activity.defn
async def refund(order: Order) -> Refund:
    return Refund("re_1", "succeeded")


@workflow.defn
class Prototype:
    def __init__(self) -> None:
        self._inbox: list[str] = []

    @workflow.signal
    def answer(self, text: str) -> None:
        self._inbox.append(text)

    @workflow.run
    async def run(self, request: Request) -> Refund:
        known = Known(request)
        while True:
            step = await workflow.execute_activity(
                choose, known, start_to_close_timeout=STEP_TIMEOUT
            )
            if step.action == "ask":
                await workflow.wait_condition(lambda: bool(self._inbox))
                known = replace(known, answers=[*known.answers, self._inbox.pop(0)])
            elif known.order and known.customer:
                return await workflow.execute_activity(
                    refund, known.order, start_to_close_timeout=STEP_TIMEOUT
                )
            elif known.order:
                known = replace(
                    known,
                    customer=await workflow.execute_activity(
                        find_customer, request.customer_id, start_to_close_timeout=STEP_TIMEOUT
                    ),
                )
            else:
                known = replace(
                    known,
                    order=await workflow.execute_activity(
                        find_order, request.order_id, start_to_close_timeout=STEP_TIMEOUT
                    ),
                )
