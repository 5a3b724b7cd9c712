"""A tiny random Whisper checkpoint, with the special tokens and the feature extractor of published
ones. Its window has one second."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from frame.core.interfaces.media import MediaItem
from frame.media.files import write_features
from frame.testing.checkpoints import _generator, _scaled, save_tokenizer

MELS, POSITIONS, CONTEXT = 8, 50, 128
SPECIAL = (
    "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"
)  # fmt: skip
STAMPS = tuple(f"<|{step * 0.02:.2f}|>" for step in range(POSITIONS + 1))
FIRST = 384  # the id of the first of SPECIAL


def make_whisper(folder: Path, **changes: Any) -> Path:
    import torch
    from transformers import PreTrainedTokenizerFast, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    sizes = {
        "vocab_size": 384 + len(SPECIAL) + len(STAMPS), "d_model": 64, "encoder_layers": 2, "decoder_layers": 3,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 80,
        "num_mel_bins": MELS, "max_source_positions": POSITIONS, "max_target_positions": CONTEXT,
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "decoder_start_token_id": FIRST,
        "suppress_tokens": None, "begin_suppress_tokens": None,
    }  # fmt: skip
    config = WhisperConfig(**{**sizes, **changes})
    config.architectures = ["WhisperForConditionalGeneration"]
    model = WhisperForConditionalGeneration(config).float()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=_generator(0, name))
            tensor.copy_(_scaled(name, noise, False))
    model.tie_weights()
    model.save_pretrained(folder)
    save_tokenizer(folder, CONTEXT)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.chat_template = None
    while len(tokenizer) < FIRST:  # as many tokens as the merges leave open
        tokenizer.add_tokens([f"<|extra{len(tokenizer)}|>"], special_tokens=True)
    tokenizer.add_tokens([*SPECIAL, *STAMPS], special_tokens=True)
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    WhisperFeatureExtractor(feature_size=MELS, chunk_length=1).save_pretrained(folder)
    generation = json.loads((folder / "generation_config.json").read_text())
    del generation["_from_model_config"]  # transformers would drop what follows
    ids = {name: FIRST + index for index, name in enumerate(SPECIAL)}
    generation |= {
        "lang_to_id": {name: ids[name] for name in ("<|en|>", "<|de|>")},
        "task_to_id": {"transcribe": ids["<|transcribe|>"], "translate": ids["<|translate|>"]},
        "no_timestamps_token_id": ids["<|notimestamps|>"], "prev_sot_token_id": ids["<|startofprev|>"], "is_multilingual": True,
        "suppress_tokens": [10, 11], "begin_suppress_tokens": [220, 1], "alignment_heads": [[1, 0], [2, 3], [2, 1]],
    }  # fmt: skip
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def make_items(folder: Path, inputs: Iterable[np.ndarray]) -> list[list[MediaItem]]:
    """The media of requests with these encoder inputs, float32 [mel bins, frames], with files in
    `folder`."""
    return [
        [MediaItem("audio", hashlib.sha256(given.tobytes()).digest(), [], POSITIONS, *write_features(folder, {"input_features": given}))]
        for given in inputs
    ]


def load_whisper(folder: Path) -> Any:
    """The checkpoint as transformers runs it, in float32."""
    import torch
    from transformers import WhisperForConditionalGeneration

    return WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
