"""Manifest of the in-tree drafters: records only. Must not import the plugins."""

from __future__ import annotations

from pydantic import Field, model_validator

from frame.core.interfaces.drafter import DrafterCapabilities, TreeOptions
from frame.registration import KindRegistry, PluginOptions, hookimpl


class NgramOptions(PluginOptions):
    """Settings of the drafter `ngram`, named as in vLLM."""

    prompt_lookup_max: int = Field(4, ge=1, le=16, description="Tokens of the longest n-gram that is looked up.")
    prompt_lookup_min: int = Field(2, ge=1, le=16, description="Tokens of the shortest n-gram that is looked up.")

    @model_validator(mode="after")
    def _check_order(self) -> NgramOptions:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(f"prompt_lookup_min is above prompt_lookup_max ({self.prompt_lookup_max}); lower it")
        return self


class SuffixOptions(PluginOptions):
    """Settings of the drafter `suffix`."""

    cache_mib: int = Field(32, ge=1, le=65536, description="MiB for suffixes of texts; about 10,000 tokens of text per MiB.")


@hookimpl
def register_drafters(registry: KindRegistry) -> None:
    """Add the in-tree drafters."""
    for name, target, options, capabilities, summary in (
        ("ngram", "ngram:NgramDrafter", NgramOptions,
         DrafterCapabilities(),
         "Drafts what followed the last tokens where they occurred before, in prompt or output."),
        ("draft_model", "draft_model:DraftModelDrafter", TreeOptions,
         DrafterCapabilities(runs_on="device", needs_draft_model=True, loads_model=True),
         "Drafts with a smaller checkpoint of the same vocabulary."),
        ("eagle3", "eagle3:Eagle3Drafter", TreeOptions,
         DrafterCapabilities(runs_on="device", needs_draft_model=True, head_field="draft_vocab_size"),
         "Drafts with an EAGLE-3 head: one layer over three hidden states of the model."),
        ("medusa", "medusa:MedusaDrafter", None,
         DrafterCapabilities(runs_on="device", needs_draft_model=True, head_field="medusa_num_heads"),
         "Drafts with Medusa heads over the model's last hidden state."),
        ("mtp", "mtp:MtpDrafter", TreeOptions,
         DrafterCapabilities(runs_on="device", needs_draft_layers=True),
         "Drafts with the multi-token-prediction layer of the model's checkpoint (DeepSeek-V3)."),
        ("suffix", "suffix:SuffixDrafter", SuffixOptions,
         DrafterCapabilities(keeps_texts=True),
         "Drafts what followed the longest known suffix, in prompt, output or recent requests of the same tenant."),
    ):  # fmt: skip
        registry.add(name, f"frame.plugins.drafters.{target}", options=options, capabilities=capabilities, summary=summary)
