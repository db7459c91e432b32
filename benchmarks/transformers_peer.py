"""transformers in float32, for benchmarks/llm_peers.py; run by an interpreter that has it:

    python transformers_peer.py MODEL.gguf THREADS PROMPT OUTPUT ROUNDS

Prints one JSON array: a round each.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    path = Path(sys.argv[1])
    threads, prompt, output, rounds = map(int, sys.argv[2:6])
    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    found = []
    with torch.inference_mode():
        for number in range(rounds):
            tokens = torch.tensor([[1000 + (i * 7919 + number * 104729) % 40000 for i in range(prompt)]])
            started = time.perf_counter()
            out = model(tokens, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
            first = time.perf_counter()
            for _ in range(output - 1):
                out = model(token, past_key_values=out.past_key_values, use_cache=True)
                token = out.logits[:, -1:].argmax(-1)
            seconds = time.perf_counter() - first
            found.append({"ttft_ms": 1e3 * (first - started), "decode_tokens_per_s": (output - 1) / seconds})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
