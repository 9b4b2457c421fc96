"""An HTTP face of FakeStripe, for the real SDK. Loopback only.

All behaviour is the fake's. What is here is the wire, and how to pay with a test card, which only
the recipe does.
"""

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from http_face import Answer, HttpFace, Request

from fake_stripe import FakeStripe, InvalidRequestError, StripeError

WHOLE = {"amount", "limit"}  # on the wire all is text; what is no whole number stays text
NESTED = re.compile(r"(\w+)\[(\w+)\]")


class StripeFace(HttpFace):
    headers = {"Connection": "close"}  # the SDK closes none by itself

    def __init__(self, fake: FakeStripe) -> None:
        super().__init__()
        self.fake = fake

    async def answer(self, request: Request) -> Answer | None:
        headers = {
            "Stripe-Version": request.headers["stripe-version"],
            "Request-Id": f"req_{len(self.requests)}",
        }
        if request.method == "POST" and "idempotency-key" in request.headers:
            headers["Idempotency-Key"] = request.headers["idempotency-key"]
        self.fake.api_key = request.headers.get("authorization", "").removeprefix("Bearer ")
        try:
            return _json(200, headers, await self._call(request))
        except StripeError as error:
            if error.http_status is None:
                return None
            shown = {name: value for name, value in vars(error.error).items() if value is not None}
            return _json(error.http_status, headers, {"error": shown})

    async def _call(self, request: Request) -> Any:
        v1, params = self.fake.v1, _parameters(form(request))
        key = request.headers.get("idempotency-key")
        match request.method, *urlsplit(request.path).path.split("/")[2:]:
            case "POST", "refunds":
                return await v1.refunds.create_async(params, {"idempotency_key": key})
            case "GET", "refunds":
                return await v1.refunds.list_async(params)
            case "GET", "refunds", refund:
                return await v1.refunds.retrieve_async(refund)
            case "GET", "payment_intents", intent:
                return await v1.payment_intents.retrieve_async(intent, params)
            case "POST", "payment_intents":
                return self._pay(params)
        raise InvalidRequestError("Unrecognized request URL.", 404)

    def _pay(self, params: dict[str, Any]) -> Any:
        if params["payment_method"] != "pm_card_visa" or params["confirm"] != "true":
            raise InvalidRequestError("This stand-in knows one card, paid with at once.")
        intent = self.fake.add_payment(params["amount"], params["currency"])
        payment = self.fake.payments[intent]
        payment["metadata"] = params["metadata"]
        return payment


def form(request: Request) -> str:
    """The parameters, as they were sent."""
    return request.data.decode() or urlsplit(request.path).query


def _parameters(sent: str) -> dict[str, Any]:
    """`a=1&metadata[case_id]=c1&expand[0]=charge`, as the fake takes it."""
    params: dict[str, Any] = {}
    for name, value in parse_qsl(sent, keep_blank_values=True):
        if nested := NESTED.fullmatch(name):
            outer, inner = nested.groups()
            if inner.isdigit():
                params.setdefault(outer, []).append(value)
            else:
                params.setdefault(outer, {})[inner] = value
        else:
            whole = name in WHOLE and re.fullmatch(r"-?\d+", value)
            params[name] = int(value) if whole else value
    return params


def _json(status: int, headers: Mapping[str, str], shown: Any) -> Answer:
    return Answer(status, json.dumps(shown, default=vars).encode(), headers)
