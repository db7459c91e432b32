"""Label schemes, as conlleval reads them."""

from __future__ import annotations

import numpy as np
import pytest

from edgeds.pipelines.bert.classify import score_labels, sigmoid, softmax
from edgeds.pipelines.bert.head import TextHead
from edgeds.pipelines.bert.tag import group_labels, split_label


@pytest.mark.parametrize(
    ("labels", "found"),
    [
        ("O B-PER I-PER O", [(1, 3, "PER")]),
        ("B-PER B-PER I-PER", [(0, 1, "PER"), (1, 3, "PER")]),
        ("I-PER I-PER O I-LOC", [(0, 2, "PER"), (3, 4, "LOC")]),  # IOB1
        ("B-PER I-LOC", [(0, 1, "PER"), (1, 2, "LOC")]),
        ("B-PER I-PER E-PER S-LOC I-LOC", [(0, 3, "PER"), (3, 4, "LOC"), (4, 5, "LOC")]),  # BIOES
        ("B-PER L-PER U-PER O", [(0, 2, "PER"), (2, 3, "PER")]),  # BILOU
        ("B-PER O I-PER", [(0, 1, "PER"), (2, 3, "PER")]),
        ("NOUN NOUN VERB", [(0, 2, "NOUN"), (2, 3, "VERB")]),
        ("O O", []),
        ("", []),
    ],
)
def test_schemes(labels: str, found: list[tuple[int, int, str]]) -> None:
    assert group_labels(labels.split()) == found


def test_labels_split_only_at_known_prefixes() -> None:
    assert split_label("B-per-son") == ("B", "per-son")
    assert split_label("X-RAY") == ("I", "X-RAY")
    assert split_label("O") == ("O", "")


def test_scores_are_stable_at_the_ends() -> None:
    assert softmax(np.array([1e4, -1e4])) == pytest.approx([1, 0])
    assert sigmoid(np.array([-1e4, 0, 1e4])) == pytest.approx([0, 0.5, 1])
    one = TextHead(task="classify", outputs=("logits",))
    assert score_labels(np.array([0.0]), one) == pytest.approx([0.5])
    number = TextHead(task="classify", outputs=("logits",), regression=True)
    assert score_labels(np.array([3.25]), number) == pytest.approx([3.25])
