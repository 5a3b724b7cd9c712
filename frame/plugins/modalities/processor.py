"""The checkpoint's own processor of transformers, of which only the needed parts are built.

Used by the modalities of this folder. `AutoProcessor` is not used: it builds video processors too,
which exist for torchvision alone. No code of a checkpoint runs. Must not know a file format.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from frame.core.errors import ConfigurationError
from frame.core.interfaces.model import ModelConfig
from frame.interfaces.modality import MediaError, Modality
from frame.plugins.modalities.kimi_k25 import make_kimi_images
from frame.plugins.modalities.llama4 import make_llama4_images
from frame.plugins.modalities.pixtral import make_pixtral_processor

_log = logging.getLogger(__name__)
_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
MAX_RATIO = 200  # of the sides of a picture or a frame; as in transformers, where a processor has a limit
_PIXTRAL = "PixtralProcessor"
# by the name of the class in preprocessor_config.json, transformers' or the checkpoint's own
_WITHOUT_TORCHVISION = {
    "Kimi_K25ImageProcessor": make_kimi_images,
    "KimiK25VisionProcessor": make_kimi_images,
    "Llama4ImageProcessor": make_llama4_images,
}
_TOKEN_KEYS = ("{}_token_id", "{}_token_index")  # of a modality, in config.json


class ProcessorModality(Modality):
    """A modality whose tokens are those of a processor. `__init__` sets them."""

    _placeholder: str
    _row_token: str

    @property
    def placeholder(self) -> str:
        return self._placeholder

    @property
    def row_token(self) -> str:
        return self._row_token


def read_settings(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint; empty where there is no file, or another value."""
    value = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return value if isinstance(value, dict) else {}


def load_tokenizer(folder: Path) -> Any:
    """The checkpoint's tokenizer, for the names of its tokens."""
    from transformers import AutoTokenizer

    return _load("tokenizer", folder, lambda: AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False))


def load_image_processor(folder: Path) -> Any:
    """The checkpoint's image processor in its PIL form."""
    from transformers.models.auto.image_processing_auto import AutoImageProcessor  # the name in `transformers` may ask for torchvision

    stored = {
        **read_settings(folder / "preprocessor_config.json"),
        **(read_settings(folder / "processor_config.json").get("image_processor") or {}),
    }
    kind = str(stored.get("image_processor_type"))
    if (make := next((make for name, make in _WITHOUT_TORCHVISION.items() if kind.startswith(name)), None)) is not None:
        return _load("image processor", folder, lambda: make().from_pretrained(folder, local_files_only=True, trust_remote_code=False))
    return _load(
        "image processor",
        folder,
        lambda: AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True, trust_remote_code=False),
    )


def load_feature_extractor(folder: Path) -> Any:
    """The checkpoint's extractor of audio features."""
    from transformers import AutoFeatureExtractor

    load = AutoFeatureExtractor.from_pretrained
    return _load("feature extractor", folder, lambda: load(folder, local_files_only=True, trust_remote_code=False))


def build_processor(folder: Path, model_config: ModelConfig, tokenizer: Any, **known: Any) -> Any:
    """The checkpoint's processor with the sub-processors in `known`. Others are empty objects."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name

    named = [read_settings(folder / name).get("processor_class") for name in _FILES]
    named.append(PROCESSOR_MAPPING_NAMES.get(model_config.full_config.get("model_type", "")))

    def build() -> Any:
        names = [name for name in named if isinstance(name, str)]
        if _PIXTRAL in names:
            base: Any = make_pixtral_processor()
        else:
            base = next((one for name in names if (one := processor_class_from_name(name)) is not None), None)
        if base is None:
            raise ConfigurationError(f"no processor class of transformers reads {folder}; update transformers.")
        # Sub-processors that are not needed have no class.
        changes = {"check_argument_for_proper_class": lambda *_: None, "__repr__": object.__repr__, "__module__": base.__module__}
        bare: Any = type(base.__name__, (base,), changes)
        parts = [tokenizer if "tokenizer" in name else known.get(name, SimpleNamespace()) for name in base.get_attributes()]
        settings, _ = base.get_processor_dict(folder, local_files_only=True)
        return bare.from_args_and_dict(parts, settings)

    return _load("processor", folder, build)


def find_row_token(model_config: ModelConfig, tokenizer: Any, modality: str, default: str | None) -> str:
    """The token whose rows the model's encoder computes, by the checkpoint's configuration."""
    config = model_config.full_config
    number = next((config[key] for form in _TOKEN_KEYS if (key := form.format(modality)) in config), None)
    token = tokenizer.convert_ids_to_tokens(number) if isinstance(number, int) else default
    if not isinstance(token, str):
        raise ConfigurationError(f"config.json has no {modality}_token_id that the tokenizer knows; fetch the checkpoint's files again.")
    return token


def check_names(options: Mapping[str, Any], known: set[str], what: str) -> None:
    """Raise ConfigurationError for an option of the server that nothing reads."""
    if unknown := sorted(set(options) - known):
        sentence = f"media.processor_options: {unknown[0]} is no option of the checkpoint's {what}"
        raise ConfigurationError(f"{sentence}; it takes {', '.join(sorted(known))}.")


def number(options: Mapping[str, Any], name: str, low: float, high: float) -> float | None:
    """A request's option that is a number; None: it is absent. Raises MediaError."""
    value = options.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise MediaError(f"{name} is {str(value)[:40]!r}; it must be a number from {low:g} to {high:g}")
    return value


def refuse_unknown(options: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise MediaError for an option of a request that the modality does not read."""
    if unknown := sorted(set(options) - set(known)):
        raise MediaError(f"{unknown[0][:40]!r} is no option of this part; it takes {' and '.join(known) or 'none'}")


def as_arrays(outputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The numeric outputs of a processor: whole numbers as int64, others as they are."""
    arrays = {}
    for name, value in outputs.items():
        array = np.asarray(value)
        if array.dtype.kind in "iub" and array.dtype != np.uint8:
            array = array.astype(np.int64)
        if array.dtype.kind in "iuf":
            arrays[name] = array
    return arrays


def _load(what: str, folder: Path, load: Callable[[], Any]) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return load()
    except ConfigurationError:
        raise
    except Exception as error:  # of transformers, which raises many
        _log.debug("the %s of %s", what, folder, exc_info=True)
        if "torchvision" in str(error).lower() and find_spec("torchvision") is None:
            sentence = f"this version of transformers needs torchvision for the {what}"
            raise ConfigurationError(f"{sentence}; run: pip install --upgrade transformers") from error
        if "torchvision" in str(error):
            sentence = f"torchvision, which does not fit the installed torch, prevents the {what}: {str(error)[:200]}"
            raise ConfigurationError(f"{sentence}; run: pip uninstall torchvision") from error
        raise ConfigurationError(f"transformers cannot read the {what} of {folder}: {str(error)[:300]}") from error
