"""`python run_demo.py` as a stranger uses it: a process, what it prints, and its exit code."""

import re

import pytest

import run_demo
from desk import ROOT, ended
from refund_agent import RefundResult

DEMO = ROOT / "run_demo.py"
pytestmark = pytest.mark.usefixtures("mark")


async def test_the_demo_observes_what_it_claims_and_prints_what_the_readme_shows() -> None:
    code, out, err = await ended(DEMO, env={"PYTHONIOENCODING": "ascii"})
    assert (code, err) == (0, "")
    assert "NOT OBSERVED" not in out and out.count("  observed  ") == 8
    assert "\x1b" not in out and out.isascii()
    (shown,) = re.findall("```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    printed = iter(masked(out).splitlines())  # the README leaves lines out
    assert [line for line in masked(shown).splitlines() if line not in printed] == []


def masked(printed: str) -> str:
    """Without what differs from run to run: process ids, seconds, and how wide they are."""
    return re.sub(r"[\d.]+", "#", re.sub(" +", " ", printed))


def test_a_claim_that_was_not_observed_fails_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    plain, durable = run_demo.Plain("1234", "before-refund"), run_demo.Durable("1234")
    durable.recorded = run_demo.Recorded(0, [], "none")
    plain.killed_at = durable.killed_at = 1.0
    plain.result = durable.result = RefundResult("denied", "No.")
    assert run_demo.show_counts(plain, durable) == 1
    assert "NOT OBSERVED  the plain process made the customer start over" in capsys.readouterr().out


def test_a_case_in_the_record_of_another_customer_is_not_counted() -> None:
    world = run_demo.Plain("1234")
    for customer, cases in (("ben", 0), ("ada", 1)):
        line = {"customer_id": customer, "past_cases": "order 1234 line 1: refund succeeded"}
        world.xmemory.put("Customer", line)
        assert world.count()["cases remembered"] == cases


def test_a_text_cannot_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    run_demo.Plain("1234").say("customer", "a\x1b[2Jb\rc\nd\u202ee")
    assert capsys.readouterr().out.strip() == "customer  a?[2Jb?c?d?e"


async def test_missing_packages_are_one_line() -> None:
    code, out, err = await ended("-I", "-S", DEMO)
    assert (code, out, err.count("\n")) == (1, "", 1) and "pip install -e ." in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--crash", "nowhere"],
        ["--crash", "everywhere", "--ask"],
        ["--order", "a b"],
        ["--order", "1236", "--crash", "before-refund"],
        ["--by-hand"],  # no terminal here
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        run_demo.parse(arguments)
    assert left.value.code == 2 and "error:" in capsys.readouterr().err
