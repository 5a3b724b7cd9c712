"""Manifest of the in-tree models. Records only; nothing heavy is imported here.

Each record names its target as "module:Class"; the registry imports it when it is selected.
"""

from __future__ import annotations

from dataclasses import dataclass

from frame.core.interfaces.model import ModelCapabilities, Task
from frame.registration import KindRegistry, hookimpl


@dataclass(frozen=True, slots=True)
class DecoderCapabilities(ModelCapabilities):
    """invariant_on: the devices on which the model is `batch_invariant`; empty: on all."""

    invariant_on: tuple[str, ...] = ()


def _forms(family: str) -> tuple[str, ...]:
    """The checkpoints of a decoder family: language model, body only, sequence classifier."""
    return (f"{family}ForCausalLM", f"{family}Model", f"{family}ForSequenceClassification")


def _media(*families: str) -> tuple[str, ...]:
    """Checkpoints of a language model with encoders."""
    return tuple(f"{family}ForConditionalGeneration" for family in families)


_TASKS: tuple[Task, ...] = ("generate", "embed", "classify")
_DECODERS = (
    (
        "llama",
        "llama:LlamaForCausalLM",
        (
            *_forms("Llama"),
            *_forms("Mistral"),
            *_forms("Ministral"),
            *_forms("Ministral3"),
            *_media("Mistral3", "Llava", "LlavaNext", "Voxtral"),
        ),
        "Llama 2 and 3, Mistral, Mistral Small, Ministral, Voxtral, and LLaVA over them",
    ),
    (
        "qwen2",
        "qwen2:Qwen2ForCausalLM",
        (*_forms("Qwen2"), *_media("Qwen2VL", "Qwen2_5_VL", "LlavaOnevision", "Qwen2Audio")),
        "Qwen2, Qwen2.5, Qwen2-VL, Qwen2.5-VL, LLaVA-OneVision, Qwen2-Audio",
    ),
    (
        "qwen3",
        "qwen3:Qwen3ForCausalLM",
        (*_forms("Qwen3"), *_media("Qwen3VL")),
        "Qwen3, with its embedding models and rerankers, and Qwen3-VL",
    ),
    ("internvl", "internvl:InternVLForConditionalGeneration", _media("InternVL"), "InternVL 3 and 3.5"),
    ("mixtral", "mixtral:MixtralForCausalLM", ("MixtralForCausalLM",), "Mixtral"),
    ("qwen2_moe", "qwen2_moe:Qwen2MoeForCausalLM", ("Qwen2MoeForCausalLM",), "Qwen2-MoE, Qwen1.5-MoE"),
    (
        "qwen3_moe",
        "qwen3_moe:Qwen3MoeForCausalLM",
        ("Qwen3MoeForCausalLM", *_media("Qwen3VLMoe", "Qwen3OmniMoe", "Qwen3OmniMoeThinker")),
        "Qwen3-MoE, Qwen3-VL-MoE, and Qwen3-Omni without its speech",
    ),
    ("deepseek_v2", "deepseek_v2:DeepseekV2ForCausalLM", ("DeepseekV2ForCausalLM",), "DeepSeek-V2, with latent attention"),
    ("deepseek_ocr2", "deepseek_ocr2:DeepseekOcr2ForConditionalGeneration", _media("DeepseekOcr2"), "DeepSeek-OCR 2"),
    (
        "deepseek_v3",
        "deepseek_v3:DeepseekV3ForCausalLM",
        ("DeepseekV3ForCausalLM", "KimiK2ForCausalLM"),
        "DeepSeek-V3, V3.1 and R1, Kimi-K2",
    ),
    ("kimi_k25", "kimi_k25:KimiK25ForConditionalGeneration", _media("KimiK25", "Kimi_K25"), "Kimi-K2.5 and K2.6"),
    (
        "deepseek_v32",
        "deepseek_v32:DeepseekV32ForCausalLM",
        ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"),
        "DeepSeek-V3.2 and GLM-5, with sparse attention",
    ),
    ("olmo2", "olmo2:Olmo2ForCausalLM", (*_forms("Olmo2"), *_forms("Olmo3")), "OLMo 2 and 3"),
    ("phi3", "phi3:Phi3ForCausalLM", _forms("Phi3"), "Phi-3, Phi-3.5, Phi-4 and Phi-4-mini"),
    ("cohere", "cohere:CohereForCausalLM", (*_forms("Cohere"), *_forms("Cohere2")), "Cohere Command R, R7B and A"),
    ("gpt_oss", "gpt_oss:GptOssForCausalLM", ("GptOssForCausalLM",), "gpt-oss 20b and 120b"),
    (
        "qwen3_next",
        "qwen3_next:Qwen3NextForCausalLM",
        tuple(f"Qwen3{form}" for form in ("NextForCausalLM", "_5ForCausalLM", "_5ForConditionalGeneration"))
        + tuple(f"Qwen3_5Moe{form}" for form in ("ForCausalLM", "ForConditionalGeneration"))
        + _media("MiniCPMV4_6"),
        "Qwen3-Next, Qwen3.5 and Qwen3.6, dense and MoE, and MiniCPM-V 4.6",
    ),
    ("llama4", "llama4:Llama4ForCausalLM", ("Llama4ForCausalLM", "Llama4ForConditionalGeneration"), "Llama 4"),
    ("kimi_linear", "kimi_linear:KimiLinearForCausalLM", ("KimiLinearForCausalLM",), "Kimi Linear"),
    ("nemotron_h", "nemotron_h:NemotronHForCausalLM", ("NemotronHForCausalLM",), "Nemotron-H, Nemotron Nano 2 and 3"),
    ("falcon_h1", "falcon_h1:FalconH1ForCausalLM", ("FalconH1ForCausalLM",), "Falcon-H1"),
    ("glm4_moe", "glm4_moe:Glm4MoeForCausalLM", ("Glm4MoeForCausalLM", *_media("Glm4vMoe")), "GLM-4.5, GLM-4.6 and GLM-4.5V"),
    ("glm4v", "glm4v:Glm4vForConditionalGeneration", _media("Glm4v", "Glm46V"), "GLM-4.1V and GLM-4.6V-Flash"),
    ("minimax_m2", "minimax_m2:MiniMaxM2ForCausalLM", ("MiniMaxM2ForCausalLM",), "MiniMax-M2"),
    (
        "gemma3",
        "gemma3:Gemma3ForCausalLM",
        ("Gemma2ForCausalLM", "Gemma2Model", "Gemma3ForCausalLM", "Gemma3TextModel", "Gemma3ForConditionalGeneration"),
        "Gemma 2 and 3",
    ),
    (
        "gemma4",
        "gemma4:Gemma4ForCausalLM",
        ("Gemma4ForCausalLM", *_media("Gemma4")),
        "Gemma 4",
    ),
)
_RECURRENT = ("falcon_h1", "kimi_linear", "nemotron_h", "qwen3_next")
_WINDOWED = (
    "cohere", "gemma3", "gemma4", "gpt_oss", "internvl", "llama", "llama4", "mixtral", "olmo2", "phi3", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe",
)  # fmt: skip
_INVARIANT_ON_CPU = ("glm4v", "internvl")
_BIDIRECTIONAL = ("llama", "qwen2", "qwen3")  # encoders, where config.json says so
_DRAFTS = ("deepseek_v3", "deepseek_v32", "glm4_moe", "kimi_k25", "nemotron_h", "qwen3_next")
_IMAGE, _VIDEO, _AUDIO = "image", "video", "audio"
_MODALITIES = {
    "deepseek_ocr2": (_IMAGE,),
    "gemma3": (_IMAGE,),
    "gemma4": (_IMAGE, _VIDEO, _AUDIO),
    "glm4_moe": (_IMAGE, _VIDEO),
    "glm4v": (_IMAGE, _VIDEO),
    "internvl": (_IMAGE, _VIDEO),
    "kimi_k25": (_IMAGE,),
    "llama": (_IMAGE, _AUDIO),
    "llama4": (_IMAGE,),
    "qwen2": (_IMAGE, _VIDEO, _AUDIO),
    "qwen3": (_IMAGE, _VIDEO),
    "qwen3_moe": (_IMAGE, _VIDEO, _AUDIO),
    "qwen3_next": (_IMAGE, _VIDEO),
}
# Gemma 3: of all images; Gemma 4: of checkpoints that say so
_MEDIA_SPANS: dict[str, bool | str] = {"gemma3": True, "gemma4": "vision"}
_ENCODERS = (
    ("bert", "bert:BertModel", ("BertModel", "BertForSequenceClassification"), "BERT, MiniLM, BGE and similar encoders"),
    (
        "roberta",
        "roberta:RobertaModel",
        tuple(f"{family}{form}" for family in ("Roberta", "XLMRoberta") for form in ("Model", "ForSequenceClassification")),
        "RoBERTa, XLM-RoBERTa, BGE-M3 (dense vectors) and BGE rerankers",
    ),
)


@hookimpl
def register_models(registry: KindRegistry) -> None:
    """Add the in-tree models."""
    for name, target, architectures, summary in _DECODERS:
        capabilities = DecoderCapabilities(
            architectures,
            tasks=_TASKS,
            pipeline_parallel=name != "gemma4",  # whose later layers read keys of earlier ones
            sinks=name == "gpt_oss",
            chunked=name == "llama4",
            encoder="is_causal" if name in _BIDIRECTIONAL else False,
            recurrent=name in _RECURRENT,
            windows=name in _WINDOWED,
            draft_layers=name in _DRAFTS,
            biased_experts=name in ("gemma4", "gpt_oss", "nemotron_h"),
            sparse=name == "deepseek_v32",
            modalities=_MODALITIES.get(name, ()),
            media_spans=_MEDIA_SPANS.get(name, False),
            batch_invariant=True,
            invariant_on=("cpu",) if name in _INVARIANT_ON_CPU else (),
        )
        registry.add(name, f"frame.models.{target}", capabilities=capabilities, summary=summary, rank=10)
    for name, target, architectures, summary in _ENCODERS:
        encoder = ModelCapabilities(architectures, tasks=("embed", "classify"), encoder=True)
        registry.add(name, f"frame.models.{target}", capabilities=encoder, summary=summary, rank=10)
    registry.add(
        "whisper",
        "frame.models.whisper:WhisperForConditionalGeneration",
        capabilities=ModelCapabilities(("WhisperForConditionalGeneration",), cross_attention=True, adapters=False),
        summary="Whisper: transcription and translation of speech",
        rank=10,
    )
    registry.add(
        "transformers",
        "frame.models.transformers_fallback:TransformersForCausalLM",
        capabilities=ModelCapabilities(None, tasks=("generate",), graphs=False, adapters=False, modalities=(_IMAGE,)),
        summary="Any decoder of the installed transformers whose attention goes through its interface, with its encoder of images",
        rank=-10,
    )
