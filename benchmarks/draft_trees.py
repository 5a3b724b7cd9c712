"""Tokens a step with chains and with EAGLE-2 trees of drafted tokens, at equal numbers of verified
tokens: frame-tiny with its prediction layer, greedy, by whole sequences without an engine.

A tree keeps the `nodes` likeliest of the tokens that beams of `width` reach in `depth` passes (Li
et al. 2024, arXiv 2406.16858); width 1 is a chain. Takes two minutes on one core:

    python benchmarks/draft_trees.py --tasks copy python --samples 4
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.speculative_cpu import TASKS, make_prompts
from frame.checkpoint.model_config import EMBEDDED, find_model
from scripts.train_frame_tiny.export import load_model
from scripts.train_frame_tiny.model import FrameTiny, rope_tables

OUTPUT = {"copy": 80, "recall": 24, "python": 64}  # tokens of an answer
# of a tree: depth, width and nodes
SHAPES = ((1, 1, 1), (2, 1, 2), (3, 1, 3), (3, 2, 3), (4, 1, 4), (3, 3, 4), (5, 1, 5), (3, 4, 5), (7, 1, 7), (4, 4, 7))
Tree = dict[tuple[int, int], int]  # (parent, token) -> node; the root is -1


def draft_tree(model: FrameTiny, tokens: list[int], hidden: torch.Tensor, depth: int, width: int, nodes: int) -> Tree:
    """The tree after `tokens`. hidden: the target's states, [1, tokens or more, size]."""
    states, embedded = hidden[:, : len(tokens) - 1], model.embed_tokens(torch.tensor([tokens[1:]]))
    found: list[tuple[float, int, int]] = []  # (log-probability from the root, parent, token)
    beams = [(0.0, -1)]  # (log-probability, node)
    for _ in range(depth):
        after, _ = model.prediction(states, embedded, rope_tables(model.shape, states.shape[1], states.device))
        best = model.lm_head(after[:, -1]).log_softmax(-1).topk(width, -1)
        reached: list[tuple[float, int, int]] = []  # (log-probability, node, beam)
        for beam, (score, parent) in enumerate(beams):
            for value, token in zip(best.values[beam].tolist(), best.indices[beam].tolist(), strict=True):
                reached.append((score + value, len(found), beam))
                found.append((score + value, parent, token))
        reached = sorted(reached, reverse=True)[:width]
        rows = [beam for _, _, beam in reached]
        drafted = model.embed_tokens(torch.tensor([[found[node][2]] for _, node, _ in reached]))
        states, embedded = torch.cat((states[rows], after[rows, -1:]), 1), torch.cat((embedded[rows], drafted), 1)
        beams = [(score, node) for score, node, _ in reached]
    kept = sorted(range(len(found)), key=lambda node: -found[node][0])[:nodes]  # a parent is no less likely than its children
    return {found[node][1:]: node for node in kept}


def count_accepted(tree: Tree, coming: list[int]) -> int:
    node, count = -1, 0
    for token in coming:
        if (node, token) not in tree:
            break
        node, count = tree[node, token], count + 1
    return count


def measure(model: FrameTiny, task: str, samples: int) -> dict[tuple[int, int, int], float]:
    """Output tokens a step, by shape."""
    steps, tokens = dict.fromkeys(SHAPES, 0), 0
    for prompt in make_prompts(task, samples, seed=5):
        whole = list(prompt)
        for _ in range(OUTPUT[task]):
            whole.append(int(model.lm_head(model.hidden(torch.tensor([whole]))[0][:, -1]).argmax()))
        hidden = model.hidden(torch.tensor([whole]))[0]
        tokens += OUTPUT[task] - 1
        for shape in SHAPES:
            known = len(prompt) + 1
            while known < len(whole):
                known += 1 + count_accepted(draft_tree(model, whole[:known], hidden, *shape), whole[known : len(whole) - 1])
                steps[shape] += 1
    return {shape: tokens / count for shape, count in steps.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["copy", "python"])
    parser.add_argument("--samples", type=int, default=4)
    args = parser.parse_args()
    model = load_model(find_model(EMBEDDED)).eval()
    torch.set_num_threads(1)
    with torch.inference_mode():
        for task in args.tasks:
            for (depth, width, nodes), rate in measure(model, task, args.samples).items():
                form = "chain" if width == 1 else f"tree of {depth} passes"
                print(f"{task:7} {nodes} tokens, {form}: {rate:.2f} tokens a step", flush=True)


if __name__ == "__main__":
    main()
