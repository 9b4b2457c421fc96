"""A recorded history still replays, and a loop that changes its order does not.

`tests/histories/record.py` records it anew.
"""

from typing import Any

import pytest
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer, UnsandboxedWorkflowRunner
from temporalio.workflow import NondeterminismError

import refund_agent
from desk import ROOT
from refund_agent import RefundAgent

RECORDED = (ROOT / "tests" / "histories" / "escalated.json").read_text()
HISTORY = WorkflowHistory.from_json("refund-1235-1", RECORDED)


async def test_a_recorded_case_replays() -> None:
    await Replayer(workflows=[RefundAgent]).replay_workflow(HISTORY)


async def test_a_loop_that_forgets_to_recall_first_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def skip(request: Any, runtime: Any) -> None:
        return None

    monkeypatch.setattr(refund_agent, "recall", skip)
    replayer = Replayer(workflows=[RefundAgent], workflow_runner=UnsandboxedWorkflowRunner())
    with pytest.raises(NondeterminismError):
        await replayer.replay_workflow(HISTORY)


def test_the_recorded_history_names_no_machine() -> None:
    assert "@" not in RECORDED and "/home/" not in RECORDED and "\\/" not in RECORDED
