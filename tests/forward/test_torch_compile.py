"""The compiled forward pass: which batches take it, and the way back when compiling fails."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import torch

from frame.forward import torch_compile as compiled
from frame.forward.torch_compile import Forward


def batch(decodes, rows):
    return SimpleNamespace(num_decodes=decodes, num_rows=rows)


def test_small_decode_batches_alone_are_compiled(monkeypatch):
    monkeypatch.setattr(compiled.torch, "compile", lambda call, dynamic: lambda batch: ("compiled", call(batch)))
    forward = Forward(lambda batch: batch.num_rows, 4)
    assert forward(batch(4, 4)) == ("compiled", 4)
    assert [forward(batch(5, 5)), forward(batch(2, 3)), forward(batch(0, 1))] == [5, 3, 1]
    assert Forward(lambda batch: batch.num_rows)(batch(2, 2)) == 2


def test_a_model_that_does_not_compile_runs_uncompiled_and_says_so_once(monkeypatch, caplog):
    def refuse(call, dynamic):
        def run(batch):
            raise RuntimeError("no such thing\nat great length")

        return run

    monkeypatch.setattr(compiled.torch, "compile", refuse)
    forward = Forward(lambda batch: torch.ones(1), 4)
    with caplog.at_level(logging.WARNING):
        assert forward(batch(2, 2)).item() == 1
        assert forward(batch(2, 2)).item() == 1
    assert [record.getMessage().split(": ", 1)[1] for record in caplog.records] == ["RuntimeError: no such thing"]


def test_errors_of_the_model_itself_are_not_hidden(monkeypatch):
    def broken(batch):
        raise ValueError("mine")

    monkeypatch.setattr(compiled.torch, "compile", lambda call, dynamic: call)
    try:
        Forward(broken, 4)(batch(1, 1))
    except ValueError as error:
        assert str(error) == "mine"
    else:
        raise AssertionError("the error was swallowed")


def test_parts_are_kept_out():
    class Part:
        calls = 0

        def run(self, x):
            self.calls += 1
            return x + 1

    part = Part()
    compiled.keep_out(part, "run")
    run = torch.compile(lambda x: part.run(x * 2) * 3, backend="eager")
    assert [run(torch.ones(n)).tolist() for n in (1, 2)] == [[9.0], [9.0, 9.0]]
    assert part.calls == 2
