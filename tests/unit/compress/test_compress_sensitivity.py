"""Losses that pruning estimates on samples, against solving the reader's weights anew (issue 5 part 1)."""

import numpy as np
import pytest
from compress_models import run
from prune_models import feeds_of, finish, start

from edgeds.compress.groups import find_groups
from edgeds.compress.importance import score_groups
from edgeds.errors import SpecError
from edgeds.graph.session import open_session
from edgeds.graph.view import GraphView


def chain(seed=0, copies=()):
    """conv (6 channels) -> Relu -> 1x1 conv; ``copies``: (channel, of) pairs made alike."""
    net, x = start(seed)
    weight, bias = net.w(6, 3, 3, 3), net.w(6)
    for channel, source in copies:
        net.weights[weight][channel] = net.weights[weight][source]
        net.weights[bias][channel] = net.weights[bias][source]
    t = net.op("Relu", net.op("Conv", x, weight, bias, pads=[1] * 4))
    return finish(net, net.op("Conv", t, net.w(4, 6, 1, 1), net.w(4))), t


def scored(model, feeds):
    view = GraphView(model)
    return score_groups(view.model, find_groups(view), method="sensitivity", feeds=feeds, quiet=True)[0]


def test_the_first_loss_is_that_of_a_new_fit():
    """Independent reference: numpy.linalg.lstsq on the inputs without the channel."""
    model, t = chain()
    feeds = [feeds_of(model, seed) for seed in range(8)]
    scores = scored(model, feeds)
    session = open_session(model, outputs=[t])
    x = np.concatenate([np.moveaxis(session.run([t], feed)[0], 1, -1).reshape(-1, 6) for feed in feeds])
    y = np.concatenate([np.moveaxis(run(model, feed)[0], 1, -1).reshape(-1, 4) for feed in feeds]).astype(np.float64)
    losses = []
    for channel in range(6):
        rest = np.concatenate([np.delete(x, channel, axis=1), np.ones((len(x), 1))], axis=1)
        fit = np.linalg.lstsq(rest, y, rcond=None)[0]
        losses.append(np.square(y - rest @ fit).mean(axis=0).sum() / y.var(axis=0).sum())
    assert scores.argmin() == np.argmin(losses)
    assert scores.min() == pytest.approx(min(losses), rel=0.01)
    assert (scores >= np.asarray(losses) * 0.99).all()


def test_of_two_alike_one_is_free():
    model, _ = chain(copies=[(4, 1)])
    scores = scored(model, [feeds_of(model, seed) for seed in range(8)])
    alike = sorted((scores[1], scores[4]))
    assert alike[0] < 1e-3 * np.median(scores)
    assert alike[1] > 0.1 * np.median(scores)


def test_dead_channels_score_zero_and_samples_are_needed():
    net, x = start(1)
    weight = net.w(6, 3, 3, 3)
    net.weights[weight][3] = 0
    model = finish(net, net.conv(net.op("Relu", net.op("Conv", x, weight)), 6, 3, act=None))
    scores = scored(model, [feeds_of(model, seed) for seed in range(3)])
    assert np.flatnonzero(scores == 0).tolist() == [3]
    with pytest.raises(SpecError, match="--calib"):
        scored(model, [])
