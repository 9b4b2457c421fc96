"""The recipe for changing the loop while cases are open."""

from pathlib import Path

import pytest
from temporalio import workflow
from temporalio.worker import WorkerConfig

from desk import ROOT, Desk, Replaying
from harness import DevServer
from recipes.versioning import ScreeningActivities, ScreeningRefundAgent, does_not_replay
from refund_agent import AgreedRefund

OLD = str(ROOT / "tests" / "histories" / "escalated.json")


class Suspects:
    def __init__(self, suspicious: bool) -> None:
        self.suspicious, self.seen = suspicious, 0

    async def screen(self, agreed: AgreedRefund) -> bool:
        self.seen += 1
        return self.suspicious


class Deployed(Replaying):
    """Puts the changed Workflow and its Activity into `build_worker`'s Worker."""

    def __init__(self, suspects: Suspects) -> None:
        super().__init__("demo")
        self.steps = ScreeningActivities(suspects.screen)

    def configure_worker(self, config: WorkerConfig) -> WorkerConfig:
        config["workflows"] = [ScreeningRefundAgent]
        config["activities"] = [*config["activities"], self.steps.screen_refund]
        return super().configure_worker(config)


async def test_a_case_from_before_the_change_still_replays() -> None:
    assert await does_not_replay([OLD]) == []


async def test_a_change_without_the_patch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workflow, "patched", lambda name: True)
    (broken,) = await does_not_replay([OLD])
    assert broken.startswith(OLD)


@pytest.mark.parametrize("suspicious", [False, True])
async def test_a_new_case_is_screened_once_and_replays(
    server: DevServer, tmp_path: Path, suspicious: bool
) -> None:
    suspects, outcome = Suspects(suspicious), "needs a human" if suspicious else "refund succeeded"
    desk = Desk(await server.client(plugins=[Deployed(suspects)]))
    async with desk.open() as case:
        assert (await case.result()).outcome == outcome
    assert (suspects.seen, desk.world.count()["refunds"]) == (1, not suspicious)
    path = tmp_path / "new.json"
    path.write_text((await case.fetch_history()).to_json())
    assert await does_not_replay([str(path)]) == []
