"""The scripts in benchmarks/ run end to end on a tiny model, judge their limits and end with one JSON object."""

import argparse
import importlib
import json
from pathlib import Path
from types import ModuleType

import cv2
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import edgeds
from edgeds.errors import EdgedsError, SpecError

ROOT = Path(edgeds.__file__).parent.parent
NAMES = ("accuracy", "calibration", "cpu_speed", "memory_soak", "recover", "session")

if not (ROOT / "benchmarks").is_dir():
    pytest.skip("the benchmarks come with the repository, not with the wheel", allow_module_level=True)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> object:
    """Imports a benchmark module the way ``python -m benchmarks.NAME`` finds it."""
    monkeypatch.syspath_prepend(str(ROOT))

    def load(name: str) -> ModuleType:
        return importlib.import_module(f"benchmarks.{name}")

    return load


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two convolutions with free batch, height and width."""
    random = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(random.normal(0, 0.2, shape).astype(np.float32), name)
        for name, shape in (("w0", (8, 3, 3, 3)), ("w1", (4, 8, 3, 3)))
    ]
    nodes = [
        helper.make_node("Conv", ["images", "w0"], ["a"], "conv0", pads=[1] * 4),
        helper.make_node("Relu", ["a"], ["b"], "relu"),
        helper.make_node("Conv", ["b", "w1"], ["output0"], "conv1", pads=[1] * 4),
    ]
    image = helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, "height", "width"])
    out = helper.make_tensor_value_info("output0", TensorProto.FLOAT, ["batch", 4, "height", "width"])
    graph = helper.make_graph(nodes, "tiny", [image], [out], weights)
    path = tmp_path_factory.mktemp("model") / "tiny.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A YOLO folder with a train half of eight noise pictures."""
    root = tmp_path_factory.mktemp("data")
    folder = root / "images" / "train2017"
    folder.mkdir(parents=True)
    random = np.random.default_rng(1)
    for index in range(8):
        pixels = random.integers(0, 256, (48, 64, 3), dtype=np.uint8)
        assert cv2.imwrite(str(folder / f"{index}.png"), pixels)
    return root


def run(module: ModuleType, arguments: list[object], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict, str]:
    code = module.main([*map(str, arguments), "--quiet"])
    out = capsys.readouterr().out
    return code, json.loads(out.strip().splitlines()[-1]), out


@pytest.mark.parametrize("name", NAMES)
def test_help_names_the_limits_switch_and_wrong_arguments_exit_with_2(
    bench, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module = bench(name)
    for arguments, code in ((["--help"], 0), (["--threads", "0"], 2), (["--no-such"], 2)):
        with pytest.raises(SystemExit) as stop:
            module.parse(arguments)
        assert stop.value.code == code
    assert "--no-limits" in capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_model_is_named(bench, name: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"gone\.onnx: no such file"):
        bench(name).main(["--data", str(tmp_path), "--model", str(tmp_path / "gone.onnx"), "--quiet"])


def test_limits_judge_both_sides_and_nan_is_missed(bench) -> None:
    limit = bench("common").Limit
    assert limit(name="a", value=1.6, limit=1.6).ok
    assert not limit(name="a", value=1.61, limit=1.6).ok
    assert limit(name="a", value=1.2, limit=1.15, at_most=False).ok
    assert not limit(name="a", value=1.1, limit=1.15, at_most=False).ok
    for at_most in (True, False):
        assert not limit(name="a", value=float("nan"), limit=1.0, at_most=at_most).ok
    assert limit(name="speed", value=1.0, limit=1.15, at_most=False).line().startswith("MISSED")


@pytest.mark.parametrize(("value", "no_limits", "code"), [(1.0, False, 0), (3.0, False, 1), (3.0, True, 0)])
def test_a_missed_limit_is_exit_code_1_unless_only_reporting(
    bench, value: float, no_limits: bool, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    common = bench("common")
    arguments = argparse.Namespace(threads=2, no_limits=no_limits)
    limits = [common.Limit(name="x", value=value, limit=2.0)]
    found = common.finish(
        "demo", header=["what", "x"], rows=[["a", value]], limits=limits, arguments=arguments, figures={"k": 1}
    )
    last = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert found == code
    assert last["ok"] is (value <= 2)
    assert last["k"] == 1
    assert {"device", "date", "threads", "versions"} <= last.keys()


def test_calls_are_measured_in_turns_and_the_first_run_is_not_counted(bench) -> None:
    order: list[str] = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    times = bench("common").measure_in_turns(calls, rounds=2, what="x", quiet=True)
    assert order == ["a", "b", "a", "b", "b", "a"]
    assert all(item.wall_s >= 0 for item in times.values())


def test_a_side_that_fails_is_an_error_with_its_exit_code(bench) -> None:
    with pytest.raises(EdgedsError, match="exit code 2"):
        bench("common").run_side("memory_soak", ["--side", "engine", "--runs", "0"], quiet=True)


def test_the_calibration_benchmark_compares_time_and_memory_with_the_peer(
    bench, model: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--data", data, "--model", model, "--images", 4, "--size", 64, "--rounds", 1, "--few", 2, "--many", 4]
    code, last, out = run(bench("calibration"), [*arguments, "--no-limits"], capsys)
    assert code == 0
    assert set(last["times"]) == {"float", "ranges", "quantize"}
    assert [item["samples"] for item in last["memory"].values()] == [4, 2, 4, 4]
    assert all(item["peak_mib"] >= item["start_mib"] > 1 for item in last["memory"].values())
    assert "x float wall" in out


def test_the_speed_benchmark_times_three_forms_at_each_size(
    bench, model: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--data", data, "--model", model, "--images", 4, "--sizes", 32, 64, "--rounds", 2, "--no-limits"]
    code, last, _ = run(bench("cpu_speed"), arguments, capsys)
    assert code == 0
    assert [(row["px"], row["form"]) for row in last["rows"]] == [
        (size, form) for size in (32, 64) for form in ("float", "INT8, CPU form", "INT8, TensorRT form")
    ]


def test_the_session_benchmark_forms_full_batches_and_measures_waiting(
    bench, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", model, "--sizes", "64x64", "32x64", "--each", 4, "--batch", 2, "--rounds", 3]
    code, last, _ = run(bench("session"), [*arguments, "--arrivals", 20, "--no-limits"], capsys)
    assert code == 0
    assert 1 <= last["mean_batch_rows"] <= 2
    assert 0 <= last["queue_p50_ms"] <= last["queue_p99_ms"]
    assert set(last["throughput"]) == {"wall", "CPU"}


def test_ideal_batches_hold_every_request_once_and_one_shape_each(bench) -> None:
    from edgeds.specs import Resolution

    session = bench("session")
    requests = session.make_requests("images", [Resolution(32, 64), Resolution(64, 32)], each=5)
    batches = session.group_ideally(requests, max_batch=4)
    assert sorted(batch["images"].shape[0] for batch in batches) == [1, 1, 4, 4]
    rows = np.concatenate([batch["images"].reshape(batch["images"].shape[0], -1) for batch in batches])
    assert len(np.unique(rows, axis=0)) == 10


def test_the_soak_measures_engine_and_peer_for_few_and_many_sizes_b74_b127(
    bench, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", model, "--runs", 12, "--largest", 160, "--few", 2, "--many", 6, "--no-limits"]
    code, last, _ = run(bench("memory_soak"), arguments, capsys)
    assert code == 0
    assert [row["sizes"] for row in last["rows"]] == [2, 6, 2, 6]
    assert all(row["peak MiB"] > 1 for row in last["rows"])


def test_soak_sizes_are_distinct_and_both_sets_hold_the_largest(bench) -> None:
    soak = bench("memory_soak")
    few, many = (soak.choose_sizes(number, largest=320) for number in (3, 40))
    assert (len(set(few)), len(set(many))) == (3, 40)
    assert max(few) == max(many) == few[-1]


def test_a_leak_shows_in_the_slope_and_a_warm_up_does_not(bench) -> None:
    slope = bench("memory_soak").slope_kb
    assert slope([100 + 0.1 * run for run in range(300)]) == pytest.approx(0.1 * (1 << 20) / 1000, rel=1e-6)
    assert abs(slope([100 + min(run, 100) for run in range(300)])) < 1e-6


def test_synthetic_pictures_are_distinct_and_repeatable(bench) -> None:
    images = bench("calibration").SyntheticImages(6, 64)
    first, second = list(images), list(images)
    assert len({item.tobytes() for item in first}) == 6
    assert all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))


def test_int8_share_of_convolutions_counts_only_what_is_quantized(bench, model: Path, data: Path, tmp_path) -> None:
    forms = bench("forms")
    images = forms.open_images(model, forms.train_images(data), size=64, limit=2)
    files, _ = forms.quantize_forms(model, images, tmp_path, quiet=True)
    share = bench("accuracy").conv_share
    assert share(files[forms.FLOAT], 64) == 0
    assert share(files[forms.TRT_INT8], 64) == 1


def test_the_recovery_benchmark_gives_a_curve_and_speed(
    bench, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "unit" / "workshop"))
    from tiny_yolo import write_labelled, write_tiny_yolo

    model, root = write_tiny_yolo(tmp_path / "tiny.onnx"), write_labelled(tmp_path / "data")
    sizes = ["--size", 64, "--minutes", 0.02, 0.02, "--samples", 2, "--rounds", 1, "--ratio", 0.3, "--threads", 1]
    code, last, out = run(bench("recover"), ["--data", root, "--model", model, *sizes, "--no-limits"], capsys)
    assert code == 0
    assert [row["what"] for row in last["rows"]] == ["dense", "pruned, re-solved", "trained", "trained"]
    assert [row["minutes"] for row in last["rows"]] == [0, 0, 0.02, 0.04]
    assert last["rows"][3]["params"] < last["rows"][0]["params"]
    assert last["cpu_speedup"] > 0
    assert last["predicted_speedup"] > 0
    assert "predicted speed-up on orin-nano-8gb@15W" in out


@pytest.fixture
def sentences(tmp_path: Path) -> Path:
    """A tiny encoder's folder with scored pairs in it."""
    from checkpoints import write_encoder
    from textmodels import VOCAB, write_tokenizer

    pytest.importorskip("tokenizers")
    folder = tmp_path / "encoder"
    write_encoder(folder, vocab_size=len(VOCAB))
    write_tokenizer(folder)
    words = ("john smith works at acme", "the movie is very good", "a bad movie !", "who is in paris ?", "running")
    rows = "\n".join(f"{a}\t{b}\t{float(a == b)}" for a in words for b in words)
    for half in ("dev", "test"):
        (folder / f"sts-{half}.csv").write_text(f"sentence1\tsentence2\tscore\n{rows}\n")
    return folder


def test_the_text_benchmark_measures_speed_accuracy_and_memory(
    bench, sentences: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (sentences / "long.txt").write_text("the good movie in paris " * 8 + "\n")
    arguments = ["--data", sentences, "--model", sentences, "--paragraphs", sentences / "long.txt", "--texts", 24]
    code, last, _ = run(bench("bert"), [*arguments, "--rounds", 1, "--soak", 3000, "--no-limits"], capsys)
    assert code == 0
    assert [row["way"] for row in last["rows"]][-1] == "edgeds INT8"
    assert all(row["texts/s"] > 0 for row in last["rows"])
    assert len(last["resident_mib"]) == 3


def test_the_text_accuracy_benchmark_compares_forms_and_the_peer(
    bench, sentences: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ["--data", sentences / "sts-test.csv", "--calib", sentences / "sts-dev.csv"]
    code, last, _ = run(bench("text_accuracy"), [*data, "--model", sentences, "--no-limits"], capsys)
    assert code == 0
    assert last["rows"][0]["what"] == "float"
    assert any(row["what"].endswith("autopilot") for row in last["rows"])
    assert any(row["what"].startswith("onnxruntime") for row in last["rows"])
    assert all(row["share"] > 0.5 for row in last["rows"][1:])


@pytest.fixture
def language(tmp_path: Path) -> tuple[Path, Path]:
    """A tiny language model and a text."""
    from llmmodels import write_llm

    pytest.importorskip("tokenizers")
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog.\n" * 40)
    return write_llm(tmp_path / "llm"), text


def test_the_language_model_benchmark_measures_pace_sharing_guesses_and_paging(
    bench, language: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model, text = language
    sizes = ["--prompt", 16, "--output", 8, "--rounds", 2, "--seconds", 0.3, "--threads", 1]
    code, last, _ = run(bench("llm"), ["--text", text, "--model", model, *sizes, "--no-limits"], capsys)
    assert code == 0
    assert set(last["paces"]) == {"edgeds INT4", "edgeds float"}
    assert last["guesses"]["same"] == 1
    assert last["prefix"]["second_ms"] > 0
    assert all(value > 0 for value in last["paging"].values())
    assert len(last["limits"]) == 5, "peers that are not there have no limits"


def test_the_language_model_benchmark_names_a_peer_that_is_not_there(
    bench, language: tuple[Path, Path], tmp_path: Path
) -> None:
    model, _ = language
    peers = bench("llm_peers")
    how = {"threads": 1, "prompt": 2, "output": 2, "rounds": 1}
    with pytest.raises(EdgedsError, match="peer"):
        peers.run_transformers(tmp_path / "python", model, **how)
    with pytest.raises(EdgedsError, match="peer node"):
        peers.run_llama(tmp_path, model, **how)


def test_the_language_model_accuracy_benchmark_compares_weights_cache_and_eviction(
    bench, language: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model, text = language
    sizes = ["--tokens", 128, "--long", 64, "--long-tokens", 128, "--samples", 2, "--threads", 1]
    code, last, _ = run(bench("llm_accuracy"), ["--text", text, "--model", model, *sizes, "--no-limits"], capsys)
    assert code == 0
    assert [row["what"] for row in last["rows"]][:4] == ["float", "INT8 KV", "INT8 weights", "INT4 weights"]
    assert all(row["perplexity"] > 1 for row in last["rows"])
    assert len(last["limits"]) == 4


@pytest.mark.zoo
@pytest.mark.slow
def test_the_accuracy_benchmark_measures_map_of_real_weights(
    bench, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from edgeds.zoo import fetch_photos

    root = tmp_path / "set"
    for half in ("train2017", "val2017"):
        for folder in ("images", "labels"):
            (root / folder / half).mkdir(parents=True)
        for path in fetch_photos(quiet=True)[:2]:
            (root / "images" / half / path.name).write_bytes(path.read_bytes())
            (root / "labels" / half / f"{path.stem}.txt").write_text("0 0.5 0.5 0.5 0.5\n", encoding="utf-8")
    arguments = ["--data", root, "--sizes", 320, "--methods", "--no-peer", "--no-limits"]
    code, last, _ = run(bench("accuracy"), arguments, capsys)
    assert code == 0
    assert [row["what"].split(",")[0] for row in last["rows"]] == ["float", "INT8", "INT8", "INT8"]
    assert last["rows"][1]["share"] > 0.9
    assert last["rows"][3]["what"].endswith("autopilot")
