"""DLA rules: refused where there is none, expected split told before the build (report B61)."""

import pytest

from edgeds.engines.dla import check_dla, dla_support, split_layers
from edgeds.errors import BuildError, SpecError
from edgeds.specs import ShapeRange

AGX, NX16, NX8, NANO = "p3701-0005", "p3767-0000", "p3767-0001", "p3767-0005"
FIXED = ShapeRange(min=(1, 3, 320, 320), opt=(1, 3, 320, 320), max=(1, 3, 320, 320))


@pytest.mark.parametrize(
    ("version", "module", "cores", "reason"),
    [
        ((10, 3, 0), AGX, 2, None),
        ((10, 3, 0), NX16, 2, None),
        ((10, 3, 0), NX8, 1, None),
        ((10, 7, 0), AGX, 2, None),
        ((10, 3, 0), NANO, 0, "Orin Nano"),
        ((10, 3, 0), None, 0, "not a Jetson"),
        ((10, 3, 0), "p9999-0000", 0, "not in the table"),
        ((10, 8, 0), AGX, 0, "does not support the DLA"),
        ((10, 16, 2, 10), AGX, 0, "does not support the DLA"),
        ((11, 4, 0), AGX, 0, "does not support the DLA"),
        ((11, 4, 1), AGX, 2, None),
        ((11, 4, 1), NX16, 0, "AGX Orin only"),
        ((11, 5), AGX, 2, None),
    ],
)
def test_cores_by_module_and_version(
    version: tuple[int, ...], module: str | None, cores: int, reason: str | None
) -> None:
    support = dla_support(version, module=module)
    assert support.cores == cores
    assert (reason or "") in (support.reason or "")
    assert (support.reason is None) == (cores > 0)


def test_rtx_and_missing_libraries_have_no_dla() -> None:
    assert "RTX" in str(dla_support((1, 7, 1), module=AGX, is_rtx=True).reason)
    assert "nvidia-l4t-dla-compiler" in str(dla_support((10, 3), module=AGX, libraries_present=False).reason)


def check(core: int = 0, *, version: tuple[int, ...] = (10, 3, 0), module: str | None = AGX, **options: object) -> list:
    arguments: dict = {"profiles": [{"images": FIXED}], "is_quantized": False, **options}
    return check_dla(core, dla_support(version, module=module), version=version, **arguments)


def test_b61_a_dla_request_where_there_is_none_is_refused_with_the_reason() -> None:
    with pytest.raises(BuildError, match="Orin Nano"):
        check(module=NANO)
    with pytest.raises(BuildError, match=r"TensorRT 10\.16"):
        check(version=(10, 16, 2))
    with pytest.raises(BuildError, match="has 1, numbered from 0"):
        check(1, module=NX8)
    for core in (-1, True, "0"):
        with pytest.raises(SpecError, match="dla_core"):
            check(core)


@pytest.mark.parametrize(
    ("profiles", "message"),
    [
        ([{"x": ShapeRange(min=(1, 3), opt=(2, 3), max=(4, 3))}], "fixed shapes only"),
        ([{"x": FIXED}, {"x": FIXED}], "2 profiles"),
        ([{"x": ShapeRange(min=(5000, 3), opt=(5000, 3), max=(5000, 3))}], "batch 5000"),
        ([{"x": ShapeRange(min=(1, 9000), opt=(1, 9000), max=(1, 9000))}], "8192"),
    ],
)
def test_shapes_that_a_dla_does_not_take_are_refused(profiles: list, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        check(profiles=profiles)


def test_qdq_models_are_refused_where_the_dla_takes_none() -> None:
    with pytest.raises(BuildError, match="float16"):
        check(is_quantized=True)
    assert check(is_quantized=True, version=(11, 4, 1)) == []


def layer(op: str, *, flops: int = 0, shapes: list | None = None) -> dict:
    return {"node": f"n_{op}", "op": op, "flops": flops, "shapes": shapes}


def test_b61_the_expected_split_is_told_per_layer_with_reasons() -> None:
    ops = [layer("Conv", flops=900), layer("Relu"), layer("Reshape"), layer("MatMul", flops=100), layer("Conv")]
    split = split_layers([*ops, layer("QuantizeLinear"), layer("Constant")])
    assert [(item.op, item.on_dla) for item in split.layers] == [
        ("Conv", True),
        ("Relu", True),
        ("Reshape", False),
        ("MatMul", False),
        ("Conv", True),
    ]
    assert split.dla_flops_share == pytest.approx(0.9)
    assert split.pieces == 2
    assert all(item.reason for item in split.layers if not item.on_dla)
    assert "1 Reshape, 1 MatMul" in split.describe()


@pytest.mark.parametrize("shape", [[1, 2, 3, 4, 5], [1, None, 3, 3], [1, 3, 9000, 3], [5000, 3, 8, 8]])
def test_shapes_move_a_layer_to_the_gpu(shape: list) -> None:
    assert not split_layers([layer("Conv", shapes=[shape])]).layers[0].on_dla
    assert split_layers([layer("Conv", shapes=[[1, 3, 8, 8]])]).layers[0].on_dla


def test_b61_scattered_splits_are_warned_about_and_empty_ones_refused() -> None:
    scattered = split_layers([layer("Conv", flops=1), layer("Reshape")] * 20)
    text = " ".join(check(split=scattered))
    assert "20 pieces" in text
    assert "slower than the GPU" in text
    assert check(split=split_layers([layer("Conv", flops=10)])) == []
    with pytest.raises(BuildError, match="no layer"):
        check(split=split_layers([layer("MatMul", flops=10)]))
    assert split_layers([]).dla_flops_share == 0


@pytest.mark.parametrize("layers", [["Conv"], [{"node": "x"}], [None]])
def test_a_damaged_layer_list_is_a_spec_error(layers: list) -> None:
    with pytest.raises(SpecError, match="layer 0"):
        split_layers(layers)
