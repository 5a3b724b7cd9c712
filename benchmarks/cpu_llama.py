"""frame beside llama.cpp (`llama-cpp-python`) on a CPU: each engine in a fresh process, in turn.

    python benchmarks/cpu_llama.py make --config FOLDER_OF_config.json --work W --peer PYTHON
    python benchmarks/cpu_llama.py run --work W --peer PYTHON --threads 2 --json RESULT.json

`make` writes a random bfloat16 checkpoint, and with the interpreter PYTHON, whose environment has
llama-cpp-python and gguf, GGUF files of the same numbers in bf16, Q8_0 and Q4_0. `run` gives, for
each engine and round, wall and CPU milliseconds of a decode step with 1, 8 and 32 streams, those of
a prompt, and the seconds from the start of the process to the first token. CPU time also counts on
a machine that does other work; a step is the difference of two runs of unequal length. The head is
quantized too, as in llama.cpp. Where llama.cpp ends in `ldtilecfg`, its compiler dropped the stores
of a tile configuration: build it with a memory clobber before `_tile_loadconfig`, and give the
folder of that libllama.so as LLAMA_CPP_LIB_PATH.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import statistics
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ENGINES = ("frame:bf16", "llama:bf16", "frame:int8", "llama:q8_0", "frame:int4", "llama:q4_0")
PAIRS = (("frame:bf16", "llama:bf16"), ("frame:int8", "llama:q8_0"), ("frame:int4", "llama:q4_0"))
VOCABULARY = 32000  # ids are drawn below it


def draw_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(16, VOCABULARY) for _ in range(length)] for _ in range(count)]


class Frame:
    def __init__(self, work: Path, variant: str, threads: int, keys: dict[str, Any]) -> None:
        from frame import Engine, SamplingParams

        if variant != "bf16":
            keys = {**keys, "quantization": variant, "plugins_options": {f"weight_format/{variant}": {"head": True}}}
        self.params = lambda tokens: SamplingParams(temperature=0, ignore_eos=True, max_tokens=tokens)
        self.engine = Engine(
            model=str(work / "model"), dtype="bfloat16", skip_tokenizer_init=True, threads=threads, max_total_tokens=16384, **keys
        )

    def generate(self, prompts: list[list[int]], tokens: int) -> None:
        outputs = self.engine.generate(prompts, [self.params(tokens)] * len(prompts))
        assert all(len(output.token_ids) == tokens for output in outputs)


class Llama:
    """llama.cpp's C interface: prompts in batches, then one step of all sequences at a time."""

    def __init__(self, work: Path, variant: str, threads: int, keys: dict[str, Any]) -> None:
        import llama_cpp
        import numpy

        self.api, self.numpy, self.threads = llama_cpp, numpy, threads
        self.log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self.log, None)
        params = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(str(work / f"{variant}.gguf").encode(), params)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(2048, 0, 1)

    def generate(self, prompts: list[list[int]], tokens: int) -> None:
        api, params = self.api, self.api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_seq_max = len(prompts) * (len(prompts[0]) + tokens), 2048, len(prompts)
        params.n_threads = params.n_threads_batch = self.threads
        self.context = api.llama_init_from_model(self.model, params)
        last: list[int] = []
        each = max(1, 2048 // len(prompts[0]))
        for first in range(0, len(prompts), each):
            part = list(enumerate(prompts))[first : first + each]
            last += self.decode([(token, place, row, place == len(ids) - 1) for row, ids in part for place, token in enumerate(ids)])
        for step in range(tokens - 1):
            last = self.decode([(token, len(prompts[0]) + step, row, True) for row, token in enumerate(last)])
        api.llama_free(self.context)

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Rows of (token, position, sequence, whether its logits are wanted) -> greedy tokens."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for index, (token, place, sequence, wants) in enumerate(rows):
            batch.token[index], batch.pos[index], batch.n_seq_id[index], batch.logits[index] = token, place, 1, wants
            batch.seq_id[index][0] = sequence
        if self.api.llama_decode(self.context, batch):
            raise SystemExit("llama_decode failed")
        logits = (self.api.llama_get_logits_ith(self.context, index) for index, row in enumerate(rows) if row[3])
        return [int(self.numpy.ctypeslib.as_array(each, (self.vocabulary,)).argmax()) for each in logits]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The part of `run` in a process of its own."""
    kind, variant = options.engine.split(":")
    engine = {"frame": Frame, "llama": Llama}[kind](options.work, variant, options.threads, json.loads(options.keys))
    loaded = time.time() - options.began

    def spend(streams: int, length: int, tokens: int, seed: int) -> tuple[float, float]:
        prompts = draw_prompts(streams, length, seed)
        wall, cpu = time.perf_counter(), time.process_time()
        engine.generate(prompts, tokens)
        return time.perf_counter() - wall, time.process_time() - cpu

    spend(1, options.length, 1, 0)
    found: dict[str, Any] = {"engine": options.engine, "loaded_s": round(loaded, 2), "first_token_s": round(time.time() - options.began, 2)}
    for streams in (1, 8, 32):
        spend(streams, options.length, 2, 1)
        few, many = spend(streams, options.length, 2, 2), spend(streams, options.length, 2 + options.steps, 2 + streams)
        found[f"step_{streams}_ms"] = [round(1e3 * (after - before) / options.steps, 1) for before, after in zip(few, many, strict=True)]
    spend(1, options.prompt, 1, 50)
    found["prompt_ms"] = [round(1e3 * seconds, 1) for seconds in spend(1, options.prompt, 1, 51)]
    return found


def run(options: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    engines = options.engines.split(",")
    for number in range(options.rounds):
        for engine in engines[::-1] if number % 2 else engines:
            python = options.peer if engine.startswith("llama") else sys.executable
            command = [python, __file__, "part", "--engine", engine, "--began", repr(time.time())]
            for name in ("work", "threads", "steps", "length", "prompt", "keys"):
                command += [f"--{name}", str(getattr(options, name))]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{engine}: {done.stderr[-2000:] or done.returncode}")
            rows.append({**json.loads(done.stdout.splitlines()[-1]), "round": number, "load": os.getloadavg()[0]})
            print(json.dumps(rows[-1]), flush=True)
            if options.json:
                about = {key: getattr(options, key) for key in ("threads", "steps", "length", "prompt", "keys")}
                options.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    for mine, theirs in PAIRS:
        for key in ("step_1_ms", "step_8_ms", "step_32_ms", "prompt_ms"):
            values = [[row[key] for row in rows if row["engine"] == engine] for engine in (mine, theirs)]
            if all(values):
                ours, others = ([statistics.median(row[at] for row in part) for at in (0, 1)] for part in values)
                wall, cpu = (other / own for own, other in zip(ours, others, strict=True))
                print(f"{mine} beside {theirs}, {key}: {wall:.2f} times as fast, {cpu:.2f} by CPU time")


def make(options: argparse.Namespace) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.config), dtype=torch.bfloat16)
    model.save_pretrained(options.work / "model")
    subprocess.run([options.peer, __file__, "gguf", "--work", str(options.work)], check=True)


def make_gguf(options: argparse.Namespace) -> None:
    """GGUF files of the checkpoint, a Qwen3 with a tied head in one file."""
    import gguf
    import llama_cpp
    import numpy as np

    config = json.loads((options.work / "model" / "config.json").read_text())
    data = np.memmap(options.work / "model" / "model.safetensors", dtype=np.uint8, mode="r")
    size = struct.unpack("<Q", data[:8].tobytes())[0]
    entries = {name: entry for name, entry in json.loads(data[8 : 8 + size].tobytes()).items() if name != "__metadata__"}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    for kind in ("bf16", "f32"):
        writer = gguf.GGUFWriter(options.work / f"{kind}.gguf", "qwen3")
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(config["num_attention_heads"])
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
        writer.add_vocab_size(config["vocab_size"])
        writer.add_file_type({"bf16": 32, "f32": 0}[kind])
        writer.add_tokenizer_model("none")
        for name, entry in entries.items():
            first, last = entry["data_offsets"]
            bits = data[8 + size + first : 8 + size + last].view(np.uint16).reshape(entry["shape"])
            new = names.get_name(name, try_suffixes=(".weight",))
            if len(entry["shape"]) == 1 or kind == "f32":
                writer.add_tensor(new, (bits.astype(np.uint32) << 16).view(np.float32))
            elif name != "lm_head.weight":
                writer.add_tensor(new, np.ascontiguousarray(bits).view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    for kind, number in (("q8_0", llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0), ("q4_0", llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0)):
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = number
        source, target = (str(options.work / f"{each}.gguf").encode() for each in ("f32", kind))
        if llama_cpp.llama_model_quantize(source, target, ctypes.byref(params)):
            raise SystemExit(f"llama.cpp did not write {kind}.gguf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["make", "gguf", "run", "part"])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--peer", default=sys.executable)
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--length", type=int, default=64, help="tokens of a prompt before the decode steps")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the prompt that is timed")
    parser.add_argument("--keys", default="{}", help="JSON of further keywords of frame's Engine")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engine")
    parser.add_argument("--began", type=float, default=0.0)
    options = parser.parse_args()
    if options.task == "part":
        print(json.dumps(measure(options)))
    else:
        {"make": make, "gguf": make_gguf, "run": run}[options.task](options)


if __name__ == "__main__":
    main()
