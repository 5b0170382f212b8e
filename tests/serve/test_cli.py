"""The command line against a scripted engine: what is printed, what is refused, and how."""

import io
import json
import subprocess
import sys

import pytest

from sejax import methods
from sejax.serve import calibrate, cli, console
from tests.models.tiny import tiny_model
from tests.serve.fake import FakeEngine, FakeTokenizer


@pytest.fixture
def engine(monkeypatch):
    made = FakeEngine()
    monkeypatch.setattr(console, "engine_of", lambda args, rows=None: made)
    yield made
    made.close(0.0)


def run(capsys, *arguments, code=0):
    try:
        assert cli.main(arguments) == code
    except SystemExit as ended:
        assert ended.code == code
    shown = capsys.readouterr()
    return shown.out if code == 0 else shown.err


def test_generate_streams_text(engine, capsys):
    assert run(capsys, "generate", "Say it.") == "hello world\n"
    prompt, sampling = engine.submitted[0]
    assert prompt.text == "Say it." and sampling.max_tokens is None and sampling.temperature == 0


def test_generate_many_in_order_with_the_template(engine, capsys):
    out = run(capsys, "generate", "--chat", "a", "b", "--max-tokens", "1", "--stop", "x", "--top-p", "0.5", "--temperature", "1")
    assert out == "--- 1\nhello\n--- 2\nhello\n"
    assert engine.submitted[1][0].text == "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    assert (engine.submitted[0][1].stop, engine.submitted[0][1].top_p) == (("x",), 0.5)


def test_generate_json(engine, capsys):
    record = json.loads(run(capsys, "generate", "--json", "hi"))
    assert record["text"] == "hello world" and record["finish"] == "stop" and record["usage"]["prompt"] == 2
    assert record["seconds"]["total"] >= record["seconds"]["first_token"] > 0


def test_generate_reads_standard_input(engine, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    run(capsys, "generate", "-")
    assert engine.submitted[0][0].text == "from a pipe"


def test_chat(engine, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n\n/help\nAgain\n/clear\nNew\n/exit\nnot read\n"))
    out = run(capsys, "chat", "--system", "Be brief.")
    texts = [prompt.text for prompt, _ in engine.submitted]
    start = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    assert len(texts) == 3 and all(text.startswith(start) for text in texts)
    assert "Hi<|im_end|>\n<|im_start|>assistant\nhello world<|im_end|>\n<|im_start|>user\nAgain" in texts[1]
    assert "Again" not in texts[2] and "New" in texts[2]
    assert out.count("hello world") == 3 and out.count("tokens kept") == 3 and "first token" in out and "tokens/s" in out


def test_chat_goes_on_after_a_refusal(engine, capsys, monkeypatch):
    engine.queue = 0
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
    assert "waiting already" in run(capsys, "chat")


def test_an_interrupt_ends_the_answer_not_the_conversation(engine, capsys, monkeypatch):
    pieces, real = [], print

    def interrupting(*args, **kwargs):
        real(*args, **kwargs)
        pieces.append(args)
        if len(pieces) == 1:
            raise KeyboardInterrupt

    engine.reply, engine.step = engine.model.tokenizer.encode("hello" * 50), 0.01
    monkeypatch.setattr(console, "print", interrupting, raising=False)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\nMore\n"))
    out = run(capsys, "chat")
    assert "| stopped" in out and len(engine.submitted) == 2


def test_serve_passes_its_flags(engine, monkeypatch):
    from sejax.serve import http

    seen = {}
    monkeypatch.setattr(http, "serve", lambda *args, **kwargs: seen.update(args=args, **kwargs))
    flags = ["--port", "0", "--host", "::", "--api-key", "k", "--served-model-name", "a", "b", "--sse-keep-alive-interval", "2"]
    assert cli.main(["serve", *flags]) == 0
    assert seen["args"][:3] == (engine, "::", 0) and seen["log_level"] == "info"
    assert seen["args"][3].aliases == ("b",) and seen["args"][3].api_key == "k" and seen["args"][3].ping == 2.0


def test_methods(capsys):
    out = run(capsys, "methods")
    for name in console.methods.names():
        told = console.methods.describe(name)
        assert name in out and told["family"] in out
        whole = run(capsys, "methods", name)
        assert told["summary"] in whole and all(key in whole for key in told["defaults"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["generate", "x", "--max-tokens", "0"], "max_tokens must be a whole number of at least 1"),
        (["generate", "x", "--temperature", "nan"], "temperature must be a number"),
        (["generate", ""], "at least one token"),
        (["methods", "snapkb"], "Did you mean 'snapkv'?"),
        (["pull", "smollm2"], "Did you mean 'smollm2-135m'?"),
        (["generate", "x", "--max-toekns", "1"], "unknown argument --max-toekns (did you mean --max-tokens?)"),
        (["serve", "--port", "99999"], "port between 0 and 65535"),
        (["serve", "--slots", "0"], "whole number of at least 1"),
        (["calibrate", "snapkv", "-o", "x"], "snapkv needs no calibration"),
        (["calibrate", "omnikv", "-o", "x", "--observrs", "3"], "no option --observrs. Did you mean 'observers'?"),
        (["calibrate", "omnikv", "-o", "x", "--observers"], "'--observers' is not an option with a value"),
        (["calibrate", "omnikv", "-o", "x", "3"], "'3' is not an option with a value"),
        (["calibrate", "omnikv", "-o", "/nowhere/x"], "its folder does not exist"),
        (["calibrate", "omnikv"], "--output"),
        (["serve", "--sse-keep-alive-interval", "nan"], "seconds above 0"),
        (["srve"], "invalid choice: 'srve'"),
        ([], "COMMAND"),
    ],
)
def test_mistakes_are_one_sentence(engine, capsys, arguments, sentence):
    err = run(capsys, *arguments, code=2)
    assert sentence in err and err.count("\n") == 1


def test_calibrate_writes_what_a_method_measured(capsys, monkeypatch, tmp_path):
    model = tiny_model(layers=3, vocab=271).replace(tokenizer=FakeTokenizer())
    monkeypatch.setattr(calibrate, "load", lambda source, dtype, progress: model)
    monkeypatch.setattr(FakeTokenizer, "encode", lambda self, text, bos=False: list(text.encode()))
    text, file = tmp_path / "text.txt", tmp_path / "found.json"
    text.write_text("A wheel turns and turns, and what it ground is flour. " * 4)
    out = run(capsys, "calibrate", "omnikv", "--observers", "2", "--wait=0", "--length", "100", "--texts", str(text), "-o", str(file))
    told = json.loads(file.read_text())
    assert told["config"] == model.config.digest and len(told["observers"]) == 2 and told["tokens"] == 200 and str(told["observers"]) in out
    assert dict(methods.method(f"omnikv:observers={file}").fitted(model).arguments)["observers"] == tuple(told["observers"])
    monkeypatch.setattr(calibrate, "documentation", lambda name: name)
    run(capsys, "calibrate", "omnikv", "--dense", "0", "--length", "64", "-o", str(file))  # without texts: the methods' documentation
    assert json.loads(file.read_text())["observers"] == [0, 1, 2] and "none has 31" in run(
        capsys, "calibrate", "omnikv", "--length", "30", "-o", str(file), code=2
    )


@pytest.mark.parametrize("spec", ["snapkb:budget=1", "snapkv:bugdet=1", "snapkv:budget=x", "snapkv:budget=0"])
def test_a_wrong_method_is_told_before_the_model_is_loaded(capsys, spec):
    err = run(capsys, "generate", "x", "--model", "/nowhere", "--method", spec, code=2)
    assert "nowhere" not in err and ("snapkv" in err or "budget" in err)


def test_an_engine_that_dies_is_told(engine, capsys):
    engine.crash = "out of memory"
    assert "out of memory" in run(capsys, "generate", "x", code=2)


def test_pull_lists(capsys):
    assert "smollm2-135m: SmolLM2 135M Instruct" in run(capsys, "pull")


def test_help_needs_no_jax():
    code = "import sys; from sejax.serve import cli; cli.parser().format_help(); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
