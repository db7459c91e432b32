"""Static exports made dynamic, proven by running them; baked sizes refused."""

from __future__ import annotations

import numpy as np
import pytest
from graph_models import build, image, node, run, static_detector, strided_heads, value, weight

from edgeds.errors import ModelError
from edgeds.graph.dynamic import make_dynamic
from edgeds.graph.io import input_specs, output_specs


@pytest.mark.parametrize("reshape", [[1, 6, 64], [1, 6, -1], [1, -1, 64]])
def test_batch_and_size_become_dynamic(reshape):
    model = static_detector(reshape=reshape)
    before = model.SerializeToString()
    batch_only = make_dynamic(model, spatial=False)
    assert input_specs(batch_only)[0].shape == ("batch", 3, 64, 64)
    assert output_specs(batch_only)[0].shape == ("batch", 6, 64)
    pair = image(2, 3, 64, 64)
    singles = [run(model, {"images": pair[i : i + 1]})[0] for i in range(2)]
    np.testing.assert_allclose(run(batch_only, {"images": pair})[0], np.concatenate(singles), rtol=1e-5, atol=1e-6)
    assert model.SerializeToString() == before


def test_size_becomes_dynamic_where_the_graph_follows_it():
    dynamic = make_dynamic(static_detector(reshape=[1, 6, -1]))
    assert input_specs(dynamic)[0].shape == ("batch", 3, "height", "width")
    assert run(dynamic, {"images": image(3, 3, 32, 96)})[0].shape == (3, 6, 48)
    flattened = make_dynamic(static_detector())
    assert run(flattened, {"images": image(2, 3, 128, 64)})[0].shape == (2, 6, 128)


def test_stored_anchors_are_named_and_batch_alone_still_works():
    model = static_detector(size=160, anchors=True)
    with pytest.raises(ModelError, match=r"'grid'.*dynamic=True"):
        make_dynamic(model)
    assert input_specs(make_dynamic(model, spatial=False))[0].shape == ("batch", 3, 160, 160)


def test_small_anchor_tables_fail_when_tried():
    with pytest.raises(ModelError, match="dynamic=True"):
        make_dynamic(static_detector(anchors=True))


def test_image_size_as_a_factor_is_refused():
    model = static_detector(reshape=[1, 6, -1])
    model.graph.node[-1].output[0] = "unit"
    model.graph.node.append(node("Mul", ["unit", "side"], ["output0"], "to_pixels"))
    from onnx import numpy_helper

    model.graph.initializer.append(numpy_helper.from_array(np.float32(64), "side"))
    with pytest.raises(ModelError, match=r"'side'.*'to_pixels'"):
        make_dynamic(model)


def test_fixed_resize_sizes_become_factors():
    nodes = [
        node("Conv", ["x", "w"], ["c"], "conv"),
        node("Resize", ["c", "", "", "sizes"], ["y"], "up", mode="nearest"),
    ]
    weights = {"w": weight(4, 3, 1, 1), "sizes": np.array([1, 4, 64, 64])}
    model = build(nodes, [value("x", [1, 3, 32, 32])], [value("y", [1, 4, 64, 64])], weights)
    dynamic = make_dynamic(model)
    assert run(dynamic, {"x": image(2, 3, 8, 16)})[0].shape == (2, 4, 16, 32)


def test_batch_mixed_into_other_dims_is_refused():
    nodes = [
        node("Reshape", ["x", "heads"], ["h"], "split_heads"),
        node("ReduceSum", ["h", "axes"], ["y"], "mix", keepdims=0),
    ]
    weights = {"heads": np.array([2, 8]), "axes": np.array([0])}
    model = build(nodes, [value("x", [1, 16])], [value("y", [8])], weights)
    with pytest.raises(ModelError, match="dynamic=True"):
        make_dynamic(model)


def test_dynamic_models_pass_through():
    model = strided_heads()
    assert make_dynamic(model) == model
