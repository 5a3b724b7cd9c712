"""Encodes and decodes text with the `tokenizers` library; uses transformers only for a folder
without tokenizer.json.

Thread-safe: encoding releases the GIL, so a thread pool scales. Must not know requests or torch.
Incremental decoding is in `frame.text.incremental_decoder`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from frame.checkpoint.folder import check_folder, read_object
from frame.checkpoint.remote_code import check_tokenizer_code, find_tokenizer_code, load_class
from frame.core.errors import CheckpointError
from frame.host.installation import install_command, is_installed
from frame.text.chat_template import (
    TEMPLATE,
    ChatTemplate,
    ChatTemplateError,
    describe_compile_error,
    find_file,
    find_template,
    read_template,
)
from frame.text.message_parts import MessageParts, check_texts, expand_placeholders
from frame.text.python_tokenizer import PythonTokenizer
from frame.text.text_bounds import TextBounds, find_max_token_length, split_groups

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from frame.core.interfaces.sampling_params import SamplingParams
    from frame.core.messages import MediaText

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
VOCABULARIES = ("*.model", "*.tiktoken", "vocab.*", "tekken.json")  # files that transformers makes a tokenizer of
SHORT = 1024  # characters; tokenizing a shorter text takes less time than releasing the interpreter's lock

Input = Sequence[str]  # one text, or a pair
Encoded = tuple[list[int], int]  # token ids, and the index of a pair's second text for models with type ids (0: none)


class Tokenizer:
    """A checkpoint's tokenizer. `eos_token_ids` end a sequence (generation_config.json, else the
    eos token)."""

    def __init__(
        self,
        backend: Backend,
        config: dict[str, Any] | None = None,
        template: str | None = None,
        eos_token_ids: Sequence[int] = (),
        template_file: str | Path = "",
    ) -> None:
        self.backend = backend
        self._config = config or {}
        self.special_tokens = {name: text for name in SPECIAL_NAMES if (text := _token_text(name, self._config.get(name))) is not None}
        self._template = ChatTemplate(template, self.special_tokens, template_file) if template else None
        if self._template is not None:
            self._template.probe_strings()
        eos = self.find_token_id(self.special_tokens.get("eos_token", ""))
        self.eos_token_ids = tuple(eos_token_ids) or (() if eos is None else (eos,))
        self._leading = self._missing_bos()
        names = self._config.get("model_input_names")
        generic = self._config.get("tokenizer_class") in ("TokenizersBackend", "PreTrainedTokenizerFast")
        # `model_input_names` of transformers: its general class has no type ids
        self._has_types = "token_type_ids" in names if isinstance(names, list) else not generic

    @classmethod
    def load(cls, path: str | Path, chat_template: str | None = None, trust_remote_code: bool = False) -> Tokenizer:
        """Read a checkpoint's folder. `chat_template`: a file that replaces the folder's template.
        `trust_remote_code`: allow Python code of the folder. Raises ConfigurationError."""
        folder = Path(path)
        config = read_settings(folder)
        template = read_template(chat_template) if chat_template else find_template(folder, config)
        eos = (read_object(folder / "generation_config.json") or {}).get("eos_token_id")
        eos_ids = [token for token in (eos if isinstance(eos, list) else [eos]) if isinstance(token, int)]
        backend = _load_backend(folder, trust_remote_code)
        try:
            with panics_as_errors():
                backend.encode("a")
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"the tokenizer of {folder} cannot encode a text: {error}; fetch its files again") from error
        return cls(backend, config, template, eos_ids, chat_template or find_file(folder))

    def describe(self) -> dict[str, Any]:
        """Return the contents of `tokenizer_config.json`, with the chat template in use."""
        template = {} if self._template is None else {"chat_template": self._template.source}
        return {"tokenizer_class": "PreTrainedTokenizerFast", **self._config, **template}

    def lower_case(self) -> None:
        """Lower-case texts before they are encoded, as `do_lower_case` of sentence-transformers
        asks. Raises CheckpointError for a tokenizer of the checkpoint's own code."""
        from tokenizers import normalizers

        if not hasattr(self.backend, "normalizer"):
            raise CheckpointError("do_lower_case in sentence_bert_config.json needs a tokenizer.json; add it, or set it to false")

        own = self.backend.normalizer
        self.backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *([] if own is None else [own])])

    # ---- encode ----

    def encode(self, text: str, add_special_tokens: bool = True, maximum: int | None = None) -> list[int]:
        """Return the token ids. Raises TextTooLongError for a long text of more than `maximum`
        tokens before tokenizing all of it."""
        if maximum is not None:
            self.bounds.check_text(text, maximum)
        if len(text) <= SHORT:
            ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        else:  # the library releases the interpreter's lock only for lists
            ids = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return [*self._leading, *ids] if add_special_tokens and self._leading else ids

    def encode_batch(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        lead = self._leading if add_special_tokens else []
        return [[*lead, *encoding.ids] for encoding in encodings]

    def encode_inputs(
        self, inputs: Sequence[Input], max_length: int | None = None, maximum: int | None = None, add_special_tokens: bool = True
    ) -> list[Encoded]:
        """Encode texts or pairs with their special tokens. Results of more than `max_length` tokens
        are truncated before the closing special tokens, pairs by tokens of their longer text
        (`longest_first` of transformers). Raises TextTooLongError for a long text of more than
        `maximum` tokens."""
        if maximum is not None:
            for one in inputs:
                for text in one:
                    self.bounds.check_text(text, maximum)
        if max_length is not None:
            inputs = [[self.bounds.cut_text(text, max_length) for text in one] for one in inputs]
        each: list[Any] = [one[0] if len(one) == 1 else tuple(one) for one in inputs]
        lead = self._leading if add_special_tokens else []
        encoded = []
        for group in split_groups(each):
            for encoding in self.backend.encode_batch_fast(group, add_special_tokens=add_special_tokens):
                ids, types = [*lead, *encoding.ids], encoding.type_ids if self._has_types else []
                if max_length is not None and len(ids) > max_length and encoding.n_sequences == 2:
                    kept = _truncate_pair(encoding.sequence_ids, max_length - len(lead))
                    ids, types = [*lead, *(encoding.ids[place] for place in kept)], [types[place] for place in kept if types]
                elif max_length is not None and len(ids) > max_length:
                    closing = next((i for i, special in enumerate(reversed(encoding.special_tokens_mask)) if not special), 0)
                    ids = [*ids[: max(0, max_length - closing)], *ids[len(ids) - closing :]] if closing < max_length else ids[:max_length]
                second = types.index(1) + len(lead) if 1 in types else 0
                encoded.append((ids, second if second < len(ids) else 0))
        return encoded

    def cut_texts(self, texts: Sequence[str], max_tokens: int) -> list[str]:
        """The beginnings of texts, which end with their token number `max_tokens`."""
        texts = [self.bounds.cut_text(text, max_tokens) for text in texts]
        ends = [
            encoding.offsets[max_tokens - 1 : max_tokens + 1] for encoding in self.backend.encode_batch(texts, add_special_tokens=False)
        ]
        return [text[: end[0][1]] if len(end) == 2 else text for text, end in zip(texts, ends, strict=True)]

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        arguments: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
        media: Sequence[MediaText] = (),
    ) -> str:
        """Render the prompt of a conversation, with a placeholder for each item of `media`. Raises
        ChatTemplateError with a sentence for the client."""
        arguments = dict(arguments or {})
        source = arguments.pop(TEMPLATE, None)
        template = self._template if source is None else self._template_of(source)
        if template is None:
            raise ChatTemplateError("this model has no chat template; give one with --chat-template, or use /v1/completions")
        if media:
            parts = self._parts if source is None else MessageParts(template.render)
            messages = parts.arrange(messages, media)
        return template.render(messages, tools, add_generation_prompt, arguments)

    @cached_property
    def _parts(self) -> MessageParts:
        assert self._template is not None
        return MessageParts(self._template.render)

    def _template_of(self, source: str) -> ChatTemplate:
        try:
            return ChatTemplate(source, self.special_tokens)
        except CheckpointError as error:
            raise ChatTemplateError(f"chat_template does not compile: {describe_compile_error(error.__cause__ or error)}") from None

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        arguments: dict[str, Any] | None = None,
        maximum: int | None = None,
    ) -> list[int]:
        """Encode a conversation. The template writes the special tokens, unless `arguments` has
        `add_special_tokens`. Raises TextTooLongError as `encode` does."""
        arguments = dict(arguments or {})
        special = bool(arguments.pop("add_special_tokens", False))
        return self.encode(self.render_chat(messages, tools, arguments), add_special_tokens=special, maximum=maximum)

    def encode_media_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        arguments: dict[str, Any],
        media: Sequence[MediaText],
        maximum: int | None = None,
    ) -> tuple[list[int], list[int]]:
        """`encode_chat` of a conversation with parts such as `{"type": "image"}`, whose items are
        `media`, in order. -> token ids, and the indices of the items in the order of the prompt."""
        arguments = dict(arguments)
        special = bool(arguments.pop("add_special_tokens", False))
        check_texts([messages, tools, {**arguments, TEMPLATE: None}], media, "messages or tools")
        return self.encode_media(self.render_chat(messages, tools, arguments, media=media), media, special, maximum)

    def encode_media(
        self, text: str, media: Sequence[MediaText], add_special_tokens: bool = True, maximum: int | None = None
    ) -> tuple[list[int], list[int]]:
        """`encode` of a text with a placeholder for each item."""
        expanded, order = expand_placeholders(text, media)
        return self.encode(expanded, add_special_tokens, maximum), order

    def encode_bad_words(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with `bad_words` as token ids, each word both without and with a
        space before it."""
        texts = [lead + word.lstrip() for word in params.bad_words for lead in ("", " ")]
        spellings = {tuple(ids) for ids in self.encode_batch(texts, False)}
        return msgspec.structs.replace(params, bad_words_ids=(*params.bad_words_ids, *sorted(filter(None, spellings))))

    # ---- decode ----

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of the tokens, without ids that have no token, as padded vocabularies have.
        Raises ValueError for a negative id."""
        try:
            return self._decode(token_ids, skip_special_tokens)
        except OverflowError:
            raise ValueError(f"token ids must be from 0 to {2**32 - 1}") from None

    def _decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        if len(token_ids) <= SHORT:
            return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return self.backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0]  # without the interpreter's lock

    def get_token_text(self, token_id: int) -> str:
        """Return the text of one token, as log-probabilities show it."""
        return self.pieces[token_id].decode("utf-8", "replace") if self.pieces is not None else self.decode([token_id], False)

    def get_token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id] if self.pieces is not None else self.decode([token_id], False).encode()

    @property
    def is_python(self) -> bool:
        """Whether it is Python code without a tokenizer.json."""
        return isinstance(self.backend, PythonTokenizer)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def find_token_id(self, text: str) -> int | None:
        return self.backend.token_to_id(text)

    @property
    def vocab_size(self) -> int:
        """Number of ids of the tokenizer. The model's vocabulary may be padded beyond."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def _description(self) -> tuple[str | None, int | None]:
        """The decoder's type, and the maximum number of characters that a token covers. Slow for a
        large vocabulary."""
        spec = json.loads(self.backend.to_str())
        return (spec.get("decoder") or {}).get("type"), find_max_token_length(spec)

    @cached_property
    def bounds(self) -> TextBounds:
        """Bounds on a text's number of tokens, checked before tokenizing."""
        return TextBounds(self.backend, self._description[1])

    @cached_property
    def special_ids(self) -> frozenset[int]:
        added = self.backend.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special)

    @cached_property
    def pieces(self) -> list[bytes] | None:
        """Each id's bytes for the byte-level decoder, whose text is that of the joined bytes. None
        for other decoders."""
        if self._description[0] != "ByteLevel":
            return None
        vocab = self.backend.get_vocab(with_added_tokens=True)
        table = [b""] * (max(vocab.values(), default=-1) + 1)
        for text, i in vocab.items():
            table[i] = _piece(text)
        return table

    def _missing_bos(self) -> list[int]:
        """The bos token, if the configuration asks for it and tokenizer.json does not add it."""
        bos = self.find_token_id(self.special_tokens.get("bos_token", ""))
        if bos is None or self._config.get("add_bos_token") is not True:
            return []
        return [] if self.backend.encode("a").ids[:1] == [bos] else [bos]


def _truncate_pair(owners: Sequence[int | None], max_length: int) -> list[int]:
    """The places that are kept of a pair's tokens, `owners`: which text each is of (None: special).
    The shares are those of `longest_first` in the library."""
    counts = sorted((owners.count(number), number) for number in (0, 1))
    (short, which), (long, _) = counts
    room = max(0, max_length - owners.count(None))
    long = max(short, room - short) if short <= room else short
    if short + long > room:
        short, long = room // 2, room - room // 2
    left = {which: short, 1 - which: long}
    kept = []
    for place, owner in enumerate(owners):
        if owner is None or left[owner] > 0:
            kept.append(place)
        if owner is not None:
            left[owner] -= 1
    return kept[:max_length]


@contextlib.contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise a panic of a library in Rust, which is no `Exception`, as RuntimeError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RuntimeError(f"the tokenizers library failed ({error})") from error


def _bytes_of_characters() -> dict[str, int]:
    """GPT-2's printable characters for bytes (Radford et al. 2019): printable bytes map to
    themselves, the others to U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {**{chr(byte): byte for byte in printable}, **{chr(256 + i): byte for i, byte in enumerate(others)}}


_BYTES = _bytes_of_characters()


def _piece(text: str) -> bytes:
    try:
        return bytes([_BYTES[character] for character in text])
    except KeyError:  # an added token with a character that maps to no byte
        return text.encode()


def _is_unicode(text: str) -> bool:
    """Whether a text has no half of a surrogate pair, which the library does not take."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _token_text(name: str, value: Any) -> str | None:
    """The text of a special token. Raises CheckpointError."""
    text = value.get("content") if isinstance(value, dict) else value
    if text is not None and not (isinstance(text, str) and _is_unicode(text)):
        raise CheckpointError(f"tokenizer_config.json: {name} is {text!r:.100}, which is no text; fetch the file again")
    return text


def read_settings(folder: Path) -> dict[str, Any]:
    """Read a folder's `tokenizer_config.json`; empty if missing. Raises CheckpointError if it is
    not JSON."""
    return read_object(folder / "tokenizer_config.json") or {}


def _load_backend(folder: Path, trust_remote_code: bool) -> Backend:
    check_folder(folder)
    if not trust_remote_code:
        check_tokenizer_code(folder)
    elif (code := find_tokenizer_code(folder)) is not None:
        return _run_code(folder, *code, trust_remote_code)
    file = folder / "tokenizer.json"
    if file.is_file():
        from tokenizers import Tokenizer as Backend

        try:
            with panics_as_errors():
                return _plain(Backend.from_file(str(file)))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{file} cannot be read: {error}; fetch the file again") from error
    _check_vocabulary(folder)
    try:
        from transformers import AutoTokenizer

        slow = AutoTokenizer.from_pretrained(str(folder), use_fast=True, local_files_only=True, trust_remote_code=trust_remote_code)
        return slow.backend_tokenizer
    except Exception as error:
        raise CheckpointError(
            f"{folder} holds no tokenizer.json, and no tokenizer can be created from its other files ({' '.join(str(error).split())}); "
            "name another folder with --tokenizer, or serve token ids only with --skip-tokenizer-init"
        ) from error


def _check_vocabulary(folder: Path) -> None:
    """Raise CheckpointError if the folder, which has no tokenizer.json, has no other vocabulary
    either, or one whose library is not installed."""
    files = [file for pattern in VOCABULARIES for file in sorted(folder.glob(pattern))]
    remedy = "name another folder with --tokenizer, or serve token ids only with --skip-tokenizer-init"
    if not files:
        raise CheckpointError(f"{folder} holds no tokenizer: copy tokenizer.json and tokenizer_config.json into it, {remedy}")
    for file in files:
        names = ("tiktoken",) if "tiktoken" in file.name else ("sentencepiece", "protobuf") if file.suffix == ".model" else ()
        missing = [name for name in names if not is_installed(name)]
        if missing:
            raise CheckpointError(
                f"{folder} holds no tokenizer.json, and {file.name} needs {' and '.join(missing)}: "
                f"run {install_command(*missing)}, {remedy}"
            )


def _run_code(folder: Path, kind: str, reference: str, trust_remote_code: bool) -> Backend:
    """The tokenizer made by the folder's own class, or held by its processor."""
    tokenizer_class = load_class(folder if trust_remote_code else None, "tokenizer", reference)
    try:
        tokenizer = tokenizer_class.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # the code may raise any error
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(f"{folder}: its own tokenizer ({reference}) cannot be created ({cause})") from error
    if kind == "AutoProcessor":
        tokenizer = tokenizer.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return _plain(backend) if backend is not None else cast("Backend", PythonTokenizer(tokenizer))


def _plain(backend: Backend) -> Backend:
    """Disable padding and truncation, which embedding models request for batches of equal
    length."""
    backend.no_padding()
    backend.no_truncation()
    return backend
