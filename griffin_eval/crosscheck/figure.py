"""Figure of `griffin-eval verify --logits --output`, as PNG and SVG."""

from pathlib import Path

import numpy as np

from griffin_eval.config import GriffinConfig
from griffin_eval.crosscheck.logits import Distance
from griffin_eval.drawing import BLUE, MARKER_SIZE, VERMILION, finish, panels, save


def draw(distance: Distance, config: GriffinConfig, pair: str, folder: Path) -> Path:
    """Draw the differences of two checkpoints by layer, and the divergence of their next tokens.

    Create the folder if needed, and return the path of the PNG. ``pair`` is the title.
    """
    figure, (layers, tokens) = panels(2, 8.4)
    places = np.arange(len(distance.places)) - 1  # the embedding lies before layer 0
    recurrent = np.array([False, *(block == "recurrent" for block in config.block_types)])
    relative = np.array(distance.relative)
    for chosen, label, color, marker in (
        (recurrent, "recurrent block", BLUE, "o"),
        (~recurrent, "attention block, embedding", VERMILION, "s"),
    ):
        layers.plot(
            places[chosen],
            relative[chosen],
            marker,
            color=color,
            label=label,
            markersize=MARKER_SIZE,
        )
    layers.set_xlabel("layer; -1 is the embedding")
    layers.set_ylabel("largest difference over largest value")
    layers.set_ylim(0)
    share = np.arange(1, len(distance.divergence) + 1) / len(distance.divergence)
    tokens.step(np.sort(distance.divergence), share, where="post", color=BLUE)
    tokens.set_xlabel("KL of the next token, nats")
    tokens.set_ylabel("share of positions")
    tokens.set_xlim(0)
    tokens.set_ylim(0, 1)
    finish(figure, [layers, tokens], folder, pair)
    return save(figure, folder, "verify_layers")
