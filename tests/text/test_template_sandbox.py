"""The time of a template is limited in the thread that renders it, and only there."""

from __future__ import annotations

import threading

import pytest
from jinja2.sandbox import SecurityError

from frame.text.template_sandbox import LARGEST_TEXT, TemplateSandbox, TemplateTimeoutError

LOOP = "{% for a in range(9) %}{% endfor %}{{ range(9)|map('string')|join }}"


def test_each_thread_has_its_own_time() -> None:
    sandbox = TemplateSandbox()
    template, texts = sandbox.from_string(LOOP), list[str]()

    def render() -> None:
        with sandbox.limit_time(60.0):
            texts.append(template.render())

    with sandbox.limit_time(-1.0):
        with pytest.raises(TemplateTimeoutError):
            template.render()
        other = threading.Thread(target=render)
        other.start()
        other.join()
    render()
    assert texts == ["012345678"] * 2


def test_texts_are_joined_up_to_a_bound() -> None:
    assert TemplateSandbox.concat(iter(["a", "b"])) == "ab"
    with pytest.raises(SecurityError, match="text of more than"):
        TemplateSandbox.concat(["a" * (LARGEST_TEXT // 2)] * 3)
