"""A small GRPO loop: an engine generates, a model of transformers learns, and its weights go back.

frame-tiny learns to write digits. Rewards are shares of the generated tokens that hold a digit; the
advantage of an answer is its reward minus the mean of its group (GRPO without a KL term, one
gradient step for each batch). Only the parameters that are trained are sent, through shared memory.

    python examples/grpo.py --steps 40
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import AutoModelForCausalLM

from frame import Engine, SamplingParams
from frame.checkpoint.model_config import find_model
from frame.rl import WeightClient

PROMPTS = ["The answer is ", "x = ["]
GROUP, LENGTH = 8, 12  # answers to each prompt, tokens of an answer
TRAINED = ("lm_head.weight", "model.layers.0.mlp.down_proj.weight", "model.norm.weight")  # named as in the checkpoint


def train(num_steps: int, learning_rate: float = 2e-3, seed: int = 0) -> list[float]:
    """The mean reward of each step."""
    torch.manual_seed(seed)
    folder = str(find_model("frame-tiny"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.requires_grad_(False)
    trained = {name: model.get_parameter(name).requires_grad_() for name in TRAINED}
    optimizer = torch.optim.Adam(trained.values(), lr=learning_rate)
    rewards = []
    keys = {"dtype": "float32", "max_model_len": 128, "max_total_tokens": 4096, "max_running_requests": len(PROMPTS) * GROUP}
    with Engine("frame-tiny", weight_transfer=["ipc"], **keys) as engine:
        client = WeightClient(engine)
        has_digit = torch.tensor([any(c.isdigit() for c in engine.tokenizer.decode([i])) for i in range(model.config.vocab_size)])
        prompts = engine.tokenizer.encode_batch(PROMPTS)
        for step in range(num_steps):
            params = SamplingParams(n=GROUP, temperature=1.0, max_tokens=LENGTH, ignore_eos=True, seed=seed * 1000 + step)
            answers = [[each.token_ids for each in output.outputs] for output in engine.generate(prompts, params)]
            reward = torch.stack([has_digit[torch.tensor(group)].float().mean(-1) for group in answers])  # [prompts, GROUP]
            advantage = (reward - reward.mean(-1, keepdim=True)) / (reward.std(-1, keepdim=True) + 1e-4)
            optimizer.zero_grad()
            for prompt, group, gain in zip(prompts, answers, advantage, strict=True):
                tokens = torch.tensor([prompt + answer for answer in group])
                logprobs = model(tokens).logits[:, len(prompt) - 1 : -1].log_softmax(-1)
                chosen = logprobs.gather(-1, tokens[:, len(prompt) :, None])[..., 0]
                (-(gain[:, None] * chosen).mean() / len(prompts)).backward()
            optimizer.step()
            client.update(trained, f"step-{step}", partial=True)
            rewards.append(float(reward.mean()))
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    start = time.perf_counter()
    rewards = train(arguments.steps)
    for step, reward in enumerate(rewards):
        print(f"step {step:3}: reward {reward:.3f}")
    print(f"{arguments.steps} steps in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
