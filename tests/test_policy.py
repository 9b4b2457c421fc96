"""The decision policy and the guard rails: pure functions, no event loop."""

import time

import pytest
from freezegun import freeze_time

import refund_agent
from refund_agent import (
    INTAKE,
    Asked,
    CustomerHistory,
    Known,
    Money,
    Order,
    PolicyCheck,
    Question,
    RefundActivities,
    Step,
    decide,
    refusal,
)

DAY = 24 * 60 * 60


def order(amount: int = 80_00, left: int = 200_00, currency: str = "usd", days: int = 10) -> Order:
    return Order("teapot", Money(amount, currency), left, "pi_1", time.time() - days * DAY)


def known(found: Order | None = None, refunds: int | None = None, eligible: bool | None = None,
          answered: int = len(INTAKE)) -> Known:
    return Known(
        recalled=(), order=found,
        answers=tuple(Asked(question, "yes") for question in INTAKE[:answered]),
        history=None if refunds is None else CustomerHistory(refunds),
        policy=None if eligible is None else PolicyCheck(eligible, "the reason"))


@pytest.mark.parametrize(("facts", "expected"), [
    (known(answered=0), Step("ask", INTAKE[0])),
    (known(answered=1), Step("ask", INTAKE[1])),
    (known(), Step("lookup_order")),
    (known(order()), Step("lookup_customer_history")),
    (known(order(), 1), Step("approve", "within the limit, clean history", 80_00)),
    (known(order(100_00), 0), Step("approve", "within the limit, clean history", 100_00)),
    (known(order(80_00, left=30_00), 0), Step("approve", "within the limit, clean history", 30_00)),
    (known(order(9_899, currency="jpy"), 0),
     Step("approve", "within the limit, clean history", 9_899)),
    (known(order(100_01), 0), Step("check_refund_policy")),
    (known(order(), 2), Step("check_refund_policy")),
    (known(order(5_00, currency="chf"), 0), Step("check_refund_policy")),
    (known(order(100_01), 0, True), Step("escalate", "above the limit", 100_01)),
    (known(order(), 3, True), Step("escalate", "3 earlier refunds", 80_00)),
    (known(order(100_01), 0, False), Step("deny", "the reason")),
])
def test_the_policy_decides(facts: Known, expected: Step) -> None:
    assert decide(refund_agent.RefundRequest("1234", "ada", "hello"), facts) == expected


@pytest.mark.parametrize(("step", "facts", "why"), [
    (Step("issue_refund"), known(order()), "no such step"),
    (Step("__class__"), known(order()), "no such step"),
    (Step(""), known(order()), "no such step"),
    (Step("ask", "  "), known(), "empty"),
    (Step("ask", INTAKE[0]), known(), "already answered"),
    (Step("lookup_order"), known(order()), "already known"),
    (Step("lookup_customer_history"), known(order(), 1), "already known"),
    (Step("check_refund_policy"), known(), "look up the order first"),
    (Step("approve", amount=1), known(), "look up the order first"),
    (Step("approve", amount=0), known(order()), "and at most 80.00 USD"),
    (Step("approve", amount=-5), known(order()), "and at most 80.00 USD"),
    (Step("approve", amount=80_01), known(order()), "and at most 80.00 USD"),
    (Step("escalate", amount=30_01), known(order(left=30_00)), "and at most 30.00 USD"),
])
def test_the_guard_rails_refuse(step: Step, facts: Known, why: str) -> None:
    assert why in refusal(step, facts)


@pytest.mark.parametrize("step", [
    Step("ask", "Where do you live?"), Step("lookup_customer_history"), Step("check_refund_policy"),
    Step("approve", amount=80_00), Step("escalate", amount=1), Step("deny", "no"),
])
def test_the_guard_rails_let_pass(step: Step) -> None:
    assert refusal(step, known(order())) == ""


@pytest.mark.parametrize("raw", [
    None, "approve", {"action": "approve"}, [Step("approve"), Step("approve")], 7,
    Step("approve", amount=10**400), Step("approve", amount=True),
    Step(action=None), Step("approve", amount="80"),  # type: ignore[arg-type]
    Step("approve", text=["x"]), Step("approve", amount=80.5),  # type: ignore[arg-type]
])
def test_what_is_no_step_becomes_one_that_is_refused(raw: object) -> None:
    step = Step.of(raw)
    assert step.action == "malformed" and refusal(step, known(order()))


@pytest.mark.parametrize(("money", "shown"), [
    (Money(80_00, "usd"), "80.00 USD"), (Money(5, "usd"), "0.05 USD"),
    (Money(1_234_567, "eur"), "12,345.67 EUR"), (Money(9_899, "jpy"), "9,899 JPY"),
    (Money(9_899, "kwd"), "9.899 KWD"),
])
def test_amounts_are_shown_in_their_currency(money: Money, shown: str) -> None:
    assert str(money) == shown


@pytest.mark.parametrize(("days", "eligible"), [(30, True), (31, False)])
async def test_the_refund_window_is_thirty_days(days: int, eligible: bool) -> None:
    steps = RefundActivities(stripe=None, shop=None, decider=None)  # type: ignore[arg-type]
    with freeze_time("2026-03-01", real_asyncio=True):
        check = await steps.check_refund_policy(order(days=days))
    assert check.eligible is eligible


def test_a_question_is_named_by_its_turn_and_its_text() -> None:
    ids = {Question.at(turn, "customer", text).id for turn in (0, 1) for text in ("a", "b")}
    assert len(ids) == 4 and ids == {
        Question.at(turn, "customer", text).id for turn in (0, 1) for text in ("a", "b")}
