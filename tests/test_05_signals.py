"""A Signal may hold anything. None stops a case, none counts twice, and none but a reviewer's
approval approves."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from desk import Desk, question_of, reply
from refund_agent import Answer, Case, Question, RefundAgent, Refused, send_answer
from run_demo import open_question


async def question_to(case: Case, person: str) -> Question:
    """The open question to this person. The customer answers all others."""
    while (question := await question_of(case)).to != person:
        await send_answer(case, await reply(question))
    return question


@asynccontextmanager
async def waiting(desk: Desk, person: str = "reviewer") -> AsyncIterator[tuple[Case, Question]]:
    """A case of 150.00 that waits for this person."""
    async with desk.worker():
        case = await desk.start("1235")
        yield case, await question_to(case, person)


def useless(review: str) -> list[list[Any]]:
    """The arguments of one Signal each. The id of the review makes them as good as they can be."""
    approval = {"question_id": review, "text": "yes", "approve": True}
    return [
        [],
        [approval, approval],
        [None],
        ["yes"],
        [b"yes"],
        [[approval]],
        [7],
        [{"question_id": review, "approve": "false"}],
        [{"question_id": review, "approve": "true"}],
        [{"question_id": review, "approve": 1}],
        [{"question_id": review, "text": "yes"}],
        [approval | {"text": "x" * 1_100_000}],
        [approval | {"text": None}],
        [approval | {"question_id": 5}],
        [approval | {"question_id": "reviewer-0-unknown"}],
        [{"question_id": "customer-9-unknown", "text": "yes"}],
    ]


async def send_all(case: Case, review: str) -> None:
    for arguments in useless(review):
        for signal in ("answer", "review"):
            await case.signal(signal, args=arguments)
    # The customer cannot approve: this id is right, and the Signal is the wrong one.
    approval = Answer(review, "yes", approve=True)
    await case.signal("answer", approval)
    with pytest.raises(Refused, match="no question to you"):
        await send_answer(case, approval)


async def test_while_a_case_waits_it_ignores_what_is_no_answer(desk: Desk) -> None:
    async with waiting(desk) as (case, review):
        await send_all(case, review.id)
        assert await open_question(case) == review
        await send_answer(case, Answer(review.id, approve=True), reviewer=True)
        assert (await case.result()).outcome == "refund succeeded"
    assert desk.world.stripe.counts()["refunds.create"] == 1


async def test_while_a_refund_is_on_its_way_no_message_stops_it(desk: Desk) -> None:
    held = desk.world.stripe.hold_next_create("before")
    async with waiting(desk) as (case, review):
        await send_answer(case, Answer(review.id, approve=True), reviewer=True)
        await held.wait()
        await send_all(case, review.id)
        desk.world.stripe.release()
        assert (await case.result()).outcome == "refund succeeded"
    assert desk.world.stripe.counts()["refunds.create"] == 1


async def test_the_first_review_counts(desk: Desk) -> None:
    async with waiting(desk) as (case, review):
        for approve in (False, True):
            await case.signal("review", Answer(review.id, "note", approve))
        result = await case.result()
    assert (result.outcome, result.notice) == ("denied", "note")


async def test_progress_names_the_step_and_the_question(desk: Desk) -> None:
    async with waiting(desk) as (case, review):
        progress = await case.query(RefundAgent.progress)
    assert (progress.question, progress.result) == (review, None)
    assert progress.since > 0
