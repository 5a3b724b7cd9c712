"""Prompts of models that fill in the middle of a text: the part before and the part after it, each
behind a token of its own.

Used by the routes that take a `suffix`. Must not know a route.
"""

from __future__ import annotations

from dataclasses import dataclass

from frame.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class MiddleForm:
    """The tokens of one family of models. `middle`: empty where the part before the middle comes
    last."""

    prefix: str
    suffix: str
    middle: str = ""

    def join(self, before: str, after: str) -> str:
        """The prompt for the text between `before` and `after`."""
        if not self.middle:
            return f"{self.suffix}{after}{self.prefix}{before}"
        return f"{self.prefix}{before}{self.suffix}{after}{self.middle}"

    @property
    def tokens(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.prefix, self.suffix, self.middle)))


FORMS = (
    MiddleForm("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, Qwen3-Coder, CodeGemma
    MiddleForm("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    MiddleForm("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder, DeepSeek V3
    MiddleForm("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    MiddleForm("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    MiddleForm("[PREFIX]", "[SUFFIX]"),  # Codestral
)
# Further tokens that no middle has: models write them after it.
_ENDS = ("<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<fim_pad>", "<file_sep>", "<|file_separator|>", "▁<EOT>")


def find_form(tokenizer: Tokenizer) -> MiddleForm | None:
    """The form whose tokens the tokenizer has; None: the model cannot fill in the middle."""
    return next((form for form in FORMS if all(tokenizer.find_token_id(text) is not None for text in form.tokens)), None)


def list_end_ids(tokenizer: Tokenizer, form: MiddleForm) -> tuple[int, ...]:
    """The ids of the tokens that end a middle, besides the model's own end tokens."""
    ids = map(tokenizer.find_token_id, (*form.tokens, *_ENDS))
    return tuple(dict.fromkeys(token for token in ids if token is not None))
