"""The policy and the guard rails: pure functions, no event loop."""

from typing import Any

import pytest

from refund_agent import (
    INTAKE,
    MAX_QUESTIONS,
    MAX_TEXT,
    Known,
    Order,
    RefundActivities,
    RefundRequest,
    Step,
    decide,
    money,
    refusal,
)

REASON = "within the limit, clean history"


def known(
    price: int = 80_00, refunds: int | None = None, policy: str | None = None, usd: str = "usd"
) -> Known:
    """The customer has answered. With a price of 0, the order was not looked up."""
    order = Order("teapot", price, usd, "pi_1", 0.0) if price else None
    answers = dict.fromkeys(INTAKE, "yes")
    return Known(RefundRequest("1", "ada", "hello"), 0.0, None, answers, order, refunds, policy)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (Known(known().request, 0.0), Step("ask", INTAKE[0])),
        (Known(known().request, 0.0, None, {INTAKE[0]: "yes"}), Step("ask", INTAKE[1])),
        (known(0), Step("lookup_order")),
        (known(), Step("lookup_customer_history")),
        (known(refunds=1), Step("approve", REASON, 80_00)),
        (known(100_00, 0), Step("approve", REASON, 100_00)),
        (known(15_000, 0, usd="jpy"), Step("approve", REASON, 15_000)),
        (known(15_001, 0, usd="jpy"), Step("check_refund_policy")),
        (known(100_01, 0), Step("check_refund_policy")),
        (known(refunds=2), Step("check_refund_policy")),
        (known(100_01, 0, ""), Step("escalate", "earlier refunds of this customer: 0", 100_01)),
        (
            known(refunds=3, policy=""),
            Step("escalate", "earlier refunds of this customer: 3", 80_00),
        ),
        (known(100_01, 0, "too late"), Step("deny", "too late")),
    ],
)
def test_the_policy_decides(facts: Known, expected: Step) -> None:
    assert decide(facts) == expected


ENOUGH = Known(known().request, 0.0, answers={str(n): "yes" for n in range(MAX_QUESTIONS)})


@pytest.mark.parametrize(
    ("step", "facts", "why"),
    [
        (Step("issue_refund"), known(), "no such step"),
        (Step("__class__"), known(), "no such step"),
        (Step("ask", " ?! "), known(), "empty"),
        (Step("ask", f" {INTAKE[0].upper()} ??"), known(), "already answered"),
        (Step("ask", "Really?"), ENOUGH, "that is enough"),
        (Step("lookup_order"), known(), "already known"),
        (Step("lookup_customer_history"), known(refunds=0), "already known"),
        (Step("check_refund_policy"), known(policy=""), "already known"),
        (Step("check_refund_policy"), known(0), "look up the order first"),
        (Step("approve", amount=1), known(0), "look up the order first"),
        (Step("approve", amount=0), known(), "above 0"),
        (Step("approve", amount=-5), known(), "above 0"),
        (Step("escalate", amount=80_01), known(), "at most 8000 minor units"),
    ],
)
def test_the_guard_rails_refuse(step: Step, facts: Known, why: str) -> None:
    assert why in refusal(step, facts)


@pytest.mark.parametrize(
    "step",
    [
        Step("ask", "Where do you live?"),
        Step("lookup_customer_history"),
        Step("check_refund_policy"),
        Step("approve", amount=80_00),
        Step("escalate", amount=1),
        Step("deny", "no"),
    ],
)
def test_the_guard_rails_let_pass(step: Step) -> None:
    assert refusal(step, known()) == ""


async def decided(answer: Any) -> Step:
    async def decide(_: Known) -> object:
        return answer

    steps = RefundActivities(stripe=None, shop=None, decide=decide)
    return await steps.agent_decide_next_step(known())


@pytest.mark.parametrize(
    "answer",
    [
        None,
        "approve",
        {"action": "approve"},
        [Step("approve")],
        Step(None),  # type: ignore[arg-type]
        Step("approve", ["x"]),  # type: ignore[arg-type]
        Step("approve", amount="80"),  # type: ignore[arg-type]
        Step("approve", amount=80.5),  # type: ignore[arg-type]
    ],
)
async def test_what_is_no_step_becomes_one_that_is_refused(answer: object) -> None:
    assert "no such step" in refusal(await decided(answer), known())


async def test_a_text_without_end_is_cut() -> None:
    assert len((await decided(Step("deny", "x" * 10**6))).text) == MAX_TEXT


@pytest.mark.parametrize(
    ("amount", "currency", "shown"),
    [(80_00, "usd", "80.00 USD"), (5, "gbp", "0.05 GBP"), (1_234_567, "eur", "12,345.67 EUR")]
    + [(9_899, "jpy", "9,899 JPY")],
)
def test_amounts_are_shown_in_their_currency(amount: int, currency: str, shown: str) -> None:
    assert money(amount, currency) == shown
