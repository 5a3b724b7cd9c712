"""Keys share the places of adapters: long outputs of one key do not hold them all."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from frame.testing.checkpoints import make_checkpoint
from tests.entrypoints.chaos.test_adapters import write_adapter
from tests.entrypoints.serving import RunningServer

FLAGS = ("--max-model-len", "2048", "--max-total-tokens", "8192", "--dtype", "float32", "--threads", "1", "--skip-tokenizer-init")
LONG = 600


@pytest.mark.slow
def test_another_key_gets_a_place_and_no_output_changes(tmp_path: Path) -> None:
    base = make_checkpoint("LlamaForCausalLM", tmp_path / "base", max_position_embeddings=2048)
    modules = ",".join(f"a{seed}={write_adapter(base, tmp_path / f'a{seed}', seed)}" for seed in range(3))
    (tmp_path / "keys").write_text("one\ntwo\n")
    adapters = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "16", "--lora-modules", modules)
    with RunningServer(base, *FLAGS, *adapters, "--api-keys", str(tmp_path / "keys"), fake=False) as server:

        def ask(key: str, model: str, tokens: int, began: threading.Semaphore | None = None) -> list[int]:
            params = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
            body = {"input_ids": [5, 6, 7, 8], "lora_path": model, "sampling_params": params, "stream": True}
            last = ""
            with httpx.stream("POST", f"{server.url}/generate", json=body, headers={"x-api-key": key}, timeout=120) as reply:
                for line in reply.iter_lines():
                    if began is not None and not last:
                        began.release()
                    last = line if line.startswith("data: {") else last
            ids: list[int] = json.loads(last.removeprefix("data: "))["output_ids"]
            return ids

        alone = [ask("one", name, LONG) for name in ("a0", "a1")]
        other, began = ask("one", "a2", 4), threading.Semaphore(0)
        with ThreadPoolExecutor() as pool:
            running = [pool.submit(ask, "one", name, LONG, began) for name in ("a0", "a1")]
            for _ in running:
                assert began.acquire(timeout=60)
            assert ask("two", "a2", 4) == other
            assert not any(each.done() for each in running), "a place was free only when a whole output had ended"
            assert [each.result() for each in running] == alone
        metrics = httpx.get(f"{server.url}/metrics", headers={"x-api-key": "one"}, timeout=120).text
        assert sum(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith("frame_preemptions_total")) == 1
