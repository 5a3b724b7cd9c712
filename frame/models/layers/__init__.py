"""The building blocks of models. Used by the in-tree models and by model plugins of other packages.

The names here, the arguments of their constructors and the methods that the reference lists are
stable: they keep their meaning for as long as the version of the interface `model` stays, and new
arguments have defaults. A change raises that version, and a plugin of an earlier version is
refused with the new names. The modules below hold more, which may change at any time. Must not know
a model.
"""

from frame.models.layers.attention import Attention, AttentionOptions, find_layer_window
from frame.models.layers.decoder import Decoder, DecoderLayer, NormedOutputLayer, ParallelLayer
from frame.models.layers.linear import ColumnLinear, ReplicatedLinear, RowLinear
from frame.models.layers.mlp import GatedMLP, PlainMLP, read_activation
from frame.models.layers.moe import ExpertSizes, MoE
from frame.models.layers.norm import LayerNorm, RMSNorm
from frame.models.layers.rotary import Rotary, read_rope_parameters
from frame.models.layers.router import RoutingRule

__all__ = [
    "Attention",
    "AttentionOptions",
    "ColumnLinear",
    "Decoder",
    "DecoderLayer",
    "ExpertSizes",
    "GatedMLP",
    "LayerNorm",
    "MoE",
    "NormedOutputLayer",
    "ParallelLayer",
    "PlainMLP",
    "RMSNorm",
    "ReplicatedLinear",
    "Rotary",
    "RoutingRule",
    "RowLinear",
    "find_layer_window",
    "read_activation",
    "read_rope_parameters",
]
