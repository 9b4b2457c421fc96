"""The README says what is so: its commands run, its links lead somewhere, its lines are counted."""

import asyncio
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [ROOT / "README.md", ROOT / "recipes" / "README.md", ROOT / "benchmarks" / "README.md"]
README = FILES[0].read_text()
ALL = "\n".join(file.read_text() for file in FILES)
PYTHON = ".venv/bin/python "
NOT_RUN = {  # why
    "uv run run_demo.py": "uv installs from the network; the demo itself: test_demo.py",
    "uv run pytest": "this suite",
    "python3 -m venv .venv": "makes an environment in the checkout",
    ".venv/bin/pip install -e .": "installs from the network",
    ".venv/bin/python run_demo.py": "test_demo.py",
    ".venv/bin/pip install -e '.[test]'": "installs from the network",
    ".venv/bin/pytest": "this suite",
    ".venv/bin/pip install -e '.[recipes]'": "installs from the network",
    ".venv/bin/temporal server start-dev": "runs until it is stopped, on a port that may be taken",
    ".venv/bin/temporal workflow start --type RefundAgent --task-queue refunds "
    "--workflow-id refund-1234-1-fdee430d --memo 'customer_id=\"ada\"' --input "
    """'{"order_id": "1234", "customer_id": "ada", "message": "Please refund it."}'""": (
        "needs that server"
    ),
    ".venv/bin/python recipes/worker.py": "runs until it is stopped: test_worker_recipe.py",
    "STRIPE_API_KEY=sk_test_... .venv/bin/python recipes/real_stripe.py": "needs a key",
    "XMEM_API_KEY=... .venv/bin/python recipes/real_memory.py": "needs a key",
    "OPENAI_API_KEY=... .venv/bin/python recipes/real_model.py --provider openai": "needs a key",
}


def commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", ALL, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [part.split("  #")[0].strip() for line in lines for part in line.split("&&")]


@pytest.mark.everywhere
@pytest.mark.parametrize("command", [each for each in commands() if each not in NOT_RUN])
async def test_a_command_of_the_readme_runs(command: str) -> None:
    assert command.startswith(PYTHON)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command.removeprefix(PYTHON).split(),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()


def test_what_is_not_run_is_in_the_readme() -> None:
    assert NOT_RUN.keys() <= set(commands())


def test_the_line_counts_are_counted() -> None:
    counts = re.findall(r"^\| \[`(\w+\.py)`\]\(\1\) \| (\d+) \|", README, re.MULTILINE)
    assert len(counts) == 5
    for file, lines in counts:
        assert len((ROOT / file).read_text().splitlines()) == int(lines), file


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_every_link_leads_to_a_file(file: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", file.read_text())
    inside = {link for link in links if not link.startswith("https://")}
    assert inside and not {link for link in inside if not (file.parent / link).is_file()}


def test_every_recipe_and_benchmark_is_named() -> None:
    files = [*ROOT.glob("recipes/*.py"), *ROOT.glob("benchmarks/*.py")]
    assert files and not [file.name for file in files if file.name not in ALL]
