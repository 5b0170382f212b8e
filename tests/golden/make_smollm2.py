"""Makes smollm2.json: greedy continuations by `transformers` on SmolLM2-135M-Instruct's dequantised weights.

Run by hand, after make_tokens.py, in an environment with torch, transformers, accelerate and gguf:
python tests/golden/make_smollm2.py FILE.gguf
`ties` lists the steps whose best two logits are closer than TIE: there another rounding may choose differently.
"""

import json
import pathlib
import sys

import torch
import transformers

HERE, STEPS, TIE = pathlib.Path(__file__).parent, 32, 1e-3


def continuation(model: torch.nn.Module, ids: list[int]) -> dict:
    cache, new, ties, step = transformers.DynamicCache(), [], [], torch.tensor([ids])
    for i in range(STEPS):
        with torch.no_grad():
            logits = model(step, past_key_values=cache).logits[0, -1]
        best = logits.topk(2)
        if float(best.values[0] - best.values[1]) < TIE:
            ties.append(i)
        new.append(int(best.indices[0]))
        step = torch.tensor([new[-1:]])
    return {"new": new, "ties": ties}


def main(path: str) -> None:
    file = pathlib.Path(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    prompts = json.loads((HERE / "tokens.json").read_text())["prompts"]
    for prompt in prompts:
        if "messages" in prompt:
            text = tokenizer.apply_chat_template(prompt["messages"], tokenize=False, add_generation_prompt=True)
            assert text == prompt["text"], (text, prompt["text"])
    found = [continuation(model, prompt["ids"]) for prompt in prompts]
    (HERE / "smollm2.json").write_text(json.dumps(found, separators=(",", ":")).replace('{"', '\n{"') + "\n")
    for answer in found:
        print(answer["ties"], repr(tokenizer.decode(answer["new"])))


if __name__ == "__main__":
    main(sys.argv[1])
