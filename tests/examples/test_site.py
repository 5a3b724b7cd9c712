"""The documentation site builds without warnings and loads nothing from other servers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import ROOT

site_hooks = pytest.importorskip("scripts.site_hooks", reason="the site needs the extra `docs`")
ASSET = re.compile(r"""<(?:script|link|img|iframe)[^>]+(?:src|href)=["'](?:https?:)?//""")


@pytest.mark.exhaustive  # as `make docs` before a release; links: tests/architecture/test_documents.py
@pytest.mark.slow
def test_the_site_builds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*.html")}
    assert {"index.html", "quickstart.html", "interfaces/attention.html", "repository/CONTRIBUTING.html"} <= set(pages)
    assert "AttentionBackend" in pages["interfaces/attention.html"]
    assert [name for name, text in pages.items() if ASSET.search(text)] == []


def test_links_out_of_the_documents_lead_to_copies() -> None:
    text = "[a](../CONTRIBUTING.md#commits) [b](index.md) [c](https://x.y) [d](../examples/frame-attn-example)"
    assert site_hooks.linked_files("docs/x.md", text) == {"CONTRIBUTING.md", "examples/frame-attn-example/README.md"}
    assert site_hooks.rewritten("x.md", "[a](../CONTRIBUTING.md#commits)") == "[a](repository/CONTRIBUTING.md#commits)"
    assert site_hooks.rewritten("repository/CONTRIBUTING.md", "[a](docs/index.md)") == "[a](../index.md)"
    assert site_hooks.rewritten("adr/README.md", "[a](../index.md) [b](https://x.y)") == "[a](../index.md) [b](https://x.y)"


def test_there_is_a_page_for_each_interface() -> None:
    pages = dict(site_hooks.interface_pages())
    assert "::: frame.core.interfaces.scheduling" in pages["interfaces/scheduling.md"]
    assert "(scheduling.md)" in pages["interfaces/index.md"]
