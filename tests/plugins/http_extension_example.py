"""`frame serve --plugin http_extension_example.py` limits what clients may ask for, and counts
tokens."""

from collections import OrderedDict
from typing import ClassVar

from fastapi import APIRouter
from pydantic import BaseModel

from frame.interfaces.http import HttpExtension, HttpRequest, RefuseRequest

MAX_TENANTS = 100
CHAT = ("POST", "/v1/chat/completions", "/v1/chat/completions")


class Budget(HttpExtension):
    """Refuses requests whose header `x-max-tokens` is above a limit, and counts the tokens of each
    tenant's responses."""

    open_paths = frozenset({"/budget/limit"})
    conformance_requests = (
        *(HttpRequest(*CHAT, {}, f"id-{number}", tenant=f"tenant {number}") for number in range(MAX_TENANTS)),
        HttpRequest(*CHAT, {"x-max-tokens": "512"}, "id", tenant="tenant 0"),
        HttpRequest(*CHAT, {}, "id", tenant="one more"),
    )
    conformance_refusals = (
        (HttpRequest(*CHAT, {"x-max-tokens": "513"}, "id-3"), 403),
        (HttpRequest(*CHAT, {"x-max-tokens": "many"}, "id-4"), 400),
        (HttpRequest(*CHAT, {"x-max-tokens": "1" * 5000}, "id-5"), 400),
    )
    conformance_bodies: ClassVar = {
        "/budget/limit": 512,
        "/budget/tokens": {**{f"tenant {number}": 7 for number in range(2, MAX_TENANTS)}, "tenant 0": 14, "one more": 7},
    }

    class Options(BaseModel):
        limit: int = 512

    def __init__(self, context, options=None):
        self.limit = (options or self.Options()).limit
        self.tokens = OrderedDict()

    def make_routers(self):
        router = APIRouter(prefix="/budget")
        router.add_api_route("/limit", lambda: self.limit, methods=["GET"])
        router.add_api_route("/tokens", lambda: dict(self.tokens), methods=["GET"])
        return [router]

    async def on_request(self, request):
        wanted = request.headers.get("x-max-tokens")
        if wanted is None:
            return
        if not (wanted.isascii() and wanted.isdigit()) or len(wanted) > len(f"{self.limit}"):
            raise RefuseRequest(400, "x-max-tokens is no number of tokens; send one, or leave it out")
        if int(wanted) > self.limit:
            raise RefuseRequest(403, f"x-max-tokens is above {self.limit}; send less")

    async def on_response(self, request, response):
        self.tokens[request.tenant] = self.tokens.pop(request.tenant, 0) + response.prompt_tokens + response.output_tokens
        if len(self.tokens) > MAX_TENANTS:
            self.tokens.popitem(last=False)
