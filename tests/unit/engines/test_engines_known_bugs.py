"""The table of known faults matches the versions it names and nothing else."""

import pytest

from edgeds.engines.known_bugs import KNOWN_BUGS, BuildFacts, find_known_bugs


def ids(**facts: object) -> set[str]:
    return {bug.id for bug in find_known_bugs(BuildFacts(**facts))}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, set()),
        ({"tensorrt": (10, 3, 0)}, {"strong-typing-gaps"}),
        ({"tensorrt": (10, 12)}, set()),
        ({"tensorrt": (10, 16, 2, 10), "precision": "int8", "is_jetson": True}, {"orin-dequantize-types"}),
        ({"tensorrt": (10, 16, 2, 10), "precision": "float16", "is_jetson": True}, set()),
        ({"tensorrt": (10, 16, 2), "uses_dla": True}, {"jetpack7-no-dla"}),
        ({"tensorrt": (11, 4, 1), "uses_dla": True}, set()),
        ({"tensorrt": (11, 0, 0), "is_jetson": True}, {"jetpack-unsupported-11"}),
        ({"tensorrt": (11, 4, 1), "module": "p3767-0005"}, {"tensorrt11-orin-nx-nano"}),
        ({"l4t": "36.4.7", "tensorrt": (10, 12)}, {"l4t-large-allocations"}),
        ({"l4t": "36.5.0", "tensorrt": (10, 12)}, set()),
        ({"l4t": "36.4.0", "tensorrt": None}, {"jetpack6-dla-compiler"}),
        # TensorRT-RTX 1.7 has other numbers and none of these faults.
        ({"tensorrt": (10, 3), "is_rtx": True, "precision": "int8"}, set()),
    ],
)
def test_faults_by_version(facts: dict, expected: set[str]) -> None:
    assert ids(**facts) == expected


def test_most_serious_first_and_every_entry_says_what_to_do_and_where_it_is_from() -> None:
    facts = BuildFacts(tensorrt=(8, 6, 2), precision="int8", l4t="36.4.7", is_jetson=True)
    assert [bug.severity for bug in find_known_bugs(facts)] == ["refuse", "warn"]
    assert find_known_bugs(facts, severities=["avoid"]) == ()
    assert len({bug.id for bug in KNOWN_BUGS}) == len(KNOWN_BUGS)
    for bug in KNOWN_BUGS:
        assert bug.what
        assert bug.fix
        assert bug.source
        assert bug.fix in bug.describe()
