"""Change the loop while cases are open, and find out before the deploy if you broke one.

A new Worker replays open cases: it runs today's code against yesterday's Event History. Code that
now wants another step, or another order of steps, does not fit (NondeterminismError), and the case
stands still until the code is put right. So such a change is made in three deploys:

1. `if workflow.patched(NAME):` the new way, else the old way. A case that was past this place keeps
   to the old way; one that comes here from now on takes the new way, and records that it did.
2. When no case of the old way is open, `workflow.deprecate_patch(NAME)` and the new way alone.
3. When the cases of step 1 are gone from the namespace, too, remove that line.

    temporal workflow list --query 'TemporalChangeVersion = "screen-before-refund"'

The example adds a step: before money moves, another Activity screens the refund. The loop stays as
it is, because it is told how to act. Texts, timeouts and Activity bodies may change freely.

The check belongs into CI: replay what is open in production against the code to be deployed.

    temporal workflow show --workflow-id refund-1234-1 --output json > case.json
    python recipes/versioning.py case.json ...       (in an environment that has this project)
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from temporalio import activity, workflow
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer
from temporalio.workflow import NondeterminismError

from refund_agent import CaseInput, RefundAgent, RefundOrder, RefundResult, StepFailed

SCREENED = "screen-before-refund"
In = TypeVar("In")
Out = TypeVar("Out")


class Screen(Protocol):
    async def suspicious(self, order: RefundOrder) -> bool: ...


class ScreeningActivities:
    def __init__(self, screen: Screen) -> None:
        self._screen = screen

    @activity.defn
    async def screen_refund(self, order: RefundOrder) -> bool:
        """Whether a person should look at this refund before it is made."""
        return await self._screen.suspicious(order)


@workflow.defn(name="RefundAgent")  # the name in the histories: it is the same Workflow, changed
class ScreeningRefundAgent(RefundAgent):
    @workflow.init
    def __init__(self, given: CaseInput) -> None:
        super().__init__(given)

    @workflow.run
    async def run(self, given: CaseInput) -> RefundResult:
        return await super().run(given)

    async def act(self, step: Callable[[Any, In], Awaitable[Out]], argument: In) -> Out:
        if isinstance(argument, RefundOrder) and workflow.patched(SCREENED):
            if await super().act(ScreeningActivities.screen_refund, argument):
                raise StepFailed("Screened", "a person should look at this refund first")
        return await super().act(step, argument)


async def does_not_replay(
    paths: Sequence[str], agent: type[RefundAgent] = ScreeningRefundAgent
) -> list[str]:
    """Which of these histories the Workflow can no longer replay, and why."""
    broken = []
    for path in paths:
        try:
            history = WorkflowHistory.from_json(Path(path).stem, Path(path).read_text())
            await Replayer(workflows=[agent]).replay_workflow(history)
        except (NondeterminismError, OSError, ValueError) as error:
            broken.append(f"{path}: {str(error).splitlines()[0]}")
    return broken


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit("Give the histories to replay: python recipes/versioning.py case.json ...")
    problems = asyncio.run(does_not_replay(sys.argv[1:]))
    print("\n".join(problems) or f"{len(sys.argv) - 1} histories replay")
    sys.exit(bool(problems))
