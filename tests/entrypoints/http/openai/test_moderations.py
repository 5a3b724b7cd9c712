"""Moderation by a language model: the policy, the regex of a verdict, and the scores of a verdict.

One test runs a random model that a grammar constrains to the form of a verdict.
"""

from __future__ import annotations

import math
import re
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from frame.core.errors import ConfigurationError
from frame.core.messages import Finish, TokenLogprobs
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.openai.moderations import _verdict
from frame.entrypoints.moderation import CATEGORIES, instructions, read_policy, verdict_form
from tests.entrypoints.published import check_response
from tests.entrypoints.serving import RunningServer


def sequence(text: str, chance: float = 0.9, reason: Any = "stop") -> Any:
    logprobs = [TokenLogprobs([5], [math.log(chance)], [[]])]
    return SimpleNamespace(take_output=lambda: (text, [], logprobs), finish=Finish(reason))


def test_verdicts_become_scores() -> None:
    assert _verdict(sequence("safe")) == {}
    assert _verdict(sequence(" unsafe\nhate, self-harm/intent\n")) == pytest.approx({"hate": 0.9, "self-harm/intent": 0.9})
    assert _verdict(sequence("unsafe\nhate, self-har", reason="length")) == pytest.approx({"hate": 0.9})
    assert _verdict(sequence("unsafe")) == pytest.approx({"other": 0.9})
    assert _verdict(sequence("unsafe\nhate", chance=0.3)) == {"hate": 0.5}
    with pytest.raises(ApiError, match="which is no verdict"):
        _verdict(sequence("I think that this is fine."))


def test_regex_of_a_verdict_names_the_categories_of_the_policy(tmp_path: Path) -> None:
    form = re.compile(verdict_form(read_policy("default") or ""))
    assert form.fullmatch("safe")
    assert form.fullmatch("unsafe\nsexual/minors, hate")
    assert not form.fullmatch("unsafe\nspam")
    (tmp_path / "policy.txt").write_text("Our shop's rules.\n- spam: advertisement\n- off topic: not about shoes\n")
    own = read_policy(str(tmp_path / "policy.txt")) or ""
    assert re.fullmatch(verdict_form(own), "unsafe\noff topic, spam")
    assert not re.fullmatch(verdict_form(own), "unsafe\nhate")
    assert re.fullmatch(verdict_form("no rudeness please"), "unsafe\nrudeness")
    assert own.strip() in instructions(own)
    assert read_policy(None) is None
    with pytest.raises(ConfigurationError, match="name a text file, or default"):
        read_policy(str(tmp_path / "none"))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("xgrammar") is None, reason="xgrammar is not installed")
def test_policy_model_over_http(checkpoint: Path) -> None:
    flags = ("--max-total-tokens", "8192", "--moderation-policy", "default")
    with RunningServer(checkpoint, *flags, fake=False) as server:
        reply = server.post("/v1/moderations", {"input": ["you are nice", "you are not"]})
        assert reply.status_code == 200, reply.text
    check_response("POST", "/v1/moderations", 200, reply.headers["content-type"], reply.content)
    for result in reply.json()["results"]:
        assert set(CATEGORIES) <= set(result["categories"]) == set(result["category_scores"])
        assert result["flagged"] == any(result["categories"].values())


def test_error_without_a_policy_names_the_flag(fake_server: RunningServer) -> None:
    reply = fake_server.post("/v1/moderations", {"input": "hello"})
    assert reply.status_code == 400
    assert "--moderation-policy default" in reply.json()["error"]["message"]
