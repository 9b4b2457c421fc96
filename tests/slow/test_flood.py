"""What `send_answer` does when far too many messages wait for a Worker."""

import asyncio

import pytest

from desk import Desk
from refund_agent import Answer, Refused, send_answer
from run_demo import open_question
from test_05_signals import question_to, waiting


async def test_with_no_worker_alive_answers_are_accepted_until_too_many_wait(desk: Desk) -> None:
    async with waiting(desk, "customer") as (case, question):
        pass
    for _ in range(20):
        await asyncio.gather(
            *(case.signal("answer", Answer("customer-9-x", "x")) for _ in range(50))
        )
    with pytest.raises(Refused, match="too many messages wait"):
        await send_answer(case, Answer(question.id, "yes"))
    async with desk.worker():
        assert await open_question(case) == question
        await send_answer(case, Answer(question.id, "yes"))
        assert (await question_to(case, "reviewer")).to == "reviewer"
