"""An HTTP face of FakeStripe, for the real SDK. Loopback only.

All behaviour is the fake's. What is here is the wire, and the two calls on payment intents that
only the recipe makes: to pay with a test card, and to list.
"""

import json
import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from http_face import Answer, HttpFace, Request

from fake_stripe import FakeStripe, InvalidRequestError, StripeError, stripe_object

WHOLE = {"amount", "limit"}  # on the wire all is text; what is no whole number stays text
NESTED = re.compile(r"(\w+)\[(\w+)\]")


class StripeFace(HttpFace):
    headers = {"Connection": "close"}  # the SDK closes none by itself

    def __init__(self, fake: FakeStripe) -> None:
        super().__init__()
        self.fake = fake

    async def answer(self, request: Request) -> Answer | None:
        echo = {"Stripe-Version": request.headers["stripe-version"]}
        if request.method == "POST" and "idempotency-key" in request.headers:
            echo["Idempotency-Key"] = request.headers["idempotency-key"]
        self.fake.api_key = request.headers.get("authorization", "").removeprefix("Bearer ")
        try:
            found = await self._call(request)
            return _json(200, echo | found.last_response.headers, vars(found))
        except StripeError as error:
            failed = error
        if failed.http_status is None:
            return None
        shown = {name: value for name, value in vars(failed.error).items() if value is not None}
        return _json(failed.http_status, echo | failed.headers, {"error": shown})

    async def _call(self, request: Request) -> Any:
        v1, params = self.fake.v1, _parameters(form(request))
        options = {"idempotency_key": request.headers.get("idempotency-key")}
        match request.method, *urlsplit(request.path).path.split("/")[2:]:
            case "POST", "refunds":
                return await v1.refunds.create_async(params, options)
            case "GET", "refunds":
                return await v1.refunds.list_async(params, options)
            case "GET", "refunds", refund:
                return await v1.refunds.retrieve_async(refund, params, options)
            case "POST", "refunds", refund, "cancel":
                return await v1.refunds.cancel_async(refund, params, options)
            case "GET", "payment_intents", intent:
                return await v1.payment_intents.retrieve_async(intent, params, options)
            case "GET", "payment_intents":
                return self._payments(params)
            case "POST", "payment_intents":
                return await self._pay(params, options)
        raise InvalidRequestError("Unrecognized request URL.", 404)

    async def _pay(self, params: dict[str, Any], options: dict[str, Any]) -> Any:
        def check() -> Any:
            if params["payment_method"] != "pm_card_visa" or params["confirm"] != "true":
                raise InvalidRequestError("This stand-in knows one card, paid with at once.")
            return pay

        def pay() -> dict[str, Any]:
            intent = self.fake.add_payment(params["amount"], params["currency"])
            self.fake.payments[intent]["metadata"] = params["metadata"]
            return self.fake.payments[intent]

        return await self.fake.post(
            "payment_intents.create", "/v1/payment_intents", params, options, check)

    def _payments(self, params: dict[str, Any]) -> Any:
        with self.fake.received("payment_intents.list") as request_id:
            found = [dict(each) for each in reversed(self.fake.payments.values())]
            if after := params.get("starting_after"):
                found = found[[each["id"] for each in found].index(after) + 1:]
            if params.get("expand") == ["data.latest_charge"]:
                for each in found:
                    each["latest_charge"] = self.fake.charges.get(each["latest_charge"])
            limit = params.get("limit", 10)
            page = {"object": "list", "url": "/v1/payment_intents", "data": found[:limit],
                    "has_more": len(found) > limit}
            return stripe_object(page, {"Request-Id": request_id})


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


def _json(status: int, headers: Mapping[str, str], shown: Mapping[str, Any]) -> Answer:
    def plain(value: SimpleNamespace) -> dict[str, Any]:
        return vars(value)

    body = {name: value for name, value in shown.items() if name != "last_response"}
    return Answer(status, json.dumps(body, default=plain).encode(), headers)
