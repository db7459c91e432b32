"""TensorRT calibration tables: the same ranges as Q/DQ, JSON and table, in both directions, and damaged files."""

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from compress_models import Net, image_feeds, quantize
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper

from edgeds.cli.main import main
from edgeds.compress.calibset import open_calibration
from edgeds.compress.quantize import quantize_model
from edgeds.compress.ranges import TensorRange, load_ranges
from edgeds.compress.trt_table import is_table, read_table, version_number, write_table
from edgeds.errors import CalibrationError, SpecError
from edgeds.graph.io import input_specs, load_model, save_model


def known(threshold, note=None):
    return TensorRange(threshold=threshold, minimum=-threshold, maximum=threshold, count=1, note=note)


def chain():
    net = Net(seed=3)
    x = net.conv(net.input("x", ["N", 3, 16, 16]), 3, 8)
    x = net.conv(x, 8, 8)
    net.output(net.conv(x, 8, 4, 1, act=None))
    return net.model()


def written(folder, **options):
    """The chain quantized with a table beside it: (report, INT8 model, table path)."""
    table = folder / "calib.table"
    report, int8 = quantize(folder, chain(), image_feeds(), table_out=table, **options)
    return report, int8, table


def qdq_scales(model):
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    return {
        node.input[0]: float(constants[node.input[1]]) for node in model.graph.node if node.op_type == "QuantizeLinear"
    }


@pytest.mark.parametrize("method", ["minmax", "percentile", "entropy", "mse"])
def test_qdq_json_and_table_hold_the_same_ranges(tmp_path, method):
    report, int8, table = written(tmp_path, method=method)
    scales, ranges = read_table(table).scales, load_ranges(Path(report.ranges))
    assert report.table == str(table)
    placed = qdq_scales(int8)
    assert placed
    for name, scale in placed.items():
        assert scales[name] == np.float32(scale)
    for name, one in ranges.tensors.items():
        assert scales[name] == np.float32(one.scale)


def test_importing_our_own_table_gives_the_same_model(tmp_path):
    report, int8, table = written(tmp_path)
    (tmp_path / "again").mkdir()
    again, imported = quantize(tmp_path / "again", chain(), image_feeds(), ranges_in=table)
    assert qdq_scales(imported) == qdq_scales(int8)
    assert again.method == "tensorrt-table"
    assert any("imported from" in note for note in again.notes)
    assert again.samples == report.samples


def test_imported_ranges_are_never_reused_as_measured_ones(tmp_path):
    _, _, table = written(tmp_path)
    for folder in ("b", "c"):
        (tmp_path / folder).mkdir()
    first, _ = quantize(tmp_path / "b", chain(), image_feeds(), ranges_in=table)
    second, _ = quantize(tmp_path / "c", chain(), image_feeds(), ranges_in=Path(first.ranges))
    assert second.method != "tensorrt-table"
    assert any("method tensorrt-table" in note for note in second.notes)


def test_tensors_that_the_table_lacks_are_measured_and_counted(tmp_path):
    _, int8, table = written(tmp_path)
    lines = table.read_text().splitlines()
    table.write_text("\n".join(lines[:2]) + "\n")
    (tmp_path / "again").mkdir()
    report, imported = quantize(tmp_path / "again", chain(), image_feeds(), ranges_in=table)
    assert any("has no range for" in note for note in report.notes)
    assert qdq_scales(imported) == qdq_scales(int8)


def test_a_table_of_another_model_is_refused(tmp_path):
    table = tmp_path / "other.table"
    write_table({"elsewhere": known(1.0)}, table)
    with pytest.raises(CalibrationError, match="none of its tensors"):
        quantize(tmp_path, chain(), image_feeds(), ranges_in=table)
    with pytest.raises(SpecError, match="auto"):
        quantize(tmp_path, chain(), image_feeds(), ranges_in=table, method="auto")


def test_a_table_as_tensorrt_writes_it_is_read(tmp_path):
    """Header and lines as in tables of TensorRT 7 to 10; colons, blanks and brackets in names; Windows line ends."""
    path = tmp_path / "CalibrationTable"
    path.write_bytes(
        b"TRT-7000-EntropyCalibration2\r\ndata: 3c008912\r\n"
        b"(Unnamed Layer* 3) [Shuffle]_output: 3C010204\r\nx:0: 3f800000\r\n"
    )
    table = read_table(path)
    assert (table.version, table.algorithm) == (7000, "EntropyCalibration2")
    assert table.scales["x:0"] == 1.0
    assert table.ranges()["(Unnamed Layer* 3) [Shuffle]_output"].threshold == pytest.approx(1.0, abs=1e-6)
    assert table.scales["data"] == struct.unpack(">f", bytes.fromhex("3c008912"))[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "line 1"),
        (b"TRT--X\n", "line 1"),
        (b"{}", "line 1"),
        (b"TRT-8601-EntropyCalibration2\n", "no tensors"),
        (b"TRT-8601-EntropyCalibration2\nx: 3f8000\n", "line 2"),
        (b"TRT-8601-EntropyCalibration2\nx 3f800000\n", "line 2"),
        (b"TRT-8601-EntropyCalibration2\n: 3f800000\n", "line 2"),
        (b"TRT-8601-EntropyCalibration2\nx: 7fc00000\n", "scale of 'x'"),
        (b"TRT-8601-EntropyCalibration2\nx: 00000000\n", "scale of 'x'"),
        (b"TRT-8601-EntropyCalibration2\nx: bf800000\n", "scale of 'x'"),
        (b"TRT-8601-EntropyCalibration2\nx: 7f800000\n", "scale of 'x'"),
        (b"TRT-8601-EntropyCalibration2\nx: 3f800000\nx: 3f800000\n", "line 3.*twice"),
        (b"TRT-8601-EntropyCalibration2\nx\xff: 3f800000\n", "not UTF-8"),
    ],
)
def test_damaged_tables_are_refused_by_line(tmp_path, text, says):
    path = tmp_path / "bad.table"
    path.write_bytes(text)
    with pytest.raises(CalibrationError, match=says):
        read_table(path)


def test_pipes_folders_and_missing_files_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "none"):
        assert not is_table(path)
        with pytest.raises(CalibrationError, match="cannot be read"):
            read_table(path)


NAMES = st.text(st.characters(exclude_categories=("Cc", "Cs")), min_size=1).filter(str.strip)


@given(st.dictionaries(NAMES, st.floats(1e-30, 1e30), min_size=1))
def test_any_ranges_survive_the_round_trip(tmp_path_factory, thresholds):
    path = tmp_path_factory.mktemp("t") / "t.table"
    assert write_table({name: known(value) for name, value in thresholds.items()}, path) == ()
    table = read_table(path)
    assert table.scales == {name: np.float32(value / 127) for name, value in thresholds.items()}


def test_extreme_and_unusable_ranges(tmp_path):
    path = tmp_path / "t.table"
    left_out = write_table({"nan": known(0.0, note="holds NaN"), "zero": known(0.0), "big": known(1e300)}, path)
    assert left_out == ("nan",)
    table = read_table(path)
    assert set(table.scales) == {"zero", "big"}
    assert np.isfinite(list(table.scales.values())).all()
    with pytest.raises(SpecError, match="line break"):
        write_table({"a\nb": known(1.0)}, path)


@pytest.mark.parametrize(("text", "number"), [("10.3", 100300), ("10.7.0", 100700), ("8.6.1", 8601), ("7", 7000)])
def test_version_numbers_are_those_of_tensorrt(text, number):
    assert version_number(text) == number


@pytest.mark.parametrize("text", ["", "ten", "10.3.0.26", "11.0", "0.1", "8.61", "1٣"])
def test_versions_without_tables_are_refused(text):
    with pytest.raises(SpecError):
        version_number(text)


def test_targets_are_checked_before_calibration(tmp_path):
    save_model(chain(), tmp_path / "m.onnx")
    feeds = [image_feeds()(seed) for seed in range(4)]
    calibration = open_calibration(feeds, model_inputs=input_specs(load_model(tmp_path / "m.onnx")))
    for table in (tmp_path / "m.onnx", tmp_path, tmp_path / "out.onnx"):
        with pytest.raises(SpecError):
            quantize_model(tmp_path / "m.onnx", calibration, out=tmp_path / "out.onnx", table_out=table, quiet=True)
    assert not (tmp_path / "out.onnx").exists()


def test_command_writes_and_imports_tables(tmp_path, capsys):
    save_model(chain(), tmp_path / "m.onnx")
    samples = [image_feeds()(seed) for seed in range(4)]
    np.savez(tmp_path / "s.npz", **{name: np.concatenate([feed[name] for feed in samples]) for name in samples[0]})
    common = ["quantize", str(tmp_path / "m.onnx"), "--calib", str(tmp_path / "s.npz"), "--json"]
    a, b, c, table = (str(tmp_path / name) for name in ("a.onnx", "b.onnx", "c.onnx", "a.table"))
    assert main([*common, "--out", a, "--table-out", table, "--table-version", "8.6.1"]) == 0
    assert json.loads(capsys.readouterr().out)["table"] == table
    assert Path(table).read_text().startswith("TRT-8601-EntropyCalibration2\n")
    assert main([*common, "--out", b, "--ranges", table]) == 0
    assert json.loads(capsys.readouterr().out)["method"] == "tensorrt-table"
    assert main([*common, "--out", c, "--table-out", c + ".table", "--table-version", "11.1"]) == 2
