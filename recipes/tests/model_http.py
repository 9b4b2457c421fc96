"""A scripted model that answers over HTTP as OpenAI (Responses) and Anthropic (Messages) do."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from http_face import Answer, HttpFace, Request

from refund_agent import INTAKE

KEY = "key-canary"
PATHS = {"openai": "/v1/responses", "anthropic": "/v1/messages"}


@dataclass(frozen=True)
class Reply:
    """What the model does: the tools it calls, and how its answer ends (`CUT` of them are cut)."""

    calls: Sequence[tuple[str, object]] = ()
    ended: str = ""  # "", refusal or length
    says: str = ""


class Billed(NamedTuple):
    input_tokens: int
    output_tokens: int


class ModelFace(HttpFace):
    """Answers with `replies`, then by itself: as the policy would, from what it is shown alone."""

    def __init__(self, provider: str) -> None:
        super().__init__()
        self.provider, self.api_key = provider, KEY
        self.replies: list[Reply] = []
        self.billed: list[Billed] = []

    @property
    def environment(self) -> dict[str, str]:
        """For a program: its key, and where its SDK finds this server."""
        name, base = self.provider.upper(), self.url + ("/v1" if self.provider == "openai" else "")
        return {f"{name}_API_KEY": self.api_key, f"{name}_BASE_URL": base}

    def shown(self, at: int = -1) -> dict[str, Any]:
        """The document of a request."""
        facts = json.loads(shown_in(self.requests[at].body))
        assert isinstance(facts, dict)
        return facts

    async def answer(self, request: Request) -> Answer:
        keys = (request.headers.get("authorization"), request.headers.get("x-api-key"))
        if f"Bearer {self.api_key}" not in keys and self.api_key not in keys:
            return failure(401)
        if request.path != PATHS[self.provider]:
            return failure(404)
        shown = json.loads(shown_in(request.body))
        reply = self.replies.pop(0) if self.replies else sensible(shown)
        self.billed.append(Billed(len(str(request.body)), 7 + len(self.billed)))
        body = {"openai": as_openai, "anthropic": as_anthropic}[self.provider](reply)
        body |= {"id": "answer-1", "model": "scripted", "usage": self.billed[-1]._asdict()}
        return Answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})


def shown_in(body: Any) -> str:
    return str(body["input"] if "input" in body else body["messages"][0]["content"])


def failure(status: int, code: str = "") -> Answer:
    """An error of either API, which quotes what must not be quoted."""
    body = {"error": {"message": f"about {KEY}", "type": "an_error", "code": code}}
    return Answer(status, json.dumps(body).encode(), {"Content-Type": "application/json"})


def sensible(facts: dict[str, Any]) -> Reply:
    """The next of six steps; each adds one fact."""
    known = [facts[fact] is not None for fact in ("order", "earlier_refunds", "policy")]
    price = (facts["order"] or {}).get("price")
    steps: list[tuple[str, object]] = [
        *(("ask", {"text": question}) for question in INTAKE),
        ("lookup_order", {}),
        ("lookup_customer_history", {}),
        ("check_refund_policy", {}),
        ("approve", {"amount": price, "text": "plain"}),
    ]
    return Reply([steps[len(facts["answers"]) + sum(known)]])


def as_openai(reply: Reply) -> dict[str, Any]:
    output: list[dict[str, Any]] = [{"type": "reasoning", "id": "rs_1", "summary": []}]
    output += [
        {
            "type": "function_call",
            "id": f"fc_{at}",
            "call_id": f"call_{at}",
            "name": name,
            "arguments": given if isinstance(given, str) else json.dumps(given),
        }
        for at, (name, given) in enumerate(reply.calls)
    ]
    if reply.says or reply.ended == "refusal":
        kind, text = ("refusal",) * 2 if reply.ended == "refusal" else ("output_text", "text")
        part = {"type": kind, text: reply.says, "annotations": []}
        output.append({"type": "message", "id": "msg_1", "role": "assistant", "content": [part]})
    cut = reply.ended == "length"
    return {
        "object": "response",
        "status": "incomplete" if cut else "completed",
        "output": output,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
    }


def as_anthropic(reply: Reply) -> dict[str, Any]:
    content: list[dict[str, Any]] = [{"type": "text", "text": reply.says}] if reply.says else []
    content += [
        {"type": "tool_use", "id": f"toolu_{at}", "name": name, "input": given}
        for at, (name, given) in enumerate(reply.calls)
    ]
    ended = {"length": "max_tokens", "refusal": "refusal"}
    usual = "tool_use" if reply.calls else "end_turn"
    return {
        "type": "message",
        "role": "assistant",
        "content": content,
        "stop_reason": ended.get(reply.ended, usual),
    }
