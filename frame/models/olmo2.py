"""OLMo 2 and 3: RMSNorm of the outputs of attention and feed-forward instead of their inputs, and
of all queries (keys) together; OLMo 3 adds sliding windows."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from frame.models.layers.attention import AttentionOptions, find_layer_window
from frame.models.layers.decoder import Decoder, NormedOutputLayer
from frame.models.layers.rotary import Rotary, read_rope_parameters

_PATTERN = 4  # in OLMo 3 every fourth layer has full attention, unless the config lists the layers


class Olmo2ForCausalLM(Decoder):
    """OLMo 3 scales the positions of full attention only; layers with a window have a rotary
    embedding of their own."""

    def build_layer(self, index: int, prefix: str) -> nn.Module:
        names = ("post_attention_layernorm", "post_feedforward_layernorm")
        norms = (self.build_norm(f"{prefix}.{names[0]}"), self.build_norm(f"{prefix}.{names[1]}"))
        attention, mlp = self.build_attention(index, f"{prefix}.self_attn"), self.build_mlp(index, f"{prefix}.mlp")
        return NormedOutputLayer(attention, mlp, norms, None)

    def build_rotary(self) -> Rotary:
        head_dim, slides = self.model_config.head_dim, self._has_windows and self.model_config.sliding_window
        self.sliding_rotary = Rotary(self.context, head_dim, self._rope("sliding_attention")) if slides else None
        return Rotary(self.context, head_dim, self._rope("full_attention"))

    def get_rotary(self, layer: int) -> Rotary:
        slides = self._find_window(layer)
        return self.sliding_rotary if slides and self.sliding_rotary is not None else self.rotary

    def get_attention_options(self, layer: int) -> AttentionOptions:
        eps, window = self.model_config.config.get("rms_norm_eps", 1e-5), self._find_window(layer)
        return replace(super().get_attention_options(layer), qk_norm=eps, qk_norm_kind="projection", sliding_window=window)

    @property
    def _has_windows(self) -> bool:
        return self.model_config.architecture.startswith("Olmo3")

    def _find_window(self, layer: int) -> int | None:
        return find_layer_window(self.model_config, layer, _PATTERN) if self._has_windows else None

    def _rope(self, kind: str) -> dict[str, object]:
        return read_rope_parameters(self.model_config, kind)
