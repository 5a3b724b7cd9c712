"""resolve(): choices, refusals and their error texts; purity and idempotence."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from frame.config.hardware import Accelerator, Hardware
from frame.config.resolve import ResolveError, pinned, resolve
from frame.config.schema import FrameConfig
from frame.config.selection import UnknownPluginError
from frame.core.errors import PluginError
from frame.core.interfaces.attention import AttentionCapabilities
from frame.core.interfaces.cache import PrefixCacheCapabilities
from frame.core.interfaces.collective import CollectiveCapabilities
from frame.core.interfaces.gemm_kernel import GemmCapabilities, Speed
from frame.core.interfaces.model import ModelCapabilities, ModelConfig
from frame.core.interfaces.moe import MoECapabilities
from frame.core.interfaces.platform import PlatformCapabilities
from frame.core.interfaces.plugin import Anything, PluginRecord, Reason
from frame.core.interfaces.weight_format import FormatCapabilities
from frame.interfaces.routing import RoutingCapabilities
from frame.interfaces.sampler import SamplerCapabilities
from frame.interfaces.weights import WeightSourceCapabilities
from tests.model_configs import LLAMA

LAPTOP = Hardware(cpu_cores=4, memory_bytes=16 * 2**30, cpu_features=frozenset({"avx2"}))
XEON = Hardware(cpu_cores=8, memory_bytes=64 * 2**30, cpu_features=frozenset({"amx_bf16", "avx512_bf16"}))
H200 = Hardware(cpu_cores=8, memory_bytes=64 * 2**30, accelerators=(Accelerator("cuda", "NVIDIA H200", (9, 0), 140 * 2**30),) * 4)
T4 = Hardware(cpu_cores=8, memory_bytes=64 * 2**30, accelerators=(Accelerator("cuda", "T4", (7, 5), 16 * 2**30),))

DEEPSEEK = dataclasses.replace(
    LLAMA,
    architecture="DeepseekV3ForCausalLM",
    kind="mla",
    latent=(64, 16),
    head_dim=48,
    v_head_dim=32,
    num_kv_heads=8,
    num_experts=8,
    config={"intermediate_size": 512, "moe_intermediate_size": 64},
)


def record(kind: str, name: str, capabilities: object = None, **more: object) -> PluginRecord:
    more = {"distribution": "frame-serve", "version": "1", **more}
    return PluginRecord(kind=kind, name=name, target=f"m:{name}", api="x/1", capabilities=capabilities or Anything(), **more)


def records(**replaced: list[PluginRecord]) -> dict[str, list[PluginRecord]]:
    by_kind = {
        "platform": [
            record("platform", "cpu", PlatformCapabilities()),
            record("platform", "cuda", PlatformCapabilities(find_devices="m:find", graphs=True), rank=10),
        ],
        "launcher": [record("launcher", "local")],
        "collective": [record("collective", "ranks", CollectiveCapabilities(("cpu", "cuda"), capturable=True))],
        "model": [
            record("model", "fallback", ModelCapabilities(None, tensor_parallel=False, expands_mla=True), rank=99),
            record("model", "llama", ModelCapabilities(("LlamaForCausalLM",))),
            record("model", "deepseek", ModelCapabilities(("DeepseekV3ForCausalLM",))),
        ],
        "attention_backend": [
            record("attention_backend", "plain", AttentionCapabilities(("cpu", "cuda"), kinds=("mha", "mla"), layout="any"), rank=1),
            record(
                "attention_backend",
                "fast",
                AttentionCapabilities(
                    ("cuda",),
                    compute_capability=((9, 0), (10, 3)),
                    page_sizes=(32, 64),
                    dtypes=("bfloat16", "float16"),
                    kv_dtypes=("fp8_e4m3",),
                ),
                rank=10,
            ),
        ],
        "weight_format": [
            record("weight_format", "none", FormatCapabilities((None,))),
            record("weight_format", "int8_on_load", FormatCapabilities((None,), ("plain", "int8")), rank=50),
            record("weight_format", "awq", FormatCapabilities(("awq",), ("plain", "int4"))),
        ],
        "gemm_kernel": [
            record("gemm_kernel", "plain", GemmCapabilities(("cpu", "cuda"), (Speed("plain", 0, 1.0),))),
            record("gemm_kernel", "quick", GemmCapabilities(("cuda",), (Speed("int4", 64, 2.5),))),
            record("gemm_kernel", "steady", GemmCapabilities(("cpu", "cuda"), (Speed("int4", 0, 0.9), Speed("int8", 0, 0.8)))),
        ],
        "moe_runner": [
            record("moe_runner", "loop", MoECapabilities(("cpu", "cuda"))),
            record("moe_runner", "grouped", MoECapabilities(("cuda",)), rank=5),
        ],
        "moe_dispatcher": [record("moe_dispatcher", "local", MoECapabilities(("cpu", "cuda")))],
        "scheduling_policy": [record("scheduling_policy", "fcfs")],
        "weight_source": [
            record("weight_source", "files", WeightSourceCapabilities()),
            record("weight_source", "random", WeightSourceCapabilities(reads_checkpoint=False), rank=9),
            record("weight_source", "lonely", WeightSourceCapabilities(several_ranks=False)),
        ],
        "prefix_cache": [
            record("prefix_cache", "tree", PrefixCacheCapabilities(), rank=50),
            record("prefix_cache", "none", PrefixCacheCapabilities(reuses=False, eviction_policy=False), rank=-100),
            record("prefix_cache", "large", PrefixCacheCapabilities(page_sizes=(64, 128), eviction_policy=False), rank=1),
        ],
        "eviction_policy": [record("eviction_policy", "lru")],
        "kv_allocator": [record("kv_allocator", "pages")],
        "sampler": [record("sampler", "race", SamplerCapabilities(batch_invariant=True))],
        "routing_policy": [record("routing_policy", "prefix_load", RoutingCapabilities())],
        "logits_processor": [record("logits_processor", "penalties"), record("logits_processor", "theirs", distribution="other")],
        "grammar_backend": [],
        "reasoning_parser": [],
        "tool_call_parser": [],
    }
    return by_kind | replaced


def config(**sections: dict[str, object]) -> FrameConfig:
    return FrameConfig.model_validate(sections)


def names(resolved: object) -> dict[str, list[str]]:
    return {kind: [choice.name for choice in choices] for kind, choices in resolved.plugins.items()}


def test_a_laptop_gets_float32_and_the_cpu_backend() -> None:
    resolved = resolve(config(), LAPTOP, LLAMA, records())
    assert (resolved.device, resolved.dtype, resolved.kv_dtype, resolved.page_size) == ("cpu", "float32", "float32", 16)
    assert names(resolved)["attention_backend"] == ["plain"]
    assert resolved.overlap is False
    assert resolved.threads == 4
    assert "natively" in resolved.reasons["model.dtype"]
    rejected = resolved.rejected["attention.backend"]["fast"]
    assert rejected == ["runs on cuda, not on cpu", "computes in bfloat16 or float16, not in float32 (try model.dtype: bfloat16)"]


def test_a_cpu_with_native_bf16_computes_a_bf16_checkpoint_in_it() -> None:
    assert resolve(config(), XEON, LLAMA, records()).dtype == "bfloat16"
    assert resolve(config(), XEON, dataclasses.replace(LLAMA, dtype="float16"), records()).dtype == "float32"


def test_a_gpu_gets_the_fast_backend_and_its_page_size() -> None:
    resolved = resolve(config(), H200, LLAMA, records())
    assert names(resolved)["attention_backend"] == ["fast"]
    assert resolved.page_size == 32
    assert resolved.overlap is True


def test_an_old_gpu_gets_float16() -> None:
    assert resolve(config(), T4, LLAMA, records()).dtype == "float16"


def test_an_exact_architecture_precedes_a_better_ranked_fallback() -> None:
    assert names(resolve(config(), LAPTOP, LLAMA, records()))["model"] == ["llama"]
    unknown = dataclasses.replace(LLAMA, architecture="NewForCausalLM")
    assert names(resolve(config(), LAPTOP, unknown, records()))["model"] == ["fallback"]


def test_a_fallback_that_expands_latent_attention_makes_the_cache_mha() -> None:
    resolved = resolve(config(model={"implementation": "fallback"}), LAPTOP, DEEPSEEK, records())
    assert (resolved.model.kind, resolved.model.latent, resolved.model.num_kv_heads) == ("mha", None, 8)
    assert resolve(config(), LAPTOP, DEEPSEEK, records()).model.kind == "mla"


def test_an_open_dtype_changes_if_no_backend_supports_it() -> None:
    only = record("attention_backend", "exact", AttentionCapabilities(("cpu",), dtypes=("float32",)))
    resolved = resolve(config(), XEON, LLAMA, records(attention_backend=[only]))
    assert resolved.dtype == "float32"
    assert "bfloat16 was refused" in resolved.reasons["model.dtype"]
    with pytest.raises(ResolveError, match=r"model\.dtype: float32"):
        resolve(config(model={"dtype": "bfloat16"}), XEON, LLAMA, records(attention_backend=[only]))


def test_an_unsupported_page_size_is_refused_with_every_candidate() -> None:
    paged = record("attention_backend", "paged", AttentionCapabilities(("cpu",), page_sizes=(16, 64)))
    fast = records()["attention_backend"][1]
    with pytest.raises(ResolveError) as caught:
        resolve(config(cache={"page_size": 48}), LAPTOP, LLAMA, records(attention_backend=[paged, fast]))
    text = str(caught.value)
    assert "pages of 48 tokens" in text
    assert "rejected fast (frame-serve 1): runs on cuda" in text
    assert "rejected paged (frame-serve 1): page size 48 is not among [16, 64]" in text
    assert caught.value.change == "cache.page_size: 64 (then paged fits)"
    assert resolve(config(cache={"page_size": 64}), LAPTOP, LLAMA, records(attention_backend=[paged])).page_size == 64


def test_only_existing_devices_are_proposed() -> None:
    only = records(attention_backend=[record("attention_backend", "gpu", AttentionCapabilities(("cuda",)))])
    on_cpu = config(execution={"device": "cpu"})
    with pytest.raises(ResolveError) as caught:
        resolve(on_cpu, H200, LLAMA, only)
    assert caught.value.change == "execution.device: cuda (then gpu fits)"
    with pytest.raises(ResolveError) as caught:
        resolve(on_cpu, LAPTOP, LLAMA, only)
    assert caught.value.change is None


def test_a_named_backend_that_does_not_fit_proposes_a_change() -> None:
    with pytest.raises(ResolveError) as caught:
        resolve(config(attention={"backend": "fast"}), T4, LLAMA, records())
    assert "compute capability 9.0 to 10.3, this card has 7.5" in str(caught.value)
    assert caught.value.change == "attention.backend: plain"


def test_a_capability_record_is_the_only_source_of_kv_dtypes_and_page_sizes() -> None:
    """Changing the record changes the choice, the refusal, the proposed change and the page size
    together."""
    for sizes, kv_dtypes in itertools.product([(32, 64), (128,)], [("fp8_e4m3",), None]):
        only = record("attention_backend", "mla_kernel", AttentionCapabilities(("cuda",), page_sizes=sizes, kv_dtypes=kv_dtypes))
        known = records(attention_backend=[only])
        assert resolve(config(), H200, LLAMA, known).page_size == min(sizes)
        with pytest.raises(ResolveError) as caught:
            resolve(config(cache={"page_size": 16}), H200, LLAMA, known)
        assert caught.value.change == f"cache.page_size: {min(sizes)} (then mla_kernel fits)"
        wants_fp8 = config(cache={"kv_dtype": "fp8_e4m3"})
        if kv_dtypes:
            assert resolve(wants_fp8, H200, LLAMA, known).kv_dtype == "fp8_e4m3"
        else:
            with pytest.raises(ResolveError, match="cannot read a fp8_e4m3 KV cache"):
                resolve(wants_fp8, H200, LLAMA, known)


def test_plain_weights_are_not_quantized_by_default() -> None:
    assert names(resolve(config(), LAPTOP, LLAMA, records()))["weight_format"] == ["none"]
    asked = config(model={"quantization": "int8_on_load"})
    assert names(resolve(asked, LAPTOP, LLAMA, records()))["weight_format"] == ["int8_on_load"]


def test_a_quantized_checkpoint_without_a_format_is_refused_with_all_reasons() -> None:
    with pytest.raises(ResolveError) as caught:
        resolve(config(), LAPTOP, dataclasses.replace(LLAMA, quantization="fp8"), records())
    assert "No weight format loads fp8 weights" in str(caught.value)
    assert {candidate.record.name for candidate in caught.value.rejected} == {"none", "int8_on_load", "awq"}


def test_gemm_kernels_are_chosen_by_their_speeds() -> None:
    stored = dataclasses.replace(LLAMA, quantization="awq")
    result = resolve(config(), H200, stored, records())
    assert names(result)["gemm_kernel"] == ["plain", "quick", "steady"]
    assert result.reasons["model.gemm_kernel"] == "plain: plain (x 1); int4: quick to 64 rows (x 2.5), steady (x 0.9)"
    assert names(resolve(config(), LAPTOP, stored, records()))["gemm_kernel"] == ["plain", "steady"]
    named = resolve(config(model={"gemm_kernel": "steady"}), H200, stored, records())
    assert "int4: steady (x 0.9)" in named.reasons["model.gemm_kernel"]
    assert names(resolve(pinned(named), H200, stored, records())) == names(named)
    with pytest.raises(ResolveError, match="steady multiplies int4 and int8 weights, but model.quantization none yields plain ones"):
        resolve(config(model={"gemm_kernel": "steady", "quantization": "none"}), H200, LLAMA, records())
    with pytest.raises(ResolveError, match="runs on cuda, not on cpu"):
        resolve(config(model={"gemm_kernel": "quick"}), LAPTOP, stored, records())


def test_the_moe_runner_and_dispatcher_are_the_best_ranked_that_fit() -> None:
    resolved = resolve(config(), H200, DEEPSEEK, records())
    assert (names(resolved)["moe_runner"], names(resolved)["moe_dispatcher"]) == (["grouped"], ["local"])
    assert names(resolve(config(moe={"runner": "loop"}), H200, DEEPSEEK, records()))["moe_runner"] == ["loop"]
    resolved = resolve(config(), LAPTOP, DEEPSEEK, records())
    assert names(resolved)["moe_runner"] == ["loop"]
    assert resolved.rejected["moe.runner"]["grouped"] == ["runs on cuda, not on cpu"]
    with pytest.raises(ResolveError, match="moe.runner: grouped cannot serve"):
        resolve(config(moe={"runner": "grouped"}), LAPTOP, DEEPSEEK, records())
    with pytest.raises(ResolveError, match="No moe_runner serves experts on cpu") as caught:
        resolve(config(), LAPTOP, DEEPSEEK, records(moe_runner=records()["moe_runner"][1:]))
    assert {candidate.record.name for candidate in caught.value.rejected} == {"grouped"}
    with pytest.raises(UnknownPluginError, match="did you mean 'loop'"):
        resolve(config(moe={"runner": "lop"}), H200, DEEPSEEK, records())


def test_a_dense_model_needs_no_moe_plugin() -> None:
    resolved = resolve(config(), LAPTOP, LLAMA, records(moe_runner=[], moe_dispatcher=[]))
    assert "moe_runner" not in resolved.plugins


@pytest.mark.parametrize(
    ("model_config", "tp", "words", "remedy"),
    [
        (LLAMA, 3, "8 attention heads", 2),
        (dataclasses.replace(LLAMA, config={"intermediate_size": 510}), 4, "the inner size 510", 2),
        (dataclasses.replace(DEEPSEEK, config={"moe_intermediate_size": 36}), 8, "the experts' inner size 36", 4),
        (dataclasses.replace(LLAMA, num_heads=12, num_kv_heads=6, config={}), 4, "6 KV heads", 3),
    ],
)
def test_tensor_parallelism_must_divide_the_model(model_config: ModelConfig, tp: int, words: str, remedy: int) -> None:
    with pytest.raises(ResolveError) as caught:
        resolve(config(parallel={"tp": tp}), LAPTOP, model_config, records())
    assert words in str(caught.value)
    assert caught.value.change == f"parallel.tp: {remedy}"
    assert resolve(config(parallel={"tp": remedy}), LAPTOP, model_config, records()).user.parallel.tp == remedy


def test_kv_heads_may_be_repeated() -> None:
    assert resolve(config(parallel={"tp": 8}), XEON, LLAMA, records()).threads == 1


def test_a_server_reserves_a_core_for_its_other_processes():
    served = resolve(config(), dataclasses.replace(XEON, busy_cores=1), LLAMA, records())
    assert served.threads == resolve(config(), XEON, LLAMA, records()).threads - 1
    assert resolve(config(), dataclasses.replace(XEON, cpu_cores=1, busy_cores=1), LLAMA, records()).threads == 1
    assert "1 of them for HTTP and text" in served.reasons["execution.threads"]


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(ResolveError, match="this machine has 4 cuda"):
        resolve(config(parallel={"tp": 8}), H200, LLAMA, records())


def test_a_missing_gpu_is_refused() -> None:
    noted = dataclasses.replace(LAPTOP, note="torch is built without CUDA")
    with pytest.raises(ResolveError, match="torch is built without CUDA"):
        resolve(config(execution={"device": "cuda"}), noted, LLAMA, records())


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"model": {"max_context": 8192}}, "made for 4096"),
        ({"cache": {"max_total_tokens": 16, "page_size": 64}}, "less than one page"),
        ({"cache": {"max_total_tokens": 512}, "model": {"max_context": 1024}}, "less than one request"),
    ],
)
def test_contradicting_lengths_are_refused(sections: dict[str, dict[str, object]], words: str) -> None:
    with pytest.raises(ResolveError, match=words):
        resolve(config(**sections), LAPTOP, LLAMA, records())


def test_a_small_cache_shortens_an_open_context() -> None:
    resolved = resolve(config(cache={"max_total_tokens": 512}), LAPTOP, LLAMA, records())
    assert resolved.max_context == 512
    assert "holds 512 tokens" in resolved.reasons["model.max_context"]


def test_a_list_names_the_logits_processors_in_order() -> None:
    assert names(resolve(config(), LAPTOP, LLAMA, records()))["logits_processor"] == ["penalties"]
    for listed, expected in (
        (["builtin", "theirs"], ["penalties", "theirs"]),
        (["theirs", "builtin", "theirs"], ["theirs", "penalties"]),
        (["theirs"], ["theirs"]),
        ([], []),
    ):
        result = resolve(config(sampling={"processors": listed}), LAPTOP, LLAMA, records())
        assert names(result)["logits_processor"] == expected
    with pytest.raises(UnknownPluginError, match="did you mean 'theirs'"):
        resolve(config(sampling={"processors": ["their"]}), LAPTOP, LLAMA, records())


def test_a_prefix_cache_is_chosen_by_name_and_capabilities() -> None:
    resolved = resolve(config(), LAPTOP, LLAMA, records())
    assert (names(resolved)["prefix_cache"], names(resolved)["eviction_policy"]) == (["tree"], ["lru"])
    for name, sizes in (("none", {}), ("large", {"page_size": 128})):
        resolved = resolve(config(cache={"prefix": name, **sizes}), LAPTOP, LLAMA, records())
        assert names(resolved)["prefix_cache"] == [name]
        assert "eviction_policy" not in resolved.plugins
        assert resolved.reasons["cache.eviction"] == f"not used: the prefix cache {name} takes no eviction policy"
    with pytest.raises(ResolveError, match="large .* stores pages of 64 or 128 tokens, not of 16 .try cache.page_size: 64"):
        resolve(config(cache={"prefix": "large"}), LAPTOP, LLAMA, records())
    with pytest.raises(UnknownPluginError, match="did you mean 'tree'"):
        resolve(config(cache={"prefix": "tre"}), LAPTOP, LLAMA, records())


def test_weights_are_made_up_only_if_the_user_says_so() -> None:
    assert names(resolve(config(), LAPTOP, LLAMA, records()))["weight_source"] == ["files"]
    assert names(resolve(config(model={"load_format": "random"}), LAPTOP, LLAMA, records()))["weight_source"] == ["random"]
    with pytest.raises(ResolveError, match="is opened by one rank alone, not by 2 .try parallel.tp: 1"):
        resolve(config(model={"load_format": "lonely"}, parallel={"tp": 2}), LAPTOP, LLAMA, records())


def test_an_installed_grammar_backend_is_used_and_a_missing_one_is_no_error() -> None:
    assert resolve(config(), LAPTOP, LLAMA, records()).reasons["sampling.grammar"] == "none: no usable grammar_backend is installed"
    grammar = record("grammar_backend", "g")
    assert names(resolve(config(), LAPTOP, LLAMA, records(grammar_backend=[grammar])))["grammar_backend"] == ["g"]
    unmet = dataclasses.replace(grammar, problems=(Reason("it needs x>=1, which is not installed"),))
    with pytest.raises(ResolveError, match="it needs x>=1"):
        resolve(config(sampling={"grammar": "g"}), LAPTOP, LLAMA, records(grammar_backend=[unmet]))


def test_a_record_whose_check_raises_is_rejected_alone() -> None:
    class Bad:
        def unsupported(self, requirements: object) -> list[Reason]:
            raise KeyError("x")

    bad = record("attention_backend", "bad", Bad(), rank=1000)
    known = records(attention_backend=[*records()["attention_backend"], bad])
    resolved = resolve(config(), LAPTOP, LLAMA, known)
    assert names(resolved)["attention_backend"] == ["plain"]
    assert "capability record fails with KeyError" in resolved.rejected["attention.backend"]["bad"][0]


def test_plugin_options_are_validated_and_completed() -> None:
    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")
        splits: int = 8

    with_options = record("scheduling_policy", "fcfs", options=Options)
    known = records(scheduling_policy=[with_options, record("scheduling_policy", "lof", options=Options)])
    key = "scheduling_policy/fcfs"
    assert resolve(config(), LAPTOP, LLAMA, known).choice("scheduling_policy").options == {"splits": 8}
    chosen = resolve(config(plugins={"options": {key: {"splits": 2}}}), LAPTOP, LLAMA, known)
    assert chosen.choice("scheduling_policy").options == {"splits": 2}
    with pytest.raises(PluginError, match="did you mean 'splits'"):
        resolve(config(plugins={"options": {key: {"split": 2}}}), LAPTOP, LLAMA, known)
    with pytest.raises(PluginError, match=r"splits is 'x'"):
        resolve(config(plugins={"options": {key: {"splits": "x"}}}), LAPTOP, LLAMA, known)
    unused = "scheduling_policy/lof"
    assert resolve(config(plugins={"options": {unused: {"splits": 2}}}), LAPTOP, LLAMA, known).choice("scheduling_policy").name == "fcfs"
    with pytest.raises(PluginError, match=r"scheduling_policy/lof.split is unknown; did you mean 'splits'"):
        resolve(config(plugins={"options": {unused: {"split": 2}}}), LAPTOP, LLAMA, known)
    with pytest.raises(PluginError, match="did you mean 'scheduling_policy/fcfs'"):
        resolve(config(plugins={"options": {"scheduling_policy/fcf": {}}}), LAPTOP, LLAMA, known)


def maybe(values: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.one_of(st.none(), values)


CONFIGS = st.fixed_dictionaries(
    {
        "model": st.fixed_dictionaries(
            {
                "dtype": maybe(st.sampled_from(["float32", "bfloat16", "float16"])),
                "max_context": maybe(st.integers(1, 5000)),
                "implementation": maybe(st.sampled_from(["fallback", "llama"])),
            }
        ),
        "parallel": st.fixed_dictionaries({"tp": st.integers(1, 8)}),
        "attention": st.fixed_dictionaries({"backend": maybe(st.sampled_from(["plain", "fast"]))}),
        "cache": st.fixed_dictionaries(
            {
                "prefix": st.sampled_from([None, "tree", "none"]),
                "page_size": maybe(st.sampled_from([1, 16, 32, 64])),
                "kv_dtype": maybe(st.sampled_from(["float32", "bfloat16", "fp8_e4m3"])),
                "mem_fraction": maybe(st.floats(0.1, 1.0)),
                "max_total_tokens": maybe(st.integers(16, 10_000)),
            }
        ),
        "scheduler": st.fixed_dictionaries(
            {
                "max_running_requests": maybe(st.integers(1, 512)),
                "chunked_prefill_size": maybe(st.integers(1, 9000)),
                "overlap": maybe(st.booleans()),
            }
        ),
        "execution": st.fixed_dictionaries({"device": maybe(st.sampled_from(["cpu", "cuda"])), "threads": maybe(st.integers(1, 8))}),
    }
)


@settings(max_examples=150, deadline=None)
@given(sections=CONFIGS, hardware=st.sampled_from([LAPTOP, XEON, H200, T4]), model_config=st.sampled_from([LLAMA, DEEPSEEK]))
def test_resolving_a_pinned_result_changes_nothing_and_user_values_are_kept(
    sections: dict[str, dict[str, object]], hardware: Hardware, model_config: ModelConfig
) -> None:
    user = FrameConfig.model_validate(sections)
    try:
        first = resolve(user, hardware, model_config, records())
    except ResolveError as error:
        assert all(each.change or each.rejected for each in error.conflicts), str(error)
        return
    again = resolve(pinned(first), hardware, model_config, records())
    changing = {"user", "reasons", "rejected"}
    assert again.model_dump(exclude=changing) == first.model_dump(exclude=changing)
    assert resolve(user, hardware, model_config, records()) == first
    flat = pinned(first).model_dump()
    for section, values in user.model_dump(exclude={"model": {"path", "tokenizer"}}).items():
        for key, value in values.items():
            assert value is None or flat[section][key] == value, (section, key)
    for section, values in user.model_dump().items():
        for key, value in values.items():
            was_chosen = value is None and flat[section][key] is not None
            assert not was_chosen or first.reasons.get(f"{section}.{key}"), f"{section}.{key} was chosen without a reason"
    assert type(first).model_validate_json(first.model_dump_json()) == first


def test_a_decoder_that_attends_in_both_directions_is_refused() -> None:
    """As published of gte-Qwen2: its vectors would be those of another model."""
    embedder = dataclasses.replace(LLAMA, config={**LLAMA.config, "is_causal": False})
    for task in ("embed", "generate"):
        with pytest.raises(ResolveError, match="config.json has is_causal: false, and LlamaForCausalLM attends to earlier tokens alone"):
            resolve(config(model={"task": task}), LAPTOP, embedder, records())
    both = [record("attention_backend", "both", AttentionCapabilities(("cpu",), bidirectional=True))]
    poolers = [record("pooler", name) for name in ("mean", "last")]

    def resolve_as(encoder: bool | str, model_config: ModelConfig = embedder, **model: object) -> ModelConfig:
        can = ModelCapabilities(("LlamaForCausalLM",), tasks=("embed", "generate"), encoder=encoder, windows=True)
        more = records(model=[record("model", "one", can)], attention_backend=both, pooler=poolers)
        return resolve(config(model=model), LAPTOP, model_config, more).model

    assert resolve_as(True, task="embed").encoder
    assert resolve_as("is_causal").encoder, "the task follows from config.json"
    assert not resolve_as("is_causal", LLAMA).encoder
    with pytest.raises(ResolveError, match="is_causal: false: its tokens attend to later ones, so it generates no text"):
        resolve_as("is_causal", task="generate")
    with pytest.raises(ResolveError, match="computes its sliding window for earlier tokens alone; serve another checkpoint"):
        resolve_as("is_causal", dataclasses.replace(embedder, sliding_window=64))
