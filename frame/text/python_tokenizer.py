"""`PythonTokenizer`: wraps a transformers tokenizer written in Python in the methods of
`tokenizers.Tokenizer` that frame uses.

Used by `frame.text.tokenizer` for checkpoints with tokenizer code. It holds the interpreter's
lock while it tokenizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Encoded(NamedTuple):
    """The fields of `tokenizers.Encoding` that frame uses."""

    ids: list[int]
    type_ids: list[int]
    special_tokens_mask: list[int]
    n_sequences: int
    sequence_ids: list[int | None]  # which text a token is of; None: special


class PythonTokenizer:
    """Wraps a `PreTrainedTokenizerBase` of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str | Sequence[str], add_special_tokens: bool = True) -> Encoded:
        first, second = (text, None) if isinstance(text, str) else (text[0], text[1])
        encoded = self._tokenizer(
            first, second, add_special_tokens=add_special_tokens, return_token_type_ids=True, return_special_tokens_mask=True, verbose=False
        )
        types, specials = list(encoded["token_type_ids"]), list(encoded["special_tokens_mask"])
        owners = [None if is_special else kind for kind, is_special in zip(types, specials, strict=True)]
        return Encoded(list(encoded["input_ids"]), types, specials, 1 if second is None else 2, owners)

    def encode_batch(self, texts: Sequence[str | Sequence[str]], add_special_tokens: bool = True) -> list[Encoded]:
        return [self.encode(text, add_special_tokens) for text in texts]

    encode_batch_fast = encode_batch

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        return text

    def decode_batch(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def token_to_id(self, text: str) -> int | None:
        token_id: int | None = self.get_vocab().get(text)
        return token_id

    def get_vocab(self, with_added_tokens: bool = True) -> dict[str, int]:
        return dict(self._tokenizer.get_vocab())

    def get_vocab_size(self, with_added_tokens: bool = True) -> int:
        return len(self._tokenizer)

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        return dict(self._tokenizer.added_tokens_decoder)

    def to_str(self) -> str:
        """An empty description: there is no tokenizer.json for byte-level decoding or grammar
        backends."""
        return "{}"
