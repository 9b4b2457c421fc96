"""The exercises of the README: each change of the product turns the test that it names red."""

import shutil
import sys
from asyncio.subprocess import DEVNULL, create_subprocess_exec
from pathlib import Path
from typing import NamedTuple

import pytest

from desk import ROOT
from test_12_readme import section

KEY = ', {"idempotency_key": f"refund:{request.name}"}'
LOOK = """            if done := await self._refund_on_record(request, order, agreed.amount):
                return done
"""


class Exercise(NamedTuple):
    test: str
    file: str
    changes: dict[str, str]


AGENT, MEMORY = "refund_agent.py", "memory_activities.py"
EXERCISES = [
    Exercise(
        "slow/test_overlap.py::test_when_one_of_two_workers_is_killed_the_other_finds_its_refund",
        AGENT,
        {KEY: "", LOOK: ""},
    ),
    Exercise(
        "test_04_money.py::test_the_key_and_the_record_each_make_it_one_refund", AGENT, {LOOK: ""}
    ),
    Exercise(
        "slow/test_identity.py::test_two_runs_that_overlap_at_stripe_make_one_refund",
        AGENT,
        {"refund:{request.name}": "refund:{activity.info().workflow_run_id}"},
    ),
    Exercise(
        "test_07_memory.py::test_only_an_attempt_that_lasts_heartbeats",
        MEMORY,
        {"        activity.heartbeat()\n": ""},
    ),
    Exercise(
        "test_10_replay.py::test_a_recorded_case_replays",
        AGENT,
        {"Known(request, runtime.started_at,": "Known(request, __import__('time').time(),"},
    ),
    Exercise(
        "test_07_memory.py::test_a_text_whose_answer_was_lost_is_not_sent_again",
        MEMORY,
        {"(ONCE if text else RETRIED)": "RETRIED"},
    ),
]


async def code_of(copy: Path, *tests: str) -> int | None:
    """How pytest ends in this copy of the project."""
    command = sys.executable, "-m", "pytest", "-q", *(f"tests/{test}" for test in tests)
    process = await create_subprocess_exec(*command, cwd=copy, stdout=DEVNULL)
    return await process.wait()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    unneeded = shutil.ignore_patterns(".*", "__pycache__", "docs", "recipes", "benchmarks")
    return Path(shutil.copytree(ROOT, tmp_path / "copy", ignore=unneeded))


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.test.split("::")[1])
async def test_a_change_turns_its_test_red(copy: Path, exercise: Exercise) -> None:
    file = copy / exercise.file
    text = file.read_text()
    for old, new in exercise.changes.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    file.write_text(text)
    assert await code_of(copy, exercise.test) == pytest.ExitCode.TESTS_FAILED


async def test_without_a_change_they_are_green_and_the_readme_has_them_all(copy: Path) -> None:
    assert await code_of(copy, *(exercise.test for exercise in EXERCISES)) == pytest.ExitCode.OK
    rows = [line for line in section("Break it").splitlines() if line.startswith("| `")]
    for row, exercise in zip(rows, EXERCISES, strict=True):
        assert f"`{exercise.test.split('::')[1]}`" in row
