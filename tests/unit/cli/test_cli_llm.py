"""``edgeds generate`` and ``chat``, and ``eval``, ``bench`` and ``bundle create`` of language models."""

from __future__ import annotations

import io
import json
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llmmodels import write_llm

from edgeds.bundle import open_bundle
from edgeds.cli import chat
from edgeds.cli.main import main
from edgeds.pipelines.llm.pipeline import LlmPipeline
from edgeds.workshop.llmpackage import create_llm_bundle

pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llmcli")
    source = write_llm(folder / "model")
    return create_llm_bundle(source, out=folder / "llm.bundle", weights="int8", eviction=True, quiet=True)


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main([*map(str, arguments), "-q"])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def feed(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


def test_generate_prints_what_the_pipeline_says(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LlmPipeline.from_bundle(bundle, backend="cpu", threads=1) as llm:
        expected = llm.generate("hello", max_tokens=10)
    code, out, _ = run(capsys, "generate", bundle, "--prompt", "hello", "--max-tokens", 10)
    assert (code, out) == (0, expected.text + "\n")
    code, out, _ = run(capsys, "generate", bundle, "--prompt", "hello", "--max-tokens", 10, "--json", "--logprobs", 2)
    document = json.loads(out)
    assert code == 0
    assert document["text"] == expected.text
    assert document["finish_reason"] == expected.finish_reason
    assert (document["prompt_tokens"], document["completion_tokens"]) == (5, expected.completion_tokens)
    assert document["ttft_ms"] > 0
    assert len(document["logprobs"]) == document["completion_tokens"]
    assert len(document["logprobs"][0]["top_logprobs"]) == 2


def test_prompts_of_a_file_are_answered_in_their_order(
    bundle: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"text number {n}" for n in range(70)]
    (tmp_path / "p.txt").write_text("\n\n".join(texts))
    code, out, _ = run(capsys, "generate", bundle, "--input", tmp_path / "p.txt", "--max-tokens", 2, "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [line["index"] for line in lines] == list(range(70))
    feed(monkeypatch, "\n".join(texts[:3]).encode())
    code, out, _ = run(capsys, "generate", bundle, "--input", "-", "--max-tokens", 2, "--json")
    assert [json.loads(line)["text"] for line in out.splitlines()] == [line["text"] for line in lines[:3]]
    feed(monkeypatch, "\n".join(texts[:3]).encode())
    code, out, _ = run(capsys, "generate", bundle, "--input", "-", "--whole", "--max-tokens", 2, "--json")
    assert json.loads(out)["prompt_tokens"] == len("\n".join(texts[:3])) - 2  # the toy has no token for a line end


def test_seeds_stops_and_grammars_reach_the_sampler(
    bundle: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said = [
        run(capsys, "generate", bundle, "--prompt", "a", "--temperature", 2, "--seed", seed, "--max-tokens", 20)[1]
        for seed in (1, 1, 2)
    ]
    assert said[0] == said[1] != said[2]
    code, out, _ = run(capsys, "generate", bundle, "--prompt", "a", "--regex", "[0-9]{4}", "--json")
    document = json.loads(out)
    assert code == 0
    assert len(document["text"]) == 4
    assert document["text"].isdigit()
    whole = run(capsys, "generate", bundle, "--prompt", "a", "--max-tokens", 12, "--ignore-eos", "--json")[1]
    text = json.loads(whole)["text"]
    stopped = json.loads(
        run(capsys, "generate", bundle, "--prompt", "a", "--max-tokens", 12, "--stop", text[3], "--json")[1]
    )
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == text[: text.index(text[3])]


def test_chat_keeps_the_conversation(
    bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(monkeypatch, b"hello\n\nagain\n/undo\nagain\n/reset\nhello\n/exit\nnever\n")
    code, out, _ = run(capsys, "chat", bundle, "--max-tokens", 5, "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert len(lines) == 4
    assert lines[1]["prompt_tokens"] > lines[0]["prompt_tokens"]
    assert lines[2]["prompt_tokens"] == lines[1]["prompt_tokens"]
    assert lines[2]["text"] == lines[1]["text"]
    assert lines[3]["text"] == lines[0]["text"]
    feed(monkeypatch, b"hello\n")
    code, out, _ = run(capsys, "chat", bundle, "--max-tokens", 5)
    assert (code, out) == (0, lines[0]["text"] + "\n")
    feed(monkeypatch, b"hello\n")
    code, out, _ = run(capsys, "chat", bundle, "--max-tokens", 5, "--system", "be kind", "--json")
    assert json.loads(out)["prompt_tokens"] > lines[0]["prompt_tokens"]


class Keyboard(io.StringIO):
    """A terminal on which lines are typed; ``None`` is Ctrl-D."""

    def isatty(self) -> bool:
        return True


def test_at_a_terminal_ctrl_c_stops_the_answer_only(
    bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Keyboard("go on\nagain\n"))
    said: list[str] = []

    def emit(text: str, *, end: str = "\n") -> None:
        said.append(text + end)
        if len(said) == 4:  # a greeting, the prompt, then text of the first answer
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(chat, "emit_text", emit)
    code, _, _ = run(capsys, "chat", bundle, "--max-tokens", 60, "--ignore-eos")
    assert code == 0
    assert "".join(said).count("[stopped]") == 1
    assert said.count("> ") == 3
    assert said.index(" [stopped]\n") < len(said) - 60, "the second answer came whole"


def test_at_a_terminal_a_mistake_does_not_end_the_conversation(
    bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Keyboard("x" * 200 + "\nhi\n"))
    code, out, _ = run(capsys, "chat", bundle, "--max-tokens", 4)
    assert code == 0
    assert "the model's context holds 128" in out
    assert out.count("\n> ") == 3


def test_eval_measures_perplexity_and_holds_a_limit(
    bundle: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "t.txt").write_text("the quick brown fox jumps over the lazy dog. " * 5)
    arguments = ("eval", bundle, "--data", tmp_path / "t.txt", "--tokens", 64, "--window", 32)
    code, out, _ = run(capsys, *arguments, "--json")
    document = json.loads(out)
    assert (code, document["metric"], document["samples"]) == (0, "perplexity", 62)
    code, out, err = run(capsys, *arguments, "--task", "perplexity")
    assert (code, err) == (0, "")
    assert f"{document['perplexity']:.3f}" in out
    code, _, err = run(capsys, *arguments, "--max-value", 1.01)
    assert code == 1
    assert "above --max-value 1.01" in err
    assert run(capsys, *arguments, "--kv-budget", 16)[0] == 0
    for flag, value in (("--min-map", 0.5), ("--split", "val"), ("--limit", 3)):
        code, _, err = run(capsys, *arguments, flag, value)
        assert code == 2
        assert flag in err


def test_bench_reports_tokens_and_the_common_keys(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("bench", bundle, "--seconds", 0.3, "--warmup", 0.1, "--prompt-tokens", 12, "--output-tokens", 4)
    code, out, _ = run(capsys, *arguments, "--concurrency", 2, "--json")
    document = json.loads(out)
    assert code == 0
    assert {"fps", "latency_p50_ms", "latency_p95_ms", "latency_p99_ms", "power_w", "backend"} <= set(document)
    assert document["tokens_per_s"] > 0
    assert document["ttft_ms"]["p50"] > 0
    assert document["load"]["concurrency"] == 2
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    assert "between tokens ms" in out
    assert "power: " in out
    code, _, err = run(capsys, *arguments, "--sizes", "32x32")
    assert code == 2
    assert "--sizes" in err


def test_bundle_create_packs_a_checkpoint(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = write_llm(tmp_path / "model")
    out = tmp_path / "out.bundle"
    code, printed, err = run(
        capsys,
        "bundle",
        "create",
        source,
        "--task",
        "generate",
        "--weights",
        "int4",
        "--kv",
        "int8",
        "--out",
        out,
        "--json",
    )
    assert code == 0, err
    assert json.loads(printed)
    with open_bundle(out) as bundle:
        assert (bundle.manifest.task, bundle.manifest.precision) == ("generate", "int4")
    for arguments, words in (
        (("--size", "640"), "--size"),
        (("--max-length", "9"), "--max-length"),
        (("--weights", "int8", "--calib", "x"), "--calib is for --weights int4"),
    ):
        code, _, err = run(
            capsys, "bundle", "create", source, "--task", "generate", "--out", tmp_path / "no", *arguments
        )
        assert code == 2, err
        assert words in err
    code, _, err = run(
        capsys, "bundle", "create", tmp_path / "m.onnx", "--task", "detect", "--kv", "int8", "--out", tmp_path / "no"
    )
    assert code == 2
    assert "--kv is for language models" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--prompt TEXT"),
        (("--prompt", "a", "--input", "x"), "one of them"),
        (("--prompt", ""), "the prompt is empty"),
        (("--prompt", "a" * 300), "the model's context holds 128"),
        (("--prompt", "a", "--max-tokens", "100000"), "ask for at most 127 tokens"),
        (("--prompt", "a", "--max-tokens", "0"), "max_tokens"),
        (("--prompt", "a", "--temperature", "-1"), "temperature"),
        (("--prompt", "a", "--system", "x"), "add --chat"),
        (("--prompt", "a", "--regex", "("), "regex"),
        (("--prompt", "a", "--json-schema", "missing.json"), "missing.json"),
        (("--input", "missing.txt"), "missing.txt"),
        (("--prompt", "a", "--precision", "int4"), "precision 'int4'"),
        (("--prompt", "a", "--max-batch", "0"), "max_batch"),
        (("--prompt", "a", "--draft", "missing.bundle"), "missing.bundle"),
    ],
)
def test_mistakes_are_one_sentence(
    bundle: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    code, out, err = run(capsys, "generate", bundle, *arguments)
    assert code in (1, 2)
    assert out == ""
    assert words in err
    assert err.count("\n") == 1


def test_other_bundles_and_models_without_a_template_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_llm(tmp_path / "model")
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    plain = create_llm_bundle(source, out=tmp_path / "plain", weights="int8", quiet=True)
    feed(monkeypatch, b"hi\n")
    code, _, err = run(capsys, "chat", plain)
    assert code == 2
    assert "no chat template" in err
    manifest = json.loads((plain / "bundle.json").read_text())
    (plain / "bundle.json").write_text(json.dumps({**manifest, "task": "detect"}))
    code, _, err = run(capsys, "generate", plain, "--prompt", "a")
    assert code != 0
    assert "generate" in err


def test_a_line_that_is_no_text_is_named(
    bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for errors in ("strict", "surrogateescape"):
        stream = io.TextIOWrapper(io.BytesIO(b"\xff\xfe\n"), encoding="utf-8", errors=errors)
        monkeypatch.setattr(sys, "stdin", stream)
        code, _, err = run(capsys, "chat", bundle)
        assert code == 1
        assert "standard input: the line is not UTF-8 text" in err


def test_a_closed_standard_input_is_an_end(
    bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert run(capsys, "chat", bundle)[0] == 0
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False, readline=lambda: ""))
    assert run(capsys, "chat", bundle)[:2] == (0, "")
