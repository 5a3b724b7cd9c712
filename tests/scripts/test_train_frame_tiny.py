"""The training script at toy size: rows, losses, one short run, export and back."""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path

import pytest
import torch

from frame.entrypoints.tools.eval.evaluate import evaluate
from frame.entrypoints.tools.eval.tasks import is_held_out
from scripts.train_frame_tiny import corpus, samples, tokenizer, wording
from scripts.train_frame_tiny.checkpoint_backend import CheckpointBackend
from scripts.train_frame_tiny.export import load_model, save_model
from scripts.train_frame_tiny.model import FrameTiny, Router, Shape
from scripts.train_frame_tiny.optimizer import orthogonalise
from scripts.train_frame_tiny.train import CodeRows, Recipe, Trainer, rate_scale

TINY = Shape(hidden=64, layers=2, dense_width=64, heads=2, q_rank=32, kv_rank=32, expert_width=32)
ENCODER = tokenizer.load_tokenizer(Path(__file__).parents[2] / "frame/models/frame_tiny")


@pytest.mark.parametrize(
    ("licence", "accepted"),
    [("MIT", True), ("BSD License", True), ("Apache-2.0 OR BSD-2-Clause", True), ("GPLv3", False), ("MPL-2.0 AND MIT", False), ("", False)],
)
def test_licences(licence: str, accepted: bool) -> None:
    assert corpus.is_permissive(licence) is accepted


@pytest.mark.slow
def test_corpus_leaves_out_what_it_should(tmp_path: Path) -> None:
    kept = tmp_path / "kept.py"
    kept.write_text("def f(x):\n\treturn x\n" * 20)
    assert "\n    return x" in (corpus.readable_source(kept) or "")
    for name, text in {
        "gpl.py": "# GNU General Public License\n" + "x = y\n" * 99,
        "short.py": "x = 1\n",
        "data.py": "1,2,3\n" * 99,
    }.items():
        (tmp_path / name).write_text(text)
        assert corpus.readable_source(tmp_path / name) is None
    texts, sources = corpus.collect(package_limit=1000, total_limit=30_000)
    assert sources[0].licence == "PSF-2.0"
    assert sum(source.files for source in sources) == len(texts)


def test_rows_are_conversations_with_marked_answers() -> None:
    ids, classes = samples.task_row(random.Random(0), ENCODER, 1500, progress=0.3)
    assert len(ids) == len(classes) == 1500
    text = ENCODER.decode(ids, skip_special_tokens=False)
    assert text.startswith("<|bos|>")
    marked = [token for token, kind in zip(ids, classes, strict=True) if kind == samples.REPLY]
    assert 1 in marked
    assert not {3, 4, 5} & set(marked)


def test_loose_wordings_ask_nothing_held_out() -> None:
    rng = random.Random(0)
    for _ in range(300):
        question, reply = wording.loose_turn("sum", rng)
        a, b = sorted(int(part) for part in re.findall(r"\d+", question))
        assert a + b == int(reply)
        assert not is_held_out("sum", f"{a}+{b}")
        question, reply = wording.loose_turn(rng.choice(("copy", "reverse")), rng)
        assert sorted(re.findall(r"\w+", reply)) == sorted(re.findall(r"\w+", re.split(r":[ \n]", question, maxsplit=1)[1]))
        for question, reply in wording.loose_recall(rng):
            assert reply in question or "\n" not in question
        assert all(wording.small_talk(rng))


def test_packed_texts_know_their_starts() -> None:
    stream, starts = samples.pack_texts(["x = 1\n", "y = 2\n"], ENCODER, seed=0)
    assert [stream[start] for start in starts] == [0, 0]
    assert list(stream).count(1) == 2


def test_router_chooses_from_the_best_groups() -> None:
    router = Router(Shape())
    torch.nn.init.normal_(router.weight)
    weights, load = router(torch.randn(50, 256))
    assert ((weights > 0).sum(-1) == 2).all()
    torch.testing.assert_close(weights.sum(-1), torch.full((50,), 2.5))
    assert load.sum() == 100


def test_orthogonalise() -> None:
    values = torch.linalg.svdvals(orthogonalise(torch.randn(3, 64, 32)).float())
    assert values.min() > 0.8
    assert values.max() < 1.2


def test_schedule_ends_at_zero() -> None:
    assert rate_scale(0.0, 0) == 0.01
    assert rate_scale(0.2, 1000) == 1.0
    assert rate_scale(1.0, 1000) == 0.0


@pytest.mark.slow
def test_a_run_learns_and_its_export_loads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    stream, starts = samples.pack_texts(["def f(x):\n    return x\n" * 30] * 4, ENCODER, seed=0)
    model, lines = FrameTiny(TINY), list[str]()
    recipe = Recipe(minutes=0.02, rows=2, length=64, long_share=0.0, workers=0)
    trainer = Trainer(model, CodeRows(stream, starts, torch.device("cpu")), ENCODER, recipe, lines.append)
    trainer.run(lambda trained: lines.append(str(save_model(trained, tmp_path))))
    assert "step 1 " in lines[0]
    again = load_model(tmp_path, TINY)
    ids = torch.randint(0, 2048, (1, 20))
    with torch.no_grad():  # as the file keeps them: the routing bias stays float32
        for name, value in model.state_dict().items():
            if not name.endswith("e_score_correction_bias"):
                value.copy_(value.bfloat16())
    torch.testing.assert_close(again.logits(ids), model.logits(ids))
    report = asyncio.run(evaluate(CheckpointBackend(again, ENCODER), tasks=("sum", "python"), samples=2))
    assert [score.errors for score in report.tasks] == [0, 0]
