"""The recipe that puts a real xmemory instance in place of the fake: the real client over HTTP."""

import asyncio
import copy
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
import pytest_asyncio
from http_face import serving
from xmemory_http import XmemoryFace

from desk import ROOT, ended
from fake_xmemory import FakeXmemory
from harness import HarnessError

xmemory = pytest.importorskip(
    "xmemory", reason="the real client is not installed: pip install -e '.[memory]'"
)

from recipes import real_memory  # noqa: E402
from recipes.real_memory import NAME, SCHEMA, find_or_create, main  # noqa: E402

RECIPE = ROOT / "recipes" / "real_memory.py"
KEY = "key-canary"


@pytest_asyncio.fixture
async def face(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[XmemoryFace]:
    """An account without an instance; the environment names it."""
    for name in ("XMEM_INSTANCE_ID", "XMEM_CLUSTER_ID", "XMEM_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    async with serving(XmemoryFace(FakeXmemory({}), "none", KEY)) as opened:
        monkeypatch.setattr(real_memory, "SETTLE_SECONDS", 0.2)
        monkeypatch.setenv("XMEM_API_KEY", KEY)
        monkeypatch.setenv("XMEM_API_URL", opened.url)
        yield opened


async def found() -> tuple[str, bool]:
    async with xmemory.AsyncXmemoryClient(api_key=KEY) as client:
        return await find_or_create(client)


async def refused() -> str:
    with pytest.raises(HarnessError) as caught:
        await main()
    assert KEY not in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


async def test_the_program_makes_the_instance_and_run_again_finds_it(face: XmemoryFace) -> None:
    code, first, errors = await ended(RECIPE)
    assert (code, errors) == (0, "")
    code, second, errors = await ended(RECIPE, env={"XMEM_INSTANCE_ID": "made-1"})
    assert (code, errors) == (0, "") and KEY not in first + second
    assert "made instance made-1; from now on: export XMEM_INSTANCE_ID=made-1" in first
    assert "recalled: 0" in first and "holds: order 1234 line 1: refund succeeded\n" in first
    assert "found instance made-1; its schema fits" in second and "recalled: 1" in second
    (row,) = face.fake.tables["Customer"].values()
    assert {*row} == {*SCHEMA["objects"]["Customer"]["fields"]}


async def test_an_instance_is_made_once_and_then_found_by_its_name(face: XmemoryFace) -> None:
    theirs = {"id": "theirs", "cluster_id": "c", "name": "another", "data_schema": {}}
    face.instances = [theirs]
    assert [await found(), await found()] == [("made-2", True), ("made-2", False)]
    assert (face.instances[1]["name"], face.instances[1]["data_schema"]) == (NAME, SCHEMA)


async def test_two_that_start_at_once_use_one_instance(face: XmemoryFace) -> None:
    (one, made), (other, made_too) = await asyncio.gather(found(), found())
    assert [each["id"] for each in face.instances] == [one] == [other] and made != made_too
    assert [sent.method for sent in face.requests].count("POST") == 2


FOREIGN = copy.deepcopy(SCHEMA)
FOREIGN["objects"]["Customer"]["fields"]["shop"] = {"type": "str", "required": True}


@pytest.mark.parametrize(
    ("schema", "wrong"),
    [
        (
            {},
            "Customer must have the primary key customer_id; Customer.customer_id must be a text;",
        ),
        (FOREIGN, "Customer.shop is required, and the agent does not know it"),
    ],
)
async def test_a_schema_that_conflicts_is_one_line(
    face: XmemoryFace, schema: Mapping[str, Any], wrong: str
) -> None:
    face.instances = [{"id": "i", "cluster_id": "c", "name": NAME, "data_schema": schema}]
    assert (await refused()).startswith(f"the schema of instance i conflicts: {wrong}")


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("XMEM_API_KEY", "other-canary", "xmemory refused the API key; check XMEM_API_KEY"),
        ("XMEM_API_KEY", "key\ncanary", "XMEM_API_KEY must hold the key"),
        ("XMEM_API_URL", "nonsense", "xmemory did not answer; check XMEM_API_KEY"),
        ("XMEM_INSTANCE_ID", "other", "xmemory has no such instance; check XMEM_API_KEY"),
    ],
)
async def test_what_is_wrong_with_the_environment_is_one_line(
    face: XmemoryFace, monkeypatch: pytest.MonkeyPatch, name: str, value: str, line: str
) -> None:
    monkeypatch.setenv(name, value)
    said = await refused()
    assert said.startswith(line) and "canary" not in said
