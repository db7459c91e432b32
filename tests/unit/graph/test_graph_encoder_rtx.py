"""Real TensorRT-RTX parses and builds the encoders of issue 6: float32, float16, and INT8 with a float16 rest.

Needs the TensorRT-RTX wheels (no GPU); built for SM86, of Orin's generation, with batch and length open.
"""

import pytest
from checkpoints import write_encoder
from test_graph_encoder import batch
from test_graph_precision_rtx import build_plan, rtx  # noqa: F401

from edgeds.compress.calibset import open_calibration
from edgeds.compress.quantize import quantize_model
from edgeds.engines.layer_log import node_precisions, read_layers
from edgeds.graph.encoder import build_encoder
from edgeds.graph.io import input_specs, load_model, save_model
from edgeds.graph.precision import convert_float16

pytestmark = [pytest.mark.tensorrt, pytest.mark.slow]
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "max_position_embeddings": 64}


def open_shapes(model):
    return {spec.name: ((1, 1), (4, 16), (8, 64)) for spec in input_specs(model)}


@pytest.mark.parametrize("pooling", ["mean", "max"])
def test_float32_and_float16_build(rtx, tmp_path, pooling):  # noqa: F811
    write_encoder(tmp_path / "m", normalize=True, **SIZES)
    model = build_encoder(tmp_path / "m", pooling=pooling)
    for name, variant in (("float", model), ("half", convert_float16(model).model)):
        _, types, log = build_plan(rtx, save_model(variant, tmp_path / f"{name}.onnx"), open_shapes(model))
        assert types == ["FLOAT"]
        assert not [text for _, text in log if "layernorm" in text.lower() and "overflow" in text.lower()]


@pytest.mark.parametrize(("family", "head"), [("roberta", "tag"), ("distilbert", "answer"), ("bert", "classify")])
def test_other_heads_build(rtx, tmp_path, family, head):  # noqa: F811
    write_encoder(tmp_path / "m", family, head=head)
    half = convert_float16(build_encoder(tmp_path / "m")).model
    shapes = {spec.name: ((1, 1), (4, 8), (8, 18)) for spec in input_specs(half)}
    build_plan(rtx, save_model(half, tmp_path / "m.onnx"), shapes)


def test_products_run_in_int8(rtx, tmp_path):  # noqa: F811
    """B65: the layers that were to be INT8 are, by the builder's own account."""
    config, _ = write_encoder(tmp_path / "m", normalize=True, **SIZES)
    path = save_model(build_encoder(tmp_path / "m"), tmp_path / "float.onnx")
    model = load_model(path)
    names = ("input_ids", "attention_mask", "token_type_ids")
    feeds = [dict(zip(names, batch(config, seed=seed, lengths=(12 + seed,)), strict=True)) for seed in range(4)]
    calibration = open_calibration(feeds, model_inputs=input_specs(model))
    quantize_model(path, calibration, out=tmp_path / "int8.onnx", threads=1, quiet=True)
    mixed = convert_float16(load_model(tmp_path / "int8.onnx")).model
    _, _, log = build_plan(rtx, save_model(mixed, tmp_path / "mixed.onnx"), open_shapes(model))
    precisions = node_precisions(read_layers(log))
    products = [node.name for node in mixed.graph.node if node.op_type == "MatMul"]
    in_int8 = [name for name in products if "Int8" in precisions.get(name, "").split("/")]
    assert len(products) == 16
    assert len(in_int8) >= 12, precisions
