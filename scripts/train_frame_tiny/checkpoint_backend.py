"""The training model as an evaluation backend: greedy answers in bf16, without a KV cache.

Requests that arrive together are padded to one batch and recomputed for every token. This is slow,
but independent of the engine that the same evaluation checks. It implements `EvalBackend` of
`frame.entrypoints.tools.eval`.
"""

import asyncio
from collections.abc import Sequence

import torch
from tokenizers import Tokenizer

from frame.entrypoints.tools.eval.evaluate import Message
from scripts.train_frame_tiny import tokenizer as tk
from scripts.train_frame_tiny.model import FrameTiny


class CheckpointBackend:
    """Answers chat and text requests with `model`; `tokens_a_batch` bounds the memory of one
    forward."""

    def __init__(self, model: FrameTiny, tokenizer: Tokenizer, tokens_a_batch: int = 400_000) -> None:
        self.model, self.tokenizer, self.tokens_a_batch = model.eval(), tokenizer, tokens_a_batch
        self.device = next(model.parameters()).device
        self.end = tokenizer.token_to_id(tk.EOS)
        self.waiting: list[tuple[list[int], int, asyncio.Future[str]]] = []
        self.worker: asyncio.Task[None] | None = None

    async def complete_chat(self, messages: Sequence[Message], max_tokens: int) -> str:
        """The assistant's answer."""
        return await self._submit(tk.render_chat(messages), max_tokens)

    async def complete(self, prompt: str, max_tokens: int) -> str:
        """The continuation of plain text."""
        return await self._submit(tk.BOS + prompt, max_tokens)

    async def _submit(self, text: str, max_tokens: int) -> str:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.waiting.append((tk.encode_plain(self.tokenizer, [text])[0], max_tokens, future))
        if self.worker is None or self.worker.done():
            self.worker = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        await asyncio.sleep(0.02)  # collect requests that arrive together
        while self.waiting:
            self.waiting.sort(key=lambda item: len(item[0]))
            taken = 1
            while taken < len(self.waiting) and (taken + 1) * (len(self.waiting[taken][0]) + 100) <= self.tokens_a_batch:
                taken += 1
            batch, self.waiting = self.waiting[:taken], self.waiting[taken:]
            replies = self.generate([item[0] for item in batch], [item[1] for item in batch])
            for (_, _, future), ids in zip(batch, replies, strict=True):
                future.set_result(self.tokenizer.decode(ids, skip_special_tokens=True))

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], limits: list[int]) -> list[list[int]]:
        """Greedy continuations; row i stops at EOS or after `limits[i]` tokens."""
        width = max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True))
        tokens = torch.zeros(len(prompts), width, dtype=torch.long, device=self.device)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt)
        ends = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        stops = ends + torch.tensor(limits, device=self.device)
        rows = torch.arange(len(prompts), device=self.device)
        open_rows = torch.ones(len(prompts), dtype=torch.bool, device=self.device)
        while bool(open_rows.any()):
            used = int(ends.max())
            with torch.autocast(self.device.type, torch.bfloat16):
                hidden, _ = self.model.hidden(tokens[:, :used])
                chosen = self.model.lm_head(hidden[rows, ends - 1]).argmax(-1)
            open_rows &= chosen != self.end
            tokens[rows[open_rows], ends[open_rows]] = chosen[open_rows]
            ends = ends + open_rows.long()
            open_rows &= ends < stops
        return [tokens[row, len(prompt) : int(ends[row])].tolist() for row, prompt in enumerate(prompts)]
