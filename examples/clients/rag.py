"""Answers a question from documents: vectors find candidates, a reranker orders them, a chat model
reads the best.

    frame serve --model /models/bge-small-en-v1.5 --port 30001
    frame serve --model /models/bge-reranker-v2-m3 --port 30002
    frame serve --model /models/Qwen3-8B
    python rag.py notes/*.txt --question "When does the library open?"
"""

from __future__ import annotations

import argparse
from pathlib import Path

import httpx
import numpy as np
from openai import OpenAI


def embed(base_url: str, texts: list[str]) -> np.ndarray:
    """Vectors of length 1, float32 [texts, width]."""
    client = OpenAI(base_url=f"{base_url}/v1", api_key="none")
    return np.array([each.embedding for each in client.embeddings.create(model="", input=texts).data], np.float32)


def find_candidates(base_url: str, question: str, documents: list[str], count: int) -> list[str]:
    vectors = embed(base_url, [question, *documents])
    return [documents[i] for i in np.argsort(-(vectors[1:] @ vectors[0]))[:count]]


def rerank(base_url: str, question: str, documents: list[str], count: int) -> list[str]:
    """The best documents first. A server of an embedding model compares vectors, one of a
    cross-encoder reads question and document together."""
    body = {"query": question, "documents": documents, "top_n": count, "return_documents": False}
    reply = httpx.post(f"{base_url}/v1/rerank", json=body, timeout=60).raise_for_status().json()
    return [documents[each["index"]] for each in reply["results"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--question", required=True)
    parser.add_argument("--embed-url", default="http://127.0.0.1:30001")
    parser.add_argument("--rerank-url", default="http://127.0.0.1:30002")
    parser.add_argument("--chat-url", default="http://127.0.0.1:30000")
    parser.add_argument("--candidates", type=int, default=20)
    parser.add_argument("--kept", type=int, default=3)
    args = parser.parse_args()
    paragraphs = [text for file in args.files for part in file.read_text().split("\n\n") if (text := part.strip())]
    candidates = find_candidates(args.embed_url, args.question, paragraphs, args.candidates)
    best = rerank(args.rerank_url, args.question, candidates, args.kept)
    print("from:", *best, sep="\n- ")
    instructions = "Answer from these notes alone:\n" + "\n".join(best)
    messages = [{"role": "system", "content": instructions}, {"role": "user", "content": args.question}]
    client = OpenAI(base_url=f"{args.chat_url}/v1", api_key="none")
    for chunk in client.chat.completions.create(model="", messages=messages, max_tokens=256, stream=True):  # type: ignore[arg-type]
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
