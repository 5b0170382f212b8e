"""Makes tokens.json: what llama.cpp makes of texts and chats, for SmolLM2-135M-Instruct's GGUF file.

Run by hand in an environment with xllamacpp (llama.cpp's server as a wheel): python tests/golden/make_tokens.py FILE.gguf
"""

import json
import pathlib
import sys
import urllib.request

import xllamacpp

TEXTS = [
    "Hello, world!",
    "  two leading spaces, a\ttab\nand\n\n\nthree newlines  ",
    "12345 + 67890 = 80235; 3.14159e-10",
    "def f(x):\n    return {k: v for k, v in x.items() if k != '_'}\n",
    "I'll say it's John's; they'd've gone, WE'RE here",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "no special: <|im_start and |im_end|> and <|endoftext|>",
    "Grüße aus München, où l'été s'achève à Zürich",
    "日本語のテキストと中文文本，한국어도 있습니다",
    "emoji 👋🏽 👩‍💻 🇩🇪 and symbols ∑ ∫ √ ≈",
    "العربية עברית हिन्दी ไทย",
    "a\u0301 combining, \u200b zero width, \u00a0 no-break",
    "CamelCaseIdentifier snake_case_identifier kebab-case SCREAMING_CASE",
    "https://example.com/a/b?c=d&e=%20#frag user@example.org",
    "x" * 40 + " " * 20 + "!" * 20,
    "Ⅷ ½ ² ٣ 1st 2nd",
]
RAW = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "The three laws of thermodynamics are:\n1.",
    "Q: What is 17 + 25?\nA:",
    "import numpy as np\n\nx = np.arange(10)\nprint(",
    "In 1969, Neil Armstrong became the first",
    "Water boils at",
    "La tour Eiffel est",
    "The quick brown fox jumps over the lazy dog. " * 12 + "The quick brown",
]
CHATS = [
    ["What is the capital of Japan?"],
    ["Write a haiku about autumn."],
    ["List three uses of a paperclip."],
    ["Explain gravity to a five-year-old."],
    ["Hi!", "Hello! How can I help you today?", "Tell me a joke about cats."],
    ["My name is Ada.", "Nice to meet you, Ada!", "What is my name?"],
    ["Translate 'good morning' to French."],
    ["Write a Python function that reverses a string."],
    ["Is a tomato a fruit or a vegetable?"],
    ["Summarise: The meeting moved from Tuesday to Thursday at 10 because the room was taken. Bring the budget."],
]


def main(path: str) -> None:
    parameters = xllamacpp.CommonParams()
    parameters.model.path, parameters.n_ctx, parameters.n_parallel, parameters.warmup = path, 256, 1, False
    server = xllamacpp.Server(parameters)

    def post(where: str, body: dict) -> dict:
        data, header = json.dumps(body).encode(), {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{server.listening_address}{where}", data, header)) as reply:
            return json.load(reply)

    def ids(text: str) -> list[int]:
        return post("/tokenize", {"content": text, "add_special": False, "parse_special": True})["tokens"]

    def chat(turns: list[str]) -> dict:
        messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
        text = post("/apply-template", {"messages": messages})["prompt"]
        return {"messages": messages, "text": text, "ids": ids(text)}

    found = {
        "texts": [{"text": t, "ids": ids(t)} for t in TEXTS],
        "prompts": [chat(turns) for turns in CHATS] + [{"text": t, "ids": ids(t)} for t in RAW],
    }
    target = pathlib.Path(__file__).with_name("tokens.json")
    target.write_text(json.dumps(found, ensure_ascii=True, separators=(",", ":")).replace('{"', '\n{"') + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
